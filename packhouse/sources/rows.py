"""Parsed rows, and what they have in common."""

from functools import cached_property
from itertools import chain
from typing import Any

__all__ = ["Rows"]


class Rows(list[Any]):
    """Parsed rows, and what they have in common, which is found once."""

    @cached_property
    def are_objects(self) -> bool:
        """Whether every row is an object."""
        return not set(map(type, self)) - {dict}

    @cached_property
    def layouts(self) -> set[tuple[str, ...]]:
        """Keys of the rows that are objects: each set of keys in one order, once."""
        return set(map(tuple, self if self.are_objects else filter(_is_object, self)))

    @cached_property
    def value_types(self) -> set[type]:
        """Types of the values of these keys."""
        objects = self if self.are_objects else filter(_is_object, self)
        return set(map(type, chain.from_iterable(map(dict.values, objects))))


def _is_object(row: Any) -> bool:
    return type(row) is dict
