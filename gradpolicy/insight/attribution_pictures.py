"""A callback that draws attributions of test images under the run's own policies."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from gradpolicy.checks import check_sizes
from gradpolicy.errors import PolicyError, nearest, shown, warn_user
from gradpolicy.insight.attribution import integrated_gradient, predict
from gradpolicy.insight.attribution_checks import insertion_deletion, random_order
from gradpolicy.insight.pictures import Sample, log_image, picture_grid
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.trainer_parts import callbacks_of
from gradpolicy.tasks.images import images_of

PHASE = "test"
# The minimum number of images for the insertion and deletion test, if there are so many.
TESTED = 64


class AttributionPictures(Callback):
    """Draws a grid of attribution maps of the first test images, and logs it.

    The maps are those of :func:`gradpolicy.insight.attribution.integrated` under the flow policies of the run
    that are active in the phase ``test``; with a guided policy the gradients are guided. A quantised model
    needs its straight-through policy in that phase too, ``when.phases=[fit,test]``; without one a warning is
    given. The model and ``.grad`` do not change. The title has the areas below the insertion and deletion
    curves of at least 64 images, and those of pixels in random order.

    The images are the first entry of a batch, and their labels, if there are any, the second. The logits are
    the output of the LightningModule's `predict_step`.

    With several processes, each processes its own images, and the first one draws.

    Args:
        policy: The name of the policy of the pictures in `GradientPolicies`; it must be active in the phase
            ``test``.
        count: Number of images.
        columns: Images in a row of the grid.
        directory: The directory of the PNG; default: ``pictures`` in the trainer's root directory.
        required: True if a run without the policy, or without images, is an error; otherwise it has no
            pictures.

    Raises:
        PolicyError: When testing starts, if the policy is required and missing, or not active then.
    """

    def __init__(
        self,
        policy: str = "guided",
        count: int = 6,
        columns: int = 3,
        directory: str | Path | None = None,
        required: bool = True,
    ) -> None:
        check_sizes("AttributionPictures", count=count, columns=columns)
        self.policy = policy
        self.count = count
        self.columns = columns
        self.required = required
        self._draws = False
        self.directory = Path(directory) if directory is not None else None
        self._batches: list[tuple[Tensor, Tensor | None]] = []

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that the policy exists before anything is computed."""
        self._batches = []
        declared = next((each.policies for each in callbacks_of(trainer, GradientPolicies)), {})
        policy = declared.get(self.policy)
        self._draws = policy is not None and policy.when.active(phase=PHASE)
        if self._draws or not self.required:
            return
        reason = f"it does not hold in the phase {PHASE!r}; declare it with when.phases=[{PHASE}]"
        if policy is None:
            reason = f"the run has no such policy; {nearest(self.policy, declared) or 'none is declared'}"
        raise PolicyError(f"AttributionPictures.policy: {shown(self.policy)}: {reason}")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Store the first images."""
        missing = max(self.count, TESTED) - sum(len(images) for images, _ in self._batches)
        if self._draws and missing > 0:
            try:
                images, labels = images_of(batch, "AttributionPictures: the data")
            except PolicyError as error:
                if self.required:
                    raise
                warn_user(f"{error}; there are no pictures of attributions")
                self._draws = False
                return
            self._batches.append((images[:missing], labels[:missing] if labels is not None else None))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute the maps; the first rank saves and logs the grid."""
        if not self._batches:
            return
        classes = getattr(getattr(trainer, "datamodule", None), "classes", None)
        # On every rank, with its own images, since all ranks must take part in gathering a sharded model.
        figure = self.draw(pl_module, classes)
        if not trainer.is_global_zero:
            return
        directory = self.directory or Path(trainer.default_root_dir) / "pictures"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.policy}.png"
        figure.savefig(path)
        for logger in trainer.loggers:
            log_image(logger, f"attribution/{self.policy}", path, trainer.global_step, "pictures")

    def draw(self, pl_module: LightningModule, classes: tuple[str, ...] | None) -> Figure:
        """Draw a grid of the stored images, under the installed policies."""

        def forward(images: Tensor) -> Any:
            return pl_module.predict_step(images, 0)

        def name(index: int) -> str:
            return classes[index] if classes else str(index)

        images = torch.cat([images for images, _ in self._batches])
        truth = [name(int(label)) for _, labels in self._batches if labels is not None for label in labels]
        attributions = integrated_gradient(forward, images)
        curves = insertion_deletion(forward, images, attributions)
        random = insertion_deletion(forward, images, random_order(images))
        areas = ", ".join(
            f"{name} {getattr(curves, f'{name}_area').mean():.2f}"
            f" (random order {getattr(random, f'{name}_area').mean():.2f})"
            for name in ("insertion", "deletion")
        )
        predicted, probabilities = predict(forward, images)
        samples = [
            Sample(
                image=images[i],
                attribution=attributions[i],
                predicted=name(int(predicted[i])),
                probability=float(probabilities[i]),
                truth=truth[i] if len(truth) == len(images) else None,
            )
            for i in range(min(self.count, len(images)))
        ]
        return picture_grid(samples, f"{self.policy}, integrated from a blurred image: {areas}", self.columns)
