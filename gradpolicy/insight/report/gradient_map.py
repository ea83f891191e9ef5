"""The map of the gradient: the tree of modules, where policies act on it, and how large the gradient is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from gradpolicy.insight.report.figures import PLAIN, Figure, is_known, new_figure
from gradpolicy.insight.report.reading import Run

# What may happen to the gradient at a module, the most drastic first: colour and marker.
CUT, REPLACED, SCALED, FROZEN, UNTOUCHED = "cut", "replaced", "scaled", "frozen", "untouched"
LOOKS = {
    CUT: ("#ef4444", "x"),
    REPLACED: ("#a855f7", "diamond"),
    SCALED: ("#f97316", "triangle-up"),
    FROZEN: ("#3b82f6", "square"),
    UNTOUCHED: (PLAIN, "circle"),
}
KINDS = {"Stop": CUT, "Scale": SCALED, "Reverse": SCALED, "Clip": SCALED, "Freeze": FROZEN}
LEAVES = 70
WIDEST, THINNEST = 16.0, 1.5  # pixels
ROW = 24


@dataclass
class Node:
    """A module of the tree.

    Args:
        name: Its qualified name; empty for the root.
        kind: Its class.
        policies: The policies that act on it.
        parameters: How many entries its parameters have, where that is known.
        children: The modules in it.
        before: Root of the summed squares of the gradient norms of what lies in it; NaN where not measured.
        after: The same after the policies.
        active: Active entries of what lies in it, a mean over the steps; NaN where no freeze policy acts.
        entries: Entries under freeze policies.
        folded: How many modules are left out below it.
    """

    name: str
    kind: str = ""
    policies: tuple[str, ...] = ()
    parameters: int = 0
    children: "list[Node]" = field(default_factory=list)
    before: float = math.nan
    after: float = math.nan
    active: float = math.nan
    entries: float = math.nan
    folded: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def label(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2] or self.kind or "model"

    def walk(self) -> "Iterator[Node]":
        """The module and all in it."""
        yield self
        for child in self.children:
            yield from child.walk()


def gradient_map(run: Run) -> Figure | None:
    """Draws the tree of modules, and what happens to the gradient where; None without modules in the plan."""
    modules = run.plan.get("modules") or []
    if not modules:
        return None
    root = make_tree(modules)
    _add_measurements(root, run)
    _prune(root)
    _fold(root)
    _place(root)
    kinds = {str(row["name"]): kind_of(str(row.get("what", ""))) for row in run.plan.get("rows", [])}
    leaves = sum(not node.children for node in root.walk())
    everywhere = _everywhere(root, run)
    root.policies = (*root.policies, *everywhere)
    figure = new_figure("", "", height=max(220, 70 + ROW * leaves))
    _draw_edges(figure, root, kinds)
    _draw_nodes(figure, root, kinds, _flow_notes(run))
    depth = max(node.x for node in root.walk())
    figure.update_layout(hovermode="closest", margin={"l": 8, "r": 8, "t": 30, "b": 8})
    figure.update_xaxes(visible=False, range=[-0.35, depth + 1.1])
    figure.update_yaxes(visible=False, range=[leaves - 0.3, -0.8])
    note = (
        "A band's width is the gradient norm of what lies in a module, a root mean square over the run: pale "
        "before the policies, coloured what they let through. Dotted: not measured, without a freeze policy "
        "or a gradient. A percentage is the share of the entries that trained, a mean over the steps."
    )
    if everywhere:
        note += f" In the whole model: {'; '.join(f'{name} ({told})' for name, told in everywhere.items())}."
    return Figure("Map of the gradient", figure, note=note, wide=True)


def kind_of(what: str) -> str:
    """What a policy does to the gradient, from the name of its class, as in ``Freeze · Random``."""
    return KINDS.get(what.split(" ")[0].split("(")[0], REPLACED)


# ---- the tree


def make_tree(modules: Sequence[Mapping[str, Any]]) -> Node:
    """A tree of the modules of ``plan.json``; parents that it does not name are added."""
    root = Node("")
    known = {"": root}
    for module in modules:
        name = str(module.get("name", ""))
        node = _node_at(name, known)
        node.kind = str(module.get("type", ""))
        node.policies = tuple(map(str, module.get("policies") or ()))
        parameters = module.get("parameters") or 0
        node.parameters = len(parameters) if isinstance(parameters, list) else int(parameters)
    return root


def _node_at(name: str, known: dict[str, Node]) -> Node:
    if name not in known:
        parent = _node_at(name.rpartition(".")[0], known)
        known[name] = Node(name)
        parent.children.append(known[name])
    return known[name]


def _add_measurements(root: Node, run: Run) -> None:
    """Gives modules the norms and active entries of the record, summed over what lies in them."""
    rows = run.rows("layer")
    measured: dict[str, dict[str, float]] = {}
    if not rows.empty:
        # Policies that share a layer see the same gradient.
        for layer, own in rows.groupby("layer"):
            measured[str(layer)] = {
                "before": _mean_square(own, "gradient_norm_before", max),
                "after": _mean_square(own, "gradient_norm_after", min),
                "active": min(_mean_active(each, run.last_step) for _, each in own.groupby("policy")),
                "entries": float(own["entries"].iloc[-1]),
            }
    _sum_up(root, measured)


def _mean_square(rows: pd.DataFrame, column: str, choose: Any) -> float:
    if not is_known(rows, column):
        return math.nan
    return float(choose(rows.assign(square=rows[column] ** 2).groupby("policy")["square"].mean()))


def _mean_active(rows: pd.DataFrame, last_step: int) -> float:
    """The active entries of a layer under a policy, a mean over the steps: a count holds until the next."""
    lasted = np.diff(rows["step"], append=last_step + 1)
    return float(np.average(rows["active"], weights=lasted))


def _sum_up(node: Node, measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    parts = [_sum_up(child, measured) for child in node.children]
    parts += [dict(measured[node.name])] if node.name in measured else []
    sums = {
        key: float(np.nansum(values))
        if (values := [part[key] for part in parts if not math.isnan(part[key])])
        else math.nan
        for key in ("before", "after", "active", "entries")
    }
    node.before, node.after = math.sqrt(sums["before"]), math.sqrt(sums["after"])
    node.active, node.entries = sums["active"], sums["entries"]
    return sums


def _everywhere(root: Node, run: Run) -> dict[str, str]:
    """What acts on operations wherever they are: the policies that are at no module, and what they are."""
    placed = {policy for node in root.walk() for policy in node.policies}
    found = {}
    for row in run.plan.get("rows", []):
        if row["name"] not in placed:
            calls = ", ".join(f"{count} {name}" for name, count in (row.get("operations") or {}).items())
            told = (str(row.get("what", "")), calls, str(row.get("when", "")))
            found[str(row["name"])] = " ".join(filter(None, told))
    return found


def _prune(root: Node) -> None:
    """Leaves out modules that hold neither parameters nor policies."""
    for node in list(root.walk()):
        node.children = [
            child
            for child in node.children
            if any(below.policies or below.parameters for below in child.walk())
        ]


def _fold(root: Node) -> None:
    """Folds the deepest modules until the tree fits."""
    while sum(not node.children for node in root.walk()) > LEAVES:
        depth = max(node.name.count(".") for node in root.walk() if node.children and node.name)
        for node in root.walk():
            if node.children and node.name.count(".") == depth and node.name:
                below = [each for child in node.children for each in child.walk()]
                node.policies = tuple(
                    dict.fromkeys([*node.policies, *(p for each in below for p in each.policies)])
                )
                node.folded = sum(1 + each.folded for each in below)
                node.children = []


def _place(root: Node) -> None:
    """Leaves get a row each, others the middle of theirs; the column is the depth."""
    rows = iter(range(10**9))

    def place(node: Node, depth: int) -> None:
        for child in node.children:
            place(child, depth + 1)
        node.x = float(depth)
        own = [child.y for child in node.children]
        node.y = (own[0] + own[-1]) / 2 if own else float(next(rows))

    place(root, 0)


# ---- the drawing


def strongest(policies: Sequence[str], kinds: Mapping[str, str]) -> str:
    """The most drastic of what several policies do."""
    present = {kinds.get(policy, REPLACED) for policy in policies}
    return next((kind for kind in LOOKS if kind in present), UNTOUCHED)


def _draw_edges(figure: go.Figure, root: Node, kinds: Mapping[str, str]) -> None:
    largest = np.nanmax([node.before for node in root.walk()] + [0.0]) or 1.0
    for node in root.walk():
        for child in node.children:
            colour = LOOKS[strongest(child.policies, kinds)][0]
            if math.isnan(child.before):
                _draw_edge(figure, node, child, THINNEST, colour, 0.9, "dot")
                continue
            _draw_edge(figure, node, child, _width(child.before, largest), colour, 0.3)
            if child.after > 0:
                _draw_edge(figure, node, child, _width(child.after, largest), colour, 0.9)


def _width(norm: float, largest: float) -> float:
    return max(THINNEST, WIDEST * norm / largest)


def _draw_edge(
    figure: go.Figure,
    parent: Node,
    child: Node,
    width: float,
    colour: str,
    opacity: float,
    dash: str = "solid",
) -> None:
    share = np.linspace(0, 1, 9)
    # Level at both ends.
    eased = share * share * (3 - 2 * share)
    figure.add_scatter(
        x=(parent.x + share * (child.x - parent.x)).astype(np.float32),
        y=(parent.y + eased * (child.y - parent.y)).astype(np.float32),
        mode="lines",
        line={"width": round(width, 1), "color": colour, "dash": dash},
        opacity=opacity,
        hoverinfo="skip",
        showlegend=False,
    )


def _draw_nodes(figure: go.Figure, root: Node, kinds: Mapping[str, str], notes: Mapping[str, str]) -> None:
    for kind, (colour, symbol) in LOOKS.items():
        nodes = [node for node in root.walk() if strongest(node.policies, kinds) == kind]
        if not nodes:
            continue
        figure.add_scatter(
            x=[node.x for node in nodes],
            y=[node.y for node in nodes],
            mode="markers+text",
            marker={"size": 11, "symbol": symbol, "color": colour},
            text=[_escaped(_caption(node)) for node in nodes],
            textposition=["middle right" if not node.children else "top center" for node in nodes],
            customdata=[_told(node, notes) for node in nodes],
            hovertemplate="%{customdata}<extra></extra>",
            cliponaxis=False,
            name=kind,
        )


def _caption(node: Node) -> str:
    folded = f" (+{node.folded})" if node.folded else ""
    share = f" {node.active / node.entries:.0%}" if node.entries > 0 and not node.children else ""
    return f"{node.label}{folded}{share}"


def _told(node: Node, notes: Mapping[str, str]) -> str:
    lines = [f"{node.name or 'the model'} · {node.kind}" if node.kind else node.name or "the model"]
    if node.entries > 0:
        share = f"{node.active / node.entries:.1%}"
        lines.append(f"on average {node.active:,.0f} of {node.entries:,.0f} entries train ({share})")
    if not math.isnan(node.before):
        lines.append(f"gradient norm {node.before:.3g} before, {node.after:.3g} after")
    lines += [f"{policy}: {notes.get(policy, '')}".rstrip(": ") for policy in node.policies]
    return "<br>".join(map(_escaped, lines))


def _flow_notes(run: Run) -> dict[str, str]:
    """By policy: what it is, and for a flow policy the norms it measured in training."""
    notes = {str(row["name"]): str(row.get("what", "")) for row in run.plan.get("rows", [])}
    rows = run.rows("flow")
    if is_known(rows, "gradient_norm_before"):
        for policy, own in rows.groupby("policy"):
            before, after = (own[f"gradient_norm_{side}"].mean() for side in ("before", "after"))
            if not math.isnan(before):
                told = f"{before:.3g}" if math.isnan(after) else f"{before:.3g} → {after:.3g}"
                notes[str(policy)] = f"{notes.get(str(policy), '')}, norm {told}"
    return notes


def _escaped(text: str) -> str:
    """Text that plotly shall not take for markup, with its own line breaks left."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
