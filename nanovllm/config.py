"""What a caller may set on an engine, checked before anything is loaded.

Config holds the wishes as given. What depends on the checkpoint or on the machine (block size, number of blocks,
max_model_len) is settled where it becomes known: in engine/executor.py.
"""

import os
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, Literal, ParamSpec

from nanovllm.checks import check_bool, check_choice, check_int, check_number

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIZE = 2**31 - 1  # of anything that is counted: beyond it arithmetic overflows before memory runs out
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "dtype": partial(check_choice, choices=("auto", *DTYPES)),
    "tensor_parallel_size": partial(check_int, minimum=1),
    "max_model_len": partial(check_int, minimum=2, optional=True),
    "max_num_batched_tokens": partial(check_int, minimum=1, maximum=MAX_SIZE),
    "max_num_seqs": partial(check_int, minimum=1, maximum=MAX_SIZE),
    "kvcache_block_size": partial(check_int, minimum=2, maximum=MAX_SIZE, optional=True),
    "num_kvcache_blocks": partial(check_int, minimum=1, maximum=MAX_SIZE, optional=True),
    "gpu_memory_utilization": partial(check_number, low=0.0, high=1.0, open_low=True),
    "kvcache_memory_bytes": partial(check_int, minimum=1, maximum=2**48, optional=True),
    "enable_prefix_caching": check_bool,
    "enable_chunked_prefill": check_bool,
    "enforce_eager": check_bool,
    "attention_backend": partial(check_choice, choices=("auto", "flash_attn", "triton", "cpp", "torch")),
    "load_format": partial(check_choice, choices=("auto", "dummy")),
    "seed": partial(check_int, minimum=0),
}


@dataclass(frozen=True)
class Config:
    """The checkpoint and the options of `LLM`. Raises ValueError or TypeError, naming the option.

    Args:
        model: A Hugging Face checkpoint directory, or a Hub id.
        dtype: Of weights, K/V and computation. "auto": the checkpoint's.
        device: "cpu", "cuda" or "cuda:N". "auto": CUDA if there is a GPU, else the CPU.
        tensor_parallel_size: Ranks of one model, a process each, and a GPU each if there are any. It must divide the heads and
            the MLP's width.
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
        attention_backend: "auto": the fastest that works here. One asked for by name that cannot run here is an error.
        load_format: "dummy": random weights of config.json's shape.
        seed: Of the engine: the same calls give the same samples.
        trace: A file for the engine's timeline, which ui.perfetto.dev and `python -m nanovllm.trace` show.
    """

    model: str | os.PathLike[str]
    _: KW_ONLY
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    kvcache_block_size: int | None = None
    num_kvcache_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    kvcache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False
    attention_backend: Literal["auto", "flash_attn", "triton", "cpp", "torch"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    trace: str | os.PathLike[str] | None = None

    @classmethod
    def from_options(cls, *args: Any, **options: Any) -> "Config":
        """Config(*args, **options), where an unknown option is answered with those that there are."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise TypeError(f"LLM has no option {name!r}; it has {', '.join(names[1:])}")
        return cls(*args, **options)

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)):
            raise TypeError(f"model must be a checkpoint directory or a Hub id, not {self.model!r}")
        object.__setattr__(self, "model", os.fspath(self.model))
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a str such as 'auto', 'cpu' or 'cuda', not {self.device!r}")
        if self.trace is not None and not isinstance(self.trace, (str, os.PathLike)):
            raise TypeError(f"trace must be a file's path or None, not {self.trace!r}")


Parameters = ParamSpec("Parameters")


def takes(
    options: Callable[Parameters, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Parameters], None]]:
    """Show editors and `help` that an __init__ has the parameters of `options`."""

    def decorate(init: Callable[..., None]) -> Callable[Concatenate[Any, Parameters], None]:
        parameters = signature(options).parameters.values()
        init.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *parameters])
        return init

    return decorate
