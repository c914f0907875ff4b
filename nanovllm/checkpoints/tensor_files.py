"""The tensors in the *.safetensors files of a checkpoint.

If there is an index, the checkpoint has only the tensors that it lists. Files are mapped into
memory, so a tensor takes memory only while it is read. Of a float weight, a rank reads only its
shard. Codes are read whole, and of stacked experts one matrix at a time.

Some checkpoints stack the weights of all experts into one tensor. Each of its matrices then has the
name that it has in other checkpoints, and is read alone.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.utils.checks import naming
from nanovllm.utils.helpers import read_json

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
_DAMAGED = (SafetensorError, OSError)  # what safe_open raises
_STACKED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj(_scale_inv)?")


@dataclass(frozen=True)
class StackedMatrix:
    """Rows of one expert in a stacked tensor, with the methods of a safetensors slice."""

    stacked: Any  # the slice of the whole tensor [num_experts, num_rows, num_columns]
    expert: int
    rows: slice

    def get_shape(self) -> list[int]:
        return [self.rows.stop - self.rows.start, self.stacked.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.stacked.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        return self.stacked[self.expert, self.rows][index]


class TensorFiles:
    """Maps the names of tensors to their files.

    Raises ValueError if there are no files, if the index is damaged or does not match, or if two
    files have the same tensor.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, safe_open] = {}
        self._stored: dict[str, tuple[Path, str]] = {}  # file, and the name in it
        self._matrices: dict[str, tuple[int, slice]] = {}  # expert and rows in a stacked tensor
        self._opened: set[str] = set()
        repeated: list[str] = []
        for path, listed in list_files(directory).items():
            with naming(path, *_DAMAGED):
                self._files[path] = safe_open(path, framework="pt")
            names = self._files[path].keys()
            missing = sorted((listed or set()).difference(names))
            if missing:
                problem = summarize(f"missing tensors, which {INDEX} lists", missing)
                raise ValueError(f"{path}: {problem}")
            for stored_name in names:
                if listed is not None and stored_name not in listed:
                    continue
                for name in self._find_names(path, stored_name):
                    if name in self._stored:
                        repeated.append(f"{self.locate(name)} and {stored_name} in {path.name}")
                    self._stored[name] = (path, stored_name)
        if repeated:
            problem = summarize("repeated tensors", repeated)
            raise ValueError(f"the checkpoint in {directory} is ambiguous: {problem}")

    def _find_names(self, path: Path, stored_name: str) -> list[str]:
        """Return the name of a tensor, or those of its matrices if it is a stacked one."""
        name = _normalize(stored_name)
        match = _STACKED_EXPERTS.fullmatch(name)
        shape = self._files[path].get_slice(stored_name).get_shape() if match else []
        if match is None or len(shape) != 3:
            return [name]
        key = f"weight{match[3] or ''}"
        matrices = _divide_experts(match[1], match[2], key, shape)
        self._matrices.update(matrices)
        return list(matrices)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def list_unread(self) -> list[str]:
        """Return the names of tensors that were not opened, in their order."""
        return [name for name in self._stored if name not in self._opened]

    def locate(self, name: str) -> str:
        """Return the stored name of a tensor and its file, for a message."""
        path, stored_name = self._stored[name]
        return f"{stored_name} in {path.name}"

    def find_stored_dtype(self) -> torch.dtype | None:
        """Return the dtype of the first tensor that stores floats of 16 or 32 bits.

        Embeddings come first, because Qwen3.5 stores a few small tensors in float32, and all others
        in 16 bits.
        """
        names = sorted(self._stored, key=lambda name: not name.endswith("embed_tokens.weight"))
        for path, stored_name in [self._stored[name] for name in names]:
            with naming(path, *_DAMAGED):
                dtype = self._files[path].get_slice(stored_name).get_dtype()
            if dtype in FLOATS:
                return FLOATS[dtype]
        return None

    def read(
        self, name: str, shape: list[int] | None = None, dtypes: Iterable[str] = FLOATS
    ) -> Tensor:
        """As `open`, for a whole tensor."""
        return self.open(name, shape, dtypes)[...]

    def open(
        self, name: str, shape: list[int] | None = None, dtypes: Iterable[str] = FLOATS
    ) -> Any:
        """Check a tensor without reading it. Index the result by slices to read a part.

        Raises ValueError if it is missing, or has another shape than `shape` or another dtype.
        """
        if name not in self:
            raise ValueError(f"the checkpoint in {self.directory} has no tensor {name}")
        path, stored_name = self._stored[name]
        self._opened.add(name)
        with naming(path, *_DAMAGED, ValueError):
            stored: Any = self._files[path].get_slice(stored_name)
            if name in self._matrices:
                stored = StackedMatrix(stored, *self._matrices[name])
            if shape is not None and stored.get_shape() != shape:
                raise ValueError(
                    f"tensor {stored_name} has shape {stored.get_shape()}, the model needs {shape}"
                )
            if stored.get_dtype() not in dtypes:
                raise ValueError(
                    f"tensor {stored_name} is stored as {stored.get_dtype()}: supported dtypes are"
                    f" {', '.join(dtypes)}"
                )
        return stored


def open_weights(directory: Path, load_format: str) -> TensorFiles | None:
    """Open the tensors of a checkpoint. None: dummy weights need no files."""
    return None if load_format == "dummy" else TensorFiles(directory)


def _normalize(stored_name: str) -> str:
    """Return the name that a tensor has in a model for text with a head.

    A model that was saved without its head has names without the prefix "model.". The text part of
    a model for images has the prefix "model.language_model.", or "language_model." before the whole
    name (Gemma 3), and OPT has "model.decoder.".
    """
    name = stored_name.removeprefix("language_model.")
    if not name.startswith(("model.", "lm_head.", "mtp.")):
        name = f"model.{name}"
    return re.sub(r"^model\.(language_model|decoder)\.", "model.", name)


def _divide_experts(
    layer: str, kind: str, key: str, shape: list[int]
) -> dict[str, tuple[int, slice]]:
    """Return the matrices in a stacked tensor, by the names that they have as tensors.

    With gate_up_proj, the first half of an expert's rows is gate_proj, and the second up_proj.
    """
    num_experts, num_rows, _ = shape
    half = num_rows // 2
    parts = {"down": slice(0, num_rows)}
    if kind == "gate_up":
        parts = {"gate": slice(0, half), "up": slice(half, num_rows)}
    return {
        f"{layer}.{expert}.{part}_proj.{key}": (expert, rows)
        for expert in range(num_experts)
        for part, rows in parts.items()
    }


def summarize(title: str, names: list[str]) -> str:
    """Return a line that names up to five."""
    shown = ", ".join(names[:5])
    return f"{title}: {shown}, ..." if len(names) > 5 else f"{title}: {shown}"


def list_files(directory: Path) -> dict[Path, set[str] | None]:
    """Map each file with weights to the tensors that count in it. None: all of them.

        index                                      files
        lists files, and all are there             these, with the tensors that it lists
        lists a missing file, as the result of a   model.safetensors
        later save as one file
        lists a missing file, otherwise            an error
        none                                       model.safetensors, or else its shards, or else
                                                   all *.safetensors

    save_pretrained removes the shards of an earlier save, but not their index. Raises ValueError
    that names the index if it is damaged, and if there are no files.
    """
    index = directory / INDEX
    if index.exists():
        files = _read_index(index)
        missing = [file.name for file in files if not file.is_file()]
        if not missing:
            return files
        if not (directory / "model.safetensors").is_file():
            raise ValueError(f"{index} lists {missing[0]!r}, but there is no such file: add it")
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        paths = sorted(directory.glob(pattern))
        if paths:
            return dict.fromkeys(paths)
    raise ValueError(
        f"{directory} contains no *.safetensors files: add them, or set load_format='dummy'"
        " for random weights"
    )


def _read_index(path: Path) -> dict[Path, set[str] | None]:
    """Read which tensors the index lists for each file."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must be an object that maps tensors to files")
    files: defaultdict[str, set[str]] = defaultdict(set)
    for tensor, name in weight_map.items():
        # A path could lead out of the checkpoint.
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise ValueError(f"{path}: the file of {tensor} must be a file's name, not {name!r}")
        files[name].add(tensor)
    return {path.parent / name: files[name] for name in sorted(files)}
