"""Puts the parts of a report into its template."""

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup, escape
from PIL import UnidentifiedImageError
from plotly.offline import get_plotlyjs

from gradpolicy.insight.report import figures
from gradpolicy.insight.report.comparison import (
    LEVEL,
    Group,
    compare,
    compared_metrics,
    config_differences,
    groups_of,
    spread,
)
from gradpolicy.insight.report.figures import Figure
from gradpolicy.insight.report.gradient_map import gradient_map
from gradpolicy.insight.report.inline_images import inlined
from gradpolicy.insight.report.reading import Run

# Bytes of a whole report, at most, and of the pictures of one run.
LARGEST = 6_000_000
PICTURES = 400_000
# Wide tables show so many rows and columns.
ROWS, COLUMNS = 200, 12


def render(runs: Sequence[Run]) -> str:
    """The report of one run, or of several beside each other, as one HTML page."""
    environment = Environment(
        loader=PackageLoader("gradpolicy.insight.report"),
        autoescape=True,
        # What files of an older version lack is left empty.
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "drawn": drawn,
        "bytes": readable_bytes,
        "next": next,
        "breakable": breakable,
    }
    page = environment.get_template("report.html")
    numbers = itertools.count()
    comparison = _comparison(runs) if len(runs) > 1 else None
    common = {"plotly": Markup(get_plotlyjs()), "numbers": numbers, "comparison": comparison}
    used = len(page.render(runs=runs, details=[], left_out=[], **common).encode(errors="replace"))
    details: list[dict[str, Any]] = []
    left_out: list[str] = []
    block = environment.get_template("run.html")
    pictures = min(PICTURES, (LARGEST - used) // (2 * len(runs)))
    for run in runs:
        shown = block.render(
            detail(run, pictures), numbers=numbers, index=len(details), several=len(runs) > 1
        )
        size = len(shown.encode(errors="replace"))
        if used + size > LARGEST:
            left_out.append(run.name)
            continue
        used += size
        details.append({"name": run.name, "html": Markup(shown)})
    return page.render(runs=runs, details=details, left_out=left_out, **common)


def detail(run: Run, pictures_bytes: int) -> dict[str, Any]:
    """What the report shows of one run, with so many bytes of pictures at most."""
    found = [
        figures.timeline(run),
        gradient_map(run),
        figures.flow(run),
        figures.memory({"optimizer state": run}),
        figures.ages(run),
        figures.mask_curves(run),
    ]
    timeline, tree, flow, memory, ages, masks = found
    pictures, strips, failed = _pictures(run, pictures_bytes)
    changed = config_differences([run.defaults, run.config]) if run.defaults and run.config else []
    return {
        "run": run,
        "changed": changed[:ROWS],
        "curves": figures.run_curves(run),
        "metrics": _by_stage(run.final_metrics),
        "timeline": timeline,
        "tree": tree,
        "flow": flow,
        "memory": memory,
        "memory_ratio": _memory_ratio(run),
        "ages": ages,
        "mask_curves": masks,
        "proof": proof(run.audit) if run.audit else None,
        "pictures": pictures,
        "strips": strips,
        "missing": {**run.missing, **failed},
    }


def proof(audit: Mapping[str, Any]) -> dict[str, Any]:
    """The audit in one line, its verdict (good, bad, or empty if nothing was checked), and its parts."""
    stopped, operations = audit.get("stopped_branches") or {}, audit.get("operations") or {}
    intervals, changed = int(audit.get("intervals", 0)), int(audit.get("changed", 0))
    faults = changed + int(stopped.get("nonzero", 0)) + int(operations.get("differing", 0))
    checked = intervals + int(stopped.get("checked", 0)) + int(operations.get("checked", 0))
    return {
        "verdict": "bad" if faults else "good" if checked else "",
        "checked": checked,
        "line": f"frozen entries: {intervals:,} intervals, {changed:,} changed",
        "entries": int(audit.get("entries", 0)),
        "sampled": bool(audit.get("sampled")),
        "stopped": stopped,
        "operations": operations,
        "differences": list(audit.get("differences") or [])[:ROWS],
    }


# ---- several runs


def _comparison(runs: Sequence[Run]) -> dict[str, Any]:
    groups = groups_of(runs)
    metrics = compared_metrics(runs)
    compared = compare(groups, metrics)
    told = [each for each in compared if not math.isnan(each.p)]
    differences = config_differences([run.config for run in runs])
    return {
        "groups": groups,
        "metrics": metrics[:COLUMNS],
        "broken_off": [run for run in runs if run.broken_off],
        "cells": {(group.label, name): spread(group.values(name)) for group in groups for name in metrics},
        "best": {name: _best(groups, name) for name in metrics},
        "differences": differences[:ROWS],
        "settings": figures.settings_and_metric(runs, differences),
        "exceeding": sorted((each for each in told if each.exceeds), key=lambda each: each.p)[:ROWS],
        "told": len(told),
        "untold": len(compared) - len(told),
        "level": LEVEL,
        "curves": figures.group_curves(groups),
        "memory": figures.memory({group.label: group.runs[0] for group in groups}),
    }


def _best(groups: Sequence[Group], metric: str) -> str | None:
    """The label of the group with the best mean, where it is known which direction is good."""
    means = {group.label: spread(group.values(metric))[0] for group in groups}
    known = {label: mean for label, mean in means.items() if not math.isnan(mean)}
    lowers, raises = "loss" in metric or "perplexity" in metric, "accuracy" in metric
    if len(known) < 2 or not (lowers or raises):
        return None
    return (min if lowers else max)(known, key=known.__getitem__)


# ---- the parts of one run


def _by_stage(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Metrics by the first part of their names: test first, then validation, training, the rest."""
    order = {"test": 0, "val": 1, "train": 2}
    found: dict[str, dict[str, float]] = {}
    for name in sorted(metrics, key=lambda name: (order.get(name.split("/")[0], 3), name)):
        stage = "policy" if "policy/" in name else name.split("/")[0]
        found.setdefault(stage, {})[name] = metrics[name]
    return found


def _memory_ratio(run: Run) -> float:
    """The most optimizer state there was, as a share of what plain Adam holds; NaN where not recorded."""
    rows = run.rows("memory")
    if rows.empty or "adam_bytes" not in rows or not rows["adam_bytes"].max() > 0:
        return math.nan
    return float(rows["state_bytes"].max() / rows["adam_bytes"].max())


def _pictures(
    run: Run, most_bytes: int
) -> tuple[dict[str, str], dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Attribution pictures by name; film strips of masks by weight; what could not be read."""
    pictures: dict[str, str] = {}
    strips: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    left = most_bytes

    def take(path: Path, most: int) -> str | None:
        nonlocal left
        try:
            address = inlined(path, most)
        except (OSError, UnidentifiedImageError) as error:
            failed[os.path.relpath(path, run.directory)] = f"cannot be read: {error}"
            return None
        if len(address) > left:
            failed.setdefault("pictures", "some are left out, so that the report stays small")
            return None
        left -= len(address)
        return address

    for path in run.pictures:
        address = take(path, most_bytes // 3)
        if address is not None:
            pictures[path.stem] = address
    for weight, kinds in run.masks.items():
        for kind, paths in kinds.items():
            frames = [
                {"step": int(path.stem.rpartition("_")[2]), "address": take(path, most_bytes // 40)}
                for path in paths
            ]
            kept = [frame for frame in frames if frame["address"]]
            if kept:
                strips[f"{weight}: {kind}"] = kept
    return pictures, strips, failed


# ---- filters of the template


def drawn(figure: Figure) -> Markup:
    """A figure as JSON that may stand in a script element."""
    return Markup(figure.figure.to_json().replace("<", "\\u003c"))


def breakable(name: str) -> Markup:
    """A name that may be broken after a slash or an underscore, so that a table of many fits the page."""
    return Markup(re.sub("([/_])", r"\1<wbr>", str(escape(name))))


def number(value: Any, digits: int = 4) -> str:
    """A number as a person writes it; a dash for NaN and for what is no number.

    Example:
        >>> number(0.123456), number(1234567), number(float("nan"))
        ('0.1235', '1,234,567', '–')
    """
    if not isinstance(value, int | float) or math.isnan(value):
        return "–"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def readable_bytes(value: float) -> str:
    """Bytes as a person writes them.

    Example:
        >>> readable_bytes(1536)
        '1.5 KiB'
    """
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError
