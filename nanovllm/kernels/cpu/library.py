"""Compiles and loads kernels.cpp: when first used, with the C++ compiler of this machine for its processor.

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
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import xxhash
from torch import Tensor

P, I, R = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "store_kvcache": [P, P, I, I, P, I, I, P, P],
    "decode_attention": [P, P, P, P, P, P, P, I, I, I, I, I, I, R],
    "prefill_attention": [P, P, P, P, P, P, P, I, I, I, I, I, I, R],
    "decoder_layers": [P, P, I, I, P, P, P, P, P, P, P, I, I, I, I, P],
    "all_reduce": [P, P, I],
    "gather": [P, P, P, I, I],
    "linear": [P, P, P, P, P, I, I, I, I, I, I],
    "rms_norm": [P, P, P, I, I, R],
    "cos_and_sin": [P, P, R, P, P, I, I],
    "rotary": [P, P, P, P, P, I, I, I, I, I, R],
    "silu_and_mul": [P, P, I, I],
    "gather_rows": [P, P, P, I, I],
    "filter_logits": [P, P, P, P, P, P, I, I],
    "sample": [P, P, P, P, P, I, I],
}
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
FLAGS += ["-mcpu=native" if platform.machine() == "arm64" else "-march=native"]  # arm64: a Mac, whose clang knows no other
LINK_FLAGS = ["-shared"]
if platform.machine() == "x86_64":
    FLAGS += ["-mprefer-vector-width=512"]
if sys.platform == "darwin":  # Apple's clang has OpenMP, but not its driver; its linker must be told of functions to come
    FLAGS += ["-Xclang", "-fopenmp"]
    LINK_FLAGS += ["-undefined", "dynamic_lookup"]
else:
    FLAGS += ["-fopenmp"]
DEFINES = {
    torch.float32: ["-DT=float"],
    torch.bfloat16: ["-DT=bfloat16", "-DT_IS_16_BITS", "-DT_IS_BFLOAT16"],
    torch.float16: ["-DT=float16", "-DT_IS_16_BITS"],
}


@cache
def reason_unavailable(dtype: torch.dtype) -> str | None:
    if dtype not in DEFINES:
        return f"there are no CPU kernels for {dtype}"
    try:
        load(dtype)
    except FileNotFoundError as error:
        return f"there is no C++ compiler: {error}"
    except subprocess.CalledProcessError as error:
        return f"the C++ compiler failed: {error.stderr.decode(errors='replace')}"
    except (OSError, ValueError) as error:  # CXX is no command, or the library cannot be loaded
        return str(error)
    return None


@cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    compiler = _find_compiler()
    target = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)  # version and processor features, as macros
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*")))
    name = f"cpu_kernels_{_digest(sources + target + repr((FLAGS, DEFINES[dtype])).encode())}"
    kept = _find_kept(name)
    library = _build(compiler, dtype, name) if kept is None else ctypes.CDLL(str(kept))
    for name, arguments in SIGNATURES.items():
        if function := getattr(library, name, None):  # products are for 16 bits: float32 is left to torch
            function.argtypes, function.restype = arguments, None
    return library


def _build(compiler: list[str], dtype: torch.dtype, name: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as scratch:
        unlinked, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _run(*compiler, *FLAGS, *DEFINES[dtype], "-c", str(SOURCE), "-o", str(unlinked))
        # Linked without OpenMP: its functions are found in the copy that torch has loaded, with torch's threads.
        _run(*compiler, *LINK_FLAGS, str(unlinked), "-o", str(linked))
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
    with suppress(OSError, RuntimeError):  # as if there were none: _keep will say why
        for path in _cache_folder().glob(f"{name}_*.so"):
            if path.stem == f"{name}_{_digest(path.read_bytes())}":
                return path
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


def call(function: Callable[..., None], *arguments: Tensor | int | float | None) -> None:
    """With tensors as pointers to their numbers."""
    function(*[argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments])
