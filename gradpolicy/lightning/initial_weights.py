"""Starts a training run from the weights of another run."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from gradpolicy.distributed.sharded_checkpoint import is_sharded_checkpoint
from gradpolicy.errors import PolicyError
from gradpolicy.lightning.checkpoint_checks import check_fits
from gradpolicy.lightning.checkpoint_reading import read_weights

KEY = "callbacks.initial_weights.path"


class InitialWeights(Callback):
    """Loads the weights of a checkpoint before training: for fine-tuning.

    Unlike a resumed run, which is what ``ckpt_path`` is for, this one begins at step 0 with an empty
    optimizer. A run that is resumed keeps the weights of its own checkpoint.

    Args:
        path: A checkpoint, be it a file or a directory of shards; None starts from the weights as they are,
            and warns of it.

    Raises:
        PolicyError: When training is set up, if it does not exist, is damaged, or is of another model.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Loads the weights, before strategies wrap the model and policies look at it."""
        if stage != "fit":
            return
        if self.path is None:
            rank_zero_warn(f"{KEY} names no checkpoint: training starts from fresh weights")
            return
        path = Path(self.path).expanduser()
        if not path.is_file() and not is_sharded_checkpoint(path):
            raise PolicyError(f"{KEY}: {path} is not a file")
        check_fits(path, pl_module, KEY)
        pl_module.load_state_dict(read_weights(path, KEY))
