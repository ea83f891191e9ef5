"""Wrong input: one message with the key, the cause and the nearest names; code 2; nothing left behind."""

from pathlib import Path

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

# What is wrong: how the one message starts, and what else it says.
WRONG: dict[str, tuple[str, ...]] = {
    # names that do not exist
    "policy=guded": ("policy=guded", "guided"),
    "polcy=guided": ("polcy", "policy"),
    "hydra/launcher=submitit_nosuch": ("hydra/launcher=submitit_nosuch: needs", "'gradpolicy[sweeps]'"),
    "trainer=null": ("trainer=null", "ddp_sim"),
    "callbacks=[record,foo]": ("callbacks=foo: there is no such config; valid names: 'default'",),
    "policy.straight_through.surrogate=identiy": ("policy.straight_through", "identity"),
    "policy.straight_through.ops=[roud]": ("policy.straight_through.ops", "round"),
    "policy.guided.when.phases=[tst]": ("policy.guided.when.phases", "test"),
    "+sede=3": ("sede", "seed"),
    "user.mine=3": ("user.mine", "+user.mine"),
    "~nosuch": ("nosuch", "there is no such key"),
    "+policy.some={_target_: gradpolicy.Freeze, mask: {_target_: gradpolicy.masks.Rondom}}": (
        "policy.some.mask._target_",
        "did you mean 'Random', ",
    ),
    "policy.random_freeze.params=model.trnk.*": ("policy.random_freeze.params", "model.trunk"),
    "policy.stop.modules=model.prob": ("policy.stop.modules", "model.probe"),
    "policy.straight_through.ops=[floor]": ("policy.straight_through.ops", "floor"),
    # arguments
    "policy.stop.modls=3": ("policy.stop.modls", "modules"),
    "trainer.max_epoch=3": ("trainer.max_epoch", "max_epochs"),
    "~trainer._target_": ("trainer", "needs a _target_"),
    "+trainer.logger=true": ("trainer.logger", "group `logger`"),
    "+callbacks.mine._target_=transformers.TrainerCallback": ("callbacks.mine", "TrainerCallback"),
    # values
    "optimized_mode=mx": ("optimized_mode", "max"),
    "seed=4294967296": ("seed:",),
    "seed=one": ("seed:", "one"),
    "+seed=3": ("seed", "Either remove + prefix"),
    "optimizer.lr=abc": ("optimizer.lr:", "abc"),
    "optimizer.lr=-1": ("optimizer:", "-1"),
    "optimizer.lr=${user.rate}": ("", "user.rate"),
    "trainer.precision=transformer-engine": ("trainer:",),
    "policy.stop=3": ("policy.stop:", "3"),
    "policy=rows policy.rows.mask.rows=word": ("policy.rows.mask", "'word' is no number, no slice"),
    "policy=fixed policy.fixed.mask.mask=no.safetensors": ("policy.fixed", "no.safetensors cannot be read"),
    # policies that contradict each other
    "policy=[random,random_freeze]": ("'model.trunk", "policy.random wants frozen_state='keep'"),
    "+policy.again={_target_: gradpolicy.Stop, modules: model.probe}": (
        "",
        "'stop'",
        "'again'",
        "; leave one of them out, or give them different modules",
    ),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("overrides", WRONG)
def test_one_message_has_the_key_and_the_nearest_names(train, overrides: str) -> None:
    groups = ("callbacks=", "policy=rows", "policy=fixed")
    words = overrides.split() if overrides.startswith(groups) else [overrides]
    message = train("plan_only=true", *words).refusal
    start, *said = WRONG[overrides]
    assert message.startswith(start)
    for words in said:
        assert words in message


@pytest.mark.mostly_slow
@pytest.mark.parametrize("override", ["a", "a..b=1", "seed='1", "seed={a:1"])
def test_what_is_no_override_is_quoted(train, override: str) -> None:
    ended = train(override)
    assert ended.refusal.startswith(f"{override}: ")
    assert ended.err.count("\n") == 1


LONG = "x" * 5000


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "override",
    [f"+{LONG}=3", f"policy=[{LONG}]", f"trainer.strategy={LONG}", f"policy.stop.modules={LONG}"],
    ids=lambda override: override.replace(LONG, "long"),
)
def test_a_message_quotes_no_more_than_a_line(train, override: str) -> None:
    ended = train(override, "plan_only=true")
    assert ended.refusal.count("x") <= 400
    assert len(ended.message) <= 800


def test_a_missing_checkpoint_is_named_with_those_beside_it(train, tmp_path: Path) -> None:
    (tmp_path / "best.ckpt").touch()
    message = train(f"ckpt_path={tmp_path}/bst.ckpt").refusal
    assert message.startswith("ckpt_path:")
    assert "best.ckpt" in message


def test_a_run_that_would_do_nothing_is_refused(train) -> None:
    assert "nothing to do" in train("train=false", "test=false").refusal


def test_deepspeed_is_refused_before_the_run_starts(train, monkeypatch: pytest.MonkeyPatch) -> None:
    # In its place, since importing DeepSpeed takes seconds.
    monkeypatch.setattr("gradpolicy.train.lightning.trainer_parts.DEEPSPEED", SingleDeviceStrategy)
    message = train("trainer=cpu", "extras.plan=false").refusal
    assert message.startswith("trainer.strategy: DeepSpeed writes directories")
    assert "trainer=fsdp2" in message


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(train) -> None:
    other = train("model.model.width=8")
    message = train(f"ckpt_path={other.run}/checkpoints/last.ckpt").refusal
    assert "of another model" in message
    assert "(8, 1, 3, 3) there and (32, 1, 3, 3) here" in message


def test_wrong_input_in_one_job_of_a_sweep_ends_it_before_the_first(train) -> None:
    message = train("-m", "optimizer.lr=0.1,abc").refusal
    assert message.startswith("optimizer.lr:")


def test_the_traceback_is_shown_where_it_is_asked_for(train) -> None:
    for override in ("extras.traceback=true", "debug=default"):
        assert "Traceback" in train("policy.stop.modules=model.prob", override).err


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("paths.output_dir=elsewhere", "paths.output_dir"),
        ("hydra.run.dir=FILE/x", "hydra.run.dir"),
        (f"hydra.run.dir={'d' * 5000}", "hydra.run.dir"),
        (f"ckpt_path={'c' * 5000}", "ckpt_path"),
    ],
)
def test_a_place_that_cannot_be_is_refused(train, tmp_path: Path, override: str, key: str) -> None:
    (tmp_path / "file").touch()
    refusal = train(override.replace("FILE", str(tmp_path / "file"))).refusal
    assert refusal.startswith(f"{key}: ")
    assert len(refusal) < 400


def test_a_process_that_lightning_has_started_reports_its_error(train, monkeypatch) -> None:
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    assert "error: policy.stop.modls" in train("policy.stop.modls=3").err


def test_an_error_within_a_job_is_one_line_too(train) -> None:
    ended = train("policy.stop.modules=model.prob")
    assert ended.refusal.startswith("policy.stop.modules: ")
    assert ended.err.count("\n") == 1
