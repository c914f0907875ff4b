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


# A text completion of SillyTavern, of API type vLLM and of API type Generic.
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
SILLYTAVERN_GENERIC = SILLYTAVERN | {
    "max_new_tokens": 8,
    "logprobs": 10,
    "typical_p": 1,
    "typical": 1,
    "skew": 0,
    "add_bos_token": True,
    "smoothing_factor": 0.0,
    "smoothing_curve": 1.0,
    "dry_allowed_length": 2,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_sequence_breakers": '["\\n", ":", "\\"", "*"]',
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "stopping_strings": ["\nUser:"],
    "truncation_length": 8192,
    "ban_eos_token": False,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "generic",
    "api_server": "http://127.0.0.1:8000/",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0.0,
    "top_n_sigma": 0.0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "rep_pen": 1.2,
    "rep_pen_range": 0,
    "rep_pen_slope": 1,
    "repetition_penalty_range": 0,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.2,
    "repeat_last_n": 0,
    "n_predict": 8,
    "num_predict": 8,
    "num_ctx": 8192,
    "mirostat": 0,
    "n_probs": 10,
}
LLAMA_CPP = {
    "messages": QUESTION,
    "return_progress": True,
    "sse_ping_interval": 1,
    "stream": True,
    "reasoning_format": "auto",
    "reasoning_control": True,
    "max_tokens": -1,
    "timings_per_token": True,
}
# With all settings of its form at their defaults.
LLAMA_CPP_SETTINGS = LLAMA_CPP | {
    "temperature": 0.8,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typ_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "backend_sampling": False,
    "cache_prompt": True,
}
OPEN_WEBUI = {
    "model": "demo_model",
    "messages": QUESTION,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8,
    "num_ctx": 4096,
    "num_keep": 24,
    "num_batch": 512,
    "num_thread": 4,
    "num_gpu": 1,
    "use_mmap": True,
    "use_mlock": False,
    "keep_alive": "5m",
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "tfs_z": 1.0,
    "reasoning_effort": "medium",
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
        (COMPLETION, SILLYTAVERN_GENERIC),
        (CHAT, LLAMA_CPP),
        (CHAT, LLAMA_CPP_SETTINGS),
        (CHAT, OPEN_WEBUI),
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
