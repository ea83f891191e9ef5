"""Operations that a policy or a block names and that it never met: what to say of them."""

import sys
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gradpolicy.errors import PolicyError, nearest
from gradpolicy.flow.near import NEAR
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
            parts.append(f"{_quoted(taken)} was taken by an override or policy within")
        if idle:
            parts.append(f"{_quoted(idle)} {NO_GRADIENT}")
        if never and not (self.any_of and parts):
            parts.append(f"{_quoted(never)} {self._never(never)}")
        return f"operation {'; '.join(parts)}" if parts else ""

    def _never(self, never: list[str]) -> str:
        if any(name in self.ran for name in never):
            return "ran only with arguments that make it another operation"
        likely = dict.fromkeys(name for operation in never for name in NEAR.get(operation, ()))
        near = [name for name in likely if name in self.ran][:4]
        if near:
            hint = f"near it, {_quoted(near)} ran there: name what is meant"
        elif self.hiding:
            hint = f"it may run within {_quoted(self.hiding)}, which cannot be seen into"
        else:
            known = set(self.ran) & set(operation_names())
            hint = nearest(never[0], known) if known else "no operation ran there"
        return f"was never met; {hint}"


def tell(subject: str, message: str, *, strict: bool, stacklevel: int) -> None:
    """Says at the end of a block that operations were not met.

    Nothing is said while an exception is on its way: that is the news then.

    Args:
        subject: Whose operations they are.
        message: What :meth:`Met.message` gave; nothing is said if it is empty.
        strict: Raise, instead of giving a warning.
        stacklevel: As :func:`warnings.warn` counts it, from the caller.

    Raises:
        PolicyError: Where ``strict``.
    """
    if not message or sys.exception() is not None:
        return
    if strict:
        raise PolicyError(f"{subject}: {message}")
    warnings.warn(f"{subject}: {message}", stacklevel=stacklevel + 1)


def _quoted(names: Iterable[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last
