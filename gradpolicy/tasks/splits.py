"""Seeded splits that keep the share of every class."""

import numpy as np
from sklearn.model_selection import train_test_split


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
