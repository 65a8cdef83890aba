r"""Text from rows, file names and manifests, made harmless where it leaves the program.

Whoever writes a row, a file name or a manifest chooses what is in it. On a terminal an escape
sequence moves the cursor or fills the clipboard, and a bidirectional control shows text in another
order than it is read. In markdown, `![](http://x)` fetches and `[a](http://x)` leads away. There
is one function for each exit; letters of every language stay as they are.

    for_terminal("a\x1b[2J")       a\x1b[2J, all of it visible
    for_markdown("[a](http://x)")  &#91;a&#93;(http&#58;//x), shown as it was written
    markdown_code("a`b")           `a\x60b`, a code span that its text cannot end
"""

import re
from collections.abc import Iterable, Sequence
from html import escape

# Parts of a page of HTML that shows itself in a notebook, light or dark, and fetches nothing.


# Half transparent, so that they go with a light and a dark page.
PAGE_STYLE = """<style>
.packhouse {font: 13px/1.5 system-ui, sans-serif; color: inherit}
.packhouse table {border-collapse: collapse; margin: 6px 0; background: none; font: inherit}
.packhouse th, .packhouse td {text-align: left; padding: 2px 12px 2px 0; background: none;
  border: 0; vertical-align: top; color: inherit}
.packhouse td.number {text-align: right; font-variant-numeric: tabular-nums}
.packhouse pre {white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 10px;
  padding: 6px 8px; border-left: 3px solid rgb(128 128 128 / .45); background: none;
  color: inherit; font: 12px/1.5 ui-monospace, monospace}
.packhouse .trained {background: rgb(46 160 67 / .32); border-radius: 2px}
.packhouse .special {outline: 1px solid rgb(64 128 240 / .75); outline-offset: -1px;
  border-radius: 2px}
.packhouse .quiet {opacity: .7}
.packhouse svg {display: block; margin: 6px 0}
</style>"""


def html_text(text: str) -> str:
    """Return text that a page shows as it is.

    Example:
        >>> html_text("<script>a & b")
        '&lt;script&gt;a &amp; b'
    """
    return escape(for_terminal(text, keep_lines=True))


def html_table(lines: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    rows = (f"<tr><td>{html_text(a)}</td><td>{html_text(b)}</td></tr>" for a, b in lines)
    return f"<table>{''.join(rows)}</table>"


# C1 and bidirectional controls, line and paragraph separators, what streams and XML cannot hold
# (half surrogates, non-characters), and the tag characters, which spell invisible ASCII.
_OTHERS = (
    "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
    "\U000e0000-\U000e007f"
)
_ACTIVE = re.compile(f"[\x00-\x1f{_OTHERS}]")
_ACTIVE_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_OTHERS}]")

# What can begin a tag, a link, an image, a list, a heading, a cell, emphasis, mathematics or an
# address that becomes a link by itself. Punctuation inside words stays: `seq_len`, `rows.jsonl`.
_MARKDOWN = re.compile(
    r"[&<>\[\]`*~\\|#{}$]|^[-+=]|^[0-9]+[.)](?= |$)|:(?=//)|(?<=www)\."
    r"|(?<![^\W_])_|_(?![^\W_])",
    re.IGNORECASE,
)


def for_terminal(text: str, *, keep_lines: bool = False) -> str:
    r"""Return text that no terminal acts on: what would act is written as its escape.

    Args:
        text: anything.
        keep_lines: leave newlines and tabs, where the text is no part of a line.

    Example:
        >>> print(for_terminal("a\x1b[31mb\u202ec\n"))
        a\x1b[31mb\u202ec\n
    """
    active = _ACTIVE_IN_LINES if keep_lines else _ACTIVE
    return active.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_markdown(text: str) -> str:
    """Return text in one line that markdown shows as it is, in a paragraph and in a table.

    Example:
        >>> for_markdown("2 of 3 rows | ![](http://x.org)")
        '2 of 3 rows &#124; !&#91;&#93;(http&#58;//x.org)'
    """
    line = for_terminal(" ".join(text.split()))
    line = _MARKDOWN.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)
    return line.replace("@", "@\u200b")  # mentions nobody, and is no address


def markdown_code(text: str) -> str:
    r"""Return text as a code span, in a paragraph and in a table.

    Example:
        >>> print(markdown_code("s3://bucket/a|b`c"))
        `s3://bucket/a\x7cb\x60c`
    """
    line = for_terminal(text).replace("`", r"\x60").replace("|", r"\x7c")
    return f"`{line or ' '}`"


class Markdown(str):
    """A cell that is markdown already, such as what `markdown_code` returns."""

    __slots__ = ()


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; cells are escaped, numbers have commas and stand at the right.

    Example:
        >>> markdown_table(("a", "b", "c"), [(1234, "x|y", Markdown("**z**"))])
        ['| a | b | c |', '|---:|---|---|', '| 1,234 | x&#124;y | **z** |']
    """
    cells = [[*row] for row in rows]
    is_number = [isinstance(cell, int) for cell in cells[0]] if cells else [False] * len(columns)
    ruler = "|".join("---:" if right else "---" for right in is_number)
    lines = [f"| {' | '.join(columns)} |", f"|{ruler}|"]
    return lines + [f"| {' | '.join(map(_cell, row))} |" for row in cells]


def _cell(value: object) -> str:
    if isinstance(value, Markdown):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value in (None, "-") else for_markdown(str(value))  # a dash is no list in a cell


def fenced(text: str, language: str) -> list[str]:
    """Return the lines of a block of code; no line of the text can end it.

    Example:
        >>> fenced("a: ```", "yaml")
        ['````yaml', 'a: ```', '````']
    """
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=2))
    return [f"{fence}{language}", text.rstrip("\n"), fence]
