"""Runs training steps once more without an effect on logs and metrics."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchmetrics import Metric

LOGGING = ("log", "log_dict")


@contextmanager
def unobserved(module: nn.Module) -> Iterator[None]:
    """Let the module log nothing within the block, and use copies of its metrics."""
    former = {name: vars(module)[name] for name in LOGGING if name in vars(module)}
    metrics = [
        (parent, name, part)
        for parent in module.modules()
        # Not named_children, which leaves out the second name of one metric.
        for name, part in parent._modules.items()
        if isinstance(part, Metric)
    ]
    for parent, name, part in metrics:
        setattr(parent, name, part.clone())
    vars(module).update(dict.fromkeys(LOGGING, lambda *arguments, **named: None))
    try:
        yield
    finally:
        for name in LOGGING:
            del vars(module)[name]
        vars(module).update(former)
        for parent, name, part in metrics:
            setattr(parent, name, part)
