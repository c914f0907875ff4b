"""Options and sampling parameters: invalid ones are rejected by name, and all are documented."""

import inspect
from dataclasses import fields

import numpy as np
import pytest
from conftest import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config

HUGE = 10**30  # overflows every integer type
INVALID_OPTIONS = {
    "dtype": ["int8"],
    "device": ["tpu", "cuda:99", 3],
    "tensor_parallel_size": [0],
    "max_model_len": [0],
    "max_num_batched_tokens": [0, HUGE],
    "max_num_seqs": [0, 2.5, True, HUGE],
    "kvcache_block_size": [1, 2**31 - 1, HUGE],
    "num_kvcache_blocks": [0, 2**31 - 1, HUGE],
    "gpu_memory_utilization": [0.0, 1.1],
    "kvcache_memory_bytes": [0, HUGE],
    "enable_prefix_caching": ["yes"],
    "enable_kernels": [1],
    "load_format": ["gguf"],
    "seed": [-1, 2**64],
    "num_speculative_tokens": [-1, HUGE],
    "trace": [3],
}
INVALID_PARAMS = {
    "n": [0, 10**9],
    "temperature": [-0.1, float("nan"), float("inf"), 10**400, "hot"],
    "top_p": [0.0, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0.0, 1e-300, 1e300],
    "max_tokens": [0, None, np.float64(3.0)],
    "min_tokens": [-1, 65],
    "stop": ["", ["a", 3], 5, ["a"] * 65],
    "stop_token_ids": [[-1], 3, ["x"], range(1025), "", {}, b"a"],
    "ignore_eos": [1],
    "seed": ["x", 2**64, -(2**63) - 1],
    "logprobs": [-1, True],
    "prompt_logprobs": [-1, "x"],
    "structured_outputs": [{}, {"regex": 3}, "a"],
    "logit_bias": [{1: 101}, {1: None}, {-1: 0}, {1.5: 0}, {"a": 1}, [3]],
    "logits_processors": [3, [3], "f"],
    "cache_salt": [3, b"a"],
}


def list_pairs(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize("name, value", list_pairs(INVALID_OPTIONS))
def test_an_invalid_option_is_named(make_llm, name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        make_llm(**{name: value})


@pytest.mark.parametrize("name, value", list_pairs(INVALID_PARAMS))
def test_an_invalid_sampling_parameter_is_named(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        SamplingParams(**{name: value})


def test_every_sampling_parameter_has_an_invalid_value():
    assert list(INVALID_PARAMS) == [field.name for field in fields(SamplingParams)]


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"max_num_seq": 3}, "'max_num_seq': .*max_num_seqs"),
        ({"max_model_len": 257}, "max_model_len=257.* 256"),
        ({"max_model_len": 100, "num_kvcache_blocks": 5}, "max_model_len=100.* 20.*num_kvcache_bl"),
        ({"kvcache_memory_bytes": 100, "num_kvcache_blocks": None}, "kvcache_memory_bytes"),
        ({"attention_backend": "fast"}, "one of 'auto', .*'torch', not 'fast'"),
        ({"enable_kernels": False, "attention_backend": "cpp"}, "'cpp' needs enable_kernels=True"),
    ],
)
def test_an_error_says_what_is_possible(make_llm, options, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        make_llm(**options)


def test_help_shows_every_option():
    assert list(inspect.signature(LLM).parameters) == [field.name for field in fields(Config)]
    for documented in (Config, SamplingParams):
        for field in fields(documented):
            assert f"\n        {field.name}: " in documented.__doc__


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "temperature"])
def test_a_message_is_short_whatever_the_value(name):
    large = {str(i): [i] for i in range(10**5)}
    for value in (10**5000, large, [[{"x": "y" * 10**6}] * 10**5] * 10**5):
        with pytest.raises((ValueError, TypeError), match=name) as caught:
            SamplingParams(**{name: value})
        assert len(str(caught.value)) < 300


def test_numpy_numbers_become_python_numbers():
    """NumPy's integers would overflow."""
    given = {
        "temperature": np.float32(0.5),
        "top_p": np.float16(0.5),
        "top_k": np.int8(5),
        "max_tokens": np.int64(70),
        "seed": np.uint64(2**64 - 1),
    }
    params = SamplingParams(stop=("a", "b"), stop_token_ids=np.array([3]), **given)
    for name, value in given.items():
        kept = getattr(params, name)
        assert kept == value
        assert type(kept) in (int, float)
    assert params.stop_token_ids == [3]
    assert type(params.stop_token_ids[0]) is int


def test_max_model_len_is_limited_by_the_model_the_cache_and_4096(tmp_path, make_llm):
    assert make_llm().max_model_len == 256
    assert make_llm(num_kvcache_blocks=10).max_model_len == 40
    assert make_llm(max_model_len=30).max_model_len == 30
    make_checkpoint(tmp_path, max_position_embeddings=5000)
    assert LLM(str(tmp_path), num_kvcache_blocks=400).max_model_len == 4096
