"""Functions and classes of the user's own are mask sources."""

import functools

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks import MaskSource, as_source
from tests.freezing.conftest import freezer_of, train


def alternate(name: str, parameter: torch.Tensor, step: int) -> torch.Tensor:
    rows = torch.arange(len(parameter)) % 2 == step % 2
    return rows.reshape(-1, *[1] * (parameter.dim() - 1))


class OneParameter:
    """A plain class: its masks know the step only."""

    def setup(self, parameters, *, seed: int) -> None:
        self.names, self.seed = list(parameters), seed

    def masks(self, step: int) -> dict[str, bool]:
        return {name: place == step % len(self.names) for place, name in enumerate(self.names)}

    def due(self, step: int, epoch: int) -> bool:
        return step % 3 == 0


def test_a_function_gives_the_mask_of_each_parameter(prepared) -> None:
    source = prepared(as_source(alternate))
    for step in (0, 1):
        assert source.masks(step, 0)["head.bias"].tolist() == [step == 0, step == 1, step == 0]


def test_a_function_may_have_a_timetable(prepared) -> None:
    source = prepared(gp.masks.Function(alternate, every=5))
    assert source.masks(9, 0)["head.bias"].tolist() == [False, True, False]
    assert [step for step in range(12) if source.due(step, 0)] == [0, 5, 10]


@pytest.mark.parametrize("given", [OneParameter, OneParameter()])
def test_a_class_with_masks_needs_no_base_class(prepared, given) -> None:
    source = prepared(as_source(given), seed=3)
    assert isinstance(source, MaskSource)
    assert source.masks(1, 0)["blocks.0.weight"] is True
    assert source.source.seed == 3
    assert [step for step in range(7) if source.due(step, 0)] == [0, 3, 6]


def test_a_class_is_asked_when_it_says_that_it_is_due(stack) -> None:
    asked = []

    class Watched(OneParameter):
        def masks(self, step: int) -> dict[str, bool]:
            asked.append(step)
            return super().masks(step)

    _, freezer = freezer_of(stack, {"one": gp.Freeze(Watched())})
    for step in range(8):
        freezer.begin_step(step)
    assert asked == [0, 3, 6]


def test_what_is_no_source_is_an_error(prepared) -> None:
    with pytest.raises(PolicyError, match="must be a mask source"):
        as_source(3)
    with pytest.raises(PolicyError, match="must take \\(name, parameter, step\\)"):
        as_source(lambda name: True)
    for name, method, message in (
        ("masks", lambda self: {}, r"Bad.masks: must take \(step, epoch\)"),
        ("setup", lambda self, p: None, r"Bad.setup: must take \(parameters"),
        ("__init__", lambda self, k: None, "Freeze.mask: Bad: must take no arguments"),
        ("due", lambda self, step: True, r"Bad.due: must take \(step, epoch\)"),
        ("state_dict", lambda self: {}, "Bad: must have both state_dict and load_state_dict, or neither"),
    ):
        with pytest.raises(PolicyError, match=message):
            as_source(type("Bad", (), {"masks": lambda self, step: {}, name: method}))
    with pytest.raises(PolicyError, match="must give masks"):
        prepared(as_source(type("Bad", (), {"masks": lambda self, step: None}))).masks(0, 0)


def test_a_function_with_some_arguments_given_is_told_by_its_own_name():
    def rows(name, parameter, step, *, share):
        return True

    assert "rows" in repr(gp.masks.Function(functools.partial(rows, share=0.5)))


def test_an_object_is_the_source_of_one_policy_only(stack) -> None:
    """A second one would set it up anew with other parameters."""
    source = OneParameter()
    policies = {name: gp.Freeze(source, params=f"{name}.*") for name in ("head", "embed")}
    with pytest.raises(PolicyError, match=r"policy\.embed: has the mask source of policy\.head"):
        freezer_of(stack, policies)
    twice = {name: gp.Freeze(OneParameter, params=f"{name}.*") for name in ("head", "embed")}
    assert freezer_of(stack, twice)[1].policies == ["head", "embed"]


class Watching:
    """Trains what had a positive gradient in the last step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def observe(self, gradients: dict[str, torch.Tensor]) -> None:
        self.seen.append({name: gradient.clone() for name, gradient in gradients.items()})

    def masks(self, step: int) -> dict[str, torch.Tensor]:
        return {name: gradient > 0 for name, gradient in (self.seen or [{}])[-1].items()}


class WatchingSource(Watching, MaskSource):
    """The same by inheritance."""

    def __init__(self) -> None:
        Watching.__init__(self)
        MaskSource.__init__(self)

    def observe(self, gradients: dict[str, torch.Tensor]) -> None:
        super().observe(gradients)

    def masks(self, step: int, epoch: int) -> dict[str, torch.Tensor]:
        return super().masks(step)


class WatchingModule(Watching, torch.nn.Module):
    """A module of its own, whose apply means something else."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        Watching.__init__(self)


class WatchingLater(Watching):
    """Says so once it knows the parameters."""

    needs_gradients = False

    def setup(self, parameters, *, seed: int) -> None:
        self.needs_gradients = True


@pytest.mark.parametrize("kind", [Watching, WatchingSource, WatchingModule, WatchingLater])
def test_what_observes_is_shown_gradients(stack, tokens, kind: type[Watching]) -> None:
    source = kind()
    _, freezer = freezer_of(stack, {"watching": gp.Freeze(source, params="head.*")})
    train(stack, freezer, tokens, range(2))
    assert torch.equal(freezer.mask_of("head.weight"), source.seen[0]["head.weight"] > 0)
    assert len(source.seen) == 2


def test_what_says_that_it_needs_no_gradients_is_shown_none() -> None:
    refusing = type("Refusing", (Watching,), {"needs_gradients": False})
    assert not as_source(refusing()).wants_gradients(0, 0)
