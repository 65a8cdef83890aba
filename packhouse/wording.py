"""Words of messages: numbers with what they count, and what libraries say."""

__all__ = ["counted", "first_line"]


def counted(number: int, what: str) -> str:
    """Return a number with the noun that it counts, in the singular or the plural.

    Example:
        >>> counted(1, "row"), counted(2_000, "bad row"), counted(0, "copy")
        ('1 row', '2,000 bad rows', '0 copies')
    """
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number:,} {what}"


def first_line(error: BaseException, most: int = 300) -> str:
    r"""Return the first line of a library's message, cut after `most` characters; or its class.

    Example:
        >>> first_line(ValueError("no such table\nLINE 1: ...")), first_line(TimeoutError())
        ('no such table', 'TimeoutError')
    """
    lines = str(error).splitlines()
    return lines[0][:most] if lines else type(error).__name__
