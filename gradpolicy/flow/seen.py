"""Records of how the rules of policies were used."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradpolicy.errors import warn_user
from gradpolicy.flow.tracing import runs_while_tracing


class GradientNorms:
    """Sums of squared gradient norms, and of zeros. The tensors stay on their device until they are read.

    Attributes:
        before: The squared norm of the gradients before the rule.
        after: The squared norm of the gradients after the rule.
        zeros: The number of zeros in the gradients after the rule.
        entries: The number of entries of these gradients; 0 if there was none.
    """

    def __init__(self) -> None:
        self.before = self.after = torch.zeros((), device="cpu")
        self.zeros, self.entries = torch.zeros((), dtype=torch.int64, device="cpu"), 0

    def measure(self, before: Any, after: Iterable[Tensor | None]) -> None:
        """Add a gradient, or a tuple of gradients, before and after the rule."""
        with torch.no_grad():
            passed = [tensor for tensor in after if tensor is not None]
            for tensor in before if isinstance(before, tuple) else (before,):
                if tensor is not None:
                    self.before = _square(tensor) + self.before
            for tensor in passed:
                self.after = _square(tensor) + self.after
                self.zeros = tensor.numel() - tensor.count_nonzero() + self.zeros
                self.entries += tensor.numel()


@dataclass(eq=False)
class Seen:
    """A record of how a rule was used. The report, the warnings and the plan read it.

    A *place* is a side of a module, the path across a module, or a parameter.

    Args:
        matched: For each operation and place, how often the rule was applied.
        ran: The operations that ran without the rule.
        without_gradient: The operations and places at which no gradient was recorded.
        off: The places that ran while the rule was inactive.
        discrete: The operations with bool or integer results, which are not matched before a cast.
        lost: Pairs of an operation with a discrete result and the function that lost its gradient.
        opaque: Pairs of a call within which the rule cannot act and the reason.
        taken: The operations on which an inner override or policy acted instead.
        forward: ``"on"`` and ``"off"`` if a forward pass ran while the rule was active or inactive, and
            ``"compiled"`` if code was compiled, which is counted once per compilation.
        calls: The number of calls of each operation in the current forward, for policies with ``calls=``;
            None outside of the forward.
        norms: Gradient norms before and after the rule; None if they are not measured.
    """

    matched: dict[str, int] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    without_gradient: set[str] = field(default_factory=set)
    off: set[str] = field(default_factory=set)
    discrete: set[str] = field(default_factory=set)
    lost: set[tuple[str, str]] = field(default_factory=set)
    opaque: set[tuple[str, str]] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    forward: set[str] = field(default_factory=set)
    calls: dict[str, int | None] = field(default_factory=dict)
    norms: GradientNorms | None = None

    # How often eager code applied any rule. Global, since a caller with only a loss function, such as
    # gradpolicy.curvature, has no reference to the policies that act in it.
    uses: ClassVar[int] = 0

    @runs_while_tracing
    def add(self, kind: str, item: Any, warning: str = "", is_traced: bool = False) -> None:
        """Add an item to one of the fields, and give a warning if it is new there.

        In compiled code this runs once, while the code is traced.
        """
        if is_traced:
            self.forward.add("compiled")
        if kind == "matched":
            count = self.matched[item] = self.matched.get(item, 0) + 1
            is_new = count == 1
            Seen.uses += not is_traced
        else:
            items: set = getattr(self, kind)
            is_new = item not in items
            items.add(item)
        if is_new and warning:
            warn_user(warning)

    @runs_while_tracing
    def warn_if_discrete(self, subject: str, message: str) -> None:
        """Warn of operations whose discrete results never became floating-point."""
        for operation in sorted(self.discrete - self.matched.keys()):
            warn_user(f"{subject}: the result of {operation!r} {message}")


def _square(tensor: Tensor) -> Tensor:
    """Return the squared norm of a gradient."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) ** 2
