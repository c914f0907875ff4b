"""Every supported family gives the tokens of transformers, on one rank and on two."""

from itertools import product

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from families import FAMILIES, make_family
from test_config_fields import WITHOUT_EFFECT, find_unread_fields
from transformers import SeedOssConfig

from nanovllm import LLM, SamplingParams
from nanovllm.models.architectures import ARCHITECTURES, Family
from nanovllm.models.decoder import DecoderSpec

# Each of these shards another kind of tensor. The other families differ in RoPE, windows or norms,
# which every rank has whole.
SHARDED = {
    "qwen2",
    "llama-2",
    "llama-biases",
    "gemma3",
    "olmo2",
    "olmo2-one-kv-head",
    "opt-350m",
    "opt-untied-narrow",
    "phi3-window",
    "phi4-mini",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "qwen3.5-moe",
    "qwen3-next",
    "qwen3-next-mixed",
}
POOL = {"num_kvcache_blocks": 40, "kvcache_block_size": 4}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_match_transformers(tmp_path, name):
    """Cold and from a warm cache, in chunks, after preemptions, whatever the default device is."""
    oracle = make_family(tmp_path, name)
    prompts = [random_prompt(length, length) for length in (1, 4, 5, 33, 70)]
    prompts.append(prompts[-1][:50] + random_prompt(0, 10))
    expected = [oracle(prompt, 12) for prompt in prompts]
    for size in (1, 2) if name in SHARDED else (1,):
        options = {**POOL, "max_num_batched_tokens": 24, "tensor_parallel_size": size}
        with torch.device("meta"), LLM(tmp_path, **options) as llm:
            for _ in range(2):
                assert generate_ids(llm, prompts, greedy(12)) == expected
                check_invariants(llm)
            assert llm.stats["num_preemptions"] > 0
            assert llm.stats["num_cached_tokens"] > 0


def compute_logprobs(llm, prompt):
    """Log probabilities [len(prompt), VOCAB_SIZE] of the token after each token of a prompt."""
    prefixes = [prompt[: n + 1] for n in range(len(prompt))]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB_SIZE)
    rows = []
    for output in llm.generate(prefixes, params, use_tqdm=False):
        (logprobs,) = output["logprobs"]
        rows.append([logprobs[token_id] for token_id in range(VOCAB_SIZE)])
    return torch.tensor(rows)


LOW_PRECISION = {
    "qwen2": torch.float16,
    "qwen3": torch.bfloat16,
    "llama-3.1": torch.bfloat16,
    "llama-biases": torch.bfloat16,
    "gemma3": torch.bfloat16,
    "ministral-windows": torch.bfloat16,
    "granite": torch.bfloat16,
    "granite-untied": torch.float16,
    "olmo2": torch.bfloat16,
    "olmo3": torch.float16,
    "phi4": torch.float16,
    "phi4-mini": torch.bfloat16,
    "smollm3": torch.bfloat16,
    "opt-350m": torch.bfloat16,
    "opt-untied-narrow": torch.float16,
    "qwen3-moe": torch.bfloat16,
    "qwen3.5-moe": torch.bfloat16,
    "qwen3.5-moe-tied": torch.float16,
    "qwen3-next": torch.bfloat16,
}
# Biases, norms of all heads, a narrow embedding, experts, and states.
ON_RANKS = ["llama-biases", "olmo2", "opt-350m", "qwen3-moe", "qwen3.5-moe"]


@pytest.mark.parametrize("name, size", [*product(LOW_PRECISION, [1]), *product(ON_RANKS, [2])])
def test_low_precision_is_as_exact_as_transformers(tmp_path, name, size):
    """The distance to float32 is at most 1.5 times that of transformers."""
    oracle = make_family(tmp_path, name, dtype=LOW_PRECISION[name])
    prompt = random_prompt(3, 40)
    with LLM(tmp_path, num_kvcache_blocks=64, tensor_parallel_size=size) as llm:
        ours = compute_logprobs(llm, prompt)
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        exact = oracle.model.float()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def test_opt_uses_all_learned_positions(tmp_path):
    oracle = make_family(tmp_path, "opt")
    prompt = random_prompt(1, 250)
    llm = LLM(tmp_path, num_kvcache_blocks=16)
    (output,) = llm.generate(prompt, greedy(50), use_tqdm=False)
    assert output["token_ids"] == oracle(prompt, 6)
    assert output["finish_reason"] == "length"
    with pytest.raises(ValueError, match="lower it to 256"):
        LLM(tmp_path, max_model_len=257)


@pytest.mark.parametrize("name", ["opt", "qwen3-moe-mixed", "gemma3", "olmo2", "phi4"])
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
            for key, weight in llm.model_runner.executor.worker.model.named_parameters():
                if weight.dim() == 1:
                    assert weight.eq(key.endswith("norm.weight")).all(), key
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0]))) > 1


def test_the_number_of_experts_has_a_second_name(tmp_path):
    oracle = make_family(tmp_path, "qwen3-moe")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_local_experts"', '"num_experts"'))
    prompt = random_prompt(1, 9)
    assert generate_ids(LLM(tmp_path, **POOL), [prompt], greedy(8)) == [oracle(prompt, 8)]


def test_a_known_family_is_added_by_a_row(tmp_path, monkeypatch):
    """The steps of models/README.md, for Seed-OSS: a row, a checkpoint, its tokens, its fields."""
    with pytest.raises(ValueError, match="SeedOssForCausalLM"):
        check_seed_oss(tmp_path / "without")
    row = Family(DecoderSpec, names={"o_bias": "attention_out_bias"})
    monkeypatch.setitem(ARCHITECTURES, "SeedOssForCausalLM", row)
    check_seed_oss(tmp_path / "with")
    unread = find_unread_fields(SeedOssConfig, "SeedOssForCausalLM")
    assert unread.difference(WITHOUT_EFFECT) == {"residual_dropout"}, "only training uses it"


def check_seed_oss(directory):
    changes = {"family": SeedOssConfig, "attention_bias": True, "attention_out_bias": False}
    oracle = Oracle(make_checkpoint(directory, **changes))
    prompt = random_prompt(1, 30)
    with LLM(directory, **POOL, max_num_batched_tokens=7) as llm:
        assert generate_ids(llm, [prompt], greedy(9)) == [oracle(prompt, 9)]
