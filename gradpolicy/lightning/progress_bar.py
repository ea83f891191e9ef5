"""A progress bar of one line, with the metrics that fit into it."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import BarColumn, ProgressColumn, TimeRemainingColumn

BAR = 10
# Four spaces between the columns, and five characters for the remaining time.
REST = BAR + 4 + len("00:00")


class ProgressBar(RichProgressBar):
    """Lightning's bar of `rich`, shortened to one line.

    It shows the epoch, the batches, the remaining time, and the metrics logged with ``prog_bar=True`` that
    fit into the terminal. Lightning's own entries (``v_num``) and the bar of each validation are not shown.
    """

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the columns to the left of the metrics."""
        description, _, batches, *_ = super().configure_columns(trainer)
        columns: list[ProgressColumn] = [
            description,
            BarColumn(BAR),
            batches,
            TimeRemainingColumn(compact=True),
        ]
        return columns

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the metrics that fit into the line, as text."""
        if self.progress is None or self.train_progress_bar_id is None:
            return {}
        total = self.total_train_batches
        room = self.progress.console.width - REST - len(f"{total}/{total}")
        room -= len(self.progress.tasks[self.train_progress_bar_id].description)
        shown = {}
        for name, value in trainer.progress_bar_metrics.items():
            shown[name] = f"{value:.3g}"
            room -= len(f" {name}: {shown[name]}")
            if room < 0:
                del shown[name]
                break
        return shown

    def on_validation_batch_start(self, trainer: Trainer, *arguments: Any, **settings: Any) -> None:
        """Show a bar for a separate validation, but not for one within training."""
        if trainer.state.fn != "fit":
            super().on_validation_batch_start(trainer, *arguments, **settings)
