"""A checkpoint that does not fit is rejected with an error that names the reason."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import edit_config, edit_weights, make_checkpoint
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.checkpoint import find_checkpoint

LAYER = "model.layers.1.mlp.up_proj.weight"
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path)
    return tmp_path


def load(directory, **options):
    return LLM(str(directory), num_kvcache_blocks=16, **options)


@pytest.mark.parametrize(
    "edit, complaint",
    [
        (lambda w: w.pop(LAYER), f"missing tensors: {LAYER}"),
        (lambda w: w.update(extra=torch.ones(2)), "unexpected.*: extra"),
        (
            lambda w: w.update({LAYER: torch.ones(3, 4)}),
            rf"{LAYER} has shape \[3, 4\], the model needs \[48, 32\]",
        ),
        (lambda w: w.update({"lm_head.weight": torch.ones(97, 32)}), "lm_head.weight differs"),
        (
            lambda w: w.update({LAYER: torch.ones(48, 32, dtype=torch.bool)}),
            f"model.safetensors: .*{LAYER} is stored as BOOL",
        ),
        (
            lambda w: w.update({LAYER: torch.ones(48, 32).to(torch.float8_e4m3fn)}),
            f"{LAYER} is stored as F8_E4M3",
        ),
        (lambda w: w.update({LAYER: torch.tensor(1.0)}), rf"{LAYER} has shape \[\]"),
    ],
    ids=[
        "missing",
        "unexpected",
        "misshapen",
        "tied-but-different",
        "no-float",
        "float8",
        "no-dimension",
    ],
)
def test_tensors_that_do_not_fit(checkpoint, edit, complaint):
    edit_weights(checkpoint, edit)
    with pytest.raises(ValueError, match=complaint):
        load(checkpoint)


def test_tied_head_stored_twice(checkpoint):
    edit_weights(
        checkpoint, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    )
    load(checkpoint)


def test_buffers_of_rope_are_passed_over(checkpoint):
    """transformers once saved each layer's frequencies, and other trainers the cosines, too."""
    prompt, greedy = [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8)
    expected = load(checkpoint).generate(prompt, greedy, use_tqdm=False)[0]["token_ids"]
    buffers = {
        f"model.layers.{layer}.self_attn.rotary_emb.{name}": torch.ones(8)
        for layer in range(2)
        for name in ("inv_freq", "cos_cached", "sin_cached")
    }
    edit_weights(checkpoint, lambda w: w.update(buffers))
    assert load(checkpoint).generate(prompt, greedy, use_tqdm=False)[0]["token_ids"] == expected
    edit_weights(
        checkpoint,
        lambda w: w.update({"model.layers.0.self_attn.rotary_emb.weight": torch.ones(8)}),
    )
    with pytest.raises(
        ValueError, match="unexpected.*: model.layers.0.self_attn.rotary_emb.weight"
    ):
        load(checkpoint)


def test_missing_shard(tmp_path):
    make_checkpoint(tmp_path, max_shard_size="10KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match="missing tensors: model"):
        load(tmp_path)


def test_which_files_hold_the_weights(tmp_path):
    """The index is not needed, and copies for other programs are not read."""
    make_checkpoint(tmp_path, max_shard_size="10KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"tok_embeddings.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    load(tmp_path)
    for number, path in enumerate(sorted(tmp_path.glob("model-*.safetensors"))):
        path.rename(tmp_path / f"part-{number}.safetensors")
    with pytest.raises(ValueError, match="unexpected or repeated tensors: tok_embeddings.weight"):
        load(tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    load(tmp_path)


def test_truncated_file(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for dtype in ("float32", None):
        edit_config(checkpoint, dtype=dtype)
        with pytest.raises(ValueError, match=str(path)):
            load(checkpoint)


def test_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="contains no"):
        load(checkpoint)
    outputs = load(checkpoint, load_format="dummy").generate(
        [[1, 2], [3]], SamplingParams(max_tokens=4), use_tqdm=False
    )
    assert [len(o["token_ids"]) for o in outputs] == [4, 4]


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
}


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"architectures": ["GPT7ForCausalLM"]}, "architectures.0. must be one of .*, not 'GPT7ForCausalLM'"),
        ({"architectures": None}, "architectures.0. must be one of .*, not None"),
        ({"model_type": "gpt7"}, "gpt7"),
        ({"rope_parameters": LONGROPE | {"factor": 2.0}}, "longrope"),
        ({"rope_parameters": LONGROPE | {"long_factor": [2.0] * 8}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}, "rope_parameters"),
        ({"num_attention_heads": 5}, "num_key_value_heads"),
        ({"num_hidden_layers": 3}, "config.json|layer"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}, "sliding"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dtype": None, "torch_dtype": "foo"}, "config.json: .*foo"),
        ({"architectures": {"Qwen3ForCausalLM": 0}, "vocab_size": 0}, "config.json: .*(vocab_size|architectures)"),
        ({"model_type": "gpt7", "auto_map": {"AutoConfig": "code.Config"}}, "config.json: .*custom code"),
        *[({name: value}, f"(?s)config.json: .*{name}") for name in SIZES for value in (0, -1, "32", 32.0, True, 10**30)],
        *[({"head_dim": value}, "config.json: .*head_dim") for value in (-1, "32", 32.0, True, 2**30, 10**30)],
        ({"vocab_size": None}, "config.json: .*vocab_size"),
        *[({"rms_norm_eps": value}, "config.json: .*rms_norm_eps") for value in (0, 0.0, -1e-6, "1e-6", float("nan"))],
        *[({"rope_parameters": {**YARN, name: value}}, "config.json: ")
          for name in ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor")
          for value in (0, -1, "1e4", float("inf"), float("nan"))],
        *[({"rope_parameters": {**YARN, "beta_fast": value}}, "config.json: ") for value in (-1, "1")],
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "config.json: .*'factor': 0"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta"),
        ({"rope_parameters": [1]}, "config.json: "),
        *[({"eos_token_id": value}, "config.json: .*eos_token_id") for value in ("2", 2.5, True)],
    ],
    ids=lambda value: ", ".join(f"{name}={value}"[:40] for name, value in value.items()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_configs_that_are_not_computed(checkpoint, changes, complaint):
    edit_config(checkpoint, **changes)
    for options in ({}, {"dtype": "float32"}, {"load_format": "dummy"}):
        with pytest.raises(ValueError, match=complaint):
            load(checkpoint, **options)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "changes",
    [{name: 2**31 - 1} for name in ("vocab_size", "hidden_size", "intermediate_size")]
    + [{"num_hidden_layers": 10**6, "layer_types": None}],
    ids=str,
)
def test_sizes_beyond_all_memory(checkpoint, changes, load_format, monkeypatch):
    """Rejected before allocation. A million layers of a tiny model need 43 GB."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=32e9, available=1e9)
    )
    edit_config(checkpoint, **changes)
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"(?s)config.json.*{name}={value}"):
        load(checkpoint, load_format=load_format)


def test_weights_that_fit_are_not_rejected(checkpoint, tmp_path, monkeypatch):
    num_bytes = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    memory = SimpleNamespace(total=num_bytes, available=num_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    load(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_a_named_pipe_is_no_file_of_a_checkpoint(checkpoint, name):
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        load(checkpoint)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_dtypes_that_are_not_computed(checkpoint, dtype):
    edit_config(checkpoint, dtype=dtype)
    for options in ({}, {"load_format": "dummy"}):
        with pytest.raises(ValueError, match=f"config.json: dtype must be one of .*{dtype}"):
            load(checkpoint, **options)


def test_no_code_of_a_checkpoint_is_run_and_no_network_asked(checkpoint, monkeypatch):
    """Nor is the user asked on stdin, as transformers does."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("asked the network"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (checkpoint / "code.py").write_text("raise SystemExit('run')")
    shutil.copy(Path(DEMO_MODEL) / "tokenizer.json", checkpoint)
    auto_map = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto_map})
    )
    assert load(checkpoint).tokenizer is not None
    edit_config(checkpoint, model_type="gpt7", auto_map=auto_map)
    with pytest.raises(ValueError, match="config.json: .*custom code"):
        load(checkpoint)


def test_old_style_rope_config(checkpoint):
    """rope_theta and rope_scaling of transformers 4 mean what rope_parameters means now."""
    prompt, greedy = [5, 6, 7, 8] * 5, SamplingParams(temperature=0.0, max_tokens=16)
    edit_config(
        checkpoint, rope_parameters={"rope_type": "linear", "rope_theta": 30.0, "factor": 2.0}
    )
    new = load(checkpoint).generate(prompt, greedy, use_tqdm=False)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 30.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert (
        load(checkpoint).generate(prompt, greedy, use_tqdm=False)[0]["token_ids"]
        == new[0]["token_ids"]
    )


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe\x00", b"[" * 10**5, None], ids=repr
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_damaged_files_are_named(checkpoint, name, content):
    """Also if only the dtype is read. None: a directory in place of the file."""
    edit_config(checkpoint, dtype=None)
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).mkdir() if content is None else (checkpoint / name).write_bytes(content)
    with pytest.raises(ValueError, match=str(checkpoint / name)):
        load(checkpoint)


def test_damaged_tokenizer_is_named(checkpoint):
    for content in (
        b"",
        b"{}",
        b"[]",
        b"5",
        b"\xff",
        b"[" * 10**5,
        (Path(DEMO_MODEL) / "tokenizer.json").read_bytes()[:-9],
    ):
        (checkpoint / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=f"the tokenizer in {checkpoint}"):
            load(checkpoint)


def test_tensor_in_two_shards(tmp_path):
    make_checkpoint(tmp_path, max_shard_size="10KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(ValueError, match=f"repeated tensors: {name}"):
        load(tmp_path)


@pytest.mark.parametrize("value", ["2", 2.5, True, [5, "2"], [None], {"a": 1}], ids=str)
def test_eos_that_is_none(checkpoint, value):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ValueError, match="generation_config.json: each of eos_token_id"):
        load(checkpoint)


def test_dtype_of_the_weights_if_the_config_has_none(tmp_path):
    make_checkpoint(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).model_runner.executor.worker.spec.dtype == torch.bfloat16


def test_a_tokenizer_without_a_vocabulary_is_none(checkpoint):
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert load(checkpoint).tokenizer is None


def test_eos_is_every_one_that_is_named(checkpoint):
    edit_config(checkpoint, eos_token_id=5)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load(checkpoint).eos_token_ids == {5, 7, 9}


@pytest.mark.parametrize(
    "of_config, of_generation, expected",
    [
        (-1, None, set()),
        (5, -1, {5}),
        (-1, [7, -1, 9], {7, 9}),
        ([5, -1], [-2], {5}),
        (None, [-1], set()),
    ],
    ids=str,
)
def test_a_negative_eos_is_none(checkpoint, of_config, of_generation, expected):
    edit_config(checkpoint, eos_token_id=of_config)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": of_generation}))
    assert load(checkpoint).eos_token_ids == expected
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, checkpoint)
    with_tokenizer = load(checkpoint)
    assert with_tokenizer.eos_token_ids == (expected or {with_tokenizer.tokenizer.eos_token_id})


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot be downloaded"):
        LLM("nowhere/at-all")
    with pytest.raises(TypeError, match="model"):
        LLM(None)
    with pytest.raises(ValueError, match="no such directory"):
        LLM(__file__)
    with pytest.raises(ValueError, match="config.json"):
        LLM(str(tmp_path))


def test_what_is_downloaded(checkpoint, monkeypatch):
    """Only files that are read, without copies of the weights in other formats."""
    read = [
        "config.json", "generation_config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt",
        "additional_chat_templates/tool_use.jinja",
    ]  # fmt: skip
    copies = [
        "consolidated.safetensors", "consolidated-00001-of-00011.safetensors", "consolidated.safetensors.index.json",
        "original/params.json", "original/tokenizer.model", "original/consolidated.00.pth", "original/model.safetensors",
        "onnx/model.safetensors", "pytorch_model.bin", "tf_model.h5", "README.md",
    ]  # fmt: skip
    downloaded: list[str] = []

    def download(model, **patterns):
        downloaded.extend(filter_repo_objects([*read, *copies], **patterns))
        return str(checkpoint)

    monkeypatch.setattr("nanovllm.models.checkpoint.snapshot_download", download)
    assert find_checkpoint("org/name") == checkpoint and downloaded == read


def test_ranks_of_a_linear_layer_make_the_whole():
    """Column-parallel outputs are concatenated, row-parallel outputs summed."""
    torch.manual_seed(0)
    full = {
        "a.q.weight": torch.randn(8, 6),
        "a.q.bias": torch.randn(8),
        "a.k.weight": torch.randn(4, 6),
        "a.k.bias": torch.randn(4),
    }
    x = torch.randn(3, 6)

    def fill(targets, weights):
        assert targets.keys() == weights.keys()
        for name, target in targets.items():
            assert target.full_shape == list(weights[name].shape)
            target.destination.copy_(weights[name][target.shard])

    with torch.no_grad():
        outputs = []
        for rank in range(2):
            layer = ColumnParallelLinear(
                6, {"q": 8, "k": 4}, True, torch.float32, TensorParallel(rank, 2)
            )
            fill(dict(layer.targets("a.qk")), full)
            outputs.append(layer(x).split([4, 2], dim=-1))
        for part, name in enumerate(("q", "k")):
            whole = torch.nn.functional.linear(x, full[f"a.{name}.weight"], full[f"a.{name}.bias"])
            torch.testing.assert_close(torch.cat([out[part] for out in outputs], dim=-1), whole)

        row = {"o.weight": torch.randn(5, 6), "o.bias": torch.randn(5)}
        total = torch.zeros(3, 5)
        for rank in range(2):
            layer = RowParallelLinear(6, 5, True, torch.float32, TensorParallel(rank, 2))
            fill(dict(layer.targets("o")), row)
            total += layer(x[:, rank * 3 : (rank + 1) * 3])
        torch.testing.assert_close(
            total, torch.nn.functional.linear(x, row["o.weight"], row["o.bias"])
        )
