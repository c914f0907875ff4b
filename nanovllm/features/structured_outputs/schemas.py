"""Prepares JSON schemas for llguidance, so that all text that it allows is valid.

llguidance rejects a strict schema with a key that it has no grammar for, by the name of the key. In
other schemas it ignores such a key, which allows more text. The same holds here for a pattern or a
bound that it would not hold exactly. A value that it would round is an error in all schemas.
"""

import json
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
# Keys whose values are converted or checked. Those of FREE are dropped if no grammar holds them and
# the schema is not strict, which allows more text.
FREE = ("pattern", "patternProperties", *BOUNDS)
EXACT = ("const", "enum", "multipleOf")
# Values that constrain nothing, of keys that llguidance has no grammar for. zod writes the first
# one for every record.
NEUTRAL = {"propertyNames": {"type": "string"}, "uniqueItems": False}
MAX_INTEGER = 2**53  # up to here, float64 holds all integers
MAX_DIGITS = 15  # digits of other numbers that llguidance reads without rounding
MIN_EXPONENT = -22  # powers of ten that float64 holds exactly end at 10^22
# The escapes that strings may contain. Without \u, because "\u0061" would be a second spelling of
# the name "a".
ESCAPES = 'bfnrt"\\'


def write_schema(schema: Schema | str, options: Any, is_strict: bool = True) -> str:
    """Return a schema in JSON with `options` of llguidance, which those of the schema override.

    Raises ValueError for what is not held exactly, RecursionError for deep nesting.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise invalid("a JSON schema", f"must be an object, not {show(schema)}")
    for node in _list_nodes(schema):
        _convert(node, is_strict)
    text = json.dumps(schema, ensure_ascii=False)
    if "\\u00" not in text:  # no control character must be written
        options = {"json_allowed_escapes": ESCAPES, **options}
    options = {"lenient": not is_strict, **options}
    schema["x-guidance"] = {**options, **schema.get("x-guidance", {})}
    return json.dumps(schema)


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


def _convert(node: Schema, is_strict: bool) -> None:
    """Convert the values of a node to what llguidance holds exactly."""
    node.pop("$schema", None)  # llguidance would look for a dialect that it does not know
    for key, value in NEUTRAL.items():
        if node.get(key) == value:
            del node[key]
    for key in [key for key in FREE + EXACT if key in node]:
        try:
            with naming(key, ValueError):
                node[key] = _convert_value(key, node[key])
        except ValueError:
            if is_strict or key in EXACT:
                raise
            del node[key]
            if key == "patternProperties":  # names that match it are no additional ones
                node.pop("additionalProperties", None)


def _convert_value(key: str, value: Any) -> Any:
    match key, value:
        case "pattern", str():
            return convert_pattern(value)
        case "patternProperties", dict():
            schemas = {convert_pattern(name): schema for name, schema in value.items()}
            if len(schemas) < len(value):
                raise ValueError("two patterns match the same names: combine their schemas")
            return schemas
    if key in BOUNDS + EXACT:
        text = json.dumps(value, allow_nan=False)
        json.loads(text, parse_int=_check_number, parse_float=_check_number)
    return value


def _check_number(text: str) -> None:
    number = Decimal(text)
    _, digits, exponent = number.as_tuple()
    is_short = len(digits) <= MAX_DIGITS and int(exponent) >= MIN_EXPONENT
    # No float above MAX_INTEGER has decimal places.
    if abs(number) > MAX_INTEGER or not (is_short or number == int(number)):
        meaning = f"integers up to 2**53, or numbers of up to {MAX_DIGITS} digits"
        raise ValueError(f"must have {meaning}, not {text:.80}")
