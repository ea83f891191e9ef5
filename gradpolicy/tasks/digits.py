"""Handwritten digits from scikit-learn, which need no download."""

import numpy as np
import torch
from sklearn.datasets import load_digits

from gradpolicy.tasks.loading import DataModule, TensorRows
from gradpolicy.tasks.splits import check_shares, stratified_split


class DigitsDataModule(DataModule):
    """1797 grey images of 8×8 pixels in ten classes, split by class with a seed of its own.

    A batch is ``(images, labels)``: float32 of shape (batch, 1, 8, 8) in [0, 1], int64 of shape (batch,).

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
    Repository, 1998, the test half, as scikit-learn holds it.

    Args:
        batch_size: Images per batch, on each process.
        validation_share: Share of all images for validation.
        test_share: Share of all images for the test.
        seed: The seed of the split and of the order of the training images.
        workers: The number of loader processes; 0 loads in the training process.

    Raises:
        PolicyError: If the shares are not positive, or leave no training images.
    """

    classes = tuple("0123456789")

    def __init__(
        self,
        batch_size: int = 64,
        validation_share: float = 0.1,
        test_share: float = 0.2,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        super().__init__(batch_size, seed, workers)
        check_shares(validation_share=validation_share, test_share=test_share)
        self.validation_share = validation_share
        self.test_share = test_share

    def setup(self, stage: str | None = None) -> None:
        """Read the images and split them; the same seed gives the same split everywhere."""
        if self.train_set is not None:
            return
        digits = load_digits()
        images, labels = (digits.images / 16.0).astype(np.float32)[:, None], digits.target
        every = np.arange(len(labels))
        rest, test = stratified_split("test_share", every, labels, self.test_share, self.seed)
        share_of_rest = self.validation_share / (1 - self.test_share)
        train, validation = stratified_split("validation_share", rest, labels, share_of_rest, self.seed)
        self.train_set, self.validation_set, self.test_set = (
            TensorRows(torch.from_numpy(images[part]), torch.from_numpy(labels[part]).long())
            for part in (train, validation, test)
        )
