"""Promise 7: a checkpoint that does not fit is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import make_checkpoint
from nanovllm import LLM, SamplingParams
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear, Target

LAYER = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path)
    return tmp_path


def edit_weights(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load(directory: Path, **options) -> LLM:
    return LLM(str(directory), num_kvcache_blocks=16, **options)


@pytest.mark.parametrize(
    "edit, complaint",
    [
        (lambda w: w.pop(LAYER), f"without a tensor: {LAYER}"),
        (lambda w: w.update(extra=torch.ones(2)), "without a parameter: extra"),
        (lambda w: w.update({LAYER: torch.ones(3, 4)}), rf"{LAYER} has shape \[3, 4\], the model needs \[48, 32\]"),
        (lambda w: w.update({"lm_head.weight": torch.ones(97, 32)}), "lm_head.weight differs"),
        (lambda w: w.update({LAYER: torch.ones(48, 32, dtype=torch.bool)}), f"{LAYER} is stored as BOOL"),
    ],
    ids=["missing", "surplus", "misshapen", "tied-but-different", "no-float"],
)
def test_tensors_that_do_not_fit(checkpoint: Path, edit: Callable, complaint: str) -> None:
    edit_weights(checkpoint, edit)
    with pytest.raises(ValueError, match=complaint):
        load(checkpoint)


def test_tied_head_stored_twice(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    load(checkpoint)


def test_missing_shard(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="10KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match="cannot read .*00002"):
        load(tmp_path)


def test_truncated_file(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot read .*model.safetensors"):
        load(checkpoint)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no"):
        load(checkpoint)
    outputs = load(checkpoint, load_format="dummy").generate([[1, 2], [3]], SamplingParams(max_tokens=4), use_tqdm=False)
    assert [len(o["token_ids"]) for o in outputs] == [4, 4]


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"architectures": ["GPT7ForCausalLM"]}, "GPT7ForCausalLM is not supported"),
        ({"architectures": None}, "not supported"),
        ({"model_type": "gpt7"}, "gpt7"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}}, "rope_parameters"),
        ({"num_attention_heads": 5}, "num_key_value_heads"),
        ({"num_hidden_layers": 3}, "config.json|layer"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None}, "sliding"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_configs_that_are_not_computed(checkpoint: Path, changes: dict, complaint: str) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(ValueError, match=complaint):
        load(checkpoint)


def test_old_style_rope_config(checkpoint: Path) -> None:
    """rope_theta and rope_scaling, as transformers 4 wrote them, mean what rope_parameters means now."""
    prompt, greedy = [5, 6, 7, 8] * 5, SamplingParams(temperature=0.0, max_tokens=16)
    edit_config(checkpoint, rope_parameters={"rope_type": "linear", "rope_theta": 30.0, "factor": 2.0})
    new = load(checkpoint).generate(prompt, greedy, use_tqdm=False)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 30.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert load(checkpoint).generate(prompt, greedy, use_tqdm=False)[0]["token_ids"] == new[0]["token_ids"]


@pytest.mark.parametrize(
    "name, text", [("model.safetensors.index.json", "{}"), ("model.safetensors.index.json", "{"), ("config.json", "{"),
                   ("generation_config.json", "[]"), ("generation_config.json", "{")],
)  # fmt: skip
def test_damaged_json_is_named(checkpoint: Path, name: str, text: str) -> None:
    (checkpoint / name).write_text(text)
    with pytest.raises(ValueError, match=name.split(".")[0] if text != "{}" else "holds no"):
        load(checkpoint)


def test_dtype_of_the_weights_if_the_config_has_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).model_runner.spec.dtype == torch.bfloat16


def test_a_tokenizer_without_a_vocabulary_is_none(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert load(checkpoint).tokenizer is None


def test_eos_is_every_one_that_is_named(checkpoint: Path) -> None:
    edit_config(checkpoint, eos_token_id=5)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load(checkpoint).eos_token_ids == {5, 7, 9}


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        LLM(tmp_path / "nothing")
    with pytest.raises(ValueError, match="cannot be downloaded"):
        LLM("nowhere/at-all")
    with pytest.raises(TypeError, match="model"):
        LLM(None)
    with pytest.raises(ValueError, match="config.json"):
        LLM(str(tmp_path))


def test_ranks_of_a_linear_layer_make_the_whole() -> None:
    """Loaded shares of two ranks: the column parallel outputs side by side and the row parallel outputs summed."""
    torch.manual_seed(0)
    full = {"a.q.weight": torch.randn(8, 6), "a.q.bias": torch.randn(8), "a.k.weight": torch.randn(4, 6), "a.k.bias": torch.randn(4)}
    x = torch.randn(3, 6)

    def fill(targets: dict[str, Target], weights: dict[str, torch.Tensor]) -> None:
        assert targets.keys() == weights.keys()
        for name, target in targets.items():
            assert target.full_shape == list(weights[name].shape)
            target.destination.copy_(weights[name][target.share])

    with torch.no_grad():
        outputs = []
        for rank in range(2):
            layer = ColumnParallelLinear(6, {"q": 8, "k": 4}, True, torch.float32, rank, 2)
            fill(dict(layer.targets("a.qk")), full)
            outputs.append(layer(x).split([4, 2], dim=-1))
        for part, name in enumerate(("q", "k")):
            whole = torch.nn.functional.linear(x, full[f"a.{name}.weight"], full[f"a.{name}.bias"])
            torch.testing.assert_close(torch.cat([out[part] for out in outputs], dim=-1), whole)

        row = {"o.weight": torch.randn(5, 6), "o.bias": torch.randn(5)}
        total = torch.zeros(3, 5)
        for rank in range(2):
            layer = RowParallelLinear(6, 5, True, torch.float32, rank, 2)
            fill(dict(layer.targets("o")), row)
            total += layer(x[:, rank * 3 : (rank + 1) * 3])
        torch.testing.assert_close(total, torch.nn.functional.linear(x, row["o.weight"], row["o.bias"]))
