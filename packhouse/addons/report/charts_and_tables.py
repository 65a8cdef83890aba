"""Building blocks of report pages: sections, tables, charts, data for scripts, and the whole file.

Each chart is a Vega-Lite specification, with the same numbers as a table.

Names, reasons, tokens and settings are untrusted. Text goes through `html_text`, and data for
scripts is JSON without `<`, `>` and `&`. The content security policy of the page allows its own
scripts by sha256, styles, and nothing else. Even if escaping failed, no text of a row could run or
fetch anything.
"""

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import zip_longest
from typing import Any

from packhouse.pack.gather_tokens import length_class
from packhouse.pack.strategies import SeqLenTrial
from packhouse.records.ledger import LedgerLine, in_and_out, units_of
from packhouse.system.escaping import html_text
from packhouse.system.wording import by_name, counted

Spec = Mapping[str, object]
Bins = Mapping[str, Mapping[int, int]]
"""Series -> upper limit of a length class -> count."""

_HEIGHT = 220
_LOG = {"type": "log", "base": 2, "nice": False}
"""Scale of lengths: record lengths spread over four powers of ten."""
_COLORS = {"rows": "#4a7fe8", "quarantined": "#e5484d", "dropped": "#d98a00"}
"""Colors of rows that stay, and of rows that leave."""


def _spec(values: Sequence[Mapping[str, object]], height: int = _HEIGHT, **parts: object) -> Spec:
    return {"data": {"values": values}, "width": "container", "height": height, **parts}


def _axis(title: str | None, **more: object) -> Spec:
    return {"title": title, "labelOverlap": "greedy", "labelSeparation": 5, **more}


def _counts(title: str) -> Spec:
    """Return an axis of counts: 0, 500, 1k, 1.5k. Vega would write 0k, 0.5k, and 500m packs."""
    return _axis(title, labelExpr="datum.value % 1 ? '' : format(datum.value, '~s')", tickCount=5)


def _q(field: str, title: str, **more: object) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _name(field: str, title: str) -> Spec:
    return {"field": field, "type": "nominal", "title": title}


def class_counts(lengths: Mapping[int, int], *, weigh: bool = False) -> dict[int, int]:
    """Count lengths by class: upper limit -> number of records, or of their tokens with `weigh`.

    Example:
        >>> class_counts({5: 1, 100: 2, 101: 1}), class_counts({100: 2}, weigh=True)
        ({5: 1, 112: 3}, {112: 200})
    """
    counts: Counter[int] = Counter()
    for length, count in lengths.items():
        top = length_class(length)[1] if length else 0
        counts[top] += count * length if weigh else count
    return dict(sorted(counts.items()))


def _range(top: int) -> str:
    low, top = length_class(top) if top else (0, 0)
    return f"{low:,}" if low == top else f"{low:,} to {top:,}"


def _left(top: int) -> float:
    """Return the left edge of a class's bar on a logarithmic axis: the previous class's end."""
    return max(length_class(top)[0] - 1, 0.7) if top else 0.5


def _octaves(least: float, most: float) -> list[int]:
    """Return the powers of 2 within a range, with halfway values added if there are at most three.

    Example:
        >>> _octaves(20, 300), _octaves(150, 1024)
        ([32, 64, 128, 256], [192, 256, 384, 512, 768, 1024])
    """
    ticks = [2**k for k in range(40) if least <= 2**k <= most]
    halves = [3 * 2**k for k in range(40) if least <= 3 * 2**k <= most]
    return ticks if len(ticks) > 3 else sorted([*ticks, *halves])


def length_figures(lengths: Mapping[str, Mapping[int, int]], seq_len: int) -> str:
    """Return charts of records by length, and of the tokens in them, by source."""
    stacked = "Bars are stacked by source. " * (len(lengths) > 1)
    few = "A few long records may account for most of the tokens."
    figures = ""
    for counts, title, says in (
        ("records", "Records by length", f"{stacked}Bin width doubles every four bins."),
        ("tokens", "Tokens by record length", few),
    ):
        bins = {s: class_counts(own, weigh=counts == "tokens") for s, own in lengths.items()}
        measured = "tokens in a record"
        name = f"lengths-{counts}"
        figures += length_histogram(name, title, says, bins, measured, "source", counts, seq_len)
    return figures


def length_histogram(
    name: str,
    title: str,
    says: str,
    bins: Bins,
    measured: str,
    series: str,
    counts: str = "records",
    seq_len: int | None = None,
) -> str:
    """Return a chart of counts by length class, on a logarithmic axis."""
    values: list[dict[str, Any]] = [
        {"from": _left(top), "to": max(top, 0.7), "n": n, "of": each, "bin": _range(top)}
        for each, own in bins.items()
        for top, n in own.items()
    ]
    most = max([*(value["to"] for value in values), seq_len or 1])
    least = min([value["from"] for value in values], default=1)
    x = {
        # Vega-Lite draws bars with two ends on a logarithmic axis only for a binned field.
        **_q("from", measured, bin="binned"),
        "scale": {**_LOG, "domainMax": most * 1.06},
        "axis": _axis(measured, format=",d", values=_octaves(least, most)),
    }
    layers = [_bars(x, measured, counts, series, bins)]
    if seq_len:
        rule = {"type": "rule", "strokeDash": [4, 3], "size": 1.5, "style": "ink"}
        at = {"x": {"field": "at", "type": "quantitative"}}
        layers.append({"data": {"values": [{"at": seq_len}]}, "mark": rule, "encoding": at})
        says = f"{says} The dashed line is seq_len, {seq_len:,}."
    spec = _spec(values, layer=layers)
    return _figure(name, title, says, spec, (measured, *bins), _rows(bins))


def _rows(bins: Bins) -> list[list[object]]:
    tops = sorted({top for own in bins.values() for top in own})
    return [[_range(top), *(own.get(top, 0) for own in bins.values())] for top in tops]


def _bars(x: Spec, measured: str, counts: str, series: str, names: Iterable[str]) -> Spec:
    """Encode values with `from`, `to`, `n`, `of` and `bin` as bars, stacked by `of`."""
    return {
        "mark": {"type": "bar", "binSpacing": 1},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": _q("n", counts, stack="zero", axis=_counts(counts)),
            "color": _color(series, names),
            "tooltip": _tooltip(series, measured, counts),
        },
    }


def _tooltip(series: str, measured: str, counts: str) -> list[Spec]:
    return [_name("of", series), _name("bin", measured), _q("n", counts, format=",")]


def _color(title: str, series: Iterable[str], **scale: object) -> Spec:
    """Encode series as colors in this order, with a legend if there is more than one."""
    names = list(series)
    legend = None if len(names) < 2 else {"orient": "top", "title": None, "columns": 3}
    domain = {"scale": {"domain": names, **scale}}
    return {"field": "of", "type": "nominal", "title": title, "legend": legend, **domain}


def seq_len_figure(
    choices: Sequence[SeqLenTrial], seq_len: int, shown: str = "this version"
) -> str:
    """Return a chart of fill and kept records for other pack sizes."""
    values: list[dict[str, Any]] = []
    rows: list[list[object]] = []
    for each in choices:
        is_now = each.seq_len == seq_len
        for name, share in (("fill", each.fill), ("records kept", each.share_kept)):
            value = {"seq_len": each.seq_len, "share": share, "of": name}
            values.append({**value, "packs": each.num_packs, "now": is_now})
        row = [f"{each.seq_len:,}{f' ({shown})' * is_now}", each.num_packs, f"{each.fill:.2%}"]
        rows.append([*row, each.num_padding, each.records_too_long, each.tokens_too_long])
    lowest = min([0.9, *(math.floor(value["share"] * 10) / 10 for value in values)])
    spec = _spec(
        values,
        encoding={
            "x": {
                **_q("seq_len", "seq_len"),
                "scale": _LOG,
                "axis": _axis("seq_len", values=[each.seq_len for each in choices], format=",d"),
            },
            "y": _q("share", "share", scale={"domain": [lowest, 1]}, axis=_axis(None, format="~%")),
            "color": _color("share", ("fill", "records kept")),
        },
        layer=[
            {"mark": {"type": "line", "interpolate": "linear"}},
            {
                "mark": {"type": "point", "filled": True, "opacity": 1},
                "encoding": {
                    "size": {"condition": {"test": "datum.now", "value": 150}, "value": 45},
                    "shape": {"field": "of", "type": "nominal", "legend": None},
                    "tooltip": [
                        _q("seq_len", "seq_len", format=","),
                        _name("of", "what"),
                        _q("share", "share", format=".2%"),
                        _q("packs", "packs", format=","),
                    ],
                },
            },
        ],
    )
    says = f"Computed with the packing planner of a run. Large marks show {shown}."
    columns = ("seq_len", "packs", "fill", "padding tokens", "records too long", "their tokens")
    return _figure("seq-len", "Other seq_len", says, spec, columns, rows)


def compare_figure(
    name: str, title: str, says: str, measured: str, series: Mapping[str, Mapping[int, int]]
) -> str:
    """Return a chart of two length distributions, each as shares of all its records.

    A line keeps its height until the next point, so every class also gets a point at its end.
    Lengths 5 and 100 give 1/2 from 4 to 5, 0 from there to 96, and 1/2 to 112.
    """
    bins = {each: class_counts(own) for each, own in series.items()}
    tops = sorted({top for own in bins.values() for top in own})
    values: list[dict[str, Any]] = []
    for each, own in bins.items():
        total = max(sum(own.values()), 1)
        # Every class ends at 0; where the next class starts at the same length, its height wins.
        points = {max(top, 0.7): (0, "") for top in tops}
        points |= {_left(top): (own.get(top, 0), _range(top)) for top in tops}
        values += [
            {"from": at, "bin": shown, "of": each, "n": n, "share": n / total}
            for at, (n, shown) in sorted(points.items())
        ]
    spec = _spec(
        values,
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        encoding={
            "x": _q(
                "from",
                measured,
                scale=_LOG,
                axis=_axis(measured, format=",d", values=_octaves(_left(tops[0]), tops[-1])),
            ),
            "y": _q("share", "share of records", axis=_axis("share of records", format="~%")),
            "color": _color("version", bins),
            "strokeDash": {"field": "of", "type": "nominal", "legend": None},
            "tooltip": _tooltip("version", measured, "records"),
        },
    )
    return _figure(name, title, says, spec, (measured, *bins), _rows(bins))


def share_figure(
    name: str, title: str, says: str, splits: Mapping[str, Sequence[int]], counts: str
) -> str:
    """Return a chart of counts by share, in equal bins."""
    bins = max((len(each) for each in splits.values()), default=1)

    names = [f"{i / bins:.0%} to {(i + 1) / bins:.0%}" for i in range(bins)]
    values = [
        {"from": i / bins, "to": (i + 1) / bins, "n": n, "of": split, "bin": names[i]}
        for split, each in splits.items()
        for i, n in enumerate(each)
    ]
    x = _q("from", "share", bin="binned", axis=_axis(None, format="%"), scale={"domain": [0, 1]})
    spec = {**_spec(values), **_bars(x, "share", counts, "split", splits)}
    cells = zip(names, *splits.values(), strict=True)
    rows = [[name, *counts] for name, *counts in cells if any(counts)]
    return _figure(name, title, says, spec, ("share", *splits), rows)


def turns_figure(turns: Sequence[tuple[int, int]]) -> str:
    """Return a chart of trained tokens by the position of the answer in its record."""
    values: list[dict[str, Any]] = [
        {"turn": f"{i + 1}{'+' if i == 11 else ''}", "at": i, "tokens": tokens, "n": n}
        for i, (tokens, n) in enumerate(turns)
        if n
    ]
    spec = _spec(
        values,
        mark="bar",
        encoding={
            "x": {"field": "turn", "type": "ordinal", "sort": {"field": "at"},
                  "axis": _axis("answer of its record", labelAngle=0)},
            "y": _q("tokens", "trained tokens", axis=_counts("trained tokens")),
            "tooltip": [
                _name("turn", "answer"),
                _q("tokens", "trained tokens", format=","),
                _q("n", "answers", format=","),
            ],
        },
    )  # fmt: skip
    says = "By position of the answer in its record: first, second, and so on."
    columns = ("answer", "trained tokens", "answers", "tokens per answer")
    rows = [[v["turn"], v["tokens"], v["n"], round(v["tokens"] / v["n"], 1)] for v in values]
    return _figure("turns", "Trained tokens by answer", says, spec, columns, rows)


def reasons_figure(rows: Sequence[tuple[str, str, int]]) -> str:
    """Return a bar chart of (reason, kind, count)."""
    kinds = list(dict.fromkeys(kind for _, kind, _ in rows))
    values = [{"bin": reason, "of": kind, "n": n} for reason, kind, n in rows]
    spec = _spec(
        values,
        height=26 * len({reason for reason, _, _ in rows}) + 10,
        mark={"type": "bar", "height": {"band": 0.75}},
        encoding={
            "y": {"field": "bin", "type": "nominal", "sort": "-x", "title": None,
                  "axis": {"labelLimit": 130}},
            "x": _q("n", "number", axis=_counts("number")),
            "color": _color("kind", kinds, range=[_COLORS.get(kind, "#888") for kind in kinds]),
            "tooltip": _tooltip("kind", "reason", "number"),
        },
    )  # fmt: skip
    title = "Dropped and quarantined rows, by reason"
    says = (
        "Quarantined rows are bad. Dropped rows are valid but were left out because of a setting."
    )
    return _figure("reasons", title, says, spec, ("reason", "", "number"), rows)


def flow_figure(ledger: Sequence[LedgerLine]) -> str:
    """Draw the rows from step to step as a band that losses leave at the bottom.

    A loss is drawn at least 1.5% of the height wide, so that one row in 52,002 is visible.
    """
    # Split only divides the records between train and eval, so it is drawn only if it loses some.
    drawn = [line for line in ledger if line.rows_in != line.rows_out or line.step != "split"]
    most = max([1, *(line.rows_in for line in drawn)])
    units = units_of(ledger)
    bands: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for i, line in enumerate(drawn):
        share_in, share_out = line.rows_in / most, line.rows_out / most
        caption = counted(line.rows_out, units[line.step][1])
        bands += _band("rows", i, 1, 1 - share_in, 1, 1 - share_out, caption)
        if not i or line.rows_in != drawn[i - 1].rows_in:
            labels.append({"x": i, "y": 1.04, "text": f"{line.rows_in:,}", "is_end": False})
        low = 1 - share_in
        for kind in ("quarantined", "dropped"):
            by_reason = getattr(line, kind)
            if lost := sum(by_reason.values()):
                wide = max(lost / most, 0.015)
                caption = f"{lost:,} {kind}: {by_name(by_reason)}"
                top = min(low + wide, 1)
                bands += _band(f"{kind} {i}", i, top, low, low - 0.08, low - 0.08 - wide, caption)
                text = f"{lost:,} {kind}"
                labels.append({"x": i + 1, "y": low - 0.22 - wide, "text": text, "is_end": True})
                low -= 0.24 + wide
    last = drawn[-1].rows_out if drawn else 0
    labels.append({"x": len(drawn), "y": 1.04, "text": f"{last:,}", "is_end": True})
    ends = [*(line.step for line in drawn), "out"]
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": {"domain": [0, len(drawn)], "nice": False},
        "axis": {
            "title": None,
            "values": list(range(len(ends))),
            "labelExpr": f"{json.dumps(ends)}[datum.value]",
            "grid": False,
            "labelOverlap": False,
            "labelFlush": False,
            "labelAlign": {
                "condition": {"test": f"datum.value === {len(drawn)}", "value": "right"},
                "value": "left",
            },
            "labelPadding": 16,
            "labelFontSize": 10.5,
            "orient": "top",
            "ticks": False,
            "domain": False,
        },
    }
    lowest = min([0, *(band["y2"] for band in bands)]) - 0.16
    y_scale = {"domain": [lowest, 1.1], "nice": False}
    colors = {"domain": list(_COLORS), "range": list(_COLORS.values())}
    spec = {
        "width": "container",
        "height": 170,
        "layer": [
            {
                # Vega-Lite has no Sankey diagram, so each band is an area.
                "data": {"values": bands},
                "mark": {"type": "area", "interpolate": "monotone", "tooltip": True},
                "encoding": {
                    "x": x,
                    "y": {"field": "y", "type": "quantitative", "axis": None, "scale": y_scale},
                    "y2": {"field": "y2"},
                    "detail": {"field": "band", "type": "nominal"},
                    "color": {"field": "kind", "type": "nominal", "legend": None, "scale": colors},
                    "opacity": {
                        "condition": {"test": "datum.kind === 'rows'", "value": 0.55},
                        "value": 0.95,
                    },
                    "tooltip": {"field": "said", "type": "nominal", "title": "number"},
                },
            },
            *(
                {
                    "data": {"values": [each for each in labels if each["is_end"] == is_end]},
                    "mark": {"type": "text", "style": "ink", "align": align, "baseline": "bottom"},
                    "encoding": {
                        "x": {"field": "x", "type": "quantitative"},
                        "y": {"field": "y", "type": "quantitative", "scale": y_scale},
                        "text": {"field": "text"},
                    },
                }
                for is_end, align in ((False, "left"), (True, "right"))
            ),
        ],
    }
    heads, cells = in_and_out(ledger)
    columns = ("step", heads[0], "added", "quarantined", "dropped", heads[1], "tokens out")
    rows = [
        [
            line.step,
            came_in,
            *(by_name(each) for each in (line.added, line.quarantined, line.dropped)),
            went_out,
            "" if line.tokens_out is None else line.tokens_out,
        ]
        for line, (came_in, went_out) in zip(ledger, cells, strict=True)
    ]
    says = (
        "Each step reads the output of the previous one. Quarantined and dropped rows leave at the "
        "bottom."
    )
    return _figure("flow", "Rows in and out of each step", says, spec, columns, rows)


def _band(
    name: str, x: int, y: float, y2: float, end: float, end2: float, caption: str
) -> list[dict[str, Any]]:
    """Return points of a band from (x, y2..y) to (x + 1, end2..end), curved like a Sankey arm."""
    band = {"band": f"{name} {x}", "kind": name.partition(" ")[0], "said": caption}
    points = []
    for t in (number / 8 for number in range(9)):
        # Half a cosine: 0 at the start, 1/2 in the middle, 1 at the end, level at both ends.
        bend = (1 - math.cos(math.pi * t)) / 2
        points.append(
            {**band, "x": x + t, "y": y + (end - y) * bend, "y2": y2 + (end2 - y2) * bend}
        )
    return points


# JavaScript for charts: Vega, Vega-Lite and Vega-Embed in one file, which is never downloaded.
#
# `hatch_build.py` writes `vega.js` into wheels and editable installs, using `vl-convert-python`. It
# is not in the repository. Without it, reports show tables only.


@cache
def vega_bundle() -> str | None:
    """Return the JavaScript (0.9 MB), or None if this installation lacks it."""
    try:
        code = read_asset("vega.js")
    except FileNotFoundError:
        return None
    # Inside a <script> element these sequences would end it, or start a comment.
    return code if "</script" not in code and "<!--" not in code else None


def read_asset(name: str) -> str:
    """Return a text file of this package."""
    return files("packhouse.addons.report").joinpath(name).read_text("utf-8")


_MOST_CODE = 100_000  # maximum number of characters of settings
_WITHOUT_VEGA = (
    "<p class=warning>Charts need JavaScript from the packhouse wheel, which this installation "
    "lacks. The tables show the same numbers.</p>"
)


def header(title: str, inner: str) -> str:
    """Return the top of a page: title, HTML below it, and the button for light and dark."""
    return (
        f"<header><div><h1>{html_text(title)}</h1>{inner}</div>"
        '<button id=theme type=button aria-label="Light or dark colours">Dark</button></header>'
    )


def section(name: str, title: str, *parts: str) -> str:
    """Return a section, or an empty string if all parts are empty."""
    inner = "".join(parts)
    if not inner:
        return ""
    head = f'<h2 id="h-{name}">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="h-{name}">{head}{inner}</section>'


def tiles(pairs: Iterable[tuple[str, str, str]]) -> str:
    """Return boxes with a name, a value and a note each."""
    boxes = (
        f"<div><dt>{html_text(name)}</dt><dd>{html_text(value)}</dd>"
        f"<dd class=note>{html_text(note)}</dd></div>"
        for name, value, note in pairs
    )
    return f"<dl class=tiles>{''.join(boxes)}</dl>"


PASSED, FAILED = "\u2713", "\u2717"
"""A cell that begins with one of these signs has its color."""


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> str:
    """Return a table with right-aligned numbers. Wide tables scroll on their own."""
    cells = [[*map(_cell, row)] for row in rows]
    kinds = [" class=number" * ("class=number" in cell[:16]) for cell in cells[0]] if cells else []
    # A table without rows has no kinds.
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
    kind = {PASSED: " class=good", FAILED: " class=bad"}.get(text[:1], kind)
    return f"<td{kind}>{html_text(text)}</td>"


def details(summary: str, inner: str, *, is_open: bool = False) -> str:
    """Return a collapsible block."""
    if not inner:
        return ""
    return f"<details{' open' * is_open}><summary>{html_text(summary)}</summary>{inner}</details>"


def preformatted(text: str, name: str) -> str:
    """Return code or settings in a block that scrolls on its own."""
    if len(text) > _MOST_CODE:
        text = f"{text[:_MOST_CODE]} ... cut here, {len(text) - _MOST_CODE:,} more characters"
    return f'<pre role=group tabindex=0 aria-label="{html_text(name)}">{html_text(text)}</pre>'


def _figure(
    name: str,
    title: str,
    says: str,
    spec: Spec,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> str:
    """Return a chart, with the table of its numbers below.

    Args:
        name: unique within the page; letters and dashes only.
        title: title of the chart.
        says: one sentence on what to look for.
        spec: Vega-Lite specification.
        columns: column names of the table.
        rows: cells of the table, text or numbers.
    """
    numbers = table(columns, rows, title)
    title, says = html_text(title), html_text(says)
    head = f"<figcaption><b>{title}</b> <span>{says}</span></figcaption>"
    if vega_bundle() is None:
        return f"<figure>{head}{numbers}</figure>"
    chart = f'<div class=chart role=img aria-label="{title}. {says}" id="chart-{name}"></div>'
    data = _json(f"spec-{name}", spec, "spec")
    return f"<figure>{head}{chart}{data}{details('Numbers', numbers)}</figure>"


def _json(name: str, value: object, role: str) -> str:
    """Return data for a script: ASCII only, with characters escaped that could end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}" class="{role}">{text}</script>'


def page(title: str, head: str, sections: Sequence[str], data: Mapping[str, object]) -> str:
    """Return the whole HTML file.

    Args:
        title: window title.
        head: HTML above the sections.
        sections: HTML of each section; the navigation links to them.
        data: name -> JSON value for the page's own script.
    """
    vega = vega_bundle()
    scripts = [*([vega] if vega else []), read_asset("page.js")]
    # The policy lists exactly these scripts; the hashes must match their text in the page.
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
    # No 'unsafe-eval': `page.js` runs Vega with its interpreter (`ast: true`).
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    # Each section has its own name and title.
    titled = (re.search(r'<h2 id="h-(.*?)">(.*?)</h2>', each) for each in sections if each)
    links = "".join(f'<li><a href="#{each[1]}">{each[2]}</a></li>' for each in titled if each)
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
            "" if vega else _WITHOUT_VEGA,
            *sections,
            "</main>",
            *(_json(name, value, "data") for name, value in data.items()),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )
