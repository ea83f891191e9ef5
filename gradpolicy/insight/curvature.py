r"""Curvature under policies: the derivative of the gradient that training uses.

``g(θ)`` is the gradient of a backward pass at the parameters θ, including policies. The functions of this
module estimate properties of its derivative ``J = ∂g/∂θ`` by products with vectors.

- *If no rule is active* when the loss and its gradient are computed, J is the Hessian, and autograd computes
  ``J v`` exactly.
- *If a rule is active*, J is the derivative of the gradient with the rule, which need not be symmetric.
  Autograd through the backward pass would apply the rule in both passes. So central differences are used, ``J
  v ≈ (g(θ + h v) − g(θ − h v)) / 2h`` with ``h = u^(1/3) · max(1, ‖θ‖) / ‖v‖``. They are also used if
  autograd has no second derivative: in compiled code, and for some kernels.

u is the rounding unit of the parameters' dtype (``torch.finfo(dtype).eps``; the coarsest if they differ). The
power 1/3 balances the error of the formula, of order h², and that of rounding, of order u/h: Nocedal and
Wright 2006, "Numerical Optimization", section 8.1. The step is proportional to ‖θ‖. If g is smooth over the
step, about ten digits are correct in float64, and about four in float32. If g is discontinuous within it, as
at the kink of a ReLU, the differences include the jump and autograd does not. In float32 a ReLU network has
many kinks within the step, and the products are noisy: use float64, where the step is a thousand times
shorter, or smooth activations.

For every function:

- The loss is evaluated once or several times, each time with the same state of torch's random generators, so
  that dropout drops the same units, and with the same buffers in each module that it calls. Afterwards
  parameters, their ``.grad``, buffers and generators are restored bit for bit, also if the loss raises an
  exception. Random numbers of Python and NumPy, and other side effects of the loss, are not handled.
- Random vectors come from the given generator, or from one seeded by torch's default generator, whose state
  must be the same on every process. Under DDP each process uses the gradient of its own loss.
- Sharded parameters (DTensor, FSDP2) are refused: use a copy of the model in one process.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow.policy_report import ReportRow
from gradpolicy.planning.first_step import graph_nodes
from gradpolicy.tensors.sharding import is_sharded

Loss = Callable[[], Tensor]
Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error.

    Attributes:
        value: The estimate.
        standard_error: The standard error of the mean over the samples, without the error of finite
            differences.
    """

    value: float
    standard_error: float


def gradient_at(loss: Loss, parameters: Named, delta: Named) -> dict[str, Tensor]:
    """Return the gradient at shifted parameters, ``g(θ + δ)``, under the active policies.

    Args:
        loss: A function that computes the loss, a scalar, from the current values of the parameters.
        parameters: The parameters by name.
        delta: The shifts by name; parameters that are not named are not shifted.

    Returns:
        The gradient by name, in the parameters' shapes and dtypes; zeros for unused parameters.

    Raises:
        PolicyError: For a sharded parameter, or a wrong name or shape in ``delta``.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> gradient_at(lambda: (x**2).sum(), {"x": x}, {"x": torch.tensor([0.0, 1.0])})
        {'x': tensor([2., 6.])}
    """
    field = _GradientField(loss, parameters, delta=delta)
    with field.moved(delta):
        return field.gradient()


def hvp(loss: Loss, parameters: Named, vector: Named) -> dict[str, Tensor]:
    """Return the product of a vector with the derivative of the gradient: ``J v``; without a policy, ``H v``.

    Args:
        loss: See :func:`gradient_at`.
        parameters: The parameters by name.
        vector: The vector by parameter name; zero for parameters that are not named.

    Returns:
        The product by name, in the parameters' shapes and dtypes.

    Raises:
        PolicyError: See :func:`gradient_at`; for finite differences in less than float32.

    Example:
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
        >>> product = hvp(lambda: (x**3).sum(), {"x": x}, {"x": torch.ones(2, dtype=torch.float64)})
        >>> product["x"].round(decimals=6)
        tensor([ 6., 12.], dtype=torch.float64)
    """
    return _GradientField(loss, parameters, vector=vector).derivative(vector)


def trace(
    loss: Loss, parameters: Named, samples: int = 32, generator: torch.Generator | None = None
) -> Estimate:
    """Estimate the trace of J: the mean of ``zᵀ J z`` over random signs z.

    Args:
        loss: See :func:`gradient_at`.
        parameters: The parameters by name.
        samples: The number of vectors z, at least 2.
        generator: The random generator; None: one seeded by torch's default generator.

    Raises:
        PolicyError: See :func:`hvp`; for fewer than 2 samples.

    Source: Hutchinson 1990, Communications in Statistics 19(2).
    """
    products = _products(loss, parameters, samples, generator)
    return _mean([_dot(vector, product) for vector, product in products])


def frobenius_norm(
    loss: Loss, parameters: Named, samples: int = 32, generator: torch.Generator | None = None
) -> Estimate:
    """Estimate the Frobenius norm of J: the square root of the mean of ``‖J z‖²`` over random signs z.

    Its standard error is that of the mean, over twice the norm. Arguments and errors are those of
    :func:`trace`.

    Source: Hutchinson's estimator of the trace of ``JᵀJ``.
    """
    square = _mean([_dot(product, product) for _, product in _products(loss, parameters, samples, generator)])
    norm = math.sqrt(square.value)
    return Estimate(norm, square.standard_error / (2 * norm) if norm else 0.0)


def _products(
    loss: Loss, parameters: Named, samples: int, generator: torch.Generator | None
) -> Iterator[tuple[Named, Named]]:
    """Yield vectors of random signs, each with its product with J."""
    check_integer("curvature: samples", samples, least=2)
    # torch's default generator is reset for each evaluation.
    generator = generator or torch.Generator("cpu").manual_seed(int(torch.randint(2**62, (), device="cpu")))
    field = _GradientField(loss, parameters)
    for _ in range(samples):
        # The same on every device.
        vector = {
            name: (torch.randint(0, 2, p.shape, generator=generator, device=generator.device) * 2 - 1).to(p)
            for name, p in parameters.items()
        }
        yield vector, field.derivative(vector)


class _GradientField:
    """The gradient of a loss as a function of its parameters.

    Args:
        loss: A function that computes the loss.
        parameters: The parameters by name.
        **like: Tensors by parameter name, which must have the parameters' shapes.
    """

    def __init__(self, loss: Loss, parameters: Named, **like: Named) -> None:
        _check(parameters, **like)
        self.loss = loss
        self.parameters = dict(parameters)
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def derivative(self, vector: Named) -> dict[str, Tensor]:
        """Return ``J v``: by autograd if no rule is active, otherwise by central differences."""
        if self._graph is not None:
            names = [name for name, part in self._graph.items() if part.requires_grad and name in vector]
            parts, along = [self._graph[name] for name in names], [vector[name] for name in names]
            try:
                return self._grad(parts, along, retain_graph=True)
            except RuntimeError:
                # A kernel without a second derivative, or compiled code.
                self._graph = None
        return self._difference(vector)

    @cached_property
    def _graph(self) -> dict[str, Tensor] | None:
        """Return the gradient with its graph; None if a rule was active, or there is no graph."""
        before = ReportRow.uses
        with self.moved({}):
            gradient = self.gradient(create_graph=True)
        # Autograd treats the gradient of a function that is once_differentiable as constant.
        ends = any(node.name().endswith("::Error") for node in graph_nodes(gradient.values()))
        return gradient if ReportRow.uses == before and not ends else None

    def _difference(self, vector: Named) -> dict[str, Tensor]:
        for name, parameter in self.parameters.items():
            if parameter.dtype not in (torch.float32, torch.float64):
                raise PolicyError(f"curvature: parameter {name!r} is {parameter.dtype}; float32 is needed")
        length = _norm(vector)
        if length == 0:
            return {name: torch.zeros_like(value) for name, value in self.values.items()}
        unit = max(torch.finfo(parameter.dtype).eps for parameter in self.parameters.values())
        step = unit ** (1 / 3) * max(1.0, _norm(self.values)) / length
        sides = []
        for shift in (step, -step):
            with self.moved({name: shift * part for name, part in vector.items()}):
                sides.append(self.gradient())
        return {name: (sides[0][name] - sides[1][name]) / (2 * step) for name in self.parameters}

    @contextmanager
    def moved(self, delta: Named) -> Iterator[None]:
        """Shift the parameters within the block, and restore everything that evaluating the loss changes."""
        devices = {p.device for p in self.parameters.values() if p.device.type != "cpu"}
        kind = next((device.type for device in devices), "cuda")
        with torch.random.fork_rng(devices=devices, device_type=kind), _buffers_restored():
            # By .data, hidden from autograd, since the values are restored afterwards.
            try:
                for name, part in delta.items():
                    self.parameters[name].data.copy_(self.values[name] + part)
                yield
            finally:
                for name in delta:
                    self.parameters[name].data.copy_(self.values[name])

    @torch.enable_grad()
    def gradient(self, create_graph: bool = False) -> dict[str, Tensor]:
        """Return the gradient at the current values of the parameters."""
        return self._grad([self.loss()], create_graph=create_graph)

    def _grad(self, outputs: list[Tensor], vectors: Any = None, **how: bool) -> dict[str, Tensor]:
        inputs, how = list(self.parameters.values()), {"allow_unused": True, "materialize_grads": True, **how}
        return dict(zip(self.parameters, torch.autograd.grad(outputs, inputs, vectors, **how), strict=True))


@contextmanager
def _buffers_restored() -> Iterator[None]:
    """Restore the buffers of every module that is called within the block."""
    before: dict[int, tuple[Tensor, Tensor]] = {}

    def note(module: nn.Module, inputs: Any) -> None:
        for buffer in module.buffers():
            if id(buffer) not in before:
                before[id(buffer)] = buffer, buffer.detach().clone()

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
        for buffer, value in before.values():
            buffer.data.copy_(value)


def _check(parameters: Named, **like: Named) -> None:
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            raise PolicyError(f"curvature: parameters[{name!r}] is sharded: use a copy in one process")
    for key, given in like.items():
        for name, tensor in given.items():
            if name not in parameters:
                raise unknown("parameter", name, parameters, key=f"curvature: {key}")
            if tensor.shape != parameters[name].shape:
                raise PolicyError(f"curvature: {key}[{name!r}] has shape {tuple(tensor.shape)}")


def _dot(one: Named, other: Named) -> float:
    """Return the inner product over all parameters, in float64."""
    return sum(float((one[name].double() * other[name].double()).sum()) for name in one)


def _norm(vector: Named) -> float:
    return math.sqrt(_dot(vector, vector))


def _mean(found: list[float]) -> Estimate:
    """Return the mean, with the standard error of the mean."""
    values = torch.tensor(found, dtype=torch.float64, device="cpu")
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(found))))
