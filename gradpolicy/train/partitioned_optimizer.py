"""The optimizer of a DeepSpeed engine (ZeRO 1, 2, 3), with masks.

DeepSpeed joins parameters to flat tensors, of which each rank owns a partition in full precision. Its engine
averages, unscales and clips gradients, then steps the optimizer that it was given, on this rank's partitions.
That optimizer is wrapped here: the mask of a partition is cut out of the masks of the parameters in it, and
moments and ages are those of its entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.optim import Optimizer

from gradpolicy.errors import PolicyError, shortened, shown, warn_user
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.shapes import fitting_mask
from gradpolicy.optim.update_rules import rule_for
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.tensors.mask import Mask
from gradpolicy.train.optimizer_steps import STATE


def _checked_frozen_state(policies: Mapping[str, Policy | None]) -> str:
    """Check that policies can act on partitions, and return the frozen state that all of them have.

    Raises:
        PolicyError: If one cannot.
    """
    for name, policy in policies.items():
        why = None
        if isinstance(policy, Freeze):
            source, kind = policy.mask, type(policy.mask).__name__
            if source.needs_gradients:
                why = f"{kind} needs whole gradients, of which a rank keeps only its part"
            elif source.writes_weights:
                why = f"{kind} may write to weights, which the engine overwrites with its own copy"
            elif policy.bias_correction == "tensor":
                why = "bias_correction='tensor' needs a step count per tensor; use 'entry'"
        elif policy is not None and not isinstance(policy, FlowPolicy):
            why = f"{type(policy).__name__} acts on the model's parameters, and the engine updates partitions"
        if why is not None:
            raise PolicyError(f"policy.{name}: does not work with DeepSpeed: {why}")
    states = {each.frozen_state: name for name, each in policies.items() if isinstance(each, Freeze)}
    if len(states) > 1:
        given = ", ".join(f"policy.{name}: {state!r}" for state, name in states.items())
        raise PolicyError(
            "frozen_state: must be the same for all policies with DeepSpeed, since a partition holds several "
            f"parameters; got {given}"
        )
    return next(iter(states), "keep")


class PartitionedOptimizer(MaskedOptimizer):
    """The optimizer of a DeepSpeed engine, which takes masks of the model's parameters.

    It cuts each mask up for the partitions of this rank, and, after ``hook_gradients``, zeroes the gradients
    of frozen entries before the engine averages and clips them.

    Args:
        engine: The engine.
        policies: The policies by name.

    Attributes:
        zero: The engine's own optimizer, which holds the partitions.
        local: The optimizer that was given to the engine, wrapped; its parameters are this rank's partitions.

    Raises:
        PolicyError: If a policy, the optimizer or a setting of the engine does not work with partitions.
    """

    def __init__(self, engine: DeepSpeedEngine, policies: Mapping[str, Policy | None]) -> None:
        frozen_state = _checked_frozen_state(policies)
        self.zero: Any = _checked_zero(engine)
        base = self.zero.optimizer
        self.local = base if isinstance(base, MaskedOptimizer) else MaskedOptimizer(base, frozen_state)
        self.zero.optimizer = self.local
        # All groups: the engine leaves one of them in the optimizer while it steps its partition.
        self._settings = self.local.param_groups
        groups, self._pieces = _groups_of(self.zero), _pieces_of(self.zero)
        super().__init__(_ModelParameters([{"params": group} for group in groups], {}), frozen_state)
        self._masks: dict[Tensor, Mask] = {}
        # The parameters with a gradient in this update, and in an earlier one.
        self._with_gradient: set[Tensor] = set()
        self._had_gradient: set[Tensor] = set()
        self._warned = False
        self._parameters = [parameter for group in groups for parameter in group]
        # The partitions that were stepped in this update: the engine steps them one after another.
        self._stepped = 0
        self._handles: list[Any] = [
            self.local.register_step_pre_hook(self._before_partition),
            self.local.register_step_post_hook(self._after_partition),
            self.local.register_load_state_dict_post_hook(self._take_settings),
        ]
        self._engine: Any = engine

    is_partitioned = True

    @property
    def allows_unused_parameters(self) -> bool:  # type: ignore[override]
        """True if frozen parameters need no gradient; stage 3 would use that of an earlier step."""
        return not _is_stage_3(self.zero) and self.zero.ignore_unused_parameters

    def hook_gradients(self) -> None:
        """Zero the gradients of frozen entries from now on, after hooks that need them as they were."""
        self._handles += [
            each.register_hook(partial(self._masked_gradient, each)) for each in self._parameters
        ]

    def remove(self) -> None:
        """Follow the engine no longer; its optimizer stays wrapped."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The settings of the engine's param groups, with the model's parameters in place of partitions."""
        pairs = zip(self._settings, self.inner.param_groups, strict=True)
        return [{**settings, "params": group["params"]} for settings, group in pairs]

    # --- masks

    def set_masks(self, masks: Mapping[Tensor, Any], **options: Any) -> None:
        """Set masks, as MaskedOptimizer does; every rank must set the same."""
        self._masks |= masks
        self._masks = {parameter: mask for parameter, mask in self._masks.items() if mask is not None}
        changed = {
            flat: self._cut(flat, pieces)
            for flat, pieces in self._pieces.items()
            if any(piece.parameter in masks for piece in pieces)
        }
        with _partitions_in_groups(self.zero):
            self.local.set_masks(changed, **options)

    def _cut(self, flat: Tensor, pieces: Iterable[Piece]) -> Tensor | None:
        """Return the mask of a partition; padding is active."""
        if not any(piece.parameter in self._masks for piece in pieces):
            return None
        result = torch.ones(flat.shape, dtype=torch.bool, device=flat.device)
        for parameter, first, start, size in pieces:
            if parameter in self._masks:
                entries = self.get_mask(parameter).expand(_shape(parameter)).reshape(-1)
                result[start : start + size] = entries[first : first + size]
        return result

    def get_mask(self, parameter: Tensor) -> Tensor:
        """Return the parameter's mask as it was set (bool, broadcastable to it), all True if none was."""
        full = torch.empty((), device=parameter.device).expand(_shape(parameter))
        return fitting_mask(self._masks.get(parameter, True), full, self._wrapped.name_of(parameter))

    def _masked_gradient(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient of which frozen entries are 0."""
        if gradient is None:
            return None
        self._with_gradient.add(parameter)
        if self._masks.get(parameter) is False:
            return torch.zeros_like(gradient)
        return torch.where(self.get_mask(parameter), gradient, 0) if parameter in self._masks else None

    def set_settings(self, settings: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Refuse settings of single parameters.

        Raises:
            PolicyError: If there are any.
        """
        if settings:
            raise PolicyError(
                "DeepSpeed: parameters cannot have learning rates of their own, since one partition holds "
                "several; give the optimizer a param group for each rate"
            )

    def _known(self, parameter: Tensor) -> MaskedParameter:
        raise PolicyError(
            "DeepSpeed: ages belong to partitions; optimizer.local, the optimizer of these, has them"
        )

    @contextmanager
    def full_parameters(self, *, values: bool) -> Iterator[None]:
        """Gather what stage 3 has distributed, or put tensors of NaN and of the right shape in its place."""
        if not _is_stage_3(self.zero):
            yield
        elif values:
            with GatheredParameters(self._parameters):
                yield
        else:
            every = self._engine.module.parameters()
            empty = [(each, each.data) for each in every if each.shape != _shape(each)]
            try:
                for parameter, _ in empty:
                    parameter.data = parameter.new_full((), math.nan).expand(_shape(parameter))
                yield
            finally:
                for parameter, data in empty:
                    parameter.data = data

    # --- steps and checkpoints

    @torch.compiler.disable
    def _before_partition(self, *_: Any) -> None:
        """Call the hooks that come before an update, with its first partition; an overflow steps none.

        Raises:
            PolicyError: If stage 3 would update parameters by gradients of an earlier update.
        """
        if not self._stepped:
            self._check_gradients()
            for hook in self._optimizer_step_pre_hooks.values():
                hook(self, (self,), {})
        self._stepped += 1

    @torch.compiler.disable
    def _after_partition(self, *_: Any) -> None:
        """Call the hooks that come after an update, with its last partition."""
        if self._stepped == len(self._pieces):
            self._stepped = 0
            self.effective_steps += 1
            for hook in self._optimizer_step_post_hooks.values():
                hook(self, (self,), {})

    def _check_gradients(self) -> None:
        """Check that no parameter lacks a gradient, since the engine takes another in its place."""
        lacking = [
            each for each in self._parameters if each.requires_grad and each not in self._with_gradient
        ]
        self._had_gradient |= self._with_gradient
        self._with_gradient = set()
        if _is_stage_3(self.zero) and (stale := [each for each in lacking if each in self._had_gradient]):
            raise PolicyError(
                f"DeepSpeed: {self._names_of(stale)} got no gradient in this update, and stage 3 would "
                "use that of an earlier one; gradpolicy.Stop(mode='zero') passes zeros where it cuts"
            )
        moving = [each for each in lacking if self._masks.get(each) is not False]
        if moving and not self._warned:
            self._warned = True
            warn_user(
                f"DeepSpeed: {self._names_of(moving)} got no gradient in an update, for which the engine "
                "takes zeros: momentum and weight decay still move them, unless gradpolicy.Freeze holds them"
            )

    def _names_of(self, parameters: Iterable[Tensor]) -> str:
        names = {parameter: name for name, parameter in self._engine.module.named_parameters()}
        return shortened([repr(names[each]) for each in parameters])

    def state_dict(self, *, dense: bool = False) -> dict[str, Any]:
        """Return the state of this rank's partitions, which ``engine.save_checkpoint`` saves."""
        with _partitions_in_groups(self.zero):
            return self.local.state_dict(dense=dense)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this rank's partitions, as ``engine.load_checkpoint`` does."""
        with _partitions_in_groups(self.zero):
            self.local.load_state_dict(state_dict)

    def _take_settings(self, _: Any) -> None:
        self._settings = self.local.param_groups
        self.effective_steps = self.local.effective_steps // len(self._pieces)


class _ModelParameters(Optimizer):
    """The model's parameters in the engine's groups."""

    def step(self, closure: Any = None) -> Any:
        """Refuse to step apart from the engine."""
        raise PolicyError("DeepSpeed: expected engine.step(), which steps the optimizer of its partitions")


# --- what DeepSpeed keeps where


class Piece(NamedTuple):
    """The part of a parameter that is in a partition.

    Attributes:
        parameter: The parameter.
        first: The first entry of the parameter, flattened, that is in the partition.
        start: Its position in the partition.
        size: The number of entries.
    """

    parameter: Tensor
    first: int
    start: int
    size: int


def _is_stage_3(zero: Any) -> bool:
    return isinstance(zero, DeepSpeedZeroOptimizer_Stage3)


def _shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter, also where stage 3 has emptied it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _groups_of(zero: Any) -> list[list[Tensor]]:
    """Return the parameters that the engine trains, by param group."""
    if not _is_stage_3(zero):
        return zero.bit16_groups
    groups: list[list[Tensor]] = [[] for _ in zero.optimizer.param_groups]
    for index, parameters in enumerate(zero.fp16_groups):
        groups[zero.sub_group_to_group_id[index]] += parameters
    return groups


def _pieces_of(zero: Any) -> dict[Tensor, list[Piece]]:
    """Return what is in each partition of this rank."""
    found: dict[Tensor, list[Piece]] = {}
    if _is_stage_3(zero):
        # Each parameter is cut into equal parts, one for each rank; a sub-group joins one rank's parts.
        for flat, group in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
            found[flat] = []
            for parameter in group:
                _, start, part = zero.grad_position[zero.get_param_id(parameter)]
                first = part * zero._get_param_partition_rank(parameter)
                size = min(part, parameter.ds_numel - first)
                found[flat] += [Piece(parameter, first, start, size)] if size > 0 else []
        return found
    # All parameters of a group are joined, then cut into equal parts.
    for index, flat in enumerate(zero.single_partition_of_fp32_groups):
        begin = zero.partition_size[index] * torch.distributed.get_rank(zero.real_dp_process_group[index])
        offsets = zero.round_robin_bit16_offsets[index]
        found[flat] = []
        for parameter, offset in zip(zero.round_robin_bit16_groups[index], offsets, strict=True):
            first, end = max(offset, begin), min(offset + parameter.numel(), begin + flat.numel())
            if first < end:
                found[flat].append(Piece(parameter, first - offset, first - begin, end - first))
    return found


@contextmanager
def _partitions_in_groups(zero: Any) -> Iterator[None]:
    """Put the partitions into the param groups, from which stage 3 takes them between steps."""
    if not _is_stage_3(zero) or any(group["params"] for group in zero.optimizer.param_groups):
        yield
        return
    zero._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        zero._clear_fp32_optimizer_param_groups()


def _checked_zero(engine: Any) -> Any:
    """Return the engine's optimizer, after checking that masks are exact with it.

    Raises:
        PolicyError: If they are not; says why.
    """
    if type(engine) is not DeepSpeedEngine:
        raise PolicyError(f"DeepSpeed: needs what deepspeed.initialize returns first, got {shown(engine)}")
    zero, why = engine.optimizer, None
    if type(zero) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        raise PolicyError(
            "DeepSpeed: policies need zero_optimization with stage 1, 2 or 3; with these settings its "
            f"optimizer is {type(zero).__name__}"
        )
    base = getattr(zero.optimizer, "inner", zero.optimizer)
    if rule_for(base) is None:
        why = (
            f"{type(base).__name__} has no update rule, which the entries of a partition need for ages of "
            "their own; give the engine torch.optim.AdamW(...), which Hugging Face's Trainer does if the "
            'config has no "optimizer", or set "torch_adam": true in the config'
        )
    elif getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        why = "offload_optimizer moves partitions away from the optimizer between steps"
    elif zero.elastic_checkpoint or engine.load_universal_checkpoint():
        why = "elastic and universal checkpoints hold moments without masks and ages"
    elif zero.torch_autocast_gradscaler is not None:
        why = "torch_autocast with float16 may skip the step of one partition and not of another"
    elif any(STATE in group for group in base.param_groups):
        why = "load_checkpoint was called before the block, where masks are lost; call it within"
    if why is not None:
        raise PolicyError(f"DeepSpeed: {why}")
    return zero
