"""GradientPoliciesCallback: policies under Hugging Face's Trainer."""

import copy
import dataclasses
import gc
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DistributedType
from hydra.utils import instantiate
from omegaconf import OmegaConf
from small_bert import make_bert, make_data, train_with_lightning
from torch import nn
from transformers import Trainer, TrainerCallback

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.freezing.row_gradients import _RowForward
from gradpolicy.integrations.transformers import GradientPoliciesCallback

PAGE = (Path(__file__).parents[2] / "docs" / "integrations" / "transformers.md").read_text()
RECIPES = {
    next(iter(yaml.safe_load(text))): text
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
}

IN_THE_TABLE = {
    "new_tokens": "rows",
    "lisa": "tensors",
    "child_tuning_d": "gradient sources",
    "badam": "tensors",
    "tenth": "entries",
    "gradual": "tensors",
}


def recipe(name):
    """A recipe of the page, with shorter periods than a real training has."""
    nodes = yaml.safe_load(RECIPES[name])
    for node in nodes.values():
        mask = node["mask"]
        if mask.get("every") == 20:
            mask["every"] = 2
        if "window" in mask:
            mask["window"] = 3
    return instantiate(OmegaConf.create(nodes))


def bits(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def half(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == 0).reshape(parameter.shape)


def alternating(name, parameter, step):
    return (torch.arange(parameter.numel()) % 2 == step % 2).reshape(parameter.shape)


class Watch(TrainerCallback):
    """Notes weights, gradients as they are clipped, and what asks for one, at each update."""

    def __init__(self):
        self.begun, self.weights, self.norms, self.requires_grad = [], [], [], []

    def on_step_begin(self, args, state, control, model, **kwargs):
        self.begun.append(bits(model))
        self.requires_grad.append({name: p.requires_grad for name, p in model.named_parameters()})

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append(bits(model))


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_what_trains_is_printed_once(train, capsys):
    train(make_bert(), {"heads": gp.Train(params=["*.bias", "classifier.*"])})
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("What trains") == 1
    assert "bert.encoder.layer.0–2" in printed
    assert "parameters (bert.embeddings.word_embeddings.weight," in printed
    assert "they are frozen, since Train policies name what trains." in printed


def test_a_trainer_that_would_train_nothing_is_refused(train):
    with pytest.raises(gp.PolicyError, match=r"0 of .* entries train"):
        train(make_bert(), {"all": gp.Freeze()})


# ---- recipes


EACH = [name if name == "lisa" else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]


@pytest.mark.supports("{name}", "accumulation", loop="huggingface", names=IN_THE_TABLE)
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", EACH)
def test_a_recipe_gives_the_bits_that_it_gives_under_lightning(train, tmp_path, name, accumulate):
    start, one, other = (make_bert() for _ in range(3))

    def prepare(trainer):
        trainer.model_accepts_loss_kwargs = False

    _, callback = train(one, recipe(name), gradient_accumulation_steps=accumulate, prepare=prepare)
    reference = train_with_lightning(other, recipe(name), tmp_path, accumulate_grad_batches=accumulate)
    assert same(bits(one), bits(other))
    assert not same(bits(one), bits(start))
    assert callback.run.freezer.parameters.keys() == reference.run.freezer.parameters.keys()


@pytest.mark.supports("resume", loop="huggingface")
@pytest.mark.parametrize("name", EACH)
def test_a_recipe_resumes_bit_for_bit(train, name):
    """With dropout and shuffling, from the middle of an epoch."""
    runs = []
    settings = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    for resume in (None, "checkpoint-2", "checkpoint-4"):
        model = make_bert(hidden_dropout_prob=0.1)
        checkpoint = resume and str(Path(runs[0][0].args.output_dir) / resume)
        trainer, _ = train(model, recipe(name), resume=checkpoint, **settings)
        runs.append((trainer, bits(model)))
    (whole, weights), *resumed = runs
    for trainer, own in resumed:
        assert same(own, weights)
        assert losses(trainer) == losses(whole)


# ---- gradients


@pytest.mark.supports("rows", "row gradients", loop="huggingface")
@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"activation_checkpointing": True}])
def test_gradients_of_rows_move_what_dense_ones_move(train, settings):
    ends, held = [], Counter()

    class Count(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            held[len(ends)] += sum(isinstance(vars(m).get("forward"), _RowForward) for m in model.modules())

    for whole in (False, True):
        model = make_bert()
        for module in model.modules():
            if whole and isinstance(module, nn.Linear):
                module.forward = lambda x, forward=module.forward: forward(x)
        rows = gp.Freeze(gp.masks.Random(0.3, level="row", every=2), params=["*dense.weight", "*word*"])
        train(model, {"rows": rows}, callbacks=(Count(),), **settings)
        ends.append(bits(model))
    assert held[0] > 0
    assert held[1] == 0
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], msg=name)


@pytest.mark.supports("step in backward", loop="huggingface")
@pytest.mark.parametrize("name", ["none", "rows", "entries"])
def test_updates_in_the_backward_pass_move_the_same_bits(train, name):
    ends, logs = [], []
    for in_backward in (True, False):
        model = make_bert()
        source = gp.masks.Random(0.3, level="row" if name == "rows" else "entry", every=2)
        policies = {} if name == "none" else {"some": gp.Freeze(source, params="*dense.weight")}
        trainer, _ = train(model, policies, step_in_backward=in_backward, max_grad_norm=0.0)
        ends.append(bits(model))
        logs.append({key for entry in trainer.state.log_history for key in entry})
    assert same(*ends)
    if name != "none":
        assert "policy/some/active_share" in logs[0] & logs[1]
        assert "policy/some/gradient_norm_before" in logs[1] - logs[0]


def test_a_training_after_one_that_was_interrupted_has_its_own_policies_only(train, bert):
    class Interrupts(TrainerCallback):
        def on_step_end(self, *_, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(bert, {"still": gp.Freeze(params="bert.*")}, callbacks=(Interrupts(),))
    before = bits(bert)
    train(bert, {"head": gp.Freeze(params="classifier.*")}, num_train_epochs=1)
    moved = {name for name, value in bits(bert).items() if not torch.equal(value, before[name])}
    assert any(name.startswith("bert.") for name in moved)
    assert not any(name.startswith("classifier.") for name in moved)


REFUSED = {
    "clipping by default": ({"max_grad_norm": 1.0}, r"found max_grad_norm=1\.0 .*clips at 1\.0 by default"),
    "accumulation": ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, "found gradient_accumulation"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_all_gradients_at_once_is_refused(train, bert, case):
    settings, message = REFUSED[case]
    with pytest.raises(PolicyError, match=message):
        train(bert, {}, step_in_backward=True, **settings)


@pytest.mark.supports("clipping", loop="huggingface")
def test_masked_gradients_count_neither_in_clipping_nor_in_the_log(train, bert):
    watch = Watch()
    policies = {"rest": gp.Freeze(half), "trunk": gp.Freeze(gp.masks.Fixed(), params="bert.*")}
    trainer, _ = train(bert, policies, callbacks=(watch,), max_grad_norm=1e-4)
    assert watch.norms == pytest.approx([1e-4] * 12, rel=1e-3)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 12
    for entry in logged:
        assert entry["grad_norm"] == pytest.approx(entry["policy/rest/gradient_norm_after"], rel=1e-6)
        assert entry["grad_norm"] < entry["policy/rest/gradient_norm_before"]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_what_the_trainer_logs_has_measurements_whenever_it_logs(train, bert, strategy):
    settings = {"logging_strategy": strategy, "logging_steps": 2, "gradient_accumulation_steps": 2}
    trainer, _ = train(bert, {"rest": gp.Freeze(half)}, **settings)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) > 1
    assert all("policy/rest/active_share" in entry for entry in logged)


class Shown(gp.masks.MaskSource):
    """Writes down the gradients that it is shown."""

    def prepare(self):
        self.seen = []

    def masks(self, step, epoch):
        return {name: half(name, parameter, step) for name, parameter in self.parameters.items()}

    def observe(self, gradients):
        self.seen.append(torch.cat([gradient.flatten() for gradient in gradients.values()]).clone())


class NoNorm(Trainer):
    """As transformers was before it logged the norm of what it does not clip."""

    def _get_grad_norm(self, model, grad_norm=None):
        return grad_norm


@pytest.mark.parametrize(("max_grad_norm", "kind"), [(1e-4, Trainer), (0.0, Trainer), (0.0, NoNorm)])
def test_sources_see_whole_gradients_before_they_are_clipped(train, bert, max_grad_norm, kind):
    source, first = Shown(), copy.deepcopy(bert)
    batch = [torch.stack([row[key] for row in make_data()[:4]]) for key in ("input_ids", "labels")]
    first(input_ids=batch[0], labels=batch[1]).loss.backward()
    policies = {"shown": gp.Freeze(source, params="classifier.*")}
    train(bert, policies, max_grad_norm=max_grad_norm, kind=kind)
    assert len(source.seen) == 12
    expected = torch.cat([p.grad.flatten() for p in first.classifier.parameters()])
    torch.testing.assert_close(source.seen[0], expected)


def test_a_trainer_that_clips_in_its_own_way_is_refused(train, bert):
    class OwnClipping(Trainer):
        def _clip_grad_norm(self, model):
            return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with pytest.raises(gp.PolicyError, match="OwnClipping clipped the gradients in a way of its own"):
        train(bert, {"half": gp.Freeze(half)}, kind=OwnClipping)


def with_loss_scaler(trainer):
    """What accelerate does for fp16 on a GPU, on the CPU; the first steps overflow."""
    accelerator = trainer.accelerator
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)


@pytest.mark.parametrize("prepared", [False, True])
def test_an_optimizer_that_is_made_anew_in_the_middle_is_refused(train, bert, prepared):
    class MakesAnew(Trainer):
        def training_step(self, *arguments):
            if self.state.global_step == 2:
                made = torch.optim.AdamW(bert.parameters())
                self.optimizer = self.accelerator.prepare(made) if prepared else made
            return super().training_step(*arguments)

    with pytest.raises(gp.PolicyError, match=r"AdamW.step would update .* past the policies"):
        train(bert, {"half": gp.Freeze(half, params="*.weight")}, kind=MakesAnew)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_that_fp16_skips_is_no_step(train, bert, optim):
    source, watch, start, largest = Shown(), Watch(), bits(bert), []

    def passed_on(grad, inputs, output):
        largest.append(float(grad.abs().max()))
        return grad

    policies = {
        "seen": gp.UseRule(passed_on, modules="bert.encoder.layer.1"),
        "shown": gp.Freeze(source, params="classifier.weight"),
        "turns": gp.Freeze(alternating, params="bert.pooler.dense.weight"),
        "bound": gp.Clip(norm=1.0, modules="bert.encoder.layer.0"),
    }
    trainer, _ = train(bert, policies, callbacks=(watch,), prepare=with_loss_scaler, optim=optim)
    updates = len(source.seen)
    assert 0 < updates < 12
    name = "bert.pooler.dense.weight"
    step = 0
    for old, new in itertools.pairwise([start, *watch.weights]):
        moved = (old[name] != new[name]).flatten()
        if moved.any():
            assert not moved[1 - step % 2 :: 2].any()
            step += 1
    assert step == updates
    unscaled = [entry for entry in trainer.state.log_history if entry.get("grad_norm", torch.inf) < 1e3]
    assert len(unscaled) == updates
    # Rules see gradients without the loss scale, of 2 ** 20 at first.
    assert 0 < max(each for each in largest if each < torch.inf) < 1
    # The bound is that of gradients without the loss scale, and these are smaller.
    for entry in unscaled:
        before, after = (entry[f"policy/bound/gradient_norm_{when}"] for when in ("before", "after"))
        assert after == pytest.approx(before)


@pytest.mark.supports("mixed precision", loop="huggingface")
@pytest.mark.parametrize(
    ("settings", "prepare"), [({"bf16": True}, id), ({}, with_loss_scaler)], ids=["bf16", "fp16"]
)
def test_mixed_precision_resumes_bit_for_bit(train, tmp_path, settings, prepare):
    ends = []
    for resume in (None, str(tmp_path / "run" / "checkpoint-6")):
        model = make_bert(hidden_dropout_prob=0.1)
        saving = {"save_strategy": "steps", "save_steps": 6}
        train(model, recipe("child_tuning_d"), resume=resume, prepare=prepare, **saving, **settings)
        ends.append(bits(model))
    assert same(*ends)
    assert not same(ends[0], bits(make_bert()))


@pytest.mark.supports("master weights", loop="huggingface")
def test_bfloat16_weights_train_at_small_rates_and_resume_bit_for_bit(train, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 6, "bf16": True, "learning_rate": 1e-5}
    ends = []
    for kept, resume in ((False, None), (True, None), (True, str(tmp_path / "run" / "checkpoint-6"))):
        model = make_bert().bfloat16()
        train(model, recipe("child_tuning_d"), resume=resume, master_weights=kept, **settings)
        ends.append(bits(model))
    start = bits(make_bert().bfloat16())
    moved = [sum(int((end[name] != start[name]).sum()) for name in start) for end in ends]
    assert moved[1] > moved[0]
    assert same(*ends[1:])


CHECKPOINTING = pytest.mark.supports("checkpointing", loop="huggingface")


@pytest.mark.supports("tensors", "entries", "flow", loop="huggingface")
@pytest.mark.parametrize(
    "settings",
    [
        {"bf16": True},
        pytest.param({"activation_checkpointing": True}, marks=CHECKPOINTING),
        pytest.param(
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
            marks=CHECKPOINTING,
        ),
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager"},
            marks=[
                pytest.mark.slow,
                pytest.mark.supports("tensors", "entries", "flow", loop="huggingface", compiled=True),
            ],
        ),
    ],
    ids=["bf16", "checkpointing", "reentrant", "compiled"],
)
def test_policies_hold_under(train, bert, settings):
    """Frozen entries keep their bits, what thaws trains, and nothing passes a stopped gradient."""
    before, watch = bits(bert), Watch()
    policies = {
        "cut": gp.Stop(modules="bert.encoder.layer.1"),
        "start": gp.Freeze(gp.masks.Fixed(), params="*embeddings*"),
        "later": gp.Freeze(gp.masks.Fixed(), params="bert.pooler.*", when=gp.When(stop=6)),
        "half": gp.Freeze(half, params="bert.encoder.layer.2.*"),
    }
    train(bert, policies, callbacks=(watch,), weight_decay=0.0, **settings)
    after = bits(bert)
    for name, value in after.items():
        moved = value != before[name]
        if "embeddings" in name or "layer.0." in name:
            assert not moved.any(), name
        elif "layer.2." in name:
            assert not moved[~half("", value, 0)].any(), name
        elif "pooler" in name:
            assert moved.any()
            assert torch.equal(watch.weights[5][name], before[name])
            assert not torch.equal(watch.weights[6][name], before[name])
    assert torch.equal(after["classifier.weight"] != before["classifier.weight"], torch.ones(2, 16) > 0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_backward_pass_skips_what_is_frozen_unless_it_is_compiled(train, bert, compiled):
    watch = Watch()
    settings = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    policies = {"trunk": gp.Freeze(gp.masks.Fixed(), params="bert.*")}
    train(bert, policies, callbacks=(watch,), max_steps=2, **settings)
    # The callback's own step_begin comes first.
    assert watch.requires_grad[0]["bert.pooler.dense.weight"] is compiled
    assert all(parameter.requires_grad for parameter in bert.parameters())


# ---- what is evaluated


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
# The first evaluation is the best of three: the classifier's rate is too large to learn anything.
STALLS = {"metric": "eval_loss", "patience": 2}


@pytest.mark.supports("phases", loop="huggingface")
def test_a_phase_ends_by_what_the_trainer_evaluates_and_resumes_bit_for_bit(train):
    def phases():
        head = {"params": "classifier.*", "until": STALLS, "best": True}
        return {"thaw": gp.Freeze(gp.masks.Phases([head, {"params": "*", "lr": 1e-3}]))}

    whole, watch = make_bert(hidden_dropout_prob=0.1), Watch()
    trainer, _ = train(whole, phases(), callbacks=(watch,), **EVALUATED)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[0] < min(losses[1:3])
    start, best, last, second, after = (watch.begun[step] for step in (0, 2, 5, 6, 7))
    assert not torch.equal(last["classifier.weight"], best["classifier.weight"])
    assert same(second, best)
    for name, value in start.items():
        assert torch.equal(value, second[name]) != name.startswith("classifier."), name
    assert not torch.equal(after["bert.pooler.dense.weight"], start["bert.pooler.dense.weight"])
    for step in (4, 6, 8):
        resumed = make_bert(hidden_dropout_prob=0.1)
        train(resumed, phases(), resume=f"{trainer.args.output_dir}/checkpoint-{step}", **EVALUATED)
        assert same(bits(resumed), bits(whole)), step


@pytest.mark.parametrize(("metric", "several"), [("eval_loss", False), ("eval_b_loss", True)])
def test_the_end_of_the_last_phase_ends_the_training_with_its_best_weights(train, bert, metric, several):
    watch = Watch()
    phase = {"params": "classifier.*", "until": {**STALLS, "metric": metric}, "best": True}
    policies = {"thaw": gp.Freeze(gp.masks.Phases([phase]))}
    evaluated = {"a": make_data(samples=4), "b": make_data(), "c": make_data(samples=4)} if several else None
    trainer, _ = train(bert, policies, callbacks=(watch,), evaluated=evaluated, **EVALUATED)
    assert trainer.state.global_step == 6
    assert same(bits(bert), watch.begun[2])


def test_a_phase_that_ends_by_a_metric_needs_a_trainer_that_evaluates(train, bert):
    policies = {"thaw": gp.Freeze(gp.masks.Phases([{"params": "*", "until": STALLS}]))}
    with pytest.raises(PolicyError, match=r"policy\.thaw: needs the metric 'eval_loss' .*eval_strategy"):
        train(bert, policies)


# ---- beginnings and ends


def test_the_model_and_the_optimizer_are_left_as_they_were_found(train, bert):
    forwards = [module.__dict__.get("forward") for module in bert.modules()]
    policies = {
        "half": gp.Freeze(half, params="classifier.*", frozen_state="drop"),
        "guide": gp.Scale(0.5, modules="bert.encoder.layer.0"),
    }
    trainer, _ = train(bert, policies)
    assert [module.__dict__.get("forward") for module in bert.modules()] == forwards
    inner = trainer.optimizer.optimizer
    assert type(inner) is torch.optim.AdamW
    assert inner.state[bert.classifier.weight]["exp_avg"].shape == bert.classifier.weight.shape
    assert "unscale_gradients" not in vars(trainer.accelerator)
    before = bits(bert)
    trainer.callback_handler.callbacks = [
        each for each in trainer.callback_handler.callbacks if not isinstance(each, GradientPoliciesCallback)
    ]
    trainer.train()
    assert (bert.classifier.weight != before["classifier.weight"]).all()


def test_a_failed_training_leaves_nothing_once_its_trainer_is_gone(train, bert):
    class Fails(Trainer):
        def training_step(self, *arguments):
            super().training_step(*arguments)
            raise ArithmeticError

    policies = {"head": gp.Freeze(params="classifier.*"), "slow": gp.Scale(0.5, modules="bert.pooler")}
    with pytest.raises(ArithmeticError):
        train(bert, policies, kind=Fails)
    gc.collect()
    assert "forward" not in vars(bert.bert.pooler)
    assert bert.classifier.weight.requires_grad


def test_a_checkpoint_holds_masks_and_needs_the_callback(train, bert, tmp_path):
    policies = {"half": gp.Freeze(half, params="classifier.weight", frozen_state="drop")}
    settings = {"save_strategy": "steps", "save_steps": 6}
    train(bert, policies, **settings)
    checkpoint = tmp_path / "run" / "checkpoint-6"
    with pytest.raises(KeyError, match="exp_avg"):
        train(make_bert(), {}, resume=str(checkpoint), **settings)
    other = {"other": gp.Freeze(half, params="classifier.weight", frozen_state="drop")}
    with pytest.warns(UserWarning, match="other policies"):
        train(make_bert(), other, resume=str(checkpoint), **settings)


# ---- logs


def test_every_tracker_gets_what_the_policies_did(train, bert, tmp_path):
    class Tracker(TrainerCallback):
        def __init__(self):
            self.logs = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    tracker = Tracker()

    def first(trainer):
        trainer.callback_handler.callbacks.insert(0, tracker)

    policies = {"half": gp.Freeze(half), "slow": gp.Scale(0.5, modules="bert.encoder.layer.1")}
    train(bert, policies, prepare=first, logging_steps=5, save_strategy="steps", save_steps=5)
    losses = [entry for entry in tracker.logs if "loss" in entry]
    assert len(losses) == 2
    assert losses[0]["policy/half/active_share"] == pytest.approx(0.5, abs=0.01)
    assert losses[0]["policy/slow/active"] == 1
    for entry in losses:
        before, after = (entry[f"policy/slow/gradient_norm_{when}"] for when in ("before", "after"))
        assert after == pytest.approx(before / 2)
    saved = json.loads((tmp_path / "run" / "checkpoint-10" / "trainer_state.json").read_text())
    assert saved["log_history"][0]["policy/half/active_share"] == losses[0]["policy/half/active_share"]


# ---- what is wrong


def test_wrong_policies_are_named(train, bert):
    with pytest.raises(gp.PolicyError, match=r"policy.half: must be a gradient policy, got dict"):
        GradientPoliciesCallback({"half": {}})
    with pytest.raises(gp.PolicyError, match=r"policy.half.params: .*bert\.encodr\.\*"):
        train(bert, {"half": gp.Freeze(half, params="bert.encodr.*")})
    frozen = gp.Freeze(gp.masks.Fixed(), params="classifier*")
    with pytest.raises(RuntimeError, match="does not require grad"):
        train(bert, {"cut": gp.Stop(modules="classifier"), "head": frozen})
    with pytest.raises(gp.PolicyError, match="round"):
        train(bert, {"rounding": gp.StraightThrough(ops=["round"])})
    assert "forward" not in vars(bert.bert)


@pytest.mark.parametrize("kind", [dataclasses.make_dataclass("Outputs", ["loss"]), SimpleNamespace])
def test_a_model_may_return_its_loss_in_an_object(train, bert, kind):
    class InObject(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert

        def forward(self, input_ids, labels):
            return kind(loss=self.bert(input_ids=input_ids, labels=labels).loss)

    class TakesIt(Trainer):
        def compute_loss(self, model, inputs, **settings):
            return model(**inputs).loss

    start = bits(bert)
    train(InObject(), {"head": gp.Stop(modules="bert.bert.pooler")}, kind=TakesIt, max_steps=1)
    moved = {name for name, value in bits(bert).items() if not torch.equal(value, start[name])}
    assert {"classifier.weight", "classifier.bias"} <= moved
    assert not any(name.startswith("bert.encoder") for name in moved)


def test_a_policy_for_evaluation_alone_is_told_that_it_does_nothing(train, bert):
    policies = {"guide": gp.Scale(0.5, modules="bert.pooler", when=gp.When(phases=("test",)))}
    with pytest.warns(UserWarning, match=r"policy.guide: does nothing in the phases test"):
        train(bert, policies, max_steps=1)


def test_version_1_of_fsdp_is_refused_with_the_reason(train, bert, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(gp.PolicyError, match=r"FSDP: policies are refused under version 1.*use version 2"):
        train(bert, {"half": gp.Freeze(half)})


def test_the_callback_alone_is_no_training(bert):
    with pytest.raises(gp.PolicyError, match="no Trainer calls it"):
        GradientPoliciesCallback({}).on_train_begin(None, None, None)


def test_the_python_of_the_page_runs():
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    names = {}
    exec(block, names)
    assert isinstance(names["callback"], GradientPoliciesCallback)


# ---- what is built on the Trainer


@pytest.mark.supports("adapters", "flow", loop="huggingface")
def test_policies_act_on_peft_adapters(train, bert):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(bert, LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0))
    before = bits(model)
    policies = {
        "a": gp.Freeze(gp.masks.Fixed(), params="*lora_A*"),
        "b": gp.Freeze(half, params="*layer.1.*lora_B*"),
        "slow": gp.Scale(0.1, modules="*layer.2.attention.self.query.lora_B.default"),
    }
    train(model, policies)
    for name, value in bits(model).items():
        moved = value != before[name]
        if "lora_B" not in name:
            assert not moved.any(), name
        elif "layer.1." in name:
            assert torch.equal(moved, half("", value, 0)), name
        else:
            assert moved.all(), name
