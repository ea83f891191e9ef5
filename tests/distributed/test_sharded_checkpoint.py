"""Directories of shards: there whole or not at all, and readable by every strategy."""

import errno
import os
import pickle
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from process_pool import ProcessPool, RemoteError, here
from runs import fit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gradpolicy.checkpoint_file import UnreadableError
from gradpolicy.distributed import sharded_checkpoint
from gradpolicy.distributed.sharded_checkpoint import (
    check_manifest,
    find_whole,
    is_whole,
    read_as_one,
    read_unsharded,
    remove_whole,
    save_whole,
    saved_shapes,
)
from gradpolicy.errors import PolicyError
from gradpolicy.lightning.runs import RunRecord, find_checkpoint
from tests.hostile import MakesFolder


def content(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    weight = distribute_tensor(torch.full((5, 3), float(number), device=here()), mesh, [Shard(0)])
    return {"state_dict": {"weight": weight}}, {"global_step": number}


def save(folder: str, number: int, fault: str = "") -> str:
    """Saves as Lightning's checkpoint of a step; a fault plants a kill or a full disk."""
    if fault == "killed while shards are written":
        die_instead_of(sharded_checkpoint, "save_shards", at_call=1)
    if fault == "killed between the two renames":
        die_instead_of(os, "rename", at_call=2)
    full_disk = fault == "full disk" and dist.get_rank() == 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full_disk:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        save_whole(*content(number), Path(folder))
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


def die_instead_of(holder: Any, name: str, at_call: int) -> None:
    """Kills rank 0 with SIGKILL where it calls a function for the n-th time."""
    original, calls = getattr(holder, name), []

    def deadly(*positional: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == at_call and dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*positional, **named)

    setattr(holder, name, deadly)


def test_what_is_saved_comes_back_in_one_process(pair: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "last.ckpt"
    pair(save, str(path), 3)
    assert is_whole(path)
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert read_unsharded(path) == {"global_step": 3}
    assert saved_shapes(path) == {"weight": (5, 3)}
    assert torch.equal(read_as_one(path)["state_dict"]["weight"], torch.full((5, 3), 3.0))


def test_a_checkpoint_takes_the_place_of_the_former(pair: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for number in (1, 2):
        pair(save, str(path), number)
    assert read_unsharded(path) == {"global_step": 2}
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kept"), [("killed while shards are written", 1), ("killed between the two renames", 2)]
)
def test_a_kill_while_saving_leaves_a_whole_checkpoint(
    pair: ProcessPool, tmp_path: Path, fault: str, kept: int
) -> None:
    path = tmp_path / "last.ckpt"
    pair(save, str(path), 1)
    with pytest.raises(RemoteError, match="the process died"):
        pair(save, str(path), 2, fault)
    RunRecord("train", "run", 1.0, str(tmp_path)).save()
    found = find_checkpoint("last", tmp_path)
    assert found is not None
    assert read_unsharded(found) == {"global_step": kept}
    pair(save, str(path), 3)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "run.json"], "the next save clears the rest away"
    assert read_unsharded(path) == {"global_step": 3}


def test_a_full_disk_on_one_rank_is_told_by_all_and_keeps_the_former(
    pair: ProcessPool, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    pair(save, str(path), 1)
    for message in pair(save, str(path), 2, "full disk"):
        assert message.startswith(f"[Errno {errno.EFBIG}] could not save {path}: rank 1: File too large; ")
        assert "the former last.ckpt is whole: make room and resume from it" in message
    assert read_unsharded(path) == {"global_step": 1}


def test_last_passes_over_what_was_not_finished(pair: ProcessPool, tmp_path: Path) -> None:
    old, new = tmp_path / "old/last.ckpt", tmp_path / "new/last.ckpt"
    pair(save, str(old), 1)
    pair(save, str(new), 2)
    (new / "whole").unlink()
    for started, path in enumerate((old, new)):
        RunRecord("train", "run", float(started), str(path.parent)).save()
    with pytest.warns(UserWarning, match=r"new/last\.ckpt was not finished"):
        assert find_checkpoint("last", tmp_path) == old
    assert list(find_whole(tmp_path, "last*.ckpt")) == [old]
    remove_whole(old)
    assert not old.exists()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    save_whole({"state_dict": {"weight": torch.ones(3)}}, {"global_step": 1}, tmp_path / "a.ckpt")
    assert check_manifest(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_what_others_wrote_has_no_manifest_to_be_checked_by(whole: Path) -> None:
    (whole / "whole").unlink()
    assert not check_manifest(whole)


SHARD = "__0_0.distcp"


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        (SHARD, lambda content: content[:-1] + bytes([content[-1] ^ 1]), f"{SHARD} differs from its"),
        ("meta.pt", lambda content: content + b"\0", "meta.pt differs from its checksum"),
        ("meta.pt", lambda content: None, "it has no file 'meta.pt'"),
        ("whole", lambda content: b'{"files": {"../other": [0, 0]}}', "it has no file '../other'"),
        ("whole", lambda content: b'{"files": [1]}', "whole is no list of its files"),
        ("whole", lambda content: b"", "whole is no list of its files"),
        ("whole", lambda content: content[:-5], "whole is no list of its files"),
        ("whole", lambda content: content + b" ", "whole was changed"),
    ],
)
def test_every_change_of_a_directory_is_found(
    whole: Path, name: str, spoil: Callable[[bytes], bytes | None], said: str
) -> None:
    (whole.parent / "other").write_bytes(b"")
    content = spoil((whole / name).read_bytes())
    (whole / name).unlink() if content is None else (whole / name).write_bytes(content)
    with pytest.raises(UnreadableError, match=f"is damaged: {said}"):
        check_manifest(whole)


def caused_by(cause: OSError) -> RuntimeError:
    error = RuntimeError("torch failed to write")
    error.__cause__ = cause
    return error


class SilentError(RuntimeError):
    """An error that says nothing."""


@pytest.mark.parametrize(
    ("error", "number", "said"),
    [
        (RuntimeError("no such shard\nsecond line"), errno.EIO, "no such shard;"),
        (SilentError(), errno.EIO, "SilentError;"),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC, f"{os.strerror(errno.ENOSPC)};"),
        (OSError("of no number"), errno.EIO, "of no number;"),
        (caused_by(OSError(errno.ENOSPC, "full")), errno.ENOSPC, f"{os.strerror(errno.ENOSPC)};"),
    ],
)
def test_whatever_fails_is_told_in_a_line_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, number: int, said: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(sharded_checkpoint, "save_shards", fail)
    with pytest.raises(
        OSError, match=f"could not save .*: rank 0: {said} there is no former checkpoint$"
    ) as caught:
        save_whole({}, {}, tmp_path / "a.ckpt")
    assert caught.value.errno == number


def spoil(path: Path, name: str, evil: MakesFolder) -> None:
    if path.is_dir():
        (path / "whole").unlink()
    if name == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(evil))
    elif name == "meta":
        torch.save(evil, path / "meta.pt")
    elif name == "file":
        torch.save({"state_dict": {}, "evil": evil}, path)


def resumed_from_a_strangers(folder: str) -> list[str]:
    """What each strategy says of directories and of a file in which there is code."""
    ran, messages = f"{folder}/ran", []
    for name in ("value", "metadata", "meta", "file"):
        path = Path(folder, name)
        evil = MakesFolder(ran)
        if name != "file":
            save_whole({"state_dict": {"evil": evil if name == "value" else 3}}, {}, path)
            dist.barrier()
        if dist.get_rank() == 0:
            spoil(path, name, evil)
        dist.barrier()
        for strategy in ("fsdp2", "ddp"):
            try:
                fit(strategy, "none", resume_from=str(path))
            except PolicyError as error:
                messages.append(str(error))
    return [*messages, *(["it ran"] if os.path.exists(ran) else [])]


def test_no_strategy_runs_what_is_in_a_strangers_checkpoint(pair: ProcessPool, tmp_path: Path) -> None:
    for messages in pair(resumed_from_a_strangers, str(tmp_path)):
        assert len(messages) == 8, messages
        assert all("is not read: only tensors and plain values are" in message for message in messages)


# ---- from each strategy to each


def half(strategy: str, kind: str, frozen_state: str, path: str) -> None:
    fit(strategy, kind, frozen_state, settings={"max_epochs": 1}, save_to=path)


def rest(strategy: str, kind: str, frozen_state: str, path: str) -> dict[str, Any]:
    return fit(strategy, kind, frozen_state, resume_from=path)


SINGLE = "one process"
CASES = [
    *((first, second, "entries", "zero") for first, second in (("fsdp2", SINGLE), (SINGLE, "fsdp2"))),
    *(
        pytest.param(first, second, kind, frozen_state, marks=pytest.mark.slow)
        for first, second in (
            ("fsdp2", "fsdp2"),
            ("fsdp2", SINGLE),
            (SINGLE, "fsdp2"),
            ("fsdp2", "ddp"),
            ("ddp", "fsdp2"),
            ("fsdp2", "zero1"),
            ("zero1", "fsdp2"),
            ("zero1", SINGLE),
            (SINGLE, "ddp"),
            (SINGLE, "zero1"),
            ("zero1", "zero1"),
        )
        for kind in ("rows", "entries", "layers")
        for frozen_state in ("keep", "zero", "drop")
    ),
]


@pytest.mark.supports("resume elsewhere", loop="lightning", processes="{second}", names={SINGLE: "one"})
@pytest.mark.parametrize(("first", "second", "kind", "frozen_state"), CASES)
def test_a_run_goes_on_under_another_strategy(
    pair: ProcessPool, tmp_path: Path, first: str, second: str, kind: str, frozen_state: str
) -> None:
    path, undisturbed = str(tmp_path / "a.ckpt"), fit(SINGLE, kind, frozen_state)
    if first == SINGLE:
        half(first, kind, frozen_state, path)
    else:
        pair(half, first, kind, frozen_state, path)
    ended = (
        rest(second, kind, frozen_state, path)
        if second == SINGLE
        else pair(rest, second, kind, frozen_state, path)[0]
    )
    for what in ("masks", "ages"):
        assert all(torch.equal(ended[what][name], value) for name, value in undisturbed[what].items()), what
    for name, weight in undisturbed["weights"].items():
        torch.testing.assert_close(ended["weights"][name], weight, rtol=2e-4, atol=2e-5)


class SaveInTheFirstWindow(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0:
            trainer.save_checkpoint(self.path)


def resumed_before_the_first_update(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    windows = {"accumulate_grad_batches": 2}
    whole = fit("fsdp2", "rows", settings={**windows, "callbacks": [SaveInTheFirstWindow(path)]})
    return whole, fit("fsdp2", "rows", resume_from=path, settings=windows)


def test_a_checkpoint_of_before_the_first_update_loads(pair: ProcessPool, tmp_path: Path) -> None:
    """Gradients wait then, so torch leaves the optimizer's state out."""
    for whole, resumed in pair(resumed_before_the_first_update, str(tmp_path / "a.ckpt")):
        for what in ("masks", "ages"):
            assert all(torch.equal(resumed[what][name], value) for name, value in whole[what].items())
