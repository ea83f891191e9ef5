"""Layers of a model, and the base class of sources that freeze layers."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import Layer
from gradpolicy.where import as_patterns, match_names

Groups = Mapping[str, str | Iterable[str]] | Iterable[str | Iterable[str]] | None
"""Groups of parameters from the input to the output, as globs with or without names; None: the layers."""

# The names of the experts and routers of a mixture-of-experts block.
_EXPERTS = "experts"
_ROUTERS = ("gate", "router")


def names_in(layers: Iterable[Layer]) -> set[str]:
    """Return the names of the parameters in layers."""
    return {name for layer in layers for name in layer.parameters}


def join_layers(layers: Collection[Layer]) -> Layer:
    """Join neighbouring layers."""
    return Layer(
        "+".join(layer.name for layer in layers),
        tuple(name for layer in layers for name in layer.parameters),
        all(layer.numbered for layer in layers),
    )


def find_layers(parameters: Mapping[str, Tensor], idle: Collection[str] = ()) -> list[Layer]:
    """Group parameters into layers, from the input to the output, by the model's own blocks.

    Sibling modules whose names differ only in a number (``layers.0`` and ``layers.1``, ``layer1`` and
    ``layer2``, ``encoder_layer_0``) are a stack if two of them have at least two weights of the same names.
    The members of a stack are blocks; but a member that consists mainly of blocks, such as a stage of a
    network, is replaced by these. The ``experts`` of a block are a separate layer, and so is the router next
    to them (``gate`` or ``router``).

    Layers outside of the blocks have ``numbered=False``. All parameters before the first block are one layer
    (a stem, the embeddings), and so are all between two blocks. After the last block each module with a
    weight is a layer (a pooler, the head). Norms are no layers: the last one belongs to the head.

    In a model without stacks the layers are its numbered modules, or else all modules, each with the norms
    after it.

    Args:
        parameters: The parameters by name, in model order.
        idle: The names of parameters that are left out of the layers, unless they are all.

    Example:
        >>> import torch
        >>> names = ["embed.weight", "h.0.w", "h.0.v", "h.1.w", "h.1.v", "norm.weight", "head.weight"]
        >>> shapes = {name: (2,) if name == "norm.weight" else (2, 2) for name in names}
        >>> layers = find_layers({name: torch.zeros(shape) for name, shape in shapes.items()})
        >>> [(layer.name, layer.numbered) for layer in layers]
        [('embed', False), ('h.0', True), ('h.1', True), ('norm+head', False)]
    """
    # If all parameters are vectors, for example biases, they count as weights.
    weights = {name for name, parameter in parameters.items() if parameter.ndim > 1} or set(parameters)
    blocks = _with_experts(set(_blocks(parameters, weights)), parameters)
    if blocks:
        found = {name: [each for each in _prefixes(name) if each in blocks] for name in parameters}
        layer_of = {name: inside[-1] if inside else None for name, inside in found.items()}
    else:
        layer_of = {name: _numbered(name) for name in parameters}
        if not any(layer_of.values()):
            layer_of = {name: _module(name) for name in parameters}
    counted = parameters.keys() - idle or parameters
    return _in_order(
        {name: layer for name, layer in layer_of.items() if name in counted}, weights, norms_join=not blocks
    )


def read_groups(key: str, groups: Groups) -> dict[str, tuple[str, ...]] | None:
    """Return the globs of groups of parameters by the name of the group; None if ``groups`` is None.

    Args:
        key: The name of the argument, for errors.
        groups: A mapping of names to globs, or a list of groups of one or more globs.

    Raises:
        PolicyError: If it is neither, there is no group, a group is empty, or two are the same.
    """
    if groups is None:
        return None
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise PolicyError(
            f"{key}: must map names to globs, or be a list of groups, each a glob or a list of them, "
            f"got {shown(groups)}"
        )
    named = groups if isinstance(groups, Mapping) else {}
    globs = [as_patterns(group) for group in (named.values() if named else groups)]
    if not globs or not all(globs):
        raise PolicyError(
            f"{key}: must name at least one glob in each of one group or more, got {shown(globs)}"
        )
    names = [str(name) for name in named] or ["+".join(map(str, each)) for each in globs]
    if len(set(names)) < len(names):
        raise PolicyError(f"{key}: must name each group once, got {shown(names)}")
    return dict(zip(names, globs, strict=True))


def layers_of(
    key: str, groups: Mapping[str, tuple[str, ...]], names: Iterable[str], *, complete: bool = False
) -> list[Layer]:
    """Return a layer for each group, with the parameters that match its globs.

    Args:
        key: The name of the argument, for errors.
        groups: The globs of each group.
        names: The names of all parameters.
        complete: True if each parameter must be in a group.

    Raises:
        PolicyError: If a glob matches nothing, a parameter is in two groups, or, with ``complete``, in none.
    """
    names = list(names)
    found = [
        Layer(group, tuple(match_names(globs, names, "parameter")), True) for group, globs in groups.items()
    ]
    members = Counter(name for layer in found for name in layer.parameters)
    for name in names:
        if members[name] > 1 or (complete and not members[name]):
            raise PolicyError(f"{key}: {shown(name)} must be in one group, not {members[name]}")
    return found


def _blocks(parameters: Mapping[str, Tensor], weights: set[str], parent: str = "") -> list[str]:
    """Return the blocks in a module: members of stacks, or the blocks of which these consist."""
    children: dict[str, dict[str, Tensor]] = {}
    for name, parameter in parameters.items():
        child, dot, _ = name.removeprefix(parent).partition(".")
        if dot and child != _EXPERTS:
            children.setdefault(parent + child, {})[name] = parameter
    stacks: dict[str, list[str]] = {}
    for child in children:
        if number := re.search(r"\d+$", child):
            stacks.setdefault(child[: number.start()], []).append(child)
    weights_of = {child: weights.intersection(inside) for child, inside in children.items()}
    members = {member for stack in stacks.values() if _alike(stack, weights_of) for member in stack}
    found = []
    for child, inside in children.items():
        below = _blocks(inside, weights, f"{child}.")
        parts = [name for name in inside if any(name.startswith(f"{each}.") for each in below)]
        mostly = 2 * _entries(inside, parts) > _entries(inside, inside)
        found += [child] if child in members and not mostly else below
    return found


def _alike(modules: Iterable[str], weights: Mapping[str, set[str]]) -> bool:
    """Return True if two of the modules have at least two weights of the same names."""
    names = [{name.removeprefix(module) for name in weights[module]} for module in modules]
    return any(len(one & other) > 1 for one, other in itertools.combinations(names, 2))


def _entries(parameters: Mapping[str, Tensor], names: Iterable[str]) -> int:
    return sum(parameters[name].numel() for name in names)


def _with_experts(blocks: set[str], parameters: Iterable[str]) -> set[str]:
    """Add the experts and routers in blocks as separate blocks."""
    inside = [name for name in parameters if not blocks.isdisjoint(_prefixes(name))]
    parents = {name.partition(f".{_EXPERTS}.")[0] for name in inside if f".{_EXPERTS}." in name}
    return blocks | {f"{parent}.{part}" for parent in parents for part in (_EXPERTS, *_ROUTERS)}


def _in_order(layer_of: Mapping[str, str | None], weights: set[str], *, norms_join: bool) -> list[Layer]:
    """Return the layers, including those outside of blocks, from the input to the output.

    Args:
        layer_of: The block of each parameter in model order; None outside of blocks.
        weights: The names of parameters that are not vectors.
        norms_join: True if layers without a weight are joined to the layer before.
    """
    blocks = {block for block in layer_of.values() if block}
    above = {prefix for name, block in layer_of.items() if block for prefix in _prefixes(name)}
    units: dict[str, list[str]] = {}
    for name, block in layer_of.items():
        # Outside of blocks: the outermost module that contains no block.
        unit = block or next(prefix for prefix in _prefixes(name) if prefix not in above)
        units.setdefault(unit, []).append(name)
    last = max((index for index, unit in enumerate(units) if unit in blocks), default=-1)
    found: list[Layer] = []
    for index, (unit, names) in enumerate(units.items()):
        layer = Layer(unit, tuple(names), unit in blocks)
        before = found[-1] if found else layer
        bare, bare_before = weights.isdisjoint(names), weights.isdisjoint(before.parameters)
        if layer.numbered:
            joins = norms_join and bare and not bare_before
        else:
            joins = index < last or bare or bare_before
        if found and joins and before.numbered == layer.numbered:
            found[-1] = join_layers([before, layer])
        else:
            found.append(layer)
    return found


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules that contain a parameter, outermost first, and its own name."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _numbered(name: str) -> str | None:
    """Return the outermost numbered module that contains a parameter."""
    modules = _prefixes(name)[:-1]
    return next((module for module in modules if module.rpartition(".")[2].isdecimal()), None)
