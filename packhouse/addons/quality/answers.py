"""Answers that are none: refusals, empty ones, and ones that say the prompt again."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.lists import string_bytes
from packhouse.system.arrays import Int64s

# \x{2019}: the typographic apostrophe.
_APOSTROPHE = r"['\x{2019}]?"
_I_AM = rf"i(?:{_APOSTROPHE}m| am)"
_CANNOT = (
    rf"(?:can{_APOSTROPHE}t|cannot|can not|am unable|am not able|am not allowed"
    rf"|am not programmed|do not have|don{_APOSTROPHE}t have)\b"
)
_HELP = (
    r"(?:assist|help|provide|fulfil|comply|create|generate|answer|complete|support|write|produce"
    r"|perform|process|access|browse|give|offer|discuss|share|engage|draw|set up|do (?:this|that))"
)
# \x{62B1}\x{6B49}, \x{5BF9}\x{4E0D}\x{8D77}: sorry; \x{65E0}\x{6CD5}, \x{4E0D}\x{80FD}: cannot.
_AI_IN_CHINESE = (
    r"(?:ai|\x{4EBA}\x{5DE5}\x{667A}\x{80FD}|\x{5927}?\x{8BED}\x{8A00}\x{6A21}\x{578B})"
    r"[^\x{3002}\n]{0,12}\x{6211}"
)
_REFUSAL = "(?i)" + "|".join(
    (
        # As an AI language model, I ...
        r"\bas an? (?:ai|a\.i\.|artificial intelligence)(?: language)?"
        r"(?: model| assistant| chatbot| system)?,? (?:and )?(?:i|my)\b",
        rf"\bas a (?:large )?language model,? i {_CANNOT}",
        # I'm sorry, but I can't ...; Unfortunately, I am unable to ...
        rf"^\W*(?:{_I_AM}(?: \w{{2,9}})? (?:sorry|afraid)|sorry|my apologies|i apologi[sz]e"
        r"|unfortunately)[,.;:]?(?: but)?(?: that)?,? "
        rf"(?:as an ai\b|i (?:currently )?{_CANNOT}|{_I_AM} (?:currently )?(?:unable|not able)"
        rf"|i (?:won{_APOSTROPHE}t|will not) {_HELP}\b)",
        # I cannot help ...
        rf"^\W*(?:i (?:can{_APOSTROPHE}t|cannot|can not|won{_APOSTROPHE}t)"
        rf"|{_I_AM} (?:unable|not able) to) {_HELP}\b",
        # As an AI, I ...; I am sorry, I cannot ...
        r"\x{4F5C}\x{4E3A}(?:\x{4E00}[\x{4E2A}\x{540D}\x{6B3E}\x{79CD}])?" + _AI_IN_CHINESE,
        r"^\W*[\x{5F88}\x{975E}\x{5E38}]{0,2}(?:\x{62B1}\x{6B49}|\x{5BF9}\x{4E0D}\x{8D77})"
        r"[,\x{FF0C}\x{3002} ]*(?:\x{4F46}\x{662F}?)?\x{6211}"
        r"(?:\x{65E0}\x{6CD5}|\x{4E0D}\x{80FD}|\x{6CA1}\x{6709}\x{529E}\x{6CD5})",
    )
)

# A sign or two, or one again and again; a word that stands for nothing; what JavaScript and
# spreadsheets write for what they have no text for. Morse code is none.
_EMPTY = (
    r"(?i)^[\s\pC\pZ]*(?:\.*|\x{2026}+|-*|_*|\*+|\?+|!+|,|;|:|/|\||\"+|'+|\"\"|\(\)|\[\]|\{\}"
    r"|n/?a\.?|none|null|nil|nan|undefined|no ?(?:input|output|answer|response)|<no ?input>|tbd"
    r"|todo|\[object object\]|#(?:ref!|n/a|name\?|value!|div/0!|num!|null!))[\s\pC\pZ]*$"
)

_ECHO_BYTES = 24
_HEAD = 16


def is_refusal(answer: pa.StringArray) -> pa.BooleanArray:
    """True where an answer refuses, or says that it is an AI's: in English or Chinese.

    Example:
        >>> is_refusal(pa.array(["Sorry, I can't help.", "I can't believe it!"])).to_pylist()
        [True, False]
    """
    return pc.match_substring_regex(answer, _REFUSAL)


def is_empty(answer: pa.StringArray) -> pa.BooleanArray:
    """True where an answer says nothing: a dot, a row of dashes, N/A, None.

    Example:
        >>> is_empty(pa.array([" ... ", "N/A", "A", "+"])).to_pylist()
        [True, True, False, False]
    """
    return pc.match_substring_regex(answer, _EMPTY)


def echoes(answer: pa.StringArray, prompt: pa.StringArray) -> pa.BooleanArray:
    """True where an answer is its prompt, or begins with all of a prompt of 24 bytes or more.

    White space at both ends and case do not count.

    Example:
        >>> echoes(pa.array(["HELLO ", "Hello you"]), pa.array(["Hello", "Hello"])).to_pylist()
        [True, False]
    """
    said, asked = _folded(answer), _folded(prompt)
    found = np.asarray(pc.fill_null(pc.equal(said, asked), False), np.bool_)
    found &= np.asarray(pc.fill_null(pc.greater(pc.binary_length(asked), 0), False), np.bool_)
    for index in _likely(said, asked).tolist():
        found[index] |= said[index].as_py().startswith(asked[index].as_py())
    is_null = pc.or_(answer.is_null(), prompt.is_null())
    return pa.array(found, mask=np.asarray(is_null, np.bool_))


def _folded(texts: pa.StringArray) -> pa.StringArray:
    return pc.utf8_lower(pc.utf8_trim_whitespace(texts))


def _likely(said: pa.StringArray, asked: pa.StringArray) -> Int64s:
    """Rows whose answer is longer than the prompt, and begins with its first 16 bytes."""
    (own, own_offsets), (other, other_offsets) = string_bytes(said), string_bytes(asked)
    sizes = np.diff(other_offsets)
    rows = np.flatnonzero((sizes >= _ECHO_BYTES) & (np.diff(own_offsets) > sizes))
    within = np.arange(_HEAD)
    # Row by row the 16 bytes from where each text begins: shape [num_rows, 16].
    heads = own[own_offsets[rows][:, None] + within], other[other_offsets[rows][:, None] + within]
    likely: Int64s = rows[(heads[0] == heads[1]).all(axis=1)]
    return likely
