"""The figures of a report, made by plotly from tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from gradpolicy.insight.report.recorded_run import Group, Run

# Colours that are readable on white and on black.
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#ec4899", "#a855f7", "#eab308", "#06b6d4", "#ef4444", "#84cc16")
# The maximum numbers of points of a curve, and of columns of a heat map.
POINTS, COLUMNS = 600, 240
# The maximum length of a name in a legend or on an axis, in characters.
LONGEST = 60
STAGES = ("train/", "val/", "test/")


@dataclass
class Figure:
    """A figure with its heading.

    Args:
        title: The heading above it.
        figure: The plotly figure.
        note: The explanation below it.
        wide: If True, it takes the full width of the page.
    """

    title: str
    figure: go.Figure
    note: str = ""
    wide: bool = False


def line_figure(title: str, table: pd.DataFrame, note: str = "", *, wide: bool = False, **how: Any) -> Figure:
    """Draw curves over the steps.

    Args:
        title: The heading.
        table: A table with a row for each point, with its ``step``.
        note: The explanation below it.
        wide: If True, it takes the full width of the page, and each row of panels its height.
        **how: Arguments of :func:`plotly.express.line`.
    """
    names = {key: how[key] for key in ("color", "line_dash", "line_group") if how.get(key)}
    short = table.assign(**{column: table[column].astype(str).str[:LONGEST] for column in names.values()})
    figure = px.line(short, x="step", color_discrete_sequence=COLOURS, template="none", **how)
    for trace in figure.data:
        chosen = np.unique(np.linspace(0, len(trace.x) - 1, POINTS).round().astype(int))
        # Single precision takes fewer bytes. A single point needs a marker, since it makes no line.
        mode = "lines+markers" if len(trace.x) < 8 else "lines"
        trace.update(x=trace.x[chosen], y=np.asarray(trace.y, dtype=np.float32)[chosen], mode=mode)
    panels = table[how["facet_row"]].nunique() if how.get("facet_row") else 1
    figure.update_yaxes(matches=None, title="")
    figure.for_each_annotation(lambda each: each.update(text=each.text.partition("=")[2]))
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "title": ""}
    lines = len({trace.name for trace in figure.data if trace.showlegend})
    figure.update_layout(legend=legend, height=(160 if panels > 1 else 270) * panels + 20 * (lines + 1))
    return Figure(title, styled(figure).update_layout(hovermode="x unified"), note, wide)


def styled(figure: go.Figure) -> go.Figure:
    """Return a figure without theme colours, which the page sets by the reader's theme."""
    margin = {"l": 52, "r": 28, "t": 12, "b": 44}
    clear = "rgba(0,0,0,0)"
    return figure.update_layout(template="none", margin=margin, paper_bgcolor=clear, plot_bgcolor=clear)


# ---- curves of metrics


def _curves(run: Run) -> pd.DataFrame:
    """Return the metrics of a run with a row for each value: ``step``, ``curve``, ``chart``, ``value``."""
    columns = [name for name in run.metrics if "policy/" not in name and not name.endswith("_best")]
    table = run.metrics[columns].drop(columns="epoch", errors="ignore")
    table = table.melt("step", var_name="curve").dropna().drop_duplicates(["step", "curve"], keep="last")
    # Training, validation and test share a chart.
    return table.assign(chart=table["curve"].str.replace(f"^({'|'.join(STAGES)})", "", regex=True))


def _by_chart(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the rows of each chart: first the loss, then the accuracy, then the others."""
    order = {"loss": 0, "accuracy": 1}
    charts = [(str(title), rows) for title, rows in table.groupby("chart")]
    return sorted(charts, key=lambda chart: order.get(chart[0], 2))


def run_curves(run: Run) -> list[Figure]:
    """Draw a chart for each metric, with a curve for each stage."""
    return [line_figure(title, rows, y="value", color="curve") for title, rows in _by_chart(_curves(run))]


def group_curves(groups: Sequence[Group]) -> list[Figure]:
    """Draw a chart for each metric: the mean of a group as a thick line, its runs as thin lines."""
    runs = [(group, run) for group in groups for run in group.runs]
    tables = [_curves(run).assign(group=group.label, run=run.name) for group, run in runs]
    found = []
    for title, rows in _by_chart(pd.concat(tables)):
        rows = rows[rows.groupby(["run", "curve"])["step"].transform("size") > 1]
        if rows.empty:
            continue
        shared: dict[str, Any] = {"y": "value", "color": "group", "line_dash": "curve"}
        chart = line_figure(title, rows, line_group="run", **shared)
        chart.figure.update_traces(line_width=0.5, hoverinfo="skip", hovertemplate=None, showlegend=False)
        means = rows.groupby(["group", "curve", "step"], sort=False, as_index=False)["value"].mean()
        thick = line_figure(title, means, **shared)
        found.append(Figure(title, thick.figure.add_traces(chart.figure.data)))
    return found


# ---- what policies did over the steps

FLIPS = "flips per entry"
# What the report calls columns of the record.
QUANTITIES = {
    "freeze": {"active": "share that trains", "flipped": FLIPS},
    "flow": {
        "gradient_norm_before": "gradient norm before",
        "gradient_norm_after": "gradient norm after",
        "operations": "operations",
        "zeros_passed": "share of zeros let through",
    },
}


def _quantities(run: Run, kind: str) -> pd.DataFrame:
    """Return the quantities of each policy of a kind: ``policy``, ``step``, ``quantity``, ``value``.

    ``varies`` is True if a policy's quantity changes over the steps, by more than a twentieth.
    """
    rows = run.rows(kind)
    if kind == "freeze":
        sums = rows.groupby(["policy", "step"])[["active", "flipped", "entries"]].sum(min_count=1)
        rows = sums.div(sums["entries"], axis=0).reset_index()
    table = rows.melt(["policy", "step"], [*QUANTITIES[kind]], "quantity", "value").dropna()
    table = table.replace({"quantity": QUANTITIES[kind]})
    # The first row counts the flips of fewer steps than the others.
    later = table["value"].where((table["quantity"] != FLIPS) | table["step"].ne(table["step"].min()))
    groups = later.groupby([table["policy"], table["quantity"]])
    most, least = groups.transform("max"), groups.transform("min")
    return table.assign(varies=most - least > most.abs() / 20)


def constants(run: Run) -> list[dict[str, Any]]:
    """Return what each policy kept within a twentieth: ``policy``, ``quantity``, ``value`` at last."""
    same = [table[~table["varies"]] for table in (_quantities(run, kind) for kind in QUANTITIES)]
    last = pd.concat(same).drop_duplicates(["policy", "quantity"], keep="last")
    return last[["policy", "quantity", "value"]].to_dict("records")


def _over_time(run: Run, kind: str, title: str, note: str = "") -> Figure | None:
    """Draw the quantities of policies of a kind over the steps, where they vary."""
    table = _quantities(run, kind)
    table = table[table["varies"]]
    how = {"y": "value", "color": "policy", "facet_row": "quantity"}
    return None if table.empty else line_figure(title, table, note, wide=True, **how)


def mask_curves(run: Run) -> Figure | None:
    """Draw the share of entries that train and flips over the steps, where they vary."""
    note = "A change flips entries that it freezes or thaws; each change since the point before counts."
    drawn = _over_time(run, "freeze", "Share and flips", note)
    if drawn is not None:
        drawn.figure.update_yaxes(rangemode="tozero")
    return drawn


def flow(run: Run) -> Figure | None:
    """Draw the gradient norms, operations and zeros of flow policies over the steps, where they vary."""
    return _over_time(run, "flow", "Flow policies")


def timeline(run: Run) -> Figure | None:
    """Draw layers by steps, the share of entries that train in colour, where it is no random draw's."""
    layers = run.rows("layer")
    by_layer = layers.groupby(["policy", "layer"])
    share, entries = by_layer["active_share"], by_layer["entries"].first()
    deviation = np.sqrt(share.mean() * (1 - share.mean()) / entries)
    if (share.max() - share.min() <= 6 * deviation).all():
        return None
    if layers["policy"].nunique() > 1:
        layers = layers.assign(layer=layers["layer"] + " · " + layers["policy"])
    table = layers.pivot_table("active_share", "layer", "step", aggfunc="last", sort=False)
    table = table.sort_index(axis=1).iloc[:, :: -(-layers["step"].nunique() // COLUMNS)]
    shares = table.to_numpy(dtype=np.float32)
    colours = {"colorscale": "Viridis", "zmin": 0, "zmax": 1}
    figure = go.Figure(go.Heatmap(x=np.asarray(table.columns), y=list(table.index), z=shares, **colours))
    styled(figure).update_layout(height=120 + 18 * min(len(table), 60)).update_xaxes(title="step")
    figure.update_yaxes(autorange="reversed", automargin=True, type="category")
    return Figure("Timeline of layers", figure, "The colour is the share of entries that train.", wide=True)
