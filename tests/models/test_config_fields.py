"""Every field of a family's config class is read, rejected, or known to have no effect.

A version of transformers can add a field that changes results. It then fails here.
"""

import pytest
import torch
import transformers
from transformers import PretrainedConfig

from nanovllm.models.architectures import ARCHITECTURES, read_spec

TRAINING = "only training uses it"
TOKENS = "no layer reads it: the engine collects EOS ids, and the tokenizer adds BOS"
OUTPUTS = "chooses what transformers returns"
WINDOWS = "transformers turns it into sliding_window and layer_types"
WITHOUT_EFFECT = {
    "attention_dropout": TRAINING,
    "bos_token_id": TOKENS,
    "embd_pdrop": TRAINING,
    "eos_token_id": TOKENS,
    "initializer_range": TRAINING,
    "output_router_logits": OUTPUTS,
    "pad_token_id": "batches have no padding",
    "pretraining_tp": "transformers ignores it",
    "resid_pdrop": TRAINING,
    "router_aux_loss_coef": TRAINING,
    "use_cache": OUTPUTS,
    "Phi3Config.original_max_position_embeddings": "transformers copies it to rope_parameters",
    "Qwen2Config.max_window_layers": WINDOWS,
    "Qwen2Config.use_sliding_window": WINDOWS,
    "Qwen3Config.max_window_layers": WINDOWS,
    "Qwen3Config.use_sliding_window": WINDOWS,
    "Qwen3MoeConfig.use_sliding_window": "transformers sets sliding_window to None without it",
    "SmolLM3Config.no_rope_layer_interval": "transformers turns it into no_rope_layers",
    "SmolLM3Config.use_sliding_window": WINDOWS,
}


def find_config_class(architecture):
    """The class of the text part's config."""
    config_class = getattr(transformers, architecture).config_class
    return config_class.sub_configs.get("text_config", config_class)


def find_unread_fields(config_class, architecture):
    """The fields that the class declares, and that neither read_spec nor `supported` mentions."""
    read = set(ARCHITECTURES[architecture].supported)

    class Recorder(config_class):
        def __getattribute__(self, name):
            read.update((name, config_class.attribute_map.get(name)))
            return super().__getattribute__(name)

    config = config_class(architectures=[architecture])
    config.__class__ = Recorder
    read_spec(config, torch.float32, num_ranks=1)
    inherited = PretrainedConfig.__dataclass_fields__
    return set(config_class.__dataclass_fields__) - set(inherited) - read


def find_entries(architecture):
    """The entries of WITHOUT_EFFECT that fields need. A field without an entry is its own."""
    config_class = find_config_class(architecture)
    entries = set()
    for field in find_unread_fields(config_class, architecture):
        own = f"{config_class.__name__}.{field}"
        entries.add(own if own in WITHOUT_EFFECT else field)
    return entries


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_is_known(architecture):
    assert find_entries(architecture) <= set(WITHOUT_EFFECT)


def test_every_entry_is_needed():
    assert set().union(*map(find_entries, ARCHITECTURES)) == set(WITHOUT_EFFECT)
