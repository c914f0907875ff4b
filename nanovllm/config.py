"""The options of an engine, validated before anything is loaded.

Values that depend on the checkpoint or the machine (block size, number of blocks, max_model_len)
are resolved later, in worker/worker.py and worker/startup.py.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec

from nanovllm.utils.checks import (
    Checked,
    check_choice,
    check_fraction,
    check_int,
    check_number,
    check_str,
    check_type,
    checked,
)

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
SPECULATIVE_METHODS = ("mtp", "prompt_lookup")
MAX_SIZE = 2**31 - 1  # limit of all counts, because larger numbers overflow int32
MAX_DRAFT_STEP = 256  # tokens of a step with drafts
Options = ParamSpec("Options")
check_size = partial(check_int, minimum=1, maximum=MAX_SIZE)


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """The checkpoint and the options of `LLM`.

    Raises ValueError or TypeError that names the invalid option.

    Args:
        model: A Hugging Face checkpoint directory or a Hub id.
        dtype: The dtype of weights, K/V and computation. "auto": the checkpoint's dtype.
        device: "cpu", "cuda" or "cuda:N". "auto": CUDA if a GPU is available, else the CPU.
        tensor_parallel_size: Number of ranks. Each rank is a process. If there are GPUs, each rank
            has one, counted from `device` or cuda:0. The number must divide the attention heads and
            the MLP width.
        max_model_len: Maximum of prompt plus generated tokens. None: the model's limit, but at most
            4096 and at most what the KV cache holds. With longrope the limit is the original
            length, and a larger value selects the long factors for all positions.
        max_num_batched_tokens: Token budget of one step. It is lowered if layers with a window have
            no memory for the K/V of so many tokens beside their windows.
        max_num_seqs: Maximum number of sequences that hold KV blocks at once. It is lowered if
            there is no memory for the recurrent states or windows of so many.
        kvcache_block_size: Tokens per block. None: the attention backend's preference.
        num_kvcache_blocks: Blocks in the KV cache. None: computed from the available memory. The
            computation, and what was lowered, are printed at start.
        gpu_memory_utilization: Fraction of the GPU's memory that this engine may use, in (0, 1].
        kvcache_memory_bytes: Size of the KV cache per rank, of which recurrent states or windows
            take at most half, unless all layers have windows. None: on a GPU, what
            gpu_memory_utilization leaves. On a CPU, a quarter of the available memory, divided by
            the ranks. This default is limited to what max_num_seqs sequences of max_model_len use.
        enable_prefix_caching: Reuse full blocks of identical prefixes.
        enable_chunked_prefill: False is vLLM's way to choose the policy "prefill_first", whatever
            `policy` is. True has no effect.
        policy: "mixed": decodes and chunks of prompts share a step. "prefill_first": a step has
            whole prompts or decodes, as in the vLLM V0 engine. engine/scheduler.py lists the names
            in POLICIES.
        kv_offloading_size: GiB of RAM for K/V that the KV cache evicts. A later prompt with the
            same prefix reads them instead of computing them. None or 0: no such RAM.
        kv_cache_dir: A folder for K/V of prefixes, which survive the engine. Engines of the same
            model can share it. It holds the tokens of prompts, so only its owner should read it.
        kv_cache_dir_size: GiB that all files in kv_cache_dir may take. The least recently used ones
            are deleted.
        enforce_eager: Disable CUDA graphs.
        enable_kernels: False: run only the plain torch code of layers/ and models/, for reading and
            debugging. Attention is then "torch".
        attention_backend: "auto": the fastest backend that can run here. A named backend that
            cannot run here is an error.
        model_impl: "nanovllm": a class of models/. "transformers": the family's own code in
            transformers, with this engine's attention. "auto": a class of models/ if the family has
            one.
        load_format: "auto": the checkpoint's weights. "dummy": random weights in the shapes of
            config.json.
        quantization: "int8" or "int4": quantize weights that the checkpoint stores in 16 or 32 bits
            while they are loaded. With "int4" the embeddings and the output head have 8 bits. None:
            keep what is stored.
        seed: Seed of the engine. The same calls give the same samples, up to rounding.
        num_speculative_tokens: Maximum number of draft tokens per sequence and step. At most
            MAX_DRAFT_LEN of the attention backend (7) are used. With backends other than "cpp" they
            can change rounding.
        speculative_method: "mtp": the checkpoint's own head for multi-token prediction proposes
            draft tokens, on one rank. "prompt_lookup": draft tokens are what followed the newest
            tokens before. None: the head, if the checkpoint has one that can be used.
        trace: File for the engine's trace. ui.perfetto.dev and `python -m nanovllm.trace` open it.
    """

    # check_int is followed by the smallest valid value, and perhaps by the largest one.
    model: str | os.PathLike[str] = field(kw_only=False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = checked("auto", check_type, str, "a str such as 'auto', 'cpu' or 'cuda'")
    tensor_parallel_size: int = checked(1, check_int, 1)
    max_model_len: int | None = checked(None, check_int, 2)
    max_num_batched_tokens: int = checked(8192, check_size)
    max_num_seqs: int = checked(256, check_size)
    kvcache_block_size: int | None = checked(None, check_int, 2, MAX_SIZE)
    num_kvcache_blocks: int | None = checked(None, check_size)
    gpu_memory_utilization: float = checked(0.9, check_fraction)
    kvcache_memory_bytes: int | None = checked(None, check_int, 1, 2**48)
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = checked("mixed", check_str)
    kv_offloading_size: float | None = checked(None, check_number, 0.0, 2.0**20)
    kv_cache_dir: str | os.PathLike[str] | None = checked(
        None, check_type, (str, os.PathLike), "a folder's path"
    )
    kv_cache_dir_size: float = checked(10.0, check_number, 0.0, 2.0**20)
    enforce_eager: bool = False
    enable_kernels: bool = True
    attention_backend: Literal["auto", "flash_attn", "triton", "cpp", "torch"] = "auto"
    model_impl: Literal["auto", "nanovllm", "transformers"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    quantization: Literal["int8", "int4"] | None = checked(None, check_choice, QUANTIZATIONS)
    seed: int = checked(0, check_int, 0, 2**64 - 1)
    num_speculative_tokens: int = checked(0, check_int, 0, MAX_SIZE)
    speculative_method: Literal["mtp", "prompt_lookup"] | None = checked(
        None, check_choice, SPECULATIVE_METHODS
    )
    trace: str | os.PathLike[str] | None = checked(
        None, check_type, (str, os.PathLike), "a file's path"
    )

    def __post_init__(self) -> None:
        check_type("model", self.model, (str, os.PathLike), "a checkpoint directory or a Hub id")
        super().__post_init__()
        if not self.enable_kernels and self.attention_backend not in ("auto", "torch"):
            raise ValueError(
                f"attention_backend={self.attention_backend!r} needs enable_kernels=True:"
                " set it, or use attention_backend='torch'"
            )
        if self.kv_offloading_size and self.kv_cache_dir:
            raise ValueError(
                "kv_offloading_size and kv_cache_dir exclude each other: set one of them (the"
                " operating system keeps files of kv_cache_dir in RAM)"
            )
        if not self.enable_chunked_prefill:
            object.__setattr__(self, "policy", "prefill_first")

    @property
    def needs(self) -> list[str]:
        """The options that are set and need a feature of the engine."""
        names = ("num_speculative_tokens", "kv_offloading_size", "kv_cache_dir", "trace")
        return [name for name in names if getattr(self, name)]


def takes(
    options: Callable[Options, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Copy the signature of `options` to an __init__ that forwards all of its arguments.

    LLM(model, **options) passes them to Config. Without this decorator, `help(LLM)` and editors
    would show `*args, **options`, and type checkers would accept any option.
    """
    return wraps(vars(options)["__init__"])
