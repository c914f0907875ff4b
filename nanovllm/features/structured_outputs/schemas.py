"""Prepares JSON schemas for llguidance, so that all text that it allows is valid.

llguidance rounds large numbers, misreads some exclusive bounds, and can wait for a property name
that cannot come. A schema that it cannot follow exactly is rejected with an error that names the
key.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from typing import Any

from nanovllm.utils.checks import invalid, show

Schema = dict[str, Any]

# Keys with a schema for each of some names.
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keys whose values contain no schemas.
VALUES = ("const", "enum", "default", "examples", "x-guidance")
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
COMBINATIONS = {"$ref", "allOf", "anyOf", "oneOf"}
MAX_INTEGER = 2**53  # up to here, float64 holds all integers
MAX_DIGITS = 15  # digits of other numbers that llguidance reads without rounding
MIN_EXPONENT = -22  # powers of ten that float64 holds exactly end at 10^22
MAX_MULTIPLE = 2**32  # limit on the product of several multipleOf
MAX_NAME_CHECKS = 100  # because each takes a millisecond
# Patterns of names with no special characters but those of alternatives, such as ^(a|b)$.
FINITE_PATTERN = re.compile(r"\^[\w\[\]()|?:,. /-]{0,200}\$")
LOOKAROUND = re.compile(r"\(\?<?[=!]")
# The escapes that strings may contain. Without \u, because "\u0061" would be a second spelling of
# the name "a".
ESCAPES = 'bfnrt"\\'
# The values of `format` that llguidance has a grammar for.
FORMATS = frozenset(
    "date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split()
)


def write_schema(schema: Schema | str, options: Any) -> str:
    """Return a schema in JSON with `options` of llguidance, which those of the schema override.

    Raises ValueError for what llguidance does not hold exactly, RecursionError for deep nesting.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise invalid("a JSON schema", f"must be an object, not {show(schema)}")
    nodes = list(_list_nodes(schema))
    for node in nodes:
        _check_numbers(node)
        _check_num_properties(node)
        _drop_lookaround(node)
    if any(map(_combines_numbers, nodes)):
        _check_bounds(nodes)  # bounds of different nodes can apply to the same number
    else:
        for node in nodes:
            _check_bounds([node])
    _drop_full_patterns(nodes)
    text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    if "\\u00" not in text:  # no control character must be written
        options = {"json_allowed_escapes": ESCAPES, **options}
    schema["x-guidance"] = {**options, **schema.get("x-guidance", {})}
    return json.dumps(schema)


def relax(schema: Schema) -> Schema:
    """Return a copy of a schema that is not strict, without keys that may be ignored.

    They are `uniqueItems` and an unknown `format`, which JSON Schema calls an annotation.
    """
    schema = json.loads(json.dumps(schema))
    for node in _list_nodes(schema):
        node.pop("uniqueItems", None)
        name = node.get("format")
        if isinstance(name, str) and name not in FORMATS:
            del node["format"]
    return schema


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


def _check_numbers(node: Schema) -> None:
    for key in ("const", "enum", *sorted(BOUNDS)):
        for number in _list_numbers(node.get(key)):
            is_bound = node.get("type") == "integer" and key in ("minimum", "maximum")
            if not (_is_exact(number) or (is_bound and _is_exact_bound(key, number))):
                meaning = f"integers up to 2**53, other numbers of up to {MAX_DIGITS} digits"
                raise invalid(key, f"must have {meaning}, not {show(number)}")


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
    is_held = abs(number) < 2**63 and number == float(number)
    return is_held or (key == "maximum" and number == 2**63 - 1)


def _combines_numbers(node: Schema) -> bool:
    parts = node.get("allOf")
    has_parts = (isinstance(parts, list) and len(parts) > 1) or "patternProperties" in node
    return has_parts or bool(BOUNDS & node.keys() and COMBINATIONS & node.keys())


def _check_bounds(nodes: list[Schema]) -> None:
    """Require what llguidance gets right of the bounds that some nodes may share.

    It takes an exclusive bound that is an integer, such as 0, for an inclusive one if the other
    bound has the same integer part, such as 0.5.
    """
    limits: dict[str, list[float]] = {key: [] for key in BOUNDS}
    for node in nodes:
        for key in BOUNDS:
            # Until draft 4, exclusiveMinimum was a bool beside minimum.
            is_exclusive = node.get(key) is True
            value = node.get(key.replace("exclusiveM", "m")) if is_exclusive else node.get(key)
            limits[key] += _list_numbers(value)
    lows = limits["minimum"] + limits["exclusiveMinimum"]
    highs = limits["maximum"] + limits["exclusiveMaximum"]
    for key, sign, others in (("exclusiveMinimum", 1, highs), ("exclusiveMaximum", -1, lows)):
        integer_parts = {int(other) for other in others if other != int(other)}
        for bound in limits[key]:
            if bound in integer_parts and sign * bound >= 0:
                problem = "and a bound with the same integer part, here or in another part,"
                raise invalid(key, f"{bound} {problem} are unsupported")
    # llguidance multiplies them in integers of 32 bits, in units of the smallest decimal place.
    factors = [Decimal(repr(factor)) for factor in limits["multipleOf"]]
    if 0 in factors:
        raise invalid("multipleOf", "must be above 0")
    unit = Decimal(10) ** min([int(each.as_tuple().exponent) for each in factors], default=0)
    if math.prod([float(factor / unit) for factor in factors]) >= MAX_MULTIPLE:
        raise invalid("multipleOf", "must be below 2**32, and so must the product of several")


def _check_num_properties(node: Schema) -> None:
    """Reject a minProperties that needs two unlisted names. They could be the same name twice."""
    minimum = node.get("minProperties")
    required = node.get("required")
    most = 1 + len(required) if isinstance(required, list) else 1
    is_open = "patternProperties" in node or node.get("additionalProperties") is not False
    if is_open and isinstance(minimum, int) and minimum > most:
        raise invalid(
            "minProperties", f"must be at most {most} here, because a name could come twice"
        )


def _drop_lookaround(node: Schema) -> None:
    """Drop alternatives with lookaround, which no grammar can hold. Pydantic's Decimal has one."""
    parts = node.get("anyOf")
    if isinstance(parts, list):
        kept = [part for part in parts if not _has_lookaround(part)]
        node["anyOf"] = kept or parts


def _has_lookaround(part: Any) -> bool:
    return isinstance(part, dict) and bool(LOOKAROUND.search(str(part.get("pattern"))))


def _drop_full_patterns(nodes: list[Schema]) -> None:
    """Drop each pattern that matches only listed names, and add its schema to theirs.

    After a comma, llguidance would wait for a name that does not exist.
    """
    num_checks = 0
    for node in nodes:
        patterns = node.get("patternProperties", {})
        properties = node.get("properties", {})
        required = node.get("required", [])
        is_valid = isinstance(patterns, dict) and isinstance(properties, dict)
        if not is_valid or not isinstance(required, list):
            continue
        names = list(dict.fromkeys([*properties, *map(str, required)]))
        num_checks += len(patterns) * (1 + len(names))
        if num_checks > MAX_NAME_CHECKS:
            break
        for pattern, schema in list(patterns.items()):
            # Others match more names than a schema lists, or take long to compile.
            if not FINITE_PATTERN.fullmatch(pattern):
                continue
            matching = _match_names(pattern, names)
            for name in matching:
                properties[name] = {"allOf": [properties.get(name, True), schema]}
            if matching:
                node["properties"] = properties
                del patterns[pattern]


def _match_names(pattern: str, names: list[str]) -> list[str]:
    """Return those of `names` that a pattern matches, or none if it matches other names, too."""
    zero = {"const": 0}
    schema = {
        "type": "object",
        "patternProperties": {pattern: zero},
        "additionalProperties": False,
    }
    listed = {**schema, "properties": dict.fromkeys(names, zero), "required": names}
    all_names = json.dumps(dict.fromkeys(names, 0), ensure_ascii=False)
    if _may_begin(listed, all_names[:-1] + ', "'):
        return []
    matching: list[str] = []
    for name in names:
        if _may_begin(schema, json.dumps({name: 0}, ensure_ascii=False)):
            matching.append(name)
    return matching


def _may_begin(schema: Schema, text: str) -> bool:
    """Match with llguidance. Python's re can take exponential time, and holds the GIL."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = LLMatcher(_make_byte_tokenizer(), grammar, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens)


@cache
def _make_byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
