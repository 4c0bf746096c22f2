"""Writes the seeds of the fuzz targets: a folder for each with small files, most of them valid.

python scripts/make_fuzz_seeds.py OUT
"""

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Seeds = Iterator[tuple[str, bytes]]


def safetensors() -> Seeds:
    def file(header: Any, data: bytes) -> bytes:
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data

    def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    two = {"a": tensor("F32", [2], 0, 8), "b": tensor("BF16", [1, 3], 8, 14)}
    yield "two", file(two, bytes(14))
    yield "metadata", file({"__metadata__": {"format": "pt"}} | two, bytes(14))
    yield (
        "scalar_and_empty",
        file({"s": tensor("I64", [], 0, 8), "e": tensor("U8", [0, 4], 8, 8)}, bytes(8)),
    )
    yield (
        "subbyte",
        file({"f": tensor("F4", [4], 0, 2), "g": tensor("F6_E2M3", [4], 2, 5)}, bytes(5)),
    )
    yield "hole", file({"a": tensor("F32", [1], 4, 8)}, bytes(8))
    yield "overflow", file({"a": tensor("F32", [2**62, 8], 0, 4)}, bytes(4))
    yield "nothing", file({}, b"")


def kdtr() -> Seeds:
    # The target puts checksums right, so they are left 0 here; docs/kdtr.md has the layout.
    def file(*arrays: tuple[bytes, int, tuple[int, ...], bytes]) -> bytes:
        rows = [32 + 8 * len(shape) + len(name) for name, _, shape, _ in arrays]
        end = 32 + sum(-(-row // 8) * 8 for row in rows)
        table, data = b"", bytes(end)
        for name, dtype, shape, raw in arrays:
            data += bytes(-len(data) % 64)
            row = struct.pack("<HBBIQQQ", len(name), dtype, len(shape), 0, len(data), len(raw), 0)
            row += struct.pack(f"<{len(shape)}Q", *shape) + name
            table += row + bytes(-len(row) % 8)
            data += raw
        header = struct.pack("<4sIQIIQ", b"KDTR", 1, len(data), len(arrays), len(table), 0)
        return header + table + data[32 + len(table) :]

    yield "one", file((b"a", 8, (2,), bytes(8)))
    yield "two", file((b"tokens", 3, (2, 2), bytes(16)), (b"mask", 0, (3,), b"\1\0\1"))
    yield "scalar_and_empty", file((b"s", 9, (), bytes(8)), (b"e", 7, (0, 4), b""))
    yield "nothing", file()


def config() -> Seeds:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    }
    target: dict[str, Any] = {
        "model_type": "kimi_k2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_scaling": yarn, "eos_token_id": [1, 2],
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights}},
        },
    }  # fmt: skip
    drafter = {
        "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "rms_norm_eps": 1e-6, "block_size": 8, "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 511},
    }  # fmt: skip
    for name, value in {
        "target": target,
        "nested": {"model_type": "kimi_k25", "text_config": target},
        "plain": target
        | {"rope_scaling": None, "n_routed_experts": 0, "quantization_config": None},
        "drafter": drafter,
        "generation": {"eos_token_id": [1, 2]},
    }.items():
        yield name, json.dumps(value).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the seeds of the fuzz targets.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for target, seeds in {"safetensors": safetensors(), "kdtr": kdtr(), "config": config()}.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, content in seeds:
            (folder / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
