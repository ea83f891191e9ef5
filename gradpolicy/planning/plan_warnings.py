"""What a plan warns of: policies that will have no effect, or another one than they seem to have."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import shortened
from gradpolicy.policies import Policy, Stop
from gradpolicy.where import plain_name

if TYPE_CHECKING:
    from gradpolicy.masks.base import MaskSource

Gradients = Mapping[str, Tensor | None]


def trained_in_vain(
    policies: Mapping[str, Policy], matched: Mapping[str, Iterable[str]], gradients: Gradients
) -> dict[str, tuple[str, ...]]:
    """For each policy on parameters, those that get no gradient or only zeros, whatever it lets train.

    Args:
        policies: The policies by name.
        matched: The names of the parameters that each matches, by the policy's name.
        gradients: The gradients by the parameters' names.
    """
    return {
        name: tuple(key for key in keys if not gets_gradient(gradients.get(key)))
        for name, keys in matched.items()
        # A stop is what gives its parameters no gradient.
        if not isinstance(policies[name], Stop)
    }


def gets_gradient(gradient: Tensor | None) -> bool:
    """Whether a gradient is there and is not zero in every entry."""
    return gradient is not None and (gradient.is_meta or bool(gradient.any()))


def vain_warnings(
    vain: Mapping[str, tuple[str, ...]], matched: Mapping[str, Collection[str]], gradients: Gradients
) -> Iterator[str]:
    """A line for each policy on parameters that get no gradient."""
    for name, without in vain.items():
        count = len(matched[name])
        # That somebody turned off the gradient of some of them is no news.
        told = without if len(without) == count else [key for key in without if key in gradients]
        if not told:
            continue
        some = "none" if len(told) == count else f"{len(told)}"
        verb = "gets a gradient" if some == "none" else f"{'gets' if len(told) == 1 else 'get'} no gradient"
        zeros = any(gradients.get(key) is not None for key in told)
        why = (
            "a rounding or another step before the loss passes only zeros, unless a policy such as "
            "straight_through gives it a gradient"
            if zeros
            else "the loss does not depend on them, or a stop or detach lies in between"
        )
        yield f"{name}: {some} of its {count} parameters {verb} ({shortened(list(told))}): {why}"


def moved_buffers(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """The buffers that a training step changed, by the module that holds them."""
    moved: dict[str, list[str]] = {}
    for raw_name, buffer in model.named_buffers():
        earlier = before.get(raw_name)
        if earlier is None or not _same(earlier, buffer):
            module, _, own = plain_name(raw_name).rpartition(".")
            moved.setdefault(module, []).append(own)
    return moved


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def buffer_warnings(
    masks: Mapping[str, Mapping[str, Any]],
    sources: Mapping[str, "MaskSource"],
    moved: Mapping[str, list[str]],
    parameters: Iterable[str],
    share_of: Any,
) -> Iterator[str]:
    """A line for each freeze policy under which a layer's parameters freeze while its buffers move on.

    Args:
        masks: Each policy's masks at its first step.
        sources: Each policy's mask source, set up.
        moved: The buffers that a step changed, by module.
        parameters: The names of all parameters that train.
        share_of: The share of entries that a mask lets train.
    """
    names = list(parameters)
    for name, given in masks.items():
        frozen = {key for key, mask in given.items() if share_of(mask) == 0.0}
        frozen |= sources[name].may_freeze()
        modules = {
            module: buffers
            for module, buffers in moved.items()
            if (own := _own_parameters(module, names)) and frozen.issuperset(own)
        }
        if modules:
            buffers = list(dict.fromkeys(buffer for found in modules.values() for buffer in found))
            yield (
                f"{name}: freezing stops parameters, not buffers: {shortened(list(modules), most=8)} "
                f"{'goes' if len(modules) == 1 else 'go'} on changing {', '.join(buffers)} while frozen; "
                "call eval() on what is to stand still as a whole"
            )


def _own_parameters(module: str, names: list[str]) -> list[str]:
    """The parameters of a module, or of the nearest one around it that has any."""
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
