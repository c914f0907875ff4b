"""Gemma 3 gives the tokens of transformers, from all forms of its checkpoints."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    edit_weights,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from families import GEMMA3, make_family
from transformers import Gemma3Config

from nanovllm import LLM
from nanovllm.checkpoints.checkpoint import read_config

POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}
TINY_TOWER = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)


def make_config_with_images(**settings):
    return Gemma3Config(text_config=settings, vision_config=TINY_TOWER, mm_tokens_per_image=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_are_scaled_as_in_transformers(tmp_path, dtype):
    """By the root of the hidden size in the model's dtype: 6.3125, not 6.3246, in bfloat16."""
    oracle = make_family(tmp_path, "gemma3", dtype=dtype, hidden_size=40)
    decoder = LLM(tmp_path, **POOL, enable_kernels=False).executor.worker.model.model
    ids = torch.arange(VOCAB_SIZE)
    with torch.inference_mode():
        embedded = decoder.embed(SimpleNamespace(input_ids=ids))
        assert embedded.equal(oracle.model.model.embed_tokens(ids))


@pytest.mark.parametrize(
    "renaming, head",
    [
        ({}, None),  # as transformers saves it
        (
            {"language_model.model.": "model.language_model.", "vision": "model.vision"},
            "lm_head.weight",
        ),
        ({"language_model.model.": "model."}, "language_model.lm_head.weight"),
        ({"language_model.model.": "language_model."}, None),
    ],
)
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
        for old, new in renaming.items():
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
