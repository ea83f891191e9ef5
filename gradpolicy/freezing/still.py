"""Frozen modules without updates of running statistics, or in evaluation mode."""

from collections.abc import Collection
from functools import partial

from torch import Tensor, nn

from gradpolicy.errors import PolicyError
from gradpolicy.where import plain_name


class StillModules:
    """Holds the running statistics of frozen modules, or keeps the modules in evaluation mode.

    A module is frozen if all of its trainable parameters are. A module without parameters, such as a dropout,
    is frozen if its nearest ancestor with parameters is. The state is in attributes of the modules, which
    compiled code reads, and which ``train()`` and ``eval()`` do not change.

    Args:
        model: The model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))
        >>> still = StillModules(nn.Sequential(model, nn.Linear(1, 1)))
        >>> still.keep(set(), set(model.parameters()), set(model.parameters()))
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
        self._held: set[nn.Module] = set()

    def keep(
        self, held: Collection[Tensor], evaluated: Collection[Tensor], trainable: Collection[Tensor]
    ) -> None:
        """Set the modules that are held or in evaluation mode; all others are released.

        Args:
            held: The parameters of modules whose running statistics are held.
            evaluated: The parameters of modules in evaluation mode.
            trainable: All parameters that train at some time.

        Raises:
            PolicyError: If running statistics of an instance norm would be held.
        """
        still = self._within(evaluated, trainable) if evaluated else {}
        # Read before anything changes, since the model itself may thaw too.
        training = self._before.get(self._model, self._model.training)
        for module in [module for module in self._before if module not in still]:
            del module.__dict__["train"]
            module.training = self._before.pop(module) and training
        for module in still:
            self._before.setdefault(module, module.training)
            module.training = False
            module.__dict__["train"] = partial(_stay, module)
        self._hold(self._within({*held, *evaluated}, trainable) if held else {})

    def release(self) -> None:
        """Release all modules."""
        self.keep((), (), ())

    def _hold(self, modules: dict[nn.Module, str]) -> None:
        norms = {module: name for module, name in modules.items() if _has_statistics(module)}
        for module, name in norms.items():
            if isinstance(module, nn.modules.instancenorm._InstanceNorm):
                raise PolicyError(
                    f"Freeze.buffers: 'hold' cannot keep the running statistics of {name!r}, since an "
                    "instance norm without them would not evaluate with them; use 'eval'"
                )
            vars(module)["track_running_stats"] = False
        for module in self._held - norms.keys():
            vars(module)["track_running_stats"] = True
        self._held = set(norms)

    def _within(self, frozen: Collection[Tensor], trainable: Collection[Tensor]) -> dict[nn.Module, str]:
        """Return the modules whose trainable parameters are all frozen, with their names."""
        found: dict[nn.Module, str | None] = {}

        def visit(module: nn.Module, name: str, outer: bool) -> None:
            own = [parameter for parameter in module.parameters() if parameter in trainable]
            still = all(parameter in frozen for parameter in own) if own else outer
            # A module with several parents is frozen only if it is in all of them.
            found[module] = name if still and found.get(module, name) is not None else None
            for key, child in module.named_children():
                visit(child, f"{name}.{key}".lstrip("."), still)

        visit(self._model, "", False)
        return {module: plain_name(name) for module, name in found.items() if name is not None}


def drops(module: nn.Module) -> bool:
    """Return True if a module is in training mode and has dropout or stochastic depth."""
    kind = type(module).__name__.lower()
    of_all = "drop" in kind or "stochasticdepth" in kind
    rates = [value for key, value in vars(module).items() if "drop" in key or (of_all and key == "p")]
    return module.training and any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace ``nn.Module.train`` of a module that remains in evaluation mode."""
    return module


def _has_statistics(module: nn.Module) -> bool:
    return hasattr(module, "track_running_stats") and getattr(module, "running_mean", None) is not None
