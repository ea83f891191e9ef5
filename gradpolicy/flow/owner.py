"""What the wrapped modules of one installation share."""

from typing import Any

import torch

from gradpolicy.errors import PolicyError
from gradpolicy.flow.recomputation import checkpoints_above
from gradpolicy.flow.trees import tensors_in


class Owner:
    """Tells one installation from another, and whether it is still there when modules run again.

    Reentrant checkpointing runs modules a second time in the backward pass. If the policies were taken off
    before that, the gradient would silently be plain: then the backward pass is refused.
    """

    def __init__(self) -> None:
        self.installed = True
        self.builds_graph = False
        self.runs_again = False

    def note_checkpoint(self) -> None:
        """Notes, in a module that runs without gradients, whether it will run again for them."""
        if self.builds_graph and not self.runs_again:
            self.runs_again = checkpoints_above() > 0

    def finish(self, result: Any) -> None:
        """At the end of the outermost module: has the backward pass check that the policies are still on."""
        self.builds_graph = False
        if not self.runs_again:
            return
        self.runs_again = False
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._check_installed)

    def _check_installed(self, grads: tuple[torch.Tensor, ...]) -> None:
        if not self.installed:
            raise PolicyError(
                "the policies were removed between forward and backward, and modules under reentrant "
                "checkpointing run again in the backward pass, then without them; remove them after it, or "
                "checkpoint with use_reentrant=False"
            )
