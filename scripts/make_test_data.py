"""Writes tests/data/*.kdtr, the cases that Python and C++ tests share, from the numpy reference.

    python scripts/make_test_data.py [FOLDER]

Every run writes the same bytes: inputs come from an integer hash. Arrays of a bundle, by its name:

tree_{typical, wide, deep, underfull, chain, star, all_ties, bf16_ties, inf_tails, budget_0,
      budget_1, budget_64, budget_128, budget_256, golden_a, golden_b}
    logprobs f32 [L, K], ids i32 [L, K], budget i32 [1]
    tokens, parents, depths, first_child, next_sibling i32 [n + 1], visibility bool [n + 1, n + 1],
    logw f64 [n + 1]                              exact, all of them
accept, accept_wide   one tree, many choices of the target: a row of `target_tokens` is a case
    tokens, parents, first_child, next_sibling i32 [n + 1]
    target_tokens i32 [cases, n + 1], accepted i32 [cases, n + 1] (-1 behind the accepted slots),
    accept_length i32 [cases] (root included), bonus i32 [cases]
attention_{h8_p0_b8, h16_p2048_b16, h64_p128_b32, h64_p512_b8, h8_p0_b1, h8_p37_b65}
    H heads, P rows of prefix, T slots; latent sizes C and R are small so that the files are
    q_latent f32 [T, H, C], q_rope f32 [T, H, R], latent f32 [P + T, C + R], parents i32 [T],
    scale f32 [1], out f64 [T, H, C]
gqa_{full, causal, window, causal_window, no_context}
    q f32 [b, Hq, d], k, v f32 [P + b, Hkv, d], context_len i32 [1], causal bool [1],
    window i32 [1], scale f32 [1], out f64 [b, Hq, d]
topk_{plain, temperature, ties, masked}
    logits f32 [R, V], k i32 [1], temperature f32 [1], logprobs f32 [R, k], ids i32
    [R, k], argmax i32 [R]
rope_{interleaved, half_split, yarn}
    x f32 [T, heads, dim], positions i32 [T], interleaved bool [1],
    cos_sin f32 [128, dim] (a position's dim / 2 cosines, then its sines), out f64 [T, heads, dim]
route_{plain, ties, groups, group_ties, nan, nan_groups, unnormalised}
    logits f32 [T, E], bias f32 [E], top_k, n_group, topk_group i32 [1], norm_topk_prob bool [1],
    routed_scaling_factor f32 [1], ids i32 [T, top_k], weights f32 [T, top_k]
experts_{spread, all_on_one}   E experts of 64 -> 32 -> 64, INT4; in `spread` some get no row
    x f32 [T, 64], ids i32 [T, top_k], weights f32 [T, top_k], {gate, up, down}_packed i32
    [E, rows, columns / 8], {gate, up, down}_scale bf16 [E, rows, columns / 32], out f64 [T, 64]
int4_linear
    packed i32 [N, K / 8], scale bf16 [N, K / 32], codes i8 [N, K], weight f32 [N, K],
    x f32 [T, K], out f64 [T, N]
model_{tiny, kimi_groups, plain}   the whole forward in float64 on this preset of make_tiny_model.py
    weights_xxh64 u64 [3]            of the shards and the drafter's file, in this order
    token_ids i32 [T], logits f64 [T, V]
    tree_tokens, tree_parents i32 [m], tree_logits f64 [m, V]   a tree behind the prompt
    root_token i32 [1], draft_logits f64 [b - 1, V]   the drafter behind the prompt
    greedy i32 [32]                  plain greedy continuation of the prompt
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdtree_engine import kdtr
from kdtree_engine.kdtr import Array, BF16Array, to_bf16
from kdtree_engine.reference import moe, quant, rope
from kdtree_engine.reference.accept import accept
from kdtree_engine.reference.attention import gqa_attention, mla_attention
from kdtree_engine.reference.decode import generate
from kdtree_engine.reference.drafter import DraftModel
from kdtree_engine.reference.model import TargetModel, chain
from kdtree_engine.reference.topk import argmax, topk_logprobs
from kdtree_engine.reference.tree import DraftTree, build_tree
from make_tiny_model import PRESETS, VOCAB, Options, checksums, make, uniform

Bundle = Mapping[str, Array]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

DATA = Path(__file__).parents[1] / "tests" / "data"
MODELS = ("tiny", "kimi_groups", "plain")  # presets of make_tiny_model.py


def integers(name: str, low: int, high: int, shape: tuple[int, ...]) -> I32:
    """Integers low ... high - 1."""
    x = uniform(name, 0, shape).astype(np.float64)
    return (low + np.floor((x + 1) / 2 * (high - low))).astype(np.int32)


def normal(name: str, shape: tuple[int, ...], deviation: float = 1.0) -> F32:
    """Nearly normal values: the sum of four uniform ones."""
    total = sum(uniform(f"{name}/{i}", 0, shape) for i in range(4))
    return (np.asarray(total) * np.float32(deviation * 0.75**0.5)).astype(np.float32)


def one(value: float, dtype: Any = np.int32) -> npt.NDArray[Any]:
    return np.array([value], dtype)


def drafter_logits(name: str, rows: int, vocab: int, exponent: float) -> F32:
    """Logits as a drafter's: the probability of the r-th best token falls about as r^-exponent."""
    order = np.argsort(uniform(f"{name} order", 0, (rows, vocab)), axis=1)
    fall = -exponent * np.log1p(np.arange(vocab))
    x = np.empty((rows, vocab), np.float32)
    np.put_along_axis(x, order, (fall + normal(name, (rows, vocab), 0.5)).astype(np.float32), 1)
    return x


# Trees.


def tree_bundle(logprobs: F32, ids: I32, budget: int) -> Bundle:
    tree = build_tree(logprobs, ids, budget)
    return {
        "logprobs": logprobs,
        "ids": ids,
        "budget": one(budget),
        **{n: getattr(tree, n) for n in ("tokens", "parents", "depths", "first_child")},
        **{n: getattr(tree, n) for n in ("next_sibling", "visibility", "logw")},
    }


def tree_inputs() -> Iterator[tuple[str, F32, I32, int]]:
    def drafted(name: str, depth: int, k: int, exponent: float = 2.0) -> tuple[F32, I32]:
        return topk_logprobs(drafter_logits(name, depth, 1024, exponent), k)

    yield "typical", *drafted("typical", 15, 64), 64
    yield "wide", *drafted("wide", 7, 96, exponent=0.5), 96
    yield "deep", *drafted("deep", 15, 32, exponent=4.0), 32
    yield "underfull", *drafted("underfull", 3, 3), 64  # 3 + 9 + 27 prefixes
    yield "chain", *drafted("chain", 15, 1), 64
    yield "star", *drafted("star", 1, 64), 32
    ties = np.full((5, 6), np.log(np.float32(0.125)), np.float32)
    yield "all_ties", ties, np.arange(30, dtype=np.int32).reshape(5, 6)[:, ::-1].copy(), 40
    rounded = to_bf16(drafter_logits("bf16", 7, 4096, 1.5)).to_float32()
    yield "bf16_ties", *topk_logprobs(rounded, 64), 64
    logprobs, ids = drafted("inf", 6, 8)
    for depth, finite in enumerate(
        [8, 3, 1, 5, 0, 8]
    ):  # nothing below the depth without candidates
        logprobs[depth, finite:] = -np.inf
    yield "inf_tails", logprobs, ids, 64
    for budget in (0, 1, 64, 128, 256):
        k = max(budget, 8)
        yield f"budget_{budget}", *drafted(f"budget {budget}", 7, k, 1.5), budget
    a = np.array([[0.6, 0.2, 0.1, 0.05], [0.5, 0.3, 0.1, 0.05], [0.7, 0.1, 0.05, 0.05]])
    b = np.array([[0.5, 0.25, 0.125, 0.125]] * 3)
    ids = np.arange(100, 112, dtype=np.int32).reshape(3, 4)
    yield "golden_a", np.log(a).astype(np.float32), ids, 6
    yield "golden_b", np.log(b).astype(np.float32), ids, 8


# Accept.


def accept_bundle(tree: DraftTree, target_tokens: I32) -> Bundle:
    accepted = np.full(target_tokens.shape, -1, np.int32)
    length, bonus = np.zeros(len(target_tokens), np.int32), np.zeros(len(target_tokens), np.int32)
    for case, target in enumerate(target_tokens):
        slots, bonus[case] = accept(tree, target)
        length[case] = len(slots)
        accepted[case, : len(slots)] = slots
    return {
        **{n: getattr(tree, n) for n in ("tokens", "parents", "first_child", "next_sibling")},
        "target_tokens": target_tokens,
        "accepted": accepted,
        "accept_length": length,
        "bonus": bonus,
    }


def accept_cases() -> Bundle:
    """Cases 0 to 8 accept that many drafts, 9 is refused at the root, the targets of 10 and 11 are
    elsewhere in the tree (a cousin; the slot itself), 12 takes the root's last child."""
    logprobs, ids = topk_logprobs(drafter_logits("accept", 8, VOCAB, 3.0), 6)
    tree = build_tree(logprobs, ids, 48)
    deepest = tree.path(int(tree.depths.argmax()))
    assert len(deepest) == 9
    nowhere = VOCAB + 1
    target = np.full((13, len(tree.tokens)), nowhere, np.int32)
    for case in range(9):
        for slot, child in pairwise(deepest[: case + 1]):
            target[case, slot] = tree.tokens[child]
    first = tree.children(0)
    elsewhere = [t for t in tree.tokens[tree.depths > 1] if t not in tree.tokens[first]]
    target[10] = elsewhere[0]
    target[10, 0] = tree.tokens[first[0]]
    target[10, first[0]] = next(
        t for t in tree.tokens[1:] if t not in tree.tokens[tree.children(first[0])]
    )
    target[11] = tree.tokens
    target[11, 0] = elsewhere[0]
    target[12, 0] = tree.tokens[first[-1]]
    return accept_bundle(tree, target)


def accept_wide() -> Bundle:
    """A tree of 64 slots; each slot's target is one of its children, or any token, at random."""
    tree = build_tree(*topk_logprobs(drafter_logits("accept wide", 7, VOCAB, 1.5), 63), 63)
    choice = integers("choice", 0, 10, (100, len(tree.tokens)))
    target = integers("target", 0, VOCAB, choice.shape)
    for case, slot in np.ndindex(choice.shape):
        children = tree.children(slot)
        if children and choice[case, slot] < 8:
            target[case, slot] = tree.tokens[children[choice[case, slot] % len(children)]]
    return accept_bundle(tree, target)


# Attention.

ATTENTION = {  # heads, prefix, slots, C, R
    "h8_p0_b8": (8, 0, 8, 32, 16),
    "h16_p2048_b16": (16, 2048, 16, 8, 8),
    "h64_p128_b32": (64, 128, 32, 4, 8),
    "h64_p512_b8": (64, 512, 8, 16, 8),
    "h8_p0_b1": (8, 0, 1, 32, 16),
    "h8_p37_b65": (8, 37, 65, 16, 16),
}


def attention_bundle(name: str) -> Bundle:
    heads, prefix, slots, rank, rotary = ATTENTION[name]
    q_latent = normal(f"{name} q_latent", (slots, heads, rank), 2.0)
    q_rope = normal(f"{name} q_rope", (slots, heads, rotary), 2.0)
    latent = normal(f"{name} latent", (prefix + slots, rank + rotary))
    logprobs, ids = topk_logprobs(drafter_logits(name, 7, 256, 2.0), max(slots - 1, 1))
    parents = build_tree(logprobs, ids, slots - 1).parents
    scale = one((rank + rotary) ** -0.5, np.float32)
    out = mla_attention(q_latent, q_rope, latent, parents, scale[0])
    inputs = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "parents": parents}
    return inputs | {"scale": scale, "out": out}


GQA = {  # context, causal, window
    "full": (19, False, 0),
    "causal": (19, True, 0),
    "window": (19, False, 6),
    "causal_window": (19, True, 6),
    "no_context": (0, False, 0),
}


def gqa_bundle(name: str) -> Bundle:
    context, causal, window = GQA[name]
    q = normal(f"{name} q", (8, 8, 32), 2.0)
    k, v = (normal(f"{name} {n}", (context + 8, 2, 32)) for n in "kv")
    scale = one(32**-0.5, np.float32)
    return {
        "q": q, "k": k, "v": v, "context_len": one(context), "causal": one(causal, bool),
        "window": one(window), "scale": scale,
        "out": gqa_attention(q, k, v, context, causal, window, scale[0]),
    }  # fmt: skip


# Choices.


def topk_bundle(logits: F32, k: int, temperature: float = 1.0) -> Bundle:
    logprobs, ids = topk_logprobs(logits, k, temperature)
    return {
        "logits": logits, "k": one(k), "temperature": one(temperature, np.float32),
        "logprobs": logprobs, "ids": ids, "argmax": argmax(logits),
    }  # fmt: skip


def topk_bundles() -> Iterator[tuple[str, Bundle]]:
    yield "plain", topk_bundle(drafter_logits("plain", 7, 2000, 2.0), 64)
    yield "temperature", topk_bundle(drafter_logits("temperature", 7, 1000, 2.0), 16, 0.5)
    ties = to_bf16(drafter_logits("ties", 5, 2000, 0.5)).to_float32()
    ties[0] = 1.5  # all equal
    ties[1, ::2] = -0.0  # equal to 0.0
    ties[1, 1::2] = 0.0
    yield "ties", topk_bundle(ties, 32)
    masked = drafter_logits("masked", 7, 300, 1.0)
    masked[0, 5:] = -np.inf  # fewer finite ones than k
    masked[1] = -np.inf
    masked[2, ::3] = np.nan
    masked[3] = np.nan
    masked[4, 7] = np.inf  # no distribution
    masked[5, :290] = np.nan
    masked[5, 290:] = -np.inf
    masked[6] *= 1e4  # lse must not overflow
    yield "masked", topk_bundle(masked, 16)


def rope_bundle(interleaved: bool, yarn: dict[str, Any] | None) -> Bundle:
    name = f"rope {interleaved} {yarn is None}"
    frequencies = rope.inverse_frequencies(32, 50000.0, yarn)
    positions = integers(name, 0, 128, (9,))
    positions[0] = 0
    table = np.hstack(rope.cos_sin(np.arange(128), frequencies, rope.rotation_scale(yarn)))
    x = normal(name, (9, 3, 32))
    cos, sin = np.split(table[positions].astype(np.float32).astype(np.float64), 2, axis=1)
    return {
        "x": x, "positions": positions, "interleaved": one(interleaved, bool),
        "cos_sin": table.astype(np.float32),
        "out": rope.rotate(x.astype(np.float64), cos, sin, interleaved),
    }  # fmt: skip


# Experts.


def route_bundle(
    logits: F32, bias: F32, top_k: int, n_group: int = 1, topk_group: int = 1, norm: bool = True
) -> Bundle:
    ids, weights = moe.route(logits, bias, top_k, n_group, topk_group, norm, 2.5)
    return {
        "logits": logits, "bias": bias, "top_k": one(top_k), "n_group": one(n_group),
        "topk_group": one(topk_group), "norm_topk_prob": one(norm, bool),
        "routed_scaling_factor": one(2.5, np.float32), "ids": ids, "weights": weights,
    }  # fmt: skip


def route_bundles() -> Iterator[tuple[str, Bundle]]:
    logits, bias = normal("route", (33, 64), 1.5), normal("bias", (64,), 0.1)
    yield "plain", route_bundle(logits, bias, 8)
    missing = logits[:6].copy()
    missing[0] = np.nan
    missing[1, 3:] = np.nan  # three numbers for eight places
    missing[2, ::2] = np.nan
    missing[3, 8:] = -np.inf
    yield "nan", route_bundle(missing, bias, 8)
    yield "nan_groups", route_bundle(missing, bias, 8, 8, 3)
    yield "unnormalised", route_bundle(logits, bias, 8, norm=False)
    yield "groups", route_bundle(logits, bias, 8, 8, 3)
    coarse = np.round(logits)  # few distinct values, and no bias: many exact ties
    none = np.zeros(64, np.float32)
    yield "ties", route_bundle(coarse, none, 8)
    coarse = coarse.copy()
    coarse[0] = 0  # all equal: the lowest ids
    yield "group_ties", route_bundle(coarse, none, 4, 8, 2)


def experts_bundle(name: str, ids: I32) -> Bundle:
    num_experts, hidden, size = 6, 64, 32
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    arrays: dict[str, Array] = {}
    matrices = []
    for part, shape in shapes.items():
        w = normal(f"{name} {part}", (num_experts, *shape), shape[1] ** -0.5)
        packed, scales, unpacked = [], [], []
        for matrix in w:
            codes, scale = quant.quantize(matrix)
            packed.append(quant.pack_int4(codes))
            scales.append(scale.bits)
            unpacked.append(quant.dequantize(packed[-1], scale).astype(np.float64))
        arrays[f"{part}_packed"] = np.stack(packed)
        arrays[f"{part}_scale"] = BF16Array(np.stack(scales))
        matrices.append(unpacked)
    x = normal(f"{name} x", (len(ids), hidden))
    weights = np.abs(normal(f"{name} weights", ids.shape))
    out = moe.experts(
        x.astype(np.float64), ids, weights.astype(np.float64), list(zip(*matrices, strict=True))
    )
    return {"x": x, "ids": ids, "weights": weights, **arrays, "out": out}


def int4_bundle() -> Bundle:
    codes = integers("codes", -8, 8, (48, 96)).astype(np.int8)
    codes[0, :16] = np.arange(-8, 8)
    scale = to_bf16(np.abs(normal("scale", (48, 3), 0.02)) + 0.001)
    packed = quant.pack_int4(codes)
    weight = quant.dequantize(packed, scale)
    x = normal("int4 x", (5, 96))
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    return {
        "packed": packed, "scale": scale, "codes": codes, "weight": weight, "x": x, "out": out
    }  # fmt: skip


# The whole model.


def model_bundle(options: Options) -> Bundle:
    with tempfile.TemporaryDirectory() as temporary:
        folder = make(temporary, options)
        target, drafter = TargetModel(folder), DraftModel(folder / "drafter")
        weights_xxh64 = checksums(folder)
    tokens = integers("tokens", 0, VOCAB, (16,))
    cache = target.new_cache()
    prompt = target.forward(tokens, chain(len(tokens)), cache)
    context = drafter.new_context()
    drafter.extend(context, prompt.features(drafter.target_layer_ids))
    root = int(prompt.logits[-1].argmax())
    draft_logits = drafter.draft_logits(root, context, target)
    tree = build_tree(*topk_logprobs(draft_logits, 4), 8)
    tree_tokens = tree.tokens.copy()
    tree_tokens[0] = root
    tree_logits = target.forward(tree_tokens, tree.parents, cache).logits
    return {
        "weights_xxh64": weights_xxh64,
        "token_ids": tokens,
        "logits": prompt.logits,
        "tree_tokens": tree_tokens,
        "tree_parents": tree.parents,
        "tree_logits": tree_logits,
        "root_token": one(root),
        "draft_logits": draft_logits,
        "greedy": np.array(generate(target, tokens.tolist(), 32), np.int32),
    }


def bundles() -> Iterator[tuple[str, Bundle]]:
    """Every bundle with its name."""
    for name, logprobs, ids, budget in tree_inputs():
        yield f"tree_{name}", tree_bundle(logprobs, ids, budget)
    yield "accept", accept_cases()
    yield "accept_wide", accept_wide()
    for name in ATTENTION:
        yield f"attention_{name}", attention_bundle(name)
    for name in GQA:
        yield f"gqa_{name}", gqa_bundle(name)
    for name, bundle in topk_bundles():
        yield f"topk_{name}", bundle
    yarn = {"factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0}
    yield "rope_interleaved", rope_bundle(True, None)
    yield "rope_half_split", rope_bundle(False, None)
    yield "rope_yarn", rope_bundle(True, yarn | {"mscale_all_dim": 0.5})
    for name, bundle in route_bundles():
        yield f"route_{name}", bundle
    yield (
        "experts_spread",
        experts_bundle("spread", np.array([[0, 2], [2, 3], [5, 0], [3, 2]], np.int32)),
    )
    yield "experts_all_on_one", experts_bundle("one", np.full((9, 1), 4, np.int32))
    yield "int4_linear", int4_bundle()
    for preset in MODELS:
        yield f"model_{preset}", model_bundle(PRESETS[preset])


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the bundles the tests share.")
    parser.add_argument("folder", type=Path, nargs="?", default=DATA)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, bundle in bundles():
        kdtr.write(folder / f"{name}.kdtr", bundle)


if __name__ == "__main__":
    main()
