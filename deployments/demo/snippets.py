"""Functions that answers show as code and that the generators really call for the example."""

from collections import Counter
from collections.abc import Callable
from typing import Any

__all__ = ["SNIPPETS"]


def triangular(n: int) -> int:
    """Return 1 + 2 + ... + n."""
    return n * (n + 1) // 2


def digit_sum(number: int) -> int:
    """Return the sum of the decimal digits."""
    return sum(int(digit) for digit in str(abs(number)))


def is_prime(n: int) -> bool:
    """Tell whether n has no divisor but 1 and itself."""
    if n < 2:
        return False
    divisor = 2
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 1
    return True


def fibonacci(count: int) -> list[int]:
    """Return the first Fibonacci numbers."""
    numbers, a, b = [], 0, 1
    for _ in range(count):
        numbers.append(a)
        a, b = b, a + b
    return numbers


def is_palindrome(text: str) -> bool:
    """Tell whether the letters read the same from both ends."""
    letters = [c for c in text.lower() if c.isalpha()]
    return letters == letters[::-1]


def most_common_letter(text: str) -> str:
    """Return the letter that occurs most often, the first of them if several do."""
    return Counter(c for c in text.lower() if c.isalpha()).most_common(1)[0][0]


def without_repeats(items: list[str]) -> list[str]:
    """Drop repeated items and keep the order of the others."""
    return list(dict.fromkeys(items))


def windows(items: list[int], size: int) -> list[list[int]]:
    """Return every run of `size` neighbours."""
    return [items[i : i + size] for i in range(len(items) - size + 1)]


def running_total(values: list[int]) -> list[int]:
    """Return the sums of all beginnings of a list."""
    totals, total = [], 0
    for value in values:
        total += value
        totals.append(total)
    return totals


def flatten(rows: list[list[int]]) -> list[int]:
    """Join lists of a list into one."""
    return [value for row in rows for value in row]


def run_lengths(text: str) -> str:
    """Shorten runs of a character: `aaab` becomes `3a1b`."""
    result, count = "", 0
    for i, character in enumerate(text):
        count += 1
        if i + 1 == len(text) or text[i + 1] != character:
            result, count = result + f"{count}{character}", 0
    return result


def title_case(text: str) -> str:
    """Begin every word with a capital letter."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split())


# Function, what it is asked for, arguments to choose from.
SNIPPETS: tuple[tuple[Callable[..., Any], str, list[tuple[Any, ...]]], ...] = (
    (triangular, "adds the whole numbers from 1 to n", [(7,), (10,), (36,), (100,)]),
    (digit_sum, "adds the digits of a number", [(1984,), (50721,), (999,), (31337,)]),
    (is_prime, "tells whether a number is prime", [(91,), (97,), (221,), (401,)]),
    (fibonacci, "returns the first Fibonacci numbers", [(6,), (10,), (13,)]),
    (
        is_palindrome,
        "tells whether a text is a palindrome, ignoring spaces and case",
        [("Never odd or even",), ("A quiet morning",), ("Step on no pets",)],
    ),
    (
        most_common_letter,
        "finds the most common letter of a text",
        [("banana bread",), ("Mississippi",), ("the weather there",)],
    ),
    (
        without_repeats,
        "removes repeated items from a list without changing the order",
        [(["red", "blue", "red", "green"],), (["b", "a", "b", "b", "c"],)],
    ),
    (
        windows,
        "returns all runs of neighbours of a given size",
        [([3, 1, 4, 1, 5], 3), ([2, 7, 1, 8], 2)],
    ),
    (running_total, "returns the running totals of a list", [([4, -1, 10, 2],), ([5, 5, 5],)]),
    (flatten, "joins nested lists into one list", [([[1, 2], [], [3]],), ([[9], [8, 7]],)]),
    (
        run_lengths,
        "shortens runs of equal characters by writing their length",
        [("aaabccd",), ("zzzzzz",), ("hello",)],
    ),
    (
        title_case,
        "begins every word of a text with a capital letter",
        [("the old man",), ("notes from paris",)],
    ),
)
