"""What the record costs a training step: the time spent in it, against the rest of the same steps."""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

import gradpolicy as gp
from benchmarks.callback_cost import STEPS, Clock
from benchmarks.measure import Row, one_thread
from gradpolicy.insight.record import Record
from gradpolicy.policies import Policy
from gradpolicy.tasks.classification import Classifier
from gradpolicy.tasks.digits import DigitsDataModule
from gradpolicy.tasks.models import QuantizedConvNet

LOG_EVERY = 10
"""As conf/trainer/default.yaml."""


def cost(what: str, policies: Mapping[str, Policy], target: float | None = None) -> Row:
    """Trains the default job's network on its data with a record.

    Args:
        what: What is measured, in words.
        policies: The policies.
        target: The most that a step with the record may take, against the same without.
    """
    torch.manual_seed(0)
    network = QuantizedConvNet(channels=1, size=8, classes=10, width=32, levels=4, dropout=0.25)
    with tempfile.TemporaryDirectory() as folder:
        record = Record(folder)
        callback = gp.GradientPolicies(policies)
        clock = Clock(record, lambda: callback._measurements)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=STEPS,
            log_every_n_steps=LOG_EVERY,
            limit_val_batches=0,
            logger=CSVLogger(folder),
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[record, callback, clock],
        )
        trainer.fit(
            Classifier(network, partial(torch.optim.AdamW, lr=1e-3)), DigitsDataModule(batch_size=64, seed=0)
        )
    return clock.row(what, target)


def default_policies() -> dict[str, Policy]:
    """As conf/train.yaml."""
    return {
        "stop": gp.Stop(modules="model.probe"),
        "straight_through": gp.StraightThrough(ops=["round"]),
        "random_freeze": gp.Freeze(
            gp.masks.Random(density=0.5, every=5), params="model.trunk.*", frozen_state="zero"
        ),
    }


def masks_anew_each_step() -> dict[str, Policy]:
    """Masks of every parameter, drawn anew for every update."""
    return {"random": gp.Freeze(gp.masks.Random(density=0.1, every=1), params="*")}


def record() -> list[Row]:
    """The default job, and one whose masks change at every step."""
    warnings.simplefilter("ignore")
    with one_thread():
        return [
            cost("the default job", default_policies(), 1.01),
            cost("masks of all parameters anew each step", masks_anew_each_step()),
        ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"record": record}
