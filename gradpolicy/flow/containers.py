"""Tensors within tuples, lists, dicts and dataclasses."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Any, cast

import torch
from torch import Tensor


def any_tensor(tensor: Tensor) -> bool:
    """Holds for every tensor."""
    return True


def map_tensors(
    function: Callable[[Tensor], Tensor], tree: Any, where: Callable[[Tensor], bool] = any_tensor
) -> Any:
    """Rebuilds nested tuples, lists, dicts and dataclasses with a function of some of their tensors.

    Args:
        function: What a tensor becomes.
        tree: The tensors.
        where: For which tensors. What holds none of them is given back as it is, the very object: a list
            that a module appends to stays the caller's.
    """
    if isinstance(tree, Tensor):
        return function(tree) if where(tree) else tree
    children = _children(tree)
    if not children or not any(_holds(child, where) for child in children):
        return tree
    return _rebuilt(tree, [map_tensors(function, child, where) for child in children])


def tensors_in(tree: Any) -> list[Tensor]:
    """Lists the tensors within nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for child in _children(tree) for tensor in tensors_in(child)]


def kinds_that_hide_tensors(tree: Any) -> set[str]:
    """Names the classes of objects within that hold tensors with a gradient, but are none of these."""
    children = _children(tree)
    if isinstance(tree, Tensor) or children:
        return set().union(*(kinds_that_hide_tensors(child) for child in children))
    held = list(tree) if isinstance(tree, Set | deque) else list(getattr(tree, "__dict__", {}).values())
    if any(isinstance(value, Tensor) and value.requires_grad for value in held):
        return {type(tree).__name__}
    return set()


def rebuilt_sequence(like: Any, items: list) -> Any:
    """A tuple or list of the kind of another one, also torch's own and named ones."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _holds(tree: Any, where: Callable[[Tensor], bool]) -> bool:
    if isinstance(tree, Tensor):
        return where(tree)
    return any(_holds(child, where) for child in _children(tree))


def _children(tree: Any) -> list:
    if type(tree) in (tuple, list):
        return list(tree)
    if type(tree) is dict:
        return list(tree.values())
    if _is_dataclass(tree):
        return [getattr(tree, name) for name in _fields(tree)]
    if isinstance(tree, Mapping):
        return list(tree.values())
    return list(tree) if isinstance(tree, tuple | list) else []


def _rebuilt(tree: Any, children: list) -> Any:
    if _is_dataclass(tree):
        return _rebuilt_dataclass(tree, dict(zip(_fields(tree), children, strict=True)))
    if isinstance(tree, Mapping):
        items = dict(zip(tree, children, strict=True))
        return items if type(tree) is dict else _rebuilt_mapping(tree, items)
    return rebuilt_sequence(tree, children)


def _rebuilt_mapping(tree: Mapping, items: dict) -> Any:
    try:
        rebuilt: Any = copy.copy(tree)
        for key, value in items.items():
            rebuilt[key] = value
    except TypeError:
        # One that cannot be written to, such as a types.MappingProxyType.
        return cast(Any, type(tree))(items)
    return rebuilt


def _rebuilt_dataclass(tree: Any, values: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():
        return dataclasses.replace(tree, **values)
    # Neither __init__ nor __post_init__ runs, and frozen ones are rebuilt too. Those that are dicts as well
    # (transformers' outputs) keep both in step by their own __setattr__.
    rebuilt = copy.copy(tree)
    write = setattr if isinstance(tree, Mapping) else object.__setattr__
    for name, value in values.items():
        write(rebuilt, name, value)
    return rebuilt


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(tree: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
