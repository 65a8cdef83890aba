"""Characters on which two libraries may disagree because they know different Unicode versions.

Whether a character is a letter decides where words end, and so ids. tokenizers 0.23 goes by
Unicode 16 (its normaliser by 9), gigatoken 0.10 by 17: all 1,112,064 characters were tried, and
those added since are where they differ. A row that holds such a character, or one that is not
assigned yet, is always encoded by HF. Rows in ASCII are not looked at.
"""

import unicodedata
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Bools

# Blocks outside the basic plane that are in common use and did not change for years. Emoji are
# added every year, but are neither letters nor numbers before or after.
_SETTLED_ASTRAL = [
    (0x1D400, 0x1D7FF),  # mathematical letters, as in fancy user names
    (0x1F000, 0x1FAFF),  # emoji and pictographs
    (0x20000, 0x2A6DF),  # CJK extension B
    (0xE0000, 0xE01EF),  # tags of flags, variation selectors
    (0xF0000, 0x10FFFD),  # private use
]
# Basic plane: assigned after Unicode 14, of which older Pythons know, or next to such.
_RECENT_BASIC = [
    (0x0870, 0x089F),
    (0x0C5C, 0x0C5C),
    (0x0CDC, 0x0CDC),
    (0x0CF3, 0x0CF3),
    (0x0ECE, 0x0ECE),
    (0x1C80, 0x1C8F),
    (0xA7C0, 0xA7F1),
]


def find_unicode_drift(texts: pa.StringArray) -> Bools:
    """Find rows with a character whose nature depends on the Unicode version; shape [num_texts].

    Example:
        >>> find_unicode_drift(pa.array(["caf\u00e9 \U0001f600", "\u088f", "a"])).tolist()
        [False, True, False]
    """
    found = np.zeros(len(texts), np.bool_)
    foreign = pc.invert(pc.string_is_ascii(texts))
    rows = np.flatnonzero(foreign.to_numpy(zero_copy_only=False))
    if not len(rows):
        return found
    chosen = texts.filter(foreign)
    codes = np.frombuffer("".join(chosen.to_pylist()).encode("utf-32-le"), np.uint32)
    is_present = np.zeros(0x110000, np.bool_)
    is_present[codes] = True
    drifting = [code for code in np.flatnonzero(is_present).tolist() if _is_unsettled(code)]
    if drifting:
        places = np.flatnonzero(np.isin(codes, drifting))
        # Texts of 3 and 2 characters end at [3 5]: characters 3 and 4 are of the second one.
        ends = np.cumsum(pc.utf8_length(chosen).to_numpy())
        found[rows[np.searchsorted(ends, places, "right")]] = True
    return found


@lru_cache(maxsize=2**16)
def _is_unsettled(code: int) -> bool:
    """Unassigned, recently assigned, or a mark that Unicode 3.2 (the oldest here) did not have.

    Marks change order under normalisation, where a library knows them.
    """
    if code >= 0x10000:
        return not any(first <= code <= last for first, last in _SETTLED_ASTRAL)
    if any(first <= code <= last for first, last in _RECENT_BASIC):
        return True
    character = chr(code)
    if unicodedata.category(character) == "Cn":
        return code < 0xFFFE  # the two above are no characters and never will be
    is_mark = unicodedata.combining(character) != 0
    return is_mark and unicodedata.ucd_3_2_0.category(character) == "Cn"
