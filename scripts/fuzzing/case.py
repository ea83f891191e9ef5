"""One case: a command line with the files beside it, and what must come of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Every command line starts with these, unless it sets the same keys itself.
PLAN = ("plan_only=true", "trainer=cpu", "logger=csv")
# In place of `plan_only=true`, where a case really trains: one batch of each kind.
SHORT = (
    *("trainer=cpu", "logger=csv", "callbacks=[model_checkpoint,record]", "extras.plan=false"),
    *("trainer.max_epochs=1", "trainer.limit_train_batches=1", "trainer.limit_val_batches=1"),
    *("trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"),
)


class Expectation(StrEnum):
    """The result that a case must have."""

    REFUSE = "must be refused"
    ACCEPT = "must be accepted"
    EITHER = "may be refused or accepted"


ACCEPT, REFUSE, EITHER = Expectation.ACCEPT, Expectation.REFUSE, Expectation.EITHER


@dataclass(frozen=True)
class Case:
    """One run of the program.

    Attributes:
        what: What is tried, in words.
        arguments: The command line of ``train.py``.
        expectation: What must come of it.
        names: A refusal must hold one of these words; none are asked for where it is empty.
        files: Files in the folder in which it runs, by their name there.
        holds: What the composed config must hold where the run is accepted, by key.
    """

    what: str
    arguments: tuple[str, ...]
    expectation: Expectation = EITHER
    names: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    holds: Mapping[str, Any] = field(default_factory=dict)

    @property
    def leaves_runs(self) -> bool:
        """True if an accepted run leaves its directory: it trains, or is a sweep."""
        sweeps = {"-m", "hydra.mode=MULTIRUN"} & {*self.arguments}
        return "plan_only=true" not in self.arguments or bool(sweeps)


def command(*overrides: str, base: tuple[str, ...] = PLAN) -> tuple[str, ...]:
    """Return a whole command line: what every one starts with, but for the keys that it sets itself.

    Example:
        >>> command("logger=none", base=("plan_only=true", "logger=csv"))
        ('plan_only=true', 'logger=none')
    """
    keys = {line.partition("=")[0] for line in overrides}
    return (*(line for line in base if line.partition("=")[0] not in keys), *overrides)
