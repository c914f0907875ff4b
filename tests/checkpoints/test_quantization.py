"""Quantized weights give the tokens of their dequantized weights, in every format that is read.

The test packs each format itself, from the same codes, scales and zeros.
"""

import json
import shutil

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
from families import make_family, stack_experts
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3_5Config, Qwen3MoeConfig

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.checkpoints.quantization import read_quantization
from nanovllm.checkpoints.tensor_files import TensorFiles
from nanovllm.layers.quantized import QuantizedWeight, Scheme

PROMPTS = [random_prompt(0, 9), random_prompt(1, 14)]
SIZES = dict(hidden_size=64, intermediate_size=128, head_dim=16)
UP = "model.layers.1.mlp.up_proj"
PROJECTIONS = ("_proj.weight", "fc1.weight", "fc2.weight", "mlp.gate.weight")
PROJECTIONS += ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
OF_BETA_AND_DECAY = ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 outputs the nibbles of an int32 have


def pack(codes, bits):
    """Pack the last dimension into int32, the low bits first."""
    num = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % num))
    words = codes.unflatten(-1, (-1, num)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32).contiguous()


def pack_gptq(weight, offset=1, g_idx=None):
    in_features = weight.shape[1]
    if g_idx is None:
        g_idx = torch.arange(in_features) // weight.scheme.group_size
    return {
        "qweight": pack(weight.unpack(), weight.scheme.bits).T.contiguous(),
        "qzeros": pack(weight.zeros.T - offset, weight.scheme.bits),
        "scales": weight.scales.T.half().contiguous(),
        "g_idx": g_idx.to(torch.int32),
    }


def pack_awq(weight):
    def pack_outputs(numbers):
        reordered = numbers.T.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2)
        return pack(reordered, 4)

    scales = weight.scales.T.half().contiguous()
    parts = {"qweight": pack_outputs(weight.unpack()), "scales": scales}
    return {**parts, "qzeros": pack_outputs(weight.zeros)}


def pack_compressed(weight, has_zeros=True):
    parts = {
        "weight_packed": pack(weight.unpack(), weight.scheme.bits),
        "weight_scale": weight.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        parts["weight_zero_point"] = pack(weight.zeros.T, weight.scheme.bits).T.contiguous()
    return parts


def quantize(weight, scheme, dtype=torch.float16, is_symmetric=False):
    """Quantize with scales that `dtype` holds, as checkpoints store them."""
    quantized = QuantizedWeight.quantize(weight, scheme)
    quantized.scales = quantized.scales.to(dtype).float()
    if is_symmetric:
        quantized.zeros.fill_(1 << (scheme.bits - 1))
    return quantized


def gptq(bits=4, group_size=32, **others):
    return dict(quant_method="gptq", bits=bits, group_size=group_size, sym=False, **others)


def compressed(bits=4, **others):
    weights = dict(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=False)
    group = dict(weights={**weights, **others}, targets=["Linear"])
    method = dict(quant_method="compressed-tensors", format="pack-quantized")
    return dict(**method, config_groups=dict(group_0=group))


FP8 = dict(quant_method="fp8", weight_block_size=[128, 128])
GROUP_0 = compressed()["config_groups"]["group_0"]
QUANTIZED_INPUTS = compressed()
QUANTIZED_INPUTS["config_groups"] = dict(group_0=dict(GROUP_0, input_activations=dict(num_bits=8)))
MIXED_BITS = compressed()
MIXED_BITS["config_groups"] = dict(group_0=GROUP_0, group_1=GROUP_0)


def convert(directory, settings, make_parts, scheme, is_projection=None, **options):
    """Store the projections of a checkpoint in a format. Return their dequantized weights."""
    dequantized = {}

    def edit(weights):
        for name in [name for name in weights if name.endswith(PROJECTIONS)]:
            if is_projection is not None and not is_projection(name):
                continue
            weight = quantize(weights.pop(name).float(), scheme, **options)
            dequantized[name] = weight.dequantize()
            for key, part in make_parts(weight).items():
                weights[f"{name.removesuffix('.weight')}.{key}"] = part

    edit_weights(directory, edit)
    edit_config(directory, quantization_config=settings)
    return dequantized


def load(directory, **options):
    return LLM(directory, num_kvcache_blocks=64, **options)


def tokens_of(directory, **options):
    with load(directory, **options) as llm:
        return generate_ids(llm, PROMPTS, greedy(12))


def make_twice(directory, family, **changes):
    """Make a checkpoint, and a copy of it."""
    stored, floats = directory / "stored", directory / "floats"
    make_family(stored, family, **changes)
    shutil.copytree(stored, floats)
    return stored, floats


@pytest.fixture
def checkpoint(tmp_path):
    return make_checkpoint(tmp_path, **SIZES)


def oracle_tokens(model, dequantized):
    """The greedy tokens of transformers with these weights."""
    model.load_state_dict(dequantized, strict=False)
    oracle = Oracle(model)
    return [oracle(prompt, 12) for prompt in PROMPTS]


INT4_32, INT8_32 = Scheme(4, 32), Scheme(8, 32)
FORMATS = {
    "gptq": (gptq(), pack_gptq, INT4_32, {}),
    "gptq 8 bits": (gptq(8), pack_gptq, INT8_32, {}),
    "gptq whole rows": (gptq(group_size=-1), pack_gptq, Scheme(4, 128), {}),
    "gptq v2": (
        gptq(checkpoint_format="gptq_v2"),
        lambda weight: pack_gptq(weight, offset=0),
        INT4_32,
        {},
    ),
    "gptq v2, as transformers names it": (
        gptq(format="gptq_v2"),
        lambda weight: pack_gptq(weight, offset=0),
        INT4_32,
        {},
    ),
    "gptq symmetric": (gptq() | dict(sym=True), pack_gptq, INT4_32, dict(is_symmetric=True)),
    "gptq without g_idx": (
        gptq(dynamic={"-:.*lm_head.*": {}}),
        lambda weight: {k: v for k, v in pack_gptq(weight).items() if k != "g_idx"},
        INT4_32,
        {},
    ),
    "awq": (
        dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        pack_awq,
        INT4_32,
        {},
    ),
    "compressed": (compressed(), pack_compressed, INT4_32, dict(dtype=torch.bfloat16)),
    "compressed 8 bits": (compressed(8), pack_compressed, INT8_32, dict(dtype=torch.bfloat16)),
    "compressed symmetric": (
        compressed(symmetric=True),
        lambda weight: pack_compressed(weight, has_zeros=False),
        INT4_32,
        dict(dtype=torch.bfloat16, is_symmetric=True),
    ),
}


@pytest.mark.parametrize("enable_kernels", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_a_checkpoint_are_kept(checkpoint, tmp_path, name, enable_kernels):
    settings, make_parts, scheme, options = FORMATS[name]
    dequantized = convert(tmp_path, settings, make_parts, scheme, **options)
    assert len(dequantized) == 14
    expected = oracle_tokens(checkpoint, dequantized)
    assert tokens_of(tmp_path, enable_kernels=enable_kernels) == expected


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_codes_of_fused_projections_are_kept(tmp_path, name):
    """One tensor has the rows of q_proj, k_proj and v_proj, and another those of gate and up."""
    model = make_family(tmp_path, "phi4", **SIZES).model
    settings, make_parts, scheme, options = FORMATS[name]
    dequantized = convert(tmp_path, settings, make_parts, scheme, **options)
    assert len(dequantized) == 8
    expected = oracle_tokens(model, dequantized)
    assert tokens_of(tmp_path) == expected
    assert tokens_of(tmp_path, tensor_parallel_size=2) == expected


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_of_gptq_take_all_values(tmp_path, bits, version, desc_act):
    """Version 1 subtracts 1 from every zero of an int32 at once, so a zero of 0 borrows."""
    rows, groups = 32, 4
    zeros = torch.arange(rows * groups).reshape(rows, groups) * (1 if bits == 4 else 37) % 2**bits
    zeros[8:20, 1] = 0
    zeros[20:] = torch.randint(3, (12, groups)) * 15 % 2**bits
    codes = torch.randint(2**bits, (rows, groups * 32), dtype=torch.uint8)
    scales = torch.rand(rows, groups).half()
    g_idx = torch.arange(groups * 32) // 32
    if desc_act:
        g_idx = g_idx[torch.randperm(groups * 32)]
    stored = QuantizedWeight.from_codes(
        Scheme(bits, 32), torch.float32, codes, scales.float(), zeros
    )
    parts = pack_gptq(stored, offset=2 - version, g_idx=g_idx)
    save_file({f"{UP}.{key}": part for key, part in parts.items()}, tmp_path / "model.safetensors")
    checkpoint_format = "gptq" if version == 1 else "gptq_v2"
    settings = gptq(bits, desc_act=desc_act, checkpoint_format=checkpoint_format)
    format = read_quantization(Qwen3MoeConfig(quantization_config=settings), None).format
    weight = format.read(TensorFiles(tmp_path), UP, [rows, groups * 32])
    full = weight if desc_act else weight.dequantize()
    assert torch.equal(full, (codes.int() - zeros[:, g_idx]) * scales[:, g_idx].float())


@pytest.mark.parametrize("option", [None, "int8"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_inputs_of_scattered_groups_become_floats(tmp_path, family, option):
    """With desc_act a group has any inputs, which no QuantizedWeight holds."""
    stored, floats = make_twice(tmp_path, family, **SIZES)

    def shuffle(size):
        return torch.randperm(size, generator=torch.Generator().manual_seed(0))

    def make_parts(weight):
        order = shuffle(weight.shape[1])
        weight.codes = QuantizedWeight.from_codes(
            weight.scheme, weight.dtype, weight.unpack()[:, order], weight.scales, weight.zeros
        ).codes
        return pack_gptq(weight, g_idx=(torch.arange(weight.shape[1]) // 32)[order])

    in_order = convert(stored, gptq(desc_act=True), make_parts, INT4_32)
    dequantized = {name: full[:, shuffle(full.shape[1])] for name, full in in_order.items()}
    if option is None:
        edit_weights(floats, lambda weights: weights.update(dequantized))
        assert tokens_of(stored) == tokens_of(floats)
    else:
        with load(stored, quantization=option) as llm:
            model = llm.executor.worker.spec.quantization
            assert model.linear == Scheme(8, 128)
            assert len(generate_ids(llm, PROMPTS, greedy(4))) == 2


def convert_to_fp8(directory):
    """Store projections in blocks of 128 x 128. Return their dequantized weights.

    Routers, and the projections of beta and decay, stay floats, as in releases.
    """
    dequantized = {}

    def edit(weights):
        for name in [name for name in weights if name.endswith(PROJECTIONS)]:
            if name.endswith("mlp.gate.weight"):
                continue
            weight = weights.pop(name)
            sizes = [-(-size // 128) for size in weight.shape]
            factors = torch.rand(sizes) + 0.5
            spread = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
            spread = spread[: weight.shape[0], : weight.shape[1]]
            weights[name] = (weight / spread).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = factors
            dequantized[name] = weights[name].float() * spread

    edit_weights(directory, edit)
    edit_config(directory, quantization_config=FP8)
    return dequantized


@pytest.mark.parametrize("size", [1, 2])
def test_fp8_blocks_become_floats(tmp_path, size):
    """Ranks may share a block."""
    model = make_checkpoint(tmp_path, hidden_size=160, intermediate_size=144)
    dequantized = convert_to_fp8(tmp_path)
    assert tokens_of(tmp_path, tensor_parallel_size=size) == oracle_tokens(model, dequantized)


@pytest.mark.parametrize("family, size", [("qwen3-moe", 1), ("qwen3.5-moe", 2), ("qwen3-next", 1)])
def test_fp8_experts_become_floats(tmp_path, family, size):
    stored, floats = make_twice(tmp_path, family, hidden_size=160, moe_intermediate_size=200)
    dequantized = convert_to_fp8(stored)
    assert any("experts.7.down_proj" in name for name in dequantized)
    edit_weights(floats, lambda weights: weights.update(dequantized))
    assert tokens_of(stored, tensor_parallel_size=size) == tokens_of(floats)


@pytest.mark.parametrize(
    "family, name, enable_kernels",
    [
        ("gemma3-untied", "gptq", True),
        ("opt", "awq", True),
        ("opt-350m", "gptq", False),
        ("qwen3-moe", "awq", False),
        ("qwen3.5-moe", "gptq", True),
        ("qwen3-next", "awq", False),
    ],
)
def test_codes_of_other_families_are_kept(tmp_path, family, name, enable_kernels):
    """Among them are experts, a router, and layers with biases."""
    stored, floats = make_twice(tmp_path, family)
    settings, make_parts, scheme, _ = FORMATS[name]
    dequantized = convert(stored, settings, make_parts, scheme)
    edit_weights(floats, lambda weights: weights.update(dequantized))
    expected = tokens_of(floats, enable_kernels=enable_kernels)
    assert tokens_of(stored, enable_kernels=enable_kernels) == expected


@pytest.mark.parametrize(
    "family, name", [("qwen3-next", "gptq"), ("qwen3.5-moe", "awq"), ("qwen3-next", "compressed")]
)
@pytest.mark.parametrize("part", [".experts.", "shared_expert.", "linear_attn.", "mlp.gate."])
def test_only_some_parts_of_mixtures_are_quantized(tmp_path, family, name, part):
    """sglang #33759, #20370, vLLM #22017, vLLM-omni #5573: lists of exceptions were misread.

    Here the names of tensors decide, and any of these parts can be quantized alone.
    """
    stored, floats = make_twice(tmp_path, family)
    settings, make_parts, scheme, options = FORMATS[name]
    dequantized = convert(
        stored, settings, make_parts, scheme, is_projection=lambda key: part in key, **options
    )
    assert dequantized
    edit_weights(floats, lambda weights: weights.update(dequantized))
    assert tokens_of(stored) == tokens_of(floats)


@pytest.mark.parametrize(
    "family, option, enable_kernels",
    [
        ("gemma3", "int8", True),
        ("opt-350m", "int4", False),
        ("phi4", "int8", False),
        ("qwen3-moe", "int4", True),
        ("qwen3.5-moe", "int8", True),
        ("qwen3-next", "int4", False),
    ],
)
def test_weights_are_quantized_while_loading(tmp_path, family, option, enable_kernels):
    """The model computes with the dequantized weights, and routers, norms and biases are floats."""
    make_family(tmp_path, family)
    head = Scheme(8, 128)
    linear = head if option == "int8" else Scheme(4, 64)
    dequantized = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        is_head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        is_kept = name.endswith(("gate.weight", "embed_positions.weight", *OF_BETA_AND_DECAY))
        if weight.dim() == 2 and not is_kept:
            scheme = head if is_head else linear
            weight = QuantizedWeight.quantize(weight, scheme).dequantize()
        dequantized[name] = weight
    if family == "qwen3.5-moe":
        edit_weights(tmp_path, stack_experts)
    with load(tmp_path, quantization=option, enable_kernels=enable_kernels) as llm:
        assert llm.executor.worker.spec.quantization.linear == linear
        actual = generate_ids(llm, PROMPTS, greedy(12))
    save_file(dequantized, tmp_path / "model.safetensors")
    assert actual == tokens_of(tmp_path, enable_kernels=enable_kernels)


@pytest.mark.parametrize("option", ["int4", pytest.param("int8", marks=pytest.mark.sweep)])
def test_ranks_quantize_their_shards_alike(option):
    answers = []
    for size in (1, 2):
        with LLM(
            DEMO_MODEL, quantization=option, tensor_parallel_size=size, dtype="float32"
        ) as llm:
            outputs = llm.generate(["What is 27 + 58?", "count"], greedy(12))
            answers.append([output["token_ids"] for output in outputs])
    assert answers[0] == answers[1]


def test_int8_chooses_the_tokens_of_unquantized_weights():
    """At 97 of 100 positions at least."""
    questions = [f"What is {number} + {97 - number}?" for number in range(20, 30)]
    questions += ["Spell planet backwards.", "Count from 3 to 20.", "Which day follows Monday?"]
    chats = [[{"role": "user", "content": question}] for question in questions]
    chosen = []
    for option in (None, "int8"):
        with LLM(DEMO_MODEL, dtype="bfloat16", quantization=option) as llm:
            if option is None:
                params = SamplingParams(seed=0)
                sampled = llm.chat(chats, params, use_tqdm=False)
                texts = [output["prompt_token_ids"] + output["token_ids"] for output in sampled]
            params = SamplingParams(max_tokens=1, prompt_logprobs=1)
            outputs = llm.generate(texts, params)
        entries = [entry for output in outputs for entry in output["prompt_logprobs"][1:]]
        chosen.append([max(entry, key=entry.get) for entry in entries])
    assert len(chosen[0]) > 300
    num_equal = sum(a == b for a, b in zip(*chosen, strict=True))
    assert num_equal >= 0.97 * len(chosen[0])


def test_ranks_do_not_share_groups(checkpoint, tmp_path):
    def check(message, **options):
        with pytest.raises(ValueError, match=f"tensor_parallel_size=2 divides groups of {message}"):
            load(tmp_path, tensor_parallel_size=2, **options)

    o_proj = "model.layers.0.self_attn.o_proj.weight"
    check(f"128 inputs of {o_proj}, which has 64: use fewer ranks", quantization="int8")
    down_proj = "model.layers.0.mlp.down_proj.weight"
    convert(
        tmp_path,
        gptq(group_size=128),
        pack_gptq,
        Scheme(4, 128),
        is_projection=lambda name: name.endswith("down_proj.weight"),
    )
    check(f"128 inputs of {down_proj}, which has 128: use fewer ranks")


@pytest.mark.parametrize(
    "settings, complaint",
    [
        (dict(quant_method="bitsandbytes"), "quantization_config: quant_method .*'bitsandbytes'"),
        (gptq(bits=3), "bits must be one of 4, 8, not 3"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format .*'marlin'"),
        (gptq(dynamic={"+:.*up_proj": {"bits": 8}}), "dynamic"),
        (dict(quant_method="awq", bits=4, group_size=32, version="gemv"), "version .*'gemv'"),
        (dict(quant_method="fp8"), "weight_block_size"),
        (compressed() | dict(format="nvfp4-pack-quantized"), "format .*'nvfp4-pack-quantized'"),
        (compressed(type="float"), "type .*'float'"),
        (compressed(actorder="group"), "actorder .*'group'"),
        (gptq(format="marlin"), "format .*'marlin'"),
        (compressed() | dict(transform_config={"config_groups": {}}), "transform_config"),
        (dict(quant_method="fp8", weight_block_size=[64, 128]), r"weight_block_size .*\[64, 128\]"),
        (FP8 | dict(activation_scheme="static"), "activation_scheme .*'static'"),
        (QUANTIZED_INPUTS, "input_activations must be one of None, not {'num_bits': 8}"),
        (MIXED_BITS, "config_groups must have one group, not group_0, group_1"),
        ("awq", "config.json: "),
    ],
)
def test_unsupported_formats_are_named(checkpoint, tmp_path, settings, complaint):
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


def test_dummy_weights_are_quantized_where_checkpoints_quantize_them(tmp_path):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    make_checkpoint(tmp_path, family=Qwen3MoeConfig, hidden_size=64, **experts)
    edit_config(tmp_path, quantization_config=gptq())
    llm = load(tmp_path, load_format="dummy", enable_kernels=False)
    modules = dict(llm.executor.worker.model.named_modules())
    layer = "model.layers.0"
    assert type(modules[f"{layer}.mlp.experts"].down_proj) is QuantizedWeight
    assert type(modules[f"{layer}.self_attn.o_proj"].weight) is QuantizedWeight
    assert type(modules[f"{layer}.mlp.gate"].weight) is nn.Parameter


def shorten(part):
    return part[:-1].contiguous()


def widen(part):
    return part.to(torch.float32)


DAMAGES = [
    ("gptq", "scales", shorten, r"has shape \[1, 128\], the model needs \[2, 128\]"),
    ("gptq", "qweight", shorten, r"has shape \[7, 128\]"),
    ("gptq", "g_idx", lambda x: x.flip(0), "reorders inputs, but config.json has no desc_act"),
    ("gptq scattered", "g_idx", lambda x: x - 1, "has groups that do not exist"),
    ("gptq symmetric", "qzeros", lambda x: x + 2, "has zeros that do not fit symmetric codes"),
    ("gptq 8 bits", "qweight", lambda x: x[::2].contiguous(), r"needs \[16, 128\]"),
    ("awq", "qzeros", lambda x: x[:, :-1].contiguous(), r"has shape \[2, 15\]"),
    ("compressed", "weight_packed", shorten, r"has shape \[127, 8\]"),
    ("compressed", "weight_zero_point", shorten, r"has shape \[15, 2\]"),
    ("fp8", "weight_scale_inv", lambda x: x[0], r"has shape \[1\], the model needs \[1, 1\]"),
    ("fp8", "weight", widen, "is stored as F32: supported dtypes are F8_E4M3"),
    ("gptq", "qzeros", None, "has no tensor"),
    ("gptq", "qweight", None, "gate_up_proj is only partly quantized, since qweight is missing"),
    ("fp8", "weight", None, "has no tensor"),
]


def store(directory, name):
    if name == "fp8":
        convert_to_fp8(directory)
    elif name == "gptq scattered":
        convert(directory, gptq(desc_act=True), pack_gptq, INT4_32)
    else:
        settings, make_parts, scheme, options = FORMATS[name]
        convert(directory, settings, make_parts, scheme, **options)


@pytest.mark.parametrize("name, part, damage, complaint", DAMAGES)
def test_damaged_parts_are_named(checkpoint, tmp_path, name, part, damage, complaint):
    """So is the file of each. Without a `damage`, the part is missing."""
    store(tmp_path, name)
    key = f"{UP}.{part}"

    def edit(weights):
        stored = weights.pop(key)
        if damage is not None:
            weights[key] = damage(stored)

    edit_weights(tmp_path, edit)
    with pytest.raises(ValueError, match=complaint) as error:
        load(tmp_path)
    assert UP in str(error.value)
    if damage is not None:
        assert key in str(error.value)
        assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize("is_inside", [False, True])
def test_settings_of_a_model_with_images_are_found(tmp_path, is_inside):
    config = Qwen3_5Config().to_dict()
    (config["text_config"] if is_inside else config)["quantization_config"] = gptq()
    (tmp_path / "config.json").write_text(json.dumps(config))
    format = read_quantization(read_config(tmp_path), None).format
    assert format == read_quantization(Qwen3MoeConfig(quantization_config=gptq()), None).format
    assert format is not None


def test_only_empty_biases_are_ignored(checkpoint, tmp_path):
    """AutoGPTQ stores biases of zeros for layers that have none."""
    dequantized = convert(tmp_path, gptq(), pack_gptq, INT4_32)
    edit_weights(tmp_path, lambda weights: weights.update({f"{UP}.bias": torch.zeros(128)}))
    assert tokens_of(tmp_path) == oracle_tokens(checkpoint, dequantized)
    edit_weights(tmp_path, lambda weights: weights.update({f"{UP}.bias": torch.ones(128)}))
    with pytest.raises(ValueError, match=f"unexpected tensors: {UP}.bias"):
        load(tmp_path)


@pytest.mark.parametrize("scheme", [Scheme(8, 128), Scheme(4, 64), Scheme(4, 32)])
@pytest.mark.parametrize("in_features", [1, 3, 31, 128, 200])
def test_codes_are_the_nearest(scheme, in_features):
    weight = torch.randn(5, in_features)
    weight[0] = 0
    weight[1] = weight[1].abs() + 1
    weight[2] = -weight[1]
    quantized = QuantizedWeight.quantize(weight, scheme)
    assert quantized.shape == weight.shape
    assert quantized.codes.shape == QuantizedWeight.empty_like(weight, scheme).codes.shape
    error = (quantized.dequantize() - weight).abs()
    step = quantized._for_each_input(quantized.scales)
    assert bool((error <= 0.5001 * step + 1e-7).all())
    assert not quantized.dequantize()[0].any()
    # The largest weight has the largest code, and 0 has a code in every group.
    largest_code = 2**scheme.bits - 1
    assert quantized.unpack().amax() == largest_code
    assert quantized.zeros.amin() >= 0
    assert quantized.zeros.amax() <= largest_code


def test_a_scale_of_1_is_exact():
    weight = torch.arange(16.0)[None] - 7
    assert torch.equal(QuantizedWeight.quantize(weight, Scheme(4, 16)).dequantize(), weight)


def test_a_dequantized_weight_is_rounded_once():
    weight = torch.randn(5, 200)
    exact = QuantizedWeight.quantize(weight, INT4_32).dequantize()
    rounded = QuantizedWeight.quantize(weight, INT4_32)
    rounded.dtype = torch.bfloat16
    assert torch.equal(rounded.dequantize(), exact.bfloat16())


def test_a_part_of_a_weight_is_indexed_as_a_tensor():
    weight = QuantizedWeight.quantize(torch.randn(3, 8, 96), INT4_32)
    full = weight.dequantize()
    assert torch.equal(weight[1].dequantize(), full[1])
    assert torch.equal(weight[2][2:5, 32:64].dequantize(), full[2][2:5, 32:64])
    assert torch.equal(weight[0][2:].dequantize(), full[0][2:])
    assert torch.equal(weight[0][torch.tensor([3, 3, 0])].dequantize(), full[0][[3, 3, 0]])
