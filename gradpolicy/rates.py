"""The policy that sets learning rates and other optimizer settings of parameters."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from gradpolicy.checks import check_call, check_number, check_setting
from gradpolicy.errors import KnowsItsArguments, PolicyError, shown, under
from gradpolicy.masks.base import Layer
from gradpolicy.masks.layers import Groups, find_layers, layers_of, read_groups
from gradpolicy.policies import Policy, WhenLike
from gradpolicy.schedules import value_at
from gradpolicy.where import Named, pick

Settings = Mapping[str, Any]
"""A factor on "lr", and the values of other settings; each may be a function of the step (or epoch) count."""


class LayerDecay(KnowsItsArguments):
    """A factor on the learning rate that falls from the output to the input: ``decay ** layers_after``.

    The last layer that the pattern matches has the factor 1, the one before it ``decay``.

    Args:
        decay: The factor from one layer to the one before it, above 0.
        groups: Groups of parameters from the input to the output, as globs by name or in a list; None: the
            layers that :func:`~gradpolicy.masks.layers.find_layers` finds in the parameters.

    Raises:
        PolicyError: If the decay is not a number above 0.

    Source: Clark et al. 2020, "ELECTRA", arXiv:2003.10555; Bao et al. 2021, "BEiT", arXiv:2106.08254.

    Example:
        >>> import torch
        >>> names = ["embed.weight", "h.0.weight", "h.1.weight", "head.weight"]
        >>> LayerDecay(0.5).factors({name: torch.zeros(2, 2) for name in names})
        {'embed.weight': 0.125, 'h.0.weight': 0.25, 'h.1.weight': 0.5, 'head.weight': 1.0}
    """

    def __init__(self, decay: float, *, groups: Groups = None) -> None:
        self.decay = check_number("LayerDecay.decay", decay, above=0.0)
        self.groups = read_groups("LayerDecay.groups", groups)

    def __repr__(self) -> str:
        groups = "" if self.groups is None else f", groups={self.groups!r}"
        return f"LayerDecay({self.decay}{groups})"

    def layers(self, parameters: Mapping[str, Tensor], idle: Collection[str] = ()) -> list[Layer]:
        """Return the layers from the input to the output; see :func:`~gradpolicy.masks.layers.find_layers`.

        Raises:
            PolicyError: If a group matches none of the parameters, or two groups overlap.
        """
        if self.groups is None:
            return find_layers(parameters, idle)
        return layers_of("LayerDecay.groups", self.groups, parameters)

    def factors(self, parameters: Mapping[str, Tensor], idle: Collection[str] = ()) -> dict[str, float]:
        """Return the factor of each parameter; see :meth:`layers`."""
        layers = self.layers(parameters, idle)
        depth = {name: index for index, layer in enumerate(layers) for name in layer.parameters}
        return {name: self.decay ** (len(layers) - 1 - depth[name]) for name in parameters if name in depth}


class Rates(Policy):
    """Sets learning rates and other optimizer settings of parameters.

    The first pattern that matches a parameter is used. If several policies match a parameter, their factors
    are multiplied, and other settings are those of the last policy. The optimizer's param groups do not
    change, so learning-rate schedulers, checkpoints and logs are not affected: the factor multiplies the
    scheduler's rate.

    Args:
        params: A dict from globs on parameter names to factors on the learning rate, or to dicts of settings:
            the factor as ``lr``, and the values of others (``weight_decay``, ``betas``, ``momentum`` …). A
            factor is a number, a :class:`LayerDecay`, or a function of the step (or epoch) count, such as a
            schedule of :mod:`gradpolicy.schedules`. Other settings may also be functions of the count.
        when: When the policy is active; at other times its parameters have the settings of their param group.

    Raises:
        PolicyError: For a factor that is not a number of at least 0, a pattern with ``!``, or no patterns;
            when training starts, if a pattern matches nothing, or only parameters of earlier patterns, or the
            optimizer has no such setting.

    Example:
        >>> import torch, gradpolicy as gp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> rates = gp.Rates({"bias": 2.0, "*": gp.schedules.Linear(0.0, 1.0, steps=10)})
        >>> with gp.training(model, optimizer, [rates]) as optimizer:
        ...     before = model.bias.item()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> round(before - model.bias.item(), 6)
        0.2
    """

    def __init__(self, params: Mapping[str, Any], *, when: WhenLike = None) -> None:
        super().__init__(when)
        if not isinstance(params, Mapping) or not params:
            raise PolicyError(
                f"Rates.params: expected a dict from globs to factors or settings, got {shown(params)}"
            )
        self.params = {str(pattern): _checked(str(pattern), settings) for pattern, settings in params.items()}
        # True if a setting is a function of the count.
        self.varies = any(callable(value) for settings in self.params.values() for value in settings.values())

    def describe(self) -> list[str]:
        """Return the arguments that distinguish this policy from others of its class, as code."""
        return [repr(self.params)]

    def settings_of(self, named: Mapping[str, Named], idle: Collection[str] = ()) -> dict[str, Settings]:
        """Return the settings of each matched parameter, which may be functions of the count.

        Args:
            named: The parameters by name.
            idle: The names of those without a gradient, which make no layer.

        Raises:
            PolicyError: If a pattern matches nothing, or only parameters of earlier patterns.
        """
        found: dict[str, Settings] = {}
        for pattern, matched, settings in self._matches(named):
            factor = settings.get("lr")
            with under(pattern):
                factors = factor.factors(matched, idle) if isinstance(factor, LayerDecay) else None
            for name in matched:
                found[name] = settings if factors is None else {**settings, "lr": factors.get(name, 1.0)}
        return found

    def layers_of(self, named: Mapping[str, Named], idle: Collection[str] = ()) -> list[Layer]:
        """Return the layers that a :class:`LayerDecay` counts."""
        decays = ((matched, settings.get("lr")) for _, matched, settings in self._matches(named))
        counting = ((matched, one) for matched, one in decays if isinstance(one, LayerDecay))
        return [layer for matched, one in counting for layer in one.layers(matched, idle)]

    def _matches(self, named: Mapping[str, Named]) -> Iterator[tuple[str, dict[str, Named], Settings]]:
        """Yield each pattern, what it matches and none before it does, and its settings."""
        seen: set[str] = set()
        for pattern, settings in self.params.items():
            with under(pattern):
                matched = {name: p for name, p in pick(named, pattern).items() if name not in seen}
                if not matched:
                    raise PolicyError("a pattern before it has all that it matches")
            yield pattern, matched, settings
            seen |= matched.keys()

    def course(self, named: Mapping[str, Named], idle: Collection[str] = ()) -> str:
        """Return the initial settings as text, such as ``lr × 0.25 to 1, weight_decay 0.0``."""
        values: dict[str, dict[Any, None]] = {}
        for settings in self.settings_of(named, idle).values():
            for name, value in at(settings, self.when.start).items():
                values.setdefault(name, {})[value] = None
        return ", ".join(f"{'lr ×' if name == 'lr' else name} {_span(each)}" for name, each in values.items())


def at(settings: Settings, count: int) -> dict[str, Any]:
    """Return the settings at a count of steps or epochs.

    Raises:
        PolicyError: If a function of the user's gives a value that the setting cannot have.
    """
    current = {name: value_at(value, count) for name, value in settings.items()}
    for name in (name for name, value in settings.items() if callable(value)):
        with under(f"at {count}"):
            check_setting(name, current[name])
    return current


def combined(policies: Iterable[Mapping[str, Settings]]) -> dict[str, Settings]:
    """Return the settings of each parameter under several policies: multiplied factors, and the last others.

    Args:
        policies: The settings of parameters by name, of each policy.
    """
    together: dict[str, dict[str, Any]] = {}
    for of_policy in policies:
        for name, settings in of_policy.items():
            factor = together.get(name, {}).get("lr", 1.0)
            together[name] = {**together.get(name, {}), **settings}
            if "lr" in settings:
                together[name]["lr"] = factor * settings["lr"]
    return dict(together)


def _checked(pattern: str, settings: Any) -> Settings:
    key = f"Rates.params: {shown(pattern)}"
    if pattern.startswith("!"):
        raise PolicyError(
            f"{key}: the first pattern that matches counts; put one for the exception, with the factor 1, "
            "before the pattern of the others"
        )
    settings = dict(settings) if isinstance(settings, Mapping) else {"lr": settings}
    for name, value in settings.items():
        if callable(value):
            check_call(f"{key}: {name}", value, 0, takes="the count alone")
        elif not isinstance(value, LayerDecay):
            with under(key):
                check_setting(name, value)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _span(values: Iterable[Any]) -> str:
    """Return one value, or the minimum and maximum of several numbers."""
    first, *others = values
    if others and all(isinstance(value, int | float) for value in (first, *others)):
        return f"{min(first, *others):g} to {max(first, *others):g}"
    return " or ".join(map(str, (first, *others)))
