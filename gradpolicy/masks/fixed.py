"""Masks that never change: by pattern, by tensor, from a file."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checkpoint_file import check_kind
from gradpolicy.errors import PolicyError, nearest, shown
from gradpolicy.masks.base import StaticSource
from gradpolicy.tensors.mask import Mask, check_mask
from gradpolicy.where import as_patterns, match_names

FILE_ENDING = ".safetensors"


class Fixed(StaticSource):
    """The same masks at all times. True = this entry trains.

    Args:
        mask: What trains, in one of these forms:

            - ``False`` (the default): nothing; ``True``: everything;
            - a glob or a list of globs: the parameters with these names;
            - a bool tensor that broadcasts to every parameter of the policy;
            - a dict from names or globs to masks; what it does not name trains;
            - the path of a ``.safetensors`` file that holds a mask for each name, bool or uint8.
        freeze: The other way round: globs of what does not train; everything else does.
        **timetable: ``every``, ``unit``, ``start``, ``stop``, ``seed``: see
            :class:`~gradpolicy.masks.base.MaskSource`. The masks never change, so that these make no
            difference, which a warning says.

    Raises:
        PolicyError: If a name or glob matches no parameter, a mask does not fit, or the file is none.

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
        freeze: str | Iterable[str] | None = None,
        **timetable: Any,
    ) -> None:
        super().__init__(**timetable)
        if freeze is not None and mask is not False:
            raise PolicyError("Fixed: give either mask (what trains) or freeze (what does not), not both")
        self.mask = mask
        self.frozen = None if freeze is None else as_patterns(freeze)
        key, given = ("mask", mask) if freeze is None else ("freeze", self.frozen)
        if isinstance(given, Mapping | list | tuple) and not given:
            raise PolicyError(f"Fixed.{key}: is empty; False means nothing, True everything")

    def prepare(self) -> None:
        """Reads the masks and checks that they fit."""
        given = self._read()
        for pattern in given:
            if not any(fnmatchcase(name, pattern) for name in self.parameters):
                raise PolicyError(
                    f"Fixed: mask for {shown(pattern)}, which is no parameter of this policy; "
                    f"{nearest(pattern, self.parameters)}"
                )
        self._masks = {name: self._mask_of(name, given) for name in self.parameters}

    def describe(self) -> dict[str, Any]:
        """What was given, in short."""
        if self.frozen is not None:
            return {"freeze": list(self.frozen)}
        shown = f"{len(self.mask)} masks" if isinstance(self.mask, Mapping) else self.mask
        return {"mask": f"tensor {tuple(self.mask.shape)}" if isinstance(self.mask, Tensor) else shown}

    def _read(self) -> dict[str, Mask]:
        """The masks by name or glob."""
        mask = self.mask
        if self.frozen is not None:
            frozen = set(match_names(self.frozen, self.parameters, "parameter"))
            return {name: name not in frozen for name in self.parameters}
        if isinstance(mask, Mapping):
            return dict(mask)
        if isinstance(mask, bool | Tensor):
            return {"*": mask}
        if isinstance(mask, Path) or (isinstance(mask, str) and mask.endswith(FILE_ENDING)):
            return read_masks(mask)
        patterns = as_patterns(mask)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise PolicyError(
                f"Fixed.mask: must be a bool, globs, a tensor, a dict or a file, got {shown(mask)}"
            )
        trained = set(match_names(patterns, self.parameters, "parameter"))
        return {name: name in trained for name in self.parameters}

    def _mask_of(self, name: str, given: Mapping[str, Mask]) -> Mask:
        """The mask under the very name, or else under the last glob that matches it."""
        matching = [pattern for pattern in given if fnmatchcase(name, pattern)]
        if not matching:
            return True
        parameter = self.parameters[name]
        mask = check_mask(given[name if name in given else matching[-1]], parameter, shown(name))
        return mask.to(parameter.device) if isinstance(mask, Tensor) else mask


def read_masks(path: str | Path) -> dict[str, Mask]:
    """Reads masks from a safetensors file.

    Raises:
        PolicyError: If there is no such file, or what it holds are no masks.
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
                f"Fixed: {shown(str(path))} holds {shown(name)} as {tensor.dtype}, not bool or uint8"
            )
    if not tensors:
        raise PolicyError(f"Fixed: {shown(str(path))} holds no mask")
    return {name: tensor.bool() for name, tensor in tensors.items()}
