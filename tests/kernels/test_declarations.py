"""Python calls C++ functions, and fills C++ structs, as the headers declare them."""

import ctypes
import os
import shlex
import subprocess

import pytest
import torch
from kernel_helpers import needs_compiler

from nanovllm.kernels.cpu import declarations, library

STRUCTS = [
    declarations.Norm,
    declarations.Weight,
    declarations.Layer,
    declarations.Rope,
    declarations.Blocks,
    declarations.DeltaRule,
    declarations.DeltaLayer,
]


@needs_compiler
def test_structs_have_the_layout_of_the_compiler(tmp_path):
    lines = ["#include <cstddef>", f'#include "{library.SOURCE}"']
    for struct in STRUCTS:
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


def test_functions_take_the_types_of_the_header():
    source = """
extern "C" void scale(const float* x, float factor,
                      int64_t size) {
}

static void hidden(bool flag) {}
"""
    assert declarations.read_functions(source) == {
        "scale": [ctypes.c_void_p, ctypes.c_float, ctypes.c_int64]
    }
    with pytest.raises(TypeError, match="bool flag: Python passes only pointers, int64_t"):
        declarations.read_functions('extern "C" void scale(const float* x, bool flag) {')


@pytest.mark.parametrize("values", [{"weight": None}, {"weight": None, "eps": 1.0, "epsilon": 1.0}])
def test_a_struct_needs_a_value_for_each_field(values):
    with pytest.raises(TypeError, match=r"struct Norm has \['weight', 'size', .*\], not"):
        declarations.Norm(**values)
