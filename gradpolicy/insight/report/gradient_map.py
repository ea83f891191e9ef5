"""The map of the gradient: modules with the policies on them and their gradient norms."""

from collections.abc import Mapping, Sequence
from html import escape

import pandas as pd
import plotly.graph_objects as go

from gradpolicy.insight.report.figures import Figure, styled
from gradpolicy.insight.report.recorded_run import Run
from gradpolicy.planning.plan_table import PlanRow

# The effects on the gradient at a module, the strongest first, and their colours.
CUT, REPLACED, SCALED, FROZEN = "cut", "replaced", "scaled", "frozen"
COLOURS = {CUT: "#ef4444", REPLACED: "#a855f7", SCALED: "#f97316", FROZEN: "#3b82f6", "": "#d0d7de"}
KINDS = {"Stop": CUT, "Scale": SCALED, "Reverse": SCALED, "Clip": SCALED, "Freeze": FROZEN}
# Pixels per leaf, the maximum number of leaves for the height, levels shown at a time.
ROW, MOST, LEVELS = 34, 40, 5
MEASURED = ["before", "after", "active", "entries"]


def gradient_map(run: Run) -> Figure | None:
    """Draw the tree of modules with the effects on gradients; None if the plan has no modules."""
    if run.plan is None or not run.plan.modules:
        return None
    described = {module.name: module for module in run.plan.modules}
    shown = [name for name, module in described.items() if module.policies or module.parameters]
    names = list(dict.fromkeys(["", *(above for name in shown for above in reversed(_path(name)))]))
    parents = [name.rpartition(".")[0] for name in names]
    policies = {name: described[name].policies if name in described else () for name in names}
    kinds = {row.name: KINDS.get(row.policy, REPLACED) for row in run.plan.rows}
    texts = {row.name: _description(row) for row in run.plan.rows}
    effects = [_strongest(policies[name], kinds) for name in names]
    measured = _measured(run).reindex(names)
    leaves = sum(name not in parents for name in names)
    icicle = go.Icicle(
        ids=[f"root.{name}" for name in names],
        parents=["", *(f"root.{parent}" for parent in parents[1:])],
        labels=[escape(name.rpartition(".")[2] or "model") for name in names],
        text=[_caption(effect, measured.loc[name]) for name, effect in zip(names, effects, strict=True)],
        customdata=[
            "<br>".join(map(escape, [name or "the model", *(f"{each}: {texts.get(each)}" for each in own)]))
            for name, own in policies.items()
        ],
        hovertemplate="%{customdata}<br>%{text}<extra></extra>",
        textinfo="label+text",
        textfont={"color": ["#ffffff" if effect else "#1f2328" for effect in effects]},
        marker={"colors": [COLOURS[effect] for effect in effects]},
        leaf={"opacity": 1},
        sort=False,
        maxdepth=LEVELS,
        tiling={"orientation": "h", "pad": 2},
    )
    figure = styled(go.Figure(icicle)).update_layout(height=60 + ROW * min(max(leaves, 6), MOST))
    figure.update_layout(margin={"l": 8, "r": 8, "t": 8, "b": 8})
    note = (
        "A box is a module. ‖g‖ is the norm of the gradients of its parameters, a root mean square over the "
        "run, before and after the policies; a percentage is the share of its entries that trained, a mean "
        "over the steps. Click on a module to see what lies in it."
    )
    placed = {policy for own in policies.values() for policy in own}
    everywhere = [f"{policy} ({text})" for policy, text in texts.items() if policy not in placed]
    if everywhere:
        note += f" In the whole model: {'; '.join(everywhere)}."
    return Figure("Map of the gradient", figure, note, wide=True)


def _path(name: str) -> list[str]:
    """Return a module and its ancestors, from the inside out.

    Example:
        >>> _path("a.b")
        ['a.b', 'a', '']
    """
    return [name, *_path(name.rpartition(".")[0])] if name else [""]


def _strongest(policies: Sequence[str], kinds: Mapping[str, str]) -> str:
    present = {kinds.get(policy, REPLACED) for policy in policies}
    return next((kind for kind in COLOURS if kind in present), "")


def _description(row: PlanRow) -> str:
    calls = ", ".join(f"{count} {operation}" for operation, count in row.operations.items())
    return " ".join(filter(None, (row.what, calls, row.when)))


def _measured(run: Run) -> pd.DataFrame:
    """Return the gradient norms and active entries of each module's parameters, as means over the run."""
    rows = run.rows("layer")
    if rows.empty:
        return pd.DataFrame(columns=MEASURED, dtype=float)
    squares = {side: rows[f"gradient_norm_{side}"] ** 2 for side in ("before", "after")}
    means = rows.assign(**squares).groupby(["layer", "policy"])[MEASURED].mean()
    # Policies that share a layer get the same gradient.
    ways = {"before": "max", "after": "min", "active": "min", "entries": "max"}
    layers = means.groupby("layer").agg(ways).reset_index()
    inside = layers.assign(module=layers["layer"].map(_path)).explode("module")
    sums = inside.groupby("module")[MEASURED].sum(min_count=1)
    return sums.assign(before=sums["before"] ** 0.5, after=sums["after"] ** 0.5)


def _caption(effect: str, measured: "pd.Series[float]") -> str:
    norms = f"‖g‖ {measured['before']:.2g}" if measured["before"] >= 0 else ""
    if norms and measured["after"] != measured["before"]:
        norms += f" → {measured['after']:.2g}"
    share = f"{measured['active'] / measured['entries']:.0%}" if measured["entries"] > 0 else ""
    return " · ".join(filter(None, (effect, share, norms)))
