"""Tools as TypeScript types: how Kimi K2.5 and K2.6 were shown them in training.

Each function is a type of one argument, an object; descriptions, bounds and defaults are comments.
Required fields come first, both groups by name. `$defs` become interfaces in front.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_SCALARS |= {"null": "null", "any": "any"}
_IN_UNIONS = _SCALARS | {"object": "{}", "array": "Array<any>"}
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}


class _NoType(Exception):
    """The schema says what has no TypeScript type here."""


def typescript_declarations(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declarations of all functions among `tools` (OpenAI's form).

    None where there are none, or where a schema has no such type: then templates show the JSON.
    """
    functions = [tool.get("function") for tool in tools if tool.get("type") == "function"]
    try:
        declared = [_Function(f).text() for f in functions if isinstance(f, Mapping) and f]
    except (_NoType, RecursionError):
        return None
    if not declared:
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(declared) + "\n}\n"


class _Function:
    """One function, and the definitions that its schema refers to."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._schema = _mapping(function.get("parameters") or {})
        self._definitions = dict(_mapping(self._schema.get("$defs") or {}))
        self._root_is_named = False

    def text(self) -> str:
        argument, interfaces = self._object(self._schema, ""), []
        for name, schema in self._definitions.items():
            about = _comment(_mapping(schema).get("description"), "")
            interfaces.append(f"{about}interface {name} {self._type(schema, '')}")
        if self._root_is_named:
            interfaces.insert(0, f"interface parameters {self._object(self._schema, '', True)}")
            argument = "parameters"
        name = self._function.get("name", "function")
        about = _comment(self._function.get("description"), "")
        declared = f"{about}type {name} = (_: {argument}) => any;"
        return "".join(f"{interface}\n" for interface in interfaces) + declared

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        kind = _mapping(schema).get("type")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(one, indent) for one in _list(schema["anyOf"]))
        if "enum" in schema:
            values = _list(schema["enum"])
            return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values)
        if isinstance(kind, list):
            return " | ".join(_named(_IN_UNIONS, one) for one in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema.get("items"), indent)
        return "any" if not schema else _named(_SCALARS, kind)

    def _reference(self, target: Any) -> str:
        if target == "#":
            self._root_is_named = True
            return "parameters"
        name = str(target).removeprefix("#/$defs/")
        if name not in self._definitions:
            raise _NoType
        return name

    def _array(self, items: Any, indent: str) -> str:
        if not items:
            return "Array<any>"
        inner = f"{indent}  "
        about = _about(items, inner)
        if not about:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{about}{inner}{self._type(items, inner)}\n{indent}>"

    def _object(self, schema: Mapping[str, Any], indent: str, is_root: bool = False) -> str:
        """`is_root`: an interface that refers to itself keeps the order and has no other fields."""
        inner = f"{indent}  "
        properties = _mapping(schema.get("properties") or {})
        required = _list(schema.get("required") or [])
        fields = []
        names = sorted(properties, key=lambda n: (n not in required, n))
        for name in properties if is_root else names:
            one = properties[name]
            optional = "" if name in required else "?"
            fields.append(
                f"{_about(one, inner)}{_default(one, inner)}{inner}{name}{optional}: "
                f"{self._type(one, inner)}"
            )
        more = schema.get("additionalProperties")
        if more is not None and not is_root:
            kind = "never" if more is False else self._type(more, inner)
            fields.append(f"{inner}[k: string]: {kind}")
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}" if fields else "{}"


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _NoType
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _NoType
    return list(value)


def _named(types: Mapping[str, str], kind: Any) -> str:
    if not isinstance(kind, str) or kind not in types:
        raise _NoType
    return types[kind]


def _comment(text: Any, indent: str) -> str:
    if not text:
        return ""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in str(text).split("\n"))


def _about(schema: Any, indent: str) -> str:
    """A field's description and bounds."""
    if not isinstance(schema, Mapping):
        return ""
    kind = schema.get("type")
    plain = not {"$ref", "anyOf", "enum"} & schema.keys()
    names = _BOUNDS.get(kind, ()) if plain and isinstance(kind, str) else ()
    bounds = ", ".join(f"{name}: {schema[name]}" for name in names if name in schema)
    return _comment(schema.get("description"), indent) + _comment(bounds, indent)


def _default(schema: Any, indent: str) -> str:
    value = schema.get("default") if isinstance(schema, Mapping) else None
    if value is None:
        return ""
    shown = repr(value) if isinstance(value, int | float) else json.dumps(value, ensure_ascii=False)
    return f"{indent}// Default: {shown}\n"
