"""Mutations of command lines."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fuzzing.case import SHORT, Case, Expectation, command
from fuzzing.dangers import FILES, loading_node, target, walked
from fuzzing.words import ODD, misspelt, scratched, written
from gradpolicy.launch.processes import quoted
from gradpolicy.policies import Policy

CONF = Path(__file__).resolve().parents[2] / "conf"
ACCEPT, REFUSE, EITHER = Expectation.ACCEPT, Expectation.REFUSE, Expectation.EITHER

# As the pages and tests write them; each is right.
LINES: tuple[tuple[str, ...], ...] = (
    (),
    ("policy=random_freeze", "policy.random_freeze.mask.density=0.2", "optimizer.lr=0.01", "seed=3"),
    ("policy=[guided,random_freeze]", "optimizer.lr=0.01", "seed=3"),
    ("+trainer.detect_anomaly=true",),
    ("policy.random_freeze=null",),
    ("~policy.random_freeze", "tags=[first,try]"),
    ("experiment=probe_only",),
    ("experiment=random_freeze_sgd", "task_name=tried"),
    ("policy=none", "data.batch_size=32"),
    (
        "policy=[stop,straight_through]",
        "+policy.again={_target_: gradpolicy.Clip, norm: 1.0, params: '*.bias'}",
    ),
    ("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.5", "policy=[straight_through,stop]"),
    ("policy=[straight_through,layerwise]", "policy.layerwise.mask.active=1"),
    ("policy=[straight_through,block_cyclic]", "policy.block_cyclic.mask.every=50"),
    ("policy=[straight_through,gradual]", "trainer.max_epochs=3"),
    ("policy=[straight_through,prune_and_grow]", "policy.prune_and_grow.mask.grow=random"),
    ("policy=[straight_through,rows]", "policy.rows.mask.rows='0:2'"),
    ("policy=[straight_through,fixed]", "policy.fixed.mask.mask=['*.bias']"),
    ("policy=[straight_through,topk]", "policy.topk.mask.by=weight"),
    ("model.model.levels=8", "model.model.width=16", "model.model.dropout=0.0"),
    ("policy.straight_through.surrogate=hardtanh", "policy.guided.when.phases=[fit,test]"),
    ("callbacks=[model_checkpoint,early_stopping]", "callbacks.early_stopping.patience=2"),
    ("+callbacks.last_checkpoint.every_n_train_steps=100", "trainer.accumulate_grad_batches=2"),
    ("optimizer=adam", "+user.rate=0.003", "optimizer.lr=${user.rate}"),
    ("hydra.run.dir=mine/run", "paths.data_dir=mine/data"),
    ("logger=many", "optimized_metric=val/loss", "optimized_mode=min"),
    ("policy=[stop,straight_through,deconv]", "callbacks.attribution.policy=deconv"),
)


@dataclass(frozen=True)
class Setting:
    """A key with values that are right and values that are wrong for it.

    Attributes:
        key: The key.
        good: Values that must be accepted and held.
        wrong: Values, as they are written, that must be refused.
        needs: What else the command line must say.
    """

    key: str
    good: tuple[Any, ...]
    wrong: tuple[str, ...]
    needs: tuple[str, ...] = ()


_NO_INTEGER = ("abc", "1.5", "[1]", "{a: 1}", "nan", "inf", "''", "'\udcff'", "'1 2'", "1e30")
_NO_NUMBER = ("abc", "[0.1]", "{a: 1}", "nan", "''", "'1,5'", "-1", "-inf")
_NO_SWITCH = ("perhaps", "[true]", "{a: true}", "3", "nan", "''")
_NO_CHOICE = ("nosuch", "3", "[a]", "{a: 1}", "nan", "''", "a" * 5000, "'日本'", "'a b'")
_MASK = "policy.random_freeze.mask"

SETTINGS = (
    Setting("seed", (0, 7, 4294967295), (*_NO_INTEGER, "-1", "4294967296", "1" + 40 * "0")),
    Setting("data.batch_size", (1, 16, 100000), (*_NO_INTEGER, "0", "-5")),
    Setting("data.validation_share", (0.2, 0.05), (*_NO_NUMBER, "1.5", "inf")),
    Setting("data.test_share", (0.2, 0.3), (*_NO_NUMBER, "1.5", "inf")),
    Setting("data.workers", (0,), (*_NO_INTEGER, "-1")),
    Setting("trainer.max_epochs", (1, 100, -1), (*_NO_INTEGER, "-7")),
    Setting("trainer.max_steps", (-1, 50), (*_NO_INTEGER, "-7")),
    Setting("trainer.accumulate_grad_batches", (1, 4), (*_NO_INTEGER, "0", "-2")),
    Setting("trainer.check_val_every_n_epoch", (1, 5), (*_NO_INTEGER, "0", "-2")),
    Setting("trainer.val_check_interval", (0.5, 1.0), ("0", "-1", "abc", "nan", "1.5", "[1]")),
    Setting("trainer.log_every_n_steps", (1, 50), (*_NO_INTEGER, "-1")),
    Setting("trainer.limit_train_batches", (1, 0.5, 1.0), ("nan", "-1", "abc", "1.5", "[1]", "{a: 1}")),
    Setting("trainer.limit_val_batches", (1, 0.5, 0), ("nan", "-1", "abc", "1.5", "[1]")),
    Setting("trainer.overfit_batches", (0.0, 2), ("nan", "-1", "abc", "1.5", "[1]")),
    Setting("trainer.gradient_clip_val", (0.5, 0), (*_NO_NUMBER,)),
    Setting(
        "trainer.gradient_clip_algorithm", ("norm", "value"), _NO_CHOICE, ("trainer.gradient_clip_val=1.0",)
    ),
    Setting("trainer.precision", ("32-true", "bf16-mixed", "64-true"), _NO_CHOICE),
    Setting("trainer.strategy", ("auto", "ddp"), _NO_CHOICE),
    Setting("trainer.accelerator", ("cpu", "auto"), _NO_CHOICE),
    Setting("trainer.max_time", ("00:01:00:00",), ("abc", "[1]", "nan", "'1:2:3:4:5'")),
    Setting("trainer.num_sanity_val_steps", (0, 2, -1), (*_NO_INTEGER, "-7")),
    Setting("trainer.enable_checkpointing", (True, False), _NO_SWITCH),
    Setting("trainer.enable_progress_bar", (True, False), _NO_SWITCH),
    Setting("trainer.fast_dev_run", (True, False, 1), ("perhaps", "[true]", "nan", "-1", "''")),
    Setting("train", (True, False), _NO_SWITCH),
    Setting("extras.plan", (True, False), _NO_SWITCH),
    Setting("optimized_mode", ("min", "max"), _NO_CHOICE),
    Setting("task_name", ("tried", "with space", "日本"), ("[a]", "{a: 1}", "3")),
    Setting("tags", (["a", "b"], []), ("3", "{a: 1}", "[1]", "[[a]]")),
    Setting("optimizer.lr", (0.001, 0.5, 1e-05), _NO_NUMBER),
    Setting("optimizer.weight_decay", (0.0, 0.1), _NO_NUMBER),
    Setting("optimizer.eps", (1e-08, 0.001), _NO_NUMBER),
    Setting("optimizer.betas", ([0.8, 0.9],), ("abc", "3", "[1]", "[2,3]", "[nan,0.9]", "[a,b]", "{a: 1}")),
    Setting("optimizer.amsgrad", (True, False), _NO_SWITCH),
    Setting("model.model.width", (2, 8, 33), (*_NO_INTEGER, "0", "-3")),
    Setting("model.model.levels", (1, 4, 255), (*_NO_INTEGER, "0", "-3")),
    Setting("model.model.dropout", (0.0, 0.5), (*_NO_NUMBER, "1.5", "inf")),
    Setting(f"{_MASK}.density", (0.0, 0.3, 1.0), (*_NO_NUMBER, "1.5", "inf")),
    Setting(f"{_MASK}.every", (1, 30), (*_NO_INTEGER, "0", "-3")),
    Setting("policy.random_freeze.frozen_state", ("keep", "zero", "drop"), _NO_CHOICE),
    Setting("policy.random_freeze.bias_correction", ("entry", "tensor"), _NO_CHOICE),
    Setting(
        "policy.random_freeze.params",
        ("model.trunk.*", ["*.weight"]),
        ("nosuch.*", "3", "[]", "''", "{a: 1}"),
    ),
    Setting("policy.stop.mode", ("detach", "zero"), _NO_CHOICE),
    Setting(
        "policy.stop.modules",
        ("model.probe", ["model.probe"]),
        ("nosuch", "3", "[]", "''", "[3]", "a" * 5000),
    ),
    Setting(
        "policy.straight_through.ops",
        (["round"], "round"),
        ("nosuch", "[rond]", "3", "[3]", "''", "os.system"),
    ),
    Setting("policy.straight_through.surrogate", ("identity", "tanh"), _NO_CHOICE),
    Setting(
        "policy.guided.when.phases", (["test"], ["fit"], "fit"), ("nosuch", "3", "[3]", "[[fit]]", "null")
    ),
    Setting(
        "policy.topk.mask.density", (0.1, 0.5), (*_NO_NUMBER, "1.5"), ("policy=[straight_through,topk]",)
    ),
    Setting("policy.topk.mask.by", ("fisher", "weight"), _NO_CHOICE, ("policy=[straight_through,topk]",)),
    Setting(
        "policy.layerwise.mask.active", (1, 2), (*_NO_INTEGER, "-1"), ("policy=[straight_through,layerwise]",)
    ),
    Setting(
        "ckpt_path",
        (None,),
        ("/", "nowhere.ckpt", "last", "guarded", "guarded/keep.txt", "a" * 5000, "3", "[a]"),
    ),
    Setting("paths.log_dir", ("elsewhere",), ("guarded/keep.txt", "guarded/keep.txt/below", "/proc/nothing")),
    Setting("paths.output_dir", ("elsewhere",), ("guarded/keep.txt", "/proc/nothing", "a" * 5000, "3")),
    Setting(
        "callbacks.model_checkpoint.dirpath",
        ("elsewhere",),
        ("guarded/keep.txt", "/proc/nothing", "a" * 5000),
    ),
    Setting("logger.csv.save_dir", ("elsewhere",), ("guarded/keep.txt", "/proc/nothing", "a" * 5000)),
)

GROUPS = {
    "policy": ("none", "stop", "straight_through", "random_freeze", "guided", "layerwise", "topk", "fixed"),
    "optimizer": ("adam", "adamw", "sgd"),
    "trainer": ("cpu", "default"),
    "logger": ("csv", "none", "tensorboard", "mlflow", "many"),
    "callbacks": ("default", "none", "model_checkpoint", "early_stopping", "costs", "progress_bar"),
    "experiment": ("probe_only", "random_freeze_sgd"),
    "debug": ("default", "fdr", "limit", "overfit", "profiler"),
    "data": ("digits",),
    "model": ("quantized_convnet",),
}

# Hydra's own keys: what is said, and what must come of it.
HYDRA: tuple[tuple[str, Expectation], ...] = (
    ("hydra.run.dir=mine/run", ACCEPT),
    ("hydra.run.dir='a b/ü'", ACCEPT),
    ("hydra.output_subdir=null", ACCEPT),
    ("hydra/job_logging=disabled", ACCEPT),
    ("hydra.job.chdir=true", EITHER),
    ("hydra.verbose=abc", EITHER),
    ("hydra.verbose=[a,3]", EITHER),
    ("hydra.output_subdir=../../escaped", EITHER),
    ("hydra.callbacks=3", EITHER),
    ("hydra.callbacks=null", EITHER),
    ("hydra.job_logging=3", EITHER),
    ("hydra.job_logging.version=3", EITHER),
    ("hydra.job=null", EITHER),
    ("hydra.run=null", EITHER),
    ("hydra.run.dir=null", EITHER),
    ("hydra.run.dir=''", EITHER),
    ("hydra.run.dir=[a]", EITHER),
    ("hydra.run.dir=${nowhere}", EITHER),
    ("hydra.run.dir=${hydra.run.dir}", REFUSE),
    ("hydra.mode=MULTIRUN", EITHER),
    ("hydra=null", EITHER),
    ("hydra.help=null", EITHER),
    ("hydra.sweeper.params={seed: abc}", EITHER),
    ("~hydra.run", EITHER),
    ("~hydra", EITHER),
    ("+hydra.job.env_set={A: 1}", EITHER),
    ("hydra.job.env_set={A: [1]}", EITHER),
    ("hydra.job.name=../x", EITHER),
    ("hydra.runtime.output_dir=guarded", EITHER),
    ("hydra.overrides.task=[seed=3]", EITHER),
    ("hydra.run.dir=" + "a" * 5000, REFUSE),
    ("hydra.run.dir=" + "a/" * 3000, REFUSE),
    ("hydra.run.dir=guarded/keep.txt", REFUSE),
    ("hydra.run.dir=/proc/nothing", REFUSE),
    ("hydra.nosuch=3", REFUSE),
    ("hydra.mode=nonsense", REFUSE),
    ("hydra/launcher=nonsense", REFUSE),
    ("hydra/sweeper=nonsense", REFUSE),
    ("hydra/job_logging=nonsense", REFUSE),
    ("hydra.searchpath=[file://missing]", REFUSE),
    ("hydra.searchpath=[pkg://stranger]", REFUSE),
    ("hydra.searchpath=3", REFUSE),
    ("hydra.launcher._target_=os.system", REFUSE),
    ("hydra.sweeper._target_=stranger.rule", REFUSE),
    ("+hydra.callbacks.evil._target_=stranger.rule", REFUSE),
    ("+hydra.callbacks.evil._target_=hydra.experimental.callbacks.PickleJobInfoCallback", REFUSE),
    ("+hydra.callbacks.evil._target_=hydra.experimental.callbacks.LogJobReturnCallback", REFUSE),
    ("+hydra.callbacks.evil={_target_: '${user.path}'} +user.path=stranger.rule", REFUSE),
    ("hydra.job_logging.handlers.file.class=stranger.rule", REFUSE),
    ("+hydra.job_logging.handlers.evil={(): stranger.rule}", REFUSE),
    ("+hydra.job_logging.handlers.evil={class: logging.FileHandler, filename: canary}", REFUSE),
    ("+hydra.job_logging.formatters.evil={(): os.system, command: 'touch canary'}", REFUSE),
    ("+hydra.hydra_logging.handlers.evil={class: logging.FileHandler, filename: canary}", REFUSE),
    ("+hydra.job_logging.filters.evil={(): '${user.path}'} +user.path=stranger.rule", REFUSE),
)

# Whole words of a command line that are no overrides, or bad ones.
WORDS: tuple[tuple[tuple[str, ...], Expectation], ...] = (
    (("=3",), REFUSE),
    (("=",), REFUSE),
    (("",), EITHER),
    (("seed",), REFUSE),
    (("seed 3",), REFUSE),
    (("seed:3",), REFUSE),
    (("seed==3",), REFUSE),
    (("+=3",), REFUSE),
    (("~",), REFUSE),
    (("~nosuch",), REFUSE),
    (("~policy.nosuch",), REFUSE),
    (("~trainer._target_",), REFUSE),
    (("~model._target_",), REFUSE),
    (("~model",), REFUSE),
    (("~data",), REFUSE),
    (("~trainer",), REFUSE),
    (("~seed",), EITHER),
    (("~optimizer",), EITHER),
    (("~callbacks",), EITHER),
    (("~paths",), EITHER),
    (("~policy",), EITHER),
    (("~extras",), EITHER),
    (("~policy.stop=3",), EITHER),
    (("~policy.stop.modules",), REFUSE),
    (("+seed=3",), EITHER),
    (("+nosuch=3",), REFUSE),
    (("+user.deep.down=[1,2]",), ACCEPT),
    (("+policy.mine={}",), REFUSE),
    (("+policy.mine=null",), ACCEPT),
    (("+policy.mine=3",), REFUSE),
    (("+callbacks.mine=3",), REFUSE),
    (("+callbacks.mine={monitor: a}",), EITHER),
    (("+trainer.nosuch=3",), REFUSE),
    (("+trainer.callbacks=[]",), EITHER),
    (("+trainer.plugins=[abc]",), EITHER),
    (("+trainer.profiler=abc",), REFUSE),
    (("+trainer.plugins=[{_target_: gradpolicy.Stop}]",), REFUSE),
    (("+model.model._partial_=yes",), REFUSE),
    (("+model._partial_=true",), REFUSE),
    (("+data._recursive_=no",), REFUSE),
    (("+policy.stop._convert_=nonsense",), REFUSE),
    (("+policy.stop._args_=3",), REFUSE),
    (("+policy.stop._nosuch_=3",), REFUSE),
    (("model=null",), REFUSE),
    (("policy@nosuch=guided",), EITHER),
    (("policy@policy=guided",), EITHER),
    (("+policy@policy.deep=guided",), EITHER),
    (("policy=../optimizer/adam",), EITHER),
    (("policy=/policy/guided",), EITHER),
    (("policy=guided,stop",), REFUSE),
    (("seed=1,2",), REFUSE),
    (("seed=range(1,3)",), REFUSE),
    (("seed=choice(1,2)",), REFUSE),
    (("seed=int(3)",), ACCEPT),
    (("seed=interval(1,3)",), EITHER),
    (("-m", "seed=1,2", "policy=none"), ACCEPT),
    (("-m", "seed=1,abc"), REFUSE),
    (("-m", "hydra/launcher=nosuch", "seed=1,2"), REFUSE),
    (("-m", "hydra.sweeper._target_=stranger.rule", "seed=1,2"), REFUSE),
    (("-m", "hydra.launcher._target_=stranger.rule", "seed=1,2"), REFUSE),
    (("--cfg", "job", "seed=5"), ACCEPT),
    (("--cfg", "job", "nosuch=5"), REFUSE),
    (("--cfg", "nosuch"), REFUSE),
    (("--nosuch",), REFUSE),
    (("--config-dir", "nowhere"), REFUSE),
    (("--config-dir", "guarded/keep.txt"), REFUSE),
    (("--config-name", "nosuch"), REFUSE),
    (("--config-name", "policy/guided"), EITHER),
    (("--config-path", "guarded"), REFUSE),
)

# References to other keys.
REFERENCES: tuple[tuple[tuple[str, ...], Expectation, dict[str, Any]], ...] = (
    (("optimizer.lr=${user.rate}", "+user.rate=0.003"), ACCEPT, {"optimizer.lr": 0.003}),
    (("data.batch_size=${user.size}", "+user.size=16"), ACCEPT, {"data.batch_size": 16}),
    (("data.batch_size=${user.size}", "+user.size=abc"), REFUSE, {}),
    (("task_name=try_${seed}", "seed=4"), ACCEPT, {"task_name": "try_4"}),
    (("optimizer.lr=${nowhere}",), REFUSE, {}),
    (("optimizer.lr=${optimizer.lr}",), REFUSE, {}),
    (("optimizer.lr=${optimizer.eps}", "optimizer.eps=${optimizer.lr}"), REFUSE, {}),
    (("seed=${nosuch:3}",), REFUSE, {}),
    (("seed=${oc.env:NO_SUCH_VARIABLE}",), REFUSE, {}),
    (("seed=${oc.decode:7}",), EITHER, {}),
    (("seed=${hydra:nosuch}",), REFUSE, {}),
    (("model=${model}",), EITHER, {}),
    (("policy.stop=${policy.stop}",), REFUSE, {}),
    (("+user.a=${user}",), REFUSE, {}),
    (("optimizer=${data}",), EITHER, {}),
    (("trainer.max_epochs=${..seed}",), EITHER, {}),
    (("tags=${tags}",), REFUSE, {}),
    (("tags='${'",), REFUSE, {}),
    (("optimizer.lr='${seed'",), REFUSE, {}),
)

# Where a node can stand that Hydra would instantiate, and where it never should.
PLACES = (
    *("+policy.evil", "+callbacks.evil", "+logger.evil", "+model.model.evil", "+user.evil", "+data.evil"),
    *("policy.random_freeze.mask", "+policy.random_freeze.mask.evil", "+optimizer.evil", "+trainer.logger"),
    *(
        "+trainer.profiler",
        "trainer.strategy",
        "+hydra.callbacks.evil",
        "model",
        "optimizer",
        "trainer",
        "data",
    ),
)


def unchanged(draw: random.Random) -> Case:
    line = draw.choice(LINES)
    return Case("unchanged", command(*line), ACCEPT)


def short_run(draw: random.Random) -> Case:
    return Case("really trains", command(*draw.choice(LINES[:14]), base=SHORT), ACCEPT)


def other_spelling(draw: random.Random) -> Case:
    """Another order, pluses, quotes, or everything twice: nothing that changes the meaning."""
    line = list(draw.choice(LINES))
    draw.shuffle(line)
    mutation = draw.choice(("another order", "with ++", "everything twice", "in another encoding"))
    if mutation == "with ++":
        line = [
            f"++{word}" if "." in word.partition("=")[0] and word[0] not in "+~" else word for word in line
        ]
    if mutation == "everything twice":
        line += [word for word in line if word[0] not in "+~"]
    encoding = draw.choice(("ascii", "latin-1")) if mutation == "in another encoding" else "utf-8"
    return Case(mutation, command(*line), ACCEPT, encoding=encoding)


def good_value(draw: random.Random) -> Case:
    setting = draw.choice(SETTINGS)
    value = draw.choice(setting.good)
    text = draw.choice(_spellings(value))
    plus = draw.choice(("", "", "++"))
    arguments = command(*setting.needs, f"{plus}{setting.key}={text}")
    return Case("a right value", arguments, ACCEPT, holds={setting.key: value})


def wrong_value(draw: random.Random) -> Case:
    setting = draw.choice(SETTINGS)
    line = f"{setting.key}={draw.choice(setting.wrong)}"
    top = ".".join(setting.key.split(".")[:-1]) or setting.key
    names = (setting.key, top, setting.key.split(".")[-1])
    return Case("a wrong value", command(*setting.needs, line), REFUSE, names, FILES)


def odd_value(draw: random.Random) -> Case:
    key = draw.choice(_keys())
    return Case("an odd value", command(f"{key}={draw.choice(ODD)}"), files=FILES)


def odd_values(draw: random.Random) -> Case:
    line = draw.choice(LINES)
    keys = draw.sample(_keys(), draw.randint(2, 4))
    return Case(
        "several odd values", command(*line, *(f"{key}={draw.choice(ODD)}" for key in keys)), files=FILES
    )


def misspelt_key(draw: random.Random) -> Case:
    setting = draw.choice(SETTINGS)
    parts = setting.key.split(".")
    place = draw.randrange(len(parts))
    wrong = misspelt(draw, parts[place], {part for key in _keys() for part in key.split(".")})
    parts[place] = wrong
    plus = draw.choice(("", "", "+", "++"))
    # Below `user`, and as a new policy, callback or logger, any name is right.
    line = f"{plus}{'.'.join(parts)}={_spellings(setting.good[0])[0]}"
    free = plus and place == 1 and parts[0] in {"policy", "callbacks", "logger", "paths"}
    arguments = command(*setting.needs, line)
    return Case("a misspelt key", arguments, EITHER if free else REFUSE, () if free else (wrong,))


def misspelt_choice(draw: random.Random) -> Case:
    group = draw.choice(sorted(GROUPS))
    choices = {path.stem for path in (CONF / group).glob("*.yaml")}
    wrong = misspelt(draw, draw.choice(GROUPS[group]), choices)
    if draw.random() < 0.3:
        line = f"{misspelt(draw, group, {*GROUPS, 'sweep', 'paths'})}={GROUPS[group][0]}"
        return Case("a misspelt group", command(line), REFUSE, (line.partition("=")[0],))
    several = f"[{GROUPS[group][0]},{wrong}]" if draw.random() < 0.3 else wrong
    return Case("a misspelt choice", command(f"{group}={several}"), REFUSE, (wrong,))


def scratched_word(draw: random.Random) -> Case:
    line = [*draw.choice(LINES[1:])]
    place = draw.randrange(len(line))
    word = scratched(draw, line[place])
    # What begins so is for argparse; there are cases of their own.
    line[place] = word.lstrip("-")
    return Case("scratched characters", command(*line), files=FILES)


def spliced_words(draw: random.Random) -> Case:
    words = [word for line in LINES for word in line]
    first, second = draw.choice(words), draw.choice(words)
    joined = draw.choice(
        (
            f"{first.partition('=')[0]}={second.partition('=')[2]}",
            f"{first},{second}",
            f"{first}{second}",
            f"{first.partition('=')[0]}.{second}",
            f"~{first}",
            f"+{first}",
        )
    )
    return Case("spliced words", command(joined.lstrip("-")), files=FILES)


def hydras_key(draw: random.Random) -> Case:
    line, expectation = draw.choice(HYDRA)
    words = line.split(" +") if " +" in line else [line]
    words = [words[0], *(f"+{word}" for word in words[1:])]
    return Case("a key of Hydra's", command(*words), expectation, files=FILES)


def bad_word(draw: random.Random) -> Case:
    words, expectation = draw.choice(WORDS)
    return Case("a word", command(*words), expectation, files=FILES)


def reference(draw: random.Random) -> Case:
    words, expectation, holds = draw.choice(REFERENCES)
    return Case("a reference", command(*words), expectation, holds=holds)


def dangerous_target(draw: random.Random) -> Case:
    """A node that runs something, at any place, written in any of the ways there are."""
    name, node = target(draw)
    place = draw.choice(PLACES)
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    way = draw.choice(("plain", "plain", "by keys", "by reference", "in a list", "below"))
    if not place.startswith("+"):
        # In place of a node that is there: only its target changes, the rest is added.
        words = [f"{place}={written(node)}"] if place == "trainer.strategy" else [f"{place}._target_={name}"]
        words += (
            []
            if place == "trainer.strategy"
            else [f"++{place}.{key}={written(arguments[key])}" for key in arguments]
        )
    elif way == "by keys":
        words = [
            f"{place}._target_={name}",
            *(f"{place}.{key}={written(arguments[key])}" for key in arguments),
        ]
    elif way == "by reference":
        words = [f"+user.path={name}", f"{place}={written({**node, '_target_': '${user.path}'})}"]
    elif way == "in a list":
        words = [f"{place}={written([node])}"]
    elif way == "below":
        words = [f"{place}={written({'_target_': 'gradpolicy.Stop', 'modules': node})}"]
    else:
        words = [f"{place}={written(node)}"]
    # Nothing is built of what stands below `user`.
    expectation = EITHER if place == "+user.evil" else REFUSE
    return Case("a dangerous target", command(*words), expectation, (name, "_target_"), FILES)


def loading_argument(draw: random.Random) -> Case:
    """Something that may be built, with an argument that ends in a loader."""
    name, node = loading_node(draw)
    place = draw.choice(("+model.model.evil", "+user.evil"))
    return Case("an argument that loads", command(f"{place}={written(node)}"), REFUSE, (name,), FILES)


def walked_target(draw: random.Random) -> Case:
    """Any callable of the allowed packages, in the place of a policy."""
    name = draw.choice(walked(Policy))
    return Case(
        "any callable as a policy",
        command(f"+policy.evil._target_={name}"),
        REFUSE,
        (name, "_target_"),
        FILES,
    )


def allowed_from_config(draw: random.Random) -> Case:
    """A package of one's own: on the command line it may be allowed, elsewhere not."""
    words = draw.choice(
        (
            ("+policy.mine={_target_: gradpolicy.UseRule, rule: stranger.rule, ops: relu}",),
            (
                "+policy.mine={_target_: gradpolicy.UseRule, rule: stranger.rule, ops: relu}",
                "+policy.mine.allowed_targets=[stranger]",
            ),
            ("+policy.mine._target_=stranger.rule", "allowed_targets=[strange]"),
            ("+policy.mine._target_=stranger.rule", "allowed_targets=${user.mine}", "+user.mine=3"),
            ("+policy.mine._target_=os.system", "allowed_targets=['']"),
            ("+policy.mine._target_=os.system", "allowed_targets=['*']"),
        )
    )
    return Case("what was not allowed", command("policy=straight_through", *words), REFUSE, files=FILES)


MUTATIONS: tuple[Callable[[random.Random], Case], ...] = (
    unchanged,
    other_spelling,
    good_value,
    *(wrong_value,) * 4,
    *(odd_value,) * 4,
    odd_values,
    *(misspelt_key,) * 2,
    *(misspelt_choice,) * 2,
    *(scratched_word,) * 4,
    *(spliced_words,) * 2,
    *(hydras_key,) * 3,
    *(bad_word,) * 3,
    reference,
    *(dangerous_target,) * 5,
    *(walked_target,) * 3,
    *(loading_argument,) * 3,
    allowed_from_config,
    short_run,
)


def mutate(draw: random.Random) -> Case:
    """A command line with something done to it."""
    return draw.choice(MUTATIONS)(draw)


@cache
def _keys() -> tuple[str, ...]:
    """Every key of the config that a run has unless told otherwise."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("train"), resolve=False)
    assert isinstance(config, dict)
    # Where loader processes without number, or many ranks, would be a matter of the machine.
    skipped = ("paths.", "data.workers", "trainer.devices", "trainer.num_nodes", "sweep")
    return tuple(key for key in _flat(config, "") if not key.startswith(skipped) and key != "plan_only")


def _flat(config: dict[Any, Any], above: str) -> list[str]:
    keys = []
    for name, value in config.items():
        keys.append(f"{above}{name}")
        keys += _flat(value, f"{above}{name}.") if isinstance(value, dict) else []
    return keys


def _spellings(value: Any) -> list[str]:
    """The ways to write a value."""
    if value is None:
        return ["null", "NULL"]
    if isinstance(value, bool):
        return [str(value), str(value).lower(), str(value).upper()]
    if isinstance(value, float):
        return [repr(value), f"{value:e}", f"{value:E}"]
    if isinstance(value, str):
        bare = value.isascii() and value.replace("_", "").replace("-", "").replace(".", "").isalpha()
        return [quoted(value), f'"{value}"', *([value] if bare else [])]
    return [written(value)]
