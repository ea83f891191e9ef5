"""Layers, found from parameter names, and the base class of sources that freeze them."""

import re
from collections.abc import Collection, Iterable, Mapping

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import Layer, MaskSource
from gradpolicy.tensors.mask import Mask
from gradpolicy.where import as_patterns, match_names

Groups = Iterable[str | Iterable[str]] | None
"""Groups of parameters from the input to the output, each as globs; None: the layers of the model."""


class LayerSource(MaskSource):
    """A mask source by which whole layers freeze and thaw together.

    A subclass sets ``layer_groups`` in :meth:`prepare`, and defines :meth:`frozen_names`.
    """

    repeats_masks = True
    # The parameters that train at all times.
    _always: Collection[str] = ()

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the parameters of the layers that do not train."""
        raise NotImplementedError

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return one flag for each parameter."""
        frozen = self.frozen_names(step, epoch).difference(self._always)
        return {name: name not in frozen for name in self.parameters}


def names_in(layers: Iterable[Layer]) -> set[str]:
    """Return the names of the parameters of some layers."""
    return {name for layer in layers for name in layer.parameters}


def find_layers(names: Iterable[str], stacks: str | Iterable[str] | None = None) -> list[Layer]:
    """Group parameters into layers, from the input to the output.

    Every member of a numbered container (``layers.0.``, ``h.3.``, ``blocks.1.``) is a layer. What lies
    before, between or after them (embedding, final norm, head) forms a layer of its own, with
    ``numbered=False``. In a model without numbered containers every module that holds parameters is a layer.

    Args:
        names: The parameter names, in model order.
        stacks: The containers that count, as globs (``"trunk.layers"``); None: the outermost of each name.

    Raises:
        PolicyError: If a glob matches no numbered container.

    Example:
        >>> names = ["embed.weight", "h.0.w", "h.0.b", "h.1.w", "h.1.b", "head.weight"]
        >>> [(layer.name, layer.numbered) for layer in find_layers(names)]
        [('embed', False), ('h.0', True), ('h.1', True), ('head', False)]
    """
    names = list(names)
    chosen = _chosen_stacks(names, stacks)
    members = {name: _member(name, chosen) for name in names}
    if not any(members.values()):
        return [Layer(module, tuple(inside), True) for module, inside in _by_module(names).items()]
    runs: list[tuple[str | None, list[str]]] = []
    run_of: dict[str, int] = {}
    for name in names:
        member = members[name]
        if member in run_of:
            runs[run_of[member]][1].append(name)
        elif member is None and runs and runs[-1][0] is None:
            runs[-1][1].append(name)
        else:
            if member is not None:
                run_of[member] = len(runs)
            runs.append((member, [name]))
    return [
        Layer(member or "+".join(_by_module(inside)), tuple(inside), member is not None)
        for member, inside in runs
    ]


def read_groups(key: str, groups: Groups) -> list[tuple[str, ...]] | None:
    """Return groups of parameters as tuples of globs; None where no groups are given.

    Args:
        key: The argument that an error names.
        groups: A list of groups, each one glob or several.

    Raises:
        PolicyError: If it is no list, or a group or the list of them is empty.
    """
    if groups is None:
        return None
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise PolicyError(
            f"{key}: must be a list of groups, each a glob or a list of them, got {shown(groups)}"
        )
    read = [as_patterns(group) for group in groups]
    if not read or not all(read):
        raise PolicyError(
            f"{key}: must name at least one glob in each of one group or more, got {shown(read)}"
        )
    return read


def layers_of(groups: Iterable[tuple[str, ...]], names: Iterable[str]) -> list[Layer]:
    """Return the groups with the parameters that their globs match.

    Raises:
        PolicyError: If a glob matches nothing.
    """
    names = list(names)
    return [Layer("+".join(globs), tuple(match_names(globs, names, "parameter")), True) for globs in groups]


def _chosen_stacks(names: list[str], stacks: str | Iterable[str] | None) -> set[str] | None:
    """Return the containers whose members are layers; None if the outermost of each name counts."""
    if stacks is None or not as_patterns(stacks):
        return None
    containers = list(dict.fromkeys(stack for name in names for stack, _ in _numbered(name)))
    if not containers:
        raise PolicyError(
            f"layers {shown(list(as_patterns(stacks)))}: no parameter lies in a numbered container"
        )
    return set(match_names(stacks, containers, "layer container"))


def _numbered(name: str) -> list[tuple[str, str]]:
    """Return the numbered containers around a parameter with its member in each, from the outermost."""
    parts = name.split(".")
    return [
        (".".join(parts[:place]), ".".join(parts[: place + 1]))
        for place, part in enumerate(parts[:-1])
        if re.fullmatch(r"\d+", part)
    ]


def _member(name: str, chosen: set[str] | None) -> str | None:
    for container, member in _numbered(name):
        if chosen is None or container in chosen:
            return member
    return None


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by the module that holds them."""
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return modules
