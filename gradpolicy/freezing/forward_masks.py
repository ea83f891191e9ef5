"""Masked weights in the forward pass, with dense gradients."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import under
from gradpolicy.freezing.bound_policy import BoundPolicy
from gradpolicy.policies import ForwardMask
from gradpolicy.tensors.mask import Mask, as_tensor, intersect, same_mask
from gradpolicy.tensors.sharding import full_tensor, local_shard, shard_like
from gradpolicy.where import pick


class ForwardMasks:
    """Applies policies that mask weights in the forward pass.

    Between updates a parameter has its masked values, for tied weights, functions of the weights, evaluation,
    state_dicts and exports alike. The gradient is that of the masked weights, and is dense. The whole weights
    are restored during updates, and while mask sources read them.

    Args:
        model: The model.
        policies: The policies by name.
        named: The model's parameters by name.
        seed: The seed of mask sources without their own seed.

    Attributes:
        parameters: The parameters that match any policy, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        policies: Mapping[str, ForwardMask],
        named: Mapping[str, nn.Parameter],
        seed: int,
    ) -> None:
        self._policies: dict[str, BoundPolicy[ForwardMask]] = {}
        for name, policy in policies.items():
            with under(f"policy.{name}.params"):
                matched: dict[str, Tensor] = dict(pick(named, policy.params))
            with under(f"policy.{name}"):
                policy.mask.model = model
                policy.mask.setup(matched, seed=seed)
            self._policies[name] = BoundPolicy(name, policy, matched)
        self.parameters = {name: p for each in self._policies.values() for name, p in each.parameters.items()}
        self._masks: dict[str, Mask] = {}
        # The whole weights and the masks of masked parameters, or of this process's shards of them.
        self._whole: dict[str, Tensor] = {}
        self._active: dict[str, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}
        self._shown: set[str] = set()

    @property
    def policies(self) -> list[str]:
        """The names of the policies."""
        return list(self._policies)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters whose whole gradients are needed, by sources or for the decay."""
        names: set[str] = set()
        for each in self._policies.values():
            names |= each.gradient_names(step, epoch)
            names |= set(each.parameters) if self._decay(each) else set()
        return names

    @contextmanager
    def whole(self, parameters: Collection[Tensor] | None = None) -> Iterator[None]:
        """Restore the whole weights within the block.

        Args:
            parameters: The parameters; None means all parameters.
        """
        names = [
            name
            for name in self._whole
            if name not in self._shown and (parameters is None or self.parameters[name] in parameters)
        ]
        self._shown |= set(names)
        try:
            for name in names:
                self._put_back(name)
            yield
        finally:
            for name in names:
                self._mask(name)
            self._shown -= set(names)

    def begin_step(
        self, step: int, epoch: int, phase: str, before: Callable[[Collection[str]], None]
    ) -> set[str]:
        """Mask the weights for the forward passes of an effective step.

        Args:
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
            phase: The current phase.
            before: A function that is called with the names of parameters whose masked values are about to
                change.

        Returns:
            These names.
        """
        for name, value in self._loaded.items():
            self._own(name).copy_(local_shard(shard_like(value, self.parameters[name])))
        self._loaded = {}
        bound = self._policies.values()
        updates = {each.name: each.update(step, epoch, phase, self.whole) for each in bound}
        changed = set().union(*updates.values()) | (self.parameters.keys() - self._masks.keys())
        for each in bound:
            each.source.gathers = bool(each.gradient_names(step, epoch))
        if changed:
            before(changed)
            with self.whole():
                for each in bound:
                    if each.in_effect and updates[each.name]:
                        each.source.apply()
        for name in changed:
            self._set(name, self._combined(name))
        return changed

    def observe(self, held: Collection[Tensor], optimizer: int, now: tuple[int, int]) -> None:
        """Pass the gradients of an optimizer's parameters to the sources."""
        for each in self._policies.values():
            wanted = each.gradient_names(*now)
            gradients = {
                name: p.grad.detach()
                for name, p in each.parameters.items()
                if name in wanted and p in held and p.grad is not None
            }
            if gradients:
                each.show(gradients, optimizer)

    def decay(self, held: Collection[Tensor]) -> None:
        """Add the decay of masked entries to their gradients."""
        for each in self._policies.values():
            for name, parameter in each.parameters.items() if self._decay(each) else ():
                if name in self._whole and parameter in held and parameter.grad is not None:
                    hidden = self._whole[name].masked_fill(self._active[name], 0.0)
                    local_shard(parameter.grad).add_(hidden, alpha=self._decay(each))

    def release(self) -> None:
        """Remove the policies. The parameters keep their masked values."""
        for each in self._policies.values():
            each.source.release()
            each.source.model = None
        for name in list(self._whole):
            self._forget(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sources, and the whole weights of masked parameters."""
        with self.whole():
            whole = {name: full_tensor(self.parameters[name].detach()).clone() for name in self._whole}
        states = {name: each.mask_state() for name, each in self._policies.items()}
        return {
            "sources": {name: each.source.state_dict() for name, each in self._policies.items()},
            "masks": {name: state for name, state in states.items() if state is not None},
            "whole": whole,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. The weights are set at the next step."""
        for name, each in self._policies.items():
            if name in state.get("sources", {}):
                each.source.load_state_dict(state["sources"][name])
                each.load_mask_state(state["masks"].get(name))
        whole = state.get("whole", {})
        self._loaded = {name: value for name, value in whole.items() if name in self.parameters}
        for name in list(self._masks):
            self._forget(name)

    # ---- one parameter

    def _combined(self, name: str) -> Mask:
        parameter = self.parameters[name]
        combined: Mask = True
        for each in self._policies.values():
            if each.in_effect and name in each.parameters:
                combined = intersect(combined, each.masks[name], parameter.shape, parameter.device)
        return combined

    def _set(self, name: str, mask: Mask) -> None:
        if same_mask(self._masks.get(name), mask):
            return
        if name in self._whole:
            self._put_back(name)
            self._forget(name)
        self._masks[name] = mask
        if mask is not True:
            parameter = self.parameters[name]
            flags = as_tensor(mask, parameter.shape, parameter.device).expand(parameter.shape)
            self._active[name] = local_shard(shard_like(flags.contiguous(), parameter))
            self._whole[name] = torch.empty_like(self._own(name))
            self._mask(name)

    def _own(self, name: str) -> Tensor:
        return local_shard(self.parameters[name].detach())

    @torch.no_grad()
    def _put_back(self, name: str) -> None:
        own = self._own(name)
        torch.where(self._active[name], own, self._whole[name], out=own)

    @torch.no_grad()
    def _mask(self, name: str) -> None:
        own = self._own(name)
        self._whole[name].copy_(own)
        torch.where(self._active[name], own, own.new_zeros(()), out=own)

    def _forget(self, name: str) -> None:
        self._masks.pop(name, None)
        self._whole.pop(name, None)
        self._active.pop(name, None)

    @staticmethod
    def _decay(each: BoundPolicy[ForwardMask]) -> float:
        return each.policy.decay if each.in_effect else 0.0
