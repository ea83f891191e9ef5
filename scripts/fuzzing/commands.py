"""Hypothesis strategies of command lines."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from omegaconf import OmegaConf

from fuzzing.case import ACCEPT, EITHER, PLAN, REFUSE, SHORT, Case, Expectation, command
from fuzzing.dangers import FILES, dangerous_nodes, loading_nodes
from fuzzing.values import ODD, misspelt, scratched, written

CONF = Path(__file__).resolve().parents[2] / "conf"
# Command lines with their expected results: documented ones, and former faults.
EXAMPLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text())
# Overrides of command lines that also run one batch.
TRAINED = ("policy", "+policy", "~policy", "optimizer", "data", "seed", "model", "+user.rate")
# Keys at which Hydra would build a node, and keys at which it never should.
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


@dataclass(frozen=True)
class Values:
    """Values that a key must accept, and texts that it must refuse."""

    right: SearchStrategy[Any]
    wrong: SearchStrategy[str]


NO_NUMBER = st.sampled_from(("abc", "[0.1]", "{a: 1}", "nan", "''", "'1,5'"))
NO_WHOLE_NUMBER = NO_NUMBER | st.sampled_from(("1.5", "inf", "'\udcff'", "'1 2'", "1e30"))
BELOW_ZERO = st.integers(-(10**20), -1).map(str)


def whole(*right: int, above: int = 0) -> Values:
    """Return the values of a key for integers of at least one."""
    return Values(st.sampled_from(right), NO_WHOLE_NUMBER | st.integers(-(10**20), above - 1).map(str))


def number(*right: float, upto: float | None = None) -> Values:
    """Return the values of a key for numbers of at least zero."""
    # Lightning takes 2.0 for two batches.
    fractions = st.floats(upto or 0.0, exclude_min=True).filter(lambda value: value % 1 != 0)
    above = st.nothing() if upto is None else fractions.map(str)
    return Values(st.sampled_from(right), NO_NUMBER | BELOW_ZERO | st.just("-inf") | above)


def choice(*right: Any) -> Values:
    """Return the values of a key for a choice of names."""
    wrong = ("nosuch", "3", "[a]", "{a: 1}", "nan", "''", "a" * 5000, "'日本'", "'a b'")
    return Values(st.sampled_from(right), st.sampled_from(wrong))


def place() -> Values:
    """Return the values of a key for an output directory."""
    return Values(st.just("elsewhere"), st.sampled_from(("guarded/keep.txt", "/proc/nothing", "a" * 5000)))


def switch() -> Values:
    """Return the values of a key for a bool."""
    return Values(st.booleans(), st.sampled_from(("perhaps", "[true]", "{a: true}", "3", "nan", "''")))


SETTINGS: dict[str, Values] = {
    "seed": whole(0, 7, 4294967295),
    "data.batch_size": whole(1, 16, 100000, above=1),
    "data.validation_share": number(0.2, 0.05, upto=1.0),
    "trainer.max_epochs": whole(1, 100, -1, above=-1),
    "trainer.accumulate_grad_batches": whole(1, 4, above=1),
    "trainer.check_val_every_n_epoch": whole(1, 5, above=1),
    "trainer.log_every_n_steps": whole(1, 50),
    "trainer.limit_train_batches": number(1, 0.5, upto=1.0),
    "trainer.gradient_clip_val": number(0.5, 0),
    "trainer.precision": choice("32-true", "bf16-mixed", "64-true"),
    "trainer.strategy": choice("auto", "ddp"),
    "trainer.accelerator": choice("cpu", "auto"),
    "trainer.num_sanity_val_steps": whole(0, 2, -1, above=-1),
    "trainer.enable_checkpointing": switch(),
    "trainer.enable_progress_bar": switch(),
    "train": switch(),
    "extras.plan": switch(),
    "optimized_mode": choice("min", "max"),
    "optimizer.lr": number(0.001, 0.5, 1e-05),
    "optimizer.weight_decay": number(0.0, 0.1),
    "optimizer.amsgrad": switch(),
    "model.model.width": whole(2, 8, 33, above=1),
    "model.model.levels": whole(1, 4, 255, above=1),
    "model.model.dropout": number(0.0, 0.5, upto=1.0),
    "policy.random_freeze.mask.density": number(0.0, 0.3, 1.0, upto=1.0),
    "policy.random_freeze.mask.every": whole(1, 30, above=1),
    "policy.random_freeze.frozen_state": choice("keep", "zero", "drop"),
    "policy.random_freeze.bias_correction": choice("entry", "tensor"),
    "policy.random_freeze.params": choice("model.trunk.*", ["*.weight"]),
    "policy.stop.mode": choice("detach", "zero"),
    "policy.stop.modules": choice("model.probe", ["model.probe"]),
    "policy.straight_through.ops": choice("round", ["round"]),
    "policy.straight_through.surrogate": choice("identity", "tanh"),
    "policy.guided.when.phases": choice("fit", ["test"], ["fit"]),
    "ckpt_path": choice(None),
    "paths.log_dir": place(),
    "callbacks.model_checkpoint.dirpath": place(),
    "logger.csv.save_dir": place(),
}
GROUPS = ("policy", "optimizer", "trainer", "logger", "callbacks", "experiment", "debug", "data", "model")


def examples(kind: str) -> SearchStrategy[tuple[str, ...]]:
    """Return the command lines of `examples.yaml` of one kind."""
    return st.sampled_from([(line,) if isinstance(line, str) else tuple(line) for line in EXAMPLES[kind]])


@st.composite
def known_lines(draw: st.DrawFn) -> Case:
    """Draw a command line with a known result."""
    expectation = draw(st.sampled_from(Expectation))
    line = draw(examples(expectation.name.lower()))
    trains = expectation is ACCEPT and all(word.startswith(TRAINED) for word in line) and draw(st.booleans())
    return Case(
        "a known command line", command(*line, base=SHORT if trains else PLAN), expectation, files=FILES
    )


@st.composite
def right_values(draw: st.DrawFn) -> Case:
    """Draw a valid value for its key."""
    key = draw(st.sampled_from(sorted(SETTINGS)))
    value = draw(SETTINGS[key].right)
    plus = draw(st.sampled_from(("", "++")))
    return Case("a right value", command(f"{plus}{key}={written(value)}"), ACCEPT, holds={key: value})


@st.composite
def wrong_values(draw: st.DrawFn) -> Case:
    """Draw an invalid value for its key."""
    key = draw(st.sampled_from(sorted(SETTINGS)))
    names = (key, key.rpartition(".")[0] or key, key.rpartition(".")[2])
    return Case("a wrong value", command(f"{key}={draw(SETTINGS[key].wrong)}"), REFUSE, names, FILES)


@st.composite
def odd_values(draw: st.DrawFn) -> Case:
    """Draw a command line and values of any kind for one to three keys."""
    words = [
        f"{key}={written(draw(ODD))}"
        for key in draw(st.lists(st.sampled_from(_keys()), min_size=1, max_size=3))
    ]
    return Case("odd values", command(*draw(examples("accept").filter(_plain)), *words), files=FILES)


@st.composite
def misspelt_keys(draw: st.DrawFn) -> Case:
    """Draw a key with one mistake."""
    key = draw(st.sampled_from(sorted(SETTINGS)))
    parts = key.split(".")
    place = draw(st.integers(0, len(parts) - 1))
    wrong = draw(misspelt(parts[place], {part for key in _keys() for part in key.split(".")}))
    parts[place] = wrong
    plus = draw(st.sampled_from(("", "+", "++")))
    line = f"{plus}{'.'.join(parts)}={written(draw(SETTINGS[key].right))}"
    # Any name is valid for a new policy, callback, logger or path.
    free = plus and place == 1 and parts[0] in {"policy", "callbacks", "logger", "paths"}
    return Case("a misspelt key", command(line), EITHER if free else REFUSE, () if free else (wrong,))


@st.composite
def misspelt_choices(draw: st.DrawFn) -> Case:
    """Draw a group or the name of one of its configs with one mistake."""
    group = draw(st.sampled_from(GROUPS))
    known = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    right = draw(st.sampled_from(known))
    if draw(st.booleans()):
        wrong = draw(misspelt(group, {*GROUPS, "sweep", "paths"}))
        return Case("a misspelt group", command(f"{wrong}={right}"), REFUSE, (wrong,))
    wrong = draw(misspelt(right, known))
    several = draw(st.sampled_from((wrong, f"[{right},{wrong}]")))
    return Case("a misspelt choice", command(f"{group}={several}"), REFUSE, (wrong,))


@st.composite
def scratched_words(draw: st.DrawFn) -> Case:
    """Draw a command line with changed characters in a word, or with parts of two words combined."""
    words = [*draw(examples("accept").filter(_plain))]
    place = draw(st.integers(0, len(words) - 1))
    other = draw(examples("accept").filter(_plain))[0]
    key = words[place].partition("=")[0]
    spliced = (
        f"{key}={other.partition('=')[2]}",
        f"{words[place]},{other}",
        f"{key}.{other}",
        f"~{words[place]}",
    )
    word = draw(scratched(words[place]) | st.sampled_from(spliced))
    # Words that start so are for argparse.
    words[place] = word.lstrip("-")
    return Case("scratched words", command(*words), files=FILES)


@st.composite
def dangers(draw: st.DrawFn) -> Case:
    """Draw a node that runs or loads code, at any key."""
    loads = draw(st.booleans())
    node = draw(loading_nodes() if loads else dangerous_nodes())
    place = draw(st.sampled_from(("+model.model.evil", "+user.evil") if loads else PLACES))
    name = node["_target_"]
    return Case("a dangerous node", command(f"{place}={written(node)}"), REFUSE, (name, "_target_"), FILES)


def cases() -> SearchStrategy[Case]:
    """Return the strategy of all command lines."""
    return st.one_of(
        known_lines(),
        right_values(),
        wrong_values(),
        odd_values(),
        misspelt_keys(),
        misspelt_choices(),
        scratched_words(),
        dangers(),
    )


def _plain(line: tuple[str, ...]) -> bool:
    return not any(word.startswith(("-", "~", "hydra")) for word in line)


@cache
def _keys() -> tuple[str, ...]:
    """Return every key of the config that a run has by default."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("train"), resolve=False)
    # Many loader processes or ranks would test the machine.
    skipped = ("paths.", "data.workers", "trainer.devices", "trainer.num_nodes", "sweep", "plan_only")
    return tuple(key for key in _flat(config, "") if not key.startswith(skipped))


def _flat(config: Any, above: str) -> list[str]:
    keys = []
    for name, value in config.items():
        keys.append(f"{above}{name}")
        keys += _flat(value, f"{above}{name}.") if isinstance(value, dict) else []
    return keys
