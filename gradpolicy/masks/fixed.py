"""Constant masks from patterns, tensors or a file."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.base import StaticSource
from gradpolicy.tensors.checkpoint_file import check_kind
from gradpolicy.tensors.mask import Mask, check_mask
from gradpolicy.tensors.pattern import pattern_of
from gradpolicy.tensors.seeded import check_level
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
        PolicyError: If there is no such file, or it does not contain masks.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_kind(Path(path), "Fixed.mask")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"Fixed: cannot read masks from {shown(str(path))}: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.bool, torch.uint8):
            raise PolicyError(
                f"Fixed: {shown(str(path))} has {shown(name)} as {tensor.dtype}, not bool or uint8"
            )
    if not tensors:
        raise PolicyError(f"Fixed: {shown(str(path))} has no mask")
    return {name: tensor.bool() for name, tensor in tensors.items()}
