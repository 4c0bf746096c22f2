"""The command `kdtree`: generate, chat, bench, inspect, tree, synth, shard."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from kdtree_engine import cli_common as common
from kdtree_engine.cli_bench import bench
from kdtree_engine.cli_bench_ops import bench_ops
from kdtree_engine.cli_bench_rank import bench_rank
from kdtree_engine.cli_chat import chat
from kdtree_engine.cli_common import stats_line
from kdtree_engine.cli_load import (
    EngineOptions,
    SamplingOptions,
    bytes_bar,
    load,
    option_groups,
)
from kdtree_engine.cli_shard import shard
from kdtree_engine.cli_synth import synth

_TOP = """Decode Kimi-K2-class models with draft trees.

The bundled model needs no download: kdtree generate "def fibonacci(n):"

Each command has examples: kdtree COMMAND --help
"""
_UsageError: Any = typer.BadParameter.__base__  # typer shows it by no name of its own
app = typer.Typer(
    help=_TOP,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help='Text to continue; "-": stdin.')]
_bench = typer.Typer(rich_markup_mode=None)
_bench.callback(invoke_without_command=True)(bench)
_bench.command("ops")(bench_ops)
_bench.command("rank")(bench_rank)
app.add_typer(_bench, name="bench")
app.command()(chat)
app.command()(synth)
app.command()(shard)


@app.callback(invoke_without_command=True)
@common.errors_in_one_line
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from kdtree_engine import __version__

        print(f"kdtree-engine {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@app.command()
@common.errors_in_one_line
@option_groups
def generate(
    prompt: Prompt,
    engine: EngineOptions,
    sampling: SamplingOptions,
    method: common.Method = None,
    tree_budget: common.TreeBudget = None,
    tree_topk: common.TreeTopk = None,
    draft_temperature: common.DraftTemperature = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end of text.")
    ] = False,
    chat: common.Chat = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Continue a prompt and show how fast that went.

    The text goes to standard output, everything else to standard error. The last line ends with
    the accept lengths: a bar for each number of tokens that a forward committed, as high as there
    were such forwards.

    \b
    Examples:
      kdtree generate "def fibonacci(n):"
      kdtree generate --method none "def fibonacci(n):"      # the same text, one token a forward
      kdtree generate --tree-budget 16 --max-tokens 64 "class Stack:"
      kdtree generate -T 0.7 --top-p 0.95 --seed 3 "class Stack:"
      kdtree generate --chat "Write a Python function is_even(n)."
      cat half.py | kdtree generate - --stop "class "
      kdtree generate --json "import os" | jq .tokens_per_forward
    """
    from kdtree_engine.sampling_params import SamplingParams

    if system is not None and not chat:
        raise common.OptionError("--system needs --chat")
    if stop and not all(stop):
        raise common.OptionError("--stop is empty: give the text that ends the output")
    text = common.read_prompt(prompt)
    params = SamplingParams(
        max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos, **sampling.for_params()
    )
    speculative = common.speculative_options(method, tree_budget, tree_topk, draft_temperature)
    llm = load(engine, speculative, quiet=as_json)
    terminal = sys.stdout.isatty() and not as_json
    with common.start(llm, text, chat, system, params) as stream:
        with common.prefill_bar(as_json) as show_prefill:
            echo = f"\x1b[2m{common.printable(text)}\x1b[0m" if terminal and not chat else ""
            for chunk in stream:
                show_prefill(chunk)
                if as_json or not (chunk.token_ids or chunk.text):
                    continue
                new = common.printable(chunk.text) if terminal else chunk.text
                sys.stdout.write(echo + new)
                sys.stdout.flush()
                echo = ""
        output = stream.output
    if as_json:
        print(json.dumps(_record(output)))
        return
    if not output.outputs[0].text.endswith("\n"):
        print(flush=True)
    print(stats_line(output), file=sys.stderr)


def _record(output: Any) -> dict[str, Any]:
    completion, spec = output.outputs[0], output.spec
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "method": spec.method,
        "tree_budget": spec.tree_budget,
        "target_forwards": spec.target_forwards,
        "tokens_per_forward": round(spec.tokens_per_forward, 4),
        "tokens_per_second": round(spec.tokens_per_second, 2),
        "accept_length_histogram": dict(sorted(spec.accept_length_histogram.items())),
        "finish_reason": completion.finish_reason,
        "seed": output.seed,
    }


@app.command()
@common.errors_in_one_line
def inspect(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint folder, a pre-sharded cache or a KDTR file.")
    ],
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size", "--tp", metavar="N", help="Plan each rank's memory of N."
        ),
    ] = None,
    expert_parallel: common.ExpertParallel = False,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Plan what fits: 96GiB, 80GB or 96 (GiB) a rank."),
    ] = None,
    overhead: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of driver and kernels, a rank.  [default: 2GiB]"),
    ] = None,
    max_model_len: common.MaxModelLen = 0,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(show_default=False, help="Sequences at a time, in the plan.  [default: 8]"),
    ] = None,
    draft_model: common.DraftModel = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of a pre-sharded cache, for its checksums.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint or a KDTR file holds, what is wrong with it, and what it needs.

    Ends with status 1 when a fault was found. Loads no weights: the plan of a GPU's memory, which
    --tp and --gpu-memory ask for, is made from the headers, and what config.json says is left out
    beside it.

    \b
    Examples:
      kdtree inspect ~/models/Kimi-K2-Instruct
      kdtree inspect ~/models/Kimi-K2.6 --tp 8 --gpu-memory 96GiB
      kdtree inspect ~/models/Kimi-K2.6 --tp 8 --gpu-memory 80GB --max-model-len 32768 --json
      kdtree inspect ~/models/Kimi-K2.6-tp8 --verify
      kdtree inspect tests/data/tree_wide.kdtr
    """
    from kdtree_engine.inspect_files import inspect_path
    from kdtree_engine.inspect_plan import parse_size

    if not path.exists():
        raise common.OptionError(f"PATH is {path}: there is no such folder or file")
    plan: dict[str, Any] = {}
    if tensor_parallel_size is not None:
        plan["tensor_parallel_size"] = tensor_parallel_size
    if expert_parallel:
        plan["expert_parallel"] = True
    for name, size in (("gpu_memory", gpu_memory), ("overhead", overhead)):
        if size is not None:
            plan[name] = parse_size(name, size)
    if max_model_len:
        plan["max_model_len"] = max_model_len
    if max_num_seqs is not None:
        plan["max_num_seqs"] = max_num_seqs
    if draft_model is not None:
        common.check_checkpoint("--draft-model", draft_model)
    with bytes_bar("verifying", path.name) if verify else nullcontext() as progress:
        fine = inspect_path(
            path, as_json, verify=verify, plan=plan or None, drafter=draft_model, progress=progress
        )
    if not fine:
        raise typer.Exit(1)


@app.command()
@common.errors_in_one_line
@option_groups
def tree(
    prompt: Prompt,
    engine: EngineOptions,
    sampling: SamplingOptions,
    tree_budget: Annotated[str, typer.Option(metavar="N", help="Draft nodes.")] = "16",
    tree_topk: common.TreeTopk = None,
    draft_temperature: common.DraftTemperature = None,
    after: Annotated[int, typer.Option(min=0, help="Rounds to skip first.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Also write a picture to this file.")] = None,
    chat: common.Chat = False,
) -> None:
    """Draw the draft tree of the next round and the path the target accepts.

    Beside each token: the drafter's probability of the token at its depth, and of the whole path;
    with a --temperature, given part of the noise that the target's tokens are drawn with.
    The tree has as many nodes as --tree-budget says; `auto` has no place here.

    \b
    Examples:
      kdtree tree "def fibonacci(n):"
      kdtree tree "def fibonacci(n):" --after 3 --tree-budget 32
      kdtree tree "def fibonacci(n):" --temperature 0.8 --seed 1
      kdtree tree "import numpy as" --svg tree.svg
    """
    from kdtree_engine import render
    from kdtree_engine.sampling_params import SamplingParams

    text = common.read_prompt(prompt)
    common.check_writable("--svg", svg)
    if svg is not None and svg.suffix.lower() not in ("", ".svg"):
        raise common.OptionError(f"--svg is {svg}: the picture is SVG, want a name ending in .svg")
    common.parse_budget(tree_budget, auto=False)
    params = SamplingParams(max_tokens=None, **sampling.for_params())
    speculative = common.speculative_options("ddtree", tree_budget, tree_topk, draft_temperature)
    llm = load(engine, speculative)
    drawn = None
    with common.start(llm, text, chat, None, params) as stream:
        trees = (chunk.step for chunk in stream if chunk.step.tree is not None)
        for skipped, step in enumerate(trees):
            if skipped == after:
                drawn = render.drawing(step, llm.get_tokenizer(), params.temperature > 0)
                break
    if drawn is None:
        raise ValueError(f"the text ended before round {after + 1}: use a smaller --after")
    render.print_tree(drawn, common.stdout_console())
    if svg is not None:
        svg.write_text(render.to_svg(drawn), encoding="utf-8")
        print(f"wrote {svg}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command; ends the process with its status."""

    def run() -> None:
        try:
            status = app(args=argv, prog_name="kdtree", standalone_mode=False)
        except _UsageError as error:
            raise common.usage_error(error) from None
        except typer.Abort:
            status = 130
        # So typer ends when it is interrupted while it reads the options; commands do not.
        if status == 130:
            raise KeyboardInterrupt
        raise SystemExit(status)

    common.prepare_streams()
    common.drop_bad_sizes()
    common.errors_in_one_line(run)()
