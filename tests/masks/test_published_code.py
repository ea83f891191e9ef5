"""Masks, rates and steps against those of the authors' published code, on the same inputs.

rigl-torch is run. What the code of the other repositories does was recorded on fixed inputs; each file names
the repository and its commit. `git show e1e659a:tests/masks/recorded/record.py` is the script that ran them;
those of scores (snip, wanda, lift) were recorded like these, on a CPU.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.masks.prune_and_grow import kept_entries
from gradpolicy.masks.scores import LIFT
from tests.masks.conftest import assert_same_masks, chosen

STEPS, EVERY, END = 40, 4, 30
RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def rigl_torch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package imports torchvision, of which it needs two classes to compare with."""
    if importlib.util.find_spec("torchvision") is None:
        residual = SimpleNamespace(Bottleneck=type("Bottleneck", (), {}), BasicBlock=type("Basic", (), {}))
        stand_in = ModuleType("torchvision")
        stand_in.models = SimpleNamespace(resnet=residual)
        monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    for name in ("rigl_torch", "rigl_torch.RigL", "rigl_torch.util"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("rigl_torch.RigL")


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_rigl_torch_chooses_the_same_topology(rigl_torch, prepared, density: float, window: int) -> None:
    layer = nn.Linear(24, 16, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    timing = {"delta": EVERY, "T_end": END, "grad_accumulation_n": window}
    settings = {"dense_allocation": density, "alpha": 0.4, "ignore_linear_layers": False, **timing}
    scheduler = rigl_torch.RigLScheduler(layer, optimizer, **settings)
    weight = torch.zeros(16, 24)
    source = gp.masks.PruneAndGrow(density, fraction=0.4, every=EVERY, stop=END, window=window)
    prepared(source, {"weight": weight})
    first = {"active": {"weight": scheduler.backward_masks[0].clone()}}
    source.load_state_dict({**source.state_dict(), **first})
    changes = 0
    for step in range(1, STEPS):
        gradient = torch.randn(16, 24)
        layer.zero_grad()
        (layer.weight * gradient).sum().backward()
        weight.copy_(layer.weight.detach())
        if source.gradient_names(step - 1, 0):
            source.observe({"weight": gradient})
        if scheduler():
            optimizer.step()
        else:
            changes += 1
            assert torch.equal(source.masks(step, 0)["weight"], scheduler.backward_masks[0])
            source.apply()
            assert torch.equal(weight, layer.weight)
        assert torch.equal(source.masks(step, 0)["weight"], scheduler.backward_masks[0])
    assert changes == (END - 1) // EVERY


def recorded(name: str) -> tuple[dict[str, Tensor], Callable[[str], dict[str, Tensor]]]:
    """What was recorded, and a function that gives the part under a prefix."""
    everything = load_file(RECORDED / f"{name}.safetensors")

    def under(prefix: str) -> dict[str, Tensor]:
        keys = [key for key in everything if key.startswith(f"{prefix}/")]
        return {key.removeprefix(f"{prefix}/"): everything[key].clone() for key in keys}

    return everything, under


def module_of(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module with parameters of these names."""
    model = nn.Module()
    for name, parameter in parameters.items():
        *path, own = name.split(".")
        module = model
        for part in path:
            module = module._modules.setdefault(part, nn.Module())
        module.register_parameter(own, parameter)
    return model


def steps_with(
    policy: gp.Freeze | dict[str, gp.Freeze],
    optimizer: Callable[..., torch.optim.Optimizer],
    weights: Mapping[str, Tensor],
    gradients: list[dict[str, Tensor]],
    first: int = 0,
) -> Iterator[tuple[dict[str, nn.Parameter], Freezer]]:
    """Trains parameters with given gradients; yields after each step, with its masked gradients."""
    parameters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    masked = gp.MaskedOptimizer(optimizer(parameters.values()))
    policies = policy if isinstance(policy, dict) else {"policy": policy}
    freezer = Freezer(module_of(parameters), [masked], policies)
    for number, given in enumerate(gradients):
        freezer.begin_step(first + number)
        for name, parameter in parameters.items():
            parameter.grad = given[name].clone() if parameter.requires_grad else None
        freezer.observe(masked)
        masked.mask_gradients()
        masked.step()
        yield parameters, freezer
        masked.zero_grad()


# Theirs adds eps before the bias correction; so small a one has no effect in either place.
child_tuning_adamw = functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-12, weight_decay=0.0)


def test_child_tuning_d_chooses_the_same_entries_and_takes_the_same_steps() -> None:
    _, under = recorded("child_tuning")
    gradients = [under(f"gradient/{number}") for number in range(8)]
    source = gp.masks.TopK(0.3, by="fisher", window=8, before="freeze")
    # The first pass gathers; in theirs, what is no "layer" does not take part and always trains.
    policy = gp.Freeze(source, params="layer.*")
    course = steps_with(policy, child_tuning_adamw, under("weight"), gradients + gradients)
    theirs = under("mask/inf")
    for step, (parameters, freezer) in enumerate(course):
        if step < 8:
            with torch.no_grad():
                parameters["head"].copy_(under("weight")["head"])
            continue
        for name, mask in theirs.items():
            assert torch.equal(freezer.mask_of(name), mask)
            expected = under(f"D/weight/{step - 8}")[name]
            torch.testing.assert_close(parameters[name].detach(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(parameters[name][~mask], under("weight")[name][~mask])


def recorded_scores(name: str):
    """A network of two layers, its batches, and the part under a prefix."""
    everything, under = recorded(name)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 4, bias=False))
    model.load_state_dict(under("weight"))
    count = sum(key.startswith("x/") for key in everything)
    return model, [(everything[f"x/{i}"], everything[f"y/{i}"]) for i in range(count)], under


def test_snip_chooses_the_same_connections() -> None:
    """Its code draws the weights anew before; recorded with that left out."""
    model, batches, under = recorded_scores("snip")
    assert_same_masks(chosen(model, batches, gp.masks.TopK(0.25, by="snip")), under("mask"))


@pytest.mark.parametrize(("key", "options"), [("half", {"density": 0.5, "within": "row"}), ("2:4", {})])
def test_wanda_keeps_the_same_weights(key: str, options: dict) -> None:
    model, batches, under = recorded_scores("wanda")
    source = gp.masks.TopK(by="wanda", window=4, level="entry" if options else "2:4", **options)
    assert_same_masks(chosen(model, batches, source), under(f"mask/{key}"))


def test_lift_chooses_the_same_principal_weights(prepared) -> None:
    _, under = recorded("lift")
    for name, theirs in under("mask").items():
        source = gp.masks.TopK(float(theirs.float().mean()), by=LIFT(rank=3))
        prepared(source, {name: under("weight")[name]})
        assert torch.equal(source.masks(0, 0)[name], theirs.bool())


@pytest.mark.parametrize(("order", "mode"), [("forward", "ascending"), ("reverse", "descending")])
def test_badam_takes_the_same_steps(order: str, mode: str) -> None:
    """Their first turn is one step short: they change where ``(step + 1) % K == 0``; the others are K."""
    _, under = recorded("badam")
    policy = gp.Freeze(gp.masks.BlockCyclic(order, every=4), frozen_state="zero")
    gradients = [under(f"gradient/{number}") for number in range(20)]
    adamw = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    for step, (parameters, _) in enumerate(steps_with(policy, adamw, under("weight"), gradients, first=1)):
        for name, theirs in under(f"{mode}/{step}").items():
            torch.testing.assert_close(parameters[name].detach(), theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("program", ["masked", "sparse"])
@pytest.mark.parametrize("number", range(3))
def test_set_keeps_the_same_weights_but_those_at_its_thresholds(program: str, number: int) -> None:
    """Theirs drops what equals a threshold too; of 10 positive weights 4 for 0.3, where the share is 3."""
    _, under = recorded("sparse_evolution")
    weight = under("weight")[str(number)]
    theirs, after = (under(f"{program}/{key}")[str(number)] for key in ("kept", "active"))
    active = weight != 0
    kept = kept_entries(active, weight, 0.3, int(active.sum()), by_sign=True)
    assert not (theirs & ~kept).any()
    for sign in (1, -1):
        side = kept & (weight * sign > 0)
        more = side & ~theirs
        assert 0 < int(more.sum()) <= 2
        # What only this keeps are the smallest of what it keeps.
        assert float((weight[more]).abs().max()) < float(weight[side & theirs].abs().min())
    assert int(after.sum()) == int(active.sum())


def test_ulmfit_thaws_the_same_groups_for_two_epochs(prepared) -> None:
    """The program then thaws all that is left at once; the paper, and this, one group after the other."""
    course = recorded("ulmfit")[0]["trains"].tolist()
    names = ["encoder.weight", *(f"rnns.{place}.weight" for place in range(3)), "decoder.weight"]
    source = prepared(gp.masks.Gradual(), {name: torch.zeros(2) for name in names})
    ours = [list(source.masks(0, epoch).values()) for epoch in range(5)]
    assert ours[:2] == course[:2]
    assert [sum(trains) for trains in ours] == [1, 2, 3, 4, 5]
    assert [sum(trains) for trains in course] == [1, 2, 5, 5, 5]
