"""The record as charts of dashboards: a number for each policy, where a row has one for each parameter."""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger


def chart(rows: Iterable[Mapping[str, Any]], loggers: Iterable[Logger]) -> None:
    """Writes the rows of training to loggers. That of CSV files gets nothing: beside it lies the record.

    Args:
        rows: Rows of the record, as they are appended to its file.
        loggers: The trainer's.
    """
    dashboards = [logger for logger in loggers if not isinstance(logger, CSVLogger)]
    if not dashboards:
        return
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(charted(row))
    for step, values in by_step.items():
        for logger in dashboards if values else ():
            # Lightning logs what belongs to the first update at step 0.
            logger.log_metrics(values, max(step - 1, 0))


def charted(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row that have a chart, by name.

    Example:
        >>> charted({"kind": "flow", "policy": "guided", "phase": "fit", "zeros_passed": 0.5})
        {'policy/guided/zeros_passed': 0.5}
    """
    if row["kind"] == "freeze":
        values = _of_parameters(row)
    elif row["kind"] == "flow" and row["phase"] == "fit":
        values = {"zeros_passed": row["zeros_passed"]}
    else:
        return {}
    return {f"policy/{row['policy']}/{name}": value for name, value in values.items() if value is not None}


def _of_parameters(row: Mapping[str, Any]) -> dict[str, float | None]:
    values: dict[str, float | None] = {}
    # Between changes nothing flips: a chart that fell to 0 there would be a comb.
    if any(row["changed"]):
        values["flipped"] = sum(row["flipped"])
    if "age_median" in row:
        values["optimizer_bytes"] = sum(row["state_bytes"])
        weights = _norm(row["weight_norm"])
        values["update_size"] = _norm(row["update_norm"]) / weights if weights else None
        entries = sum(row["entries"])
        ages = zip(row["age_median"], row["entries"], strict=True)
        values["age_median"] = sum(age * count for age, count in ages if age is not None) / max(entries, 1)
    return values


def _norm(norms: Sequence[float | None]) -> float:
    """The norm of parameters together."""
    return sqrt(sum(norm**2 for norm in norms if norm is not None))
