"""Ranks in several processes: the launchers' variables, real launches, and ranks that die."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kdtree_engine
from kdtree_engine import cli_load, synth

_core: Any = pytest.importorskip("kdtree_engine._core")
if not hasattr(_core, "op_linear"):
    pytest.skip("the compiled module is not built", allow_module_level=True)

BUNDLED = Path(kdtree_engine.__file__).parent / "models" / "k2-nano"
PROMPT = "def total(values):"
GENERATE = ["-m", "kdtree_engine", "generate", "--json", "--device", "cpu", "--max-tokens", "24"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "SLURM_", "TORCHELASTIC_", "PMIX_")
# Stays in a request until it is killed.
ENDLESS = """
from kdtree_engine import LLM, SamplingParams
llm = LLM(device="cpu", tensor_parallel_size=2, num_threads=1, rank_timeout={timeout})
print("started", flush=True)
while True:
    llm.generate(["x = 1"], SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python with variables of a launcher; what is left at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(arguments: list[str], **variables: Any) -> "subprocess.Popen[str]":
        env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        env["PYTHONPATH"] = os.pathsep.join([str(BUNDLED.parents[2]), env.get("PYTHONPATH", "")])
        env |= {name: str(value) for name, value in variables.items()}
        pipe = subprocess.PIPE
        command = [sys.executable, *arguments]
        started.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def master(world_size: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(probe.getsockname()[1], 65000)
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world_size}


def finish(process: "subprocess.Popen[str]", seconds: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """Tokens of two ranks in one process."""
    llm = kdtree_engine.LLM(device="cpu", tensor_parallel_size=2, num_threads=2)
    params = kdtree_engine.SamplingParams(max_tokens=24)
    return list(llm.generate([PROMPT], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "srun"])
def test_two_processes_give_the_tokens_of_two_threads(
    launcher: str, start: Start, expected: list[int]
) -> None:
    shared = master(2)
    size = shared.pop("WORLD_SIZE")
    processes = []
    for rank in range(size):
        names = {
            "torchrun": {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": size,
            },
            "mpirun": {
                "OMPI_COMM_WORLD_RANK": rank,
                "OMPI_COMM_WORLD_SIZE": size,
                "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                "OMPI_COMM_WORLD_LOCAL_SIZE": size,
            },
            "srun": {
                "SLURM_PROCID": rank,
                "SLURM_STEP_ID": 0,
                "SLURM_NTASKS": size,
                "SLURM_LOCALID": 0,
                "SLURM_NODEID": rank,
                "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
            },
        }[launcher]
        processes.append(start([*GENERATE, "--tp", "2", PROMPT], **shared, **names))
    status, out, err = finish(processes[0])
    assert status == 0, err
    assert json.loads(out)["token_ids"] == expected
    status, out, err = finish(processes[1])
    assert (status, out) == (0, ""), err


def test_it_is_said_who_is_waited_for(start: Start, expected: list[int]) -> None:
    shared = master(2)
    first = start([*GENERATE, "--tp", "2", PROMPT], RANK=0, **shared)
    assert first.stderr is not None
    assert first.stderr.readline() == "waiting for rank 1 of 2\n"
    wrong = start([*GENERATE, "--tp", "3", PROMPT], RANK=1, **(shared | {"WORLD_SIZE": 3}))
    assert "refused this process: the group has 2 processes, it is one of 3" in finish(wrong)[2]
    told = first.stderr.readline()
    assert told.startswith("waiting for rank 1 of 2; process 1 (") and "is one of 3" in told
    second = start([*GENERATE, "--tp", "2", PROMPT], RANK=1, **shared)
    status, out, err = finish(first)
    assert (status, err) == (0, "") and json.loads(out)["token_ids"] == expected
    assert finish(second)[::2] == (0, "")


def test_refused_processes_that_try_on_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = [f"rank 2 of 3; process 1 (node{i}:{i}) was refused: late" for i in (1, 2, 1)]
    waits.append(waits[0] + "; and 1 more")
    asked, all_asked = iter(waits), threading.Event()

    def missing_ranks() -> str:
        if now := next(asked, ""):
            return now
        all_asked.set()
        return ""

    monkeypatch.setattr(_core, "missing_ranks", missing_ranks)
    monkeypatch.setattr(cli_load, "SLOW_START_S", 0.01)
    with cli_load.waiting_told():
        assert all_asked.wait(20)
    assert capsys.readouterr().err.splitlines() == [f"waiting for {waits[i]}" for i in (0, 3)]


def test_the_time_to_wait_is_an_option(start: Start) -> None:
    options = ["--tp", "2", "--rank-timeout", "1"]
    status, _, err = finish(start([*GENERATE, *options, PROMPT], RANK=0, **master(2)))
    assert status == 1 and "rank 1 of 2 did not come to 127.0.0.1" in err and "within 1 s" in err
    status, _, err = finish(start([*GENERATE, *options[2:], PROMPT], RANK=0, **master(2)))
    assert status == 2 and "WORLD_SIZE alone makes none" in err and len(err.splitlines()) == 1


def test_several_ranks_in_each_process(start: Start) -> None:
    alone = finish(start([*GENERATE, "--tp", "4", PROMPT]))
    shared = master(2)
    processes = [start([*GENERATE, "--tp", "4", PROMPT], RANK=rank, **shared) for rank in range(2)]
    status, out, err = finish(processes[0])
    assert status == 0, err
    assert json.loads(out)["token_ids"] == json.loads(alone[1])["token_ids"]
    assert finish(processes[1])[0] == 0


def test_torchrun_itself(start: Start, expected: list[int]) -> None:
    pytest.importorskip("torch.distributed.run")
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    port = str(master(2)["MASTER_PORT"])
    status, out, err = finish(start([*arguments, port, *GENERATE, "--tp", "2", PROMPT]), 120)
    assert status == 0, err
    assert json.loads(out)["token_ids"] == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "two"}, 'RANK is "two"; it must be a number from 0 to 1'),
        ({"RANK": "2"}, 'RANK is "2"; it must be a number from 0 to 1'),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "is 2, which the number of processes, 3"),
        ({"RANK": "0", "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "MASTER_PORT": "x"}, 'MASTER_PORT is "x"'),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not set"),
    ],
)
def test_bad_variables_are_named(variables: dict[str, str], message: str, start: Start) -> None:
    process = start([*GENERATE, "--tp", "2", PROMPT], **(master(2) | variables))
    status, _, err = finish(process)
    assert status != 0 and message in err and "Traceback" not in err


def test_processes_that_were_given_different_things(start: Start, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(BUNDLED, other)
    config = json.loads((other / "config.json").read_text())
    config["routed_scaling_factor"] = 2.5
    (other / "config.json").write_text(json.dumps(config))
    for seed in (1, 2):
        synth.write(synth.plan("tiny", layers=2, seed=seed), tmp_path / str(seed))
    files = "rank 1 has other files (config.json or tensors, of the drafter too) than rank 0"
    cases: list[tuple[list[str], list[str], str]] = [
        ([], ["--max-model-len", "512"], "rank 1 has other options than rank 0"),
        ([], ["--model", str(other)], files),
        (["--model", str(tmp_path / "1")], ["--model", str(tmp_path / "2")], files),
    ]
    for first, second, message in cases:
        shared = master(2)
        processes = [
            start(
                [*GENERATE, "--tp", "2", *(second if rank else first), PROMPT], RANK=rank, **shared
            )
            for rank in range(2)
        ]
        for process in processes:
            status, _, err = finish(process)
            assert status == 1 and message in err, err


@pytest.mark.parametrize("rank", [0, 1])
def test_others_do_not_come(rank: int, start: Start) -> None:
    program = ENDLESS.format(timeout=1)
    status, _, err = finish(start(["-c", program], RANK=rank, **master(2)))
    assert status != 0
    assert ("rank 1 of 2 did not come to 127.0.0.1" if rank == 0 else "found no rank 0 at") in err


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stalls_ends_the_others(
    victim: int, how: signal.Signals, start: Start
) -> None:
    shared = master(2)
    program = ENDLESS.format(timeout=3 if how == signal.SIGSTOP else 60)
    processes = [start(["-c", program], RANK=rank, **shared) for rank in range(2)]
    assert processes[0].stdout is not None
    assert processes[0].stdout.readline() == "started\n", processes[0].communicate()[1]
    time.sleep(0.5)
    for attempt in range(8):
        began = time.monotonic()
        processes[victim].send_signal(how)
        try:
            status, _, err = finish(processes[1 - victim], 12)
            break
        except subprocess.TimeoutExpired:
            # Rank 0 was stopped between two calls, where the others wait as long as it takes.
            assert how == signal.SIGSTOP and victim == 0 and attempt < 7
            processes[victim].send_signal(signal.SIGCONT)
            time.sleep(0.037)
    assert status != 0
    assert f"rank {victim} (" in err or f"rank {victim} of 2" in err, err
    assert time.monotonic() - began < (5 if how == signal.SIGKILL else 15)
