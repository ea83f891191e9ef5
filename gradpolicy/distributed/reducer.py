"""Rebuilds DistributedDataParallel's reducer when the set of active parameters changes.

The reducer's parameters are fixed when the model is wrapped. If a parameter is frozen later, the reducer
waits for a gradient that never comes. If one is thawed later, its gradient is silently not reduced. With a
rebuilt reducer, autograd skips the frozen part as on one process, DDP does not search for unused parameters,
and frozen parameters are not sent.
"""

from collections.abc import Iterable

from torch import nn
from torch._C._distributed_c10d import _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

from gradpolicy.distributed.compression import ActiveEntries
from gradpolicy.distributed.row_reducer import RowReducer
from gradpolicy.freezing.row_gradients import has_row_gradient, rows_of, set_whole


def trained_parameters(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """Return the ids of the parameters that get a whole gradient."""
    return frozenset(id(p) for p in parameters if p.requires_grad and not has_row_gradient(p))


class ReducerUpdater:
    """Rebuilds the reducer of a DistributedDataParallel module when other parameters require a gradient.

    Args:
        model: The DistributedDataParallel module. No parameter may have been frozen or thawed since then.
        communication: The model's communication hook; gradients of rows are sent in its dtype.

    Attributes:
        rebuilds: The number of rebuilds.

    Example:
        Before the first forward pass of each optimizer step::

            updater = ReducerUpdater(model)
            ...
            model.module.trunk.requires_grad_(False)
            updater.refresh()
    """

    def __init__(self, model: DistributedDataParallel, communication: ActiveEntries | None = None) -> None:
        self.model = model
        self.rows = RowReducer(model, communication)
        self.rebuilds = 0
        self._ignored = model.parameters_to_ignore
        self._known = trained_parameters(model.module.parameters())

    def refresh(self, *, find_unused_parameters: bool | None = None) -> bool:
        """Rebuild the reducer if that is needed. Call it between accumulation windows.

        Every rank must call this at the same point with the same parameters frozen.

        Args:
            find_unused_parameters: True if each backward pass has to search for parameters without a
                gradient; None keeps the setting.

        Returns:
            True if the reducer was rebuilt.
        """
        parameters = list(self.model.module.parameters())
        rows = [parameter for parameter in parameters if has_row_gradient(parameter)]
        if rows and not trained_parameters(parameters):
            set_whole(rows.pop())  # the reducer needs one
        wanted = trained_parameters(parameters)
        self.rows.follow({parameter: rows_of(parameter) for parameter in rows})
        search = (
            self.model.find_unused_parameters if find_unused_parameters is None else find_unused_parameters
        )
        if wanted == self._known and search == self.model.find_unused_parameters:
            return False
        self.model.find_unused_parameters = search
        self.model.parameters_to_ignore = self._ignored | {
            f"{module_name}.{name}"
            for module_name, module in self.model.module.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if has_row_gradient(parameter)
        }
        rebuild_reducer(self.model)
        self._known = wanted
        self.rebuilds += 1
        return True


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Create a new reducer for the parameters that now require a gradient.

    The DistributedDataParallel module stays the same object and keeps its communication hooks. This does what
    its constructor and unpickling do, with its process group, as of torch 2.11 to 2.13.

    Raises:
        RuntimeError: If no parameter requires a gradient.
    """
    if not trained_parameters(model.module.parameters()):
        raise RuntimeError("no parameter of the model trains: there is nothing to reduce")
    parameters, expects_sparse = model._build_params_for_reducer()
    _drop_reducer(model)
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()  # type: ignore[union-attr]
        model._static_graph_delay_allreduce_enqueued = False
    model._has_rebuilt_buckets = False
    for hook, state in model._comm_hooks:
        _register_comm_hook(model.reducer, state, hook)


def _drop_reducer(model: DistributedDataParallel) -> None:
    """Delete the old reducer, which removes its hooks from the parameters. That must come first."""
    model.__dict__.pop("reducer", None)
    model.__dict__.pop("logger", None)
