"""The kernels of kernels.cpp: compiled when first used, with the C++ compiler of this machine for its processor.

Not an extension module of torch, whose headers take half a minute to compile: the kernels get plain pointers through
ctypes and are ready in a second. The library is kept in ~/.cache/nanovllm, one per dtype, compiler and processor. A
digest in its name tells whether it is whole. Where there is no place for it, it is compiled at each start; where there
is no compiler, or none that will do, the layers compute the same with torch.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from nanovllm.engine.batch import Batch

P, I, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "store_kvcache": [P, P, I, I, P, I, I, P, P],
    "decode_attention": [P, P, P, P, P, P, P, I, I, I, I, I, I, R],
    "prefill_attention": [P, P, P, P, P, P, P, I, I, I, I, I, I, R],
    "decoder_layers": [P, P, I, I, P, P, P, P, P, P, P, I, I, I, I],
    "linear": [P, P, P, P, P, I, I, I, I],
    "rms_norm": [P, P, P, I, I, R],
    "rotary": [P, P, P, P, P, I, I, I, I, R],
    "silu_and_multiply": [P, P, I, I],
    "gather_rows": [P, P, P, I, I],
    "sample": [P, P, P, P, P, I, I],
}
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
DEFINES = {torch.float32: ["-DT=float"], torch.bfloat16: ["-DT=bfloat16", "-DT_IS_BFLOAT16"]}


@cache
def reason_unavailable(dtype: torch.dtype) -> str | None:
    if dtype not in DEFINES:
        return f"there are no CPU kernels for {dtype}"
    try:
        _library(dtype)
    except FileNotFoundError as error:
        return f"there is no C++ compiler: {error}"
    except subprocess.CalledProcessError as error:
        return f"the C++ compiler failed: {error.stderr.decode(errors='replace')}"
    except (OSError, ValueError) as error:  # CXX is no command, or the library cannot be loaded
        return str(error)
    return None


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    compiler = _find_compiler()
    target = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)  # version and processor features, as macros
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*")))
    name = f"cpu_kernels_{_digest(sources + target + repr((FLAGS, DEFINES[dtype])).encode())}"
    kept = _find_kept(name)
    library = _build(compiler, dtype, name) if kept is None else ctypes.CDLL(str(kept))
    for name, arguments in SIGNATURES.items():
        if function := getattr(library, name, None):  # not every processor has `linear`
            function.argtypes, function.restype = arguments, None
    return library


def _build(compiler: list[str], dtype: torch.dtype, name: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as scratch:
        unlinked, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _run(*compiler, *FLAGS, *DEFINES[dtype], "-c", str(SOURCE), "-o", str(unlinked))
        # Linked without OpenMP: its functions are found in the copy that torch has loaded, with torch's threads.
        _run(*compiler, "-shared", str(unlinked), "-o", str(linked))
        return ctypes.CDLL(str(_keep(linked, name)))  # once it is loaded, its file may go


def _find_compiler() -> list[str]:
    command = os.environ.get("CXX", "")
    try:
        return shlex.split(command) or ["c++"]  # it may have several words: "ccache g++"
    except ValueError as error:
        raise ValueError(f"CXX={command!r} is not a command: {error}") from error


def _cache_folder() -> Path:
    """Where the XDG base directory specification says: an empty or relative XDG_CACHE_HOME is ignored.

    Raises OSError if it cannot be made, or if somebody else could put a library there; RuntimeError if there is no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path("~/.cache").expanduser()
    if not base.is_absolute():
        raise FileNotFoundError(f"{base} is relative: set HOME or XDG_CACHE_HOME to an absolute path")
    folder = base / "nanovllm"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by other users: make it yours alone (chmod 700)")
    return folder


def _find_kept(name: str) -> Path | None:
    """A library of this name, if it is whole."""
    try:
        for path in _cache_folder().glob(f"{name}_*.so"):
            if path.stem == f"{name}_{_digest(path.read_bytes())}":
                return path
    except (OSError, RuntimeError):  # as if there were none: _keep will say why
        pass
    return None


def _keep(library: Path, name: str) -> Path:
    """Where `library` lies for processes to come, or, if it cannot be kept, as it is given."""
    try:
        folder = _cache_folder()
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            copy = Path(shutil.copy(library, scratch))
            return copy.replace(folder / f"{name}_{_digest(copy.read_bytes())}.so")  # at once, for those who look for it
    except (OSError, RuntimeError) as error:  # no home, no permission, no space
        print(f"nanovllm: the CPU kernels will be compiled again next time: {error}", file=sys.stderr)
        return library


def _digest(data: bytes) -> str:
    return xxhash.xxh64(data).hexdigest()


def _run(*command: str) -> bytes:
    return subprocess.run(command, check=True, capture_output=True).stdout


def _call(function: Callable[..., None], *arguments: Tensor | int | float | None) -> None:
    """With tensors as pointers to their numbers."""
    function(*[argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments])


def store_kvcache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the attention backends' function of this name."""
    assert key[:1].is_contiguous() and value[:1].is_contiguous() and kv_cache.is_contiguous()
    num_tokens, num_kv_heads, head_dim = key.shape
    _call(
        _library(key.dtype).store_kvcache, key, value, key.stride(0), value.stride(0), slot_mapping, num_tokens,
        num_kv_heads * head_dim, *kv_cache,
    )  # fmt: skip


def decode_attention(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float, output: Tensor) -> None:
    """Attention of the sequences with one query token, into their rows of `output`; the others' rows stay as they are."""
    _attend(_library(query.dtype).decode_attention, query, kv_cache, batch, scale, output)


def prefill_attention(query: Tensor, kv_cache: Tensor, batch: Batch, scale: float, output: Tensor) -> None:
    """Causal attention of the sequences with more than one query token, likewise. Only where can_multiply(dtype)."""
    _attend(_library(query.dtype).prefill_attention, query, kv_cache, batch, scale, output)


def _attend(
    function: Callable[..., None], query: Tensor, kv_cache: Tensor, batch: Batch, scale: float, output: Tensor
) -> None:
    assert query.is_contiguous() and kv_cache.is_contiguous() and batch.block_tables.is_contiguous()
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    group_size = query.shape[1] // num_kv_heads
    _call(
        function, query, *kv_cache, output, batch.cu_seqlens_q, batch.context_lens, batch.block_tables, *batch.block_tables.shape,
        block_size, num_kv_heads, group_size, head_dim, scale,
    )  # fmt: skip


@cache
def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there are kernels for matrix products: the processor needs instructions for bfloat16 (AVX-512, AMX)."""
    if dtype != torch.bfloat16 or reason_unavailable(dtype) is not None:
        return False
    library = _library(dtype)
    return hasattr(library, "can_multiply") and bool(library.can_multiply())


class TiledWeight:
    """A bfloat16 matrix [out_features, in_features] in the order in which `linear` reads it: see products.h.

    A `gated` one has gates in its upper half, and what they let pass in the lower; they alternate in memory, 16 by 16.
    """

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        num_rows, self.in_features = weight.shape
        self.gated = gated
        self.out_features = num_rows // 2 if gated else num_rows
        parts = weight.unflatten(0, (2, -1)) if gated else weight[None]
        width = 32 // len(parts)
        parts = F.pad(parts, (0, -self.in_features % 32, 0, -self.out_features % width))
        rows = parts.unflatten(1, (-1, width)).transpose(0, 1)  # [num_columns, parts, width, depth]
        columns = rows.reshape(rows.shape[0], 32, -1, 2)
        self.columns = columns.transpose(1, 2).contiguous()  # [num_columns, depth / 2, 32, 2]

    @staticmethod
    def can_hold(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[1] % 2 == 0 and can_multiply(weight.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [num_rows, in_features] to [num_rows, out_features]."""
        assert x.is_contiguous() and (bias is None or not self.gated)
        output = x.new_empty(x.shape[0], self.out_features)
        _call(_library(x.dtype).linear, x, self.columns, bias, None, output, *x.shape, self.out_features, self.gated)
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of the matrix that `ids` [num_rows] names, [num_rows, in_features]."""
        assert ids.is_contiguous() and not self.gated
        output = self.columns.new_empty(len(ids), self.in_features)
        _call(_library(output.dtype).gather_rows, self.columns, ids, output, *output.shape)
        return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm.RMSNorm of x [num_tokens, size]."""
    assert x.is_contiguous()
    output = x.new_empty(x.shape)
    num_tokens, size = x.shape
    _call(_library(x.dtype).rms_norm, x, weight, output, num_tokens, size, eps)
    return output


def rotary(x: Tensor, cos: Tensor, sin: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    """rotary.apply_rotary of x [num_tokens, num_heads, head_dim], whose tokens may lie apart."""
    assert x[:1].is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    output = x.new_empty(x.shape)
    num_tokens, num_heads, head_dim = x.shape
    _call(
        _library(x.dtype).rotary, x, cos, sin, norm_weight, output, num_tokens, x.stride(0), num_heads, head_dim // 2, eps
    )  # fmt: skip
    return output


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """silu of the first half of each token's numbers, times the second half."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    _call(_library(gate_up.dtype).silu_and_multiply, gate_up, output, num_tokens, size)
    return output


def sample(logits: Tensor, token_hashes: Tensor, noise_keys: Tensor | None, temperatures: Tensor | None) -> Tensor:
    """sampler.Sampler's draw: argmax of logits [num_rows, vocab_size] + temperature * noise, or -1, int64 [num_rows]."""
    logits = logits.contiguous()
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    _call(_library(logits.dtype).sample, logits, token_hashes, noise_keys, temperatures, tokens, *logits.shape)
    return tokens
