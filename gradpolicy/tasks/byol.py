"""BYOL on small images: a network predicts its moving average's output for another view.

The model does not define gradients. A policy stops the gradient into the target network, as in
``conf/policy/byol.yaml``.
"""

import copy

import torch
from torch import Tensor, nn

from gradpolicy.checks import check_share
from gradpolicy.tasks.simsiam import SimSiam, SimSiamNetwork
from gradpolicy.tasks.task import OptimizerFactory, SchedulerFactory


class BYOLNetwork(SimSiamNetwork):
    """An encoder with a projector and a predictor, a target network, and a probe.

    Arguments are those of :class:`~gradpolicy.tasks.simsiam.SimSiamNetwork`.

    Source: Grill et al. 2020 (bootstrap your own latent), arXiv:2006.07733.
    """

    def __init__(self, inputs: int = 64, hidden: int = 128, size: int = 32, classes: int = 10) -> None:
        super().__init__(inputs, hidden, size, classes)
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector))

    def targets(self, first: Tensor, second: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target network's outputs for the second and for the first view."""
        return self.target(second), self.target(first)


class BYOL(SimSiam):
    """Trains BYOL like :class:`~gradpolicy.tasks.simsiam.SimSiam`, with an updated target network.

    Args:
        model: A model that returns :class:`~gradpolicy.tasks.simsiam.Views`.
        optimizer: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler: See :class:`~gradpolicy.tasks.task.Task`.
        scheduler_interval: See :class:`~gradpolicy.tasks.task.Task`.
        momentum: The weight of the target network's old value in each update, between 0 and 1.

    Raises:
        PolicyError: If the momentum is not between 0 and 1.
    """

    model: BYOLNetwork

    def __init__(
        self,
        model: BYOLNetwork,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str = "epoch",
        momentum: float = 0.98,
    ) -> None:
        super().__init__(model, optimizer, scheduler, scheduler_interval)
        check_share("BYOL.momentum", momentum)
        self.momentum = momentum

    @torch.no_grad()
    def on_train_batch_end(self, outputs: object, batch: object, batch_index: int) -> None:
        """Update the target network: ``target = momentum · target + (1 − momentum) · online``."""
        online = nn.Sequential(self.model.encoder, self.model.projector)
        for follower, leader in zip(self.model.target.parameters(), online.parameters(), strict=True):
            follower.lerp_(leader, 1 - self.momentum)
