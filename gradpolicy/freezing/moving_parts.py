"""Warnings of buffers that change, and of dropout, in frozen modules."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn

from gradpolicy.freezing.still import drops
from gradpolicy.where import plain_name

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
        frozen: For each policy, the parameters that it freezes completely, now or later.
        moving: The result of :func:`moving_parts` for a training step without modules in evaluation mode.
        parameters: The names of all parameters that train or that a policy freezes.
        buffers: The argument ``buffers`` of each policy: "move" or "eval".
    """
    names = list(parameters)
    own = {module: set(_own_parameters(module, names)) for module in moving}
    for policy, keys in frozen.items():
        if buffers[policy] == "eval":
            continue
        still = {m: parts for m, parts in moving.items() if own[m] and own[m] <= set(keys)}
        names_of = {m: [part for part in parts if part != DROPOUT] for m, parts in still.items()}
        changed = dict.fromkeys(part for parts in names_of.values() for part in parts)
        for kind, modules, does in (
            ("buffers", [m for m in still if names_of[m]], f"changing {', '.join(changed)}"),
            (DROPOUT, [m for m in still if DROPOUT in still[m]], "drawing dropout"),
        ):
            if modules:
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
