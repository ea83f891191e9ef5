"""One file of a checkpoint: whatever happens to its bytes is seen, and nothing in it is run."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.checkpoint_file import UnreadableError, check_file, load_file, read_file
from tests.hostile import MakesFolder

CONTENT = {"state_dict": {"weight": torch.arange(300.0), "bias": torch.zeros(3)}, "step": 3, "name": "run"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(CONTENT, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def read(path: Path) -> Any:
    check_file(path)
    return load_file(path)


def test_a_flipped_bit_changes_nothing_or_is_refused(path: Path) -> None:
    whole, refused = path.read_bytes(), 0
    changes = [whole + b"\0", 2 * whole, whole[:-1]]
    for bit in random.Random(41).sample(range(8 * len(whole)), 100):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        changes.append(bytes(changed))
    for changed in changes:
        path.write_bytes(changed)
        try:
            assert repr(read(path)) == repr(CONTENT)
            assert changed not in changes[:3]
        except UnreadableError:
            refused += 1
    assert refused > 30


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit.*")
def test_what_could_run_is_refused_by_name_without_advice_to_run_it(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": MakesFolder(tmp_path / "ran")}, tmp_path / "evil.ckpt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "program.ckpt")
    for name, said in (("evil.ckpt", r"it holds \w+\.mkdir"), ("program.ckpt", None)):
        with pytest.raises(UnreadableError, match=said) as caught:
            read(tmp_path / name)
        assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_what_could_be_read_without_end_is_not_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(PolicyError, match=rf"^weights: {path} is neither a file nor a directory$"):
            read_file(path, "weights")
