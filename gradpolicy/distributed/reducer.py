"""Rebuilds DistributedDataParallel's reducer whenever other parameters train.

Which parameters the reducer reduces is fixed when the model is wrapped. If a parameter is frozen
later, the reducer waits for a gradient that never comes. If one is thawed later, its gradient is never
reduced, and nothing says so. With a rebuilt reducer, autograd leaves out the frozen part as it does on one
process, DDP need not search for unused parameters, and nothing frozen is sent.
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
    """Rebuilds the reducer of a DistributedDataParallel model when other parameters require a gradient.

    Args:
        model: The wrapped model. Nothing may have been frozen or thawed since it was wrapped.
        communication: The model's communication hook; gradients of rows are sent in its dtype.

    Attributes:
        rebuilds: How often the reducer was rebuilt.

    Example:
        Before each forward pass that begins an optimizer step::

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
            find_unused_parameters: Whether each backward pass has to look for parameters that get no
                gradient; None keeps the setting.

        Returns:
            Whether the reducer was rebuilt.
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
    """Give a wrapped model a new reducer for the parameters that require a gradient now.

    The wrapped model stays the same object and keeps its communication hooks. This does what the constructor
    and unpickling do, with the process group that the model has, as read in torch 2.11 to 2.13.

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
