"""The optimizer inside the one that Hugging Face's accelerate has prepared."""

import sys
from typing import Any

from torch.optim import Optimizer


def is_prepared(optimizer: Any) -> bool:
    """Return True for accelerate's wrapper of an optimizer, without importing accelerate."""
    module = sys.modules.get("accelerate.optimizer")
    return module is not None and isinstance(optimizer, module.AcceleratedOptimizer)


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer without accelerate's wrappers."""
    while is_prepared(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def put_inside(prepared: Any, optimizer: Optimizer) -> None:
    """Replace the optimizer inside accelerate's wrapper; another optimizer is left alone."""
    while is_prepared(prepared) and is_prepared(prepared.optimizer):
        prepared = prepared.optimizer
    if is_prepared(prepared):
        # As after unpickling, which also updates the step method that the loss scaler calls.
        prepared.__setstate__({"optimizer": optimizer})
