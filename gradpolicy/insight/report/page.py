"""Renders a report from its templates."""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from gradpolicy.insight.report import figures
from gradpolicy.insight.report.figures import Figure
from gradpolicy.insight.report.recorded_run import Run, compared_metrics, config_differences, groups_of

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
    # The numbers of the figures in the page.
    environment.globals |= {"figures": figures, "numbers": itertools.count()}
    return environment.get_template("report.html").render(
        plotly=Markup(get_plotlyjs()),
        runs=runs,
        several=len(runs) > 1,
        shown=runs[:RUNS],
        groups=groups_of(runs),
        metrics=compared_metrics(runs)[:COLUMNS],
        differences=config_differences([run.config for run in runs]).iloc[:, :ROWS],
    )


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
