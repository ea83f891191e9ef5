"""Updates in the backward pass end where updates in step() do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.policies import Policy
from tests.fixtures import TwoLayers, quiet_trainer

STEPS = 12


class Network(nn.Module):
    """A tied head, a convolution, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.conv = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        hidden = self.layer(self.layer(hidden).tanh())
        return self.head(hidden).logsumexp(-1).mean()


def freeze(source: Any, **settings: Any) -> list[Policy]:
    return [gp.Freeze(source, params="*.weight", **settings)]


POLICIES: dict[str, Callable[[], list[Policy]]] = {
    "none": list,
    "rows": lambda: freeze(gp.masks.Rows([0, 3]), frozen_state="drop"),
    "rows that change": lambda: freeze(gp.masks.Random(0.4, level="row", every=2)),
    "columns": lambda: freeze(gp.masks.Rows([0, 3], dim=1)),
    "entries": lambda: freeze(gp.masks.Random(0.2, every=3), frozen_state="zero"),
    "entries of one age": lambda: freeze(gp.masks.Random(0.2, every=3), bias_correction="tensor"),
    "packed entries": lambda: freeze(gp.masks.Random(0.2, every=3), frozen_state="drop"),
    "layers in turn": lambda: [gp.Freeze(gp.masks.BlockCyclic(every=2), params="*")],
    "the largest weights": lambda: freeze(gp.masks.TopK(0.5, by="magnitude", every=4)),
    "rates and a gradient policy": lambda: [
        gp.Rates({"layer.*": 0.1, "head.*": gp.schedules.Linear(0.0, 1.0, steps=6)}),
        gp.Clip(norm=0.01, modules="layer"),
        *freeze(gp.masks.Random(0.3)),
    ],
}


def of(kind: Any, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), lr=0.05, **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": of(torch.optim.AdamW),
    "fused AdamW": of(torch.optim.AdamW, fused=True, amsgrad=True),
    "SGD": of(torch.optim.SGD, momentum=0.9, nesterov=True),
    "two groups": lambda model: torch.optim.RMSprop(
        [
            {"params": [model.embedding.weight], "lr": 0.02},
            {"params": [*model.conv.parameters(), *model.layer.parameters()]},
        ]
    ),
    "named": lambda model: torch.optim.NAdam(model.named_parameters(), lr=0.05),
    "put back": of(torch.optim.Adadelta),
}


def tokens(step: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(step))


def train(make: Any, policies: list[Policy], *, in_backward: bool) -> tuple[nn.Module, Any]:
    model = Network()
    given = make(model)
    with gp.training(model, given, policies, seed=0, step_in_backward=in_backward) as optimizer:
        for step in range(STEPS):
            model(tokens(step)).backward()
            if in_backward:
                assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return model, (optimizer.effective_steps, copy.deepcopy(optimizer.state_dict()))


@pytest.mark.supports("rows", "tensors", "step in backward", loop="plain")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policies", POLICIES)
def test_the_course_is_the_same_bit_for_bit(policies: str, optimizer: str) -> None:
    ends = []
    for in_backward in (True, False):
        make = OPTIMIZERS[optimizer]
        ends.append(train(make, POLICIES[policies](), in_backward=in_backward))
    (model, saved), (reference, wanted) = ends
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))
    assert_same(saved, wanted)


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(plain(found), plain(wanted), rtol=0, atol=0, equal_nan=True)


def plain(tree: Any) -> list[Any]:
    """All tensors and numbers of nested containers."""
    if isinstance(tree, dict):
        return [each for key in sorted(tree, key=str) for each in plain(tree[key])]
    if isinstance(tree, list | tuple):
        return [each for value in tree for each in plain(value)]
    return [tree] if isinstance(tree, Tensor | int | float) else []


def test_several_optimizers_and_joined_ones() -> None:
    entries = [
        {"params": "layer.weight", "optimizer": torch.optim.Muon, "lr": 0.01},
        {"params": "*", "optimizer": torch.optim.AdamW, "lr": 0.05},
    ]
    ends = [
        train(
            lambda model: gp.Optimizers(model, copy.deepcopy(entries)),
            freeze(gp.masks.Random(0.4, level="row", every=2)),
            in_backward=in_backward,
        )
        for in_backward in (True, False)
    ]
    assert_same(dict(ends[0][0].state_dict()), dict(ends[1][0].state_dict()))


def test_weights_move_in_the_backward_pass_and_one_gradient_exists_at_a_time() -> None:
    model = Network()
    optimizer, alive = torch.optim.AdamW(model.parameters()), []
    before = copy.deepcopy(model.state_dict())
    with gp.training(model, optimizer, [], step_in_backward=True) as optimizer:
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.register_hook(lambda _: alive.append(sum(p.grad is not None for p in parameters)))
        model(tokens(0)).backward()
        assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert optimizer.effective_steps == 0
        after = copy.deepcopy(model.state_dict())
        optimizer.step()
        assert_same(dict(model.state_dict()), dict(after))
        assert optimizer.effective_steps == 1
    assert alive == [0] * len(list(model.parameters()))
    model(tokens(1)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_of_a_second_batch_are_refused() -> None:
    model = Network()
    with gp.training(model, torch.optim.SGD(model.parameters()), [], step_in_backward=True):
        model(tokens(0)).backward()
        with pytest.raises(PolicyError, match=r"second gradient .* expected one backward pass for each step"):
            model(tokens(1)).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    model, ends = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), []
    for in_backward in (True, False):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(copied.parameters(), lr=0.1)
        policies = [gp.Freeze(gp.masks.Random(0.5, level="row"), params="*weight")]
        with gp.training(copied, optimizer, policies, step_in_backward=in_backward) as optimizer:
            for _ in range(3):
                x = torch.ones(2, 4, requires_grad=True)
                for layer in copied:
                    x = checkpoint(layer, x, use_reentrant=reentrant).tanh()
                x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(dict(copied.state_dict()))
    assert_same(*ends)


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    ends = []
    for runs in ([range(STEPS)], [range(5), range(5, STEPS)]):
        model, saved = Network(), None
        for steps in runs:
            policies = freeze(gp.masks.Random(0.4, level="row", every=2))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            with gp.training(model, optimizer, policies, step_in_backward=True) as masked:
                if saved is not None:
                    masked.load_state_dict(saved)
                for step in steps:
                    model(tokens(step)).backward()
                    masked.step()
                saved = copy.deepcopy(masked.state_dict())
        ends.append(dict(model.state_dict()))
    assert_same(*ends)


# ---- what is refused by name


def schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    import schedulefree

    return schedulefree.AdamWScheduleFree(model.parameters())


REFUSED: dict[str, tuple[Any, list[Policy], dict[str, Any], str]] = {
    "LBFGS": (of(torch.optim.LBFGS), [], {}, "found LBFGS"),
    "a schedule-free rule": (schedule_free, [], {}, "found AdamWScheduleFree"),
    "an optimizer that counts for a group": (of(pytorch_optimizer.Prodigy), [], {}, "found Prodigy"),
    "gradients to compare": (
        of(torch.optim.SGD),
        freeze(gp.masks.TopK(0.3, by="gradient", every=2, window=1)),
        {},
        r"policy\.freeze: TopK compares gradients",
    ),
    "a scaler": (of(torch.optim.SGD), [], {"scaler": torch.amp.GradScaler("cpu")}, "found GradScaler"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_all_gradients_at_once_is_refused(case: str) -> None:
    make, policies, settings, message = REFUSED[case]
    model = Network()
    block = gp.training(model, make(model), copy.deepcopy(policies), step_in_backward=True, **settings)
    with pytest.raises(PolicyError, match=message), block:
        pass
    model(tokens(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_step_with_a_closure_is_refused() -> None:
    model = Network()
    block = gp.training(model, torch.optim.SGD(model.parameters()), [], step_in_backward=True)
    with block as optimizer, pytest.raises(PolicyError, match="found a closure"):
        optimizer.step(lambda: model(tokens(0)))


def test_a_scaler_that_nobody_named_is_refused() -> None:
    model, scaler = Network(), torch.amp.GradScaler("cpu")
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with gp.training(model, fused, [], step_in_backward=True) as optimizer:
        scaler.scale(model(tokens(0))).backward()
        with pytest.raises(PolicyError, match="found GradScaler"):
            scaler.step(optimizer)


# ---- Lightning


def fit(policies: list[Policy], *, in_backward: bool, **settings: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, policies = TwoLayers(), copy.deepcopy(policies)
    callback = gp.GradientPolicies(
        {str(number): each for number, each in enumerate(policies)}, step_in_backward=in_backward
    )
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    quiet_trainer(callbacks=[callback], **settings).fit(model, DataLoader(data, batch_size=2))
    return dict(model.state_dict())


@pytest.mark.supports("step in backward", loop="lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policies", ["none", "rows that change", "entries", "layers in turn"])
def test_lightning_moves_the_same_bits(policies: str) -> None:
    given = POLICIES[policies]()
    assert_same(*(fit(given, in_backward=in_backward, log_every_n_steps=1) for in_backward in (True, False)))


TRAINER: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"accumulate_grad_batches": 2}, "found accumulate_grad_batches=2"),
    "clipping": ({"gradient_clip_val": 0.5}, r"found gradient_clip_val=0\.5"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TRAINER)
def test_lightning_refuses_what_needs_all_gradients_at_once(case: str) -> None:
    settings, message = TRAINER[case]
    with pytest.raises(PolicyError, match=message):
        fit([], in_backward=True, **settings)
