"""What a caller may set on an engine, checked before anything is loaded.

Config holds the wishes as given. What depends on the checkpoint or on the machine (block size, number of blocks,
max_model_len) is settled where it becomes known: in engine/executor.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec

from nanovllm.backends import BACKENDS
from nanovllm.checks import (
    Checked,
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_type,
    checked,
)

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIZE = (
    2**31 - 1
)  # of anything that is counted: beyond it arithmetic overflows before memory runs out
MAX_HEAD_DIM = (
    2**16
)  # far above what backends compute; a larger one exceeds all memory in RoPE's tables
MAX_DRAFT_LEN = 7  # on a CPU, queries of up to 8 tokens are computed as decodes, to the bit: a longer draft could change one
MAX_DRAFT_STEP = 256  # tokens of a step with drafts, whatever it costs
Options = ParamSpec("Options")


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """The checkpoint and the options of `LLM`. Raises ValueError or TypeError, naming the option.

    Args:
        model: A Hugging Face checkpoint directory, or a Hub id.
        dtype: Of weights, K/V and computation. "auto": the checkpoint's.
        device: "cpu", "cuda" or "cuda:N". "auto": CUDA if there is a GPU, else the CPU.
        tensor_parallel_size: Ranks of one model, a process each, and a GPU each if there are any, from cuda:0 or `device` on. It
            must divide the heads and the MLP's width.
        max_model_len: Prompt and generated tokens of a sequence. None: the model's limit, at most 4096, at most what the KV
            cache holds.
        max_num_batched_tokens: Tokens computed in one step.
        max_num_seqs: Sequences that hold KV blocks at once.
        kvcache_block_size: Tokens in a block. None: what the attention backend prefers.
        num_kvcache_blocks: None: sized from the memory there is; the arithmetic is printed at the start.
        gpu_memory_utilization: (0, 1]: the share of the GPU's memory that this engine may come to use.
        kvcache_memory_bytes: The KV cache's size on each rank. None on a CPU: a quarter of the available memory, divided among
            the ranks, or what max_num_seqs sequences can use.
        enable_prefix_caching: Reuse full blocks of equal prefixes.
        enable_chunked_prefill: True: decodes and pieces of prompts share steps. False: whole prompts first, then decodes, as in
            vLLM 0.x.
        enforce_eager: No CUDA graphs.
        enable_kernels: False: every token is computed by the plain torch of layers/ and models/, to read and to step through;
            attention is then "torch".
        attention_backend: "auto": the fastest that works here. One asked for by name that cannot run here is an error.
        load_format: "dummy": random weights of config.json's shape.
        seed: Of the engine: the same calls give the same samples.
        num_speculative_tokens: Draft tokens of a sequence in a step at most, found by prompt lookup. They change no token. More
            than 7 are not used.
        trace: A file for the engine's timeline, which ui.perfetto.dev and `python -m nanovllm.trace` show.
    """

    model: str | os.PathLike[str] = field(kw_only=False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = checked(
        "auto", check_choice, choices=("auto", *DTYPES)
    )
    device: str = checked(
        "auto", check_type, types=(str,), meaning="a str such as 'auto', 'cpu' or 'cuda'"
    )
    tensor_parallel_size: int = checked(1, check_int, minimum=1)
    max_model_len: int | None = checked(None, check_int, minimum=2)
    max_num_batched_tokens: int = checked(8192, check_int, minimum=1, maximum=MAX_SIZE)
    max_num_seqs: int = checked(256, check_int, minimum=1, maximum=MAX_SIZE)
    kvcache_block_size: int | None = checked(None, check_int, minimum=2, maximum=MAX_SIZE)
    num_kvcache_blocks: int | None = checked(None, check_int, minimum=1, maximum=MAX_SIZE)
    gpu_memory_utilization: float = checked(0.9, check_number, low=0.0, high=1.0, open_low=True)
    kvcache_memory_bytes: int | None = checked(None, check_int, minimum=1, maximum=2**48)
    enable_prefix_caching: bool = checked(True, check_bool)
    enable_chunked_prefill: bool = checked(True, check_bool)
    enforce_eager: bool = checked(False, check_bool)
    enable_kernels: bool = checked(True, check_bool)
    attention_backend: str = checked("auto", check_choice, choices=("auto", *BACKENDS))
    load_format: Literal["auto", "dummy"] = checked("auto", check_choice, choices=("auto", "dummy"))
    seed: int = checked(0, check_int, minimum=0)
    num_speculative_tokens: int = checked(0, check_int, minimum=0, maximum=MAX_SIZE)
    trace: str | os.PathLike[str] | None = checked(
        None, check_type, types=(str, os.PathLike), meaning="a file's path"
    )

    @classmethod
    def from_options(cls, *args: Any, **options: Any) -> "Config":
        """Config(*args, **options), where an unknown option is answered with those that there are."""
        model, *names = [each.name for each in fields(cls)]
        if unknown := options.keys() - {model, *names}:
            raise TypeError(f"LLM has no option {min(unknown)!r}; it has {', '.join(names)}")
        return cls(*args, **options)

    def __post_init__(self) -> None:
        check_type("model", self.model, (str, os.PathLike), "a checkpoint directory or a Hub id")
        super().__post_init__()
        if not self.enable_kernels and self.attention_backend not in ("auto", "torch"):
            raise ValueError(
                f"attention_backend={self.attention_backend!r} needs enable_kernels=True: without, it is 'torch'"
            )


def takes(
    options: Callable[Options, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Show editors and `help` that an __init__ has the parameters of `options`."""
    return wraps(vars(options)["__init__"])
