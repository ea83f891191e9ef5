import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from gradpolicy.lightning.checkpoint_io import WholeCheckpointIO, write_whole

MEGABYTE = 2**20


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets no file grow beyond some bytes: writing then fails halfway, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    former = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, former)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    WholeCheckpointIO().save_checkpoint({"step": 3, "weight": torch.arange(4)}, tmp_path / "new" / "a.ckpt")
    loaded = WholeCheckpointIO().load_checkpoint(tmp_path / "new" / "a.ckpt", weights_only=True)
    assert loaded["step"] == 3
    assert torch.equal(loaded["weight"], torch.arange(4))


def test_a_full_disk_keeps_the_former_checkpoint_and_says_so(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    path = tmp_path / "last.ckpt"
    write_whole({"step": 1}, path)
    small_files(MEGABYTE)
    with pytest.raises(
        OSError, match=r"could not save .*last\.ckpt: .*; the former last\.ckpt is whole"
    ) as caught:
        write_whole({"step": 2, "weight": torch.zeros(MEGABYTE)}, path)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert torch.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"], "nothing half written stays"


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_training_on_a_full_disk_ends_with_the_former_checkpoint(
    tmp_path: Path,
    two_layers: LightningModule,
    loader: DataLoader,
    make_trainer: Callable[..., Trainer],
    small_files: Callable[[int], None],
) -> None:
    def fit(steps: int) -> None:
        checkpoints = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_last=True)
        trainer = make_trainer(
            max_steps=steps, callbacks=[checkpoints], enable_checkpointing=True, plugins=[WholeCheckpointIO()]
        )
        trainer.fit(two_layers, loader)

    fit(2)
    kept = (tmp_path / "last.ckpt").read_bytes()
    small_files(1024)
    with pytest.raises(OSError, match="make room and resume"):
        fit(4)
    assert (tmp_path / "last.ckpt").read_bytes() == kept


KILLED_WHILE_SAVING = """
    import os, signal, sys, threading, torch
    from pathlib import Path
    from gradpolicy.lightning.checkpoint_io import write_whole

    path = Path(sys.argv[1])
    write_whole({"step": 1}, path)

    class Deadly(torch.nn.Module):
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    write_whole([torch.zeros(100_000), Deadly()], path)
"""


@pytest.mark.slow
def test_a_run_killed_while_it_saves_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    program = textwrap.dedent(KILLED_WHILE_SAVING)
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    assert torch.load(path) == {"step": 1}
    assert (tmp_path / ".last.ckpt.part").exists()
    write_whole({"step": 2}, tmp_path / "other.ckpt")
    assert not (tmp_path / ".last.ckpt.part").exists(), "the next save clears it away"
