"""The callback that records what policies do."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from pydantic import BaseModel, NonNegativeInt

from gradpolicy.insight.costs import optimizer_bytes
from gradpolicy.insight.record.charts import chart
from gradpolicy.insight.record.flow_record import FlowRecord, flow_rows
from gradpolicy.insight.record.freeze_record import FreezeRecord
from gradpolicy.insight.record.record_file import RecordFile
from gradpolicy.lightning.callback import GradientPolicies, log_interval
from gradpolicy.optim.zero_redundancy import MaskedZero
from gradpolicy.tensors.sharding import is_sharded

SECONDS = 1.0
"""How long rows wait at most until they are written."""


class SavedChanges(BaseModel, extra="forbid", strict=True):
    """What `FreezeRecord.state` gives."""

    flips: dict[str, NonNegativeInt] = {}
    first: list[str] = []


class SavedRecord(BaseModel, extra="forbid", strict=True):
    """What a checkpoint holds of a record."""

    size: NonNegativeInt
    operations: dict[str, dict[str, NonNegativeInt]]
    changes: SavedChanges


class Record(Callback):
    """Writes what policies do into ``record.jsonl`` in the run's directory, a JSON object a line.

    Rows are of updates: of every ``log_every_n_steps``-th, and of every one before which masks changed, then
    without what takes a look at every weight; for flow policies also of every validation, test or prediction.
    ``step`` counts the updates so far. They are in the file at most a second later.
    docs/insight/record.md says what a row holds; :func:`gradpolicy.insight.record.load` reads the file as a
    table.

    A checkpoint holds how long the file was. A resumed run begins with that much of it, also in another
    directory, so that there is neither a gap nor a row twice. On several processes the first one writes the
    numbers of all.

    Loggers, except for that of CSV files, get the sums over each policy's parameters as ``policy/<name>/…``.

    Args:
        directory: The run's directory; None: the trainer's ``default_root_dir``.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self.file: RecordFile | None = None
        self._policies: GradientPolicies | None = None
        self._flow: FlowRecord | None = None
        self._freeze: FreezeRecord | None = None
        self._restored: dict[str, Any] | None = None
        # The number of updates at the last look, and the evaluation whose end is still to be written.
        self._updates = 0
        self._ended: str | None = None
        # What is still to be written, and when something was written last.
        self._pending: list[tuple[int, int, str, dict[str, Any]]] = []
        self._written = 0.0
        # How many parameters optimizers had, and what plain Adam would hold for them.
        self._counted, self._adam = 0, 0

    # ---- the beginning and the end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Asks the policies of the run to be measured."""
        found = [each for each in trainer.callbacks if isinstance(each, GradientPolicies)]  # type: ignore[attr-defined]
        self._policies = found[0] if found else None
        if self.file is None and trainer.is_global_zero:
            self.file = RecordFile(Path(self.directory or trainer.default_root_dir))
        if self._policies is not None:
            self._policies.recorded = True
            self._policies.before_removal.append(self._write_evaluation)
            self._flow = FlowRecord(self._policies, self._flow)
        self._trainer = trainer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes up the record of the run before, as it was when the checkpoint was saved."""
        policies, restored = self._policies, self._restored or {}
        if policies is not None and policies.freezer is not None:
            self._freeze = FreezeRecord(policies, restored.get("changes"))
            policies.freezer.observers.append(self._freeze)
        if self._flow is not None:
            self._flow.restore(restored.get("operations", {}))
        self._updates = self._updates_of(trainer)
        # A second fit by the same callback goes on.
        if self.file is not None and (restored or not self.file.size):
            self._begin(self.file, restored)
        self._restored = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes up the record of a run that had nothing left to train: no training started."""
        if self.file is not None and self._restored:
            self._begin(self.file, self._restored)
        self._restored = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes the rest; lets go of the file, and of the policies."""
        self._write_evaluation()
        self._write()
        if self._policies is not None:
            self._policies.recorded = False
            if self._write_evaluation in self._policies.before_removal:
                self._policies.before_removal.remove(self._write_evaluation)
        if self._freeze is not None:
            self._freeze.remove()
        self._freeze, self._restored = None, None
        if self.file is not None:
            self.file.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes what is known of a run that fails."""
        if trainer.world_size == 1:
            self._write()

    def _begin(self, file: RecordFile, restored: dict[str, Any]) -> None:
        if not file.begin(restored.get("size", 0)):
            rank_zero_warn(f"{file.path} lacks rows of the steps before the checkpoint")

    # ---- training

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps the weights as they are before an update whose size is to be recorded."""
        if self._freeze is not None and self._policies is not None and self._policies.records_now:
            self._freeze.keep_weights()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes what there is to say of an update, if one took place."""
        updates = self._updates_of(trainer)
        if updates == self._updates:
            return
        self._updates = updates
        policies = self._policies
        logs = updates % log_interval(trainer) == 0 if policies is None else policies.records_now
        changes = self._freeze is not None and self._freeze.has_changes
        if logs or changes:
            self._note(trainer, **self._update_parts(trainer, logs))

    def _update_parts(self, trainer: Trainer, logs: bool) -> dict[str, Any]:
        """What this process knows of an update."""
        parts: dict[str, Any] = {}
        if self._freeze is not None:
            parts["freeze"] = self._freeze.take(measured=logs)
        if self._flow is not None and logs:
            parts["flow"] = self._flow.take("fit")
        if logs:
            parts["state_bytes"] = sum(optimizer_bytes(each) for each in trainer.optimizers)
        return parts

    def _updates_of(self, trainer: Trainer) -> int:
        return trainer.global_step if self._policies is None else self._policies.updates(trainer)

    # ---- evaluation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps what was met in training apart."""
        self._begin_evaluation()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps what was met before apart."""
        self._begin_evaluation()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps what was met before apart."""
        self._begin_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes what was met in a validation."""
        self._ended = None if trainer.sanity_checking else "validate"
        if trainer.state.fn is TrainerFn.FITTING:
            self._write_evaluation()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the test is over; other callbacks may still use its policies."""
        self._ended = "test"

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes that the prediction is over."""
        self._ended = "predict"

    def _begin_evaluation(self) -> None:
        if self._flow is not None:
            self._flow.count("fit")

    def _write_evaluation(self) -> None:
        phase, self._ended = self._ended, None
        if phase is not None and self._flow is not None:
            self._note(self._trainer, phase, flow=self._flow.take(phase))
            self._write()

    # ---- writing

    def _note(self, trainer: Trainer, phase: str = "fit", **parts: Any) -> None:
        """Keeps what is to be written, at most for a second: read together, numbers take far less time."""
        self._pending.append((self._updates_of(trainer), trainer.current_epoch, phase, parts))
        # Processes must put theirs together at the same moment, which a clock does not tell.
        if trainer.world_size > 1 or time.monotonic() - self._written >= SECONDS:
            self._write()

    @torch.no_grad()
    def _write(self) -> None:
        """Appends what was kept."""
        pending, self._pending = self._pending, []
        rows = [row for each in pending for row in self._rows(*each)]
        if self.file is not None and rows:
            self.file.append(rows)
            if self._policies is not None and self._policies.log_policies:
                chart(rows, self._trainer.loggers)
        self._written = time.monotonic()

    def _rows(self, step: int, epoch: int, phase: str, parts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of an update or of an evaluation, with what all processes know; on the first of them."""
        trainer, first = self._trainer, parts["freeze"]["first"] if "freeze" in parts else ()
        own = {**parts}
        if "freeze" in parts and self._freeze is not None:
            own["freeze"] = self._freeze.read(parts["freeze"])
        if "flow" in parts:
            own["flow"] = FlowRecord.read(parts["flow"])
        of_ranks, is_divided = [own], trainer.world_size > 1 and _is_divided(trainer.optimizers)
        if trainer.world_size > 1 and (is_divided or own.get("flow")):
            of_ranks = _on_first_rank(own, trainer)
        if self.file is None:
            return
        rows: list[dict[str, Any]] = []
        if "freeze" in parts and self._freeze is not None:
            columns = [each["freeze"] for each in of_ranks] if is_divided else [own["freeze"]]
            rows += self._freeze.rows(columns, first)
        if "flow" in parts:
            rows += flow_rows(phase, [each["flow"] for each in of_ranks])
        if "state_bytes" in parts:
            held = sum(each["state_bytes"] for each in of_ranks) if is_divided else own["state_bytes"]
            rows.append({"kind": "memory", "state_bytes": held, "adam_bytes": self._adam_bytes(trainer)})
        for row in rows:
            yield {"kind": row.pop("kind"), "step": step, "epoch": epoch, **row}

    def _adam_bytes(self, trainer: Trainer) -> int:
        """What plain Adam would hold; counted anew where parameters have joined an optimizer."""
        count = sum(len(group["params"]) for each in trainer.optimizers for group in each.param_groups)
        if self._counted != count:
            self._counted, self._adam = count, adam_bytes(trainer.optimizers)
        return self._adam

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """How long the record is, and what was counted since its last rows."""
        self._write()
        if self._flow is not None:
            self._flow.count("fit")
        return {
            "size": 0 if self.file is None else self.file.size,
            "operations": {} if self._flow is None else self._flow.state(),
            "changes": {} if self._freeze is None else self._freeze.state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until training starts."""
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


def _on_first_rank(parts: dict[str, Any], trainer: Trainer) -> list[dict[str, Any]]:
    """What every process knows, on the first one; nothing elsewhere."""
    found: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
    dist.gather_object(parts, found)
    return found or []
