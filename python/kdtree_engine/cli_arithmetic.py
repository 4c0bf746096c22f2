"""What plain decoding must read and compute for one token, against what this CPU can do."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kdtree_engine import cli_common as common

if TYPE_CHECKING:
    from kdtree_engine.cli_bench import Setting
    from kdtree_engine.llm import LLM

_MAX_HEADER_BYTES = 100_000_000
_KV_BYTES = 4  # the CPU caches float32
_CACHE_BYTES = (1 << 16, 4 << 30)  # what the ceiling of the caches can be measured with


@dataclass(frozen=True)
class Arithmetic:
    """One token of plain decoding at the bench's mean context, and the ceilings measured with it.

    Bytes: weights touched (a routed expert counts by the share of tokens it sees), one embedding
    row, the KV cache of the context. Operations: two for each multiply-add. Which ceiling of the
    two for bytes holds depends on whether the last-level cache holds `model_bytes`.
    """

    model_bytes: int | None  # all weights in memory, drafter included
    weight_bytes: float
    kv_bytes: float
    operations: float
    mean_context: float
    tokens_per_second: float
    isa: str
    num_threads: int
    fma_gflops: float
    read_gb_s: float
    cache_gb_s: float  # as many bytes as a token needs, over and over
    memory_ms: float  # the bytes at the speed of memory
    cache_ms: float  # the bytes at the speed of the caches that hold them
    compute_ms: float  # the operations at the speed of multiply-adds
    measured_ms: float
    fraction_of_memory: float
    fraction_of_cache: float
    fraction_of_compute: float


def of_plain(llm: "LLM", plain: "Setting", mean_context: float) -> Arithmetic:
    """The arithmetic of plain decoding; measures the CPU's ceilings now, with the same threads."""
    from kdtree_engine import _core

    config = llm.config["model"]
    weight_bytes, macs = weights_per_token(llm.model, config)
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    # Keys (latent and rope part) and, laid out apart from them, values (the latent again).
    kv_bytes = mean_context * layers * (latent + config["kv_lora_rank"]) * _KV_BYTES
    # Scores over the latent and rope parts, then the weighted sum of latents.
    macs += mean_context * layers * heads * (latent + config["kv_lora_rank"])
    total_bytes, operations = weight_bytes + kv_bytes, 2 * macs
    low, high = _CACHE_BYTES
    stats = llm.stats()
    ceilings = _core.measure_cpu(stats["num_threads"], min(max(int(total_bytes), low), high))
    memory_ms = total_bytes / ceilings["read_gb_s"] / 1e6
    cache_ms = total_bytes / ceilings["cache_gb_s"] / 1e6
    compute_ms = operations / ceilings["fma_gflops"] / 1e6
    measured_ms = (
        1000 / plain.spec.tokens_per_second if plain.spec.tokens_per_second else float("inf")
    )
    return Arithmetic(
        model_bytes=stats.get("model_bytes"),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        operations=operations,
        mean_context=mean_context,
        tokens_per_second=plain.spec.tokens_per_second,
        isa=ceilings["isa"],
        num_threads=ceilings["num_threads"],
        fma_gflops=ceilings["fma_gflops"],
        read_gb_s=ceilings["read_gb_s"],
        cache_gb_s=ceilings["cache_gb_s"],
        memory_ms=memory_ms,
        cache_ms=cache_ms,
        compute_ms=compute_ms,
        measured_ms=measured_ms,
        fraction_of_memory=memory_ms / measured_ms,
        fraction_of_cache=cache_ms / measured_ms,
        fraction_of_compute=compute_ms / measured_ms,
    )


def weights_per_token(folder: Path, config: dict[str, Any]) -> tuple[float, float]:
    """(bytes read, multiply-adds) of the target's weights for one token, from the file headers."""
    experts = config.get("n_routed_experts")  # none in a dense model
    share = config["num_experts_per_tok"] / experts if experts else 0.0
    total_bytes = macs = 0.0
    tensors = _tensors(folder)
    for name, (shape, num_bytes) in tensors.items():
        if name.endswith("embed_tokens.weight"):
            total_bytes += num_bytes / shape[0]
            if "lm_head.weight" in tensors:
                continue  # else the embedding is the head too
        used = share if ".mlp.experts." in name else 1.0
        total_bytes += used * num_bytes
        if name.endswith(".weight_packed"):
            macs += used * 8 * prod(shape)
        elif len(shape) == 2 and not name.endswith(".weight_scale"):
            macs += used * prod(shape)
    return total_bytes, macs


def _tensors(folder: Path) -> dict[str, tuple[list[int], int]]:
    """Shape and bytes of every tensor of the engine's model; the engine checked the files."""
    found: dict[str, tuple[list[int], int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"{path}: header of {length} bytes is too large")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = (entry["shape"], last - first)
    return found


def show(a: Arithmetic) -> None:
    """Prints the arithmetic as a table."""
    table = Table(
        title=f"plain decoding, one token at {a.mean_context:.0f} tokens of context: "
        f"{a.measured_ms:.3f} ms ({a.tokens_per_second:.1f} tokens/s)"
    )
    table.add_column("limit", no_wrap=True)
    for name in ("needs", "ceiling", "least time", "reached"):
        table.add_column(name, justify="right")
    need = f"{(a.weight_bytes + a.kv_bytes) / 1e6:.2f} MB"
    rows = (
        ("memory", need, f"{a.read_gb_s:.1f} GB/s", a.memory_ms, a.fraction_of_memory),
        ("caches", need, f"{a.cache_gb_s:.1f} GB/s", a.cache_ms, a.fraction_of_cache),
        (
            "multiply-adds",
            f"{a.operations / 1e6:.1f} MFLOP",
            f"{a.fma_gflops:.1f} GFLOP/s",
            a.compute_ms,
            a.fraction_of_compute,
        ),
    )
    for limit, needs, ceiling, least, reached in rows:
        table.add_row(limit, needs, ceiling, f"{least:.3f} ms", f"{reached:.0%}")
    console = common.stdout_console()
    common.print_table(table, console)
    console.print(
        f"ceilings measured just now with {a.num_threads} threads, {a.isa}; caches: reading "
        f"{need} over and over"
    )
    if a.model_bytes is not None:
        console.print(
            f"the weights are {a.model_bytes / 1e6:.1f} MB in all: a last-level cache that holds "
            "them makes caches the bound, a smaller one memory"
        )
