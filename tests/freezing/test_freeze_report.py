"""The report of freeze policies: a row for each, and a table to read."""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.freezing.freeze_report import FreezeReport


@pytest.fixture
def report(stack) -> FreezeReport:
    optimizer = gp.MaskedOptimizer(torch.optim.SGD(stack.parameters(), lr=0.1))
    rows = gp.masks.Fixed(torch.arange(4)[:, None] == 0)
    policies = {
        "rows": gp.Freeze(rows, params="blocks.0.weight"),
        "late": gp.Freeze(gp.masks.Fixed(False), params="blocks.*.weight", when=gp.When(start=9)),
    }
    freezer = Freezer(stack, optimizer, policies)
    freezer.begin_step(0)
    return freezer.report()


def test_a_row_by_index_or_in_a_loop(report) -> None:
    assert len(report) == 2
    assert [row.name for row in report] == ["rows", "late"]
    assert (report[0].parameters, report[0].entries, report[0].active) == (1, 16, 4)
    assert (report[0].in_effect, report[1].in_effect) == (True, False)


def test_the_table_has_a_column_for_each_number(report) -> None:
    lines = str(report).splitlines()
    (heading,) = (line for line in lines if "mask source" in line)
    assert [word for word in ("parameters", "entries", "train", "share") if word not in heading] == []
    (row,) = (line for line in lines if line.lstrip("│ ").startswith("rows"))
    assert [part.strip() for part in row.strip("│ ").split("│")][-4:] == ["1", "16", "4", "25.0%"]
    assert "yes" in row
