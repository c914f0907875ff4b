"""Finds what a reader has changed in a layer, because kernels compute only what they know.

A kernel of a whole layer computes some of its parts without calling them. A subclass of a part, a
method that was replaced on an instance, and a hook would then have no effect.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


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
