"""Renders a report from its templates."""

import base64
import io
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup, escape
from PIL import Image, UnidentifiedImageError
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
from gradpolicy.insight.report.reading import Run

# Bytes of a whole report, at most, and of the pictures of one run.
LARGEST = 6_000_000
PICTURES = 400_000
# The widest picture, in pixels.
WIDEST = 1100
# Wide tables show so many rows and columns.
ROWS, COLUMNS = 200, 12


def render(runs: Sequence[Run]) -> str:
    """Return the report of one run, or of several beside each other, as one HTML page."""
    environment = Environment(
        loader=PackageLoader("gradpolicy.insight.report"),
        autoescape=True,
        # Keys that files of an older version lack are left empty.
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "drawn": drawn, "next": next, "breakable": breakable}
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
    """Return the variables of the template of one run, with so many bytes of pictures at most."""
    pictures, strips, failed = _pictures(run, pictures_bytes)
    changed = config_differences([run.defaults, run.config]) if run.defaults and run.config else []
    return {
        "run": run,
        "changed": changed[:ROWS],
        "curves": figures.run_curves(run),
        "metrics": _by_stage(run.final_metrics),
        "mask_curves": figures.mask_curves(run),
        "timeline": figures.timeline(run),
        "tree": gradient_map(run),
        "flow": figures.flow(run),
        "memory": figures.memory({"optimizer state": run}),
        "memory_ratio": _memory_ratio(run),
        "proof": proof(run.audit) if run.audit else None,
        "pictures": pictures,
        "strips": strips,
        "missing": {**run.missing, **failed},
    }


def proof(audit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the audit in one line, its verdict (good, bad, or empty without a check), and its parts."""
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
    tested = [each for each in compared if not math.isnan(each.p)]
    differences = config_differences([run.config for run in runs])
    return {
        "groups": groups,
        "metrics": metrics[:COLUMNS],
        "broken_off": [run for run in runs if run.broken_off],
        "cells": {(group.label, name): spread(group.values(name)) for group in groups for name in metrics},
        "best": {name: _best(groups, name) for name in metrics},
        "differences": differences[:ROWS],
        "settings": figures.settings_and_metric(runs, differences),
        "exceeding": sorted((each for each in tested if each.exceeds), key=lambda each: each.p)[:ROWS],
        "tested": len(tested),
        "untested": len(compared) - len(tested),
        "level": LEVEL,
        "curves": figures.group_curves(groups),
        "memory": figures.memory({group.label: group.runs[0] for group in groups}),
    }


def _best(groups: Sequence[Group], metric: str) -> str | None:
    """Return the label of the group with the best mean, where it is known which direction is good."""
    means = {group.label: spread(group.values(metric))[0] for group in groups}
    known = {label: mean for label, mean in means.items() if not math.isnan(mean)}
    lowers, raises = "loss" in metric or "perplexity" in metric, "accuracy" in metric
    if len(known) < 2 or not (lowers or raises):
        return None
    return (min if lowers else max)(known, key=known.__getitem__)


# ---- the parts of one run


def _by_stage(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Group metrics by the first part of their names: test, then validation, training, the rest."""
    order = {"test": 0, "val": 1, "train": 2}
    found: dict[str, dict[str, float]] = {}
    for name in sorted(metrics, key=lambda name: (order.get(name.split("/")[0], 3), name)):
        stage = "policy" if "policy/" in name else name.split("/")[0]
        found.setdefault(stage, {})[name] = metrics[name]
    return found


def _memory_ratio(run: Run) -> float:
    """Return the largest optimizer state as a share of plain Adam's; NaN where it was not recorded."""
    rows = run.rows("memory")
    if rows.empty or "adam_bytes" not in rows or not rows["adam_bytes"].max() > 0:
        return math.nan
    return float(rows["state_bytes"].max() / rows["adam_bytes"].max())


# ---- pictures


def inlined(path: Path, most: int) -> str:
    """Return a picture as a ``data:`` address, shrunk until it has at most so many bytes.

    Raises:
        OSError: If it cannot be read.
    """
    content, kind, width = path.read_bytes(), "png", WIDEST
    while len(content) > most and width >= 64:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        image.thumbnail((width, image.height))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80, optimize=True)
        content, kind, width = buffer.getvalue(), "jpeg", image.width * 3 // 4
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _pictures(
    run: Run, most_bytes: int
) -> tuple[dict[str, str], dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Return attribution pictures by name, film strips of masks by weight, and unreadable files."""
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
    """Return a figure as JSON that may stand in a script element."""
    return Markup(figure.figure.to_json().replace("<", "\\u003c"))


def breakable(name: str) -> Markup:
    """Return a name that may be broken after a slash or an underscore, so that wide tables fit the page."""
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
