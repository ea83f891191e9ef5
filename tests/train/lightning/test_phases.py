"""Phases under Lightning: metrics end them, and a run killed in any of them ends with the same bits."""

import copy
import itertools

import pytest
import torch
from lightning.pytorch import Callback

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.train.lightning.resume import ExactResume

EPOCHS = [
    {"params": "head.*", "until": {"epochs": 2}},
    {"params": ["head.*", "trunk.2.*"], "until": {"epoch": 3}, "lr": 0.02},
    {"params": "*", "lr": gp.schedules.Cosine(0.02, 0.0, steps=20), "weight_decay": 0.0},
]
METRICS = [
    {"params": "head.*", "until": {"metric": "val/script", "patience": 1}, "best": True},
    {"params": ["head.*", "trunk.2.*"], "until": {"metric": "val/script", "patience": 2}, "best": True},
    {"params": "*"},
]
# Without it no gradient would reach the trunk, which rounds.
PASSED = {"through": gp.StraightThrough(ops=["round"])}
# The first phase ends with the third validation, the second with the sixth.
VALUES = [3.0, 2.0, 2.5, 1.0, 1.5, 1.2, 5.0, 4.0]


resumes = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming")


class Follow(Callback):
    """Notes the phase of each batch, and saves checkpoints before and after each validation."""

    def __init__(self, policies, folder=None):
        self.source, self.folder, self.phases = policies.policies["thaw"].mask, folder, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.phases.append(self.source.phase)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.folder is not None and trainer.is_last_batch:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch} unvalidated.ckpt")

    def on_validation_end(self, trainer, module):
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.fixture
def fit(two_layers, loader, make_trainer):
    """Trains a copy of the model in phases, with a validation whose values are written down."""

    def run(phases, epochs=8, folder=None, resumed=None, **settings):
        model = copy.deepcopy(two_layers)
        policies = gp.GradientPolicies({"thaw": gp.Freeze(gp.masks.Phases(phases)), **PASSED}, log=False)
        follow = Follow(policies, folder)
        model.validation_step = lambda batch, batch_idx: model.log("val/script", VALUES[model.current_epoch])
        trainer = make_trainer(max_epochs=epochs, callbacks=[ExactResume(), policies, follow], **settings)
        trainer.fit(model, loader, loader, ckpt_path=resumed, weights_only=True)
        return model, follow.phases, trainer

    return run


def phase_of_epochs(phases):
    assert all(phases[i : i + 4] == [phases[i]] * 4 for i in range(0, len(phases), 4))
    return phases[::4]


def check_moved(model, before, layers):
    """Check that all parameters of these layers have changed, and no others."""
    for name, parameter in model.named_parameters():
        stays = name.rpartition(".")[0] not in layers
        assert torch.equal(parameter, before[name]) == stays, name


@pytest.mark.supports("phases", loop="lightning")
@resumes
@pytest.mark.parametrize(
    ("phases", "course"), [(EPOCHS, [0] * 2 + [1] + [2] * 5), (METRICS, [0] * 3 + [1] * 3 + [2] * 2)]
)
def test_a_run_killed_in_any_phase_ends_with_the_same_bits(fit, tmp_path, phases, course):
    whole, seen, _ = fit(phases, folder=tmp_path)
    assert phase_of_epochs(seen) == course
    for epoch, moment in itertools.product(range(7), ("", " unvalidated")):
        model, seen, _ = fit(phases, resumed=tmp_path / f"{epoch}{moment}.ckpt")
        assert phase_of_epochs(seen) == course[epoch + 1 :]
        assert all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))


@resumes
@pytest.mark.parametrize(
    ("phases", "phase", "trained"),
    [(EPOCHS, 2, {"head", "trunk.2", "trunk.0"}), (METRICS, 1, {"head", "trunk.2"})],
)
def test_what_has_thawed_trains_on_in_a_resumed_run_of_one_param_group(fit, tmp_path, phases, phase, trained):
    """Neither Lightning's issues 21901, 6891 and 8502 nor finetuning-scheduler's 29 and 30 are to be met."""
    fit(phases, epochs=5, folder=tmp_path)
    stopped = torch.load(tmp_path / "4.ckpt", weights_only=True)
    model, seen, trainer = fit(phases, epochs=6, resumed=tmp_path / "4.ckpt")
    assert phase_of_epochs(seen) == [phase]
    check_moved(model, stopped["state_dict"], trained)
    assert all(p.requires_grad for p in model.parameters())
    (saved,), (group,) = stopped["optimizer_states"][0]["param_groups"], trainer.optimizers[0].param_groups
    assert len(saved["params"]) == len(set(group["params"])) == len(list(model.parameters()))
    assert trainer.early_stopping_callback is None


def test_what_a_phase_does_not_train_keeps_its_bits_and_what_it_trains_moves(fit, two_layers):
    for epochs, trained in ((1, {"head"}), (3, {"head", "trunk.2"}), (4, {"head", "trunk.2", "trunk.0"})):
        model, _, _ = fit(EPOCHS, epochs=epochs)
        check_moved(model, two_layers.state_dict(), trained)


# Of the form that finetuning-scheduler publishes: names and regular expressions, disjoint phases.


def test_the_best_weights_of_a_phase_come_back_when_it_ends(fit, tmp_path):
    model, _, _ = fit(METRICS[:1], folder=tmp_path)
    best = torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())


def test_an_end_of_the_last_phase_ends_the_training(fit):
    for until, batches in (
        ({"steps": 6}, 6),
        ({"epochs": 2}, 8),
        ({"metric": "val/script", "patience": 1}, 12),
    ):
        _, seen, trainer = fit([{"params": "head.*", "until": until}])
        assert (len(seen), trainer.global_step) == (batches, batches)


def test_a_metric_that_is_not_logged_is_an_error_with_the_nearest(fit):
    message = r"policy\.thaw: .*'val/scrip' was not logged; did you mean 'val/script'"
    with pytest.raises(PolicyError, match=message):
        fit([{"params": "head.*", "until": {"metric": "val/scrip"}}])


def test_a_second_fit_of_a_trainer_goes_on_with_the_phases_of_the_first(fit, two_layers, loader):
    _, _, trainer = fit(EPOCHS, epochs=1)
    follow = trainer.callbacks[-1]
    for trainer.fit_loop.max_epochs in (2, 4):
        trainer.fit(two_layers, loader, loader)
    assert phase_of_epochs(follow.phases) == [0, 0, 1, 2]


def test_a_metric_without_a_validation_is_an_error_before_the_first_step(fit):
    message = r"policy\.thaw: needs the metric 'val/script' .* found none .*limit_val_batches above 0"
    with pytest.raises(PolicyError, match=message):
        fit(METRICS, limit_val_batches=0)


@pytest.mark.supports("phases", loop="plain")
def test_a_loop_killed_at_any_step_ends_with_the_same_bits(two_layers, loader):
    batches = list(itertools.chain(*[loader] * 2))

    def train(steps, state=None):
        model = copy.deepcopy(two_layers)
        phases = gp.masks.Phases(
            [
                {"params": "head.*", "until": {"metric": "loss", "patience": 1}, "best": True},
                {"params": "trunk.*", "until": {"steps": 2}},
                {"params": "*"},
            ]
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with gp.training(model, optimizer, {"thaw": gp.Freeze(phases), **PASSED}) as optimizer:
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
            for step in steps:
                model.training_step(batches[step], step).backward()
                optimizer.step()
                optimizer.zero_grad()
                phases.report({"loss": VALUES[step]})
            return copy.deepcopy((model.state_dict(), optimizer.state_dict(), phases.phase))

    whole, _, last = train(range(8))
    assert last == 2
    for cut in range(1, 8):
        model, _, _ = train(range(cut, 8), train(range(cut)))
        assert all(map(torch.equal, model.values(), whole.values()))
