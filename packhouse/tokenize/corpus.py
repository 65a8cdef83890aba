"""Texts on which tokenizers are known to part ways, and a sample of the data at hand.

The fixed part is made for a tokenizer: besides white space, scripts, emoji, marks, digits, code
and runs, it holds that tokenizer's own added tokens and vocabulary. About 300 KB; HF takes
0.2 s, once per tokenizer where verdicts are kept.
"""

import unicodedata

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.tokenize.pipeline import Pipeline

CORPUS_VERSION = 1
"""Rises when the fixed texts change, so that kept verdicts are given anew."""

_SAMPLE_ROWS = 200
_SAMPLE_BYTES = 100_000
_MAX_TEXT_BYTES = 16_384

# HF's BPE is near linear in one long word (128 KB of "a": 0.05 s), so a run can be long enough to
# show a regular expression that backtracks; eight times as much shows no more and takes 0.5 s.
_LONG_RUN = 2**17
_RUN = 2**13

_SCRIPTS = {
    "Latin": (0xC0, 0x24F),
    "IPA": (0x250, 0x2AF),
    "Greek": (0x391, 0x3CE),
    "Cyrillic": (0x400, 0x45F),
    "Armenian": (0x531, 0x586),
    "Hebrew": (0x5D0, 0x5EA),
    "Arabic": (0x620, 0x64A),
    "Devanagari": (0x905, 0x94D),
    "Bengali": (0x995, 0x9CD),
    "Tamil": (0xB95, 0xBCD),
    "Thai": (0xE01, 0xE4C),
    "Tibetan": (0xF40, 0xF84),
    "Myanmar": (0x1000, 0x103A),
    "Georgian": (0x10D0, 0x10FA),
    "Jamo": (0x1100, 0x11F9),
    "Ethiopic": (0x1200, 0x1248),
    "Khmer": (0x1780, 0x17D2),
    "Hiragana": (0x3041, 0x3096),
    "Katakana": (0x30A1, 0x30FA),
    "CJK": (0x4E00, 0x4F00),
    "Hangul": (0xAC00, 0xAD00),
    "half and full width": (0xFF01, 0xFFDC),
    "Gothic": (0x10330, 0x1034A),
    "mathematical": (0x1D400, 0x1D454),
    "CJK extension B": (0x20000, 0x20040),
    "compatibility": (0xF900, 0xF940),
    "symbols": (0x2190, 0x2290),
    "superscripts and fractions": (0x2070, 0x218B),
    "controls": (0x00, 0x20),
    "more controls": (0x7F, 0xA0),
    "format and spaces": (0x2000, 0x206F),
    "private and specials": (0xE000, 0xE010),
    "non-characters": (0xFFF0, 0xFFFF),
    "Syriac": (0x710, 0x74B),
    "Thaana": (0x780, 0x7B2),
    "N'Ko": (0x7C0, 0x7FB),
    "Samaritan": (0x800, 0x82E),
    "Gurmukhi": (0xA05, 0xA76),
    "Gujarati": (0xA85, 0xAF2),
    "Oriya": (0xB05, 0xB78),
    "Telugu": (0xC05, 0xC70),
    "Kannada": (0xC85, 0xCF0),
    "Malayalam": (0xD05, 0xD7F),
    "Sinhala": (0xD85, 0xDF5),
    "Lao": (0xE81, 0xEDF),
    "Cherokee": (0x13A0, 0x13FE),
    "Canadian syllabics": (0x1400, 0x1480),
    "Ogham and runes": (0x1680, 0x16F1),
    "Tagalog": (0x1700, 0x1716),
    "Mongolian": (0x1800, 0x18AB),
    "Limbu": (0x1900, 0x1950),
    "Tai": (0x1950, 0x1AAE),
    "Balinese to Lepcha": (0x1B00, 0x1C50),
    "Ol Chiki": (0x1C50, 0x1C80),
    "Greek extended": (0x1F00, 0x1FFF),
    "Glagolitic and Coptic": (0x2C00, 0x2D00),
    "Tifinagh": (0x2D30, 0x2D80),
    "Bopomofo": (0x3105, 0x3130),
    "Yi": (0xA000, 0xA080),
    "Vai and Bamum": (0xA500, 0xA6F8),
    "Indic extensions": (0xA800, 0xAA00),
    "Cham to Meetei": (0xAA00, 0xAC00),
    "Arabic forms": (0xFB50, 0xFC00),
    "Linear B": (0x10000, 0x10080),
    "Deseret to Osage": (0x10400, 0x104FC),
    "Brahmi": (0x11000, 0x11076),
    "cuneiform": (0x12000, 0x12080),
    "hieroglyphs": (0x13000, 0x13080),
    "Adlam": (0x1E900, 0x1E960),
    "emoji": (0x1F300, 0x1F650),
    "combining": (0x300, 0x34E),
    "variation selectors": (0xFE00, 0xFE10),
}

_SPACES = [
    " ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\v",
    "\f",
    "\x85",
    "\u00a0",
    "\u2003",
    "\u2028",
    "\u3000",
]

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
    """Texts that an encoder of this tokenizer has to get right; the same in every process."""
    units = ("=", "\n", " ", "1", "\u00e9", "ab", "\u4f60")
    runs = [unit * (_RUN // len(unit)) for unit in units]
    return [*short_texts(pipeline), "a" * _LONG_RUN, *runs]


def short_texts(pipeline: Pipeline) -> list[str]:
    """Adversarial texts without the long runs, which take some tokenizers seconds."""
    texts = [*_WRITING, *_EMOJI, *_MARKS]
    texts += [unicodedata.normalize("NFD", text) for text in _WRITING if not text.isascii()]
    texts += [_script(first, last) for first, last in _SCRIPTS.values()]
    runs = [
        "x" + " " * n + "y" + "\n" * n + "z" + "\t" * n for n in (*range(1, 36), 64, 127, 128, 129)
    ]
    pairs = [f"{a}{b}w{b}{a}1{a}{a}{b}.{b}" for a in _SPACES for b in _SPACES]
    texts += ["".join(runs), "".join(pairs), *runs[::5], *pairs[::7]]
    texts += [_around(token.text, number) for number, token in enumerate(pipeline.added)]
    return texts + _vocabulary(pipeline)


def sample_texts(texts: pa.ChunkedArray) -> list[str]:
    """A fiftieth of the data, 32 to 200 rows, up to 100 KB: half of it from rows not in ASCII.

    HF takes for a fiftieth as long as the fast encoder for all. Rows are chosen by their place, so
    the same table gives the same sample. Long texts are cut.
    """
    rows = np.arange(len(texts))
    foreign = rows[~pc.string_is_ascii(texts).to_numpy()]
    num_bytes = pc.sum(pc.binary_length(texts)).as_py() or 0
    average = 1 + num_bytes // max(len(texts), 1)
    size = int(np.clip(min(num_bytes // 50, _SAMPLE_BYTES) // average, 32, _SAMPLE_ROWS))
    chosen = _spread(foreign, size // 2)
    chosen = np.union1d(chosen, _spread(rows, size - len(chosen)))
    sample = [texts[row].as_py() for row in chosen.tolist()]  # `take` would join all chunks first
    return [text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore") for text in sample]


def _spread(rows: np.ndarray, size: int) -> np.ndarray:
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(size, len(rows))).astype(np.int64))]


def _script(first: int, last: int) -> str:
    """All characters of a block in words of growing length."""
    characters = [chr(code) for code in range(first, last)]
    # Letters a to j in words of 1, 2, 3 and 4: "a bc def ghij"; behind 7 comes 1 again.
    words, length = [], 1
    while characters:
        words.append("".join(characters[:length]))
        characters = characters[length:]
        length = length % 7 + 1
    return " ".join(words) + "\n" + "".join(words)


def _around(text: str, number: int) -> str:
    """An added token next to all kinds of neighbours; every tenth in full, the others short."""
    if number % 10 == 0 or number < 40:
        cut = f"{text[:-1]} {text.upper()}  {text[1:]}{text}"
        return f"{text}a {text} {text}{text}\n{text}\n {cut}.{text}"
    return f"a{text} b\n{text}"


def _vocabulary(pipeline: Pipeline) -> list[str]:
    """Pieces of the vocabulary itself, joined in ways that tempt to other merges."""
    if pipeline.token_bytes is None:
        return []
    stride = max(1, len(pipeline.token_bytes) // 12_000)
    pieces = pipeline.token_bytes.take(pa.array(np.arange(0, len(pipeline.token_bytes), stride)))
    words = [piece.decode(errors="ignore") for piece in pieces.to_pylist()]
    groups = [words[start : start + 40] for start in range(0, len(words), 40)]
    return [
        "".join(group) if number % 2 else " ".join(group) for number, group in enumerate(groups)
    ]
