"""The arguments of a config node against the signature of what it names."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, Optional, Union

import pytest
from torch import Tensor

import gradpolicy as gp
from gradpolicy.launch.target_arguments import argument_names, check_arguments, check_value, misfits


@pytest.mark.parametrize(
    ("value", "annotation", "suits"),
    [
        (3, float, True),
        (True, int, False),
        ("abc", float, False),
        ("0.1", float, False),
        (0.1, float | Tensor, True),
        ("abc", float | Tensor, False),
        ([0.9, 0.99], tuple[float, float], True),
        ([0.9, "x"], tuple[float, float], False),
        (["a", "b"], str | Iterable[str], True),
        ("16-mixed", Literal["16-mixed", 32], True),
        (None, int | None, True),
        (None, int, False),
        ("x", Callable, False),
        ({"a": 1}, dict[str, int], True),
        (object(), Any, True),
    ],
)
def test_text_never_stands_for_a_number_but_a_list_may_for_a_tuple(
    value: object, annotation: object, suits: bool
) -> None:
    assert (misfits(value, annotation) == []) is suits


def test_a_policy_takes_the_arguments_of_its_bases_too() -> None:
    names, takes_any = argument_names(gp.Stop)
    assert {"mode", "modules", "ops", "params", "at", "when"} <= names.keys()
    assert not takes_any


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "torch.optim.AdamW", "lrr": 0.1}, r"^top\.lrr: .*did you mean 'lr'"),
        ({"_target_": "torch.optim.AdamW", "lr": "abc"}, r"^top\.lr: must be a valid number.*got 'abc'"),
        ({"_target_": "gradpolicy.Stop", "modles": "x"}, r"^top\.modles: .*modules"),
        ({"_target_": "gradpolicy.Scale", "modules": "x"}, r"^top\.factor: gradpolicy\.Scale needs a value"),
        ({"_target_": "torch.optim.AdamW"}, r"^top\._partial_: must be true: the model gives"),
        (
            {"_target_": "lightning.pytorch.loggers.WandbLogger", "mode": "on"},
            r"^top\.mode: must be 'online'",
        ),
        (
            {"below": [{"_target_": "gradpolicy.When", "stride": "x"}]},
            r"^top\.below\[0\]\.stride: must be a valid integer",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_key(node: dict, message: str) -> None:
    with pytest.raises(gp.PolicyError, match=message):
        check_arguments(node, key="top")


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1, "betas": [0.9, 0.99]},
        {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 2, "bias": False},
        {"_target_": "lightning.pytorch.loggers.WandbLogger", "mode": "offline", "notes": "first"},
        {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": ".", "anything": 1},
        {
            "_target_": "torchmetrics.MetricCollection",
            "_recursive_": False,
            "metrics": {"_target_": "torch.nn.Linear"},
        },
        {"_target_": "gradpolicy.Freeze", "mask": {"_target_": "gradpolicy.masks.Random", "density": 1}},
        {"_target_": "gradpolicy.Scale", "_args_": [0.1], "modules": "x"},
    ],
)
def test_what_a_target_takes_passes(node: dict) -> None:
    assert check_arguments(node, key="top") is None


# As older code writes it.
Either = Optional[Union[Literal["a", "b"], bool]]  # noqa: UP007, UP045


@pytest.mark.parametrize(
    ("annotation", "value", "words"),
    [
        (int | None, "x", "key: must be a valid integer, got 'x'"),
        (
            tuple[float, float],
            [0.9, "x"],
            "key[1]: must be a valid number, unable to parse string as a number, got 'x'",
        ),
        (tuple[float, float], [0.9], "key[1]: Field required, got [0.9]"),
        (float | Callable[[int], float], "x", "key: must be a valid number or callable, got 'x'"),
        (Either, 3, "key: must be 'a' or 'b' or a valid boolean, got 3"),
    ],
)
def test_what_is_wanted_is_said_in_words(annotation: Any, value: object, words: str) -> None:
    with pytest.raises(gp.PolicyError) as raised:
        check_value("key", annotation, value)
    assert str(raised.value) == words


def test_a_mapping_is_taken_for_a_config_that_pydantic_cannot_describe() -> None:
    clip = pytest.importorskip("transformers").CLIPConfig
    parameters, _ = argument_names(clip)
    assert misfits({"hidden_size": 32}, parameters["text_config"].annotation) == []
