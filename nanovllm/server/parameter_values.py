"""The values of parameters that a model writes as plain text, as Qwen3.5 does.

The text 12345 is "12345" if the schema of its parameter allows a string, else a number.
"""

import ast
import json
from contextlib import suppress
from typing import Any

from nanovllm.server.errors import JsonObject
from nanovllm.utils.helpers import as_list

# Types of JSON schemas.
TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
JSON = json.JSONDecoder(strict=False)  # small models write newlines in strings
# What the parsers and json.dumps raise. The stack of Python's parser can overflow, too.
ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


def read_value(text: str, schemas: list[object], root: object) -> Any:
    """Return the value that was written as `text`, in JSON or in Python.

    Return the text itself if a schema allows strings, or if none allows the value. null comes
    before strings. Without a type, null, arrays and objects are read, and all else stays text.
    `root` is the schema that references refer to.
    """
    types: list[Any] = []
    for part in list_parts(schemas, root):
        types += as_list(part.get("type"))
        constants = list(as_list(part.get("enum")))
        if "const" in part:
            constants.append(part["const"])
        types += [TYPES[type(constant)] for constant in constants]
    value = _read_literal(text)
    kind = TYPES[type(value)]
    types = types or ["null", "array", "object"]
    if "string" in types and value is not None:
        return text
    if kind == "number" and "integer" in types:
        return int(value) if value % 1 == 0 else value  # 3.0 is an integer
    return value if kind in types else text


def list_parts(schemas: list[object], root: object) -> list[JsonObject]:
    """List schemas, those that they refer to, and those that they combine."""
    parts: dict[int, JsonObject] = {}  # by identity, because references can be circular
    pending = list(schemas)
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
            return json.loads(json.dumps(read(text.strip()), allow_nan=False))
    return text
