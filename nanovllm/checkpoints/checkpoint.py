"""Opens a checkpoint: everything that an engine reads from its directory, except the weights."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from nanovllm.checkpoints.tensor_files import open_weights
from nanovllm.config import MAX_SIZE, Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_ints, naming
from nanovllm.utils.helpers import as_list, read_json, report

# Options of from_pretrained: run no code of the checkpoint, use no network.
LOCAL: dict[str, bool] = {"trust_remote_code": False, "local_files_only": True}
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
# The same weights for other programs, in repositories of Mistral and Meta.
_COPIES = ["consolidated*", "original/*", "*/*.safetensors"]
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


@dataclass(frozen=True)
class Checkpoint:
    """What an engine needs of a checkpoint directory. models/ turns `hf_config` into a model."""

    directory: Path
    hf_config: PretrainedConfig
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase | None  # None: the checkpoint has none
    eos_token_ids: frozenset[int]  # can exceed the vocabulary, see read_eos_token_ids
    default_params: SamplingParams

    @classmethod
    def open(cls, config: Config) -> "Checkpoint":
        """Find or download `config.model`, and read its files.

        Raises ValueError, naming the file, if one is missing or invalid.
        """
        directory = find_checkpoint(os.fspath(config.model))
        hf_config = read_config(directory)
        tokenizer = read_tokenizer(directory)
        path = directory / "generation_config.json"
        generation_config = read_json(path) if path.exists() else {}
        with naming(path, ValueError, TypeError):
            default_params = SamplingParams(**find_generation_defaults(generation_config))
        return cls(
            directory=directory,
            hf_config=hf_config,
            dtype=choose_dtype(config, hf_config, directory),
            tokenizer=tokenizer,
            eos_token_ids=read_eos_token_ids(directory, generation_config, hf_config, tokenizer),
            default_params=default_params,
        )


def find_checkpoint(model: str) -> Path:
    """Return the directory `model`, or download the Hub id `model` and return its directory.

    Raises ValueError if it is neither.
    """
    directory = Path(os.path.expanduser(model))
    if not directory.is_dir():
        problem = f"model={model!r}: no such directory, and it cannot be downloaded"
        # OSError comes from the network and the Hub, ValueError from an invalid id.
        with naming(problem, OSError, ValueError):
            downloaded = snapshot_download(model, allow_patterns=_FILES, ignore_patterns=_COPIES)
        directory = Path(downloaded)
    return directory


def read_config(directory: Path) -> PretrainedConfig:
    """Read config.json and fill in the defaults of its family.

    Of a model for text and images, return the config of the text part, with every EOS id.

    Raises ValueError for a config that transformers rejects.
    """
    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{path} is missing: model must be a checkpoint directory or a Hub id")
    with naming(path, Exception):
        config = AutoConfig.from_pretrained(directory, **LOCAL)
        text_config = config.get_text_config()
        if text_config is not config:
            text_config.name_or_path = config.name_or_path
            # Only what the file states, because the class of the whole config has defaults of its
            # own.
            stated = read_json(path)
            names = {"architectures", "tie_word_embeddings", "quantization_config"}
            for name in stated.keys() & names:
                setattr(text_config, name, stated[name])
            text_config.dtype = text_config.dtype or config.dtype
            outer_ids = as_list(getattr(config, "eos_token_id", None))
            text_config.eos_token_id = outer_ids + as_list(text_config.eos_token_id)
    return text_config


def read_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer. Return None if the checkpoint has none.

    Raises ValueError if it cannot be loaded.
    """
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        return None
    problem = (  # the error of transformers always names tiktoken
        f"cannot load the tokenizer in {directory} (a tokenizer.model without tokenizer.json needs"
        " sentencepiece and protobuf, or tiktoken in Llama 3's original format)"
    )
    with naming(problem, Exception):
        return AutoTokenizer.from_pretrained(directory, **LOCAL)


def choose_dtype(config: Config, hf_config: PretrainedConfig, directory: Path) -> torch.dtype:
    """Return the dtype of `config`, or else of config.json, or else of the stored embedding.

    A GPU before Ampere, such as the T4, computes bfloat16 only by emulation, so it gets float16.
    """
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    dtype = hf_config.dtype
    if not isinstance(dtype, torch.dtype):
        files = open_weights(directory, config.load_format)
        dtype = torch.float32 if files is None else files.find_stored_dtype()
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if dtype == torch.bfloat16 and on_gpu:
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            report("this GPU has no bfloat16, so the model is computed in float16")
            return torch.float16
    return dtype


def read_eos_token_ids(
    directory: Path,
    generation_config: dict[str, Any],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> frozenset[int]:
    """Return every EOS id of generation_config.json, config.json and the tokenizer.

    All of them count, because fine-tuned checkpoints often change only one: a chat model's
    tokenizer ends turns, while its config.json still names the EOS of the base model.

    A negative id means none, as null does. Checkpoints with a reduced vocabulary can have ids above
    it.
    """
    given = {
        "generation_config.json": generation_config.get("eos_token_id"),
        "config.json": config.eos_token_id,
        "tokenizer_config.json": None if tokenizer is None else tokenizer.eos_token_id,
    }
    token_ids: set[int] = set()
    for name, value in given.items():
        with naming(directory / name, TypeError, ValueError):
            token_ids.update(check_ints("eos_token_id", as_list(value), minimum=-MAX_SIZE))
    return frozenset(token_id for token_id in token_ids if token_id >= 0)


def find_generation_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that generation_config.json sets, by their names here.

    As in vLLM, null means unset and do_sample is ignored. In transformers a missing do_sample means
    greedy, so obeying it would make most base models greedy, which users of vLLM do not expect.
    The values are not checked.
    """
    content = {**generation_config, "max_tokens": generation_config.get("max_new_tokens")}
    return {name: content[name] for name in _SAMPLING_FIELDS if content.get(name) is not None}
