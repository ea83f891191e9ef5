"""SimSiam on small images: representations of two views agree, without negative pairs.

The model does not define gradients. Policies stop the gradient into the target, which prevents collapse, and
that of the probe, as in ``conf/policy/simsiam.yaml``.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import check_sizes
from gradpolicy.tasks.task import Task


class Views(NamedTuple):
    """The output of SimSiam for two views.

    Attributes:
        loss: The mean of the two negative cosine similarities.
        projections: The projections of the first view, shape (batch, size).
        probe_logits: The probe's logits for the first view, shape (batch, classes).
    """

    loss: Tensor
    projections: Tensor
    probe_logits: Tensor


class NegativeCosine(nn.Module):
    """The loss of a prediction p of the projection z: the mean of −cos(p, z)."""

    def forward(self, p: Tensor, z: Tensor) -> Tensor:
        """Compare predictions and projections of shape (batch, size)."""
        return -functional.cosine_similarity(p, z, dim=-1).mean()


class SimSiamNetwork(nn.Module):
    """An encoder with a projector, a predictor and a probe.

    Args:
        inputs: Pixels of an image, over all channels.
        hidden: Units of the hidden layers.
        size: The size of a projection.
        classes: Classes that the probe distinguishes.

    Raises:
        PolicyError: For an impossible size.

    Source: Chen, He 2021 (exploring simple Siamese representation learning), arXiv:2011.10566.
    """

    def __init__(self, inputs: int = 64, hidden: int = 128, size: int = 32, classes: int = 10) -> None:
        super().__init__()
        check_sizes("SimSiamNetwork", inputs=inputs, hidden=hidden, size=size, classes=classes)
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(inputs, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
        )
        # Without the paper's last normalisation, which would spread out collapsed projections.
        self.projector = nn.Linear(hidden, size)
        self.predictor = nn.Sequential(
            nn.Linear(size, size // 2, bias=False),
            nn.BatchNorm1d(size // 2),
            nn.ReLU(),
            nn.Linear(size // 2, size),
        )
        self.criterion = NegativeCosine()
        self.probe = nn.Linear(hidden, classes)

    def forward(self, first: Tensor, second: Tensor) -> Views:
        """Compare two views of the same images, each of shape (batch, channels, height, width)."""
        features = self.encoder(first)
        one, other = self.projector(features), self.projector(self.encoder(second))
        of_second, of_first = self.targets(first, second, one, other)
        similarity = self.criterion(self.predictor(one), of_second)
        similarity = similarity + self.criterion(self.predictor(other), of_first)
        return Views(similarity / 2, one, self.probe(features))

    def targets(self, first: Tensor, second: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the predictions, the projections of the second and of the first view."""
        return other, one


class SimSiam(Task):
    """Trains SimSiam on two noisy, shifted views of each image, and a probe of its features.

    Arguments are those of :class:`~gradpolicy.tasks.task.Task`; the model returns :class:`Views`.

    Logs ``{train,val,test}/loss``, ``…/probe_accuracy`` and ``…/spread``: the standard deviation of the
    normalised projections times the root of their size. It is 1 if they fill all directions, and 0 if they
    have collapsed to one.
    """

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of two views and the probe's, and the values to log."""
        images, labels = batch
        views = self.model(_view(images), _view(images)) if self.training else self.model(images, images)
        loss = views.loss + functional.cross_entropy(views.probe_logits, labels)
        accuracy = (views.probe_logits.argmax(-1) == labels).float().mean()
        return loss, {"loss": views.loss, "probe_accuracy": accuracy, "spread": spread(views.projections)}


def spread(projections: Tensor) -> Tensor:
    """Return the standard deviation of the normalised projections, times the root of their size."""
    directions = functional.normalize(projections.detach(), dim=-1)
    return directions.std(0, correction=0).mean() * directions.shape[-1] ** 0.5


def _view(images: Tensor) -> Tensor:
    """Return images moved by up to a pixel in each direction, with noise and a random brightness."""
    down, right = torch.randint(-1, 2, (2,)).tolist()
    moved = torch.roll(images, (down, right), (-2, -1))
    brightness = 0.8 + 0.4 * torch.rand(len(images), 1, 1, 1, device=images.device)
    return moved * brightness + 0.1 * torch.randn_like(images)
