"""Training by gradients of active rows alone moves what training by masked whole gradients moves."""

import copy
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gradpolicy as gp
from gradpolicy.tensors.row_gradient import RowGradient
from tests.fixtures import quiet_trainer

STEPS = 6
SOURCES: dict[str, Callable[[], Any]] = {
    "fixed rows": lambda: gp.masks.Rows([0, 3]),
    "columns": lambda: gp.masks.Rows([0, 3], dim=1),
    "rows that change": lambda: gp.masks.Random(0.4, level="row", every=2),
    "entries that change": lambda: gp.masks.Random(0.2, every=2),
}


class Classifier(lightning.LightningModule):
    """Notes of each step how many gradients hold rows alone."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11))
        self.held: list[int] = []
        if whole:
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: None)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch).logsumexp(-1).mean()

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.held.append(sum(isinstance(p.grad, RowGradient) for p in self.parameters()))


def batches() -> Tensor:
    return torch.randint(0, 11, (2 * STEPS, 5), generator=torch.Generator().manual_seed(1))


def in_a_plain_loop(model: Classifier, policies: dict[str, gp.Freeze]) -> None:
    with gp.training(model, model.configure_optimizers(), policies, seed=0) as optimizer:
        for number, batch in enumerate(batches()):
            (model(batch) / 2).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                model.on_before_zero_grad(optimizer)
                optimizer.zero_grad()


def under_lightning(model: Classifier, policies: dict[str, gp.Freeze]) -> None:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    trainer = quiet_trainer(callbacks=[gp.GradientPolicies(policies)], **settings)
    trainer.fit(model, DataLoader(batches(), batch_size=None))


def with_installed_flow_policies(model: Classifier, policies: dict[str, gp.Freeze]) -> None:
    flow = [gp.Guided(), gp.Clip(norm=0.05, modules="net.1"), gp.Scale(0.5, ops=["embedding"])]
    with gp.install(model, flow):
        in_a_plain_loop(model, policies)


@pytest.mark.supports("rows", "row gradients", "accumulation", "clipping", loop=("plain", "lightning"))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [in_a_plain_loop, under_lightning, with_installed_flow_policies])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("source", SOURCES)
def test_rows_move_as_with_whole_gradients(source, frozen_state, train):
    policies = {"rows": gp.Freeze(SOURCES[source](), params="*.weight", frozen_state=frozen_state)}
    model, reference = Classifier(), Classifier(whole=True)
    before = copy.deepcopy(model.state_dict())
    for each in (model, reference):
        train(each, copy.deepcopy(policies))
    # Of entries only where their state is packed too.
    rows = 2 if train is with_installed_flow_policies else 3  # whole where a rule is the operation's own
    assert max(model.held) == (0 if "entries" in source and frozen_state == "keep" else rows)
    assert not any(reference.held)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert not any(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_other_rows_are_added_to_gradients_that_are_not_set_to_none(source: str, zeroed: bool) -> None:
    """First while the rows change, and, after four updates, when everything trains."""
    freeze = gp.Freeze(SOURCES[source](), params="*.weight", frozen_state="drop", when=gp.When(stop=4))
    model, reference = Classifier(), Classifier(whole=True)
    for each in (model, reference):
        with gp.training(each, each.configure_optimizers(), [copy.deepcopy(freeze)], seed=0) as optimizer:
            for batch in batches():
                each(batch).backward()
                optimizer.step()
                each.on_before_zero_grad(optimizer)
                if zeroed:
                    optimizer.zero_grad(set_to_none=False)
    assert any(model.held)
    assert not any(reference.held)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, reference.state_dict()[name])


def test_a_gradient_of_rows_stays_small_at_the_end_of_a_block() -> None:
    model = nn.Linear(3, 4)
    freeze = gp.Freeze(gp.masks.Rows([0, 1]), params="weight")
    with gp.training(model, torch.optim.AdamW(model.parameters()), [freeze], seed=0) as optimizer:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert type(model.weight) is nn.Parameter
    assert isinstance(model.weight.grad, RowGradient)


MASKS = {
    "rows": torch.tensor([[False], [True], [True], [False]]),
    "columns": torch.tensor([[False, True, True]]),
    "entries": torch.arange(1, 13).view(4, 3) % 5 == 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_every_update_rule_takes_rows(rule, dtype, mask):
    """In C, and in torch's kernels, which take float16."""
    weights = [nn.Parameter(torch.arange(12.0).view(4, 3).to(dtype)) for _ in range(2)]
    for number, weight in enumerate(weights):
        optimizer = gp.MaskedOptimizer(rule([weight], lr=0.1), frozen_state="drop")
        optimizer.set_mask(weight, MASKS[mask])
        rows = optimizer.active_rows(weight)
        for step in range(3):
            whole = torch.sin(weight.detach() + step)
            weight.grad = whole if number else RowGradient(rows.select(whole), *rows, weight.shape)
            assert optimizer.gradient(weight) is weight.grad
            optimizer.step()
    assert torch.equal(*weights)


def test_entries_have_a_gradient_of_their_own_where_that_saves_memory() -> None:
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state="drop")
    for active in (16, 17):
        optimizer.set_mask(weight, (torch.arange(64) < active).view(8, 8))
        assert (optimizer.active_rows(weight) is None) is (active > 16)


def test_rows_of_another_mask_count_where_they_are_active() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = gp.MaskedOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer.set_mask(weight, torch.tensor([[False], [True], [True], [False]]))
    weight.grad = RowGradient(torch.ones(2, 3), torch.tensor([2, 3]), 0, weight.shape)
    optimizer.step()
    assert weight[:, 0].tolist() == [0, 0, -1, 0]


def test_a_source_that_needs_whole_gradients_gets_them_when_it_chooses() -> None:
    model = Classifier()
    source = gp.masks.TopK(0.3, by="gradient", level="row", every=3, window=1)
    in_a_plain_loop(model, {"rows": gp.Freeze(source, params="*.weight")})
    assert 0 in model.held
    assert max(model.held) > 0
