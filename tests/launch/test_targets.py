"""Which classes and functions a config may name."""

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.launch.targets import check_targets, locate_target, targets_of


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("torch.optim.AdamW", torch.optim.AdamW),
        ("torch.nn.Sequential", torch.nn.Sequential),
        ("torch.randn", torch.randn),
        ("torch.optim.lr_scheduler.CosineAnnealingLR", torch.optim.lr_scheduler.CosineAnnealingLR),
    ],
)
def test_what_lies_in_an_allowed_package_is_found(path: str, found: object) -> None:
    assert locate_target("key", path) is found


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "torchvision.models.resnet18",
        "torch.os.system",
        "torch.sys.exit",
        "torch.load",
        "torch.hub.load",
        "torch.jit.load",
        "torch.save",
        "torch.serialization.load",
        "torch._C._jit_set_profiling_mode",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils.collect_env.run",
        "torch.nn.Module.__init__.__globals__",
        "lightning.pytorch.LightningModule.load_from_checkpoint",
        "gradpolicy.launch.app.sys.exit",
    ],
)
def test_what_could_do_anything_is_refused(path: str) -> None:
    with pytest.raises(PolicyError, match="key"):
        locate_target("key", path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("torch.optim.AdmW", "did you mean 'Adam"),
        ("torch.optim.adamw.AdamX", "AdamW"),
        ("torch.nosuch.Thing", "has no 'nosuch'"),
        ("torch.nn", "is a module"),
        ("torch.float32", "is a dtype"),
        ("not a path", "dotted path"),
        (3, "dotted path"),
    ],
)
def test_what_does_not_exist_is_named_with_its_key(path: object, words: str) -> None:
    with pytest.raises(PolicyError, match=f"^key: .*{words}"):
        locate_target("key", path)


def test_every_target_is_found_with_its_key() -> None:
    config = {"a": {"_target_": "x", "b": [{"_target_": "y"}, {"c": {"_target_": "z"}}]}}
    assert list(targets_of(config)) == [
        ("a._target_", "x"),
        ("a.b[0]._target_", "y"),
        ("a.b[1].c._target_", "z"),
    ]


def test_a_package_is_allowed_by_its_whole_name_only() -> None:
    check_targets({"node": {"_target_": "fractions.Fraction"}}, allowed=["fractions"])
    with pytest.raises(PolicyError, match=r"fractions\.Fraction"):
        check_targets({"node": {"_target_": "fractions.Fraction"}}, allowed=["fraction"])
