"""Models by name come with what they take; a package that is absent is named with its extra."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.images import ImageShape
from gradpolicy.tasks.named_models import load_named_model


class Network(nn.Linear):
    """Stands for a network of either package."""

    num_classes = 1000

    def __init__(self) -> None:
        super().__init__(2, 2)


def fake_timm() -> SimpleNamespace:
    config = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "input_size": (3, 16, 20)}
    info = SimpleNamespace(index_to_description=lambda index: f"thing {index}, something")
    data = SimpleNamespace(resolve_model_data_config=lambda network: config, ImageNetInfo=lambda: info)
    return SimpleNamespace(
        list_models=lambda: ["resnet18", "vit"], create_model=lambda name, pretrained: Network(), data=data
    )


def fake_torchvision() -> SimpleNamespace:
    preprocessing = SimpleNamespace(crop_size=[24], mean=(0.5,) * 3, std=(0.25,) * 3)
    weights = SimpleNamespace(transforms=lambda: preprocessing, meta={"categories": ["cat", "dog"]})

    def get_model(name: str, weights: object) -> nn.Module:
        if weights is not None:
            raise OSError("no network")
        return Network()

    models = SimpleNamespace(
        list_models=lambda module: ["resnet18", "resnet50"],
        get_model_weights=lambda name: SimpleNamespace(DEFAULT=weights),
        get_model=get_model,
    )
    return SimpleNamespace(models=models)


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", fake_timm())
    monkeypatch.setitem(sys.modules, "torchvision", fake_torchvision())


def test_a_timm_model_comes_with_its_shape_and_classes() -> None:
    found = load_named_model("timm:resnet18")
    assert found.shape == ImageShape(3, 16, 20)
    assert found.classes[2] == "thing 2"
    assert found.model.mean.flatten().tolist() == [0.5] * 3


def test_a_torchvision_model_comes_with_its_shape_and_classes() -> None:
    found = load_named_model("torchvision:resnet18", weights="none")
    assert found.shape == ImageShape(3, 24, 24)
    assert found.classes == ("cat", "dog")
    assert found.model.network is found.network


def test_weights_are_read_from_a_file(tmp_path: Path) -> None:
    trained = Network()
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    found = load_named_model("timm:vit", weights=str(tmp_path / "weights.pt"))
    assert torch.equal(found.network.weight, trained.weight)


def test_an_absent_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(PolicyError, match=r"needs timm.*pip install 'gradpolicy\[vision\]'"):
        load_named_model("timm:resnet18")


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("resnet18", None, "timm:NAME or torchvision:NAME needed"),
        ("timm:resnet19", None, "unknown timm model 'resnet19'; did you mean 'resnet18'"),
        ("torchvision:resnet51", None, "unknown torchvision model 'resnet51'; did you mean 'resnet50'"),
        ("torchvision:resnet18", None, "the weights of torchvision:resnet18 cannot be had: no network"),
        ("timm:vit", "nowhere.pt", "weights: nowhere.pt does not exist"),
    ],
)
def test_what_cannot_be_had_is_named(name: str, weights: str | None, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_named_model(name, weights)


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


def test_nothing_in_a_file_of_weights_is_run(tmp_path: Path) -> None:
    torch.save({"weight": Code(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(PolicyError, match=r"weights: .*evil\.pt is not read: .* holds \w+\.mkdir$"):
        load_named_model("timm:vit", weights=str(tmp_path / "evil.pt"))
    assert not (tmp_path / "ran").exists()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 3).state_dict(), tmp_path / "other.pt")
    with pytest.raises(PolicyError, match="does not fit the model"):
        load_named_model("timm:vit", weights=str(tmp_path / "other.pt"))
