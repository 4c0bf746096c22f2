"""`kdtree bench`: plain decoding, the chain and trees side by side on held-out prompts."""

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kdtree_engine import cli_common as common
from kdtree_engine.cli_common import OptionError
from kdtree_engine.cli_load import EngineOptions, SamplingOptions, load, option_groups
from kdtree_engine.outputs import SpecStats
from kdtree_engine.sampling_params import MAX_BUDGET, METHODS

if TYPE_CHECKING:
    from kdtree_engine.llm import LLM
    from kdtree_engine.outputs import RequestOutput
    from kdtree_engine.sampling_params import SamplingParams

PROMPTS_FILE = "heldout_prompts.json"
_DEFAULT_BUDGETS = "8,16,32,64,256,auto"
_WARM_UP_TOKENS = 16


@dataclass
class Setting:
    """One way to decode, and what it did over all prompts."""

    spec: SpecStats
    tokens: int = 0
    seconds: float = 0.0  # wall clock, prefill included
    differing: list[str] = field(default_factory=list)  # prompts with other tokens than plain

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"method": self.spec.method}
        if self.spec.tree_budget is not None:
            options["tree_budget"] = self.spec.tree_budget
        return options

    def add(self, output: "RequestOutput", seconds: float) -> None:
        self.spec.add(output.spec)
        self.tokens += len(output.outputs[0].token_ids)
        self.seconds += seconds

    def record(self, plain: "Setting") -> dict[str, Any]:
        spec, plain_speed = self.spec, plain.spec.tokens_per_second
        return {
            "method": spec.method,
            "tree_budget": spec.tree_budget,
            "tokens_per_forward": round(spec.tokens_per_forward, 4),
            "tokens_per_second": round(spec.tokens_per_second, 2),
            "speedup_over_plain": round(spec.tokens_per_second / plain_speed, 4)
            if plain_speed > 0
            else 0.0,
            "identical_to_plain": not self.differing,
            "differing_prompts": self.differing,
            "tokens": self.tokens,
            "target_forwards": spec.target_forwards,
            "seconds": round(self.seconds, 4),
            "accept_length_histogram": dict(sorted(spec.accept_length_histogram.items())),
            "timings_ms": {stage: round(ms, 3) for stage, ms in spec.timings.items()},
        }


@dataclass(frozen=True)
class BenchPrompt:
    """One entry of a prompts file."""

    name: str
    text: str
    kind: str


def read_prompts(path: Path) -> list[BenchPrompt]:
    """The prompts of a JSON file: a list of {"name", "text", "kind"}; errors name the entry."""
    want = 'want a list of objects such as {"text": "def f("}, "name" and "kind" if you like'
    if not path.is_file():
        raise OptionError(f"{path} is not a file: name one with prompts as --prompts FILE")
    try:
        entries = json.loads(common.utf8(f"prompts file {path}", path.read_bytes()))
    except OptionError:
        raise
    except (ValueError, RecursionError) as error:
        fault = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise OptionError(f"prompts file {path} is not JSON ({fault}): {want}") from error
    if not isinstance(entries, list) or not entries:
        raise OptionError(f"prompts file {path} holds no list of prompts: {want}")
    prompts = []
    for index, entry in enumerate(entries):
        fields = entry if isinstance(entry, dict) else {}
        values = [fields.get(key, "") for key in ("name", "text", "kind")]
        if not all(isinstance(v, str) for v in values) or not fields.get("text"):
            raise OptionError(
                f"prompts file {path}: prompt {index} has no text, or other fields: {want}"
            )
        for key, value in zip(("name", "text", "kind"), values, strict=True):
            common.check_text(f"prompts file {path}: prompt {index}: {key}", value)
        prompts.append(BenchPrompt(values[0] or str(index), values[1], values[2]))
    return prompts


def settings_of(methods: str, budgets: str | None) -> list[Setting]:
    """The settings that two comma-separated options stand for; plain decoding comes first."""
    names = [m.strip() for m in methods.split(",")]
    for name in names:
        if name not in METHODS:
            raise OptionError(f"--methods has {name!r}, want {', '.join(METHODS)}")
    if budgets is not None and "ddtree" not in names:
        raise OptionError("--budgets needs trees, and --methods has no ddtree: leave one out")
    settings = [Setting(SpecStats("none", None))]
    if "dflash" in names:
        settings.append(Setting(SpecStats("dflash", None)))
    if "ddtree" in names:
        for text in (_DEFAULT_BUDGETS if budgets is None else budgets).split(","):
            budget = common.parse_budget(text.strip(), "--budgets")
            settings.append(Setting(SpecStats("ddtree", budget)))
    return settings


def measure(
    llm: "LLM", prompts: list[BenchPrompt], settings: list[Setting], params: "SamplingParams"
) -> None:
    """Runs every prompt under every setting and adds the results to the settings.

    The settings take turns on each prompt, each prompt starting with another one, so that a change
    in the machine's speed hits all alike.
    """
    warm_up = replace(params, max_tokens=min(params.max_tokens or 0, _WARM_UP_TOKENS))
    for setting in settings:
        _generate(llm, prompts[0], warm_up, setting)
    console = common.stderr_console()
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("measuring", total=len(prompts) * len(settings))
        for index, prompt in enumerate(prompts):
            tokens: dict[int, list[int]] = {}
            for turn in range(len(settings)):
                which = (index + turn) % len(settings)
                setting, start = settings[which], perf_counter()
                output = _generate(llm, prompt, params, setting)
                setting.add(output, perf_counter() - start)
                tokens[which] = output.outputs[0].token_ids
                bar.advance(task)
            for which, setting in enumerate(settings):
                if tokens[which] != tokens[0]:
                    setting.differing.append(prompt.name)


def _generate(
    llm: "LLM", prompt: BenchPrompt, params: "SamplingParams", setting: Setting
) -> "RequestOutput":
    try:
        return llm.generate(prompt.text, params, speculative_config=setting.options())[0]
    except ValueError as error:  # most likely it is longer than the context
        raise ValueError(f"prompt {prompt.name!r}: {error}") from None


def machine_info(llm: "LLM") -> dict[str, Any]:
    """What the numbers depend on."""
    from kdtree_engine import __version__

    stats = llm.stats()
    return {
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "device": stats.get("device"),
        "num_threads": stats.get("num_threads"),
        "isa": stats.get("isa"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kdtree_engine": __version__,
        "verify_cost_ms": stats.get("verify_cost"),
        "draft_cost_ms": stats.get("draft_cost_ms"),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@common.errors_in_one_line
@option_groups
def bench(
    context: typer.Context,
    engine: EngineOptions,
    sampling: SamplingOptions,
    methods: Annotated[str, typer.Option(help="Of none, dflash, ddtree.")] = "none,dflash,ddtree",
    budgets: Annotated[
        str | None,
        typer.Option(
            help=f"Tree budgets, 1 to {MAX_BUDGET} or auto.  [default: {_DEFAULT_BUDGETS}]"
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSON: a list of {"text": ...}, with "name" and "kind" if you like.  '
            f"[default: {PROMPTS_FILE} in the model's folder]",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Only the first N prompts.  [default: all]"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Most new tokens a prompt.")
    ] = 128,
    arithmetic: Annotated[
        bool,
        typer.Option("--arithmetic", help="Compare plain decoding with the machine's ceilings."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results here.")
    ] = None,
) -> None:
    """Compare plain decoding, the chain and draft trees on held-out prompts.

    Ends with status 1 when a setting gave other tokens than plain decoding. Tokens per forward
    count the target's forwards while decoding, prefill not included, and include the bonus token.
    With a --temperature every setting draws with the same seed, 0 unless --seed names one.

    \b
    Examples:
      kdtree bench
      kdtree bench --budgets 16,64 --limit 8 --json results.json
      kdtree bench --temperature 1 --top-p 0.95
      kdtree bench --methods none --arithmetic
      kdtree bench ops
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
        return
    from kdtree_engine.locations import default_model, find_drafter
    from kdtree_engine.sampling_params import SamplingParams

    settings = settings_of(methods, budgets)
    chosen = sampling.for_params()
    if sampling.temperature:
        chosen.setdefault("seed", 0)
    params = SamplingParams(max_tokens=max_tokens, **chosen)
    common.check_writable("--json", json_file)
    folder = engine.model or default_model()
    common.check_checkpoint("--model" if engine.model else "the model", folder)
    if len(settings) > 1 and find_drafter(folder, engine.draft_model) is None:
        raise OptionError(
            f"{folder} has no drafter: name one with --draft-model, or use --methods none"
        )
    listed = read_prompts(prompts or folder / PROMPTS_FILE)
    listed = listed[:limit] if limit else listed
    speculative = common.speculative_options(None if len(settings) > 1 else "none")
    llm = load(engine, speculative)
    used = str(llm.stats()["device"])
    if arithmetic and used != "cpu":
        raise OptionError(
            "--arithmetic compares with the ceilings of this CPU, and --device "
            f"{engine.device} computes on {used}: add --device cpu"
        )
    measure(llm, listed, settings, params)
    how = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in chosen.items())
    _print_table(settings, len(listed), max_tokens, used, how if params.temperature else "greedy")
    report = {
        "model": folder.resolve().name,
        "prompts": len(listed),
        "max_tokens": max_tokens,
        "sampling": {name: getattr(params, name) for name in vars(sampling)},
        "machine": machine_info(llm),
        "settings": [s.record(settings[0]) for s in settings],
    }
    if arithmetic:
        from kdtree_engine import cli_arithmetic

        result = cli_arithmetic.of_plain(llm, settings[0], _mean_context(llm, listed, settings[0]))
        report["arithmetic"] = asdict(result)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arithmetic:
        cli_arithmetic.show(result)
    wrong = [s for s in settings if s.differing]
    for setting in wrong:
        print(
            f"kdtree: error: {setting.spec.name} gave other tokens than plain decoding on "
            f"{len(setting.differing)} of {len(listed)} prompts, first {setting.differing[0]!r}",
            file=sys.stderr,
        )
    if wrong:
        raise typer.Exit(1)


def _refuse_options_before(context: typer.Context, name: str) -> None:
    """Refuses options of `bench` itself in front of a subcommand, which would not get them."""
    group: Any = context.command
    own = {p.name: p.opts[0] for p in group.params}
    known = {p.name for p in group.get_command(context, name).params}
    for given in context.params:  # in the order of the command line
        source = context.get_parameter_source(given)
        if source is not None and source.name == "COMMANDLINE":
            advice = f"give it after {name}" if given in known else f"{name} has no such option"
            raise OptionError(f"{own[given]} stands before {name} and would be ignored: {advice}")


def _mean_context(llm: "LLM", prompts: list[BenchPrompt], plain: Setting) -> float:
    """Tokens in the KV cache during a step of plain decoding, on average."""
    tokenizer = llm.get_tokenizer()
    lengths = [len(tokenizer.encode(p.text, add_bos=tokenizer.add_bos)) for p in prompts]
    return sum(lengths) / len(lengths) + plain.tokens / len(prompts) / 2


def _print_table(
    settings: list[Setting], num_prompts: int, max_tokens: int, device: str, how: str
) -> None:
    prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
    title = f"{prompts}, at most {max_tokens} tokens each, on {device}, {how}"
    table = Table(title=title)
    table.add_column("setting", no_wrap=True)
    for name in ("tokens per forward", "tokens/s", "speed-up"):
        table.add_column(name, justify="right")
    table.add_column("same tokens")
    for setting in settings:
        record = setting.record(settings[0])
        table.add_row(
            setting.spec.name,
            f"{setting.spec.tokens_per_forward:.2f}",
            f"{setting.spec.tokens_per_second:.1f}",
            f"{record['speedup_over_plain']:.2f}",
            "yes" if record["identical_to_plain"] else "NO",
        )
    common.print_table(table)
