"""What the files of a run hold, as models: whatever reads one reads it by its model.

Those of ``result.json`` and ``run.json`` are :class:`gradpolicy.insight.results.ResultFile` and
:class:`gradpolicy.lightning.runs.RunRecord`. What files of older versions lack has a default.
"""

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

# What a float counts exactly.
Count = Annotated[int, Field(ge=0, le=2**53)]
# A measurement; null where there was none.
Number = bool | Annotated[float, Field(allow_inf_nan=False)] | None
Numbers = Number | list[Number]
Word = str | None
Flags = bool | None | list[bool | None]


class PlanRow(BaseModel):
    """What ``plan.json`` says of a policy."""

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
    """What ``plan.json`` says of a module."""

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


# What a line of the record has, by its kind.
NEEDED = {"freeze": ("policy", "parameter", "entries", "active"), "flow": ("policy",)}


class RecordLine(BaseModel):
    """A line of ``record.jsonl``; one of the kind ``freeze`` has lists, with a value for each parameter."""

    kind: str
    step: Count
    epoch: Count
    policy: Word = None
    phase: Word = None
    layer: Word = None
    frozen_state: Word | list[Word] = None
    parameter: Word | list[str] = None
    changed: Flags = None
    entries: Numbers = None
    active: Numbers = None
    flipped: Numbers = None
    state_bytes: Numbers = None
    adam_bytes: Numbers = None
    age_min: Numbers = None
    age_q25: Numbers = None
    age_median: Numbers = None
    age_q75: Numbers = None
    age_max: Numbers = None
    weight_norm: Numbers = None
    update_norm: Numbers = None
    gradient_norm_before: Numbers = None
    gradient_norm_after: Numbers = None
    operations: Numbers = None
    zeros_passed: Numbers = None

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        for name in NEEDED.get(self.kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is needed where the kind is {self.kind}")
        return self


class StopChecks(BaseModel):
    """How often the audit looked at stopped gradients, and how often they were not zero."""

    checked: Count = 0
    nonzero: Count = 0


class OperationChecks(BaseModel):
    """How often the audit compared the operations of a batch, and how often they differed."""

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
