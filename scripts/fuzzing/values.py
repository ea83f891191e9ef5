"""Hypothesis strategies of valid and unusual values and words."""

import string
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gradpolicy.launch.processes import quoted

# Characters with a meaning for Hydra, YAML, globs, paths or terminals, and some outside ASCII.
SIGNS = "{}[]():,=~+@$'\"\\ \t#%&*!|/.;^<>?-_019eEéß日🙂\u202e\x1b\x7f\udcff"
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats()
    | st.text(SIGNS + string.ascii_lowercase, max_size=8)
    | st.sampled_from(("a" * 5000, "a.b.c", "${seed}", "${", "${nowhere}", "*", "!*", "..", "???"))
)
NODES = st.sampled_from(("gradpolicy.Stop", "nowhere.Nothing", 3)).map(lambda name: {"_target_": name})
ODD: SearchStrategy[Any] = st.recursive(
    SCALARS | NODES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab_1"), inner, max_size=3),
    max_leaves=6,
)


def written(value: Any) -> str:
    """Return a value in Hydra's grammar for a command line; strings are quoted.

    Example:
        >>> written({"ops": ["round"], "stride": 2, "mode": None})
        "{ops: ['round'], stride: 2, mode: null}"
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, str):
        return quoted(value)
    return "null" if value is None else str(value).lower()


@st.composite
def misspelt(draw: st.DrawFn, word: str, known: Iterable[str]) -> str:
    """Draw a word with one small mistake that is not one of the known words."""
    place = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase))
    rest = word[place + 1 :]
    wrong = draw(
        st.sampled_from(
            (word[:place] + rest, word[:place] + letter + word[place:], word[:place] + letter + rest)
        )
    )
    return draw(st.just(wrong).filter(lambda wrong: wrong not in {*known, word, ""} and wrong[0] != "_"))


@st.composite
def scratched(draw: st.DrawFn, text: str) -> str:
    """Draw a text with one to three characters removed, inserted, or replaced."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(st.text(SIGNS, max_size=1)) + text[place + draw(st.integers(0, 1)) :]
    return text
