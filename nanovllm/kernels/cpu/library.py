"""Compiles and loads kernels.cpp on first use, with this machine's C++ compiler for its processor.

This is not a torch extension, because torch's headers take half a minute to compile. The kernels
receive plain pointers through ctypes and compile in 5 to 9 s, on one core. An engine therefore
loads only the library of its dtype, when it starts. The library is cached in ~/.cache/nanovllm,
under a hash of the sources, flags, compiler and processor. If it cannot be cached, every start
compiles it. If it cannot be compiled, plain torch layers are used.
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
from functools import cache, partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from nanovllm.kernels.cpu.declarations import Struct, read_functions
from nanovllm.utils.helpers import report

SHORT_QUERY = 8  # tokens of a query that decode.h computes as separate decodes
SOURCE = Path(__file__).with_name("kernels.cpp")
DEFINES = {
    torch.float32: ["-DT=float"],
    torch.bfloat16: ["-DT=bfloat16", "-DT_IS_16_BITS", "-DT_IS_BFLOAT16"],
    torch.float16: ["-DT=float16", "-DT_IS_16_BITS"],
}


def _may_use_amx() -> bool:
    """Ask Linux to let this process use AMX, which a sandbox can deny."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    numbers = [ctypes.c_long(number) for number in (158, 0x1023, 18)]
    return ctypes.CDLL(None).syscall(*numbers) == 0


FLAGS = [
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    f"-DSHORT_QUERY={SHORT_QUERY}",
    # "arm64" is a Mac, whose clang does not know -march=native.
    "-mcpu=native" if platform.machine() == "arm64" else "-march=native",
]
LINK_FLAGS = ["-shared"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
if _may_use_amx():
    FLAGS.append("-DMAY_USE_AMX")
if sys.platform == "darwin":
    # Apple's clang has OpenMP, but its driver does not know the option.
    FLAGS.append("-Xclang")
    # Its linker rejects functions that are found at load time.
    LINK_FLAGS += ["-undefined", "dynamic_lookup"]
FLAGS.append("-fopenmp")


@cache
def reason_unavailable(dtype: torch.dtype) -> str | None:
    """Return why the kernels of `dtype` cannot be used here, or None."""
    try:
        load(dtype)
    except (OSError, ValueError) as error:
        compiler = os.environ.get("CXX", "c++")
        return (
            f"the C++ compiler {compiler!r} cannot build the CPU kernels"
            f" (set CXX to a C++20 compiler): {error}"
        )
    return None


@cache
def load(dtype: torch.dtype) -> ctypes.CDLL:
    """Return the kernels of `dtype`. Raises OSError or ValueError if there are none."""
    # Several words are allowed: "ccache g++".
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    # Its predefined macros name the version and the processor's features.
    target = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*")))
    digest = xxhash.xxh64_hexdigest(sources + target + repr((FLAGS, DEFINES[dtype])).encode())
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(caches, "nanovllm", f"cpu_kernels_{digest}.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # missing or damaged
        library = _build(compiler, dtype, path)
    for name, types in read_functions(sources.decode()).items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None
        setattr(library, name, partial(_call, function))
    return library


def _call(function: Callable[..., None], *arguments: object) -> None:
    """Call a C++ function. Structs and tensors, which must be contiguous, are passed as pointers.

    Pass data_ptr() of a tensor that is not contiguous. (A class with `from_param` could do the
    same, but ctypes would turn a KeyboardInterrupt within it into an error of its own.)
    """
    values: list[object] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous()
            values.append(argument.data_ptr())
        elif isinstance(argument, Struct):
            values.append(ctypes.addressof(argument))
        else:
            values.append(argument)
    function(*values)


def _build(compiler: list[str], dtype: torch.dtype, path: Path) -> ctypes.CDLL:
    """Compile the library, cache it at `path` if possible, and load it."""
    with tempfile.TemporaryDirectory() as scratch:
        unlinked = Path(scratch, "kernels.o")
        linked = Path(scratch, "kernels.so")
        _run(*compiler, *FLAGS, *DEFINES[dtype], "-c", str(SOURCE), "-o", str(unlinked))
        # Without OpenMP, so that its functions resolve to torch's copy, with torch's threads.
        _run(*compiler, *LINK_FLAGS, str(unlinked), "-o", str(linked))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Renaming within a directory is atomic: other processes see the whole file or none.
            with tempfile.TemporaryDirectory(dir=path.parent) as beside:
                linked = Path(shutil.copy(linked, beside)).replace(path)
        except OSError as error:  # no home, no permission, no space
            advice = "set XDG_CACHE_HOME to a writable directory"
            report(f"cannot cache the compiled CPU kernels ({error}): {advice}")
        return ctypes.CDLL(str(linked))


def _run(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True)
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace")
        raise OSError(f"{command[0]} exited with code {done.returncode}: {output}")
    return done.stdout
