"""response_format, tools and thoughts as grammars, and what a reply is."""

import pytest
from grammar_helpers import match
from server_helpers import parse_body

from nanovllm.features.structured_outputs.grammar_writer import make_grammar
from nanovllm.server.errors import ApiError

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}{{ start }}"
PAIR = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PAIR["additionalProperties"] = False
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PAIR}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PAIR}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEXT = '{"a": 1}'
MESSAGES = {"messages": [{"role": "user", "content": "1 + 1"}]}


@pytest.fixture(scope="module")
def llm(llm):
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def parse(llm, parses_reasoning=False, is_chat=True, **body):
    prompt = MESSAGES if is_chat else {"prompt": "x"}
    return parse_body(llm, {**prompt, **body}, is_chat, parses_reasoning)


def allow(llm, *texts, **options):
    """Which of the texts a request allows."""
    [(_, params, _)], _ = parse(llm, **options)
    return match(make_grammar(params.structured_outputs), texts)


def make_tool(parameters, strict=False, name="f"):
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def make_call(arguments, name="f"):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NAMED = {"type": "function", "function": {"name": "f"}}


def make_format(schema, **options):
    details = {"name": "x", "schema": schema, **options}
    return {"response_format": {"type": "json_schema", "json_schema": details}}


# --- response_format


def test_a_schema_beside_json_object_holds(llm):
    kind = {"type": "json_object"}
    texts = [TEXT, '{"b": 1}', "1"]
    assert allow(llm, *texts, response_format={**kind, "schema": PAIR}) == [True, False, False]
    assert allow(llm, *texts, response_format=kind) == [True, True, False]
    assert allow(llm, *texts, response_format={**kind, "schema": None}) == [True, True, False]
    assert allow(llm, *texts, **JSON) == [True, False, False]
    options = {"is_chat": False, "response_format": {**kind, "schema": PAIR}}
    assert allow(llm, *texts, **options) == [True, False, False]


# No grammar holds these schemas.
UNIQUE = {"properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
MISSING = {"properties": {"a": {"$ref": "#/$defs/missing"}}}


def test_keys_that_no_grammar_holds_are_ignored_unless_they_are_strict(llm):
    text = '{"a": []}'
    call = make_call(text)
    assert allow(llm, text, **make_format(UNIQUE, strict=None)) == [True]
    for choice in ("required", NAMED):
        assert allow(llm, call, tools=[make_tool(UNIQUE)], tool_choice=choice) == [True]
    # A strict tool that merely may be called forbids nothing.
    assert allow(llm, call, TEXT, **JSON, tools=[make_tool(UNIQUE, strict=True)]) == [True, True]


SCHEMA = "function.parameters"
DEEP = {}
for _ in range(5000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    "param, body",
    [
        (f"tools[0].{SCHEMA}", {"tools": [make_tool(MISSING)], "tool_choice": NAMED}),
        (
            f"tools[1].{SCHEMA}",
            {"tools": [TOOL, make_tool(MISSING)], "tool_choice": "required", **JSON},
        ),
        (
            f"tools[1].{SCHEMA}",
            {"tools": [TOOL, make_tool(UNIQUE, strict=True)], "tool_choice": NAMED},
        ),
        (f"tools[0].{SCHEMA}", {"tools": [make_tool(DEEP)], "tool_choice": NAMED}),
        ("structured_outputs", {"structured_outputs": {"json": MISSING}, "tools": []}),
        ("structured_outputs", {"structured_outputs": {"json": UNIQUE}}),
        ("response_format", {"tools": [TOOL], **make_format(MISSING)}),
        ("response_format", {"tools": [make_tool(MISSING)], **make_format(UNIQUE, strict=True)}),
        ("response_format", make_format({"const": 2**60})),
        ("response_format", {"response_format": {"type": "json_object", "schema": "{}"}}),
        ("response_format.schema", {"response_format": {"type": "text", "schema": PAIR}}),
        ("response_format.json_schema.mode", make_format(PAIR, mode="x")),
        ("response_format.json_schema.strict", make_format(PAIR, strict="yes")),
        (
            "response_format.strict",
            {"response_format": {**JSON["response_format"], "strict": True}},
        ),
    ],
)
def test_an_error_names_the_parameter_at_fault(llm, param, body):
    with pytest.raises(ApiError) as caught:
        parse(llm, **body)
    assert caught.value.param == param
    assert param in caught.value.message
    assert "start:" not in caught.value.message, "no line of a grammar is shown"


# --- Tools


@pytest.mark.parametrize(
    "options, call, text",
    [
        ({"tools": [TOOL]}, True, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, True, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False, True),
        ({"tools": [TOOL], "tool_choice": "required"}, True, False),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
            True,
            False,
        ),
        ({}, False, True),
    ],
)
def test_a_format_beside_tools(llm, options, call, text):
    two = f"{CALL}\n{CALL}"
    wrong = [f"{CALL}{TEXT}", "Words.", CALL.replace("add", "other"), CALL.replace("1", '"x"')]
    allowed = allow(llm, CALL, two, TEXT, *wrong, **JSON, **options)
    is_named = isinstance(options.get("tool_choice"), dict)
    assert allowed == [call, call and not is_named, text, *[False] * 4]
    assert allow(llm, two, **JSON, **options, parallel_tool_calls=False) == [False]


UNHELD_FIELDS = [
    {"type": "any"},
    {"$ref": "#/$defs/missing"},
    {"const": 2**60},
    {"type": "string", "minLength": -1},
    {"patternProperties": {"^a": {}, "b$": {}}},
]


@pytest.mark.parametrize("field", UNHELD_FIELDS, ids=str)
def test_tools_that_may_be_called_take_any_object_if_no_grammar_holds_their_own(llm, field):
    tools = [make_tool(PAIR), make_tool({"properties": {"a": field}}, name="other")]
    texts = [TEXT, make_call(TEXT), make_call('{"x": [null]}', "other"), make_call("[1]", "other")]
    assert allow(llm, *texts, **JSON, tools=tools) == [True, True, True, False]


def test_a_required_call_has_only_arguments_of_its_schema(llm):
    schema = {"$defs": {"any": {}}, "properties": {"a": {"$ref": "#/$defs/any"}}}
    tools = [make_tool(schema), make_tool(None, name="stop")]
    valid = [make_call(TEXT), make_call("{}", "stop")]
    invalid = [make_call('{"b": 1}'), make_call(TEXT, "stop")]
    allowed = allow(llm, *valid, *invalid, tools=tools, tool_choice="required")
    assert allowed == [True, True, False, False]


@pytest.mark.parametrize("type_names", ["object", ["object"], ["object", "null"]], ids=str)
def test_arguments_are_an_object_if_they_can_be_one(llm, type_names):
    tool = make_tool({**PAIR, "type": type_names})
    parse(llm, tools=[tool])
    calls = [make_call(TEXT), make_call("null")]
    assert allow(llm, *calls, tools=[tool], tool_choice="required") == [True, False]


def test_a_named_function_is_called_once(llm):
    """As in vLLM, whatever parallel_tool_calls says."""
    named = {"type": "function", "function": {"name": "add"}}
    two = f"{CALL}\n{CALL}"
    assert allow(llm, CALL, two, tools=[TOOL], tool_choice=named) == [True, False]
    options = {"tools": [TOOL], "tool_choice": named, "parallel_tool_calls": True}
    assert allow(llm, CALL, two, **options) == [True, False]


# --- Thoughts


ALONE = [True, False, False]  # a constraint allows its text
WHOLE = [True, True, False]  # or also with reasoning before it
REST = [False, True, True]  # or only with the end of reasoning, which may be the whole
CHOICE = {"structured_outputs": {"choice": ["yes"]}}


def continue_message(content):
    messages = [{"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    return {"messages": messages, **options, **JSON}


@pytest.mark.parametrize(
    "start, expected, options, text",
    [
        ("", WHOLE, JSON, TEXT),
        ("<think>", REST, JSON, TEXT),
        ("<think>\n", REST, CHOICE, "yes"),
        ("<think>\n\n</think>\n\n", ALONE, JSON, TEXT),
        ("I mean <think> as a word:", WHOLE, JSON, TEXT),
        ("", WHOLE, {"tools": [TOOL], "tool_choice": "required"}, CALL),
        ("<think>", REST, {"tools": [TOOL], "tool_choice": "required"}, CALL),
        ("", REST, continue_message("<think>I"), TEXT),
        ("", ALONE, continue_message("<think></think>So"), TEXT),
        ("", REST, continue_message([{"type": "text", "text": "<think>I"}]), TEXT),
    ],
)
def test_a_constraint_holds_after_the_thoughts(llm, start, expected, options, text):
    options = {**options, "chat_template_kwargs": {"start": start}}
    texts = [text, f"<think>Hm.</think>\n\n{text}", f"Hm.</think>{text}"]
    unfinished = ["<think>Hm.", "Hm.", "Hm.</think>", "<think>Hm.</think>\n\nWords."]
    allowed = allow(llm, *texts, *unfinished, parses_reasoning=True, **options)
    assert allowed == [*expected, *[False] * 4]
    assert allow(llm, *texts, **options) == ALONE


def test_a_completion_has_no_thoughts(llm):
    options = {"is_chat": False, "parses_reasoning": True, **JSON}
    assert allow(llm, TEXT, f"<think></think>{TEXT}", **options) == [True, False]


@pytest.mark.parametrize("outputs", [{"regex": r"[^\s\S]"}, {"json": {"$ref": "#"}}])
def test_a_constraint_that_nothing_matches_is_found_before_the_reasoning(llm, outputs):
    with pytest.raises(ApiError, match="structured_outputs"):
        allow(llm, "<think>", parses_reasoning=True, structured_outputs=outputs)
