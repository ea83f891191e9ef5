"""What a run prints, and what it leaves out."""

import errno
import io
import json
import sys
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import yaml

from gradpolicy.app.run import finished_loggers
from gradpolicy.tensors.checkpoint_file import load_file
from tests.app.own_callbacks import Pooled, chosen


def test_what_a_run_prints_and_leaves(train) -> None:
    whole = train(
        "callbacks=default",
        "trainer.log_every_n_steps=1",
        "extras.report=true",
        "optimizer.lr=0.5",
        "tags=[first,try]",
    )
    assert (whole.code, whole.err) == (0, "")
    run, out = whole.run, whole.out
    assert out.index("Plan") < out.index("Results")
    last = out.partition("Results")[2]
    rows = dict(line.split(maxsplit=1) for line in last.splitlines() if line.strip())
    assert {"test/accuracy", "test/loss", "val/accuracy_best", "time"} <= rows.keys()
    assert rows["report"] == str(run / "report.html")
    assert "policy/" not in last

    for name in ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "csv/version_0/metrics.csv"):
        assert (run / name).is_file()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["tags"] == ["first", "try"]
    assert config["model"]["optimizer"] == config["optimizer"]
    assert yaml.safe_load((run / "csv/version_0/hparams.yaml").read_text())["seed"] == 0
    assert json.loads((run / "run.json").read_text())["versions"]["torch"] == torch.__version__
    assert json.loads((run / "plan.json").read_text())["rows"][0]["name"] == "stop"

    log = "\n".join(line.rstrip() for line in (run / "train.log").read_text().splitlines())
    for said in ("Plan", "random_freeze", "test/accuracy", (run / "plan.txt").read_text()):
        assert said in log

    metrics = whole.result.metrics
    assert whole.result.seconds > 0
    assert {"test/accuracy", "test/probe_accuracy", "val/accuracy_best"} <= metrics.keys()
    assert metrics["policy/random_freeze/active_share"] == pytest.approx(0.5, abs=0.02)
    assert {"policy/stop/operations", "policy/straight_through/gradient_norm_before"} <= metrics.keys()

    report = (run / "report.html").read_text()
    for said in (
        "<td><code>optimizer.lr</code></td>",
        "<td>random_freeze</td><td>share that trains</td>",
        "What trains in the first step",
        f"<td>torch</td><td>{torch.__version__}</td>",
    ):
        assert said in report, said


def test_a_layer_without_a_gradient_is_none_in_training_either_and_is_named_once(train) -> None:
    gradual = "{_target_: gradpolicy.Freeze, mask: {_target_: gradpolicy.masks.Gradual, unit: step}}"
    model = f"model.model._target_={Pooled.__module__}.Pooled"
    policies = ("policy=[straight_through]", f"+policy.gradual={gradual}")
    ended = train(model, *policies, "test=false", "trainer.limit_train_batches=4").completed
    assert "gradual: model.pooler.bias, model.pooler.weight get no gradient and make no layer" in ended.out
    assert "lets model.pooler" not in ended.out + ended.err
    (group, *_) = load_file(ended.run / "checkpoints/last.ckpt")["optimizer_states"][0]["param_groups"]
    state = load_file(io.BytesIO(group["gradient_policies"]))
    assert state["freezer"]["idle"] == ["model.pooler.bias", "model.pooler.weight"]


def test_the_log_of_a_run_that_failed_says_why(train, tmp_path) -> None:
    with pytest.raises(ArithmeticError):
        train("trainer.max_steps=1", *chosen("Fails"), folder=tmp_path)
    (log,) = tmp_path.glob("*/runs/*/train.log")
    lines = log.read_text().splitlines()
    assert any(line.endswith("about to fail") for line in lines)
    assert lines[-1] == "ArithmeticError: on purpose"


def test_a_full_disk_is_one_line(train, monkeypatch) -> None:
    full = OSError(errno.ENOSPC, "could not save last.ckpt: No space left on device")
    monkeypatch.setattr("gradpolicy.train.lightning.checkpoints.write_checkpoint", Mock(side_effect=full))
    ended = train("extras.plan=false")
    assert ended.code == 1
    assert ended.message == "could not save last.ckpt: No space left on device"


def test_a_report_that_fails_is_one_warning(train, monkeypatch) -> None:
    monkeypatch.setattr("gradpolicy.insight.report.write", Mock(side_effect=OSError("no space\nleft")))
    ended = train("extras.report=true", "test=false", "extras.plan=false").completed
    assert "warning: no report: OSError: no space left" in ended.out.splitlines()


def test_a_run_whose_optimized_metric_is_misspelt_says_so(train, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("gradpolicy.app.run.rank_zero_warn", said.append)
    assert train("optimized_metric=val/acuracy", "test=false", "extras.plan=false").code == 0
    assert said[0].startswith("optimized_metric: 'val/acuracy' was not logged; did you mean 'val/accuracy'")


@pytest.mark.slow
def test_a_sweep_ends_with_the_path_of_its_report(train) -> None:
    ended = train("-m", "seed=1,2", "extras.report=true")
    (report,) = ended.folder.glob("*/sweeps/*/report.html")
    assert ended.out.splitlines()[-1] == f"report {report}"


@pytest.mark.parametrize(("reason", "code"), [(None, 0), (ValueError(), 1), (KeyboardInterrupt(), 1)])
def test_wandb_is_told_whether_the_run_came_to_its_end(monkeypatch, reason, code) -> None:
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(type(reason)) if reason else nullcontext(), finished_loggers():
        if reason:
            raise reason
    wandb.finish.assert_called_once_with(exit_code=code)
