"""Numbers with what they count, for messages."""

__all__ = ["counted"]


def counted(number: int, what: str) -> str:
    """Return a number with the noun that it counts, in the singular or the plural.

    Example:
        >>> counted(1, "row"), counted(2_000, "bad row"), counted(0, "copy")
        ('1 row', '2,000 bad rows', '0 copies')
    """
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number:,} {what}"
