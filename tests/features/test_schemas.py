"""JSON schemas: llguidance gets them so that no text that it allows is invalid."""

import json
import re

import jsonschema
import pytest
from grammar_helpers import allows, compile_grammar

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.features.structured_outputs import grammars
from nanovllm.features.structured_outputs.grammar_writer import allow_reasoning, make_grammar
from nanovllm.features.structured_outputs.schemas import write_schema


def compile(**outputs):
    return compile_outputs(StructuredOutputsParams(**outputs))


def compile_outputs(outputs):
    return compile_grammar(make_grammar(outputs))


@pytest.mark.parametrize(
    "schema, name",
    [
        ({"const": 9007199254740993}, "const"),
        ({"const": 123456789.123456789}, "const"),
        ({"enum": [1, 2**64]}, "enum"),
        ({"multipleOf": 10**30}, "multipleOf"),
        ('"text"', "a JSON schema"),
    ],
    ids=str,
)
def test_a_number_that_would_be_rounded_is_named(schema, name):
    for is_strict in (True, False):
        with pytest.raises(ValueError, match=rf"^{name}\b") as caught:
            write_schema(schema, {}, is_strict)
        assert len(str(caught.value)) < 120


CLOSED = {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema, valid, invalid",
    [
        ({"const": 9007199254740992}, "9007199254740992", "9007199254740993"),
        ({"enum": [2**53 - 1, 0.1]}, "9007199254740991", "9007199254740990"),
        ({"type": "integer", "minimum": 0.5}, "1", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", "0"),
        ({"const": "\x01"}, '"\\u0001"', '"\\u0002"'),
        # Control characters, whose escapes other schemas do not allow.
        ({"enum": ["a\x7fb"]}, '"a\\u007fb"', '"ab"'),
        ({"pattern": r"^\x1b\[0m$", "type": "string"}, '"\\u001b[0m"', '"[0m"'),
        ({"pattern": "^\x1b$", "type": "string"}, '"\\u001b"', '""'),
        ({"pattern": r"^[\x7f]a\x01$", "type": "string"}, '"\\u007fa\\u0001"', '"a"'),
        ({"pattern": r"^\0$", "type": "string"}, '"\\u0000"', '""'),
        ({"properties": {"\x1f": {"const": 1}}, "required": ["\x1f"]}, '{"\\u001f":1}', '{"":1}'),
        ({"pattern": r"^[^\n]\t.\w$", "type": "string"}, r'"a\tba"', r'"\u0001\tba"'),
        ({"minLength": 2.0, "type": "string"}, '"ab"', '"a"'),
        ({"properties": {"x": {"const": 1}}, "type": "object"}, '{"x":1}', '{"\\u0078":2}'),
        ({**CLOSED, "minProperties": 1}, '{"b":1}', "{}"),
        ({**CLOSED, "minProperties": 1, "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
        ({"minimum": 0, "exclusiveMinimum": True, "type": "number"}, "0.5", "0"),
        ({"propertyNames": {"type": "string"}, "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "object"}, '{"a": 1}', '{"a":\n1}'),
    ],
    ids=str,
)
def test_texts_of_a_schema(schema, valid, invalid):
    matcher = compile(json=schema)
    assert allows(matcher, valid)
    assert not allows(matcher, invalid)


def test_blank_lines_of_a_grammar_take_no_time():
    """A pattern that looks for EBNF in each of them would take minutes."""
    assert allows(compile(grammar=100_000 * "\n" + 'start: "a"'), "a")


NAMES = {"type": "object", "properties": {"a": {}, "b": {}}}
# A value of a key that no grammar holds, and text that it forbids.
UNHELD_SCHEMAS = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "[1,1]"),
    "propertyNames": ({"type": "object", "propertyNames": {"enum": ["a"]}}, '{"b":1}'),
    "not": ({"not": {"const": 1}}, "1"),
    "format": ({"type": "string", "format": "path"}, None),
    "pattern": ({"type": "string", "pattern": "^(?!b)[a-z]+$"}, '"b"'),
    "patternProperties": (
        {"patternProperties": {r"^(?=a)": {}}, "additionalProperties": False},
        '{"b":1}',
    ),
    "patternProperties twice": (
        {"patternProperties": {r"^\d$": {"type": "string"}, "^[0-9]$": {"maxLength": 1}}},
        '{"1":5}',
    ),
    "min/maxProperties": ({**NAMES, "maxProperties": 0}, '{"a":1}'),
    "minimum": ({"type": "integer", "minimum": 2**53 + 1}, "5"),
    "maximum": ({"type": "number", "maximum": 3.4028234663852886e38}, "1e39"),
    "oneOf": ({"oneOf": [{"minimum": 0}, {"maximum": 5}]}, "3"),
}


@pytest.mark.parametrize("name", UNHELD_SCHEMAS)
def test_a_key_that_no_grammar_holds_is_rejected_if_strict_and_else_dropped(name):
    key = name.split()[0]
    part, text = UNHELD_SCHEMAS[name]
    schema = {
        "$defs": {key: part},
        "properties": {"x": {"$ref": f"#/$defs/{key.replace('/', '~1')}"}},
    }
    before = json.dumps(schema)
    with pytest.raises(ValueError, match=key):
        compile(json=schema)
    dropped = write_schema(schema, {}, is_strict=False)
    matcher = compile(json=dropped)
    assert json.dumps(schema) == before, "the client's schema stays as it is"
    if text is not None:
        assert allows(matcher, f'{{"x":{text}}}')
        validator = jsonschema.Draft202012Validator(schema)
        assert not validator.is_valid({"x": json.loads(text)})


def test_annotations_are_ignored():
    schema = {"$schema": "https://json-schema.org/draft-07/schema#", "deprecated": True}
    schema |= {"title": "x", "discriminator": {"propertyName": "kind"}, "x-order": 1}
    schema |= {"type": "integer", "format": "int64"}
    assert allows(compile(json=schema), "1")


@pytest.mark.parametrize(
    "schema, text",
    [
        # An exclusive bound counts as inclusive if another one has the same integer part.
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
        # The product is 2**32 + 1.
        ({"type": "integer", "allOf": [{"multipleOf": 641}, {"multipleOf": 6700417}]}, "2"),
        # No name is left after the comma, so the text cannot end.
        (
            {
                "type": "object",
                "properties": {"a": {}},
                "patternProperties": {"^a$": {}},
                "additionalProperties": False,
            },
            '{"a":1,',
        ),
        # A name that the schema does not list counts twice.
        ({"type": "object", "minProperties": 2}, '{"a":1,"a":1}'),
    ],
)
def test_a_fault_of_llguidance(schema, text):
    """It allows text that it should not. If this fails, a newer version has mended it."""
    assert compile(json=schema).try_consume_tokens(list(text.encode())) == len(text)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" | /b[0-9]+/',
        '%llguidance {}\nstart: A\nA: "a" | /b[0-9]/',
    ],
)
def test_grammars_in_lark(grammar):
    for outputs in (
        StructuredOutputsParams(grammar=grammar),
        allow_reasoning(StructuredOutputsParams(grammar=grammar), is_open=False),
    ):
        matcher = compile_outputs(outputs)
        assert allows(matcher, "a")
        assert allows(matcher, "b7")
        assert not allows(matcher, "b")


@pytest.mark.parametrize("grammar", ['root ::= "a"', "\n  x ::= y\nroot ::= x"])
def test_ebnf_is_rejected_with_advice(grammar):
    outputs = StructuredOutputsParams(grammar=grammar)
    for write in (make_grammar, lambda outputs: allow_reasoning(outputs, is_open=True)):
        with pytest.raises(ValueError, match=r"grammar is EBNF .* write it in Lark, or use json"):
            write(outputs)
    assert allows(compile(grammar='start: "a" // root ::= "a"'), "a")


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
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": {"$ref": "http://x/y"}}, "Resource 'http://x/y' is not present"),
        ({"grammar": 'start: "a" b\nb: c'}, 'at 2(4): unknown name: "c"'),
    ],
    ids=str,
)
def test_an_error_of_llguidance_is_passed_on(outputs, message):
    for each in (
        StructuredOutputsParams(**outputs),
        allow_reasoning(StructuredOutputsParams(**outputs), is_open=True),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            compile_outputs(each)


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
    texts = grammars.TokenBytes(tokenizer, 900, frozenset({1}))
    assert tokenizer.convert_tokens_to_ids("<think>") not in texts.special_token_ids
    assert tokenizer.convert_tokens_to_ids("<other>") in texts.special_token_ids
