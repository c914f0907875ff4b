"""What each endpoint does with the parameters of a request."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from server_helpers import call_endpoint, parse_body

from nanovllm import SamplingParams
from nanovllm.features.structured_outputs.grammars import StructuredOutputs
from nanovllm.server.chat_completions import parse_chat
from nanovllm.server.errors import ApiError
from nanovllm.server.parameters import CHAT, COMPLETION, IGNORED, NEUTRAL
from nanovllm.server.tokenization import detokenize, tokenize

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "subtract"}}
CALL = {"tools": [TOOL], "tool_choice": "required"}
JSON = {"response_format": {"type": "json_object"}}
NEUTRAL_PAIRS = [(name, value) for value, names in NEUTRAL for name in names.split()]
NEUTRAL_NAMES = {name for name, _ in NEUTRAL_PAIRS}
VALID = {False: {"prompt": "x"}, True: {"messages": QUESTION}}


def read(llm, body, is_chat=True):
    """Return the sampling parameters of a request."""
    [(_, params, _)], _ = parse_body(llm, {**VALID[is_chat], **body}, is_chat)
    return params


def reject(llm, body, is_chat=True):
    with pytest.raises(ApiError) as caught:
        parse_body(llm, {**VALID[is_chat], **body}, is_chat)
    return caught.value


@pytest.mark.parametrize("is_chat, names", [(True, CHAT), (False, COMPLETION)])
def test_values_that_say_nothing_change_nothing(llm, is_chat, names):
    expected = parse_body(llm, VALID[is_chat], is_chat)
    accepted = [("unknown", value) for value in (None, "", [], {})]
    neutral = [(name, value) for name, value in NEUTRAL_PAIRS if name not in names]
    accepted += [(name, 0.0) for name, value in neutral if value is False]
    accepted += [(name, {"any": ["value"]}) for name in IGNORED]
    accepted += neutral
    accepted += [(name, None) for name in names - VALID[is_chat].keys()]
    for name, value in accepted:
        assert parse_body(llm, {**VALID[is_chat], name: value}, is_chat) == expected, name


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_cache_salt_is_any_text(llm, is_chat):
    assert read(llm, {"cache_salt": "\ud800 a"}, is_chat).cache_salt == "\ud800 a"
    assert reject(llm, {"cache_salt": 3}, is_chat).param == "cache_salt"


@pytest.mark.parametrize("is_chat, names", [(True, CHAT), (False, COMPLETION)])
def test_other_values_are_rejected_by_name(llm, is_chat, names):
    for name in ["unknown", "max_new_tokens", *NEUTRAL_NAMES - names]:
        for other in ("x", [3], {"x": 1}, 7, *([False, 0] if name not in NEUTRAL_NAMES else ())):
            error = reject(llm, {name: other}, is_chat)
            assert error.param == name
            assert name in error.message


@pytest.mark.parametrize(
    "is_chat, body, param",
    [
        (False, {"messages": QUESTION}, "messages"),
        (False, {"prompt": None}, "prompt"),
        (False, {"prompt": []}, "prompt"),
        (False, {"prompt": {"x": 1}}, "prompt"),
        (False, {"prompt": [1.5]}, "prompt"),
        (True, {"messages": None}, "messages"),
        (False, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (True, {"prompt": "x"}, "prompt"),
        (True, {"stream_options": {"include_usage": True}}, "stream_options"),
        (True, {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        (True, {"stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include"),
        (True, {"reasoning_effort": {"effort": "low"}}, "reasoning_effort"),
        (True, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (True, {"stop_token_ids": [2.5]}, "stop_token_ids[0]"),
        (True, {"top_logprobs": 1}, "top_logprobs"),
        (True, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (True, {"logprobs": 3}, "logprobs"),
        (False, {"echo": False, "max_tokens": 0}, "max_tokens"),
        (False, {"echo": True, "max_tokens": False}, "max_tokens"),
        (True, {"max_tokens": 0}, "max_tokens"),
        (True, {"max_tokens": "x", "max_completion_tokens": 2}, "max_tokens"),
        (True, {"response_format": False}, "response_format"),
        (True, {"response_format": ""}, "response_format"),
        (True, {"response_format": {"type": "json_object", "schema": False}}, "response_format"),
        (True, {"enable_thinking": "no"}, "enable_thinking"),
        (False, {"enable_thinking": False}, "enable_thinking"),
        (False, {"include_reasoning": False}, "include_reasoning"),
        (True, {"think": False}, "think"),
        (True, {"thinking_budget": 0}, "thinking_budget"),
        (True, {"do_sample": False}, "do_sample"),
        (True, {"messages": []}, "messages"),
        (False, {"tool_choice": "required"}, "tool_choice"),
        (True, {"tools": [TOOL]}, "tools"),  # the template ignores them
        (True, {"tools": [{}]}, "tools[0].type"),
        (True, {"tools": [TOOL], "tool_choice": OTHER}, "tool_choice"),
        (True, {**CALL, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (True, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        (True, {"continue_final_message": True}, "messages"),
        (True, {"logit_bias": [3]}, "logit_bias"),
        (True, {"logit_bias": {"5.0": 1}}, "logit_bias[0]"),
        (True, {"logit_bias": {"5" * 5000: 1}}, "logit_bias"),
        (False, {"response_format": {"type": "xml"}}, "response_format"),
        (True, {"x" * 10**6: ["y" * 10**6] * 10}, "x" * 10**6),
    ],
)
def test_an_error_names_the_parameter(llm, is_chat, body, param):
    error = reject(llm, body, is_chat)
    assert error.param.startswith(param)
    assert error.code is None
    assert len(error.message) < 400


@pytest.mark.parametrize("prompts, n", [("x", 5000), (["x"] * 4097, 1), ([[1], [2]], 4096)])
def test_samples_are_counted_before_their_grammar_is_compiled(llm, monkeypatch, prompts, n):
    monkeypatch.setattr(StructuredOutputs, "prepare", None)
    error = reject(llm, {"prompt": prompts, "n": n, "structured_outputs": {"regex": "a"}}, False)
    assert error.param == "n"
    assert "the number of prompts times n must be" in error.message


def test_two_constraints_are_rejected_with_advice(llm):
    body = {"structured_outputs": {"regex": "a"}}
    for name, other in (("tool_choice", CALL), ("response_format", JSON)):
        error = reject(llm, {**body, **other})
        expected = f"{name} and structured_outputs both constrain the reply: leave one of them out"
        assert error.message == expected


def test_the_package_for_constraints_is_named_if_it_is_missing(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for body in (JSON, CALL):
        assert "pip install 'nanovllm[structured]'" in reject(llm, body).message


@pytest.mark.parametrize(
    "endpoint, body, param",
    [
        (tokenize, {}, "prompt"),
        (tokenize, {"prompt": "x", "messages": QUESTION}, "prompt"),
        (tokenize, {"messages": []}, "messages"),
        (tokenize, {"prompt": "x" * 10**6}, "prompt"),
        (detokenize, {"tokens": ["x"]}, "tokens[0]"),
        (detokenize, {"tokens": [10**6]}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(llm, endpoint, body, param):
    with pytest.raises(ApiError) as caught:
        call_endpoint(endpoint, body, llm)
    assert caught.value.param == param


def test_an_error_of_the_tokenizer_is_an_error_of_the_tokens(llm, monkeypatch):
    monkeypatch.setattr(llm, "tokenizer", SimpleNamespace(decode=lambda *_, **__: 1 // 0))
    with pytest.raises(ApiError, match="cannot decode") as caught:
        call_endpoint(detokenize, {"tokens": [1]}, llm)
    assert caught.value.param == "tokens"


@pytest.mark.parametrize("name", ["chat_template_kwargs", "messages"])
def test_a_lone_surrogate_is_an_error_of_the_client(llm, monkeypatch, name):
    template = "{{ text }}{{ messages[0].content }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    text = "\ud800"
    message = {"role": "user", "content": text}
    values = {"messages": [message], "chat_template_kwargs": {"text": text}}
    body = {**VALID[True], name: values[name]}
    for endpoint in (partial(parse_chat, "model", False), tokenize):
        with pytest.raises(ApiError, match="surrogates not allowed"):
            call_endpoint(endpoint, body, llm)


# What LangChain, SillyTavern, litellm and vLLM's client send beside the documented values.
NEUTRAL_VALUES = {
    "best_of": 1,
    "detokenize": True,
    "length_penalty": 1.0,
    "metadata": {"user_id": "1"},
    "modalities": ["text"],
    "service_tier": "auto",
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "verbosity": "low",
}


@pytest.mark.parametrize("endpoint", [partial(parse_chat, "model", False), tokenize])
def test_thinking_can_be_chosen_as_in_qwens_own_programs(llm, monkeypatch, endpoint):
    """At the top level of a body, or as a variable of the template."""
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ enable_thinking }}")

    def render(**body):
        result = call_endpoint(endpoint, {**VALID[True], **body}, llm)
        ids = result["tokens"] if endpoint is tokenize else result.prompts[0].token_ids
        return llm.tokenizer.decode(ids)

    for value in (False, True):
        variables = {"chat_template_kwargs": {"enable_thinking": value}}
        assert render(enable_thinking=value) == render(**variables) == str(value)
        assert render(enable_thinking=value, **variables) == str(value)
        with pytest.raises(ApiError, match="contradicts") as caught:
            render(enable_thinking=not value, **variables)
        assert caught.value.param == "enable_thinking"


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"response_format": {}}, {}),
        ({"max_tokens": 16.0}, {"max_tokens": 16}),
        ({"max_tokens": 10**6}, {"max_tokens": 10**6}),  # max_model_len ends the sequence
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"seed": -1.0}, {"seed": None}),
        ({"tool_choice": "none", "tools": [TOOL]}, {}),
        ({"reasoning_effort": "low", **NEUTRAL_VALUES}, {}),
        ({"logit_bias": {"5": -100, "6": 1.5}}, {"logit_bias": {5: -100, 6: 1.5}}),
    ],
)
def test_values_of_many_clients_are_understood(llm, body, expected):
    assert read(llm, body) == SamplingParams(**{"max_tokens": llm.max_model_len, **expected})


@pytest.mark.parametrize(
    "is_chat, body",
    [
        (False, {"prompt": [5] * 3000}),
        (False, {"prompt": ["x", "word " * 10**6]}),
        (True, {"messages": [{"role": "user", "content": "word " * 10**6}]}),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code(llm, is_chat, body):
    error = reject(llm, body, is_chat)
    assert error.code == "context_length_exceeded"
    assert error.message.startswith("This model's maximum context length is 1024 tokens")
    assert error.param == ("messages" if is_chat else "prompt")


def test_defaults_come_from_the_checkpoint(llm, monkeypatch):
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    monkeypatch.setattr(llm.input_processor, "default_params", defaults)
    body = {"temperature": None, "top_p": 1, "top_k": 0, "seed": -1}
    expected = SamplingParams(temperature=0.6, top_k=0, top_p=1, max_tokens=16)
    assert read(llm, body, is_chat=False) == expected
    expected = SamplingParams(temperature=0, top_k=20, top_p=0.95, max_tokens=1024)
    assert read(llm, {"temperature": 0}) == expected
    for seed in (-2, -(2**63), 2**64 - 1):
        assert read(llm, {"seed": seed}).seed == seed
