"""GradientPolicies: what happens when in a Lightning run."""

import copy
import csv
import functools
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
from gradpolicy.distributed.compression import ActiveEntries
from gradpolicy.measurements import Measurements, summary
from gradpolicy.planning.plan import training_loss
from tests.fixtures import TwoLayers


class Recorder(Callback):
    """Remembers the parameters after each batch, and the gradients before clipping."""

    def __init__(self):
        self.weights = []
        self.requires_grad = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})
        self.requires_grad.append({name: p.requires_grad for name, p in pl_module.named_parameters()})


def bits(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def half(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == 0).reshape(parameter.shape)


def alternating(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == step % 2).reshape(parameter.shape)


def test_a_stop_policy_keeps_the_gradient_from_what_comes_before(two_layers, loader, make_trainer):
    before = bits(two_layers)
    trainer = make_trainer(max_steps=3, callbacks=[gp.GradientPolicies({"cut": gp.Stop(modules="head")})])
    trainer.fit(two_layers, loader)
    after = bits(two_layers)
    assert torch.equal(before["trunk.0.weight"], after["trunk.0.weight"])
    assert not torch.equal(before["head.weight"], after["head.weight"])


def test_a_straight_through_policy_trains_what_lies_behind_the_rounding(two_layers, loader, make_trainer):
    plain = copy.deepcopy(two_layers)
    policies = {"rounding": gp.StraightThrough(ops=["round"])}
    before = bits(two_layers)["trunk.0.weight"]
    make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies)]).fit(two_layers, loader)
    assert not torch.allclose(before, two_layers.trunk[0].weight, atol=0.05)
    # AdamW's weight decay alone moves what gets only zeros.
    make_trainer(max_steps=2).fit(plain, loader)
    assert torch.allclose(before, plain.trunk[0].weight, atol=0.05)


def test_frozen_entries_keep_their_bits_and_others_move(two_layers, loader, make_trainer):
    before = two_layers.head.weight.detach().clone()
    policies = {"half": gp.Freeze(half, params="head.weight", frozen_state="zero")}
    make_trainer(max_steps=4, gradient_clip_val=0.1, callbacks=[gp.GradientPolicies(policies)]).fit(
        two_layers, loader
    )
    active = half("", two_layers.head.weight, 0)
    moved = two_layers.head.weight != before
    assert not moved[~active].any()
    assert moved[active].all()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_masks_change_between_effective_steps_only(two_layers, loader, make_trainer, precision):
    recorder = Recorder()
    policies = {"turns": gp.Freeze(alternating, params="head.weight")}
    trainer = make_trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        precision=precision,
        callbacks=[gp.GradientPolicies(policies), recorder],
    )
    start = two_layers.head.weight.detach().clone()
    trainer.fit(two_layers, loader)
    history = [start, *(weights["head.weight"] for weights in recorder.weights)]
    for batch, (old, new) in enumerate(itertools.pairwise(history)):
        moved = (old != new).flatten()
        if batch % 2 == 0:
            assert not moved.any(), "an accumulated batch takes no step"
        else:
            step = batch // 2
            assert moved[step % 2 :: 2].all()
            assert not moved[1 - step % 2 :: 2].any()


@pytest.mark.supports("clipping", loop="lightning")
def test_masked_gradients_do_not_count_in_the_clipping_norm(two_layers, loader, make_trainer):
    norms = []

    class Watch(Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.nn.utils.get_total_norm(gradients).item())

    policies = {"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*")}
    trainer = make_trainer(
        max_steps=3, gradient_clip_val=1e-3, callbacks=[gp.GradientPolicies(policies), Watch()]
    )
    trainer.fit(two_layers, loader)
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
    ("settings", "readers", "mixed_in", "masked"),
    [
        ({}, [], (), False),
        ({"gradient_clip_val": 0.0}, [], (), False),
        ({"gradient_clip_val": 1e9}, [], (), True),
        ({}, [Reader()], (), True),
        ({}, [], (OwnClipping,), True),
        ({}, [], (OwnStep,), True),
        ({}, [], (OwnLog,), True),
    ],
)
def test_gradients_are_masked_where_somebody_may_read_them(
    two_layers, loader, make_trainer, settings, readers, mixed_in, masked
):
    remaining = []

    class Module(*mixed_in, type(two_layers)):
        def on_before_zero_grad(self, optimizer):
            gradient = self.head.weight.grad
            if gradient is not None:
                remaining.append(bool(gradient[~half("", gradient, 0)].any()))

    callbacks = [gp.GradientPolicies({"half": gp.Freeze(half, params="head.weight")}), *readers]
    make_trainer(max_steps=3, callbacks=callbacks, **settings).fit(Module(), loader)
    assert remaining == [not masked] * 2


@pytest.mark.parametrize("sees_gradients", [False, True])
def test_under_manual_optimization_too(two_layers, loader, make_trainer, sees_gradients):
    norms = []

    class Manual(type(two_layers)):
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
    policies = {"half": gp.Freeze(half, params="head.weight")}
    if sees_gradients:
        policies["fisher"] = gp.Freeze(gp.masks.TopK(0.5, window=2), params="trunk.*")
    make_trainer(max_steps=3, callbacks=[gp.GradientPolicies(policies)]).fit(module, loader)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)
    assert torch.equal(module.head.weight != before, half("", before, 0))


class Slower(gp.masks.MaskSource):
    """Lets everything train at a quarter of the learning rate."""

    def masks(self, step, epoch):
        return {}

    def learning_rate_scale(self, step, epoch):
        return dict.fromkeys(self.parameters, 0.25)


def test_a_rate_of_a_layers_own_is_in_force_when_the_update_is_first_seen(two_layers, loader, make_trainer):
    """Another loss may be computed with the weights, and other callbacks may save or average them."""

    class Manual(type(two_layers)):
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
    policies = {"slower": gp.Freeze(Slower(), params="head.*")}
    make_trainer(callbacks=[gp.GradientPolicies(policies)]).fit(module, loader)
    assert not torch.equal(module.head.weight, before)


def test_an_optimizer_that_a_module_keeps_serves_one_fit_after_the_other(two_layers, loader, make_trainer):
    optimizer = torch.optim.AdamW(two_layers.parameters(), lr=0.05)
    two_layers.configure_optimizers = lambda: optimizer
    for frozen, active in (("trunk.0.weight", "head.weight"), ("head.weight", "trunk.2.weight")):
        asked = []

        def nothing(name, parameter, step, asked=asked):
            asked.append(step)
            return False

        before = bits(two_layers)
        policy = gp.Freeze(nothing, params=frozen, frozen_state="drop")
        make_trainer(callbacks=[gp.GradientPolicies({"part": policy})]).fit(two_layers, loader)
        after = bits(two_layers)
        assert torch.equal(before[frozen], after[frozen])
        assert not torch.equal(before[active], after[active])
        assert asked == [0, 1, 2, 3]


def test_steps_that_the_trainer_took_before_count(two_layers, loader, make_trainer, tmp_path):
    """In a former fit of the same trainer, or until a run without policies was saved."""
    asked = []

    def everything(name, parameter, step):
        asked.append(step)
        return True

    def callback():
        return gp.GradientPolicies({"all": gp.Freeze(everything, params="head.bias")})

    trainer = make_trainer(callbacks=[callback()])
    trainer.fit(two_layers, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(two_layers, loader)
    assert asked == list(range(8))

    for callbacks in ([], [gp.GradientPolicies({"rounding": gp.StraightThrough(ops=["round"])})]):
        asked.clear()
        before = make_trainer(callbacks=callbacks)
        before.fit(two_layers, loader)
        before.save_checkpoint(tmp_path / "before.ckpt")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*under other policies")
            make_trainer(max_epochs=2, callbacks=[callback()]).fit(
                two_layers, loader, ckpt_path=tmp_path / "before.ckpt", weights_only=True
            )
        assert asked == [4, 5, 6, 7]


def test_steps_of_several_optimizers_before_count_once(two_layers, loader, make_trainer, tmp_path):
    """Lightning's own count adds up the steps of all optimizers."""
    asked = []

    class TwoOptimizers(type(two_layers)):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.trunk, self.head)]

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def everything(name, parameter, step):
        asked.append(step)
        return True

    module = TwoOptimizers()
    before = make_trainer()
    before.fit(module, loader)
    before.save_checkpoint(tmp_path / "before.ckpt")
    policies = {"all": gp.Freeze(everything, params="head.bias")}
    make_trainer(max_epochs=2, callbacks=[gp.GradientPolicies(policies)]).fit(
        module, loader, ckpt_path=tmp_path / "before.ckpt", weights_only=True
    )
    assert asked == [4, 5, 6, 7]


def test_an_optimizer_that_has_not_stepped_yet_resumes_so(two_layers, loader, make_trainer, tmp_path):
    """As that of a generator whose critic learns first; the trainer counts the steps of both."""

    class CriticFirst(type(two_layers)):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.trunk, self.head)]

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers()[1].step()

    class Reads(Callback):
        def on_train_batch_start(self, trainer, *_):
            steps.append([optimizer.effective_steps for optimizer in callback.masked_optimizers])

    module, steps = CriticFirst(), []
    for epochs, resumed in ((1, None), (2, tmp_path / "last.ckpt")):
        callback = gp.GradientPolicies({"half": gp.Freeze(half)})
        trainer = make_trainer(max_epochs=epochs, callbacks=[callback, Reads()])
        trainer.fit(module, loader, ckpt_path=resumed, weights_only=True)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert steps == [[0, step] for step in range(8)]


@pytest.mark.parametrize("first", [True, False])
def test_parameters_that_a_finetuning_schedule_adds_are_masked_too(two_layers, loader, make_trainer, first):
    class Finetuned(type(two_layers)):
        @property
        def backbone(self):
            return self.trunk

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    module = Finetuned()
    before = bits(module)
    policies = gp.GradientPolicies({"half": gp.Freeze(half, params=["trunk.0.weight", "head.weight"])})
    thaw = BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.05)
    callbacks = [policies, thaw] if first else [thaw, policies]
    make_trainer(max_epochs=2, callbacks=callbacks).fit(module, loader)
    for name, parameter in module.named_parameters():
        moved = parameter != before[name]
        expected = half("", parameter, 0) if name in ("trunk.0.weight", "head.weight") else moved
        assert torch.equal(moved, expected)
        assert moved.any()


def test_parameters_that_join_the_model_and_the_optimizer_are_masked_too(two_layers, loader, make_trainer):
    class Grows(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.late = torch.nn.Parameter(torch.zeros(2))
                trainer.optimizers[0].add_param_group({"params": [pl_module.late]})

        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.current_epoch == 1:
                pl_module.late.sum().backward()

    callback = gp.GradientPolicies({"half": gp.Freeze(half)})
    make_trainer(max_epochs=2, callbacks=[callback, Grows()]).fit(two_layers, loader)
    assert (two_layers.late != 0).tolist() == [True, False]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_batch_start"])
def test_optimizers_that_are_made_anew_in_the_middle_of_a_fit_are_masked_too(
    two_layers, loader, make_trainer, first, hook
):
    class MakesAnew(Callback):
        def _set_up(self, trainer, *_):
            if trainer.current_epoch == 1 and trainer.global_step == len(loader):
                trainer.strategy.setup_optimizers(trainer)

    setattr(MakesAnew, hook, MakesAnew._set_up)
    seen = []
    policies = {"odd": gp.Freeze(alternating, params="head.weight", frozen_state="zero")}
    callback, recorder = gp.GradientPolicies(policies), Recorder()
    trainer = make_trainer(
        max_epochs=2,
        callbacks=[callback, MakesAnew(), recorder] if first else [MakesAnew(), callback, recorder],
    )
    start = two_layers.head.weight.detach().clone()
    if first and hook == "on_train_batch_start":
        # It comes too late for this batch, so that nothing knows the masks.
        with pytest.raises(gp.PolicyError, match=r"AdamW.step would update head.weight past the policies"):
            trainer.fit(two_layers, loader)
        return
    trainer.fit(two_layers, loader)
    courses = [start, *(weights["head.weight"] for weights in recorder.weights)]
    for step, (before, after) in enumerate(itertools.pairwise(courses)):
        assert torch.equal(after != before, alternating("", after, step))
        seen.append(step)
    assert len(seen) == 2 * len(loader)
    assert callback.masked_optimizers == trainer.optimizers
    # Its moments began anew with it, and the policies' time went on.
    assert callback.masked_optimizers[0].effective_steps == 2 * len(loader)
    assert int(callback.masked_optimizers[0].age(two_layers.head.weight).max()) <= len(loader)


def test_an_optimizer_made_anew_between_two_batches_of_an_update_is_masked_too(
    two_layers, loader, make_trainer
):
    class MakesAnew(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, index):
            if index == 1:
                trainer.strategy.setup_optimizers(trainer)

    start = two_layers.head.weight.detach().clone()
    callbacks = [MakesAnew(), gp.GradientPolicies({"odd": gp.Freeze(alternating, params="head.weight")})]
    make_trainer(max_steps=1, accumulate_grad_batches=2, callbacks=callbacks).fit(two_layers, loader)
    assert torch.equal(two_layers.head.weight != start, alternating("", start, 0))


def test_parameters_that_are_made_anew_with_their_optimizer_are_refused(two_layers, loader, make_trainer):
    class MakesAnew(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.head.weight = torch.nn.Parameter(pl_module.head.weight.detach().clone())
                trainer.strategy.setup_optimizers(trainer)

    callbacks = [gp.GradientPolicies({"half": gp.Freeze(half, params="head.weight")}), MakesAnew()]
    with pytest.raises(gp.PolicyError, match=r"head.weight: replaced during the training"):
        make_trainer(max_epochs=2, callbacks=callbacks).fit(two_layers, loader)


def test_a_step_past_the_policies_is_refused(two_layers, loader, make_trainer):
    class Own(type(two_layers)):
        automatic_optimization = False

        def configure_optimizers(self):
            self.own = super().configure_optimizers()
            return self.own

        def training_step(self, batch, index):
            super().training_step(batch, index).backward()
            self.own.step()

    module = Own()
    before = bits(module)
    policies = gp.GradientPolicies({"half": gp.Freeze(half, params="head.weight")})
    with pytest.raises(gp.PolicyError, match=r"would update head.weight past the policies: call step"):
        make_trainer(max_epochs=1, callbacks=[policies]).fit(module, loader)
    assert same(before, bits(module))
    module.own.zero_grad()


class Shown(gp.masks.MaskSource):
    """Writes down the gradients that it is shown."""

    needs_gradients = True

    def prepare(self):
        self.seen = []

    def masks(self, step, epoch):
        return {}

    def observe(self, gradients):
        self.seen.append(torch.cat([gradient.flatten() for gradient in gradients.values()]))


def test_sources_see_no_loss_scale_and_no_skipped_step(two_layers, loader, make_trainer):
    """A fused optimizer would take the gradients with their scale, which changes within a window."""
    runs = []
    for fused in (False, True):
        module, source = copy.deepcopy(two_layers), Shown()
        module.optimizer = functools.partial(torch.optim.AdamW, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
        precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        callback = gp.GradientPolicies({"head": gp.Freeze(source, params="head.*")})
        trainer = make_trainer(max_epochs=2, plugins=[precision], callbacks=[callback])
        trainer.fit(module, loader)
        runs.append(source.seen)
        assert len(source.seen) == trainer.strategy.optimizers[0].effective_steps < trainer.global_step
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_loss_scaler_takes_an_optimizer_that_is_wholly_frozen(
    two_layers, loader, make_trainer, fused, manual
):
    class Part(type(two_layers)):
        automatic_optimization = not manual

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    module = Part(functools.partial(torch.optim.AdamW, fused=fused))
    before = bits(module)
    policies = {"start": gp.Freeze(gp.masks.Fixed(False), when=gp.When(stop=2))}
    recorder = Recorder()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer = make_trainer(
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        callbacks=[gp.GradientPolicies(policies), recorder],
    )
    trainer.fit(module, loader)
    moved = [not same(weights, before) for weights in recorder.weights]
    assert moved == [False, False, True, True]


def test_a_network_that_freezes_leaves_its_own_loss_a_backward_pass(two_layers, loader, make_trainer):
    """Under manual optimization nothing but one optimizer's parameters may be on."""

    class Turns(type(two_layers)):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.trunk, self.head)]

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
    policies = {"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*")}
    make_trainer(max_epochs=1, callbacks=[gp.GradientPolicies(policies)]).fit(module, loader)
    after = bits(module)
    assert torch.equal(after["trunk.0.weight"], before["trunk.0.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize("order", [("trunk", "head"), ("head", "trunk")])
def test_an_optimizer_without_masks_leaves_the_gradients_of_others_alone(
    two_layers, loader, make_trainer, order
):
    """Both gradients are there when the first of two optimizers steps; each is scaled once."""

    class Two(type(two_layers)):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(getattr(self, name).parameters(), lr=0.05) for name in order]

        def training_step(self, batch, batch_idx):
            optimizers = self.optimizers()
            self.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            for optimizer in optimizers:
                optimizer.step()

    module = Two()
    module.load_state_dict(two_layers.state_dict())
    before = bits(module)
    mask = gp.masks.Random(0.5, rescale=True)
    callback = gp.GradientPolicies({"half": gp.Freeze(mask, params="head.weight")})
    make_trainer(limit_train_batches=1, callbacks=[callback]).fit(module, loader)
    batch = next(iter(loader))
    two_layers.zero_grad()
    torch.nn.functional.cross_entropy(two_layers(batch[0]), batch[1]).backward()
    moved = module.head.weight.detach() - before["head.weight"]
    active = callback.freezer.mask_of("head.weight").materialize((2, 8))
    torch.testing.assert_close(moved, -0.05 * 2 * two_layers.head.weight.grad * active)


def test_the_model_is_left_as_found(two_layers, loader, make_trainer):
    shape = {
        name: (dict(m._forward_hooks), "forward" in m.__dict__) for name, m in two_layers.named_modules()
    }
    policies = {
        "rounding": gp.StraightThrough(ops=["round"]),
        "cut": gp.Stop(modules="head"),
        "trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*"),
    }
    make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies)]).fit(two_layers, loader)
    after = {
        name: (dict(m._forward_hooks), "forward" in m.__dict__) for name, m in two_layers.named_modules()
    }
    assert after == shape
    assert all(parameter.requires_grad for parameter in two_layers.parameters())


def test_the_model_is_left_as_found_also_after_an_error(two_layers, loader, make_trainer):
    class Fails(Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("on purpose")

    policies = {"cut": gp.Stop(modules="head"), "trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*")}
    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies), Fails()]).fit(two_layers, loader)
    assert "forward" not in two_layers.head.__dict__
    assert all(parameter.requires_grad for parameter in two_layers.parameters())


def test_a_wholly_frozen_tensor_asks_for_no_gradient_while_it_is_frozen(two_layers, loader, make_trainer):
    recorder = Recorder()
    policies = {"trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.*")}
    make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies), recorder]).fit(two_layers, loader)
    assert not recorder.requires_grad[0]["trunk.0.weight"]
    assert recorder.requires_grad[0]["head.weight"]


def test_when_holds_a_policy_back_until_its_step(two_layers, loader, make_trainer):
    recorder = Recorder()
    policies = {
        "late": gp.Freeze(gp.masks.Fixed(False), params="head.weight", when=gp.When(start=2)),
    }
    start = two_layers.head.weight.detach().clone()
    make_trainer(max_steps=4, callbacks=[gp.GradientPolicies(policies), recorder]).fit(two_layers, loader)
    history = [start, *(weights["head.weight"] for weights in recorder.weights)]
    moved = [not torch.equal(old, new) for old, new in itertools.pairwise(history)]
    assert moved == [True, True, False, False]


def test_an_operation_that_is_never_met_ends_the_run(two_layers, loader, make_trainer):
    policies = {"wrong": gp.StraightThrough(ops=["floor"])}
    with pytest.raises(gp.PolicyError, match=r"wrong.*floor.*round"):
        make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies)]).fit(two_layers, loader)


def test_a_stop_that_cuts_the_only_path_is_named(two_layers, loader, make_trainer):
    policies = {"cut": gp.Stop(modules="head", at="output")}
    with pytest.raises(gp.PolicyError, match=r"policy 'cut' \(Stop at output of modules head\) cuts"):
        make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies)]).fit(two_layers, loader)


@pytest.mark.parametrize("plan", [False, True])
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (gp.Stop(modules="trunk.0"), "no gradient crosses input of module 'trunk.0'"),
        (gp.Scale(0.5, modules="spare"), "module 'spare' never ran through its forward"),
        (gp.Scale(0.5, modules="twin", at="output"), "module 'twin' is also 'head'"),
    ],
)
def test_a_policy_that_cannot_act_where_it_is_is_a_warning(
    two_layers, loader, make_trainer, policy, message, plan
):
    two_layers.spare, two_layers.twin = torch.nn.Linear(2, 2), two_layers.head
    callback = gp.GradientPolicies({"it": policy}, plan=plan)
    with pytest.warns(UserWarning, match=f"policy 'it': {message}"):
        make_trainer(max_steps=2, callbacks=[callback]).fit(two_layers, loader)


def test_a_plan_within_a_fit_is_that_of_the_model_before_it(two_layers, loader, make_trainer):
    policies = {
        "rounding": gp.StraightThrough(ops=["round"]),
        "trunk": gp.Freeze(gp.masks.Fixed(False), params="trunk.0.*"),
    }
    batch = next(iter(loader))
    plans = [gp.plan(two_layers, policies, lambda copy: training_loss(copy, batch))]

    class Plans(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            plans.append(gp.plan(pl_module, policies, lambda copy: training_loss(copy, batch)))

    callbacks = [gp.GradientPolicies(policies), Plans()]
    make_trainer(max_steps=1, callbacks=callbacks).fit(two_layers, loader)
    before, within = plans
    assert within == before


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"a": gp.Stop(modules="haed")}, "haed.*head"),
        ({"a": gp.Freeze(half, params="trnk.*")}, r"policy\.a\.params.*trnk.*trunk"),
        ({"a": gp.Guided(), "b": gp.Deconv()}, "a.*b"),
    ],
)
def test_a_wrong_place_ends_the_run_before_its_first_step(
    two_layers, loader, make_trainer, policies, message
):
    recorder = Recorder()
    with pytest.raises(gp.PolicyError, match=message):
        make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies), recorder]).fit(two_layers, loader)
    assert recorder.weights == []


def test_learning_rate_schedulers_see_the_steps_of_the_wrapped_optimizer(two_layers, loader, make_trainer):
    def configure():
        optimizer = torch.optim.AdamW(two_layers.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    two_layers.configure_optimizers = configure
    trainer = make_trainer(
        max_steps=3, callbacks=[gp.GradientPolicies({"half": gp.Freeze(half, params="head.weight")})]
    )
    trainer.fit(two_layers, loader)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.125)


@pytest.mark.supports("gradient sources", loop="lightning")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_ends_with_the_same_bits(two_layers, loader, make_trainer, tmp_path):
    def policies():
        return {
            "random": gp.Freeze(gp.masks.Random(density=0.5, every=3), params="trunk.*", frozen_state="zero"),
            "top": gp.Freeze(gp.masks.TopK(0.5, by="gradient", window=2, every=3), params="head.*"),
            "rounding": gp.StraightThrough(ops=["round"]),
        }

    twin = copy.deepcopy(two_layers)
    make_trainer(max_epochs=4, callbacks=[gp.GradientPolicies(policies())]).fit(two_layers, loader)

    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    first = make_trainer(
        max_epochs=2, callbacks=[gp.GradientPolicies(policies()), saving], enable_checkpointing=True
    )
    first.fit(twin, loader)
    second = make_trainer(max_epochs=4, callbacks=[gp.GradientPolicies(policies())])
    second.fit(twin, loader, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert same(bits(two_layers), bits(twin))


def test_a_checkpoint_that_was_tested_leaves_nothing_for_the_next_fit(
    two_layers, loader, make_trainer, tmp_path
):
    def trainer():
        top = gp.Freeze(gp.masks.TopK(0.5, every=4))
        return make_trainer(callbacks=[gp.GradientPolicies({"top": top})])

    first, twin = trainer(), copy.deepcopy(two_layers)
    first.fit(copy.deepcopy(two_layers), loader)
    first.save_checkpoint(tmp_path / "first.ckpt")
    tested = trainer()
    tested.test(copy.deepcopy(two_layers), loader, tmp_path / "first.ckpt", verbose=False, weights_only=True)
    tested.fit(two_layers, loader)
    trainer().fit(twin, loader)
    assert same(bits(two_layers), bits(twin))


@pytest.mark.filterwarnings("ignore:.*(under other policies|it starts anew)")
@pytest.mark.parametrize("name", ["trunk", "other"])
def test_what_no_policy_freezes_any_more_trains_in_a_resumed_run(
    two_layers, loader, make_trainer, tmp_path, name
):
    def trainer(name, params, epochs):
        policies = {name: gp.Freeze(gp.masks.Fixed(False), params=params)}
        return make_trainer(max_epochs=epochs, callbacks=[gp.GradientPolicies(policies)])

    first = trainer("trunk", "trunk.*", 1)
    first.fit(two_layers, loader)
    first.save_checkpoint(tmp_path / "first.ckpt")
    before = bits(two_layers)
    trainer(name, "trunk.0.*", 2).fit(
        two_layers, loader, ckpt_path=tmp_path / "first.ckpt", weights_only=True
    )
    after = bits(two_layers)
    assert torch.equal(after["trunk.0.weight"], before["trunk.0.weight"])
    assert not torch.equal(after["trunk.2.weight"], before["trunk.2.weight"])


def test_a_run_resumed_under_other_policies_says_which(two_layers, loader, make_trainer, tmp_path, recwarn):
    def train(epochs, density, resume_from=None):
        policies = {
            "random": gp.Freeze(gp.masks.Random(lambda step: density, every=int(density * 10))),
            "slow": gp.Scale(lambda step: 0.1, modules="head"),
        }
        saving = ModelCheckpoint(dirpath=tmp_path, filename=f"{epochs}", save_top_k=-1)
        callbacks = [gp.GradientPolicies(policies), saving]
        trainer = make_trainer(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(copy.deepcopy(two_layers), loader, ckpt_path=resume_from, weights_only=True)
        return [str(w.message) for w in recwarn if "under other policies" in str(w.message)]

    assert train(1, 0.5) == []
    assert train(2, 0.5, tmp_path / "1.ckpt") == []
    assert train(3, 0.3, tmp_path / "2.ckpt") == [
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
    policies = {"half": gp.Freeze(half, params="head.weight")}
    trainer = make_trainer(
        logger=CSVLogger(tmp_path), log_every_n_steps=2, callbacks=[gp.GradientPolicies(policies)]
    )
    trainer.fit(two_layers, loader)
    assert computed == [1, 1, 3, 3]
    trainer = make_trainer(log_every_n_steps=2, callbacks=[gp.GradientPolicies(policies)])
    trainer.fit(two_layers, loader)
    assert computed == [1, 1, 3, 3]


def test_operations_in_compiled_code_are_met_in_each_fit(two_layers, loader, make_trainer):
    two_layers.trunk.compile(backend="eager")
    for _ in range(3):
        callback = gp.GradientPolicies({"guided": gp.Guided(modules="trunk.*")})
        make_trainer(callbacks=[callback]).fit(two_layers, loader)
        assert callback.installed is None


@pytest.mark.parametrize("phase", ["validate", "test", "predict"])
def test_a_policy_for_another_phase_holds_there_and_not_in_training(two_layers, loader, make_trainer, phase):
    seen = {}

    class Watch(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen["fit"] = callback.installed.report().rows[0].active

        def on_evaluation_batch_end(self, trainer, pl_module, *_):
            seen[phase] = callback.installed.report().rows[0].active

        on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_evaluation_batch_end

    callback = gp.GradientPolicies({"guided": gp.Guided(when=gp.When(phases=[phase]))})
    trainer = make_trainer(max_steps=1, callbacks=[callback, Watch()])
    trainer.fit(two_layers, loader)
    inputs = torch.utils.data.DataLoader(torch.ones(2, 4)) if phase == "predict" else loader
    getattr(trainer, phase)(two_layers, inputs)
    assert seen == {"fit": False, phase: True}


@pytest.mark.parametrize("phase", ["fit", "validate"])
def test_after_a_validation_within_a_fit_the_policies_of_training_hold_again(
    two_layers, loader, make_trainer, phase
):
    class Watch(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.active = callback.installed.report().rows[0].active

    callback, watch = gp.GradientPolicies({"guided": gp.Guided(when=gp.When(phases=[phase]))}), Watch()
    make_trainer(callbacks=[callback, watch]).fit(two_layers, loader, loader)
    assert watch.active is (phase == "fit")


def test_what_a_policy_did_in_the_test_phase_is_logged_at_its_end(two_layers, loader, make_trainer, tmp_path):
    class Attributes(Callback):
        def on_test_end(self, trainer, pl_module):
            with torch.inference_mode(False), torch.enable_grad():
                images = torch.ones(2, 4, requires_grad=True)
                pl_module.predict_step(images, 0).sum().backward()
            pl_module.zero_grad()

    guided = gp.Guided(when=gp.When(phases=["test"]))
    callbacks = [gp.GradientPolicies({"guided": guided}), Attributes()]
    trainer = make_trainer(logger=CSVLogger(tmp_path), callbacks=callbacks)
    trainer.test(two_layers, loader, verbose=False)
    with open(trainer.logger.experiment.metrics_file_path) as file:
        (row,) = [row for row in csv.DictReader(file) if row.get("test/policy/guided/operations")]
    assert float(row["test/policy/guided/operations"]) == 1
    assert float(row["test/policy/guided/gradient_norm_before"]) >= float(
        row["test/policy/guided/gradient_norm_after"]
    )


def test_what_policies_did_in_training_and_in_the_test_has_keys_of_its_own(
    two_layers, loader, make_trainer, tmp_path
):
    rounding = gp.StraightThrough(ops=["round"], when=gp.When(phases=["fit", "test"]))
    callbacks = [gp.GradientPolicies({"rounding": rounding})]
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(max_steps=2, log_every_n_steps=1, logger=logger, callbacks=callbacks)
    trainer.fit(two_layers, loader)
    trainer.test(two_layers, loader, verbose=False)
    with open(trainer.logger.experiment.metrics_file_path) as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    keys = [{key for key in row if "policy/" in key} for row in rows]
    of_training, of_test = (
        {key for key in set().union(*keys) if key.startswith(s)} for s in ("policy/", "test/")
    )
    assert {f"test/{key}" for key in of_training} >= of_test > set()
    assert of_test in keys
    assert not any(row & of_training and row & of_test for row in keys)
    (counted,) = [row["test/policy/rounding/operations"] for row in rows if of_test & {*row}]
    assert float(counted) == 0, "no gradient was recorded in the test"


@pytest.mark.parametrize("wanted", [False, True])
def test_what_no_logger_gets_is_measured_for_a_sink(two_layers, loader, make_trainer, wanted):
    received = []
    policies = {
        "rounding": gp.StraightThrough(ops=["round"]),
        "half": gp.Freeze(half, params="head.weight"),
    }
    callback = gp.GradientPolicies(policies)
    if wanted:
        callback.sinks.append(lambda *measured: received.append(measured))
    trainer = make_trainer(limit_train_batches=3, log_every_n_steps=3, callbacks=[callback])
    trainer.fit(two_layers, loader)
    if not wanted:
        assert received == []
        assert callback.freezer.observers == []
        return
    ((phase, updates, measured),) = received
    assert (phase, updates, [*measured]) == ("fit", 3, ["half", "rounding"])
    assert measured["half"]["parameter"] == ["head.weight"]
    assert measured["half"]["active"] == [8]
    assert measured["rounding"]["zeros_passed"] is not None


def test_loggers_and_sinks_get_the_same_numbers(two_layers, loader, make_trainer, tmp_path):
    received = []
    callback = gp.GradientPolicies(
        {
            "half": gp.Freeze(gp.masks.Random(0.5, every=2), params="trunk.*"),
            "none": gp.Scale(0.0, ops=["relu"]),
            "rounding": gp.StraightThrough(ops=["round"]),
        }
    )
    callback.sinks.append(lambda *measured: received.append(measured))
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(max_epochs=2, log_every_n_steps=4, logger=logger, callbacks=[callback])
    trainer.fit(two_layers, loader)
    with open(logger.experiment.metrics_file_path) as file:
        rows = [row for row in csv.DictReader(file) if row["policy/half/active_share"]]
    assert [updates for _, updates, _ in received] == [4, 8]
    for row, (_, _, measured) in zip(rows, received, strict=True):
        policy = {key: float(value) for key, value in row.items() if key.startswith("policy/")}
        assert policy == pytest.approx(summary(measured))
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


@pytest.mark.parametrize("wanted", [False, True])
def test_a_validation_is_measured_only_for_a_sink(two_layers, loader, make_trainer, wanted):
    class Attributes(Callback):
        def on_validation_end(self, trainer, pl_module):
            with torch.inference_mode(False), torch.enable_grad():
                pl_module(torch.ones(2, 4, requires_grad=True)).sum().backward()

    received = []
    callback = gp.GradientPolicies({"guided": gp.Guided(when=gp.When(phases=["validate"]))})
    if wanted:
        callback.sinks.append(lambda phase, updates, measured: received.append((phase, measured["guided"])))
    make_trainer(callbacks=[callback, Attributes()]).validate(two_layers, loader, verbose=False)
    assert len(received) == wanted
    for phase, guided in received:
        assert phase == "validate"
        # The model rounds, without a policy that passes a gradient.
        assert guided["gradient_norm_before"] == 0


def test_nothing_is_logged_where_that_is_not_wanted(two_layers, loader, make_trainer, tmp_path):
    policies = {
        "rounding": gp.StraightThrough(ops=["round"], when=gp.When(phases=["fit", "test"])),
        "half": gp.Freeze(half, params="head.weight"),
    }
    callbacks = [gp.GradientPolicies(policies, log=False)]
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(log_every_n_steps=1, logger=logger, callbacks=callbacks)
    trainer.fit(two_layers, loader)
    trainer.test(two_layers, loader, verbose=False)
    with open(logger.experiment.metrics_file_path) as file:
        keys = csv.DictReader(file).fieldnames
    assert "train/loss" in keys
    assert not [key for key in keys if "policy/" in key]


def test_a_run_that_fails_says_nothing_else(two_layers, loader, make_trainer, recwarn):
    """It may have ended before it met what its policies name."""

    class Fails(Callback):
        def on_train_batch_start(self, *_):
            raise RuntimeError("on purpose")

    callbacks = [gp.GradientPolicies({"rounding": gp.StraightThrough(ops=["round"])}), Fails()]
    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(callbacks=callbacks).fit(two_layers, loader)
    assert not [warning for warning in recwarn if "never met" in str(warning.message)]


def test_bounds_on_gradients_follow_the_loss_scale(two_layers, loader, make_trainer):
    moved = []
    for scale in (1.0, 2.0**10):
        module = copy.deepcopy(two_layers)
        module.optimizer = torch.optim.SGD
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        callback = gp.GradientPolicies({"bound": gp.Clip(value=1e-3, modules="head", at="output")})
        make_trainer(
            limit_train_batches=1,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
            callbacks=[callback],
        ).fit(module, loader)
        moved.append(module.head.bias.detach() - two_layers.head.bias.detach())
    # The gradient of the bias adds up those of eight samples.
    assert 0 < moved[0].abs().max() <= 0.05 * 8 * 1e-3 * 1.01
    torch.testing.assert_close(moved[1], moved[0], rtol=0.01, atol=0.0)


class Detached:
    """Rounds where no gradient is recorded."""

    def forward(self, x):
        return self.head(torch.round(self.trunk(x).detach()))


def test_an_operation_that_gets_no_gradient_ends_the_run_unless_what_rests_may_thaw(
    two_layers, loader, make_trainer
):
    class Module(Detached, type(two_layers)):
        pass

    def fit(module):
        callback = gp.GradientPolicies({"rounding": gp.StraightThrough(ops=["round"])})
        trainer = make_trainer(callbacks=[callback])
        trainer.fit(module, loader)
        return trainer.global_step

    with pytest.raises(gp.PolicyError, match=r"policy\.rounding\.ops"):
        fit(Module())
    resting = Module()
    resting.trunk.requires_grad_(False)
    with pytest.warns(UserWarning, match="policy 'rounding'"):
        assert fit(resting) == 4


def test_an_operation_that_a_test_never_meets_ends_it(two_layers, loader, make_trainer):
    wrong = gp.StraightThrough(ops=["floor"], when=gp.When(phases=["test"]))
    with pytest.raises(gp.PolicyError, match=r"wrong.*floor"):
        make_trainer(callbacks=[gp.GradientPolicies({"wrong": wrong})]).test(
            two_layers, loader, verbose=False
        )


def test_what_is_for_several_processes_does_no_harm_on_one(two_layers, loader, make_trainer):
    seen = []

    class Reads(Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append((callback.ranks.agreement_every, callback.ranks.communication))

    policies = {"half": gp.Freeze(half, params="head.weight")}
    communication = ActiveEntries()
    callback = gp.GradientPolicies(policies, agreement_every=7, communication=communication)
    assert callback.communication is communication
    trainer = make_trainer(callbacks=[callback, Reads()])
    trainer.fit(two_layers, loader)
    assert trainer.global_step == 4
    assert seen == [(7, None)]
    assert callback.ranks is None


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        (gp.Guided(), "policies: must be a dict from names to policies"),
        ([gp.Guided()], "policies: must be a dict from names to policies"),
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


def caught(model, loader, trainer):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(model, loader)
    return [str(each.message) for each in found if str(each.message).startswith("policy")]


@pytest.mark.parametrize("buffers", ["hold", "eval"])
def test_a_frozen_layer_stands_still_through_validation_and_a_call_of_train(loader, make_trainer, buffers):
    class Called(Normalized):
        seen: list = []

        def on_train_batch_start(self, *_):
            self.train()

        def on_before_zero_grad(self, *_):
            self.seen.append((self.norm.running_mean.clone(), self.norm.training, self.trunk.training))

        def validation_step(self, *_):
            assert not any(module.training for module in self.modules())

    model, frozen = Called(), gp.Freeze(gp.masks.Fixed(False), params=["norm.*"], buffers=buffers)
    model.seen = []
    trainer = make_trainer(
        max_steps=4,
        val_check_interval=1,
        limit_val_batches=1,
        callbacks=[gp.GradientPolicies({"still": frozen})],
    )
    trainer.fit(model, loader, loader)
    assert len(model.seen) == 4
    for mean, norm, trunk in model.seen:
        assert torch.equal(mean, torch.zeros_like(mean))
        assert (norm, trunk) == (buffers == "hold", True)
    assert all(module.training for module in model.modules())


def test_every_warning_of_the_plan_comes_from_the_callback_too(loader, make_trainer):
    policies = {
        "still": gp.Freeze(gp.masks.Fixed(False), params=["norm.*"]),
        "nothing": gp.Scale(1.0, modules="head", at="output"),
        "adam": gp.Scale(0.5, params="head.*"),
        "steps": gp.StraightThrough(ops=["round", "floor"]),
    }
    model = Normalized()
    batch = next(iter(loader))
    planned = gp.plan(model, policies, lambda copy: training_loss(copy, batch))
    assert len(planned.warnings) == 4
    lines = caught(model, loader, make_trainer(max_steps=2, callbacks=[gp.GradientPolicies(policies)]))
    found = [line.removeprefix("policy ").replace("'steps'", "steps") for line in lines]
    # What else ran there differs: the callback sees the logging too.
    assert {line.split(";")[0] for line in found} == {line.split(";")[0] for line in planned.warnings}


def test_warnings_that_a_plan_has_shown_are_not_repeated(loader, make_trainer):
    policies = {"still": gp.Freeze(gp.masks.Fixed(False), params=["norm.*"])}
    model, batch = Normalized(), next(iter(loader))
    callback = gp.GradientPolicies(policies)
    callback.shown_warnings = frozenset(
        gp.plan(model, policies, lambda copy: training_loss(copy, batch)).warnings
    )
    assert caught(model, loader, make_trainer(max_steps=2, callbacks=[callback])) == []


def test_plan_prints_the_table_before_training_and_leaves_the_course_as_it_was(
    two_layers, loader, make_trainer, capsys
):
    policies = {"half": gp.Freeze(gp.masks.Random(0.5, every=1), params="head.weight")}
    weights = []
    for plan in (None, True):
        model = copy.deepcopy(two_layers)
        torch.manual_seed(0)
        make_trainer(max_steps=3, callbacks=[gp.GradientPolicies(policies, plan=plan)]).fit(model, loader)
        weights.append(bits(model))
        printed = capsys.readouterr().out
        assert ("Freeze · Random" in printed) is bool(plan)
    assert same(*weights)


def test_a_plan_that_cannot_be_made_is_a_warning(two_layers, loader, make_trainer):
    class AsksTrainer(type(two_layers)):
        def training_step(self, batch, *rest):
            assert self.trainer.max_steps == 1
            return super().training_step(batch, *rest)

    callback = gp.GradientPolicies({"cut": gp.Stop(modules="head")}, plan=True)
    with pytest.warns(UserWarning, match="no plan could be made: .*Trainer"):
        make_trainer(max_steps=1, callbacks=[callback]).fit(AsksTrainer(), loader)


def test_under_manual_optimization_a_plan_is_not_made(two_layers, loader, make_trainer):
    two_layers.automatic_optimization = False
    callback = gp.GradientPolicies({"cut": gp.Stop(modules="head")}, plan=True)
    with pytest.warns(UserWarning, match="plan=True makes no plan under manual optimization"):
        make_trainer(max_steps=1, callbacks=[callback]).fit(two_layers, loader)
