"""Masked weights in the forward pass, with dense gradients."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gradpolicy.tensors.mask import Mask, as_tensor, same_mask
from gradpolicy.tensors.sharding import full_tensor, local_shard, shard_like


class ForwardMasks:
    """Parameters that have masked values between updates.

    So tied weights, functions of the weights, evaluation, state_dicts and exports see these. The gradient is
    that of the masked weights, and is dense. The whole weights are restored during updates, and while mask
    sources read them.

    Args:
        parameters: The parameters by name.

    Attributes:
        parameters: As given.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self._masks: dict[str, Mask] = {}
        # The whole weights and the masks of masked parameters, or of this process's shards of them.
        self._whole: dict[str, Tensor] = {}
        self._active: dict[str, Tensor] = {}
        self._loaded: dict[str, Tensor] = {}
        self._shown: set[str] = set()

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

    def unset(self) -> set[str]:
        """Return the names of parameters without a mask yet, or since a state was loaded."""
        return self.parameters.keys() - self._masks.keys()

    def set(self, name: str, mask: Mask) -> None:
        """Mask the values of a parameter."""
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

    def decay(self, name: str, factor: float) -> None:
        """Add the decay of the masked entries of a parameter to its gradient."""
        gradient = self.parameters[name].grad
        if name in self._whole and gradient is not None:
            hidden = self._whole[name].masked_fill(self._active[name], 0.0)
            local_shard(gradient).add_(hidden, alpha=factor)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole weights of masked parameters.

        After training, too, when the weights may have been changed; so they are the same afterwards.
        """
        return {name: self._whole_weights(name) for name in self._whole}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of :meth:`state_dict`, for :meth:`restore_loaded`."""
        self._loaded = {name: value for name, value in state.items() if name in self.parameters}
        for name in list(self._masks):
            self._forget(name)

    def restore_loaded(self) -> None:
        """Set the weights that were loaded."""
        for name, value in self._loaded.items():
            self._own(name).copy_(local_shard(shard_like(value, self.parameters[name])))
        self._loaded = {}

    def _own(self, name: str) -> Tensor:
        return local_shard(self.parameters[name].detach())

    @torch.no_grad()
    def _put_back(self, name: str) -> None:
        own = self._own(name)
        torch.where(self._active[name], own, self._whole[name], out=own)

    def _whole_weights(self, name: str) -> Tensor:
        before = self._own(name).clone()
        if name not in self._shown:
            self._put_back(name)
        whole = full_tensor(self.parameters[name].detach()).clone()
        self._own(name).copy_(before)
        return whole

    @torch.no_grad()
    def _mask(self, name: str) -> None:
        own = self._own(name)
        self._whole[name].copy_(own)
        torch.where(self._active[name], own, own.new_zeros(()), out=own)

    def _forget(self, name: str) -> None:
        for each in (self._masks, self._whole, self._active):
            each.pop(name, None)
