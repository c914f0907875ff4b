"""The bodies that well-known clients send, as they send them, are served."""

import json

import pytest
from server_helpers import OPTIONS, post, start

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def url():
    with start(*OPTIONS) as (address, _):
        yield address


# A text completion of SillyTavern, of API type vLLM.
SILLYTAVERN = {
    "prompt": "What is 12 + 30?",
    "model": "demo_model",
    "max_tokens": 8,
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 40,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "min_tokens": 0,
    "stop": ["\nUser:"],
    "skip_special_tokens": True,
    "n": 1,
    "ignore_eos": False,
    "spaces_between_special_tokens": True,
    "stream": True,
}
LANGCHAIN = {
    "model": "demo_model",
    "prompt": ["What is 12 + 30?"],
    "temperature": 0.7,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "n": 1,
    "best_of": 1,
    "logit_bias": {},
    "max_tokens": 8,
    "seed": None,
    "logprobs": None,
}
LANGCHAIN_CHAT = {
    "model": "demo_model",
    "messages": [{"content": "What is 12 + 30?", "role": "user"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 8,
    "parallel_tool_calls": False,
    "service_tier": "auto",
    "store": False,
    "user": "user",
}
LITELLM = {
    "model": "demo_model",
    "messages": QUESTION,
    "stream": False,
    "n": 1,
    "max_tokens": 8,
    "max_completion_tokens": 8,
    "modalities": ["text"],
    "reasoning_effort": "low",
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "metadata": {"user_id": "1"},
}
GUIDELLM = {
    "model": "demo_model",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is 12 + 30?"}]}],
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 8,
    "max_tokens": 8,
    "ignore_eos": True,
    "stop": None,
}
VLLM = {
    "prompt": "12 + 30 =",
    "structured_outputs": {
        "regex": "[0-9]+",
        "disable_fallback": False,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
    },
    "use_beam_search": False,
    "length_penalty": 1.0,
    "detokenize": True,
    "return_token_ids": False,
    "max_tokens": 8,
}


@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETION, SILLYTAVERN),
        (COMPLETION, LANGCHAIN),
        (CHAT, LANGCHAIN_CHAT),
        (CHAT, LITELLM),
        (CHAT, GUIDELLM),
        (COMPLETION, VLLM),
    ],
)
def test_bodies_of_clients_are_served(url, path, body):
    reply = post(url, body, path)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path, prompt", [(COMPLETION, {"prompt": ["a", "a b c"]}), (CHAT, {})])
def test_each_chunk_has_the_usage_of_its_choice(url, path, prompt):
    """As in vLLM. The last chunk has that of all choices."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"stream": True, "stream_options": options, "max_tokens": 3, "n": 2, "ignore_eos": True}
    prompt = prompt or {"messages": QUESTION}
    lines = post(url, {**body, **prompt}, path).text.split("\n\n")
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    usage = last["usage"]
    seen = {}
    prompts = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        counts = chunk["usage"]
        seen.setdefault(choice["index"], []).append(counts["completion_tokens"])
        prompts[choice["index"]] = counts["prompt_tokens"]
        total = counts["prompt_tokens"] + counts["completion_tokens"]
        assert counts["total_tokens"] == total
    # A busy server sends several tokens in a chunk.
    assert all(sorted(set(counts)) == counts and counts[-1] == 3 for counts in seen.values())
    assert usage["completion_tokens"] == 3 * len(seen)
    assert usage["prompt_tokens"] == sum(prompts[index] for index in prompts if index % 2 == 0)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}])
def test_usage_in_each_chunk_needs_include_usage(url, options):
    """As in vLLM, which ignores the option otherwise."""
    options = {**options, "continuous_usage_stats": True}
    body = {"prompt": "a", "stream": True, "stream_options": options, "max_tokens": 2}
    reply = post(url, body)
    assert reply.status_code == 200
    assert "usage" not in reply.text
