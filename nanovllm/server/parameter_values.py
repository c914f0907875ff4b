"""The values of parameters that a model writes as plain text, as Qwen3.5 does.

The text 12345 is "12345" if the parameter's schema has a string, and 12345 if it has a number.
"""

import ast
import json
from contextlib import suppress
from typing import Any

from nanovllm.server.errors import JsonObject
from nanovllm.utils.helpers import as_list

TYPES: dict[Any, tuple[type, ...]] = {
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
# Without a type, any value is valid. Numbers and booleans then stay strings.
DEFAULT_TYPES = ["null", "array", "object"]
JSON = json.JSONDecoder(strict=False)  # small models write newlines in strings
# What the parsers and json.dumps raise. The stack of Python's parser can overflow, too.
ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def read_value(text: str, schema: object, root: object) -> Any:
    """Return the value that was written as `text`, in JSON or in Python.

    The first type of the schema that the text fits decides, but null comes before the others. A
    text that fits none is a str. `root` is the schema that references refer to.
    """
    constants: list[Any] = []
    types: list[Any] = []
    for part in list_parts(schema, root):
        constants += as_list(part.get("enum"))
        constants += [part["const"]] if "const" in part else []
        types += as_list(part.get("type"))
    value = _read_literal(text)
    if text in constants:
        return text
    if value in constants or (value is None and "null" in types):
        return value
    for kind in types if types or constants else DEFAULT_TYPES:
        if kind == "string":
            break
        if _is_of_type(value, kind):
            return value
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)  # 3.0 is an integer of JSON Schema
    return text


def find_properties(schema: object) -> JsonObject:
    """Return the schemas of a function's parameters by name."""
    found: JsonObject = {}
    for part in list_parts(schema, schema):
        properties = part.get("properties")
        for name, each in properties.items() if isinstance(properties, dict) else ():
            found.setdefault(name, {"anyOf": []})["anyOf"].append(each)
    return found


def list_parts(schema: object, root: object) -> list[JsonObject]:
    """List a schema, those that it refers to, and those that it combines."""
    parts: dict[int, JsonObject] = {}  # by identity, because references can be circular
    pending = [schema]
    for part in pending:  # which grows
        if not isinstance(part, dict) or id(part) in parts:
            continue
        parts[id(part)] = part
        for name in ("allOf", "anyOf", "oneOf"):
            pending += as_list(part.get(name))
        pending.append(_resolve(part.get("$ref"), root))
    return list(parts.values())


def _resolve(reference: object, root: object) -> object:
    """Return the schema at a path such as #/$defs/color, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for name in reference.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _read_literal(text: str) -> Any:
    """Return a value that is written in JSON or in Python. Others are a str."""
    for read in (JSON.decode, ast.literal_eval):
        with suppress(*ERRORS):
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
            return value
    return text


def _is_of_type(value: object, kind: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(kind, str) and isinstance(value, TYPES.get(kind, ()))
