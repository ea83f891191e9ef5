"""Averages gradients of active rows over the ranks of DistributedDataParallel."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from gradpolicy.tensors.row_gradient import ActiveRows, RowGradient


class RowReducer:
    """Averages the gradients of rows at the end of each backward pass, by one all-reduce per dtype.

    The reducer of DistributedDataParallel expects whole gradients, so it does not include these parameters.

    Args:
        model: The wrapped model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self._rows: Mapping[nn.Parameter, ActiveRows] = {}
        self._is_queued = False
        self._hook = model.register_forward_hook(self._after_forward)

    def follow(self, rows: Mapping[nn.Parameter, ActiveRows]) -> None:
        """Set the parameters to reduce, each with its rows."""
        self._rows = rows

    def remove(self) -> None:
        """Stop reducing."""
        self._hook.remove()

    def _after_forward(self, model: DistributedDataParallel, inputs: Any, outputs: Any) -> None:
        if self._rows and torch.is_grad_enabled() and model.require_backward_grad_sync:
            for each in tree_leaves(outputs):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(self._queue)

    def _queue(self, gradient: Tensor) -> None:
        """Schedule the reduction for the end of the current backward pass."""
        if not self._is_queued:
            self._is_queued = True
            # As in DistributedDataParallel and FSDP2 of torch 2.11 to 2.13.
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._is_queued = False
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self._rows:
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in alike.values():
            self._average(parameters)

    def _average(self, parameters: list[nn.Parameter]) -> None:
        values = [self._values(parameter) for parameter in parameters]
        # A parameter that no rank used keeps a gradient of None.
        used = values[0].new_tensor([parameter.grad is not None for parameter in parameters])
        packed = torch.cat([used, *[each.flatten() / self.model.process_group.size() for each in values]])
        dist.all_reduce(packed, group=self.model.process_group)
        used, *averages = packed.split([len(used), *[each.numel() for each in values]])
        for parameter, own, average, is_used in zip(parameters, values, averages, used.tolist(), strict=True):
            own.copy_(average.view(own.shape))
            if parameter.grad is None and is_used:
                parameter.grad = RowGradient(own, *self._rows[parameter], parameter.shape)

    def _values(self, parameter: nn.Parameter) -> Tensor:
        """Return the gradient of a parameter's rows, to be written to; zeros if it has none."""
        gradient, rows = parameter.grad, self._rows[parameter]
        if gradient is None:
            return parameter.new_zeros(rows.shape(parameter.shape))
        # Whole, for example, if a rule replaces the whole operation; of other rows, if not set to None.
        if not isinstance(gradient, RowGradient) or not gradient.holds(rows):
            parameter.grad = gradient = RowGradient(rows.select(gradient), *rows, parameter.shape)
        return gradient.held
