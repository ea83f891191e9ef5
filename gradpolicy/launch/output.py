"""Prints on streams that do not take UTF-8, such as ``PYTHONIOENCODING=ascii``."""

import codecs
import io
import sys
import unicodedata

PLAIN = "gradpolicy.plain"
# What has no decomposition into ASCII; a character for a character, so that tables keep their shape.
REPLACEMENTS = {
    "–": "-",
    "—": "-",
    "−": "-",
    "·": "*",
    "•": "*",
    "×": "x",
    "→": ">",
    "│": "|",
    "─": "-",
    "━": "-",
}


def replace_what_does_not_encode() -> None:
    """Has both output streams write plain characters in place of those that their encoding lacks.

    Without it the first dash or ellipsis in a table, a plan or an error would end the program.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_plain_character, error.object[error.start : error.end])), error.end


def _plain_character(character: str) -> str:
    decomposed = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return REPLACEMENTS.get(character) or decomposed or "?"


codecs.register_error(PLAIN, _plain)
