"""What users of other engines have reported of mixtures and of dense families does not happen here.

Each test names a report. The models are random, and transformers computes the expected tokens.
Reports of quantized mixtures are in tests/checkpoints/test_quantization.py.
"""

import json

import pytest
import torch
from conftest import (
    Oracle,
    check_invariants,
    edit_config,
    edit_weights,
    generate_ids,
    greedy,
    random_prompt,
)
from families import YARN, YARN_SCALES, make_family
from transformers import AutoModelForCausalLM

from nanovllm import LLM

POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}
PROMPTS = [random_prompt(length, length) for length in (1, 9, 100)]
NAN_TOKEN = 96


def check_tokens(directory, oracle, **options):
    with LLM(directory, **POOL, **options) as llm:
        expected = [oracle(prompt, 12) for prompt in PROMPTS]
        assert generate_ids(llm, PROMPTS, greedy(12)) == expected


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_ranks_keep_the_value_heads_of_their_key_heads(tmp_path, name):
    """llama.cpp #21732, vLLM #36242: ranks with several key heads combined the wrong ones."""
    oracle = make_family(tmp_path, name, linear_num_key_heads=4, linear_num_value_heads=8)
    check_tokens(tmp_path, oracle, tensor_parallel_size=2)


@pytest.mark.parametrize(
    "name, factor", [("smollm3", 1.0), ("qwen3-next", 0.3), ("qwen3.5-moe", 0.5)]
)
def test_yarn_is_applied_by_each_family(tmp_path, name, factor):
    """omlx #3347: it was ignored with partial RoPE. Layers without RoPE have no factor on cos."""
    rope = dict(YARN, **YARN_SCALES, partial_rotary_factor=factor)
    check_tokens(tmp_path, make_family(tmp_path, name, rope_parameters=rope))


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5-moe"])
@pytest.mark.parametrize("value", [None, False, True])
def test_weights_of_experts_are_normalized_as_the_class_says(tmp_path, name, value):
    """Swiftlet #6: releases of Qwen3.5-MoE leave norm_topk_prob out. There it has no effect."""
    make_family(tmp_path, name)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("norm_topk_prob", None)
    path.write_text(json.dumps(config))
    if value is not None:
        edit_config(tmp_path, norm_topk_prob=value)
    check_tokens(tmp_path, Oracle(AutoModelForCausalLM.from_pretrained(tmp_path).eval()))


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3"])
@pytest.mark.parametrize("with_kernels", [True, False])
def test_nan_of_one_request_reaches_no_other(tmp_path, name, with_kernels):
    """torchtitan #1237: NaN spread between rows of experts. A row with NaN chooses some as well."""
    oracle = make_family(tmp_path, name, tie_word_embeddings=False)
    embedding = "model.embed_tokens.weight"
    edit_weights(tmp_path, lambda weights: weights[embedding][NAN_TOKEN].fill_(torch.nan))
    shared = [token for token in random_prompt(7, 60) if token != NAN_TOKEN]
    prompts = [shared[:40], [*shared[:40], NAN_TOKEN, 1], [*shared[:20], NAN_TOKEN, *shared[20:50]]]
    prompts += [shared[:52], [*shared[:48], 4]]
    with LLM(tmp_path, **POOL, enable_kernels=with_kernels) as llm:
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="its logits are NaN"):
                outputs = llm.generate(prompts, greedy(12))
            check_invariants(llm)
            for prompt, output in zip(prompts, outputs):
                has_nan = NAN_TOKEN in prompt
                assert output["finish_reason"] == ("error" if has_nan else "length")
                assert has_nan or output["token_ids"] == oracle(prompt, 12)


@pytest.mark.parametrize("layers", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]])
def test_smollm3_by_list_of_layers(tmp_path, layers):
    """transformers #43756, executorch #22043: 1 means RoPE, and the list precedes the interval."""
    check_tokens(tmp_path, make_family(tmp_path, "smollm3", no_rope_layers=layers))
