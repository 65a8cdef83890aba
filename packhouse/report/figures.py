"""Charts of a report: each is a Vega-Lite specification, and the same numbers as a table."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packhouse.report.other_seq_lens import Alternative

__all__ = [
    "KIND_COLORS",
    "Figure",
    "Spec",
    "compare_figure",
    "fill_figure",
    "length_figures",
    "reasons_figure",
    "seq_len_figure",
    "share_figure",
    "trained_figure",
    "turns_figure",
]

Spec = Mapping[str, Any]
Bins = Mapping[str, Mapping[int, int]]
"""Series -> lower bound in tokens -> count."""

_HEIGHT = 220
KIND_COLORS = {"rows": "#4a7fe8", "quarantined": "#e5484d", "dropped": "#d98a00"}
"""Of rows on their way, and of those that left it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A chart and its numbers."""

    name: str
    """Unique in its page, letters and dashes."""
    title: str
    says: str
    """One sentence on what to look at."""
    spec: Spec
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    """Cells of the table: text, or numbers."""


def _spec(values: list[dict[str, Any]], height: int = _HEIGHT, **parts: Any) -> Spec:
    return {"data": {"values": values}, "width": "container", "height": height, **parts}


def _axis(title: str | None, **more: Any) -> dict[str, Any]:
    return {"title": title, "labelOverlap": "greedy", **more}


def _q(field: str, title: str, **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, **more}


def octave_bins(lengths: Mapping[int, int], *, weigh: bool = False) -> dict[int, int]:
    """Count lengths in bins a quarter octave wide: lower bound -> records, or tokens in them.

    Example:
        >>> octave_bins({5: 1, 100: 2, 101: 1}), octave_bins({100: 2}, weigh=True)
        ({5: 1, 96: 3}, {96: 200})
    """
    bins: Counter[int] = Counter()
    for length, count in lengths.items():
        bins[_lower(length)] += count * length if weigh else count
    return dict(sorted(bins.items()))


def _lower(length: int) -> int:
    """Lower bound of the bin of a length: 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    if length < 8:
        return length
    step = 1 << (length.bit_length() - 3)
    return length // step * step


def _upper(lower: int) -> int:
    return lower + 1 if lower < 8 else lower + (1 << (lower.bit_length() - 3))


def length_figures(lengths: Mapping[str, Mapping[int, int]], seq_len: int) -> list[Figure]:
    """Records by length, and the tokens that they hold, by source."""
    found = []
    for name, title, weigh in (
        ("records", "Records by length", False),
        ("tokens", "Tokens by length of their record", True),
    ):
        bins = {source: octave_bins(own, weigh=weigh) for source, own in lengths.items()}
        says = "Bars are stacked by source; bins double in width every four."
        if weigh:
            says = "Where the tokens are: few long records may hold most of them."
        found.append(
            _histogram(
                f"lengths-{name}", title, says, bins, name, "tokens in a record", seq_len, "source"
            )
        )
    return found


def trained_figure(splits: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Records by number of trained tokens, by split."""
    bins = {name: octave_bins(dict((a, b) for a, b in each)) for name, each in splits.items()}
    return _histogram(
        "trained-lengths",
        "Records by trained tokens",
        "How much of a record counts in the loss.",
        bins,
        "records",
        "trained tokens in a record",
        None,
        "split",
    )


def _histogram(
    name: str,
    title: str,
    says: str,
    bins: Bins,
    counts: str,
    measured: str,
    seq_len: int | None,
    series: str,
) -> Figure:
    values: list[dict[str, Any]] = [
        {"from": max(low, 0.7), "to": _upper(low), "n": n, "of": each, "bin": _range(low)}
        for each, own in bins.items()
        for low, n in own.items()
    ]
    top = max([*(value["to"] for value in values), seq_len or 1])
    x = {
        **_q("from", measured, bin="binned"),
        "scale": {"type": "log", "base": 2, "nice": False, "domainMax": top * 1.06},
        "axis": _axis(measured, format=",d", tickCount=8),
    }
    bars = {
        "mark": {"type": "bar", "binSpacing": 1},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": _q("n", counts, stack="zero", axis=_axis(counts, format="~s", tickCount=5)),
            "color": _color(series, bins),
            "tooltip": [
                {"field": "of", "title": series, "type": "nominal"},
                {"field": "bin", "title": measured, "type": "nominal"},
                _q("n", counts, format=","),
            ],
        },
    }
    layers: list[Any] = [bars]
    if seq_len:
        layers.append(_rule(seq_len))
        says = f"{says} The dashed line is seq_len, {seq_len:,}."
    lows = sorted({low for own in bins.values() for low in own})
    rows = [[_range(low), *(bins[each].get(low, 0) for each in bins)] for low in lows]
    return Figure(
        name=name,
        title=title,
        says=says,
        spec=_spec(values, layer=layers),
        columns=(measured, *bins),
        rows=rows,
    )


def _range(low: int) -> str:
    high = _upper(low) - 1
    return f"{low:,}" if high == low else f"{low:,} to {high:,}"


def _rule(seq_len: int) -> Spec:
    mark = {"type": "rule", "strokeDash": [4, 3], "size": 1.5, "style": "ink"}
    x = {"field": "at", "type": "quantitative"}
    return {"data": {"values": [{"at": seq_len}]}, "mark": mark, "encoding": {"x": x}}


def _color(title: str, series: Iterable[str], **scale: Any) -> dict[str, Any]:
    """Colours of series, in this order; a legend where there are several."""
    names = list(series)
    legend = None if len(names) < 2 else {"orient": "top", "title": None, "columns": 3}
    domain = {"scale": {"domain": names, **scale}}
    return {"field": "of", "type": "nominal", "title": title, "legend": legend, **domain}


def seq_len_figure(choices: Sequence[Alternative], seq_len: int) -> Figure:
    """What other pack sizes would give."""
    values: list[dict[str, Any]] = [
        {
            "seq_len": each.seq_len,
            "share": share,
            "of": name,
            "packs": each.num_packs,
            "now": each.seq_len == seq_len,
        }
        for each in choices
        for name, share in (("fill", each.fill), ("rows kept", each.share_kept))
    ]
    lowest = min([0.9, *(math.floor(value["share"] * 10) / 10 for value in values)])
    spec = _spec(
        values,
        encoding={
            "x": {
                **_q("seq_len", "seq_len"),
                "scale": {"type": "log", "base": 2, "nice": False},
                "axis": _axis("seq_len", values=[each.seq_len for each in choices], format=",d"),
            },
            "y": _q("share", "share", scale={"domain": [lowest, 1]}, axis=_axis(None, format="~%")),
            "color": _color("share", ("fill", "rows kept")),
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
                        {"field": "of", "title": "what", "type": "nominal"},
                        _q("share", "share", format=".2%"),
                        _q("packs", "packs", format=","),
                    ],
                },
            },
        ],
    )
    return Figure(
        name="seq-len",
        title="Other seq_len",
        says="Packed anew with the planner of a run. The large marks are this version.",
        spec=spec,
        columns=("seq_len", "packs", "fill", "padding tokens", "rows too long", "their tokens"),
        rows=[
            [
                f"{each.seq_len:,}{' (this version)' if each.seq_len == seq_len else ''}",
                each.num_packs,
                f"{each.fill:.2%}",
                each.num_padding,
                each.rows_too_long,
                each.tokens_too_long,
            ]
            for each in choices
        ],
    )


def compare_figure(
    name: str, title: str, says: str, measured: str, series: Mapping[str, Mapping[int, int]]
) -> Figure:
    """Two distributions of lengths, each as shares of its own records."""
    bins = {each: octave_bins(own) for each, own in series.items()}
    lows = sorted({low for own in bins.values() for low in own})
    totals = {each: max(sum(own.values()), 1) for each, own in bins.items()}
    values: list[dict[str, Any]] = [
        {
            "from": max(low, 0.7),
            "bin": _range(low),
            "of": each,
            "n": own.get(low, 0),
            "share": own.get(low, 0) / totals[each],
        }
        for each, own in bins.items()
        for low in (*lows, *([_upper(lows[-1])] if lows else []))
    ]
    spec = _spec(
        values,
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2},
        encoding={
            "x": {
                **_q("from", measured),
                "scale": {"type": "log", "base": 2, "nice": False},
                "axis": _axis(measured, format=",d", tickCount=8),
            },
            "y": _q("share", "share of records", axis=_axis("share of records", format="~%")),
            "color": _color("version", bins),
            "strokeDash": {"field": "of", "type": "nominal", "legend": None},
            "tooltip": [
                {"field": "of", "title": "version", "type": "nominal"},
                {"field": "bin", "title": measured, "type": "nominal"},
                _q("n", "records", format=","),
            ],
        },
    )
    rows = [[_range(low), *(bins[each].get(low, 0) for each in bins)] for low in lows]
    return Figure(
        name=name, title=title, says=says, spec=spec, columns=(measured, *bins), rows=rows
    )


def fill_figure(splits: Mapping[str, Sequence[int]]) -> Figure:
    """Packs by the share of them that is tokens."""
    return _shares("fill", "Packs by fill", "The rest of a pack is padding.", splits, "packs")


def share_figure(splits: Mapping[str, Sequence[int]]) -> Figure:
    """Records by the share of their tokens that is trained."""
    says = "Records at the left teach little for what they cost."
    return _shares("trained-share", "Records by trained share", says, splits, "records")


def _shares(
    name: str, title: str, says: str, splits: Mapping[str, Sequence[int]], counts: str
) -> Figure:
    bins = max((len(each) for each in splits.values()), default=1)
    values = [
        {"from": i / bins, "to": (i + 1) / bins, "n": n, "of": split}
        for split, each in splits.items()
        for i, n in enumerate(each)
    ]
    spec = _spec(
        values,
        mark={"type": "bar", "binSpacing": 1},
        encoding={
            "x": {**_q("from", "share", bin="binned"), "axis": _axis(None, format="%"),
                  "scale": {"domain": [0, 1]}},
            "x2": {"field": "to"},
            "y": _q("n", counts, stack="zero", axis=_axis(counts, format="~s", tickCount=5)),
            "color": _color("split", splits),
            "tooltip": [
                {"field": "of", "title": "split", "type": "nominal"},
                _q("from", "from", format=".0%"),
                _q("to", "to", format=".0%"),
                _q("n", counts, format=","),
            ],
        },
    )  # fmt: skip
    rows = [
        [f"{i / bins:.0%} to {(i + 1) / bins:.0%}", *(each[i] for each in splits.values())]
        for i in range(bins)
        if any(each[i] for each in splits.values())
    ]
    return Figure(
        name=name, title=title, says=says, spec=spec, columns=("share", *splits), rows=rows
    )


def turns_figure(turns: Sequence[tuple[int, int]]) -> Figure:
    """Trained tokens by the number of the answer in its record."""
    values: list[dict[str, Any]] = [
        {"turn": f"{i + 1}{'+' if i == 11 else ''}", "at": i, "tokens": tokens, "n": n}
        for i, (tokens, n) in enumerate(turns)
        if n
    ]
    tooltip = [
        {"field": "turn", "title": "answer", "type": "nominal"},
        _q("tokens", "trained tokens", format=","),
        _q("n", "answers", format=","),
    ]
    spec = _spec(
        values,
        mark="bar",
        encoding={
            "x": {"field": "turn", "type": "ordinal", "sort": {"field": "at"},
                  "axis": _axis("answer of its record", labelAngle=0)},
            "y": _q("tokens", "trained tokens", axis=_axis("trained tokens", format="~s")),
            "tooltip": tooltip,
        },
    )  # fmt: skip
    return Figure(
        name="turns",
        title="Trained tokens by answer",
        says="First answers of a conversation, second ones, and so on.",
        spec=spec,
        columns=("answer", "trained tokens", "answers", "tokens each"),
        rows=[[v["turn"], v["tokens"], v["n"], round(v["tokens"] / v["n"], 1)] for v in values],
    )


def reasons_figure(
    name: str, title: str, says: str, counts: Iterable[tuple[str, str, int]]
) -> Figure:
    """Bars of (name, kind, count), such as rows by reason."""
    rows = list(counts)
    kinds = list(dict.fromkeys(kind for _, kind, _ in rows))
    values = [{"reason": reason, "of": kind, "n": n} for reason, kind, n in rows]
    spec = _spec(
        values,
        height=26 * len({reason for reason, _, _ in rows}) + 10,
        mark={"type": "bar", "height": {"band": 0.75}},
        encoding={
            "y": {"field": "reason", "type": "nominal", "sort": "-x", "title": None,
                  "axis": {"labelLimit": 130}},
            "x": _q("n", "rows", axis=_axis("rows", format="~s", tickCount=5)),
            "color": _color("kind", kinds, range=[KIND_COLORS.get(kind, "#888") for kind in kinds]),
            "tooltip": [
                {"field": "reason", "type": "nominal"},
                {"field": "of", "title": "kind", "type": "nominal"},
                _q("n", "rows", format=","),
            ],
        },
    )  # fmt: skip
    return Figure(
        name=name, title=title, says=says, spec=spec, columns=("reason", "", "rows"), rows=rows
    )
