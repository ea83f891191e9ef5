"""Tensors in tuples, lists, dicts and dataclasses."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor


def map_tensors(
    function: Callable[[Tensor], Tensor], values: Any, where: Callable[[Tensor], bool] = torch.is_tensor
) -> Any:
    """Apply a function to the tensors in nested tuples, lists, dicts and dataclasses.

    Args:
        function: Returns the replacement of a tensor.
        values: A tensor, a container, or any other object.
        where: Returns True for tensors to replace. A container without such tensors is returned unchanged,
            not copied, so that a module can append to the caller's list.
    """
    if isinstance(values, Tensor):
        return function(values) if where(values) else values
    if not any(where(tensor) for tensor in tensors_in(values)):
        return values
    items = _items(values).items()
    return _rebuilt(values, {key: map_tensors(function, child, where) for key, child in items})


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(values, Tensor):
        return [values]
    return [tensor for child in _items(values).values() for tensor in tensors_in(child)]


def tensors_of_call(args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a torch function, and in its lists, in order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found


def classes_that_hide_tensors(values: Any) -> set[str]:
    """Return the classes of objects in nested containers whose tensors :func:`tensors_in` does not find.

    These are iterators, and all other objects whose attributes or items are tensors that require a gradient.
    """
    if isinstance(values, Tensor):
        return set()
    if children := _items(values):
        return set().union(*map(classes_that_hide_tensors, children.values()))
    if isinstance(values, Set | deque):
        found = list(values)
    else:
        names = (*getattr(values, "__dict__", ()), *getattr(type(values), "__slots__", ()))
        found = [getattr(values, name, None) for name in names]
    hides = isinstance(values, Iterator) or any(tensor.requires_grad for tensor in tensors_in(found))
    return {type(values).__name__} if hides else set()


def replace_at(values: Any, key: int | str, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a container or object with the value at one key replaced.

    Args:
        values: A tuple, list, dict, dataclass or any other object with attributes.
        key: A key, an attribute or an index.
        function: Returns the replacement of the value.

    Raises:
        LookupError: If there is no such key; its argument is the list of all keys.
    """
    children = _items(values)
    if not children and isinstance(key, str):
        children = getattr(values, "__dict__", {})
    names = list(children)
    if key not in children:
        if not isinstance(key, int) or not -len(names) <= key < len(names):
            raise LookupError(names)
        key = names[key]
    return _rebuilt(values, {**children, key: function(children[key])})


def rebuilt_sequence(like: Any, items: list) -> Any:
    """Return a tuple or list of the class of another one, which may be a named tuple or one of torch's."""
    is_named = hasattr(like, "_fields") and type(like).__module__ != "torch.return_types"
    return type(like)(*items) if is_named else type(like)(items)


def _items(values: Any) -> dict[Any, Any]:
    """Return the items of a container by key, attribute or index; an empty dict for other objects."""
    if _is_dataclass(values):
        names = [field.name for field in dataclasses.fields(values)]
        return {name: getattr(values, name) for name in names if hasattr(values, name)}
    if isinstance(values, Mapping):
        return dict(values)
    if not isinstance(values, tuple | list):
        return {}
    return dict(zip(getattr(values, "_fields", range(len(values))), values, strict=True))


def _rebuilt(values: Any, children: dict[Any, Any]) -> Any:
    """Return a container, or an object with attributes, of the class of another one with other children."""
    if isinstance(values, tuple | list):
        return rebuilt_sequence(values, list(children.values()))
    if type(values) is dict:
        return children
    if torch.compiler.is_compiling() and _is_dataclass(values):
        return dataclasses.replace(values, **children)
    # Without __init__ and __post_init__, and also for frozen dataclasses. Dataclasses that are dicts too
    # (outputs of transformers) update their items in __setattr__.
    rebuilt: Any = copy.copy(values)
    if isinstance(values, Mapping) and not _is_dataclass(values):
        rebuilt.update(children)
        return rebuilt
    write = setattr if isinstance(values, Mapping) else object.__setattr__
    for name, value in children.items():
        write(rebuilt, name, value)
    return rebuilt


def _is_dataclass(values: Any) -> bool:
    # torch 2.11 cannot compile `dataclasses.is_dataclass`, nor `hasattr` of a slice.
    return not isinstance(values, slice | type) and hasattr(values, "__dataclass_fields__")
