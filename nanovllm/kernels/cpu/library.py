"""Compiles and loads kernels.cpp: when first used, with the C++ compiler of this machine for its processor.

Not an extension module of torch, whose headers take half a minute to compile: the kernels get plain pointers through
ctypes and are ready in a second. The library is kept in ~/.cache/nanovllm under a name that says what it was made of: the
sources, the flags, the compiler and the processor. Where it cannot be kept, it is compiled at each start; where it cannot be
compiled, the layers compute the same with torch.
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
import xxhash
from torch import Tensor

KINDS = {"P": ctypes.c_void_p, "I": ctypes.c_int64, "F": ctypes.c_float}
SIGNATURES = {  # of the functions of kernels.cpp: pointers, int64_t and float
    "store_kvcache": "PPIIPIIPP", "decode_attention": "PPPPPPPIIIIIIF", "prefill_attention": "PPPPPPPIIIIIIF",
    "decoder_layers": "PPIIPPPPPPPIIIIPI", "linear": "PPPPPIIIIII", "gather_rows": "PPPII",
    "rms_norm": "PPPIIF", "layer_norm": "PPPPIIF", "cos_and_sin": "PPFPPII", "rotary": "PPPPPIIIIIF",
    "silu_and_mul": "PPII", "relu": "PII", "filter_logits": "PPPPPPPIII", "sample": "PPPPPII",
    "all_reduce": "PPI", "gather": "PPPII",
}  # fmt: skip
SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
FLAGS += [
    "-mcpu=native" if platform.machine() == "arm64" else "-march=native"
]  # arm64: a Mac, whose clang knows no other
FLAGS += ["-mprefer-vector-width=512"] * (platform.machine() == "x86_64")
FLAGS += (
    ["-Xclang", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]
)  # Apple's clang has OpenMP, but not its driver
LINK_FLAGS = [
    "-shared",
    *["-undefined", "dynamic_lookup"] * (sys.platform == "darwin"),
]  # its linker asks for what is to come
DEFINES = {
    torch.float32: ["-DT=float"],
    torch.bfloat16: ["-DT=bfloat16", "-DT_IS_16_BITS", "-DT_IS_BFLOAT16"],
    torch.float16: ["-DT=float16", "-DT_IS_16_BITS"],
}


@cache
def reason_unavailable(dtype: torch.dtype) -> str | None:
    try:
        load(dtype)
    except (
        OSError,
        ValueError,
    ) as error:  # CXX is no command, or it fails, or what it makes cannot be loaded
        return f"the C++ compiler {os.environ.get('CXX', 'c++')!r} made no CPU kernels: {error}"
    return None


@cache
def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there are kernels for matrix products: unless the system keeps a processor's AMX to itself."""
    return reason_unavailable(dtype) is None and bool(load(dtype).can_multiply())


@cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """The kernels of that dtype. Raises OSError or ValueError if there are none."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [
        "c++"
    ]  # it may have several words: "ccache g++"
    target = _run(
        *compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull
    )  # version and processor features, as macros
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*")))
    digest = xxhash.xxh64_hexdigest(sources + target + repr((FLAGS, DEFINES[dtype])).encode())
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(caches, "nanovllm", f"cpu_kernels_{digest}.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # it is not there, or damaged
        library = _build(compiler, dtype, path)
    for name, kinds in SIGNATURES.items():
        if function := getattr(library, name, None):  # a test's stand-in lacks them
            function.argtypes, function.restype = [KINDS[kind] for kind in kinds], None
    return library


def _build(compiler: list[str], dtype: torch.dtype, path: Path) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as scratch:
        unlinked, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
        _run(*compiler, *FLAGS, *DEFINES[dtype], "-c", str(SOURCE), "-o", str(unlinked))
        # Linked without OpenMP: its functions are found in the copy that torch has loaded, with torch's threads.
        _run(*compiler, *LINK_FLAGS, str(unlinked), "-o", str(linked))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                dir=path.parent
            ) as place:  # other processes see the whole library or none
                linked = Path(shutil.copy(linked, place)).replace(path)
        except OSError as error:  # no home, no permission, no space
            print(
                f"nanovllm: the CPU kernels will be compiled again next time: {error}",
                file=sys.stderr,
            )
        return ctypes.CDLL(str(linked))  # once it is loaded, its file may go


def _run(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise OSError(f"it failed: {done.stderr.decode(errors='replace')}")
    return done.stdout


def call(function: Callable[..., None], *arguments: object) -> None:
    """With tensors as pointers to their numbers, which must be contiguous; for one that is not, pass its pointer."""
    assert all([argument.is_contiguous() for argument in arguments if isinstance(argument, Tensor)])
    function(
        *[
            argument.data_ptr() if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
    )
