"""Reads the config, the tokenizer and the EOS token ids of a checkpoint directory."""

import json
import os
import re
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import (
    is_protobuf_available,
    is_sentencepiece_available,
    is_tiktoken_available,
)

from nanovllm.checks import check_ints, naming
from nanovllm.config import MAX_SIZE

# Options of from_pretrained: run no code of the checkpoint, use no network.
LOCAL: dict[str, bool] = {"trust_remote_code": False, "local_files_only": True}
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
# The same weights for other programs, in repositories of Mistral and Meta.
_COPIES = ["consolidated*", "original/*", "*/*.safetensors"]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_PROBE = "What is x?\n12 plus 3 é"


def find_checkpoint(model: str) -> Path:
    """Return the directory `model`, or download the Hub id `model` and return its directory.

    Raises ValueError if it is neither, or if a file in it is not a regular file.
    """
    directory = Path(os.path.expanduser(model))
    if not directory.is_dir():
        problem = f"model={model!r}: no such directory, and it cannot be downloaded"
        # OSError comes from the network and the Hub, ValueError from an invalid id.
        with naming(problem, OSError, ValueError):
            downloaded = snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_COPIES)
        directory = Path(downloaded)
    for pattern in _FILES:
        for path in directory.glob(pattern):
            # Reading a named pipe would wait for its writer.
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a regular file")
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """Read config.json and fill in the defaults of its family.

    Raises ValueError for a config that transformers rejects.
    """
    with naming(directory / "config.json", Exception):
        return AutoConfig.from_pretrained(directory, **LOCAL)


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer. Return None if the checkpoint has none.

    Raises ValueError if it cannot be loaded, or if it loses spaces.
    """
    vocabularies = [name for name in _VOCABULARIES if (directory / name).is_file()]
    if not vocabularies:
        return None
    with naming(f"cannot load the tokenizer in {directory}", Exception):
        if vocabularies == ["tokenizer.model"]:
            _check_packages(directory / "tokenizer.model")
        tokenizer = AutoTokenizer.from_pretrained(directory, **LOCAL)
        if "tokenizer.json" in vocabularies:
            _check_spaces(tokenizer, directory / "tokenizer.json")
    return tokenizer


def _check_packages(path: Path) -> None:
    """Require the packages that convert tokenizer.model.

    Raises ValueError that names the missing ones, because transformers always names tiktoken.
    """
    with path.open("rb") as file:
        first_line = file.readline(1000)
    # The original format of Llama 3 has a token in base64 and its rank per line. Others are
    # SentencePiece models, in protobuf.
    if re.fullmatch(rb"[A-Za-z0-9+/=]+ \d+\s*", first_line):
        needed = {"tiktoken": is_tiktoken_available()}
    else:
        needed = {
            "sentencepiece": is_sentencepiece_available(),
            "protobuf": is_protobuf_available(),
        }
    missing = [name for name, is_available in needed.items() if not is_available]
    if missing:
        raise ValueError(
            f"{path.name} needs {' and '.join(missing)}: pip install {' '.join(missing)},"
            " or add tokenizer.json"
        )


def _check_spaces(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Require that `tokenizer` keeps the spaces that a byte-level tokenizer.json keeps.

    transformers below 5.22 replaces the pre-tokenizer if tokenizer_config.json names Llama's class,
    as in DeepSeek-R1's distilled models. Other differences can be intended, and are accepted.

    Raises ValueError if spaces are lost.
    """
    if b'"ByteLevel"' not in path.read_bytes():
        return
    num_words = len(_PROBE.split())
    token_ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    text = str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))
    if len(text.split()) >= num_words:
        return
    original = Tokenizer.from_file(str(path))
    original.no_truncation()
    original.no_padding()
    token_ids = original.encode(_PROBE, add_special_tokens=False).ids
    if len(original.decode(token_ids, skip_special_tokens=False).split()) == num_words:
        raise ValueError(
            f"transformers {transformers.__version__} loses spaces ({_PROBE!r} becomes {text!r}):"
            " upgrade it to 5.22 or later"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises ValueError, naming the file, if there is none."""
    with naming(path, OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, found {type(content).__name__}")
    return content


def read_eos_token_ids(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    """Return every EOS id of generation_config.json and config.json, or else the tokenizer's.

    A negative id means none, as null does. Ids above the vocabulary are kept. They occur in
    checkpoints with a reduced vocabulary, and are never sampled.
    """
    path = directory / "generation_config.json"
    generation_config = read_json(path) if path.exists() else {}
    given: list[object] = []
    for value in (generation_config.get("eos_token_id"), config.eos_token_id):
        if isinstance(value, list):
            given += value
        elif value is not None:
            given.append(value)
    with naming(path, TypeError):  # transformers has checked those of config.json
        token_ids = check_ints("eos_token_id", given, minimum=-MAX_SIZE)
    valid = frozenset(token_id for token_id in token_ids if token_id >= 0)
    if not valid and tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset([tokenizer.eos_token_id])
    return valid
