"""OPT's own: strict loading under both names that its checkpoints have, refusals, positions, dummy weights.

That it computes what transformers computes is shown with the other families, in test_families.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Oracle, edit_config, edit_weights, make_checkpoint, random_prompt
from transformers import OPTConfig

from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
POSITIONS = "model.decoder.embed_positions.weight"
PROJECTION = "model.decoder.project_in.weight"
SURPLUS = "model.decoder.layers.0.fc3.bias"
BIAS = "model.decoder.layers.1.self_attn.k_proj.bias"


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    """Of the checkpoint in tmp_path, which has every kind of tensor."""
    return Oracle(make_checkpoint(tmp_path, family=OPTConfig, ffn_dim=40, word_embed_proj_dim=24))


def load(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), num_kvcache_blocks=32, **options)


def generate(llm: LLM, *prompts: list[int]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(list(prompts), GREEDY, use_tqdm=False)]


def test_names_without_the_prefix(oracle: Oracle, tmp_path: Path) -> None:
    """The checkpoints of 350m, 6.7b, 13b and 30b were saved without a head: "decoder." instead of "model.decoder."."""
    edit_weights(tmp_path, lambda w: [w.update({name.removeprefix("model."): w.pop(name)}) for name in list(w)])
    prompt = random_prompt(0, 9)
    assert generate(load(tmp_path), prompt) == [oracle(prompt, 12)]


@pytest.mark.parametrize(
    "edit, complaint",
    [
        (lambda w: w.pop(POSITIONS), f"without a tensor: {POSITIONS}"),
        (lambda w: w.pop(PROJECTION), f"without a tensor: {PROJECTION}"),
        (lambda w: w.update({SURPLUS: torch.ones(2)}), f"without a parameter.*: {SURPLUS}"),
        (lambda w: w.update({POSITIONS.removeprefix("model."): w[POSITIONS].clone()}), "repeated: .*embed_positions"),
        (lambda w: w.update({POSITIONS: w[POSITIONS][2:].clone()}), r"embed_positions.* has shape \[256, 32\].* \[258, 32\]"),
        (lambda w: w.update({BIAS: torch.ones(33)}), rf"{BIAS} has shape \[33\], the model needs \[32\]"),
        (lambda w: w.update({"lm_head.weight": torch.ones(97, 24)}), "lm_head.weight differs"),
    ],
    ids=["no-positions", "no-projection", "surplus", "twice", "no-offset", "misshapen", "tied-but-different"],
)
def test_tensors_that_do_not_fit(oracle: Oracle, tmp_path: Path, edit: Callable, complaint: str) -> None:
    edit_weights(tmp_path, edit)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"activation_function": "gelu"}, "activation_function must be one of 'relu'"),
        ({"num_attention_heads": 5}, "hidden_size must be a multiple of num_attention_heads"),
        ({"ffn_dim": 0}, "ffn_dim"),
        ({"word_embed_proj_dim": "24"}, "word_embed_proj_dim"),
        *[({name: 1}, name) for name in ("enable_bias", "do_layer_norm_before", "layer_norm_elementwise_affine")],
        ({"_remove_final_layer_norm": "no"}, "_remove_final_layer_norm"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        # what differs in the config but not in the weights
        ({"enable_bias": False}, "without a parameter.*k_proj.bias"),
        ({"layer_norm_elementwise_affine": False}, "without a parameter.*layer_norm.bias"),
        ({"do_layer_norm_before": False}, "without a parameter.*model.decoder.final_layer_norm"),
        ({"word_embed_proj_dim": None}, r"embed_tokens.weight has shape \[97, 24\]"),
        ({"tie_word_embeddings": False}, "without a tensor: lm_head.weight"),
    ],
)
def test_configs_that_do_not_fit(oracle: Oracle, tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


def test_sizes_that_do_not_divide(oracle: Oracle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide num_attention_heads=4"):
        load(tmp_path, tensor_parallel_size=3)
    edit_config(tmp_path, ffn_dim=41)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 does not divide intermediate_size=41"):
        load(tmp_path, tensor_parallel_size=2)


def test_every_position_that_was_learned(oracle: Oracle, tmp_path: Path) -> None:
    """The sequence ends where the matrix of positions does."""
    prompt = random_prompt(1, 250)
    (output,) = load(tmp_path).generate(prompt, SamplingParams(temperature=0.0, max_tokens=50), use_tqdm=False)
    assert (output["token_ids"], output["finish_reason"]) == (oracle(prompt, 6), "length")
    with pytest.raises(ValueError, match="lower it to 256"):
        load(tmp_path, max_model_len=257)


def test_dummy_weights(oracle: Oracle, tmp_path: Path) -> None:
    """Norms start at 1 and biases at 0, also those of norms; the same on any number of ranks."""
    (tmp_path / "model.safetensors").unlink()
    prompts, token_ids = [random_prompt(seed, 9) for seed in range(3)], []
    for size in (1, 2):
        with load(tmp_path, load_format="dummy", tensor_parallel_size=size) as llm:
            token_ids.append(generate(llm, *prompts))
            decoder = llm.model_runner.executor.model.model.decoder
            for norm in (decoder.final_layer_norm, decoder.layers[1].self_attn_layer_norm):
                assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
            assert decoder.layers[0].fc2.bias.eq(0).all()
    assert token_ids[0] == token_ids[1] and len({tuple(ids) for ids in token_ids[0]}) > 1
