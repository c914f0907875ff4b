"""The other files of a checkpoint are checked before they are used. No code in them is run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    copy_tokenizer,
    edit_config,
    make_checkpoint,
)
from families import GEMMA3_ROPES, LONGROPE, YARN, make_family
from huggingface_hub.utils import filter_repo_objects
from test_weights import load, reject

from nanovllm import DEMO_MODEL, LLM
from nanovllm.checkpoints.checkpoint import (
    Checkpoint,
    find_checkpoint,
    find_generation_defaults,
)
from nanovllm.config import Config

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
AXIAL = dict(rope_type="axial", rope_theta=1e4)
PARTIAL = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.5)
SU = dict(type="su", short_factor=[1.0] * 3, long_factor=[2.0] * 3)
TEXT_LENGTH = {**LONGROPE, "original_max_position_embeddings": "64"}
GEMMA3_LONGROPE = {**GEMMA3_ROPES, "full_attention": {"rope_type": "longrope"}}
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path)
    return tmp_path


def write_json(path, content):
    path.write_text(json.dumps(content))


INVALID = [
    *[({name: value}, name) for name in SIZES for value in (0, -1, "32", 32.0, True, 10**30)],
    *[({"head_dim": value}, "head_dim") for value in (-1, "32", 32.0, True, 2**30)],
    *[({"rms_norm_eps": value}, "rms_norm_eps") for value in (0, -1e-6, "1e-6", NAN)],
    ({"eos_token_id": "2"}, "eos_token_id"),
    *[
        ({"rope_parameters": {**YARN, name: value}}, "")
        for name in (*YARN, "attention_factor")
        for value in (0, -1, "1e4", INF, NAN)
    ],
    ({"rope_parameters": {**YARN, "beta_fast": -1}}, ""),
    ({"rope_parameters": None, "rope_theta": 0}, "rope_theta"),
    ({"num_attention_heads": 5}, "num_key_value_heads"),
    ({"dtype": "foo"}, "foo"),
]


@pytest.mark.parametrize("changes, complaint", INVALID, ids=str)
def test_invalid_configs_are_rejected(checkpoint, changes, complaint):
    edit_config(checkpoint, **changes)
    for load_format in ("auto", "dummy"):
        reject(f"(?s)config.json: .*{complaint}", checkpoint, load_format=load_format)


@pytest.mark.parametrize(
    "family, changes, complaint",
    [
        (
            "qwen3",
            {"architectures": ["Qwen7ForCausalLM"]},
            "architectures.0. must be 'Qwen3ForCausalLM' .* not 'Qwen7ForCausalLM'",
        ),
        ("qwen3", {"architectures": [7]}, "architectures.0. must be .*, not 7"),
        ("qwen3", {"model_type": "gpt7"}, "gpt7"),
        ("qwen3", {"rope_parameters": AXIAL}, "rope_type must be one of .* not 'axial'"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("qwen3", {"dtype": "float8_e4m3fn"}, "dtype must be one of .*float8_e4m3fn"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act must be one of 'silu'"),
        ("llama-2", {"is_causal": False}, "is_causal must be one of True, None, not False"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "at least 1 and at most 8, not 9"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1"),
        ("phi4", {"rope_parameters": PARTIAL}, "partial_rotary_factor must be .* at most 1.0"),
        ("phi4-mini", {"rope_parameters": None, "rope_scaling": SU}, "Missing required keys"),
        ("phi4-mini", {"original_max_position_embeddings": 0}, ""),
        ("llama-longrope", {"rope_parameters": TEXT_LENGTH}, "position_embeddings must be an int"),
        (
            "llama-yarn-scales",
            {"rope_parameters": {**YARN, "factor": "4"}},
            "factor must be a number",
        ),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers=.1, 0, 1. must have a value"),
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be above 0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be one of None"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("gemma3", {"rope_parameters": GEMMA3_LONGROPE}, "longrope"),
        (
            "gemma3",
            {"architectures": ["Gemma3TextModel"]},
            "must be .*, not 'Gemma3TextModel'",
        ),
        ("qwen3.5-moe", {"layer_types": ["sliding_attention"] * 4}, "layer_types must be"),
        ("qwen3.5-moe", {"layer_types": ["linear_attention"] * 4}, "without full_attention"),
        ("qwen3.5-moe", {"linear_num_value_heads": 3}, "must be a multiple of"),
        ("qwen3.5-moe", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ("qwen3.5-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen3-next", {"num_experts": 0}, "num_experts must be at least 1"),
        ("qwen3-next", {"sliding_window": 8}, "sliding_window is no field of Qwen3NextConfig"),
    ],
)
def test_unsupported_features_are_named(tmp_path, family, changes, complaint):
    make_family(tmp_path, family)
    edit_config(tmp_path, **changes)
    for load_format in ("auto", "dummy"):
        reject(f"(?s)config.json: .*{complaint}", tmp_path, load_format=load_format)


@pytest.mark.parametrize(
    "family, changes, size, complaint",
    [
        ("qwen3", {}, 3, "does not divide num_attention_heads=4"),
        ("qwen3", {"intermediate_size": 41}, 2, "does not divide intermediate_size=41"),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "must divide num_key"),
        ("qwen3-moe", {"moe_intermediate_size": 25}, 2, "does not divide moe_intermediate_size=25"),
        ("qwen3-moe", {"intermediate_size": 47}, 2, "does not divide intermediate_size=47"),
        ("qwen3.5-moe", {"shared_expert_intermediate_size": 21}, 2, ".*shared_expert_inter.*=21"),
        ("qwen3-next", {"linear_num_key_heads": 1}, 2, "does not divide linear_num_key_heads=1"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(tmp_path, family, changes, size, complaint):
    make_family(tmp_path, family)
    edit_config(tmp_path, **changes)
    reject(f"tensor_parallel_size={size} {complaint}", tmp_path, tensor_parallel_size=size)


def test_no_code_is_run_and_no_network_asked(checkpoint, monkeypatch):
    """Nor is the user asked on stdin, as transformers does."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (checkpoint / "code.py").write_text("raise SystemExit('run')")
    shutil.copy(Path(DEMO_MODEL) / "tokenizer.json", checkpoint)
    auto_map = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    tokenizer_config = {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}
    write_json(checkpoint / "tokenizer_config.json", tokenizer_config)
    assert load(checkpoint).tokenizer is not None
    edit_config(checkpoint, model_type="gpt7", auto_map=auto_map)
    reject("config.json: .*custom code", checkpoint)


DAMAGED = [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe\x00", b"[" * 10**5]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_damaged_files_are_named(checkpoint, name):
    """Also if only the dtype is read."""
    path = checkpoint / name
    edit_config(checkpoint, dtype=None)
    for content in DAMAGED:
        path.write_bytes(content)
        reject(str(path), checkpoint)
    path.unlink()
    path.mkdir()
    reject(str(path), checkpoint)


def test_a_damaged_tokenizer_is_named(checkpoint):
    path = checkpoint / "tokenizer.json"
    truncated = (Path(DEMO_MODEL) / "tokenizer.json").read_bytes()[:-9]
    for content in (b"", b"{}", b"[]", b"5", b"\xff", b"[" * 10**5, truncated):
        path.write_bytes(content)
        reject(f"the tokenizer in {checkpoint}", checkpoint)


def test_a_tokenizer_without_a_vocabulary_is_none(checkpoint):
    write_json(checkpoint / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    assert load(checkpoint).tokenizer is None


@pytest.mark.parametrize("value", ["2", 2.5, True, -(10**30), [5, "2"], [None], {"a": 1}], ids=str)
def test_an_invalid_eos_is_rejected(checkpoint, value):
    path = checkpoint / "generation_config.json"
    write_json(path, {"eos_token_id": value})
    reject(f"^{path}: eos_token_id\\[[01]\\]", checkpoint)
    path.unlink()
    edit_config(checkpoint, eos_token_id=-(10**30))
    reject(f"^{checkpoint / 'config.json'}: eos_token_id\\[[01]\\]", checkpoint)


@pytest.mark.parametrize(
    "of_config, of_generation, expected",
    [
        (5, [7, 9], {5, 7, 9}),
        (5, -1, {5}),
        (-1, [7, -1, 9], {7, 9}),
        ([5, -1], [-2], {5}),
        (-1, None, set()),
    ],
    ids=str,
)
def test_every_named_eos_counts(checkpoint, of_config, of_generation, expected):
    """A negative id means none."""
    edit_config(checkpoint, eos_token_id=of_config)
    write_json(checkpoint / "generation_config.json", {"eos_token_id": of_generation})
    assert load(checkpoint).eos_token_ids == expected
    copy_tokenizer(checkpoint)
    llm = load(checkpoint)
    assert llm.eos_token_ids == {*expected, llm.tokenizer.eos_token_id}


def test_generation_defaults_are_those_that_are_set():
    """do_sample and fields that are no sampling parameters do not count."""
    assert find_generation_defaults({}) == {}
    given = {"temperature": 0.6, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1}
    others = {"top_p": None, "do_sample": False, "num_beams": 1, "eos_token_id": 2}
    content = {**given, **others, "max_new_tokens": 5}
    assert find_generation_defaults(content) == {**given, "max_tokens": 5}


@pytest.mark.parametrize(
    "model, error, complaint",
    [
        ("/nothing", ValueError, "no such directory"),
        (__file__, ValueError, "no such directory"),
        ("nowhere/at-all", ValueError, "cannot be downloaded"),
        (Path(__file__).parent, ValueError, "config.json is missing: model must be"),
        (None, TypeError, "model"),
    ],
)
def test_a_model_that_is_no_checkpoint(model, error, complaint):
    with pytest.raises(error, match=complaint):
        LLM(model)


def test_only_files_that_are_read_are_downloaded(checkpoint, monkeypatch):
    """Copies of the weights in other formats are left out."""
    read = """
        config.json generation_config.json model.safetensors.index.json tokenizer.json
        model-00001-of-00003.safetensors tokenizer.model tokenizer_config.json chat_template.jinja
        vocab.json merges.txt additional_chat_templates/tool_use.jinja
    """.split()
    copies = """
        consolidated.safetensors consolidated-00001-of-00011.safetensors original/params.json
        consolidated.safetensors.index.json original/tokenizer.model original/consolidated.00.pth
        original/model.safetensors onnx/model.safetensors pytorch_model.bin tf_model.h5 README.md
    """.split()
    downloaded = []

    def download(model, **patterns):
        downloaded.extend(filter_repo_objects(read + copies, **patterns))
        return str(checkpoint)

    monkeypatch.setattr("nanovllm.checkpoints.checkpoint.snapshot_download", download)
    assert find_checkpoint("org/name") == checkpoint
    assert downloaded == read


@pytest.mark.parametrize(
    "options, has_bfloat16, expected",
    [
        ({}, False, torch.float16),
        ({}, True, torch.bfloat16),
        ({"device": "cpu"}, False, torch.bfloat16),
        ({"dtype": "bfloat16"}, False, torch.bfloat16),
    ],
    ids=str,
)
def test_a_gpu_without_bfloat16_gets_float16(monkeypatch, options, has_bfloat16, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert Checkpoint.open(Config(DEMO_MODEL, **options)).dtype == expected
