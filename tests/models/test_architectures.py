"""The config.json of a family becomes a spec, as the config classes of transformers read it."""

import json

import pytest
import torch
from transformers import (
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from nanovllm.checkpoints.checkpoint import read_config
from nanovllm.models.architectures import read_spec

FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LEN = 8192
TWICE_AS_LONG = dict(rope_type="linear", rope_theta=1e4, factor=2.0)
LATE = dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)


def read(family, **changes):
    """Read the spec of a model with 3 layers and up to MAX_LEN positions."""
    settings = dict(num_hidden_layers=3, max_position_embeddings=MAX_LEN, **changes)
    architecture = family.__name__.replace("Config", "ForCausalLM")
    config = family(architectures=[architecture], **settings)
    return read_spec(config, torch.float32, num_ranks=1)


@pytest.mark.parametrize(
    "family, changes, windows",
    [
        (MistralConfig, {}, [4096] * 3),  # the default of its class
        (MistralConfig, dict(sliding_window=MAX_LEN - 1), [MAX_LEN - 1] * 3),
        (MistralConfig, dict(sliding_window=MAX_LEN), [None] * 3),
        (
            MistralConfig,
            dict(sliding_window=MAX_LEN, rope_parameters=TWICE_AS_LONG),
            [MAX_LEN] * 3,
        ),
        (Qwen2Config, {**LATE, "layer_types": [SLIDING, FULL, FULL]}, [8, None, None]),
        (Qwen3MoeConfig, LATE, [8] * 3),  # it has no max_window_layers
    ],
    ids=str,
)
def test_windows(family, changes, windows):
    spec = read(family, **changes)
    assert list(spec.windows) == windows
    assert [spec.attention_shape(layer).window for layer in range(3)] == windows


@pytest.mark.parametrize("layer_types, windows", [(None, (8, 8)), ([SLIDING, FULL], (8, None))])
def test_mistral_with_layer_types_is_ministral(tmp_path, layer_types, windows):
    """transformers reads config.json of such models by another class."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 2,
        "sliding_window": 8,
    }
    if layer_types is not None:
        config["layer_types"] = layer_types
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(read_config(tmp_path), torch.float32, num_ranks=1).windows == windows


@pytest.mark.parametrize(
    "family, changes, complaint",
    [
        (LlamaConfig, dict(sliding_window=8), "sliding_window is no field of LlamaConfig"),
        (
            Qwen3MoeConfig,
            {**LATE, "layer_types": [FULL] * 3},
            "layer_types is no field of Qwen3MoeConfig",
        ),
        (
            MinistralConfig,
            dict(sliding_window=None, layer_types=[SLIDING] * 3),
            "sliding_window must be an int, not None",
        ),
        (MinistralConfig, dict(layer_types=["chunked_attention"] * 3), "not 'chunked_attention'"),
        (MistralConfig, dict(sliding_window=0), "sliding_window must be at least 1"),
    ],
    ids=str,
)
def test_windows_that_are_rejected(family, changes, complaint):
    """A window in a field that transformers ignores is rejected, because nobody can know if the
    model was trained with it."""
    with pytest.raises(ValueError, match=complaint):
        read(family, **changes)


def test_what_the_class_of_a_config_does_not_declare_is_ignored():
    assert not read(MistralConfig, attention_bias=True).qkv_bias
