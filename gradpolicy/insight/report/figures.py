"""The figures of a report, each a plotly figure with the choices that a reader has."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

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
CURVE_HEIGHT = 300
# Axes of parallel coordinates, at most.
AXES = 8
# Legends: the longest name in characters, and the height of a line in pixels.
LONGEST, LINE = 60, 20
STAGES = ("train/", "val/", "test/")


@dataclass(frozen=True)
class Figure:
    """A figure with its heading and what a reader can choose.

    Args:
        title: The heading above it.
        figure: The plotly figure. A trace's ``meta`` says under which choices it is shown.
        choices: By key of ``meta``: the heading of the choice and its values. A trace without that key is
            always shown.
        note: How to read it.
        wide: Whether it takes the whole width of the page.
    """

    title: str
    figure: go.Figure
    choices: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)
    note: str = ""
    wide: bool = False

    def __post_init__(self) -> None:
        """Shortens long names in the legend, and makes the figure higher by its lines."""
        named = [trace for trace in self.figure.data if trace.name and trace.showlegend is not False]
        for trace in named:
            trace.name = _shortened(trace.name, LONGEST)
        names = {trace.name for trace in named if trace.visible is not False}
        if len(names) < 2 or not self.figure.layout.legend.orientation:
            return
        width = (1100 if self.wide else 500) // (44 + 7 * max(map(len, names)))
        lines = -(-len(names) // max(width, 1))
        self.figure.update_layout(height=self.figure.layout.height + LINE * (lines - 1))


def new_figure(x: str, y: str, height: int = CURVE_HEIGHT, **layout: Any) -> go.Figure:
    """An empty figure; the page gives it the colours of the reader's theme."""
    figure = go.Figure()
    figure.update_layout(
        template={"layout": {"colorway": COLOURS}},
        height=height,
        margin={"l": 52, "r": 12, "t": 12, "b": 44},
        xaxis={"title": {"text": x}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        **layout,
    )
    return figure


def _shown_first(figure: go.Figure, choices: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Hides the traces that the first value of each choice does not show."""
    for trace in figure.data:
        meta = trace.meta or {}
        trace.visible = all(meta.get(key, values[0]) == values[0] for key, (_, values) in choices.items())


def is_known(rows: pd.DataFrame, column: str) -> bool:
    """Whether any row has a value in a column."""
    return column in rows and bool(rows[column].notna().any())


def _thinned(frame: pd.DataFrame, most: int = POINTS) -> pd.DataFrame:
    """At most so many rows, evenly chosen, the last among them."""
    if len(frame) <= most:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, most).round().astype(int))]


def _numbers(values: Iterable[float]) -> np.ndarray:
    """Values in single precision, which the page holds in few bytes."""
    return np.asarray(list(values), dtype=np.float32)


def _mode(points: pd.DataFrame) -> str:
    """Few points are marked: a single one has no line."""
    return "lines+markers" if len(points) < 8 else "lines"


# ---- curves


def curve(run: Run, metric: str) -> pd.DataFrame:
    """The steps at which a metric was logged, and its values."""
    if metric not in run.metrics or "step" not in run.metrics:
        return pd.DataFrame({"step": [], metric: []})
    points = run.metrics[["step", metric]].apply(pd.to_numeric, errors="coerce").dropna()
    return points.groupby("step", as_index=False).last()


def curve_groups(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The metrics that share a chart: those of one name in training, validation and test."""
    names = dict.fromkeys(str(name) for run in runs for name in run.metrics)
    groups: dict[str, list[str]] = {}
    for name in names:
        stage = next((stage for stage in STAGES if name.startswith(stage)), "")
        if name in ("step", "epoch") or "policy/" in name or name.endswith("_best"):
            continue
        groups.setdefault(name.removeprefix(stage), []).append(name)
    order = {"loss": 0, "accuracy": 1}
    return {
        key: sorted(groups[key], key=_stage)
        for key in sorted(groups, key=lambda key: (order.get(key, 2), key))
    }


def _stage(name: str) -> int:
    return next((index for index, stage in enumerate(STAGES) if name.startswith(stage)), len(STAGES))


def run_curves(run: Run) -> list[Figure]:
    """A chart for each metric, with a curve for each stage."""
    found = []
    for title, names in curve_groups([run]).items():
        figure = new_figure("step", title)
        for name in names:
            points = _thinned(curve(run, name))
            single = len(points) == 1
            figure.add_scatter(
                x=points["step"].to_numpy(),
                y=_numbers(points[name]),
                name=name,
                mode="markers" if single else "lines",
                marker={"size": 10, "symbol": "diamond"},
            )
        # A number that never changed stands in the table.
        if any(len(set(trace.y)) > 1 for trace in figure.data):
            found.append(Figure(title, figure))
    return found


def group_curves(groups: Sequence[Group]) -> list[Figure]:
    """A chart for each metric: a group's mean as a line, its spread as a band, its runs as hairlines."""
    runs = [run for group in groups for run in group.runs]
    found = []
    for title, names in curve_groups(runs).items():
        figure = new_figure("step", title)
        usable = [name for name in names if any(len(curve(run, name)) > 1 for run in runs)]
        for name in usable:
            for group, colour in zip(groups, _colours(len(groups)), strict=True):
                _add_group(figure, group, name, colour)
        if figure.data:
            choices = {"metric": ("curve", usable)}
            _shown_first(figure, choices)
            found.append(Figure(title, figure, choices if len(usable) > 1 else {}))
    return found


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _add_group(figure: go.Figure, group: Group, metric: str, colour: str) -> None:
    curves = {index: curve(run, metric).set_index("step")[metric] for index, run in enumerate(group.runs)}
    curves = {index: points for index, points in curves.items() if len(points)}
    if not curves:
        return
    common = {"legendgroup": group.label, "meta": {"metric": metric}}
    table = pd.concat(curves, axis=1)
    # A run that ends earlier is not in the mean of later steps.
    inside = table.interpolate(limit_area="inside")
    inside = _thinned(inside, POINTS // 4)
    counted = inside[[index for index in inside if not group.runs[index].broken_off] or list(inside)]
    mean, deviation = counted.mean(axis=1), counted.std(axis=1, ddof=1).fillna(0)
    steps = inside.index.to_numpy()
    if len(curves) > 1:
        figure.add_scatter(
            x=np.concatenate([steps, steps[::-1]]),
            y=_numbers([*(mean + deviation), *(mean - deviation)[::-1]]),
            fill="toself",
            fillcolor=_faint(colour),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            **common,
        )
        for column in range(inside.shape[1]):
            figure.add_scatter(
                x=steps,
                y=_numbers(inside.iloc[:, column]),
                line={"color": colour, "width": 0.5},
                hoverinfo="skip",
                showlegend=False,
                mode="lines",
                **common,
            )
    figure.add_scatter(
        x=steps,
        y=_numbers(mean),
        name=group.label,
        mode="lines",
        line={"color": colour, "width": 2.5},
        **common,
    )


def _faint(colour: str, alpha: float = 0.15) -> str:
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def parallel_coordinates(
    settings: Mapping[str, Sequence[Any]], metric: str, values: Sequence[float], *, lowest: bool = False
) -> go.Figure:
    """Draws a line for each run through what it set, an axis for each setting, and through what came of it.

    Args:
        settings: By name, the value of each run.
        metric: What runs are compared by.
        values: The value of each run.
        lowest: Whether the lowest value is the best.
    """
    line = {"color": values, "colorscale": "Viridis", "reversescale": lowest, "showscale": True}
    axes = [_axis(name, list(given)) for name, given in settings.items()]
    axes.append({"label": metric, "values": list(values), "tickformat": ".3~g"})
    figure = go.Figure(go.Parcoords(line=line, dimensions=axes))
    # The names on the first axis stand left of it, and plotly makes no room for them.
    left = max(110, 20 + 6 * max(map(len, axes[0].get("ticktext", [""]))))
    figure.update_layout(
        height=380, margin={"l": left, "r": 60, "t": 60, "b": 30}, paper_bgcolor="rgba(0,0,0,0)"
    )
    return figure


def _axis(name: str, given: list[Any]) -> dict[str, Any]:
    """An axis of parallel coordinates: numbers as they are, other values one after the other."""
    if _are_numbers(given):
        return {"label": name, "values": [float(value) for value in given], "tickformat": ".3~g"}
    names = list(dict.fromkeys(map(str, given)))
    return {
        "label": name,
        "values": [names.index(str(value)) for value in given],
        "tickvals": list(range(len(names))),
        "ticktext": [_shortened(text, 40) for text in names],
    }


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _are_numbers(values: Iterable[Any]) -> bool:
    try:
        return all(np.isfinite(float(value)) for value in values)
    except (TypeError, ValueError):
        return False


def settings_and_metric(runs: Sequence[Run], differences: Sequence[Difference]) -> Figure | None:
    """What runs set beside the metric that they are compared by; None without two to compare."""
    config = runs[0].config
    metric = str(config.get("optimized_metric") or next(iter(compared_metrics(runs)), ""))
    valued = [
        index
        for index, run in enumerate(runs)
        if not run.broken_off and np.isfinite(run.final_metrics.get(metric, np.nan))
    ]
    varied = [each for each in differences if each.key != "seed"][:AXES]
    if len(valued) < 2 or not varied:
        return None
    # Digits that a label leaves out count on an axis.
    settings = {
        each.name: [(each.values if _are_numbers(each.values) else each.shown)[index] for index in valued]
        for each in varied
    }
    values = [runs[index].final_metrics[metric] for index in valued]
    figure = parallel_coordinates(settings, metric, values, lowest=config.get("optimized_mode") == "min")
    note = "A line for each run that came to its end. Drag along an axis to choose among them."
    return Figure(f"What was set, and {metric}", figure, note=note, wide=True)


# ---- masks over time

# Share, flips and ages, one above the other: the axis of each, its heading, and where it stands.
PANELS = (
    ("y", "entries that train", (0.72, 1.0)),
    ("y2", "flipped by a change", (0.36, 0.64)),
    ("y3", "age in updates", (0.0, 0.28)),
)


def mask_curves(run: Run) -> Figure | None:
    """The share of entries that train, the share that a change flips, and the ages, over the steps."""
    rows = run.rows("freeze")
    if rows.empty:
        return None
    figure = new_figure("step", "", height=520)
    policies = list(rows["policy"].unique())
    for policy in policies:
        own = rows[rows["policy"] == policy]
        # Which parameters a mask covers does not change, so a value holds until the next one.
        held = own.pivot_table(
            index="step", columns="parameter", values=["active", "entries"], aggfunc="last"
        )
        held = held.ffill()
        share = held["active"].sum(axis=1) / held["entries"].sum(axis=1)
        flips = own.groupby("step")["flipped"].sum() / held["entries"].sum(axis=1)
        changed = own.groupby("step")["changed"].any() if "changed" in own else flips > 0
        flips = flips[changed].iloc[1:]
        figure.add_scatter(**_panel("y", share, policy, shape="hv"))
        figure.add_scatter(**_panel("y2", flips, policy, mode="markers" if len(flips) < 200 else "lines"))
        _add_ages(figure, own, policy)
    for number, (_, heading, domain) in enumerate(PANELS, start=1):
        axis = {"title": {"text": heading}, "domain": domain, "rangemode": "tozero", "automargin": True}
        if number < len(PANELS):
            axis |= {"tickformat": ".0%", "range": [0, 1.05]}
        figure.update_layout({f"yaxis{number if number > 1 else ''}": axis})
    figure.update_xaxes(anchor="y3")
    choices = {"policy": ("policy", policies)}
    _shown_first(figure, choices)
    note = (
        "A change flips entries that it freezes or thaws. The age of an entry: its updates since its "
        "optimizer state was last empty; line: the median, band: the middle half, means over the tensors."
    )
    return Figure("Share, flips and ages", figure, choices if len(policies) > 1 else {}, note, wide=True)


def _panel(
    axis: str, values: pd.Series, policy: str, mode: str = "lines", shape: str = "linear"
) -> dict[str, Any]:
    """A curve of :func:`mask_curves`."""
    values = values.iloc[
        np.unique(np.linspace(0, len(values) - 1, min(len(values), POINTS)).round().astype(int))
    ]
    return {
        "x": values.index.to_numpy(),
        "y": _numbers(values),
        "yaxis": axis,
        "mode": mode,
        "line": {"color": COLOURS[0], "shape": shape},
        "marker": {"color": COLOURS[0], "size": 4},
        "name": {name: heading for name, heading, _ in PANELS}[axis],
        "showlegend": False,
        "meta": {"policy": policy},
    }


def _add_ages(figure: go.Figure, rows: pd.DataFrame, policy: str) -> None:
    known = [name for name in ("age_q25", "age_q75", "age_median") if name in rows]
    if "age_median" not in known:
        return
    rows = rows.dropna(subset="age_median")
    weighted = rows[known].mul(rows["entries"], axis=0).assign(step=rows["step"], entries=rows["entries"])
    sums = weighted.groupby("step").sum()
    for name in known:
        curve = _panel("y3", sums[name] / sums["entries"], policy)
        if name != "age_median":
            curve |= {"line": {"width": 0, "color": COLOURS[0]}, "hoverinfo": "skip"}
        if name == "age_q75":
            curve |= {"fill": "tonexty", "fillcolor": _faint(COLOURS[0], 0.25)}
        figure.add_scatter(**curve)


def _trains_by_layers(layers: pd.DataFrame) -> bool:
    """Whether layers train or freeze as a whole: otherwise shares by layer show noise alone."""
    whole = (layers["active_share"] < 0.02) | (layers["active_share"] > 0.98)
    return float(layers.loc[whole, "entries"].sum()) > 0.1 * float(layers["entries"].sum())


# ---- the timeline of layers


@dataclass(frozen=True)
class Quantity:
    """What a heat map shows.

    Args:
        name: As the reader chooses it.
        column: The column made of the record.
        scale: The colours.
        top: The largest value; None: by the data.
        logarithmic: Whether colours go by the logarithm.
        held: Whether a value holds until the next one is recorded.
        of_masks: Whether it tells of masks.
    """

    name: str
    column: str
    scale: str
    top: float | None = None
    logarithmic: bool = False
    held: bool = True
    of_masks: bool = False


QUANTITIES = (
    Quantity("active share", "active_share", "Viridis", top=1.0, of_masks=True),
    Quantity("flipped share", "flipped_share", "Inferno", held=False, of_masks=True),
    Quantity("gradient norm before", "gradient_norm_before", "Cividis", logarithmic=True),
    Quantity("gradient norm after", "gradient_norm_after", "Cividis", logarithmic=True),
    Quantity("update size", "update_size", "Cividis", logarithmic=True),
    Quantity("median age", "age_median", "Plasma", of_masks=True),
)


def timeline(run: Run) -> Figure | None:
    """Layers by steps: the active share, flips, gradient norms, update sizes or ages in colour."""
    layers = run.rows("layer")
    if layers.empty:
        return None
    layers = layers.assign(flipped_share=layers.get("flipped", 0) / layers["entries"].clip(lower=1))
    layers = _with_parameters(layers, run.rows("freeze"))
    policies = list(layers["policy"].unique())
    height = 120 + 18 * min(int(layers.groupby("policy")["layer"].nunique().max()), 60)
    figure = new_figure("step", "", height=height)
    figure.update_layout(hovermode="closest")
    names = list(layers["layer"].unique())
    figure.update_yaxes(
        autorange="reversed", type="category", tickvals=names, ticktext=_without_common_parents(names)
    )
    usable = []
    by_layers = _trains_by_layers(layers)
    for quantity in QUANTITIES:
        if not is_known(layers, quantity.column):
            continue
        if quantity.of_masks and not by_layers:
            continue
        usable.append(quantity.name)
        for policy in policies:
            figure.add_trace(_heat_map(layers[layers["policy"] == policy], policy, quantity, run.last_step))
    if not usable:
        return None
    choices = {"quantity": ("colour", usable), "policy": ("policy", policies)}
    _shown_first(figure, choices)
    note = "A mask holds until the next change, a norm, size or age until it is measured again."
    shown = {key: choice for key, choice in choices.items() if len(choice[1]) > 1}
    title = "Timeline of masks" if by_layers else "Gradients and updates by layer"
    return Figure(title, figure, shown, note, wide=True)


def _without_common_parents(names: Sequence[str]) -> list[str]:
    """Qualified names without the parents that all of them have: a phone is narrow."""
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    common = sum(1 for _ in takewhile(lambda level: len(set(level)) == 1, levels))
    return [".".join(name.split(".")[common:]) for name in names]


def _with_parameters(layers: pd.DataFrame, parameters: pd.DataFrame) -> pd.DataFrame:
    """Adds what is only recorded for parameters: means over a layer's, weighted by their entries."""
    keys = ["policy", "layer", "step"]
    known = [name for name in ("update_size", "age_median") if is_known(parameters, name)]
    if not known:
        return layers
    weighted = parameters[keys].assign(entries=parameters["entries"])
    for name in known:
        weighted[name] = parameters[name] * parameters["entries"]
    # Without a value in any parameter there is none in the layer.
    sums = weighted.groupby(keys, as_index=False).sum(min_count=1)
    for name in known:
        sums[name] = sums[name] / sums["entries"].clip(lower=1)
    return layers.drop(columns=known, errors="ignore").merge(sums[[*keys, *known]], on=keys, how="left")


def _evenly_spaced(table: pd.DataFrame, end: int, *, held: bool) -> pd.DataFrame:
    """Columns of equally many steps: a heat map puts the borders of others halfway between them.

    Args:
        table: Layers by the steps that were recorded.
        end: The last step of the run.
        held: Whether a value holds until the next one.
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


def _heat_map(rows: pd.DataFrame, policy: str, quantity: Quantity, end: int) -> go.Heatmap:
    table = rows.pivot_table(
        index="layer", columns="step", values=quantity.column, aggfunc="last", sort=False, dropna=False
    )
    table = table.reindex(index=rows["layer"].unique(), columns=sorted(table.columns))
    table = _evenly_spaced(table.ffill(axis=1) if quantity.held else table, end, held=quantity.held)
    values = table.to_numpy(dtype=np.float32)
    colours = np.log10(np.where(values > 0, values, np.nan)) if quantity.logarithmic else values
    bar: dict[str, Any] = {"thickness": 10, "title": {"text": quantity.name, "side": "right"}}
    if quantity.logarithmic:
        bar |= {"tickprefix": "10<sup>", "ticksuffix": "</sup>"}
    return go.Heatmap(
        x=np.asarray(table.columns),
        y=list(table.index),
        z=colours,
        customdata=values if quantity.logarithmic else None,
        zmin=None if quantity.logarithmic else 0.0,
        zmax=quantity.top,
        colorscale=quantity.scale,
        colorbar=bar,
        hoverongaps=False,
        hovertemplate=f"%{{y}}<br>step %{{x}}<br>{quantity.name} "
        + ("%{customdata:.3g}" if quantity.logarithmic else "%{z:.3g}")
        + "<extra></extra>",
        meta={"quantity": quantity.name, "policy": policy},
    )


# ---- ages, memory, flow policies


def ages(run: Run) -> Figure | None:
    """The quartiles of the ages of a parameter's entries over the steps."""
    rows = run.rows("freeze")
    if not is_known(rows, "age_median"):
        return None
    figure = new_figure("step", "age in updates")
    # Masks may change at steps at which no ages are recorded.
    rows = rows.dropna(subset="age_median")
    names = list(rows["parameter"].unique())
    # One that had just begun whenever ages were recorded would be shown as a flat line.
    oldest = rows["age_max" if is_known(rows, "age_max") else "age_median"].idxmax()
    names.sort(key=lambda name: name != rows["parameter"][oldest])
    most = max(30, POINTS * 20 // max(len(names), 1))
    for name in names:
        own = rows[rows["parameter"] == name].groupby("step", as_index=False).last()
        own = _thinned(own, min(most, POINTS // 2))
        meta = {"parameter": name}
        bands = (("age_min", "age_max", 0.12, "least to most"), ("age_q25", "age_q75", 0.3, "middle half"))
        for low, high, alpha, label in bands:
            if not (is_known(own, low) and is_known(own, high)):
                continue
            line = {"width": 0, "color": COLOURS[0]}
            figure.add_scatter(
                x=own["step"],
                y=_numbers(own[low]),
                line=line,
                mode="lines",
                showlegend=False,
                name=low,
                meta=meta,
            )
            figure.add_scatter(
                x=own["step"],
                y=_numbers(own[high]),
                line=line,
                mode="lines",
                fill="tonexty",
                fillcolor=_faint(COLOURS[0], alpha),
                name=label,
                meta=meta,
            )
        figure.add_scatter(
            x=own["step"], y=_numbers(own["age_median"]), mode=_mode(own), name="median", meta=meta
        )
    choices = {"parameter": ("parameter", names)}
    _shown_first(figure, choices)
    note = "The age of an entry: its updates since its optimizer state was last empty."
    return Figure("Ages", figure, choices, note, wide=True)


def memory(runs: Mapping[str, Run]) -> Figure | None:
    """Bytes of optimizer state over the steps, beside what plain Adam would hold.

    Args:
        runs: By the label of the curve.
    """
    figure = new_figure("step", "bytes")
    figure.update_yaxes(tickformat=".3s", rangemode="tozero")
    beside: dict[tuple[float, ...], str] = {}
    for (label, run), colour in zip(runs.items(), _colours(len(runs)), strict=True):
        rows = _thinned(run.rows("memory"))
        if not is_known(rows, "state_bytes"):
            continue
        figure.add_scatter(
            x=rows["step"],
            y=_numbers(rows["state_bytes"]),
            name=label,
            line={"color": colour, "shape": "hv"},
            mode=_mode(rows),
        )
        # Runs of one model share it.
        if is_known(rows, "adam_bytes") and beside.setdefault(tuple(rows["adam_bytes"]), label) == label:
            figure.add_scatter(
                x=rows["step"],
                y=_numbers(rows["adam_bytes"]),
                name="plain Adam" if len(runs) == 1 or len(beside) == 1 else f"plain Adam · {label}",
                line={"color": PLAIN if len(beside) == 1 else colour, "dash": "dash"},
                mode=_mode(rows),
            )
    return Figure("Optimizer memory", figure, wide=len(runs) == 1) if figure.data else None


FLOW = {
    "gradient norms": (("gradient_norm_before", "before"), ("gradient_norm_after", "after")),
    "operations met": (("operations", "operations"),),
    "zeros let through": (("zeros_passed", "share of zeros"),),
}


def flow(run: Run) -> Figure | None:
    """What flow policies did to the gradient over the steps: norms, operations, zeros."""
    rows = run.rows("flow")
    if rows.empty:
        return None
    figure = new_figure("step", "")
    rows = rows.assign(phase=rows["phase"].fillna("fit"))
    phases = list(rows["phase"].unique())
    usable = []
    for quantity, columns in FLOW.items():
        if not any(is_known(rows, column) for column, _ in columns):
            continue
        usable.append(quantity)
        for phase in phases:
            of_phase = rows[rows["phase"] == phase]
            for index, (policy, own) in enumerate(of_phase.groupby("policy", sort=False)):
                for place, (column, label) in enumerate(columns):
                    _add_flow_curve(figure, own, column, f"{policy} {label}", index, place, quantity, phase)
    choices = {"quantity": ("shows", usable), "phase": ("phase", phases)}
    if not figure.data:
        return None
    _shown_first(figure, choices)
    shown = {key: choice for key, choice in choices.items() if len(choice[1]) > 1}
    return Figure("Flow policies", figure, shown, wide=True)


def _add_flow_curve(
    figure: go.Figure,
    rows: pd.DataFrame,
    column: str,
    label: str,
    index: int,
    place: int,
    quantity: str,
    phase: str,
) -> None:
    if not is_known(rows, column):
        return
    own = _thinned(rows[["step", column]].dropna())
    figure.add_scatter(
        x=own["step"],
        y=_numbers(own[column]),
        name=label,
        mode=_mode(own),
        line={"color": COLOURS[index % len(COLOURS)], "dash": ("solid", "dot")[place]},
        meta={"quantity": quantity, "phase": phase},
    )
