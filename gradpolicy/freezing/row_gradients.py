"""Weight gradients that are computed for the rows that train, and are zero elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from gradpolicy.tensors.mask import Mask, as_tensor
from gradpolicy.tensors.seeded import RandomMask
from gradpolicy.tensors.sharding import full_tensor, is_sharded


class RowGradients:
    """Restricts the weight gradients of a model's linear and convolution modules to rows that train.

    ``p.grad`` is an ordinary dense tensor. A weight that is used elsewhere, such as by an embedding or
    ``F.linear``, gets its ordinary gradient there. So it does in convolutions with groups, with a padding
    like "same" or of other values than zeros, in modules whose ``forward`` is not PyTorch's, under a
    ``TorchFunctionMode``, and in forward-mode differentiation.

    Args:
        model: The model. Modules that are added later get ordinary gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[Tensor, list[nn.Module]] = {}
        for module in model.modules():
            if _product_of(module) is not None:
                self._modules.setdefault(module.get_parameter("weight"), []).append(module)
        self._forwards: list[_RowForward] = []

    @property
    def active(self) -> bool:
        """True if some weight gradient is restricted to rows."""
        return bool(self._forwards)

    def set(self, masks: Mapping[Tensor, Mask]) -> None:
        """Compute the gradients of the rows that train under these masks; other gradients are ordinary."""
        before, self._forwards = self._forwards, []
        for parameter, modules in self._modules.items():
            rows = _active_rows(masks.get(parameter, True), parameter)
            if rows is not None:
                self._forwards += [each for module in modules if (each := _with_rows(module, rows))]
        for each in before:
            if each not in self._forwards:
                each.remove()

    def release(self) -> None:
        """Compute ordinary gradients from now on."""
        self.set({})
        self._modules = {}


def _active_rows(mask: Mask, parameter: Tensor) -> Tensor | None:
    """Return the indices of the rows that train under a mask of rows; None for another mask."""
    if isinstance(mask, bool) or parameter.is_meta or (isinstance(mask, RandomMask) and mask.level != "row"):
        return None
    flags = as_tensor(mask, parameter.shape, parameter.device)
    if flags.shape != (*parameter.shape[:1], *[1] * (parameter.dim() - 1)):
        return None
    return full_tensor(flags).flatten().nonzero().flatten()


class _RowForward:
    """The ``forward`` of a module whose weight gradient is restricted to rows; a copy's is not."""

    def __init__(self, module: nn.Module, product: _Product) -> None:
        self.module, self.product = module, product
        self.rows: Tensor | None = None

    def __call__(self, input: Tensor) -> Tensor:
        rows, weight, device = self.rows, self.module.weight, input.device.type
        if rows is None or not _can_restrict(input, weight):  # type: ignore[arg-type]
            return type(self.module).forward(self.module, input)
        if _is_cast(input):
            input = input.to(torch.get_autocast_dtype(device))
        return self.product(self.module, input, rows.to(input.device))

    def __reduce__(self) -> Any:
        return partial, (type(self.module).forward, self.module)

    def remove(self) -> None:
        """Compute the ordinary gradient, also where another function has replaced and calls this one."""
        self.rows = None
        if vars(self.module).get("forward") is self:
            del self.module.forward


def _with_rows(module: nn.Module, rows: Tensor) -> _RowForward | None:
    """Restrict the weight gradient of a module to rows, unless something else has replaced its forward."""
    forward, product = vars(module).get("forward"), _product_of(module)
    if product is None:
        return None
    if forward is None or (isinstance(forward, partial) and forward.func is type(module).forward):
        module.forward = forward = _RowForward(module, product)
    if not isinstance(forward, _RowForward):
        return None
    forward.rows = rows
    return forward


def _can_restrict(input: Tensor, weight: Tensor) -> bool:
    """Return True if a weight has a gradient of rows in this call."""
    if not torch.is_grad_enabled() or not weight.requires_grad or has_torch_function((input, weight)):
        return False
    is_unbatched = weight.dim() > 2 and input.dim() != weight.dim()
    if is_sharded(weight) or weight.is_complex() or input.is_nested or is_unbatched:
        return False
    return torch.compiler.is_compiling() or not (_is_traced() or _is_dual(input) or _is_dual(weight))


def _is_traced() -> bool:
    return torch.jit.is_tracing()  # type: ignore[attr-defined]


def _is_dual(tensor: Tensor) -> bool:
    """Return True if a tensor has a tangent of forward-mode differentiation."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def _is_cast(input: Tensor) -> bool:
    """Return True if autocast casts the input of a product; then only the cast one is saved."""
    # Devices without values have no autocast, for which torch raises an error.
    if input.is_meta or not torch.is_autocast_enabled(input.device.type):
        return False
    return input.is_floating_point() and input.dtype != torch.float64


# ---- products


_Product = Callable[[Any, Tensor, Tensor], Tensor]


def _linear(module: nn.Linear, input: Tensor, rows: Tensor) -> Tensor:
    matrix = input.reshape(-1, input.shape[-1])
    output = _OfRows.apply(matrix, module.weight, module.bias, rows, None)
    # Not in the function: its output must not be a view, which in-place functions could not change.
    return output.reshape(*input.shape[:-1], output.shape[-1])


def _convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, input: Tensor, rows: Tensor) -> Tensor:
    settings = (module.stride, module.padding, module.dilation, False, (0,) * len(module.stride), 1)
    return _OfRows.apply(input, module.weight, module.bias, rows, settings)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _product_of(module: nn.Module) -> _Product | None:
    """Return the product with rows of a module; None if there is none."""
    kind = type(module)
    # The parameters of a ScriptModule have no method get, and what is in it runs outside Python.
    if isinstance(module, torch.jit.ScriptModule) or not isinstance(
        module._parameters.get("weight"), nn.Parameter
    ):
        return None
    if kind.forward is nn.Linear.forward:
        return _linear
    if kind.forward in [each.forward for each in _CONVOLUTIONS] and _is_of_torch(kind):
        pads_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _convolution if module.groups == 1 and pads_zeros else None
    return None


def _is_of_torch(kind: type) -> bool:
    """Return True if no class from elsewhere may change what a convolution's forward calls."""
    return all(each.__module__.split(".")[0] in ("torch", "builtins") for each in kind.__mro__)


class _OfRows(torch.autograd.Function):
    """A product with a weight that computes only some rows of the weight's gradient.

    The settings are the arguments of ``torch.ops.aten.convolution`` after the bias; None for a linear product
    of a matrix.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, settings: Any) -> Tensor:
        if settings is None:
            return F.linear(input, weight, bias)
        # Autocast does not reach torch.ops.aten.convolution.
        return (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3](input, weight, bias, *settings[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        input, weight, bias, rows, ctx.settings = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(input, weight, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, weight, rows = ctx.saved_tensors
        settings, dtype = ctx.settings, gradient.dtype
        data, cast = input.to(dtype), weight.to(dtype)  # autocast may have cast them in the forward pass
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _gradient(0, gradient, data, cast, settings).to(input.dtype)
        if ctx.needs_input_grad[1]:
            # Of the weight's rows only the shape counts.
            own_rows = gradient.index_select(1, rows), data, cast[: len(rows)]
            values = _gradient(1, *own_rows, settings).to(weight.dtype)
            of_weight = values.new_zeros(weight.shape).index_put_((rows,), values)
        if ctx.needs_input_grad[2]:
            others = [dim for dim in range(gradient.dim()) if dim != 1]
            of_bias = gradient.sum(others).to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None, None


def _gradient(index: int, gradient: Tensor, input: Tensor, weight: Tensor, settings: Any) -> Tensor:
    """Return the gradient of the input (index 0) or of the weight (1) of a product."""
    if settings is None:
        return gradient @ weight if index == 0 else gradient.t() @ input
    mask = [index == 0, index == 1, False]
    return torch.ops.aten.convolution_backward(gradient, input, weight, None, *settings, mask)[index]
