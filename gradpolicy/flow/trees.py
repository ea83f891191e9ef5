"""Tensors within tuples, lists, dicts and dataclasses."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Rebuilds nested tuples, lists, dicts and dataclasses with a function of each tensor.

    What holds no tensor that changes is given back as it is, the very object.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_fields(function, tree)
    if isinstance(tree, Mapping):
        return _map_mapping(function, tree)
    if isinstance(tree, tuple | list):
        items = [map_tensors(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def tensors_in(tree: Any) -> list[Tensor]:
    """Lists the tensors within nested tuples, lists, dicts and dataclasses, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def _map_mapping(function: Callable[[Tensor], Tensor], tree: Mapping) -> Any:
    items = {key: map_tensors(function, value) for key, value in tree.items()}
    if all(items[key] is tree[key] for key in items):
        return tree
    if type(tree) is dict:
        return items
    rebuilt: Any = copy.copy(tree)
    for key, value in items.items():
        rebuilt[key] = value
    return rebuilt


def _map_fields(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    values = {
        field.name: map_tensors(function, getattr(tree, field.name))
        for field in dataclasses.fields(tree)
        if hasattr(tree, field.name)
    }
    changed = {name: value for name, value in values.items() if value is not getattr(tree, name)}
    if not changed:
        return tree
    if torch.compiler.is_compiling():
        return dataclasses.replace(tree, **changed)
    # Neither __init__ nor __post_init__ runs, and frozen ones are rebuilt too. Those that are dicts as well
    # (transformers' outputs) keep both in step by their own __setattr__.
    rebuilt = copy.copy(tree)
    write = setattr if isinstance(tree, Mapping) else object.__setattr__
    for name, value in changed.items():
        write(rebuilt, name, value)
    return rebuilt
