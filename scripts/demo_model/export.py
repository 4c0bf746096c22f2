"""Writes the model in Hugging Face layout: INT4 shards, drafter, tokenizer, card, metrics."""

import argparse
import csv
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from . import card, tokenizer
from .config import NANO_DRAFTER, TargetConfig
from .device import Device, log
from .dflash import Drafter
from .generate import load_target
from .model import Target
from .quant import dequantize, pack, quantize

SHARD_BYTES = 14_600_000
MAX_TOTAL_BYTES = 40_000_000


def model_config(config: TargetConfig) -> dict[str, Any]:
    """config.json of the target."""
    c = config
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": c.group_size,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
        "block_structure": None,
        "observer_kwargs": {},
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
        "config_groups": {"group_0": group},
    }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "moe_intermediate_size": c.moe_intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_attention_heads,
        "n_shared_experts": c.n_shared_experts,
        "n_routed_experts": c.n_routed_experts,
        "routed_scaling_factor": c.routed_scaling_factor,
        "kv_lora_rank": c.kv_lora_rank,
        "q_lora_rank": c.q_lora_rank,
        "qk_rope_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "qk_nope_head_dim": c.qk_nope_head_dim,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": c.num_experts_per_tok,
        "first_k_dense_replace": c.first_k_dense_replace,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "latent_rms_norm_eps": c.latent_rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": c.yarn_factor,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": c.original_max_position_embeddings,
            "type": "yarn",
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": c.special("[BOS]"),
        "eos_token_id": c.special("<|im_end|>"),
        "torch_dtype": "bfloat16",
        "quantization_config": quantization,
    }


def drafter_config(drafter: Drafter, target: TargetConfig) -> dict[str, Any]:
    """config.json of the drafter."""
    c = drafter.config
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "vocab_size": target.vocab_size,
        "block_size": c.block_size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {
            "target_layer_ids": list(c.target_layer_ids),
            "mask_token_id": drafter.mask_token,
        },
        "torch_dtype": "bfloat16",
    }


def target_tensors(target: Target) -> tuple[dict[str, Tensor], float]:
    """The checkpoint's tensors under its names, and the largest difference between a frozen
    expert weight and what its INT4 form stands for (0 when the target is frozen)."""
    c, tensors, worst = target.config, {}, 0.0
    for name, value in target.state_dict().items():
        value = value.detach().cpu()
        layer, _, leaf = name.rpartition(".")
        if leaf == "correction_bias":
            tensors[f"model.{layer}.gate.e_score_correction_bias"] = value.float()
        elif leaf in ("gate_proj", "up_proj", "down_proj"):
            for expert, weight in enumerate(value):
                q, scale = quantize(weight, c.group_size)
                worst = max(worst, (dequantize(q, scale) - weight).abs().max().item())
                prefix = f"model.{layer}.experts.{expert}.{leaf}."
                tensors[prefix + "weight_packed"] = pack(q).contiguous()
                tensors[prefix + "weight_scale"] = scale.contiguous()
                tensors[prefix + "weight_shape"] = torch.tensor(q.shape, dtype=torch.int32)
        else:
            prefix = "" if name.startswith("lm_head") else "model."
            tensors[prefix + name] = value.bfloat16().contiguous()
    return tensors, worst


def write_shards(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Writes the tensors in order over files of at most `shard_bytes`, with their index."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json) + "\n")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def read_sources(data: Path) -> list[dict[str, str]]:
    """The rows of SOURCES.tsv."""
    with open(data / "SOURCES.tsv", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def export(
    folder: Path,
    target: Target,
    drafter: Drafter,
    data: Path,
    metrics: dict[str, Any],
    bench: list[dict[str, str]],
    samples: list[dict[str, Any]],
) -> int:
    """Writes the whole model folder and returns its size in bytes.

    Raises ValueError when the target is not frozen or the folder is larger than 40 MB.
    """
    c = target.config
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    tensors, worst = target_tensors(target)
    if worst != 0.0:
        raise ValueError(f"the experts differ from their INT4 form by {worst}: freeze them first")
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    write_shards(tensors, folder, SHARD_BYTES)
    _write_json(folder / "config.json", model_config(c))
    stops = [c.special("<|im_end|>"), c.special("[EOS]")]
    generation = {
        "bos_token_id": c.special("[BOS]"),
        "eos_token_id": stops,
        "max_length": c.max_position_embeddings,
        "pad_token_id": c.special("[PAD]"),
    }
    _write_json(folder / "generation_config.json", generation)
    drafter_tensors = {
        name: value.detach().cpu().bfloat16().contiguous()
        for name, value in drafter.state_dict().items()
    }
    save_file(drafter_tensors, folder / "drafter" / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "drafter" / "config.json", drafter_config(drafter, c))
    shutil.copy(data / "tiktoken.model", folder / "tiktoken.model")
    tokenizer.write_config(c, folder)
    _write_json(folder / "heldout_prompts.json", bench)
    parameters = sum(p.numel() for p in target.parameters())
    drafter_parameters = sum(p.numel() for p in drafter.parameters())
    metrics["parameters"] = {"target": parameters, "drafter": drafter_parameters}
    metrics["requantization_difference"] = worst
    _write_json(folder / "metrics.json", metrics)
    sources = read_sources(data)
    (folder / "NOTICE").write_text(card.notice(sources, bench))
    (folder / "MODEL_CARD.md").write_text(card.model_card(c, metrics, sources, samples))
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes files that only their owner can read
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    log(f"exported {folder}: {size / 1e6:.2f} MB")
    if size > MAX_TOTAL_BYTES:
        raise ValueError(f"{folder} holds {size} bytes, more than {MAX_TOTAL_BYTES}")
    return size


def main() -> None:
    """Command line of the stage."""
    from .sources import DATA

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the corpus")
    parser.add_argument("--run", type=Path, required=True, help="folder of the stages' files")
    parser.add_argument("--output", type=Path, required=True, help="the model folder")
    arguments = parser.parse_args()
    run: Path = arguments.run
    device = Device()
    target = load_target(run / "target.pt", device)
    drafter = Drafter(NANO_DRAFTER, target.config)
    drafter.load_state_dict(torch.load(run / "drafter.pt", map_location="cpu")["weights"])
    metrics, bench, samples = (
        json.loads((run / f"{name}.json").read_text())
        for name in ("metrics", "prompts", "functions")
    )
    export(arguments.output, target, drafter, arguments.data, metrics, bench, samples)


if __name__ == "__main__":
    main()
