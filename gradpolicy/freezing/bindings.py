"""Policies bound to the parameters of a model, and the optimizers that update these."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shortened, under, warn_user
from gradpolicy.freezing.bound_policy import BoundPolicy, masks_never_change
from gradpolicy.freezing.requires_grad import is_turned_off
from gradpolicy.masks.base import Layer
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.wrapped import check_settings
from gradpolicy.policies import Freeze, Train
from gradpolicy.rates import Rates, Settings
from gradpolicy.tensors.checkpoint_file import reading
from gradpolicy.where import named_parameters, pick


@dataclass(eq=False)
class Bindings:
    """Binds policies to those parameters of a model that optimizers update.

    The arguments are those of :class:`~gradpolicy.freezing.freezer.Freezer`, which raises what this raises.

    Attributes:
        named: All parameters of the model by name.
        optimized: The parameters of each optimizer.
        policies: The bound freeze policies by name.
        parameters: The parameters that freeze policies restrict, by name.
        policies_of: The policies of each of these; those that match it come first, since their options apply.
        settings_of: The settings of parameters by policy of ``rates``.
    """

    model: nn.Module
    optimizers: Sequence[MaskedOptimizer] | None
    given: Mapping[str, Freeze]
    rates: Mapping[str, Rates]
    seed: int
    idle: Collection[str]

    def __post_init__(self) -> None:
        self.idle = sorted(self.idle)
        _check_sources(self.given)
        self._find_parameters()
        self._bind_all()

    @property
    def in_effect(self) -> list[BoundPolicy]:
        """The policies that are active in the current step."""
        return [each for each in self.policies.values() if each.in_effect]

    def trainable(self) -> set[Tensor]:
        """Return the parameters that an optimizer updates at some time."""
        able = {p for p in self._in_any if p.requires_grad or is_turned_off(p)}
        return able.union(self.parameters.values())

    def check_optimizers(self) -> None:
        """Check that no parameter which a policy restricts was added to an optimizer during training.

        Raises:
            PolicyError: If one was, as by a finetuning schedule.
        """
        if self.count_optimized() == self._counted:
            return
        self._find_parameters()
        for policy, each in self.policies.items():
            others = pick(self.named, each.policy.restricts).keys() - each.parameters.keys()
            if joined := sorted(name for name in others if self.named[name] in self._in_any):
                raise PolicyError(
                    f"policy.{policy}: {shortened(joined, most=5)} joined the optimizer during training; "
                    "give it all parameters from the start (Phases and Gradual freeze them until later), or "
                    "take these out of params"
                )

    def counted_layers(self) -> dict[str, Sequence[Layer]]:
        """Return the layers, or other groups of parameters, that each policy counts."""
        of_rates = {name: rates.layers_of(self.named, self.idle) for name, rates in self.rates.items()}
        return {**{name: each.source.layer_groups for name, each in self.policies.items()}, **of_rates}

    def frozen_tensors(self) -> dict[str, set[str]]:
        """Return the names of parameters that each policy freezes completely, now or later.

        ``Train`` policies freeze only what none of them trains.
        """
        with self.gathered():
            frozen = {name: each.frozen_tensors() for name, each in self.policies.items()}
        trains = [frozen[name] for name, each in self.policies.items() if isinstance(each.policy, Train)]
        return {
            name: names.intersection(*trains) if isinstance(self.given[name], Train) else names
            for name, names in frozen.items()
        }

    @contextmanager
    def gathered(self, *, values: bool = False) -> Iterator[None]:
        """Gather sharded parameters in the block: their shapes only, unless ``values=True``."""
        with ExitStack() as block:
            for optimizer in self.optimized:
                block.enter_context(optimizer.full_parameters(values=values))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sources, and current masks that they cannot compute again.

        The combined masks and the ages are in the optimizer's own state_dict.
        """
        policies = self.policies.items()
        masks = {name: each.mask_state() for name, each in policies}
        return {
            "sources": {name: each.source.state_dict() for name, each in policies},
            "masks": {name: state for name, state in masks.items() if state is not None},
            "identities": {name: each.identity() for name, each in policies},
            "parameters": list(self.parameters),
            "idle": self.idle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> set[str]:
        """Load the result of :meth:`state_dict`.

        Returns:
            The names of parameters that only policies of the saved run restricted.
        """
        saved, masks, identities = (state.get(key, {}) for key in ("sources", "masks", "identities"))
        if self.idle != (idle := state.get("idle", [])):
            with reading("the saved names of parameters without a gradient"):
                self.idle = sorted(idle)
                self._bind_all()
        for name, each in self.policies.items():
            identity = each.identity()
            known = name in saved
            if known and identities.get(name, identity) != identity:
                warn_user(
                    f"policy.{name}: was saved with another kind of mask source or other parameters; "
                    "it is re-initialised"
                )
                known = False
            with reading(f"policy.{name}: its saved state"):
                if known:
                    each.source.load_state_dict(saved[name])
                with self.gathered():
                    each.load_mask_state(masks.get(name) if known else None)
        return set(state.get("parameters", ())) - set(self.parameters)

    def _find_parameters(self) -> None:
        """Find the model's parameters by name, and the parameters of each optimizer."""
        self.named = named_parameters(self.model)
        self.optimized = {
            each: {parameter for group in each.param_groups for parameter in group["params"]}
            for each in self.optimizers or ()
        }
        self._in_any: set[Tensor] = set().union(*self.optimized.values())
        if self.optimizers is None:
            self._in_any.update(self.named.values())
        self._counted = self.count_optimized()

    def count_optimized(self) -> int:
        """Return the number of parameters of all optimizers."""
        return sum(len(group["params"]) for each in self.optimized for group in each.param_groups)

    def _bind_all(self) -> None:
        """Bind the policies, and set the attributes that depend on them."""
        with self.gathered(values=True):
            self.policies = {name: self._bind(name, policy) for name, policy in self.given.items()}
        bound = self.policies.values()
        self.parameters: dict[str, Tensor] = {
            name: p for each in bound for name, p in each.parameters.items()
        }
        self.policies_of = {
            name: sorted((b for b in bound if name in b.parameters), key=lambda b: not b.matches(name))
            for name in self.parameters
        }
        for name, policies in self.policies_of.items():
            matching = [each for each in policies if each.matches(name)] or policies
            _check_together(name, {each.name: each.policy for each in matching})
        self.settings_of = {name: self._settings(name, policy) for name, policy in self.rates.items()}

    def _bind(self, name: str, policy: Freeze) -> BoundPolicy:
        """Find a policy's parameters, and set up its source."""
        with under(f"policy.{name}.params"):
            matched = pick(self.named, policy.params)
        with under(f"policy.{name}"):
            optimized = self._optimized_of(matched)
            parameters = self._optimized_of(pick(self.named, policy.restricts))
            policy.mask.model, policy.mask.idle = self.model, self.idle
            policy.mask.setup(optimized, seed=self.seed)
            if self.optimizers is not None:
                known = {key for each in self.optimizers for group in each.param_groups for key in group}
                check_settings(policy.mask.setting_names, known)
            return BoundPolicy(name, policy, parameters)

    def _optimized_of(self, matched: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that an optimizer updates."""
        parameters = {key: p for key, p in matched.items() if p in self._in_any}
        if not parameters:
            raise PolicyError(f"no optimizer holds what it matches: {shortened(list(matched), most=5)}")
        return parameters

    def _settings(self, name: str, policy: Rates) -> dict[str, Settings]:
        """Return the settings of each parameter that a policy matches."""
        with under(f"policy.{name}.params"):
            matched = policy.settings_of(self.named, self.idle)
            self._optimized_of({key: self.named[key] for key in matched})
        return matched


def _check_sources(policies: Mapping[str, Freeze]) -> None:
    """Check that no two policies share a mask source.

    Raises:
        PolicyError: If they do.
    """
    first: dict[int, str] = {}
    for name, policy in policies.items():
        other = first.setdefault(id(policy.mask), name)
        if other != name:
            raise PolicyError(f"policy.{name}: has the mask source of policy.{other}; each needs its own")


def _check_together(name: str, policies: Mapping[str, Freeze]) -> None:
    """Check that policies on a parameter want the same state, and none writes to what another freezes.

    Raises:
        PolicyError: If they do not, or one does.
    """
    for key, policy in policies.items() if len(policies) > 1 else ():
        changing = (n for n, each in policies.items() if n != key and not masks_never_change(each))
        if policy.mask.restores_weights and (other := next(changing, None)):
            raise PolicyError(
                f"{name!r}: policy.{key} restores the best weights of a phase, also of entries that "
                f"policy.{other} has frozen since; leave best out, or give policy.{other} constant masks"
            )
    (first, one), *rest = policies.items()
    for other, another in rest:
        for key in ("frozen_state", "bias_correction"):
            here, there = getattr(one, key), getattr(another, key)
            if here != there:
                raise PolicyError(
                    f"{name!r}: policy.{first} wants {key}={here!r}, policy.{other} {key}={there!r};"
                    f" policies on one parameter must agree: give both the same {key}, or different params"
                )
