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
_POSITIVE_SIZE, _POSITIVE = partial(check_int, minimum=1, maximum=MAX_SIZE), partial(check_number, low=0.0, open_low=True)
_CHECKS: dict[str, Callable[[str, Any], object]] = {  # of what transformers computes with, and does not check
    **dict.fromkeys(("dtype", "torch_dtype"), partial(check_choice, choices=DTYPES)),  # "torch_dtype" before transformers 5
    **dict.fromkeys(("num_hidden_layers", "original_max_position_embeddings"), _POSITIVE_SIZE),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), partial(check_number, low=0.0)),
    "rope_theta": partial(check_number, low=1.0, open_low=True),
    "factor": partial(check_number, low=1.0, high=1e6),
    "truncate": check_bool,
}


def find_checkpoint(model: str) -> Path:
    """The directory of `model`, which is one or else a Hub id to download. Raises ValueError if it can be neither."""
    directory = Path(os.path.expanduser(model))
    if not directory.is_dir():
        if directory.exists():
            raise ValueError(f"model {model!r} is a file: give the directory of a checkpoint")
        if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ValueError(f"model {model!r}: there is no such directory")
        try:
            directory = Path(snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_COPIES))
        except (OSError, ValueError) as error:  # of the network and of the Hub, or for what is no id
            raise ValueError(f"model {model!r} is no directory and cannot be downloaded: {error}") from error
    if not (directory / "config.json").exists():
        raise ValueError(f"model {model!r}: {directory} holds no config.json")
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """config.json with its family's defaults filled in. Raises ValueError if a field is wrong or the family unknown."""
    path = directory / "config.json"
    content = read_json(path)
    with naming(path, Exception):
        if "auto_map" in content and content.get("model_type") not in CONFIG_MAPPING:
            raise ValueError("auto_map: no code is run that comes with a checkpoint")
        sections = (content, content.get("rope_parameters"), content.get("rope_scaling"))
        for settings in (section for section in sections if isinstance(section, dict)):
            for name in _CHECKS.keys() & settings:
                if settings[name] is not None:  # null stands for the default
                    _CHECKS[name](name, settings[name])
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
    generation_config = read_json(path) if path.exists() else {}
    ids: set[int] = set()
    for source, given in ((path, generation_config.get("eos_token_id")), (directory / "config.json", config.eos_token_id)):
        with naming(source, TypeError, ValueError):
            given = [] if given is None else given if isinstance(given, list) else [given]
            ids.update(token_id for token_id in check_ints("eos_token_id", given, minimum=-MAX_SIZE) if token_id >= 0)
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
