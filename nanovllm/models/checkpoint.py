"""What a checkpoint directory says besides its weights: config, tokenizer, and which tokens end a text."""

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from nanovllm.checks import check_ints, naming
from nanovllm.config import MAX_SIZE

LOCAL: dict[str, bool] = {
    "trust_remote_code": False,
    "local_files_only": True,
}  # of from_pretrained: no code, no network
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_COPIES = [
    "consolidated*",
    "original/*",
    "*/*.safetensors",
]  # the same weights for other programs (Mistral's, Meta's)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_checkpoint(model: str) -> Path:
    """The directory of `model`, which is one or else a Hub id to download. Raises ValueError if it can be neither."""
    directory = Path(os.path.expanduser(model))
    if not directory.is_dir():
        # OSError: of the network and of the Hub; ValueError: for what is no id.
        with naming(
            f"model {model!r}: there is no such directory, and it cannot be downloaded",
            OSError,
            ValueError,
        ):
            directory = Path(
                snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_COPIES)
            )
    for path in [path for pattern in _FILES for path in directory.glob(pattern)]:
        if path.exists() and not path.is_file():  # reading a named pipe would wait for its writer
            raise ValueError(f"{path} is not a regular file")
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """config.json with its family's defaults filled in. Raises ValueError for what transformers refuses."""
    with naming(directory / "config.json", Exception):
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


def read_eos_token_ids(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Every id that generation_config.json or config.json calls an end; where neither does, the tokenizer's.

    A negative id means none, as null does. Ids above the vocabulary stay, though none is ever drawn: cut-down checkpoints
    keep those of their originals.
    """
    path = directory / "generation_config.json"
    generation_config = read_json(path) if path.exists() else {}
    given = generation_config.get("eos_token_id"), config.eos_token_id
    ids = [
        token_id
        for each in given
        if each is not None
        for token_id in (each if isinstance(each, list) else [each])
    ]
    with naming(path, TypeError):  # transformers has checked those of config.json
        found = frozenset(
            token_id
            for token_id in check_ints("eos_token_id", ids, minimum=-MAX_SIZE)
            if token_id >= 0
        )
    return found if found or tokenizer is None else frozenset([tokenizer.eos_token_id]) - {None}
