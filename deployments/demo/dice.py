"""Random choices whose results are the same on every Python: only `Random.random()` promises that.

`randrange`, `sample` and `shuffle` may change their algorithm between versions of Python, and then
the committed sample could no longer be made again.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Dice", "Row", "row"]

Item = TypeVar("Item")
Row = dict[str, str]


class Dice:
    """A seeded source of choices.

    Example:
        >>> dice = Dice(7)
        >>> dice.number(1, 6), dice.pick("abc"), dice.some("abcd", 2)
        (2, 'a', ['c', 'a'])
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one of the items."""
        return items[self.number(0, len(items) - 1)]

    def some(self, items: Sequence[Item], count: int) -> list[Item]:
        """Return `count` different items, in random order."""
        rest = list(items)
        return [rest.pop(self.number(0, len(rest) - 1)) for _ in range(count)]

    def mixed(self, items: Sequence[Item]) -> list[Item]:
        """Return all items in random order."""
        return self.some(items, len(items))


def row(instruction: str, output: str, context: str = "") -> Row:
    """Return one Alpaca row; `context` becomes its `input`."""
    return {"instruction": instruction, "input": context, "output": output}
