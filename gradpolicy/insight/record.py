"""The record of a run: values of each policy at each logged step.

>>> import tempfile
>>> from pathlib import Path
>>> from gradpolicy.insight import record
>>> run = Path(tempfile.mkdtemp())
>>> numbers = '"step": 5, "epoch": 0, "active": [3], "entries": [4]'
>>> line = '{"kind": "freeze", "policy": "half", "parameter": ["fc.weight"], ' + numbers + "}\\n"
>>> _ = (run / "record.jsonl").write_text(line)
>>> record.load(run).query("kind == 'freeze'")[["step", "parameter", "active_share"]]
   step  parameter  active_share
0     5  fc.weight          0.75
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from pydantic import create_model
from pydantic_core import to_json

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError
from gradpolicy.files import is_inside, parse_json
from gradpolicy.insight.run_files import Count
from gradpolicy.train.lightning.callback import GradientPolicies
from gradpolicy.train.lightning.resume import starts_new_run
from gradpolicy.train.lightning.trainer_parts import callbacks_of
from gradpolicy.train.measurements import NORMS, SUMS, Measured

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Record", "load"]

RECORD = "record.jsonl"
WORDS = ("policy", "parameter", "layer")
MEASURED = (*SUMS, *NORMS, "operations", "zeros_passed")


class Record(Callback):
    """Writes values of each policy to ``record.jsonl`` in the run's directory, as JSON lines.

    Lines are written at every ``log_every_n_steps``-th update. ``step`` counts the updates so far.
    docs/insight.md#the-record describes the columns; :func:`gradpolicy.insight.record.load` reads the file as
    a table.

    Each is one write to the operating system, so that no written line is lost if the process is killed. At
    most the last line can be incomplete. A checkpoint holds the length of the file. A resumed run truncates
    the file to that length, so that no row is missing or written twice. With several processes the first one
    writes the values of all.

    Args:
        directory: The run's directory; None: the trainer's ``default_root_dir``.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        # The length of the file, and that in a checkpoint, until training starts.
        self._size = 0
        self._restored: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Subscribe to the measurements of the run's policies."""
        self._trainer = trainer
        self._path = Path(self.directory or trainer.default_root_dir).absolute() / RECORD
        for each in callbacks_of(trainer, GradientPolicies):
            if self._write not in each.sinks:
                each.sinks.append(self._write)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the file, or truncate it to its length in the checkpoint."""
        # A second fit by the same callback continues the file.
        if trainer.is_global_zero and (self._restored is not None or not self._size):
            self._size = truncate(self._path, 0 if starts_new_run(trainer) else self._restored or 0)
        self._restored = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Truncate the file also if the resumed run has no steps left."""
        self.on_train_start(trainer, pl_module)

    def _write(self, step: int, measured: Measured) -> None:
        """Append a line for each policy; NaN and infinity become null."""
        if not self._trainer.is_global_zero:
            return
        content = b""
        for name, each in measured.items():
            first = {"kind": each["kind"], "step": step, "epoch": self._trainer.current_epoch, "policy": name}
            content += to_json({**first, **each}, inf_nan_mode="null") + b"\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(content)
        self._size += len(content)

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file."""
        return {"size": self._size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the length until training starts."""
        self._restored = check_integer("the record in a checkpoint", state_dict["size"], least=0)


def truncate(path: Path, size: int) -> int:
    """Truncate a record to a length and to complete lines; return its length. An absent one is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(min(file.tell(), size))
        complete = len(_whole_lines(path.read_bytes()))
        file.truncate(complete)
    return complete


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


# ---- the table

# null where nothing was measured.
_Number = bool | float | None
_FIELDS: dict[str, Any] = {
    "kind": (str, ...),
    "step": (Count, ...),
    "epoch": (Count, ...),
    **dict.fromkeys(WORDS, (str | None | list[str], None)),
    **dict.fromkeys(MEASURED, (_Number | list[_Number], None)),
}
_Line: Any = create_model("RecordLine", **_FIELDS)


def load(run: str | Path) -> DataFrame:
    """Read the record of a run as a table. docs/insight.md#the-record describes its columns.

    An incomplete last line of a killed run is ignored.

    Args:
        run: The run's directory.

    Returns:
        A row for each parameter, layer and flow policy (``kind``), by ``step``.
        ``step`` and ``epoch`` are integers; other numbers are floats, NaN if a row has no value.

    Raises:
        PolicyError: If the directory has no record, or a line is damaged.
    """
    path = Path(run) / RECORD
    if not path.is_file() or not is_inside(path, path.parent):
        raise PolicyError(
            f"{run} holds no {RECORD} of its own, which callbacks with `record` (Record in Python) write"
        )
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), start=1):
        try:
            rows += _rows_of(parse_json(line, _Line).model_dump(exclude_unset=True))
        except ValueError as error:
            raise PolicyError(f"{path}, line {number}: is no line of a record ({error})") from error
    return table_of(rows)


def table_of(rows: Sequence[Mapping[str, Any]]) -> DataFrame:
    """Return the table of the rows of parameters and flow policies, with the rows of layers."""
    import pandas

    types = {"step": "int64", "epoch": "int64", **dict.fromkeys(MEASURED, "float64")}
    table = pandas.DataFrame(rows, columns=[*_FIELDS]).astype(types)
    table = pandas.concat([table, _layers(table).astype(types)]) if rows else table
    table["active_share"] = table["active"] / table["entries"]
    ratio = (table["update_norm"] / table["weight_norm"]).where(table["weight_norm"] > 0)
    table["update_size"] = ratio.mask(table["update_norm"] == 0, 0.0)
    return table.sort_values("step", kind="stable", ignore_index=True)


def _rows_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a line: one, or one for each parameter if it has lists of parameters."""
    shared = {key: value for key, value in line.items() if not isinstance(value, list)}
    lists = {key: value for key, value in line.items() if isinstance(value, list)}
    if not lists:
        return [shared]
    lists["layer"] = [parameter.rpartition(".")[0] for parameter in lists.get("parameter", ())]
    return [
        {**shared, **dict(zip(lists, values, strict=True))} for values in zip(*lists.values(), strict=True)
    ]


def _layers(table: DataFrame) -> DataFrame:
    """Return the rows of parameters combined by layer: sums of counts, and root sums of squared norms."""
    freeze = table[table["kind"] == "freeze"]
    squared = freeze.assign(**{norm: freeze[norm] ** 2 for norm in NORMS})
    groups = squared.groupby(["step", "epoch", "policy", "layer"], sort=False)
    # A layer has no value if none of its parameters has one.
    layers = groups[[*SUMS, *NORMS]].sum(min_count=1)
    layers = layers.assign(**{norm: layers[norm] ** 0.5 for norm in NORMS})
    return layers.reset_index().assign(kind="layer").reindex(columns=table.columns)
