"""Tiny Shakespeare: a million characters of plays, the whole text or one half."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradpolicy.checks import LARGEST_SIZE, check_whole
from gradpolicy.errors import PolicyError, unknown
from gradpolicy.tasks.files import FileDataModule, RemoteFile
from gradpolicy.tasks.splits import check_shares

FILES = (
    RemoteFile(
        "input.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
)
PARTS = {"all": (0.0, 1.0), "first": (0.0, 0.5), "second": (0.5, 1.0)}


class Windows(Dataset[tuple[Tensor, ...]]):
    """Sequences of a text, each with the sequence shifted by one token.

    Args:
        tokens: The tokens, int64, shape (length,).
        context: The length of a sequence.
        stride: The distance between the starts of two sequences.
    """

    def __init__(self, tokens: Tensor, context: int, stride: int) -> None:
        self.tokens = tokens
        self.stride = stride
        self.offsets = torch.arange(context + 1)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return max(0, (len(self.tokens) - len(self.offsets)) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return a sequence, and the one shifted by one token."""
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the sequences of a batch, each of shape (batch, context)."""
        starts = torch.as_tensor(indices) * self.stride
        stretches = self.tokens[starts[:, None] + self.offsets]
        return stretches[:, :-1], stretches[:, 1:]


class TinyShakespeareDataModule(FileDataModule):
    """1,115,394 characters, 65 different ones; the end of the text is for validation and test.

    A batch is ``(characters, next characters)``, both int64 of shape (batch, context). The 65 characters have
    the same numbers for each part of the text, so that a model of one part can be fine-tuned on another.

    Source: A. Karpathy, char-rnn, 2015; MIT licence, the text itself is in the public domain.

    Args:
        data_dir: The directory of ``input.txt``.
        batch_size: Sequences per batch, on each process.
        context: Length of a sequence.
        stride: The distance between the starts of two training sequences; default: the context.
        part: ``"all"`` of the text, its ``"first"`` or its ``"second"`` half.
        validation_share: Share of that part for validation, before the test's.
        test_share: Share of that part for the test, at its end.
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
        stride: int | None = None,
        part: str = "all",
        validation_share: float = 0.1,
        test_share: float = 0.1,
        seed: int = 0,
        workers: int = 0,
        download: bool = False,
    ) -> None:
        if part not in PARTS:
            raise unknown("part", part, PARTS, key="data.part")
        check_shares(validation_share=validation_share, test_share=test_share)
        check_whole("data.context", context, least=1, most=LARGEST_SIZE)
        stride = context if stride is None else stride
        check_whole("data.stride", stride, least=1, most=LARGEST_SIZE)
        super().__init__(FILES, data_dir, batch_size, seed, workers, download)
        self.context = context
        self.stride = stride
        self.part = part
        self.validation_share = validation_share
        self.test_share = test_share
        self.characters = ""

    def setup(self, stage: str | None = None) -> None:
        """Read the text, encode its characters and split it into three parts."""
        if self.train_set is not None:
            return
        text = (self.data_dir / self.files[0].name).read_text(encoding="utf-8")
        self.characters = "".join(sorted(set(text)))
        begin, end = (round(share * len(text)) for share in PARTS[self.part])
        tokens = self.encode(text[begin:end])
        test = len(tokens) - round(self.test_share * len(tokens))
        validation = test - round(self.validation_share * len(tokens))
        self.train_set = Windows(tokens[:validation], self.context, self.stride)
        self.validation_set = Windows(tokens[validation:test], self.context, self.context)
        self.test_set = Windows(tokens[test:], self.context, self.context)
        for name, windows in {"validation": self.validation_set, "test": self.test_set}.items():
            if len(windows) == 0:
                raise PolicyError(f"data.context: {self.context} is longer than the {name} text")

    def encode(self, text: str) -> Tensor:
        """Return the numbers of characters, int64 of shape (length,)."""
        number = {character: index for index, character in enumerate(self.characters)}
        return torch.tensor([number[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        """Return the characters of numbers."""
        return "".join(self.characters[index] for index in tokens.tolist())
