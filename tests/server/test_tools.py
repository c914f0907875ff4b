"""Tool calls and reasoning in replies."""

import shutil
from unittest.mock import patch

import pytest
from server_helpers import parse_body, write
from transformers import AddedToken, AutoTokenizer

from nanovllm import DEMO_MODEL, LLM
from nanovllm.server.errors import ApiError
from nanovllm.text.vocabulary import TAGS

TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}{{ start }}"
ADD = {"type": "function", "function": {"name": "add"}}
STOP = {"type": "function", "function": {"name": "stop"}}
BODY = {"messages": [{"role": "user", "content": "1 + 1"}], "tools": [ADD, STOP]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "add", "arguments": '{"a": 1}'}


@pytest.fixture(scope="module")
def llm(llm):
    """The demo model with a template that shows tools to it, but it does not know them."""
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def reply_to(llm, text, is_chat=True, parses_reasoning=True, reason="stop", **body):
    """The reply in which a model writes the tokens of a text, or the chunks of the reply."""
    messages = {"messages": BODY["messages"]} if is_chat else {"prompt": "a"}
    prompts, reply = parse_body(llm, {**messages, **body}, is_chat, parses_reasoning)
    (request,) = llm.input_processor.make_requests(prompts, llm.eos_token_ids, {})
    outputs = []
    for token_id in llm.tokenizer.encode(text, add_special_tokens=False):
        request.token_ids.append(token_id)
        request.commit()
        outputs.append(request.output())
    request.finish_reason = reason
    request.commit()
    return write(reply, [*outputs[:-1], request.output()])


def answer(llm, text, reason="stop", parses_reasoning=False, **body):
    """The choices of a reply, or of its chunks, if the model writes `text`."""
    body = {"tools": BODY["tools"], **body}
    reply = reply_to(llm, text, parses_reasoning=parses_reasoning, reason=reason, **body)
    chunks = reply if body.get("stream") else [reply]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_a_reply_with_calls(llm):
    (choice,) = answer(llm, f"I add.{CALL}\n{CALL}")
    message = choice["message"]
    assert message["content"] == "I add."
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [FUNCTION, FUNCTION]
    assert message["tool_calls"][0].keys() == {"id", "type", "function"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    (choice,) = answer(llm, CALL, parallel_tool_calls=False)
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("is_stream", [False, True])
def test_only_a_named_call_ends_with_stop(llm, is_stream):
    """As in OpenAI's API and in vLLM."""
    named = {"type": "function", "function": {"name": "add"}}
    for choice, reason in [(named, "stop"), ("required", "tool_calls"), ("auto", "tool_calls")]:
        *_, last = answer(llm, CALL, tool_choice=choice, stream=is_stream)
        assert last["finish_reason"] == reason
        *_, last = answer(llm, CALL, "length", tool_choice=choice, stream=is_stream)
        assert last["finish_reason"] == "length"


@pytest.fixture(scope="module")
def special(tmp_path_factory):
    """The demo model with tags that its tokenizer marks as special."""
    directory = tmp_path_factory.mktemp("special")
    shutil.copytree(DEMO_MODEL, directory, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tags = [AddedToken(tag, special=True, normalized=False) for tag in TAGS]
    tokenizer.add_tokens(tags, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    with LLM(str(directory), dtype="float32", num_kvcache_blocks=64) as llm:
        # The model itself writes nothing here.
        llm.input_processor.encoder.vocab_size = len(tokenizer)
        llm.input_processor.vocab_size = len(tokenizer)
        yield llm


def test_tags_are_parsed_if_the_tokenizer_hides_them(special):
    text = f"<think>so</think>yes<|im_start|>{CALL}<|im_end|>"
    message = reply_to(special, text, tools=[ADD])["choices"][0]["message"]
    assert message["reasoning"] == "so"
    assert message["content"] == "yes"
    assert message["tool_calls"][0]["function"] == FUNCTION
    chunks = reply_to(special, text, tools=[ADD], stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"
    reply = reply_to(special, CALL, parses_reasoning=False, tools=[ADD])
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


def test_other_texts_have_no_special_tokens(special):
    text = f"<think>so</think>yes{CALL}"
    reply = reply_to(special, text, parses_reasoning=False, tools=[ADD], tool_choice="none")
    expected = f"soyes{CALL.removeprefix('<tool_call>').removesuffix('</tool_call>')}"
    assert reply["choices"][0]["message"]["content"] == expected
    assert reply_to(special, text, is_chat=False)["choices"][0]["text"] == expected


def test_the_tokens_of_thoughts_are_counted(special, llm):
    def count(model, text, **body):
        details = reply_to(model, text, **body)["usage"]["completion_tokens_details"]
        *_, last = reply_to(
            model, text, **body, stream=True, stream_options={"include_usage": True}
        )
        assert last["usage"]["completion_tokens_details"] == details
        return details["reasoning_tokens"]

    def count_tokens(*texts):
        return sum(len(llm.tokenizer.encode(text)) for text in texts)

    for thoughts in ("", "What is 3 + 4?", "né 你"):
        text = f"<think>{thoughts}</think>Yes."
        assert count(special, text) == count_tokens(thoughts)
        # Without tokens for the tags, one token can have a part of a tag and of the thoughts.
        assert abs(count(llm, text) - count_tokens(thoughts)) <= 1
    assert count(special, f"<think>so, so{CALL}", tools=[ADD]) == count_tokens("so, so")
    # Text can have more tokens when it is tokenized again, such as U+FFFD, which is one byte here.
    encode = llm.tokenizer.encode

    def longer(text, **options):
        return [1] * 99 if text == "so" else encode(text, **options)

    with patch.object(llm.tokenizer, "encode", longer):
        assert count(llm, "<think>so") == count_tokens("<think>so")
    # A tag that the model writes again is no thought.
    start = {"start": "<think>\n"}
    text = "<think>\nso</think>Yes."
    assert count(special, text, chat_template_kwargs=start) == count_tokens("\nso")
    usage = reply_to(special, "<think>so</think>", parses_reasoning=False)["usage"]
    assert "completion_tokens_details" not in usage


def test_a_template_can_read_tools_of_a_message_only(llm, monkeypatch):
    """Such as that of Phi-4-mini."""
    template = "{% for m in messages %}{{ m.content }}{{ m['tools'] }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(ApiError, match="tools need a chat template that uses them"):
        parse_body(llm, BODY, True)
    parse_body(llm, {**BODY, "tool_choice": "required"}, True)


@pytest.mark.parametrize("choice", ["auto", "required", "none", None])
def test_tools_are_shown_to_the_model_unless_it_must_not_call_them(llm, choice):
    [(prompt, params, _)], _ = parse_body(llm, {**BODY, "tool_choice": choice}, True)
    assert ("add" in llm.tokenizer.decode(prompt)) == (choice != "none")
    assert (params.structured_outputs is not None) == (choice == "required")
    (reply,) = answer(llm, CALL, tool_choice=choice)
    assert (reply["message"]["content"] == CALL) == (choice == "none")
    assert reply["finish_reason"] == ("stop" if choice == "none" else "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": ADD["function"]}])
def test_a_required_call_that_is_cut_is_no_content(llm, choice):
    for text in (CALL[:-5], f"<think>so</think>{CALL[:30]}"):
        (whole,) = answer(llm, text, "length", parses_reasoning=True, tool_choice=choice)
        assert whole["message"]["content"] is None
        assert whole["finish_reason"] == "length"
        parts = answer(llm, text, "length", parses_reasoning=True, tool_choice=choice, stream=True)
        assert not any("content" in part["delta"] for part in parts)
    (cut,) = answer(llm, f"{CALL}\n{CALL[:30]}", "length", tool_choice=choice)
    assert [call["function"] for call in cut["message"]["tool_calls"]] == [FUNCTION]
    assert cut["message"]["content"] is None


def test_the_end_of_a_call_has_a_chunk_of_its_own(llm):
    *_, call, end = answer(llm, CALL, stream=True)
    assert call["finish_reason"] is None
    assert call["delta"]["tool_calls"][0]["function"] == FUNCTION
    assert end == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}


@pytest.mark.parametrize("parses_reasoning", [False, True])
def test_the_first_space_of_a_reply_is_content(llm, parses_reasoning):
    """A message that is continued needs it."""
    (choice,) = answer(llm, " Paris", parses_reasoning=parses_reasoning)
    assert choice["message"]["content"] == " Paris"
    parts = answer(llm, " Paris", parses_reasoning=parses_reasoning, stream=True)
    assert "".join(part["delta"].get("content", "") for part in parts) == " Paris"


def test_reasoning_can_be_left_out(llm):
    reply = reply_to(llm, "<think>So, so.</think>Yes", include_reasoning=False)
    message = reply["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes", "refusal": None}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = reply_to(llm, "<think>So, so.</think>Yes", include_reasoning=False, stream=True)
    assert "reasoning" not in str(chunks)


def test_reasoning_has_two_names(llm):
    text = f"<think>So.</think>\n\n{CALL}"
    (choice,) = answer(llm, text, parses_reasoning=True)
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "So."
    assert message["tool_calls"][0]["function"] == FUNCTION
    assert message["content"] is None
    deltas = [chunk["delta"] for chunk in answer(llm, text, parses_reasoning=True, stream=True)]
    assert deltas[0] == {"role": "assistant"}
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "So."
