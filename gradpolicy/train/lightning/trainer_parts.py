"""Parts of Lightning's Trainer that callbacks read."""

from typing import TypeVar

from lightning.pytorch import Callback, Trainer

# The methods that Lightning calls instead of the forward method of a LightningModule.
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")

Kind = TypeVar("Kind", bound=Callback)


def callbacks_of(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of a class, in the order in which they run."""
    # Lightning sets the attribute outside the class, which a type checker does not see.
    return [each for each in trainer.callbacks if isinstance(each, kind)]  # type: ignore[attr-defined]
