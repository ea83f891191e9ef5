"""Phases of training, each ended by counts or by a metric that stops improving."""

import copy
import math

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from tests.freezing.conftest import freezer_of

STALL = {"metric": "val/loss", "patience": 2, "min_delta": 0.1}


def thawing(phases: list) -> gp.Freeze:
    """A policy with these phases."""
    return gp.Freeze(gp.masks.Phases(phases))


def step_once(model: nn.Module, tokens, *optimizers) -> None:
    model(tokens).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def phases_of(source, counts: list[tuple[int, int]]) -> list[int]:
    """The phase that holds at each step and epoch."""
    return [source.masks(step, epoch) and source.phase for step, epoch in counts]


def test_a_phase_lasts_its_steps_and_then_its_epochs(prepared) -> None:
    phases = [
        {"params": "head.*", "until": {"steps": 3}},
        {"params": "blocks.*", "until": {"epochs": 2}},
        {"params": "*", "until": {"epoch": 5}},
        {"params": "embed.*"},
    ]
    # Four steps an epoch: the second phase begins within the first epoch, and ends with the second.
    times = [(step, step // 4) for step in range(24)]
    assert phases_of(prepared(gp.masks.Phases(phases)), times) == [0] * 3 + [1] * 5 + [2] * 12 + [3] * 4


def test_phases_overlap_and_freeze_again(prepared, trained) -> None:
    phases = [
        {"params": "head.*", "until": {"steps": 1}},
        {"params": ["head.*", "blocks.3.*"], "until": {"steps": 1}},
        {"params": "embed.*"},
    ]
    source = prepared(gp.masks.Phases(phases))
    for step, expected in enumerate([{"head"}, {"head", "blocks.3"}, {"embed"}]):
        assert {name.rpartition(".")[0] for name in trained(source.masks(step, 0))} == expected


@pytest.mark.parametrize(
    ("mode", "values", "lasts"),
    [
        ("min", [3.0, 2.0, 1.0, 0.95, 0.93, 0.0], 5),  # better by less than min_delta is no improvement
        ("min", [1.0, 0.95, 0.85, 0.84, 0.83], 5),  # 0.85 is better than 1 by more
        ("min", [1.0, float("nan"), float("nan")], 3),
        ("min", [float("nan"), float("nan")], 2),
        ("max", [0.5, 0.7, 0.75, 0.6], 4),
    ],
)
def test_a_phase_ends_when_its_metric_stops_improving(prepared, mode: str, values, lasts) -> None:
    until = {**STALL, "mode": mode}
    source = prepared(gp.masks.Phases([{"params": "head.*", "until": until}, {"params": "*"}]))
    for step, value in enumerate(values):
        source.masks(step, 0)
        assert source.phase == (step >= lasts)
        source.report({"val/loss": value})
    source.masks(len(values), 0)
    assert source.phase == (len(values) >= lasts)


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


def test_a_phase_has_a_rate_and_settings_of_its_own(moves) -> None:
    thaw = [
        {"params": "*", "until": {"steps": 2}},
        {"params": "weight", "until": {"steps": 2}, "lr": 0.01, "maximize": True},
        {"params": {"weight": {"lr": 0.5}}, "lr": 7.0},
    ]
    assert moves([thawing(thaw)]) == [1.0, 1.0, -0.01, -0.01, 0.5, 0.5]
    # What a scheduler does to the optimizer's rate it does to the phase's.
    assert moves([thawing(thaw)], halves=True) == [1.0, 0.5, -0.0025, -0.00125, 0.03125, 0.015625]
    assert moves([thawing(thaw), gp.Rates({"*": 2.0})]) == [2.0, 2.0, -0.02, -0.02, 1.0, 1.0]


def test_a_schedule_of_a_phase_begins_with_it(moves) -> None:
    # finetuning-scheduler#1: how to change the learning-rate scheduler between phases.
    warm_up = gp.schedules.Linear(0.0, 0.4, steps=2)
    thaw = [{"params": "*", "until": {"steps": 2}}, {"params": "*", "lr": warm_up}]
    assert moves([thawing(thaw)]) == [1.0, 1.0, 0.0, 0.2, 0.4, 0.4]
    # It takes the place of the optimizer's scheduler.
    assert moves([thawing(thaw)], halves=True) == [1.0, 0.5, 0.0, 0.2, 0.4, 0.4]


@pytest.mark.parametrize("fused", [False, True])
def test_settings_of_phases_are_those_of_param_groups_made_by_hand(stack: nn.Module, tokens, fused) -> None:
    phases = [
        {"params": "head.*", "until": {"steps": 3}, "lr": 0.03, "weight_decay": 0.0},
        {"params": {"head.*": {"lr": 0.01}, "blocks.*": {"lr": 0.002, "betas": [0.8, 0.9]}}},
    ]
    peer = copy.deepcopy(stack.double())
    optimizer = torch.optim.AdamW(stack.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with gp.training(stack, optimizer, [thawing(phases)]) as masked:
        for _ in range(8):
            step_once(stack, tokens, masked, scheduler)
    peer.embed.requires_grad_(False)
    head = {"params": peer.head.parameters(), "lr": 0.03, "weight_decay": 0.0}
    by_hand = torch.optim.AdamW([head], lr=0.1, weight_decay=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(by_hand, 0.9)
    for _ in range(3):
        step_once(peer, tokens, by_hand, scheduler)
    by_hand.param_groups[0] |= {"lr": 0.01 * 0.9**3, "initial_lr": 0.01, "weight_decay": 0.1}
    blocks = {"params": peer.blocks.parameters(), "lr": 0.002 * 0.9**3, "betas": (0.8, 0.9)}
    by_hand.add_param_group(blocks)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(by_hand, 0.9, last_epoch=-1)
    for _ in range(5):
        step_once(peer, tokens, by_hand, scheduler)
    torch.testing.assert_close(stack.state_dict(), peer.state_dict(), rtol=0, atol=1e-12)


def test_finetuning_scheduler_6_what_a_phase_thaws_may_have_another_optimizer(stack, tokens) -> None:
    peer = copy.deepcopy(stack.double())
    entries = [
        {"params": "head.*", "optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
        {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.01},
    ]
    thaw = [{"params": "head.*", "until": {"steps": 3}}, {"params": ["head.*", "blocks.*"]}]
    with gp.training(stack, gp.Optimizers(stack, entries), [thawing(thaw)]) as optimizer:
        for _ in range(6):
            step_once(stack, tokens, optimizer)
    sgd = torch.optim.SGD(peer.head.parameters(), lr=0.1, momentum=0.9)
    adamw = torch.optim.AdamW(peer.blocks.parameters(), lr=0.01)
    for step in range(6):
        step_once(peer, tokens, sgd, *([adamw] if step >= 3 else []))
    torch.testing.assert_close(stack.state_dict(), peer.state_dict(), rtol=0, atol=1e-12)


def test_a_setting_that_the_optimizer_has_not_is_refused_before_the_first_step(stack: nn.Module) -> None:
    thaw = thawing([{"params": "*", "until": {"steps": 1}}, {"params": "*", "weight_dcay": 0.1}])
    with pytest.raises(PolicyError, match=r"policy\.thaw: .*'weight_dcay'; did you mean 'weight_decay'"):
        freezer_of(stack, {"thaw": thaw})


def test_the_last_phase_too_gives_its_best_weights_at_the_end(stack: nn.Module, tokens) -> None:
    phases = gp.masks.Phases([{"params": "head.*", "until": STALL, "best": True}])
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    with gp.training(stack, optimizer, [gp.Freeze(phases)]) as optimizer:
        for value in (1.0, 0.5, 0.8):
            step_once(stack, tokens, optimizer)
            phases.report({"val/loss": value})
            if value == 0.5:
                best = copy.deepcopy(stack.state_dict())
    assert all(torch.equal(value, best[name]) for name, value in stack.state_dict().items())


def test_a_training_that_ends_early_says_which_phases_never_began(stack, tokens, recwarn) -> None:
    policy = thawing([{"params": "head.*", "until": STALL}, {"params": "*"}])
    with gp.training(stack, torch.optim.SGD(stack.parameters()), [policy]) as optimizer:
        step_once(stack, tokens, optimizer)
    (warning,) = [str(each.message) for each in recwarn]
    assert warning == "Phases: the training ended in phase 0 (params head.*); 1 more never started"


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], r"Phases\.phases: expected a list of phases"),
        ({"params": "*"}, r"Phases\.phases: expected a list of phases"),
        ([3], r"phases\[0\]: expected a dict with keys"),
        ([{"until": {"steps": 1}}], r"phases\[0\]: params: expected globs"),
        ([{"params": "*"}, {"params": "*"}], r"phases\[0\]: until: is missing"),
        ([{"params": "*", "untl": {}}], r"phases\[0\]: .*'untl'.*did you mean 'until'"),
        ([{"params": "*", "until": {"epoch": 0}}], r"until\.epoch: expected an integer of at least 1"),
        ([{"params": "*", "until": {"stps": 3}}], r"until.*'stps'.*'steps'"),
        ([{"params": "*", "until": {"patience": 3}}], r"until\.patience: goes with until\.metric"),
        ([{"params": "*", "until": {"metric": "a", "mode": "mn"}}], r"until\.mode: .*'min'"),
        ([{"params": "*", "until": {"metric": "a", "min_delta": -1}}], r"until\.min_delta: expected"),
        ([{"params": "*", "until": {"steps": 3}, "best": True}], r"best: needs until\.metric"),
        ([{"params": "*", "lr": -1.0}], r"phases\[0\]: lr: expected a number of at least 0"),
        ([{"params": {"*": {"lr": "fast"}}}], r"phases\[0\]: params: '\*': lr: expected a number"),
        ([{"params": "*", "weight_decay": math.nan}], r"phases\[0\]: weight_decay: expected a number"),
        ([{"params": {"*": 0.1}}], r"params: '\*': expected a dict of settings"),
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
    with pytest.raises(PolicyError, match="was saved in phase 1, but this run has 1 phases"):
        fewer.load_state_dict(source.state_dict())
