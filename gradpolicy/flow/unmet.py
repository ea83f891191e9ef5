"""Operations that a policy or a block names and that it never met: what to say of them."""

import sys
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from gradpolicy.errors import PolicyError, nearest
from gradpolicy.flow.operation_tables import NEAR
from gradpolicy.flow.operations import operation_names

NO_GRADIENT = "ran only where no gradient is recorded (under torch.no_grad, or on tensors that need none)"


@dataclass(frozen=True)
class Met:
    """What ran where the operations of a policy or block were looked for.

    Args:
        operations: The operations that it names.
        matched: Those that its rule was put on.
        ran: All that ran there, whatever became of them.
        without_gradient: Those that ran where no gradient is recorded.
        taken: Those that an override or policy further in took.
        hiding: Calls that may run some of them within torch.
        excused: Those that ran while the policy was off.
        any_of: Whether one of them is enough, as of the usual ones of ``StraightThrough``.
    """

    operations: tuple[str, ...] = ()
    matched: Collection[str] = ()
    ran: Collection[str] = ()
    without_gradient: Collection[str] = ()
    taken: Collection[str] = ()
    hiding: Collection[str] = ()
    excused: Collection[str] = ()
    any_of: bool = False

    @property
    def unmet(self) -> tuple[str, ...]:
        """The operations that were to be met and were not."""
        missing = tuple(
            name for name in self.operations if name not in self.matched and name not in self.excused
        )
        return () if self.any_of and len(missing) < len(self.operations) else missing

    def message(self) -> str:
        """What to say of the unmet operations; empty where there are none."""
        unmet = self.unmet
        taken = [name for name in unmet if name in self.taken]
        idle = [name for name in unmet if name in self.without_gradient and name not in taken]
        never = [name for name in unmet if name not in taken and name not in idle]
        parts = []
        if taken:
            parts.append(f"{_operations(taken)} taken by another override or policy further in")
        if idle:
            parts.append(f"{'operation' if len(idle) == 1 else 'operations'} {_quoted(idle)} {NO_GRADIENT}")
        if never and not (self.any_of and parts):
            parts.append(f"{_operations(never)} never met; {self._instead(never)}")
        return "; ".join(parts)

    def _instead(self, never: list[str]) -> str:
        """What may have been meant in the place of what never ran."""
        if any(name in self.ran for name in never):
            return "it ran only with arguments that make it another operation"
        likely = dict.fromkeys(name for operation in never for name in NEAR.get(operation, ()))
        near = [name for name in likely if name in self.ran][:4]
        if near:
            return f"near it, {_quoted(near)} ran there: name what is meant"
        if self.hiding:
            return f"it may run within {_quoted(self.hiding)}, which cannot be seen into"
        known = sorted(set(self.ran) & set(operation_names()))
        if not known:
            return "nothing ran there that a rule could be put on"
        return nearest(never[0], known).replace("valid names", "what ran there")


def check_met(name: str, met: Met, *, may_come: bool = False) -> str:
    """Makes sure, after a step, that operations which a policy names ran where it acts.

    Args:
        name: The policy's name.
        met: What it met.
        may_come: Whether an operation that ran where no gradient is recorded may still get one.

    Returns:
        What to say of those that were not met, if others were; empty where all were.

    Raises:
        PolicyError: If none of them was.
    """
    message = met.message()
    some = set(met.operations) - set(met.unmet) or (may_come and set(met.unmet) & set(met.without_gradient))
    if message and not some:
        raise PolicyError(f"policy.{name}.ops: {message}")
    return message


def tell(subject: str, met: Met, *, strict: bool, stacklevel: int) -> None:
    """Says at the end of a block that operations were not met.

    Nothing is said of what an override or policy further in took, which is how these nest, nor while an
    exception is on its way, which is the news then.

    Args:
        subject: Whose operations they are.
        met: What was met.
        strict: Raise, instead of giving a warning.
        stacklevel: As :func:`warnings.warn` counts it, from the caller.

    Raises:
        PolicyError: Where ``strict``.
    """
    message = replace(met, matched={*met.matched, *met.taken}).message()
    if not message or sys.exception() is not None:
        return
    if strict:
        raise PolicyError(f"{subject}: {message}")
    warnings.warn(f"{subject}: {message}", stacklevel=stacklevel + 1)


def _operations(names: list[str]) -> str:
    return f"operation {_quoted(names)} was" if len(names) == 1 else f"operations {_quoted(names)} were"


def _quoted(names: Iterable[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last
