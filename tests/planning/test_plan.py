"""The plan says what policies will touch, and touches nothing itself."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradpolicy as gp
from gradpolicy.planning.plan import training_loss


@pytest.fixture
def batch():
    return [torch.randn(8, 4), torch.zeros(8, dtype=torch.long)]


@pytest.fixture
def plan_of(two_layers, batch):
    return lambda policies: gp.plan(two_layers, policies, lambda copy: training_loss(copy, batch))


HALF = gp.Freeze(gp.masks.Random(0.5), params="trunk.*")


def test_a_row_counts_operations_modules_parameters_and_the_share_that_trains(plan_of):
    policies = {
        "rounding": gp.StraightThrough(ops=["round"]),
        "cut": gp.Stop(modules="head"),
        "random": gp.Freeze(gp.masks.Random(density=0.25), params="trunk.*"),
    }
    rounding, cut, random = plan_of(policies).rows
    assert rounding.operations == {"round": 1}
    assert cut.modules == ("head",)
    assert (len(random.parameters), random.entries) == (4, 112)
    assert random.active_share == pytest.approx(0.25)


def test_brackets_of_a_glob_are_printed_as_they_were_written(two_layers, plan_of):
    policies = {"cut": gp.Stop(modules="[h]ead"), "frozen": gp.Freeze(False, params="[t]runk.*")}
    text = str(plan_of(policies))
    assert "[h]ead" in text
    assert "[t]runk.*" in text
    with gp.install(two_layers, [gp.Stop(modules="[h]ead")]) as installed:
        assert "[h]ead" in str(installed.report())


def test_it_names_the_parameters_that_get_no_gradient_and_those_that_get_only_zeros(plan_of):
    cut = plan_of({"cut": gp.Stop(modules="head")})
    assert set(cut.without_gradient) == {f"trunk.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert "head" in cut.cuts[0]
    # Without a policy the rounding passes zeros.
    plain = plan_of({})
    assert plain.without_gradient == ()
    assert set(plain.zero_gradient) == set(cut.without_gradient)


def test_what_several_freeze_policies_leave_to_train_is_their_intersection(plan_of):
    policies = {
        "first": gp.Freeze(lambda name, p, step: torch.arange(2)[:, None] < 1, params="head.weight"),
        "second": gp.Freeze(lambda name, p, step: torch.arange(8)[None] < 2, params="head.weight"),
    }
    # Of the head alone a gradient is not zero: two of its weights train, and its two biases.
    assert plan_of(policies).training_entries == 2 + 2


def test_a_model_without_values_has_a_plan():
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(1, 4)
    plan = gp.plan(model, [gp.Freeze(gp.masks.Random(0.5, level="row"))], lambda copy: copy(batch).sum())
    assert (plan.training_entries, plan.entries) == (15, 30)


def test_a_freeze_policy_shows_its_source_its_timetable_and_its_state(plan_of):
    random = gp.masks.Random(gp.masks.Cubic(1.0, 0.1, steps=100), every=5, start=10, stop=90)
    fixed, later = gp.masks.Fixed(["head.bias"]), gp.When(start=3, unit="epoch")
    policies = {
        "random": gp.Freeze(random, params="trunk.*", frozen_state="drop"),
        "layers": gp.Freeze(fixed, params="head.*", when=later),
    }
    plan = plan_of(policies)
    assert [row.course for row in plan.rows] == [
        "Random(density=Cubic(1.0, 0.1, steps=100, begin=0), level=entry) may change every"
        " 5 steps from step 10 until step 90;"
        " what freezes loses its optimizer state, with Adam the memory too",
        "Fixed(mask=['head.bias']) is chosen once; what freezes keeps its optimizer state",
    ]
    assert plan.rows[1].when == "every epoch from epoch 3"
    assert all(row.course in str(plan).replace("\n", " ") for row in plan.rows)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"one": gp.Freeze(gp.masks.Random(0.5), frozen_state="zero"), "two": gp.Freeze(gp.masks.Fixed())},
            "policy.one wants frozen_state='zero', policy.two frozen_state='keep'",
        ),
        (
            {"file": gp.Freeze(gp.masks.Fixed("nothing.safetensors"))},
            "policy.file: Fixed.mask: nothing.safetensors cannot be read",
        ),
        ({"wrong": gp.StraightThrough(ops=["floor"])}, r"policy\.wrong\.ops.*floor.*round"),
    ],
)
def test_what_no_run_could_do_is_refused_with_the_policies_names(policies, message, plan_of):
    with pytest.raises(gp.PolicyError, match=message):
        plan_of(policies)


def test_what_freezes_later_trains_in_the_first_step(plan_of):
    later = gp.Freeze(gp.masks.Fixed(), when=gp.When(start=3))
    plan = plan_of({"later": later, "round": gp.StraightThrough(ops=["round"])})
    assert plan.training_entries == plan.entries
    assert plan.rows[0].active_share == 0.0


def test_the_model_its_gradients_and_the_random_state_are_left_alone(two_layers, plan_of):
    two_layers.head.weight.grad = torch.full_like(two_layers.head.weight, 7.0)
    two_layers.trunk.append(nn.Dropout(0.5))
    state, before = torch.get_rng_state(), copy.deepcopy(two_layers.state_dict())
    plan_of({"rounding": gp.StraightThrough(ops=["round"])})
    assert torch.equal(torch.get_rng_state(), state)
    assert (two_layers.head.weight.grad == 7).all()
    assert all(torch.equal(before[name], value) for name, value in two_layers.state_dict().items())
    assert "forward" not in two_layers.trunk.__dict__


def test_policies_of_other_phases_are_counted_too_and_do_not_change_training(plan_of):
    guided = gp.Guided(when=gp.When(phases=["test"]))
    plan = plan_of({"rounding": gp.StraightThrough(ops=["round"]), "guided": guided})
    assert plan.rows[1].operations == {"relu": 1}
    assert plan.rows[1].phases == ("test",)


def test_a_step_that_is_no_function_is_refused(two_layers):
    with pytest.raises(gp.PolicyError, match="plan: needs a function from the model's copy to the loss"):
        gp.plan(two_layers, {}, torch.ones(2))


def test_a_step_that_takes_no_index_gives_its_loss(two_layers, batch):
    wanted, plain = training_loss(two_layers, batch), two_layers.training_step
    two_layers.training_step = lambda batch: plain(batch, 0)
    assert torch.equal(training_loss(two_layers, batch), wanted)


def test_a_step_without_a_loss_is_an_error(two_layers, batch):
    two_layers.training_step = lambda batch, index: None
    with pytest.raises(gp.PolicyError, match="gave no loss"):
        training_loss(two_layers, batch)


class Normed(nn.Module):
    """Two blocks with a BatchNorm each, the second without parameters of its own, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def plan_of_normed(policy):
    return gp.plan(Normed(), {"own": policy}, lambda model: model(torch.randn(8, 4)).square().sum())


def test_what_gets_no_gradient_is_the_first_warning_and_does_not_count_as_training(plan_of):
    policies = {"half": HALF, "neutral": gp.Scale(1.0, modules="head")}
    plan = plan_of(policies)
    assert plan.warnings[0].startswith("half: none of its 4 parameters gets a gradient (trunk.0.weight, ")
    assert "straight_through" in plan.warnings[0]
    assert (plan.rows[0].training_share, plan.training_entries) == (0.0, 18)
    lines = str(plan).splitlines()
    assert any("params trunk.*" in line and "0.0% of 112" in line for line in lines)
    first = next(number for number, line in enumerate(lines) if line.startswith("Warning: "))
    assert lines[first].startswith("Warning: half: none of its 4")
    cut = plan_of({**policies, "cut": gp.Stop(modules="head")} | {"neutral": gp.Guided()})
    assert "the loss does not depend on them, or a stop" in cut.warnings[0]
    passed = plan_of({"half": HALF, "round": gp.StraightThrough()})
    assert passed.warnings == ()
    assert passed.rows[0].training_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    "policy",
    [
        gp.Rates({"*": gp.LayerDecay(0.5)}),
        gp.Rates({"pooler.*": 1.0, "*": gp.LayerDecay(0.5)}),
        gp.Freeze(gp.masks.Gradual()),
        gp.Freeze(gp.masks.Gradual(), params=["*", "!pooler.*"]),
    ],
)
def test_layers_without_a_gradient_are_no_layers_and_are_named(policy):
    model = Normed()
    model.pooler = nn.Linear(2, 2)
    planned = gp.plan(model, {"own": policy}, lambda model: model(torch.randn(8, 4)).square().sum())
    said = "own: pooler.bias, pooler.weight get no gradient and make no layer; "
    assert [line.startswith(said) for line in planned.warnings].count(True) == ("pooler" not in repr(policy))
    groups = ("blocks.0", "blocks.1", "head") if isinstance(policy, gp.Freeze) else ()
    assert planned.rows[0].groups == groups
    rates = {row.name: row.rate for row in planned.layers.rows if row.name != "pooler"}
    factors = ("×0.25", "×0.5", "×1") if isinstance(policy, gp.Rates) else ("", "", "×1")
    assert rates == dict(zip(("blocks.0", "blocks.1", "head"), factors, strict=True))


@pytest.mark.parametrize(
    "cut", [gp.Stop(modules="blocks.1", when=gp.When(stop=3)), gp.Scale(0.0, params="blocks.*")]
)
def test_layers_without_a_gradient_in_some_steps_or_with_zeros_are_counted(cut):
    plan = gp.plan(
        Normed(),
        {"own": gp.Freeze(gp.masks.Gradual()), "cut": cut},
        lambda model: model(torch.randn(8, 4)).sum(),
    )
    assert plan.rows[0].groups == ("blocks.0", "blocks.1", "head")
    assert any("own: counts blocks.0" in line for line in plan.warnings)


@pytest.mark.parametrize(
    "policy",
    [
        gp.Rates({"*": gp.LayerDecay(0.5, groups=["blocks.*", "pooler.*", "head.*"])}),
        gp.Freeze(gp.masks.Gradual(groups=["blocks.*", "pooler.*", "head.*"])),
    ],
)
def test_groups_that_are_given_are_counted_and_named(policy):
    model = Normed()
    model.pooler = nn.Linear(2, 2)
    planned = gp.plan(model, {"own": policy}, lambda model: model(torch.randn(8, 4)).sum())
    assert any(line.startswith("own: counts pooler.* as a layer, which gets no") for line in planned.warnings)


def test_only_some_parameters_without_a_gradient_are_named(plan_of):
    plan = plan_of({"all": gp.Freeze(gp.masks.Random(0.5)), "cut": gp.Scale(2.0, params="*")})
    assert [warning.partition(" (")[0] for warning in plan.warnings[:2]] == [
        "all: 4 of its 6 parameters get no gradient",
        "cut: 4 of its 6 parameters get no gradient",
    ]


def test_warnings_are_in_colour_and_plain_text_where_there_is_none(plan_of):
    from rich.console import Console

    plan = plan_of({"half": HALF})
    console = Console(force_terminal=True, color_system="standard", width=120)
    with console.capture() as captured:
        console.print(plan)
    assert "\x1b[1;33mWarning:" in captured.get()
    assert "\x1b" not in str(plan)


@pytest.mark.parametrize(
    ("source", "groups", "layers"),
    [
        (gp.masks.Layerwise(active=1), ("blocks.0", "blocks.1"), "blocks.0.1, blocks.1.1 go"),
        (gp.masks.Gradual(), ("blocks.0", "blocks.1", "head"), "blocks.0.1, blocks.1.1 go"),
        (gp.masks.BlockCyclic(), ("blocks.0", "blocks.1", "head"), "blocks.0.1, blocks.1.1 go"),
        (
            gp.masks.Gradual(groups={"body": "blocks.*", "top": "head.*"}),
            ("body", "top"),
            "blocks.0.1, blocks.1.1 go",
        ),
        (gp.masks.Fixed(["head.*"]), (), "blocks.0.1, blocks.1.1 go"),
    ],
)
def test_layer_sources_list_their_groups_and_frozen_layers_whose_buffers_move_are_named(
    source, groups, layers
):
    plan = plan_of_normed(gp.Freeze(source))
    assert plan.rows[0].groups == groups
    if groups:
        assert f"own goes by {len(groups)} groups: {', '.join(groups)}." in str(plan)
    (warning,) = plan.warnings
    assert f"{layers} on changing running_mean, running_var, num_batches_tracked" in warning


@pytest.mark.parametrize("policy", [gp.Freeze(gp.masks.Random(0.5)), gp.Freeze(False, params="head.*")])
def test_layers_that_train_may_move_their_buffers(policy):
    assert plan_of_normed(policy).warnings == ()


def test_a_model_that_has_the_policies_already_gets_the_same_plan(two_layers, batch, plan_of):
    policies = {"round": gp.StraightThrough(ops=["round"]), "slow": gp.Scale(0.5, modules="head")}
    plain = plan_of(policies)
    with gp.install(two_layers, policies) as installed:
        assert plan_of(policies) == plain
        two_layers(batch[0]).sum().backward()
        # The plan left the installation alone.
        assert installed.report().rows[0].operations_matched == 1


def test_other_policies_that_are_installed_stay_in_force(two_layers, batch, plan_of):
    with gp.install(two_layers, [gp.Stop(modules="head")]) as installed:
        plan = plan_of({"slow": gp.Scale(0.5, modules="trunk")})
        assert len(plan.without_gradient) == 4
        installed.remove()
    with gp.install(two_layers, [gp.UseRule("tanh", ops="round")]):
        with pytest.raises(gp.PolicyError, match=r"policy\.mine\.ops: .*'round' was taken by another"):
            plan_of({"mine": gp.StraightThrough(ops=["round"])})
        two_layers(batch[0])


def test_what_runs_only_without_gradient_is_not_met():
    class Draws(nn.Module):
        def forward(self, p):
            return p * torch.no_grad()(torch.bernoulli)(p)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Draws())
    policies = {"bits": gp.UseRule("bernoulli", ops="bernoulli")}
    with pytest.raises(gp.PolicyError, match=r"policy\.bits\.ops: .*only where no gradient is recorded"):
        gp.plan(model, policies, lambda model: model(torch.ones(2, 4)).sum())


def test_some_of_a_policys_operations_that_are_not_met_are_a_warning(plan_of):
    (warning,) = plan_of({"steps": gp.StraightThrough(ops=["round", "sign"])}).warnings
    assert warning.startswith("steps: operation 'sign' was never met")


def test_the_policys_own_source_is_not_set_up(plan_of):
    source = gp.masks.TopK(0.5)
    plan_of({"top": gp.Freeze(source, params="head.*")})
    assert (source.parameters, source.sums, source.decided) == ({}, {}, -1)


@pytest.mark.parametrize(("unit", "asked"), [("step", (3, 0)), ("epoch", (0, 3))])
def test_a_source_is_asked_for_the_step_and_epoch_at_which_its_policy_starts(plan_of, unit, asked):
    class Asked(gp.masks.MaskSource):
        counts = []

        def masks(self, step, epoch):
            self.counts.append((step, epoch))
            return {}

    plan_of({"later": gp.Freeze(Asked(), when=gp.When(start=3, unit=unit))})
    assert Asked.counts == [asked]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_pass_checkpoints_and_what_is_beside_the_model_keeps_its_own(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.used, x.requires_grad_(), use_reentrant=reentrant)

    model, beside = Checkpointed(), nn.Linear(4, 1)
    for each in (model.idle.weight, beside.weight):
        each.grad = torch.ones_like(each)
    planned = gp.plan(model, {}, lambda copy: beside(copy(torch.ones(2, 4))).sum())
    assert planned.without_gradient == ("idle.weight", "idle.bias")
    assert beside.weight.grad.tolist() == [[1.0] * 4]
    assert beside.bias.grad is None


def test_masks_are_those_of_the_epoch_at_which_a_policy_starts(plan_of):
    thaws = gp.masks.Gradual(initial=1, groups=["trunk.0.*", "trunk.2.*", "head.*"])
    plan = plan_of({"later": gp.Freeze(thaws, when=gp.When(start=1, unit="epoch"))})
    assert plan.rows[0].active_share == pytest.approx((72 + 18) / 130)
