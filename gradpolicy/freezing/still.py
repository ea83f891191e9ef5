"""Frozen modules in evaluation mode."""

from collections.abc import Collection, Mapping
from functools import partial

from torch import Tensor, nn

from gradpolicy.errors import PolicyError


class StillModules:
    """Keeps frozen modules in evaluation mode.

    A module is frozen if all of its trainable parameters are. A module without parameters, such as a dropout,
    is frozen if its nearest ancestor with parameters is. The state is in attributes of the modules, which
    compiled code reads, and which ``train()`` and ``eval()`` do not change.

    Args:
        model: The model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))
        >>> still = StillModules(nn.Sequential(model, nn.Linear(1, 1)))
        >>> still.keep(set(model.parameters()), set(model.parameters()))
        >>> _ = model.train()
        >>> model[1].training
        False
        >>> still.release()
        >>> model[1].training
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The modules in evaluation mode, with their previous value of `training`.
        self._before: dict[nn.Module, bool] = {}

    def keep(self, evaluated: Collection[Tensor], trainable: Collection[Tensor]) -> None:
        """Set the modules in evaluation mode; all others are released.

        Args:
            evaluated: The parameters of modules in evaluation mode.
            trainable: All parameters that train at some time.
        """
        still = self._within(evaluated, trainable) if evaluated else ()
        # Read before anything changes, since the model itself may thaw too.
        training = self._before.get(self._model, self._model.training)
        for module in [module for module in self._before if module not in still]:
            del module.__dict__["train"]
            module.training = self._before.pop(module) and training
        for module in still:
            self._before.setdefault(module, module.training)
            module.training = False
            module.__dict__["train"] = partial(_stay, module)

    def release(self) -> None:
        """Release all modules."""
        self.keep((), ())

    def _within(self, frozen: Collection[Tensor], trainable: Collection[Tensor]) -> list[nn.Module]:
        """Return the modules whose trainable parameters are all frozen."""
        found: dict[nn.Module, bool] = {}

        def visit(module: nn.Module, outer: bool) -> None:
            own = [parameter for parameter in module.parameters() if parameter in trainable]
            still = all(parameter in frozen for parameter in own) if own else outer
            # A module with several parents is frozen only if it is in all of them.
            found[module] = still and found.get(module, True)
            for child in module.children():
                visit(child, still)

        visit(self._model, False)
        return [module for module, still in found.items() if still]


def check_not_renormalised(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Check that no embedding writes to its weight in the forward pass.

    Raises:
        PolicyError: If one does.
    """
    for module in model.modules():
        limit = getattr(module, "max_norm", None)
        names = [name for name, each in parameters.items() if each is getattr(module, "weight", None)]
        if names and limit is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise PolicyError(
                f"{names[0]}: {type(module).__name__}(max_norm={limit}) rescales rows in each forward pass, "
                "frozen or not; expected max_norm=None"
            )


def drops(module: nn.Module) -> bool:
    """Return True if a module is in training mode and has dropout or stochastic depth."""
    kind = type(module).__name__.lower()
    of_all = "drop" in kind or "stochasticdepth" in kind
    rates = [value for key, value in vars(module).items() if "drop" in key or (of_all and key == "p")]
    return module.training and any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace ``nn.Module.train`` of a module that remains in evaluation mode."""
    return module
