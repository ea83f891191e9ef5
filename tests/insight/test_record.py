"""The record tells what policies did, costs nothing where it is off, and resumes without gap or doubling."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from process_pool import ProcessPool
from record_program import train
from torch import Tensor

import gradpolicy as gp
from gradpolicy.insight import record
from gradpolicy.insight.record import RECORD, Record


def freeze(**settings: Any) -> gp.Freeze:
    mask = gp.masks.Random(0.5, every=settings.pop("every", 2))
    return gp.Freeze(mask, **{"params": "trunk.*", "frozen_state": "zero", **settings})


@pytest.fixture
def fit(fit, tmp_path):
    """Trains under policies, and records that."""

    def run(policies, *more, **settings):
        settings = {"max_epochs": 2, "log_every_n_steps": 4, **settings}
        return fit(*more, Record(tmp_path), gp.GradientPolicies(policies), **settings)

    return run


class Reference(Callback):
    """Computes the numbers of each update anew from what torch and the optimizer tell."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.rows: dict[tuple[int, str], dict[str, float]] = {}
        self.masks: dict[str, Tensor] = {}

    def on_train_start(self, trainer, pl_module):
        self.parameters = {name: p for name, p in pl_module.named_parameters() if name in self.names}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights = {name: p.detach().clone() for name, p in self.parameters.items()}

    def on_after_backward(self, trainer, pl_module):
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        for name, parameter in self.parameters.items():
            mask = optimizer.get_mask(parameter).expand(parameter.shape)
            before, gradient = self.weights[name], self.gradients[name]
            state = optimizer.state[parameter]
            moved = parameter.detach() - before
            self.rows[trainer.global_step, name] = {
                "active": float(mask.sum()),
                "flipped": float((mask != self.masks.get(name, mask)).sum()),
                "update_size": float(moved.norm() / before.norm()),
                "gradient_norm_before": float(gradient.norm()),
                "gradient_norm_after": float((gradient * mask).norm()),
                "moments": float(sum(state[key].nbytes for key in ("exp_avg", "exp_avg_sq"))),
            }
            self.masks[name] = mask.clone()


def test_each_parameter_is_measured_at_every_logged_step(fit, two_layers, tmp_path):
    names = [name for name, _ in two_layers.named_parameters() if name.startswith("trunk")]
    reference = Reference(names)
    fit({"trunk": freeze(every=3)}, reference)
    table = record.load(tmp_path).query("kind == 'freeze'")
    assert sorted({*zip(table["step"], table["parameter"], strict=True)}) == sorted(
        (step, name) for step in (4, 8) for name in names
    )
    for row in table.to_dict("records"):
        expected = reference.rows[row["step"], row["parameter"]]
        assert row["active"] == expected["active"]
        # Masks changed before the updates 1, 4 and 7: since the row before, once or twice.
        flipped = sum(
            reference.rows[step, row["parameter"]]["flipped"]
            for step in range(row["step"] - 3, row["step"] + 1)
        )
        assert row["flipped"] == flipped > 0
        assert row["state_bytes"] > expected["moments"]
        assert row["active_share"] == row["active"] / row["entries"]
        for key in ("update_size", "gradient_norm_before", "gradient_norm_after"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5)


def test_a_layer_is_the_sum_of_its_parameters(fit, tmp_path):
    fit({"trunk": freeze()})
    table = record.load(tmp_path)
    whole = table.query("kind == 'layer' and step == 4 and layer == 'trunk.0'").iloc[0]
    parts = table.query("kind == 'freeze' and step == 4 and layer == 'trunk.0'")
    assert list(parts["parameter"]) == ["trunk.0.weight", "trunk.0.bias"]
    for key in ("entries", "active", "flipped", "state_bytes"):
        assert whole[key] == parts[key].sum()
    for key in ("gradient_norm_before", "gradient_norm_after", "weight_norm"):
        assert whole[key] == pytest.approx((parts[key] ** 2).sum() ** 0.5)
    moved = ((parts["update_size"] * parts["weight_norm"]) ** 2).sum() ** 0.5
    assert whole["update_size"] == pytest.approx(moved / whole["weight_norm"])


@gp.rule("record_test_first_half")
def first_half(grad, inputs, output):
    """Lets the first half of each sample's gradient through, twice as large."""
    keep = torch.arange(grad.shape[-1]) < grad.shape[-1] // 2
    return torch.where(keep, 2 * grad, torch.zeros_like(grad))


def test_flow_policies_are_measured_in_training(fit, two_layers, loader, tmp_path):
    seen = {}

    class Gradients(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            (seen[trainer.global_step + 1],) = torch.autograd.grad(loss, pl_module.rounded, retain_graph=True)

    class Rounding(type(two_layers)):
        def forward(self, x):
            self.rounded = torch.round(self.trunk(x) * 4)
            return self.head(self.rounded / 4)

    model = Rounding()
    rule = gp.UseRule("record_test_first_half", ops=["round"], when=gp.When(phases=("fit", "test")))
    trainer = fit({"half": rule}, Gradients(), model=model)
    trainer.test(model, loader, verbose=False)
    table = record.load(tmp_path).query("kind == 'flow' and policy == 'half'")
    # Rounding ran once in each of these updates.
    assert list(table["operations"]) == [1, 1]
    for row in table.to_dict("records"):
        gradient = seen[row["step"]]
        assert row["gradient_norm_before"] == pytest.approx(float(gradient.norm()))
        assert row["gradient_norm_after"] == pytest.approx(float(2 * gradient[:, :4].norm()))
        assert row["zeros_passed"] == 0.5
        assert row["active"]


class SaveAt(Checkpoint):
    """Saves after these batches, once every other callback has seen them."""

    def __init__(self, folder: Path, batches: tuple[int, ...]) -> None:
        self.folder, self.batches = folder, batches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx in self.batches:
            trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


@pytest.mark.parametrize(("accumulated", "batches"), [(1, (2, 3, 9)), (2, (6, 7, 10))])
def test_a_resumed_run_has_the_record_of_the_undisturbed_one(tmp_path, accumulated, batches):
    settings = {
        "max_steps": 14 // accumulated,
        "accumulate_grad_batches": accumulated,
        "val_check_interval": 5,
        "limit_val_batches": 1,
        "limit_train_batches": 15,
    }
    alone = tmp_path / "alone"
    train(alone, SaveAt(tmp_path, batches), **settings)
    text = (alone / RECORD).read_text()
    for batch in batches:
        train(alone, resume=tmp_path / f"{batch}.ckpt", **settings)
        assert (alone / RECORD).read_text() == text


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    def writer(size=None):
        policies, callback = gp.GradientPolicies({}), Record(tmp_path)
        trainer = SimpleNamespace(is_global_zero=True, current_epoch=0, callbacks=[policies], ckpt_path=None)
        if size is not None:
            callback.load_state_dict({"size": size})
        callback.setup(trainer, None, "fit")
        callback.on_train_start(trainer, None)
        return policies.sinks[0]

    write = writer()
    write(1, {"p": {"kind": "flow"}})
    write(2, {"q": {"kind": "flow", "zeros_passed": float("nan")}})
    whole = (tmp_path / RECORD).read_bytes()
    assert b"null" in whole
    (tmp_path / RECORD).write_bytes(whole + b'{"kind":"mem')
    assert list(record.load(tmp_path)["step"]) == [1, 2]
    writer(len(whole) + 3)(3, {"q": {"kind": "flow"}})
    assert list(record.load(tmp_path)["step"]) == [1, 2, 3]


@pytest.mark.parametrize(("content", "message"), [(None, "holds no record.jsonl"), ("[1]\n", "line 1")])
def test_what_is_no_record_is_told(tmp_path, content, message):
    if content is not None:
        (tmp_path / RECORD).write_text(content)
    with pytest.raises(gp.PolicyError, match=message):
        record.load(tmp_path)


def test_no_link_out_of_the_directory_is_followed(tmp_path):
    (tmp_path / "theirs").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).symlink_to(tmp_path / "theirs")
    with pytest.raises(gp.PolicyError, match=r"holds no record\.jsonl of its own"):
        record.load(tmp_path / "run")


# ---- many processes


def recorded(strategy: str, kind: str, directory: str) -> None:
    from runs import fit as run

    run(strategy, kind, settings={"callbacks": [Record(directory)], "log_every_n_steps": 2})


@pytest.mark.mostly_slow
@pytest.mark.parametrize("kind", ["entries", "all kinds"])
def test_two_ranks_give_one_record(pair: ProcessPool, tmp_path: Path, kind: str) -> None:
    recorded("one process", kind, str(tmp_path / "alone"))
    alone = record.load(tmp_path / "alone")
    for strategy in ("ddp", "fsdp2") if kind == "entries" else ("ddp",):
        pair(recorded, strategy, kind, str(tmp_path / strategy))
        together = record.load(tmp_path / strategy)
        numbers = [column for column in alone if alone[column].dtype == "float64"]
        words = [column for column in alone if column not in numbers]
        pandas.testing.assert_frame_equal(together[words], alone[words])
        # Counts and small ages are held on every rank.
        held = [column for column in numbers if column != "state_bytes" or strategy == "ddp"]
        pandas.testing.assert_frame_equal(together[held], alone[held], rtol=1e-4)
