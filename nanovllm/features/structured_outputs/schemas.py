"""Prepares JSON schemas for llguidance, so that all text that it allows is valid.

llguidance rejects a strict schema with a key that it has no grammar for, by the name of the key. In
other schemas it ignores such a key, which allows more text. The same holds here for a pattern and
for a large bound that no grammar holds. Any other number that llguidance would round is an error.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from nanovllm.features.structured_outputs.patterns import convert_pattern
from nanovllm.utils.checks import invalid, naming, show

Schema = dict[str, Any]

# Keys with a schema for each of some names.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
# Keys whose values contain no schemas.
VALUES = ("const", "enum", "default", "examples", "x-guidance")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Values that constrain nothing, of keys that llguidance has no grammar for. zod writes the first
# one for every record.
NEUTRAL = {"propertyNames": {"type": "string"}, "uniqueItems": False}
MAX_INTEGER = 2**53  # up to here, float64 holds all integers
MAX_DIGITS = 15  # digits of other numbers that llguidance reads without rounding
MIN_EXPONENT = -22  # powers of ten that float64 holds exactly end at 10^22
# The escapes that strings may contain. Without \u, because "\u0061" would be a second spelling of
# the name "a".
ESCAPES = 'bfnrt"\\'
# A control character that is written with \u only: in a text, or in a pattern. \x{0} begins classes
# that have no control character, and a range may begin with any.
CONTROL = re.compile(
    r"\\u00(?:[01]|7f)"
    r"|(?:(?<!\[\\)(?<!\[\^\\)\\x\{0\}|\\x\{(?:[1-7BEF]|1[0-9A-F]|7F)\})(?!-)"
)


def write_schema(schema: Schema | str, options: Any, is_strict: bool = True) -> str:
    """Return a schema in JSON with `options` of llguidance, which those of the schema override.

    Raises ValueError for what is not held exactly, RecursionError for deep nesting.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    schema = json.loads(text, parse_float=_read_float)
    if not isinstance(schema, dict):
        raise invalid("a JSON schema", f"must be an object, not {show(schema)}")
    for node in _list_nodes(schema):
        if not is_strict:
            _drop_large_bounds(node)
        _check_numbers(node)
        _convert(node, is_strict)
    if CONTROL.search(json.dumps(schema)) is None:
        options = {"json_allowed_escapes": ESCAPES, **options}
    options = {"lenient": not is_strict, **options}
    schema["x-guidance"] = {**options, **schema.get("x-guidance", {})}
    return json.dumps(schema)


def _read_float(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number  # "minLength": 2.0 is valid


def _list_nodes(schema: Any) -> Iterator[Schema]:
    """Yield all schemas within a schema that are dicts, itself included."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            yield node
            for key, value in node.items():
                if key in MAPS and isinstance(value, dict):
                    stack += value.values()
                elif key not in VALUES:
                    stack.append(value)


def _drop_large_bounds(node: Schema) -> None:
    """Drop bounds that no grammar holds, such as those of 64-bit integers and 32-bit floats."""
    for key in BOUNDS:
        bound = node.get(key)
        if isinstance(bound, (int, float)) and abs(bound) > MAX_INTEGER:
            del node[key]


def _check_numbers(node: Schema) -> None:
    for key in ("const", "enum", "multipleOf", *BOUNDS):
        with naming(key, ValueError):
            text = json.dumps(node.get(key), allow_nan=False)
            json.loads(text, parse_int=_check_number, parse_float=_check_number)


def _check_number(text: str) -> None:
    number = Decimal(text)
    _, digits, exponent = number.as_tuple()
    is_short = len(digits) <= MAX_DIGITS and int(exponent) >= MIN_EXPONENT
    # No float above MAX_INTEGER has decimal places.
    if abs(number) > MAX_INTEGER or not (is_short or number == int(number)):
        meaning = f"integers up to 2**53, or numbers of up to {MAX_DIGITS} digits"
        raise ValueError(f"must have {meaning}, not {text:.80}")


def _convert(node: Schema, is_strict: bool) -> None:
    """Convert the patterns of a node, and remove what llguidance need not see."""
    node.pop("$schema", None)  # llguidance would look for a dialect that it does not know
    for key, value in NEUTRAL.items():
        if node.get(key) == value:
            del node[key]
    try:
        if isinstance(node.get("pattern"), str):
            node["pattern"] = convert_pattern(node["pattern"])
        with naming("patternProperties", ValueError):
            _convert_names(node)
    except ValueError:
        if is_strict:
            raise
        # Names that match a dropped pattern are no additional ones.
        for key in ("pattern", "patternProperties", "additionalProperties"):
            node.pop(key, None)


def _convert_names(node: Schema) -> None:
    names = node.get("patternProperties")
    if not isinstance(names, dict):
        return
    schemas = {convert_pattern(name): schema for name, schema in names.items()}
    if len(schemas) < len(names):
        raise ValueError("two patterns match the same names: combine their schemas")
    node["patternProperties"] = schemas
