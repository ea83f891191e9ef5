"""Small mutations of words and values, each a function of a ``random.Random``."""

import random
from collections.abc import Iterable
from typing import Any

from gradpolicy.launch.processes import quoted

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# What means something to Hydra, YAML, globs, paths or terminals, and what is no ASCII.
SIGNS = [
    *"{}[]():,=~+@$'\"\\ \t#%&*!|/.;^<>?-_019eE",
    "é",
    "ß",
    "日",
    "🙂",
    "\u202e",
    "\x1b",
    "\x7f",
    "\udcff",
]

# Values as they are written on a command line, each of some use to somebody who breaks programs.
ODD = (
    *("null", "true", "-1", "0", "1", "3", "2147483648", "9223372036854775808", "1" + 60 * "0"),
    *("1e308", "-1e308", "1e-320", "nan", "inf", "-inf", "0.5", "1e400"),
    *(
        "''",
        "' '",
        "abc",
        "a.b.c",
        "'*'",
        "'!*'",
        "a/b",
        "'.'",
        "a" * 5000,
        "日本",
        "'🙂'",
        "'\udcff'",
    ),
    *("[]", "[1]", "[a,b]", "[[[1]]]", "[null]", "{}", "{a: 1}", "{a: {b: [1]}}", "{1: 2}"),
    *("{_target_: gradpolicy.Stop}", "{_target_: nowhere.Nothing}", "{_args_: [1]}", "'${seed}'", "'%s'"),
    *("'{'", "\"a 'b'\"", "'a=b'", "'[1'", "'\\'", "'a: b'", "'!!python/none'", "[" * 60 + "]" * 60),
)
# Values for files, where there is no grammar of Hydra's.
GARBAGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31, 2**63, 10**60, 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *(
        "",
        " ",
        "abc",
        "a.b.c",
        "*",
        "!*",
        "!",
        "[",
        "..",
        "a" * 5000,
        "日本",
        "🙂",
        "${seed}",
        "${",
        "${nowhere}",
    ),
    *([], [1], ["a", "b"], [[[[1]]]], [None], {}, {"a": 1}, {"a": {"b": [1]}}, {1: 2}, {"": ""}),
    *({"_target_": "gradpolicy.Stop"}, {"_target_": "nowhere.Nothing"}, {"_target_": 3}, {"_args_": [1]}),
)


def misspelt(draw: random.Random, word: str, known: Iterable[str]) -> str:
    """A word with one small mistake that is not one of the known words."""
    known = {*known, word}
    while True:
        place = draw.randrange(len(word))
        letter = draw.choice(LETTERS)
        wrong = draw.choice(
            (
                word[:place] + word[place + 1 :],
                word[:place] + letter + word[place:],
                word[:place] + letter + word[place + 1 :],
                word[:place] + word[place : place + 2][::-1] + word[place + 2 :],
            )
        )
        if wrong and wrong not in known and not wrong.startswith("_"):
            return wrong


def scratched(draw: random.Random, text: str) -> str:
    """A text with one to three characters taken out, put in, replaced, or doubled."""
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(text) + 1)
        sign = draw.choice(SIGNS)
        text = draw.choice(
            (
                text[:place] + text[place + 1 :],
                text[:place] + sign + text[place:],
                text[:place] + sign + text[place + 1 :],
                text[:place] + text[max(place - 3, 0) : place] + text[place:],
            )
        )
    return text


def written(value: Any) -> str:
    """A value as Hydra's grammar reads it on a command line; texts are quoted.

    Example:
        >>> written({"ops": ["round"], "every": 2, "mode": None})
        "{ops: ['round'], every: 2, mode: null}"
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str):
        return quoted(value)
    return "null" if value is None else str(value).lower()
