"""Seeded splits that keep the share of every class."""

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from gradpolicy.errors import PolicyError

Indices = NDArray[np.integer]


def check_shares(**shares: float) -> None:
    """Check the shares of the samples that are split off, by the names of their settings.

    Raises:
        PolicyError: If one is not between 0 and 1, or they leave no training samples.
    """
    for key, share in shares.items():
        if not 0 < share < 1:
            raise PolicyError(f"data.{key}: {share} given, a share between 0 and 1 needed")
    if sum(shares.values()) >= 1:
        raise PolicyError(f"data.{next(iter(shares))}: the shares together leave nothing to train on")


def stratified_split(
    key: str, indices: Indices, labels: Indices, share: float, seed: int
) -> tuple[Indices, Indices]:
    """Split off the same share of the samples of every class.

    Args:
        key: The name of the setting with the share.
        indices: The samples.
        labels: The classes of all samples, by index.
        share: The share that is split off, between 0 and 1.
        seed: The seed.

    Returns:
        The remaining samples and those split off, each in ascending order.

    Raises:
        PolicyError: If not every class has a sample on both sides.

    Example:
        >>> left, taken = stratified_split("share", np.arange(8), np.array([0, 1] * 4), share=0.25, seed=0)
        >>> sorted(taken % 2)
        [np.int64(0), np.int64(1)]
    """
    try:
        left, taken = train_test_split(indices, test_size=share, random_state=seed, stratify=labels[indices])
    except ValueError as error:
        raise PolicyError(f"data.{key}: cannot be split off: {error}") from error
    return np.sort(left), np.sort(taken)
