"""The audit: what holds is counted, and each planted fault is found."""

import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from pydantic import ValidationError

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.insight.audit import Audit
from gradpolicy.insight.audit_checks import FrozenEntries, bits_at

FULL = {"entries": None}


def half(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == 0).reshape(parameter.shape)


def frozen(frozen_state="keep"):
    mask = gp.masks.Function(half, every=100)
    return {"half": gp.Freeze(mask, params="trunk.*", frozen_state=frozen_state)}


def turning(every=1):
    return {"turns": gp.Freeze(gp.masks.Random(0.5, every=every), params="trunk.*", frozen_state="keep")}


@pytest.fixture
def fit(fit, tmp_path):
    """Trains with an audit and gives what it wrote."""

    def run(policies, *others, audit=(), max_epochs=3, **settings):
        watcher = Audit(tmp_path, **dict(audit))
        fit(watcher, gp.GradientPolicies(policies), *others, max_epochs=max_epochs, **settings)
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
@pytest.mark.parametrize("audit", [FULL, {}])
def test_frozen_entries_are_found_unchanged(fit, state, audit):
    report = fit(frozen(state), audit=audit)
    assert report["intervals"] > 0
    assert report["entries"] > 0
    assert (report["changed"], report["differences"]) == (0, [])
    assert report["sampled"] is (not audit)


def test_all_entries_of_each_interval_are_compared(fit, capsys):
    report = fit(turning(every=4), audit={**FULL, "every": 100})
    # Four tensors, and changes at 4, 8 and 12; the first update makes the state that is kept.
    assert report["intervals"] == 4 * (3 + 1)
    assert "frozen entries: 16 intervals, 0 changed" in capsys.readouterr().out


@pytest.mark.parametrize("entries", [7, 16, 63])
def test_places_are_drawn_anew_from_the_whole_tensor(two_layers, entries):
    weight = two_layers.trunk[2].weight
    optimizer = gp.MaskedOptimizer(torch.optim.SGD([weight], lr=0.1))
    policies = {"rows": gp.Freeze(gp.masks.Rows([1]), params="trunk.2.weight")}
    freezer = Freezer(two_layers, [optimizer], policies)
    frozen = FrozenEntries(freezer, entries=entries, every=1, seed=0, report=lambda _: None)
    freezer.begin_step(0)
    seen = set()
    for step in range(1, 101):
        optimizer.effective_steps = step
        frozen.renew()
        (snapshot,) = frozen._snapshots.values()
        places = snapshot.places.tolist()
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


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start", "on_before_zero_grad"])
@pytest.mark.parametrize("audit", [FULL, {}])
def test_a_callback_that_writes_to_a_frozen_weight_is_found(fit, tmp_path, hook, audit):
    write = Meddler(lambda _, module: module.trunk[0].weight.add_(1e-3), hook)
    audit = {**audit, "entries": None} if audit else {"every": 1}
    with pytest.raises(gp.PolicyError, match=r"trunk\.") as error:
        fit({"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.0.*")}, write, audit=audit)
    assert "policy.trunk" in str(error.value)
    (found,) = written(tmp_path)["differences"]
    assert found["tensor"] == "trunk.0.weight"
    assert found["what"] == "weight"


def test_the_exact_entries_and_the_step_are_named(fit, tmp_path):
    with pytest.raises(
        gp.PolicyError, match=r"1 of 16 frozen entries of the weight .* update 4, at \(0, 1\)"
    ):
        fit(frozen(), Meddler(write_one), audit={**FULL, "every": 5})
    report = written(tmp_path)
    (found,) = report["differences"]
    assert report["changed"] == found["count"] == 1
    assert (found["step"], found["indices"], found["policy"]) == (4, [[0, 1]], "half")


def write_to_state(trainer, pl_module):
    trainer.optimizers[0].state[pl_module.trunk[0].weight]["exp_avg"].add_(1e-9)


def take_off_the_mask(trainer, pl_module):
    trainer.optimizers[0].set_mask(pl_module.trunk[0].weight, None)


@pytest.mark.parametrize(("act", "what"), [(write_to_state, "state exp_avg"), (take_off_the_mask, "weight")])
def test_what_is_done_to_the_optimizer_behind_the_policies_back_is_found(fit, tmp_path, act, what):
    with pytest.raises(gp.PolicyError, match=f"frozen entries of the {what} changed"):
        fit(frozen(), Meddler(act), audit=FULL)
    assert written(tmp_path)["differences"][0]["what"] == what


@pytest.mark.parametrize("audit", [FULL, {}])
def test_weights_that_are_written_as_training_ends_are_found(fit, tmp_path, audit):
    write = Meddler(lambda _, module: [p.add_(1e-3) for p in module.parameters()], "on_train_end", at=0)
    with pytest.raises(gp.PolicyError, match="frozen entries of the weight changed"):
        fit(turning(every=4), write, audit=audit)
    assert written(tmp_path)["changed"] >= 1


def test_a_warning_lets_the_run_go_on(fit):
    with pytest.warns(UserWarning, match=r"audit: trunk\.0\.weight .* 1 of 16 frozen"):
        report = fit(frozen(), Meddler(write_one), audit={**FULL, "on_difference": "warn", "every": 5})
    assert report["changed"] == 1
    # Of four tensors, between the updates 0, 1, 5 and 10, and the epochs' ends at 4, 8 and 12.
    assert report["intervals"] == 4 * 6


# ---- flow policies


@pytest.mark.parametrize("mode", ["detach", "zero"])
def test_a_stopped_branch_gets_exactly_zero(fit, mode, capsys):
    report = fit({"cut": gp.Stop(mode, modules="head")}, audit=FULL)
    assert report["stopped_branches"]["checked"] >= 12
    assert report["stopped_branches"]["nonzero"] == 0
    assert "stopped branches" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["detach", pytest.param("zero", marks=pytest.mark.slow)])
def test_under_manual_optimization_the_cuts_are_looked_at(fit, two_layers, mode):
    def training_step(batch, batch_idx):
        optimizer = two_layers.optimizers()
        loss = type(two_layers).training_step(two_layers, batch, batch_idx)
        two_layers.manual_backward(loss)
        optimizer.step()
        # Gone at the end of the batch, which is no sign of a cut.
        optimizer.zero_grad()

    two_layers.automatic_optimization = False
    two_layers.training_step = training_step
    report = fit({"cut": gp.Stop(mode, modules="head")}, audit=FULL)
    assert report["stopped_branches"] == {"checked": 12, "nonzero": 0}


def test_a_stop_that_compiled_code_hides_is_said_to_be_unchecked(fit, two_layers, capsys):
    # What other tests compiled counts towards the limit after which torch gives up.
    torch.compiler.reset()
    two_layers.head.compile(backend="eager")
    report = fit({"cut": gp.Stop(modules="head")}, audit=FULL)
    assert report["stopped_branches"] == {"checked": 0, "nonzero": 0}
    assert capsys.readouterr().out.endswith("0 changed; stopped branches: 0 checks\n")


def test_a_gradient_of_a_stopped_parameter_is_found(fit, tmp_path):
    def write(trainer, pl_module):
        pl_module.head.bias.grad = torch.full_like(pl_module.head.bias, 1e-30)

    with pytest.raises(gp.PolicyError, match=r"policy\.cut: head\.bias is stopped, .* 2 entries in update 4"):
        fit({"cut": gp.Stop(params="head.bias")}, Meddler(write, "on_before_optimizer_step"), audit=FULL)
    (found,) = written(tmp_path)["differences"]
    assert (found["tensor"], found["what"], found["count"], found["step"]) == ("head.bias", "gradient", 2, 4)


def test_policies_that_come_and_go_by_their_schedule_are_no_difference(fit):
    policies = {
        "cut": gp.Stop(modules="head", when=gp.When(start=2, stride=3)),
        "round": gp.StraightThrough(ops=["round"], when=gp.When(stride=2)),
    }
    report = fit(policies, audit=FULL)
    assert report["stopped_branches"]["checked"] > 3
    assert report["differences"] == []


# ---- checkpoints


def test_a_resumed_run_adds_to_what_was_counted_before(fit, tmp_path):
    def keep():
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)

    whole = fit(turning(every=5), keep(), audit=FULL, enable_checkpointing=True)
    torch.manual_seed(0)
    begun = tmp_path / "step=6.ckpt"
    assert fit(turning(every=5), keep(), audit=FULL, ckpt_path=begun, enable_checkpointing=True) == whole


@pytest.mark.parametrize(
    "garbage",
    [{"intervals": torch.zeros(3)}, {"entries": -1}, {"differences": [{"tensor": "a"}]}],
)
def test_a_checkpoint_with_garbage_for_counts_is_refused(fit, tmp_path, garbage):
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    fit(turning(), saving, enable_checkpointing=True)
    checkpoint = torch.load(tmp_path / "step=6.ckpt", weights_only=True)
    checkpoint[Audit.KEY] |= garbage
    torch.save(checkpoint, tmp_path / "garbage.ckpt")
    with pytest.raises(ValidationError, match="for AuditFile"):
        fit(turning(), ckpt_path=tmp_path / "garbage.ckpt")


@pytest.mark.parametrize("audit", [FULL, {"entries": 16}])
def test_nothing_is_lost_between_a_checkpoint_and_the_next_batch(fit, tmp_path, audit):
    late = Meddler(lambda _, module: module.trunk[0].weight.add_(1), at=5)
    keep = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=6)
    policies = {"one": gp.Freeze(gp.masks.Fixed(False), params="trunk.0.weight")}
    with pytest.raises(gp.PolicyError, match="frozen entries of the weight changed"):
        fit(policies, keep, late, audit={**audit, "every": 100}, enable_checkpointing=True)


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"entries": 0}, "entries"), ({"every": 0}, "every"), ({"on_difference": "stopp"}, "on_difference")],
)
def test_wrong_arguments_are_refused(arguments, key):
    with pytest.raises(gp.PolicyError, match=rf"callbacks\.audit\.{key}"):
        Audit(**arguments)


def test_an_audit_without_policies_does_nothing(two_layers, loader, make_trainer, tmp_path, capsys):
    make_trainer(callbacks=[Audit(tmp_path)]).fit(two_layers, loader)
    assert written(tmp_path)["intervals"] == 0
    assert capsys.readouterr().out == ""


# ---- what writes to frozen entries by design, when masks change


SOURCES = {
    "block_cyclic": lambda: gp.masks.BlockCyclic(every=2),
    "gradual": lambda: gp.masks.Gradual(),
    "layerwise": lambda: gp.masks.Layerwise(active=1, every=2),
    "prune_and_grow": lambda: gp.masks.PruneAndGrow(0.3, every=3, stop=9),
    "prune_and_grow at random": lambda: gp.masks.PruneAndGrow(0.3, grow="random", every=2),
    "rows": lambda: gp.masks.Rows([1]),
    "topk": lambda: gp.masks.TopK(0.3, every=3),
    "topk of tensors": lambda: gp.masks.TopK(0.5, level="tensor", every=3),
}


@pytest.mark.parametrize("state", ["keep", pytest.param("drop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", SOURCES)
def test_a_mask_source_that_keeps_its_word_is_no_difference(fit, source, state):
    policies = {"some": gp.Freeze(SOURCES[source](), params="*", frozen_state=state)}
    report = fit(policies, audit={**FULL, "every": 5}, accumulate_grad_batches=2, max_epochs=6)
    assert report["intervals"] > 0
    assert report["differences"] == []
