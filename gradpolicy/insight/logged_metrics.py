"""Tells before training whether a metric will be logged, by one batch of each kind on a copy of the model."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from gradpolicy.errors import nearest

# In these a model may log what its steps do not. They need a Trainer, so they are not tried.
HOOKS = ("on_train_batch_end", *(f"on_{stage}_epoch_end" for stage in ("train", "validation", "test")))
# Callbacks of these packages log nothing else than is named here.
KNOWN_CALLBACKS = ("gradpolicy.", "lightning.")
OF_CALLBACKS = ("policy/", "cost/", "curvature/", "lr-")
# Lightning adds one of these where a value is logged by step and by epoch.
FORKS = ("_step", "_epoch")


def missing_metric(
    name: str, model: LightningModule, data: LightningDataModule, callbacks: Iterable[Callback]
) -> tuple[str, bool]:
    """What to say of a metric that a run will not log.

    Args:
        name: The metric.
        model: The model, which is left alone.
        data: The data module, set up for fitting.
        callbacks: The run's callbacks. For each metric that one keeps checkpoints by, a run logs the best
            value as ``…_best``.

    Returns:
        A message with the nearest names, empty if the metric is logged or nothing is known; and whether it is
        certain, because nothing but the model's steps logs metrics in this run.
    """
    callbacks = list(callbacks)
    names = logged_metrics(model, data)
    kept = {each.monitor for each in callbacks if isinstance(each, ModelCheckpoint) and each.monitor}
    known = names | {f"{metric}_best" for metric in kept or names}
    plain = {name, *(name.removesuffix(fork) for fork in FORKS)}
    if not names or plain & known or name.startswith(OF_CALLBACKS):
        return "", False
    others = [each for each in callbacks if not type(each).__module__.startswith(KNOWN_CALLBACKS)]
    certain = not others and not any(is_overridden(hook, model) for hook in HOOKS)
    return f"optimized_metric: {name!r} is not logged; {nearest(name, known)}", certain


def logged_metrics(model: LightningModule, data: LightningDataModule) -> set[str]:
    """The names that a model's steps log; empty if a step cannot be taken without a Trainer.

    Args:
        model: The model, which is left alone.
        data: The data module, set up for fitting.
    """
    names: set[str] = set()
    duplicate: Any = copy.deepcopy(model).eval()
    duplicate.log = lambda name, *arguments, **settings: names.add(name)
    loaders = {"training_step": data.train_dataloader, "validation_step": data.val_dataloader}
    with torch.random.fork_rng(devices=()), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for step, loader in loaders.items():
                if is_overridden(step, model):
                    getattr(duplicate, step)(next(iter(loader())), 0)
            if is_overridden("test_step", model):
                data.setup("test")
                duplicate.test_step(next(iter(data.test_dataloader())), 0)
        except Exception:
            # Some ask a Trainer, of which there is none yet, or have loaders of several kinds.
            return set()
    return names
