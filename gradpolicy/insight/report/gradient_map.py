"""The map of the gradient: modules with the policies on them and their gradient norms."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from gradpolicy.insight.report.figures import Figure, new_figure
from gradpolicy.insight.report.reading import Run

# What may happen to the gradient at a module, the most drastic first, and its colour.
CUT, REPLACED, SCALED, FROZEN = "cut", "replaced", "scaled", "frozen"
COLOURS = {CUT: "#ef4444", REPLACED: "#a855f7", SCALED: "#f97316", FROZEN: "#3b82f6", "": "#d0d7de"}
KINDS = {"Stop": CUT, "Scale": SCALED, "Reverse": SCALED, "Clip": SCALED, "Freeze": FROZEN}
# Pixels of a leaf, leaves that set the height, levels shown at a time.
ROW, MOST, LEVELS = 34, 40, 5


def gradient_map(run: Run) -> Figure | None:
    """Draw the tree of modules, and what happens to the gradient where; None without modules in the plan."""
    described = {str(module["name"]): module for module in run.plan.get("modules") or ()}
    if not described:
        return None
    names = _shown_modules(described)
    parents = [_parent(name) for name in names]
    rows = run.plan.get("rows", [])
    kinds = {str(row["name"]): _kind_of(str(row.get("what", ""))) for row in rows}
    effects = [_strongest(described.get(name, {}).get("policies", ()), kinds) for name in names]
    measured = _measured(run, names)
    told = _descriptions(run)
    leaves = sum(name not in parents for name in names)
    figure = new_figure("", "", height=60 + ROW * min(max(leaves, 6), MOST))
    figure.add_icicle(
        ids=[f"root.{name}" for name in names],
        parents=["", *(f"root.{parent}" for parent in parents[1:])],
        labels=[escape(name.rpartition(".")[2] or "model") for name in names],
        text=[_caption(effect, measured.loc[name]) for name, effect in zip(names, effects, strict=True)],
        customdata=[_details(name, described.get(name, {}), measured.loc[name], told) for name in names],
        hovertemplate="%{customdata}<extra></extra>",
        textinfo="label+text",
        textfont={"color": ["#ffffff" if effect else "#1f2328" for effect in effects]},
        marker={"colors": [COLOURS[effect] for effect in effects]},
        leaf={"opacity": 1},
        sort=False,
        maxdepth=LEVELS,
        tiling={"orientation": "h", "pad": 2},
    )
    figure.update_layout(hovermode="closest", margin={"l": 8, "r": 8, "t": 8, "b": 8})
    note = (
        "A box is a module. ‖g‖ is the norm of the gradients of its parameters, a root mean square over the "
        "run, before and after the policies; a percentage is the share of its entries that trained, a mean "
        "over the steps. Click on a module to see what lies in it."
    )
    placed = {policy for name in names for policy in described.get(name, {}).get("policies", ())}
    everywhere = [f"{policy} ({text})" for policy, text in told.items() if policy not in placed]
    if everywhere:
        note += f" In the whole model: {'; '.join(everywhere)}."
    return Figure("Map of the gradient", figure, note=note, wide=True)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _shown_modules(described: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the modules that hold parameters or policies, and those around them, from the outside in."""
    shown = {"": None}
    for name, module in described.items():
        if name and (module.get("policies") or module.get("parameters")):
            parts = name.split(".")
            shown |= dict.fromkeys(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return list(shown)


def _kind_of(what: str) -> str:
    """Return what a policy does to the gradient, by the name of its class, as in ``Freeze · Random``."""
    return KINDS.get(what.split(" ")[0].split("(")[0], REPLACED)


def _strongest(policies: Sequence[str], kinds: Mapping[str, str]) -> str:
    present = {kinds.get(policy, REPLACED) for policy in policies}
    return next((kind for kind in COLOURS if kind in present), "")


def _measured(run: Run, names: Sequence[str]) -> pd.DataFrame:
    """Return the gradient norms and active entries of what lies in each module; NaN without a measurement."""
    rows = run.rows("layer")
    if rows.empty:
        return pd.DataFrame(index=list(names), columns=["before", "after", "active", "entries"], dtype=float)
    squares = {side: rows[f"gradient_norm_{side}"] ** 2 for side in ("before", "after")}
    # A count of active entries holds until the next one.
    lasted = rows.groupby(["layer", "policy"])["step"].shift(-1).fillna(run.last_step + 1) - rows["step"]
    rows = rows.assign(**squares, lasted=lasted, active=rows["active"] * lasted)
    groups = rows.groupby(["layer", "policy"])
    means = groups[["before", "after"]].mean()
    means["active"] = groups["active"].sum() / groups["lasted"].sum()
    means["entries"] = groups["entries"].last()
    # Policies that share a layer get the same gradient.
    layers = means.groupby("layer").agg({"before": "max", "after": "min", "active": "min", "entries": "last"})
    inside = {
        name: layers[[not name or f"{layer}.".startswith(f"{name}.") for layer in layers.index]]
        for name in names
    }
    sums = pd.DataFrame({name: own.sum(min_count=1) for name, own in inside.items()}).T
    return sums.assign(before=np.sqrt(sums["before"]), after=np.sqrt(sums["after"]))


def _caption(effect: str, measured: "pd.Series[float]") -> str:
    norms = f"‖g‖ {measured['before']:.2g}" if measured["before"] >= 0 else ""
    if norms and measured["after"] != measured["before"]:
        norms += f" → {measured['after']:.2g}"
    share = f"{measured['active'] / measured['entries']:.0%}" if measured["entries"] > 0 else ""
    return " · ".join(filter(None, (effect, share, norms)))


def _details(
    name: str, module: Mapping[str, Any], measured: "pd.Series[float]", told: Mapping[str, str]
) -> str:
    lines = [" · ".join(filter(None, (name or "the model", str(module.get("type", "")))))]
    if measured["entries"] > 0:
        active, entries = measured["active"], measured["entries"]
        lines.append(f"on average {active:,.0f} of {entries:,.0f} entries train ({active / entries:.1%})")
    if measured["before"] >= 0:
        lines.append(f"gradient norm {measured['before']:.3g} before, {measured['after']:.3g} after")
    lines += [f"{policy}: {told.get(policy, '')}".rstrip(": ") for policy in module.get("policies") or ()]
    return "<br>".join(map(escape, lines))


def _descriptions(run: Run) -> dict[str, str]:
    """Describe each policy: its kind, its operations, and the norms that a flow policy measured."""
    rows = run.rows("flow")
    norms = pd.DataFrame()
    if not rows.empty:
        norms = rows.groupby("policy")[["gradient_norm_before", "gradient_norm_after"]].mean()
    found = {}
    for row in run.plan.get("rows", []):
        name = str(row["name"])
        calls = ", ".join(
            f"{count} {operation}" for operation, count in (row.get("operations") or {}).items()
        )
        parts = [" ".join(filter(None, (str(row.get("what", "")), calls, str(row.get("when", "")))))]
        if name in norms.index:
            known = [f"{norm:.3g}" for norm in norms.loc[name] if not np.isnan(norm)]
            parts += [f"norm {' → '.join(known)}"] if known else []
        found[name] = ", ".join(parts)
    return found
