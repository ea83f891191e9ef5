"""Fashion-MNIST is read from its files; the real ones are used where they lie beside the project."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from gradpolicy.tasks import FashionMNISTDataModule
from gradpolicy.tasks.data_sets import read_idx

REAL = Path(__file__).parents[2].parent / "shared" / "data" / "fashion_mnist"


def write_idx(path: Path, values: np.ndarray) -> Path:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))
    return path


def test_an_idx_file_is_read_in_its_shape(tmp_path: Path) -> None:
    values = np.arange(24).reshape(2, 3, 4)
    assert torch.equal(read_idx(write_idx(tmp_path / "a.gz", values)), torch.from_numpy(values).byte())


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the Fashion-MNIST files beside the project")
def test_the_real_images_are_split_and_loaded() -> None:
    data = FashionMNISTDataModule(REAL, batch_size=100)
    data.prepare_data()
    data.setup()
    sizes = [len(part) for part in (data.train_set, data.validation_set, data.test_set)]
    assert sizes == [54000, 6000, 10000]
    assert torch.bincount(data.train_set.tensors[1]).tolist() == [5400] * 10
    images, labels = next(iter(data.test_dataloader()))
    assert images.shape == (100, 1, 28, 28)
    assert labels[0] == 9
    assert data.test_set.tensors[0].mean() == pytest.approx(0.2868, abs=1e-4)
