"""The callback that records what policies do."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from pydantic import BaseModel, NonNegativeInt

from gradpolicy.insight.costs import optimizer_bytes
from gradpolicy.insight.record.record_file import RecordFile
from gradpolicy.lightning.callback import GradientPolicies, log_interval
from gradpolicy.measurements import Measured
from gradpolicy.optim.zero_redundancy import MaskedZero
from gradpolicy.tensors.sharding import is_sharded


class SavedRecord(BaseModel, extra="forbid", strict=True):
    """What a checkpoint holds of a record."""

    size: NonNegativeInt


class Record(Callback):
    """Writes what policies do into ``record.jsonl`` in the run's directory, a JSON object a line.

    Rows are of every ``log_every_n_steps``-th update; for flow policies also of every validation, test or
    prediction. ``step`` counts the updates so far. docs/insight/record.md says what a row holds;
    :func:`gradpolicy.insight.record.load` reads the file as a table.

    A checkpoint holds how long the file was. A resumed run begins with that much of it, so that there is
    neither a gap nor a row twice. On several processes the first one writes the
    numbers of all.

    Args:
        directory: The run's directory; None: the trainer's ``default_root_dir``.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.file: RecordFile | None = None
        self._has_policies = False
        self._restored: dict[str, Any] | None = None
        # The number of updates at the last batch without policies.
        self._updates = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask the policies of the run for what they measure."""
        self._trainer = trainer
        if self.file is None and trainer.is_global_zero:
            self.file = RecordFile(Path(self.directory or trainer.default_root_dir))
        for each in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(each, GradientPolicies):
                self._has_policies = True
                if self._write not in each.sinks:
                    each.sinks.append(self._write)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the record of the run before, as it was when the checkpoint was saved."""
        self._updates = trainer.global_step
        # A second fit by the same callback goes on.
        if self.file is not None and (self._restored or not self.file.size):
            self._begin(self.file, self._restored or {})
        self._restored = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take up the record of a run that had nothing left to train: no training started."""
        if self.file is not None and self._restored:
            self._begin(self.file, self._restored)
        self._restored = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write how much state the optimizers of a run without policies hold."""
        updates = trainer.global_step
        if not self._has_policies and updates != self._updates and updates % log_interval(trainer) == 0:
            self._write("fit", updates, {})
        self._updates = updates

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the file; what comes later opens it again."""
        if self.file is not None:
            self.file.close()

    def _begin(self, file: RecordFile, restored: dict[str, Any]) -> None:
        if not file.begin(restored.get("size", 0)):
            rank_zero_warn(f"{file.path} lacks rows of the steps before the checkpoint")

    def _write(self, phase: str, step: int, measured: Measured) -> None:
        """Append a row for each policy, and in training one for the memory of the optimizers."""
        rows = [{"kind": each["kind"], "policy": name, **each} for name, each in measured.items()]
        if phase == "fit":
            optimizers = self._trainer.optimizers
            held = sum(optimizer_bytes(each) for each in optimizers)
            if _is_divided(optimizers):
                held = int(self._trainer.strategy.reduce(torch.tensor(held), reduce_op="sum"))
            rows.append({"kind": "memory", "state_bytes": held, "adam_bytes": adam_bytes(optimizers)})
        if self.file is not None:
            epoch = self._trainer.current_epoch
            self.file.append({"kind": row["kind"], "step": step, "epoch": epoch, **row} for row in rows)
            if phase != "fit":
                # The stage ends, perhaps after this callback.
                self.file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return how long the record is."""
        return {"size": 0 if self.file is None else self.file.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        SavedRecord.model_validate(state_dict)
        self._restored = state_dict


def adam_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Bytes of state that plain Adam would hold: two moments an entry, and a count for each parameter.

    Example:
        >>> adam_bytes([torch.optim.SGD([torch.ones(10)], lr=0.1)])
        84
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return sum(2 * parameter.numel() * parameter.element_size() + 4 for parameter in parameters)


def _is_divided(optimizers: Collection[torch.optim.Optimizer]) -> bool:
    """Whether processes hold different parts of parameters or of optimizer state."""
    parameters = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return any(MaskedZero.wraps(getattr(each, "inner", each)) for each in optimizers) or any(
        is_sharded(parameter) for parameter in parameters
    )
