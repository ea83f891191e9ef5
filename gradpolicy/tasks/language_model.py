"""Next-token prediction as a Lightning module."""

import math

from torch import Tensor
from torch.nn import functional

from gradpolicy.tasks.task import Task


class LanguageModel(Task):
    """Trains a model to predict the next token, with cross-entropy.

    Arguments are those of :class:`~gradpolicy.tasks.task.Task`; the model gives logits of shape
    (batch, length, vocabulary) for tokens of shape (batch, length). A batch is ``(tokens, next tokens)``.

    Logs ``{train,val,test}/loss`` in nats and ``…/bits_per_character``, the loss over ln 2, a token.
    """

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        """Return the mean loss over a batch's tokens."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/bits_per_character", loss / math.log(2))
        return loss

    def evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        """Log the values of a batch."""
        loss = self._loss(batch)
        values = {f"{stage}/loss": loss, f"{stage}/bits_per_character": loss / math.log(2)}
        self.log_dict(
            values, on_epoch=True, sync_dist=True, batch_size=len(batch[0]), prog_bar=stage == "val"
        )

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = batch
        return functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())
