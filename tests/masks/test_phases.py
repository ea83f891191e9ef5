"""Phases of training, each ended by counts or by a metric that stops improving."""

import copy
import warnings

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError

STALL = {"metric": "val/loss", "patience": 2, "min_delta": 0.1}


def phases_of(source, counts: list[tuple[int, int]]) -> list[int]:
    """The phase that holds at each step and epoch."""
    return [source.masks(step, epoch) and source.phase for step, epoch in counts]


def test_a_phase_lasts_its_steps_and_then_its_epochs(prepared) -> None:
    source = prepared(
        gp.masks.Phases(
            [
                {"params": "head.*", "until": {"steps": 3}},
                {"params": "blocks.*", "until": {"epochs": 2}},
                {"params": "*", "until": {"epoch": 5}},
                {"params": "embed.*"},
            ]
        )
    )
    # Four steps an epoch: the second phase begins within the first epoch, and ends with the second.
    times = [(step, step // 4) for step in range(24)]
    assert phases_of(source, times) == [0] * 3 + [1] * 5 + [2] * 12 + [3] * 4


def test_phases_overlap_and_freeze_again(prepared, trained) -> None:
    source = prepared(
        gp.masks.Phases(
            [
                {"params": "head.*", "until": {"steps": 1}},
                {"params": ["head.*", "blocks.3.*"], "until": {"steps": 1}},
                {"params": "embed.*"},
            ]
        )
    )
    own = {name.split(".weight")[0].split(".bias")[0] for name in trained(source.masks(0, 0))}
    assert own == {"head"}
    assert {name.split(".")[0] for name in trained(source.masks(1, 0))} == {"head", "blocks"}
    assert {name.split(".")[0] for name in trained(source.masks(2, 0))} == {"embed"}


@pytest.mark.parametrize(
    ("values", "lasts"),
    [
        ([3.0, 2.0, 1.0, 0.95, 0.93, 0.0], 5),  # better by less than min_delta is no improvement
        ([1.0, 0.95, 0.85, 0.84, 0.83], 5),  # 0.85 is better than 1 by more
        ([1.0, float("nan"), float("nan")], 3),
        ([float("nan"), float("nan")], 2),
    ],
)
def test_a_phase_ends_when_its_metric_stops_improving(prepared, values: list[float], lasts: int) -> None:
    source = prepared(gp.masks.Phases([{"params": "head.*", "until": STALL}, {"params": "*"}]))
    for step, value in enumerate(values):
        source.masks(step, 0)
        assert source.phase == (step >= lasts)
        source.report({"val/loss": value})
    source.masks(len(values), 0)
    assert source.phase == (len(values) >= lasts)


def test_a_metric_may_be_best_where_it_is_greatest(prepared) -> None:
    until = {"metric": "val/accuracy", "patience": 1, "mode": "max"}
    source = prepared(gp.masks.Phases([{"params": "head.*", "until": until}, {"params": "*"}]))
    for step, (value, phase) in enumerate([(0.5, 0), (0.6, 0), (0.6, 0), (0.7, 1)]):
        source.masks(step, 0)
        assert source.phase == phase
        source.report({"val/accuracy": torch.tensor(value)})


def test_what_comes_first_ends_a_phase(prepared) -> None:
    source = prepared(
        gp.masks.Phases([{"params": "head.*", "until": {**STALL, "epochs": 2}}, {"params": "*"}])
    )
    for epoch, phase in enumerate([0, 0, 1]):
        source.masks(epoch, epoch)
        assert source.phase == phase
        source.report({"val/loss": -epoch})


def test_the_best_weights_come_back_and_nothing_else_changes(prepared, stack: nn.Module) -> None:
    source = prepared(gp.masks.Phases([{"params": "head.*", "until": STALL, "best": True}, {"params": "*"}]))
    seen = []
    for step, value in enumerate([1.0, 0.7, 0.69, 0.75]):
        source.masks(step, 0)
        with torch.no_grad():
            stack.head.weight.add_(1.0)
        seen.append(copy.deepcopy(stack.state_dict()))
        source.report({"val/loss": value})
    source.masks(4, 0)
    # 0.69 is no improvement by min_delta, but the best all the same.
    assert all(torch.equal(value, seen[2][name]) for name, value in stack.state_dict().items())


def test_the_last_phase_too_gives_its_best_weights_at_the_end(stack: nn.Module, tokens) -> None:
    phases = gp.masks.Phases([{"params": "head.*", "until": STALL, "best": True}])
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    with gp.training(stack, optimizer, [gp.Freeze(phases)]) as optimizer:
        for value in (1.0, 0.5, 0.8):
            stack(tokens).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            phases.report({"val/loss": value})
            if value == 0.5:
                best = copy.deepcopy(stack.state_dict())
    assert all(torch.equal(value, best[name]) for name, value in stack.state_dict().items())


def test_a_training_that_ends_early_says_which_phases_never_began(stack: nn.Module, tokens) -> None:
    phases = gp.masks.Phases([{"params": "head.*", "until": STALL}, {"params": "*"}])
    optimizer = torch.optim.SGD(stack.parameters())
    with (
        warnings.catch_warnings(record=True) as caught,
        gp.training(stack, optimizer, [gp.Freeze(phases)]) as optimizer,
    ):
        stack(tokens).sum().backward()
        optimizer.step()
    assert [str(each.message) for each in caught] == [
        "Phases: the training ended in phase 0 (params head.*); 1 more never began"
    ]


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], r"Phases\.phases: must be a list of phases"),
        ({"params": "*"}, r"Phases\.phases: must be a list of phases"),
        ([3], r"phases\[0\]: must be a dict with params"),
        ([{"until": {"steps": 1}}], r"phases\[0\]: params: must be globs"),
        ([{"params": "*"}, {"params": "*"}], r"phases\[0\]: until: is missing"),
        ([{"params": "*", "untl": {}}], r"phases\[0\]: .*'untl'.*did you mean 'until'"),
        ([{"params": "*", "until": {"epoch": 0}}], r"until\.epoch: must be a whole number of at least 1"),
        ([{"params": "*", "until": {"stps": 3}}], r"until.*'stps'.*'steps'"),
        ([{"params": "*", "until": {"patience": 3}}], r"until\.patience: goes with until\.metric"),
        ([{"params": "*", "until": {"metric": "a", "mode": "mn"}}], r"until\.mode: .*'min'"),
        ([{"params": "*", "until": {"metric": "a", "min_delta": -1}}], r"until\.min_delta: must be"),
        ([{"params": "*", "until": {"steps": 3}, "best": True}], r"best: needs until\.metric"),
    ],
)
def test_a_wrong_phase_is_named(phases, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        gp.masks.Phases(phases)


def test_names_are_checked_when_they_are_known(prepared) -> None:
    with pytest.raises(PolicyError, match=r"phases\[1\]\.params: .*'heed\.\*' matches nothing; .*'head\.\*'"):
        prepared(gp.masks.Phases([{"params": "*", "until": {"steps": 1}}, {"params": "heed.*"}]))
    source = prepared(gp.masks.Phases([{"params": "*", "until": STALL}]))
    source.masks(0, 0)
    with pytest.raises(PolicyError, match="'val/loss' was not logged; did you mean 'val_loss'"):
        source.report({"val_loss": 1.0})
    with pytest.raises(PolicyError, match=r"Phases\.every: means nothing here"):
        gp.masks.Phases([{"params": "*"}], every=2)


def test_a_checkpoint_of_more_phases_is_refused(prepared) -> None:
    source = prepared(gp.masks.Phases([{"params": "*", "until": {"steps": 1}}, {"params": "*"}]))
    source.masks(0, 0)
    source.masks(1, 0)
    fewer = prepared(gp.masks.Phases([{"params": "*"}]))
    with pytest.raises(PolicyError, match="is of phase 1, and there are 1"):
        fewer.load_state_dict(source.state_dict())
