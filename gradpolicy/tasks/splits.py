"""Seeded splits that keep the share of every class."""

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from gradpolicy.errors import PolicyError

Indices = NDArray[np.integer]


def check_shares(**shares: float) -> None:
    """Check the shares of the samples that are split off, by the names of their settings.

    Raises:
        PolicyError: If one is not between 0 and 1, or they leave nothing to train on.
    """
    for key, share in shares.items():
        if not 0 < share < 1:
            raise PolicyError(f"data.{key}: {share} given, a share between 0 and 1 needed")
    if sum(shares.values()) >= 1:
        raise PolicyError(f"data.{next(iter(shares))}: the shares together leave nothing to train on")


def stratified_split(indices: Indices, labels: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Take a share away from samples, in every class alike.

    Args:
        indices: The samples.
        labels: The class of every sample there is, by index.
        share: The share that is taken away, between 0 and 1.
        seed: Decides which.

    Returns:
        What is left and what was taken, each in ascending order.

    Example:
        >>> left, taken = stratified_split(np.arange(8), np.array([0, 1] * 4), share=0.25, seed=0)
        >>> sorted(taken % 2)
        [np.int64(0), np.int64(1)]
    """
    left, taken = train_test_split(indices, test_size=share, random_state=seed, stratify=labels[indices])
    return np.sort(left), np.sort(taken)
