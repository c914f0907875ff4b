"""Gemma 3, Phi and SmolLM3: log probabilities, kernels, and longrope."""

import pytest
import torch
from conftest import generate_ids, greedy, random_prompt
from families import PHI4_MINI, make_family
from test_families import compute_logprobs

from nanovllm import LLM
from nanovllm.kernels.cpu.library import reason_unavailable

POOL = {"num_kvcache_blocks": 64, "kvcache_block_size": 4}
NAMES = [
    "gemma3",
    "phi3-window",
    "phi4-mini",
    "smollm3-windows",
]


@pytest.mark.parametrize("enable_kernels", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_match_transformers(tmp_path, name, enable_kernels):
    oracle = make_family(tmp_path, name)
    prompt = random_prompt(3, 60)
    ours = compute_logprobs(LLM(tmp_path, **POOL, enable_kernels=enable_kernels), prompt)
    torch.testing.assert_close(ours, oracle.find_logprobs(prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(reason_unavailable(torch.float32) is not None, reason="no compiler")
@pytest.mark.parametrize("name", ["phi4", "phi4-mini", "smollm3-windows"])
def test_the_layers_of_a_step_are_one_cpp_call(tmp_path, layer_calls, name):
    """The last layer of a prefill is computed separately, first for K/V, then for the logits."""
    make_family(tmp_path, name)
    llm = LLM(tmp_path, **POOL, device="cpu")
    layer_calls.clear()
    generate_ids(llm, [[1, 2, 3]], greedy(2))
    num_layers = len(llm.executor.worker.model.model.layers)
    assert layer_calls == [num_layers - 1, 1, 1, num_layers]


ORIGINAL_LEN = 64  # of longrope


@pytest.mark.parametrize("max_model_len", [None, 50, ORIGINAL_LEN])
def test_longrope_up_to_the_original_length(tmp_path, max_model_len):
    """The short factors apply, and the original length is the default of max_model_len."""
    oracle = make_family(tmp_path, "phi4-mini", original_max_position_embeddings=ORIGINAL_LEN)
    llm = LLM(tmp_path, **POOL, max_model_len=max_model_len)
    assert llm.max_model_len == (max_model_len or ORIGINAL_LEN)
    prompts = [random_prompt(length, length) for length in (1, 30)]
    expected = [oracle(prompt, 20) for prompt in prompts]
    assert generate_ids(llm, prompts, greedy(20)) == expected


@pytest.mark.parametrize(
    "max_model_len, lengths", [(ORIGINAL_LEN + 1, (1, 30)), (256, (1, 30, 65, 100))]
)
def test_longrope_above_the_original_length(tmp_path, max_model_len, lengths):
    """The long factors apply, to short contexts, too. transformers has short ones for these."""
    names = dict(original_max_position_embeddings=ORIGINAL_LEN)
    short_oracle = make_family(tmp_path, "phi4-mini", **names)
    rope = dict(PHI4_MINI["rope_parameters"])
    rope["short_factor"] = rope["long_factor"]
    oracle = make_family(tmp_path / "long", "phi4-mini", **names, rope_parameters=rope)
    llm = LLM(tmp_path, **POOL, max_model_len=max_model_len)
    assert llm.max_model_len == max_model_len
    prompts = [random_prompt(length, length) for length in lengths]
    expected = [oracle(prompt, 20) for prompt in prompts]
    assert generate_ids(llm, prompts, greedy(20)) == expected
    assert expected[1] != short_oracle(prompts[1], 20)
    with pytest.raises(ValueError, match="lower it to 256"):
        LLM(tmp_path, **POOL, max_model_len=257)
