"""The experiments behind docs/results.md, for two steps each on small made-up data."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from gradpolicy.insight import record
from gradpolicy.tasks import data_sets
from gradpolicy.train.lightning.checkpoints import read_checkpoint
from tests.tasks.test_fashion_mnist import write_idx

FASHION = ("dense", "rigl", "set")
TUNED = ("full", "layerwise", "block_cyclic", "topk", "random")
SMALL = ("callbacks=[model_checkpoint,record]", "trainer.log_every_n_steps=1")
SMALL_TEXT = ("data.context=16", "model.model.width=16", "model.model.dropout=0.0")


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with a hundred images, known by checksums of their own."""
    generator = np.random.default_rng(0)
    for prefix, count in (("train", 640), ("t10k", 100)):
        pixels = generator.integers(0, 256, (count, 28, 28))
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    trust("FASHION_FILES", tmp_path, monkeypatch)
    return f"data.data_dir={tmp_path}"


@pytest.fixture
def shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory with a text of 65 characters, known by its checksum."""
    letters = "".join(map(chr, range(40, 105)))
    (tmp_path / "input.txt").write_text(letters * 80)
    trust("SHAKESPEARE_FILES", tmp_path, monkeypatch)
    return f"data.data_dir={tmp_path}"


def trust(known: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = getattr(data_sets, known)
    files = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in names}
    monkeypatch.setattr(data_sets, known, files)


def weights_of(ended) -> dict[str, torch.Tensor]:
    return read_checkpoint(ended.run / "checkpoints/last.ckpt")["state_dict"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FASHION)
def test_fashion_runs_and_sparse_weights_are_zero(train, fashion: str, name: str) -> None:
    ended = train(fashion, *SMALL, f"experiment=fashion_{name}").completed
    assert "test/accuracy" in ended.result.metrics
    matrices = [tensor for tensor in weights_of(ended).values() if tensor.dim() == 2]
    active = sum(int(tensor.count_nonzero()) for tensor in matrices)
    share = active / sum(tensor.numel() for tensor in matrices)
    assert share == pytest.approx(1.0 if name == "dense" else 0.1, abs=0.01)


def test_sparse_training_holds_less_optimizer_state(train, fashion: str) -> None:
    rows = record.load(train(fashion, *SMALL, "experiment=fashion_set").completed.run)
    last = rows[(rows["kind"] == "freeze") & (rows["step"] == rows["step"].max())]
    # Of dense training: two moments of four bytes an entry.
    assert 0 < last["state_bytes"].sum() < 0.2 * 8 * last["entries"].sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_moves_what_its_policy_lets_move(train, shakespeare: str, name: str) -> None:
    small = (shakespeare, *SMALL_TEXT)
    base = train(*small, *SMALL, "experiment=shakespeare_base", "trainer.limit_train_batches=1")
    ended = train(
        *small,
        *SMALL,
        f"experiment=shakespeare_{name}",
        "callbacks=[model_checkpoint,initial_weights]",
        f"callbacks.initial_weights.path={base.run}/checkpoints/best.ckpt",
        *(["policy.topk.mask.window=1"] if name == "topk" else []),
    ).completed
    before, after = weights_of(base), weights_of(ended)
    moved = sum(int((before[key] != after[key]).sum()) for key in after)
    total = sum(tensor.numel() for tensor in after.values())
    low, high = {
        "full": (0.9, 1.0),
        "layerwise": (0.4, 0.9),
        "block_cyclic": (0.01, 0.3),
        "topk": (0.05, 0.11),
        "random": (0.05, 0.11),
    }[name]
    assert low <= moved / total <= high
