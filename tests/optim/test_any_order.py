"""Whatever a user does with the optimizer, in any order: after each action all is as a reference has it."""

import copy
import pickle

import pytest
import pytorch_optimizer
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from gradpolicy import MaskedOptimizer
from tests.fixtures import through_a_file
from tests.optim.alone import WITH_RULE, Alone, PutBack, without_rule

SHAPES = [(4, 3), (3,), ()]
# Adagrad of torch 2.11 makes its state in the constructor, so that it cannot add a group.
NOT_IN_GROUPS = {"Adagrad", "accumulating", "decaying"} if torch.__version__ < (2, 12) else set()
FROZEN_STATES = st.sampled_from(["keep", "zero", "drop"])
SEEDS = st.integers(0, 2**16)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "file": lambda value: through_a_file(value, weights_only=False),
}


class CopiedLion(pytorch_optimizer.Lion):
    """A copy of Lion has lost these two, which it keeps beside its defaults."""

    maximize, foreach = False, None


class Accumulating(torch.optim.Adagrad):
    """Counts steps by tensor, and has a step of its own, which no rule describes."""

    def step(self, closure=None):
        return super().step(closure)


class InAnyOrder(RuleBasedStateMachine):
    """A parameter of each shape, each in its own group; all have a mask, so that all are saved with one."""

    kinds = {}
    reference_kind = Alone
    ages_are_entries = True
    compared = 0

    @initialize(data=st.data(), frozen_state=FROZEN_STATES)
    def begin(self, data, frozen_state):
        # What torch counts in numbers, NAdam's product for one, is exact then, also after a load.
        torch.set_default_dtype(torch.float64)
        self.make = self.kinds[data.draw(st.sampled_from(sorted(set(self.kinds) - NOT_IN_GROUPS)))]
        generator = torch.Generator().manual_seed(0)
        starts = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]
        self.parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        self.reference = self.reference_kind(self.make, starts)
        self.masks = [torch.ones(shape, dtype=torch.bool) for shape in SHAPES]
        self.ages = [mask.long() * 0 for mask in self.masks]
        self.forgets = [frozen_state != "keep"] * len(SHAPES)
        self.saved = None
        self.wrap(frozen_state)
        self.optimizer.set_masks(dict.fromkeys(self.parameters))

    def wrap(self, frozen_state):
        inner = self.make(self.parameters[:1])
        for parameter in self.parameters[1:]:
            inner.add_param_group({"params": [parameter]})
        self.optimizer = MaskedOptimizer(inner, frozen_state=frozen_state)

    def teardown(self):
        torch.set_default_dtype(torch.float32)

    @invariant()
    def all_is_as_the_reference_has_it(self):
        for place, parameter in enumerate(self.parameters):
            value, mask, ages = parameter.detach(), self.masks[place], self.ages[place]
            expected = self.reference.value(place).view(value.shape)
            torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
            assert torch.equal(self.optimizer.get_mask(parameter).expand(mask.shape), mask)
            if self.ages_are_entries:
                assert torch.equal(self.optimizer.age(parameter).expand(mask.shape), ages)
        type(self).compared += 1

    # --- steps

    @rule(
        seed=SEEDS,
        missing=st.sets(st.integers(0, 3)),
        garbage=st.sampled_from([0.0, torch.nan, torch.inf]),
        way=st.sampled_from(["plain", "closure", "masked"]),
    )
    def step(self, seed, missing, garbage, way):
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in self.parameters]
        gradients = [None if place in missing else gradient for place, gradient in enumerate(drawn)]
        before = [parameter.detach().clone() for parameter in self.parameters]
        for parameter, gradient, mask in zip(self.parameters, gradients, self.masks, strict=True):
            parameter.grad = None if gradient is None else gradient.masked_fill(~mask, garbage)
        if way == "masked":
            self.optimizer.mask_gradients()
        self.optimizer.step(*([lambda: 0.0] if way == "closure" else []))
        for own, given in zip(
            self.reference.optimizer.param_groups, self.optimizer.param_groups, strict=True
        ):
            own.update({key: given[key] for key in ("lr", "weight_decay")})
        self.reference.step(gradients, self.masks)
        for parameter, mask, old in zip(self.parameters, self.masks, before, strict=True):
            assert torch.equal(parameter.detach()[~mask].view(torch.int64), old[~mask].view(torch.int64))
        for ages, gradient, mask in zip(self.ages, gradients, self.masks, strict=True):
            ages += mask if gradient is not None else 0

    @rule(place=st.integers(0, 3), lr=st.sampled_from([0.01, 0.3]), weight_decay=st.sampled_from([0.0, 0.2]))
    def change_settings(self, place, lr, weight_decay):
        group = self.optimizer.param_groups[place % len(self.parameters)]
        group.update(lr=lr, weight_decay=weight_decay)

    # --- masks

    @rule(
        shapes=st.lists(st.sampled_from(["entry", "row", "column", "flag", "none"]), min_size=1, max_size=4),
        seed=SEEDS,
        frozen_state=st.none() | FROZEN_STATES,
    )
    def set_masks(self, shapes, seed, frozen_state):
        generator = torch.Generator().manual_seed(seed)
        masks = {}
        for place, (parameter, level) in enumerate(zip(self.parameters, shapes, strict=False)):
            shape = parameter.shape
            cut = {"row": (*shape[:1], *(1,) * (len(shape) - 1)), "column": shape[-1:], "flag": ()}
            mask = torch.rand(cut.get(level, shape), generator=generator) < 0.5
            masks[parameter] = None if level == "none" else mask
            self.masks[place] = torch.ones(shape, dtype=torch.bool) if level == "none" else mask.expand(shape)
            if frozen_state is not None:
                self.forgets[place] = frozen_state != "keep"
            if self.forgets[place]:
                self.reference.forget(place, ~self.masks[place])
                self.ages[place] *= self.masks[place]
        if len(masks) == 1:
            self.optimizer.set_mask(*masks.popitem(), frozen_state=frozen_state)
        else:
            self.optimizer.set_masks(masks, frozen_state=frozen_state)

    # --- what becomes of parameters and state

    @rule()
    def add_group(self):
        if len(self.parameters) > len(SHAPES):
            return
        start = torch.ones(2, 2, dtype=torch.float64)
        self.parameters.append(torch.nn.Parameter(start.clone()))
        self.optimizer.add_param_group({"params": self.parameters[-1:]})
        self.optimizer.set_mask(self.parameters[-1], None)
        self.reference.add(start)
        self.masks.append(start.bool())
        self.ages.append(start.long() * 0)
        self.forgets.append(self.optimizer.frozen_state != "keep")
        self.saved = None

    @rule(transposed=st.booleans())
    def move_data(self, transposed):
        for parameter in self.parameters:
            data = parameter.data
            parameter.data = data.t().contiguous().t() if transposed and data.dim() == 2 else data.clone()
            parameter.grad = None

    @rule(place=st.integers(0, 3))
    def remove_state(self, place):
        place %= len(self.parameters)
        if not self.optimizer.state.pop(self.parameters[place], None):
            return  # plain SGD keeps nothing that could be removed
        everywhere = torch.ones_like(self.masks[place])
        self.reference.forget(place, everywhere)
        self.ages[place] *= 0

    @rule(way=st.sampled_from(sorted(COPIES)))
    def go_on_with_a_copy(self, way):
        self.parameters, self.optimizer = COPIES[way]((self.parameters, self.optimizer))

    # --- saving and loading

    @rule()
    def look_at_the_state(self):
        model = torch.nn.ParameterList(self.parameters)
        get_optimizer_state_dict(model, self.optimizer)
        self.optimizer.state_bytes()

    @rule(way=st.sampled_from(["a copy", "a file", "plain torch"]))
    def save(self, way):
        state = copy.deepcopy(self.optimizer.state_dict())
        if way == "a file":
            state = through_a_file(state)
        elif way == "plain torch":
            plain = self.make(self.parameters[:1])
            for parameter in self.parameters[1:]:
                plain.add_param_group({"params": [parameter]})
            plain.load_state_dict(state)
            state = copy.deepcopy(plain.state_dict())
        self.saved = state, self.reference.saved(), copy.deepcopy((self.masks, self.ages, self.forgets))

    @rule(into=st.sampled_from(["itself", "another"]), frozen_state=FROZEN_STATES)
    def load(self, into, frozen_state):
        if self.saved is None:
            return
        if into == "another":
            self.wrap(frozen_state)
        state, states, known = copy.deepcopy(self.saved)
        self.optimizer.load_state_dict(state)
        self.reference.load(states)
        self.masks, self.ages, self.forgets = known


def made(kind, **settings):
    return lambda weights: {pytorch_optimizer.Lion: CopiedLion}.get(kind, kind)(weights, lr=0.1, **settings)


class RulesInAnyOrder(InAnyOrder):
    kinds = {
        **{name: made(kind) for name, kind in WITH_RULE.items()},
        "nesterov": made(torch.optim.SGD, momentum=0.9, nesterov=True),
        "dampening": made(torch.optim.SGD, momentum=0.9, dampening=0.5),
        "centered": made(torch.optim.RMSprop, momentum=0.5, centered=True),
        "decaying": made(torch.optim.Adagrad, lr_decay=0.1),
        "amsgrad": made(torch.optim.AdamW, amsgrad=True, maximize=True, betas=(0.6, 0.8)),
    }


class OthersInAnyOrder(InAnyOrder):
    kinds = without_rule({"accumulating": made(Accumulating), "adadelta": made(torch.optim.Adadelta)})
    reference_kind = PutBack
    ages_are_entries = False


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", [RulesInAnyOrder, OthersInAnyOrder])
def test_any_order_of_actions_ends_as_the_reference(machine, examples):
    machine.compared = 0
    quick = settings(deadline=None, suppress_health_check=list(HealthCheck), stateful_step_count=20)
    run_state_machine_as_test(machine, settings=settings(quick, max_examples=examples))
    assert machine.compared > examples
