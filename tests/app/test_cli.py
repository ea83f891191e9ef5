"""The command: its subcommands, and what it says where something is missing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest

import gradpolicy as gp
from gradpolicy.app import launch
from gradpolicy.app.cli import COMMANDS, STARTER, main, write_project
from tests.app.conftest import CONF


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `gradpolicy init` writes."""
    place = tmp_path_factory.mktemp("init") / "spirals_demo"
    write_project(place)
    return place


@pytest.fixture
def project(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(written, tmp_path / "spirals_demo"))


def test_a_closed_pipe_ends_it_without_a_traceback() -> None:
    command = [sys.executable, "-m", "gradpolicy", "--version"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 1


def test_without_a_subcommand_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock(return_value=0)
    monkeypatch.setattr(launch, "main", run)
    assert main(["policy=guided"]) == 0
    assert main([]) == 0
    assert main(["plan", "policy=guided"], CONF) == 0
    commands = (["policy=guided"], [], ["policy=guided", "plan_only=true"])
    assert run.call_args_list == [call(CONF, words) for words in commands]


def test_ctrl_c_in_a_subcommand_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gradpolicy.insight.report.write", Mock(side_effect=KeyboardInterrupt))
    (tmp_path / "config.yaml").touch()
    assert main(["report", str(tmp_path)]) == 130


def test_a_subcommand_that_does_not_exist(refusal) -> None:
    assert refusal("reprot") == "gradpolicy: unknown command 'reprot'; did you mean 'report'?"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradpolicy {gp.__version__}\n"


@pytest.mark.parametrize(
    ("line", "names"),
    [("gradpolicy re", "report resume"), ("python train.py pl", "plan"), ("gradpolicy a=1 re", "")],
)
def test_tab_completes_subcommands(line: str, names: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch, "main", Mock(return_value=0))
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == names.split()


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m gradpolicy report --help | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", f"exec 2>&1; {command}"], capture_output=True, text=True)
    assert ended.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_subcommand_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"gradpolicy {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [([], "hydra", "train"), (["report", "run"], "pandas", "train"), (["sweep"], "optuna", "sweeps")],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    words: list[str], missing: str, extra: str
) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None; from gradpolicy.app.cli import main; "
        f"sys.exit(main({words}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    hint = f"pip install 'gradpolicy[{extra}]'"
    expected = f"error: gradpolicy: needs {missing}, which is not installed: {hint}\n"
    assert (done.returncode, done.stderr) == (2, expected)


# ---- the project that `init` writes


def test_a_project_is_named_after_its_directory(project: Path) -> None:
    assert (project / "spirals_demo" / "spirals.py").is_file()
    assert len(list((project / "conf" / "policy").iterdir())) == 2
    written = [path for path in project.rglob("*") if path.is_file()]
    assert len(written) == sum(
        path.is_file() and "__pycache__" not in path.parts for path in STARTER.rglob("*")
    )
    assert not any("my_project" in path.read_text() for path in written)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "is not empty"),
        ("file", "is not empty"),
        ("2nd", "cannot be the name of a package"),
    ],
)
def test_a_directory_that_init_refuses(name, message, tmp_path, refusal) -> None:
    (tmp_path / "full" / "work").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    said = refusal("init", str(tmp_path / name))
    assert said.startswith("DIR: ")
    assert message in said
    assert (tmp_path / "file").read_text() == "mine"


ASK = ("--cfg", "job", "--package", "policy")


def test_a_project_chooses_from_its_own_configs_and_from_the_packages(project, capsys, refusal) -> None:
    assert main(["policy=[half_trunk,layerwise]", *ASK], project / "conf") == 0
    printed = capsys.readouterr().out
    assert "gradpolicy.masks.Random" in printed
    assert "gradpolicy.masks.Layerwise" in printed
    for wrong, nearest in (("half_trnk", "half_trunk"), ("layrwise", "layerwise")):
        said = refusal(f"policy=[{wrong}]", config_dir=project / "conf")
        assert f"did you mean '{nearest}'" in said


def test_a_group_that_the_defaults_list_lacks_is_named(project, refusal) -> None:
    config = project / "conf" / "train.yaml"
    config.write_text(config.read_text().replace("  - sweep: null\n", ""))
    said = refusal("-m", "sweep=grid", config_dir=project / "conf")
    assert said.startswith("sweep: Could not override 'sweep'. No match in the defaults list.")
    assert "+sweep=grid" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep=learning_rate"], "sweep.parameters.policy.half_trunk.mask.density: must be"),
        (["sweep=learning_rat"], "sweep=learning_rat: there is no such config; did you mean 'learning_rate'"),
        ([], "sweep: name one search space"),
    ],
)
def test_a_project_searches_its_own_spaces(project: Path, tmp_path: Path, refusal, words, said) -> None:
    space = project / "conf/sweep/learning_rate.yaml"
    space.write_text(space.read_text().replace("max: 1.0", "max: 0.0"))
    assert refusal(
        "sweep", *words, "--directory", str(tmp_path / "none"), config_dir=project / "conf"
    ).startswith(said)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_all_of_a_projects_readme_can_be_done(project: Path) -> None:
    text = (project / "README.md").read_text()
    commands = []
    for language, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language == "bash":
            commands += [line for line in block.splitlines() if line.startswith("python train.py")]
        else:
            first, _, content = block.partition("\n")
            (project / first.removeprefix("# ")).parent.mkdir(exist_ok=True, parents=True)
            (project / first.removeprefix("# ")).write_text(content)
    assert len(commands) >= 8
    for command in commands:
        program = command.replace("python", sys.executable, 1)
        done = subprocess.run(program, shell=True, capture_output=True, text=True, cwd=project, timeout=200)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_the_test_of_a_new_project_passes(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, timeout=500)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
