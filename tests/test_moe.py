"""Qwen3-MoE beyond its tokens (test_families.py): which experts are computed, how they load and are divided, what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import VOCAB_SIZE, Oracle, make_checkpoint, random_prompt
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import capture_decode_steps, kernelize
from nanovllm.kernels.cpu.library import can_multiply
from nanovllm.kernels.cpu.twins import PackedExperts
from nanovllm.layers import attention
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.moe import MoE, MoESpec
from nanovllm.models.weights import init_dummy_weights

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SPEC = MoESpec(
    vocab_size=VOCAB_SIZE, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48, max_len=64,
    dtype=torch.float32, hidden_size=40, norm_eps=1e-6, rope=RopeSpec(1e4), tie_embeddings=True,
    num_experts=16, num_experts_per_tok=3, expert_size=24, normalize_weights=True, dense_layers=frozenset({0}),
)  # fmt: skip
needs_bfloat16 = pytest.mark.skipif(not can_multiply(torch.bfloat16), reason="no compiler, or AMX that is not allowed")


def make_moe(dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    moe = MoE(replace(SPEC, dtype=dtype), TensorParallel()).requires_grad_(False)
    for parameter in moe.parameters():
        parameter.normal_(0.0, 0.3)
    return moe


@pytest.mark.parametrize("normalize", [True, False])
def test_every_token_gets_its_experts(normalize: bool) -> None:
    """Against the definition, one token and one expert at a time; the weights of the others are not even looked at."""
    moe, x = make_moe(), torch.randn(5, SPEC.hidden_size)
    moe.normalize_weights = normalize
    probabilities = (x @ moe.gate.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    chosen: set[int] = set()
    for token, each in enumerate(probabilities):
        experts = each.argsort(descending=True)[: SPEC.num_experts_per_tok].tolist()
        for expert in experts:
            gate, up = (moe.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            output = moe.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += output * each[expert] / (each[experts].sum() if normalize else 1)
        chosen.update(experts)
    others = sorted(set(range(SPEC.num_experts)) - chosen)
    assert others
    moe.experts.gate_up_proj[others] = torch.nan
    moe.experts.down_proj[others] = torch.nan
    torch.testing.assert_close(moe(x), expected)


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=needs_bfloat16)])
def test_low_precision(is_packed: bool) -> None:
    """Nearer to float32 than transformers' block, by a tenth, or a third: by the float32 weights and sums, and by SwiGLU's one
    rounding. Packed, a token gets alone the same bits as among others."""
    moe, x = make_moe(torch.bfloat16), torch.randn(50, SPEC.hidden_size).bfloat16()
    config = Qwen3MoeConfig(**{**EXPERTS, "num_experts": 16, "num_experts_per_tok": 3}, hidden_size=SPEC.hidden_size)
    theirs = Qwen3MoeSparseMoeBlock(config).bfloat16().requires_grad_(False)
    theirs.load_state_dict(moe.state_dict())
    logits, rounded = moe.gate(x), theirs(x[None])[0]
    exact = make_moe()
    exact.load_state_dict(moe.state_dict())
    exact.gate.forward = lambda x: logits.float()  # whom a near tie chooses is not what this is about
    if is_packed:
        moe = kernelize(moe, torch.device("cpu"), torch.bfloat16)
        assert type(moe.experts) is PackedExperts and not list(moe.parameters())
    output = moe(x)
    expected = exact(x.float())
    assert (output - expected).norm() < (0.65 if is_packed else 0.9) * (rounded - expected).norm()
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40)) if is_packed else ():
        assert torch.equal(moe(x[rows]), output[rows])


@pytest.mark.parametrize("size", [2, 3])
def test_the_width_is_divided(size: int) -> None:
    """Dummy weights are the same on any number of ranks, and what the ranks compute adds up."""
    whole = MoE(SPEC, TensorParallel()).requires_grad_(False)
    init_dummy_weights(whole, seed=1)
    x = torch.randn(7, SPEC.hidden_size)
    total = torch.zeros_like(x)
    for rank in range(size):
        moe = MoE(SPEC, TensorParallel(rank, size)).requires_grad_(False)
        init_dummy_weights(moe, seed=1)
        assert moe.experts.down_proj.shape == (16, 40, 24 // size) and torch.equal(moe.gate.weight, whole.gate.weight)
        total += moe(x)
    torch.testing.assert_close(total, whole(x))


def test_low_precision_on_two_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family=Qwen3MoeConfig, dtype=torch.bfloat16, **EXPERTS, initializer_range=0.1)
    params, values = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB_SIZE), []
    for size in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=size, num_kvcache_blocks=64) as llm:
            outputs = llm.generate([random_prompt(seed, 20) for seed in range(8)], params, use_tqdm=False)
        values.append(torch.tensor([[output["logprobs"][0][token_id] for token_id in range(VOCAB_SIZE)] for output in outputs]))
    assert (values[0] - values[1]).abs().mean() < 0.02 * values[0].std()


def test_steps_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which shapes they have depends on the routing. A decoder whose layers are all dense is captured."""
    monkeypatch.setattr("nanovllm.kernels.CudaGraphs", lambda *arguments: "captured")
    backend, kv_caches = SimpleNamespace(SUPPORTS_CUDA_GRAPHS=True), [SimpleNamespace(device=torch.device("cuda"))]
    for dense_layers, expected in (({0}, None), ({0, 1}, "captured")):
        model = replace(SPEC, dense_layers=frozenset(dense_layers)).make_model(attention)
        assert capture_decode_steps(model, backend, kv_caches, 8, 4) == expected


# --- Checkpoints


@pytest.fixture
def change_config(tmp_path: Path) -> Callable[..., Oracle]:
    """A checkpoint whose config.json is changed afterwards; None removes a field."""

    def change(made_with: dict[str, Any], **changes: Any) -> Oracle:
        oracle = Oracle(make_checkpoint(tmp_path, family=Qwen3MoeConfig, **{**EXPERTS, **made_with}))
        content = {**json.loads((tmp_path / "config.json").read_text()), **changes}
        content = {name: value for name, value in content.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return oracle

    return change


@pytest.mark.parametrize("name, other", [("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")])
def test_either_name_of_num_experts(tmp_path: Path, change_config: Callable[..., Oracle], name: str, other: str) -> None:
    oracle, prompt = change_config({}, **{name: 6, other: None}), random_prompt(1, 9)
    with LLM(str(tmp_path), num_kvcache_blocks=16) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0]
    assert output["token_ids"] == oracle(prompt, 8)


@pytest.mark.parametrize(
    "made_with, changes, num_ranks, complaint",
    [
        ({}, {"num_experts_per_tok": 7}, 1, "num_experts_per_tok=7 must be at least 1 and at most num_experts=6"),
        ({}, {"num_experts_per_tok": 0}, 1, "num_experts_per_tok=0 must be"),
        ({}, {"decoder_sparse_step": 0}, 1, "decoder_sparse_step must be at least 1"),
        ({}, {"mlp_only_layers": [-1]}, 1, "mlp_only_layers must be at least 0"),
        ({}, {"moe_intermediate_size": 0}, 1, "moe_intermediate_size must be at least 1"),
        ({}, {"norm_topk_prob": 1}, 1, "norm_topk_prob must be True or False"),
        ({}, {"hidden_act": "gelu"}, 1, "hidden_act must be one of 'silu'"),
        ({}, {"use_sliding_window": True, "sliding_window": 8}, 1, "sliding-window"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, 1, "quantized"),
        ({"moe_intermediate_size": 25}, {}, 2, "tensor_parallel_size=2 does not divide moe_intermediate_size=25"),
        ({"mlp_only_layers": [1], "intermediate_size": 47}, {}, 2, "tensor_parallel_size=2 does not divide intermediate_size=47"),
        ({}, {"num_local_experts": 5}, 1, r"mlp.gate.weight has shape \[6, 32\], the model needs \[5, 32\]"),
        ({}, {"moe_intermediate_size": 16}, 1, r"has shape \[32, 24\], the model needs \[32, 16\]"),
        ({}, {"mlp_only_layers": [0]}, 1, "parameters without a tensor: .*layers.0.mlp.gate_proj.weight"),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path,
    change_config: Callable[..., Oracle],
    made_with: dict[str, Any],
    changes: dict[str, Any],
    num_ranks: int,
    complaint: str,
) -> None:
    change_config(made_with, **changes)
    with pytest.raises(ValueError, match=complaint):
        LLM(str(tmp_path), num_kvcache_blocks=16, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("experts.3.up_proj", None, "parameters without a tensor: .*experts.3.up_proj.weight"),
        ("experts.3.up_proj", "experts.6.up_proj", "repeated: .*experts.6.up_proj.weight; .*experts.3.up_proj.weight"),
        ("gate", "gate.e_score_correction_bias", "repeated: .*gate.e_score_correction_bias"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change_config: Callable[..., Oracle], old: str, new: str | None, complaint: str
) -> None:
    change_config({})
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(f"model.layers.1.mlp.{old}.weight")
    if new is not None:
        tensors[f"model.layers.1.mlp.{new}.weight"] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        LLM(str(tmp_path), num_kvcache_blocks=16)
