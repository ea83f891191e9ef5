"""The package as a stranger gets it: sdist and wheel, in an empty environment, away from the clone."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("gradpolicy", "conf", "pyproject.toml", "README.md", "LICENSE")
# What `import gradpolicy` must do without.
HEAVY = ("hydra", "lightning", "matplotlib", "omegaconf", "pandas", "sklearn", "wandb")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a program that sees nothing of the clone, and gives what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, made of a copy of the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "local")
            shutil.copytree(source, copy / part, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, copy)
    # The settings of one machine, which nobody else should get.
    (copy / "conf" / "local").mkdir()
    (copy / "conf" / "local" / "default.yaml").write_text("seed: 3\n")
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('.')", cwd=copy)
    (archive,) = copy.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made of the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    run(sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('.')", cwd=unpacked)
    (found,) = unpacked.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with nothing but the package and what it needs itself; its directory of programs."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", ".", cwd=folder)
    install(folder / "bin", str(wheel))
    return folder / "bin"


def install(programs: Path, *what: str) -> None:
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(programs / "python", *pip, "--constraint", ROOT / "constraints.txt", *what, cwd=programs)


def test_the_wheel_is_pure_python_and_holds_every_config(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.check_output(["git", "ls-files", "conf"], cwd=ROOT, text=True).split()
    assert {f"gradpolicy/{config}" for config in tracked} <= names
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "gradpolicy/app/starter/conf/train.yaml" in names
    assert not any("/local/" in name for name in names)


def test_the_wheel_passes_the_check_of_the_workflow(environment: Path, tmp_path: Path) -> None:
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    (check,) = re.findall(r"<<'END'\n(.*?)\n +END\n", workflow, flags=re.DOTALL)
    (tmp_path / "check.py").write_text(textwrap.dedent(check))
    run(environment / "python", "-W", "error:gradpolicy:UserWarning", "check.py", cwd=tmp_path)


def test_the_core_is_enough_for_a_loop_of_ones_own(environment: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "integrations" / "loops.md").read_text()
    loop, *_ = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "loop.py").write_text(loop)
    run(environment / "python", "loop.py", cwd=tmp_path)
    asked = f"from importlib.util import find_spec; print([name for name in {HEAVY} if find_spec(name)])"
    assert run(environment / "python", "-c", asked, cwd=tmp_path) == "[]\n"
    done = subprocess.run([environment / "gradpolicy"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.endswith("is not installed: pip install 'gradpolicy[train]'\n")


def test_a_stranger_gets_from_init_to_a_report(environment: Path, wheel: Path, tmp_path: Path) -> None:
    run(environment / "gradpolicy", "init", "first_project", cwd=tmp_path)
    install(environment, f"{wheel}[train]", "pytest")
    said = run(environment / "python", "-m", "pytest", "-q", cwd=tmp_path / "first_project")
    assert "1 passed" in said
    # The command away from any project: the configs come from the package.
    short = (
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
        "logger=csv",
        "policy=[stop,straight_through]",
    )
    run(environment / "gradpolicy", *short, cwd=tmp_path)
    (report,) = tmp_path.glob("outputs/train/runs/*/report.html")
    assert "straight_through" in report.read_text()
    assert "Guided" in run(environment / "python", "-m", "gradpolicy", "plan", "policy=guided", cwd=tmp_path)
    # Two processes: the command starts itself again.
    run(environment / "gradpolicy", *short, "trainer=ddp_sim", cwd=tmp_path)
