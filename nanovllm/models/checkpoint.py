"""What a checkpoint directory says besides its weights: config, tokenizer, and which tokens end a text."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_checkpoint(model: str) -> Path:
    """The directory of `model`, which is one or else a Hub id to download. Raises ValueError if it can be neither."""
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ValueError(f"model {model!r}: there is no such directory")
        try:
            directory = Path(snapshot_download(model, allow_patterns=_FILES))
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            raise ValueError(f"model {model!r} is no directory and cannot be downloaded: {error}") from error
    if not (directory / "config.json").exists():
        raise ValueError(f"model {model!r}: {directory} holds no config.json")
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """config.json with its family's defaults filled in. Raises ValueError if transformers cannot make sense of it."""
    try:
        return AutoConfig.from_pretrained(directory)
    except (OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None if the checkpoint comes without one."""
    if not any((directory / name).exists() for name in _VOCABULARIES):
        return None
    return AutoTokenizer.from_pretrained(directory)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, if there is none."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def read_eos_token_ids(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Every id that generation_config.json or config.json calls an end; where neither does, the tokenizer's."""
    path = directory / "generation_config.json"
    generation_config = read_json(path) if path.exists() else {}
    ids: set[int] = set()
    for given in (generation_config.get("eos_token_id"), getattr(config, "eos_token_id", None)):
        if given is not None:
            ids.update(given if isinstance(given, list) else [given])
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
