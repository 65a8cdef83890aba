r"""Escape untrusted text (rows, file names, manifests) for terminals, Markdown and HTML.

On a terminal, an escape sequence can move the cursor or fill the clipboard, and a bidirectional
control shows text in another order than it is read. In Markdown, `![](http://x)` fetches an address
and `[a](http://x)` links to one. There is one function for each output. Letters of all languages
stay unchanged.

    for_terminal("a\x1b[2J")       a\x1b[2J, all of it visible
    for_markdown("[a](http://x)")  &#91;a&#93;(http&#58;//x), shown literally
    markdown_code("a`b")           `a\x60b`, a code span that its text cannot end
"""

import re
from collections.abc import Iterable, Sequence
from html import escape

# HTML for notebooks. Colors are half transparent, so that they suit light and dark pages. Nothing
# is fetched.
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
    """Return text escaped for HTML.

    Example:
        >>> html_text("<script>a & b")
        '&lt;script&gt;a &amp; b'
    """
    return escape(for_terminal(text, keep_lines=True))


def html_table(lines: Iterable[tuple[str, str]]) -> str:
    """Return an HTML table of names and values."""
    rows = (f"<tr><td>{html_text(a)}</td><td>{html_text(b)}</td></tr>" for a, b in lines)
    return f"<table>{''.join(rows)}</table>"


# C1 and bidirectional controls, line and paragraph separators, code points that UTF-8 or XML cannot
# contain (surrogates, non-characters), and tag characters, which spell invisible ASCII.
_OTHERS = (
    "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
    "\U000e0000-\U000e007f"
)
_ACTIVE = re.compile(f"[\x00-\x1f{_OTHERS}]")
_ACTIVE_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_OTHERS}]")

# Characters that can begin a tag, link, image, list, heading, cell, emphasis, formula or an address
# that becomes a link. Punctuation inside words stays: `seq_len`, `rows.jsonl`.
_MARKDOWN = re.compile(
    r"[&<>\[\]`*~\\|#{}$]|^[-+=]|^[0-9]+[.)](?= |$)|:(?=//)|(?<=www)\."
    r"|(?<![^\W_])_|_(?![^\W_])",
    re.IGNORECASE,
)


def for_terminal(text: str, *, keep_lines: bool = False) -> str:
    r"""Return text with control characters written as escapes, so that no terminal acts on them.

    Args:
        text: Any text.
        keep_lines: Keep newlines and tabs.

    Example:
        >>> print(for_terminal("a\x1b[31mb\u202ec\n"))
        a\x1b[31mb\u202ec\n
    """
    active = _ACTIVE_IN_LINES if keep_lines else _ACTIVE
    return active.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def for_markdown(text: str) -> str:
    """Return text as one line, escaped for Markdown paragraphs and tables.

    Example:
        >>> for_markdown("2 of 3 rows | ![](http://x.org)")
        '2 of 3 rows &#124; !&#91;&#93;(http&#58;//x.org)'
    """
    line = for_terminal(" ".join(text.split()))
    line = _MARKDOWN.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)
    return line.replace("@", "@\u200b")  # a zero-width space, so that nobody is mentioned


def markdown_code(text: str) -> str:
    r"""Return text as a Markdown code span for paragraphs and tables.

    Example:
        >>> print(markdown_code("s3://bucket/a|b`c"))
        `s3://bucket/a\x7cb\x60c`
    """
    line = for_terminal(text).replace("`", r"\x60").replace("|", r"\x7c")
    return f"`{line or ' '}`"


class Markdown(str):
    """A table cell that is already Markdown, such as a result of `markdown_code`."""

    __slots__ = ()


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table; cells are escaped, numbers have commas and align right.

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
    return "-" if value in (None, "-") else for_markdown(str(value))  # in a cell, "-" is not a list
