"""Choose the encoder: the fast one if it gives the same ids as HF, otherwise HF.

Fast encoders are young. One is used for a tokenizer only if it gives exactly HF's ids on a fixed
corpus of known traps (the verdict is cached per tokenizer and version) and, in every run, on a
sample of the data. If one id differs, it fails or it cannot read the tokenizer, HF is used and the
report gives the reason. Text of up to 100 KB is always encoded by HF. So the choice of encoder
affects only the time, never the ids.
"""

import threading
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import TokenizerError
from packhouse.records.arrays import Bools
from packhouse.system.disks import read_checked, write_checked
from packhouse.tokenize.encoders import (
    Encoder,
    EncoderError,
    GigatokenEncoder,
    HFEncoder,
    Pipeline,
    TokenizerSnapshot,
    read_pipeline,
)
from packhouse.tokenize.offsets import flat_texts, locate_by_widths

_JUDGING = threading.Lock()

FEW_BYTES = 100_000
"""Up to this size, HF encodes a shard's text without asking. Only the shard's own size counts:
manifests name the encoders, and equal inputs must give equal manifests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An encoder and the reason for using it."""

    encoder: Encoder
    gate: str
    """`passed`, `not asked`, or `failed: ` and the reason why the fast encoder is not used."""

    sample_size: int = 0
    """Number of texts of the data on which the fast encoder was compared."""


def choose_encoder(
    texts: pa.ChunkedArray,
    snapshot: TokenizerSnapshot,
    choice: Literal["auto", "hf", "fast"],
    cache: Path | None = None,
) -> Choice:
    """Choose the encoder for some texts.

    Args:
        texts: data to encode; a sample of it is compared.
        snapshot: tokenizer.
        choice: `auto`, `hf` (never another) or `fast` (never HF).
        cache: folder that keeps verdicts on the fixed corpus.

    Raises:
        TokenizerError: `choice` is `fast` and the fast encoder cannot be used, with the reason.
    """
    if choice == "hf":
        return Choice(encoder=HFEncoder(snapshot.backend), gate="not asked")
    num_bytes = pc.sum(pc.binary_length(texts)).as_py() or 0
    if choice == "auto" and num_bytes <= FEW_BYTES:
        gate = "not asked: HF encodes a text this short as fast as a sample of it"
        return Choice(encoder=HFEncoder(snapshot.backend), gate=gate)
    sample, pipeline = sample_texts(texts), read_pipeline(snapshot.backend)
    which = "-file" if snapshot.pipeline == "file" else ""
    encoder = f"{GigatokenEncoder.name}-{version(GigatokenEncoder.name)}"
    name = f"gate-{CORPUS_VERSION}-{snapshot.fingerprint}{which}-{encoder}.json"
    with _JUDGING:  # a second thread waits for the first one's verdict
        # Only the verdict on the fixed corpus is kept. The sample is another one for every shard.
        verdict = read_checked(cache / name) if cache else None
        fault: str | None = verdict["fault"] if verdict else None
        # Without the bytes of its tokens, no row can be proven, so HF would encode each one again.
        if fault is None and pipeline.token_bytes is None:
            fault = f"a {pipeline.model_type} tokenizer does not keep its text"
        if fault is None:
            try:
                fast = GigatokenEncoder.load(snapshot.backend)
            except EncoderError as error:
                fault = str(error)
        if fault is None and verdict is None:
            fault = first_difference(fast, adversarial_texts(pipeline), snapshot)
            if cache:
                write_checked(cache / name, {"fault": fault})
    if fault is None:
        fault = first_difference(fast, sample, snapshot)
    if fault is not None:
        return refuse_fast(snapshot, choice, fault)
    return Choice(encoder=fast, gate="passed", sample_size=len(sample))


def refuse_fast(
    snapshot: TokenizerSnapshot, choice: Literal["auto", "hf", "fast"], fault: str
) -> Choice:
    """Use HF because of a fault of the fast encoder.

    Raises:
        TokenizerError: only the fast encoder may be used.
    """
    if choice == "fast":
        raise TokenizerError(
            f"encoder 'fast' cannot be used with this {snapshot.class_name}: {fault}. Set "
            "tokenize.encoder to 'auto' or 'hf'",
            fault=fault,
        )
    return Choice(encoder=HFEncoder(snapshot.backend), gate=f"failed: {fault}")


def first_difference(encoder: Encoder, texts: list[str], snapshot: TokenizerSnapshot) -> str | None:
    """Describe where an encoder's ids first differ from HF's; None if they agree.

    Skips rows that are always left to HF (see `packhouse.tokenize.text_to_tokens`).

    Args:
        encoder: encoder to check.
        texts: texts to encode.
        snapshot: the tokenizer.
    """
    array = pa.array(texts, pa.string())
    true_ids, true_offsets = HFEncoder(snapshot.backend).encode(array)
    try:
        ids, offsets = encoder.encode(array)
    except EncoderError as error:
        return str(error)
    name = f"{encoder.name} {encoder.version}"
    if len(offsets) != len(texts) + 1:
        return f"{name} gives {len(offsets) - 1} rows for {len(texts)} texts"
    pipeline = read_pipeline(snapshot.backend)
    for row, text in enumerate(texts):
        ours = ids[offsets[row] : offsets[row + 1]]
        true = true_ids[true_offsets[row] : true_offsets[row + 1]]
        if np.array_equal(ours, true):
            continue
        one = array[row : row + 1]
        expected = locate_by_widths(*flat_texts(one), true, np.array([0, len(true)]), pipeline)
        if expected.is_exact[0] and not find_unicode_drift(one)[0]:
            shorter = min(len(ours), len(true))
            place = int(np.argmin(np.append(ours[:shorter] == true[:shorter], False)))
            return (
                f"{name} gives different ids than HF for {text[:60]!r}: token {place} starts "
                f"{ours[place : place + 4].tolist()}, not {true[place : place + 4].tolist()}"
            )
    return None


# Characters on which two libraries may disagree because they know different Unicode versions.
#
# Ids depend on which characters are letters, since these decide where words end. tokenizers 0.23
# uses Unicode 16 (its normaliser 9), gigatoken 0.10 uses 17. A test of all 1,112,064 characters
# showed that they differ in those added since. A row with such a character, or with an unassigned
# one, is always encoded by HF. Rows in ASCII need no check.


# Blocks outside the basic plane that are in common use and have not changed for years. Emoji are
# added every year, but a new one is not a letter or number in any version.
_SETTLED_ASTRAL = [
    (0x1D400, 0x1D7FF),  # mathematical letters, as in fancy user names
    (0x1F000, 0x1FAFF),  # emoji and pictographs
    (0x20000, 0x2A6DF),  # CJK extension B
    (0xE0000, 0xE01EF),  # tags of flags, variation selectors
    (0xF0000, 0x10FFFD),  # private use
]
# Basic plane: assigned after Unicode 14, which is what older Pythons know, or next to such blocks.
_RECENT_BASIC = [
    (0x0870, 0x089F),
    (0x0C5C, 0x0C5C),
    (0x0CDC, 0x0CDC),
    (0x0CF3, 0x0CF3),
    (0x0ECE, 0x0ECE),
    (0x1C80, 0x1C8F),
    (0xA7C0, 0xA7F1),
]


# The gate is not enough, because a rare character is in no sample. Of 870,000 fuzzed texts, only
# rows found here, and rows whose tokens do not join to their text, had other ids.
def find_unicode_drift(texts: pa.StringArray) -> Bools:
    """Find rows with a character whose class depends on the Unicode version; shape [num_texts].

    Example:
        >>> find_unicode_drift(pa.array(["caf\u00e9 \U0001f600", "\u088f", "a"])).tolist()
        [False, True, False]
    """
    found = np.zeros(len(texts), np.bool_)
    data, bases = flat_texts(texts)
    places = np.flatnonzero(data >= 0x80)
    if not len(places):
        return found
    # All bytes of the characters outside of ASCII, in order, are valid UTF-8 themselves.
    codes = np.frombuffer(data[places].tobytes().decode().encode("utf-32-le"), np.uint32)
    is_present = np.zeros(0x110000, np.bool_)
    is_present[codes] = True
    drifting = [code for code in np.flatnonzero(is_present).tolist() if _is_unsettled(code)]
    if drifting:
        first_bytes = places[data[places] >= 0xC0]
        found[np.searchsorted(bases, first_bytes[np.isin(codes, drifting)], "right") - 1] = True
    return found


@lru_cache(maxsize=2**16)
def _is_unsettled(code: int) -> bool:
    """Return True if it is unassigned, recently assigned, or a mark that Unicode 3.2 lacked."""
    if code >= 0x10000:
        return not any(first <= code <= last for first, last in _SETTLED_ASTRAL)
    if any(first <= code <= last for first, last in _RECENT_BASIC):
        return True
    character = chr(code)
    if unicodedata.category(character) == "Cn":
        return code < 0xFFFE  # U+FFFE and U+FFFF will never be characters
    # Normalisation reorders the marks that a library knows; 3.2 is the oldest version here.
    is_mark = unicodedata.combining(character) != 0
    return is_mark and unicodedata.ucd_3_2_0.category(character) == "Cn"


# Texts on which tokenizers are known to differ, and a sample of the data.
#
# The fixed part is built for each tokenizer: white space, scripts, emoji, marks, digits, code, long
# runs, and the tokenizer's added tokens and vocabulary. It has about 300 KB and takes HF 0.2 s,
# once per tokenizer if verdicts are cached.


CORPUS_VERSION = 1
"""Raise it when the fixed texts change, so that cached verdicts are not used."""

_SAMPLE_ROWS = 200
_SAMPLE_BYTES = 100_000
_MAX_TEXT_BYTES = 16_384

# HF's BPE takes nearly linear time for one long word (128 KB of "a": 0.05 s), so a run can be long
# enough to reveal a regex that backtracks; eight times as much reveals no more and takes 0.5 s.
_LONG_RUN = 2**17
_RUN = 2**13

# Unicode blocks: the first character, and the one after the last.
_SCRIPTS = [
    (0xC0, 0x24F), (0x250, 0x2AF), (0x391, 0x3CE), (0x400, 0x45F),  # Latin, IPA, Greek, Cyrillic
    (0x531, 0x586), (0x5D0, 0x5EA), (0x620, 0x64A),  # Armenian, Hebrew, Arabic
    (0x905, 0x94D), (0x995, 0x9CD), (0xB95, 0xBCD),  # Devanagari, Bengali, Tamil
    (0xE01, 0xE4C), (0xF40, 0xF84), (0x1000, 0x103A),  # Thai, Tibetan, Myanmar
    (0x10D0, 0x10FA), (0x1100, 0x11F9), (0x1200, 0x1248),  # Georgian, Jamo, Ethiopic
    (0x1780, 0x17D2), (0x3041, 0x3096), (0x30A1, 0x30FA),  # Khmer, Hiragana, Katakana
    (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xFF01, 0xFFDC),  # CJK, Hangul, half and full width
    (0x10330, 0x1034A), (0x1D400, 0x1D454),  # Gothic, mathematical
    (0x20000, 0x20040), (0xF900, 0xF940),  # CJK extension B, compatibility
    (0x2190, 0x2290), (0x2070, 0x218B),  # symbols, superscripts and fractions
    (0x00, 0x20), (0x7F, 0xA0), (0x2000, 0x206F),  # controls, more controls, format and spaces
    (0xE000, 0xE010), (0xFFF0, 0xFFFF),  # private and specials, non-characters
    (0x710, 0x74B), (0x780, 0x7B2), (0x7C0, 0x7FB),  # Syriac, Thaana, N'Ko
    (0x800, 0x82E), (0xA05, 0xA76), (0xA85, 0xAF2),  # Samaritan, Gurmukhi, Gujarati
    (0xB05, 0xB78), (0xC05, 0xC70), (0xC85, 0xCF0),  # Oriya, Telugu, Kannada
    (0xD05, 0xD7F), (0xD85, 0xDF5), (0xE81, 0xEDF),  # Malayalam, Sinhala, Lao
    (0x13A0, 0x13FE), (0x1400, 0x1480),  # Cherokee, Canadian syllabics
    (0x1680, 0x16F1), (0x1700, 0x1716), (0x1800, 0x18AB),  # Ogham and runes, Tagalog, Mongolian
    (0x1900, 0x1950), (0x1950, 0x1AAE), (0x1B00, 0x1C50),  # Limbu, Tai, Balinese to Lepcha
    (0x1C50, 0x1C80), (0x1F00, 0x1FFF),  # Ol Chiki, Greek extended
    (0x2C00, 0x2D00), (0x2D30, 0x2D80),  # Glagolitic and Coptic, Tifinagh
    (0x3105, 0x3130), (0xA000, 0xA080), (0xA500, 0xA6F8),  # Bopomofo, Yi, Vai and Bamum
    (0xA800, 0xAA00), (0xAA00, 0xAC00),  # Indic extensions, Cham to Meetei
    (0xFB50, 0xFC00), (0x10000, 0x10080),  # Arabic forms, Linear B
    (0x10400, 0x104FC), (0x11000, 0x11076),  # Deseret to Osage, Brahmi
    (0x12000, 0x12080), (0x13000, 0x13080), (0x1E900, 0x1E960),  # cuneiform, hieroglyphs, Adlam
    (0x1F300, 0x1F650), (0x300, 0x34E), (0xFE00, 0xFE10),  # emoji, combining, variation selectors
]  # fmt: skip

_MAX_ADDED = 20_000
"""Of more added tokens, only every second, third, ... is tested: HF takes 30 us for each."""

_SPACES = [*" \t\n\r", "\r\n", *"\v\f\x85\u00a0\u2003\u2028\u3000"]

_EMOJI = [
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "\U0001f44d\U0001f3fd\U0001f44d\U0001f3ff ok",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7\U0001f1ef",
    "1\ufe0f\u20e3 #\ufe0f\u20e3 \u2764\ufe0f\u200d\U0001f525",
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
]

_MARKS = [
    "e\u0301 e\u0300\u0323 a\u0323\u0307 a\u0307\u0323 \u0301alone o\u0302\u0303\u0304\u0305\u0306",
    "\u212b \u212a \u1e9b\u0323 \ufb01 \u0958 \u0344 \u2126 \u1100\u1161\u11a8 \uac01",
    "na\u00efve nai\u0308ve \u00c5ngstr\u00f6m A\u030angstro\u0308m \u1ebf e\u0302\u0301",
    "\u0915\u094d\u200d\u0937 \u0e01\u0e33 \u0627\u064e\u0651 \u05d1\u05bc\u05b0",
]

_WRITING = [
    "I'm you're he'd we'll they've it's ISN'T WE'LL 'S 'LL '\u017f \u2019s ''s' 's's d'accord",
    "12345678901234567890 1,234.50 -3e-10 0x1F 1/2 \u00bd \u0661\u0662\u0663 \u096a\u096b 10\u00b2",
    "def f(x: int) -> str:\n\treturn f'{x!r:>{10}}'  # no\n\n\n\nclass A:\n        pass\n",
    '{"a": [1, 2.5, null, true], "b\\n": "\\u00e9"}\n<p class="x">&nbsp;</p>\n<!-- -->',
    "https://example.org/a%20b?c=d&e=f#g user@example.org C:\\Users\\x ../../etc $HOME ~/.x",
    "\\begin{align} \\frac{a}{b} &= \\sum_{i=0}^{n} x_i^2 \\\\ \\end{align} $$ \\alpha $$",
    "TGV0IHVzIGFsbCBiZSBiYXNlNjQgdG9nZXRoZXI= 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b",
    "supercalifragilisticexpialidocious Donaudampfschifffahrtsgesellschaftskapitaen ALLCAPSWORD",
    "camelCaseAnd_snake_case-and-kebab...!!!???;;;:::,,,((([[[{{{}}}]]])))\"\"\"'''```***___===---",
    "\u2581 \u2581\u2581a \u0120 \u010a <0x0A> <0xE2><0x96> ##ing [UNK] <unk> </w> @@ \ufffd\ufeff",
    " leading", "  two leading", "trailing ", "trailing  ", "\n", "\n\n", " \n ", "", " ", "  ",
    "mixed \u4f60\u597d, \u043c\u0438\u0440! \u0645\u0631 123\u5e74 caf\u00e9s \U0001f600end",
]  # fmt: skip


def adversarial_texts(pipeline: Pipeline) -> list[str]:
    """Return texts that an encoder must get right for this tokenizer; the same in every process."""
    runs = [u * (_RUN // len(u)) for u in ("=", "\n", " ", "1", "\u00e9", "ab", "\u4f60")]
    return [*short_texts(pipeline), "a" * _LONG_RUN, *runs]


def short_texts(pipeline: Pipeline) -> list[str]:
    """Return the adversarial texts without long runs, which take some tokenizers seconds."""
    texts = [*_WRITING, *_EMOJI, *_MARKS]
    texts += [unicodedata.normalize("NFD", text) for text in _WRITING if not text.isascii()]
    for first, last in _SCRIPTS:
        # Letters a to j in words of 1, 2, 3 and 4: "a bc def ghij". After length 7 comes 1 again.
        characters, words = "".join(map(chr, range(first, last))), list[str]()
        while characters:
            length = len(words) % 7 + 1
            words.append(characters[:length])
            characters = characters[length:]
        texts.append(" ".join(words) + "\n" + "".join(words))
    runs = [
        "x" + " " * n + "y" + "\n" * n + "z" + "\t" * n for n in (*range(1, 36), 64, 127, 128, 129)
    ]
    pairs = [f"{a}{b}w{b}{a}1{a}{a}{b}.{b}" for a in _SPACES for b in _SPACES]
    texts += ["".join(runs), "".join(pairs), *runs[::5], *pairs[::7]]
    # Added tokens next to all kinds of neighbours; every tenth in full, the others short.
    for number, token in enumerate(pipeline.added[:: 1 + len(pipeline.added) // _MAX_ADDED]):
        text = token.text
        if number % 10 == 0 or number < 40:
            cut = f"{text[:-1]} {text.upper()}  {text[1:]}{text}"
            texts.append(f"{text}a {text} {text}{text}\n{text}\n {cut}.{text}")
        else:
            texts.append(f"a{text} b\n{text}")
    known = pipeline.token_bytes
    if known is not None:  # pieces of the vocabulary, joined in ways that invite other merges
        stride = max(1, len(known) // 12_000)
        pieces = known.take(pa.array(np.arange(0, len(known), stride))).to_pylist()
        words = [piece.decode(errors="ignore") for piece in pieces]
        for number, start in enumerate(range(0, len(words), 40)):
            texts.append(("" if number % 2 else " ").join(words[start : start + 40]))
    return texts


def sample_texts(texts: pa.ChunkedArray) -> list[str]:
    """Return a fiftieth of the data, 32 to 200 rows and up to 100 KB, half of it not in ASCII.

    Rows are chosen by position, so the same table gives the same sample. Long texts are truncated.
    """
    rows = np.arange(len(texts))
    foreign = rows[~pc.string_is_ascii(texts).to_numpy()]
    num_bytes = pc.sum(pc.binary_length(texts)).as_py() or 0
    average = 1 + num_bytes // max(len(texts), 1)
    # HF needs as much time for a fiftieth as the fast encoder, 60 times as fast, for everything.
    size = int(np.clip(min(num_bytes // 50, _SAMPLE_BYTES) // average, 32, _SAMPLE_ROWS))
    chosen = _spread(foreign, size // 2)
    chosen = np.union1d(chosen, _spread(rows, size - len(chosen)))
    sample = [texts[row].as_py() for row in chosen.tolist()]  # `take` would join all chunks first
    return [text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore") for text in sample]


def _spread(rows: np.ndarray, size: int) -> np.ndarray:
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(size, len(rows))).astype(np.int64))]
