"""Tensors for a forward that may be written for NumPy: what it does first with them decides."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradpolicy.flow.containers import map_tensors


class TensorOrArray(Tensor):
    """A tensor that is also taken where NumPy wants an array.

    torch's functions and methods see a tensor, and what they return is one of these again. NumPy's functions,
    and what only arrays have (``astype``, ``copy``, ``x[::-1]``, arrays as indices), see an array, and return
    arrays.
    """

    def __getattr__(self, name: str) -> Any:
        # Only reached for what a tensor does not have.
        if name.startswith("__") or not hasattr(np.ndarray, name):
            raise AttributeError(f"neither a tensor nor an array has {name!r}")
        return getattr(_as_array(self), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array, for ``np.asarray``."""
        array = _as_array(self)
        return array if dtype is None else array.astype(dtype, copy=bool(copy))

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Calls NumPy's element-wise functions on arrays."""
        inputs, kwargs = as_arrays((inputs, kwargs))
        return getattr(function, method)(*inputs, **kwargs)

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        """Calls NumPy's other functions on arrays."""
        args, kwargs = as_arrays((args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Calls torch's functions on tensors; an operator between a tensor and an array is NumPy's."""
        has_array = any(isinstance(value, np.ndarray) for value in args)
        if func is Tensor.__getitem__ and _is_index_of_array(args[1]):
            values, index = as_arrays(args)
            return values[index]
        if func is Tensor.__setitem__:
            # Arrays that are copies, of another device's memory, would not write to the tensor.
            args = tuple(
                torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value
                for value in args
            )
        elif has_array and getattr(func, "__name__", "").startswith("__"):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


def as_arrays(values: Any) -> Any:
    """Gives the tensors in containers as arrays that share their memory where they lie on a CPU."""
    to_array: Any = _as_array
    return map_tensors(to_array, values)


def as_either(values: Any) -> Any:
    """Gives the tensors in containers as ones that are taken for arrays too."""
    return map_tensors(lambda tensor: tensor.as_subclass(TensorOrArray), values)


def as_plain(tensor: Tensor) -> Tensor:
    """Gives a tensor that is nothing else."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, TensorOrArray) else tensor


def _as_array(tensor: Tensor) -> np.ndarray:
    """The values as an array; NumPy has no bfloat16, so these become float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)


def _is_index_of_array(index: Any) -> bool:
    """Whether an index holds an array, or a slice backwards, which torch does not take."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, np.ndarray) or (isinstance(part, slice) and (part.step or 1) < 0) for part in parts
    )
