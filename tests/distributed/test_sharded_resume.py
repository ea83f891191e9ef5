"""Under FSDP2 too a run resumed within an accumulation window ends with the bits of the run left alone."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradpolicy.tasks.loading import DataModule, TensorRows
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO
from gradpolicy.train.lightning.fully_shard_strategy import FullyShardStrategy
from gradpolicy.train.lightning.resume import ExactResume


class Noisy(LightningModule):
    """Dropout draws on each rank's own random state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return (self.net(batch[0])[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Numbers(DataModule):
    """Five batches of two for each of two ranks."""

    def setup(self, stage: str | None = None) -> None:
        values = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
        self.train_set = TensorRows(values, values.sum(dim=1))


class SaveAfterBatch(Checkpoint):
    """Saves after each batch of the second epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.folder / f"{batch[-1]}.ckpt")


def fit(folder: str, resume_from: str | None = None) -> list[Tensor]:
    """Trains for two epochs in windows of two batches; gives weights and moments."""
    warnings.simplefilter("ignore")
    torch.manual_seed(3 if resume_from is None else 4)
    trainer = Trainer(
        accelerator="gpu" if here().type == "cuda" else "cpu",
        devices=2,
        strategy=FullyShardStrategy(),
        accumulate_grad_batches=2,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[AtomicCheckpointIO()],
        callbacks=[ExactResume(), SaveAfterBatch(folder)],
    )
    module = Noisy()
    states: list[Tensor] = []
    module.on_train_end = lambda: states.extend(_state(trainer))  # type: ignore[method-assign]
    trainer.fit(module, Numbers(batch_size=2, seed=5), ckpt_path=resume_from, weights_only=True)
    return states


def _state(trainer: Trainer) -> list[Tensor]:
    """This rank's parts, since a rank that holds no entry of a parameter has no moments of it."""
    parameters = list(trainer.lightning_module.parameters())
    states = [trainer.optimizers[0].state[parameter] for parameter in parameters]
    moments = [state[name] for state in states for name in sorted(state)]
    tensors = [*parameters, *filter(torch.is_tensor, moments)]
    return [
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone() for tensor in tensors
    ]


@pytest.mark.slow
def test_resuming_within_a_window_of_sharded_gradients_gives_the_same_bits(
    pair: ProcessPool, tmp_path: Path
) -> None:
    alone = pair(fit, str(tmp_path / "alone"))
    for batch in (0, 1, 2):
        resumed = pair(fit, str(tmp_path / f"from{batch}"), str(tmp_path / "alone" / f"{batch}.ckpt"))
        for ours, theirs in zip(resumed, alone, strict=True):
            assert len(ours) == len(theirs) > 4
            assert all(torch.equal(*tensors) for tensors in zip(ours, theirs, strict=True))
