"""Masks that users give: patterns, tensors, files, functions; and the zeros of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_call
from gradpolicy.errors import PolicyError, shown, warn_user
from gradpolicy.masks.base import MaskSource, StaticSource
from gradpolicy.tensors.checkpoint_file import errors_named
from gradpolicy.tensors.mask import Mask, check_mask
from gradpolicy.tensors.pattern import pattern_of
from gradpolicy.tensors.seeded import check_level
from gradpolicy.tensors.sharding import full_tensor, zero_outside
from gradpolicy.where import as_patterns, match_names

FILE_ENDING = ".safetensors"


class Fixed(StaticSource):
    """Constant masks. True = this entry trains.

    Args:
        mask: The entries that train, in one of these forms:

            - ``False`` (the default): nothing; ``True``: everything;
            - a glob or a list of globs: the parameters with these names;
            - a bool tensor that broadcasts to every parameter of the policy;
            - a dict from names or globs to masks; all other parameters train;
            - the path of a ``.safetensors`` file with a mask for each name, in bool or uint8.
        level: ``"2:4"`` or blocks, ``"16x16"``: a pattern that masks in the form of tensors must have.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see
            :class:`~gradpolicy.masks.base.MaskSource`. They have no effect, and give a warning.

    Raises:
        PolicyError: If a name or glob matches no parameter, a mask has the wrong shape, or the file is
            invalid.

    Example:
        >>> import torch
        >>> source = Fixed({"head.*": True, "trunk.weight": torch.tensor([[True], [False]])})
        >>> weights = {"trunk.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)}
        >>> source.setup(weights, seed=0)
        >>> source.masks(step=0, epoch=0)["trunk.weight"].flatten().tolist()
        [True, False]
    """

    def __init__(
        self,
        mask: "bool | str | Path | Iterable[str] | Tensor | Mapping[str, Mask]" = False,
        *,
        level: str = "entry",
        **timetable: Any,
    ) -> None:
        super().__init__(**timetable)
        self.mask = mask
        self.level = check_level("Fixed.level", level)
        if isinstance(mask, Mapping | list | tuple) and not mask:
            raise PolicyError("Fixed.mask: is empty; False means nothing, True everything")

    def prepare(self) -> None:
        """Read and check the masks."""
        given, required = self._read(), pattern_of(self.level)
        patterns: dict[str, str] = {}
        # The last glob that matches a name counts, but the name itself takes precedence.
        for pattern in sorted(given, key=self.parameters.__contains__):
            patterns |= dict.fromkeys(match_names(pattern, self.parameters, "parameter"), pattern)
        for name, parameter in self.parameters.items():
            mask = check_mask(given[patterns[name]], parameter, shown(name)) if name in patterns else True
            self._masks[name] = mask.to(parameter.device) if isinstance(mask, Tensor) else mask
            if required is not None and isinstance(mask, Tensor):
                required.check(name, tuple(parameter.shape))
                if not required.holds(mask.expand(parameter.shape)):
                    raise PolicyError(f"Fixed.level: the mask of {shown(name)} is not {required} everywhere")

    def describe(self) -> dict[str, Any]:
        """Return a short form of the arguments."""
        level = {} if self.level == "entry" else {"level": self.level}
        if isinstance(self.mask, Tensor):
            return {"mask": f"tensor {tuple(self.mask.shape)}", **level}
        return {"mask": f"{len(self.mask)} masks" if isinstance(self.mask, Mapping) else self.mask, **level}

    def _read(self) -> Mapping[str, Mask]:
        """Return the masks by name or glob."""
        mask = self.mask
        if isinstance(mask, Mapping):
            return mask
        if isinstance(mask, bool | Tensor):
            return {"*": mask}
        if isinstance(mask, Path) or (isinstance(mask, str) and mask.endswith(FILE_ENDING)):
            return read_masks(mask)
        patterns = as_patterns(mask)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise PolicyError(
                f"Fixed.mask: expected a bool, globs, a tensor, a dict or a file, got {shown(mask)}"
            )
        matched = match_names(patterns, self.parameters, "parameter")
        return dict.fromkeys(self.parameters, False) | dict.fromkeys(matched, True)


def read_masks(path: str | Path) -> dict[str, Mask]:
    """Read masks from a safetensors file.

    Raises:
        PolicyError: If there is no such file, it is damaged, or it has no mask.
    """
    from safetensors.torch import load_file

    with errors_named(Path(path), "Fixed.mask"):
        tensors = load_file(path)
    if not tensors:
        raise PolicyError(f"Fixed.mask: {path} has no mask")
    return {name: each.bool() if each.dtype == torch.uint8 else each for name, each in tensors.items()}


class Zeros(StaticSource):
    """Keeps entries at 0 that are 0 at the start of training, so that a pruned checkpoint remains sparse.

    Load the checkpoint before the start of training, when the zeros are read. A resumed run uses the zeros of
    the original start. Tensors with one dimension (biases, norms), which are often initialised to 0, always
    train.

    Args:
        **timetable: See :class:`~gradpolicy.masks.base.MaskSource`. It has no effect, and gives a warning.

    Example:
        >>> import torch
        >>> source = Zeros()
        >>> source.setup({"fc.weight": torch.tensor([[0.5, 0.0], [0.0, -1.0]])}, seed=0)
        >>> source.masks(step=0, epoch=0)["fc.weight"].tolist()
        [[True, False], [False, True]]
    """

    # The initial weights of a resumed run may differ.
    remembered = {"_masks": {}}

    def prepare(self) -> None:
        """Read the zeros."""
        for name, parameter in self.parameters.items():
            is_matrix = parameter.dim() > 1 and not parameter.is_meta
            nonzero = full_tensor(parameter.detach()) != 0 if is_matrix else torch.tensor(True)
            self._masks[name] = bool(nonzero.all()) or (nonzero if nonzero.any() else False)

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the masks."""
        if all(mask is True for mask in self._masks.values()):
            warn_user("Zeros: no entry of a matrix is 0, so that all trains")
        return super().masks(step, epoch)

    @torch.no_grad()
    def apply(self) -> None:
        """Set masked entries to zero, which another policy may have modified."""
        for name, mask in self._masks.items():
            if isinstance(mask, Tensor):
                zero_outside(self.parameters[name].detach(), mask)


MaskFunction = Callable[[str, Tensor, int], Mask]


class Function(MaskSource):
    """A function ``(name, parameter, step) -> mask`` as a mask source.

    The function must return the same mask on every rank, so it must not depend on the rank's data.

    Args:
        function: The function. Its ``step`` is the count of the last change of masks.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`.

    Raises:
        PolicyError: If it is not such a function.

    Example:
        >>> import torch
        >>> first_row = Function(lambda name, parameter, step: torch.arange(len(parameter))[:, None] == 0)
        >>> first_row.setup({"weight": torch.zeros(3, 2)}, seed=0)
        >>> first_row.masks(step=0, epoch=0)["weight"].flatten().tolist()
        [True, False, False]
    """

    def __init__(self, function: MaskFunction, **timetable: Any) -> None:
        super().__init__(**timetable)
        if not callable(function):
            raise PolicyError(
                f"Function: expected a function (name, parameter, step) -> mask, got {shown(function)}"
            )
        check_call(f"Function: {_name(function)}", function, "name", None, 0, takes="(name, parameter, step)")
        self.function = function

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the function's mask for each parameter."""
        changed = self.timetable.begins(self.period(step, epoch))
        return {name: self.function(name, parameter, changed) for name, parameter in self.parameters.items()}

    def describe(self) -> dict[str, Any]:
        """Return the function's name."""
        return {"function": _name(self.function)}


def as_source(value: object) -> MaskSource:
    """Convert an object to a mask source.

    Args:
        value: A mask source; a function ``(name, parameter, step) -> mask``; or an argument of
            :class:`Fixed`: a mask tensor, a dict of masks, globs, True or False, or a safetensors file.

    Raises:
        PolicyError: For other objects.
    """
    if isinstance(value, MaskSource):
        return value
    if isinstance(value, bool | str | Path | Tensor | Mapping | list | tuple):
        return Fixed(value)
    if callable(value) and not isinstance(value, type):
        return Function(value)
    raise PolicyError(
        "Freeze.mask: expected a mask source, a function (name, parameter, step) -> mask, a mask tensor or a "
        f"dict of masks, got {shown(value)}"
    )


def _name(function: Callable) -> str:
    """Return the name of a function or partial."""
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", type(inner).__name__)
