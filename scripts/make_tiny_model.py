"""Writes a random checkpoint of the real architecture with a DFlash drafter, some 600 kB.

    python scripts/make_tiny_model.py OUT [--n-group 2 --topk-group 1] [--no-q-lora] ...
    python scripts/make_tiny_model.py OUT --presets    # OUT/tiny, OUT/groups and so on, for tests

Files are in Hugging Face layout. The same options give the same bytes on every machine: weights
come from an integer hash of their names.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kdtree_engine.kdtr import Array, to_bf16
from kdtree_engine.reference.checkpoint import write_safetensors
from kdtree_engine.reference.quant import GROUP_SIZE, pack_int4, quantize

HIDDEN, INTERMEDIATE, MOE_INTERMEDIATE, VOCAB = 64, 128, 32, 512
HEADS, NOPE, ROPE, V_DIM, KV_LORA, Q_LORA = 4, 16, 16, 16, 32, 32
LAYERS, EXPERTS, TOP_K = 3, 8, 2
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_HEAD_DIM = 2, 4, 2, 32
BLOCK_SIZE, TAPS, MASK_TOKEN = 8, [0, 1], 511
SHARDS = 2


@dataclass(frozen=True)
class Options:
    """What may differ between tiny models; each field is an option of the command line."""

    seed: int = 0
    n_group: int = 1  # groups of experts, of which topk_group are eligible
    topk_group: int = 1
    no_q_lora: bool = False  # the query is one product
    plain_rope: bool = False  # no yarn
    half_split_rope: bool = False  # rope_interleave false
    kimi: bool = False  # model_type kimi_k2: the latent norms use rms_norm_eps
    nested: bool = False  # Kimi-K2.5's layout: text_config, language_model., vision tensors
    sliding: bool = False  # the drafter's first layer has a sliding window of 12


DEFAULT = Options()
PRESETS = {
    "tiny": DEFAULT,
    "groups": Options(seed=10, n_group=4, topk_group=2),
    "kimi_groups": Options(seed=10, n_group=4, topk_group=2, kimi=True, sliding=True),
    "plain": Options(seed=20, no_q_lora=True, plain_rope=True, half_split_rope=True),
    "nested": Options(seed=10, n_group=4, topk_group=2, nested=True, sliding=True),
}


def uniform(name: str, seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Values in [-1, 1), multiples of 2^-23: splitmix64 from a hash of the name."""
    start = np.uint64(xxhash.xxh64_intdigest(name.encode(), seed))
    z = start + np.arange(1, np.prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
    return (z.astype(np.float32) / np.float32(2**23) - 1).reshape(shape)


class Writer:
    """Collects the tensors of one checkpoint."""

    def __init__(self, prefix: str, seed: int) -> None:
        self.tensors: dict[str, Array] = {}
        self._prefix, self._seed = prefix, seed

    def random(self, name: str, shape: tuple[int, ...], deviation: float) -> npt.NDArray[Any]:
        return uniform(name, self._seed, shape) * np.float32(3**0.5 * deviation)

    def add(self, name: str, tensor: Array) -> None:
        self.tensors[self._prefix + name] = tensor

    def norm(self, name: str, size: int) -> None:
        self.add(f"{name}.weight", to_bf16(1 + self.random(name, (size,), 0.2)))

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        weight = self.random(name, (rows, columns), gain * columns**-0.5)
        self.add(f"{name}.weight", to_bf16(weight))

    def int4_linear(self, name: str, rows: int, columns: int) -> None:
        codes, scale = quantize(self.random(name, (rows, columns), columns**-0.5))
        self.add(f"{name}.weight_packed", pack_int4(codes))
        self.add(f"{name}.weight_scale", scale)
        self.add(f"{name}.weight_shape", np.array([rows, columns], np.int32))

    def mlp(self, name: str, size: int, int4: bool = False) -> None:
        linear = self.int4_linear if int4 else self.linear
        linear(f"{name}.gate_proj", size, HIDDEN)
        linear(f"{name}.up_proj", size, HIDDEN)
        linear(f"{name}.down_proj", HIDDEN, size)


def target_tensors(options: Options) -> dict[str, Array]:
    w = Writer("language_model." if options.nested else "", options.seed)
    w.add("model.embed_tokens.weight", to_bf16(w.random("embed", (VOCAB, HIDDEN), 1.0)))
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        w.norm(f"{name}.input_layernorm", HIDDEN)
        if options.no_q_lora:
            w.linear(f"{attention}.q_proj", HEADS * (NOPE + ROPE), HIDDEN)
        else:
            w.linear(f"{attention}.q_a_proj", Q_LORA, HIDDEN)
            w.norm(f"{attention}.q_a_layernorm", Q_LORA)
            w.linear(f"{attention}.q_b_proj", HEADS * (NOPE + ROPE), Q_LORA)
        w.linear(f"{attention}.kv_a_proj_with_mqa", KV_LORA + ROPE, HIDDEN)
        w.norm(f"{attention}.kv_a_layernorm", KV_LORA)
        w.linear(f"{attention}.kv_b_proj", HEADS * (NOPE + V_DIM), KV_LORA)
        w.linear(f"{attention}.o_proj", HIDDEN, HEADS * V_DIM)
        w.norm(f"{name}.post_attention_layernorm", HIDDEN)
        if layer == 0:
            w.mlp(f"{name}.mlp", INTERMEDIATE)
            continue
        w.linear(f"{name}.mlp.gate", EXPERTS, HIDDEN)
        bias = f"{name}.mlp.gate.e_score_correction_bias"
        w.add(bias, w.random(bias, (EXPERTS,), 0.1))
        w.mlp(f"{name}.mlp.shared_experts", MOE_INTERMEDIATE)
        for expert in range(EXPERTS):
            w.mlp(f"{name}.mlp.experts.{expert}", MOE_INTERMEDIATE, int4=True)
    w.norm("model.norm", HIDDEN)
    w.linear("lm_head", VOCAB, HIDDEN, gain=2.0)
    if options.nested:
        vision = Writer("", options.seed)
        vision.linear("vision_tower.patch_embed.proj", 32, 32)
        vision.linear("mm_projector.linear_1", HIDDEN, 32)
        return w.tensors | vision.tensors
    return w.tensors


def target_config(options: Options) -> dict[str, Any]:
    yarn = {
        "type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False,
        "group_size": GROUP_SIZE, "actorder": None, "block_structure": None, "observer": "minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    group |= {"input_activations": None, "output_activations": None}
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    ignore += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2" if options.kimi or options.nested else "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "moe_intermediate_size": MOE_INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": None if options.no_q_lora else Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "n_group": options.n_group,
        "topk_group": options.topk_group,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-3,  # large, so that a norm with another eps shows
        "rope_theta": 50000.0,
        "rope_scaling": None if options.plain_rope else yarn,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 508,
        "eos_token_id": 509,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "ignore": ignore,
            "config_groups": {"group_0": group},
        },
    }
    if options.half_split_rope:
        text["rope_interleave"] = False
    if not options.nested:
        return text
    outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    return outer | {"text_config": text, "tie_word_embeddings": False}


def drafter_tensors(options: Options) -> dict[str, Array]:
    w = Writer("", options.seed + 1)
    w.linear("fc", HIDDEN, len(TAPS) * HIDDEN)
    w.norm("hidden_norm", HIDDEN)
    for layer in range(DRAFT_LAYERS):
        name = f"layers.{layer}"
        w.norm(f"{name}.input_layernorm", HIDDEN)
        w.linear(f"{name}.self_attn.q_proj", DRAFT_HEADS * DRAFT_HEAD_DIM, HIDDEN)
        w.linear(f"{name}.self_attn.k_proj", DRAFT_KV_HEADS * DRAFT_HEAD_DIM, HIDDEN)
        w.linear(f"{name}.self_attn.v_proj", DRAFT_KV_HEADS * DRAFT_HEAD_DIM, HIDDEN)
        w.linear(f"{name}.self_attn.o_proj", HIDDEN, DRAFT_HEADS * DRAFT_HEAD_DIM)
        w.norm(f"{name}.self_attn.q_norm", DRAFT_HEAD_DIM)
        w.norm(f"{name}.self_attn.k_norm", DRAFT_HEAD_DIM)
        w.norm(f"{name}.post_attention_layernorm", HIDDEN)
        w.mlp(f"{name}.mlp", INTERMEDIATE)
    w.norm("norm", HIDDEN)
    return w.tensors


def drafter_config(options: Options) -> dict[str, Any]:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_KV_HEADS,
        "head_dim": DRAFT_HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "block_size": BLOCK_SIZE,
        "num_target_layers": LAYERS,
        "dflash_config": {"target_layer_ids": TAPS, "mask_token_id": MASK_TOKEN},
        "torch_dtype": "bfloat16",
    }
    if options.sliding:
        config["layer_types"] = ["sliding_attention"] + ["full_attention"] * (DRAFT_LAYERS - 1)
        config["sliding_window"] = 12
    return config


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def make(folder: str | Path, options: Options = DEFAULT) -> Path:
    """Writes the model to `folder` and its drafter to `folder`/drafter."""
    folder = Path(folder)
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    tensors = target_tensors(options)
    names = list(tensors)
    per_shard = -(-len(names) // SHARDS)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    size = sum((t if isinstance(t, np.ndarray) else t.bits).nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", target_config(options))
    _write_json(folder / "generation_config.json", {"eos_token_id": [509, 510]})
    write_safetensors(folder / "drafter" / "model.safetensors", drafter_tensors(options))
    _write_json(folder / "drafter" / "config.json", drafter_config(options))
    return folder


def checksums(folder: str | Path) -> npt.NDArray[np.uint64]:
    """XXH64 of each file with weights, by name: tells whether results belong to these weights."""
    files = sorted(Path(folder).rglob("*.safetensors"))
    return np.array([xxhash.xxh64_intdigest(f.read_bytes()) for f in files], np.uint64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    for field in fields(Options):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=int, default=field.default)
    parser.add_argument("--presets", action="store_true", help="write each preset to FOLDER/NAME")
    arguments = vars(parser.parse_args())
    folder = arguments.pop("folder")
    if arguments.pop("presets"):
        for name, options in PRESETS.items():
            print(make(folder / name, options))
    else:
        print(make(folder, Options(**arguments)))


if __name__ == "__main__":
    main()
