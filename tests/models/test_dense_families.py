"""SmolLM3, Granite, OLMo and Phi: log probabilities, options, released configs and rejections."""

import json

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    check_invariants,
    edit_config,
    find_feature,
    generate_ids,
    greedy,
    random_prompt,
)
from families import LONGROPE, PHI4_MINI, YARN, make_family

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.kernels.cpu.fused_layers import FusedLayers
from nanovllm.kernels.cpu.library import reason_unavailable
from nanovllm.layers.rotary import RopeSpec
from nanovllm.models.architectures import read_spec

POOL = {"num_kvcache_blocks": 64, "kvcache_block_size": 4}
FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = [
    "gemma3",
    "granite",
    "olmo2",
    "olmo3",
    "phi3-window",
    "phi4-mini",
    "smollm3-windows",
]


def read(directory, config, **options):
    (directory / "config.json").write_text(json.dumps(config))
    return read_spec(read_config(directory), torch.bfloat16, num_ranks=1, **options)


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
        find_feature(llm, Drafts).costs = StepCosts(per_token=0.0)
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


@pytest.mark.skipif(reason_unavailable(torch.float32) is not None, reason="no compiler")
@pytest.mark.parametrize(
    "name",
    ["granite", "olmo2", "olmo2-one-kv-head", "olmo3", "phi4", "phi4-mini", "smollm3-windows"],
)
def test_the_layers_of_a_step_are_one_cpp_call(tmp_path, monkeypatch, name):
    """The last layer of a prefill is computed separately, first for K/V, then for the logits."""
    make_family(tmp_path, name)
    llm = LLM(tmp_path, **POOL, device="cpu")
    calls = []
    compute = FusedLayers._compute

    def record(layers, first, kv_caches, *args, **options):
        calls.append(len(kv_caches))
        compute(layers, first, kv_caches, *args, **options)

    monkeypatch.setattr(FusedLayers, "_compute", record)
    generate_ids(llm, [[1, 2, 3]], greedy(2))
    num_layers = len(llm.executor.worker.model.model.layers)
    assert calls == [num_layers - 1, 1, 1, num_layers]


ORIGINAL_LEN = 64  # of longrope


@pytest.mark.parametrize("max_model_len", [None, 50, ORIGINAL_LEN])
def test_longrope_up_to_the_original_length(tmp_path, max_model_len):
    """The short factors apply, and the original length is the default of max_model_len."""
    oracle = make_family(tmp_path, "phi4-mini", original_max_position_embeddings=ORIGINAL_LEN)
    llm = LLM(tmp_path, **POOL, max_model_len=max_model_len)
    assert llm.max_model_len == (max_model_len or ORIGINAL_LEN)
    prompts = [random_prompt(length, length) for length in (1, 30)]
    expected = [oracle(prompt, 20) for prompt in prompts]
    assert generate_ids(llm, prompts, greedy(20)) == expected


@pytest.mark.parametrize("max_model_len", [ORIGINAL_LEN + 1, 256])
def test_longrope_above_the_original_length(tmp_path, max_model_len):
    """The long factors apply, to short contexts, too. transformers has short ones for these."""
    names = dict(original_max_position_embeddings=ORIGINAL_LEN)
    oracle = make_family(tmp_path, "phi4-mini", **names)
    llm = LLM(tmp_path, **POOL, max_model_len=max_model_len)
    assert llm.max_model_len == max_model_len
    if max_model_len == 256:
        prompts = [random_prompt(length, length) for length in (65, 100)]
        expected = [oracle(prompt, 20) for prompt in prompts]
        assert generate_ids(llm, prompts, greedy(20)) == expected
    rope = dict(PHI4_MINI["rope_parameters"])
    rope["short_factor"] = rope["long_factor"]
    other_oracle = make_family(tmp_path / "other", "phi4-mini", **names, rope_parameters=rope)
    prompts = [random_prompt(length, length) for length in (1, 30)]
    expected = [other_oracle(prompt, 20) for prompt in prompts]
    assert generate_ids(llm, prompts, greedy(20)) == expected
    assert expected != [oracle(prompt, 20) for prompt in prompts]
    with pytest.raises(ValueError, match="lower it to 256"):
        LLM(tmp_path, **POOL, max_model_len=257)


PHI4_MINI_4B = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "full_attn_mod": 1,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "long_factor": [2.0] * 48,
        "short_factor": [1.0] * 48,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


@pytest.mark.parametrize(
    "max_model_len, max_len, factor",
    [(None, 4096, 1), (100, 4096, 1), (4096, 4096, 1), (4097, 131072, 2), (131072, 131072, 2)],
)
def test_phi4_mini(tmp_path, max_model_len, max_len, factor):
    spec = read(tmp_path, PHI4_MINI_4B, max_model_len=max_model_len)
    assert spec.max_len == max_len
    assert spec.windows == (None,) * 32
    (rope,) = spec.ropes
    base = RopeSpec.from_base(1e4, 96)  # of 128 dimensions, 96 are rotated
    assert rope.inv_freq == tuple(value / factor for value in base.inv_freq)
    assert rope.attention_factor == pytest.approx(1.1902, abs=1e-4)
    assert spec.tie_embeddings


@pytest.mark.parametrize("field", ["type", "rope_type"])
@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_old_names_of_longrope(tmp_path, field, name):
    """Phi3Config renames them."""
    rope = {**PHI4_MINI_4B["rope_scaling"], "type": None, "rope_type": None, field: name}
    rope = {key: value for key, value in rope.items() if value is not None}
    rope["original_max_position_embeddings"] = 4096
    spec = read(tmp_path, {**PHI4_MINI_4B, "rope_scaling": rope})
    assert spec == read(tmp_path, PHI4_MINI_4B)


PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.5)
SU = dict(type="su", short_factor=[1.0] * 3, long_factor=[2.0] * 3)
TEXT_LENGTH = {**LONGROPE, "original_max_position_embeddings": "64"}


@pytest.mark.parametrize(
    "name, changes, complaint",
    [
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be above 0"),
        ("olmo2", {"sliding_window": 8}, "sliding_window is no field of Olmo2Config"),
        ("phi4", {"rope_parameters": PARTIAL}, "partial_rotary_factor must be .* at most 1.0"),
        ("phi4-mini", {"rope_parameters": None, "rope_scaling": SU}, "Missing required keys"),
        ("phi4-mini", {"original_max_position_embeddings": 0}, ""),
        ("llama-longrope", {"rope_parameters": TEXT_LENGTH}, "position_embeddings must be an int"),
        ("llama-yarn", {"rope_parameters": {**YARN, "factor": "4"}}, "factor must be a number"),
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
