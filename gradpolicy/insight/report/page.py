"""Renders a report from its templates."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from gradpolicy.insight.report import figures
from gradpolicy.insight.report.figures import Figure
from gradpolicy.insight.report.recorded_run import (
    Run,
    compared_metrics,
    config_differences,
    groups_of,
    spread,
)

# The maximum numbers of rows and columns of wide tables, and of runs that are shown one by one.
ROWS, COLUMNS, RUNS = 200, 12, 40


def render(runs: Sequence[Run]) -> str:
    """Return the report of one or several runs as one HTML page."""
    environment = Environment(
        loader=PackageLoader("gradpolicy.insight.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "drawn": drawn, "next": next, "breakable": breakable}
    page, block = environment.get_template("report.html"), environment.get_template("run.html")
    numbers = itertools.count()
    comparison = _comparison(runs) if len(runs) > 1 else None
    common = {"plotly": Markup(get_plotlyjs()), "numbers": numbers, "comparison": comparison, "runs": runs}
    place = {"numbers": numbers, "several": len(runs) > 1}
    details = [
        {"name": run.name, "html": Markup(block.render(detail(run), index=index, **place))}
        for index, run in enumerate(runs[:RUNS])
    ]
    return page.render(details=details, left_out=[run.name for run in runs[RUNS:]], **common)


def detail(run: Run) -> dict[str, Any]:
    """Return the variables of the template for one run."""
    checked = run.audit.get("intervals", 0)
    return {
        "run": run,
        "curves": figures.run_curves(run),
        "metrics": _by_stage(run.final_metrics),
        "mask_curves": figures.mask_curves(run),
        "timeline": figures.timeline(run),
        "flow": figures.flow(run),
        "constants": figures.constants(run),
        "checked": checked,
        "verdict": "bad" if run.audit.get("changed") else "good" if checked else "",
        "missing": run.missing,
    }


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    groups = groups_of(runs)
    metrics = compared_metrics(runs)
    return {
        "groups": groups,
        "metrics": metrics[:COLUMNS],
        "broken_off": [run for run in runs if run.broken_off],
        "cells": {(group.label, name): spread(group.values(name)) for group in groups for name in metrics},
        "differences": config_differences([run.config for run in runs])[:ROWS],
        "curves": figures.group_curves(groups),
    }


def _by_stage(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group metrics by the first part of their names."""
    found: dict[str, dict[str, float]] = {}
    for name in sorted(metrics):
        if "policy/" not in name:
            found.setdefault(name.split("/")[0], {})[name] = metrics[name]
    return found


# ---- filters of the template


def drawn(figure: Figure) -> Markup:
    """Return a figure as JSON for a script element."""
    return Markup(figure.figure.to_json().replace("<", "\\u003c"))


def breakable(name: str) -> Markup:
    """Return a name that can be wrapped after a slash or an underscore, so that wide tables fit the page."""
    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(name))))


def number(value: Any, digits: int = 4) -> str:
    """Format a number for reading; a dash stands for NaN and for other values.

    Example:
        >>> number(0.123456), number(1234567), number(float("nan"))
        ('0.1235', '1,234,567', '–')
    """
    if not isinstance(value, int | float) or math.isnan(value):
        return "–"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.{digits}g}"
