"""Slurm: the launcher of a sweep's jobs, and the trainer within one."""

import pytest
from hydra.utils import instantiate
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_only

from gradpolicy.app.config import Source

from .conftest import CONF

SLURM = ("hydra/launcher=submitit_slurm", "trainer=slurm", "hydra.launcher.partition=gpu")


@pytest.fixture
def composed():
    with Source(CONF).open():
        yield Source(CONF).compose(list(SLURM))


def test_the_config_makes_the_launcher_of_submitit(composed) -> None:
    launcher = instantiate(composed.hydra.launcher)
    assert type(launcher).__name__ == "SlurmLauncher"
    assert launcher.params["partition"] == "gpu"
    assert launcher.params["signal_delay_s"] == 120


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
    with Source(CONF).open():
        settings = ["trainer=slurm", "trainer.accelerator=cpu", "trainer.devices=2"]
        trainer = instantiate(Source(CONF).compose(settings).trainer)
    environment = trainer.strategy.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert environment.auto_requeue
    assert (trainer.num_nodes, trainer.world_size) == (3, 6)
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (5, 1, 2)
    assert environment.creates_processes_externally, "srun has started them: none is launched"
