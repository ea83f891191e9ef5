import copy
import gc
import pickle
import warnings

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch.testing._internal.common_optimizers import (
    _get_optim_inputs_including_global_cliquey_kwargs as inputs_with_flags,
)
from torch.testing._internal.common_optimizers import optim_db

from gradpolicy import MaskedOptimizer
from gradpolicy.errors import PolicyError

# Importing torch's own cases forbids every later test of the process to set a backend flag, as Trainer does.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


def cases():
    """Torch's own inputs for each optimizer, with its foreach and fused ways."""
    for info in optim_db:
        if info.only_supports_sparse_grads:
            continue
        for number, case in enumerate(inputs_with_flags("cpu", torch.float32, info)):
            name = f"{info.optim_cls.__name__}-{number}-{case.desc or 'default'}"
            if not case.kwargs.get("differentiable"):
                yield pytest.param(info, case.kwargs, id=name.replace(" ", "_"))


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def closure_of(optimizer, loss):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def train(model, optimizer, steps, needs_closure=False, first=0):
    for step in range(first, first + steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        closure = closure_of(optimizer, lambda inputs=inputs: model(inputs).square().mean())
        if needs_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize(("info", "settings"), list(cases()))
def test_all_active_is_the_wrapped_optimizer_bit_for_bit(info, settings):
    ends = []
    for wrap in (False, True):
        model = small_model()
        weights = list(model.parameters())
        if info.optim_cls.__name__ == "Muon":
            weights = [weight for weight in weights if weight.dim() == 2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = info.optim_cls(weights, **copy.deepcopy(settings))
            if wrap:
                optimizer = MaskedOptimizer(optimizer)
                optimizer.set_mask(weights[0], torch.ones_like(weights[0], dtype=torch.bool))
            train(model, optimizer, 4, info.step_requires_closure)
        # Bytes, since L-BFGS that maximizes (torch 2.15) ends in NaN here, which equals nothing.
        ends.append([weight.detach().numpy().tobytes() for weight in model.parameters()])
    assert ends[0] == ends[1]


STEPPING = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, amsgrad=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1, weight_decay=0.1, fused=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=0.1),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=0.1, weight_decay=0.1),
    # At least a scale of 1, since frozen values that are no numbers count in its own.
    "adafactor": lambda weights: torch.optim.Adafactor(weights, lr=0.1, eps=(None, 1.0)),
}


WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("name", STEPPING)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_frozen_entries_keep_every_bit(device, name, dtype, frozen_state):
    """Zeros with a sign, infinities, and NaNs with a payload, under gradients that are no numbers."""
    whole = WHOLE[dtype.itemsize]
    parameter = torch.nn.Parameter(torch.randn(1000).to(dtype))
    odd = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype).repeat(100)
    odd.view(whole)[3::4] += torch.arange(100).to(whole) % 60
    frozen = torch.randperm(1000)[:400]
    with torch.no_grad():
        parameter[frozen] = odd
    mask = torch.ones(1000, dtype=torch.bool).index_fill_(0, frozen, False)
    optimizer = MaskedOptimizer(STEPPING[name]([parameter]), frozen_state=frozen_state)
    optimizer.set_mask(parameter, mask)
    before = parameter.detach().clone()
    for garbage in (torch.nan, torch.inf, 1.0):
        parameter.grad = torch.full_like(parameter, 0.5)
        parameter.grad[frozen] = garbage
        optimizer.step()
    assert torch.equal(parameter.detach().view(whole)[frozen], odd.view(whole))
    assert parameter.detach()[mask].isfinite().all()
    assert (parameter.detach() != before)[mask].all()


def test_zero_empties_moments_at_once_and_drop_holds_none():
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = MaskedOptimizer(torch.optim.Adam([weight], amsgrad=True), frozen_state="zero")
    weight.grad = torch.randn(8, 8)
    optimizer.step()
    mask = torch.rand(8, 8) < 0.5
    optimizer.set_mask(weight, mask)
    for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert torch.equal(optimizer.state[weight][key] != 0, mask)
    optimizer.set_mask(weight, mask, frozen_state="drop")
    assert optimizer.state[weight]["exp_avg"].numel() == mask.sum()
    optimizer.set_mask(weight, torch.tensor(False))
    assert not optimizer.state[weight]


@pytest.mark.parametrize(("shape", "most"), [((200, 500), 0.16), ((200, 1), 0.11), ((1, 1), 0.11)])
def test_drop_holds_memory_for_active_entries_alone(shape, most):
    weights = [torch.nn.Parameter(torch.randn(200, 500)) for _ in range(10)]
    optimizer = MaskedOptimizer(torch.optim.Adam(weights), frozen_state="drop")
    for index, weight in enumerate(weights):
        few = torch.zeros(shape, dtype=torch.bool).view(-1)
        few[: few.numel() // 10] = True
        optimizer.set_mask(weight, torch.tensor(index == 0) if few.numel() == 1 else few.view(shape))
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert optimizer.state_bytes() <= most * 8 * sum(weight.numel() for weight in weights)


def test_masked_gradients_do_not_count_in_the_clipping_norm():
    weights = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    optimizer = MaskedOptimizer(torch.optim.SGD(weights, lr=1.0))
    optimizer.set_masks({weights[0]: torch.tensor([[True, False]]), weights[1]: torch.tensor(False)})
    for weight in weights:
        weight.grad = torch.tensor([[3.0, float("inf")], [4.0, float("nan")]])
    optimizer.mask_gradients()
    assert weights[0].grad.tolist() == [[3, 0], [4, 0]]
    assert weights[1].grad is None
    assert torch.nn.utils.clip_grad_norm_(weights, 1.0) == 5


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_fp16_step_advances_nothing(fused):
    weight = torch.nn.Parameter(torch.randn(4, 3))
    twin = torch.nn.Parameter(weight.detach().clone())
    optimizer = MaskedOptimizer(torch.optim.AdamW([weight], lr=0.1, fused=fused))
    unscaled = MaskedOptimizer(torch.optim.AdamW([twin], lr=0.1, fused=fused))
    mask = torch.rand(4, 3) < 0.5
    optimizer.set_mask(weight, mask)
    unscaled.set_mask(twin, mask)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        gradient = torch.randn(4, 3)
        scaler.scale(torch.zeros(()))
        weight.grad = gradient * scaler.get_scale()
        before = weight.detach().clone()
        if step == 1:
            weight.grad.view(-1)[mask.view(-1).nonzero()[0]] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            assert torch.equal(weight.detach(), before)
        else:
            twin.grad = gradient
            unscaled.step()
    assert optimizer.effective_steps == unscaled.effective_steps == 3
    assert torch.equal(optimizer.age(weight), unscaled.age(twin))
    torch.testing.assert_close(weight.detach(), twin.detach())


def test_lbfgs_moves_only_active_entries():
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    optimizer = MaskedOptimizer(torch.optim.LBFGS([weight], line_search_fn="strong_wolfe"))
    optimizer.set_mask(weight, torch.tensor([True, False, True]))
    optimizer.step(closure_of(optimizer, lambda: weight.square().sum()))
    torch.testing.assert_close(weight.detach(), torch.tensor([0.0, 2.0, 0.0]))
    with pytest.raises(PolicyError, match="closure"):
        optimizer.step()


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_lbfgs_leaves_a_tensor_alone_that_freezes_after_it_has_moved(frozen_state):
    first, second = (torch.nn.Parameter(torch.randn(3)) for _ in range(2))
    optimizer = MaskedOptimizer(torch.optim.LBFGS([first, second], lr=0.5, max_iter=3), frozen_state)
    closure = closure_of(optimizer, lambda: (first.square() + (first - second).pow(4)).sum())
    optimizer.step(closure)
    optimizer.set_mask(second, torch.tensor(False))
    before = [first.detach().clone(), second.detach().clone()]
    optimizer.step(closure)
    assert not torch.equal(first.detach(), before[0])
    assert torch.equal(second.detach(), before[1])
    optimizer.set_mask(second, None)
    optimizer.step(closure)
    assert not torch.equal(second.detach(), before[1])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_gradient_whose_entries_share_memory_can_be_masked(kind):
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = MaskedOptimizer(kind([weight], lr=1.0, weight_decay=0.0))
    optimizer.set_mask(weight, torch.eye(2, dtype=torch.bool))
    for masked_before in (True, False):
        (weight.grad,) = torch.autograd.grad(weight.sum(), weight)
        assert weight.grad.stride() == (0, 0)
        if masked_before:
            optimizer.mask_gradients()
            assert weight.grad.tolist() == [[1, 0], [0, 1]]
        optimizer.step()
    torch.testing.assert_close(weight.detach(), -2 * torch.eye(2))


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("frozen_state", ["keep", "zero"])
def test_fused_sgd_takes_tensors_that_join_later(frozen_state, dampening):
    ends = []
    for fused in (False, True):
        model = small_model()
        settings = {"momentum": 0.9, "dampening": dampening, "weight_decay": 0.1, "maximize": True}
        inner = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused, **settings)
        optimizer = MaskedOptimizer(inner, frozen_state=frozen_state)
        for step, mask in enumerate((torch.tensor(False), None, torch.tensor(False), None)):
            optimizer.set_mask(model[0].weight, mask)
            train(model, optimizer, 2, first=2 * step)
        ends.append(model[0].weight.detach())
    torch.testing.assert_close(*ends)
    assert not torch.equal(ends[0], small_model()[0].weight)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "nadam"])
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
def test_the_callers_modes_and_default_device_do_not_matter(device, kind, frozen_state):
    """Lightning validates in inference mode; a default device may be another than an optimizer's."""
    ends = []
    # On a GPU torch's own step makes a tensor of the default device, which may then be the CPU at most.
    other, usual = ("cpu", "cuda") if device == "gpu" else ("meta", "cpu")
    for elsewhere in (True, False):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(6, 5))
        optimizer = MaskedOptimizer(STEPPING[kind]([weight]), frozen_state=frozen_state)
        for step in range(12):
            shape = [(6, 5), (6, 5), (6, 1), (1, 1)][step % 4]
            mask, gradient = torch.rand(shape) < 0.5, torch.randn(6, 5)
            mode, place = (torch.inference_mode(), other) if elsewhere else (torch.no_grad(), usual)
            with mode, torch.device(place):
                optimizer.set_mask(weight, None if step in (4, 9) else mask)
            weight.grad = gradient
            with torch.device(place):
                optimizer.mask_gradients()
                optimizer.step()
        state = optimizer.state[weight].values()
        assert not any(value is not None and value.is_inference() for value in state)
        ends.append(weight.detach())
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(6, 5), "bool"),
        (torch.ones(4, 5, dtype=torch.bool), "does not broadcast"),
        (torch.ones(1, 6, 5, dtype=torch.bool), "does not broadcast"),
        ([True], r"\[True\]"),
        (torch.eye(6, 5, dtype=torch.bool).to_sparse(), "dense"),
        (torch.ones(6, 5, dtype=torch.bool, device="meta"), "the mask is on the meta device"),
        (torch.nested.nested_tensor([torch.ones(5, dtype=torch.bool)] * 6), "dense tensor, got a nested one"),
    ],
)
def test_a_wrong_mask_is_named(parameter, mask, message):
    named = torch.optim.AdamW([("head.weight", parameter)])
    with pytest.raises(PolicyError, match=rf"'head\.weight'.*{message}"):
        MaskedOptimizer(named).set_mask(parameter, mask)


@pytest.mark.parametrize(
    "copied", [lambda each: each, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_a_step_of_the_wrapped_optimizer_is_refused_while_entries_are_frozen(parameter, copied):
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], lr=0.1))
    optimizer.set_mask(parameter, torch.rand_like(parameter) < 0.5)
    optimizer = copied(optimizer)
    (weight,) = optimizer.param_groups[0]["params"]
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    for step in (optimizer.inner.step, lambda: optimizer.inner.step(lambda: weight.sum())):
        message = r"AdamW.step was called past .* call step\(\) of the MaskedOptimizer"
        with pytest.raises(PolicyError, match=message):
            step()
    assert torch.equal(weight, before)
    optimizer.step()
    assert torch.equal(weight != before, optimizer.get_mask(weight))
    optimizer.set_mask(weight, None)
    optimizer.inner.step()  # nothing is frozen any more
    assert (weight != before).all()


def test_an_optimizer_serves_alone_again_once_its_wrapper_is_gone(parameter):
    inner = torch.optim.AdamW([parameter])
    MaskedOptimizer(inner).set_mask(parameter, False)
    gc.collect()
    assert not inner._optimizer_step_pre_hooks
    parameter.grad = torch.ones_like(parameter)
    inner.step()
    MaskedOptimizer(inner).set_mask(parameter, True)


def test_what_has_been_prepared_by_another_library_is_refused(parameter):
    prepared = Accelerator(cpu=True).prepare(torch.optim.AdamW([parameter]))
    with pytest.raises(
        PolicyError, match=r"AcceleratedOptimizer passes steps on .* wrap the torch optimizer first"
    ):
        MaskedOptimizer(prepared)
    with_fabric = Fabric(accelerator="cpu").setup_optimizers(torch.optim.AdamW([parameter]))
    with pytest.raises(PolicyError, match="FabricAdamW passes steps on"):
        MaskedOptimizer(with_fabric)
    in_engine = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    with pytest.raises(PolicyError, match=r"refused under DeepSpeed except .*integrations\.deepspeed"):
        MaskedOptimizer(in_engine([parameter]))


def test_a_differentiable_step_cannot_freeze(parameter):
    optimizer = MaskedOptimizer(torch.optim.AdamW([parameter], differentiable=True))
    with pytest.raises(PolicyError, match="differentiable=True"):
        optimizer.set_mask(parameter, torch.tensor(False))


def test_other_wrong_input_is_named(parameter):
    inner = torch.optim.AdamW([parameter])
    optimizer = MaskedOptimizer(inner)
    with pytest.raises(PolicyError, match=r"shape \(2,\).*\(6, 5\)"):
        optimizer.set_mask(torch.nn.Parameter(torch.ones(2)), None)
    with pytest.raises(PolicyError, match="wrapped by a MaskedOptimizer"):
        MaskedOptimizer(optimizer)
    with pytest.raises(PolicyError, match="wrapped by a MaskedOptimizer"):
        MaskedOptimizer(inner)
    with pytest.raises(PolicyError, match="did you mean 'zero'"):
        MaskedOptimizer(torch.optim.SGD([parameter]), frozen_state="zeros")
    with pytest.raises(PolicyError, match="bias_correction"):
        optimizer.set_mask(parameter, None, bias_correction="row")
    for wrong in ([parameter], {parameter: 3}, None):
        with pytest.raises(
            PolicyError, match="set_settings: expected a dict from parameters to dicts of settings"
        ):
            optimizer.set_settings(wrong)
    with pytest.raises(PolicyError, match=r"set_masks: expected a dict from parameters to masks, got \["):
        optimizer.set_masks([parameter])
    with pytest.raises(AttributeError, match="frozen_state"):
        optimizer.frozen_state = "zero"
    with pytest.raises(PolicyError, match="Linear"):
        MaskedOptimizer(torch.nn.Linear(1, 1))
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    sparse = MaskedOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(PolicyError, match="sparse gradient"):
        sparse.step()
