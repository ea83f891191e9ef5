"""Freezing under ZeroRedundancyOptimizer, where each rank holds the optimizer state of some parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from gradpolicy.errors import PolicyError
from gradpolicy.optim import checkpoint
from gradpolicy.optim.masked_optimizer import MaskedOptimizer
from gradpolicy.optim.masked_parameter import MaskedParameter

if TYPE_CHECKING:  # torch compiles TorchScript for half a second when this is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer


class MaskedZero(MaskedOptimizer):
    """A :class:`~gradpolicy.MaskedOptimizer` for a ZeroRedundancyOptimizer.

    Every rank has the masks and ages of all parameters, since it masks all gradients before they are clipped.
    Moments are in the local optimizer of the rank that owns a parameter; that optimizer is wrapped too and
    makes the update, exactly as on one process. Then ZeRO broadcasts the weights.

    Args:
        inner: The optimizer, without ``overlap_with_ddp``.
        frozen_state: As MaskedOptimizer's.
        bias_correction: As MaskedOptimizer's.

    Raises:
        PolicyError: If it overlaps its step with the backward pass, so that gradients cannot be masked first.
    """

    inner: ZeroRedundancyOptimizer

    def __init__(
        self, inner: ZeroRedundancyOptimizer, frozen_state: str = "keep", bias_correction: str = "entry"
    ) -> None:
        if inner._overlap_with_ddp:
            raise PolicyError(
                "ZeroRedundancyOptimizer: freeze policies need overlap_with_ddp=False: with overlap it "
                "updates weights within the backward pass, before gradients can be masked"
            )
        super().__init__(inner, frozen_state, bias_correction)
        self._wrapped.delegates = True
        inner.optim = MaskedOptimizer(inner.optim, frozen_state, bias_correction)
        # Ranks gather their states into one; the records beside it do not say how the owner stores its own.
        self.saves_dense = inner.optim.saves_dense = True
        # A parameter that was never masked has an age too, which is in no state on this rank.
        for parameter in (known for group in inner.param_groups for known in group["params"]):
            self._masked[parameter] = self._known(parameter)
        # Loading leaves a second copy of this rank's state there, which is not used.
        inner.register_load_state_dict_post_hook(lambda optimizer: optimizer.state.clear())

    def _set_up(self) -> None:
        super()._set_up()
        self._calls_closure_itself = False

    @classmethod
    def wraps(cls, optimizer: Any) -> bool:
        """Return True for a ZeroRedundancyOptimizer.

        Raises:
            PolicyError: If it is DeepSpeed's, which only `integrations.deepspeed` can wrap.
        """
        if type(optimizer).__module__.startswith("deepspeed"):
            raise deepspeed_refused(type(optimizer).__name__)
        # If this is an optimizer of that class, its module has been imported.
        zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)

    @property
    def local(self) -> MaskedOptimizer:
        """The optimizer of the parameters that this rank owns."""
        return self.inner.optim

    def owns(self, parameter: Tensor) -> bool:
        """Return True if this rank holds the parameter's moments."""
        return any(known is parameter for group in self.local.param_groups for known in group["params"])

    def set_masks(self, masks: Mapping[Tensor, Any], **options: Any) -> None:
        """Set masks, as MaskedOptimizer does; every rank must set the same."""
        super().set_masks(masks, **options)
        self.local.set_masks({key: mask for key, mask in masks.items() if self.owns(key)}, **options)

    def set_settings(self, settings: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Set settings of single parameters; every rank must set the same."""
        self.local.set_settings(settings)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather all state on one rank. Every rank must call this before that rank calls ``state_dict``."""
        self.inner.consolidate_state_dict(to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state; each rank keeps what it owns."""
        own, _, saved = checkpoint.split(state_dict)
        parameters = self._wrapped.parameters()
        # Torch's optimizer empties the dict that it is given.
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"])})
        records = {parameters[index]: record for index, record in saved.items()}
        # A parameter saved without a record was never masked there; here every parameter has a mask.
        for index, state in own["state"].items():
            if parameters[index] not in records:
                self._masked[parameters[index]].adopt_state(updates=int(state.get("step", 0)))
        for parameter, masked in self.local.masked_parameters().items():
            if parameter not in records:
                masked.adopt_state()
        for parameter, record in records.items():
            if self.owns(parameter):
                self.local.restore(parameter, record)

    def state_bytes(self, parameter: Tensor | None = None) -> int:
        """Return the bytes held on this rank for the state of one parameter, or of all."""
        return super().state_bytes(parameter) + self.local.state_bytes(parameter)

    def _step_inner(self, frozen: Iterable[MaskedParameter], closure: Callable[[], Any] | None) -> Any:
        """Step; the local optimizers do not change frozen entries."""
        return super()._step_inner((), closure)


def as_masked(optimizer: Optimizer) -> MaskedOptimizer:
    """Wrap an optimizer unless it is wrapped already."""
    return optimizer if isinstance(optimizer, MaskedOptimizer) else MaskedOptimizer(optimizer)


def deepspeed_refused(what: str, instead: str = "give it the engine") -> PolicyError:
    """Return the error that says where policies work under DeepSpeed, and what to do instead."""
    return PolicyError(
        f"{what}: freeze policies are refused under DeepSpeed except under Lightning's and Hugging Face's "
        "Trainer and in a loop of your own, with gradpolicy.integrations.deepspeed.training: its engine "
        f"updates partitions of the weights within its own step; {instead}"
    )
