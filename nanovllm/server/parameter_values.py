"""The values of parameters that a model writes as plain text, as Qwen3.5 does.

The text 12345 is "12345" if the parameter's schema has a string, and 12345 if it has a number.
"""

import ast
import json
from contextlib import suppress
from functools import partial
from typing import Any

from nanovllm.server.errors import JsonObject

TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
# Without a type, any value is valid. Numbers and booleans then stay strings.
DEFAULT_TYPES = ["null", "array", "object", "string"]
COMBINATIONS = ("allOf", "anyOf", "oneOf")
# Written in any case, as the JSON that they mean.
WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
# What Python's parser and json.dumps raise. The parser's stack can overflow, too.
LITERAL_ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def write_value(text: str, schema: object, root: object) -> str:
    """Return the JSON of a value that was written as `text`.

    The first type of the schema that the text fits decides, but null comes before the others. A
    text that fits none is a str. `root` is the schema that references refer to.
    """
    constants: list[Any] = []
    types: list[str] = []
    for part in list_parts(schema, root):
        constants += part["enum"] if isinstance(part.get("enum"), list) else []
        constants += [part["const"]] if "const" in part else []
        kinds: Any = part.get("type")
        types += kinds if isinstance(kinds, list) else [kinds]
        types += ["null"] if part.get("nullable") is True else []  # as OpenAPI writes it
    types = [kind for kind in types if kind in ("null", "string", *TYPES)]
    if not types and not constants:
        types = DEFAULT_TYPES
    if text in constants or types == ["string"]:
        return json.dumps(text)
    value, written = _read_literal(text.strip())
    if (type(value), value) in [(type(constant), constant) for constant in constants]:
        return written
    is_null = text.strip() == "null" or (value is None and "string" not in types)
    if is_null and "null" in types:
        return "null"
    for kind in types:
        if kind == "string":
            break
        if _is_of_type(value, kind):
            return written
    return json.dumps(text)


def find_properties(schema: object) -> JsonObject:
    """Return the schemas of a function's parameters by name."""
    found: dict[str, list[object]] = {}
    for part in list_parts(schema, schema):
        properties = part.get("properties")
        for name, each in properties.items() if isinstance(properties, dict) else ():
            found.setdefault(name, []).append(each)
    return {name: {"anyOf": schemas} for name, schemas in found.items()}


def list_parts(schema: object, root: object) -> list[JsonObject]:
    """List a schema, those that it refers to, and those that it combines."""
    parts: list[JsonObject] = []
    references: set[str] = set()  # each is followed once, because they can be circular
    pending = [schema]
    while pending:
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        parts.append(part)
        for name in reversed(COMBINATIONS):
            combined = part.get(name)
            pending += reversed(combined) if isinstance(combined, list) else []
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            pending.append(_resolve(reference, root))
    return parts


def _resolve(reference: str, root: object) -> object:
    """Return the schema at a path such as #/$defs/color, or None."""
    path = reference.removeprefix("#").split("/")
    for name in path[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root if reference.startswith("#") else None


def _read_literal(text: str) -> tuple[Any, str]:
    """Return a value that is written in JSON or in Python, and its JSON. Others are a str."""
    text = WORDS.get(text.lower(), text)
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_reject), text  # as written, so numbers are exact
    for read in (partial(json.loads, strict=False), ast.literal_eval):
        with suppress(*LITERAL_ERRORS):
            value = read(text)
            return value, json.dumps(value, allow_nan=False)
    return text, json.dumps(text)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_of_type(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # as JSON Schema defines it
    return isinstance(value, TYPES.get(kind, ()))
