"""The base classes of mask sources."""

import dataclasses
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gradpolicy.checks import check_integer
from gradpolicy.errors import NAMED, PolicyError, refuse_unknown_arguments, warn_user
from gradpolicy.schedules import Constant
from gradpolicy.tensors.checkpoint_file import restored
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import full_tensor
from gradpolicy.when import Timetable

# The defaults of the arguments that all sources have. A repr omits arguments with these values.
_DEFAULTS = {"every": None, "unit": "step", "start": 0, "stop": None, "seed": None}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Parameters that are frozen and thawed together.

    Attributes:
        name: The name of their module, or the names of several.
        parameters: The names of the parameters in model order.
        numbered: True for a block, such as ``layers.3``; False for an embedding or head.
    """

    name: str
    parameters: tuple[str, ...]
    numbered: bool


class MaskSource:
    """Base class of sources, which return the masks of an effective optimizer step. True = this entry trains.

    The masks may change at the counts ``start``, ``start + every``, ``start + 2 · every``, … below
    ``stop``. Before ``start`` the first masks are used, from ``stop`` on the last ones. (To train all entries
    at other times, set the policy's ``when``.) Masks are a function of (seed, step, parameter name), for some
    sources also of weights and averaged gradients, so that all ranks and resumed runs agree.

    A subclass defines :meth:`masks`, usually in terms of :meth:`period`. All other methods are optional.

    Args:
        every: The number of steps (or epochs) between changes; None: the masks are chosen once.
        unit: ``"step"`` (effective optimizer steps) or ``"epoch"``.
        start: The count of the first change.
        stop: The count from which the masks no longer change; None means never.
        seed: The seed of the source; None means the seed of the run.
        **wrong: Other arguments, which raise an error with the nearest valid names.

    Raises:
        PolicyError: For an unknown argument or unit, or an impossible timetable.

    Example:
        >>> class EvenSteps(MaskSource):
        ...     def masks(self, step, epoch):
        ...         return {name: self.period(step, epoch) % 2 == 0 for name in self.parameters}
        >>> source = EvenSteps(every=5)
        >>> [source.period(step, epoch=0) for step in (0, 4, 5, 9, 10)]
        [0, 0, 1, 1, 2]
    """

    # True if masks() returns the same masks at all steps of a period, from arguments and state_dict alone. If
    # not, for example if they depend on the weights, checkpoints contain the masks.
    repeats_masks: bool = False
    # False if masks() needs no more of the parameters than names, shapes and what prepare() has read. Where a
    # process has only a shard of the weights, they are gathered for all other sources.
    reads_weights: bool = True
    # True if tensors returned by masks() are never modified, so that they need not be copied.
    keeps_masks: bool = False
    # The model, for sources that need more than the parameters; set before setup.
    model: nn.Module | None = None
    # The names of parameters without a gradient, which make no layer of the model; set before setup.
    idle: Collection[str] = ()
    # True if the source needs gradients of the current step; set before the forward pass.
    gathers: bool = True
    # True if the source sets entries back to values that they had while they trained.
    restores_weights: bool = False
    # The names of settings that settings() returns, without learning rates.
    setting_names: Collection[str] = ()
    # The names of the metrics that report() needs.
    metrics: Sequence[str] = ()
    # Groups of parameters that freeze and thaw together, from the input to the output.
    layer_groups: Sequence[Layer] = ()
    # The attributes that a resumed run needs besides the arguments, with a state like each; see ``restored``.
    remembered: Mapping[str, Any] = {}

    def __init__(
        self,
        *,
        every: int | None = 1,
        unit: str = "step",
        start: int = 0,
        stop: int | None = None,
        seed: int | None = None,
        **wrong: Any,
    ) -> None:
        kind = type(self).__name__
        refuse_unknown_arguments(type(self), wrong)
        self.timetable = Timetable(start, stop, unit, every)
        self.timetable.check(kind)
        self.own_seed = None if seed is None else check_integer(f"{kind}.seed", seed)
        self.seed = 0
        # True if `observe` is called with the gradients of `gradient_names`.
        self.needs_gradients = type(self).observe is not MaskSource.observe
        # True if the source may modify the weights.
        self.writes_weights = type(self).apply is not MaskSource.apply
        self.parameters: dict[str, Tensor] = {}

    def setup(self, parameters: Mapping[str, Tensor], *, seed: int) -> None:
        """Set the parameters.

        Args:
            parameters: The parameters by name, in model order.
            seed: The seed of the run, which is used if the source has no seed.

        Raises:
            PolicyError: If the source cannot mask these parameters.
        """
        kind = type(self).__name__
        if not hasattr(self, "own_seed"):
            raise PolicyError(f"{kind}.__init__: must call super().__init__(**timetable)")
        if not parameters:
            raise PolicyError(f"{kind}: there is no parameter to mask")
        self.parameters = dict(parameters)
        self.seed = seed if self.own_seed is None else self.own_seed
        self.prepare()

    def prepare(self) -> None:
        """Check the arguments against the parameters; called at the end of :meth:`setup`."""

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the masks of an effective step. Parameters without a mask train.

        Args:
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.

        Returns:
            For each parameter name True or False (all entries), a bool tensor (``(n, 1, …)`` for rows,
            the full shape for entries) or a :class:`~gradpolicy.tensors.seeded.RandomMask`.
        """
        raise TypeError(f"{type(self).__name__} must define masks(step, epoch)")

    def overdue(self, step: int, epoch: int) -> bool:
        """Return True if a change was delayed and can be made now."""
        return False

    def period(self, step: int, epoch: int) -> int:
        """Return the number of the period since ``start``, between possible changes; −1 before ``start``."""
        return self.timetable.period(step, epoch)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters whose gradients :meth:`observe` needs at this step."""
        return set(self.parameters) if self.needs_gradients else set()

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Process the full gradients of an effective step, before clipping and masking.

        Not called in steps in which a gradient of the optimizer is not finite.
        """

    def observe_more(self, gradients: Mapping[str, Tensor]) -> None:
        """Process gradients of another optimizer in the same step; by default like those of another step."""
        self.observe(gradients)

    def settings(self, step: int, epoch: int) -> Mapping[str, Mapping[str, Any]]:
        """Return settings of the optimizer by parameter name, in the form of its ``set_settings``."""
        return {}

    def apply(self) -> None:
        """Modify the weights as the masks require. Called after the masks are set.

        Called again for the same masks in a resumed run, and after another policy modified the weights.
        """

    def release(self) -> None:
        """Remove hooks from the model. Called at the end of training."""

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Process the metrics of a validation by name. Called on every rank."""

    def is_finished(self, step: int, epoch: int) -> bool:
        """Return True if the training is finished."""
        return False

    def finish(self) -> None:
        """Modify the weights at the end of the training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs besides the arguments: plain containers and tensors."""
        values = {name.strip("_"): vars(self)[name] for name in self.remembered}
        return tree_map_only(Tensor, full_tensor, values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            PolicyError: If it is damaged.
        """
        for name, like in self.remembered.items():
            key = name.strip("_")
            what = f"{type(self).__name__}.{key}"
            setattr(self, name, restored(what, state.get(key), like, self.parameters))

    def __repr__(self) -> str:
        settings = {**dataclasses.asdict(self.timetable), "seed": self.own_seed}
        given = {key: settings[key] for key, default in _DEFAULTS.items() if settings[key] != default}
        written = ", ".join(f"{key}={value!r}" for key, value in {**self.describe(), **given}.items())
        return f"{type(self).__name__}({written})"

    def describe(self) -> dict[str, Any]:
        """Return the source's own arguments, from attributes of the same names, for reports and plots."""
        arguments = inspect.signature(type(self).__init__).parameters.values()
        names = [each.name for each in arguments if each.kind in NAMED and each.name not in _DEFAULTS]
        values = {name: vars(self).get(name) for name in names}
        return {
            name: value.value if isinstance(value, Constant) else value
            for name, value in values.items()
            if value is not None
        }

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that will certainly be frozen completely."""
        return set()


class StaticSource(MaskSource):
    """A mask source whose masks never change; :meth:`prepare` sets ``_masks``.

    Args:
        **timetable: See :class:`MaskSource`. It has no effect, and gives a warning.
    """

    repeats_masks, reads_weights, keeps_masks = True, False, True

    def __init__(self, **timetable: Any) -> None:
        super().__init__(**{"every": None, **timetable})
        self._masks: dict[str, Mask] = {}
        times = dataclasses.asdict(self.timetable)
        given = sorted(key for key, value in times.items() if value != _DEFAULTS[key])
        if given:
            warn_user(
                f"{type(self).__name__}: {' and '.join(given)} make no difference, since its masks never "
                "change; for a policy that holds only at some times, give the policy "
                "when=gradpolicy.When(...)"
            )

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the masks."""
        return self._masks

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that are frozen completely."""
        return {name for name, mask in self._masks.items() if mask is False}
