"""Where and how the stages run: device, dtype, compilation, pacing, and the log."""

import time
from collections.abc import Callable
from typing import Any

import torch

_START = time.time()


def log(*words: object) -> None:
    """Prints a line with the seconds since the program started."""
    print(f"[{time.time() - _START:7.1f}]", *words, flush=True)


class Device:
    """A CUDA device with bf16 activations and compiled layers, or a CPU with neither."""

    def __init__(self) -> None:
        self.is_cuda = torch.cuda.is_available()
        self.name = "cuda" if self.is_cuda else "cpu"
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        if self.is_cuda:
            torch.set_float32_matmul_precision("high")
            torch._dynamo.config.automatic_dynamic_shapes = False
            torch._dynamo.config.recompile_limit = 256
            torch._dynamo.config.accumulated_recompile_limit = 1024

    def compile(self, function: Callable[..., Any], fullgraph: bool = False) -> Callable[..., Any]:
        """`function` compiled for its exact shapes, on a GPU."""
        if not self.is_cuda:
            return function
        return torch.compile(function, fullgraph=fullgraph, dynamic=False)

    def wait(self) -> None:
        """Returns when the device has done all it was given."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Gives cached memory back."""
        if self.is_cuda:
            torch.cuda.empty_cache()


class Pacer:
    """Keeps the host at most two steps ahead of the device, so that the clock which drives
    the learning rate is the device's; time inside `pause` does not count."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._events: list[torch.cuda.Event] = []
        self._paused = 0.0
        self._start = time.time()

    def elapsed(self) -> float:
        """Seconds since the start, without the pauses."""
        return time.time() - self._start - self._paused

    def tick(self) -> None:
        """Marks the end of a step."""
        if self.device.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)
            if len(self._events) > 2:
                self._events.pop(0).synchronize()

    def pause(self, work: Callable[[], Any]) -> Any:
        """Runs `work` with the clock stopped."""
        self.device.wait()
        before = time.time()
        result = work()
        self.device.wait()
        self._paused += time.time() - before
        return result
