"""Quantized weights give the tokens of their dequantized weights, in every format that is read.

The test packs each format itself, from the same codes, scales and zeros.
"""

import json
import shutil
from functools import partial
from itertools import product

import pytest
import torch
from conftest import (
    edit_config,
    edit_weights,
    generate_ids,
    greedy,
    make_checkpoint,
    random_prompt,
)
from families import make_family, stack_experts
from mtp_heads import add_head, record_drafts
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3_5Config, Qwen3MoeConfig

from nanovllm import DEMO_MODEL, LLM
from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.checkpoints.quantization import read_quantization
from nanovllm.checkpoints.tensor_files import TensorFiles
from nanovllm.layers.quantized import QuantizedWeight, Scheme
from nanovllm.utils.helpers import cdiv

PROMPTS = [random_prompt(0, 9), random_prompt(1, 14)]
SIZES = dict(hidden_size=64, intermediate_size=128, head_dim=16)
FP8_SIZES = dict(hidden_size=160, intermediate_size=144, moe_intermediate_size=200)
UP = "model.layers.1.mlp.up_proj"
PROJECTIONS = ("_proj.weight", "mtp.fc.weight", "fc1.weight", "fc2.weight", "mlp.gate.weight")
PROJECTIONS += ("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
PARTS = (".experts.", "shared_expert.", "linear_attn.", "mlp.gate.")
OF_BETA_AND_DECAY = ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 outputs the nibbles of an int32 have


def pack(codes, bits):
    """Pack the last dimension into int32, the low bits first."""
    num = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % num))
    words = codes.unflatten(-1, (-1, num)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32).contiguous()


def scatter(x):
    """Reorder inputs, so that those of a group are not neighbors."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def pack_gptq(weight, offset=1, order=torch.clone):
    groups = torch.arange(weight.shape[1]) // weight.scheme.group_size
    return {
        "qweight": pack(order(weight.unpack()), weight.scheme.bits).T.contiguous(),
        "qzeros": pack(weight.zeros.T - offset, weight.scheme.bits),
        "scales": weight.scales.T.half().contiguous(),
        "g_idx": order(groups).to(torch.int32),
    }


def pack_gptq_without_groups(weight):
    parts = pack_gptq(weight)
    del parts["g_idx"]
    return parts


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


def quantize(pack_parts, scheme, weight, dtype=torch.float16, is_symmetric=False):
    """Quantize with scales that `dtype` holds. Return the dequantized weight and its tensors."""
    quantized = QuantizedWeight.quantize(weight, scheme)
    quantized.scales = quantized.scales.to(dtype).float()
    if is_symmetric:
        quantized.zeros.fill_(1 << (scheme.bits - 1))
    return quantized.dequantize(), pack_parts(quantized)


def quantize_scattered(weight):
    full, parts = quantize(partial(pack_gptq, order=scatter), INT4_32, weight)
    return scatter(full), parts


def quantize_to_fp8(weight):
    """With a factor for each block of 128 x 128."""
    factors = torch.rand([cdiv(size, 128) for size in weight.shape]) + 0.5
    spread = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return codes.float() * spread, {"weight": codes, "weight_scale_inv": factors}


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


def convert(directory, settings, store, part=""):
    """Store the projections with `part` in their name. Return their dequantized weights."""
    dequantized = {}

    def edit(weights):
        for name in [name for name in weights if name.endswith(PROJECTIONS) and part in name]:
            dequantized[name], parts = store(weights.pop(name).float())
            for key, each in parts.items():
                weights[f"{name.removesuffix('.weight')}.{key}"] = each

    edit_weights(directory, edit)
    edit_config(directory, quantization_config=settings)
    assert dequantized
    return dequantized


def load(directory, **options):
    return LLM(directory, num_kvcache_blocks=64, **options)


def tokens_of(directory, **options):
    with load(directory, **options) as llm:
        return generate_ids(llm, PROMPTS, greedy(12))


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path, **SIZES)
    return tmp_path


INT4_32, INT8_32 = Scheme(4, 32), Scheme(8, 32)
COMPRESSED = partial(quantize, pack_compressed, INT4_32, dtype=torch.bfloat16)
FORMATS = {
    "gptq": (gptq(), partial(quantize, pack_gptq, INT4_32)),
    "gptq 8 bits": (gptq(8), partial(quantize, pack_gptq, INT8_32)),
    "gptq whole rows": (gptq(group_size=-1), partial(quantize, pack_gptq, Scheme(4, 128))),
    "gptq symmetric": (
        gptq() | dict(sym=True),
        partial(quantize, pack_gptq, INT4_32, is_symmetric=True),
    ),
    "gptq without g_idx": (
        gptq(dynamic={"-:.*lm_head.*": {}}),
        partial(quantize, pack_gptq_without_groups, INT4_32),
    ),
    "awq": (
        dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
        partial(quantize, pack_awq, INT4_32),
    ),
    "compressed": (compressed(), COMPRESSED),
    "compressed 8 bits": (
        compressed(8),
        partial(quantize, pack_compressed, INT8_32, dtype=torch.bfloat16),
    ),
    "compressed symmetric": (
        compressed(symmetric=True),
        partial(
            quantize,
            partial(pack_compressed, has_zeros=False),
            INT4_32,
            dtype=torch.bfloat16,
            is_symmetric=True,
        ),
    ),
    # These become floats. With desc_act a group has any inputs, which no QuantizedWeight holds.
    "gptq scattered": (gptq(desc_act=True), quantize_scattered),
    "fp8": (FP8, quantize_to_fp8),
}
PLAIN = {"enable_kernels": False}
BORROWED = {"model_impl": "transformers"}
TWO_RANKS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    "family, name, part, options",
    [
        *product(["qwen3"], FORMATS, [""], [{}, PLAIN]),
        ("qwen3", "gptq scattered", "", {"quantization": "int4"}),  # quantizes the floats
        # One tensor has the rows of q_proj, k_proj and v_proj, and another those of gate and up.
        *product(["phi4"], ["gptq", "awq", "compressed"], [""], [{}, TWO_RANKS]),
        # Experts, a router, and layers with biases.
        ("gemma3-untied", "gptq", "", {}),
        ("llama-biases", "awq", "", {}),
        ("qwen3-moe", "awq", "", PLAIN),
        ("qwen3-moe", "gptq scattered", "", {}),
        ("qwen3-moe", "fp8", "", {}),
        ("qwen3.5-moe", "gptq", "", {}),
        ("qwen3.5-moe", "fp8", "", TWO_RANKS),  # which share a block
        ("qwen3-next", "awq", "", PLAIN),
        ("qwen3-next", "fp8", "", {}),
        # The names of tensors decide what is quantized. Lists of exceptions in config.json were
        # misread (sglang #33759, #20370, vLLM #22017, vLLM-omni #5573).
        *product(["qwen3-next"], ["gptq", "compressed"], PARTS, [{}]),
        *product(["qwen3.5-moe"], ["awq"], PARTS, [{}]),
        # The layers that replace those of transformers.
        *product(
            ["qwen3", "phi4", "qwen3-moe"], ["gptq", "awq", "compressed", "fp8"], [""], [BORROWED]
        ),
    ],
)
def test_stored_codes_give_the_tokens_of_their_weights(tmp_path, family, name, part, options):
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    make_family(stored, family, **(FP8_SIZES if name == "fp8" else SIZES))
    shutil.copytree(stored, floats)
    dequantized = convert(stored, *FORMATS[name], part=part)
    edit_weights(floats, lambda weights: weights.update(dequantized))
    expected = tokens_of(floats, quantization=options.get("quantization"))
    assert tokens_of(stored, **options) == expected


@pytest.mark.parametrize("part", ["", "mtp.", "model."])
@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_codes_of_an_mtp_head(tmp_path, name, part):
    """In the main file, as on the Hub. Its weights can be stored in another form than others."""
    stored, floats = tmp_path / "stored", tmp_path / "floats"
    oracle = make_family(stored, "qwen3.5-moe", **(FP8_SIZES if name == "fp8" else SIZES))
    add_head(stored, oracle.model)
    head = load_file(stored / "mtp.safetensors")
    edit_weights(stored, lambda weights: weights.update(head))
    (stored / "mtp.safetensors").unlink()
    shutil.copytree(stored, floats)
    dequantized = convert(stored, *FORMATS[name], part=part)
    edit_weights(floats, lambda weights: weights.update(dequantized))
    drafts = []
    for directory in (stored, floats):
        with load(directory, num_speculative_tokens=2) as llm:
            proposals = record_drafts(llm)
            generate_ids(llm, PROMPTS, greedy(8))
            drafts.append(proposals)
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("order", [torch.clone, scatter])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "offset, version", [(1, {}), (0, {"checkpoint_format": "gptq_v2"}), (0, {"format": "gptq_v2"})]
)
def test_zeros_of_gptq_take_all_values(tmp_path, bits, offset, version, order):
    """Version 1 subtracts 1 from every zero of an int32 at once, so a zero of 0 borrows."""
    zeros = torch.arange(32 * 4).reshape(32, 4) * 37 % 2**bits
    zeros[8:20, 1] = 0
    zeros[20:, 2:] = torch.randint(2, (12, 2))
    codes = torch.randint(2**bits, (32, 128), dtype=torch.uint8)
    scales = torch.rand(32, 4).half()
    stored = QuantizedWeight.from_codes(Scheme(bits, 32), torch.float32, codes, scales, zeros)
    parts = pack_gptq(stored, offset, order)
    save_file({f"{UP}.{key}": part for key, part in parts.items()}, tmp_path / "model.safetensors")
    settings = gptq(bits, desc_act=order is scatter, **version)
    format = read_quantization(Qwen3MoeConfig(quantization_config=settings), None).format
    weight = format.read(TensorFiles(tmp_path), UP, [32, 128])
    full = weight if order is scatter else weight.dequantize()
    assert torch.equal(full, order(stored.dequantize()))


@pytest.mark.parametrize(
    "family, option, options",
    [
        ("gemma3", "int8", {}),
        ("llama-biases", "int4", PLAIN),
        ("phi4", "int8", PLAIN),
        ("qwen3-moe", "int4", {}),
        ("qwen3.5-moe", "int8", {}),
        ("qwen3-next", "int4", PLAIN),
        ("gemma3", "int4", BORROWED),
        ("qwen3-moe", "int8", BORROWED),
    ],
)
def test_weights_are_quantized_while_loading(tmp_path, family, option, options):
    """The model computes with the dequantized weights, and routers, norms and biases are floats."""
    make_family(tmp_path, family)
    head = Scheme(8, 128)
    linear = head if option == "int8" else Scheme(4, 64)
    dequantized = {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        is_head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        is_kept = name.endswith(("gate.weight", *OF_BETA_AND_DECAY))
        if weight.dim() == 2 and not is_kept:
            scheme = head if is_head else linear
            weight = QuantizedWeight.quantize(weight, scheme).dequantize()
        dequantized[name] = weight
    if family == "qwen3.5-moe":
        edit_weights(tmp_path, stack_experts)
    with load(tmp_path, quantization=option, **options) as llm:
        assert llm.executor.worker.spec.quantization.linear == linear
        actual = generate_ids(llm, PROMPTS, greedy(12))
    save_file(dequantized, tmp_path / "model.safetensors")
    assert actual == tokens_of(tmp_path, **options)


def test_ranks_quantize_their_shards_alike():
    options = {"quantization": "int4", "dtype": "float32"}
    answers = []
    for size in (1, 2):
        with LLM(DEMO_MODEL, **options, tensor_parallel_size=size) as llm:
            answers.append(generate_ids(llm, ["What is 27 + 58?", "count"], greedy(12)))
    assert answers[0] == answers[1]


def test_ranks_do_not_share_groups(checkpoint):
    def check(message, **options):
        with pytest.raises(ValueError, match=f"tensor_parallel_size=2 divides groups of {message}"):
            load(checkpoint, **TWO_RANKS, **options)

    o_proj = "model.layers.0.self_attn.o_proj.weight"
    check(f"128 inputs of {o_proj}, which has 64: use fewer ranks", quantization="int8")
    down_proj = "model.layers.0.mlp.down_proj.weight"
    wide = partial(quantize, pack_gptq, Scheme(4, 128))
    convert(checkpoint, gptq(group_size=128), wide, part="down_proj")
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
def test_unsupported_formats_are_named(checkpoint, settings, complaint):
    edit_config(checkpoint, quantization_config=settings)
    with pytest.raises(ValueError, match=complaint):
        load(checkpoint)


def test_dummy_weights_are_quantized_where_checkpoints_quantize_them(tmp_path):
    make_family(tmp_path, "qwen3-moe")
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
    ("gptq", "g_idx", lambda x: x.flip(0), "reorders inputs, but config.json has no desc_act"),
    ("gptq scattered", "g_idx", lambda x: x - 1, "has groups that do not exist"),
    ("gptq symmetric", "qzeros", lambda x: x + 2, "has zeros that do not fit symmetric codes"),
    ("compressed", "weight_zero_point", shorten, r"has shape \[15, 2\]"),
    ("fp8", "weight_scale_inv", lambda x: x[0], r"has shape \[1\], the model needs \[1, 1\]"),
    ("fp8", "weight", widen, "is stored as F32: supported dtypes are F8_E4M3"),
    ("gptq", "qzeros", None, "has no tensor"),
    ("gptq", "qweight", None, "gate_up_proj is only partly quantized, since qweight is missing"),
    ("fp8", "weight", None, "has no tensor"),
]


@pytest.mark.parametrize("name, part, damage, complaint", DAMAGES)
def test_damaged_parts_are_named(checkpoint, name, part, damage, complaint):
    """So is the file of each. Without a `damage`, the part is missing."""
    convert(checkpoint, *FORMATS[name])
    key = f"{UP}.{part}"

    def edit(weights):
        stored = weights.pop(key)
        if damage is not None:
            weights[key] = damage(stored)

    edit_weights(checkpoint, edit)
    with pytest.raises(ValueError, match=complaint) as error:
        load(checkpoint)
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


def test_only_empty_biases_are_ignored(checkpoint):
    """AutoGPTQ stores biases of zeros for layers that have none."""
    convert(checkpoint, *FORMATS["gptq"])
    edit_weights(checkpoint, lambda weights: weights.update({f"{UP}.bias": torch.zeros(128)}))
    load(checkpoint)
    edit_weights(checkpoint, lambda weights: weights.update({f"{UP}.bias": torch.ones(128)}))
    with pytest.raises(ValueError, match=f"unexpected tensors: {UP}.bias"):
        load(checkpoint)


@pytest.mark.parametrize("scheme", [Scheme(8, 128), Scheme(4, 64), Scheme(4, 32)])
@pytest.mark.parametrize("in_features", [1, 3, 31, 128, 200])
@pytest.mark.parametrize(
    "dtype, size", [(torch.float32, 1.0), (torch.float32, 1e-5), (torch.bfloat16, 1.0)], ids=str
)
def test_codes_are_the_nearest(scheme, in_features, dtype, size):
    """The error of a weight is at most half a step of its own group."""
    weight = torch.randn(5, in_features) * size
    weight[0] = 0
    weight[1] = weight[1].abs() + size
    weight[2] = -weight[1]
    weight = weight.to(dtype)
    quantized = QuantizedWeight.quantize(weight, scheme)
    assert quantized.shape == weight.shape
    assert quantized.codes.shape == QuantizedWeight.empty_like(weight, scheme).codes.shape
    assert quantized.scales.shape == QuantizedWeight.empty_like(weight, scheme).scales.shape
    quantized.dtype = torch.float32
    error = (quantized.dequantize() - weight).abs()
    largest_code = 2**scheme.bits - 1
    for start in range(0, in_features, scheme.group_size):
        group = slice(start, start + scheme.group_size)
        low = weight[:, group].float().amin(1).clamp(max=0)
        high = weight[:, group].float().amax(1).clamp(min=0)
        step = (high - low) / largest_code
        assert bool((error[:, group] <= 0.5001 * step[:, None] + 1e-7 * size).all())
    assert not quantized.dequantize()[0].any()
    # The largest weight has the largest code, and 0 has a code in every group.
    assert quantized.unpack().amax() == largest_code
    assert quantized.zeros.amin() >= 0
    assert quantized.zeros.amax() <= largest_code


@pytest.mark.parametrize("scheme", [Scheme(8, 4), Scheme(4, 4)])
def test_codes_scales_and_zeros_of_a_checkpoint_are_kept(scheme):
    """GPTQ's zeros go up to 2^bits, and scales have more bits than the model's dtype."""
    codes = torch.arange(8, dtype=torch.uint8)[None] + 7
    scales = torch.tensor([[0.1, 0.3]])
    zeros = torch.tensor([[2.0**scheme.bits, 0.0]])
    for scale_dtype in (torch.float32, torch.float16):
        given = scales.to(scale_dtype)
        weight = QuantizedWeight.from_codes(scheme, torch.bfloat16, codes, given, zeros)
        assert torch.equal(weight.unpack(), codes)
        assert torch.equal(weight.scales, given.float())
        assert weight.zeros.tolist() == zeros.tolist()
        assert (weight.scales.dtype, weight.zeros.dtype) == (torch.float32, torch.int16)
        each_zero = zeros.repeat_interleave(4, dim=1)
        expected = (codes - each_zero) * given.float().repeat_interleave(4, dim=1)
        assert torch.equal(weight.dequantize(), expected.bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_code_does_not_overflow(bits):
    """The zero is 1.5, which is rounded up, and so is the largest weight."""
    largest = 2.0**bits - 1
    weight = torch.tensor([[-1.5, largest - 1.5, 1.0, 0.0]])
    dequantized = QuantizedWeight.quantize(weight, Scheme(bits, 4)).dequantize()
    assert dequantized.tolist() == [[-2.0, largest - 2, 1.0, 0.0]]


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
