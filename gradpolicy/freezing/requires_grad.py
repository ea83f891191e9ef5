"""Switch ``requires_grad`` off for a while, so that the backward pass skips frozen tensors."""

from collections.abc import Collection, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradpolicy.where import named_parameters, once_each

FOLLOWS_REQUIRES_GRAD = torch.__version__ >= (2, 12)  # type: ignore[operator]
"""True if torch compiles code again where a parameter's ``requires_grad`` has changed.

Torch 2.11 keeps the code that it has: a layer that was frozen then gets no gradient when it thaws
(pytorch#139476).
"""
ONE_GRAPH_A_PHASE = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""True if torch finds the code of a phase again when the same parameters train; tested with 2.13."""
MOST_PHASES = 64
"""In how many phases compiled modules have code of their own; in others all their gradients are computed."""
# The mark of a parameter whose requires_grad is off for a while: it trains at other times.
_TURNED_OFF = "_gradient_turned_off"


class RequiresGrad:
    """Switches the ``requires_grad`` of parameters off and on again.

    Parameters whose ``requires_grad`` was off already are never touched. If nothing of an optimizer's
    parameters, which may have a loss of their own, would be left for a backward pass, all of them stay on:
    masks alone keep the values then.

    Compiled modules have code for each *phase*, the set of their parameters that are off. After
    :data:`MOST_PHASES` phases their parameters stay on in new ones. Before torch 2.13 those whose masks
    change always do.

    Args:
        model: The model.
        groups: The parameters of each optimizer.
        changing: The names of the parameters whose masks change during training.
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[Collection[Tensor]] = (), *, changing: Collection[str] = ()
    ) -> None:
        self._model = model
        self._parameters = once_each(named_parameters(model))
        self._groups = [{name for name, p in self._parameters.items() if p in group} for group in groups]
        compiled = compiled_parameters(model)
        self._compiled = {name for name, p in self._parameters.items() if id(p) in compiled}
        self._constant: set[str] = set()
        if not ONE_GRAPH_A_PHASE:
            self._constant = (
                self._compiled.intersection(changing) if FOLLOWS_REQUIRES_GRAD else self._compiled
            )
        self._phases: set[frozenset[str]] = set()
        self._turned_off: set[str] = set()
        self._hooks: list[RemovableHandle] = []

    def turn_off(self, idle: set[str]) -> None:
        """Turn exactly these off; others that were turned off before come on again."""
        if idle and not self._hooks:
            self._hooks = guard_group_norms(self._model)
        idle = idle - self._constant
        for group in self._groups:
            if not any(name not in idle and self._can_train(name) for name in group):
                idle = idle - group
        idle = idle - self._without_code(idle)
        for name in sorted(self._turned_off - idle):
            self._turn_on(name)
        for name, parameter in self._parameters.items():
            if name in idle and parameter.requires_grad:
                parameter.requires_grad_(False)
                setattr(parameter, _TURNED_OFF, True)
                # A stale gradient would still count in clipping and in the update.
                parameter.grad = None
                self._turned_off.add(name)

    def restore(self) -> None:
        """Turn on again all that is off."""
        for name in sorted(self._turned_off):
            self._turn_on(name)
        while self._hooks:
            self._hooks.pop().remove()

    def _without_code(self, idle: set[str]) -> set[str]:
        """Return the compiled parameters of a phase that is one too many; count a new one."""
        phase = frozenset(idle & self._compiled)
        if not self._compiled or phase in self._phases:
            return set()
        if len(self._phases) >= MOST_PHASES:
            return set(phase)
        self._phases.add(phase)
        allow_compilations(len(self._phases))
        return set()

    def _turn_on(self, name: str) -> None:
        self._parameters[name].requires_grad_(True)
        self._parameters[name].__dict__.pop(_TURNED_OFF, None)
        self._turned_off.discard(name)

    def _can_train(self, name: str) -> bool:
        return self._parameters[name].requires_grad or name in self._turned_off


def is_turned_off(parameter: Tensor) -> bool:
    """Return True if :class:`RequiresGrad` has turned a parameter's ``requires_grad`` off for a while."""
    return hasattr(parameter, _TURNED_OFF)


# ---- compiled code


def compiled_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters in modules that are compiled, or whose forward is.

    Not those in another method or function that is compiled: a module does not know of it.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 1), backend="eager"))
        >>> len(compiled_parameters(model))
        2
    """
    return {
        id(parameter)
        for module in model.modules()
        if _is_compiled(module)
        for parameter in module.parameters()
    }


def _is_compiled(module: nn.Module) -> bool:
    """Return True if a module is compiled: as a whole, in place, or by its forward."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return True
    call: Any = module.forward
    while call is not None:
        if hasattr(call, "_torchdynamo_orig_callable"):
            return True
        call = getattr(call, "__wrapped__", None)
    return False


def allow_compilations(phases: int) -> None:
    """Let torch compile each function in each phase as often as torch 2.13 does in all: eight times.

    After that it would give the function up, or raise with ``fullgraph``.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, 8 * phases)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


# ---- a crash of torch


def guard_group_norms(model: nn.Module) -> list[RemovableHandle]:
    """Keep GroupNorm from crashing where its input needs no gradient.

    In torch 2.13 the backward pass of GroupNorm on a CPU ends the process where the input is in
    channels_last, or is a slice of such a tensor, and needs no gradient, and the norm's own parameters do.
    Exactly there the input is made to require one.

    Returns:
        The handles of the forward hooks, to be removed.
    """
    return [
        module.register_forward_pre_hook(_require_input_gradient)
        for module in model.modules()
        if isinstance(module, nn.GroupNorm) and module.affine
    ]


def _require_input_gradient(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not inputs:
        return None
    needed = inputs[0].device.type == "cpu" and not inputs[0].requires_grad and _is_channels_last(inputs[0])
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return (inputs[0].detach().requires_grad_(),) if needed and trains else None


def _is_channels_last(tensor: Tensor) -> bool:
    # As GroupNorm decides it, by the order of strides: so slices count, but not 1 x 1 images.
    is_image = tensor.dim() in (4, 5) and prod(tensor.shape[2:]) > 1
    return is_image and tensor.stride(1) <= min(tensor.stride()[2:])
