"""Wrong input: one message with the key, the cause and the nearest names; code 2; nothing left behind."""

import errno
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from gradpolicy.launch.run_directory import LOCK
from gradpolicy.tasks import DigitsDataModule

# What is wrong: how the one message starts, and what else it says.
WRONG: dict[str, tuple[str, ...]] = {
    "policy=guded": ("policy=guded", "guided"),
    "polcy=guided": ("polcy", "policy"),
    "policy.straight_through.surrogate=identiy": ("policy.straight_through", "identity"),
    "policy.straight_through.ops=[roud]": ("policy.straight_through.ops", "round"),
    "policy.stop.modls=3": ("policy.stop.modls", "modules"),
    "policy.guided.when.phases=[tst]": ("policy.guided.when.phases", "test"),
    "trainer.max_epoch=3": ("trainer.max_epoch", "max_epochs"),
    "+sede=3": ("sede", "seed"),
    "optimized_mode=mx": ("optimized_mode", "max"),
    "trainer=null": ("trainer=null", "ddp_sim"),
    "callbacks=[record,foo]": ("callbacks=foo: there is no such config; valid names: 'attribution'",),
    "+policy.some={_target_: gradpolicy.Freeze, mask: {_target_: gradpolicy.masks.Rondom}}": (
        "policy.some.mask._target_",
        "did you mean 'Random', ",
    ),
    "user.mine=3": ("user.mine", "+user.mine"),
    "~nosuch": ("nosuch", "there is no such key"),
    "+seed=3": ("seed", "Either remove + prefix"),
    "~policy": ("policy", "policy=none"),
    "~trainer._target_": ("trainer", "needs a _target_"),
    "+trainer.logger=true": ("trainer.logger", "group `logger`"),
    "seed=4294967296": ("seed:",),
    "model.model.dropout=nan": ("model.model.dropout:",),
    "model.model.classes=100000000000000000000": ("model.model.classes:",),
    "trainer.val_check_interval=0": ("trainer.val_check_interval:",),
    "trainer.max_epochs=${..seed}": ("hydra:",),
    "trainer.precision=transformer-engine": ("trainer:",),
    "+model._partial_='yes'": ("model._partial_:",),
    "+logger.csv._partial_=true": ("logger.csv:",),
    "hydra.job_logging.version=7": ("hydra:",),
    "hydra.sweeper.params={seed: abc}": ("hydra.sweeper.params:",),
    "optimizer.lr=abc": ("optimizer.lr:", "abc"),
    "seed=one": ("seed:", "one"),
    "policy.stop=3": ("policy.stop:", "3"),
    "optimizer.lr=-1": ("optimizer:", "-1"),
    "trainer.accumulate_grad_batches=0": ("trainer.accumulate_grad_batches:", "0"),
    "policy=rows policy.rows.mask.rows=word": ("policy.rows.mask", "'word' is no number, no slice"),
    "policy=fixed policy.fixed.mask.mask=no.safetensors": ("policy.fixed", "cannot read masks from"),
    "policy=[random,random_freeze]": ("'model.trunk", "policy.random wants frozen_state='keep'"),
    "policy.random_freeze.params=model.trnk.*": ("policy.random_freeze.params", "model.trunk"),
    "policy.stop.modules=model.prob": ("policy.stop.modules", "model.probe"),
    "policy.straight_through.ops=[floor]": ("policy.straight_through.ops", "floor"),
    "+policy.again={_target_: gradpolicy.Stop, modules: model.probe}": (
        "",
        "'stop'",
        "'again'",
        "; leave one of them out, or give them different modules",
    ),
    "optimizer.lr=${user.rate}": ("", "user.rate"),
    "seed=${oc.env:NO_SUCH_VARIABLE}": ('seed: "Environment variable', "'NO_SUCH_VARIABLE' not found"),
    "+callbacks.mine._target_=transformers.TrainerCallback": ("callbacks.mine", "transformers"),
    "+policy.scaled={_target_: gradpolicy.UseRule, rule: tanh, ops: round}": (
        "",
        "'straight_through'",
        "'scaled'",
        "; leave one of them out, or give them different modules",
    ),
}
ODD = ("=3", "~", "==", "a", "a..b=1", "seed='1", "seed={a:1", "a.b.=1")


@pytest.mark.mostly_slow
@pytest.mark.parametrize("overrides", WRONG)
def test_wrong_input_is_one_message_with_its_key_and_what_comes_nearest(train, overrides: str) -> None:
    groups = ("model=", "callbacks=", "optimizer=sgd", "policy=rows", "policy=fixed")
    words = overrides.split() if overrides.startswith(groups) else [overrides]
    message = train("plan_only=true", *words).refusal
    start, *said = WRONG[overrides]
    assert message.startswith(start)
    for words in said:
        assert words in message


@pytest.mark.mostly_slow
@pytest.mark.parametrize("override", ["trainer.val_check_interval=1000", "trainer.limit_val_batches=0.01"])
def test_a_limit_that_leaves_no_batch_is_refused_when_the_run_starts(train, override: str) -> None:
    ended = train(override, "extras.plan=false")
    assert (ended.code, ended.err.count("\n")) == (2, 1)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("override", ODD)
def test_what_is_no_override_is_quoted_and_refused(train, override: str) -> None:
    ended = train(override)
    assert ended.refusal.startswith(f"{override}: ")
    assert ended.err.count("\n") == 1


LONG = "x" * 5000


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "override",
    [
        f"+{LONG}=3",
        f"policy=[{LONG}]",
        f"+trainer.{LONG}=3",
        f"trainer.strategy={LONG}",
        f"optimizer.lr=${{{LONG}}}",
        f"policy.stop.modules={LONG}",
        f"policy.straight_through.surrogate={LONG}",
    ],
    ids=lambda override: override.replace(LONG, "long"),
)
def test_a_message_quotes_no_more_than_a_line_of_what_was_given(train, override: str) -> None:
    ended = train(override, "plan_only=true")
    assert ended.refusal.count("x") <= 400
    assert len(ended.message) <= 800


def test_an_empty_run_directory_is_refused_and_nothing_removed(
    train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert train("hydra.run.dir=", "plan_only=true").refusal.startswith("hydra.run.dir:")
    assert (tmp_path / "empty").is_dir()


def test_a_missing_checkpoint_is_named_with_those_beside_it(train, tmp_path: Path) -> None:
    (tmp_path / "best.ckpt").touch()
    message = train(f"ckpt_path={tmp_path}/bst.ckpt").refusal
    assert message.startswith("ckpt_path:")
    assert "best.ckpt" in message


def test_a_run_that_would_do_nothing_is_refused(train) -> None:
    assert "nothing to do" in train("train=false", "test=false").refusal


def test_a_metric_that_no_one_logs_is_named_with_the_nearest(train) -> None:
    ended = train("callbacks.model_checkpoint.monitor=val/acuracy")
    assert ended.code == 2
    assert ended.message.startswith("callbacks.model_checkpoint.monitor: 'val/acuracy' is not logged")
    assert "val/accuracy" in ended.message


def test_deepspeed_is_refused_before_the_run_starts(train, monkeypatch: pytest.MonkeyPatch) -> None:
    # In its place, since importing DeepSpeed takes seconds.
    monkeypatch.setattr("gradpolicy.launch.trainer.DeepSpeedStrategy", SingleDeviceStrategy)
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
        ("callbacks.model_checkpoint.dirpath=FILE/x", "callbacks.model_checkpoint.dirpath"),
        ("logger.csv.save_dir=FILE/x", "logger.csv.save_dir"),
        ("hydra.run.dir=FILE/x", "hydra.run.dir: nothing can be written to"),
        (f"hydra.run.dir={'d' * 5000}", "hydra.run.dir"),
        (f"ckpt_path={'c' * 5000}", "ckpt_path"),
    ],
)
def test_a_place_that_cannot_be_is_refused_before_anything_is_made(
    train, tmp_path: Path, override: str, key: str
) -> None:
    (tmp_path / "file").touch()
    refusal = train(override.replace("FILE", str(tmp_path / "file"))).refusal
    assert refusal.startswith((f"{key}: ", f"{key} {tmp_path}/file/x: "))
    assert len(refusal) < 400


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("abc", "policy=theirs: theirs.yaml must hold keys and values, not 'abc'"),
        ("a: &a [*a]", "policy: maximum recursion depth exceeded"),
    ],
)
def test_a_chosen_file_that_is_no_config_is_refused(train, tmp_path: Path, written: str, words: str) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "theirs.yaml").write_text(f"# @package policy\n{written}\n")
    for chosen in ("policy=theirs", "policy=[stop,theirs]"):
        assert words in train(chosen, f"--config-dir={tmp_path}").refusal


def test_checkpoints_go_to_no_directory_to_which_another_run_writes_them(train, tmp_path: Path) -> None:
    holder = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "file.write('process 7 on theirs'); file.flush(); print('locked', flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", holder, str(tmp_path / LOCK)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == b"locked\n"
        refusal = train(f"callbacks.last_checkpoint.dirpath={tmp_path}").refusal
    assert refusal == (
        f"callbacks.last_checkpoint.dirpath: process 7 on theirs runs in {tmp_path}; wait until it ends, or"
        " choose another directory"
    )


NO_NETWORK = (
    "cannot get its data: URLError: <urlopen error name resolution failed>; "
    "without a network, put the files where it looks"
)
NO_PACKAGE = "needs torchvision, which is not installed: pip install 'gradpolicy[vision]'"


@pytest.mark.parametrize(
    ("error", "plan", "said"),
    [
        (URLError("name resolution failed"), "true", NO_NETWORK),
        (URLError("name resolution failed"), "false", NO_NETWORK),
        (ModuleNotFoundError("No module named 'torchvision'", name="torchvision"), "true", NO_PACKAGE),
    ],
)
def test_data_that_cannot_be_had_end_the_run_in_one_line(train, monkeypatch, error, plan, said) -> None:
    monkeypatch.setattr(DigitsDataModule, "prepare_data", Mock(side_effect=error))
    assert train(f"extras.plan={plan}", "optimized_metric=null").refusal == f"data: DigitsDataModule {said}"


def test_a_process_that_lightning_has_started_reports_its_error(train, monkeypatch) -> None:
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    assert "error: policy.stop.modls" in train("policy.stop.modls=3").err


def test_a_full_disk_ends_the_run_in_one_line_and_is_no_wrong_input(train, monkeypatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/config.yaml")
    monkeypatch.setattr("gradpolicy.launch.run.save_settings", Mock(side_effect=full))
    ended = train("extras.plan=false")
    assert ended.code == 1
    assert ended.message.startswith("nothing can be written to /runs/config.yaml: no space left on device")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("above", ["", "mine:\n"])
@pytest.mark.parametrize("chosen", ["policy=flat", "policy=[stop,flat]"])
def test_a_policy_that_is_not_indented_below_a_name_is_told_what_to_write(
    train, tmp_path: Path, above: str, chosen: str
) -> None:
    (tmp_path / "policy").mkdir()
    text = f"# @package policy\n{above}params: model.trunk.*\n_target_: gradpolicy.Freeze\n"
    (tmp_path / "policy" / "flat.yaml").write_text(text)
    message = train(chosen, f"--config-dir={tmp_path}").refusal
    assert message.startswith("policy: policy._target_ has no name above it: write a line such as `mine:`")
