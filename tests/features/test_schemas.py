"""JSON schemas: llguidance gets them so that no text that it allows is invalid."""

import json
import random
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.features.structured_outputs import grammars, schemas
from nanovllm.features.structured_outputs.grammar_writer import (
    allow_reasoning,
    explain,
    make_grammar,
)
from nanovllm.features.structured_outputs.schemas import FORMATS, relax

TOKENIZER = LLTokenizer("byte")


def compile(**outputs):
    return compile_outputs(StructuredOutputsParams(**outputs))


def compile_outputs(outputs):
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(TOKENIZER, make_grammar(outputs), log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(explain(matcher.get_error()))
    return matcher


def allows(matcher, text):
    matcher = matcher.deep_copy()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def sample(matcher, rng, max_bytes=60):
    """A random text, or None if it becomes too long. Fails if the text cannot go on."""
    matcher = matcher.deep_copy()
    text = bytearray()
    while len(text) < max_bytes:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed and not matcher.is_error(), text
        byte = rng.choice(allowed)
        if byte >= 256:  # EOS
            return text.decode(errors="replace")
        matcher.consume_token(byte)
        text.append(byte)
        if matcher.is_stopped():
            return text.decode(errors="replace")
    return None


NUMBERS = [0, 1, -1, 2, 5, 10, -10, 99, 0.5, -0.5, 0.25, 1.5, -1.5, 2.75, 0.1, 12.5]


def make_number_schema(rng):
    schema = {"type": rng.choice(["integer", "number", ["integer", "null"]])}
    for key in rng.sample(sorted(schemas.BOUNDS - {"multipleOf"}), rng.randint(1, 2)):
        schema[key] = rng.choice(NUMBERS)
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 3, 0.5, 0.25, 0.1])
    if rng.random() < 0.3:
        key = rng.choice(sorted(schemas.BOUNDS - {"multipleOf"}))
        schema = {"allOf": [schema, {key: rng.choice(NUMBERS)}]}
    return schema


def test_numbers_obey_their_bounds():
    rng = random.Random(0)
    num_compiled = num_texts = 0
    for _ in range(300):
        schema = make_number_schema(rng)
        try:
            matcher = compile(json=schema)
        except ValueError:
            continue
        num_compiled += 1
        candidates = [sample(matcher, rng, 12) for _ in range(3)]
        candidates += [text for text in map(json.dumps, NUMBERS) if allows(matcher, text)]
        for text in filter(None, candidates):
            num_texts += 1
            is_fraction = "." in text and "multipleOf" in json.dumps(schema)
            if not is_fraction:  # jsonschema divides in floating point
                jsonschema.validate(json.loads(text), schema)
    assert num_compiled > 150
    assert num_texts > 500


LEAVES = [True, {"const": 1}, {"enum": ["a", "b"]}, {"type": "boolean"}, {"type": "null"}]
LEAVES += [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 2}]


def make_object_schema(rng, depth=0):
    def make_values(names, most):
        chosen = rng.sample(names, rng.randint(0, most))
        return {name: make_part(rng, depth + 1) for name in chosen}

    schema = {"type": "object", "properties": make_values(["a", "b", "ab"], 3)}
    schema["required"] = rng.sample(["a", "b", "c"], rng.randint(0, 2))
    schema["additionalProperties"] = rng.choice([False, False, True, {"const": 2}])
    schema["patternProperties"] = make_values(["^a$", "^(a|b)$", "^[ab]$", "^c", "b$"], 2)
    if rng.random() < 0.2:
        schema[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 3)
    return schema


def make_part(rng, depth):
    kind = rng.choice(["leaf", "leaf", "object", "anyOf", "allOf"])
    if kind == "leaf" or depth > 2:
        return rng.choice(LEAVES)
    if kind == "object":
        return make_object_schema(rng, depth)
    return {kind: [make_part(rng, depth + 1) for _ in range(2)]}


def test_objects_are_valid_and_never_stuck():
    rng = random.Random(0)
    num_texts = 0
    for _ in range(150):
        schema = make_object_schema(rng)
        try:
            matcher = compile(json=schema)
        except ValueError:
            continue
        for text in filter(None, [sample(matcher, rng) for _ in range(4)]):
            num_texts += 1
            jsonschema.validate(json.loads(text), schema)
    assert num_texts > 100


@pytest.mark.parametrize(
    "schema, name",
    [
        ({"const": 9007199254740993}, "const"),
        ({"const": 9007199254740993.5}, "const"),
        ({"const": 123456789.123456789}, "const"),
        ({"const": {"a": [-9007199254740993]}}, "const"),
        ({"enum": [1, 2**64]}, "enum"),
        ({"properties": {"a": {"items": {"minimum": 2**53 + 1}}}}, "minimum"),
        ({"maximum": 2**63 - 1}, "maximum"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum"),
        ({"type": "integer", "maximum": 2**60 + 1}, "maximum"),
        ({"type": "integer", "exclusiveMaximum": 2**63 - 1}, "exclusiveMaximum"),
        ({"exclusiveMaximum": 1e300}, "exclusiveMaximum"),
        ({"multipleOf": 10**30}, "multipleOf"),
        ('{"const": 1e999}', "const"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "exclusiveMinimum"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "exclusiveMaximum"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "exclusiveMinimum"),
        (
            {
                "properties": {"a": {"exclusiveMinimum": 0}},
                "patternProperties": {"^a": {"maximum": 0.5}},
            },
            "exclusiveMinimum",
        ),
        (
            {"$ref": "#/$defs/a", "exclusiveMinimum": 0, "$defs": {"a": {"maximum": 0.5}}},
            "exclusiveMinimum",
        ),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ('"text"', "a JSON schema"),
    ],
    ids=str,
)
def test_what_cannot_be_held_exactly_is_named(schema, name):
    with pytest.raises(ValueError, match=f"^{name} ") as caught:
        compile(json=schema)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    "schema, valid, invalid",
    [
        ({"const": 9007199254740992}, "9007199254740992", "9007199254740993"),
        ({"enum": [2**53 - 1, 0.1]}, "9007199254740991", "9007199254740990"),
        ({"type": "integer", "maximum": 2**53}, "9007199254740992", "9007199254740993"),
        ({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1), str(2**63)),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**62}, str(2**60), str(2**60 - 1)),
        ({"type": "integer", "minimum": 0.5}, "1", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"const": True}, "true", "1"),
        ({"properties": {"maximum": {"const": 1}}}, '{"maximum":1}', '{"maximum":2}'),
        ({"const": "\x01"}, '"\\u0001"', '"\\u0002"'),
        ({"properties": {"x": {"const": 1}}, "type": "object"}, '{"x":1}', '{"\\u0078":2}'),
        ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
        ({"type": "object"}, '{"a": 1}', '{"a":\n1}'),
    ],
    ids=str,
)
def test_texts_of_a_schema(schema, valid, invalid):
    matcher = compile(json=schema)
    assert allows(matcher, valid)
    assert not allows(matcher, invalid)


def test_names_do_not_take_exponential_time():
    """Python's re would take days to match the pattern."""
    pattern = "^" + 40 * "a?" + 40 * "a" + "$"
    properties = {num * "a": {"type": "integer"} for num in range(40, 81)}
    schema = {"type": "object", "properties": properties, "patternProperties": {pattern: {}}}
    assert allows(compile(json=schema), '{"' + 50 * "a" + '":1}')


def test_many_names_and_patterns_take_no_time():
    node = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    hard = {f"^({index}|{'.?' * 80})$": {} for index in range(100)}
    nodes = [{**node, "patternProperties": hard, "title": str(index)} for index in range(100)]
    with patch.object(schemas, "_may_begin") as check:
        schemas.write_schema({"anyOf": nodes}, {})
    assert check.call_count <= schemas.MAX_NAME_CHECKS


@pytest.mark.parametrize(
    "schema", [{"multipleOf": [2**53] * 70_000}, {"allOf": [{"multipleOf": 9e15}] * 70_000}]
)
def test_large_products_are_no_errors_of_python(schema):
    with pytest.raises(ValueError, match="multipleOf"):
        compile(json=schema)


def test_blank_lines_of_a_grammar_take_no_time():
    """A pattern that looks for EBNF in each of them would take minutes."""
    assert allows(compile(grammar=100_000 * "\n" + 'start: "a"'), "a")


def test_known_formats_are_those_of_llguidance():
    others = {"path", "binary", "password", "regex", "json-pointer", "idn-email", "uri-reference"}
    for name in FORMATS | others:
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        assert (LLMatcher.validate_grammar(grammar) == "") == (name in FORMATS), name


@pytest.mark.parametrize("pattern", ["^score$", "^(score|size)$", "^s(core|ize)$"])
def test_patterns_that_match_only_listed_names(pattern):
    """After a comma no name is left, so there must be no comma."""
    schema = {
        "type": "object",
        "properties": {"score": {"type": "integer"}, "size": {"maximum": 3}, "other": {}},
        "required": ["score", "size", "other"],
        "patternProperties": {pattern: {"minimum": 2}},
        "additionalProperties": False,
    }
    matcher = compile(json=schema)
    assert allows(matcher, '{"score":2,"size":3,"other":1}')
    assert not allows(matcher, '{"score":1,"size":3,"other":1}')
    assert not allows(matcher, '{"score":2,"size":3,"other":1')
    matcher.consume_tokens(list(b'{"score":2,"size":3,"other":1'))
    assert not matcher.try_consume_tokens(list(b","))


def test_patterns_that_match_only_required_names():
    schema = {"type": "object", "required": ["a", "b"], "additionalProperties": False}
    schema["patternProperties"] = {"^[ab]$": {"const": 1}}
    matcher = compile(json=schema)
    assert allows(matcher, '{"a":1,"b":1}')
    matcher.consume_tokens(list(b'{"a":1,"b":1'))
    assert not matcher.try_consume_tokens(list(b","))


def test_patterns_with_a_name_left_hold():
    schema = {"type": "object", "additionalProperties": False}
    schema |= {"properties": {"a": {"const": 1}}, "patternProperties": {"^[ab]$": {"minimum": 1}}}
    matcher = compile(json=schema)
    assert allows(matcher, '{"a":1,"b":2}')
    assert not allows(matcher, '{"b":0}')
    rng = random.Random(0)
    for _ in range(40):
        text = sample(matcher, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


def test_a_pattern_with_lookaround_leaves_the_other_types():
    """As of a Decimal of pydantic."""
    text = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    matcher = compile(json={"anyOf": [{"type": "number"}, text]})
    assert allows(matcher, "1.5")
    assert not allows(matcher, '"1.5"')
    with pytest.raises(ValueError, match="look-around"):
        compile(json=text)


def test_a_relaxed_schema_lacks_only_what_no_grammar_holds():
    path = {"type": "string", "format": "path", "maxLength": 3}
    day = {"type": "string", "format": "date"}
    names = {"uniqueItems": {"type": "array", "uniqueItems": True}, "format": path, "day": day}
    schema = {"properties": names, "required": ["day"], "default": {"format": "path"}}
    relaxed = relax(schema)
    assert relaxed["properties"] == {
        "uniqueItems": {"type": "array"},
        "format": {"type": "string", "maxLength": 3},
        "day": day,
    }
    assert relaxed["default"] == schema["default"]
    assert path["format"] == "path", "the client's schema stays as it is"
    compile(json=relaxed)
    for strict in (names["uniqueItems"], path):
        with pytest.raises(ValueError):
            compile(json=strict)
    for other in ({"not": {}}, {"contains": {}}, {"if": {}}, {"propertyNames": {}}):
        with pytest.raises(ValueError, match="unsupported keys"):
            compile(json=relax(other))


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" | "b" [0-9]+',
        "root ::= x # comment\nx ::= y+ | \"b\" z\ny ::= 'a'\nz ::= [0-9]".replace("'", '"'),
        'start: "a" | /b[0-9]+/',
        '%llguidance {}\nstart: A\nA: "a" | /b[0-9]/',
    ],
)
def test_grammars_in_lark_and_ebnf(grammar):
    for outputs in (
        StructuredOutputsParams(grammar=grammar),
        allow_reasoning(StructuredOutputsParams(grammar=grammar), is_open=False),
    ):
        matcher = compile_outputs(outputs)
        assert allows(matcher, "a")
        assert allows(matcher, "b7")
        assert not allows(matcher, "b")


THOUGHTS = "I think, <think> and think.\n</think>"


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    "outputs, text",
    [
        ({"json": {"type": "object"}}, '{"a": 1}'),
        ({"regex": "a/b+"}, "a/bb"),
        ({"choice": ["}", "</think>"]}, "}"),
        ({"grammar": 'start: "(" x ")" // }\nx: /x/'}, "(x)"),
    ],
)
def test_thoughts_come_before_a_constraint(is_open, outputs, text):
    matcher = compile_outputs(allow_reasoning(StructuredOutputsParams(**outputs), is_open))
    before = THOUGHTS if is_open else f"<think>{THOUGHTS}"
    for gap in ("", "\n", "\n\n"):
        assert allows(matcher, before + gap + text)
    assert not allows(matcher, f"{before}\n\n\n{text}")
    assert not allows(matcher, before)
    assert not allows(matcher, f"{before} Yes. {text}")
    assert not allows(matcher, THOUGHTS[:9])
    assert allows(matcher, text) == (not is_open)


@pytest.mark.parametrize(
    "outputs, message",
    [
        ({"regex": r"[^\s\S]"}, "no text matches"),
        ({"grammar": "start: a\na: /(/"}, 'line 2: invalid regex "(": unclosed group'),
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"not": {}}}, 'unsupported keys: ["not"]'),
        ({"json": {"type": "string", "pattern": "("}}, 'invalid regex "(": unclosed group'),
        (
            {"json": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}},
            "oneOf must have parts that exclude each other: use anyOf",
        ),
        ({"json": {"$ref": "http://x/y"}}, "$ref 'http://x/y' is not in the schema"),
        ({"grammar": 'start: "a" b\nb: c'}, 'line 2: unknown name: "c"'),
        ({"grammar": "no rules"}, """line 1: Expected token ':', found 'rule_name' (at "rules")"""),
    ],
    ids=str,
)
def test_an_error_is_about_what_the_client_wrote(outputs, message):
    for each in (
        StructuredOutputsParams(**outputs),
        allow_reasoning(StructuredOutputsParams(**outputs), is_open=True),
    ):
        if message == "no text matches" and each.grammar is not None:
            continue  # thoughts match
        with pytest.raises(ValueError) as caught:
            compile_outputs(each)
        assert str(caught.value) == message


def test_null_fields_are_not_given():
    value = {"json": None, "json_object": None, "regex": "a", "choice": None, "unknown": None}
    value["disable_any_whitespace"] = False
    params = SamplingParams(structured_outputs=value)
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="exactly one"):
        SamplingParams(structured_outputs={"json": None})
    with pytest.raises(ValueError, match="unknown option 'disable_any_whitespace'"):
        SamplingParams(structured_outputs={"regex": "a", "disable_any_whitespace": True})


def test_tags_are_text_even_if_the_tokenizer_calls_them_special():
    """As in some checkpoints of reasoning models."""
    from transformers import AutoTokenizer

    from nanovllm import DEMO_MODEL

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<other>"]})
    texts = grammars.TokenTexts(tokenizer, 900, frozenset({1}))
    assert tokenizer.convert_tokens_to_ids("<think>") not in texts.special_token_ids
    assert tokenizer.convert_tokens_to_ids("<other>") in texts.special_token_ids
