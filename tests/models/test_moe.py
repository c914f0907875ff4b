"""A layer of experts follows its definition, in float32 to rounding and in 16 bits as closely."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB_SIZE, make_batch
from graph_helpers import capture_on_the_cpu
from torch.nn.functional import silu
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm.kernels import kernelize
from nanovllm.kernels.cpu.library import reason_unavailable
from nanovllm.kernels.cpu.moe import FastExperts
from nanovllm.layers import attention
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.architectures import read_spec
from nanovllm.models.moe import MoE

CONFIG = Qwen3MoeConfig(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=VOCAB_SIZE,
    hidden_size=40,
    num_hidden_layers=2,
    num_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    mlp_only_layers=[0],
)
SPEC = read_spec(CONFIG, torch.float32, num_ranks=1)


def make_moe(dtype=torch.float32):
    torch.manual_seed(0)
    moe = MoE(replace(SPEC, dtype=dtype), TensorParallel()).requires_grad_(False)
    for parameter in moe.parameters():
        parameter.normal_(0.0, 0.3)
    return moe


@pytest.mark.parametrize("normalize", [True, False])
def test_every_token_gets_its_experts(normalize):
    """One token and one expert at a time, as the definition says. Other experts are not read."""
    moe = make_moe()
    moe.normalize_weights = normalize
    x = torch.randn(5, SPEC.hidden_size)
    expected = torch.zeros_like(x)
    others = set(range(SPEC.num_experts))
    for token, probabilities in enumerate((x @ moe.gate.weight.T).softmax(-1)):
        chosen = probabilities.argsort(descending=True)[: SPEC.num_experts_per_tok].tolist()
        total = probabilities[chosen].sum() if normalize else 1
        for expert in chosen:
            gate, up = (moe.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            output = moe.experts.down_proj[expert] @ (silu(gate) * up)
            expected[token] += output * probabilities[expert] / total
        others -= set(chosen)
    assert others
    moe.experts.gate_up_proj[list(others)] = torch.nan
    moe.experts.down_proj[list(others)] = torch.nan
    torch.testing.assert_close(moe(x), expected)


def test_bfloat16_is_closer_to_float32_than_transformers():
    """Weights, sums and SwiGLU round less often. The router's choice rounds only its logits.

    With prepacked weights a token's result does not depend on the batch, to the bit.
    """
    moe = make_moe(torch.bfloat16)
    x = torch.randn(50, SPEC.hidden_size).bfloat16()
    block = Qwen3MoeSparseMoeBlock(CONFIG).bfloat16().requires_grad_(False)
    block.load_state_dict(moe.state_dict())
    exact = make_moe()
    exact.load_state_dict(moe.state_dict())
    logits = moe.gate(x).float()
    exact.gate.forward = lambda x: logits  # or near ties would choose other experts
    expected = exact(x.float())
    distance = (block(x[None])[0] - expected).norm()
    assert (moe(x) - expected).norm() < 0.9 * distance
    if reason_unavailable(torch.bfloat16) is None:
        kernelize(moe, torch.device("cpu"), torch.bfloat16)
        assert type(moe.experts) is FastExperts
        output = moe(x)
        assert (output - expected).norm() < 0.65 * distance
        for rows in (slice(0, 0), slice(0, 1), slice(7, 8), slice(3, 40)):
            assert torch.equal(moe(x[rows]), output[rows])
        num_threads = torch.get_num_threads()
        torch.set_num_threads(2)
        assert torch.equal(moe(x), output)
        torch.set_num_threads(num_threads)


def test_steps_with_experts_run_eager(monkeypatch):
    """Shapes depend on the routing. A model with dense layers only is captured."""
    pytest.importorskip("triton", reason="triton is not installed")
    backend = SimpleNamespace(SUPPORTS_CUDA_GRAPHS=True)
    for dense_layers, is_captured in (([0], False), ([0, 1], True)):
        model = replace(SPEC, mlp_only_layers=dense_layers).make_model(attention)
        model.forward = lambda batch: torch.ones(len(batch.logits_indices), 1)
        batch = make_batch([1], [1], torch.zeros(1, 4, dtype=torch.int32))
        captured = capture_on_the_cpu(monkeypatch, model, backend, batch)
        assert (captured is not None) == is_captured
