"""Several optimizers as one, and optimizers inside those of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shortened, shown, under
from gradpolicy.where import named_parameters, pick


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one: one ``step``, one ``state_dict``, one learning-rate scheduler.

    Each entry creates an optimizer of the parameters that its globs match, that have its number of
    dimensions, and that are in no entry before it. Param groups and state are those of the optimizers, one
    after the other.

    Args:
        model: The model, or its named parameters.
        entries: Dicts of ``params`` (globs on parameter names), ``optimizer`` (a class, or a function that
            makes an optimizer of parameters), perhaps ``ndim``, and arguments of the optimizer.

    Attributes:
        optimizers: The optimizers, in the order of the entries.

    Raises:
        PolicyError: If a parameter is in no entry, an entry has no parameters, or its optimizer rejects its
            arguments or needs a closure.

    Example:
        >>> import torch, gradpolicy as gp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> optimizer = gp.Optimizers(model, [
        ...     {"params": "*.weight", "ndim": 2, "optimizer": torch.optim.Muon, "lr": 0.02},
        ...     {"params": "*", "optimizer": torch.optim.AdamW, "lr": 1e-3},
        ... ])
        >>> [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
        [(0.02, 1), (0.001, 3)]
    """

    # Code that creates optimizers from parameters must pass their names too.
    needs_names = True

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        entries: Iterable[Mapping[str, Any]],
    ) -> None:
        named = named_parameters(model) if isinstance(model, nn.Module) else _by_name(model)
        left = dict.fromkeys(named.values())
        self.optimizers: list[torch.optim.Optimizer] = []
        for place, entry in enumerate(entries if isinstance(entries, Iterable) else [entries]):
            if not isinstance(entry, Mapping):
                raise PolicyError(f"Optimizers: expected a list with a dict an optimizer, got {shown(entry)}")
            with under(f"Optimizers[{place}]"):
                self.optimizers.append(_made(named, left, **{str(key): entry[key] for key in entry}))
        if left:
            names = [name for name, parameter in named.items() if parameter in left]
            raise PolicyError(f"Optimizers: no entry has {shortened(names)}; end with one for '*'")
        self._counts = [len(each.param_groups) for each in self.optimizers]
        groups = [group for each in self.optimizers for group in each.param_groups]
        first, *others = (each.defaults for each in self.optimizers)
        super().__init__(groups, {key: first[key] for key in first if all(key in each for each in others)})
        # All keep their state in one dict.
        for each in self.optimizers:
            self.state.update(each.state)
            each.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of one of the optimizers.

        Raises:
            PolicyError: After construction, when it belongs to none of them.
        """
        if len(self.param_groups) >= sum(self._counts):
            raise PolicyError("Optimizers: takes no further param group; name all parameters in an entry")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each optimizer.

        Args:
            closure: Reevaluates the model and returns the loss; it runs once, before all steps.

        Returns:
            The closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers, "_counts": self._counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state that were loaded or unpickled, and pass each optimizer its own."""
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for each, count in zip(self.optimizers, self._counts, strict=True):
            own = [group for _, group in zip(range(count), groups, strict=False)]
            # Adds settings of newer versions of torch.
            each.__setstate__({"state": self.state, "param_groups": own})


def _by_name(model: Iterable[Any]) -> dict[str, nn.Parameter]:
    named = list(model) if isinstance(model, Iterable) else [None]
    if not all(isinstance(each, tuple) and isinstance(each[-1], Tensor) for each in named):
        raise PolicyError("Optimizers: needs the model, or model.named_parameters(), not parameters alone")
    return dict(named)


def _made(
    named: Mapping[str, nn.Parameter],
    left: dict[nn.Parameter, None],
    *,
    params: str | Iterable[str] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ndim: int | None = None,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Return the optimizer of an entry, and remove its parameters from those that are left."""
    if params is None or not callable(optimizer):
        raise PolicyError("needs params, globs, and optimizer, such as torch.optim.AdamW")
    matched = pick(named, params).values()
    own = [each for each in matched if each in left and ndim in (None, each.ndim)]
    if not own:
        dimensions = "" if ndim is None else f" with {ndim} dimensions"
        raise PolicyError(f"no parameter{dimensions} that {shown(params)} matches is left for it")
    for each in own:
        del left[each]
    try:
        made = optimizer(own, **settings)
    except (TypeError, ValueError) as error:
        raise PolicyError(str(error)) from error
    if not isinstance(made, torch.optim.Optimizer) or isinstance(made, torch.optim.LBFGS | Optimizers):
        raise PolicyError(
            f"optimizer: expected an optimizer whose step takes no closure, got {type(made).__name__}"
        )
    return made


def plain_optimizers(optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the innermost optimizers, with :class:`Optimizers` replaced by its parts."""
    inner = [getattr(each, "inner", each) for each in optimizers]
    parts = [each.optimizers if isinstance(each, Optimizers) else [each] for each in inner]
    return [each for some in parts for each in some]


# --- what accelerate has prepared


def is_prepared(optimizer: Any) -> bool:
    """Return True for accelerate's wrapper of an optimizer, without importing accelerate."""
    module = sys.modules.get("accelerate.optimizer")
    return module is not None and isinstance(optimizer, module.AcceleratedOptimizer)


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer without accelerate's wrappers."""
    while is_prepared(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def put_inside(prepared: Any, optimizer: torch.optim.Optimizer) -> None:
    """Replace the optimizer inside accelerate's wrapper; another optimizer is left alone."""
    while is_prepared(prepared) and is_prepared(prepared.optimizer):
        prepared = prepared.optimizer
    if is_prepared(prepared):
        # As after unpickling, which also updates the step method that the loss scaler calls.
        prepared.__setstate__({"optimizer": optimizer})
