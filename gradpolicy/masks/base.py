"""The base classes of mask sources: a timetable, a seed, the parameters to mask."""

import dataclasses
import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from gradpolicy.errors import NAMED, PolicyError, refuse_unknown_arguments, shown
from gradpolicy.schedules import Constant
from gradpolicy.tensors.mask import Mask
from gradpolicy.when import Timetable

# The arguments that all sources share; a repr leaves out those that have these values.
_DEFAULTS = {"every": None, "unit": "step", "start": 0, "stop": None, "seed": None}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Parameters that are frozen and thawed together.

    Attributes:
        name: The module that holds them, or the modules.
        parameters: The parameters' names, in model order.
        numbered: True for a block, such as ``layers.3``; False for the embedding or the head.
    """

    name: str
    parameters: tuple[str, ...]
    numbered: bool


class MaskSource:
    """Gives the masks of an effective optimizer step. True = this entry trains.

    The masks may change at the counts ``start``, ``start + every``, ``start + 2 · every``, … below
    ``stop``. Before ``start`` the first masks hold, from ``stop`` on the last ones. (To let everything train
    at other times, give the policy a ``when``.) What a source gives depends on (seed, step, parameter name)
    only, and for some on weights and averaged gradients, so that every rank and resumed run agrees.

    A subclass defines :meth:`masks`, mostly with the help of :meth:`period`; all other methods are optional.

    Args:
        every: After how many steps (or epochs) the masks may change again; None: they are chosen once.
        unit: ``"step"`` (effective optimizer steps) or ``"epoch"``.
        start: The count at which masks may change for the first time.
        stop: The count from which they no longer change; None for never.
        seed: The source's own seed; None takes the run's.
        **wrong: Any other argument is refused, with the nearest valid names.

    Raises:
        PolicyError: For an unknown argument or unit, or an impossible timetable.

    Example:
        >>> class EvenSteps(MaskSource):
        ...     def masks(self, step, epoch):
        ...         return {name: self.period(step, epoch) % 2 == 0 for name in self.parameters}
        >>> source = EvenSteps(every=5)
        >>> [step for step in range(12) if source.due(step, epoch=0)]
        [0, 5, 10]
    """

    # A subclass that observes needs them, unless it says otherwise.
    needs_gradients: bool = False
    # True if masks() returns the masks in force again, from arguments and state_dict alone, at any later step
    # of their period. If not, as where the weights decide, a checkpoint holds the masks.
    repeats_masks: bool = False
    # True if no tensor that masks() returned is written to later, so that it need not be copied.
    keeps_masks: bool = False
    # The model of the parameters, for a source that looks at more than these; set before setup.
    model: nn.Module | None = None
    # True while the gradients of the step are asked for; set before its forward pass.
    gathers: bool = True
    # The names of what settings() gives, other than rates.
    setting_names: Collection[str] = ()
    # Groups of parameters that freeze and thaw together, from the input to the output.
    layer_groups: Sequence[Layer] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "observe" in vars(cls) and "needs_gradients" not in vars(cls):
            cls.needs_gradients = True

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
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise PolicyError(f"{kind}.seed: must be a whole number, got {shown(seed)}")
        self.own_seed = seed
        self.seed = 0
        self.parameters: dict[str, Tensor] = {}

    def setup(self, parameters: Mapping[str, Tensor], *, seed: int) -> None:
        """Take the parameters to mask.

        Args:
            parameters: The parameters by name, in model order.
            seed: The run's seed; a seed of the source's own takes precedence.

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
        """Return the masks of an effective step; parameters without a mask train.

        Args:
            step: Effective optimizer steps taken so far.
            epoch: Epochs completed so far.

        Returns:
            By parameter name: True or False (the whole tensor), a bool tensor (``(n, 1, …)`` for rows,
            the full shape for entries) or a :class:`~gradpolicy.tensors.seeded.RandomMask`.
        """
        raise TypeError(f"{type(self).__name__} must define masks(step, epoch)")

    def due(self, step: int, epoch: int) -> bool:
        """Return True if the timetable lets the masks change at this effective step (or in this epoch)."""
        return self.timetable.due(step, epoch)

    def overdue(self, step: int, epoch: int) -> bool:
        """Return True if a change that the timetable allowed earlier had to wait, and can be made now."""
        return False

    def count(self, step: int, epoch: int) -> int:
        """Return the count that the timetable goes by: of steps or of epochs."""
        return self.timetable.count(step, epoch)

    def period(self, step: int, epoch: int) -> int:
        """Return how often the masks may have changed since ``start``; −1 before it."""
        return self.timetable.period(step, epoch)

    def wants_gradients(self, step: int, epoch: int) -> bool:
        """Return True if :meth:`observe` should get the gradients of this step."""
        return self.needs_gradients

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the parameters whose gradients the source needs at this step."""
        return set(self.parameters) if self.wants_gradients(step, epoch) else set()

    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the whole gradients of an effective step, before clipping and masking.

        It is not called in a step in which a gradient of the optimizer is not finite.
        """

    def observe_more(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients of another optimizer in the same step; by default as those of another step."""
        self.observe(gradients)

    def gradient_scale(self, step: int, epoch: int) -> Mapping[str, float]:
        """Return factors on the gradients of active entries, by parameter name; 1 where none is given."""
        return {}

    def learning_rate_scale(self, step: int, epoch: int) -> Mapping[str, float]:
        """Return factors on the learning rates, by parameter name; 1 where none is given."""
        return {}

    def settings(self, step: int, epoch: int) -> Mapping[str, Mapping[str, Any]]:
        """Return settings of the optimizer by parameter name, as its ``set_settings`` takes them.

        By default the factors of :meth:`learning_rate_scale`, as ``lr``.
        """
        return {name: {"lr": scale} for name, scale in self.learning_rate_scale(step, epoch).items()}

    @property
    def resets_state(self) -> bool:
        """True if the optimizer state is to be emptied under the masks that were just returned."""
        return False

    def apply(self) -> None:
        """Write to the weights what the masks demand; called once they are in force.

        It is called again for the same masks in a resumed run, and after another policy wrote to the weights.
        """

    def release(self) -> None:
        """Take what the source put on the model off again; called at the end of training."""

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Take the metrics of a validation, by name; every rank calls it."""

    def is_finished(self, step: int, epoch: int) -> bool:
        """Return True if training need not go on."""
        return False

    def finish(self) -> None:
        """Write to the weights what the end of the training demands."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beyond the arguments: plain containers and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""

    def __repr__(self) -> str:
        settings = {**dataclasses.asdict(self.timetable), "seed": self.own_seed}
        given = {key: settings[key] for key, default in _DEFAULTS.items() if settings[key] != default}
        written = ", ".join(f"{key}={value!r}" for key, value in {**self.describe(), **given}.items())
        return f"{type(self).__name__}({written})"

    def describe(self) -> dict[str, Any]:
        """Return the source's own arguments as reports and plots show them: attributes of the same names."""
        arguments = inspect.signature(type(self).__init__).parameters.values()
        names = [each.name for each in arguments if each.kind in NAMED and each.name not in _DEFAULTS]
        values = {name: vars(self).get(name) for name in names}
        return {
            name: value.value if isinstance(value, Constant) else value
            for name, value in values.items()
            if value is not None
        }

    @property
    def original(self) -> object:
        """The object that the user gave: this one, unless it adapts another."""
        return self

    def may_freeze(self) -> set[str]:
        """Return the parameters that are sure to be frozen as a whole at some time."""
        return set()


class StaticSource(MaskSource):
    """A mask source whose masks never change; :meth:`prepare` sets ``_masks``.

    Args:
        **timetable: See :class:`MaskSource`; a warning says that it makes no difference.
    """

    repeats_masks = True

    def __init__(self, **timetable: Any) -> None:
        super().__init__(**{"every": None, **timetable})
        self._masks: dict[str, Mask] = {}
        times = dataclasses.asdict(self.timetable)
        given = sorted(key for key, value in times.items() if value != _DEFAULTS[key])
        if given:
            warnings.warn(
                f"{type(self).__name__}: {' and '.join(given)} make no difference, since its masks never "
                "change; for a policy that holds only at some times, give the policy "
                "when=gradpolicy.When(...)",
                stacklevel=3,
            )

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the masks, whatever the step."""
        return self._masks

    def may_freeze(self) -> set[str]:
        """Return the parameters that are frozen as a whole."""
        return {name for name, mask in self._masks.items() if mask is False}
