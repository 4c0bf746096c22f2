"""Measures the trained model: losses, completed functions, repeats, acceptance, gates.

It also chooses the prompts of `kdtree bench` from the held-out files: half are cuts of files,
half are function heads whose greedy completion ends and parses.
"""

import argparse
import json
import multiprocessing.pool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch

from . import acceptance, data, functions, tokenizer
from .config import NANO_DRAFTER
from .decode import Decoder, agreement, pad
from .device import Device, log
from .dflash import Drafter
from .generate import load_target
from .model import Target


@dataclass(frozen=True)
class EvaluateSettings:
    """Numbers of prompts, and lengths in tokens."""

    prompts: int = 96
    prompt_length: int = 64
    continuation: int = 176
    functions: int = 50
    function_candidates: int = 256
    function_tokens: int = 224
    bench_prompts: int = 40
    bench_continuation: int = 144


# name, where the value lies in the metrics, bound, whether the bound is a lower one
GATES = (
    ("nats per token on unseen packages", ("losses", "unseen_packages"), 2.05, False),
    ("INT4 against its masters, nats per token", ("losses", "int4_cost"), 0.01, False),
    ("completed functions that parse", ("functions", "greedy", "parse_share"), 0.8, True),
    ("repeats in completions that end", ("functions", "greedy", "repeats_ended"), 0.12, False),
    ("tokens per forward, tree of 64, greedy", ("acceptance", "greedy", "tree_64"), 5.0, True),
    (
        "the same, prompts that do not loop",
        ("acceptance", "greedy_low_repeat", "tree_64"),
        4.2,
        True,
    ),
    ("the same, temperature 0.8", ("acceptance", "temperature_0.8", "tree_64"), 2.8, True),
)


def repeat_share(tokens: list[int], n: int = 8) -> float:
    """Share of the n-grams of a sequence that occurred before in it."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def held_out_cuts(corpus: data.Corpus, count: int, length: int, seed: int) -> list[list[int]]:
    """Random cuts of the held-out streams, in turn."""
    rng = np.random.default_rng(seed)
    streams = [s for name in data.HELD_OUT if len(s := corpus.streams[name]) > length]
    cuts = []
    for index in range(count):
        stream = streams[index % len(streams)]
        start = int(rng.integers(len(stream) - length))
        cuts.append(stream[start : start + length].astype(int).tolist())
    return cuts


def continue_all(
    target: Target, device: Device, rows: list[list[int]], new_tokens: int, temperature: float
) -> list[list[int]]:
    """Every row with `new_tokens` tokens of the target after it."""
    prompts, lengths = pad(rows, device)
    decoder = Decoder(target, device, len(rows), int(lengths.max()) + new_tokens)
    heat = torch.full((len(rows),), temperature, device=device.name)
    out = decoder.run(prompts, lengths, heat).tolist()
    return [row[: len(p) + new_tokens] for row, p in zip(out, rows, strict=True)]


def losses(pretrained: dict[str, Any], corpus: data.Corpus) -> dict[str, Any]:
    """The losses of the exported model and the two gates over them."""
    final, masters = pretrained["held_out"], pretrained["masters"]
    nats = {split: round(final[split], 4) for split in final}
    bits = {split: round(corpus.bits_per_byte(split, final[split]), 4) for split in final}
    return {
        "nats_per_token": nats,
        "bits_per_byte": bits,
        "unseen_packages": round((final["networkx"] + final["sphinx"]) / 2, 4),
        "int4_cost": round(max(final[s] - masters[s] for s in final), 4),
    }


def evaluate(
    target: Target,
    drafter: Drafter,
    pretrained: dict[str, Any],
    corpus: data.Corpus,
    device: Device,
    pool: multiprocessing.pool.Pool | None,
    settings: EvaluateSettings,
) -> tuple[dict[str, Any], list[dict[str, str]], list[dict[str, Any]]]:
    """(metrics, bench prompts, completed functions)."""
    s = settings
    metrics: dict[str, Any] = {"losses": losses(pretrained, corpus)}
    cuts = held_out_cuts(corpus, s.prompts, s.prompt_length + s.continuation, seed=9)
    prompts = [cut[: s.prompt_length] for cut in cuts]
    paths = {
        "greedy": continue_all(target, device, prompts, s.continuation, 0.0),
        "temperature_0.8": continue_all(target, device, prompts, s.continuation, 0.8),
    }
    greedy = torch.tensor(paths["greedy"], device=device.name)
    metrics["decode_agreement"] = round(agreement(target, greedy, s.prompt_length), 4)
    shares = {
        name: [repeat_share(row[s.prompt_length :]) for row in rows]
        for name, rows in (paths | {"real_text": cuts}).items()
    }
    metrics["repeats"] = {name: round(float(np.mean(v)), 3) for name, v in shares.items()}
    log("repeated 8-grams", metrics["repeats"], "decode agrees", metrics["decode_agreement"])

    metrics["acceptance"] = {}
    lengths = [s.prompt_length] * s.prompts
    for name, rows in paths.items():
        accepted = acceptance.measure(target, drafter, rows, lengths, device, pool)
        table = {"prompts": s.prompts, **accepted.tokens_per_forward()}
        metrics["acceptance"][name] = table
        if name == "greedy":
            low = [i for i, share in enumerate(shares["greedy"]) if share < 0.15]
            table = {"prompts": len(low), **accepted.tokens_per_forward(low)}
            metrics["acceptance"]["greedy_low_repeat"] = table
    for name, table in metrics["acceptance"].items():
        log("tokens per forward,", name, table)

    encoding = tokenizer.load(corpus.ranks)
    heads = functions.held_out_heads(corpus.held_out, encoding, s.function_candidates, seed=4)
    chosen = [functions.tokens_of(head, encoding) for head in heads]
    metrics["functions"], samples = {}, []
    completed: dict[str, list[functions.Completion]] = {}
    for name, temperature in (("greedy", 0.0), ("temperature_0.5", 0.5)):
        rows = continue_all(target, device, chosen, s.function_tokens, temperature)
        completed[name] = [
            functions.complete(head, row[len(prompt) :], encoding)
            for head, row, prompt in zip(heads, rows, chosen, strict=True)
        ]
        judged = completed[name][: s.functions]
        ended = [repeat_share(c.tokens) for c in judged if c.ended]
        metrics["functions"][name] = {
            "functions": len(judged),
            "parse_share": round(sum(c.parses for c in judged) / len(judged), 3),
            "ended": len(ended),
            "ended_and_parse": sum(c.parses and c.ended for c in judged),
            "repeats_ended": round(float(np.mean(ended)), 3) if ended else 1.0,
        }
        samples += [{"decoding": name, **c.as_dict()} for c in judged]
        log("functions,", name, metrics["functions"][name])

    bench = functions.bench_prompts(
        corpus.held_out,
        heads[s.functions :],
        completed["greedy"][s.functions :],
        encoding,
        s.bench_prompts,
    )
    tables = bench_acceptance(target, drafter, bench, encoding, device, pool, s.bench_continuation)
    metrics["acceptance"] |= tables
    log("tokens per forward, bench prompts", tables["bench"])
    metrics["gates"] = gates(metrics)
    return metrics, bench, samples


def bench_acceptance(
    target: Target,
    drafter: Drafter,
    bench: list[dict[str, str]],
    encoding: tiktoken.Encoding,
    device: Device,
    pool: multiprocessing.pool.Pool | None,
    continuation: int = EvaluateSettings.bench_continuation,
) -> dict[str, dict[str, float]]:
    """Tokens per forward on the bench prompts, by kind and for all."""
    texts = [encoding.encode_ordinary(prompt["text"]) for prompt in bench]
    rows = continue_all(target, device, texts, continuation, 0.0)
    accepted = acceptance.measure(target, drafter, rows, [len(t) for t in texts], device, pool)
    tables = {}
    for kind in ("code", "function"):
        of_kind = [i for i, prompt in enumerate(bench) if prompt["kind"] == kind]
        tables[f"bench_{kind}"] = {
            "prompts": len(of_kind),
            **accepted.tokens_per_forward(of_kind),
        }
    tables["bench"] = {"prompts": len(bench), **accepted.tokens_per_forward()}
    return tables


def gates(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Every gate with its bound, the value measured, and whether it is met."""
    result = []
    for name, keys, bound, at_least in GATES:
        value: Any = metrics
        for key in keys:
            value = value[key]
        met = value >= bound if at_least else value <= bound
        sign = ">=" if at_least else "<="
        result.append({"gate": name, "bound": f"{sign} {bound}", "value": value, "met": met})
    return result


def main() -> None:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=data.DATA, help="folder of the corpus")
    parser.add_argument("--run", type=Path, required=True, help="folder of the stages' files")
    arguments = parser.parse_args()
    run: Path = arguments.run
    corpus = data.load(arguments.data, None)
    device = Device()
    target = load_target(run / "target.pt", device)
    pretrained = torch.load(run / "target.pt", map_location="cpu")["result"]
    drafter = Drafter(NANO_DRAFTER, target.config).to(device.name)
    drafter.load_state_dict(torch.load(run / "drafter.pt", map_location=device.name)["weights"])
    metrics, bench, samples = evaluate(
        target, drafter, pretrained, corpus, device, None, EvaluateSettings()
    )
    for name, value in (("metrics", metrics), ("prompts", bench), ("functions", samples)):
        (run / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
