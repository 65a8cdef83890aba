"""Check text quality: empty answers, refusals, repetition, HTML, personal data, secrets, language.

Each function takes an Arrow array of texts and returns one result per text, null for null. It uses
the text alone, with RE2 regular expressions and numpy, in linear time. `where`, `select` and
`packhouse sql` call these functions (`TEXT_FUNCTIONS` of the registry). If a recipe has
`audit.quality`, the audit counts rows with them (`count_quality`).

Each counter counts a row once. Personal data and text noise are searched in all messages of a row,
the rest in its answers. Findings are reported by file and row, without the text, because a manifest
should not repeat personal data.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from itertools import chain, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.auditing.token_checks import worst_first
from packhouse.errors import ConfigError
from packhouse.recipe.audit_section import QUALITY_COUNTERS
from packhouse.records.arrays import Bools, Bytes, Float64s, Int64s, string_bytes
from packhouse.records.message_rules import ASSISTANT, USER, FlatMessages
from packhouse.system.plugins import import_extra

# \x{2019} is the typographic apostrophe.
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
# \x{62B1}\x{6B49} and \x{5BF9}\x{4E0D}\x{8D77} mean sorry, \x{65E0}\x{6CD5} and \x{4E0D}\x{80FD}
# cannot.
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

# One or two punctuation marks, or one repeated; placeholders; what JavaScript and spreadsheets
# write for missing values. Morse code is not empty.
_EMPTY = (
    r"(?i)^[\s\pC\pZ]*(?:\.*|\x{2026}+|-*|_*|\*+|\?+|!+|,|;|:|/|\||\"+|'+|\"\"|\(\)|\[\]|\{\}"
    r"|n/?a\.?|none|null|nil|nan|undefined|no ?(?:input|output|answer|response)|<no ?input>|tbd"
    r"|todo|\[object object\]|#(?:ref!|n/a|name\?|value!|div/0!|num!|null!))[\s\pC\pZ]*$"
)

_ECHO_BYTES = 24
_HEAD = 16


def is_refusal(answer: pa.StringArray) -> pa.BooleanArray:
    """Return True for answers that refuse or call themselves an AI, in English or Chinese.

    Example:
        >>> is_refusal(pa.array(["Sorry, I can't help.", "I can't believe it!"])).to_pylist()
        [True, False]
    """
    return pc.match_substring_regex(answer, _REFUSAL)


def is_empty(answer: pa.StringArray) -> pa.BooleanArray:
    """Return True for answers without content: a dot, a row of dashes, N/A, None.

    Example:
        >>> is_empty(pa.array([" ... ", "N/A", "A", "+"])).to_pylist()
        [True, True, False, False]
    """
    return pc.match_substring_regex(answer, _EMPTY)


def echoes(answer: pa.StringArray, prompt: pa.StringArray) -> pa.BooleanArray:
    """Return True for answers equal to the prompt, or starting with a prompt of at least 24 bytes.

    Ignores case, and white space at both ends.

    Example:
        >>> echoes(pa.array(["HELLO ", "Hello you"]), pa.array(["Hello", "Hello"])).to_pylist()
        [True, False]
    """
    answers, prompts = (pc.utf8_lower(pc.utf8_trim_whitespace(each)) for each in (answer, prompt))
    found = np.asarray(pc.fill_null(pc.equal(answers, prompts), False), np.bool_)
    found &= np.asarray(pc.fill_null(pc.greater(pc.binary_length(prompts), 0), False), np.bool_)
    for index in _likely(answers, prompts).tolist():
        found[index] |= answers[index].as_py().startswith(prompts[index].as_py())
    is_null = pc.or_(answer.is_null(), prompt.is_null())
    return pa.array(found, mask=np.asarray(is_null, np.bool_))


def _likely(answers: pa.StringArray, prompts: pa.StringArray) -> Int64s:
    """Return rows whose answer is longer than the prompt and starts with its first 16 bytes."""
    (own, own_offsets), (other, other_offsets) = string_bytes(answers), string_bytes(prompts)
    sizes = np.diff(other_offsets)
    rows = np.flatnonzero((sizes >= _ECHO_BYTES) & (np.diff(own_offsets) > sizes))
    within = np.arange(_HEAD)
    # The first 16 bytes of each text, row by row: shape [num_rows, 16].
    heads = own[own_offsets[rows][:, None] + within], other[other_offsets[rows][:, None] + within]
    likely: Int64s = rows[(heads[0] == heads[1]).all(axis=1)]
    return likely


_MARKUP = (
    r"(?i)</?(?:p|br|div|span|a|b|i|u|em|strong|ul|ol|li|h[1-6]|table|t[dhr]|font|img|center|hr"
    r"|blockquote|sup|sub)(?:\s+[a-z:-]{1,30}\s*=[^<>]{0,500})?\s*/?>"
    r"|&(?:nbsp|amp|lt|gt|quot|apos|[lr]squo|[lr]dquo|mdash|ndash|hellip|#\d{2,6}|#x[0-9a-f]{2,5});"
)
_CODE = r"(?s)```.*?(?:```|\z)|`[^`\n]*`"

# Text about markup, or code, contains tags on purpose.
_ON_PURPOSE = (
    r"(?i)\b(?:html5?|xml|xhtml|css|svg|javascript|js|jsx|php|react|vue|angular|django|markup"
    r"|markdown|tags?|hyperlinks?|code|script|web ?pages?|web ?sites?|snippet|function|regex)\b"
    r"|<!doctype|<(?:html|head|body|script|style|form|input|button|meta|link|title|svg|canvas)\b"
    "|\u4ee3\u7801|\u6807\u7b7e|\u7f51\u9875"  # code, tag, page of the Web
)

# UTF-8 decoded as Windows-1252 or Latin-1: the two bytes of \u00e9 become `\u00c3\u00a9`, those of
# a quotation mark `\u00e2\u20ac\u2122`. Also byte order marks, emoji, and UTF-8 decoded as GBK.
_LATER = "\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152"
_LATER += "\u017d\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e"
_LATER += "\u0178"
_MOJIBAKE = "|".join(
    (
        "\ufffd",
        f"\u00c3[{_LATER}]",
        "\u00c2[\u0080-\u00bf]",
        f"\u00e2[\u0080\u20ac][{_LATER}]",
        f"\u00f0[\u0178\u009f][{_LATER}]",
        "\u00ef\u00bb\u00bf",
        "\u951f\u65a4\u62f7",
        "\u70eb\u70eb\u70eb",
    )
)

# Control characters such as bell or terminal codes (JSON and CSV reject raw ones, Parquet does
# not); zero-width space, word joiner and byte order mark; marks that change the text direction; tag
# characters, except in flags such as Scotland's. Joiners in emoji and Persian are allowed.
_INVISIBLE = (
    r"[\x{0}-\x{8}\x{E}-\x{1F}\x{7F}\x{200B}\x{2060}-\x{2064}\x{FEFF}\x{202A}-\x{202E}\x{2066}-\x{2069}]"
    r"|(?:^|[^\x{1F3F4}\x{E0020}-\x{E007F}])[\x{E0001}-\x{E007F}]"
)


def has_html(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for prose with HTML tags or entities, ignoring code and texts about HTML.

    Example:
        >>> has_html(pa.array(["<p>Hi<br/>you", "HTML has <p> and <br>", "`<p>`"])).to_pylist()
        [True, False, False]
    """
    # Most texts have no markup at all, so the costly checks run on the few that do.
    found = pc.match_substring_regex(text, _MARKUP)
    likely = pc.indices_nonzero(pc.fill_null(found, False))
    if not len(likely):
        return found
    prose = pc.replace_substring_regex(text.take(likely), _CODE, " ")
    is_dirt = pc.and_not(
        pc.match_substring_regex(prose, _MARKUP), pc.match_substring_regex(prose, _ON_PURPOSE)
    )
    return pc.replace_with_mask(found, pc.fill_null(found, False), is_dirt)


def has_mojibake(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for texts decoded with the wrong encoding, or with undecodable bytes.

    Example:
        >>> has_mojibake(pa.array(["caf\u00c3\u00a9", "caf\u00e9", "S\u00c3O"])).to_pylist()
        [True, False, False]
    """
    return pc.match_substring_regex(text, _MOJIBAKE)


def has_invisible(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for texts with characters that are invisible or change the text direction.

    Example:
        >>> has_invisible(pa.array(["a\u200bb", "\u202egnp.exe", "n\u200dl"])).to_pylist()
        [True, True, False]
    """
    return pc.match_substring_regex(text, _INVISIBLE)


# Checks for personal data and secrets avoid false alarms: digits are a card number only if they
# have a valid prefix and check digit, and a phone number only if they are formatted like one.
# Addresses at example.com and test numbers count too, because a rule for real ones would miss some.

_EMAIL = (
    r"(?:^|[^A-Za-z0-9._%+/-])[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,63})"
    r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}(?:$|[^A-Za-z0-9@_:-]|:(?:\s|$))"
)

# North America: (212) 684-4700, 502-294-8258, 502.294.8258. Anywhere: +44 20 7946 0958,
# +12145558444, +49 30 901820.
_PHONE = (
    r"(?:^|[^\w.+/=-])(?:"
    r"(?:\+?1[ .-])?(?:\(\d{3}\) ?|\d{3}-)\d{3}-\d{4}|\d{3}\.\d{3}\.\d{4}"
    r"|\+\d{10,15}"
    r"|\+ ?\d{1,3}[ .-]?(?:\(\d{1,4}\) ?|\d{1,4}[ .-])\d{2,4}(?:[ .-]\d{2,4}){1,4}"
    r"|\+\d{1,3}[ .-](?:\(\d{1,4}\) ?|\d{2,5}[ .-])\d{5,8}"
    r")(?:$|[^\w.-]|\.(?:$|\D))"
)

# Visa, Mastercard, Discover, JCB, American Express, Diners, UnionPay: as one run of digits, or in
# the groups printed on the card. Not inside longer numbers, codes or sums.
_CARD = (
    r"(?:^|[^\w.,=+*/<>-])("
    r"(?:4\d{3}|5[1-5]\d\d|2[2-7]\d\d|6011|65\d\d|64[4-9]\d|35[2-8]\d|62\d\d)"
    r"(?:\d{12}| \d{4} \d{4} \d{4}|-\d{4}-\d{4}-\d{4})"
    r"|3[47]\d\d(?:\d{11}| \d{6} \d{5}|-\d{6}-\d{5})"
    r"|3(?:0[0-5]|[68]\d)\d(?:\d{10}| \d{6} \d{4}|-\d{6}-\d{4})"
    r")(?:$|[^\w.,=+*/<>-]|[.,](?:$|\D))"
)
_CARD_IN_PYTHON = re.compile(_CARD, re.ASCII)

# Formats that the issuers publish, or that secret scanners search for.
_SECRET = "|".join(
    (
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",  # AWS access keys
        r"\bgh[pousr]_[A-Za-z0-9]{36}",  # GitHub
        r"\bgithub_pat_[A-Za-z0-9_]{40}",
        r"\bglpat-[A-Za-z0-9_-]{20}",  # GitLab
        r"\bhf_[A-Za-z0-9]{34}",  # Hugging Face
        r"\bsk-[A-Za-z0-9]{40}",  # OpenAI, before project keys
        r"\bsk-(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_-]{32}",  # OpenAI, Anthropic, OpenRouter
        r"\bAIza[A-Za-z0-9_-]{35}",  # Google
        r"\bxox[abeoprs]-[0-9]{8,14}-[A-Za-z0-9-]{10}",  # Slack
        r"\b[rs]k_live_[A-Za-z0-9]{20}",  # Stripe
        r"\bnpm_[A-Za-z0-9]{36}\b",
        r"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{40}",
        r"-----BEGIN (?:[A-Z]{2,9} )?PRIVATE KEY(?: BLOCK)?-----\s*[A-Za-z0-9+/=:-]",
    )
)


def has_email(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for texts with an e-mail address.

    Example:
        >>> has_email(pa.array(["Write to jo@mail.org.", "git@host:repo", None])).to_pylist()
        [True, False, None]
    """
    return pc.match_substring_regex(text, _EMAIL)


def has_phone(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for texts with a phone number: North American, or with `+` and a country code.

    Example:
        >>> has_phone(pa.array(["(212) 684-4700", "+44 20 7946 0958", "2126844700"])).to_pylist()
        [True, True, False]
    """
    return pc.match_substring_regex(text, _PHONE)


def has_secret(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for texts with a key or token of a known format, or a private key.

    Example:
        >>> has_secret(pa.array(["AKIAIOSFODNN7EXAMPLE", "set AWS_SECRET_KEY"])).to_pylist()
        [True, False]
    """
    return pc.match_substring_regex(text, _SECRET)


def has_card(text: pa.StringArray) -> pa.BooleanArray:
    """Return True for texts with a payment card number whose check digit (Luhn) is valid.

    Example:
        >>> has_card(pa.array(["4242 4242 4242 4242", "4242 4242 4242 4243"])).to_pylist()
        [True, False]
    """
    found = pc.match_substring_regex(text, _CARD)
    # RE2 finds the form of a number; only its check digit needs Python.
    likely = np.flatnonzero(pc.fill_null(found, False).to_numpy(zero_copy_only=False))
    is_valid = np.ones(len(text), np.bool_)
    is_valid[likely] = [
        any(_is_luhn(match[1]) for match in _CARD_IN_PYTHON.finditer(each))
        for each in text.take(pa.array(likely)).to_pylist()
    ]
    return pc.and_(found, pa.array(is_valid))


def _is_luhn(number: str) -> bool:
    """Return True if the check digit of a card number is valid by Luhn's algorithm.

    4539 5787 6362 1486: 8+5+6+9+1+7+7+7+3+3+3+2+2+4+7+6 = 80, a multiple of ten.
    """
    digits = [int(each) for each in number if each.isdigit()]
    doubled = [2 * each - 9 * (each > 4) for each in digits[-2::-2]]
    # Repetitions of one digit pass too (0000 0000 0000 0000), but are placeholders.
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0 and len(set(digits)) > 1


# Repetition compares 16 bytes at the start of each word or sign with all earlier ones, and returns
# the share that occurs again. It needs no word list, so it also finds loops of Chinese, code or a
# single character. Prose has about 3%, tables and code up to 50%. Cost: 15 ns per byte.

REPETITIVE = 0.6
"""Answers with a larger share count as repetition; a text written three times has 0.67."""

_WINDOW = 16
_MIN_BYTES = 100
_BATCH_BYTES = 2**16  # bytes compared at a time: fits into a core's cache

_ROW_BITS = np.uint64(11)  # enough for the texts of a batch: at most 2**16 / 100, plus one

_FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)

_BETWEEN = np.zeros(2, np.uint8)
"""Separates texts; differs from every byte at which a word or sign starts."""


_IS_WORD = np.array([bytes([each]).isalnum() for each in range(256)])  # ASCII letters and digits
_IS_INNER = np.array([each <= 32 or 128 <= each < 192 for each in range(256)])
"""Bytes at which nothing starts: white space, and continuation bytes of UTF-8."""


def repetition(text: pa.StringArray) -> pa.DoubleArray:
    """Return the share of a text that repeats earlier parts, from 0 to 1; 0 below 100 bytes.

    Example:
        >>> looped = "I am here. " * 20
        >>> repetition(pa.array([looped, "Short. " * 3, None])).to_pylist()
        [0.946236559139785, 0.0, None]
    """
    values, offsets = string_bytes(text)
    sizes = np.diff(offsets).astype(np.int64)
    shares = np.zeros(len(text))
    rows = np.flatnonzero(sizes >= _MIN_BYTES)
    ends = np.cumsum(sizes[rows])
    first = 0
    while first < len(rows):
        start = int(ends[first] - sizes[rows[first]])
        last = max(first + 1, int(np.searchsorted(ends, start + _BATCH_BYTES, "right")))
        own = rows[first:last]
        parts = [values[offsets[row] : offsets[row + 1]] for row in own.tolist()]
        apart = chain.from_iterable(zip(parts, repeat(_BETWEEN)))
        shares[own] = _shares(np.concatenate([*apart]), sizes[own])
        first = last
    return pa.array(shares, mask=np.asarray(text.is_null(), np.bool_))


def _shares(values: Bytes, sizes: Int64s) -> Float64s:
    """Return the share for each text of a batch; each text is followed by `_BETWEEN`."""
    ends = np.cumsum(sizes + len(_BETWEEN)) - len(_BETWEEN)
    places = np.flatnonzero(_begins(values))
    row = np.searchsorted(ends, places, "right")
    # Texts of 100 and 120 bytes end at [100 222], as 2 bytes follow each. Position 90 is in the
    # first text, and 16 bytes from there go past its end.
    is_whole = places + _WINDOW <= ends[row]
    places, row = places[is_whole], row[is_whole]
    words = np.ndarray((len(values) - 7,), np.uint64, values, 0, (1,))  # 8 bytes from each offset
    # Hash the 16 bytes as two 64-bit words. The top 11 bits of a key are the text's number, so
    # equal neighbours after sorting are repetitions within one text.
    hashes = words[places] * _FACTORS[0]
    hashes ^= hashes >> np.uint64(32)
    hashes += words[places + 8]
    hashes *= _FACTORS[1]
    hashes ^= hashes >> np.uint64(29)
    keys = (row.astype(np.uint64) << (np.uint64(64) - _ROW_BITS)) | (hashes >> _ROW_BITS)
    keys.sort()
    rows_again = keys[1:][keys[1:] == keys[:-1]] >> (np.uint64(64) - _ROW_BITS)
    num_again = np.bincount(rows_again.astype(np.int64), minlength=len(sizes))
    num_places = np.bincount(row, minlength=len(sizes))
    return np.asarray(num_again / np.maximum(num_places, 1))


def _begins(values: Bytes) -> Bools:
    """Return a mask of where words, signs and characters start; in runs (`aaaa`, `haha`) all bytes.

    `Ha! 1.5` -> 1 0 1 0 1 1 1
    """
    is_word = _IS_WORD[values]
    begins = ~is_word
    begins[0] = True
    begins[1:] |= begins[:-1] | (values[1:] == values[:-1])
    begins[2:] |= values[2:] == values[:-2]
    begins &= ~_IS_INNER[values]
    return begins


UNDETERMINED = "und"

# Languages are detected by py3langid, an extra (`packhouse[quality]`): naive Bayes over byte
# n-grams, 150 us per text. Of its 139 languages, 59 are used: with all of them, short English is
# often detected as a creole, and Mandarin as Wu.
_LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk"
    " kn ko la lt lv mk ml mn mr nl no pa pl pt ro ru sk sl sq sr sv sw ta te th tr uk ur vi zh"
).split()
_MIN_CHARACTERS = 20
_MAX_CHARACTERS = 400  # from the middle of a text: more does not improve the result
_MIN_PROBABILITY = 0.7


def language(text: pa.StringArray) -> pa.StringArray:
    """Return the ISO 639-1 code of each text, such as `en`; `und` if it is short or unclear.

    Raises:
        ConfigError: py3langid is not installed.
    """
    return pa.array([None if each is None else _language(each) for each in text.to_pylist()])


def language_key(languages: Sequence[str]) -> dict[str, object]:
    """Return settings that affect which answers count as other languages, for a step's key.

    Empty if no languages are given.

    Raises:
        ConfigError: py3langid is not installed, or a language is not supported.
    """
    if not languages:
        return {}
    for name in languages:
        if name not in _LANGUAGES:
            raise ConfigError(
                f"audit.quality.languages: '{name}' is not available. Use one of "
                f"{', '.join(_LANGUAGES)}.",
                name=name,
            )
    _import()
    detector = ["py3langid", version("py3langid")]
    return {"languages": sorted(set(languages)), "language_detector": detector}


def _language(text: str) -> str:
    text = text.strip()
    if len(text) < _MIN_CHARACTERS:
        return UNDETERMINED
    start = max(0, (len(text) - _MAX_CHARACTERS) // 2)
    name, probability = _identifier().classify(text[start : start + _MAX_CHARACTERS])
    return str(name) if probability >= _MIN_PROBABILITY else UNDETERMINED


def _import() -> Any:
    return import_extra("py3langid.langid", "quality", "the language of texts")


@cache
def _identifier() -> Any:
    langid = _import()
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    identifier.set_languages(_LANGUAGES)
    return identifier


_NUM_WORST = 5
_BLOCK = 2**13  # rows per block
_OUTLIER = 16  # buckets above the bucket of the median: 16 times as long
_EDGES = np.array([round(2 ** (step / 4)) for step in range(4 * 40)])
"""Lengths in characters at which buckets start; every four buckets, the length doubles."""


def count_quality(validated: pa.Table, *, languages: bool = False) -> dict[str, object]:
    """Count the findings of each check in the conversations of a shard.

    Args:
        validated: schema `table_schemas.VALIDATED`.
        languages: also count the languages of answers.

    Returns:
        Plain JSON: `rows`; `counts`, counter -> rows; `worst`, counter -> first rows; `lengths`,
        bucket -> rows; and with `languages`: `languages`, language -> rows, and `of_languages`,
        language -> first rows. Which lengths and languages count is decided over all shards.
    """
    flags: dict[str, list[Bools]] = {name: [] for name in _CHECKS}
    lengths, found_languages = [], []
    for start in range(0, validated.num_rows, _BLOCK):
        rows = _Rows(FlatMessages.of(validated["messages"].slice(start, _BLOCK)))
        for name, check in _CHECKS.items():
            flags[name].append(check(rows))
        lengths.append(np.asarray(pc.utf8_length(rows.texts), np.int64))
        if languages:
            found_languages.append(language(rows.joined_answers))
    found = {name: np.flatnonzero(np.concatenate([_NONE, *each])) for name, each in flags.items()}
    sizes = np.concatenate([np.zeros(0, np.int64), *lengths])
    longest = np.argsort(-sizes, kind="stable")[:_NUM_WORST]
    result: dict[str, Any] = {
        "rows": validated.num_rows,
        "counts": {name: len(rows) for name, rows in found.items()},
        "worst": {name: _places(validated, rows) for name, rows in found.items() if len(rows)},
        "lengths": _histogram(np.searchsorted(_EDGES, np.maximum(sizes, 1), "right")),
        "longest": _places(validated, longest, sizes[longest]),
    }
    if languages:
        parts = (each.to_pylist() for each in found_languages)
        names = np.array([*chain.from_iterable(parts)], object)
        result["languages"] = _histogram(names)
        result["of_languages"] = {
            name: _places(validated, np.flatnonzero(names == name)) for name in result["languages"]
        }
    return result


def combine_quality(
    shards: Sequence[tuple[str, Mapping[str, Any]]], languages: Sequence[str] = ()
) -> dict[str, object]:
    """Combine the counts of all shards.

    Args:
        shards: (source name, result of `count_quality`) in order.
        languages: expected languages of answers.

    Returns:
        `dataset` and each of `sources`: rows and counts; `worst`: first rows of each source by
        counter; `languages`: rows by language, if counted.
    """
    sources: dict[str, Counter[str]] = {}
    worst: dict[str, list[dict[str, object]]] = {name: [] for name in QUALITY_COUNTERS}
    spoken: Counter[str] = Counter()
    medians = _medians(shards)
    for name, found in shards:
        counts = sources.setdefault(name, Counter(rows=0))
        counts.update(rows=found["rows"], **found["counts"])
        for counter, rows in found["worst"].items():
            worst[counter] += rows
        limit = medians[name] + _OUTLIER
        counts["length_outliers"] += sum(
            rows for bucket, rows in found["lengths"].items() if int(bucket) >= limit
        )
        edge = _EDGES[min(limit, len(_EDGES)) - 1]
        worst["length_outliers"] += [row for row in found["longest"] if row["value"] >= edge]
        for spoken_in, rows in found.get("languages", {}).items():
            spoken[spoken_in] += rows
            is_other = spoken_in not in (*languages, UNDETERMINED)
            counts["other_languages"] += rows * is_other
            worst["other_languages"] += found["of_languages"][spoken_in] * is_other
    total: Counter[str] = Counter(rows=0)
    for counts in sources.values():
        total.update(counts)
    combined = {
        "dataset": dict(total),
        "sources": {name: dict(counts) for name, counts in sorted(sources.items())},
        "worst": {name: _first_of_sources(rows) for name, rows in worst.items() if rows},
    }
    return combined | ({"languages": dict(sorted(spoken.items()))} if spoken else {})


def _first_of_sources(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    rows.sort(key=worst_first)
    num_kept: Counter[str] = Counter()
    kept = []
    for row in rows:
        source = row["source"].split("/")[0]
        num_kept[source] += 1
        kept += [row] if num_kept[source] <= _NUM_WORST else []
    return kept


def _medians(shards: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, int]:
    """Return the bucket of the median length of each source."""
    rows_of: dict[str, Int64s] = {}
    for name, found in shards:
        rows = rows_of.setdefault(name, np.zeros(len(_EDGES) + 1, np.int64))
        for bucket, number in found["lengths"].items():
            rows[int(bucket)] += number
    # Two rows in bucket 3 and five in bucket 9: cumulative counts [0 0 0 2 .. 2 7], and the middle
    # row, at 3.5, is in bucket 9.
    up_to = {name: np.cumsum(rows) for name, rows in rows_of.items()}
    return {name: int(np.searchsorted(own, own[-1] / 2)) for name, own in up_to.items()}


_NONE = np.zeros(0, np.bool_)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Texts of some conversations, as the checks need them."""

    flat: FlatMessages

    @cached_property
    def texts(self) -> pa.StringArray:
        """All text of each row, joined."""
        flat = self.flat
        fields = (flat.content, flat.context, flat.reasoning, flat.tool_calls)
        texts = pc.binary_join_element_wise(*fields, "\n", null_handling="skip")
        return flat.join(texts, "\n")

    @cached_property
    def likely(self) -> Int64s:
        """Rows in which a check of all text may find something."""
        return np.flatnonzero(pc.match_substring_regex(self.texts, _ANY_IN_TEXTS))

    @cached_property
    def _is_answer(self) -> Bools:
        return np.asarray(self.flat.roles == ASSISTANT)

    @cached_property
    def answers(self) -> pa.StringArray:
        """One text per assistant message."""
        return self.flat.content.filter(pa.array(self._is_answer))

    @cached_property
    def joined_answers(self) -> pa.StringArray:
        """The assistant messages of each row, joined."""
        counts = self.flat.sums(self._is_answer)
        lists = pa.ListArray.from_arrays(
            pa.array(np.append(0, np.cumsum(counts)), pa.int32()), self.answers
        )
        return pc.binary_join(lists, "\n")

    @cached_property
    def prompts(self) -> pa.StringArray:
        """The user message right before each answer; null if there is none."""
        user = self.flat.roles == USER
        # Messages u a a: answers at [1 2]; the first follows a user message, the second does not.
        at = np.flatnonzero(self._is_answer)
        is_first = np.isin(at, self.flat.offsets)
        mask = is_first | ~user[np.maximum(at - 1, 0)]
        return self.flat.content.take(pa.array(np.maximum(at - 1, 0), mask=mask))

    @cached_property
    def calls_nothing(self) -> Bools:
        """Mask of answers without tool calls and reasoning."""
        return ~(self.flat.has("tool_calls") | self.flat.has("reasoning"))[self._is_answer]

    def of_answers(self, is_found: pa.BooleanArray | Bools) -> Bools:
        """Return a mask of the rows with a marked answer."""
        marks = np.asarray(pc.fill_null(pa.array(is_found), False), np.bool_)
        rows = np.zeros(len(self.flat.counts), np.bool_)
        rows[self.flat.rows[self._is_answer][marks]] = True
        return rows


# Few texts match any of these patterns, so the checks read only those: one pass takes 2 us per row
# of Alpaca, the seven checks 5.
_ANY_IN_TEXTS = "|".join(
    f"(?i:{pattern.removeprefix('(?i)')})" if pattern.startswith("(?i)") else pattern
    for pattern in (_MARKUP, _MOJIBAKE, _INVISIBLE, _EMAIL, _PHONE, _CARD, _SECRET)
)


def _in_texts(check: Callable[[pa.StringArray], pa.BooleanArray]) -> Callable[[_Rows], Bools]:
    def found(rows: _Rows) -> Bools:
        marks = np.zeros(len(rows.texts), np.bool_)
        marks[rows.likely] = np.asarray(check(rows.texts.take(pa.array(rows.likely))), np.bool_)
        return marks

    return found


# Together they take 9 us per row of Alpaca, 3 of them for repetition.
_CHECKS: dict[str, Callable[[_Rows], Bools]] = {
    "empty_answers": lambda rows: rows.of_answers(
        np.asarray(is_empty(rows.answers), np.bool_) & rows.calls_nothing
    ),
    "echoes": lambda rows: rows.of_answers(echoes(rows.answers, rows.prompts)),
    "refusals": lambda rows: rows.of_answers(is_refusal(rows.answers)),
    "repetition": lambda rows: rows.of_answers(pc.greater(repetition(rows.answers), REPETITIVE)),
    "html": _in_texts(has_html),
    "mojibake": _in_texts(has_mojibake),
    "invisible": _in_texts(has_invisible),
    "emails": _in_texts(has_email),
    "phones": _in_texts(has_phone),
    "cards": _in_texts(has_card),
    "secrets": _in_texts(has_secret),
}


def _places(table: pa.Table, rows: Int64s, values: Int64s | None = None) -> list[dict[str, object]]:
    """Return the places of the first rows, with a value each (1 by default)."""
    first = rows[:_NUM_WORST]
    found = table.select(["source", "row", "record_id"]).take(pa.array(first)).to_pylist()
    numbers = [1] * len(first) if values is None else values.tolist()
    return [{**row, "value": value} for row, value in zip(found, numbers, strict=True)]


def _histogram(values: np.ndarray) -> dict[str, int]:
    names, counts = np.unique(values, return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}
