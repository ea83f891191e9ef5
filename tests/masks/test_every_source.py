"""What every mask source promises, for each one that the package has."""

import copy
import inspect
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.masks import SOURCES, MaskSource
from gradpolicy.masks.base import StaticSource
from gradpolicy.masks.phases import Phases
from gradpolicy.masks.prune_and_grow import PruneAndGrow
from gradpolicy.tensors.mask import Mask, as_tensor, check_mask
from tests.fixtures import through_a_file

# Values for arguments without a default.
REQUIRED = {
    "phases": [{"params": "embed.*", "until": {"steps": 2}}, {"params": "*", "until": {"steps": 3}}],
    "rows": [0],
    "function": lambda name, parameter, step: len(name) % 2 == step % 4 // 2,
}
each_source = pytest.mark.parametrize("kind", SOURCES.values(), ids=SOURCES)


def example(kind: type[MaskSource], **more: object) -> MaskSource:
    """A source whose masks change every two steps, if they change."""
    own = inspect.signature(kind).parameters.values()
    needed = [each.name for each in own if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    assert REQUIRED.keys() >= set(needed), f"give REQUIRED in {__file__} a value for {needed} of {kind}"
    timetable = {} if issubclass(kind, (StaticSource, Phases)) else {"every": 2, "unit": "step"}
    return kind(**{name: REQUIRED[name] for name in needed}, **timetable, **more)


def begun(kind: type[MaskSource], model: nn.Module, **more: object) -> MaskSource:
    source = example(kind, **more)
    source.setup(dict(model.named_parameters()), seed=3)
    return source


def course(source: MaskSource, model: nn.Module, steps: range) -> list[Mapping[str, Mask]]:
    """The masks of some steps, under gradients that depend on the step alone."""
    given = []
    for step in steps:
        given.append(dict(source.masks(step, 0)))
        source.apply()
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        wanted = source.gradient_names(step, 0)
        if wanted:
            source.observe({name: gradients[name] for name in wanted})
    return given


@pytest.mark.parametrize(
    ("kind", "more"),
    [*((kind, {}) for kind in SOURCES.values()), (PruneAndGrow, {"grow": "random"})],
    ids=[*SOURCES, "PruneAndGrow at random"],
)
def test_a_resumed_run_and_another_rank_have_the_same_masks(kind, more: dict, stack: nn.Module) -> None:
    whole = copy.deepcopy(stack)
    expected = course(begun(kind, whole, **more), whole, range(9))
    for cut in range(1, 8):
        model = copy.deepcopy(stack)
        first = begun(kind, model, **more)
        course(first, model, range(cut))
        second = begun(kind, model, **more)
        second.load_state_dict(through_a_file(first.state_dict()))
        for ours, theirs in zip(course(second, model, range(cut, 9)), expected[cut:], strict=True):
            assert ours.keys() == theirs.keys()
            for name, parameter in model.named_parameters():
                masks = (as_tensor(each[name], parameter.shape) for each in (ours, theirs))
                assert torch.equal(*(mask.expand(parameter.shape) for mask in masks))
        assert all(torch.equal(p, whole.get_parameter(name)) for name, p in model.named_parameters())


@each_source
def test_its_masks_fit_and_layers_freeze_only_where_it_says_so(kind, stack):
    source, parameters, frozen = begun(kind, stack), dict(stack.named_parameters()), set()
    for masks in course(source, stack, range(8)):
        for name, mask in masks.items():
            check_mask(mask, parameters[name], name)
        frozen |= {name for name, mask in masks.items() if mask is False}
    if source.layer_groups:
        assert frozen <= source.may_freeze()
        assert {name for layer in source.layer_groups for name in layer.parameters} <= set(parameters)


@each_source
def test_it_describes_itself_and_names_the_nearest_argument(kind: type[MaskSource]) -> None:
    assert repr(example(kind)).startswith(f"{kind.__name__}(")
    needed = REQUIRED.keys() & inspect.signature(kind).parameters
    with pytest.raises(PolicyError, match=rf"^{kind.__name__}: takes no argument 'evry'; .*'every'"):
        kind(**{name: REQUIRED[name] for name in needed}, evry=2)


WRONG_SHAPE = {"head.weight": torch.zeros(7, 7)}


@pytest.mark.parametrize(
    ("kind", "damage", "key"),
    [
        (Phases, {"phase": -7}, "Phases.phase"),
        (Phases, {"phase": 1.5}, "Phases.phase"),
        (Phases, {"reports": [None]}, "Phases.reports"),
        (Phases, {"kept": WRONG_SHAPE}, "Phases.kept.head.weight"),
        (PruneAndGrow, {"active": {}}, "PruneAndGrow.active"),
        (PruneAndGrow, {"decided": "abc"}, "PruneAndGrow.decided"),
        (SOURCES["TopK"], {"sums": {"gradient": WRONG_SHAPE}}, "TopK.sums.gradient.head.weight"),
        (SOURCES["TopK"], {"masks": [3]}, "TopK.masks"),
    ],
)
def test_a_damaged_state_is_refused_when_it_is_loaded(kind, damage: dict, key: str, stack) -> None:
    saved = begun(kind, stack).state_dict()
    begun(kind, stack).load_state_dict(saved)
    with pytest.raises(PolicyError, match=f"^{key}: expected"):
        begun(kind, stack).load_state_dict({**saved, **damage})


@each_source
def test_it_needs_parameters(kind: type[MaskSource]) -> None:
    with pytest.raises(PolicyError, match=f"{kind.__name__}: there is no parameter to mask"):
        example(kind).setup({}, seed=0)
