"""Reads what the C++ headers declare for Python, so that nothing is declared twice.

A function for Python is `extern "C" void name(parameters)`. A struct for Python has its fields
first, one on a line, up to an empty line or its end. Parameters and fields are pointers, int64_t,
float, or a struct below: any other type is a KeyError. ctypes lays fields out as the C++ compiler
does. Only the enums Gate and NormKind are declared again, in linear.py and norm.py.
"""

import ctypes
import re
from pathlib import Path
from typing import Any

from torch import Tensor

_SOURCE = "".join(path.read_text() for path in Path(__file__).parent.glob("*.h"))

_types: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float}


class Struct(ctypes.Structure):
    """A C struct. A tensor is passed as a pointer.

    What the struct was made of is kept, because layers can be replaced, and because a struct within
    another one is a copy. With a `source`, fields that are not given are its attributes of the same
    names. Without one, they are 0 or null.
    """

    def __init__(self, source: object = None, **values: Any) -> None:
        super().__init__()
        self.kept: list[Any] = []
        for name, *_ in self._fields_:
            if name in values:
                value = values.pop(name)
            elif source is not None:
                value = getattr(source, name)
            else:
                continue
            if isinstance(value, Tensor):
                assert value.is_contiguous(), name
                self.kept.append(value)
                value = value.data_ptr()
            elif isinstance(value, Struct):
                self.kept.append(value)
            setattr(self, name, value)
        assert not values, values  # ctypes ignores typos


def read_functions(source: str) -> dict[str, list[Any]]:
    """Map the names of the functions for Python to the types of their parameters."""
    functions = re.findall(r'^extern "C" void (\w+)\((.*?)\)', source, re.MULTILINE | re.DOTALL)
    return {name: [*_find_types(parts.split(",")).values()] for name, parts in functions}


def read_struct(name: str) -> type[Struct]:
    """Return a struct of the headers. The structs in it must have been read before."""
    pattern = rf"^struct {name} {{[^\n]*\n(.*?)\n(?:\n|}};)"
    (body,) = re.findall(pattern, _SOURCE, re.MULTILINE | re.DOTALL)
    fields = _find_types([line.partition(";")[0] for line in body.splitlines()])
    _types[name] = type(name, (Struct,), {"_fields_": [*fields.items()]})
    return _types[name]


def _find_types(declarations: list[str]) -> dict[str, Any]:
    """Map names to types, for declarations such as `const T* x` or `int64_t num_rows`."""
    types: dict[str, Any] = {}
    for declaration in declarations:
        *_, kind, name = declaration.split()
        types[name] = ctypes.c_void_p if "*" in declaration else _types[kind]
    return types


Norm = read_struct("Norm")
Rope = read_struct("Rope")
Heads = read_struct("Heads")
Sequences = read_struct("Sequences")
Weight = read_struct("Weight")
Layer = read_struct("Layer")
DeltaRule = read_struct("DeltaRule")
DeltaLayer = read_struct("DeltaLayer")
