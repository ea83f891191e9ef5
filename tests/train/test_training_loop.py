"""gp.training: what a loop of one's own trains under policies, against references in plain torch."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradpolicy as gp

RATE, DECAY, BETAS, EPS = 0.05, 0.1, (0.9, 0.99), 1e-8


class Net(nn.Module):
    """Two layers, and a rounding between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.round(4 * torch.tanh(self.trunk(x))) / 4)

    def encode(self, x):
        return self(x)


class RoundPassing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class NetByHand(Net):
    """The same with the straight-through rounding written out, and the clip of what enters the head."""

    def forward(self, x):
        hidden = RoundPassing.apply(4 * torch.tanh(self.trunk(x))) / 4
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * (0.1 / grad.norm()).clamp(max=1.0))
        return self.head(hidden)


def flow():
    return {"through": gp.StraightThrough(ops=["round"]), "clip": gp.Clip(norm=0.1, modules="head")}


def mask_at(name, parameter, step):
    """A third of the entries, others in each step."""
    return (torch.arange(parameter.numel()) + step + len(name)).reshape(parameter.shape) % 3 == 0


def both(mask=mask_at, **settings):
    """Policies of both kinds."""
    return {**flow(), "some": gp.Freeze(mask, **settings)}


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)


class AdamWByHand:
    """AdamW for each entry by itself, over the updates in which a mask lets it train."""

    def __init__(self, model, frozen_state):
        self.named = dict(model.named_parameters())
        self.forgets = frozen_state != "keep"
        self.state = {name: [torch.zeros_like(p) for _ in range(3)] for name, p in self.named.items()}

    @torch.no_grad()
    def step(self, masks):
        for name, p in self.named.items():
            mean, square, age = self.state[name]
            mask, grad = masks[name], p.grad
            if self.forgets:
                for each in self.state[name]:
                    each[~mask] = 0
            age[mask] += 1
            mean[mask] = (BETAS[0] * mean + (1 - BETAS[0]) * grad)[mask]
            square[mask] = (BETAS[1] * square + (1 - BETAS[1]) * grad**2)[mask]
            steps = age.clamp(min=1)
            root = (square / (1 - BETAS[1] ** steps)).sqrt() + EPS
            moved = p * (1 - RATE * DECAY) - RATE * mean / (1 - BETAS[0] ** steps) / root
            p[mask] = moved[mask]


def by_hand(steps, frozen_state="keep", parts=1, clip=None, mask=mask_at):
    model = NetByHand()
    optimizer = AdamWByHand(model, frozen_state)
    for step in range(steps):
        masks = {n: torch.as_tensor(mask(n, p, step)).expand(p.shape) for n, p in model.named_parameters()}
        model.zero_grad()
        for part in range(parts):
            x, y = batch(parts * step + part)
            (cross_entropy(model(x), y) / parts).backward()
        for name, p in model.named_parameters():
            p.grad *= masks[name]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step(masks)
    return model


def backward(number, *models):
    """Compute the gradients of one batch, and add them to what is there."""
    x, y = batch(number)
    for model in models:
        cross_entropy(model(x), y).backward()


def train(model, optimizer, steps, first=0):
    """The shortest loop."""
    for step in range(first, first + steps):
        backward(step, model)
        optimizer.step()
        optimizer.zero_grad()


def trained(policies, steps, **settings):
    """A model after some steps of AdamW."""
    model = Net()
    with gp.training(model, adamw(model), policies, **settings) as optimizer:
        train(model, optimizer, steps)
    return model


def assert_close(one, other):
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


def assert_same(one, other):
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def bits(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.supports("entries", "frozen_state", "flow", loop="plain")
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("listed", [True, False])
def test_both_kinds_of_policies_train_what_the_loop_by_hand_does(frozen_state, listed):
    model = Net()
    policies = both(frozen_state=frozen_state)
    with gp.training(model, adamw(model), [*policies.values()] if listed else policies, seed=0) as optimizer:
        for step in range(9):
            before = bits(model)
            train(model, optimizer, 1, first=step)
            for name, p in model.named_parameters():
                assert not (p != before[name])[~mask_at(name, p, step)].any()
                assert torch.equal(optimizer.get_mask(p), mask_at(name, p, step))
    assert_close(model, by_hand(9, frozen_state))


@pytest.mark.supports("accumulation", "clipping", loop="plain")
def test_gradients_of_several_batches_add_up_under_one_mask_and_frozen_ones_count_in_no_norm():
    model = Net()
    with gp.training(model, adamw(model), both()) as optimizer:
        for number in range(12):
            x, y = batch(number)
            (cross_entropy(model(x), y) / 2).backward()
            if number % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                model.zero_grad()
    assert optimizer.effective_steps == 6
    assert_close(model, by_hand(6, parts=2, clip=0.05))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(torch.optim.SGD, {"lr": 0.1}), (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4})],
    ids=["one call", "several calls"],
)
def test_a_step_may_take_a_closure_and_call_it_often_under_one_mask(kind, settings):
    model, plain = Net(), NetByHand()
    masks = {name: mask_at(name, p, 0) for name, p in plain.named_parameters()}

    def closure_of(each, step):
        def closure():
            each.zero_grad()
            x, y = batch(step)
            loss = cross_entropy(each(x), y)
            loss.backward()
            for name, p in each.named_parameters() if each is plain else ():
                p.grad *= masks[name]
            return loss

        return closure

    reference = kind(plain.parameters(), **settings)
    with gp.training(model, kind(model.parameters(), **settings), both(masks)) as optimizer:
        for step in range(3):
            assert optimizer.step(closure_of(model, step)).item() > 0
            reference.step(closure_of(plain, step))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-3)


def several(model):
    return [
        torch.optim.SGD(model.trunk.parameters(), lr=0.1),
        torch.optim.SGD(model.head.parameters(), lr=0.2),
    ]


@torch.no_grad()
def sgd(model, rate, step, layer=""):
    for name, p in model.named_parameters():
        if name.startswith(layer):
            p -= rate * p.grad * mask_at(name, p, step)


@pytest.mark.supports("several optimizers", loop="plain")
@pytest.mark.parametrize(
    ("steps_at", "mask_step"),
    [
        pytest.param(lambda update: (0, 1), lambda update: update, id="together"),
        pytest.param(lambda update: (update % 2,), lambda update: update // 2, id="in turn"),
        pytest.param(
            lambda update: (0, 1) if update % 3 == 2 else (0,), lambda update: update, id="one more often"
        ),
    ],
)
def test_several_optimizers_get_new_masks_once_each_has_stepped_or_one_steps_again(steps_at, mask_step):
    model, plain = Net(), NetByHand()
    with gp.training(model, several(model), both()) as optimizers:
        for update in range(10):
            backward(update, model, plain)
            for place in steps_at(update):
                optimizers[place].step()
                sgd(plain, (0.1, 0.2)[place], mask_step(update), ("trunk", "head")[place])
            model.zero_grad()
            plain.zero_grad()
    assert_close(model, plain)


SOURCES = {
    "function": lambda: mask_at,
    "random": lambda: gp.masks.Random(0.3, every=2),
    "layers": lambda: gp.masks.Layerwise(active=1, every=2),
    "topk": lambda: gp.masks.TopK(0.4, every=2),
    "topk of a window": lambda: gp.masks.TopK(0.4, window=3, every=3),
    "sparse": lambda: gp.masks.PruneAndGrow(0.4, every=3),
}


# When a loop is saved, and by what it is resumed.
WAYS = [
    (0, "in the block", "the wrapped optimizer"),
    (3, "after the block", "the plain optimizer"),
    (4, "in the block", "the model last"),
    (3, "in the block", "the plain optimizer"),
    (4, "after the block", "the wrapped optimizer"),
]


@pytest.mark.supports("resume", "gradient sources", loop="plain")
@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("source", "frozen_state", "saved_at", "where", "into"),
    [
        (source, ("keep", "zero", "drop")[(row + column) % 3], *way)
        for row, source in enumerate(SOURCES)
        for column, way in enumerate(WAYS)
    ],
)
def test_a_loop_that_is_saved_and_resumed_ends_with_the_same_bits(
    source, frozen_state, saved_at, where, into
):
    def policies():
        params = "*.weight" if source == "sparse" else "*"
        return both(SOURCES[source](), params=params, frozen_state=frozen_state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # gradients that are missing in so few steps
        whole = trained(policies(), 8, seed=3)
        part = Net()
        with gp.training(part, adamw(part), policies(), seed=3) as optimizer:
            train(part, optimizer, saved_at)
            state = optimizer.state_dict()
        state = optimizer.state_dict() if where == "after the block" else state
        file = io.BytesIO()
        torch.save({"model": part.state_dict(), "optimizer": state}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)

        resumed = Net()
        plain = adamw(resumed)
        if into != "the model last":
            resumed.load_state_dict(saved["model"])
        if into == "the plain optimizer":
            plain.load_state_dict(saved["optimizer"])
        with gp.training(resumed, plain, policies(), seed=3) as optimizer:
            if into != "the plain optimizer":
                optimizer.load_state_dict(saved["optimizer"])
            if into == "the model last":
                resumed.load_state_dict(saved["model"])
            train(resumed, optimizer, 8 - saved_at, first=saved_at)
    assert optimizer.effective_steps == 8
    assert_same(resumed, whole)


def test_a_loop_resumes_in_the_middle_of_an_update_of_several_batches_and_optimizers():
    def run(stop):
        model = Net()
        optimizers, saved = several(model), None
        for first, last in ((0, stop), (stop, 12)):
            with gp.training(model, optimizers, both()) as wrapped:
                for each, state in zip(wrapped, saved or (), strict=False):
                    each.load_state_dict(state)
                for number in range(first, last):
                    backward(number, model)
                    # First one, then the other.
                    if number % 2:
                        wrapped[number // 2 % 2].step()
                        model.zero_grad()
                saved = [copy.deepcopy(each.state_dict()) for each in wrapped]
            optimizers = several(model)
        return model

    for stop in (2, 4, 6):
        assert_same(run(stop), run(12))


def test_flow_policies_alone_go_on_by_the_clock_when_resumed():
    def run(stop):
        model, state = Net(), None
        slow = gp.Scale(gp.schedules.Linear(1.0, 0.0, steps=8), modules="head")
        policies = {**flow(), "slow": slow, "late": gp.Reverse(modules="head", when=gp.When(start=5))}
        for first, last in ((0, stop), (stop, 8)):
            plain = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
            with gp.training(model, plain, policies) as optimizer:
                if state is not None:
                    optimizer.load_state_dict(state)
                train(model, optimizer, last - first, first=first)
                state = copy.deepcopy(optimizer.state_dict())
        return model

    plain = Net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.5)
    for step in range(8):
        x, y = batch(step)
        hidden = RoundPassing.apply(4 * torch.tanh(plain.trunk(x))) / 4
        # As the gradient meets the policies at the input of the head.
        hidden.register_hook(lambda grad: grad * (0.1 / grad.norm()).clamp(max=1.0))
        hidden.register_hook(lambda grad, step=step: grad * (1 - step / 8) * (-1 if step >= 5 else 1))
        optimizer.zero_grad()
        cross_entropy(plain.head(hidden), y).backward()
        optimizer.step()
    assert_close(run(8), plain)
    assert_same(run(8), run(3))


@pytest.mark.supports("mixed precision", loop="plain")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("source", ["function", "topk"])
def test_a_step_that_mixed_precision_skips_is_none(fused, source):
    def run(overflows):
        model = Net()
        plain = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        with gp.training(model, plain, both(SOURCES[source]()), scaler=scaler) as optimizer:
            for step in range(7):
                x, y = batch(step)
                scaler.scale(cross_entropy(model(x), y)).backward()
                if step in overflows:
                    model.head.bias.grad[:] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return model, optimizer

    model, optimizer = run({2, 3})
    assert optimizer.effective_steps == 5
    expected = Net()
    plain = torch.optim.AdamW(expected.parameters(), lr=RATE)
    with gp.training(expected, plain, both(SOURCES[source]())) as optimizer:
        for step in (0, 1, 4, 5, 6):
            train(expected, optimizer, 1, first=step)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def signs(grad, inputs, output):
    return 0.01 * grad.sign()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (flow(), "policy.clip: its bound must follow the loss scale"),
        ({"signs": gp.UseRule(signs, modules="head")}, "policy.signs: its rule must follow the loss scale"),
    ],
)
def test_a_bound_that_does_not_know_the_loss_scale_is_refused_before_the_first_update(
    fused, policies, message
):
    def step(optimizer, model, scaler):
        x, y = batch(0)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)

    model, before = Net(), bits(Net())
    plain = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
    with gp.training(model, plain, policies) as optimizer:
        with pytest.raises(gp.PolicyError, match=message):
            step(optimizer, model, torch.amp.GradScaler("cpu"))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        step(optimizer, model, torch.amp.GradScaler("cpu", enabled=False))
    with gp.training(model, plain, [gp.StraightThrough(ops=["round"])]) as optimizer:
        step(optimizer, model, torch.amp.GradScaler("cpu"))
    ends = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=2.0**12), torch.amp.GradScaler(enabled=False)):
        model = Net()
        with gp.training(
            model, torch.optim.SGD(model.parameters(), 0.1), policies, scaler=scaler
        ) as optimizer:
            step(optimizer, model, scaler)
        ends.append(bits(model))
    torch.testing.assert_close(*ends)


def test_one_block_within_another_is_refused_for_the_same_optimizer():
    model, other = Net(), Net()
    plain = adamw(model)
    with gp.training(model, plain, [gp.Freeze(False, params="trunk.*")]) as optimizer:
        for given in (plain, optimizer):
            with (
                pytest.raises(gp.PolicyError, match=r"outer gradpolicy.training; give all policies to one"),
                gp.training(model, given, flow()),
            ):
                pass
        with gp.training(other, adamw(other), flow()):
            pass
        train(model, optimizer, 1)
    with gp.training(model, plain, flow()) as optimizer:
        train(model, optimizer, 1)


def test_epochs_are_counted_by_steps():
    class EachEpoch(gp.masks.MaskSource):
        def masks(self, step, epoch):
            return {name: mask_at(name, p, epoch) for name, p in self.parameters.items()}

    policies = both(EachEpoch(unit="epoch"))
    expected = by_hand(9, mask=lambda name, p, step: mask_at(name, p, step // 3))
    assert_close(trained(policies, 9, steps_per_epoch=3), expected)
    late = {"late": gp.Stop(modules="head", when=gp.When(start=1, unit="epoch"))}
    for counting in (policies, {**flow(), **late}):
        with pytest.raises(gp.PolicyError, match=r"counts epochs; .* steps_per_epoch=len\(loader\)"):
            trained(counting, 0)


def test_steps_that_pass_the_policies_by_are_refused_and_allowed_after_the_block():
    model = Net()
    plain = adamw(model)
    wrapped = gp.MaskedOptimizer(torch.optim.SGD(model.trunk.parameters(), lr=0.1))
    for policies in ([gp.Freeze(gp.masks.Random(0.1))], [gp.StraightThrough(ops=["round"])]):
        with gp.training(model, plain, policies) as optimizer:
            backward(0, model)
            before = bits(model)
            for other in (plain, adamw(model), torch.optim.SGD(model.head.parameters()), wrapped):
                with pytest.raises(
                    gp.PolicyError, match=r"step would update .* past the policies: call step\(\)"
                ):
                    other.step()
            assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
            torch.optim.SGD(Net().parameters()).step()
            optimizer.step()
            moved = [p != before[name] for name, p in model.named_parameters()]
            masks = [optimizer.get_mask(p) for p in model.parameters()]
            assert all(not each[~mask].any() for each, mask in zip(moved, masks, strict=True))
        before = bits(model)
        plain.step()
        assert all((p != before[name]).all() for name, p in model.named_parameters())


@pytest.mark.parametrize(
    "policy",
    [gp.Freeze(gp.masks.Random(0.5), params="1.*"), gp.Scale(0.5, modules="1"), gp.Rates({"1.*": 2.0})],
)
def test_an_optimizer_that_no_policy_concerns_may_step_in_the_block_and_after_it(policy):
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2), nn.Linear(2, 1))
    others = [torch.optim.SparseAdam(model[0].parameters()), adamw(model[2])]
    with gp.training(model, adamw(model[1]), [policy]) as optimizer:
        for _ in range(2):
            before = bits(model)
            model(torch.arange(4)).sum().backward()
            for each in (optimizer, *others):
                each.step()
                each.zero_grad()
            assert all((p != before[name]).any() for name, p in model.named_parameters())
    model(torch.arange(4)).sum().backward()
    others[0].step()


class NoneOfTorchs:
    """An optimizer such as fastai's, which is not a torch.optim.Optimizer."""

    def __init__(self, model):
        self.parameters = list(model.parameters())

    def step(self):
        for parameter in self.parameters:
            parameter.data.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


@pytest.mark.parametrize("policies", [flow(), [gp.Freeze(gp.masks.Random(0.1))]])
def test_a_step_of_an_optimizer_that_is_none_of_torchs_is_an_error_by_the_third_pass(policies):
    def train(model, passes):
        with gp.training(model, adamw(model), policies):
            for batch in range(passes):
                backward(batch, model)
                NoneOfTorchs(model).step()

    message = "parameters have changed without a step of AdamW: .* the optimizer that gradpolicy.training"
    model, stepped_twice = Net(), Net()
    for each, passes in ((Net(), 1), (stepped_twice, 2), (model, 4)):
        with pytest.raises(gp.PolicyError, match=message):
            train(each, passes)
    assert all(map(torch.equal, model.parameters(), stepped_twice.parameters()))


def test_gradients_that_are_only_looked_at_and_windows_of_accumulation_are_no_error():
    model = Net()
    with gp.training(model, adamw(model), flow()) as optimizer:
        for batch in range(3):
            backward(batch, model)
            model.zero_grad()
        for batch in range(3):
            backward(batch, model)
        optimizer.step()
    assert optimizer.effective_steps == 1


@torch.no_grad()
def move_along_gradients(model, size):
    for parameter in model.parameters():
        parameter.add_(parameter.grad, alpha=size)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.load_state_dict({name: p + 1 for name, p in model.state_dict().items()}),
        lambda model: move_along_gradients(model, 0.5),
    ],
)
def test_weights_may_be_loaded_or_perturbed_between_two_passes(move):
    """The second is two-step sharpness-aware minimization, without its step back."""

    def train(model, optimizer):
        for step in range(2):
            backward(step, model)
            move(model)
            backward(step, model)
            optimizer.step()
            optimizer.zero_grad()

    model, plain = Net(), NetByHand()
    with gp.training(model, adamw(model), flow()) as optimizer:
        train(model, optimizer)
    train(plain, adamw(plain))
    assert_close(model, plain)


def test_the_model_is_left_as_found():
    model = Net()
    plain, before = adamw(model), (set(vars(model)), [*model._forward_pre_hooks])
    policies = {**flow(), "layer": gp.Freeze(False, params="trunk.*")}

    def fail():
        with gp.training(model, plain, policies) as optimizer:
            train(model, optimizer, 2)
            assert not model.trunk.weight.requires_grad
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (set(vars(model)), [*model._forward_pre_hooks]) == before
    assert "forward" not in vars(model.head)
    assert all(p.requires_grad and not p._backward_hooks for p in model.parameters())
    train(model, plain, 1)


@pytest.mark.supports("tensors", loop="plain")
def test_what_is_frozen_as_a_whole_is_left_out_of_the_backward_pass_and_comes_back_exactly():
    def whole(name, parameter, step):
        return name.startswith(("head", "trunk")[step // 2 % 2])

    model = Net()
    with warnings.catch_warnings(action="error"), gp.training(model, adamw(model), both(whole)) as optimizer:
        for step in range(8):
            backward(step, model)
            assert [p.grad is not None for p in model.parameters()] == [
                whole(n, p, step) for n, p in model.named_parameters()
            ]
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model, by_hand(8, mask=whole))


@pytest.mark.parametrize(
    ("way", "clips"),
    [
        ("torch.compile", True),
        ("in place", True),
        ("before", True),
        ("another method", False),
        ("another method", True),
        ("a copy is called too", True),
    ],
)
def test_however_the_model_is_entered(way, clips):
    """Hooks of the forward pass are called neither in compiled code nor by another method."""

    def whole(name, parameter, step):
        return True if name.startswith(("trunk", "head")[step // 2 % 2]) else mask_at(name, parameter, step)

    model = Net()
    if way == "in place":
        model.compile(backend="eager")
    given = call = torch.compile(model, backend="eager") if way == "before" else model
    with gp.training(given, adamw(model), both(whole)) as optimizer:
        if way == "torch.compile":
            call = torch.compile(model, backend="eager")
        elif way == "another method":
            call = model.encode
        for step in range(6):
            x, y = batch(step)
            cross_entropy(call(x), y).backward()
            if way == "a copy is called too":
                copy.deepcopy(model)(x)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)
    assert_close(model, by_hand(6, mask=whole, clip=0.05 if clips else None))


def through_a_file(model):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False), b"gradpolicy" in buffer.getvalue()


@pytest.mark.parametrize(
    ("policy", "is_saved"),
    [
        (None, False),
        (gp.Freeze(params="trunk.*"), False),
        (gp.Freeze(gp.masks.Random(0.5, level="row"), params="*.weight"), False),
        (gp.Freeze(gp.masks.TopK(0.5, by="wanda"), params="*.weight"), False),
        (gp.StraightThrough(ops=["round"]), True),
        (gp.Scale(0.5, params="head.weight"), True),
    ],
)
def test_the_model_may_be_saved_and_copied_within_the_block(policy, is_saved):
    """Loaded models and copies have flow policies, and nothing else of the package."""
    model, (x, y) = Net(), batch(0)
    with gp.training(model, adamw(model), {"only": policy}) as optimizer:
        for step in range(4):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            loaded, has_policies = through_a_file(copy.deepcopy(model) if step % 2 else model)
            assert has_policies == is_saved
            assert torch.equal(loaded(x), model(x))
            for own, other in zip(model.parameters(), loaded.requires_grad_().parameters(), strict=True):
                assert torch.equal(own, other)
            cross_entropy(loaded(x), y).backward()
            assert loaded.trunk.weight.grad.any() == (is_saved and "round" in str(policy))
            through_a_file(copy.deepcopy(model).half())
        assert optimizer.effective_steps == 4


def test_the_whole_training_step_may_be_compiled():
    model = Net()
    with gp.training(model, adamw(model), both(), toggle_requires_grad=False) as optimizer:

        @torch.compile(backend="eager")
        def step(x, y):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(5):
            step(*batch(number))
    assert_close(model, by_hand(5))


def test_a_model_that_is_called_in_some_updates_only_is_a_warning():
    model = Net()
    layers = both(gp.masks.BlockCyclic(every=1), frozen_state="zero")
    with gp.training(model, adamw(model), layers) as optimizer:
        train(model, optimizer, 2)
        x, y = batch(2)
        loss = cross_entropy(model.head(torch.tanh(model.trunk(x))), y)
        with pytest.warns(UserWarning, match="the model was not called before a backward pass"):
            loss.backward()
        optimizer.step()
        assert all(p.requires_grad for p in model.parameters())
        train(model, optimizer, 2)


def test_blocks_follow_one_another_and_time_goes_on():
    model = Net()
    plain = adamw(model)
    optimizer = gp.MaskedOptimizer(plain)
    for step in range(4):
        given = plain if step % 2 else optimizer
        with gp.training(model, given, both()) as optimizer:
            train(model, optimizer, 1, first=step)
    assert_same(model, trained(both(), 4))


def test_an_operation_that_is_never_executed_is_an_error_in_the_first_step():
    model, policies = Net(), {"guided": gp.Guided(ops=["relu"])}
    with pytest.raises(gp.PolicyError, match="relu"), gp.training(model, adamw(model), policies) as it:
        train(model, it, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policies": [gp.Stop(modules="head", when=gp.When(phases="test"))]}, "phases test alone"),
        ({"policies": gp.Stop(modules="head")}, "needs a list or dict of policies, got Stop"),
        ({"policies": None}, "needs a list or dict of policies, got None"),
        ({"policies": {"a": 3}}, r"policy.a: must be a gradient policy, got int"),
        ({"policies": [gp.Freeze(False, params="tail.*")]}, "tail"),
        ({"policies": [gp.Stop(modules="tail")]}, "tail"),
        *(
            ({"optimizer": optimizer}, "needs an optimizer, or a list of them")
            for optimizer in (None, "adamw", [], [nn.Linear(1, 1)], Net().parameters())
        ),
        (
            {"optimizer": type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime"})()},
            r"integrations\.deepspeed\.training: .* give it the engine",
        ),
        ({"model": adamw(Net())}, "needs the model first"),
        ({"steps_per_epoch": 0}, r"training.steps_per_epoch"),
        ({"seed": "x"}, r"seed: expected an integer, got 'x'"),
        ({"seed": None}, r"seed: expected an integer, got None"),
    ],
)
def test_wrong_arguments_are_refused_and_leave_nothing_behind(given, message):
    model = Net()
    plain = adamw(model)
    arguments = {"model": model, "optimizer": plain, "policies": [], **given}
    with pytest.raises(gp.PolicyError, match=message), gp.training(**arguments):
        pass
    assert not model._forward_pre_hooks
    train(model, plain, 1)


@pytest.mark.supports("tensors", "entries", "flow", "clipping", loop=("plain", "lightning"))
def test_it_trains_what_lightnings_callback_does(make_trainer, loader, two_layers):
    policies = {
        "rounding": gp.StraightThrough(ops=["round"]),
        "some": gp.Freeze(gp.masks.Random(0.3, every=2), frozen_state="zero"),
        "layers": gp.Freeze(gp.masks.Layerwise(active=2, every=3), params="trunk.*", frozen_state="zero"),
    }
    own = copy.deepcopy(two_layers)
    make_trainer(
        max_epochs=2, gradient_clip_val=0.1, callbacks=[gp.GradientPolicies(copy.deepcopy(policies))]
    ).fit(two_layers, loader)
    with gp.training(own, own.configure_optimizers(), copy.deepcopy(policies)) as optimizer:
        for _ in range(2):
            for x, y in loader:
                own.zero_grad()
                cross_entropy(own(x), y).backward()
                nn.utils.clip_grad_norm_(own.parameters(), 0.1)
                optimizer.step()
    assert_close(own, two_layers)


class Unlearned(torch.autograd.Function):
    """A product whose second factor gets no gradient."""

    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(
    "policy",
    [
        gp.Freeze(gp.masks.Random(0.5)),
        gp.Freeze(gp.masks.TopK(0.5)),
        gp.Scale(0.5, params="*"),
    ],
    ids=repr,
)
def test_a_function_may_return_no_gradient_for_a_parameter(policy):
    model = Net()
    factor = nn.Parameter(torch.ones(()))
    model.register_parameter("factor", factor)
    with gp.training(model, torch.optim.SGD(model.parameters(), lr=0.1), [policy]) as optimizer:
        for step in range(3):
            x, y = batch(step)
            cross_entropy(Unlearned.apply(model(x), factor), y).backward()
            assert factor.grad is None
            optimizer.step()
            optimizer.zero_grad()
    assert factor == 1
