"""Handwritten digits from scikit-learn, which need no download."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from gradpolicy.tasks.loading import DataModule, TensorRows
from gradpolicy.tasks.splits import split_off


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
