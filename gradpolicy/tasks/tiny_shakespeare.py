"""Tiny Shakespeare: a million characters of plays, the full text or one half."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradpolicy.checks import LARGEST_SIZE, check_choice, check_integer
from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import DataModule, check_present, fetch

SITE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
FILES = {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}
PARTS = {"all": (0.0, 1.0), "first": (0.0, 0.5), "second": (0.5, 1.0)}


class Windows(Dataset[tuple[Tensor, ...]]):
    """Adjacent sequences of a text, each with the sequence shifted by one token.

    Args:
        tokens: The tokens, int64, shape (length,).
        context: The length of a sequence.
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        """Return the number of sequences."""
        return (len(self.tokens) - 1) // self.context

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the sequences of a batch, each of shape (batch, context)."""
        starts = torch.as_tensor(indices)[:, None] * self.context
        stretches = self.tokens[starts + torch.arange(self.context + 1)]
        return stretches[:, :-1], stretches[:, 1:]


class TinyShakespeareDataModule(DataModule):
    """1,115,394 characters, 65 different ones; a tenth each, at the end, is for validation and for the test.

    A batch is ``(characters, next characters)``, both int64 of shape (batch, context). The 65 characters have
    the same numbers for each part of the text, so that a model of one part can be fine-tuned on another.

    Source: A. Karpathy, char-rnn, 2015; MIT licence, the text itself is in the public domain.

    Args:
        data_dir: The directory of ``input.txt``.
        batch_size: Sequences per batch, on each process.
        context: Length of a sequence.
        part: ``"all"`` of the text, its ``"first"`` or its ``"second"`` half.
        seed: The seed of the order of the training sequences.
        workers: The number of loader processes; 0 loads in the training process.
        download: Download the file if it is missing.

    Raises:
        PolicyError: If the file is missing and `download` is false, it has the wrong checksum, or the
            settings leave no sequence.
    """

    def __init__(
        self,
        data_dir: str | Path,
        batch_size: int = 64,
        context: int = 128,
        part: str = "all",
        seed: int = 0,
        workers: int = 0,
        download: bool = False,
    ) -> None:
        super().__init__(batch_size, seed, workers)
        self.context = check_integer("data.context", context, least=1, most=LARGEST_SIZE)
        self.part = check_choice("data.part", part, PARTS)
        self.data_dir, self.download = check_present(Path(data_dir), FILES, download), download

    def prepare_data(self) -> None:
        """Check the file, or download it."""
        fetch(self.data_dir, SITE, FILES, self.download)

    def setup(self, stage: str | None = None) -> None:
        """Read the text, encode its characters and split it into three parts."""
        text = (self.data_dir / "input.txt").read_text(encoding="utf-8")
        number = {character: index for index, character in enumerate(sorted(set(text)))}
        begin, end = (round(share * len(text)) for share in PARTS[self.part])
        tokens = torch.tensor([number[character] for character in text[begin:end]])
        tenth = round(0.1 * len(tokens))
        parts = tokens.split((len(tokens) - 2 * tenth, tenth, tenth))
        self.train_set, self.validation_set, self.test_set = (Windows(part, self.context) for part in parts)
        if self.context >= tenth:
            raise PolicyError(f"data.context: {self.context} is longer than the validation text")
