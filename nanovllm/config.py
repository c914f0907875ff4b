"""What a caller may set on an engine, checked before anything is loaded.

Config holds the wishes as given. What depends on the checkpoint or on the machine (block size, number of blocks,
max_model_len, dtype) is settled where it becomes known: in ModelRunner.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Config:
    """Options of `LLM`; the README's table says what each means. Raises ValueError or TypeError, naming the option."""

    model: str
    dtype: str = "auto"
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
    attention_backend: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    trace: str | None = None

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, Any]) -> "Config":
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"model must be a checkpoint directory or a Hub id, not {model!r}")
        names = [field.name for field in fields(cls) if field.name != "model"]
        for name in options:
            if name not in names:
                raise TypeError(f"LLM has no option {name!r}; it has {', '.join(names)}")
        return cls(model=os.fspath(model), **options)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a str such as 'auto', 'cpu' or 'cuda', not {self.device!r}")
        if self.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} is not built yet: only 1 is")
        if self.trace is not None:
            raise ValueError("trace is not built yet: only None is")
