"""Next-token prediction as a Lightning module."""

import math

from torch import Tensor
from torch.nn import functional

from gradpolicy.tasks.task import Task


class LanguageModel(Task):
    """Trains a model to predict the next token, with cross-entropy.

    Arguments are those of :class:`~gradpolicy.tasks.task.Task`; the model returns logits of shape
    (batch, length, vocabulary) for tokens of shape (batch, length). A batch is ``(tokens, next tokens)``.

    Logs ``{train,val,test}/loss`` in nats and ``…/bits_per_character``, the loss over ln 2, per token.
    """

    def assess(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over a batch's tokens, and the same in bits."""
        tokens, following = batch
        loss = functional.cross_entropy(self(tokens).flatten(0, 1), following.flatten())
        return loss, {"loss": loss, "bits_per_character": loss / math.log(2)}
