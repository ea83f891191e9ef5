"""Rebuilds DistributedDataParallel's reducer when the set of active parameters changes.

The reducer's parameters are fixed when the model is wrapped. If a parameter is frozen later, the reducer
waits for a gradient that never comes. If one is thawed later, its gradient is silently not reduced. With a
rebuilt reducer, autograd skips the frozen part as on one process, DDP does not search for unused parameters,
and frozen parameters are not sent.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

# The attribute of a model for the updater that was released and has not rebuilt the reducer yet.
_RELEASED = "_released_reducer_updater"


def trained_parameters(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """Return the ids of the parameters that get a gradient."""
    return frozenset(id(p) for p in parameters if p.requires_grad)


class ReducerUpdater:
    """Rebuilds the reducer of a DistributedDataParallel module when other parameters require a gradient.

    Args:
        model: The DistributedDataParallel module. Since it was created, only another updater may have frozen
            or thawed parameters.

    Attributes:
        rebuilds: The number of rebuilds.

    Example:
        Before the first forward pass of each optimizer step::

            updater = ReducerUpdater(model)
            ...
            model.module.trunk.requires_grad_(False)
            updater.refresh()
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model
        self.rebuilds = 0
        before: ReducerUpdater | None = vars(model).pop(_RELEASED, None)
        if before is None:
            self._searches = model.find_unused_parameters
            self._known = trained_parameters(model.module.parameters())
        else:
            before._pending.remove()
            self._searches, self._known = before._searches, before._known

    def refresh(self, *, find_unused_parameters: bool = False) -> bool:
        """Rebuild the reducer if that is needed. Call it between accumulation windows.

        Every rank must call this at the same point with the same parameters frozen.

        Args:
            find_unused_parameters: True if each backward pass has to search for parameters without a
                gradient, whatever the setting of the model.

        Returns:
            True if the reducer was rebuilt.
        """
        wanted = trained_parameters(self.model.module.parameters())
        search = find_unused_parameters or self._searches
        if wanted == self._known and search == self.model.find_unused_parameters:
            return False
        self.model.find_unused_parameters = search
        rebuild_reducer(self.model)
        self._known = wanted
        self.rebuilds += 1
        return True

    def release(self) -> None:
        """Stop updating, and let the reducer cover all that trains from the next forward pass on.

        Not at once, since the ranks communicate for it, and one of them may have failed.
        """
        covers_all = trained_parameters(self.model.module.parameters()) == self._known
        if not covers_all or self.model.find_unused_parameters != self._searches:
            vars(self.model)[_RELEASED] = self
            self._pending = self.model.register_forward_pre_hook(self._refresh_once)

    def _refresh_once(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._pending.remove()
            del vars(self.model)[_RELEASED]
            if trained_parameters(self.model.module.parameters()):
                self.refresh()


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Create a new reducer for the parameters that now require a gradient.

    The DistributedDataParallel module stays the same object and keeps its communication hooks. This does what
    its constructor and unpickling do, with its process group, as of torch 2.11 to 2.15.

    Raises:
        RuntimeError: If no parameter requires a gradient.
    """
    if not trained_parameters(model.module.parameters()):
        raise RuntimeError("no parameter of the model trains: there is nothing to reduce")
    parameters, expects_sparse = model._build_params_for_reducer()
    # Deleted first, which removes its hooks from the parameters.
    model.__dict__.pop("reducer", None)
    model.__dict__.pop("logger", None)
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()  # type: ignore[union-attr]
        model._static_graph_delay_allreduce_enqueued = False
    model._has_rebuilt_buckets = False
    for hook, state in model._comm_hooks:
        _register_comm_hook(model.reducer, state, hook)
