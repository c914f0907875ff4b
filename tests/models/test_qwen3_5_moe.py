"""Qwen3.5-MoE and Qwen3-Next give the tokens of transformers. Checkpoints have several forms."""

import json
from unittest.mock import MagicMock

import pytest
import torch
from conftest import (
    Oracle,
    edit_weights,
    generate_ids,
    greedy,
    random_prompt,
)
from families import FAMILIES, make_family, stack_experts
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeConfig, Qwen3_5MoeForCausalLM

from nanovllm import LLM
from nanovllm.kernels.cpu.gated_delta import FastDeltaLayer
from nanovllm.kernels.cpu.library import reason_unavailable
from nanovllm.kernels.cpu.moe import FastExperts
from nanovllm.layers.quantized import QuantizedWeight
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.architectures import read_spec

POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}
NAMES = ["qwen3.5-moe", "qwen3-next"]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_form_of_the_hub(tmp_path, is_tied, size):
    """Stacked experts, a config with a text_config, a vision tower and a draft head with experts.

    transformers reads the checkpoint as well, which shows that the form is right.
    """
    make_family(tmp_path, "qwen3.5-moe", tie_word_embeddings=is_tied)
    text_config = json.loads((tmp_path / "config.json").read_text())
    config = Qwen3_5MoeConfig(text_config=text_config, tie_word_embeddings=is_tied)
    config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    config.save_pretrained(tmp_path)

    def edit(weights):
        stack_experts(weights)
        for name in list(weights):
            new_name = name.replace("model.", "model.language_model.", 1)
            weights[new_name] = weights.pop(name)
        weights["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(8, 48, 32)
        weights["model.visual.blocks.0.norm1.bias"] = torch.ones(2)

    edit_weights(tmp_path, edit)
    oracle = Oracle(Qwen3_5MoeForCausalLM.from_pretrained(tmp_path).eval())
    prompts = [random_prompt(seed, 20) for seed in range(3)]
    options = {"tensor_parallel_size": size, "enable_kernels": size == 2}
    with LLM(tmp_path, **POOL, **options) as llm:
        assert generate_ids(llm, prompts, greedy(12)) == [oracle(prompt, 12) for prompt in prompts]


def test_one_matrix_of_an_expert_is_read_at_once(tmp_path, monkeypatch):
    make_family(tmp_path, "qwen3.5-moe")
    edit_weights(tmp_path, stack_experts)
    sizes = []
    copy = QuantizedWeight.copy_

    def record(destination, source):
        if type(source) is torch.Tensor:
            sizes.append(source.numel())
        copy(destination, source)

    monkeypatch.setattr(QuantizedWeight, "copy_", record)
    LLM(tmp_path, **POOL, quantization="int8", enable_kernels=False)
    assert max(sizes) == 128 * 32  # q_proj, while all gate projections of a layer are larger


@pytest.mark.parametrize("name", NAMES)
def test_old_configs(tmp_path, name):
    """RoPE as separate fields, an interval in place of layer_types, and defaults left out."""
    make_family(tmp_path, name, layer_types=None, full_attention_interval=2)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    defaults = ("norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "hidden_act")
    for field in ("layer_types", "rope_parameters", *defaults):
        config.pop(field, None)
    old = {"rope_theta": 500.0, "rope_scaling": None, "full_attention_interval": 2}
    path.write_text(json.dumps({**config, **old, "partial_rotary_factor": 0.5}))
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert oracle.model.config.rope_parameters["partial_rotary_factor"] == 0.5
    prompts = [random_prompt(seed, 20) for seed in range(3)]
    expected = [oracle(prompt, 12) for prompt in prompts]
    assert generate_ids(LLM(tmp_path, **POOL), prompts, greedy(12)) == expected


def test_stacked_experts_that_do_not_fit(tmp_path):
    make_family(tmp_path, "qwen3.5-moe")
    single = load_file(tmp_path / "model.safetensors")
    edit_weights(tmp_path, stack_experts)
    stacked = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    gate_up = stacked[name]
    changes = {
        r"gate_up_proj has shape \[8, 46, 32\], the model needs \[8, 48, 32\]": gate_up[:, :-2],
        r"gate_up_proj has shape \[7, 48, 32\]": gate_up[:-1],
        r"gate_up_proj has shape \[48, 32\]": gate_up[0],
        r"gate_up_proj is stored as F8_E4M3": gate_up.to(torch.float8_e4m3fn),
    }
    changed = {complaint: {name: tensor.contiguous()} for complaint, tensor in changes.items()}
    changed["unexpected tensors: .*experts.0"] = single
    for complaint, tensors in changed.items():
        save_file({**stacked, **tensors}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=complaint):
            LLM(tmp_path, **POOL)


@pytest.mark.parametrize("dense_layer", [0, 1])
def test_a_layer_reduces_once(dense_layer):
    """The shares of the chosen experts and of the shared expert are added up together."""
    family, settings = FAMILIES["qwen3-next"]
    settings = {**settings, "hidden_size": 32, "mlp_only_layers": [dense_layer]}
    config = family(architectures=["Qwen3NextForCausalLM"], **settings)
    group = MagicMock()
    spec = read_spec(config, torch.float32, num_ranks=2)
    mlp = spec.make_mlp(0, TensorParallel(size=2, group=group)).requires_grad_(False)
    mlp(torch.zeros(5, 32))
    assert group.allreduce.call_count == 1


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_all_layers_with_states(tmp_path, name):
    make_family(tmp_path, name)
    llm = LLM(tmp_path, **POOL)
    layers = llm.executor.worker.model.model.layers
    generate_ids(llm, [[1, 2, 3]], greedy(2))
    if reason_unavailable(torch.float32) is None:
        for layer in (layers[0], layers[1], layers[3]):
            assert type(layer) is FastDeltaLayer and layer.struct is not None
            assert type(layer.mlp.experts) is FastExperts
