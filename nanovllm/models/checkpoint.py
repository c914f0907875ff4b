"""What a checkpoint directory says besides its weights: config, tokenizer, and which tokens end a text."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from nanovllm.checks import check_bool, check_choice, check_int, check_ints, check_number, naming
from nanovllm.config import DTYPES, MAX_SIZE

LOCAL: dict[str, bool] = {"trust_remote_code": False, "local_files_only": True}  # of from_pretrained: no code, no network
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_COPIES = ["consolidated*", "original/*", "*/*.safetensors"]  # the same weights for other programs (Mistral's, Meta's)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SIZES = """
    vocab_size hidden_size head_dim intermediate_size moe_intermediate_size ffn_dim word_embed_proj_dim decoder_sparse_step
    num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings original_max_position_embeddings
"""
_COUNTS = "num_experts num_local_experts num_experts_per_tok"  # 0 of them: there are only MLPs
_POSITIVE = "rms_norm_eps rope_theta factor attention_factor beta_fast beta_slow low_freq_factor high_freq_factor"
_SWITCHES = """
    attention_bias mlp_bias enable_bias tie_word_embeddings norm_topk_prob do_layer_norm_before _remove_final_layer_norm
    layer_norm_elementwise_affine
"""
_CHECKS: dict[str, Callable[[str, Any], object]] = {  # before transformers computes with these fields
    **dict.fromkeys(_SIZES.split(), partial(check_int, minimum=1, maximum=MAX_SIZE)),
    **dict.fromkeys(_COUNTS.split(), partial(check_int, minimum=0, maximum=MAX_SIZE)),
    **dict.fromkeys(_POSITIVE.split(), partial(check_number, low=0.0, open_low=True)),
    **dict.fromkeys(_SWITCHES.split(), check_bool),
    **dict.fromkeys(("dtype", "torch_dtype"), partial(check_choice, choices=DTYPES)),  # "torch_dtype" before transformers 5
    "mlp_only_layers": partial(check_ints, minimum=0),
    "eos_token_id": lambda name, value: check_ints(name, value if isinstance(value, list) else [value], minimum=-MAX_SIZE),
}


def find_checkpoint(model: str) -> Path:
    """The directory of `model`, which is one or else a Hub id to download. Raises ValueError if it can be neither."""
    directory = Path(os.path.expanduser(model))
    if directory.is_file():
        raise ValueError(f"model {model!r} is a file: give the directory of a checkpoint")
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_COPIES))
        except (OSError, ValueError) as error:  # of the network and of the Hub, or for what is no id
            raise ValueError(f"model {model!r}: there is no such directory, and it cannot be downloaded: {error}") from error
    if not (directory / "config.json").exists():
        raise ValueError(f"model {model!r}: {directory} holds no config.json")
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """config.json with its family's defaults filled in. Raises ValueError if a field is wrong or the family unknown."""
    path = directory / "config.json"
    content = _read_settings(path)
    with naming(path, Exception):
        if "auto_map" in content and content.get("model_type") not in CONFIG_MAPPING:
            raise ValueError("auto_map: no code is run that comes with a checkpoint")
        return AutoConfig.from_pretrained(directory, **LOCAL)


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None if the checkpoint comes without one. Raises ValueError if it cannot be made."""
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        return None
    with naming(f"the tokenizer in {directory}", Exception):
        return AutoTokenizer.from_pretrained(directory, **LOCAL)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, if there is none."""
    with naming(path, OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("there is no JSON object in it")
    return content


def read_eos_token_ids(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that generation_config.json or config.json calls an end; where neither does, the tokenizer's.

    A negative id means none, as null does. Ids above the vocabulary stay, though none is ever drawn: cut-down checkpoints
    keep those of their originals.
    """
    path = directory / "generation_config.json"
    generation_config = _read_settings(path) if path.exists() else {}
    given = (generation_config.get("eos_token_id"), config.eos_token_id)
    ids = {token_id for each in given for token_id in (each if isinstance(each, list) else [each])}
    found = frozenset(token_id for token_id in ids if token_id is not None and token_id >= 0)
    return found if found or tokenizer is None else frozenset([tokenizer.eos_token_id]) - {None}


def _read_settings(path: Path) -> dict[str, Any]:
    """A JSON object whose fields, and those of RoPE in it, pass _CHECKS. null stands for the default."""
    content = read_json(path)
    with naming(path, TypeError, ValueError):
        for settings in (content, content.get("rope_parameters"), content.get("rope_scaling")):
            for name, value in settings.items() if isinstance(settings, dict) else ():
                if name in _CHECKS and value is not None:
                    _CHECKS[name](name, value)
    return content
