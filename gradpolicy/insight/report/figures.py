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
    own = [name for name in run.metrics if "policy/" not in name and not name.endswith("_best")]
    if "step" not in own:
        return pd.DataFrame(columns=["step", "curve", "chart", "value"])
    table = run.metrics[own].drop(columns="epoch", errors="ignore")
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
# The columns of flow policies, and what the report calls them.
FLOW = {
    "gradient_norm_before": "gradient norm before",
    "gradient_norm_after": "gradient norm after",
    "operations": "operations",
    "zeros_passed": "share of zeros let through",
}


def _mask_quantities(run: Run) -> pd.DataFrame:
    """Return the shares and flips of freeze policies: ``policy``, ``step``, ``quantity``, ``value``."""
    rows = run.rows("freeze")
    if rows.empty:
        return rows
    by = rows.groupby(["policy", "step"], as_index=False)
    sums = by[["active", "flipped", "entries"]].sum(min_count=1)
    quantities = {"share that trains": "active", FLIPS: "flipped"}
    table = sums.assign(**{name: sums[column] / sums["entries"] for name, column in quantities.items()})
    return table.melt(["policy", "step"], list(quantities), "quantity", "value").dropna()


def _flow_quantities(run: Run) -> pd.DataFrame:
    """Return the norms, operations and zeros of each flow policy."""
    rows = run.rows("flow")
    if rows.empty:
        return rows
    table = rows.melt(["step", "policy"], list(FLOW), "quantity", "value").dropna()
    return table.replace({"quantity": FLOW})


def _varies(table: pd.DataFrame) -> "pd.Series[bool]":
    """Return for each row if its policy's quantity changes over the steps, by more than a twentieth."""
    # The first row counts the flips of fewer steps than the others.
    later = table["value"].where((table["quantity"] != FLIPS) | table["step"].ne(table["step"].min()))
    own = later.groupby([table["policy"], table["quantity"]])
    return own.transform("max") - own.transform("min") > own.transform("max").abs() / 20


def constants(run: Run) -> list[dict[str, Any]]:
    """Return what each policy kept within a twentieth: ``policy``, ``quantity``, ``value`` at last."""
    tables = [table for table in (_mask_quantities(run), _flow_quantities(run)) if len(table)]
    same = [table[~_varies(table)].drop_duplicates(["policy", "quantity"], keep="last") for table in tables]
    return pd.concat(same)[["policy", "quantity", "value"]].to_dict("records") if same else []


def mask_curves(run: Run) -> Figure | None:
    """Draw the share of entries that train and flips over the steps, where they vary."""
    table = _mask_quantities(run)
    if table.empty or (table := table[_varies(table)]).empty:
        return None
    note = "A change flips entries that it freezes or thaws; each change since the point before counts."
    shared = {"y": "value", "color": "policy", "facet_row": "quantity"}
    drawn = line_figure("Share and flips", table, note, wide=True, **shared)
    drawn.figure.update_yaxes(rangemode="tozero")
    return drawn


def timeline(run: Run) -> Figure | None:
    """Draw layers by steps, the share of entries that train in colour, where it is no random draw's."""
    layers = run.rows("layer")
    if layers.empty:
        return None
    own = layers.groupby(["policy", "layer"])
    share, entries = own["active_share"], own["entries"].first()
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


def flow(run: Run) -> Figure | None:
    """Draw the gradient norms, operations and zeros of flow policies over the steps, where they vary."""
    table = _flow_quantities(run)
    if table.empty or (table := table[_varies(table)]).empty:
        return None
    shared = {"y": "value", "color": "policy", "facet_row": "quantity"}
    return line_figure("Flow policies", table, wide=True, **shared)
