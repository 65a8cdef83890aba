"""Parts of a page of HTML that shows itself in a notebook, light or dark, and fetches nothing."""

from collections.abc import Iterable
from html import escape

from packhouse.escaping import for_terminal

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
