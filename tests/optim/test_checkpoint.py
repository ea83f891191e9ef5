import copy
import io
import json
from functools import partial

import pytest
import pytorch_optimizer
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError
from gradpolicy.optim.checkpoint import VERSION
from tests.fixtures import through_a_file

KINDS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, amsgrad=True),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "damped_sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1, centered=True),
}


def model_and_optimizer(kind, frozen_state, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
    return model, MaskedOptimizer(KINDS[kind](model.parameters()), frozen_state=frozen_state)


def resumed_from(model, kind, frozen_state):
    """Another model with the same weights, and a new optimizer for it."""
    resumed, optimizer = model_and_optimizer(kind, frozen_state)
    resumed.load_state_dict(model.state_dict())
    return resumed, optimizer


def run(model, optimizer, steps, change=True):
    """Training whose masks and gradients follow from the step's number alone."""
    shapes = [lambda w: w.shape, lambda w: w.shape[:1] + (1,) * (w.dim() - 1), lambda w: ()]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for index, weight in enumerate(model.parameters()):
            if change and step % 3 == 0 and index:
                shape = shapes[(step // 3 + index) % 3](weight)
                optimizer.set_mask(weight, torch.rand(shape, generator=generator) < 0.5)
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()


def assert_same(model, other):
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["keep", "zero", "drop", "drop, dense", "drop, plain torch"])
@pytest.mark.parametrize("stop", range(1, 14, 2))
def test_resume_at_any_step_is_bit_for_bit(kind, form, stop):
    frozen_state, _, form = form.partition(", ")
    model, optimizer = model_and_optimizer(kind, frozen_state)
    run(model, optimizer, range(stop))
    resumed, other = resumed_from(model, kind, "keep")
    saved = through_a_file(optimizer.state_dict(dense=form == "dense"))
    if form == "plain torch":  # as where a library loads a checkpoint before the optimizer is wrapped
        other.inner.load_state_dict(saved)
        saved = other.inner.state_dict()
        other = MaskedOptimizer(copy.copy(other.inner))
        assert all(p.shape == v.shape for p, own in other.state.items() for v in own.values() if v.dim())
    other.load_state_dict(saved)
    run(model, optimizer, range(stop, 16))
    run(resumed, other, range(stop, 16))
    assert_same(model, resumed)
    for weight, twin in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(optimizer.get_mask(weight), other.get_mask(twin))
        assert torch.equal(*torch.broadcast_tensors(optimizer.age(weight), other.age(twin)))
    assert optimizer.effective_steps == other.effective_steps == 16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias_correction", ["entry", "tensor"])
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("through_torch", [False, True])
def test_what_has_never_trained_begins_after_a_resume(kind, frozen_state, bias_correction, through_torch):
    def prepared():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 4)
        settings = {"frozen_state": frozen_state, "bias_correction": bias_correction}
        return model, MaskedOptimizer(KINDS[kind](model.parameters()), **settings)

    (model, optimizer), (resumed, other) = prepared(), prepared()
    optimizer.set_mask(model.bias, torch.tensor(False))
    run(model, optimizer, range(3), change=False)
    resumed.load_state_dict(model.state_dict())
    if through_torch:
        optimizer.zero_grad()
        set_optimizer_state_dict(resumed, other, through_a_file(get_optimizer_state_dict(model, optimizer)))
    else:
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    for each, its in ((model, optimizer), (resumed, other)):
        its.set_mask(each.bias, None)
        run(each, its, range(3, 6), change=False)
    assert_same(model, resumed)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_torch_alone_leave_no_masks_and_ages_behind(kind):
    model, optimizer = model_and_optimizer(kind, "zero")
    run(model, optimizer, range(5))
    plain = KINDS[kind](model.parameters())
    plain.load_state_dict(through_a_file(optimizer.state_dict()))
    run(model, plain, range(5, 8), change=False)
    resumed, again = resumed_from(model, kind, "zero")
    again.load_state_dict(through_a_file(plain.state_dict()))
    assert again.active_share() == 1.0
    run(model, plain, range(8, 11), change=False)
    run(resumed, again, range(8, 11), change=False)
    assert_same(model, resumed)


BEGINNING_ODDLY = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.5),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=0.1),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=0.1),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=0.1),
    "ademamix": lambda weights: pytorch_optimizer.AdEMAMix(weights, lr=0.1),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (kind, way)
        for kind in BEGINNING_ODDLY
        for way in ("look", "save and load", "load what others saved later")
        # Torch loads no full state with counts in the param groups, which AdEMAMix has after its first step.
        if (kind, way) != ("ademamix", "load what others saved later")
    ],
)
def test_looking_at_the_state_before_the_first_step_changes_nothing(kind, way):
    """Neither what makes the state of the first step, nor what was loaded before it."""
    full, ends = StateDictOptions(full_state_dict=True), []

    def masked(model):
        return MaskedOptimizer(BEGINNING_ODDLY[kind](model.parameters()), frozen_state="zero")

    for looks in (False, True):
        model, _ = model_and_optimizer("sgd", "keep")
        other = copy.deepcopy(model)
        optimizer, trained = masked(model), masked(other)
        run(other, trained, range(3), change=False)
        if looks:
            state = get_optimizer_state_dict(model, optimizer, options=full)
        if looks and way == "save and load":
            optimizer = masked(model)
            set_optimizer_state_dict(model, optimizer, state, options=full)
        if looks and way == "load what others saved later":
            state = get_optimizer_state_dict(other, trained, options=full)
            set_optimizer_state_dict(model, optimizer, state, options=full)
        elif way == "load what others saved later":
            optimizer.load_state_dict(trained.state_dict())
        run(model, optimizer, range(4))
        ends.append(model)
    assert_same(*ends)


@pytest.mark.parametrize("kind", KINDS)
def test_active_entries_are_saved_before_the_first_step_too(kind):
    model, optimizer = model_and_optimizer(kind, "drop")
    mask = torch.rand(model[0].weight.shape) < 0.5
    optimizer.set_mask(model[0].weight, mask)
    resumed, other = resumed_from(model, kind, "keep")
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(other.get_mask(resumed[0].weight), mask)
    for each, its in ((model, optimizer), (resumed, other)):
        run(each, its, range(3), change=False)
    assert_same(model, resumed)


def test_a_first_step_with_rate_zero_counts_as_torchs():
    """It is what torch.distributed.checkpoint takes where there is no state."""
    masked, plain = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = MaskedOptimizer(torch.optim.AdamW([masked]))
    alone = torch.optim.AdamW([plain])
    for lr, gradient in ((0.0, 0.0), (0.1, 1.0)):
        for its, weight in ((optimizer, masked), (alone, plain)):
            its.param_groups[0]["lr"] = lr
            weight.grad = torch.full((2,), gradient)
            its.step()
    assert torch.equal(masked, plain)
    assert optimizer.effective_steps == optimizer.age(masked)[0] == 2


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "Adafactor", "Muon"])
@pytest.mark.parametrize("looks", [False, True])
def test_a_tensor_that_rests_is_saved_as_torch_saves_one(kind, looks):
    """Torch refuses to load a full state that lacks a parameter's."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, bias=False) for _ in range(2)))
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer, other = (
        MaskedOptimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options), frozen_state=state)
        for state in ("zero", "keep")
    )
    if looks:
        get_optimizer_state_dict(model, optimizer)
    optimizer.set_mask(model[0].weight, torch.tensor(False))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"].keys() == {"0.weight", "1.weight"}
    set_optimizer_state_dict(model, other, state)
    assert not other.get_mask(model[0].weight).any()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("target", ["without masks", "with other masks", "plain torch"])
def test_full_states_reach_optimizers_that_have_nothing_of_ours_yet(kind, frozen_state, target):
    model, optimizer = model_and_optimizer(kind, frozen_state)
    run(model, optimizer, range(5))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    resumed, other = resumed_from(model, kind, "zero")
    if target == "with other masks":
        _, *masked = resumed.parameters()
        other.set_masks({weight: torch.rand(weight.shape) < 0.5 for weight in masked})
    if target == "plain torch":
        other = KINDS[kind](resumed.parameters())
    set_optimizer_state_dict(resumed, other, saved, options=options)
    if target == "plain torch":
        run(resumed, other, range(5, 6), change=False)
        assert all(weight.isfinite().all() for weight in resumed.parameters())
        return
    run(model, optimizer, range(5, 9))
    run(resumed, other, range(5, 9))
    assert_same(model, resumed)


def test_a_target_without_room_for_masks_is_told_so():
    model, optimizer = model_and_optimizer("adamw", "keep")
    run(model, optimizer, range(4))
    saved = optimizer.state_dict(dense=True)
    # What torch.distributed.checkpoint.load leaves out where its target has no such entry.
    del saved["param_groups"][0]["gradpolicy"]["parameters"]["2"]["ages"]
    with pytest.raises(PolicyError, match=r"ages of shape \(3, 7\) did not come through"):
        model_and_optimizer("adamw", "keep")[1].load_state_dict(saved)


def change_settings(tensors, **changed):
    """Changes the settings of a saved record, which are text in bytes; None takes one out."""
    settings = json.loads(bytes(tensors["settings"].tolist())) | changed
    content = json.dumps({key: value for key, value in settings.items() if value is not None}).encode()
    tensors["settings"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


def give_ages(tensors, ages):
    change_settings(tensors, ages_shape=list(ages.shape))
    tensors["ages"] = ages.reshape(-1)


def change_version(saved, version, steps=3):
    general = json.dumps({"version": version, "effective_steps": steps}).encode()
    saved["param_groups"][0]["gradpolicy"]["general"] = torch.tensor(list(general), dtype=torch.uint8)


def move_record(saved, place):
    parameters = saved["param_groups"][0]["gradpolicy"]["parameters"]
    parameters[str(place)] = parameters["0"]


def spoilt(value, others=1.0):
    return torch.full((4, 3), others).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value))


def damaged(change):
    """A checkpoint of one masked parameter, changed."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight]))
    for _ in range(3):
        optimizer.set_mask(weight, torch.rand(4, 3) < 0.5)
        weight.grad = torch.ones(4, 3)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict(dense=True))
    record = saved["param_groups"][0]["gradpolicy"]["parameters"]["0"]
    change_settings(record, mark=None)
    change(saved, record)
    return saved


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, record: change_settings(record, mask_shape=[2, 2]), r"'mask'.*\(2, 2\)"),
        (lambda _, record: record.update(ages=record["ages"].double()), "not integers"),
        (lambda _, record: change_settings(record, frozen_state="kept"), "saved frozen_state.*'keep'"),
        (lambda _, record: give_ages(record, torch.ones(5, 5, dtype=torch.int16)), r"'ages'.*\(5, 5\)"),
        (lambda _, record: record["ages"].fill_(0), "a 0, which no entry has"),
        (lambda _, record: change_settings(record, updates=None), "no 'updates'"),
        (lambda saved, _: saved["state"][0].update(exp_avg=torch.zeros(4, 1)), r"'exp_avg'.*\(4, 1\)"),
        (lambda saved, _: change_version(saved, 99), "newer"),
        (lambda saved, _: move_record(saved, 7), "parameter 7"),
        (lambda saved, _: move_record(saved, -1), "parameter -1"),
        *(
            (lambda saved, _, change=change: saved["param_groups"][0].update(change), message)
            for change, message in (
                ({"lr": "fast"}, "lr: expected a number of at least 0, got 'fast'"),
                ({"weight_decay": torch.nan}, "weight_decay: expected a number"),
                ({"betas": (0.9,)}, r"betas: expected 2 values such as \(0\.9, 0\.999\), got \(0\.9,\)"),
                ({"amsgrad": torch.zeros(3)}, "amsgrad: expected True or False"),
                ({"gradpolicy": 3}, "the state_dict is truncated or damaged"),
                ({"decoupled_weight_decay": 3}, "decoupled_weight_decay: expected True or False, got 3"),
            )
        ),
        (lambda saved, _: saved["param_groups"][0].pop("eps"), "param group of parameter 0 .* has no 'eps'"),
        *(
            (lambda saved, _, change=change: saved["state"][0].update(change), message)
            for change, message in (
                ({"exp_avg": "abc"}, r"'exp_avg' to fit the parameter of shape \(4, 3\), got 'abc'"),
                ({"exp_avg": torch.ones(4, 3, dtype=torch.int32)}, r"'exp_avg'.*\(4, 3\) of integers"),
                ({"exp_avg_sq": torch.ones(4, 3) * 1j}, r"'exp_avg_sq'.*of complex numbers"),
                ({"step": 1e30}, r"the saved 'step': expected a number of at least 0 and below .*got 1e\+30"),
                ({"step": "abc"}, "the saved 'step': expected a number"),
                ({"exp_avg": spoilt(torch.nan)}, "'exp_avg' is not finite in 1 entries whose weights are"),
                ({"exp_avg_sq": spoilt(torch.nan)}, "'exp_avg_sq' is not finite in 1 entries"),
                ({"exp_avg": spoilt(torch.inf, others=-1.0)}, "'exp_avg' is not finite in 1 entries"),
            )
        ),
        (
            lambda saved, _: saved["param_groups"][0].update(capturable=True),
            "capturable: expected False .* CPU",
        ),
        (lambda _, record: change_settings(record, updates=10**30), "'updates': expected at most 2147483647"),
        (
            lambda saved, _: change_version(saved, VERSION, steps=10**30),
            "saved number of steps: expected at most",
        ),
        (lambda saved, _: saved["state"].update({0: "abc"}), "the state_dict is truncated or damaged"),
        (lambda saved, _: saved.clear(), "expected a dict with 'param_groups', got {}"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_of_it_loaded(change, message):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.5))
    optimizer.set_mask(weight, torch.eye(4, 3, dtype=torch.bool))
    weight.grad = torch.randn(4, 3)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PolicyError, match=message):
        optimizer.load_state_dict(damaged(change))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(optimizer.get_mask(weight), torch.eye(4, 3, dtype=torch.bool))
    assert torch.equal(optimizer.state[weight]["exp_avg"], before["state"][0]["exp_avg"])
    assert optimizer.age(weight).max() == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
@pytest.mark.parametrize("frozen_state", ["keep", "drop"])
@pytest.mark.parametrize("gradient", [torch.nan, 1e30])
def test_a_run_that_has_diverged_goes_on_as_it_was(kind, frozen_state, gradient):
    """Its moments are NaN where its weights are, and squares of large gradients are infinite."""

    def made(values):
        weight = torch.nn.Parameter(values.clone())
        optimizer = MaskedOptimizer(kind([weight], lr=0.1), frozen_state=frozen_state)
        optimizer.set_mask(weight, torch.eye(4, 3, dtype=torch.bool))
        return weight, optimizer

    def step(weight, optimizer, value):
        weight.grad = torch.ones(4, 3).index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(value))
        optimizer.step()

    weight, optimizer = made(torch.ones(4, 3))
    step(weight, optimizer, gradient)
    other, resumed = made(weight.detach())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for each in ((weight, optimizer), (other, resumed)):
        step(*each, 1.0)
    assert torch.equal(weight.view(torch.int32), other.view(torch.int32))
    if gradient != gradient:
        with pytest.raises(PolicyError, match="or the run has diverged, and its weights"):
            made(torch.ones(4, 3))[1].load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", ["Rprop", "Adafactor", "ASGD"])
@pytest.mark.parametrize("value", ["abc", torch.ones(2), None], ids=str)
def test_state_of_optimizers_without_a_rule_is_compared_too(kind, value):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    plain, other = (getattr(torch.optim, kind)([weight]) for _ in range(2))
    plain.step()
    saved = copy.deepcopy(plain.state_dict())
    MaskedOptimizer(other).load_state_dict(saved)
    for name in saved["state"][0].keys() - {"step"}:
        spoilt = {**saved, "state": {0: {**saved["state"][0], name: value}}}
        with pytest.raises(PolicyError, match=f"'{name}'"):
            MaskedOptimizer(getattr(torch.optim, kind)([weight])).load_state_dict(spoilt)


def test_settings_that_the_optimizer_itself_has_are_loaded():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = [MaskedOptimizer(torch.optim.AdamW([weight], eps=0.0)) for _ in range(2)]
    weight.grad = torch.ones(2)
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert optimizers[1].param_groups[0]["eps"] == 0.0


def test_a_plain_state_gives_every_entry_the_tensors_age_under_the_mask_that_is_set():
    weight = torch.nn.Parameter(torch.randn(4))
    plain = torch.optim.AdamW([weight])
    for _ in range(3):
        weight.grad = torch.ones(4)
        plain.step()
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight]), frozen_state="zero")
    optimizer.set_mask(weight, torch.tensor([True, False, True, True]))
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.age(weight).tolist() == [3, 0, 3, 3]
    assert (optimizer.state[weight]["exp_avg"] != 0).tolist() == [True, False, True, True]


def test_a_saved_age_outweighs_the_tensors_step_count():
    """A checkpoint of many processes holds the step count of one that may have none of the entries."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1), frozen_state="zero")
    for active in (True, True, False, True):
        optimizer.set_mask(weight, torch.tensor([active]))
        weight.grad = torch.ones(1)
        optimizer.step()
    optimizer.state[weight]["step"].fill_(4)
    saved = copy.deepcopy(optimizer.state_dict())
    other = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1), frozen_state="zero")
    other.load_state_dict(saved)
    other.set_mask(weight, torch.tensor([True]))
    assert other.age(weight).tolist() == [1]
    assert other.state[weight]["step"] == 1


def test_bf16_ages_are_exact():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    inner = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    inner.step()
    inner.state[weight]["step"].fill_(70001)
    optimizer = MaskedOptimizer(inner)
    optimizer.set_mask(weight, torch.tensor([True, False, True, True]))
    optimizer.step()
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert optimizer.age(weight).tolist() == [70002, 70001, 70002, 70002]


@pytest.mark.parametrize("share", [0.5, 0.1, 0.032, 0.01, 0.001])
def test_state_in_memory_and_in_a_file_is_that_of_active_entries_and_a_small_index(share):
    count = 1_000_000
    weight = torch.nn.Parameter(torch.zeros(count))
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight], fused=True), frozen_state="drop")
    # Entries that join at another time have other ages.
    for part in (share / 2, share):
        optimizer.set_mask(weight, torch.arange(count) % 1000 < 1000 * part)
        weight.grad = torch.ones(count)
        optimizer.step()
    active = int(optimizer.get_mask(weight).sum())
    assert optimizer.state_bytes() <= (8 + 2) * active + 4 * active + 64
    index = count / 8 if share >= 0.03 else 4 * active
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict()}, file)
    assert (8 + 2) * active + index <= file.tell() <= (8 + 2) * active + index + 6000


def test_plain_torch_refuses_a_small_state_and_steps_from_the_dense_one_as_from_its_own():
    masked, plain = (torch.nn.Parameter(torch.ones(1000)) for _ in range(2))
    optimizer = MaskedOptimizer(torch.optim.AdamW([masked], lr=0.1, fused=True), frozen_state="drop")
    optimizer.set_mask(masked, torch.arange(1000) % 10 == 0)
    masked.grad = plain.grad = torch.linspace(-1, 1, 1000)
    optimizer.step()
    alone = torch.optim.AdamW([plain], lr=0.1, fused=True)
    alone.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        alone.step()
    alone.load_state_dict(optimizer.state_dict(dense=True))
    alone.step()
    state = alone.state[plain]
    mask = (torch.arange(1000) % 10 == 0).float()
    assert torch.equal(optimizer.state_dict(dense=True)["state"][0]["exp_avg"] != 0, (mask * plain.grad) != 0)
    torch.testing.assert_close(state["exp_avg"], 0.1 * plain.grad * (0.9 * mask + 1))
