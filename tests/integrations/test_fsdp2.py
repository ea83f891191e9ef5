"""FSDP2 under Hugging Face's accelerate, on gloo ranks: as one process, and as Lightning's strategy."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_pool import ProcessPool, refusal
from sharded import (
    FORMS,
    IN_THE_TABLE,
    RUNS,
    SAVED_AT,
    STEPS,
    Facts,
    assert_same,
    batch,
    count_moved,
    facts,
    forgets_accelerate,
    make_model,
    make_optimizer,
    make_policies,
    mostly_slow,
    prepared,
    shard_with_accelerate,
    train,
    whole,
)
from small_bert import VOCABULARY
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import gradpolicy as gp
from gradpolicy.freezing.row_gradients import _RowForward

FSDP2 = {"loop": "huggingface", "processes": "fsdp2"}


def alone(model_kind: str, kind: str, frozen_state: str, steps: int = STEPS) -> Facts:
    """The run on one process, without accelerate."""
    model = make_model(model_kind)
    policies = make_policies(model_kind, kind, frozen_state)
    with gp.training(model, make_optimizer(model), policies, seed=1) as optimizer:
        assert not any(train(model, optimizer, model_kind, range(steps)))
        return facts(model, optimizer)


@forgets_accelerate()
def on_ranks(
    model_kind: str,
    kind: str,
    frozen_state: str,
    steps: range = range(STEPS),
    form: str = "SHARDED_STATE_DICT",
    load: str | None = None,
    save: str | None = None,
) -> tuple[Facts, Facts, list[int]]:
    """The same run sharded, after loading and before saving a checkpoint if asked to."""
    accelerator = shard_with_accelerate(form)
    model, optimizer = prepared(model_kind, accelerator)
    policies = make_policies(model_kind, kind, frozen_state)
    with gp.training(model, optimizer, policies, seed=1) as optimizer:
        if load is not None:
            accelerator.load_state(load)
        begun = facts(model, optimizer.optimizer)
        moved = train(model, optimizer, model_kind, steps, accelerator)
        if save is not None:
            accelerator.save_state(save)
        return begun, facts(model, optimizer.optimizer), moved


@pytest.mark.supports("{kind}", "frozen_state", "flow", "clipping", **FSDP2, names=IN_THE_TABLE)
@pytest.mark.parametrize(("model", "kind", "frozen_state"), mostly_slow(RUNS, 1))
def test_two_ranks_train_what_one_process_does(
    pair: ProcessPool, model: str, kind: str, frozen_state: str
) -> None:
    wanted = alone(model, kind, frozen_state)
    (_, first, moved), (_, second, _) = pair(on_ranks, model, kind, frozen_state)
    assert_same(first, wanted)
    assert_same(second, first, exactly=True)
    assert moved == [0] * STEPS


@pytest.mark.supports("row gradients", **FSDP2)
def test_the_gradients_of_active_rows_alone_are_computed(pair: ProcessPool) -> None:
    for of_rows, rows in pair(gradients_of_rows):
        assert of_rows == [True] * STEPS
        assert rows <= set(range(VOCABULARY - 9, VOCABULARY - 4))


@forgets_accelerate()
def gradients_of_rows() -> tuple[list[bool], set[int]]:
    """Whether the tied head had a gradient of rows in each forward pass, and its rows that moved."""
    accelerator = shard_with_accelerate()
    model, optimizer = prepared("llama", accelerator)
    head, found = model.get_output_embeddings(), []
    before = whole(head.weight)
    with gp.training(model, optimizer, make_policies("llama", "rows", "drop")) as optimizer:
        head.register_forward_pre_hook(
            lambda module, _: found.append(isinstance(vars(module).get("forward"), _RowForward))
        )
        train(model, optimizer, "llama", range(STEPS), accelerator)
    return found, set((whole(head.weight) != before).any(dim=1).nonzero().flatten().tolist())


@pytest.mark.supports("accumulation", **FSDP2)
def test_gradients_of_accumulated_batches_count_once(pair: ProcessPool) -> None:
    """Masks hold for all batches of an update; accelerate's optimizer steps at the last one."""
    for moved, updates in pair(accumulated):
        assert moved == 0
        assert updates == STEPS // 2


@forgets_accelerate()
def accumulated() -> tuple[int, int]:
    accelerator = shard_with_accelerate(gradient_accumulation_steps=2)
    model, optimizer = prepared("llama", accelerator)
    policies = make_policies("llama", "entries", "zero")
    with gp.training(model, optimizer, policies, seed=1) as optimizer:
        moved = 0
        for step in range(STEPS):
            with accelerator.accumulate(model):
                before = facts(model, optimizer.optimizer)
                accelerator.backward(model(**batch("llama", step, dist.get_rank(), 2)).loss)
                optimizer.step()
                after = facts(model, optimizer.optimizer)
                moved += count_moved(before, after)
                stays = all(map(torch.equal, before["weights"].values(), after["weights"].values()))
                assert stays == (step % 2 == 0)
                optimizer.zero_grad()
        return moved, optimizer.optimizer.effective_steps


# ---- saved and resumed by accelerate's own calls

FIRST, LAST = range(SAVED_AT), range(SAVED_AT, STEPS)


@pytest.mark.supports("resume", **FSDP2)
@pytest.mark.parametrize(
    ("model", "kind", "frozen_state", "form"),
    mostly_slow([(*run, FORMS[number % 2]) for number, run in enumerate(RUNS[2:] + RUNS[:2])], 1),
)
def test_a_run_resumes_bit_for_bit(
    pair: ProcessPool, tmp_path: Path, model: str, kind: str, frozen_state: str, form: str
) -> None:
    folder = str(tmp_path / "saved")
    whole, _ = pair(on_ranks, model, kind, frozen_state)
    half, _ = pair(on_ranks, model, kind, frozen_state, FIRST, form, None, folder)
    for begun, after, _ in pair(on_ranks, model, kind, frozen_state, LAST, form, folder):
        assert_same(begun, half[1], exactly=True)
        assert_same(after, whole[1], exactly=True)


@pytest.mark.supports("resume elsewhere", **FSDP2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kind", "frozen_state", "form"), [(*RUNS[1], FORMS[0]), (*RUNS[2], FORMS[1])]
)
def test_a_run_of_two_ranks_resumes_on_one_and_on_four_and_the_reverse(
    pools: dict[int, ProcessPool], tmp_path: Path, model: str, kind: str, frozen_state: str, form: str
) -> None:
    wanted = alone(model, kind, frozen_state)
    for saving, loading in ((2, 1), (2, 4), (1, 2), (4, 2)):
        folder = str(tmp_path / f"{saving}_{loading}")
        (_, half, _), *_ = pools[saving](on_ranks, model, kind, frozen_state, FIRST, form, None, folder)
        for begun, after, moved in pools[loading](on_ranks, model, kind, frozen_state, LAST, form, folder):
            assert_same(begun, half, exactly=True)
            assert_same(after, wanted)
            assert not any(moved)


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_with_the_same_bits(pair: ProcessPool, tmp_path: Path) -> None:
    folder, kinds = str(tmp_path / "saved"), ("llama", "topk", "drop")
    program = str(Path(__file__).with_name("killed_on_ranks.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, program, folder], capture_output=True, text=True, timeout=300)
    assert "SIGKILL" in done.stderr
    assert done.returncode != 0
    whole, _ = pair(on_ranks, *kinds)
    for _, after, _ in pair(on_ranks, *kinds, LAST, FORMS[0], folder):
        assert_same(after, whole[1], exactly=True)


# ---- what cannot be right


@forgets_accelerate()
def refusals() -> list[str]:
    """What is said to sharding within the block, and to a flattened state."""
    accelerator = shard_with_accelerate()
    model = make_model("llama")
    with gp.training(model, make_optimizer(model), make_policies("llama", "layers", "keep")) as optimizer:
        model, optimizer = accelerator.prepare(model, optimizer)
        said = [refusal(model, **batch("llama", 0))]
    accelerator = shard_with_accelerate()
    model, optimizer = prepared("llama", accelerator)
    with gp.training(model, optimizer, make_policies("llama", "layers", "keep")) as optimizer:
        flattened = StateDictOptions(flatten_optimizer_state_dict=True)
        with pytest.raises(NotImplementedError) as raised:  # torch's own
            get_optimizer_state_dict(model, optimizer, options=flattened)
        said.append(str(raised.value))
    return said


def test_what_would_lose_masks_is_refused_with_the_reason(pair: ProcessPool) -> None:
    for replaced, flattened in pair(refusals):
        assert "was replaced after the block began" in replaced
        assert "accelerator.prepare" in replaced
        assert "Flattening optimizer state_dict" in flattened
