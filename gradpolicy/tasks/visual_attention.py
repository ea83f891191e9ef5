"""Visual attention by a mask: the positions of an image that a classifier uses.

The model does not define gradients. A policy passes the gradient of a sampled mask to the attention, as in
``conf/policy/visual_attention.yaml``.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradpolicy.checks import LARGEST_SIZE, check_integer, check_share, check_sizes


class Attended(NamedTuple):
    """The output of a model with visual attention.

    Attributes:
        logits: Unnormalised log-probabilities, shape (batch, classes).
        attention: The probability of each position, shape (batch, 1, height, width).
        mask: The factors of the features, of the same shape.
        losses: What the training adds to the cross-entropy.
    """

    logits: Tensor
    attention: Tensor
    mask: Tensor
    losses: dict[str, Tensor]


class Mask(nn.Module):
    """Bits with the probabilities of an attention map."""

    def forward(self, attention: Tensor) -> Tensor:
        """Sample a mask of the shape of the map."""
        return torch.bernoulli(attention)


class VisualAttention(nn.Module):
    """A classifier of an image's features times the mask of an attention map.

    Formula: ``logits = head(features · mask)``, ``mask ~ Bernoulli(attention)``. The gradient of a sampled
        mask is defined by policies: with `identity` the attention gets ``Σ features · incoming`` over the
        channels. ``10 · mean((attention's mean over an image − share)²)`` is added to the loss.

    Args:
        size: Height and width of the images in pixels.
        classes: Number of classes.
        width: Channels of the features.
        sampled: Use hard masks, which are sampled in each forward pass (also in a test); otherwise soft ones.
        share: The share of positions that the classifier should use, between 0 and 1.

    Raises:
        PolicyError: For an impossible size or share.

    Source: hard and soft attention, Xu et al. 2015 (show, attend and tell), arXiv:1502.03044; the gradient of
    the bits, Bengio, Léonard, Courville 2013, arXiv:1308.3432.
    """

    def __init__(
        self, size: int = 28, classes: int = 10, width: int = 16, sampled: bool = True, share: float = 0.1
    ) -> None:
        super().__init__()
        check_sizes("VisualAttention", classes=classes, width=width)
        check_integer("VisualAttention.size", size, least=4, most=LARGEST_SIZE)
        self.share = check_share("VisualAttention.share", share)
        self.features = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU())
        self.attention = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)
        )
        self.mask = Mask() if sampled else nn.Identity()
        self.head = nn.Sequential(
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * ((size + 1) // 4) ** 2, classes)
        )

    def forward(self, images: Tensor) -> Attended:
        """Classify images of shape (batch, 1, size, size)."""
        attention = torch.sigmoid(self.attention(images))
        mask = self.mask(attention)
        excess = attention.mean((1, 2, 3)) - self.share
        losses = {"share_loss": 10 * excess.square().mean()}
        return Attended(self.head(self.features(images) * mask), attention, mask, losses)
