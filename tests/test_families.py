"""Each family that loads: transformers' tokens, cold, warm, in chunks, preempted, on two ranks; and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB_SIZE, Oracle, check_invariants, make_checkpoint, random_prompt
from transformers import (
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from nanovllm import LLM, SamplingParams
from nanovllm.layers.rotary import RotaryEmbedding
from nanovllm.models.checkpoint import read_config
from nanovllm.models.config import read_spec
from nanovllm.models.decoder import DecoderSpec

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
OPT = dict(ffn_dim=40)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=False)),
    "qwen2.5-tied": (Qwen2Config, dict(use_sliding_window=False, sliding_window=8, max_window_layers=1)),
    "llama-2": (LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=False, head_dim=None)),
    "llama-3.1": (LlamaConfig, dict(rope_parameters=LLAMA3)),
    "llama-biases": (LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama-dynamic": (LlamaConfig, dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})),
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
        dict(**EXPERTS, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=False),
    ),
}


def make_family(directory: Path, name: str, **changes: Any) -> Oracle:
    family, settings = FAMILIES[name]
    return Oracle(make_checkpoint(directory, family=family, **{**settings, **changes}))


def generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
    return [output["token_ids"] for output in outputs]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens(tmp_path: Path, name: str) -> None:
    oracle = make_family(tmp_path, name)
    prompts = [random_prompt(length, length) for length in (1, 3, 4, 5, 8, 9, 33, 100)]
    prompts.append(prompts[-1][:50] + random_prompt(0, 10))
    expected = [oracle(prompt, 20) for prompt in prompts]
    for size in (1, 2):
        options = {"num_kvcache_blocks": 40, "kvcache_block_size": 4, "max_num_batched_tokens": 24, "tensor_parallel_size": size}
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
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 16.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.3},
        LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    """To the last bit, on whatever device the caller computes."""
    model = make_checkpoint(tmp_path, family=LlamaConfig, rope_parameters=rope)
    with torch.device("meta"):
        spec = read_spec(read_config(tmp_path), torch.float32, 1)
    theirs = model.model.rotary_emb
    assert isinstance(spec, DecoderSpec)
    assert torch.equal(RotaryEmbedding(spec.rope).inv_freq, theirs.inv_freq)
    assert spec.rope.attention_factor == theirs.attention_scaling


@pytest.mark.parametrize("name", FAMILIES)
def test_low_precision_logits(tmp_path: Path, name: str) -> None:
    """In bfloat16 no farther from float32 than transformers' own, give or take half."""
    oracle = make_family(tmp_path, name, dtype=torch.bfloat16)
    prompt = random_prompt(3, 40)
    llm = LLM(str(tmp_path), num_kvcache_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB_SIZE)
    outputs = llm.generate([prompt[:n] for n in range(1, 41)], params, use_tqdm=False)
    ours = torch.tensor([[output["logprobs"][0][token_id] for token_id in range(VOCAB_SIZE)] for output in outputs])
    with torch.inference_mode():
        theirs = oracle.model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        exact = oracle.model.float()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


@pytest.mark.parametrize(
    "family, changes, complaint",
    [
        (MistralConfig, dict(sliding_window=64), "sliding-window"),
        (MinistralConfig, dict(sliding_window=64), "sliding-window"),
        (Qwen2Config, dict(use_sliding_window=True, sliding_window=64, max_window_layers=1), "sliding-window"),
        (LlamaConfig, dict(hidden_act="gelu"), "hidden_act must be one of 'silu'"),
        (
            LlamaConfig,
            dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            "partial_rotary",
        ),
        (LlamaConfig, dict(rope_parameters={**LLAMA3, "low_freq_factor": 4.0}), "low_freq_factor=4.0 must be below"),
        (OPTConfig, dict(activation_function="gelu"), "activation_function must be one of 'relu'"),
        (LlamaConfig, dict(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
    ],
)
def test_close_but_different(tmp_path: Path, family: type[PretrainedConfig], changes: dict[str, Any], complaint: str) -> None:
    settings = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256)
    architecture = family.__name__.replace("Config", "ForCausalLM")
    family(**settings, vocab_size=97, architectures=[architecture], **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        LLM(str(tmp_path), load_format="dummy", num_kvcache_blocks=8)
