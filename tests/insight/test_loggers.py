"""Dashboards have no chart of what never changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

from gradpolicy.insight.loggers import (
    TensorBoardLogger,
    VaryingOnly,
    WandbLogger,
    custom_scalars,
)


class Kept(VaryingOnly, CSVLogger):
    """A logger of which rows and held-back numbers can be read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.held: dict[str, float] = {}

    def hold_back(self, name: str, value: float) -> None:
        self.held[name] = value

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.experiment.metrics


def test_a_policys_number_is_written_once_it_changes_with_the_steps_before(tmp_path: Path) -> None:
    logger = Kept(tmp_path)
    for step, active in enumerate([1.0, 1.0, 1.0, 0.0, 0.0]):
        logger.log_metrics({"policy/a/active": active, "policy/a/operations": 3.0}, step)
    written = [(row["step"], row["policy/a/active"]) for row in logger.rows]
    assert written == [(0, 1.0), (2, 1.0), (3, 0.0), (4, 0.0)]
    assert not any("policy/a/operations" in row for row in logger.rows)
    assert logger.held == {"policy/a/active": 1.0, "policy/a/operations": 3.0}


def test_other_numbers_are_written_as_they_come(tmp_path: Path) -> None:
    logger = Kept(tmp_path)
    for step in range(2):
        logger.log_metrics({"train/loss": 1.0, "test/policy/a/active": 1.0}, step)
    assert logger.rows == [{"train/loss": 1.0, "step": step} for step in range(2)]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda folder: WandbLogger(save_dir=folder, offline=True), id="wandb"),
        pytest.param(lambda folder: TensorBoardLogger(folder, name=""), id="tensorboard"),
    ],
)
def test_a_rank_that_is_not_the_first_writes_nothing(
    make: Callable[[Path], Logger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = make(tmp_path)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    for step in range(3):
        logger.log_metrics({"policy/a/active": 1.0, "policy/a/active_share": 0.1 * step}, step)
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_no_flat_lines(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(tmp_path, name="")
    for step in range(3):
        logger.log_metrics({"policy/a/active": 1.0, "policy/a/active_share": 0.1 * step}, step)
    logger.save()
    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    assert events.Tags()["scalars"] == ["policy/a/active_share"]
    assert [event.step for event in events.Scalars("policy/a/active_share")] == [0, 1, 2]
    # The layout that was written last is the one that counts.
    layout = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
    assert b"policy a" in layout
    assert b"active share" in layout
    assert b"policy/a/active_share" in layout
    assert layout.count(b"policy/a") == 1


def test_tensorboards_layout_has_a_section_for_each_policy_with_something_to_chart() -> None:
    norms = {f"policy/ro[und]/gradient_norm_{when}" for when in ("before", "after")}
    layout = custom_scalars(
        {"policy/half/update_size", "policy/half/active_share", "test/policy/seen/zeros", *norms}
    )
    assert list(layout) == ["results", "policy half", "policy ro[und]"]
    assert list(layout["policy half"]) == ["active share", "update size"]
    assert layout["policy ro[und]"] == {
        "gradient norm": ["Multiline", [r"policy/ro\[und\]/gradient_norm(_before|_after)?$"]]
    }
