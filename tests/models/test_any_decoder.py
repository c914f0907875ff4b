"""Decoders of transformers without a line for their family."""

import pytest
import torch
from conftest import Oracle, greedy, make_checkpoint, random_prompt
from families import POOL, YARN, check_tokens, make_family
from test_families import compute_logprobs
from transformers import (
    BloomConfig,
    CohereConfig,
    Ernie4_5Config,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Starcoder2Config,
)
from transformers.models.qwen3 import modeling_qwen3

from nanovllm import LLM

GRANITE = dict(
    embedding_multiplier=0.7,
    attention_multiplier=0.1,
    residual_multiplier=0.6,
    logits_scaling=5.0,
    rms_norm_eps=0.1,  # not negligible
)
OLMO3 = dict(
    num_hidden_layers=4,  # layer 3 attends to the whole context
    sliding_window=8,
    rope_parameters={
        "full_attention": YARN,
        "sliding_attention": dict(rope_type="default", rope_theta=1e4),
    },
)
OPT = dict(ffn_dim=40)
# Decoders that differ in kind: in norms, MLPs, biases, positions, RoPE, experts, windows, names.
SERVED = {
    "cohere": (CohereConfig, {"logit_scale": 0.5}),
    "ernie4_5": (Ernie4_5Config, {}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 64}),
    "gemma2": (Gemma2Config, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gpt_oss": (GptOssConfig, dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "granite": (GraniteConfig, GRANITE),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "olmo2": (Olmo2Config, {"tie_word_embeddings": False}),
    "olmo3": (Olmo3Config, OLMO3),
    "opt": (OPTConfig, OPT),
    "opt-350m": (OPTConfig, dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=24)),
    "starcoder2-window": (Starcoder2Config, {"sliding_window": 8}),
}


def make_served(directory, name):
    """Save a random checkpoint of a family, and return its oracle."""
    family, changes = SERVED[name]
    return Oracle(make_checkpoint(directory, family=family, **changes))


@pytest.mark.parametrize("name", SERVED)
def test_tokens_match_transformers(tmp_path, name):
    check_tokens(tmp_path, make_served(tmp_path, name))


def test_a_family_with_an_own_class_is_served_on_request(tmp_path):
    check_tokens(tmp_path, make_family(tmp_path, "phi4-mini"), model_impl="transformers")


@pytest.mark.parametrize("name", ["cohere", "gemma2", "granite"])
def test_log_probabilities_match_transformers(tmp_path, name):
    """They show factors and soft-caps of logits, which change no greedy token."""
    oracle = make_served(tmp_path, name)
    prompt = random_prompt(3, 60)
    ours = compute_logprobs(LLM(tmp_path, **POOL), prompt)
    torch.testing.assert_close(ours, oracle.find_logprobs(prompt), rtol=1e-4, atol=1e-4)


def test_all_learned_positions_are_used(tmp_path):
    oracle = make_served(tmp_path, "opt")
    prompt = random_prompt(1, 250)
    llm = LLM(tmp_path, num_kvcache_blocks=16)
    (output,) = llm.generate(prompt, greedy(50))
    assert output["token_ids"] == oracle(prompt, 6)
    assert output["finish_reason"] == "length"
    with pytest.raises(ValueError, match="lower it to 256"):
        LLM(tmp_path, max_model_len=257)


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
