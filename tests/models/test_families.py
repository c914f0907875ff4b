"""Every supported family gives the tokens of transformers, on one rank and on two."""

from itertools import product

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    generate_ids,
    greedy,
    random_prompt,
)
from families import FAMILIES, POOL, check_tokens, make_family

from nanovllm import LLM, SamplingParams

# Each of these shards another kind of tensor. Gemma 3 has norms, windows and scales of its own. The
# others differ in RoPE, windows or norms, which every rank has whole.
SHARDED = {
    "qwen2",
    "llama-2",
    "llama-biases",
    "phi3-window",
    "phi4-mini",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "qwen3.5-moe",
    "qwen3-next",
    "gemma3",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_match_transformers(tmp_path, name):
    oracle = make_family(tmp_path, name)
    for size in (1, 2) if name in SHARDED else (1,):
        check_tokens(tmp_path, oracle, tensor_parallel_size=size)


def compute_logprobs(llm, prompt):
    """Log probabilities [len(prompt) - 1, VOCAB_SIZE] of the tokens of a prompt."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    (output,) = llm.generate(prompt, params)
    items = [sorted(entry.items()) for entry in output["prompt_logprobs"][1:]]
    return torch.tensor(items)[..., 1]


IN_BFLOAT16 = [
    "llama-biases",
    "gemma3",
    "phi4-mini",
    "smollm3",
    "qwen3-moe",
    "qwen3.5-moe",
    "qwen3-next",
]


@pytest.mark.parametrize(
    "name, dtype, size",
    [
        ("qwen2", torch.float16, 1),
        *product(IN_BFLOAT16, [torch.bfloat16], [1]),
        ("qwen3.5-moe", torch.bfloat16, 2),  # experts and states
    ],
)
def test_low_precision_is_as_exact_as_transformers(tmp_path, name, dtype, size):
    check_precision(tmp_path, make_family(tmp_path, name, dtype=dtype), size)


def check_precision(directory, oracle, size=1):
    """The distance to float32 is at most 1.5 times that of transformers."""
    prompt = random_prompt(3, 40)
    with LLM(directory, num_kvcache_blocks=64, tensor_parallel_size=size) as llm:
        ours = compute_logprobs(llm, prompt)
    theirs = oracle.find_logprobs(prompt)
    oracle.model.float()
    exact = oracle.find_logprobs(prompt)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-moe-mixed", "phi4"])
def test_dummy_weights_are_the_same_on_any_number_of_ranks(tmp_path, name):
    """Norms are 1 and biases 0."""
    make_family(tmp_path, name)
    (tmp_path / "model.safetensors").unlink()
    prompts = [random_prompt(seed, 9) for seed in range(3)]
    found = []
    for size in (1, 2):
        options = {"load_format": "dummy", "tensor_parallel_size": size}
        with LLM(tmp_path, **POOL, **options, enable_kernels=False) as llm:
            found.append(generate_ids(llm, prompts, greedy(12)))
            for key, weight in llm.executor.worker.model.named_parameters():
                if weight.dim() == 1:
                    assert weight.eq(key.endswith("norm.weight")).all(), key
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) > 1
