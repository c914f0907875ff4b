"""response_format, tools and thoughts as grammars, and what a reply is."""

import asyncio
import json

import httpx
import pytest
from grammar_helpers import match
from server_helpers import parse_body

from nanovllm import DEMO_MODEL, LLM
from nanovllm.engine.outputs import NAN_LOGITS
from nanovllm.features.structured_outputs import grammars
from nanovllm.features.structured_outputs.grammar_writer import make_grammar
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.errors import ApiError
from nanovllm.server.openai_api import Api

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


@pytest.mark.parametrize(
    "response_format, param",
    [
        ({"type": "text", "schema": PAIR}, "response_format.schema"),
        ({"type": "json_object", "schema": "{}"}, "response_format"),
        ({**JSON["response_format"], "strict": True}, "response_format.strict"),
        (make_format(PAIR, mode="x")["response_format"], "response_format.json_schema.mode"),
        (make_format(PAIR, strict="yes")["response_format"], "response_format.json_schema.strict"),
        (make_format({"const": 2**60})["response_format"], "response_format"),
    ],
)
def test_what_would_change_the_format_is_named(llm, response_format, param):
    with pytest.raises(ApiError) as caught:
        parse(llm, response_format=response_format)
    assert caught.value.param == param
    assert "structured_outputs" not in caught.value.message


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
# Fields that no grammar holds, with the key that it does not hold and a valid value.
FIELDS = {
    # As Pydantic writes them.
    "Path": ({"format": "path", "type": "string"}, "format", "a/b"),
    "set": (
        {"items": {"type": "integer"}, "type": "array", "uniqueItems": True},
        "uniqueItems",
        [1],
    ),
    "dict[Literal, float]": (
        {
            "additionalProperties": {"type": "number"},
            "propertyNames": {"enum": ["a", "b"]},
            "type": "object",
        },
        "propertyNames",
        {"a": 1.5},
    ),
    "int64": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "minimum", 7),
    "discriminated union": ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "oneOf", 1),
    # As zod writes them.
    "z.email()": ({"type": "string", "format": "email", "pattern": EMAIL}, "pattern", "a@b.co"),
    "z.float32()": ({"type": "number", "maximum": 3.4028234663852886e38}, "maximum", 0.5),
    "z.never()": ({"not": {}}, "not", 1),
}


def make_schema(field):
    definitions = {"x": field, "a": {"type": "integer"}}
    properties = {"a": {"$ref": "#/$defs/x"}}
    return {"$defs": definitions, "type": "object", "required": ["a"], "properties": properties}


@pytest.mark.parametrize("name", FIELDS)
def test_everyday_fields_are_accepted_unless_they_are_strict(llm, name):
    field, key, value = FIELDS[name]
    schema = make_schema(field)
    assert allow(llm, json.dumps({"a": value}), **make_format(schema)) == [True]
    with pytest.raises(ApiError, match=key) as caught:
        parse(llm, **make_format(schema, strict=True))
    assert caught.value.param == "response_format"


def test_each_parameter_says_whether_it_is_strict(llm):
    field, key, value = FIELDS["set"]
    schema = make_schema(field)
    text = json.dumps({"a": value})
    call = make_call(text)
    tool, strict_tool = (make_tool(schema, strict) for strict in (False, True))
    assert allow(llm, text, **make_format(schema, strict=None)) == [True]
    for choice in ("required", NAMED):
        assert allow(llm, call, tools=[tool], tool_choice=choice) == [True]
    for param, body in (
        ("response_format", {**make_format(schema, strict=True), "tools": [tool]}),
        ("structured_outputs", {"structured_outputs": {"json": schema}}),
        ("tools", {"tools": [strict_tool], "tool_choice": NAMED}),
    ):
        with pytest.raises(ApiError, match=key) as caught:
            parse(llm, **body)
        assert caught.value.param == param
    # A strict tool that merely may be called forbids nothing.
    assert allow(llm, call, TEXT, **JSON, tools=[strict_tool]) == [True, True]


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
    assert allowed == [call, call, text, *[False] * 4]
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


def test_an_error_names_the_parameter_at_fault(llm):
    schema = {"properties": {"a": UNHELD_FIELDS[1]}}
    for param, body in (
        ("tools", {"tools": [make_tool(schema)], "tool_choice": NAMED}),
        ("tools", {"tools": [make_tool(schema)], "tool_choice": "required", **JSON}),
        ("response_format", {"tools": [make_tool(PAIR)], **make_format(schema)}),
        ("response_format", {"tools": [make_tool(schema)], **make_format(schema, strict=True)}),
        ("structured_outputs", {"structured_outputs": {"json": schema}}),
    ):
        with pytest.raises(ApiError) as caught:
            parse(llm, **body)
        assert caught.value.param == param
        assert caught.value.message.startswith(f"{param}: ")


# --- Thoughts


ALONE = [True, False, False]  # a constraint allows its text
WHOLE = [True, True, False]  # or also with reasoning before it
REST = [False, True, True]  # or only with the end of reasoning, which may be the whole
CHOICE = {"structured_outputs": {"choice": ["yes"]}}


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
    ],
)
def test_a_constraint_holds_after_the_thoughts(llm, start, expected, options, text):
    options = {**options, "chat_template_kwargs": {"start": start}}
    texts = [text, f"<think>Hm.</think>\n\n{text}", f"Hm.</think>{text}"]
    unfinished = ["<think>Hm.", "Hm.", "Hm.</think>", "<think>Hm.</think>\n\nWords."]
    allowed = allow(llm, *texts, *unfinished, parses_reasoning=True, **options)
    assert allowed == [*expected, *[False] * 4]
    assert allow(llm, *texts, **options) == ALONE


def test_thoughts_of_a_message_that_is_continued(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages[-1].content }}")
    options = {"continue_final_message": True, "add_generation_prompt": False, **JSON}
    for content, expected in (("<think>I", [False, True]), ("<think></think>So", [True, False])):
        messages = [{"role": "assistant", "content": content}]
        texts = [TEXT, f" am.</think>{TEXT}"]
        allowed = allow(llm, *texts, parses_reasoning=True, messages=messages, **options)
        assert allowed == expected


def test_a_completion_has_no_thoughts(llm):
    options = {"is_chat": False, "parses_reasoning": True, **JSON}
    assert allow(llm, TEXT, f"<think></think>{TEXT}", **options) == [True, False]


# --- Limits


def post(bodies, parses_reasoning=False, change=None):
    """The responses of a server in this process."""

    async def serve():
        llm = LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64)
        if change is not None:
            change(llm)
        engine = EngineThread(llm)
        engine.start_on(asyncio.get_running_loop())
        app = Api(engine, "model", "model").make_app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            responses = [await client.post("/v1/completions", json=body) for body in bodies]
        engine.stop("done")
        await asyncio.to_thread(engine.join)
        return responses

    return asyncio.run(serve())


@pytest.mark.filterwarnings("ignore:request:RuntimeWarning")
def test_a_limit_of_the_grammar_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_LEXER_STATES", 30)
    body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"regex": "[a-c]{40}x"}}
    whole, streamed = post([body, {**body, "stream": True}])
    assert whole.status_code == 400
    error = whole.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "too many states" in error["message"]
    assert streamed.status_code == 200
    *events, last, end = streamed.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"] == error
    assert end == "data: [DONE]"
    assert all('"finish_reason": "error"' not in event for event in events)


@pytest.mark.filterwarnings("ignore:request:RuntimeWarning")
def test_nan_logits_are_an_error_of_the_server():
    def break_logits(llm):
        forward = llm.model_runner.forward
        llm.model_runner.forward = lambda seqs: forward(seqs) * float("nan")

    (response,) = post([{"prompt": "x"}], change=break_logits)
    assert response.status_code == 500
    assert NAN_LOGITS in response.json()["error"]["message"]


@pytest.mark.parametrize("outputs", [{"regex": r"[^\s\S]"}, {"json": {"$ref": "#"}}])
def test_a_constraint_that_nothing_matches_is_found_before_the_reasoning(llm, outputs):
    with pytest.raises(ApiError, match="structured_outputs"):
        allow(llm, "<think>", parses_reasoning=True, structured_outputs=outputs)
