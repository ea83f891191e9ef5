"""What a run does with checkpoints that were made by hand, or by a stranger."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import yaml
from torch.distributed.checkpoint import save as save_shards
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from gradpolicy.app.launch import main
from gradpolicy.insight import record
from gradpolicy.train.lightning.checkpoints import write_checkpoint
from gradpolicy.train.lightning.runs import RunRecord
from tests.hostile import MakesFolder

from .conftest import CONF, QUICK

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*cannot be told")


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run."""
    folder = tmp_path_factory.mktemp("run")
    assert main(CONF, [f"paths.log_dir={folder}", *QUICK, "test=false", "extras.plan=false"]) == 0
    return next(folder.rglob("last.ckpt"))


@pytest.fixture
def trained(last: Path) -> dict[str, Any]:
    """What it holds."""
    return torch.load(last, weights_only=True)


def saved(content: dict[str, Any], path: Path) -> Path:
    torch.save(content, path)
    return path


# Seen only where the run takes them up.
UNFIT: dict[str, tuple[Any, ...]] = {
    "optimizer_states": ([], "twice"),
    "lr_schedulers": ([{}],),
    "callbacks": ("none",),
    "gradpolicy_exact_resume": ([{"moment": "batch"}],),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("name", "value"), [(name, value) for name in UNFIT for value in UNFIT[name]])
def test_what_lightning_cannot_take_up_is_told_in_one_line(
    train, trained, tmp_path: Path, name: str, value: Any
) -> None:
    state = trained[name] * 2 if value == "twice" else value
    path = saved({**trained, name: state}, tmp_path / "a.ckpt")
    ended = train(f"ckpt_path={path}", "trainer.max_epochs=2", "extras.plan=false")
    assert ended.code == 2
    assert ended.message.startswith(f"ckpt_path: {path} holds ")
    assert "a run cannot be resumed from it" in ended.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda saved: saved["state"][0]["exp_avg"].fill_(torch.nan),
            "the saved 'exp_avg' is not finite in ",
        ),
        (lambda saved: saved["param_groups"][0].update(capturable=True), "capturable: expected False"),
        (
            lambda saved: saved["param_groups"][0].update(gradient_policies={"updates": 10**30}),
            "number of updates",
        ),
    ],
)
def test_damage_in_the_optimizer_is_told_with_the_name_of_the_file(
    train, trained, tmp_path: Path, change, message: str
) -> None:
    change(trained["optimizer_states"][0])
    path = saved(trained, tmp_path / "a.ckpt")
    ended = train(f"ckpt_path={path}", "trainer.max_epochs=2", "extras.plan=false")
    assert (ended.code, ended.message.startswith(f"ckpt_path: {path}: ")) == (2, True)
    assert message in ended.message


def test_an_error_of_a_policy_does_not_name_the_file(train, last: Path) -> None:
    wrong = "+policy.wrong={_target_: gradpolicy.Freeze, params: typo.*}"
    ended = train(f"ckpt_path={last}", "trainer.max_epochs=2", "extras.plan=false", wrong)
    assert ended.message.startswith("policy.wrong")


@pytest.mark.slow
def test_weights_alone_can_be_tested_and_trained_on(train, trained, tmp_path: Path) -> None:
    path = saved({"state_dict": trained["state_dict"]}, tmp_path / "weights.ckpt")
    tested = train(f"ckpt_path={path}", "train=false").completed
    assert "test/accuracy" in tested.result.metrics
    assert train(
        "callbacks=[initial_weights]", f"callbacks.initial_weights.path={path}", "test=false"
    ).completed
    assert "holds no optimizer_states" in train(f"ckpt_path={path}").refusal


PLAN, RESUME, TEST, START = "plan_only=true", "train=true", "train=false", "callbacks=[initial_weights]"


@pytest.mark.mostly_slow
@pytest.mark.parametrize("way", [PLAN, RESUME, TEST, START])
def test_nothing_in_a_strangers_directory_is_run(train, trained, tmp_path: Path, way: str) -> None:
    ran, path = tmp_path / "ran", tmp_path / "evil.ckpt"
    save_shards({"state_dict": trained["state_dict"]}, storage_writer=FileSystemWriter(path), no_dist=True)
    (path / ".metadata").write_bytes(pickle.dumps(MakesFolder(ran)))
    key = "callbacks.initial_weights.path" if way == START else "ckpt_path"
    ended = train(way, f"{key}={path}", "extras.plan=false")
    assert ended.code == 2
    assert ended.message.startswith(f"{key}: {path} is ")
    assert "director" in ended.message
    assert not ran.exists()


@pytest.mark.slow
def test_nothing_that_a_strangers_checkpoint_names_is_deleted(train, trained, tmp_path: Path) -> None:
    """Lightning would delete each: the second `ModelCheckpoint` takes its newest one for outdated."""
    checkpoints = tmp_path / "mine"
    precious = checkpoints / "precious"
    precious.mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (key,) = [key for key in trained["callbacks"] if "'monitor': None" in key]
    for named in (f"local://{precious}", f"{checkpoints}/../mine/precious", str(precious)):
        trained["callbacks"][key]["best_model_path"] = named
        write_checkpoint(trained, tmp_path / "theirs" / "a.ckpt")
        ended = train(
            f"ckpt_path={tmp_path}/theirs/a.ckpt",
            "trainer.max_epochs=2",
            f"callbacks.last_checkpoint.dirpath={checkpoints}",
            "extras.plan=false",
        )
        assert precious.is_dir(), named
        # The last is a plain path, which a new run from the checkpoint has no use for.
        assert ended.code == (0 if named == str(precious) else 2)
        if ended.code:
            assert ended.message.startswith(f"ckpt_path: {tmp_path}/theirs/a.ckpt names ")


@pytest.mark.parametrize("override", ["seed=4", "data._target_=gradpolicy.tasks.FashionMNISTDataModule"])
def test_another_seed_or_class_is_refused_by_its_key(train, last: Path, override: str) -> None:
    ended = train(f"ckpt_path={last}", "trainer.max_epochs=2", "plan_only=true", override)
    key, _, value = override.partition("=")
    assert ended.refusal.startswith(f"{key}: ")
    assert f"{value}" in ended.message
    assert "callbacks.initial_weights.path=" in ended.message


QUIET = ("test=false", "extras.plan=false")


def content(run: Path) -> dict[str, bytes]:
    """The files of a run, but for its log."""
    files = (path for path in run.rglob("*") if path.is_file() and path.name != "train.log")
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def steps(run: Path) -> list[int]:
    """The steps at which the log of a run has rows of training."""
    table = pandas.read_csv(run / "csv/version_0/metrics.csv")
    return table["step"][table["policy/random_freeze/gradient_norm_after"].notna()].tolist()


def test_a_resumed_run_goes_on_in_its_directory(train) -> None:
    callbacks = "callbacks=[model_checkpoint,record]"
    first = train(*QUIET, "trainer.log_every_n_steps=1", callbacks)
    settings = ("trainer.log_every_n_steps=1", callbacks, "trainer.max_epochs=2")
    ended = train(
        *QUIET,
        *settings,
        "ckpt_path=last",
        "trainer.gradient_clip_val=1",
        "data.workers=1",
        folder=first.folder,
    ).completed
    assert f"going on from {first.run}/checkpoints/last.ckpt" in ended.out
    assert ended.run == first.run
    assert steps(first.run) == [0, 1, 2, 3]
    table = record.load(first.run)
    assert sorted(set(table[table["kind"] == "flow"]["step"])) == [1, 2, 3, 4]
    assert yaml.safe_load((first.run / "config.yaml").read_text())["trainer"]["gradient_clip_val"] == 1
    # From the first epoch again: what came after it is cut.
    again = train(*QUIET, *settings, f"ckpt_path={first.run}/checkpoints/best.ckpt", "trainer.max_epochs=3")
    assert again.left_nothing
    assert steps(first.run)[-2:] == [4, 5]


@pytest.mark.slow
def test_a_run_around_other_runs_leaves_their_checkpoints_alone(train, last: Path, tmp_path: Path) -> None:
    around = tmp_path / "outputs0"
    other = shutil.copytree(last.parents[1], around / "train/runs/other")
    run_dir = f"hydra.run.dir={around}"
    assert train(*QUIET, run_dir, "trainer.limit_train_batches=1").code == 0
    before = content(other)
    ended = train(*QUIET, run_dir, f"ckpt_path={around}/checkpoints/last.ckpt", "trainer.max_epochs=2")
    assert f"going on from {around}" in ended.completed.out
    ended = train(*QUIET, run_dir, f"ckpt_path={other}/checkpoints/last.ckpt", "trainer.max_epochs=3")
    assert "a new run from " in ended.completed.out
    assert content(other) == before


def test_wrong_input_leaves_the_run_that_would_go_on_as_it_is(train) -> None:
    first = train(*QUIET)
    before = content(first.run)
    resumed = ("ckpt_path=last", "trainer.max_epochs=2", *QUIET)
    assert train(*resumed, "trainer.precision=transformer-engine", folder=first.folder).code == 2
    assert content(first.run) == before


def test_another_directory_makes_a_new_run_from_the_checkpoint(train, last: Path, tmp_path: Path) -> None:
    before = content(last.parents[1])
    run_dir = f"hydra.run.dir={tmp_path}/outputs0/train/runs/new"
    ended = train(f"ckpt_path={last}", "trainer.max_epochs=2", *QUIET, run_dir).completed
    assert f"a new run from {last}" in ended.out
    assert content(last.parents[1]) == before
    state = torch.load(ended.run / "checkpoints/best.ckpt", weights_only=True)
    assert state["global_step"] == 4


def test_a_checkpoint_is_tested_in_a_directory_of_its_own(train, last: Path) -> None:
    before = content(last.parents[1])
    # No optimizer is restored, so its settings do not matter.
    assert train(f"ckpt_path={last}", "train=false", "optimizer.lr=0.5").code == 0
    assert content(last.parents[1]) == before


@pytest.mark.slow
def test_a_job_of_a_sweep_goes_on_in_its_directory(train) -> None:
    folder = train("-m", "seed=1,2", *QUIET).folder
    (job,) = folder.glob("train/sweeps/*/1")
    assert train("seed=2", f"ckpt_path={job}", "trainer.max_epochs=2", *QUIET, folder=folder).completed
    assert torch.load(job / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    assert not list(folder.glob("train/runs/*"))
    assert RunRecord.load(job).kind == "sweep"


@pytest.mark.slow
def test_a_requeued_job_goes_on_with_the_same_command(train, tmp_path: Path, monkeypatch) -> None:
    command = (f"hydra.run.dir={tmp_path}/run", *QUIET)
    assert train(*command).code == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "going on from " in train(*command, "trainer.max_epochs=2").out
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 4


@pytest.mark.slow
def test_loggers_go_on_with_what_they_stored(train) -> None:
    loggers = ("logger=[csv,tensorboard,wandb,mlflow]", *QUIET)
    first = train(*loggers)
    stored = RunRecord.load(first.run).loggers
    assert train(*loggers, "ckpt_path=last", "trainer.max_epochs=2", folder=first.folder).code == 0
    assert set(stored) == {"csv", "tensorboard", "wandb", "mlflow"}
    assert RunRecord.load(first.run).loggers == stored
    assert len(list(first.run.glob("tensorboard/*"))) == len(list(first.run.glob("csv/*"))) == 1
