"""The tensors in the *.safetensors files of a checkpoint.

If there is an index, the checkpoint has only the tensors that it lists. Files are mapped into
memory, so a tensor takes memory only while it is read. Of a float weight, a rank reads only its
shard. Codes are read whole.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.utils.checks import naming, show
from nanovllm.utils.helpers import read_json

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"  # a head that is not in the other files
MTP = "mtp."  # how the names of its tensors begin
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_DAMAGED = (SafetensorError, OSError)  # what safe_open raises


class TensorFiles:
    """Maps the names of tensors to their files.

    Raises ValueError if there are no files, if one is damaged, or if two have the same tensor.
    """

    def __init__(self, directory: Path, with_mtp_head: bool = False) -> None:
        """`with_mtp_head` also opens the head's own file, if the others do not have it."""
        self.directory = directory
        self._files: dict[Path, safe_open] = {}
        self._stored: dict[str, tuple[Path, str]] = {}  # file, and the name in it
        self._opened: set[str] = set()
        for path, listed in list_files(directory).items():
            self._add(path, listed)
        path = directory / MTP_FILE
        is_stored = any(name.startswith(MTP) for name in self._stored)
        if with_mtp_head and not is_stored and path.exists():
            self._add(path, None)

    def _add(self, path: Path, listed: set[str] | None) -> None:
        with naming(path, *_DAMAGED):
            self._files[path] = safe_open(path, framework="pt")
        for stored_name in self._files[path].keys():
            if listed is not None and stored_name not in listed:
                continue
            name = normalize(stored_name)
            if name in self._stored:
                raise ValueError(
                    f"{path}: {stored_name} repeats {self.locate(name)}: remove one of them"
                )
            self._stored[name] = (path, stored_name)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def list_names(self) -> list[str]:
        return list(self._stored)

    def list_unread(self) -> list[str]:
        """Return the names of tensors that were not opened, in their order."""
        return [name for name in self._stored if name not in self._opened]

    def locate(self, name: str) -> str:
        """Return the stored name of a tensor and its file, for a message."""
        path, stored_name = self._stored[name]
        return f"{stored_name} in {path.name}"

    def find_stored_dtype(self) -> torch.dtype:
        """Return the dtype of the embedding, or of the output head if that is stored in its place.

        Qwen3.5 stores a few small tensors in float32, and all others in 16 bits. If both have
        other names, the dtype is that of the first tensor of floats.
        """
        for name in (EMBEDDING, HEAD, *self._stored):
            if name in self:
                path, stored_name = self._stored[name]
                dtype = FLOATS.get(self._files[path].get_slice(stored_name).get_dtype())
                if dtype is not None:
                    return dtype
        raise ValueError(f"the checkpoint in {self.directory} has no tensor of floats")

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

    def has_same(self, given: "GivenTensors") -> bool:
        """Return whether the tensors that both have are equal."""
        for name in given.list_names():
            if name in self:
                tensor, stored = given.open(name).cpu(), self.read(name)
                if tensor.dtype.itemsize == 1:  # torch promotes no float8
                    tensor = tensor.float()
                dtype = torch.promote_types(tensor.dtype, stored.dtype)
                if not torch.equal(tensor.to(dtype), stored.to(dtype)):
                    return False
        return True


class GivenTensors(TensorFiles):
    """Tensors in memory, by the names that transformers gives them, in place of files.

    Raises ValueError if two have one name, and TypeError for anything but names and tensors.
    """

    MEANING = "a state dict, or pairs of a name and a tensor"

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.directory = Path("update_weights")  # in messages
        self._opened = set()
        self._stored = {}
        self._tensors: dict[str, Tensor] = {}
        for pair in tensors:
            match pair:
                case (str(stored_name), Tensor() as tensor):
                    name = normalize(stored_name)
                case _:
                    raise TypeError(f"tensors must be {self.MEANING}, not {show(pair)}")
            if name in self._tensors:
                raise ValueError(f"{stored_name} is given twice, or in two forms of its name")
            self._tensors[name] = tensor.detach()
            self._stored[name] = (self.directory, stored_name)

    def add_mtp_head(self, files: TensorFiles) -> None:
        """Add the MTP head of `files`, unless one is given. Models of transformers have none."""
        if any(name.startswith(MTP) for name in self._tensors):
            return
        for name in files.list_unread():
            if name.startswith(MTP):
                self._tensors[name] = files.read(name)
                self._stored[name] = (self.directory, name)

    def open(
        self, name: str, shape: list[int] | None = None, dtypes: Iterable[str] = FLOATS
    ) -> Tensor:
        tensor = self._tensors[name]
        self._opened.add(name)
        has_shape = shape is None or list(tensor.shape) == shape
        is_dense = tensor.layout == torch.strided and not tensor.is_meta
        if not (has_shape and is_dense and tensor.is_floating_point()):
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            if not is_dense:
                found += f", {tensor.layout} on {tensor.device}"
            needed = f"dense floats of shape {shape or list(tensor.shape)}"
            raise ValueError(f"tensor {name} is {found}, the model needs {needed}")
        return tensor


def open_weights(
    directory: Path, load_format: str, with_mtp_head: bool = False
) -> TensorFiles | None:
    """Open the tensors of a checkpoint. None: dummy weights need no files."""
    return None if load_format == "dummy" else TensorFiles(directory, with_mtp_head)


def normalize(stored_name: str) -> str:
    """Return the name that a tensor has in a model for text with a head.

    A model that was saved without its head has names without the prefix "model.". The text part of
    a model for images has the prefix "model.language_model.", or "language_model." before the whole
    name (Gemma 3). Stacked experts have no ".weight".
    """
    name = stored_name.removeprefix("language_model.")
    if not name.startswith(("model.", "lm_head.", "mtp.")):
        name = f"model.{name}"
    name = re.sub(r"^model\.language_model\.", "model.", name)
    return re.sub(r"(\.experts\.(?:gate_up|down)_proj)$", r"\1.weight", name)


def summarize(title: str, names: list[str]) -> str:
    """Return a line that names up to five."""
    shown = ", ".join(names[:5])
    return f"{title}: {shown}, ..." if len(names) > 5 else f"{title}: {shown}"


def list_files(directory: Path) -> Mapping[Path, set[str] | None]:
    """Map each file with weights to the tensors that count in it. None: all of them.

    An index lists files and their tensors. Without it, the weights are in model.safetensors, or
    else in its shards, or else in all *.safetensors. Raises ValueError if there are none, or if the
    index is damaged.
    """
    index = directory / INDEX
    if index.exists():
        return _read_index(index)
    for pattern in ("model.safetensors", "model-*.safetensors", "*.safetensors"):
        paths = sorted(directory.glob(pattern))
        if paths:
            return dict.fromkeys(paths)
    raise ValueError(
        f"{directory} contains no *.safetensors files: add them, or set load_format='dummy'"
        " for random weights"
    )


def _read_index(path: Path) -> dict[Path, set[str]]:
    """Read which tensors the index lists for each file."""
    weight_map: Any = read_json(path).get("weight_map")
    files: defaultdict[Path, set[str]] = defaultdict(set)
    problem = f"{path}: weight_map must be an object that maps tensors to files"
    with naming(problem, AttributeError, TypeError):
        for tensor, name in weight_map.items():
            files[path.parent / name].add(tensor)
    return files
