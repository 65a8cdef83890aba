"""Patterns that find control tokens."""

import random
import re

import pytest

from packhouse.tokenize.control_tokens import any_of


@pytest.mark.parametrize("letters", ["a", "ab", "a]^-\\[.é☃ ", "abcdefgh<|>"])
def test_a_pattern_finds_the_longest_text_at_each_place(letters):
    random_ = random.Random(7)
    texts = {"".join(random_.choices(letters, k=random_.randint(1, 70))) for _ in range(500)}
    texts |= {text[:3] for text in texts}
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    expected = re.compile("|".join(map(re.escape, longest_first)))
    searched = "".join(random_.choices(letters, k=9000)) + "".join(longest_first)
    assert re.findall(any_of(texts), searched) == expected.findall(searched)


def test_many_numbered_tokens_take_a_short_pattern():
    pattern = any_of(f"<extra_{n}>" for n in range(300_000))
    assert len(pattern) < 300
    assert re.fullmatch(pattern, "<extra_299999>")
    assert not re.search(pattern, "<extra_300000>")
