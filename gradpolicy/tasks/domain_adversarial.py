"""Domain-adversarial training: features that distinguish classes, but not the domain of an image.

The model does not define gradients. A policy reverses the gradient of the domain classifier, as in
``conf/policy/domain_adversarial.yaml``.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import check_sizes
from gradpolicy.tasks.task import OptimizerFactory, SchedulerFactory, Task


class Domains(NamedTuple):
    """The output of a model for two domains.

    Attributes:
        logits: The logits of the classes, shape (batch, classes).
        domain_logits: The logit of the target domain, shape (batch,).
    """

    logits: Tensor
    domain_logits: Tensor


class DomainNetwork(nn.Module):
    """A feature extractor with a classifier of images and a classifier of domains.

    Args:
        inputs: Pixels of an image, over all channels.
        hidden: Units of the hidden layers.
        classes: Number of classes.

    Raises:
        PolicyError: For an impossible size.

    Source: Ganin, Lempitsky 2015 (unsupervised domain adaptation by backpropagation), arXiv:1409.7495.
    """

    def __init__(self, inputs: int = 64, hidden: int = 128, classes: int = 10) -> None:
        super().__init__()
        check_sizes("DomainNetwork", inputs=inputs, hidden=hidden, classes=classes)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
        self.label = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        self.domain = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, images: Tensor) -> Domains:
        """Classify images of any shape (batch, …) with as many pixels as inputs."""
        features = self.features(images)
        return Domains(self.label(features), self.domain(features)[:, 0])


class DomainAdversarial(Task):
    """Trains on labelled images with a mark, and on unlabelled images without it.

    In the source domain the first rows of an image are a mark of its class: bright in the pixels
    before ``width · label / classes``. In the target domain they are empty. The first half of a training
    batch is the source domain, the second the target. The loss is the cross-entropy of the first half's
    classes and that of the domains of both.

    Args:
        model: A model that returns :class:`Domains`.
        optimizer: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler_interval: See :class:`~gradpolicy.tasks.task.Task`.
        classes: Number of classes.
        rows: The number of rows of the mark.

    Logs ``{val,test}/source_accuracy``, ``…/target_accuracy`` and ``…/domain_accuracy``, the share of images
    whose domain is recognised; and ``train/loss``, ``train/domain_loss``.

    Raises:
        PolicyError: For impossible numbers of classes or rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str = "epoch",
        classes: int = 10,
        rows: int = 1,
    ) -> None:
        super().__init__(model, optimizer, scheduler, scheduler_interval)
        check_sizes("DomainAdversarial", classes=classes, rows=rows)
        self.classes = classes
        self.rows = rows

    def source(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return images of shape (batch, channels, height, width) with the mark."""
        width = images.shape[-1]
        place = torch.arange(width, device=images.device)
        marks = (place < width * (labels[:, None] / self.classes)).to(images.dtype)
        marked = images.clone()
        marked[..., : self.rows, :] = marks[:, None, None, :]
        return marked

    def target(self, images: Tensor) -> Tensor:
        """Return the same images with empty rows instead."""
        unmarked = images.clone()
        unmarked[..., : self.rows, :] = 0
        return unmarked

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of the classes of one half and of the domains of both, and its two parts."""
        images, labels = batch
        half = len(images) // 2
        both = torch.cat([self.source(images[:half], labels[:half]), self.target(images[half:])])
        output = self.model(both)
        domains = (torch.arange(len(images), device=both.device) >= half).float()
        loss = functional.cross_entropy(output.logits[:half], labels[:half])
        domain_loss = functional.binary_cross_entropy_with_logits(output.domain_logits, domains)
        return loss + domain_loss, {"loss": loss, "domain_loss": domain_loss}

    def evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        """Log the values of a batch."""
        images, labels = batch
        source, target = self.model(self.source(images, labels)), self.model(self.target(images))
        right = torch.cat([source.domain_logits < 0, target.domain_logits > 0])
        values = {
            "source_accuracy": (source.logits.argmax(-1) == labels).float().mean(),
            "target_accuracy": (target.logits.argmax(-1) == labels).float().mean(),
            "domain_accuracy": right.float().mean(),
        }
        logged = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(logged, on_epoch=True, sync_dist=True, batch_size=len(images))
