"""Python calls C++ functions, and fills C++ structs, as the headers declare them."""

import ctypes
import os
import shlex
import subprocess

import torch
from kernel_helpers import needs_compiler

from nanovllm.kernels.cpu import declarations, library


@needs_compiler
def test_structs_have_the_layout_of_the_compiler(tmp_path):
    lines = ["#include <cstddef>", f'#include "{library.SOURCE}"']
    for struct in declarations.Struct.__subclasses__():
        size = ctypes.sizeof(struct)
        lines.append(f"static_assert(sizeof({struct.__name__}) == {size});")
        for name, _ in struct._fields_:
            offset = getattr(struct, name).offset
            lines.append(f"static_assert(offsetof({struct.__name__}, {name}) == {offset});")
    source = tmp_path / "layouts.cpp"
    source.write_text("\n".join(lines))
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    options = [*library.FLAGS, *library.DEFINES[torch.float32], "-fsyntax-only"]
    done = subprocess.run([*compiler, *options, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
