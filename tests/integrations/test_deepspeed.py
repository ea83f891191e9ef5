"""Policies with a DeepSpeed engine: two ranks train what one process trains, and frozen bits stay."""

import functools
import os
import re
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_ranks import NEEDS_DEEPSPEED, use_deepspeed_on_cpus, whole_weights
from networks import perceptron
from process_pool import ProcessPool, RemoteError, refusal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradpolicy as gp
from tests.docs.markdown import DOCS, blocks

pytestmark = [pytest.mark.slow, NEEDS_DEEPSPEED, pytest.mark.xdist_group("deepspeed")]
STEPS, BATCH = 8, 16


# --- what runs on the ranks


def policies(frozen_state: str) -> dict[str, Any]:
    """Entries, rows and whole layers freeze by turns, and a gradient is scaled."""
    state = {"frozen_state": frozen_state}
    return {
        "entries": gp.Freeze(gp.masks.Random(0.5, every=2), params="*", **state),
        "rows": gp.Freeze(gp.masks.Random(0.7, level="row", every=2), params="4.weight", **state),
        "layers": gp.Freeze(gp.masks.Layerwise(active=2, every=3), params=["*.weight", "!0.*"], **state),
        "slow": gp.Scale(0.5, modules="2"),
    }


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose second layer never trains, and an optimizer with two param groups."""
    model = perceptron(6, 9, 8, 7, 3)
    model[2].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return model, torch.optim.AdamW(groups, lr=0.05)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def engine_for(stage: int, optimizer: Any = None, micro_batches: int = 2, **settings: Any) -> Any:
    use_deepspeed_on_cpus()
    import deepspeed

    model, adam = network()
    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size() // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, "sub_group_size": 20, **settings.pop("zero", {})},
        **settings,
    }
    made = adam if optimizer is None else optimizer(model.parameters())
    schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step))
    return deepspeed.initialize(model=model, optimizer=made, config=config, lr_scheduler=schedule)[0]


def train(engine: Any, optimizer: gp.MaskedOptimizer, steps: range, factor: float = 1.0) -> None:
    """Update by inputs times a factor; check that frozen entries keep their bits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        before = whole_weights(engine.module)
        x, y = data(step)
        for part in range(engine.gradient_accumulation_steps()):
            own = slice(size * part + rank, None, size * engine.gradient_accumulation_steps())
            dtype = next(engine.module.parameters()).dtype
            engine.backward(cross_entropy(engine(factor * x[own].to(dtype)).float(), y[own]))
            engine.step()
        after = whole_weights(engine.module)
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                frozen = ~optimizer.get_mask(parameter).expand(before[name].shape)
                assert torch.equal(after[name][frozen], before[name][frozen]), name
            else:
                assert torch.equal(after[name], before[name]), name


def trained(stage: int, frozen_state: str, resume_at: int | None, folder: str, zero: dict[str, Any]) -> Any:
    """The weights after training, perhaps in two engines, and the updates that were counted."""
    from gradpolicy.integrations.deepspeed import training

    engine = engine_for(stage, zero=zero)
    with training(engine, policies(frozen_state), seed=1) as optimizer:
        train(engine, optimizer, range(resume_at or STEPS))
        if resume_at is not None:
            engine.save_checkpoint(folder)
    if resume_at is not None:
        engine = engine_for(stage, zero=zero)
        with training(engine, policies(frozen_state), seed=1) as optimizer:
            engine.load_checkpoint(folder)
            train(engine, optimizer, range(resume_at, STEPS))
    return whole_weights(engine.module), optimizer.effective_steps


def printed(stage: int) -> str:
    """What a rank prints that is asked for what trains."""
    from gradpolicy.integrations.deepspeed import training

    engine = engine_for(stage)
    policies = [gp.Train(params="4.*")]
    with redirect_stdout(StringIO()) as written, training(engine, policies, layers=True) as optimizer:
        train(engine, optimizer, range(2))
    return written.getvalue()


def in_bfloat16(stage: int) -> tuple[int, int]:
    """Train, with one update whose gradients are NaN; count the updates and those that were skipped."""
    from gradpolicy.integrations.deepspeed import training

    engine = engine_for(stage, bf16={"enabled": True, "check_grad_overflow": True})
    with training(engine, policies("zero"), seed=1) as optimizer:
        train(engine, optimizer, range(3))
        train(engine, optimizer, range(3, 4), factor=float("nan"))
        train(engine, optimizer, range(4, STEPS))
        return optimizer.effective_steps, engine.skipped_steps


def gathers(reads: bool) -> tuple[int, int]:
    """How often stage 3 gathers parameters in an uninterrupted run, and for the masks of an update."""
    from gradpolicy.integrations.deepspeed import training
    from gradpolicy.train import partitioned_optimizer

    counts, plain = [0], partitioned_optimizer.GatheredParameters

    def counting(*arguments: Any) -> Any:
        counts[-1] += 1
        return plain(*arguments)

    source = gp.masks.Function(lambda name, parameter, step: parameter > 0, every=4)
    mask = source if reads else gp.masks.Random(0.5, every=2)
    partitioned_optimizer.GatheredParameters = counting  # type: ignore[assignment,misc]
    try:
        engine = engine_for(3, zero={"stage3_param_persistence_threshold": 0})
        with training(engine, {"some": gp.Freeze(mask)}, seed=1) as optimizer:
            counts.append(0)
            train(engine, optimizer, range(STEPS))
    finally:
        partitioned_optimizer.GatheredParameters = plain  # type: ignore[misc]
    return counts[0], counts[1]


def refused(case: str, folder: str) -> str:
    """What an engine or policy that does not work is refused with."""
    from gradpolicy.integrations.deepspeed import training

    zero = {"elastic_checkpoint": True} if case == "elastic_checkpoint" else {}
    adadelta = functools.partial(torch.optim.Adadelta, lr=0.1) if case == "no rule" else None
    stage = 0 if case == "stage 0" else 1
    engine = engine_for(stage, adadelta, zero=zero, zero_allow_untested_optimizer=True)
    freeze: dict[str, Any] = {
        "gradients": {"a": gp.Freeze(gp.masks.TopK(0.5, by="gradient"))},
        "writes": {"a": gp.Freeze(gp.masks.Zeros())},
        "tensor": {"a": gp.Freeze(gp.masks.Random(0.5), bias_correction="tensor")},
        "rates": {"a": gp.Rates({"0.*": 0.1})},
        "phases": {"a": gp.Freeze(gp.masks.Phases([{"params": "*", "lr": 0.1}]))},
        "best": {"a": gp.Freeze(gp.masks.Phases([{"params": "*", "until": {"metric": "x"}, "best": True}]))},
        "states": {
            "a": gp.Freeze(gp.masks.Random(0.5)),
            "b": gp.Freeze(gp.masks.Random(0.5), frozen_state="zero"),
        },
    }
    if case == "loaded before":
        with training(engine, policies("keep")):
            engine.save_checkpoint(folder)
        engine = engine_for(1)
        engine.load_checkpoint(folder)
    given = engine.module if case == "model" else engine

    def attempt() -> None:
        with training(given, freeze.get(case, policies("keep"))) as optimizer:
            engine(data(0)[0])
            optimizer.age(engine.module[0].weight)

    return refusal(attempt)


def with_gradients(stage: int) -> list[set[str]]:
    """The parameters of which each update computes a gradient; all thaw at the second."""
    from gradpolicy.integrations.deepspeed import training

    found: list[set[str]] = []
    engine = engine_for(stage, micro_batches=1)
    head = gp.Freeze(gp.masks.Fixed(["6.*"]), when=gp.When(stop=1))
    with training(engine, [head]) as optimizer:
        for name, parameter in engine.module.named_parameters():
            if not name.startswith("2."):
                parameter.register_hook(lambda _, name=name: found[-1].add(name))
        for step in range(2):
            found.append(set())
            train(engine, optimizer, range(step, step + 1))
    return found


CUTS = {"start": 2, "stop": 4}


def cut_for_a_while(stage: int, mode: str) -> tuple[dict[str, Tensor], list[str]]:
    """Train with a cut before the fourth layer for two updates; return the weights and the warnings."""
    from gradpolicy.integrations.deepspeed import training

    engine = engine_for(stage)
    stop = gp.Stop(mode, modules="4", when=gp.When(**CUTS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with training(engine, [stop]) as optimizer:
            train(engine, optimizer, range(STEPS))
    return whole_weights(engine.module), [str(each.message) for each in caught]


# --- tests


def on_one_process(policies: Any) -> dict[str, Tensor]:
    """What the plain loop trains on one process with whole batches."""
    model, optimizer = network()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    with gp.training(model, optimizer, policies, seed=1) as masked:
        for step in range(STEPS):
            x, y = data(step)
            cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            masked.step()
            masked.zero_grad()
            schedule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.supports(
    *("tensors", "rows", "entries", "frozen_state", "flow", "accumulation", "clipping", "resume"),
    loop="plain",
    processes="deepspeed",
)
@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_equal_one_process_and_resume_bit_for_bit(
    ranks: ProcessPool, stage: int, frozen_state: str, tmp_path: Path
) -> None:
    (first, updates), (second, _) = ranks(trained, stage, frozen_state, None, "", {})
    assert updates == STEPS
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, on_one_process(policies(frozen_state)), rtol=0, atol=1e-6)
    (resumed, updates), _ = ranks(trained, stage, frozen_state, 3, str(tmp_path), {})
    assert updates == STEPS
    assert all(torch.equal(first[name], resumed[name]) for name in first)


@pytest.mark.parametrize(
    ("stage", "setting"),
    [
        (2, {"round_robin_gradients": True}),
        (2, {"parameter_alignment": True}),
        (2, {"contiguous_gradients": False}),
        (1, {"contiguous_gradients": False, "overlap_comm": False}),
        (3, {"stage3_param_persistence_threshold": 0}),
    ],
)
def test_settings_that_move_parameters_change_nothing(
    ranks: ProcessPool, stage: int, setting: dict[str, Any]
) -> None:
    (first, _), _ = ranks(trained, stage, "zero", None, "", setting)
    torch.testing.assert_close(first, on_one_process(policies("zero")), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_first_rank_alone_says_what_trains(ranks: ProcessPool, stage: int) -> None:
    first, second = ranks(printed, stage)
    entries = 6 * 9 + 9 + 9 * 8 + 8 + 8 * 7 + 7 + 7 * 3 + 3
    assert first.count("What trains") == 1
    assert f"63 of {entries} entries" in first
    assert not second


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zeros_pass_a_cut_as_on_one_process(ranks: ProcessPool, stage: int) -> None:
    wanted = on_one_process([gp.Stop("zero", modules="4", when=gp.When(**CUTS))])
    for found, said in ranks(cut_for_a_while, stage, "zero"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        assert not any("got no gradient" in line for line in said)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_missing_gradient_is_zero_with_a_warning(ranks: ProcessPool, stage: int) -> None:
    wanted = on_one_process([gp.Stop("zero", modules="4", when=gp.When(**CUTS))])
    for found, said in ranks(cut_for_a_while, stage, "detach"):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        (line,) = (line for line in said if "got no gradient" in line)
        assert line.startswith("DeepSpeed: '0.weight', '0.bias' got no gradient in an update, for which the")


def test_stage_3_refuses_to_take_the_gradient_of_an_earlier_update(ranks: ProcessPool) -> None:
    with pytest.raises(RemoteError, match=r"'0.weight', '0.bias' got no gradient in this .*mode='zero'"):
        ranks(cut_for_a_while, 3, "detach")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_backward_pass_ends_at_frozen_layers_but_in_stage_3(ranks: ProcessPool, stage: int) -> None:
    head = {"6.weight", "6.bias"}
    everything = head | {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert ranks(with_gradients, stage) == [[everything if stage == 3 else head, everything]] * 2


def test_stage_3_gathers_parameters_only_when_a_source_reads_them(ranks: ProcessPool) -> None:
    assert ranks(gathers, False) == [(1, 0)] * 2
    assert ranks(gathers, True) == [(1, STEPS // 4)] * 2


@pytest.mark.supports("mixed precision", loop="plain", processes="deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_in_bfloat16_frozen_bits_stay_and_a_skipped_update_does_not_count(
    ranks: ProcessPool, stage: int
) -> None:
    assert ranks(in_bfloat16, stage) == [(STEPS - 1, 1)] * 2


@pytest.mark.supports(
    *("gradient sources", "rates", "no update rule"),
    loop="plain",
    processes="deepspeed",
    no="a rank has partitions, which hold parts of several parameters",
)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("stage 0", "policies need zero_optimization with stage 1, 2 or 3"),
        ("model", "needs what deepspeed.initialize returns first, got Sequential"),
        ("no rule", r"Adadelta has no update rule.*torch_adam"),
        ("elastic_checkpoint", "elastic and universal checkpoints hold moments without masks"),
        ("gradients", r"policy.a: does not work with DeepSpeed: TopK needs whole gradients"),
        ("writes", "Zeros may write to weights"),
        ("tensor", "bias_correction='tensor'"),
        ("rates", "Rates acts on the model's parameters"),
        ("phases", "parameters cannot have learning rates of their own"),
        ("best", "Phases may write to weights"),
        ("loaded before", "load_checkpoint was called before the block"),
        ("age", "ages belong to partitions"),
        ("states", "frozen_state: must be the same .* policy.a: 'keep', policy.b: 'zero'"),
    ],
)
def test_what_cannot_be_exact_is_refused(ranks: ProcessPool, case: str, message: str, tmp_path: Path) -> None:
    assert all(re.search(message, each) for each in ranks(refused, case, str(tmp_path)))


def test_the_page_runs_on_two_ranks(tmp_path: Path) -> None:
    program = blocks(DOCS / "integrations" / "deepspeed.md", "python")[0]
    # What DeepSpeed would compile for the CPU takes minutes; gloo does as well.
    ahead = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
    (tmp_path / "train.py").write_text(ahead + program)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
