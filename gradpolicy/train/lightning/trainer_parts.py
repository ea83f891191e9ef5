"""Parts of both Lightning packages' Trainers that callbacks read, and a check of their callbacks."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pytorch_lightning
from lightning.pytorch import Callback, Trainer, callbacks, strategies

from gradpolicy.errors import PolicyError
from gradpolicy.freezing.bound_policy import masks_never_change
from gradpolicy.policies import Freeze, Policy

# The methods that Lightning calls instead of the forward method of a LightningModule.
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")

# `lightning` and `pytorch_lightning` have the same classes, each its own.
PACKAGES = ((callbacks, strategies), (pytorch_lightning.callbacks, pytorch_lightning.strategies))
AVERAGING = tuple(
    kind for one, _ in PACKAGES for kind in (one.WeightAveraging, one.StochasticWeightAveraging)
)
EMA = tuple(one.EMAWeightAveraging for one, _ in PACKAGES)
DEEPSPEED = tuple(one.DeepSpeedStrategy for _, one in PACKAGES)

Kind = TypeVar("Kind", bound=Callback)
_Twin: Any = pytorch_lightning.Callback


class AnyCallback(Callback, _Twin):
    """A callback that the Trainers of both packages take."""


def callbacks_of(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of a class, in the order in which they run."""
    # Lightning sets the attribute outside the class, which a type checker does not see.
    return [each for each in trainer.callbacks if isinstance(each, kind)]  # type: ignore[attr-defined]


def check_weight_averaging(given: Iterable[object], policies: Mapping[str, Policy]) -> None:
    """Check that no callback averages weights whose masks change during training.

    An average over all steps mixes the values of an entry from before and after it froze. If masks never
    change, the average of a frozen entry is over equal values.

    Raises:
        PolicyError: If a callback averages weights whose masks change; or if it is EMAWeightAveraging, which
            rounds averages of equal values to others.
    """
    averaging = [callback for callback in given if isinstance(callback, AVERAGING)]
    freezing = {name: policy for name, policy in policies.items() if isinstance(policy, Freeze)}
    rounds = any(isinstance(callback, EMA) for callback in averaging)
    moving = [name for name, policy in freezing.items() if rounds or not masks_never_change(policy)]
    if averaging and moving:
        raise PolicyError(
            f"policy.{moving[0]}: {type(averaging[0]).__name__} averages over steps in which entries are "
            "frozen and moves these; leave it out, give the policy masks that never change and use "
            "WeightAveraging(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)), which does not "
            "round averages of equal values, or average active entries alone in a loop of your own "
            "(docs/python.md, Averaged weights)"
        )
