"""The record as charts of dashboards."""

from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

import gradpolicy as gp
from gradpolicy.insight.record import Record
from gradpolicy.insight.record.charts import chart, charted


class Dashboard(DummyLogger):
    """Keeps what is logged, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        self.steps.setdefault(step, {}).update(metrics)


def test_parameters_of_a_policy_have_one_number() -> None:
    row = {
        "kind": "freeze",
        "policy": "half",
        "entries": [30, 10],
        "changed": [True, False],
        "flipped": [3, 1],
        "weight_norm": [3.0, 4.0],
        "update_norm": [0.3, 0.4],
        "age_median": [2, 6],
        "state_bytes": [240, 80],
    }
    assert charted(row) == {
        "policy/half/flipped": 4,
        "policy/half/update_size": pytest.approx(0.1),
        "policy/half/age_median": 3.0,
        "policy/half/optimizer_bytes": 320,
    }


def test_flips_are_those_of_a_change_also_between_logged_steps() -> None:
    row = {"kind": "freeze", "policy": "half", "changed": [True, True], "flipped": [3, 1]}
    assert charted(row) == {"policy/half/flipped": 4}
    assert charted({**row, "changed": [False, False], "flipped": [0, 0]}) == {}


def test_a_flow_policy_has_its_zeros_in_training_where_there_are_any() -> None:
    row = {"kind": "flow", "policy": "guided", "phase": "fit", "zeros_passed": 0.25}
    assert charted(row) == {"policy/guided/zeros_passed": 0.25}
    assert charted({**row, "phase": "test"}) == charted({**row, "zeros_passed": None}) == {}


def test_steps_are_lightnings_and_a_logger_of_files_gets_nothing(tmp_path) -> None:
    dashboard, csv = Dashboard(), CSVLogger(tmp_path)
    row = {"kind": "flow", "policy": "guided", "phase": "fit", "zeros_passed": 0.25}
    chart([{**row, "step": 1}, {**row, "step": 5}, {"kind": "memory", "step": 7}], [csv, dashboard])
    assert dashboard.steps == {
        0: {"policy/guided/zeros_passed": 0.25},
        4: {"policy/guided/zeros_passed": 0.25},
    }
    assert not csv.experiment.metrics


@pytest.mark.parametrize("log", [True, False])
def test_a_run_charts_the_record_unless_its_policies_do_not_log(
    two_layers, loader, make_trainer, tmp_path, log
) -> None:
    dashboard = Dashboard()
    policies = {
        "half": gp.Freeze(gp.masks.Random(0.5, every=2), params="trunk.*"),
        "half.scaled": gp.Scale(0.0, ops=["relu"]),
    }
    callbacks = [gp.GradientPolicies(policies, log=log), Record(tmp_path)]
    make_trainer(max_steps=8, logger=[dashboard], callbacks=callbacks, log_every_n_steps=2).fit(
        two_layers, loader
    )
    names = {name for values in dashboard.steps.values() for name in values if name.startswith("policy/")}
    charted = {f"policy/half/{name}" for name in ("flipped", "update_size", "age_median", "optimizer_bytes")}
    assert names >= {*charted, "policy/half.scaled/zeros_passed"} if log else not names
