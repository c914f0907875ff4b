"""The schema of a parameter decides which value its text is."""

import pytest

from nanovllm.server.parameter_values import read_value

DEEP = {"type": "string"}
for _ in range(2000):
    DEEP = {"anyOf": [DEEP]}
DEFINITIONS = {
    "$defs": {
        "text": {"type": "string"},
        "zip/code": {"$ref": "#/$defs/text"},
        "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"type": "string"}]},
    }
}
STRING = {"type": "string"}
NULLABLE = {"anyOf": [STRING, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema, text, expected",
    [
        (STRING, "12345", "12345"),
        (STRING, " a\n", " a\n"),
        ({"$ref": "#/$defs/zip~1code"}, "12345", "12345"),
        ({"$ref": "#/$defs/circle"}, "12345", "12345"),
        ({"$ref": "#/$defs/missing/one"}, "12345", "12345"),
        ({"$ref": "other.json#/$defs/text"}, "[1]", [1]),
        ({"allOf": [{"$ref": "#/$defs/text"}], "description": "zip"}, "12345", "12345"),
        (DEEP, "12345", "12345"),
        ({"const": "12345"}, "12345", "12345"),
        ({"enum": ["1", "True"]}, "True", "True"),
        ({"enum": [1, 2, None, True]}, "True", True),
        ({"enum": ["none", "nil"]}, "none", "none"),
        ({"enum": [1, 2.5]}, "2.5", 2.5),
        # Without a type: as in vLLM, but arrays, objects and null are hardly meant as text.
        ({}, "12345", "12345"),
        ({"description": "any"}, "null", None),
        (None, "[2, {}]", [2, {}]),
        ({"type": ["unknown", []], "anyOf": 3, "enum": "ab"}, "a", "a"),
        ({"enum": [{}], "const": None}, "{}", {}),
        ({"const": [1, 2]}, "[1, 2]", [1, 2]),
        ({"const": None}, "None", None),
        (NULLABLE, "null", None),
        (NULLABLE, "true", "true"),
        ({"type": ["string", "array"]}, "[]", "[]"),
        ({"type": ["array", "string"]}, "[]", "[]"),
        ({"type": ["integer", "string"]}, "007", "007"),
        (NULLABLE, "None", None),
        (STRING, "null", "null"),
        ({"oneOf": [{"type": "integer"}, STRING]}, "five", "five"),
        ({"type": "boolean"}, "\ntrue ", True),
        ({"type": "integer"}, "+5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "9007199254740993", 9007199254740993),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
        ({"type": "number"}, "+.5", 0.5),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "5.5", 5.5),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "['a', True, None, (1,)]", ["a", True, None, [1]]),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "array"}, "[" * 1000, "[" * 1000),
        ({"type": "object"}, "{'a': {'b': 1}}", {"a": {"b": 1}}),
        ({"type": "object"}, "{[]: 1}", "{[]: 1}"),
    ],
)
def test_the_schema_decides(schema, text, expected):
    value = read_value(text, [schema], DEFINITIONS)
    assert value == expected
    assert type(value) is type(expected)


def test_all_schemas_of_a_parameter_decide():
    assert read_value("12345", [{"type": "integer"}, STRING], {}) == "12345"
    assert read_value("null", [STRING, {"type": "null"}], {}) is None
    assert read_value("12345", [None, 5], {}) == "12345"


def test_references_are_followed_once():
    """Each level doubles the paths."""
    levels = {f"level{i}": {"anyOf": [{"$ref": f"#/level{i + 1}"}] * 2} for i in range(60)}
    assert read_value("1", [{"$ref": "#/level0"}], {**levels, "level60": STRING}) == "1"
