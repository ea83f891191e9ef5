"""GradientPolicies: what happens when in a Lightning run."""

import contextlib
import copy
import csv
import functools
import importlib
import itertools
import math
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

import gradpolicy as gp
from gradpolicy.planning.plan import training_loss
from gradpolicy.train.measurements import Measurements, summary
from tests.fixtures import TwoLayers


class Recorder(Callback):
    """Remembers the parameters after each batch."""

    def __init__(self):
        self.weights = []
        self.requires_grad = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        self.requires_grad.append({name: p.requires_grad for name, p in pl_module.named_parameters()})


class Fails(Callback):
    def on_train_batch_end(self, *_):
        raise RuntimeError("on purpose")


class ByHand(TwoLayers):
    """Two layers that step their optimizers, one a part, by themselves."""

    automatic_optimization = False
    parts = ("trunk", "head")

    def configure_optimizers(self):
        return [torch.optim.SGD(getattr(self, name).parameters(), lr=0.05) for name in self.parts]

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()


def bits(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def half(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == 0).reshape(parameter.shape)


def alternating(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == step % 2).reshape(parameter.shape)


def recording(steps):
    """A mask under which everything trains, and which writes down the steps for which it is asked."""

    def everything(name, parameter, step):
        steps.append(step)
        return True

    return everything


HALF = {"half": gp.Freeze(half, params="head.weight")}
TRUNK = {"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*")}
ROUNDING = {"rounding": gp.StraightThrough(ops=["round"])}


def loss_scaler(**settings):
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **settings))


def logged(trainer):
    """The rows of a run's log, each without what it lacks."""
    with open(trainer.logger.experiment.metrics_file_path) as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_masks_change_between_effective_steps_only(two_layers, train, precision):
    recorder = Recorder()
    policies = {"turns": gp.Freeze(alternating, params="head.weight")}
    start = two_layers.head.weight.detach().clone()
    train(policies, recorder, max_epochs=2, accumulate_grad_batches=2, precision=precision)
    history = [start, *(weights["head.weight"] for weights in recorder.weights)]
    for batch, (old, new) in enumerate(itertools.pairwise(history)):
        if batch % 2 == 0:
            assert torch.equal(old, new), "an accumulated batch takes no step"
        else:
            assert torch.equal(old != new, alternating("", new, batch // 2))


@pytest.mark.supports("clipping", loop="lightning")
def test_masked_gradients_do_not_count_in_the_clipping_norm(train):
    norms = []

    class Watch(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.nn.utils.get_total_norm(gradients).item())

    train(TRUNK, Watch(), max_steps=3, gradient_clip_val=1e-3)
    assert norms
    assert all(math.isclose(norm, 1e-3, rel_tol=1e-3) for norm in norms)


class Reader(Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pass


class OwnClipping:
    def configure_gradient_clipping(self, *_, **__):
        pass


class OwnStep:
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class OwnLog:
    def on_before_optimizer_step(self, optimizer):
        pass


@pytest.mark.parametrize(
    ("settings", "readers", "mixed_in"),
    [
        ({"gradient_clip_val": 1e9}, [], ()),
        ({}, [Reader()], ()),
        ({}, [], (OwnClipping,)),
        ({}, [], (OwnStep,)),
        ({}, [], (OwnLog,)),
    ],
)
def test_gradients_are_masked_where_somebody_may_read_them(train, settings, readers, mixed_in):
    remaining = []

    class Module(*mixed_in, TwoLayers):
        def on_before_zero_grad(self, optimizer):
            gradient = self.head.weight.grad
            if gradient is not None:
                remaining.append(bool(gradient[~half("", gradient, 0)].any()))

    train(HALF, *readers, module=Module(), max_steps=3, **settings)
    assert remaining == [False] * 2


@pytest.mark.parametrize("sees_gradients", [False, True])
def test_under_manual_optimization_too(train, sees_gradients):
    norms = []

    class Manual(TwoLayers):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            if sees_gradients:
                optimizer.mask_gradients()
            self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
            active = self.head.weight.grad[half("", self.head.weight, 0)]
            rest = [p.grad for p in self.parameters() if p.grad is not None and p is not self.head.weight]
            norms.append(float(torch.nn.utils.get_total_norm([active, *rest])))
            optimizer.step()

    module = Manual()
    before = module.head.weight.detach().clone()
    fisher = {"fisher": gp.Freeze(gp.masks.TopK(0.5, window=2), params="trunk.*")} if sees_gradients else {}
    train({**HALF, **fisher}, module=module, max_steps=3)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)
    assert torch.equal(module.head.weight != before, half("", before, 0))


class Slower(gp.masks.MaskSource):
    """Lets everything train at a quarter of the learning rate."""

    def masks(self, step, epoch):
        return {}

    def settings(self, step, epoch):
        return {name: {"lr": 0.25} for name in self.parameters}


def test_a_rate_of_a_layers_own_is_in_force_when_the_update_is_first_seen(train):
    """Another loss may be computed with the weights, and other callbacks may save or average them."""

    class Manual(TwoLayers):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            expected = self.head.weight.detach() - 0.25 * 0.05 * self.head.weight.grad
            optimizer.step()
            torch.testing.assert_close(self.head.weight.detach(), expected)

    module = Manual(torch.optim.SGD)
    before = module.head.weight.detach().clone()
    train({"slower": gp.Freeze(Slower(), params="head.*")}, module=module)
    assert not torch.equal(module.head.weight, before)


def test_an_optimizer_that_a_module_keeps_serves_one_fit_after_the_other(two_layers, train):
    optimizer = torch.optim.AdamW(two_layers.parameters(), lr=0.05)
    two_layers.configure_optimizers = lambda: optimizer
    for frozen, active in (("trunk.0.weight", "head.weight"), ("head.weight", "trunk.2.weight")):
        asked = []

        def nothing(name, parameter, step, asked=asked):
            asked.append(step)
            return False

        before = bits(two_layers)
        train({"part": gp.Freeze(nothing, params=frozen, frozen_state="drop")})
        after = bits(two_layers)
        assert torch.equal(before[frozen], after[frozen])
        assert not torch.equal(before[active], after[active])
        assert asked == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*under other policies")
@pytest.mark.parametrize(
    ("former", "kind"),
    [
        ([], TwoLayers),
        ([ROUNDING], TwoLayers),
        # Lightning's own count adds up the steps of all optimizers.
        ([], ByHand),
    ],
)
def test_steps_until_a_run_without_masks_was_saved_count(train, tmp_path, former, kind):
    asked, module = [], kind()
    train(*former, module=module).save_checkpoint(tmp_path / "before.ckpt")
    policies = {"all": gp.Freeze(recording(asked), params="head.bias")}
    train(policies, module=module, resume=tmp_path / "before.ckpt", max_epochs=2)
    assert asked == [4, 5, 6, 7]


def test_parameters_that_a_finetuning_schedule_adds_are_refused(train):
    class Finetuned(TwoLayers):
        @property
        def backbone(self):
            return self.trunk

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    policies = gp.GradientPolicies({"half": gp.Freeze(half, params=["trunk.0.weight", "head.weight"])})
    thaw = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.05)
    with pytest.raises(gp.PolicyError, match=r"policy.half: trunk.0.weight joined the optimizer during"):
        train(policies, thaw, module=Finetuned(), max_epochs=2)


def test_optimizers_that_replace_those_of_the_start_are_refused(train):
    class MakesAnew(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.strategy.setup_optimizers(trainer)

    with pytest.raises(gp.PolicyError, match=r"AdamW.step would update .*head.weight.* past the policies"):
        train(HALF, MakesAnew(), max_epochs=2)


def test_a_step_past_the_policies_is_refused(train):
    class Own(TwoLayers):
        automatic_optimization = False

        def configure_optimizers(self):
            self.own = super().configure_optimizers()
            return self.own

        def training_step(self, batch, index):
            super().training_step(batch, index).backward()
            self.own.step()

    module = Own()
    before = bits(module)
    with pytest.raises(gp.PolicyError, match=r"would update head.weight past the policies: call step"):
        train(HALF, module=module)
    assert same(before, bits(module))
    module.own.zero_grad()


class Shown(gp.masks.MaskSource):
    """Writes down the gradients that it is shown."""

    def prepare(self):
        self.seen = []

    def masks(self, step, epoch):
        return {}

    def observe(self, gradients):
        self.seen.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))


def test_sources_see_no_loss_scale_and_no_skipped_step(two_layers, train):
    """A fused optimizer would take the gradients with their scale, which changes within a window."""
    runs = []
    for fused in (False, True):
        module, source = copy.deepcopy(two_layers), Shown()
        module.optimizer = functools.partial(torch.optim.AdamW, fused=fused)
        precision = loss_scaler(init_scale=2.0**18, growth_interval=2)
        policies = {"head": gp.Freeze(source, params="head.*")}
        trainer = train(policies, module=module, max_epochs=2, plugins=[precision])
        runs.append(source.seen)
        assert len(source.seen) == trainer.strategy.optimizers[0].effective_steps < trainer.global_step
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_scaler_takes_an_optimizer_that_is_wholly_frozen(train, fused, manual):
    class Part(TwoLayers):
        automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    module, recorder = Part(functools.partial(torch.optim.AdamW, fused=fused)), Recorder()
    before = bits(module)
    policies = {"start": gp.Freeze(gp.masks.Fixed(False), when=gp.When(stop=2))}
    train(policies, recorder, module=module, plugins=[loss_scaler(init_scale=4.0)])
    moved = [not same(weights, before) for weights in recorder.weights]
    assert moved == [False, False, True, True]


def test_a_network_that_freezes_leaves_its_own_loss_a_backward_pass(train):
    """Under manual optimization nothing but one optimizer's parameters may be on."""

    class Turns(ByHand):
        def training_step(self, batch, batch_idx):
            for part, optimizer in zip((self.trunk, self.head), self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.head(self.trunk(batch[0])).square().mean())
                optimizer.step()
                self.untoggle_optimizer(optimizer)
                assert all(parameter.requires_grad for parameter in part.parameters())

    module = Turns()
    before = bits(module)
    train(TRUNK, module=module)
    after = bits(module)
    assert torch.equal(after["trunk.0.weight"], before["trunk.0.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_found(two_layers, train, fails):
    def shape():
        return {
            name: (dict(m._forward_hooks), "forward" in vars(m)) for name, m in two_layers.named_modules()
        }

    before = shape()
    policies = {**ROUNDING, **TRUNK, "cut": gp.Stop(modules="head")}
    with pytest.raises(RuntimeError, match="on purpose") if fails else contextlib.nullcontext():
        train(policies, *[Fails()] * fails, max_steps=2)
    assert shape() == before
    assert all(parameter.requires_grad for parameter in two_layers.parameters())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (gp.Stop(modules="trunk.0"), "no gradient crosses input of module 'trunk.0'"),
        (gp.Scale(0.5, modules="spare"), "module 'spare' never ran through its forward"),
    ],
)
def test_a_policy_that_cannot_act_where_it_is_is_a_warning(two_layers, train, policy, message):
    two_layers.spare = torch.nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=f"policy 'it': {message}"):
        train(gp.GradientPolicies({"it": policy}), max_steps=2)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": gp.Stop(modules="haed")}, "haed.*head"),
        ({"a": gp.Freeze(half, params="trnk.*")}, r"policy\.a\.params.*trnk.*trunk"),
        ({"a": gp.Guided(), "b": gp.Deconv()}, "a.*b"),
    ],
)
def test_a_wrong_place_ends_the_run_before_its_first_step(train, policies, message):
    recorder = Recorder()
    with pytest.raises(gp.PolicyError, match=message):
        train(policies, recorder, max_steps=2)
    assert recorder.weights == []


def test_an_operation_that_is_never_met_ends_the_run(train):
    with pytest.raises(gp.PolicyError, match=r"wrong.*floor.*round"):
        train({"wrong": gp.StraightThrough(ops=["floor"])}, max_steps=2)


def test_learning_rate_schedulers_see_the_steps_of_the_wrapped_optimizer(two_layers, train):
    def configure():
        optimizer = torch.optim.AdamW(two_layers.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    two_layers.configure_optimizers = configure
    trainer = train(HALF, max_steps=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.125)


@pytest.mark.supports("gradient sources", loop="lightning")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_ends_with_the_same_bits(two_layers, train, tmp_path):
    def policies():
        return {
            "random": gp.Freeze(gp.masks.Random(density=0.5, every=3), params="trunk.*", frozen_state="zero"),
            "top": gp.Freeze(gp.masks.TopK(0.5, by="gradient", window=2, every=3), params="head.*"),
            **ROUNDING,
        }

    twin = copy.deepcopy(two_layers)
    train(policies(), max_epochs=4)
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    train(policies(), saving, module=twin, max_epochs=2, enable_checkpointing=True)
    train(policies(), module=twin, resume=tmp_path / "last.ckpt", max_epochs=4)
    assert same(bits(two_layers), bits(twin))


def test_a_checkpoint_that_was_tested_leaves_nothing_for_the_next_fit(
    two_layers, loader, make_trainer, train, tmp_path
):
    def callback():
        return gp.GradientPolicies({"top": gp.Freeze(gp.masks.TopK(0.5, every=4))})

    twin = copy.deepcopy(two_layers)
    train(callback(), module=copy.deepcopy(two_layers)).save_checkpoint(tmp_path / "first.ckpt")
    tested = make_trainer(callbacks=[callback()])
    tested.test(copy.deepcopy(two_layers), loader, tmp_path / "first.ckpt", verbose=False, weights_only=True)
    tested.fit(two_layers, loader)
    train(callback(), module=twin)
    assert same(bits(two_layers), bits(twin))


@pytest.mark.filterwarnings("ignore:.*(under other policies|it is re-initialised)")
@pytest.mark.parametrize("name", ["trunk", "other"])
def test_what_no_policy_freezes_any_more_trains_in_a_resumed_run(two_layers, train, tmp_path, name):
    train(TRUNK).save_checkpoint(tmp_path / "first.ckpt")
    before = bits(two_layers)
    policies = {name: gp.Freeze(gp.masks.Fixed(False), params="trunk.0.*")}
    train(policies, resume=tmp_path / "first.ckpt", max_epochs=2)
    after = bits(two_layers)
    assert torch.equal(after["trunk.0.weight"], before["trunk.0.weight"])
    assert not torch.equal(after["trunk.2.weight"], before["trunk.2.weight"])


def test_a_run_resumed_under_other_policies_says_which(train, tmp_path, recwarn):
    def told(epochs, density, resume=None):
        policies = {
            "random": gp.Freeze(gp.masks.Random(lambda step: density, every=int(density * 10))),
            "slow": gp.Scale(lambda step: 0.1, modules="head"),
        }
        trainer = train(policies, module=TwoLayers(), resume=resume, max_epochs=epochs)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return [str(w.message) for w in recwarn if "under other policies" in str(w.message)]

    assert told(1, 0.5) == []
    assert told(2, 0.5, tmp_path / "1.ckpt") == []
    assert told(3, 0.3, tmp_path / "2.ckpt") == [
        "the checkpoint was written under other policies; changed: random"
    ]


def test_norms_are_computed_only_where_they_are_logged(
    two_layers, loader, make_trainer, tmp_path, monkeypatch
):
    computed = []
    take = Measurements.take_gradients
    monkeypatch.setattr(
        Measurements,
        "take_gradients",
        lambda self, *given: computed.append(trainer.global_step) or take(self, *given),
    )
    for logger in (CSVLogger(tmp_path), False):
        trainer = make_trainer(logger=logger, log_every_n_steps=2, callbacks=[gp.GradientPolicies(HALF)])
        trainer.fit(two_layers, loader)
        assert computed == [1, 1, 3, 3]


@pytest.mark.parametrize("phase", ["validate", "test", "predict"])
def test_a_policy_for_another_phase_holds_there_and_not_in_training(two_layers, loader, train, phase):
    seen = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen["fit"] = callback.run.installed.report().rows[0].active

        def on_evaluation_batch_end(self, trainer, pl_module, *_):
            seen[phase] = callback.run.installed.report().rows[0].active

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_evaluation_batch_end

    callback = gp.GradientPolicies({"guided": gp.Guided(when=gp.When(phases=[phase]))})
    trainer = train(callback, Watch(), max_steps=1)
    inputs = torch.utils.data.DataLoader(torch.ones(2, 4)) if phase == "predict" else loader
    getattr(trainer, phase)(two_layers, inputs)
    assert seen == {"fit": False, phase: True}


@pytest.mark.parametrize("phase", ["fit", "validate"])
def test_after_a_validation_within_a_fit_the_policies_of_training_hold_again(
    two_layers, loader, make_trainer, phase
):
    class Watch(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.active = callback.run.installed.report().rows[0].active

    callback, watch = gp.GradientPolicies({"guided": gp.Guided(when=gp.When(phases=[phase]))}), Watch()
    make_trainer(callbacks=[callback, watch]).fit(two_layers, loader, loader)
    assert watch.active is (phase == "fit")


def test_loggers_and_sinks_get_the_same_numbers(train, tmp_path):
    received = []
    callback = gp.GradientPolicies(
        {
            "half": gp.Freeze(gp.masks.Random(0.5, every=2), params="trunk.*"),
            "none": gp.Scale(0.0, ops=["relu"]),
            **ROUNDING,
        }
    )
    callback.sinks.append(lambda *measured: received.append(measured))
    trainer = train(callback, max_epochs=2, log_every_n_steps=4, logger=CSVLogger(tmp_path))
    rows = [row for row in logged(trainer) if "policy/half/gradient_norm_after" in row]
    assert [int(row["step"]) for row in rows] == [3, 7]
    assert [updates for updates, _ in received] == [4, 8]
    last = summary(received[-1][1])
    assert {key: float(trainer.callback_metrics[key]) for key in last} == pytest.approx(last)
    for row, (_, measured) in zip(rows, received, strict=True):
        logs = {key: float(value) for key, value in row.items() if key.startswith("policy/")}
        policy = summary(measured)
        assert policy == pytest.approx(logs)
        assert policy["policy/none/zeros_passed"] == 1
        assert policy["policy/rounding/operations"] == 1
        assert policy["policy/rounding/gradient_norm_after"] > 0
        assert 0 < policy["policy/half/gradient_norm_after"] < policy["policy/half/gradient_norm_before"]
        half = measured["half"]
        assert policy["policy/half/flipped"] == sum(half["flipped"]) > 0
        share = sum(half["active"]) / sum(half["entries"])
        assert policy["policy/half/active_share"] == pytest.approx(share) == pytest.approx(0.5, abs=0.1)
        norms = [math.sqrt(sum(norm**2 for norm in half[f"{what}_norm"])) for what in ("update", "weight")]
        assert policy["policy/half/update_size"] == pytest.approx(norms[0] / norms[1])


def test_nothing_is_logged_where_that_is_not_wanted(two_layers, loader, train, tmp_path):
    rounding = gp.StraightThrough(ops=["round"], when=gp.When(phases=["fit", "test"]))
    callback = gp.GradientPolicies({"rounding": rounding, **HALF}, log=False)
    trainer = train(callback, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    trainer.test(two_layers, loader, verbose=False)
    keys = set().union(*logged(trainer))
    assert "train/loss" in keys
    assert not [key for key in keys if "policy/" in key]


def test_a_run_that_fails_says_nothing_else(train, recwarn):
    """It may have ended before it met what its policies name."""

    class Fails(Callback):
        def on_train_batch_start(self, *_):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        train(ROUNDING, Fails())
    assert not [warning for warning in recwarn if "never met" in str(warning.message)]


@pytest.mark.parametrize(
    "policy",
    [
        gp.Clip(value=1e-3, modules="head", at="output"),
        gp.UseRule(lambda grad, *_: 1e-3 * grad.sign(), modules="head", at="output"),
    ],
)
def test_rules_follow_the_loss_scale(two_layers, train, policy):
    moved = []
    for scale in (1.0, 2.0**10):
        module = copy.deepcopy(two_layers)
        module.optimizer = torch.optim.SGD
        train(
            {"bound": policy}, module=module, limit_train_batches=1, plugins=[loss_scaler(init_scale=scale)]
        )
        moved.append(module.head.bias.detach() - two_layers.head.bias.detach())
    # The gradient of the bias adds up those of eight samples.
    assert 0 < moved[0].abs().max() <= 0.05 * 8 * 1e-3 * 1.01
    torch.testing.assert_close(moved[1], moved[0], rtol=0.01, atol=0.0)


def test_an_operation_that_gets_no_gradient_ends_the_run_unless_what_rests_may_thaw(train):
    class Detached(TwoLayers):
        def forward(self, x):
            return self.head(torch.round(self.trunk(x).detach()))

    with pytest.raises(gp.PolicyError, match=r"policy\.rounding\.ops"):
        train(ROUNDING, module=Detached())
    resting = Detached()
    resting.trunk.requires_grad_(False)
    with pytest.warns(UserWarning, match="policy 'rounding'"):
        assert train(ROUNDING, module=resting).global_step == 4


def test_an_operation_that_a_test_never_meets_ends_it(two_layers, loader, make_trainer):
    wrong = gp.StraightThrough(ops=["floor"], when=gp.When(phases=["test"]))
    with pytest.raises(gp.PolicyError, match=r"wrong.*floor"):
        make_trainer(callbacks=[gp.GradientPolicies({"wrong": wrong})]).test(
            two_layers, loader, verbose=False
        )


def test_what_is_for_several_processes_does_no_harm_on_one(train):
    seen = []

    class Reads(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(callback.run.ranks.agreement_every)

    callback = gp.GradientPolicies(HALF, agreement_every=7)
    assert train(callback, Reads()).global_step == 4
    assert seen == [7]
    assert callback.run.ranks is None


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (gp.Guided(), "policies: expected a dict from names to policies"),
        ([gp.Guided()], "policies: expected a dict from names to policies"),
        ({"cut": "stop"}, r"policy\.cut: must be a gradient policy, got str"),
    ],
)
def test_what_are_no_policies_by_name_is_refused(policies, words):
    with pytest.raises(gp.PolicyError, match=words):
        gp.GradientPolicies(policies)


class Normalized(TwoLayers):
    """Two layers with a BatchNorm in the trunk."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(self.trunk[0].in_features)

    def training_step(self, batch, *rest):
        return super().training_step((self.norm(batch[0]), *batch[1:]), *rest)


def caught(train, *callbacks):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(*callbacks, module=Normalized(), max_steps=2)
    return [str(each.message) for each in found if str(each.message).startswith("policy")]


def test_a_frozen_layer_stands_still_through_validation_and_a_call_of_train(loader, make_trainer):
    seen = []

    class Called(Normalized):
        def on_train_batch_start(self, *_):
            self.train()

        def on_before_zero_grad(self, *_):
            seen.append((self.norm.running_mean.clone(), self.norm.training, self.trunk.training))

        def validation_step(self, *_):
            assert not any(module.training for module in self.modules())

    model, frozen = Called(), gp.Freeze(gp.masks.Fixed(False), params=["norm.*"], buffers="eval")
    callbacks = [gp.GradientPolicies({"still": frozen})]
    trainer = make_trainer(max_steps=4, val_check_interval=1, limit_val_batches=1, callbacks=callbacks)
    trainer.fit(model, loader, loader)
    assert len(seen) == 4
    for mean, norm, trunk in seen:
        assert torch.equal(mean, torch.zeros_like(mean))
        assert (norm, trunk) == (False, True)
    assert all(module.training for module in model.modules())


def test_every_warning_of_the_plan_comes_from_the_callback_too(loader, train):
    policies = {
        "still": gp.Freeze(gp.masks.Fixed(False), params=["norm.*"]),
        "adam": gp.Scale(0.5, params="head.*"),
        "steps": gp.StraightThrough(ops=["round", "floor"]),
    }
    batch = next(iter(loader))
    planned = gp.plan(Normalized(), policies, lambda copy: training_loss(copy, batch))
    assert len(planned.warnings) == 3
    lines = caught(train, policies)
    found = [line.removeprefix("policy ").replace("'steps'", "steps") for line in lines]
    # What else ran there differs: the callback sees the logging too.
    assert {line.split(";")[0] for line in found} == {line.split(";")[0] for line in planned.warnings}


def test_warnings_that_a_plan_has_shown_are_not_repeated(loader, train):
    policies = {"still": gp.Freeze(gp.masks.Fixed(False), params=["norm.*"])}
    batch = next(iter(loader))
    callback = gp.GradientPolicies(policies)
    callback.run.notices.shown = frozenset(
        gp.plan(Normalized(), policies, lambda copy: training_loss(copy, batch)).warnings
    )
    assert caught(train, callback) == []


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_trainers_of_both_lightning_packages_take_it_and_report_after_each_validation(
    package, two_layers, loader, capsys
):
    lightning = importlib.import_module(package)

    class Twin(lightning.LightningModule):
        forward, configure_optimizers = TwoLayers.forward, TwoLayers.configure_optimizers
        training_step, validation_step = TwoLayers.training_step, TwoLayers.validation_step
        optimizer = torch.optim.AdamW

        def __init__(self):
            super().__init__()
            self.trunk, self.head = two_layers.trunk, two_layers.head

    head = {"params": "head.*", "until": {"metric": "val/loss", "patience": 1, "min_delta": 9.0}}
    phases = gp.masks.Phases([head, {"params": "*"}])
    callback, seen = gp.GradientPolicies({"thaw": gp.Freeze(phases), **ROUNDING}, log=False), []
    phases.report, report = lambda metrics: [seen.append(metrics), report(metrics)], phases.report
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=3, callbacks=[callback], **quiet)
    trainer.fit(Twin(), loader, loader)
    # Not after the sanity check, which has not made the table wrong either.
    assert (len(seen), phases.phase) == (3, 1)
    assert "18 of 130 entries" in capsys.readouterr().out


@pytest.mark.parametrize("policy", [gp.Scale(1.0, modules="head"), gp.Train(params="*")])
def test_schedule_free_optimizers_have_their_other_weights_in_validation_and_checkpoints(
    policy, loader, make_trainer, tmp_path
):
    schedulefree = pytest.importorskip("schedulefree")
    model = TwoLayers(schedulefree.AdamWScheduleFree)
    peer, validated, expected = copy.deepcopy(model), [], []
    optimizer = peer.configure_optimizers()
    for _ in range(3):
        optimizer.train()
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(peer(x), y).backward()
            optimizer.step()
        optimizer.eval()
        expected.append(bits(peer))
    model.validation_step = lambda batch: validated.append(bits(model))
    callbacks = [gp.GradientPolicies({"own": policy}), ModelCheckpoint(tmp_path, save_top_k=-1)]
    trainer = make_trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True, limit_val_batches=1)
    trainer.fit(model, loader, loader)
    saved = torch.load(tmp_path / "epoch=1-step=8.ckpt", weights_only=True)["state_dict"]
    # Masks move by an update rule, which may round in another way.
    torch.testing.assert_close([*validated, bits(model), saved], [*expected, expected[2], expected[1]])
