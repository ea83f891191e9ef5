"""Models of ``plan.json`` and ``audit.json`` in the directory of a run.

Those of ``result.json`` and ``run.json`` are :class:`gradpolicy.insight.results.ResultFile` and
:class:`gradpolicy.lightning.runs.RunRecord`. Keys that files of older versions lack have a default.
"""

from typing import Annotated

from pydantic import BaseModel, Field

# A float holds whole numbers up to this one exactly.
Count = Annotated[int, Field(ge=0, le=2**53)]


class PlanRow(BaseModel):
    """A policy in ``plan.json``."""

    name: str
    what: str = ""
    where: str = ""
    when: str = ""
    matched: list[str] = []
    parameters: list[str] = []
    operations: dict[str, Count] = {}
    entries: Count = 0
    active_entries: Count = 0
    remarks: list[str] = []


class PlanModule(BaseModel):
    """A module in ``plan.json``."""

    name: str
    type: str = ""
    parameters: Count = 0
    policies: list[str] = []


class PlanFile(BaseModel):
    """The content of ``plan.json``."""

    rows: list[PlanRow]
    entries: Count | None = None
    training_entries: Count = 0
    cuts: list[str] = []
    without_gradient: list[str] = []
    warnings: list[str] = []
    modules: list[PlanModule] = []


class StopChecks(BaseModel):
    """The number of checks of stopped gradients, and of those that were not zero."""

    checked: Count = 0
    nonzero: Count = 0


class OperationChecks(BaseModel):
    """The number of comparisons of the operations of a batch, and of those that differed."""

    checked: Count = 0
    differing: Count = 0


class AuditDifference(BaseModel):
    """A promise that did not hold.

    Attributes:
        tensor: The parameter or place.
        what: ``"weight"``, ``"state <name>"``, ``"gradient"`` or ``"operations"``.
        policy: The policies on it.
        count: Entries that changed or were not zero; calls there were too many or too few.
        step: Updates when it was found.
        rank: The process that found it.
        indices: The first entries; of a sharded parameter within the part of that process.
        message: The same in a sentence.
    """

    tensor: str
    what: str
    policy: str
    count: Count
    step: Count
    rank: Count = 0
    indices: list[list[Count]] = []
    message: str = ""


class AuditFile(BaseModel):
    """The content of ``audit.json``, which a checkpoint holds, too."""

    intervals: Count
    entries: Count
    changed: Count
    sampled: bool
    stopped_branches: StopChecks = Field(default_factory=StopChecks)
    operations: OperationChecks = Field(default_factory=OperationChecks)
    differences: list[AuditDifference] = []
    versions: dict[str, str] = {}
