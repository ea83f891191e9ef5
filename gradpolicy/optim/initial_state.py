"""What an optimizer's state of a parameter begins with, and which part of it has a value for each entry.

The state of torch's own optimizers begins at 0, with few exceptions. What a third party's begins with is
found out once, by a first step of another optimizer of the same class on a small tensor: some keep an anchor,
which begins as the parameter.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AS_PARAMETER = "as the parameter"
_KNOWN: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, dict[str, float | str] | None]] = (
    weakref.WeakKeyDictionary()
)
OF_THE_TENSOR = ("step", "mu_product", "eta", "mu")
"""What torch's optimizers keep once for a whole tensor, and so does not belong to the entry of a scalar."""
INITIAL_VALUES: dict[tuple[str, str], Callable[[torch.optim.Optimizer, dict[str, Any]], float]] = {
    # Torch does not look at what a param group says of it.
    ("Adagrad", "sum"): lambda optimizer, _: float(optimizer.defaults["initial_accumulator_value"]),
    ("Rprop", "step_size"): lambda _, group: float(group["lr"]),
}
"""What state that does not begin at 0 begins with, given the optimizer and a param group.

Both parts of a complex number begin there.
"""


@functools.cache
def _adagrad_fills_its_state_at_once() -> bool:
    """Whether Adagrad's constructor makes the state, as up to torch 2.11, and its step never does."""
    return bool(torch.optim.Adagrad([torch.zeros(1, requires_grad=True)]).state)


def makes_state_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step makes the state of a parameter that has none."""
    return not (isinstance(optimizer, torch.optim.Adagrad) and _adagrad_fills_its_state_at_once())


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's whose state belongs to single parameters (all but LBFGS)."""
    return _is_of_torch(optimizer) and type(optimizer) is not torch.optim.LBFGS


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    # Adafactor and Muon call the package their home, others a module of it.
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is impossible without a closure; such optimizers move tensors that have no gradient.

    LBFGS is one: it goes where the gradients of former steps lead, too.
    """
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def entry_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    """The part of an optimizer's state that has a value (not a flag) for each of the parameter's entries."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype != torch.bool
        and (value.dim() or key not in OF_THE_TENSOR)
    }


def reset_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]
) -> None:
    """Resets the state of all entries of a parameter to its initial values, in place."""
    for key, value in entry_state(state, parameter).items():
        start = initial_value(optimizer, key, group, parameter)
        if start == AS_PARAMETER:
            value.copy_(parameter.detach())
        elif start is not None:
            (torch.view_as_real(value) if value.is_complex() else value).fill_(float(start))


def initial_value(
    optimizer: torch.optim.Optimizer, key: str, group: dict[str, Any], parameter: Tensor
) -> float | str | None:
    """What an entry of this state is before its first update.

    Returns:
        A number; `AS_PARAMETER`, the parameter's own value; or None where it is not known.
    """
    for kind in type(optimizer).__mro__:
        if (kind.__name__, key) in INITIAL_VALUES:
            return INITIAL_VALUES[kind.__name__, key](optimizer, group)
    if _is_of_torch(optimizer):
        return 0.0
    known = _KNOWN.setdefault(optimizer, {})
    if parameter.dim() not in known:
        known[parameter.dim()] = _probe(optimizer, group, parameter)
    found = known[parameter.dim()]
    return None if found is None else found.get(key, 0.0)


def _probe(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> dict[str, float | str] | None:
    """What state begins with, as a first step with gradient 0 shows; None where there can be no such step."""
    shape = (3,) * parameter.dim()
    count = 3 ** parameter.dim()
    start = torch.linspace(0.5, 1.5, count, device=parameter.device).to(parameter.dtype).view(shape)
    stand_in = start.clone().requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    still = {"weight_decay": 0.0} if "weight_decay" in group else {}
    devices = [parameter.device] if parameter.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = stand_in_optimizer(optimizer, {**group, **still}, stand_in)
            other.step()
    except Exception:
        # A stranger's constructor or step may want anything.
        return None
    return {
        key: _kind_of_start(value.detach(), start)
        for key, value in entry_state(other.state[stand_in], stand_in).items()
    }


def stand_in_optimizer(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and settings for another parameter."""
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    other: Any = kind([{**own, "params": [parameter]}], **settings)
    if callable(getattr(other, "train", None)):
        other.train()
    return other


def _kind_of_start(value: Tensor, start: Tensor) -> float | str:
    """What an entry of this state begins with, given what the small tensor was."""
    if torch.allclose(value, start.to(value.dtype), rtol=1e-2):
        return AS_PARAMETER
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) and not value.is_complex() else 0.0


def first_step_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, group: dict[str, Any]
) -> dict[str, Any]:
    """The state that an optimizer makes of a parameter at a step with gradient 0; changes neither."""
    stand_in = torch.zeros_like(parameter, memory_format=torch.preserve_format).requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    other = copy.copy(optimizer)
    other.__dict__ |= {
        "state": defaultdict(dict),
        "param_groups": [{**group, "params": [stand_in]}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    # By its class: a learning-rate scheduler counts calls of the instance's own.
    type(optimizer).step(other)
    return dict(other.state[stand_in])
