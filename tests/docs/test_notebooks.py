"""The notebooks run from top to bottom in a folder of their own, and show what their text speaks of."""

import re
from pathlib import Path

import nbformat
import pytest
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def executed(name: str, folder: Path) -> list[nbformat.NotebookNode]:
    """The code cells of a notebook after its execution; a cell that errs raises."""
    notebook = read_myst_markdown_notebook((FOLDER / f"{name}.md").read_text())
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cells: list[nbformat.NotebookNode]) -> str:
    outputs = [output for cell in cells for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def displayed(cells: list[nbformat.NotebookNode], kind: str) -> list[str]:
    outputs = [output for cell in cells for output in cell.outputs if output.output_type != "stream"]
    return [output.data[kind] for output in outputs if kind in output.data]


@pytest.mark.slow
def test_a_first_look(tmp_path: Path) -> None:
    cells = executed("first-look", tmp_path)
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
