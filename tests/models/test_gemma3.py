"""Gemma 3 gives the tokens of transformers, from all forms of its checkpoints."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    cover_pairs,
    edit_weights,
    generate_ids,
    greedy,
    make_checkpoint,
    make_drafts_free,
    random_prompt,
)
from families import GEMMA3, make_family
from transformers import Gemma3Config

from nanovllm import LLM
from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.layers import attention
from nanovllm.models.architectures import read_spec

POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}
TINY_TOWER = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The path of a checkpoint, and its oracle."""
    directory = tmp_path_factory.mktemp("gemma3")
    return str(directory), make_family(directory, "gemma3")


def make_config_with_images(**settings):
    return Gemma3Config(text_config=settings, vision_config=TINY_TOWER, mm_tokens_per_image=1)


@pytest.mark.parametrize(
    "budget, num_blocks, num_drafts, is_chunked, is_caching, with_kernels, size",
    cover_pairs(
        [5, 24, 256],
        [64, 200],
        [0, 4],
        [True, False],
        [True, False],
        [True, False],
        [1, 2],
        allowed=lambda budget, _, __, is_chunked, ___, ____, size: (
            budget == 256 or (is_chunked and (size == 1 or budget == 24))
        ),
    ),
)
def test_grid(gemma, budget, num_blocks, num_drafts, is_chunked, is_caching, with_kernels, size):
    """Contexts are up to 30 windows long."""
    path, oracle = gemma
    prompts = [random_prompt(length, length) for length in (1, 7, 8, 9, 33, 100)]
    prompts += [prompts[-1][:50] + random_prompt(seed, 7 + seed) for seed in range(2)]
    prompts.append([5, 6, 7] * 60)
    params = [greedy(12 + index) for index in range(len(prompts))]
    expected = [oracle(prompt, each.max_tokens) for prompt, each in zip(prompts, params)]
    with LLM(
        path,
        kvcache_block_size=4,
        max_num_batched_tokens=budget,
        num_kvcache_blocks=num_blocks,
        num_speculative_tokens=num_drafts,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=is_caching,
        enable_kernels=with_kernels,
        tensor_parallel_size=size,
    ) as llm:
        if num_drafts > 0:
            make_drafts_free(llm)
        for _ in range(2):
            assert generate_ids(llm, prompts, params) == expected
            check_invariants(llm)
        assert budget < 24 or (llm.stats["num_draft_tokens"] > 0) == (num_drafts > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_in_transformers(tmp_path, dtype):
    """By the root of the hidden size in the model's dtype: 6.3125, not 6.3246, in bfloat16."""
    oracle = make_family(tmp_path, "gemma3", dtype=dtype, hidden_size=40)
    spec = read_spec(read_config(tmp_path), dtype, num_ranks=1)
    decoder = spec.make_model(attention).model
    ids = torch.arange(VOCAB_SIZE)
    with torch.inference_mode():
        decoder.embed_tokens.weight.copy_(oracle.model.model.embed_tokens.weight)
        embedded = decoder.embed(SimpleNamespace(input_ids=ids))
        assert embedded.equal(oracle.model.model.embed_tokens(ids))


RENAMINGS = {
    "transformers": {},
    "hub": {"language_model.model.": "model.language_model.", "vision": "model.vision"},
    "text": {"language_model.model.": "model."},
    "without-head": {"language_model.model.": "language_model."},
}
HEADS = [None, "lm_head.weight", "language_model.lm_head.weight", None]


@pytest.mark.parametrize("renaming, head", list(zip(RENAMINGS, HEADS)))
def test_checkpoints_of_models_with_images(tmp_path, renaming, head):
    """The vision tower is skipped, and a copy of the tied head can be stored."""
    directory = tmp_path
    oracle = Oracle(make_checkpoint(directory, family=make_config_with_images, **GEMMA3))
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForConditionalGeneration"]

    def rename(weights):
        assert any(name.startswith("vision_tower.") for name in weights)
        assert any(name.startswith("multi_modal_projector.") for name in weights)
        embedding = weights["language_model.model.embed_tokens.weight"]
        for old, new in RENAMINGS[renaming].items():
            for name in list(weights):
                if name.startswith(old):
                    weights[new + name.removeprefix(old)] = weights.pop(name)
        if head is not None:
            weights[head] = embedding.clone()

    edit_weights(directory, rename)
    prompt = random_prompt(1, 60)
    llm = LLM(directory, **POOL)
    assert generate_ids(llm, [prompt], greedy(16)) == [oracle(prompt, 16)]
    assert len(llm.executor.worker.kv_caches) == GEMMA3["num_hidden_layers"]


@pytest.mark.parametrize("where", ["text_config", "config"])
def test_either_config_can_say_that_the_output_head_is_not_tied(tmp_path, where):
    """The other one says nothing, and Gemma3Config's default is True."""
    oracle = make_family(tmp_path, "gemma3-untied")
    text_config = json.loads((tmp_path / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text_config, "vision_config": TINY_TOWER}
    config["architectures"] = ["Gemma3ForConditionalGeneration"]
    if where == "config":
        config["tie_word_embeddings"] = text_config.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = random_prompt(1, 20)
    assert generate_ids(LLM(tmp_path, **POOL), [prompt], greedy(8)) == [oracle(prompt, 8)]
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).architectures == text_config["architectures"]
