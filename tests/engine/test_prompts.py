"""Texts, token ids and conversations become prompts. Those that cannot be served are rejected."""

import json
import re
from copy import deepcopy
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, generate_ids, greedy
from tokenizers.processors import TemplateProcessing

from nanovllm import LLM

GREEDY = greedy(6)
TEXT = "What is 1 + 2?"
HALF_EMOJI = "\ud83d"  # a lone surrogate, which UTF-8 cannot encode


@pytest.fixture(scope="module")
def plain(tiny):
    """An engine without a tokenizer, for 39 tokens."""
    return LLM(tiny[0], num_kvcache_blocks=10, kvcache_block_size=4)


def ask(content):
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def call_tool(**changes):
    """A conversation of one message, which calls a tool."""
    function = {"name": "add", "arguments": '{"a": 12, "b": [30]}', **changes}
    calls = [{"type": "function", "id": "call_0", "function": function}]
    return [{"role": "assistant", "content": None, "tool_calls": calls}]


def test_a_prompt_is_a_text_or_token_ids(demo):
    ids = demo.tokenizer.encode(TEXT)
    (expected,) = generate_ids(demo, ids, GREEDY)
    for prompt in (TEXT, tuple(ids), [np.uint16(token_id) for token_id in ids]):
        assert generate_ids(demo, prompt, GREEDY) == [expected]
    outputs = demo.generate([TEXT, ids], [greedy(1), GREEDY])
    assert [output["prompt_token_ids"] for output in outputs] == [ids] * 2
    assert [output["token_ids"] for output in outputs] == [expected[:1], expected]
    assert demo.generate([]) == []


@pytest.mark.parametrize(
    "prompts, complaint",
    [
        ([[]], "at least one token"),
        ([[1, 2], [1, VOCAB_SIZE]], f"{VOCAB_SIZE}"),
        ([[1, "a"]], "'str' object cannot be interpreted as an integer"),
        # Arrays have __index__, which raises.
        ([[1, 2], [torch.tensor(1.5)]], "only integer .* index"),
        ([[1, 2], None], "None"),
        ([[1] * 39, [1] * 40], "max_model_len=40"),
        (["text"], "no tokenizer"),
    ],
)
def test_a_rejected_call_queues_nothing(plain, prompts, complaint):
    for call in (plain.generate, plain.stream):
        with pytest.raises((ValueError, TypeError), match=complaint):
            call(prompts, GREEDY)
    assert plain.is_finished()
    assert plain.stats["num_waiting"] == 0


def test_sampling_params_must_fit_the_prompts(plain):
    with pytest.raises(ValueError, match="2 prompts but 1"):
        plain.generate([[1], [2]], [GREEDY])
    for params in ({}, 0):
        with pytest.raises(TypeError, match="sampling_params"):
            plain.generate([[1]], params)


def test_a_prompt_above_the_budget_needs_chunked_prefill(make_llm):
    with pytest.raises(ValueError, match="max_num_batched_tokens=8"):
        make_llm(enable_chunked_prefill=False, max_num_batched_tokens=8).add_request([1] * 9)


# Chat


def test_a_conversation_becomes_a_prompt_by_the_template(demo):
    conversations = [ask(TEXT), [{"role": "system", "content": "Be brief."}, *ask(TEXT)]]
    outputs = demo.chat(ask(TEXT), GREEDY, use_tqdm=False)
    outputs += demo.chat(conversations, GREEDY, use_tqdm=False)
    for output, messages in zip(outputs, [ask(TEXT), *conversations], strict=True):
        rendered = demo.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert demo.tokenizer.decode(output["prompt_token_ids"]) == rendered
    assert demo.chat([]) == []


@pytest.mark.parametrize(
    "messages, complaint",
    [
        ("hi", "messages must be"),
        ([{"content": TEXT}], "messages[0].role must be one of"),
        ([{"role": "user"}], "messages[0].content must be a str or a list of parts, not None"),
        (ask(12), "messages[0].content"),
        (ask([{"type": "image_url", "image_url": {"url": "x" * 10000}}]), "not 'image_url'"),
        (ask([{"type": "refusal", "refusal": "no"}]), "messages[0].content[0].type"),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}],
            "messages[0].content[0].refusal must be a str, not None",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].type must be"),
        (call_tool(name=None), "messages[0].tool_calls[0].function.name"),
    ],
)
def test_an_invalid_conversation_is_rejected(demo, messages, complaint):
    """A template would print whatever it gets. A message is short, whatever the value."""
    with pytest.raises((ValueError, TypeError), match=re.escape(complaint)) as caught:
        demo.chat(messages)
    assert len(str(caught.value)) < 300


def test_a_tools_content_may_be_missing(demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", "{{ messages[-1].content }};")
    for content in (None, []):
        messages = [*call_tool(), {"role": "tool", "content": content, "tool_call_id": "call_0"}]
        assert demo.tokenizer.decode(demo.encode_chats([messages])[0]) == ";"


def test_null_as_arguments_is_an_empty_object(demo, monkeypatch):
    monkeypatch.setattr(demo.tokenizer, "chat_template", QWEN3)
    for arguments in ("null", "{}", "", None):
        assert demo.tokenizer.decode(demo.encode_chats([call_tool(arguments=arguments)])[0]) == "{}"


def test_an_assistants_content_may_be_missing(demo):
    empty = [*ask(TEXT), {"role": "assistant", "content": ""}, *ask(TEXT)]
    for assistant in ({"content": None}, {}, {"content": None, "tool_calls": [], "audio": None}):
        messages = [*ask(TEXT), {"role": "assistant", **assistant}, *ask(TEXT)]
        assert demo.encode_chats([messages]) == demo.encode_chats([empty])


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def make_tool(**changes):
    return {"type": "function", "function": {**TOOL["function"], **changes}}


# As Qwen's: the arguments of a call are written as JSON.
TOOL_TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %};
{%- endfor %}
{%- if add_generation_prompt %}assistant:{{ thought }}{% endif %}"""


def test_tools_and_variables_are_passed_to_the_template(demo, monkeypatch):
    with pytest.raises(ValueError, match="tools need a chat template"):
        demo.chat(ask(TEXT), tools=[TOOL])
    monkeypatch.setattr(demo.tokenizer, "chat_template", TOOL_TEMPLATE)

    def render(messages, **options):
        return demo.tokenizer.decode(demo.encode_chats([messages], **options)[0])

    messages = [*call_tool(), {"role": "tool", "content": "42", "tool_call_id": "call_0"}]
    history = 'assistant: {"name": "add", "arguments": {"a": 12, "b": [30]}};tool: 42;'
    assert render(messages) == f"{history}assistant:"
    assert messages[0]["content"] is None, "the caller's messages stay as they are"
    assert render(call_tool(arguments={"a": 1}), add_generation_prompt=False) == (
        'assistant: {"name": "add", "arguments": {"a": 1}};'
    )
    for arguments in ("", None):
        assert '"arguments": {}' in render(call_tool(arguments=arguments))
    with_tools = render(messages, tools=[TOOL], chat_template_kwargs={"thought": "<think>"})
    assert with_tools.startswith('[{"type": "function"')
    assert with_tools.endswith(f"{history}assistant:<think>")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(messages, **options) == history.removesuffix(";")
    (output,) = demo.chat(messages, GREEDY, use_tqdm=False, tools=[TOOL])
    assert output["prompt_token_ids"] == demo.encode_chats([messages], tools=[TOOL])[0]


# As Qwen3's, which takes a str, and as Qwen3.5's, which loops over arguments.
QWEN3 = """
{%- for call in messages[0].tool_calls %}{% set arguments = call.function.arguments %}
{%- if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}
{%- endfor %}"""
QWEN3_5 = """
{%- for call in messages[0].tool_calls %}{% for name, value in call.function.arguments | items %}
{{- name }}={{ value }};{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("arguments", ['{"a": "x', "[3]", "three", "[" * 1000])
def test_arguments_that_are_no_json_object_reach_the_template(demo, monkeypatch, arguments):
    """Agents send calls back as they were, with an error as the tool's result."""
    messages = [*call_tool(arguments=arguments), *call_tool()]
    messages[0]["tool_calls"] += call_tool()[0]["tool_calls"]
    before = deepcopy(messages)
    for template, expected in [
        (QWEN3, f'{json.dumps({"arguments": arguments})}{{"a": 12, "b": [30]}}'),
        (QWEN3_5, f"arguments={arguments};a=12;b=[30];"),
        (TOOL_TEMPLATE, json.dumps(arguments)),
    ]:
        monkeypatch.setattr(demo.tokenizer, "chat_template", template)
        assert expected in demo.tokenizer.decode(demo.encode_chats([messages])[0])
    assert messages == before, "the caller's messages stay as they are"
    monkeypatch.undo()
    assert demo.encode_chats([messages])


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"tools": "add"}, "tools must be a list of dicts"),
        ({"tools": [TOOL, {}]}, "tools[1].type must be one of 'function'"),
        ({"tools": [make_tool(name="two words")]}, "tools[0].function.name"),
        ({"tools": [make_tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat template"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_invalid_options_of_a_chat_are_named(demo, monkeypatch, options, complaint):
    monkeypatch.setattr(demo.tokenizer, "chat_template", TOOL_TEMPLATE)
    with pytest.raises((ValueError, TypeError), match=re.escape(complaint)):
        demo.chat(ask(TEXT), **options)


def test_a_text_that_cannot_fit_is_not_tokenized(demo, monkeypatch):
    encode = demo.tokenizer.encode
    sizes = []
    monkeypatch.setattr(
        demo.tokenizer, "encode", lambda text, **kwargs: sizes.append(len(text)) or encode(text)
    )
    for call in (lambda text: demo.add_request(text), lambda text: demo.chat(ask(text))):
        with pytest.raises(ValueError, match="characters, which exceed max_model_len=2048"):
            call("word " * 1_000_000)
        with pytest.raises(ValueError, match="leave no room for output.*=2048: shorten"):
            call("word " * 5_000)
    assert max(sizes) < 100_000


def test_a_text_that_cannot_be_encoded_is_rejected(demo, monkeypatch):
    for call in (demo.generate, demo.add_request, lambda text: demo.chat(ask(text))):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            call(HALF_EMOJI)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="no such word"):
            patch.setattr(demo.tokenizer, "encode", Mock(side_effect=RuntimeError("no such word")))
            call(TEXT)


def test_a_failing_chat_template_is_a_value_error(demo, monkeypatch):
    for template in (
        "{{ messages[0].content + 1 }}",
        "{{ raise_exception('no') }}",
        "{{",
        None,
    ):
        monkeypatch.setattr(demo.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match="chat template"):
            demo.chat(ask(TEXT))


def test_bos_comes_once(demo, monkeypatch):
    """As for Llama, the tokenizer puts BOS before a text, and the chat template writes it, too."""
    bos = "<|endoftext|>"
    bos_id = demo.tokenizer.convert_tokens_to_ids(bos)
    expected = [bos_id, *demo.tokenizer.encode(TEXT)]
    add_bos = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    monkeypatch.setattr(demo.tokenizer.backend_tokenizer, "post_processor", add_bos)
    monkeypatch.setattr(demo.tokenizer, "chat_template", bos + "{{ messages[0].content }}")
    (text,) = demo.generate(TEXT, GREEDY)
    (chat,) = demo.chat(ask(TEXT), GREEDY, use_tqdm=False)
    assert text["prompt_token_ids"] == expected
    assert chat["prompt_token_ids"] == expected
