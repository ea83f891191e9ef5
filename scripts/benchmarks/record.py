"""What the record costs: training steps of Lightning with the callback, against the same without it."""

import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger

import gradpolicy as gp
from benchmarks.measure import Row, one_thread, paired_ratio
from gradpolicy.insight.record import Record
from gradpolicy.policies import Policy
from gradpolicy.tasks.classification import Classifier
from gradpolicy.tasks.digits import DigitsDataModule
from gradpolicy.tasks.models import QuantizedConvNet

LOG_EVERY = 5
"""As conf/trainer/default.yaml."""
STEPS = 20
"""Updates to a timing: as many of them are recorded as in a long run."""


class Paced(Callback):
    """Lets a fit, which runs in a thread of its own, go on by so many updates when it is asked to."""

    def __init__(self) -> None:
        self.wanted, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.left = 0

    def advance(self) -> None:
        """Waits for the next updates."""
        self.wanted.release()
        self.done.acquire()

    def on_train_batch_start(self, *arguments: Any) -> None:
        """Waits to be asked."""
        if not self.left:
            self.wanted.acquire()
            self.left = STEPS

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Tells that the updates are done. It is called after the other callbacks."""
        self.left -= 1
        if not self.left:
            self.done.release()


@contextmanager
def fit(policies: dict[str, Policy], *more: Callback) -> Iterator[Callable[[], None]]:
    """A fit of the default job's network on its data; gives what makes the next updates."""
    paced = Paced()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=-1,
            log_every_n_steps=LOG_EVERY,
            limit_val_batches=0,
            logger=CSVLogger(folder),
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*more, gp.GradientPolicies(policies), paced],
        )
        network = QuantizedConvNet(channels=1, size=8, classes=10, width=32, levels=4, dropout=0.25)
        module, data = (
            Classifier(network, partial(torch.optim.AdamW, lr=1e-3)),
            DigitsDataModule(batch_size=64, seed=0),
        )
        thread = threading.Thread(target=trainer.fit, args=(module, data), daemon=True)
        thread.start()
        yield paced.advance
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = 0
        paced.left = 1 << 30
        paced.wanted.release()
        thread.join()


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


def processor_seconds(function: Callable[[], None]) -> float:
    """The processor time that a call takes, over all threads: other work on the machine changes it least."""
    start = time.process_time()
    function()
    return time.process_time() - start


def record() -> list[Row]:
    """The default job, and one whose masks change at every step."""
    warnings.simplefilter("ignore")
    cases = (
        ("the default job", default_policies, 1.01),
        ("masks of all parameters anew each step", masks_anew_each_step, None),
    )
    rows = []
    for what, policies, target in cases:
        with one_thread(), ExitStack() as stack:
            recorded = stack.enter_context(fit(policies(), Record()))
            plain = stack.enter_context(fit(policies()))
            rows.append(
                paired_ratio(what, recorded, plain, target=target, rounds=60, seconds=processor_seconds)
            )
    return rows


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"record": record}
