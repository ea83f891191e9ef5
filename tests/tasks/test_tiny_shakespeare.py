"""The text is cut in three, numbered, and given in windows."""

import hashlib
from pathlib import Path

import pytest
import torch

from gradpolicy.errors import PolicyError
from gradpolicy.tasks import TinyShakespeareDataModule, data_sets

TEXT = "".join(chr(97 + index % 26) for index in range(1000)) + "".join(
    chr(65 + index % 26) for index in range(1000)
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "input.txt").write_text(TEXT)
    sha256 = hashlib.sha256(TEXT.encode()).hexdigest()
    monkeypatch.setattr(data_sets, "SHAKESPEARE_FILES", {"input.txt": sha256})
    return tmp_path


def made(directory: Path, **settings: object) -> TinyShakespeareDataModule:
    data = TinyShakespeareDataModule(directory, **{"batch_size": 4, "context": 10, **settings})
    data.prepare_data()
    data.setup()
    return data


def numbers(text: str) -> list[int]:
    return [sorted(set(TEXT)).index(character) for character in text]


def test_the_texts_follow_each_other_and_the_halves_share_their_numbering(directory: Path) -> None:
    data = made(directory)
    parts = [part.tokens for part in (data.train_set, data.validation_set, data.test_set)]
    assert [len(part) for part in parts] == [1600, 200, 200]
    assert torch.cat(parts).tolist() == numbers(TEXT)
    first, second = made(directory, part="first"), made(directory, part="second")
    assert first.train_set.tokens.tolist() == numbers(TEXT[:800])
    assert second.train_set.tokens.tolist() == numbers(TEXT[1000:1800])
    tokens, following = next(iter(first.train_dataloader()))
    assert tokens.shape == following.shape == (4, 10)
    assert torch.equal(tokens[:, 1:], following[:, :-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"part": "third"}, "data.part: unknown value 'third'"),
        ({"context": 0}, r"data\.context: expected an integer"),
        ({"context": 500}, "data.context: 500 is longer than the validation text"),
    ],
)
def test_wrong_settings_name_their_key(directory: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        made(directory, **settings)
