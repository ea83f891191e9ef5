"""Data sets of small grey images: digits, which need no download, and Fashion-MNIST."""

import gzip
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from gradpolicy.tasks.loading import DataModule, TensorRows, check_present, fetch

SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}


class DigitsDataModule(DataModule):
    """1797 grey images of 8×8 pixels in ten classes: 1257 for training, 180 for validation, 360 for the test.

    A batch is ``(images, labels)``: float32 of shape (batch, 1, 8, 8) in [0, 1], int64 of shape (batch,).
    Arguments are those of :class:`~gradpolicy.tasks.loading.DataModule`; the seed is also that of the split.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
    Repository, 1998, the test half, as scikit-learn holds it.
    """

    def setup(self, stage: str | None = None) -> None:
        """Read the images and split them; the same seed gives the same split everywhere."""
        digits = load_digits()
        images, labels = (
            torch.from_numpy(digits.images / 16).float()[:, None],
            torch.from_numpy(digits.target),
        )
        rest, test = split_off(0.2, np.arange(len(labels)), digits.target, self.seed)
        train, validation = split_off(0.125, rest, digits.target, self.seed)
        self.train_set, self.validation_set, self.test_set = (
            TensorRows(images[part], labels[part]) for part in (train, validation, test)
        )


class FashionMNISTDataModule(DataModule):
    """60,000 grey images of 28×28 pixels, of which a tenth is for validation, and 10,000 for the test.

    A batch is ``(images, labels)``: float32 of shape (batch, 1, 28, 28) in [0, 1], int64 of shape (batch,).

    Source: H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", 2017, arXiv:1708.07747; MIT licence.

    Args:
        data_dir: The directory of the four compressed files.
        batch_size: Images per batch, on each process.
        seed: The seed of the split and of the order of the training images.
        workers: The number of loader processes; 0 loads in the training process.
        download: Download missing files.

    Raises:
        PolicyError: If a file is missing and `download` is false, or has the wrong checksum.
    """

    def __init__(
        self,
        data_dir: str | Path,
        batch_size: int = 128,
        seed: int = 0,
        workers: int = 0,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, workers)
        self.data_dir, self.download = check_present(Path(data_dir), FILES, download), download

    def prepare_data(self) -> None:
        """Check the files, or download them."""
        fetch(self.data_dir, SITE, FILES, self.download)

    def setup(self, stage: str | None = None) -> None:
        """Read the images and split off those for validation."""
        images, labels, test_images, test_labels = (read_idx(self.data_dir / name) for name in FILES)
        train, validation = split_off(0.1, np.arange(len(labels)), labels.numpy(), self.seed)
        self.train_set = TensorRows(images[train][:, None] / 255, labels[train].long())
        self.validation_set = TensorRows(images[validation][:, None] / 255, labels[validation].long())
        self.test_set = TensorRows(test_images[:, None] / 255, test_labels.long())


def read_idx(path: Path) -> Tensor:
    """Read a gzip-compressed IDX file of bytes.

    The format: two zero bytes, the type (8 = unsigned byte), the number of dimensions, each dimension as a
    big-endian 32-bit number, then the values (Y. LeCun, C. Cortes, C. Burges, the MNIST database).
    """
    content = gzip.decompress(path.read_bytes())
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], ">u4").astype(int)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy())


def split_off(
    share: float, indices: np.ndarray, labels: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the remaining samples and a share of every class, each in ascending order.

    Args:
        share: The share that is split off, between 0 and 1.
        indices: The samples.
        labels: The classes of all samples, by index.
        seed: The seed.

    Example:
        >>> left, taken = split_off(0.25, np.arange(8), np.array([0, 1] * 4), seed=0)
        >>> sorted(taken % 2)
        [np.int64(0), np.int64(1)]
    """
    left, taken = train_test_split(indices, test_size=share, random_state=seed, stratify=labels[indices])
    return np.sort(left), np.sort(taken)
