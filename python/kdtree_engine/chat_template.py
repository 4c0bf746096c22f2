"""Chat templates: jinja2 from the model's folder, in a sandbox, on text that stays text.

A template is a part of a checkpoint, so it comes from outside: it sees copies of plain values,
changes nothing, and what it can build and compute is limited.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kdtree_engine import checks
from kdtree_engine.checks import shown
from kdtree_engine.tokenizer_files import SETTINGS_FILE, read_text
from kdtree_engine.tool_calls import with_own_call_ids
from kdtree_engine.tool_declarations import typescript_declarations

TEMPLATE_FILE = "chat_template.jinja"
MAX_SOURCE_CHARS = 1 << 20
MAX_TEXT_CHARS = 1 << 24
MAX_BITS = 4096
MAX_SECONDS = 10.0
# Methods that make a text of any length out of one number.
_GROWING = ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map")
# Where the characters come from that stand in for those of users' text: a private plane.
_STAND_INS = range(0xF0000, 0xFFFFE)


def find_template(folder: Path, settings: dict[str, Any], for_kimi: bool) -> "ChatTemplate":
    """The template of a folder: chat_template.jinja, else chat_template in tokenizer_config.json.

    The latter is a text, or a list of named ones: "default", and "tool_use" where tools are given.
    `for_kimi`: tools are prepared as Kimi's own tokenizer class does it.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return ChatTemplate(str(path), read_text(path), None, for_kimi)
    path = folder / SETTINGS_FILE
    value = settings.get("chat_template")
    if value is None or isinstance(value, str):
        where = f"{folder} has no {TEMPLATE_FILE}" if value is None else f"{path}: chat_template"
        return ChatTemplate(where, value, None, for_kimi)
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name, source = (entry.get(k) if isinstance(entry, dict) else None for k in _NAMED_KEYS)
        if not isinstance(name, str) or not isinstance(source, str):
            raise ValueError(
                f"{path}: chat_template is {shown(value)}, want a text or a list of objects with "
                "'name' and 'template'"
            )
        named[name] = source
    if "default" not in named:
        raise ValueError(f"{path}: chat_template has no entry 'default', found {sorted(named)}")
    return ChatTemplate(f"{path}: chat_template", named["default"], named.get("tool_use"), for_kimi)


_NAMED_KEYS = ("name", "template")


@dataclass
class ChatTemplate:
    """A template: `name` for messages, its `source` (None: there is none), one for tools."""

    name: str
    source: str | None
    tool_source: str | None
    for_kimi: bool
    _compiled: dict[str, Any] = field(default_factory=dict)
    _environment: Any = None

    def render(
        self,
        messages: Any,
        tools: Any,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        control: Mapping[str, int],
        named: Mapping[str, str],
    ) -> tuple[str, dict[int, str]]:
        """The text of a conversation, and what its stand-in characters stand for.

        Each character of the values that could begin a name in `control` is replaced by one that
        occurs nowhere, so that the names left in the text are the template's own. `named`:
        variables that are names of control tokens. Raises ValueError naming the template.
        """
        messages = checked_messages(messages)
        if tools is not None:
            tools = dicts("tools", tools)
        given: dict[str, Any] = {"tools": tools, **variables, "messages": messages}
        try:
            used = set(self.source or "") | set(self.tool_source or "")
            for name, value in given.items():
                for text in _texts(name, value):
                    used.update(text)
            if self.for_kimi:
                given = self._as_kimi(given)
            starts = sorted({"<", *(name[0] for name in control)})
            free = (code for code in _STAND_INS if chr(code) not in used)
            stand_ins = {ord(start): code for start, code in zip(starts, free, strict=False)}
            if len(stand_ins) < len(starts):
                raise ValueError("messages use every character of Unicode's plane 15")
            context = {name: _replaced(value, stand_ins) for name, value in given.items()}
        except RecursionError:
            raise ValueError("messages, tools or variables are nested too deeply") from None
        context = {**named, **context, "add_generation_prompt": add_generation_prompt}
        text = self._run(self.tool_source if tools and self.tool_source else self.source, context)
        return text, {code: chr(start) for start, code in stand_ins.items()}

    def _as_kimi(self, given: dict[str, Any]) -> dict[str, Any]:
        """Kimi's tokenizer sorts the keys of tools, and K2.5's and K2.6's declares their types."""
        given = {**given, "messages": with_own_call_ids(given["messages"])}
        if given["tools"]:
            given["tools"] = _sorted_keys(given["tools"])
            declared = typescript_declarations(given["tools"])
            if declared is not None:
                given.setdefault("tools_ts_str", declared)
        return given

    def _run(self, source: str | None, context: dict[str, Any]) -> str:
        import jinja2

        if source is None:
            raise ValueError(f"{self.name}: use a plain prompt")
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(
                f"{self.name}: {len(source)} characters, want at most {MAX_SOURCE_CHARS}"
            )
        try:
            environment = self._environment = self._environment or _environment()
            environment.deadline = time.monotonic() + MAX_SECONDS
            if source not in self._compiled:
                self._compiled[source] = environment.from_string(source)
            parts, length = [], 0
            for part in self._compiled[source].generate(context):
                environment.check(part)
                length += len(part)
                _check_length(length)
                parts.append(part)
            return "".join(parts)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.name}:{error.lineno}: {error.message}") from error
        except Exception as error:  # a template may raise anything
            raise ValueError(f"{self.name}: {error}") from error


def checked_messages(messages: Any) -> list[Any]:
    """A conversation: dicts with a role, and a content: a text, parts, or none beside calls."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages is {shown(messages)}, want a list with at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where} is {shown(message)}, want a dict with a 'role'")
        content, calls = message.get("content"), message.get("tool_calls")
        if calls is not None:
            calls = dicts(f"{where}: tool_calls", calls)
        if not isinstance(content, str) and not (content is None and calls):
            dicts(f"{where}: content", content, "dicts, or a str")
    return list(messages)


def dicts(name: str, value: Any, what: str = "dicts") -> list[Any]:
    """A list of dicts."""
    items = checks.listed(name, value, what)
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{name}[{index}] is {shown(item)}, want a dict")
    return items


def _texts(name: str, value: Any) -> Iterator[str]:
    """All texts in a value, which must be what JSON can hold: others could become any text."""
    if isinstance(value, str):
        yield checks.text(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(f"{name}: key", key)
            yield from _texts(f"{name}[{shown(key)}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(f"{name}[{index}]", item)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ValueError(f"{name} is {shown(value)}, want what JSON can hold")


def _replaced(value: Any, stand_ins: dict[int, int]) -> Any:
    if isinstance(value, str):
        return value.translate(stand_ins)
    if isinstance(value, Mapping):
        return {_replaced(k, stand_ins): _replaced(v, stand_ins) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, stand_ins) for item in value]
    return value


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted_keys(value[key]) for key in sorted(value, key=str)}
    return [_sorted_keys(v) for v in value] if isinstance(value, list | tuple) else value


# ---------------------------------------------------------------- the sandbox


def _check_length(length: int) -> None:
    if length > MAX_TEXT_CHARS:
        raise ValueError(f"a text of more than {MAX_TEXT_CHARS} characters")


def _environment() -> Any:
    """jinja2's sandbox for values that do not change, with limits on what grows."""
    from jinja2 import nodes, pass_environment
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Watched(NodeTransformer):
        """`a ~ b` as a filter whose result is checked, and a look at the clock for each loop."""

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None)

        def visit_For(self, node: nodes.For) -> nodes.Node:
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "watched", [], [], None, None)
            return node

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "+", "%"})
        deadline = 0.0

        def check(self, value: Any) -> Any:
            if time.monotonic() > self.deadline:
                raise ValueError(f"it ran for more than {MAX_SECONDS:g} seconds")
            if isinstance(value, str | list | tuple):
                _check_length(len(value))
            return value

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                raise ValueError("formats with % are not supported")
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * max(1, abs(right)) if operator == "**" else 0
                if operator == "*":
                    bits = left.bit_length() + right.bit_length()
                if bits > MAX_BITS:
                    raise ValueError(f"a number of more than {MAX_BITS} bits")
            for one, other in ((left, right), (right, left)):
                if operator == "*" and isinstance(one, str | list | tuple):
                    _check_length(len(one) * max(0, other))
            return self.check(super().call_binop(context, operator, left, right))

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
            if isinstance(owner, str) and name == "replace" and len(args) > 1:
                _check_length(len(owner) + (owner.count(args[0]) * len(args[1])))
            if isinstance(owner, str) and name == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_length(len(owner) * len(args[0]) + sum(map(len, args[0])))
            return self.check(super().call(context, function, *args, **kwargs))

        def wrap_str_format(self, value: Any) -> None:
            """Formats are refused below: a width in one can be any number."""

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            grows = isinstance(obj, str) and attr in _GROWING
            return not grows and super().is_safe_attribute(obj, attr, value)

        def getattr(self, obj: Any, attribute: str) -> Any:
            return super().getattr(self.check(obj), attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            return super().getitem(self.check(obj), argument)

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Watched().visit(super()._parse(source, name, filename))
            return tree

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    for name in ("center", "format", "indent", "lipsum", "wordwrap", "xmlattr"):
        environment.filters.pop(name, None)
    del environment.globals["lipsum"]
    environment.filters["watched"] = environment.check
    environment.filters["join"] = pass_environment(_join)
    environment.filters["replace"] = _replace
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = time.strftime
    return environment


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(text)
    _check_length(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _join(environment: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    from jinja2.filters import make_attrgetter

    get = (lambda item: item) if attribute is None else make_attrgetter(environment, attribute)
    items, length = [], 0
    for item in value:
        items.append(str(get(item)))
        length += len(items[-1]) + len(d)
        _check_length(length)
    return d.join(items)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes characters for HTML, which no prompt wants."""
    if isinstance(indent, int):
        checks.integer("indent", indent, 0, 16)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise ValueError(message)
