"""What a checkpoint directory says besides its weights: config, tokenizer, and which tokens end a text."""

import json
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def find_checkpoint(model: str) -> Path:
    """The directory of `model`, which is one or else a Hub id to download. Raises ValueError if it can be neither."""
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise ValueError(f"model {model!r}: there is no such directory")
        directory = Path(snapshot_download(model, allow_patterns=_FILES))
    if not (directory / "config.json").exists():
        raise ValueError(f"model {model!r}: {directory} holds no config.json")
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """config.json with its family's defaults filled in. Raises ValueError for a family that transformers does not know."""
    return AutoConfig.from_pretrained(directory)


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None if the checkpoint comes without one."""
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(directory)


def read_eos_token_ids(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Every id that generation_config.json or config.json calls an end; where neither does, the tokenizer's."""
    path = directory / "generation_config.json"
    generation_config = json.loads(path.read_text()) if path.exists() else {}
    ids: set[int] = set()
    for given in (generation_config.get("eos_token_id"), getattr(config, "eos_token_id", None)):
        if given is not None:
            ids.update(given if isinstance(given, list) else [given])
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
