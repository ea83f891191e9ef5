"""Visual attention by a mask: the positions of an image that a classifier uses.

The model does not define gradients. A policy passes the gradient of a sampled mask to the attention, as in
``conf/policy/visual_attention.yaml``.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradpolicy.checks import LARGEST_SIZE, check_share, check_sizes, check_whole
from gradpolicy.tasks.classification import Classifier
from gradpolicy.tasks.task import OptimizerFactory, SchedulerFactory


class Attended(NamedTuple):
    """The output of a model with visual attention.

    Attributes:
        logits: Unnormalised log-probabilities, shape (batch, classes).
        attention: The probability of each position, shape (batch, 1, height, width).
        mask: The factors of the features, of the same shape.
    """

    logits: Tensor
    attention: Tensor
    mask: Tensor


class Mask(nn.Module):
    """The mask of an attention map: bits sampled with its probabilities, or the map itself.

    Args:
        sampled: Sample bits.
    """

    def __init__(self, sampled: bool) -> None:
        super().__init__()
        self.sampled = sampled

    def forward(self, attention: Tensor) -> Tensor:
        """Return a mask of the shape of the map."""
        return torch.bernoulli(attention) if self.sampled else attention


class VisualAttention(nn.Module):
    """A classifier of an image's features times the mask of an attention map.

    Formula: ``logits = head(features · mask)``, ``mask ~ Bernoulli(attention)``. The gradient of a sampled
        mask is defined by policies: with `identity` the attention gets ``Σ features · incoming`` over the
        channels.

    Args:
        channels: Channels of the images.
        size: Height and width of the images in pixels.
        classes: Number of classes.
        width: Channels of the features.
        sampled: Use hard masks, which are sampled in each forward pass (also in a test); otherwise soft ones.

    Raises:
        PolicyError: For an impossible size.

    Source: hard and soft attention, Xu et al. 2015 (show, attend and tell), arXiv:1502.03044; the gradient of
    the bits, Bengio, Léonard, Courville 2013, arXiv:1308.3432.
    """

    def __init__(
        self, channels: int = 1, size: int = 28, classes: int = 10, width: int = 16, sampled: bool = True
    ) -> None:
        super().__init__()
        check_sizes("VisualAttention", channels=channels, classes=classes, width=width)
        check_whole("VisualAttention.size", size, least=4, most=LARGEST_SIZE)
        self.features = nn.Sequential(nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.ReLU())
        self.attention = nn.Sequential(
            nn.Conv2d(channels, width, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)
        )
        self.mask = Mask(sampled)
        self.head = nn.Sequential(
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * ((size + 1) // 4) ** 2, classes)
        )

    def forward(self, images: Tensor) -> Attended:
        """Classify images of shape (batch, channels, size, size)."""
        attention = torch.sigmoid(self.attention(images))
        mask = self.mask(attention)
        return Attended(self.head(self.features(images) * mask), attention, mask)


class AttentionClassifier(Classifier):
    """Trains a classifier that should use only a share of the positions of an image.

    The loss is the cross-entropy plus ``weight · mean((attention's mean over an image − share)²)``.

    Args:
        model: A model that returns :class:`Attended`.
        optimizer: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler_interval: See :class:`~gradpolicy.tasks.task.Task`.
        classes: Number of classes.
        share: The target share of positions, between 0 and 1.
        weight: The weight of the second part of the loss.

    Logs what :class:`~gradpolicy.tasks.classification.Classifier` logs, and ``…/share_loss``.

    Raises:
        PolicyError: If the share is not between 0 and 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str = "epoch",
        classes: int = 10,
        share: float = 0.1,
        weight: float = 10.0,
    ) -> None:
        super().__init__(model, optimizer, scheduler, scheduler_interval, classes)
        check_share("AttentionClassifier.share", share)
        self.share = share
        self.weight = weight

    def losses_of(self, output: Attended, labels: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropy, and the deviation of the attention from its target share."""
        excess = output.attention.mean((1, 2, 3)) - self.share
        return {**super().losses_of(output, labels), "share_loss": self.weight * excess.square().mean()}
