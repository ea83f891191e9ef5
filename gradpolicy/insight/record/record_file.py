"""The file of a record: JSON lines that are appended, cut where a run resumes, and read as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from gradpolicy.errors import PolicyError
from gradpolicy.insight.file_models import RecordLine
from gradpolicy.json_file import parse_json

if TYPE_CHECKING:
    from pandas import DataFrame

FILE = "record.jsonl"
WORDS = ("kind", "policy", "phase", "parameter", "layer", "frozen_state")
WHOLE_NUMBERS = ("step", "epoch")
NORMS = ("weight_norm", "update_norm", "gradient_norm_before", "gradient_norm_after")
SUMS = ("entries", "active", "flipped", "state_bytes")
NUMBERS = (
    *(*SUMS, "active_share", "adam_bytes"),
    *("age_min", "age_q25", "age_median", "age_q75", "age_max"),
    *(*NORMS, "update_size"),
    *("operations", "zeros_passed"),
)
FLAGS = ("changed",)


class RecordFile:
    """A record that is being written.

    Every call of :meth:`append` ends in the operating system's hands, so that killing the process loses none
    of it. At most the last line can be cut off half-way.

    Args:
        directory: The run's directory.

    Attributes:
        size: How many bytes the record has.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.size = 0
        self._file: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.directory / FILE

    def begin(self, size: int = 0) -> bool:
        """Begin empty, or with as many bytes as the record had when a checkpoint was saved.

        Args:
            size: Its size then. What was written later is cut off.

        Returns:
            True if all of these bytes were there.
        """
        self.close()
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            found = file.tell()
            file.truncate(min(found, size))
        self._open()
        return self.size == size

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes rows in one go, a line each."""
        if self._file is None:
            self._open()
        text = "".join(f"{_encoded(row)}\n" for row in rows).encode()
        assert self._file is not None
        self._file.write(text)
        self.size += len(text)

    def close(self) -> None:
        """Lets go of the file; a later :meth:`append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        """Opens the file behind its last whole line."""
        self.directory.mkdir(parents=True, exist_ok=True)
        whole = _whole_lines(self.path.read_bytes()) if self.path.is_file() else b""
        # Without a buffer of Python's own: what is written is in the file.
        self._file = self.path.open("ab", buffering=0)
        self._file.truncate(len(whole))
        self.size = len(whole)


_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))


def _encoded(row: Mapping[str, Any]) -> str:
    """A row as JSON, which has neither NaN nor infinity: null stands for both."""
    try:
        return _ENCODER.encode(row)
    except ValueError:
        return _ENCODER.encode({key: _finite(value) for key, value in row.items()})


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def load(run: str | Path) -> DataFrame:
    """Reads the record of a run as a table. docs/insight/record.md says what its columns mean.

    A line that a kill cut off half-way is left out.

    Args:
        run: The run's directory.

    Returns:
        A row for each parameter, layer, flow policy and measurement of memory (``kind``), by ``step``.
        ``step`` and ``epoch`` are whole numbers; other numbers are floats, NaN where a row has none;
        ``changed`` is a nullable bool.

    Raises:
        PolicyError: If the directory holds no record, or a line of it is damaged.
    """
    import pandas

    path = Path(run) / FILE
    if not path.is_file():
        raise PolicyError(
            f"{run} holds no {FILE}; a run writes it where callbacks contain `record` (Record in Python)"
        )
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), start=1):
        try:
            rows += _rows_of(parse_json(line, RecordLine).model_dump(exclude_unset=True))
        except ValueError as error:
            raise PolicyError(f"{path}, line {number}: is no line of a record ({error})") from error
    columns = (*WORDS[:1], *WHOLE_NUMBERS, *WORDS[1:], *NUMBERS, *FLAGS)
    types = {
        **dict.fromkeys(WHOLE_NUMBERS, "int64"),
        **dict.fromkeys(NUMBERS, "float64"),
        **dict.fromkeys(FLAGS, "boolean"),
    }
    table = pandas.DataFrame(rows, columns=columns).astype(types)
    table = pandas.concat([table, _layers(table).astype(types)]) if rows else table
    table["active_share"] = table["active"] / table["entries"]
    ratio = (table["update_norm"] / table["weight_norm"]).where(table["weight_norm"] > 0)
    table["update_size"] = ratio.mask(table["update_norm"] == 0, 0.0)
    return table.sort_values("step", kind="stable", ignore_index=True)


def _rows_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a line: one, or one for each parameter where it has lists of them."""
    shared = {key: value for key, value in line.items() if not isinstance(value, list)}
    lists = {key: value for key, value in line.items() if isinstance(value, list)}
    if (line["kind"] == "freeze") != ("parameter" in lists) or (lists and "parameter" not in lists):
        raise ValueError("parameter: must be a list where the kind is freeze, and there alone are lists")
    if not lists:
        return [shared]
    return [
        {
            **shared,
            "layer": values[0].rpartition(".")[0],
            **dict(zip(("parameter", *lists), values, strict=True)),
        }
        for values in zip(line["parameter"], *lists.values(), strict=True)
    ]


def _layers(table: DataFrame) -> DataFrame:
    """The rows of parameters put together by layer: counts are added, norms by the root of squares."""
    freeze = table[table["kind"] == "freeze"]
    squared = freeze.assign(**{norm: freeze[norm] ** 2 for norm in NORMS})
    groups = squared.groupby(["step", "epoch", "policy", "layer"], sort=False)
    # Without a value in any parameter there is none in the layer.
    whole = groups[[*SUMS, *NORMS]].sum(min_count=1)
    whole = whole.assign(**{norm: whole[norm] ** 0.5 for norm in NORMS}, changed=groups["changed"].any())
    return whole.reset_index().assign(kind="layer").reindex(columns=table.columns)
