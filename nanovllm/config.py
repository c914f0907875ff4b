"""What a caller may set on an engine, checked before anything is loaded.

Config holds the wishes as given. What depends on the checkpoint or on the machine (block size, number of blocks,
max_model_len, dtype) is settled where it becomes known: in ModelRunner.
"""

import os
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checks import check_bool, check_choice, check_int, check_number


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
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice("attention_backend", self.attention_backend, ("auto", "flash_attn", "triton", "cpp", "torch"))
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a str such as 'auto', 'cpu' or 'cuda', not {self.device!r}")
        check_int("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_int("max_model_len", self.max_model_len, 2, optional=True)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("kvcache_block_size", self.kvcache_block_size, 2, optional=True)
        check_int("num_kvcache_blocks", self.num_kvcache_blocks, 1, optional=True)
        check_int("kvcache_memory_bytes", self.kvcache_memory_bytes, 1, optional=True)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, open_low=True)
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"):
            check_bool(name, getattr(self, name))
        check_int("seed", self.seed, 0)
        if self.tensor_parallel_size != 1:
            raise ValueError(f"tensor_parallel_size={self.tensor_parallel_size} is not built yet: only 1 is")
        if self.trace is not None:
            raise ValueError("trace is not built yet: only None is")
