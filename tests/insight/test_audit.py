"""The audit: what holds is counted, and each planted fault is found."""

import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.insight.audit import Audit, bits_at

WHOLE = {"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.0.weight")}


def turning(every=1, frozen_state="keep"):
    return {
        "turns": gp.Freeze(gp.masks.Random(0.5, every=every), params="trunk.*", frozen_state=frozen_state)
    }


@pytest.fixture
def fit(fit, tmp_path):
    """Trains with an audit and gives what it wrote."""

    def run(policies, *others, max_epochs=3, **settings):
        fit(Audit(tmp_path), gp.GradientPolicies(policies), *others, max_epochs=max_epochs, **settings)
        return written(tmp_path)

    return run


def written(directory):
    return json.loads((directory / "audit.json").read_text())


class Meddler(Callback):
    """Does something to the model after its fourth batch."""

    def __init__(self, act, hook="on_train_batch_end", at=3):
        self.act, self.at, self.batches = act, at, 0
        setattr(self, hook, self.do)

    def do(self, trainer, pl_module, *_):
        if self.batches == self.at:
            with torch.no_grad():
                self.act(trainer, pl_module)
        self.batches += 1


def write_one(trainer, pl_module):
    pl_module.trunk[0].weight[0, 1] += 1e-3


# ---- what holds


@pytest.mark.parametrize("state", ["keep", "zero", "drop"])
def test_counts_each_interval_between_masks(fit, state, capsys):
    report = fit(turning(every=8, frozen_state=state), max_epochs=7)
    # Four tensors over 28 updates: until 8, and from 20 to 24 and 28.
    assert report["intervals"] == 4 * 2
    assert report["entries"] > 0
    assert (report["changed"], report["sampled"], report["differences"]) == (0, False, [])
    assert "frozen entries: 8 intervals, 0 changed" in capsys.readouterr().out


@pytest.mark.parametrize("entries", [7, 16, 63])
def test_draws_places_anew_from_the_whole_tensor(two_layers, entries):
    weight = two_layers.trunk[2].weight
    optimizer = gp.MaskedOptimizer(torch.optim.SGD([weight], lr=0.1))
    policies = {"rows": gp.Freeze(gp.masks.Rows([1]), params="trunk.2.weight")}
    freezer = Freezer(two_layers, [optimizer], policies)
    freezer.begin_step(0)
    audit, seen = Audit(entries=entries), set()
    for step in range(1, 101):
        optimizer.effective_steps = step
        places = audit._frozen_indices(freezer, "trunk.2.weight").tolist()
        assert len(set(places)) == len(places) <= entries
        seen |= set(places)
    # All of the eight rows but the one that trains.
    assert seen == {place for place in range(64) if place // 8 != 1}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.int16],
)
def test_any_flipped_bit_shows(dtype):
    tensor = torch.randint(1, 100, (3, 4)).to(dtype)
    places = torch.arange(12)
    before = bits_at(tensor.t(), places)
    raw = tensor.view(torch.uint8)
    for byte in range(raw.shape[1]):
        for bit in range(8):
            raw[1, byte] ^= 1 << bit
            changed = (bits_at(tensor.t(), places) != before).any(1)
            assert changed.nonzero().flatten().tolist() == [3 * (byte // tensor.element_size()) + 1]
            raw[1, byte] ^= 1 << bit


# ---- planted faults


@pytest.mark.parametrize(
    ("hook", "at"), [("on_train_batch_end", 3), ("on_before_zero_grad", 3), ("on_train_end", 0)]
)
def test_names_what_another_callback_writes_to_a_frozen_weight(fit, tmp_path, hook, at):
    match = r"audit: trunk\.0\.weight \(policy\.trunk\): 1 of 32 frozen entries changed between update 0 and"
    with pytest.raises(gp.PolicyError, match=match):
        fit(WHOLE, Meddler(write_one, hook, at))
    report = written(tmp_path)
    assert report["changed"] == len(report["differences"]) == 1


def test_finds_a_mask_that_is_taken_off_behind_the_policys_back(fit, tmp_path):
    def take_off(trainer, pl_module):
        trainer.optimizers[0].set_mask(pl_module.trunk[0].weight, None)

    with pytest.raises(gp.PolicyError, match="frozen entries changed"):
        fit(turning(every=100), Meddler(take_off))
    assert written(tmp_path)["differences"][0].startswith("trunk.0.weight (policy.turns)")


# ---- checkpoints


def test_a_resumed_run_adds_to_what_was_counted_before(fit, tmp_path):
    def keep():
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)

    whole = fit(turning(every=5), keep(), enable_checkpointing=True)
    torch.manual_seed(0)
    begun = tmp_path / "step=6.ckpt"
    assert fit(turning(every=5), keep(), ckpt_path=begun, enable_checkpointing=True) == whole


def test_loses_nothing_between_a_checkpoint_and_the_next_batch(fit, tmp_path):
    keep = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=6)
    with pytest.raises(gp.PolicyError, match="frozen entries changed"):
        fit(WHOLE, keep, Meddler(write_one, at=5), enable_checkpointing=True)


# ---- arguments


def test_does_nothing_without_policies(two_layers, loader, make_trainer, tmp_path, capsys):
    make_trainer(callbacks=[Audit(tmp_path)]).fit(two_layers, loader)
    assert written(tmp_path)["intervals"] == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(gp.PolicyError, match=r"callbacks\.audit\.entries"):
        Audit(entries=0)


# ---- what writes to frozen entries by design, when masks change


SOURCES = {
    "gradual": lambda: gp.masks.Gradual(),
    "layerwise": lambda: gp.masks.Layerwise(active=1, every=2),
    "prune_and_grow": lambda: gp.masks.PruneAndGrow(0.3, every=3, stop=9),
    "rows": lambda: gp.masks.Rows([1]),
    "topk": lambda: gp.masks.TopK(0.3, every=3),
    "topk of tensors": lambda: gp.masks.TopK(0.5, level="tensor", every=3),
}


@pytest.mark.parametrize("state", ["keep", pytest.param("drop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", SOURCES)
def test_what_a_source_writes_as_masks_change_is_no_difference(fit, source, state):
    policies = {"some": gp.Freeze(SOURCES[source](), params="*", frozen_state=state)}
    report = fit(policies, accumulate_grad_batches=2, max_epochs=12)
    assert report["intervals"] > 0
    assert report["differences"] == []
