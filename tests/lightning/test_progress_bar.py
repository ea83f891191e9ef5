"""The progress bar takes one line and shows nothing of Lightning's own."""

import io

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from rich import get_console
from torch import nn
from torch.utils.data import DataLoader

from gradpolicy.lightning.progress_bar import ProgressBar


class ManyMetrics(LightningModule):
    """Logs more metrics to the progress bar than fit into a line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.layer(batch).mean()
        self.log("train/loss", loss, prog_bar=True)
        for index in range(6):
            self.log(f"train/a_long_name_{index}", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val/loss", self.layer(batch).mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def terminal():
    """Stands in for a terminal; the console of rich is put back."""
    former = vars(get_console()).copy()
    yield io.StringIO()
    get_console().__dict__ = former


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bar_takes_one_line_of_any_terminal(terminal, tmp_path, width: int) -> None:
    options = {"file": terminal, "width": width, "force_terminal": True, "color_system": None}
    bar = ProgressBar(console_kwargs=options)
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[bar],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    data = DataLoader(torch.ones(4, 1))
    trainer.fit(ManyMetrics(), data, data)
    drawn = terminal.getvalue()
    assert "Epoch 1/1" in drawn
    assert "v_num" not in drawn
    assert "Validation" not in drawn
    assert ("train/loss" in drawn) == (width > 40)
    # What moves the cursor up would redraw a bar of several lines.
    assert "\x1b[1A" not in drawn
