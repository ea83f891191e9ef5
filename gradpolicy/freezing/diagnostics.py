"""Warnings of active tensors without a gradient, and of buffers and dropout in frozen modules."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gradpolicy.errors import shortened
from gradpolicy.freezing.still import drops
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.where import plain_name

MOST_UPDATES = 100
"""The number of updates without a gradient after which a tensor is reported."""
LEAST_UPDATES = 2
"""The same for a tensor that freezes. More than one, since a single forward pass may skip a branch."""

_NO_GRADIENT = (
    "no gradient gets there: no loss depends on it, something else turned requires_grad off, or code was "
    "compiled while it was frozen"
)
_ONLY_ZEROS = (
    "only zeros get there: a rounding or another step before the loss passes no other gradient, unless a "
    "policy such as straight_through gives it one"
)


class MissingGradients:
    """Finds active tensors that never get a gradient, or only zeros.

    A tensor is reported after :data:`MOST_UPDATES` updates without a gradient, or when it freezes or training
    ends, if it had none before. Only tensors without a gradient so far are inspected, so that the cost per
    step is negligible.

    Example:
        >>> import torch
        >>> used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> parameters, missing = {"used": used, "unused": unused}, MissingGradients()
        >>> used.sum().backward()
        >>> for _ in range(3):
        ...     found = [*missing.follow(parameters), *missing.update(parameters)]
        >>> found, missing.finish()
        ([], ['unused'])
    """

    def __init__(self) -> None:
        # The number of updates without a gradient, for tensors that have had none so far.
        self._without: dict[str, int] = {}
        self._training: set[str] = set()
        self._reported: set[str] = set()
        # Tensors whose gradients had only zeros.
        self._zeros: set[str] = set()
        self._updates = 0

    def follow(self, training: Collection[str]) -> list[str]:
        """Set the names of the active tensors.

        Returns:
            The names of tensors that are no longer active, and had no gradient while they were.
        """
        before, self._training = self._training, set(training)
        self._expect(self._training - before)
        return self._found(before - self._training, LEAST_UPDATES)

    def note(self, name: str, gradient: Tensor) -> None:
        """Record a gradient that is masked before :meth:`update`."""
        if name in self._without and _trains_by(gradient):
            del self._without[name]
            self._zeros.discard(name)

    def update(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Inspect the gradients of parameters, before they are masked.

        Returns:
            The names of parameters that had no gradient in :data:`MOST_UPDATES` updates.
        """
        for name in self._without.keys() & self._training & parameters.keys():
            gradient = parameters[name].grad
            self._without[name] += 1
            if gradient is not None:
                self._zeros.add(name)
                self.note(name, gradient)
        self._updates += 1
        if self._updates % MOST_UPDATES == 0:
            self._expect(self._training)
        return self._found(self._training, MOST_UPDATES)

    def finish(self) -> list[str]:
        """Return the names of active tensors without a gradient at the end of training."""
        found = self._found(self._training, LEAST_UPDATES)
        self._without, self._training = {}, set()
        return found

    def lines(self, names: Collection[str], policy_of: Mapping[str, str]) -> Iterator[str]:
        """Yield a warning for each policy and reason.

        Args:
            names: The names of tensors without a gradient.
            policy_of: The first policy of each tensor, in the order of the model.
        """
        alike: dict[tuple[str, str], list[str]] = {}
        for name, policy in policy_of.items():
            if name in names:
                why = _ONLY_ZEROS if name in self._zeros else _NO_GRADIENT
                alike.setdefault((policy, why), []).append(name)
        for (policy, why), own in alike.items():
            yield f"policy.{policy}: lets {shortened(own, most=8)} train, but {why}"

    def _expect(self, names: Collection[str]) -> None:
        for name in names:
            if name not in self._reported:
                self._without.setdefault(name, 0)

    def _found(self, names: Collection[str], least: int) -> list[str]:
        """Return tensors without a gradient in at least this number of updates. Each is returned once."""
        found = [name for name, count in self._without.items() if name in names and count >= least]
        for name in found:
            del self._without[name]
        self._reported.update(found)
        return found


def _trains_by(gradient: Tensor) -> bool:
    """Return True for a gradient with an entry other than 0, and for all shards and sparse gradients."""
    if is_sharded(gradient) or gradient.layout != torch.strided or gradient.is_meta:
        return True
    return bool(gradient.any())


# ---- buffers and dropout in frozen modules

DROPOUT = "dropout"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def changed_buffers(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """Return the names of buffers that have changed since they were copied, by module."""
    changed: dict[str, list[str]] = {}
    for raw_name, buffer in model.named_buffers():
        earlier = before.get(raw_name)
        if earlier is None or not _same(earlier, buffer):
            module, _, own = plain_name(raw_name).rpartition(".")
            changed.setdefault(module, []).append(own)
    return changed


def moving_parts(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """Return the names of changed buffers, and ``"dropout"``, by module."""
    moving = changed_buffers(before, model)
    for raw_name, module in model.named_modules():
        if drops(module):
            moving.setdefault(plain_name(raw_name), []).append(DROPOUT)
    return moving


def moving_warnings(
    frozen: Mapping[str, Collection[str]],
    moving: Mapping[str, list[str]],
    parameters: Iterable[str],
    buffers: Mapping[str, str],
) -> Iterator[str]:
    """Yield a line for each freeze policy that freezes modules whose buffers change or which have dropout.

    Args:
        frozen: For each policy, the parameters that it freezes as a whole, now or later.
        moving: The result of :func:`moving_parts` for a training step without modules in evaluation mode.
        parameters: The names of all parameters that train or that a policy freezes.
        buffers: The argument ``buffers`` of each policy: "move" or "eval".
    """
    names = list(parameters)
    own = {module: set(_own_parameters(module, names)) for module in moving}
    for policy, keys in frozen.items():
        if buffers[policy] == "eval":
            continue
        found: dict[str, dict[str, None]] = {"buffers": {}, DROPOUT: {}}
        parts: dict[str, None] = {}
        for module, moved in moving.items():
            if not own[module] or not own[module] <= set(keys):
                continue
            for part in moved:
                if part == DROPOUT:
                    found[DROPOUT][module] = None
                else:
                    found["buffers"][module] = parts[part] = None
        for kind, modules in found.items():
            if modules:
                does = f"changing {', '.join(parts)}" if kind == "buffers" else "drawing dropout"
                yield (
                    f"{policy}: freezing stops parameters, not {kind}: {', '.join(modules)} "
                    f"{'goes' if len(modules) == 1 else 'go'} on {does} while frozen; "
                    "with buffers: eval of the policy they stand still"
                )


def _own_parameters(module: str, names: list[str]) -> list[str]:
    """Return the parameters of a module, or of the nearest ancestor that has any."""
    while True:
        own = [name for name in names if not module or name.startswith(f"{module}.")]
        if own or not module:
            return own
        module = module.rpartition(".")[0]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta or one.shape != other.shape:
        return one.shape == other.shape
    equal = (one == other) | (one.isnan() & other.isnan())
    return bool(equal.all())
