"""Replaces a layer of a live model by an optimized subclass: `layer.__class__ = FastRMSNorm`.

layers/ and models/ make the model and load its weights, and do not know this package. Afterwards a
layer object changes its class. Its weights, its hooks and its place in the model stay as they are,
and no constructor runs again. This is safe under four rules:

1. The object is of exactly the class that the subclass replaces, and no attribute of it hides one
   of its class. Otherwise code of a reader, a subclass or a patched method, would have no effect.
2. `convert` runs once, after the assignment, in place of a constructor. It makes the attributes
   that the subclass adds, unless the first step makes them. If this subclass cannot replace this
   layer, it returns False before it has changed anything, and the object gets its class back.
3. A subclass that computes parts of the layer without calling them names them in `parts`. A
   subclass of a part, a method that was replaced on it, or a hook would otherwise have no effect.
   The first two prevent the replacement, and parts are called while they have hooks.
4. `uninstall` gives a layer its class back if a check fails. Checks run on a GPU only. A layer for
   GPUs therefore keeps all tensors of the layer it replaces. One for CPUs may release them.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property, reduce
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module


class OptimizedLayer(nn.Module):
    """Mixin for an optimized subclass of a layer. The last base is the class that it replaces."""

    replaces: ClassVar[type[nn.Module]]  # exactly this class, and no subclass of it
    # The parts that it computes without calling them, as in `has_parts`, with optimized classes.
    parts: ClassVar[Mapping[str, Any]] = {}
    dtype: torch.dtype  # the model's, set by `install`

    def __init_subclass__(cls) -> None:
        cls.replaces = cls.__bases__[-1]

    def convert(self) -> bool:
        """Convert the weights of a layer whose class was just replaced.

        Return False, and change nothing, if this subclass cannot replace the layer.
        """
        return has_parts(self, self.parts)

    @cached_property
    def hooks(self) -> list[Mapping[int, Any]]:
        """Where hooks of its parts are registered. While there are any, it must call its parts."""
        return list_hooks(self)


def install(kinds: Iterable[type[OptimizedLayer]], layer: nn.Module, dtype: torch.dtype) -> None:
    """Replace the class of a layer by the one of `kinds` that can replace it, if there is one."""
    original = type(layer)
    for kind in kinds:
        if kind.replaces is original and not has_overrides(layer):
            layer.__class__ = kind
            converted = cast(OptimizedLayer, layer)
            converted.dtype = dtype
            if converted.convert():
                return
            uninstall(layer)


def uninstall(layer: nn.Module) -> None:
    """Give an optimized layer back the class that was replaced."""
    layer.__class__ = cast(OptimizedLayer, layer).replaces


def has_overrides(layer: object) -> bool:
    """Return whether an attribute of this instance hides one of its class, such as `forward`."""
    return any([hasattr(type(layer), name) for name in vars(layer)])


def has_parts(layer: nn.Module, parts: Mapping[str, Any]) -> bool:
    """Return whether calls of these parts of a layer run the code of these classes and no other.

    `parts` maps the path of a part, "" for the layer itself, to its class or a tuple of classes.
    Parents come before their parts.
    """
    for path, kinds in parts.items():
        part = reduce(getattr, filter(None, path.split(".")), layer)
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(part) not in allowed or (part is not None and has_overrides(part)):
            return False
    return True


def list_hooks(module: nn.Module) -> list[Mapping[int, Any]]:
    """Return the dicts that receive the forward hooks of a module and of all its parts."""
    hooks: list[Mapping[int, Any]] = [
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
    ]
    for part in module.modules():
        hooks += [part._forward_pre_hooks, part._forward_hooks]
    return hooks
