"""Slurm: the launcher of a sweep's jobs, and the trainer within one."""

import os
import stat
import sys
from pathlib import Path

import pytest
from hydra.utils import instantiate
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only

from gradpolicy.launch.config import Source, check_launcher, compose_job, hydra_at

from .conftest import CONF

SLURM = ("hydra/launcher=submitit_slurm", "trainer=slurm", "hydra.launcher.partition=gpu")


@pytest.fixture
def composed():
    with hydra_at(Source(CONF)):
        yield compose_job(Source(CONF), list(SLURM))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has srun."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


def test_the_config_makes_the_launcher_of_submitit(composed, cluster: Path) -> None:
    assert check_launcher(composed) is None
    launcher = instantiate(composed.hydra.launcher)
    assert type(launcher).__name__ == "SlurmLauncher"
    assert launcher.params["partition"] == "gpu"
    assert launcher.params["signal_delay_s"] == 120


def test_without_slurm_the_message_says_what_to_do(train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    ended = train("-m", "seed=1,2", "hydra/launcher=submitit_slurm")
    assert (ended.code, ended.left_nothing) == (2, True)
    assert ended.message.startswith("hydra/launcher=submitit_slurm: there is no srun here; ")
    assert "hydra/launcher=submitit_local" in ended.message


def test_without_the_plugin_the_message_names_the_extra(
    train, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_submitit_launcher.submitit_launcher", None)
    refusal = train("-m", "seed=1,2", "hydra/launcher=submitit_slurm").refusal
    assert refusal.startswith("needs hydra_plugins, which is not installed: pip install 'gradpolicy[sweeps]'")


def test_the_slurm_trainer_takes_ranks_and_nodes_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "6",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NNODES": "3",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_NODELIST": "n1",
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    # A trainer sets it to its own rank, for the whole process.
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with hydra_at(Source(CONF)):
        settings = ["trainer=slurm", "trainer.accelerator=cpu", "trainer.devices=2"]
        trainer = instantiate(compose_job(Source(CONF), settings).trainer)
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert environment.auto_requeue
    assert (trainer.num_nodes, trainer.world_size) == (3, 6)
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (5, 1, 2)
    assert environment.creates_processes_externally, "srun has started them: none is launched"
