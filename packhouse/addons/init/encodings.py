"""Guess the encoding of text, by whether its letters are those that people write.

Text that is UTF-8 but for a few bytes stays UTF-8: its rows with other bytes are bad rows. The
guess is shown to a person, and nothing is read by it that the recipe does not say.
"""

import codecs
import re
from collections.abc import Callable

_ENOUGH = 0.6
"""Share of the letters beyond ASCII that must be common ones."""


def guess_encoding(data: bytes) -> str | None:
    """Return the encoding of the first bytes of a text; None: none that a source can have.

    Example:
        >>> guess_encoding("你好世界天空为什么是蓝色的".encode("gbk"))
        'gb18030'
    """
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None if data.startswith(b"\xff\xfe\0\0") else "utf-16"
    letters = _letters_beyond_ascii(data, "utf-8")
    if letters.count("\ufffd") <= len(letters) / 10:
        return "utf-8"
    runs = re.findall(rb"[\x80-\xff]+", data)
    stand_alone = sum(len(run) == 1 for run in runs) > len(runs) / 2  # an accent in a Latin word
    names = [name for name in _COMMON if (name == "cp1252") == stand_alone]
    scores = {}
    for name in names:
        letters = _letters_beyond_ascii(data, name)
        scores[name] = sum(map(_COMMON[name], letters)) / max(1, len(letters))
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= _ENOUGH else None


def _letters_beyond_ascii(data: bytes, encoding: str) -> str:
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data)  # may end in a letter
    return "".join(letter for letter in text if letter > "\x7f")


def _lead_byte(first: int, last: int, encoding: str) -> Callable[[str], bool]:
    """True for letters of the part of a national set that holds the common ones."""

    def is_common(letter: str) -> bool:
        if "\u3000" <= letter <= "\u303f" or "\uff00" <= letter <= "\uff60":  # punctuation
            return True
        return first <= letter.encode(encoding, "replace")[0] <= last

    return is_common


_KANJI = _lead_byte(0x88, 0x97, "cp932")

_LATIN = (
    "äöüßÄÖÜéèêëàâáíìîïóòôúùûñçåæøÉÀÇÑÅØ\u00ab\u00bb\u20ac\u00b0"
    "\u2013\u2014\u2018\u2019\u201c\u201d\u2026"
)

# In the order of trial; the first of equals wins: what is common in Korean, read as Chinese, is
# common as well.
_COMMON: dict[str, Callable[[str], bool]] = {
    "cp949": _lead_byte(0xB0, 0xC8, "euc_kr"),
    "gb18030": _lead_byte(0xB0, 0xD7, "gb2312"),
    "big5": _lead_byte(0xA4, 0xC6, "big5"),
    "cp932": lambda letter: "\u3040" <= letter <= "\u30ff" or _KANJI(letter),
    "cp1251": lambda letter: "\u0410" <= letter <= "\u044f",
    "cp1252": lambda letter: letter in _LATIN,
}
