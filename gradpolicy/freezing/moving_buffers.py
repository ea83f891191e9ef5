"""Finds buffers that go on changing while the parameters of their layer are frozen."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from gradpolicy.errors import shortened
from gradpolicy.where import plain_name


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def changed_buffers(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """Return the buffers that have changed since they were copied, by the module that holds them."""
    changed: dict[str, list[str]] = {}
    for raw_name, buffer in model.named_buffers():
        earlier = before.get(raw_name)
        if earlier is None or not _same(earlier, buffer):
            module, _, own = plain_name(raw_name).rpartition(".")
            changed.setdefault(module, []).append(own)
    return changed


def buffer_warnings(
    frozen: Mapping[str, Collection[str]], changed: Mapping[str, list[str]], parameters: Iterable[str]
) -> Iterator[str]:
    """Yield a line for each freeze policy under which a layer's parameters freeze and its buffers move on.

    Args:
        frozen: For each policy, the parameters that it freezes as a whole, now or at some time.
        changed: The buffers that a training step changed, by module.
        parameters: The names of all parameters that train or that a policy freezes.
    """
    names = list(parameters)
    for policy, keys in frozen.items():
        modules = {
            module: buffers
            for module, buffers in changed.items()
            if (own := _own_parameters(module, names)) and set(own) <= set(keys)
        }
        if modules:
            buffers = list(dict.fromkeys(buffer for found in modules.values() for buffer in found))
            yield (
                f"{policy}: freezing stops parameters, not buffers: {shortened(list(modules), most=8)} "
                f"{'goes' if len(modules) == 1 else 'go'} on changing {', '.join(buffers)} while frozen; "
                "call eval() on what is to stand still as a whole"
            )


def _own_parameters(module: str, names: list[str]) -> list[str]:
    """Return the parameters of a module, or of the nearest one around it that has any."""
    while True:
        own = [name for name in names if not module or name.startswith(f"{module}.")]
        if own or not module:
            return own
        module = module.rpartition(".")[0]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta or one.shape != other.shape:
        return one.shape == other.shape
    return torch.equal(_without_nan(one), _without_nan(other))


def _without_nan(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor
