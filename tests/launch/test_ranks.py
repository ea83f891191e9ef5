"""Several processes: one run directory, and each rank with its own job's arguments."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradpolicy.launch.ranks import job_arguments

PROBE = (
    "+callbacks.probe._target_=probe.Probe",
    "+callbacks.probe.directory=${paths.output_dir}",
    "allowed_targets=[probe]",
)


@pytest.fixture(autouse=True)
def _probe_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


def said(run: Path) -> list[list[dict]]:
    """What each rank wrote, a list of lines a rank."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(run.glob("rank*.jsonl"))
    ]


def test_in_a_sweep_each_rank_trains_its_own_job_once(train_process) -> None:
    ended = train_process("-m", "optimizer.lr=0.001,0.002", "trainer=ddp_sim", *PROBE)
    assert ended.code == 0, ended.err
    (sweep,) = ended.folder.glob("train/sweeps/*")
    for job, rate in (("0", 0.001), ("1", 0.002)):
        assert said(sweep / job) == [[{"rank": rank, "lr": rate}] for rank in (0, 1)]
        assert len(list((sweep / job).glob("csv/*/metrics.csv"))) == 1
    assert not list(ended.folder.glob("train/runs/*"))


def test_torchrun_writes_one_run_directory(train_process) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = train_process("trainer=ddp_sim", *PROBE, launcher=torchrun)
    assert ended.code == 0, ended.err
    assert [lines[0]["rank"] for lines in said(ended.run)] == [0, 1]
    assert (ended.run / "checkpoints/last.ckpt").is_file()


def hydra_of(task: list[str], own: list[str]) -> SimpleNamespace:
    return SimpleNamespace(
        runtime=SimpleNamespace(config_sources=[SimpleNamespace(provider="main", path="/conf")]),
        job=SimpleNamespace(config_name="train", name="train"),
        overrides=SimpleNamespace(task=task, hydra=own),
    )


def test_a_rank_is_told_its_job_and_nothing_of_the_sweep() -> None:
    own = [
        "hydra.mode=MULTIRUN",
        "hydra.sweep.dir=/sweep",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "+hydra.sweeper.params.seed=1,2",
        "hydra.run.dir=/run",
        "hydra.searchpath=[file:///more]",
    ]
    assert job_arguments(hydra_of(["seed=1", "trainer=ddp_sim"], own)) == [
        "--config-name",
        "train",
        "seed=1",
        "trainer=ddp_sim",
        "hydra.searchpath=[file:///more]",
    ]
