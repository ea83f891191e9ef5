"""The pages on loops and trainers of others: each runs as it stands and trains what the plain loop does."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.nn.functional import cross_entropy

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from tests.docs.markdown import DOCS


def block(place: str, language: str) -> str:
    """Return the first block of a page, or of one of its sections."""
    page, _, section = place.partition("#")
    text = (
        (DOCS / "integrations" / f"{page}.md").read_text().partition(f"\n## {section}")[2 if section else 0]
    )
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0]


def run_page(page: str, name: str = "page") -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    exec(compile(block(page, "python"), page, "exec"), names)
    return names


def by_hand(steps: int, batches: Callable[[int], list[slice]], every: int) -> nn.Module:
    """The loop of the pages with the clip and the masking of gradients written out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    inputs = torch.randn(64, 4)
    labels = (inputs.sum(dim=1) > 0).long()
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), frozen_state="zero")
    source = gp.masks.Random(0.5, every=every)
    frozen = {f"0.{name}": parameter for name, parameter in model[0].named_parameters()}
    freezer = Freezer(model, [optimizer], {"half": gp.Freeze(source, params="0.*", frozen_state="zero")})
    for step in range(steps):
        freezer.begin_step(step)
        before = {name: parameter.detach().clone() for name, parameter in frozen.items()}
        masks = {name: optimizer.get_mask(parameter).clone() for name, parameter in frozen.items()}
        chosen = batches(step)
        for part in chosen:
            hidden = model[1](model[0](inputs[part]))
            # Clip(norm=1) at the input of the last layer.
            hidden.register_hook(lambda gradient: gradient * min(1.0, 1.0 / gradient.norm().item()))
            (cross_entropy(model[2](hidden), labels[part]) / len(chosen)).backward()
        for name, parameter in frozen.items():
            parameter.grad *= masks[name]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in frozen.items():
            assert torch.equal(parameter[~masks[name]], before[name][~masks[name]])
    return model


def assert_same(first: nn.Module, second: nn.Module) -> None:
    torch.testing.assert_close(first.state_dict(), second.state_dict())


def test_the_plain_loop() -> None:
    model = run_page("loops#Plain PyTorch")["model"]
    assert_same(model, by_hand(20, lambda step: [slice(None)], every=5))


def test_fabric_trains_the_bits_of_the_plain_loop() -> None:
    fabric, plain = (run_page(page)["model"] for page in ("loops#Fabric", "loops#Plain PyTorch"))
    for name, value in plain.state_dict().items():
        assert torch.equal(fabric.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("page", "loop", "steps", "save", "load"),
    [
        (
            "loops#Plain PyTorch",
            "for step in range(20):",
            (7, 13),
            'torch.save([model.state_dict(), optimizer.state_dict()], "saved")',
            'a, b = torch.load("saved"); model.load_state_dict(a); optimizer.load_state_dict(b)',
        ),
        (
            "loops#Fabric",
            "for step in range(20):",
            (7, 13),
            'fabric.save("saved", {"model": fabric_model, "optimizer": optimizer})',
            'fabric.load("saved", {"model": fabric_model, "optimizer": optimizer})',
        ),
        (
            "loops#accelerate",
            "for epoch in range(3):",
            (1, 2),
            'accelerator.save_state("saved")',
            'accelerator.load_state("saved")',
        ),
    ],
)
def test_a_loop_goes_on_exactly_from_what_its_page_has_one_save(
    page: str, loop: str, steps: tuple[int, int], save: str, load: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = run_page(page)["model"]
    first, second = (re.sub(r"range\(\d+\)", f"range({count})", loop) for count in steps)
    program = block(page, "python")
    assert loop in program
    exec(compile(program.replace(loop, first) + f"    {save}\n", page, "exec"), {})
    names: dict[str, Any] = {}
    exec(compile(program.replace(loop, f"{load}\n    {second}"), page, "exec"), names)
    for name, value in whole.state_dict().items():
        assert torch.equal(names["model"].state_dict()[name], value), name


@pytest.mark.supports("entries", "flow", "accumulation", "clipping", loop="huggingface")
def test_accelerate_follows_accumulation() -> None:
    names = run_page("loops#accelerate")
    assert names["optimizer"].optimizer.effective_steps == 6
    parts = [slice(start, start + 16) for start in range(0, 64, 16)]
    assert_same(names["model"], by_hand(6, lambda step: parts[2 * step % 4 :][:2], every=1))


def run_on_two_processes(program: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Runs a program under torchrun; gives the weights with which each rank ends."""
    ending = "import os\ntorch.save(model.state_dict(), f\"rank{os.environ['RANK']}.pt\")\n"
    (folder / "program.py").write_text(program + ending)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, "program.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.supports("entries", "flow", "clipping", loop="plain", processes="ddp")
@pytest.mark.slow
def test_fabric_on_two_processes(tmp_path: Path) -> None:
    program = block("loops#Fabric", "python").replace("devices=1", 'strategy="ddp", devices=2')
    # Each rank takes every second point.
    program = program.replace("(inputs), labels)", "(inputs[part]), labels[part])")
    program = program.replace("for step in", "part = slice(fabric.global_rank, None, 2)\n    for step in")
    first, second = run_on_two_processes(program, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    halves = [slice(0, None, 2), slice(1, None, 2)]
    torch.testing.assert_close(first, by_hand(20, lambda step: halves, every=5).state_dict())


@pytest.mark.supports("entries", "flow", "accumulation", "clipping", loop="huggingface", processes="ddp")
@pytest.mark.slow
def test_accelerate_on_two_processes(tmp_path: Path) -> None:
    first, second = run_on_two_processes(block("loops#accelerate", "python"), tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Each rank takes two of the four batches of an epoch, for one step.
    parts = [slice(start, start + 16) for start in range(0, 64, 16)]
    torch.testing.assert_close(first, by_hand(3, lambda step: parts, every=1).state_dict())


def test_lightning_cli_trains_the_bits_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fit.yaml").write_text(block("hydra#With LightningCLI", "yaml"))
    names = run_page("hydra#With LightningCLI")
    # What the page's last line does, with the command line beneath it.
    monkeypatch.setattr(sys, "argv", ["main.py"])
    arguments = ["fit", "--config", "fit.yaml"]
    cli = LightningCLI(names["Net"], names["Data"], args=arguments, seed_everything_default=0)
    (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, gp.GradientPolicies)]
    assert repr(callback.policies["trunk"].when) == repr(gp.When(start=2))

    # The config that it saves with the run says the same.
    saved = yaml.safe_load(Path("config.yaml").read_text())["trainer"]["callbacks"][0]["init_args"][
        "policies"
    ]
    assert saved["rounding"]["init_args"]["ops"] == ["round"]
    assert saved["trunk"]["init_args"]["when"]["start"] == 2

    seed_everything(0, workers=True, verbose=False)
    model = names["Net"]()
    settings = yaml.safe_load(block("hydra#With LightningCLI", "yaml"))["trainer"]
    trunk = gp.Freeze(gp.masks.Random(0.5, every=5), params="trunk.*", frozen_state="zero", when={"start": 2})
    policies = {"rounding": gp.StraightThrough(ops=["round"]), "trunk": trunk}
    settings["callbacks"] = [gp.GradientPolicies(policies, seed=0)]
    Trainer(**settings, enable_checkpointing=False).fit(model, names["Data"]())
    for name, value in model.state_dict().items():
        assert torch.equal(cli.model.state_dict()[name], value), name


@pytest.mark.slow
def test_a_hydra_project_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(block("hydra", "yaml"))
    (tmp_path / "main.py").write_text(block("hydra", "python"))
    for choice in ("policy.random.mask.density=0.5", "policy=[rows]"):
        command = [sys.executable, "main.py", choice]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
