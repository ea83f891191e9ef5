"""The how-to pages and the README: their snippets run, their links lead somewhere."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hydra.utils import instantiate

import gradpolicy as gp
from gradpolicy.app.config import Source, check_config, fixed_overrides, sweep_values
from gradpolicy.policies import Policy
from tests.docs.markdown import DOCS, ROOT, all_blocks, blocks, pictures, write_modules
from tests.docs.plans import planned

PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted(DOCS.glob("*.md"))]
# Their snippets are tested in test_cookbook.py.
COOKBOOK = sorted((DOCS / "cookbook").glob("*.md"))
ROWS = re.findall(
    r"^\| (`.+`) \| .+ \| \[\w+\]\(([^)#]+)", (ROOT / "AGENTS.md").read_text(), flags=re.MULTILINE
)
MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
# A tutorial trains five times.
SLOW = {"tutorial": [pytest.mark.slow]}
each_page = pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=SLOW.get(page.stem, [])) for page in PAGES]
)


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Write the modules that the pages let a person write: my_rules and my_masks."""
    write_modules([DOCS / "write-a-rule.md", DOCS / "write-a-mask-source.md"], tmp_path, monkeypatch)


@pytest.mark.filterwarnings("error::UserWarning")
@each_page
def test_the_python_of_a_page_runs(page, own_modules, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.randn(100, requires_grad=True)
    names = {"torch": torch, "gp": gp, "np": np, "x": x, "a": x, "b": x, "__name__": "page"}
    python = blocks(page, "python")
    if page.stem == "write-a-rule":
        # The first block is the module my_rules, which is imported.
        python = python[1:]
    for block in python:
        exec(compile(block, page.name, "exec"), names)
    assert names["gp"] is gp


def test_the_help_by_symptom_shows_what_its_python_prints():
    names, printed, compared = {}, "", 0
    for block in all_blocks(DOCS / "troubleshooting.md"):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, "troubleshooting", "exec"), names)
            printed = output.getvalue()
        elif block.language == "text" and printed:
            assert printed == block.text
            printed, compared = "", compared + 1
    assert compared == 5


@pytest.mark.slow
def test_the_tutorial_shows_the_table_that_its_plan_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "tutorial.md"
    names = {"__name__": "page"}
    for block in blocks(page, "python")[:3]:
        capsys.readouterr()
        exec(compile(block, page.name, "exec"), names)
    shown = blocks(page, "text")[0].splitlines()
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()][: len(shown)] == shown


def test_the_first_page_has_ten_lines_of_code_and_the_pictures_of_the_cookbook():
    (code,) = blocks(DOCS / "index.md", "python")
    assert len([line for line in code.splitlines() if line]) == 10
    assert set((DOCS / "cookbook/pictures").glob("*.png")) <= set(pictures(DOCS / "index.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=["readme", "index"])
def test_the_first_page_begins_with_three_captioned_pictures(page):
    text = page.read_text()
    captioned = re.findall(r"^!\[[^]]+\]\(([^)]+\.png)\)\n\n\*[A-Z][^*]+\*$", text, flags=re.MULTILINE)
    names = [Path(name).stem for name in captioned]
    assert names == ["what_trains", "loss_against_memory", "presets"]
    begins = {
        path: path.read_text().partition("\n## ")[0] for path in (ROOT / "README.md", DOCS / "index.md")
    }
    assert begins[ROOT / "README.md"].replace("](docs/", "](") == begins[DOCS / "index.md"]


# Tables and messages as they are printed, which other tests compare: they cannot be narrower.
PRINTED = [ROOT / "README.md", DOCS / "troubleshooting.md"]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_at_most_88_characters_wide(page):
    text = page.read_text()
    for block in re.finditer(r"^ *```([^\n]*)\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE):
        if block[1] != "text" or page not in PRINTED:
            assert [line for line in block[2].splitlines() if len(line) > 88] == []


@each_page
def test_the_yaml_of_a_page_makes_policies(page, own_modules):
    nodes = [
        node
        for block in blocks(page, "yaml")
        for node in yaml.safe_load(block).values()
        if isinstance(node, dict) and str(node.get("_target_", "")).startswith("gradpolicy.")
    ]
    assert all(isinstance(instantiate(node), Policy) for node in nodes)
    assert nodes or page.stem not in ("README", "first-policy", "write-a-rule", "write-a-mask-source")


COMMANDS = [
    (page, command)
    for page in [*PAGES, *COOKBOOK, *sorted((ROOT / "conf" / "experiment").glob("*.yaml"))]
    for command in dict.fromkeys(re.findall(r"\bpython train\.py ([^`\n]+)", page.read_text()))
    if "--" not in command
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """The configs, with the policies that the pages let a person write."""
    folder = tmp_path_factory.mktemp("configs") / "conf"
    shutil.copytree(ROOT / "conf", folder)
    for page in PAGES:
        for block in blocks(page, "yaml"):
            if block.startswith("# conf/policy/"):
                (folder / "policy" / f"{next(iter(yaml.safe_load(block)))}.yaml").write_text(block)
    return Source(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_a_command_of_a_page_or_config_is_understood(configs, page, command):
    words = [word for word in shlex.split(command, comments=True) if word != "-m"]
    with configs.open():
        job = configs.compose(fixed_overrides(words))
        check_config(job)
        for override in sweep_values(job, words):
            check_config(configs.compose([*fixed_overrides(words), override]))
    assert "policy" in job


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_links_of_every_page_lead_somewhere():
    missing = []
    for page in MARKDOWN:
        links = [link for link in re.findall(r"\]\(([^)\s]+)", without_code(page)) if "://" not in link]
        for link in links:
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert missing == []


@pytest.mark.parametrize(("names", "page"), ROWS)
def test_a_row_for_assistants_leads_to_the_page_of_its_names(names, page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`([\w.]+)`", names):
        assert name.rpartition(".")[2] in text


def test_what_is_new_has_a_row_for_assistants():
    names = " ".join(names for names, _ in ROWS)
    for name in ("gp.Train", "presets.FrozenAttention", "presets.FrozenNorms", "delta.patch", "apply_patch"):
        assert f"{name}`" in names
    for name in ("save_patch", "to_vllm", "to_sglang", "master_weights", "step_in_backward"):
        assert f"`{name}`" in names


def chosen_policies():
    """The words about policies of every command that the pages, the help and the Makefile show."""
    files = [
        *PAGES,
        *DOCS.glob("*/*.md"),
        ROOT / "conf" / "hydra" / "default.yaml",
        ROOT / "Makefile",
    ]
    found = set()
    for file in files:
        text = file.read_text()
        lines = re.findall(
            r"(?:\bpython train\.py|\$\{program:\}) ([^`\n]+)|make train \[?ARGS=\"([^\"]+)\"", text
        )
        for command in ("".join(line) for line in lines):
            words = re.split(r"\s{2,}|\s#", command)[0].replace('"', "").split()
            # A grid of choices is made of such as are shown by themselves.
            single = not any(re.search(r",(?![^\[]*\])", word) for word in words)
            if single and "experiment=" not in command and "ckpt_path" not in command:
                found.add(tuple(word for word in words if word.lstrip("+~").startswith("policy")))
    return sorted(found)


@pytest.mark.slow
def test_the_readme_shows_the_plan_that_is_printed(configs):
    (command,) = re.findall(r'python train\.py "(.+)" plan_only=true', (ROOT / "README.md").read_text())
    printed = re.sub(r"[\u2500-\u257f]", " ", str(planned(configs, [command])))
    assert blocks(ROOT / "README.md", "text")[0].split() == printed.split()


@pytest.mark.mostly_slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("words", chosen_policies(), ids=" ".join)
def test_what_the_pages_let_a_person_try_first_trains_what_its_policies_are_on(words, configs):
    warnings = planned(configs, list(words)).warnings
    # A policy that freezes a part for a while says that dropout goes on there.
    assert [line for line in warnings if "not dropout" not in line] == []


def test_the_pages_let_a_person_choose_policies():
    assert ("policy=[stop,straight_through,my_freeze]",) in chosen_policies()
