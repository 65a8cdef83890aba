"""The words of texts, as numbers, for what compares texts by runs of words.

Text is put in Unicode's NFKC form and lower case; letters and digits make words, all else divides
them, and each ideograph, kana or Thai letter is a word of its own, since such scripts put no
spaces. All of it runs in Arrow on whole columns; only different words are hashed one by one.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.lists import list_items
from packhouse.system.arrays import Int64s, Uint64s

Hashes = Uint64s

FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that every word keeps its weight modulo 2**64

_UNSPACED = r"([\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}])"


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The words of texts, one text after another."""

    values: pa.Array
    offsets: Int64s
    """Where each text's words begin, shape [num_texts + 1]."""

    def text_of(self, places: Int64s) -> Int64s:
        """Number of the text that each word is of."""
        return np.searchsorted(self.offsets, places, "right") - 1

    def run(self, place: int, num_words: int) -> str:
        """So many words from a place on, for people."""
        return " ".join(self.values.slice(place, num_words).to_pylist())


def words_of(texts: pa.Array) -> Words:
    """Split texts, null taken for empty, into words.

    Example:
        >>> words = words_of(pa.array(["Add 1, please!", None, "\u4f60\u597d"]))
        >>> words.values.to_pylist(), words.offsets.tolist()
        (['add', '1', 'please', '\u4f60', '\u597d'], [0, 3, 3, 5])
    """
    lower = pc.utf8_lower(pc.utf8_normalize(pc.fill_null(texts, ""), form="NFKC"))
    is_plain = pc.string_is_ascii(lower)
    if not pc.all(is_plain).as_py():
        spaced = pc.replace_substring_regex(lower, _UNSPACED, r" \1 ")
        lower = pc.if_else(is_plain, lower, spaced)
    plain = pc.utf8_trim(pc.replace_substring_regex(lower, r"[^\pL\pN\pM]+", " "), " ")
    values, offsets = list_items(pc.split_pattern(plain, " "))
    is_word = np.asarray(pc.binary_length(values)) > 0  # a text without any splits into one ""
    if is_word.all():
        return Words(values, offsets)
    before = np.append(0, np.cumsum(is_word))
    return Words(values.filter(pa.array(is_word)), before[offsets])


def hash_words(values: pa.Array) -> Hashes:
    """64 bits of each word, the same on every machine and in every run."""
    encoded = values.dictionary_encode()
    different = [
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        for word in encoded.dictionary.to_pylist()
    ]
    numbers = np.array(different, np.uint64)
    return np.asarray(numbers[encoded.indices.to_numpy(zero_copy_only=False)])


def run_hashes(numbers: Hashes, starts: Int64s, length: int) -> Hashes:
    """Hash the run of `length` numbers from each start on.

    Numbers [5 7 9], starts [0 1], length 2: hashes of 5 7 and of 7 9.
    """
    weighted = numbers * FACTOR
    hashes = np.zeros(len(starts), np.uint64)
    for offset in range(length):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * FACTOR + weighted[starts + offset]
    return hashes
