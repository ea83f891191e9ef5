"""The notebooks, which the site's build runs from top to bottom, show what their text speaks of."""

import re
from pathlib import Path

import nbformat
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]


def executed(name: str, site: Path) -> list[nbformat.NotebookNode]:
    """The code cells of a notebook, with what they gave; the build leaves them beside the site."""
    notebook = nbformat.read(site.parent / "jupyter_execute" / "notebooks" / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells: list[nbformat.NotebookNode]) -> str:
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def displayed(cells: list[nbformat.NotebookNode], kind: str) -> list[str]:
    outputs = [output for cell in cells for output in cell.outputs if output.output_type != "stream"]
    return [output.data[kind] for output in outputs if kind in output.data]


def rows(text: str, pattern: str) -> dict[str, float]:
    """The numbers of printed lines by what stands before them."""
    return {name: float(value) for name, value in re.findall(pattern, text)}


@pytest.mark.parametrize("name", ["first-look", "freezing-under-adam"])
def test_what_a_cell_prints_is_one_block_of_whole_lines(name: str, site: Path) -> None:
    page = (site / "notebooks" / f"{name}.html").read_text()
    cells = page.split('<div class="cell_output docutils container">')[1:]
    assert len(cells) == sum(bool(cell.outputs) for cell in executed(name, site))
    assert all(cell.count('<div class="output stream ') <= 1 for cell in cells)
    pieces = [output.text for cell in executed(name, site) for output in cell.outputs if "text" in output]
    # The site sets each piece on a line of its own.
    assert all(piece.endswith("\n") for piece in pieces)
    assert "\x1b" not in "".join(pieces)


def test_a_first_look(site: Path) -> None:
    cells = executed("first-look", site)
    text = printed(cells)
    norms = [float(norm) for norm in re.findall(r"gradient norm of the first layer: (\S+)", text)]
    assert norms[0] == 0.0
    assert norms[1] > 0.0
    assert "same loss: True" in text
    assert "did you mean 'first.weight'" in text
    without, with_policy = map(float, re.findall(r"([\d.]+)%", text)[:2])
    assert with_policy > without + 50
    # The plan and the report are shown once each: rich must not show them a second time.
    plan, report = displayed(cells, "text/html")
    assert "50.0% of 144" in plan
    assert "round × 132" in report
    assert len(displayed(cells, "image/png")) == 1


def test_freezing_under_adam(site: Path) -> None:
    cells = executed("freezing-under-adam", site)
    text = printed(cells)
    moved = re.search(r"moved after the gradient became zero: (\S+)", text)
    assert moved
    assert float(moved[1]) > 0.01
    assert "every bit kept: True" in text
    assert "the others train as before: True" in text
    assert "keep ages: [20, 20, 20, 20, 20, 50, 50, 50, 50, 50]" in text
    assert "zero ages: [0, 0, 0, 0, 0, 50, 50, 50, 50, 50]" in text
    assert "as a new Adam's first step: True" in text
    memory = rows(text, r"(keep|zero|drop): ([\d.]+) of Adam's state")
    assert memory["keep"] == memory["zero"] > 1.0
    assert memory["drop"] < 0.2
    assert len(displayed(cells, "image/png")) == 1
