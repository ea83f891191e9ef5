"""The figures of a report: plotly figures with the choices of a reader."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from gradpolicy.insight.report.comparison import Difference, Group, compared_metrics
from gradpolicy.insight.report.reading import Run

# Readable on white and on black.
COLOURS = ("#3b82f6", "#f97316", "#10b981", "#ec4899", "#a855f7", "#eab308", "#06b6d4", "#ef4444", "#84cc16")
PLAIN = "#8b949e"
# Points of a curve, columns and cells of a heat map: at most.
POINTS = 600
COLUMNS, CELLS = 240, 12_000
# Axes of parallel coordinates, at most.
AXES = 8
# Legends: the longest name in characters, and the height of a line in pixels.
LONGEST, LINE = 60, 20
STAGES = ("train/", "val/", "test/")

Choices = Mapping[str, tuple[str, Sequence[str]]]


@dataclass
class Figure:
    """A figure with its heading and the choices of a reader.

    Args:
        title: The heading above it.
        figure: The plotly figure. A trace's ``meta`` says under which choices it is shown.
        choices: By key of ``meta``: the name of the choice and its values. A trace without that key is
            always shown.
        note: How to read it.
        wide: If True, it takes the whole width of the page.
    """

    title: str
    figure: go.Figure
    choices: Choices = field(default_factory=dict)
    note: str = ""
    wide: bool = False

    def __post_init__(self) -> None:
        """Show the first of each choice, leave out choices of one value, and make room for the legend."""
        for trace in self.figure.data:
            meta = trace.meta or {}
            shown = {key: values[0] for key, (_, values) in self.choices.items()}
            trace.visible = all(meta.get(key, value) == value for key, value in shown.items())
        several = {key: choice for key, choice in self.choices.items() if len(choice[1]) > 1}
        self.choices = several
        named = [trace for trace in self.figure.data if trace.name and trace.showlegend is not False]
        for trace in named:
            trace.name = _shortened(trace.name, LONGEST)
        names = {trace.name for trace in named if trace.visible}
        if len(names) > 1 and self.figure.layout.legend.orientation:
            columns = (1100 if self.wide else 500) // (44 + 7 * max(map(len, names)))
            lines = -(-len(names) // max(columns, 1))
            self.figure.update_layout(height=self.figure.layout.height + LINE * (lines - 1))


def new_figure(x: str, y: str, height: int = 300) -> go.Figure:
    """Return an empty figure; the page gives it the colours of the reader's theme."""
    return go.Figure().update_layout(
        template={"layout": {"colorway": COLOURS}},
        height=height,
        margin={"l": 52, "r": 12, "t": 12, "b": 44},
        xaxis={"title": {"text": x}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )


def _add_curve(figure: go.Figure, values: pd.Series, name: str, **settings: Any) -> None:
    """Add a curve over the steps that are the index of the values; few points are marked."""
    values = _thinned(values)
    figure.add_scatter(
        x=values.index.to_numpy(),
        # The page holds single precision in few bytes.
        y=values.to_numpy(dtype=np.float32),
        name=name,
        **{"mode": "lines+markers" if len(values) < 8 else "lines", **settings},
    )


def _thinned(values: Any, most: int = POINTS) -> Any:
    """Return at most so many rows, evenly chosen, the last among them."""
    if len(values) <= most:
        return values
    return values.iloc[np.unique(np.linspace(0, len(values) - 1, most).round().astype(int))]


def _is_known(rows: pd.DataFrame, column: str) -> bool:
    return column in rows and bool(rows[column].notna().any())


def _faint(colour: str, alpha: float = 0.15) -> str:
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# ---- curves of metrics


def _curve(run: Run, metric: str) -> "pd.Series[float]":
    """Return a metric by the steps at which it was logged."""
    if metric not in run.metrics:
        return pd.Series(dtype=float)
    return run.metrics[["step", metric]].dropna().groupby("step")[metric].last()


def _charts(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the metrics that share a chart: those of one name in training, validation and test."""
    charts: dict[str, list[str]] = {}
    for name in dict.fromkeys(str(name) for run in runs for name in run.metrics):
        if name not in ("step", "epoch") and "policy/" not in name and not name.endswith("_best"):
            stage = next((stage for stage in STAGES if name.startswith(stage)), "")
            charts.setdefault(name.removeprefix(stage), []).append(name)
    order = {"loss": 0, "accuracy": 1}
    return dict(sorted(charts.items(), key=lambda chart: (order.get(chart[0], 2), chart[0])))


def run_curves(run: Run) -> list[Figure]:
    """Draw a chart for each metric, with a curve for each stage."""
    found = []
    for title, names in _charts([run]).items():
        figure = new_figure("step", title)
        for name in names:
            points = _curve(run, name)
            mode = "markers" if len(points) == 1 else "lines"
            _add_curve(figure, points, name, mode=mode, marker={"size": 10, "symbol": "diamond"})
        # A number that never changed stands in the table.
        if any(len(set(trace.y)) > 1 for trace in figure.data):
            found.append(Figure(title, figure))
    return found


def group_curves(groups: Sequence[Group]) -> list[Figure]:
    """Draw a chart for each metric: a group's mean as a line, its spread as a band, its runs as hairlines."""
    runs = [run for group in groups for run in group.runs]
    found = []
    for title, names in _charts(runs).items():
        figure = new_figure("step", title)
        usable = [name for name in names if any(len(_curve(run, name)) > 1 for run in runs)]
        for name in usable:
            for index, group in enumerate(groups):
                _add_group(figure, group, name, _colour(index))
        if figure.data:
            found.append(Figure(title, figure, {"metric": ("curve", usable)}))
    return found


def _add_group(figure: go.Figure, group: Group, metric: str, colour: str) -> None:
    curves = {index: _curve(run, metric) for index, run in enumerate(group.runs)}
    curves = {index: points for index, points in curves.items() if len(points)}
    if not curves:
        return
    shared: dict[str, Any] = {"legendgroup": group.label, "meta": {"metric": metric}, "mode": "lines"}
    # A run that ends earlier is not in the mean of later steps.
    inside = _thinned(pd.concat(curves, axis=1).interpolate(limit_area="inside"), POINTS // 4)
    ended = [index for index in inside if not group.runs[index].broken_off] or list(inside)
    mean, deviation = inside[ended].mean(axis=1), inside[ended].std(axis=1, ddof=1).fillna(0)
    if len(curves) > 1:
        unnamed = {**shared, "hoverinfo": "skip", "showlegend": False}
        band = pd.concat([mean + deviation, (mean - deviation)[::-1]])
        _add_curve(figure, band, "", fill="toself", fillcolor=_faint(colour), line={"width": 0}, **unnamed)
        for index in inside:
            _add_curve(figure, inside[index], "", line={"color": colour, "width": 0.5}, **unnamed)
    _add_curve(figure, mean, group.label, line={"color": colour, "width": 2.5}, **shared)


# ---- parallel coordinates


def parallel_coordinates(
    settings: Mapping[str, Sequence[Any]], metric: str, values: Sequence[float], *, lowest: bool = False
) -> go.Figure:
    """Draw a line for each run through its settings, an axis for each, and through its metric.

    Args:
        settings: By name, the value of each run.
        metric: The metric that runs are compared by.
        values: Its value in each run.
        lowest: If True, the lowest value is the best.
    """
    line = {"color": values, "colorscale": "Viridis", "reversescale": lowest, "showscale": True}
    axes = [_axis(name, list(given)) for name, given in settings.items()]
    axes.append({"label": metric, "values": list(values), "tickformat": ".3~g"})
    figure = go.Figure(go.Parcoords(line=line, dimensions=axes))
    # The names on the first axis stand left of it, and plotly makes no room for them.
    left = max(110, 20 + 6 * max(map(len, axes[0].get("ticktext", [""]))))
    margin = {"l": left, "r": 60, "t": 60, "b": 30}
    return figure.update_layout(height=380, margin=margin, paper_bgcolor="rgba(0,0,0,0)")


def _axis(name: str, given: list[Any]) -> dict[str, Any]:
    """Return an axis of parallel coordinates: numbers as they are, other values one after the other."""
    if _are_numbers(given):
        return {"label": name, "values": [float(value) for value in given], "tickformat": ".3~g"}
    codes, names = pd.factorize(np.array([str(value) for value in given], dtype=object))
    return {
        "label": name,
        "values": codes.tolist(),
        "tickvals": list(range(len(names))),
        "ticktext": [_shortened(text, 40) for text in names],
    }


def _are_numbers(values: Iterable[Any]) -> bool:
    try:
        return all(np.isfinite(float(value)) for value in values)
    except (TypeError, ValueError):
        return False


def settings_and_metric(runs: Sequence[Run], differences: Sequence[Difference]) -> Figure | None:
    """Draw the settings of runs beside the metric that they are compared by; None without two to compare."""
    config = runs[0].config
    metric = str(config.get("optimized_metric") or next(iter(compared_metrics(runs)), ""))
    values = {
        index: run.final_metrics[metric]
        for index, run in enumerate(runs)
        if not run.broken_off and np.isfinite(run.final_metrics.get(metric, np.nan))
    }
    varied = [each for each in differences if each.key != "seed"][:AXES]
    if len(values) < 2 or not varied:
        return None
    # A label has three digits, an axis all of them.
    settings = {
        each.name: [(each.values if _are_numbers(each.values) else each.shown)[index] for index in values]
        for each in varied
    }
    lowest = config.get("optimized_mode") == "min"
    figure = parallel_coordinates(settings, metric, list(values.values()), lowest=lowest)
    note = "A line for each run that was completed. Drag along an axis to choose among them."
    return Figure(f"Settings and {metric}", figure, note=note, wide=True)


# ---- masks over time

# One above the other: the axis of each panel, its heading, and its place.
PANELS = {
    "y": ("entries that train", (0.72, 1.0)),
    "y2": ("flips per entry", (0.36, 0.64)),
    "y3": ("age in updates", (0.0, 0.28)),
}
AGES = ["age_q25", "age_q75", "age_median"]


def mask_curves(run: Run) -> Figure | None:
    """Draw the share of entries that train, flips, and ages over the steps."""
    rows = run.rows("freeze")
    if rows.empty:
        return None
    figure = new_figure("step", "", height=520)
    policies = list(rows["policy"].unique())
    for policy in policies:
        own = rows[rows["policy"] == policy]
        # A mask covers the same parameters throughout, and a count holds until the next one.
        held = own.pivot_table(
            index="step", columns="parameter", values=["active", "entries"], aggfunc="last"
        ).ffill()
        entries = held["entries"].sum(axis=1)
        steps = own.groupby("step")
        flips = (steps["flipped"].sum() / entries)[steps["changed"].any()].iloc[1:]
        shared: dict[str, Any] = {"showlegend": False, "meta": {"policy": policy}}
        line = {"color": COLOURS[0]}
        share = held["active"].sum(axis=1) / entries
        _add_curve(figure, share, PANELS["y"][0], line={**line, "shape": "hv"}, **shared)
        marks: dict[str, Any] = {
            "mode": "markers" if len(flips) < 200 else "lines",
            "marker": {**line, "size": 4},
        }
        _add_curve(figure, flips, PANELS["y2"][0], yaxis="y2", line=line, **marks, **shared)
        means = _means_by_entries(own, AGES, ["step"])
        edge: dict[str, Any] = {"line": {"width": 0, **line}, "hoverinfo": "skip"}
        band = {"fill": "tonexty", "fillcolor": _faint(COLOURS[0], 0.25)}
        looks = [edge, {**edge, **band}, {"line": line}]
        for name, look in zip(AGES, looks if len(means) else (), strict=False):
            _add_curve(figure, means[name], PANELS["y3"][0], yaxis="y3", **look, **shared)
    for name, (heading, domain) in PANELS.items():
        axis = {"title": {"text": heading}, "domain": domain, "rangemode": "tozero", "automargin": True}
        if name == "y":
            axis |= {"tickformat": ".0%", "range": [0, 1.05]}
        figure.update_layout({name.replace("y", "yaxis"): axis})
    figure.update_xaxes(anchor="y3")
    note = (
        "A change flips entries that it freezes or thaws; each change since the point before counts. The age "
        "of an entry: its updates since its optimizer state was last empty; line: the median, band: the "
        "middle half, means over the tensors."
    )
    return Figure("Share, flips and ages", figure, {"policy": ("policy", policies)}, note, wide=True)


def _means_by_entries(rows: pd.DataFrame, columns: list[str], by: list[str]) -> pd.DataFrame:
    """Return means over parameters, weighted by their entries, of the rows that have these columns."""
    rows = rows.dropna(subset=columns)
    weighted = rows[columns].mul(rows["entries"], axis=0)
    keys = [rows[key] for key in by]
    return weighted.groupby(keys).sum().div(rows["entries"].groupby(keys).sum().clip(lower=1), axis=0)


# ---- the timeline of layers


class Quantity(NamedTuple):
    """A quantity of the timeline: its column, its colours, and how it is shown."""

    column: str
    scale: str
    top: float | None = None
    logarithmic: bool = False
    # True if a value holds until the next one is recorded.
    held: bool = True
    of_masks: bool = False


QUANTITIES = {
    "active share": Quantity("active_share", "Viridis", top=1.0, of_masks=True),
    "flips per entry": Quantity("flips_per_entry", "Inferno", held=False, of_masks=True),
    "gradient norm before": Quantity("gradient_norm_before", "Cividis", logarithmic=True),
    "gradient norm after": Quantity("gradient_norm_after", "Cividis", logarithmic=True),
    "update size": Quantity("update_size", "Cividis", logarithmic=True),
    "median age": Quantity("age_median", "Plasma", of_masks=True),
}


def timeline(run: Run) -> Figure | None:
    """Draw layers by steps: the active share, flips, gradient norms, update sizes or ages in colour."""
    layers = run.rows("layer")
    if layers.empty:
        return None
    keys = ["policy", "layer", "step"]
    ages = _means_by_entries(run.rows("freeze"), ["age_median"], keys)
    layers = layers.drop(columns="age_median").join(ages, on=keys)
    layers = layers.assign(flips_per_entry=layers["flipped"] / layers["entries"].clip(lower=1))
    by_layers = _trains_by_layers(layers)
    usable = {
        name: quantity
        for name, quantity in QUANTITIES.items()
        if _is_known(layers, quantity.column) and (by_layers or not quantity.of_masks)
    }
    if not usable:
        return None
    policies = list(layers["policy"].unique())
    height = 120 + 18 * min(int(layers.groupby("policy")["layer"].nunique().max()), 60)
    figure = new_figure("step", "", height=height).update_layout(hovermode="closest")
    names = list(layers["layer"].unique())
    labels = _without_common_parents(names)
    figure.update_yaxes(autorange="reversed", type="category", tickvals=names, ticktext=labels)
    for name, quantity in usable.items():
        for policy in policies:
            rows = layers[layers["policy"] == policy]
            meta = {"quantity": name, "policy": policy}
            figure.add_trace(_heat_map(rows, name, quantity, run.last_step).update(meta=meta))
    choices = {"quantity": ("colour", list(usable)), "policy": ("policy", policies)}
    note = "A mask holds until the next change, a norm, size or age until it is measured again."
    title = "Timeline of masks" if by_layers else "Gradients and updates by layer"
    return Figure(title, figure, choices, note, wide=True)


def _trains_by_layers(layers: pd.DataFrame) -> bool:
    """Return True if layers train or freeze as a whole: otherwise shares by layer show noise alone."""
    whole = (layers["active_share"] < 0.02) | (layers["active_share"] > 0.98)
    return float(layers.loc[whole, "entries"].sum()) > 0.1 * float(layers["entries"].sum())


def _without_common_parents(names: Sequence[str]) -> list[str]:
    """Return qualified names without the parents that all of them have: a phone is narrow."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return [".".join(name.split(".")[common:]) for name in names]


def _heat_map(rows: pd.DataFrame, name: str, quantity: Quantity, end: int) -> go.Heatmap:
    table = rows.pivot_table(
        index="layer", columns="step", values=quantity.column, aggfunc="last", sort=False, dropna=False
    )
    table = table.reindex(index=rows["layer"].unique(), columns=sorted(table.columns))
    table = _evenly_spaced(table.ffill(axis=1) if quantity.held else table, end, held=quantity.held)
    values = table.to_numpy(dtype=np.float32)
    shared = {"x": np.asarray(table.columns), "y": list(table.index), "colorscale": quantity.scale}
    shared |= {"hoverongaps": False}
    bar: dict[str, Any] = {"thickness": 10, "title": {"text": name, "side": "right"}}
    hover = f"%{{y}}<br>step %{{x}}<br>{name} %{{text:.3g}}<extra></extra>"
    if not quantity.logarithmic:
        hover = hover.replace("text", "z")
        return go.Heatmap(z=values, zmin=0.0, zmax=quantity.top, colorbar=bar, hovertemplate=hover, **shared)
    logarithms = np.log10(np.where(values > 0, values, np.nan))
    bar |= {"tickprefix": "10<sup>", "ticksuffix": "</sup>"}
    hover = hover.replace("text", "customdata")
    return go.Heatmap(z=logarithms, customdata=values, colorbar=bar, hovertemplate=hover, **shared)


def _evenly_spaced(table: pd.DataFrame, end: int, *, held: bool) -> pd.DataFrame:
    """Return columns of equally many steps: a heat map puts the borders of others halfway between them.

    Args:
        table: Layers by the steps that were recorded.
        end: The last step of the run.
        held: If True, a value holds until the next one.
    """
    most = max(20, min(COLUMNS, CELLS // max(len(table), 1)))
    start = int(table.columns[0])
    width = -(-(end - start + 1) // most)
    recorded = table.T.groupby((table.columns - start) // width)
    columns = range((end - start) // width + 1)
    spaced = recorded.mean().T.reindex(columns=columns)
    if held:
        spaced = spaced.fillna(recorded.last().T.reindex(columns=columns).ffill(axis=1))
    spaced.columns = [start + width * column for column in columns]
    return spaced


# ---- memory, flow policies


def memory(runs: Mapping[str, Run]) -> Figure | None:
    """Draw the bytes of optimizer state over the steps, beside those of plain Adam.

    Args:
        runs: By the label of the curve.
    """
    figure = new_figure("step", "bytes").update_yaxes(tickformat=".3s", rangemode="tozero")
    drawn: set[tuple[float, ...]] = set()
    for index, (label, run) in enumerate(runs.items()):
        rows = run.rows("memory")
        if not _is_known(rows, "state_bytes"):
            continue
        rows = rows.set_index("step")
        line = {"color": _colour(index), "shape": "hv"}
        _add_curve(figure, rows["state_bytes"], label, line=line)
        # Runs of one model share it.
        adam = rows["adam_bytes"]
        if adam.notna().any() and tuple(adam) not in drawn:
            name = f"plain Adam · {label}" if drawn else "plain Adam"
            _add_curve(figure, adam, name, line={"color": line["color"] if drawn else PLAIN, "dash": "dash"})
            drawn.add(tuple(adam))
    return Figure("Optimizer memory", figure, wide=len(runs) == 1) if figure.data else None


FLOW = {
    "gradient norms": {"gradient_norm_before": "before", "gradient_norm_after": "after"},
    "operations": {"operations": "operations"},
    "zeros let through": {"zeros_passed": "share of zeros"},
}


def flow(run: Run) -> Figure | None:
    """Draw the gradient norms, operations and zeros of flow policies over the steps."""
    rows = run.rows("flow")
    if rows.empty:
        return None
    figure = new_figure("step", "")
    rows = rows.assign(phase=rows["phase"].astype(object).fillna("fit"))
    groups = list(rows.groupby(["phase", "policy"], sort=False))
    colours = {policy: _colour(index) for index, policy in enumerate(rows["policy"].unique())}
    for quantity, columns in FLOW.items():
        for (phase, policy), own in groups:
            for (column, label), dash in zip(columns.items(), ("solid", "dot"), strict=False):
                points = own.set_index("step")[column].dropna()
                if len(points):
                    meta = {"quantity": quantity, "phase": phase}
                    line = {"color": colours[policy], "dash": dash}
                    _add_curve(figure, points, f"{policy} {label}", line=line, meta=meta)
    if not figure.data:
        return None
    quantities, phases = (
        list(dict.fromkeys(t.meta[key] for t in figure.data)) for key in ("quantity", "phase")
    )
    choices = {"quantity": ("shows", quantities), "phase": ("phase", phases)}
    return Figure("Flow policies", figure, choices, wide=True)
