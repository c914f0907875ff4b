"""Decoders of transformers without a line for their family."""

import pytest
import torch
from conftest import (
    Oracle,
    edit_config,
    edit_weights,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from families import POOL, YARN, check_tokens, make_family
from test_families import check_precision, compute_logprobs
from transformers import (
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    PhiConfig,
    Starcoder2Config,
)
from transformers.models.qwen3 import modeling_qwen3

from nanovllm import LLM
from nanovllm.models import borrowed
from nanovllm.models.decoder import MLP
from nanovllm.utils.helpers import report_once

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
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24, num_hidden_layers=3)
GLM4_MOE = dict(EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, pad_token_id=96)
GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
# Decoders that differ in kind: in norms, MLPs, biases, positions, RoPE, routers, windows, names.
SERVED = {
    "cohere": (CohereConfig, {"logit_scale": 0.5}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 64}),
    "gemma2": (Gemma2Config, {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "glm4_moe": (Glm4MoeConfig, GLM4_MOE),  # a router with a buffer in the checkpoint
    "gpt_oss": (GptOssConfig, GPT_OSS),
    "granite": (GraniteConfig, GRANITE),
    "hunyuan_moe": (HunYuanMoEV1Config, dict(num_experts=4, moe_topk=2)),  # reads weights
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "olmo3": (Olmo3Config, OLMO3),
    "opt": (OPTConfig, OPT),
    "opt-350m": (OPTConfig, dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=24)),
    "phi": (PhiConfig, {"tie_word_embeddings": False}),  # an output head with a bias
}


def make_served(directory, name, dtype=torch.float32):
    """Save a random checkpoint of a family, and return its oracle."""
    family, changes = SERVED[name]
    return Oracle(make_checkpoint(directory, dtype=dtype, family=family, **changes))


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


@pytest.mark.parametrize("name", ["cohere", "gemma2", "gpt_oss", "granite", "mixtral", "olmo3"])
def test_low_precision_is_as_exact_as_transformers(tmp_path, name):
    check_precision(tmp_path, make_served(tmp_path, name, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "name, kept",
    [
        ("cohere", "CohereLayerNorm"),
        ("gpt_oss", "GptOssAttention, GptOssExperts, GptOssTopKRouter"),
        ("granite", ""),
        ("hunyuan_moe", "Linear"),
        ("mixtral", "MixtralTopKRouter"),
        ("opt", "LayerNorm, OPTLearnedPositionalEmbedding"),
    ],
)
def test_what_is_not_replaced_is_named(tmp_path, capsys, name, kept):
    make_served(tmp_path, name, dtype=torch.bfloat16)
    report_once.cache_clear()
    LLM(tmp_path, **POOL)
    line = next(line for line in capsys.readouterr().err.splitlines() if "model: " in line)
    assert line.partition("; runs as transformers has it: ")[2] == kept


def test_a_layer_with_a_limit_is_not_replaced(tmp_path, monkeypatch):
    """The limit shows for large activations only."""
    oracle = Oracle(make_checkpoint(tmp_path))

    def limit(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=100.0) * self.up_proj(x))

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", limit)
    with LLM(tmp_path, model_impl="transformers", **POOL) as llm:
        assert not [each for each in llm.executor.worker.model.modules() if isinstance(each, MLP)]
        assert generate_ids(llm, [[1, 2, 3]], greedy(6)) == [oracle([1, 2, 3], 6)]


@pytest.mark.parametrize("name", ["opt", "gpt_neox"])
def test_a_tied_head_can_be_stored(tmp_path, name):
    """Alone, or beside the embedding. Without a dtype in config.json, tensors have the dtype."""
    oracle = make_served(tmp_path, name)
    edit_config(tmp_path, dtype=None)
    embedding, head = {
        "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
        "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    }[name]
    prompt = random_prompt(1, 9)
    for is_alone in (False, True):

        def store_head(weights, is_alone=is_alone):
            weights[head] = weights[embedding].clone()
            if is_alone:
                del weights[embedding]

        edit_weights(tmp_path, store_head)
        with LLM(tmp_path, **POOL) as llm:
            assert generate_ids(llm, [prompt], greedy(6)) == [oracle(prompt, 6)]


def test_all_learned_positions_are_used(tmp_path):
    oracle = make_served(tmp_path, "opt")
    prompt = random_prompt(1, 250)
    llm = LLM(tmp_path, num_kvcache_blocks=16)
    (output,) = llm.generate(prompt, greedy(50))
    assert output["token_ids"] == oracle(prompt, 6)
    assert output["finish_reason"] == "length"
    with pytest.raises(ValueError, match="lower it to 256"):
        LLM(tmp_path, max_model_len=257)


def test_gpt2_can_be_stored_as_on_the_hub(tmp_path):
    """Without the head, so without the prefix of names, and with masks, which are not needed."""
    oracle = Oracle(make_checkpoint(tmp_path, family=GPT2Config))

    def store_decoder(weights):
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 9, 9)

    edit_weights(tmp_path, store_decoder)
    check_tokens(tmp_path, oracle)


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "gpt2"])
def test_new_weights_can_have_the_names_of_a_state_dict(tmp_path, name):
    """They can differ from those in files, and begin with another word than "model"."""
    family, changes = SERVED.get(name, (GPT2Config, {}))
    oracle = Oracle(make_checkpoint(tmp_path, family=family, **changes))
    with torch.no_grad():
        for parameter in oracle.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    prompt = random_prompt(1, 9)
    with LLM(tmp_path, **POOL) as llm:
        before = generate_ids(llm, prompt, greedy(8))
        for _ in range(2):
            llm.update_weights(oracle.model.state_dict())
            assert generate_ids(llm, prompt, greedy(8)) == [oracle(prompt, 8)] != before


# --- Several ranks


@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_ranks_give_the_tokens_of_one(tmp_path, name):
    check_tokens(tmp_path, make_served(tmp_path, name), tensor_parallel_size=2)


@pytest.mark.parametrize(
    "family, changes, reason",
    [
        (OPTConfig, OPT, "needs a tp_plan"),
        (Olmo2Config, {}, "cannot divide model.layers.0.self_attn.q_proj .*gather_output"),
        (MixtralConfig, {"num_local_experts": 4}, "cannot divide .*experts .tp_plan: moe_tp"),
        (GraniteConfig, {"num_key_value_heads": 1}, "does not divide 1 K/V heads"),
        (GraniteConfig, {"intermediate_size": 47}, "cannot divide .*gate_proj .tp_plan: colwise"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_rejected(tmp_path, family, changes, reason):
    make_checkpoint(tmp_path, family=family, **changes)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2 {reason}"):
        LLM(tmp_path, tensor_parallel_size=2, **POOL)


# --- What cannot be served


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


@pytest.mark.parametrize("part", ["Qwen3MLP", "Qwen3RMSNorm"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixed_tokens_are_rejected(tmp_path, monkeypatch, kind, part):
    """Also in layers that would be replaced otherwise."""
    make_checkpoint(tmp_path)
    part = getattr(modeling_qwen3, part)
    compute = part.forward

    def mix(self, x):
        return compute(self, MIXTURES[kind](x) if x.dim() == 3 else x)

    monkeypatch.setattr(part, "forward", mix)
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


def test_an_error_names_the_versions_of_transformers(tmp_path, monkeypatch):
    """For example if a release changes what is used of it."""
    make_checkpoint(tmp_path)

    def run_decoder(decoder, input_ids):
        raise AssertionError

    monkeypatch.setattr(borrowed, "run_decoder", run_decoder)
    with pytest.raises(
        ValueError, match=r"transformers 5\.\d+.*tested with 5.22.*unexpected keyword"
    ):
        LLM(tmp_path, model_impl="transformers", **POOL)


def test_an_own_class_is_required_by_name(tmp_path):
    make_checkpoint(tmp_path, family=Starcoder2Config)
    with pytest.raises(ValueError, match="no class for Starcoder2.*model_impl='transformers'"):
        LLM(tmp_path, model_impl="nanovllm", **POOL)
