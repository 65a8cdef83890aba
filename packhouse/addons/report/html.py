"""Building blocks of report pages: sections, tables, charts, data for scripts, one whole file.

Names, reasons, tokens and settings are of others. Text goes through `html_text`; data for scripts
is JSON without `<`, `>` and `&`. The page's policy allows its own scripts by their sha256, styles
and nothing else: no text of a row can run or fetch anything, even if one of these were to fail.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import zip_longest

from packhouse.addons.report.figures import Figure
from packhouse.system.escaping import html_text

# The JavaScript that draws charts: Vega, Vega-Lite and Vega-Embed as one file, never fetched.
#
# `hatch_build.py` writes `vega.js` into wheels, and into a checkout that is installed editable,
# with `vl-convert-python`. It is not in the repository. A report without it shows its numbers as
# tables.


@cache
def vega_bundle() -> str | None:
    """Return the JavaScript, 0.9 MB; None where this installation has none."""
    try:
        code = read_asset("vega.js")
    except FileNotFoundError:
        return None
    return code if "</script" not in code and "<!--" not in code else None


def read_asset(name: str) -> str:
    """Return a text file of this package."""
    return files("packhouse.addons.report").joinpath(name).read_text("utf-8")


_MOST_CODE = 100_000  # characters of settings
_WITHOUT_VEGA = (
    "Charts need the JavaScript that packhouse's wheel carries, and this installation has none; "
    "the tables show the same numbers."
)


def header(title: str, inner: str) -> str:
    """Return the top of a page: its title, HTML below it, and the button for light or dark."""
    return (
        f"<header><div><h1>{html_text(title)}</h1>{inner}</div>"
        '<button id=theme type=button aria-label="Light or dark colours">Dark</button></header>'
    )


def section(name: str, title: str, *parts: str) -> str:
    """Return a section; empty where all of its parts are."""
    inner = "".join(parts)
    if not inner:
        return ""
    head = f'<h2 id="h-{name}">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="h-{name}">{head}{inner}</section>'


def tiles(pairs: Iterable[tuple[str, str, str]]) -> str:
    """Return numbers in boxes: name, value, and a note below."""
    boxes = (
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd>"
        f"<dd class=note>{html_text(note)}</dd></div>"
        for name, value, note in pairs
    )
    return f"<dl class=tiles>{''.join(boxes)}</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> str:
    """Return a table; numbers stand at the right, and wide tables scroll by themselves."""
    cells = [[*map(_cell, row)] for row in rows]
    kinds = [" class=number" * ("class=number" in cell[:16]) for cell in cells[0]] if cells else []
    heads = zip_longest(columns, kinds, fillvalue="")
    head = "".join(f"<th scope=col{kind}>{html_text(name)}</th>" for name, kind in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    name = html_text(caption)
    return (
        f'<div class=scroll role=group tabindex=0 aria-label="{name}"><table>'
        f"<caption class=hidden>{name}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: object) -> str:
    is_number = type(value) in (int, float)
    text = f"{value:,}" if is_number else "" if value is None else str(value)
    is_number = is_number or re.fullmatch(r"[0-9.,]+%", text) is not None
    kind = " class=number" if is_number else " class=wide" * (len(text) > 25)
    return f"<td{kind}>{html_text(text)}</td>"


def details(summary: str, inner: str, *, is_open: bool = False) -> str:
    """Return what opens on a click."""
    return (
        f"<details{' open' * is_open}><summary>{html_text(summary)}</summary>{inner}</details>"
        if inner
        else ""
    )


def preformatted(text: str, name: str) -> str:
    """Return code or settings, which scroll by themselves where they are long."""
    if len(text) > _MOST_CODE:
        text = f"{text[:_MOST_CODE]} ... cut here, {len(text) - _MOST_CODE:,} more characters"
    return f'<pre role=group tabindex=0 aria-label="{html_text(name)}">{html_text(text)}</pre>'


def figure(drawn: Figure) -> str:
    """Return a chart above the table of its numbers."""
    rows = table(drawn.columns, drawn.rows, drawn.title)
    title, says = html_text(drawn.title), html_text(drawn.says)
    head = f"<figcaption><b>{title}</b> <span>{says}</span></figcaption>"
    if vega_bundle() is None:
        return f"<figure>{head}{rows}</figure>"
    chart = f'<div class=chart role=img aria-label="{title}. {says}" id="chart-{drawn.name}"></div>'
    data = _json(f"spec-{drawn.name}", drawn.spec, "spec")
    return f"<figure>{head}{chart}{data}{details('Numbers', rows)}</figure>"


def _json(name: str, value: object, role: str) -> str:
    """Data for a script. ASCII; what could end the element or begin a tag is escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}" class="{role}">{text}</script>'


def page(title: str, head: str, sections: Sequence[str], data: Mapping[str, object]) -> str:
    """Return a whole file.

    Args:
        title: of the window.
        head: HTML above the sections.
        sections: HTML; their links stand at the side.
        data: name -> JSON for the page's own script.
    """
    vega = vega_bundle()
    scripts = [*([vega] if vega else []), read_asset("page.js")]
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    links = "".join(_link(each) for each in sections if each)
    return "".join(
        [
            "<!doctype html>\n",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html_text(title)}</title><style>{read_asset('page.css')}</style>",
            "</head><body>",
            '<a class=skip href="#main">Skip to content</a>',
            f'<nav aria-label="Sections"><ul>{links}</ul></nav><main id=main>{head}',
            "" if vega else f"<p class=warning>{_WITHOUT_VEGA}</p>",
            *sections,
            "</main>",
            *(_json(name, value, "data") for name, value in data.items()),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _link(html: str) -> str:
    """A link to a section, from its own name and title."""
    name = html.split('id="', 1)[1].split('"', 1)[0]
    title = html.split(f'<h2 id="h-{name}">', 1)[1].split("</h2>", 1)[0]
    return f'<li><a href="#{name}">{title}</a></li>'
