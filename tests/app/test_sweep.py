"""Sweeps: each job once, with its own arguments, and one table of what came out."""

import os
import signal
import sys
from pathlib import Path
from subprocess import Popen

import optuna
import pandas
import pytest

from gradpolicy.app.sweep import distribution
from gradpolicy.errors import PolicyError
from gradpolicy.insight.run_files import RESULT, Result
from gradpolicy.insight.sweep_summary import SUMMARY, collect
from gradpolicy.train.lightning.runs import RunRecord
from tests.app.conftest import QUICK, ROOT, Ended, end, start, stop_when
from tests.app.own_callbacks import chosen


def sweep_of(ended: Ended) -> Path:
    (found,) = ended.folder.glob("train/sweeps/*")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [(), pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=pytest.mark.slow)],
)
def test_a_grid_runs_each_job_once_and_summarizes(train, launcher: tuple[str, ...]) -> None:
    ended = train("-m", "seed=1,2", "policy=none,stop", *launcher).completed
    results = collect(sweep_of(ended))
    chosen = [
        {line for line in result.overrides if line.startswith(("seed", "policy"))} for result in results
    ]
    assert chosen == [{f"seed={seed}", f"policy={policy}"} for seed in (1, 2) for policy in ("none", "stop")]
    assert all(result.optimized is not None for result in results)
    assert "val/accuracy_best" in ended.out
    assert (sweep_of(ended) / SUMMARY).is_file()


@pytest.mark.slow
def test_submitit_runs_the_jobs_of_a_sweep(train_process) -> None:
    ended = train_process("-m", "seed=1,2", "hydra/launcher=submitit_local").completed
    assert len(collect(sweep_of(ended))) == 2


@pytest.mark.slow
def test_a_failed_job_does_not_keep_the_others_from_running(train, tmp_path) -> None:
    with pytest.raises(ArithmeticError):
        train("-m", "trainer.max_steps=1,2", *chosen("Fails"), folder=tmp_path)
    (place,) = tmp_path.glob("train/sweeps/*")
    assert [result.status for result in collect(place)] == ["failed", "completed"]
    assert "on purpose" in (place / SUMMARY).read_text()


def test_a_job_that_is_not_known_beforehand_is_checked_where_it_begins(train, monkeypatch) -> None:
    """As those of a sweeper that draws values from an interval."""
    monkeypatch.setattr("gradpolicy.app.launch.sweep_values", lambda *given: [])
    ended = train("-m", "optimizer.lr=abc,0.1", "plan_only=true")
    assert ended.message == "optimizer.lr: must be a valid number or an instance of Tensor, got 'abc'"
    assert ended.err.count("\n") == 1


def start_search(folder: Path, *arguments: str) -> Popen:
    words = ("sweep=learning_rate", "--directory", str(folder), *QUICK, *arguments)
    return start(folder.parent, f"{ROOT}/train.py", "sweep", *words)


def search(folder: Path, *arguments: str) -> Ended:
    return end(start_search(folder, *arguments), folder)


@pytest.mark.slow
def test_a_search_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    assert search(tmp_path, "--trials", "2").code == 0
    done = search(tmp_path, "--trials", "3").completed
    study = optuna.load_study(study_name="learning_rate", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert study.best_value == max(trial.value for trial in study.trials)
    assert "best" in done.out
    first = tmp_path / "learning_rate/0"
    assert not [word for word in Result.load(first / RESULT).overrides if word.startswith("hydra.")]
    assert RunRecord.load(first).kind == "sweep"


@pytest.mark.slow
def test_wrong_input_ends_a_search_before_it_begins(tmp_path: Path) -> None:
    ended = search(tmp_path / "none", "--trials", "1", "policy=guided")
    assert ended.code == 2
    assert "random_freeze" in ended.err
    assert not (tmp_path / "none").exists()


LONG = ("trainer.max_epochs=1000", "trainer.limit_train_batches=5")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_search_that_is_stopped_goes_on_with_the_values_of_its_trial(tmp_path, number, code) -> None:
    process = start_search(tmp_path, "--trials", "2", *LONG)
    ended = stop_when(process, lambda: any(tmp_path.rglob("last.ckpt")), number, tmp_path)
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert search(tmp_path, "--trials", "1", "trainer.max_epochs=1").code == 0
    study = optuna.load_study(study_name="learning_rate", storage=f"sqlite:///{tmp_path}/study.db")
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]
    assert study.trials[0].params == study.trials[1].params


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_sweep_that_is_told_to_stop_stops_and_says_what_was_done(
    tmp_path: Path, launcher: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    jobs = ("-m", "trainer.max_epochs=1,1000,1000,1000", "trainer.limit_train_batches=5", *launcher)
    process = start(tmp_path, f"{ROOT}/train.py", f"paths.log_dir={tmp_path}", *QUICK, *jobs)

    def one_is_done_and_one_trains() -> bool:
        made = ("train/sweeps/*/0/result.json", "train/sweeps/*/1/checkpoints/last.ckpt")
        return all(any(tmp_path.glob(pattern)) for pattern in made)

    ended = stop_when(process, one_is_done_and_one_trains, number, tmp_path)
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    assert "Sweep" in ended.out
    (sweep,) = tmp_path.glob("train/sweeps/*")
    assert pandas.read_csv(sweep / SUMMARY)["status"][0] == "completed"
    assert not list(sweep.glob("3/checkpoints/*"))


@pytest.mark.parametrize("command", ["", "sweep sweep=learning_rate"])
def test_ctrl_c_while_a_program_imports_ends_it_without_a_traceback(tmp_path: Path, command: str) -> None:
    (tmp_path / "torch.py").write_text(
        "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(100)\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = (*command.split(), "plan_only=true")
    process = start(tmp_path, f"{ROOT}/train.py", *words, PYTHONPATH=path)
    ended = stop_when(process, (tmp_path / "importing").exists, signal.SIGINT, tmp_path)
    assert ended.code == 130
    assert len(ended.err.splitlines()) <= 1


def test_a_job_of_a_sweep_is_recorded_as_one(train) -> None:
    ended = train("-m", "seed=1", "test=false")
    assert RunRecord.load(sweep_of(ended) / "0").kind == "sweep"


@pytest.mark.parametrize(
    ("space", "drawn"),
    [
        ({"min": 2, "max": 5}, {2, 3, 4, 5}),
        ({"min": 0.5, "max": 0.5}, {0.5}),
        ({"min": 1e-4, "max": 1e-4, "log": True}, {1e-4}),
        ([2, "a", True, None], {2, "a", True, None}),
    ],
)
def test_an_interval_or_a_list_gives_values(space: object, drawn: set) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    asked = {"key": distribution("key", space)}
    assert {study.ask(asked).params["key"] for _ in range(40)} == drawn


@pytest.mark.parametrize(
    "space",
    [
        3,
        [],
        {"min": 1},
        {"min": 0, "max": 1, "lg": True},
        {"min": 2, "max": 1},
        {"min": 0, "max": 1, "log": True},
        {"min": 0, "max": "x"},
    ],
)
def test_what_is_no_space_is_refused_by_its_key(space: object) -> None:
    with pytest.raises(PolicyError, match=r"^sweep\.parameters\.optimizer\.lr: must be a list of values, or"):
        distribution("optimizer.lr", space)
