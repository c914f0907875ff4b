"""Decoders of transformers without a line for their family."""

import pytest
import torch
from conftest import Oracle, make_checkpoint
from families import POOL, check_tokens
from transformers import (
    BloomConfig,
    CohereConfig,
    Ernie4_5Config,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    Starcoder2Config,
)
from transformers.models.qwen3 import modeling_qwen3

from nanovllm import LLM

# Decoders that differ in kind: in norms, MLPs, biases, positions, RoPE, experts, windows, names.
SERVED = {
    "cohere": (CohereConfig, {"logit_scale": 0.5}),
    "ernie4_5": (Ernie4_5Config, {}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 64}),
    "gemma2": (Gemma2Config, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gpt_oss": (GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "opt": (OPTConfig, {"ffn_dim": 40}),
    "phi3-longrope": (Phi3Config, {"original_max_position_embeddings": 64}),
    "starcoder2-window": (Starcoder2Config, {"sliding_window": 8}),
}


@pytest.mark.parametrize("name", SERVED)
def test_tokens_match_transformers(tmp_path, name):
    family, changes = SERVED[name]
    oracle = Oracle(make_checkpoint(tmp_path, family=family, **changes))
    check_tokens(tmp_path, oracle, model_impl="transformers")


REJECTED = {
    "its attention cannot be replaced": (BloomConfig, {}),
    "does not pass keyword arguments": (NemotronConfig, {}),
    "a mask cannot be evaluated": (
        Llama4TextConfig,
        {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_rejected_with_the_reason(tmp_path, reason):
    family, changes = REJECTED[reason]
    make_checkpoint(tmp_path, family=family, **changes)
    with pytest.raises(ValueError, match=reason):
        LLM(tmp_path, **POOL)


# --- Models that mix tokens in another way than by attention


def shift(x, distance):
    return x + torch.nn.functional.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]


MIXTURES = {
    "convolution": lambda x: shift(x, 1),
    "convolution at distance 9": lambda x: shift(x, 9),
    "from later tokens": lambda x: shift(x.flip(1), 1).flip(1),
    "mean over the call": lambda x: x + x.mean(1, keepdim=True),
    "number of tokens": lambda x: x.roll(x.shape[1] // 8, -1),
    "experts with a capacity": lambda x: x * ((x[..., :1] > 0).cumsum(1) < 9),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixed_tokens_are_rejected(tmp_path, monkeypatch, kind):
    make_checkpoint(tmp_path)
    compute = modeling_qwen3.Qwen3MLP.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3MLP, "forward", lambda self, x: compute(self, MIXTURES[kind](x))
    )
    with pytest.raises(ValueError, match="Qwen3ForCausalLM of transformers .* mixes tokens"):
        LLM(tmp_path, model_impl="transformers", **POOL)


def test_rope_by_the_longest_position_is_rejected(tmp_path, monkeypatch):
    make_checkpoint(tmp_path)
    rotate = modeling_qwen3.Qwen3RotaryEmbedding.forward
    monkeypatch.setattr(
        modeling_qwen3.Qwen3RotaryEmbedding,
        "forward",
        lambda self, x, positions: rotate(self, x, positions * positions.max()),
    )
    with pytest.raises(ValueError, match="mixes tokens"):
        LLM(tmp_path, model_impl="transformers", **POOL)


def test_a_mask_by_head_is_rejected(tmp_path, monkeypatch):
    make_checkpoint(tmp_path)
    create = modeling_qwen3.create_causal_mask

    def only_even_heads(sequence, head, query, key):
        return (key <= query) & (head % 2 == 0)

    monkeypatch.setattr(
        modeling_qwen3,
        "create_causal_mask",
        lambda **given: create(**given, and_mask_function=only_even_heads),
    )
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        LLM(tmp_path, model_impl="transformers", **POOL)


def test_an_own_class_is_required_by_name(tmp_path):
    make_checkpoint(tmp_path, family=Starcoder2Config)
    with pytest.raises(ValueError, match="no class for Starcoder2.*model_impl='transformers'"):
        LLM(tmp_path, model_impl="nanovllm", **POOL)
