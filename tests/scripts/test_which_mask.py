"""The rate of each method is the best of one seed on validation, and judged on other seeds."""

from pathlib import Path

import pytest
import torch
import which_mask
from choosing.methods import METHODS, Method
from choosing.tasks import Task
from torch import nn

import gradpolicy as gp


def start(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def task() -> Task:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, 0] > 0).long()
    parts = {
        part: (inputs[begin : begin + 32], labels[begin : begin + 32])
        for part, begin in {"train": 0, "validation": 32, "test": 64}.items()
    }
    return Task(start, parts, lambda model, x: model(x), "accuracy", 8, 30, (1e-5, 1e-2))


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(8)[:, None] % 2 > 0
    half = Method(lambda model, steps: [gp.Freeze(rows, params="0.weight", frozen_state="drop")])
    listed = {"nothing": Method(trains=False), "full": Method(), "half": half}
    monkeypatch.setitem(METHODS, "small", listed)


def test_the_better_rate_is_taken_and_finished_trials_are_not_repeated(task: Task, tmp_path: Path) -> None:
    out = tmp_path / "trials.json"
    table = which_mask.compare("small", task, out, "")
    assert list(table.index) == ["nothing", "full", "half"]
    assert list(table["rate"][1:]) == ["0.01", "0.01"]
    before = out.read_text()
    assert which_mask.compare("small", task, out, "").equals(table)
    assert out.read_text() == before


def test_the_null_is_the_most_frequent_class(task: Task) -> None:
    trial = which_mask.run(task, METHODS["small"]["nothing"], 0, 1e-2)
    most = int(task.parts["train"][1].mode().values)
    assert trial["test"] == pytest.approx(100 * (task.parts["test"][1] == most).float().mean().item())


def test_gradients_of_rows_count_by_what_they_hold(task: Task) -> None:
    full, half = (which_mask.run(task, METHODS["small"][name], 0, 1e-2) for name in ("full", "half"))
    assert full["gradients"] - half["gradients"] == 4 * 4 * 4, "four of eight rows of four floats"
    assert half["state"] < full["state"]
