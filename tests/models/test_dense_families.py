"""SmolLM3, Granite, OLMo and Phi: log probabilities, options, released configs and rejections."""

import json

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    check_invariants,
    edit_config,
    find_extension,
    generate_ids,
    greedy,
    random_prompt,
)
from families import make_family

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.layers.attention import AttentionShape
from nanovllm.models.architectures import read_spec

POOL = {"num_kvcache_blocks": 64, "kvcache_block_size": 4}
FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = [
    "granite",
    "granite-untied",
    "olmo2",
    "olmo3",
    "phi3-window",
    "phi4-mini",
    "smollm3-windows",
]


def read(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return read_spec(read_config(directory), torch.bfloat16, num_ranks=1)


@pytest.mark.parametrize("name", NAMES)
def test_options_change_no_token(tmp_path, name):
    """Plain torch, drafts, and whole prompts."""
    oracle = make_family(tmp_path, name)
    prompts = [random_prompt(length, length) for length in (1, 9, 40)]
    prompts.append([5, 6, 7] * 20)
    expected = [oracle(prompt, 20) for prompt in prompts]
    for with_kernels in (False, True):
        options = {"num_speculative_tokens": 4, "enable_chunked_prefill": False}
        llm = LLM(tmp_path, **POOL, **options, enable_kernels=with_kernels)
        free = [0.0, *[1.0] * 256]  # costs of steps in which drafts cost nothing
        find_extension(llm, Drafts).costs = StepCosts(free, free)
        for _ in range(2):
            assert generate_ids(llm, prompts, greedy(20)) == expected
            check_invariants(llm)
        assert llm.stats["num_draft_tokens"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_match_transformers(tmp_path, name):
    """A factor on the logits chooses the same tokens."""
    oracle = make_family(tmp_path, name)
    prompt = random_prompt(3, 60)
    params = SamplingParams(max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    (output,) = LLM(tmp_path, **POOL).generate(prompt, params, use_tqdm=False)
    items = [sorted(entry.items()) for entry in output["prompt_logprobs"][1:]]
    ours = torch.tensor(items)[..., 1]
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["granite", "olmo2", "phi4-mini", "smollm3"])
def test_the_engine_alone_serves_models_without_windows(tmp_path, name):
    oracle = make_family(tmp_path, name)
    engine = LLMEngine(Config(str(tmp_path), **POOL))
    prompt = random_prompt(1, 30)
    engine.add_request(prompt, greedy(12))
    outputs = []
    while not engine.is_finished():
        outputs += engine.step()
    assert outputs[-1]["token_ids"] == oracle(prompt, 12)


# What config.json of released models says.
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": [FULL] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


def test_smollm3_3b(tmp_path):
    spec = read(tmp_path, SMOLLM3_3B)
    assert spec.rope_indices == (0, 0, 0, 1) * 9
    rope, no_rope = spec.ropes
    assert (rope.inv_freq[0], rope.inv_freq[1]) == (1.0, pytest.approx(5e6 ** (-1 / 64)))
    assert set(no_rope.inv_freq) == {0.0} and len(no_rope.inv_freq) == 64
    assert spec.windows == (None,) * 36
    assert spec.max_len == 65536
    assert spec.tie_embeddings
    without_layers = {**SMOLLM3_3B, "no_rope_layers": None, "layer_types": None}
    assert read(tmp_path, without_layers) == spec
    windows = {**without_layers, "use_sliding_window": True, "sliding_window": 8}
    assert read(tmp_path, windows).windows == (None, None, None, 8) * 9
    windows["use_sliding_window"] = False
    assert read(tmp_path, windows).windows == (None,) * 36


GRANITE_2B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}


def test_granite_2b(tmp_path):
    spec = read(tmp_path, GRANITE_2B)
    assert spec.attention_shape(0) == AttentionShape(32, 8, 64, scale=1 / 64)
    factors = (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_scaling)
    assert factors == (12.0, 0.22, 8.0)
    assert spec.max_len == 131072
    assert spec.tie_embeddings and not spec.qkv_bias and not spec.mlp_bias
    sizes = {name: GRANITE_2B[name] for name in ("architectures", "model_type")}
    spec = read(tmp_path, sizes)  # the defaults of the class
    assert (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_scaling) == (1, 1, 1)
    assert spec.scale == 1
    assert not spec.tie_embeddings


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        ("granite", {"hidden_act": "gelu"}, "hidden_act must be one of 'silu'"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be above 0"),
        ("granite", {"logits_scaling": -1.0}, "logits_scaling must be above 0"),
        ("smollm3", {"hidden_act": "gelu"}, "hidden_act must be one of 'silu'"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers=.1, 0, 1. must have a value"),
        (
            "smollm3",
            {"layer_types": [SLIDING] * 4, "sliding_window": 8},
            "layer_types must be one of 'full_attention', not 'sliding_attention'",
        ),
    ],
    ids=str,
)
def test_unsupported_features_are_named(tmp_path, name, changes, complaint):
    make_family(tmp_path, name)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"(?s)config.json: .*{complaint}"):
        LLM(tmp_path, **POOL)
