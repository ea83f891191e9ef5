"""Training by gradients of active rows moves what training by masked gradients moves."""

import copy
from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gradpolicy as gp
from gradpolicy.freezing.row_gradients import _RowForward
from tests.fixtures import quiet_trainer

STEPS = 6
SOURCES: dict[str, Callable[[], Any]] = {
    "fixed rows": lambda: gp.masks.Rows([0, 3]),
    "columns": lambda: gp.masks.Rows([0, 3], dim=1),
    "rows that change": lambda: gp.masks.Random(0.4, level="row", every=2),
    "entries that change": lambda: gp.masks.Random(0.2, every=2),
}


class Classifier(lightning.LightningModule):
    """Notes for each step how many modules compute gradients of rows only."""

    def __init__(self, *, dense: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 11))
        self.restricted: list[int] = []
        for layer in (self.net[1], self.net[3]) if dense else ():
            layer.forward = lambda x, layer=layer: F.linear(x, layer.weight, layer.bias)

    def forward(self, batch: Tensor) -> Tensor:
        return self.net(batch).logsumexp(-1).mean()

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.restricted.append(sum(isinstance(vars(layer).get("forward"), _RowForward) for layer in self.net))


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
def test_rows_move_as_with_dense_gradients(source, frozen_state, train):
    policies = {"rows": gp.Freeze(SOURCES[source](), params="*.weight", frozen_state=frozen_state)}
    model, reference = Classifier(), Classifier(dense=True)
    before = copy.deepcopy(model.state_dict())
    for each in (model, reference):
        train(each, copy.deepcopy(policies))
    if train is not with_installed_flow_policies:  # their function mode has to see ordinary products
        assert max(model.restricted) == (2 if "rows" in source else 0)
    assert not any(reference.restricted)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert not any(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_other_rows_are_added_to_gradients_that_are_not_set_to_none(source: str, zeroed: bool) -> None:
    """First while the rows change, and, after four updates, when everything trains."""
    freeze = gp.Freeze(SOURCES[source](), params="*.weight", frozen_state="drop", when=gp.When(stop=4))
    model, reference = Classifier(), Classifier(dense=True)
    for each in (model, reference):
        with gp.training(each, each.configure_optimizers(), [copy.deepcopy(freeze)], seed=0) as optimizer:
            for batch in batches():
                each(batch).backward()
                optimizer.step()
                each.on_before_zero_grad(optimizer)
                if zeroed:
                    optimizer.zero_grad(set_to_none=False)
    assert any(model.restricted) is ("rows" in source)
    assert not any(reference.restricted)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, reference.state_dict()[name])


def test_a_source_that_needs_all_gradients_gets_them_when_it_chooses() -> None:
    model = Classifier()
    source = gp.masks.TopK(0.3, by="gradient", level="row", every=3, window=1)
    in_a_plain_loop(model, {"rows": gp.Freeze(source, params="*.weight")})
    assert 0 in model.restricted
    assert max(model.restricted) > 0
