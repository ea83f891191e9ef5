"""Functions of the user's own, and subclasses of `MaskSource`, are mask sources."""

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


def test_a_function_gives_masks_by_its_timetable(prepared) -> None:
    every_step, every_fifth = prepared(as_source(alternate)), prepared(gp.masks.Function(alternate, every=5))
    for step in (0, 1):
        assert every_step.masks(step, 0)["head.bias"].tolist() == [step == 0, step == 1, step == 0]
    assert every_fifth.masks(9, 0)["head.bias"].tolist() == [False, True, False]
    assert [every_fifth.period(step, 0) for step in (0, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "expected a mask source"),
        (gp.masks.Gradual, "expected a mask source"),
        (type("Bare", (), {"masks": lambda self, step: {}})(), "expected a mask source"),
        (lambda name: True, r"must take \(name, parameter, step\)"),
    ],
)
def test_other_objects_are_refused(given, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        as_source(given)


def test_a_partial_is_described_by_its_function() -> None:
    def rows(name, parameter, step, *, share):
        return True

    assert "rows" in repr(gp.masks.Function(functools.partial(rows, share=0.5)))


class Watching(MaskSource):
    """Trains what had a positive gradient in the last step."""

    def __init__(self, **timetable) -> None:
        super().__init__(**timetable)
        self.seen: list[dict[str, torch.Tensor]] = []

    def observe(self, gradients: dict[str, torch.Tensor]) -> None:
        self.seen.append({name: gradient.clone() for name, gradient in gradients.items()})

    def masks(self, step: int, epoch: int) -> dict[str, torch.Tensor]:
        return {name: gradient > 0 for name, gradient in (self.seen or [{}])[-1].items()}


def test_a_source_that_observes_gets_gradients(stack, tokens) -> None:
    source = Watching()
    _, freezer = freezer_of(stack, {"watching": gp.Freeze(source, params="head.*")})
    train(stack, freezer, tokens, range(2))
    assert torch.equal(freezer.mask_of("head.weight"), source.seen[0]["head.weight"] > 0)
    assert len(source.seen) == 2


def test_a_source_belongs_to_one_policy(stack) -> None:
    source = Watching()
    policies = {name: gp.Freeze(source, params=f"{name}.*") for name in ("head", "embed")}
    with pytest.raises(PolicyError, match=r"policy\.embed: has the mask source of policy\.head"):
        freezer_of(stack, policies)
