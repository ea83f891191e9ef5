import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO, write_checkpoint

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
    writer, path = AtomicCheckpointIO(), tmp_path / "new" / "run" / "a.ckpt"
    writer.save_checkpoint({"step": 3, "state_dict": {"weight": torch.arange(4)}}, path)
    loaded = writer.load_checkpoint(path, weights_only=True)
    assert loaded["step"] == 3
    assert torch.equal(loaded["state_dict"]["weight"], torch.arange(4))


def test_a_full_disk_keeps_the_former_checkpoint_and_says_so(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint({"step": 1}, path)
    small_files(MEGABYTE)
    message = r"could not save .*last\.ckpt: .*; the former last\.ckpt is complete"
    with pytest.raises(OSError, match=message) as caught:
        write_checkpoint({"step": 2, "weight": torch.zeros(MEGABYTE)}, path)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert torch.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"], "nothing half written stays"


def test_what_is_saved_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the name is there too before anything else happens: the machine may die at any moment."""
    path = tmp_path / "last.ckpt"
    done: list[object] = []
    replace = os.replace

    def sync(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        done.append((name, os.fstat(file).st_size if name.endswith(".part") else None))

    def rename(part: Path, path: Path) -> None:
        done.append("renamed")
        replace(part, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    write_checkpoint({"weight": torch.zeros(1000)}, path)
    part = str(tmp_path / f".last.ckpt.{os.getpid()}.part")
    assert done == [(part, path.stat().st_size), "renamed", (str(tmp_path), None)]


def test_what_a_killed_save_has_left_is_cleared_away(tmp_path: Path) -> None:
    others = [".last.ckpt.mine.part", ".of_another_program.part"]
    for name in (".last.ckpt.7.part", *others):
        (tmp_path / name).write_bytes(b"half")
    write_checkpoint({"step": 2}, tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == [*others, "last.ckpt"]


class Refuses:
    def __init__(self, error: Exception, cause: OSError | None = None) -> None:
        self.error = error
        self.error.__cause__ = cause

    def __reduce__(self) -> tuple:
        raise self.error


FULL = OSError(errno.ENOSPC, "full")


@pytest.mark.parametrize(
    ("content", "number", "said"),
    [
        (Refuses(RuntimeError("on purpose\nsecond line")), errno.EIO, "on purpose"),
        (Refuses(RuntimeError()), errno.EIO, "RuntimeError"),
        (Refuses(OSError("of no number")), errno.EIO, "of no number"),
        (Refuses(RuntimeError("torch failed to write"), FULL), errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
)
def test_what_cannot_be_saved_keeps_the_former_checkpoint_and_says_why(
    tmp_path: Path, content: Refuses, number: int, said: str
) -> None:
    path = tmp_path / "last.ckpt"
    write_checkpoint({"step": 1}, path)
    with pytest.raises(
        OSError, match=rf"could not save .*: {said}; the former last.ckpt is complete"
    ) as caught:
        write_checkpoint({"step": content}, path)
    assert caught.value.errno == number
    assert torch.load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_full_disk_names_the_newest_checkpoint_or_says_that_there_is_none(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    small_files(MEGABYTE)
    content = {"weight": torch.zeros(MEGABYTE)}
    with pytest.raises(OSError, match=r"there is no former checkpoint$"):
        write_checkpoint(content, tmp_path / "c.ckpt")
    for age, name in ((0, "a.ckpt"), (50, "b.ckpt")):
        write_checkpoint({"step": 1}, tmp_path / name)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    with pytest.raises(OSError, match=r"the former a\.ckpt is complete"):
        write_checkpoint(content, tmp_path / "c.ckpt")


def test_remote_paths_are_left_to_lightning_which_runs_nothing_either() -> None:
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"step": 3}, "memory://remote/a.ckpt")
    assert writer.load_checkpoint("memory://remote/a.ckpt") == {"step": 3}
    writer.save_checkpoint({"step": print}, "memory://remote/b.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        writer.load_checkpoint("memory://remote/b.ckpt", weights_only=False)


def test_options_that_lightnings_own_files_do_not_take_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({"step": 3}, tmp_path / "a.ckpt", storage_options={})


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*none\.ckpt$"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_training_on_a_full_disk_ends_with_the_former_checkpoint(
    tmp_path: Path, train: Callable[..., Trainer], small_files: Callable[[int], None]
) -> None:
    def fit(steps: int) -> None:
        checkpoints = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_last=True)
        train(checkpoints, max_steps=steps, enable_checkpointing=True, plugins=[AtomicCheckpointIO()])

    fit(2)
    kept = (tmp_path / "last.ckpt").read_bytes()
    small_files(1024)
    with pytest.raises(OSError, match="make room and resume"):
        fit(4)
    assert (tmp_path / "last.ckpt").read_bytes() == kept


KILLED_WHILE_SAVING = """
    import os, signal, sys, threading, torch
    from pathlib import Path
    from gradpolicy.train.lightning.checkpoints import write_checkpoint

    path = Path(sys.argv[1])
    write_checkpoint({"step": 1}, path)

    class Deadly(torch.nn.Module):
        def __reduce__(self):
            os.kill(os.getpid(), signal.SIGKILL)

    write_checkpoint([torch.zeros(100_000), Deadly()], path)
"""


@pytest.mark.slow
def test_a_run_killed_while_it_saves_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    program = textwrap.dedent(KILLED_WHILE_SAVING)
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[3])
    assert done.returncode == -signal.SIGKILL
    assert torch.load(path) == {"step": 1}
    assert list(tmp_path.glob(".last.ckpt.*.part"))
    write_checkpoint({"step": 2}, path)
    assert not list(tmp_path.glob(".*.part")), "the next save clears it away"
