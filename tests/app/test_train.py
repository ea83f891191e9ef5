"""The command line: what a person may write, and what it leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradpolicy.app.processes import quoted

CONF = Path(__file__).parents[2] / "conf"
Train = Callable[..., object]


def test_a_run_that_fails_leaves_a_report_that_says_why(train, tmp_path: Path) -> None:
    diverges = ("optimizer.lr=1e30", "trainer.limit_train_batches=4", "+trainer.detect_anomaly=true")
    with pytest.raises(RuntimeError, match="returned nan values"):
        train(*diverges, "extras.report=true", folder=tmp_path)
    (run,) = tmp_path.glob("train/runs/*")
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    page = (run / "report.html").read_text()
    assert '<span class="chip bad">failed</span>' in page
    assert "returned nan values" in page


def test_the_trainers_switches_hold_for_callbacks_too(train) -> None:
    ended = train(
        "callbacks=default", "trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false"
    ).completed
    assert not any(ended.run.rglob("*.ckpt"))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("choice", "policies"),
    [
        ("policy=none", []),
        ("policy=guided", ["guided"]),
        ("policy=[guided,random_freeze]", ["guided", "random_freeze"]),
        ("policy.stop=null", ["guided", "random_freeze", "straight_through"]),
    ],
)
def test_the_plan_alone_of_the_policies_on_the_command_line_leaves_nothing(train, choice, policies) -> None:
    ended = train(choice, "plan_only=true").completed
    assert "Plan" in ended.out
    assert "Results" not in ended.out
    assert ended.left_nothing
    all_names = ("guided", "random_freeze", "stop", "straight_through")
    assert [name for name in all_names if f"│ {name}" in ended.out] == policies


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train=false without ckpt_path")
def test_flags_may_stand_between_overrides(train) -> None:
    ended = train("-m", "seed=1,2", "train=false", "test=true").completed
    assert len(list(ended.folder.glob("train/sweeps/*/*/config.yaml"))) == 2


@pytest.mark.slow
def test_testing_alone_takes_the_weights_of_a_checkpoint(train) -> None:
    trained = train()
    tested = train("train=false", "test=true", f"ckpt_path={trained.run}/checkpoints/best.ckpt")
    name = "test/accuracy"
    assert tested.result.metrics[name] == trained.result.metrics[name]
    assert not (tested.run / "checkpoints").exists()


def test_a_run_that_had_only_to_be_tested_gives_the_results_of_the_run_before(train) -> None:
    whole = train()
    first = whole.result.metrics
    assert train("ckpt_path=last", folder=whole.folder).code == 0
    assert whole.result.metrics == first
    assert {"train/loss", "val/accuracy_best", "test/accuracy"} <= first.keys()


@pytest.mark.filterwarnings("ignore:train=false without ckpt_path")
def test_the_last_checkpoint_is_of_the_last_epoch_also_where_nothing_got_better(train) -> None:
    ended = train("trainer.max_epochs=3", "optimizer.lr=0", "policy=none", "model.model.dropout=0")
    for name, epoch in {"best": 0, "last": 2}.items():
        assert torch.load(ended.run / f"checkpoints/{name}.ckpt", weights_only=True)["epoch"] == epoch


@pytest.mark.parametrize("value", ["plain", "with space", "a=b, c", "it's", "back\\slash"])
def test_a_quoted_value_is_read_as_it_was(value: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"key={quoted(value)}"])
    assert override.value() == value
