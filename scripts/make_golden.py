"""Writes tests/data/golden_*.kdtr: results of transformers' own models on the tiny checkpoints.

Needs torch and transformers (2.13.0 and 5.24.0 wrote the files there are) and is run by hand; the
tests read what it wrote. The INT4 experts are unpacked to float32 first, so that both sides compute
with the same weights.

golden_deepseek_v3*.kdtr, from DeepseekV3ForCausalLM in float32 (presets tiny, groups, plain):
    weights_xxh64 u64 [files]   checksums of the checkpoint the results belong to
    token_ids i32 [T]           a prompt
    logits f32 [T, vocab_size]  after each of its tokens
    features f32 [T, n * H]     hidden states after the layers of the drafter's taps
    tree_tokens, tree_parents i32 [m]  a draft tree behind the whole prompt; slot 0 follows it
    tree_logits f32 [m, vocab_size]    after each slot, by a 4-D mask and explicit positions
golden_dflash.kdtr, from MuseGlimmerAssistantModel, which is a DFlash drafter (preset tiny):
    weights_xxh64               as above
    features f32 [S, n * H]     the features of S committed tokens
    block_embeddings f32 [b, H] the target's embeddings of the root and b - 1 masks
    hidden f32 [b, H]           the block's hidden states after the last norm
"""
# torch and transformers are no requirements of the project.
# mypy: ignore-errors

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from kdtree_engine import kdtr
from kdtree_engine.kdtr import Array, BF16Array
from kdtree_engine.reference.checkpoint import read_config, read_tensors, to_numpy
from kdtree_engine.reference.quant import dequantize
from kdtree_engine.reference.tree import visibility
from make_tiny_model import BLOCK_SIZE, MASK_TOKEN, PRESETS, TAPS, VOCAB, checksums, make

DATA = Path(__file__).parents[1] / "tests" / "data"
TARGETS = {  # file: preset
    "golden_deepseek_v3": "tiny",
    "golden_deepseek_v3_groups": "groups",
    "golden_deepseek_v3_plain": "plain",
}
PROMPT_LENGTH, CONTEXT_LENGTH = 24, 20
TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 6, 0]


def state_dict(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in float32, INT4 matrices unpacked under the name `weight`."""
    tensors = read_tensors(folder)
    state = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            scale = tensors[name.replace("_packed", "_scale")]
            assert isinstance(tensor, np.ndarray) and isinstance(scale, BF16Array)
            state[name.removesuffix("_packed")] = torch.from_numpy(dequantize(tensor, scale))
        elif not name.endswith((".weight_scale", ".weight_shape")):
            state[name] = torch.from_numpy(to_numpy(tensor, np.float32))
    return state


def target_model(folder: Path) -> DeepseekV3ForCausalLM:
    config = read_config(folder)
    del config["quantization_config"], config["torch_dtype"], config["model_type"]
    with tempfile.TemporaryDirectory() as temporary:
        # Written and read back: transformers joins the experts' matrices only while loading.
        DeepseekV3Config(**config).save_pretrained(temporary)
        from safetensors.torch import save_file

        save_file(state_dict(folder), f"{temporary}/model.safetensors", {"format": "pt"})
        model, report = DeepseekV3ForCausalLM.from_pretrained(
            temporary,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.eval()


def run_target(folder: Path) -> dict[str, Array]:
    model = target_model(folder)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, PROMPT_LENGTH, dtype=np.int32)
    tree_tokens = rng.integers(0, VOCAB, len(TREE_PARENTS), dtype=np.int32)
    parents = np.array(TREE_PARENTS, np.int32)

    cache = DynamicCache(config=model.config)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    prompt = model(ids, cache=cache, use_cache=True, output_hidden_states=True)
    features = torch.cat([prompt.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)

    seen = visibility(parents)
    mask = torch.zeros(1, 1, len(parents), PROMPT_LENGTH + len(parents))
    mask[0, 0, :, PROMPT_LENGTH:] = torch.where(torch.from_numpy(seen), 0.0, -torch.inf)
    positions = PROMPT_LENGTH + seen.sum(axis=1) - 1
    tree = model(
        torch.from_numpy(tree_tokens.astype(np.int64))[None],
        attention_mask=mask,
        position_ids=torch.from_numpy(positions)[None],
        cache=cache,
        use_cache=True,
    )
    return {
        "weights_xxh64": checksums(folder),
        "token_ids": tokens,
        "logits": prompt.logits[0].numpy(),
        "features": features.numpy(),
        "tree_tokens": tree_tokens,
        "tree_parents": parents,
        "tree_logits": tree.logits[0].numpy(),
    }


def run_drafter(folder: Path, features: np.ndarray) -> dict[str, Array]:
    keys = read_config(folder / "drafter")
    config = MuseGlimmerAssistantConfig(
        **{k: keys[k] for k in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
        )},
        rope_parameters={"rope_type": "default", "rope_theta": keys["rope_theta"]},
        layer_types=["full_attention"] * keys["num_hidden_layers"],
        target_layer_ids=TAPS,
        block_size=BLOCK_SIZE,
        mask_token_id=MASK_TOKEN,
        attn_implementation="eager",
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(config).eval()
    theirs = {"fc.weight": "encoder.fc.weight"}
    theirs["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
    state = state_dict(folder / "drafter")
    model.load_state_dict({theirs.get(name, name): t for name, t in state.items()})

    embedding = to_numpy(read_tensors(folder)["model.embed_tokens.weight"], np.float32)
    block = embedding[[7] + [MASK_TOKEN] * (BLOCK_SIZE - 1)]
    context = features[:CONTEXT_LENGTH]
    length = len(context) + len(block)
    out = model(
        noise_embeds=torch.from_numpy(block)[None],
        context_hidden_states=torch.from_numpy(context)[None],
        # Additive and all zero: every row of the block sees the context and the whole block.
        attention_mask={"full_attention": torch.zeros(1, 1, len(block), length)},
        position_ids=torch.arange(length)[None],
    )
    return {
        "weights_xxh64": checksums(folder),
        "features": context,
        "block_embeddings": block,
        "hidden": out.last_hidden_state[0].numpy(),
    }


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    for name, preset in TARGETS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = make(temporary, PRESETS[preset])
            arrays = run_target(folder)
            kdtr.write(DATA / f"{name}.kdtr", arrays)
            print(name, {n: a.shape for n, a in arrays.items()})
            if preset == "tiny":
                features = arrays["features"]
                assert isinstance(features, np.ndarray)
                kdtr.write(DATA / "golden_dflash.kdtr", run_drafter(folder, features))


if __name__ == "__main__":
    main()
