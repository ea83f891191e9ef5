"""A callback that logs the curvature of the training loss under the run's own policies."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from gradpolicy.checks import check_choice, check_whole
from gradpolicy.errors import PolicyError
from gradpolicy.insight import curvature
from gradpolicy.lightning.unobserved import unobserved
from gradpolicy.planning.plan import training_loss

QUANTITIES = {
    "trace": curvature.trace,
    "frobenius_norm": curvature.frobenius_norm,
    "top_eigenvalue": curvature.top_eigenvalue,
}


class LogCurvature(Callback):
    """Estimates the curvature of the loss of the batch just trained, and logs it.

    Each quantity is logged as ``curvature/<quantity>``, its standard error (for ``top_eigenvalue`` the
    residual) as ``curvature/<quantity>_error``. They are for the parameters that train at that step, and the
    gradient under the run's policies. The random vectors are the same at every step, so they do not cause
    differences between steps.

    Training is not affected. For the estimates ``training_step`` is called again; values that it then logs,
    or adds to a torchmetrics metric, are discarded. Reports of policies include these calls. With several
    processes the mean over their estimates is logged.

    Args:
        every: The number of optimizer steps between two estimates.
        quantities: Some of ``trace``, ``frobenius_norm`` and ``top_eigenvalue``.
        samples: Random vectors per estimate; the maximum number of iterations for ``top_eigenvalue``.
        seed: Seed of the random vectors.

    Raises:
        PolicyError: For an unknown quantity, or a number that is too small; when training starts, for a
            module with manual optimization.
    """

    def __init__(
        self, every: int = 100, quantities: Iterable[str] = tuple(QUANTITIES), samples: int = 8, seed: int = 0
    ) -> None:
        key = "callbacks.curvature"
        self.every = check_whole(f"{key}.every", every, least=1)
        self.samples = check_whole(f"{key}.samples", samples, least=2)
        self.seed = check_whole(f"{key}.seed", seed, least=0)
        self.quantities = [check_choice(f"{key}.quantities", name, QUANTITIES) for name in quantities]
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that calling ``training_step`` again does not update weights."""
        if not pl_module.automatic_optimization:
            raise PolicyError(
                f"callbacks.curvature: {type(pl_module).__name__} optimizes by hand in training_step, which"
                " cannot be called again for an estimate"
            )
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the estimates after every n-th optimizer step."""
        step = trainer.global_step
        if step == self._last_step or step % self.every:
            return
        self._last_step = step
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        found = {}
        with unobserved(pl_module), trainer.precision_plugin.train_step_context():
            for name in self.quantities:
                generator = torch.Generator("cpu").manual_seed(self.seed)
                estimate = QUANTITIES[name](
                    lambda: training_loss(pl_module, batch), parameters, self.samples, generator
                )
                found[f"curvature/{name}"] = estimate.value
                found[f"curvature/{name}_error"] = estimate.standard_error
        pl_module.log_dict(found, on_step=True, on_epoch=False, sync_dist=True)
