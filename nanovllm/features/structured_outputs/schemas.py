"""Prepares JSON schemas for llguidance, so that all text that it allows is valid.

One rule holds for all keys. A strict schema with a key that llguidance does not hold is rejected
with an error that names the key. Otherwise the key is dropped, which allows more text. A number
that llguidance would round is an error in both cases. Other keys are annotations.
"""

import json
import warnings
from collections.abc import Callable, Iterator
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
# Keys of any draft that llguidance has no grammar for.
UNHELD = """
    not if then else contains minContains maxContains uniqueItems unevaluatedItems propertyNames
    dependencies dependentRequired dependentSchemas unevaluatedProperties
    $dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef
""".split()
# Values of these that constrain nothing. zod writes the first one for every record.
NEUTRAL = {"propertyNames": {"type": "string"}, "uniqueItems": False}
# The values of `format` that llguidance has a grammar for.
FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split()
)
MAX_INTEGER = 2**53  # up to here, float64 holds all integers
MAX_BOUND = 2**63  # bounds are below, because llguidance has integers of 64 bits
MAX_DIGITS = 15  # digits of other numbers that llguidance reads without rounding
MIN_EXPONENT = -22  # powers of ten that float64 holds exactly end at 10^22
# The escapes that strings may contain. Without \u, because "\u0061" would be a second spelling of
# the name "a".
ESCAPES = 'bfnrt"\\'


def write_schema(schema: Schema | str, options: Any, is_strict: bool = True) -> str:
    """Return a schema in JSON with `options` of llguidance, which those of the schema override.

    Raises ValueError for what llguidance does not hold exactly, RecursionError for deep nesting.
    If it is not strict, a key that llguidance does not hold is dropped.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise invalid("a JSON schema", f"must be an object, not {show(schema)}")
    for node in _list_nodes(schema):
        _hold(node, is_strict)
    text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    if "\\u00" not in text:  # no control character must be written
        options = {"json_allowed_escapes": ESCAPES, **options}
    # "lenient" makes anyOf of oneOf, and drops keys that are not held in combinations of nodes.
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


def _hold(node: Schema, is_strict: bool) -> None:
    """Reject or drop what llguidance does not hold of the keys of one node."""
    node.pop("$schema", None)  # llguidance would look for a dialect that it does not know
    for key, check in CHECKS.items():
        try:
            if key in node:
                check(node, key)
        except ValueError:
            if is_strict:
                raise
            message = f"{key} of a JSON schema is ignored, because no grammar holds it"
            warnings.warn(message, RuntimeWarning, stacklevel=2)  # shown once
            del node[key]
            if key == "patternProperties":  # whose names are no additional ones
                node.pop("additionalProperties", None)
    for key in ("const", "enum", "multipleOf", *BOUNDS):
        for number in _list_numbers(node.get(key)):
            is_integer = node.get("type") in ("integer", ["integer", "null"])
            if not (_is_exact(number) or (is_integer and _is_exact_bound(key, number))):
                meaning = f"integers up to 2**53, other numbers of up to {MAX_DIGITS} digits"
                raise invalid(key, f"must have {meaning}, not {show(number)}")


def _list_numbers(value: Any) -> Iterator[float]:
    """Yield the numbers within a value, which are no bools."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            yield item


def _is_exact(number: float) -> bool:
    if not abs(number) <= MAX_INTEGER:  # or NaN. No larger float has decimal places
        return False
    if number == int(number):
        return True
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return len(digits) <= MAX_DIGITS and int(exponent) >= MIN_EXPONENT


def _is_exact_bound(key: str, number: float) -> bool:
    """Return whether llguidance holds a large bound of integers.

    It converts them from float64 to integers of 64 bits, and the largest of these comes out right.
    """
    is_bound = key in ("minimum", "maximum")
    return is_bound and (number == float(number) or (key == "maximum" and number == 2**63 - 1))


# --- What llguidance holds of a key. These functions raise ValueError for the rest.


def _reject(node: Schema, key: str) -> None:
    if node[key] != NEUTRAL.get(key):
        raise invalid(key, "is a key that no grammar holds: leave it out")
    del node[key]


def _check_format(node: Schema, key: str) -> None:
    can_be_text = "string" in str(node.get("type", "string"))
    name = node[key]
    if can_be_text and isinstance(name, str) and name not in FORMATS:
        raise invalid(key, f"must be one of {', '.join(sorted(FORMATS))}, not {show(name)}")


def _convert_pattern(node: Schema, key: str) -> None:
    if isinstance(node[key], str):
        node[key] = convert_pattern(node[key])


def _convert_names(node: Schema, key: str) -> None:
    if isinstance(node[key], dict):
        with naming(key, ValueError):
            schemas = {convert_pattern(name): schema for name, schema in node[key].items()}
        if len(schemas) < len(node[key]):
            raise invalid(key, "has two patterns for the same names: combine their schemas")
        node[key] = schemas


def _check_bound(node: Schema, key: str) -> None:
    for number in _list_numbers(node[key]):
        if not abs(number) < MAX_BOUND:
            raise invalid(key, f"must be within ±2**63, not {show(number)}")


def _check_exclusive_bound(node: Schema, key: str) -> None:
    """Reject an integer, such as 0, if another bound has the same integer part, such as 0.5.

    llguidance would take it for an inclusive bound.
    """
    _check_bound(node, key)
    # Until draft 4, exclusiveMinimum was a bool beside minimum.
    inclusive = key.replace("exclusiveM", "m")
    bound = node.get(inclusive) if node[key] is True else node[key]
    for other in _list_numbers([node.get(other_key) for other_key in BOUNDS]):
        if int(other) == bound != other:
            node.setdefault(inclusive, bound)  # remains if this key is dropped
            raise invalid(key, f"{bound} and a bound with the same integer part are unsupported")


def _check_num_properties(node: Schema, key: str) -> None:
    """Require a number of properties that llguidance can count.

    Of the names that are listed but not required, it can tell one from none. Of unlisted names, the
    second one could be the first one again.
    """
    if not isinstance(node[key], int):
        return
    required = node.get("required", [])
    num_others = node[key] - len(required)
    is_closed = node.get("additionalProperties") is False and "patternProperties" not in node
    has_optional = not set(required).issuperset(node.get("properties", {}))
    if key == "maxProperties":
        is_held = not has_optional or (is_closed and num_others == 1)
    else:
        is_held = num_others <= 0 or (num_others == 1 and (is_closed or not has_optional))
    if not is_held:
        raise invalid(key, f"{node[key]} is not held beside these properties: leave it out")


CHECKS: dict[str, Callable[[Schema, str], None]] = {
    **dict.fromkeys(UNHELD, _reject),
    "minimum": _check_bound,
    "maximum": _check_bound,
    "exclusiveMinimum": _check_exclusive_bound,
    "exclusiveMaximum": _check_exclusive_bound,
    "format": _check_format,
    "pattern": _convert_pattern,
    "patternProperties": _convert_names,
    "maxProperties": _check_num_properties,
    "minProperties": _check_num_properties,
}
