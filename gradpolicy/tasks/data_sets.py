"""Data sets: digits, which need no download, Fashion-MNIST and Tiny Shakespeare."""

import gzip
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from gradpolicy.checks import LARGEST_SIZE, check_choice, check_integer
from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import DataModule, TensorRows, check_present, fetch

FASHION_SITE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_FILES = {
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
        self.data_dir, self.download = check_present(Path(data_dir), FASHION_FILES, download), download

    def prepare_data(self) -> None:
        """Check the files, or download them."""
        fetch(self.data_dir, FASHION_SITE, FASHION_FILES, self.download)

    def setup(self, stage: str | None = None) -> None:
        """Read the images and split off those for validation."""
        images, labels, test_images, test_labels = (read_idx(self.data_dir / name) for name in FASHION_FILES)
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


# ---- text

SHAKESPEARE_SITE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
SHAKESPEARE_FILES = {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}
PARTS = {"all": (0.0, 1.0), "first": (0.0, 0.5), "second": (0.5, 1.0)}


class Windows(TensorRows):
    """Adjacent sequences of a text, each with the sequence shifted by one token.

    Args:
        tokens: The tokens, int64, shape (length,), at least one sequence and a token.
        context: The length of a sequence.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        stretches = tokens.unfold(0, context + 1, context)
        super().__init__(stretches[:, :-1], stretches[:, 1:])


class TinyShakespeareDataModule(DataModule):
    """1,115,394 characters, 65 different ones; a tenth each, at the end, is for validation and for the test.

    A batch is ``(characters, next characters)``, both int64 of shape (batch, context). The 65 characters have
    the same numbers for each part of the text, so that a model of one part can be fine-tuned on another.

    Source: A. Karpathy, char-rnn, 2015; MIT licence, the text itself is in the public domain.

    Args:
        data_dir: The directory of ``input.txt``.
        batch_size: Sequences per batch, on each process.
        context: Length of a sequence.
        part: ``"all"`` of the text, its ``"first"`` or its ``"second"`` half.
        seed: The seed of the order of the training sequences.
        workers: The number of loader processes; 0 loads in the training process.
        download: Download the file if it is missing.

    Raises:
        PolicyError: If the file is missing and `download` is false, it has the wrong checksum, or the
            settings leave no sequence.
    """

    def __init__(
        self,
        data_dir: str | Path,
        batch_size: int = 64,
        context: int = 128,
        part: str = "all",
        seed: int = 0,
        workers: int = 0,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, workers)
        self.context = check_integer("data.context", context, least=1, most=LARGEST_SIZE)
        self.part = check_choice("data.part", part, PARTS)
        self.data_dir, self.download = check_present(Path(data_dir), SHAKESPEARE_FILES, download), download

    def prepare_data(self) -> None:
        """Check the file, or download it."""
        fetch(self.data_dir, SHAKESPEARE_SITE, SHAKESPEARE_FILES, self.download)

    def setup(self, stage: str | None = None) -> None:
        """Read the text, encode its characters and split it into three parts."""
        text = (self.data_dir / "input.txt").read_text(encoding="utf-8")
        number = {character: index for index, character in enumerate(sorted(set(text)))}
        begin, end = (round(share * len(text)) for share in PARTS[self.part])
        tokens = torch.tensor([number[character] for character in text[begin:end]])
        tenth = round(0.1 * len(tokens))
        parts = tokens.split((len(tokens) - 2 * tenth, tenth, tenth))
        if self.context >= tenth:
            raise PolicyError(f"data.context: {self.context} is longer than the validation text")
        self.train_set, self.validation_set, self.test_set = (Windows(part, self.context) for part in parts)
