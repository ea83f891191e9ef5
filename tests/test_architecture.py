"""The house is as docs/architecture.md draws it: which room imports which, and where the two walks lead."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import gradpolicy as gp
from gradpolicy.flow.bound_rule import BoundRule, RuleState
from gradpolicy.flow.operation_rule import OperationRule
from gradpolicy.launch.app import main
from gradpolicy.optim.kernels import select
from gradpolicy.tensors.seeded_mask import RandomMask

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gradpolicy"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    # The project that `gradpolicy init` writes, and the configs, are data.
    if not {"starter", "conf"} & set(path.relative_to(PACKAGE).parts)
}
FILES = {str(path): path.relative_to(PACKAGE).as_posix() for path in MODULES.values()}

# ---- imports


@cache
def imports_of(module: str) -> frozenset[str]:
    """The package's modules that a module imports: anywhere in it, and for the type checker too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else str(node.module))
    return frozenset(found & MODULES.keys()) - {module}


def rooms() -> dict[str, str]:
    """The room of each folder and of each file on top of the package, as the picture names them."""
    drawn = re.findall(r"^    (\w+)\[([^\]]+)\]$", PAGE, flags=re.MULTILINE)
    return {name.strip(): room for room, label in drawn for name in label.split("·")}


def arrows() -> dict[str, set[str]]:
    """What each room may import, by the picture: all that arrows lead to."""
    drawn = re.findall(r"^    (\w+) --> ([\w &]+)$", PAGE, flags=re.MULTILINE)
    direct = {room: set(targets.split(" & ")) for room, targets in drawn}
    found: dict[str, set[str]] = {}
    for room in TopologicalSorter(direct).static_order():
        onward = direct.get(room, set())
        found[room] = onward.union(*(found[target] for target in onward))
    return found


def room_of(module: str) -> str:
    return rooms()[module.split(".")[1]]


INSIDE = [module for module in MODULES if module != "gradpolicy"]


def test_the_picture_shows_every_room_and_no_other() -> None:
    assert set(rooms()) == {module.split(".")[1] for module in INSIDE}
    assert set(rooms().values()) == set(arrows())


SHARED_NAMES = {
    "base.py": "what the files of its folder have in common",
    "binary.py": "rules, and the task that trains with them",
    "sampling.py": "rules for draws, and how draws are found",
    "spiking.py": "rules, and the task that trains with them",
}


def test_no_two_files_share_a_name_without_reason() -> None:
    names = Counter(path.name for path in MODULES.values())
    assert {name for name, count in names.items() if count > 1} - {"__init__.py"} == SHARED_NAMES.keys()


def test_no_module_imports_in_a_circle() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter({module: imports_of(module) for module in INSIDE}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


@pytest.mark.parametrize("module", INSIDE)
def test_a_module_imports_only_rooms_that_arrows_lead_to(module: str) -> None:
    own = room_of(module)
    # Names are loaded from the package's top at their first use, which a module inside has no need of.
    assert "gradpolicy" not in imports_of(module)
    upwards = {other for other in imports_of(module) if room_of(other) not in {own, *arrows()[own]}}
    assert not upwards


def test_lightning_and_hydra_are_known_to_few_rooms() -> None:
    known: dict[str, set[str]] = {"lightning": set(), "hydra": set(), "accelerate": set()}
    for module in INSIDE:
        for line in MODULES[module].read_text().splitlines():
            found = re.match(r"\s*(?:from|import) (lightning|hydra|accelerate)\b", line)
            if found:
                known[found[1]].add(room_of(module))
    assert known == {
        "lightning": {"lightning", "tasks", "insight", "launch"},
        "hydra": {"launch", "commands"},
        "accelerate": {"integrations"},
    }


def test_the_callback_for_transformers_needs_neither_lightning_nor_hydra() -> None:
    forbidden = {"lightning", "tasks", "insight", "launch", "commands"}
    assert forbidden.isdisjoint(arrows()["integrations"])


# ---- the two walks


def walk_of(heading: str) -> list[str]:
    """The files that a section of the page lists as the steps of its walk."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([^`]+)` \|", section, flags=re.MULTILINE)


def aside_of(heading: str) -> set[str]:
    """The files that a section names in the line that begins with "Asked on the way"."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    (paragraph,) = re.findall(
        r"^Asked on the way: (.*?)\n\n", section + "\n\n", flags=re.MULTILINE | re.DOTALL
    )
    return set(re.findall(r"`([^`]+\.py)`", paragraph))


@contextmanager
def profiled(see: Callable[[str, FrameType, str, Any], None]) -> Iterator[None]:
    """Shows every call and return of a function of the package, with its file."""
    former = sys.getprofile()

    def profile(frame: FrameType, event: str, value: Any) -> None:
        file = FILES.get(frame.f_code.co_filename)
        if file is not None and event in ("call", "return") and frame.f_code.co_name != "<module>":
            see(file, frame, event, value)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(former)


def files_below(frame: FrameType | None) -> set[str]:
    """The package's files that have a function running."""
    found = set()
    while frame is not None:
        found |= {FILES[file] for file in [frame.f_code.co_filename] if file in FILES}
        frame = frame.f_back
    return found


def passes(frame: FrameType, event: str, value: Any, carries: Callable[[Any], bool]) -> bool:
    """Whether a function is given what is looked for, or returns it."""
    if event == "return":
        return carries(value)
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    names = [name for name in code.co_varnames[:count] if name not in ("self", "cls")]
    return any(carries(frame.f_locals.get(name)) for name in names)


def holds(value: Any, kinds: Callable[[Any], bool]) -> bool:
    """Whether a value is of a kind, or a plain container of such values, or of containers of them."""
    if kinds(value):
        return True
    if type(value) is dict:
        value = list(value.values())
    return type(value) in (list, tuple) and any(holds(item, kinds) for item in value[:50])


def is_mask(value: Any) -> bool:
    """A freeze policy, its source, a mask, or what the optimizer makes of one: flags and signed ages."""
    if isinstance(value, torch.Tensor):
        return value.dtype in (torch.bool, torch.int16) and value.dim() > 0
    return isinstance(value, gp.Freeze | gp.masks.MaskSource | RandomMask)


QUICK = [
    *("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"),
    *("trainer.accelerator=cpu", "test=false", "logger=csv", "callbacks=model_checkpoint"),
    *("extras.plan=false", "policy=random_freeze"),
    # It looks on, and would ask for masks of its own.
    "audit=off",
]
KERNELS = type(select(torch.device("cpu"), torch.float32, rule_kernel="adam"))
KERNELS_FILE = FILES[str(Path(str(sys.modules[KERNELS.__module__].__file__)))]
NATIVE_FILE = "optim/kernels/native/__init__.py"
MASK_STAGES = {
    ("launch/compose.py", "compose_job"),
    ("launch/config.py", "check_config"),
    ("policies.py", "Freeze.__init__"),
    ("masks/random.py", "Random.masks"),
    ("tensors/seeded_mask.py", "RandomMask.materialize"),
    (KERNELS_FILE, f"{KERNELS.__name__}.turn"),
    (KERNELS_FILE, f"{KERNELS.__name__}.update"),
    ("optim/checkpoint.py", "record_of"),
}


def test_a_mask_goes_from_yaml_to_kernel_and_checkpoint_through_the_files_of_the_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    walked, aside, stages = set(), set(), set()

    def see(file: str, frame: FrameType, event: str, value: Any) -> None:
        stage = file, frame.f_code.co_qualname
        if event == "call" and stage in MASK_STAGES:
            stages.add(stage)
            walked.update(files_below(frame))
        if file not in aside and passes(frame, event, value, lambda value: holds(value, is_mask)):
            aside.add(file)

    with profiled(see):
        assert main(ROOT / "conf", [f"paths.log_dir={tmp_path}", *QUICK]) == 0
    assert stages == MASK_STAGES
    # Without a C compiler torch does it.
    aside -= {"optim/kernels/reference.py", *walked}
    walked = {NATIVE_FILE if file == KERNELS_FILE else file for file in walked}
    listed = walk_of("A mask's walk")
    assert walked == set(listed)
    assert len(listed) == len(set(listed)) <= 20
    assert aside == aside_of("A mask's walk")


def is_rule(value: Any) -> bool:
    return isinstance(value, gp.Rule | RuleState | BoundRule | OperationRule)


def test_a_gradient_goes_through_an_override_by_the_files_of_the_page() -> None:
    passed: set[str] = set()
    looked_for: Callable[[Any], bool] = is_rule

    def see(file: str, frame: FrameType, event: str, value: Any) -> None:
        if passes(frame, event, value, lambda value: holds(value, looked_for)):
            passed.add(file)

    x = torch.tensor([-2.0, 0.5], requires_grad=True)
    # A rule that filters the incoming gradient takes another way than one that computes its own.
    for rule, expected in (("guided_relu", [0.0, 1.0]), ("hardtanh", [0.0, 1.0])):
        looked_for = is_rule
        with profiled(see), gp.gradient_override({"relu": rule}):
            loss = torch.relu(x).sum()
        looked_for = lambda value: isinstance(value, Tensor)  # noqa: E731
        x.grad = None
        with profiled(see):
            loss.backward()
        assert x.grad is not None
        assert x.grad.tolist() == expected
    listed = walk_of("A gradient's walk")
    assert passed == set(listed)
    assert len(listed) == len(set(listed)) <= 10
