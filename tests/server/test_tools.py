"""Tool calls and reasoning in replies, and the grammar of a required call."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from nanovllm import DEMO_MODEL, LLM
from nanovllm.server.errors import ApiError
from nanovllm.server.parameters import parse_request
from nanovllm.server.protocol import Reply
from nanovllm.server.tools import write_grammar

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}{{ start }}"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "$defs": {"number": {"type": "integer"}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/number"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
BODY = {"messages": [{"role": "user", "content": "1 + 1"}], "tools": [ADD, STOP]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "add", "arguments": '{"a": 1}'}


@pytest.fixture(scope="module")
def llm():
    """The demo model with a template that shows tools to it, but it does not know them."""
    with LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64) as llm:
        llm.tokenizer.chat_template = TEMPLATE
        yield llm


def answer(llm, text, reason="stop", parses_reasoning=False, **body):
    """The choices of a reply, or of its chunks, if the model writes `text`."""
    given, [(prompt, _, _)] = parse_request({**BODY, **body}, True, llm)
    reply = Reply(given, "model", True, llm, parses_reasoning)
    is_stream = body.get("stream", False)
    choices = []
    for end in range(1 if is_stream else len(text), len(text) + 1):
        output = {
            "sample_index": 0,
            "prompt_token_ids": prompt,
            "token_ids": [0] * end,
            "text": text[:end],
            "finish_reason": reason if end == len(text) else None,
            "logprobs": None,
            "prompt_logprobs": None,
            "num_cached_tokens": 0,
        }
        if is_stream:
            event = reply.write_chunk({0: output})
            choices += json.loads(event.removeprefix("data: "))["choices"]
        else:
            reply.take({0: output})
            choices += reply.write_whole()["choices"]
    return choices


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_reply_with_calls(llm, reason):
    (choice,) = answer(llm, f"I add.{CALL}\n{CALL}", reason)
    message = choice["message"]
    assert message["content"] == "I add."
    assert choice["finish_reason"] == ("tool_calls" if reason == "stop" else "length")
    assert [call["function"] for call in message["tool_calls"]] == [FUNCTION, FUNCTION]
    assert message["tool_calls"][0].keys() == {"id", "type", "function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    (choice,) = answer(llm, CALL, parallel_tool_calls=False)
    assert choice["message"]["content"] is None


def test_a_stream_with_calls(llm):
    chunks = answer(llm, CALL, stream=True)
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"}
    entries = [entry for delta in deltas for entry in delta.get("tool_calls", [])]
    assert entries[0].keys() == {"index", "id", "type", "function"}
    assert entries[0]["function"] == {"name": "add", "arguments": "{"}
    assert len(entries) > 5
    assert "".join(entry["function"]["arguments"] for entry in entries) == '{"a": 1}'
    assert [chunk["finish_reason"] for chunk in chunks[-2:]] == [None, "tool_calls"]


def test_a_message_with_calls_needs_no_content(llm):
    call = {"type": "function", "id": "call_0", "function": FUNCTION}
    for content in (None, "", []):
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        messages = [message, *BODY["messages"]]
        given, _ = parse_request({"messages": messages}, True, llm)
        assert given["messages"] == messages


def test_a_template_can_read_tools_of_a_message_only(llm, monkeypatch):
    """Such as that of Phi-4-mini."""
    template = "{% for m in messages %}{{ m.content }}{{ m['tools'] }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(ApiError, match="tools need a chat template that uses them"):
        parse_request(BODY, True, llm)
    parse_request({**BODY, "tool_choice": "required"}, True, llm)


@pytest.mark.parametrize("choice", ["auto", "required", "none", None])
def test_tools_are_shown_to_the_model_unless_it_must_not_call_them(llm, choice):
    _, [(prompt, params, _)] = parse_request({**BODY, "tool_choice": choice}, True, llm)
    assert ("add" in llm.tokenizer.decode(prompt)) == (choice != "none")
    assert (params.structured_outputs is not None) == (choice == "required")
    (reply,) = answer(llm, CALL, tool_choice=choice)
    assert (reply["message"]["content"] == CALL) == (choice == "none")
    assert reply["finish_reason"] == ("stop" if choice == "none" else "tool_calls")


def test_reasoning_has_two_names(llm):
    text = f"<think>So.</think>\n\n{CALL}"
    (choice,) = answer(llm, text, parses_reasoning=True)
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "So."
    assert message["tool_calls"][0]["function"] == FUNCTION
    assert message["content"] is None
    deltas = [chunk["delta"] for chunk in answer(llm, text, parses_reasoning=True, stream=True)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "So."
    (choice,) = answer(llm, text, parses_reasoning=True, include_reasoning=False)
    assert not {"reasoning", "reasoning_content"} & choice["message"].keys()
    (choice,) = answer(llm, text, tools=[])
    assert choice["message"]["content"] == text


def test_the_template_can_begin_the_reasoning(llm):
    options = {"chat_template_kwargs": {"start": "<think>\n"}, "parses_reasoning": True}
    (choice,) = answer(llm, "So.\n</think>\n\nYes.", **options)
    assert choice["message"]["reasoning"] == "So.\n"
    assert choice["message"]["content"] == "Yes."


def make_tool(**parameters):
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


OPEN = make_tool(properties={"a": {}})
FREE = make_tool(additionalProperties=True)
PARTS = make_tool(allOf=[{"properties": {"a": {}}}, {"properties": {"b": {}}}])
WITHOUT = {"type": "function", "function": {"name": "add", "parameters": None}}
STOP_CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, tools, is_parallel, is_valid",
    [
        (CALL, [ADD, STOP], True, True),
        (STOP_CALL, [ADD, STOP], True, True),
        (f"{CALL}\n{STOP_CALL}", [ADD, STOP], True, True),
        (f"{CALL}\n{STOP_CALL}", [ADD, STOP], False, False),
        (STOP_CALL, [ADD], True, False),
        (f"I add. {CALL}", [ADD], True, False),
        (CALL.replace("1", '"1"'), [ADD], True, False),
        (CALL.replace('{"a": 1}', "{}"), [ADD], True, False),
        (STOP_CALL.replace("{}", '{"a": 1}'), [STOP], True, False),
        (CALL, [OPEN], True, True),
        (CALL.replace('{"a"', '{"b"'), [OPEN], True, False),
        (CALL.replace('{"a": 1}', "1"), [make_tool()], True, False),
        (CALL, [FREE], True, True),
        (CALL.replace("1}", '1, "b": 2}'), [PARTS], True, True),
        (CALL.replace('{"a": 1}', "{}"), [WITHOUT], True, True),
    ],
)
def test_a_grammar_allows_only_calls_of_the_tools(text, tools, is_parallel, is_valid):
    grammar = LLMatcher.grammar_from_lark(write_grammar(tools, is_parallel))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    tokens = list(text.encode())
    is_consumed = matcher.try_consume_tokens(tokens) == len(tokens)
    assert (is_consumed and matcher.is_accepting()) == is_valid
