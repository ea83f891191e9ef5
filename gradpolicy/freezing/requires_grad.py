"""Gradients that the backward pass skips, since nobody needs them."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradpolicy.errors import PolicyError, shortened
from gradpolicy.freezing.row_gradients import RowGradients
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.where import ModelHook, named_parameters, once_each

MOST_PHASES = 64 if torch.__version__ >= (2, 13) else 0  # type: ignore[operator]
"""The number of phases for which modules are compiled; in others all their gradients are computed.

Torch 2.13 reuses the code of a phase when the same parameters train again. Torch 2.12 compiles it again.
Torch 2.11 does not even do that: a layer that was frozen during compilation gets no gradient when it thaws
(pytorch#139476).
"""
# The attribute of a parameter whose requires_grad is temporarily disabled.
_TURNED_OFF = "_gradient_turned_off"


class ComputedGradients:
    """Leaves gradients of frozen tensors, and of frozen rows, out of the backward pass.

    The ``requires_grad`` of tensors that are frozen completely is disabled, unless a source needs their
    gradients. Parameters without ``requires_grad`` are never changed. If all parameters of an optimizer,
    which may have its own loss, would be disabled, none of them is, and they are only masked.

    Compiled modules have code for each *phase*, the set of their disabled parameters. After
    :data:`MOST_PHASES` phases no parameters of compiled modules are disabled in new ones.

    Args:
        model: The model.
        groups: The parameters of each optimizer.
        toggle: Disable ``requires_grad`` at all.

    Attributes:
        dropped: Parameters whose gradients are computed in this update, but dropped like those of updates in
            which ``requires_grad`` is disabled.
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[Collection[Tensor]], *, toggle: bool = True
    ) -> None:
        self._model, self._toggle = model, toggle
        self._parameters = once_each(named_parameters(model))
        self._groups = [{name for name, p in self._parameters.items() if p in group} for group in groups]
        compiled = compiled_parameters(model)
        self._compiled = {name for name, p in self._parameters.items() if p in compiled}
        self._phases: set[frozenset[str]] = set()
        # FSDP2's first pass takes the dtypes of a block from its parameters that require a gradient.
        self._needs_all = any(map(is_sharded, model.parameters()))
        self.dropped: set[Tensor] = set()
        self._rows = RowGradients(model)
        # The parameters whose full gradients sources need; None: gradients are chosen again.
        self._wanted: set[str] | None = None
        # The modules that ran since the last update, and True if they ran with a graph.
        self._recorded: dict[nn.Module, bool] = {}
        self._hooks: list[RemovableHandle] = []

    def update(self, masks: Mapping[str, Mask], wanted: set[str], *, changed: bool) -> None:
        """Choose the gradients of an update.

        Args:
            masks: The masks of parameters by name.
            wanted: The names of parameters whose full gradients mask sources need.
            changed: True if masks have changed.
        """
        if not changed and wanted == self._wanted:
            return
        self._wanted = wanted
        needed = {name: mask for name, mask in masks.items() if name not in wanted}
        self._rows.set({self._parameters[name]: mask for name, mask in needed.items()})
        if self._toggle:
            idle = {name for name, mask in needed.items() if mask is False}
            self._turn_off(self._may_skip(idle))
            self.dropped.clear()
            self.dropped.update(self._parameters[name] for name in idle if self._needs_all)

    def observe(self) -> None:
        """Check, after the backward pass of an update, that each layer that trains was in a graph.

        Reentrant checkpointing records a layer only if one of its inputs requires a gradient, which none does
        if all layers before it are frozen.

        Raises:
            PolicyError: If one was not.
        """
        unrecorded = [module for module, recorded in self._recorded.items() if not recorded]
        self._recorded.clear()
        lost = {p for module in unrecorded for p in module.parameters(recurse=False)}
        names = [n for n, p in self._parameters.items() if p in lost and p.requires_grad and p.grad is None]
        if names and self._skips_tensors():
            raise PolicyError(
                f"{shortened(names)} got no gradient: their modules ran without a graph, as in "
                "torch.utils.checkpoint(use_reentrant=True) if no input requires a gradient, here since all "
                "layers before are frozen; expected use_reentrant=False, or toggle_requires_grad=False"
            )
        if self._needs_all:
            self._needs_all, self._wanted = False, None

    def compute_all(self) -> bool:
        """Compute all gradients from now on, and return True if some are not in this update."""
        skips = self._rows.active or self._skips_tensors()
        self._toggle = False
        self.dropped.clear()
        self.restore()
        return skips

    def restore(self) -> None:
        """Restore ``requires_grad`` of all parameters."""
        self._turn_off(set())
        self._rows.release()
        while self._hooks:
            self._hooks.pop().remove()

    def _skips_tensors(self) -> bool:
        return any(map(is_turned_off, self._parameters.values()))

    def _may_skip(self, idle: set[str]) -> set[str]:
        """Return those of some frozen parameters whose gradients can be skipped."""
        if self._needs_all or recomputes_reentrantly(self._model):
            return set()
        for group in self._groups:
            others = (self._parameters[name] for name in group - idle)
            if not any(parameter.requires_grad or is_turned_off(parameter) for parameter in others):
                idle = idle - group
        phase = frozenset(idle & self._compiled)
        return idle - phase if phase and not self._may_compile(phase) else idle

    def _may_compile(self, phase: frozenset[str]) -> bool:
        """Return True if compiled modules have code for a phase, or torch may compile it."""
        if phase not in self._phases and len(self._phases) >= MOST_PHASES:
            return False
        self._phases.add(phase)
        import torch._dynamo.config as config

        # Beyond its limit of eight in total torch runs a function in eager mode, or raises with fullgraph.
        config.recompile_limit = max(config.recompile_limit, 8 * len(self._phases))
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
        return True

    def _turn_off(self, idle: set[str]) -> None:
        """Disable ``requires_grad`` of these parameters, and enable all others that were disabled before."""
        if idle and not self._hooks:
            self._hooks = [*guard_group_norms(self._model), *self._follow_graphs()]
        for name, parameter in self._parameters.items():
            if name not in idle and is_turned_off(parameter):
                parameter.requires_grad_(True)
                delattr(parameter, _TURNED_OFF)
            elif name in idle and parameter.requires_grad:
                parameter.requires_grad_(False)
                setattr(parameter, _TURNED_OFF, True)
                # A stale gradient would still be clipped and used in the update.
                parameter.grad = None

    def _follow_graphs(self) -> list[RemovableHandle]:
        trained = {self._parameters[name] for group in self._groups for name in group - self._compiled}
        return [
            module.register_forward_pre_hook(ModelHook(self._note_graph))
            for module in self._model.modules()
            if any(parameter in trained for parameter in module.parameters(recurse=False))
        ]

    def _note_graph(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if module.training and not torch.compiler.is_compiling():
            self._recorded[module] = self._recorded.get(module, False) or torch.is_grad_enabled()


def is_turned_off(parameter: Tensor) -> bool:
    """Return True if :class:`ComputedGradients` has disabled a parameter's ``requires_grad``."""
    return hasattr(parameter, _TURNED_OFF)


def recomputes_reentrantly(model: nn.Module) -> bool:
    """Return True if a model of ``transformers`` checkpoints reentrantly."""
    functions = (getattr(module, "_gradient_checkpointing_func", None) for module in model.modules())
    return any(getattr(function, "keywords", {}).get("use_reentrant", False) for function in functions)


def compiled_parameters(model: nn.Module) -> set[Tensor]:
    """Return the parameters in modules that are compiled, or whose forward is.

    Other methods and functions that are compiled cannot be detected.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 1), backend="eager"))
        >>> len(compiled_parameters(model))
        2
    """
    return {p for module in model.modules() if _is_compiled(module) for p in module.parameters()}


def _is_compiled(module: nn.Module) -> bool:
    """Return True if a module is compiled: by a wrapper, in place, or by its forward."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return True
    return _is_compiled_function(inspect.unwrap(module.forward, stop=_is_compiled_function))


def _is_compiled_function(function: Any) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable")


# ---- a crash of torch


def guard_group_norms(model: nn.Module) -> list[RemovableHandle]:
    """Prevent a crash of GroupNorm if its input requires no gradient.

    In torch 2.13 the backward pass of GroupNorm on a CPU crashes the process if the input is in
    channels_last, or is a slice of such a tensor, and only the norm's own parameters require a gradient. On a
    CPU the input is made to require one.

    Returns:
        The handles of the forward hooks.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm) and module.affine]
    return [norm.register_forward_pre_hook(ModelHook(_require_input_gradient)) for norm in norms]


def _require_input_gradient(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not inputs:
        return None
    trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    needed = trains and inputs[0].device.type == "cpu" and not inputs[0].requires_grad
    return (inputs[0].detach().requires_grad_(),) if needed else None
