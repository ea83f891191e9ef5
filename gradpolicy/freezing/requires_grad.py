"""Gradients that the backward pass skips, since nobody needs them."""

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradpolicy.errors import PolicyError, shortened
from gradpolicy.freezing.row_gradients import RowGradients
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.where import ModelHook, named_parameters, once_each

ONE_GRAPH_A_PHASE = torch.__version__ >= (2, 13)  # type: ignore[operator]
"""True if torch reuses the code of a phase when the same parameters train again; tested with 2.13.

Torch 2.12 compiles it again. Torch 2.11 does not even do that: a layer that was frozen during compilation
gets no gradient when it thaws (pytorch#139476).
"""
MOST_PHASES = 64
"""The number of phases for which modules are compiled; in others all their gradients are computed."""
# The attribute of a parameter whose requires_grad is temporarily disabled.
_TURNED_OFF = "_gradient_turned_off"


class ComputedGradients:
    """Leaves gradients of frozen tensors, and of frozen rows, out of the backward pass.

    Args:
        model: The model.
        groups: The parameters of each optimizer.
        parameters: The parameters that freeze policies restrict, by name.
        toggle: Disable ``requires_grad`` of tensors that are frozen completely, unless a source needs their
            gradients.

    Attributes:
        dropped: Parameters whose gradients are computed in this update, but dropped like those of updates in
            which ``requires_grad`` is disabled.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[Collection[Tensor]],
        parameters: Mapping[str, Tensor],
        *,
        toggle: bool,
    ) -> None:
        self._parameters, self._toggle = parameters, toggle
        self.dropped: set[Tensor] = set()
        # FSDP2's first pass takes the dtypes of a block from its parameters that require a gradient.
        self._computes_all = any(map(is_sharded, model.parameters()))
        self._rows = RowGradients(model)
        self._wanted: set[str] = set()
        self._requires_grad = RequiresGrad(model, groups)
        self.check_graphs = self._requires_grad.check_graphs

    def update(self, masks: Mapping[str, Mask], wanted: set[str], *, changed: bool) -> None:
        """Choose the gradients of an update.

        Args:
            masks: The masks of parameters by name.
            wanted: The names of parameters whose full gradients mask sources need.
            changed: True if masks have changed.
        """
        if not (changed or wanted != self._wanted or self.dropped):
            return
        self._wanted = wanted
        needed = {name: mask for name, mask in masks.items() if name not in wanted}
        self._rows.set({self._parameters[name]: mask for name, mask in needed.items()})
        if not self._toggle:
            return
        idle = {name for name, mask in needed.items() if mask is False}
        self.dropped.clear()
        if self._computes_all:
            self.dropped.update(self._parameters[name] for name in idle)
        else:
            self._requires_grad.turn_off(idle)

    def observe(self) -> None:
        """Check that layers which train were in a graph, and remove gradients that are dropped."""
        self.check_graphs()
        for parameter in self.dropped:
            parameter.grad = None
        self._computes_all = False

    def compute_all(self) -> bool:
        """Compute all gradients from now on, and return True if some are not in this update."""
        skips = self._rows.active or any(map(is_turned_off, self._parameters.values()))
        self._toggle = False
        self.dropped.clear()
        self.restore()
        return skips

    def restore(self) -> None:
        """Restore ``requires_grad`` of all parameters."""
        self._requires_grad.restore()
        self._rows.release()


class RequiresGrad:
    """Disables and restores the ``requires_grad`` of parameters.

    Parameters without ``requires_grad`` are never changed. If all parameters of an optimizer, which may have
    its own loss, would be disabled, none of them is, and they are only masked.

    Compiled modules have code for each *phase*, the set of their disabled parameters. After
    :data:`MOST_PHASES` phases no parameters of compiled modules are disabled in new ones, and before torch
    2.13 in none.

    Args:
        model: The model.
        groups: The parameters of each optimizer.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Collection[Tensor]] = ()) -> None:
        self._model = model
        self._parameters = once_each(named_parameters(model))
        self._groups = [{name for name, p in self._parameters.items() if p in group} for group in groups]
        compiled = compiled_parameters(model)
        self._compiled = {name for name, p in self._parameters.items() if id(p) in compiled}
        self._phases: set[frozenset[str]] = set()
        # Modules that ran with and without a graph since the last update.
        self._recorded: set[nn.Module] = set()
        self._unrecorded: set[nn.Module] = set()
        self._turned_off: set[str] = set()
        self._hooks: list[RemovableHandle] = []

    def turn_off(self, idle: set[str]) -> None:
        """Disable ``requires_grad`` of these parameters, and enable all others that were disabled before."""
        if recomputes_reentrantly(self._model):
            idle = set()
        if idle and not self._hooks:
            self._hooks = [*guard_group_norms(self._model), *self._follow_graphs()]
        if not ONE_GRAPH_A_PHASE:
            idle = idle - self._compiled
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
                # A stale gradient would still be clipped and used in the update.
                parameter.grad = None
                self._turned_off.add(name)

    def check_graphs(self) -> None:
        """Check, after the backward pass of an update, that each layer that trains was in a graph.

        Reentrant checkpointing records a layer only if one of its inputs requires a gradient, which none does
        if all layers before it are frozen.

        Raises:
            PolicyError: If one was not.
        """
        unrecorded = self._unrecorded - self._recorded if self._turned_off else set()
        self._recorded.clear()
        self._unrecorded.clear()
        lost = {p for module in unrecorded for p in module.parameters(recurse=False)}
        names = [n for n, p in self._parameters.items() if p in lost and p.requires_grad and p.grad is None]
        if names:
            raise PolicyError(
                f"{shortened(names)} got no gradient: their modules ran without a graph, as in "
                "torch.utils.checkpoint(use_reentrant=True) if no input requires a gradient, here since all "
                "layers before are frozen; expected use_reentrant=False, or toggle_requires_grad=False"
            )

    def restore(self) -> None:
        """Enable ``requires_grad`` of all parameters that were disabled."""
        for name in sorted(self._turned_off):
            self._turn_on(name)
        while self._hooks:
            self._hooks.pop().remove()

    def _follow_graphs(self) -> list[RemovableHandle]:
        trained = {self._parameters[name] for group in self._groups for name in group - self._compiled}
        return [
            module.register_forward_pre_hook(ModelHook(self._note_graph))
            for module in self._model.modules()
            if any(parameter in trained for parameter in module.parameters(recurse=False))
        ]

    def _note_graph(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and not torch.compiler.is_compiling():
            (self._recorded if torch.is_grad_enabled() else self._unrecorded).add(module)

    def _without_code(self, idle: set[str]) -> set[str]:
        """Return the compiled parameters of a phase beyond the limit; otherwise add the phase."""
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
    """Return True if :class:`RequiresGrad` has disabled a parameter's ``requires_grad``."""
    return hasattr(parameter, _TURNED_OFF)


def recomputes_reentrantly(model: nn.Module) -> bool:
    """Return True if a model of ``transformers`` checkpoints reentrantly."""
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return any(getattr(function, "keywords", {}).get("use_reentrant", False) for function in functions)


# ---- compiled code


def compiled_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters in modules that are compiled, or whose forward is.

    Other methods and functions that are compiled cannot be detected.

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
    """Return True if a module is compiled: by a wrapper, in place, or by its forward."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return True
    call: Any = module.forward
    while call is not None:
        if hasattr(call, "_torchdynamo_orig_callable"):
            return True
        call = getattr(call, "__wrapped__", None)
    return False


def allow_compilations(phases: int) -> None:
    """Raise torch's limits of recompilations to eight per function and phase.

    Beyond its limit of eight in total torch runs a function in eager mode, or raises an error with
    ``fullgraph``.
    """
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, 8 * phases)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


# ---- a crash of torch


def guard_group_norms(model: nn.Module) -> list[RemovableHandle]:
    """Prevent a crash of GroupNorm if its input requires no gradient.

    In torch 2.13 the backward pass of GroupNorm on a CPU crashes the process if the input is in
    channels_last, or is a slice of such a tensor, and only the norm's own parameters require a gradient. In
    this case the input is made to require one.

    Returns:
        The handles of the forward hooks.
    """
    return [
        module.register_forward_pre_hook(ModelHook(_require_input_gradient))
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
    # By the order of strides, as in GroupNorm: true for slices, false for 1 x 1 images.
    is_image = tensor.dim() in (4, 5) and prod(tensor.shape[2:]) > 1
    return is_image and tensor.stride(1) <= min(tensor.stride()[2:])
