"""Every family that loads matches transformers, and what is unsupported is rejected by name.

OPT (learned positions, names without a prefix) and Qwen3-MoE (router, experts) have tests of their
own.
"""

import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    edit_config,
    edit_weights,
    make_checkpoint,
    random_prompt,
)
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import capture_decode_steps, kernelize
from nanovllm.kernels.cpu.library import has_gemm
from nanovllm.kernels.cpu.prepacked import PrepackedExperts
from nanovllm.layers import attention
from nanovllm.layers.rotary import RopeSpec, RotaryEmbedding
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.checkpoint import read_config
from nanovllm.models.config import read_spec
from nanovllm.models.decoder import DecoderSpec
from nanovllm.models.moe import Experts, MoE, MoESpec
from nanovllm.models.weights import init_dummy_weights

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
OPT = dict(ffn_dim=40)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=False)),
    "qwen2.5-tied": (
        Qwen2Config,
        dict(use_sliding_window=False, sliding_window=8, max_window_layers=1),
    ),
    "llama-2": (LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=False, head_dim=None)),
    "llama-3.1": (LlamaConfig, dict(rope_parameters=LLAMA3)),
    "llama-biases": (LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama-dynamic": (
        LlamaConfig,
        dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}),
    ),
    "mistral": (MistralConfig, dict(sliding_window=None)),
    "mistral-wide-window": (MistralConfig, dict(sliding_window=4096)),
    "ministral": (MinistralConfig, dict(layer_types=["full_attention"] * 2)),
    "opt": (OPTConfig, OPT),
    "opt-350m": (OPTConfig, dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=24)),
    "opt-untied-narrow": (OPTConfig, dict(OPT, tie_word_embeddings=False, word_embed_proj_dim=24)),
    "opt-no-biases": (OPTConfig, dict(OPT, enable_bias=False, layer_norm_elementwise_affine=False)),
    "opt-no-final-norm": (OPTConfig, dict(OPT, _remove_final_layer_norm=True)),
    "qwen3-moe": (Qwen3MoeConfig, dict(**EXPERTS, norm_topk_prob=True, intermediate_size=47)),
    "qwen3-moe-mixed": (
        Qwen3MoeConfig,
        dict(
            **EXPERTS,
            num_hidden_layers=4,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            tie_word_embeddings=False,
        ),
    ),
}
# What is divided among ranks differs between these; the others differ in what every rank has whole: RoPE, windows, norms.
DIVIDED = {
    "qwen2",
    "llama-2",
    "llama-biases",
    "opt-350m",
    "opt-untied-narrow",
    "opt-no-biases",
    "qwen3-moe",
    "qwen3-moe-mixed",
}


def make_family(directory, name, **changes):
    family, settings = FAMILIES[name]
    return Oracle(make_checkpoint(directory, family=family, **{**settings, **changes}))


def generate(llm, prompts, num_tokens):
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False
    )
    return [output["token_ids"] for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens(tmp_path, name):
    oracle = make_family(tmp_path, name)
    prompts = [random_prompt(length, length) for length in (1, 3, 4, 5, 8, 9, 33, 100)]
    prompts.append(prompts[-1][:50] + random_prompt(0, 10))
    expected = [oracle(prompt, 20) for prompt in prompts]
    for size in (1, 2) if name in DIVIDED else (1,):
        options = {
            "num_kvcache_blocks": 40,
            "kvcache_block_size": 4,
            "max_num_batched_tokens": 24,
            "tensor_parallel_size": size,
        }
        with LLM(str(tmp_path), **options) as llm:
            for _ in range(2):
                assert generate(llm, prompts, 20) == expected
                check_invariants(llm)
            assert llm.stats["num_preemptions"] and llm.stats["num_cached_tokens"]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 16.0, "truncate": False,
         "mscale": 0.7, "mscale_all_dim": 0.3},
        LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(tmp_path, rope):
    """They are bitwise identical, whatever the caller's default device is."""
    model = make_checkpoint(tmp_path, family=LlamaConfig, rope_parameters=rope)
    with torch.device("meta"):
        spec = read_spec(read_config(tmp_path), torch.float32, 1)
    theirs = model.model.rotary_emb
    assert isinstance(spec, DecoderSpec)
    assert torch.equal(RotaryEmbedding(spec.rope).inv_freq, theirs.inv_freq)
    assert spec.rope.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("name", FAMILIES)
def test_low_precision_logits(tmp_path, name):
    """In bfloat16 logits differ from float32 by at most 1.5 times as much as those of transformers."""
    oracle = make_family(tmp_path, name, dtype=torch.bfloat16)
    prompt = random_prompt(3, 40)
    llm = LLM(str(tmp_path), num_kvcache_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB_SIZE)
    outputs = llm.generate([prompt[:n] for n in range(1, 41)], params, use_tqdm=False)
    ours = torch.tensor(
        [[output["logprobs"][0][token_id] for token_id in range(VOCAB_SIZE)] for output in outputs]
    )
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        exact = oracle.model.float()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize(
    "family, changes, complaint",
    [
        (MistralConfig, dict(sliding_window=64), "sliding-window"),
        (MinistralConfig, dict(sliding_window=64), "sliding-window"),
        (
            Qwen2Config,
            dict(use_sliding_window=True, sliding_window=64, max_window_layers=1),
            "sliding-window",
        ),
        (LlamaConfig, dict(hidden_act="gelu"), "hidden_act must be one of 'silu'"),
        (
            LlamaConfig,
            dict(
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            ),
            "partial_rotary",
        ),
        (OPTConfig, dict(activation_function="gelu"), "activation_function must be one of 'relu'"),
        (LlamaConfig, dict(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
    ],
)
def test_close_but_different(tmp_path, family, changes, complaint):
    settings = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    architecture = family.__name__.replace("Config", "ForCausalLM")
    family(**settings, vocab_size=97, architectures=[architecture], **changes).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match=complaint):
        LLM(str(tmp_path), load_format="dummy", num_kvcache_blocks=8)


# --- OPT


OPT_POSITIONS = "model.decoder.embed_positions.weight"
OPT_PROJECTION = "model.decoder.project_in.weight"
OPT_UNEXPECTED = "model.decoder.layers.0.fc3.bias"
OPT_BIAS = "model.decoder.layers.1.self_attn.k_proj.bias"


@pytest.fixture
def opt(tmp_path):
    """An OPT checkpoint with every kind of tensor."""
    return make_family(tmp_path, "opt", word_embed_proj_dim=24)


def load(directory, **options):
    return LLM(str(directory), num_kvcache_blocks=32, **options)


def test_opt_names_without_the_prefix(opt, tmp_path):
    """The checkpoints of 350m, 6.7b, 13b and 30b begin with "decoder.", not "model.decoder."."""
    edit_weights(
        tmp_path,
        lambda w: [w.update({name.removeprefix("model."): w.pop(name)}) for name in list(w)],
    )
    prompt = random_prompt(0, 9)
    assert generate(load(tmp_path), [prompt], 12) == [opt(prompt, 12)]


@pytest.mark.parametrize(
    "edit, complaint",
    [
        (lambda w: w.pop(OPT_POSITIONS), f"missing tensors: {OPT_POSITIONS}"),
        (lambda w: w.pop(OPT_PROJECTION), f"missing tensors: {OPT_PROJECTION}"),
        (lambda w: w.update({OPT_UNEXPECTED: torch.ones(2)}), f"unexpected.*: {OPT_UNEXPECTED}"),
        (
            lambda w: w.update({OPT_POSITIONS.removeprefix("model."): w[OPT_POSITIONS].clone()}),
            "repeated tensors: .*embed_positions",
        ),
        (
            lambda w: w.update({OPT_POSITIONS: w[OPT_POSITIONS][2:].clone()}),
            r"embed_positions.* has shape \[256, 32\].* \[258, 32\]",
        ),
        (
            lambda w: w.update({OPT_BIAS: torch.ones(33)}),
            rf"{OPT_BIAS} has shape \[33\], the model needs \[32\]",
        ),
        (lambda w: w.update({"lm_head.weight": torch.ones(97, 24)}), "lm_head.weight differs"),
    ],
    ids=[
        "no-positions",
        "no-projection",
        "unexpected",
        "twice",
        "no-offset",
        "misshapen",
        "tied-but-different",
    ],
)
def test_opt_tensors_that_do_not_fit(opt, tmp_path, edit, complaint):
    edit_weights(tmp_path, edit)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"num_attention_heads": 5}, "hidden_size=32 must be a multiple of num_attention_heads=5"),
        ({"ffn_dim": 0}, "ffn_dim"),
        ({"word_embed_proj_dim": "24"}, "word_embed_proj_dim"),
        # what differs in the config but not in the weights
        ({"enable_bias": False}, "unexpected.*k_proj.bias"),
        ({"layer_norm_elementwise_affine": False}, "unexpected.*layer_norm.bias"),
        ({"do_layer_norm_before": False}, "unexpected.*model.decoder.final_layer_norm"),
        ({"word_embed_proj_dim": None}, r"embed_tokens.weight has shape \[97, 24\]"),
        ({"tie_word_embeddings": False}, "missing tensors: lm_head.weight"),
    ],
)
def test_opt_configs_that_do_not_fit(opt, tmp_path, changes, complaint):
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


def test_opt_sizes_that_do_not_divide(opt, tmp_path):
    with pytest.raises(
        ValueError, match="tensor_parallel_size=3 does not divide num_attention_heads=4"
    ):
        load(tmp_path, tensor_parallel_size=3)
    edit_config(tmp_path, ffn_dim=41)
    with pytest.raises(
        ValueError, match="tensor_parallel_size=2 does not divide intermediate_size=41"
    ):
        load(tmp_path, tensor_parallel_size=2)


def test_opt_every_position_that_was_learned(opt, tmp_path):
    """A sequence can use all learned positions, and no more."""
    prompt = random_prompt(1, 250)
    (output,) = load(tmp_path).generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=50), use_tqdm=False
    )
    assert (output["token_ids"], output["finish_reason"]) == (opt(prompt, 6), "length")
    with pytest.raises(ValueError, match="lower it to 256"):
        load(tmp_path, max_model_len=257)


def test_opt_dummy_weights(opt, tmp_path):
    """Norms are 1 and biases 0, on any number of ranks."""
    (tmp_path / "model.safetensors").unlink()
    prompts, token_ids = [random_prompt(seed, 9) for seed in range(3)], []
    for size in (1, 2):
        with load(tmp_path, load_format="dummy", tensor_parallel_size=size) as llm:
            token_ids.append(generate(llm, prompts, 12))
            decoder = llm.model_runner.executor.worker.model.model.decoder
            for norm in (decoder.final_layer_norm, decoder.layers[1].self_attn_layer_norm):
                assert norm.weight.eq(1).all() and norm.bias.eq(0).all()
            assert decoder.layers[0].fc2.bias.eq(0).all()
    assert token_ids[0] == token_ids[1] and len({tuple(ids) for ids in token_ids[0]}) > 1


# --- Qwen3-MoE


SIX_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
MOE_SPEC = MoESpec(
    vocab_size=VOCAB_SIZE, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48, max_len=64,
    dtype=torch.float32, hidden_size=40, norm_eps=1e-6, rope=RopeSpec.from_base(1e4, 16), tie_embeddings=True,
    num_experts=16, num_experts_per_tok=3, expert_size=24, normalize_weights=True, dense_layers=frozenset({0}),
)  # fmt: skip
needs_bfloat16 = pytest.mark.skipif(
    not has_gemm(torch.bfloat16), reason="no compiler, or AMX that is not allowed"
)


def make_moe(dtype=torch.float32):
    torch.manual_seed(0)
    moe = MoE(replace(MOE_SPEC, dtype=dtype), TensorParallel()).requires_grad_(False)
    for parameter in moe.parameters():
        parameter.normal_(0.0, 0.3)
    return moe


@pytest.mark.parametrize("normalize", [True, False])
def test_moe_every_token_gets_its_experts(normalize):
    """Matches the definition, one token and one expert at a time. Other experts are not read."""
    moe, x = make_moe(), torch.randn(5, MOE_SPEC.hidden_size)
    moe.normalize_weights = normalize
    probabilities = (x @ moe.gate.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    chosen: set[int] = set()
    for token, each in enumerate(probabilities):
        experts = each.argsort(descending=True)[: MOE_SPEC.num_experts_per_tok].tolist()
        for expert in experts:
            gate, up = (moe.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            output = moe.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += output * each[expert] / (each[experts].sum() if normalize else 1)
        chosen.update(experts)
    others = sorted(set(range(MOE_SPEC.num_experts)) - chosen)
    assert others
    moe.experts.gate_up_proj[others] = torch.nan
    moe.experts.down_proj[others] = torch.nan
    torch.testing.assert_close(moe(x), expected)


@pytest.mark.parametrize("is_packed", [False, pytest.param(True, marks=needs_bfloat16)])
def test_moe_low_precision(is_packed):
    """Closer to float32 than transformers' block, because weights, sums and SwiGLU round less
    often.

    With prepacked weights a token's result does not depend on the batch, to the bit.
    """
    moe, x = make_moe(torch.bfloat16), torch.randn(50, MOE_SPEC.hidden_size).bfloat16()
    config = Qwen3MoeConfig(
        num_experts=16,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        hidden_size=MOE_SPEC.hidden_size,
    )
    theirs = Qwen3MoeSparseMoeBlock(config).bfloat16().requires_grad_(False)
    theirs.load_state_dict(moe.state_dict())
    logits, rounded = moe.gate(x), theirs(x[None])[0]
    exact = make_moe()
    exact.load_state_dict(moe.state_dict())
    exact.gate.forward = lambda x: (
        logits.float()
    )  # whom a near tie chooses is not what this is about
    if is_packed:
        kernelize(moe, torch.device("cpu"), torch.bfloat16)
        assert type(moe.experts) is PrepackedExperts and not list(moe.parameters())
    output = moe(x)
    expected = exact(x.float())
    assert (output - expected).norm() < (0.65 if is_packed else 0.9) * (rounded - expected).norm()
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40)) if is_packed else ():
        assert torch.equal(moe(x[rows]), output[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_kernelized", [True, False])
def test_moe_near_ties(tmp_path, monkeypatch, is_kernelized, dtype):
    """In 16 bits rounding can decide near ties of the router. Apart from that, only rounding
    differs.

    Experts come in pairs of almost equal probability, so a token's third expert is half of a near
    tie. Given nanovllm's choices, float32 is as close to nanovllm as to transformers.
    """
    model = make_checkpoint(
        tmp_path,
        family=Qwen3MoeConfig,
        dtype=dtype,
        **{**SIX_EXPERTS, "num_experts": 16, "num_experts_per_tok": 3},
    )
    for layer in model.model.layers:
        rows = layer.mlp.gate.weight.data
        rows[8:] = rows[:8] * (1 + torch.finfo(dtype).eps * torch.randn(rows[:8].shape)).to(dtype)
    model.save_pretrained(tmp_path)
    prompt, chosen = random_prompt(1, 100), defaultdict[nn.Module, list[Tensor]](list)
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=VOCAB_SIZE)
    with LLM(str(tmp_path), num_kvcache_blocks=16, enable_kernels=is_kernelized) as llm:
        for module in llm.model_runner.executor.worker.model.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(
                    lambda module, args: chosen[module].append(args[1])
                )
        output = llm.generate(prompt, params, use_tqdm=False)[0]
    ours = torch.tensor(
        [[logprobs[token_id] for token_id in range(VOCAB_SIZE)] for logprobs in output["logprobs"]]
    )
    topk, gaps = (
        torch.topk,
        [],
    )  # of each choice: log(probability of the third best / of the least probable that is chosen)

    def compute_theirs(*, is_forced):
        """Log probabilities [num_generated, vocab_size] of transformers, with its experts or with
        ours.
        """
        layers = iter(chosen.values())

        def choose(probabilities, k, dim):
            experts = torch.cat(next(layers))
            weights = probabilities.gather(dim, experts)
            gaps.append((topk(probabilities, k).values[:, -1] / weights.amin(dim)).log())
            return weights, experts

        with monkeypatch.context() as patch, torch.inference_mode():
            if is_forced:
                patch.setattr(torch, "topk", choose)
            logits = model(torch.tensor([prompt + output["token_ids"][:-1]])).logits[
                0, len(prompt) - 1 :
            ]
        assert not is_forced or next(layers, None) is None
        return logits.float().log_softmax(-1)

    def regret(logprobs):
        """The largest difference between the best token's log probability and the generated
        token's.
        """
        return (logprobs.amax(-1) - logprobs[range(len(ours)), output["token_ids"]]).max()

    rounded = compute_theirs(is_forced=True)
    model.float()
    gaps.clear()
    free, exact = compute_theirs(is_forced=False), compute_theirs(is_forced=True)
    rounding = (rounded - exact).square().mean().sqrt()
    assert (ours - exact).square().mean().sqrt() < 1.3 * rounding
    assert regret(exact) < 10 * rounding < regret(free)
    assert 0.0 < torch.cat(gaps).max() < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [2, 3])
def test_moe_the_width_is_divided(size):
    """Dummy weights are the same on any number of ranks, and the ranks' outputs sum to the whole."""
    whole = MoE(MOE_SPEC, TensorParallel()).requires_grad_(False)
    init_dummy_weights(whole, seed=1)
    x = torch.randn(7, MOE_SPEC.hidden_size)
    total = torch.zeros_like(x)
    for rank in range(size):
        moe = MoE(MOE_SPEC, TensorParallel(rank, size)).requires_grad_(False)
        init_dummy_weights(moe, seed=1)
        assert moe.experts.down_proj.shape == (16, 40, 24 // size) and torch.equal(
            moe.gate.weight, whole.gate.weight
        )
        total += moe(x)
    torch.testing.assert_close(total, whole(x))


def test_moe_low_precision_on_two_ranks(tmp_path):
    make_checkpoint(
        tmp_path, family=Qwen3MoeConfig, dtype=torch.bfloat16, **SIX_EXPERTS, initializer_range=0.1
    )
    params, values = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB_SIZE), []
    for size in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=size, num_kvcache_blocks=64) as llm:
            outputs = llm.generate(
                [random_prompt(seed, 20) for seed in range(8)], params, use_tqdm=False
            )
        values.append(
            torch.tensor(
                [
                    [output["logprobs"][0][token_id] for token_id in range(VOCAB_SIZE)]
                    for output in outputs
                ]
            )
        )
    assert (values[0] - values[1]).abs().mean() < 0.02 * values[0].std()


def test_moe_steps_run_eager(monkeypatch):
    """Shapes depend on the routing. A model with dense layers only is captured."""
    monkeypatch.setattr("nanovllm.kernels.CudaGraphs", lambda *arguments: "captured")
    backend, kv_caches = (
        SimpleNamespace(SUPPORTS_CUDA_GRAPHS=True),
        [SimpleNamespace(device=torch.device("cuda"))],
    )
    for dense_layers, expected in (({0}, None), ({0, 1}, "captured")):
        model = replace(MOE_SPEC, dense_layers=frozenset(dense_layers)).make_model(attention)
        assert capture_decode_steps(model, backend, kv_caches, 8, 4) == expected


@pytest.fixture
def change_moe_config(tmp_path):
    """A checkpoint with a changed config.json. None removes a field."""

    def change(made_with, **changes):
        oracle = Oracle(
            make_checkpoint(tmp_path, family=Qwen3MoeConfig, **{**SIX_EXPERTS, **made_with})
        )
        content = {**json.loads((tmp_path / "config.json").read_text()), **changes}
        content = {name: value for name, value in content.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return oracle

    return change


@pytest.mark.parametrize(
    "name, other", [("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")]
)
def test_moe_either_name_of_num_experts(tmp_path, change_moe_config, name, other):
    oracle, prompt = change_moe_config({}, **{name: 6, other: None}), random_prompt(1, 9)
    with LLM(str(tmp_path), num_kvcache_blocks=16) as llm:
        output = llm.generate(
            prompt, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
        )[0]
    assert output["token_ids"] == oracle(prompt, 8)


@pytest.mark.parametrize(
    "made_with, changes, num_ranks, complaint",
    [
        ({}, {"num_experts_per_tok": 7}, 1, "num_experts_per_tok must be at least 1 and at most 6, not 7"),
        ({}, {"num_experts_per_tok": 0}, 1, "num_experts_per_tok must be at least 1"),
        ({}, {"decoder_sparse_step": 0}, 1, "decoder_sparse_step must be at least 1"),
        ({}, {"moe_intermediate_size": 0}, 1, "moe_intermediate_size must be at least 1"),
        ({}, {"num_experts": 0, "num_local_experts": 0}, 1, "num_experts must be at least 1"),
        ({"moe_intermediate_size": 25}, {}, 2, "tensor_parallel_size=2 does not divide moe_intermediate_size=25"),
        ({"mlp_only_layers": [1], "intermediate_size": 47}, {}, 2, "tensor_parallel_size=2 does not divide intermediate_size=47"),
        ({}, {"num_local_experts": 5}, 1, r"mlp.gate.weight has shape \[6, 32\], the model needs \[5, 32\]"),
        ({}, {"moe_intermediate_size": 16}, 1, r"has shape \[32, 24\], the model needs \[32, 16\]"),
        ({}, {"mlp_only_layers": [0]}, 1, "missing tensors: .*layers.0.mlp.gate_proj.weight"),
    ],
)  # fmt: skip
def test_moe_refusals(tmp_path, change_moe_config, made_with, changes, num_ranks, complaint):
    change_moe_config(made_with, **changes)
    with pytest.raises(ValueError, match=complaint):
        LLM(str(tmp_path), num_kvcache_blocks=16, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("experts.3.up_proj", None, "missing tensors: .*experts.3.up_proj.weight"),
        (
            "experts.3.up_proj",
            "experts.6.up_proj",
            "repeated tensors: .*experts.6.up_proj.weight; .*experts.3.up_proj.weight",
        ),
        (
            "gate",
            "gate.e_score_correction_bias",
            "repeated tensors: .*gate.e_score_correction_bias",
        ),
    ],
)
def test_moe_tensors_that_do_not_fit(tmp_path, change_moe_config, old, new, complaint):
    change_moe_config({})

    def edit(weights):
        tensor = weights.pop(f"model.layers.1.mlp.{old}.weight")
        if new is not None:
            weights[f"model.layers.1.mlp.{new}.weight"] = tensor

    edit_weights(tmp_path, edit)
    with pytest.raises(ValueError, match=complaint):
        LLM(str(tmp_path), num_kvcache_blocks=16)
