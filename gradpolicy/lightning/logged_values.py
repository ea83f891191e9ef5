"""Saves what a run has logged and measured, so that a resumed run logs what the run left alone would have.

- The row of a batch reaches the loggers after the checkpoint of that batch is saved, so the row is saved too.
- Averages over an unfinished epoch, Lightning's (``self.log(..., on_epoch=True)``) and those of torchmetrics,
  are saved as each rank has them.
- ``metrics.csv`` of the resumed run begins with the rows that were written when the checkpoint was saved.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars, move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities import rank_zero_warn
from torchmetrics import Metric

from gradpolicy.lightning.resume_point import BATCH, EPOCH, VALIDATION

# The fields that say how a value is logged, except its reduction and its synchronization.
DESCRIPTION = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


# ---- rows


def pending_row(trainer: Trainer, moment: str) -> dict[str, Any]:
    """The row that is logged after a point: ``metrics``, numbers by name, and ``step``; or nothing."""
    connector, epoch_loop = trainer._logger_connector, trainer.fit_loop.epoch_loop
    due = {BATCH: connector.should_update_logs and not epoch_loop._should_accumulate(), EPOCH: True}
    values = convert_tensors_to_scalars(connector.metrics["log"]) if due.get(moment) else {}
    if not values:
        return {}
    step = values.pop("step", None)
    if step is None:
        values.setdefault("epoch", trainer.current_epoch)
        # Lightning logs the values of an epoch at the step of its last batch.
        step = epoch_loop._batches_that_stepped - (moment == EPOCH)
    return {"metrics": values, "step": int(step)}


def log_row(trainer: Trainer, row: Mapping[str, Any]) -> None:
    """Logs what `pending_row` gave."""
    if row:
        trainer._logger_connector.log_metrics(row["metrics"], step=row["step"])


def written_rows(trainer: Trainer) -> list[dict[str, Any]]:
    """Writes what CSV loggers still hold; gives the file of each, and how many rows it has."""
    found = []
    for logger in _csv_loggers(trainer):
        logger.save()
        path = Path(logger.experiment.metrics_file_path)
        found.append({"path": str(path.absolute()), "rows": _count_rows(path)})
    return found


def copy_rows(trainer: Trainer, written: list[dict[str, Any]]) -> None:
    """Puts the rows that `written_rows` counted before those of the resumed run."""
    for logger, former in zip(_csv_loggers(trainer), written, strict=False):
        source, target = Path(former["path"]), Path(logger.experiment.metrics_file_path)
        if not former["rows"]:
            continue
        if source.absolute() == target.absolute():
            if _count_rows(target) < former["rows"]:
                rank_zero_warn(
                    f"{target} begins at the resumed step: a CSVLogger whose version= is that of the run"
                    " before deletes its file; leave version= out"
                )
            continue
        if not source.is_file():
            rank_zero_warn(f"{target} begins at the resumed step: {source}, with the steps before, is gone")
            continue
        rows = _read_rows(source)[: former["rows"]] + _read_rows(target)
        writer = logger.experiment
        writer.metrics_keys = sorted({*writer.metrics_keys, *(name for row in rows for name in row)})
        with target.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, writer.metrics_keys)
            table.writeheader()
            table.writerows(rows)


def _csv_loggers(trainer: Trainer) -> list[CSVLogger]:
    if not trainer.is_global_zero:
        return []
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]


def _count_rows(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file) - 1


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


# ---- averages


def averages(trainer: Trainer, pl_module: LightningModule, moment: str) -> dict[str, Any]:
    """This rank's averages over many batches, except those that end at this point."""
    of_training = trainer.fit_loop.epoch_loop._results
    ended: dict[str, _ResultMetric] = {
        VALIDATION: trainer.fit_loop.epoch_loop.val_loop._results,
        EPOCH: of_training,
    }.get(moment, {})
    reset_next = {id(result.value) for result in ended.values()}
    metrics = {
        name: {
            "updates": module._update_count,
            "values": {key: move_data_to_device(getattr(module, key), "cpu") for key in module._defaults},
        }
        for name, module in pl_module.named_modules()
        if isinstance(module, Metric) and module._update_count and id(module) not in reset_next
    }
    results = {
        key: _describe(result)
        for key, result in of_training.items()
        if moment != EPOCH and result.meta.on_epoch and not result.has_reset
    }
    return {"metrics": metrics, "results": results}


def restore_averages(trainer: Trainer, pl_module: LightningModule, saved: Mapping[str, Any]) -> None:
    """Restores what `averages` gave."""
    modules = dict(pl_module.named_modules())
    for name, state in saved["metrics"].items():
        metric = modules.get(name)
        if isinstance(metric, Metric):
            for key, value in state["values"].items():
                setattr(metric, key, move_data_to_device(value, metric.device))
            metric._update_count, metric._computed = state["updates"], None
    results = trainer.fit_loop.epoch_loop._results
    for key, described in saved["results"].items():
        result = _recreate(trainer, modules, described)
        if result is not None:
            results[key] = result.to(pl_module.device)


def _describe(result: _ResultMetric) -> dict[str, Any]:
    values = {name: getattr(result, name).cpu() for name in result._defaults}
    return {
        "description": {name: getattr(result.meta, name) for name in DESCRIPTION},
        "reduction": result.meta.reduce_fx.__name__,
        "synchronized": [result.meta.sync.should, result.meta.sync.rank_zero_only],
        "values": values,
    }


def _recreate(
    trainer: Trainer, modules: Mapping[str, torch.nn.Module], saved: Mapping[str, Any]
) -> _ResultMetric | None:
    meta = _Metadata(**saved["description"], reduce_fx=saved["reduction"])
    should, rank_zero_only = saved["synchronized"]
    meta.sync = _Sync(fn=trainer.strategy.reduce, _should=should, rank_zero_only=rank_zero_only)
    result = _ResultMetric(meta, is_tensor=bool(saved["values"]))
    result._update_count = 1
    for name, value in saved["values"].items():
        setattr(result, name, value)
    if not result.is_tensor:
        metric = modules.get(meta.metric_attribute or "")
        if not isinstance(metric, Metric):
            return None
        result.value = metric
    return result
