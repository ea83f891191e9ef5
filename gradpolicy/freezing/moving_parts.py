"""Buffers, dropout and embeddings that move in frozen modules, and modules kept still."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor, nn

from gradpolicy.errors import shortened
from gradpolicy.where import plain_name

DROPOUT = "dropout"


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def moving_parts(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """Return the names of buffers that have changed since they were copied, and ``"dropout"``, by module."""
    moving: dict[str, list[str]] = {}
    for raw_name, buffer in model.named_buffers():
        if raw_name not in before or not _same(before[raw_name], buffer):
            module, _, name = plain_name(raw_name).rpartition(".")
            moving.setdefault(module, []).append(name)
    for raw_name, module in model.named_modules():
        if drops(module):
            moving.setdefault(plain_name(raw_name), []).append(DROPOUT)
    return moving


def _same(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta or one.shape != other.shape:
        return one.shape == other.shape
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def moving_warnings(
    frozen: Mapping[str, Collection[str]],
    moving: Mapping[str, list[str]],
    parameters: Iterable[str],
    buffers: Mapping[str, str],
) -> Iterator[str]:
    """Yield a line for each freeze policy that freezes modules whose buffers change or which have dropout.

    Args:
        frozen: For each policy, the parameters that it freezes completely, now or later.
        moving: The result of :func:`moving_parts` for a training step without modules in evaluation mode.
        parameters: The names of all parameters that train or that a policy freezes.
        buffers: The argument ``buffers`` of each policy: "move" or "eval".
    """
    names = list(parameters)
    of_module = {module: set(_own_parameters(module, names)) for module in moving}
    for policy, keys in frozen.items():
        still = {m: parts for m, parts in moving.items() if of_module[m] and of_module[m] <= set(keys)}
        if not still or buffers[policy] == "eval":
            continue
        parts = dict.fromkeys(part for each in still.values() for part in each)
        changed = ", ".join(part for part in parts if part != DROPOUT)
        does = {"buffers": f"changing {changed}"} if changed else {}
        does |= {"dropout": "drawing dropout"} if DROPOUT in parts else {}
        yield (
            f"{policy}: freezing stops parameters, {', '.join(f'not {kind}' for kind in does)}: "
            f"{shortened(list(still))} {'goes' if len(still) == 1 else 'go'} on "
            f"{' and '.join(does.values())} while frozen; with buffers: eval of the policy they stand still"
        )


def _own_parameters(module: str, names: list[str]) -> list[str]:
    """Return the parameters of a module, or of the nearest ancestor that has any."""
    while True:
        inside = [name for name in names if not module or name.startswith(f"{module}.")]
        if inside or not module:
            return inside
        module = module.rpartition(".")[0]


# ---- keeping modules still


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
            trained = [parameter for parameter in module.parameters() if parameter in trainable]
            still = all(parameter in frozen for parameter in trained) if trained else outer
            # A module with several parents is frozen only if it is in all of them.
            found[module] = still and found.get(module, True)
            for child in module.children():
                visit(child, still)

        visit(self._model, False)
        return [module for module, still in found.items() if still]


def renormalised(model: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the tables whose rows an embedding rescales in each forward pass, with the embedding's kind."""
    found: dict[str, str] = {}
    for module in model.modules():
        limit = getattr(module, "max_norm", None)
        if limit is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            names = [name for name, each in parameters.items() if each is module.weight]
            found |= dict.fromkeys(names, f"{type(module).__name__}(max_norm={limit})")
    return found


def drops(module: nn.Module) -> bool:
    """Return True if a module is in training mode and has dropout or stochastic depth."""
    kind = type(module).__name__.lower()
    of_all = "drop" in kind or "stochasticdepth" in kind
    rates = [value for key, value in vars(module).items() if "drop" in key or (of_all and key == "p")]
    return module.training and any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """Replace ``nn.Module.train`` of a module that remains in evaluation mode."""
    return module
