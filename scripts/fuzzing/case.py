"""One case: a command line with its files, and the expected result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Every command line starts with these, unless it sets the same keys itself.
PLAN = ("plan_only=true", "trainer=cpu", "logger=csv")
# Instead of `plan_only=true` in cases that train: one batch of each kind.
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
        what: A description.
        arguments: The command line of ``train.py``.
        expectation: The expected result.
        names: Words of which a refusal must have one; any refusal is valid if empty.
        files: Files in the working directory, by name.
        holds: Values that the composed config must have if the run is accepted, by key.
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
    """Return a whole command line: the common overrides, except for keys that it sets itself.

    Example:
        >>> command("logger=none", base=("plan_only=true", "logger=csv"))
        ('plan_only=true', 'logger=none')
    """
    keys = {line.partition("=")[0] for line in overrides}
    return (*(line for line in base if line.partition("=")[0] not in keys), *overrides)
