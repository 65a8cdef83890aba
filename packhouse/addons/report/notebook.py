"""Render versions and recipes for notebook cells: counts, lengths, three records, or a full report.

Names, reasons and tokens are untrusted: all text is escaped, and nothing is fetched from the web.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packhouse.addons.ask.samples import (
    PackRecord,
    first_split,
    label_names,
    read_packs,
    records_in,
    weights_text,
)
from packhouse.cli.tokens import html_runs, pipeline_of, runs_of
from packhouse.pack import PackStatistics
from packhouse.store import OpenVersion
from packhouse.store.card import numbers_of
from packhouse.system.escaping import PAGE_STYLE, html_table, html_text
from packhouse.system.wording import counted
from packhouse.tokenize.of_version import tokenizer_of
from packhouse.tokenize.pipeline import Pipeline

# Picture of a version: the lengths of its records, and the fill of its packs.
#
# Plain SVG, so it needs no library and no download. Bars are shares of a split's records by length
# class (a quarter octave wide). Half-transparent gray suits light and dark pages.


_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 170, 64, 34
_COLORS = {"train": "#1f77b4", "eval": "#ff7f0e"}


def lengths_svg(splits: Mapping[str, PackStatistics]) -> str:
    """Draw one row of bars per split, with a gauge of its fill below.

    Example:
        >>> side = PackStatistics(length_histogram=[(5, 1), (10, 2)], seq_len=16, lower_bound=2,
        ...     strategy="best_fit", num_packs=2, num_sequences=3, num_tokens=24)
        >>> svg = lengths_svg({"train": side})
        >>> svg.count("<rect"), "fill 75.00%" in svg, "seq_len 16" in svg
        (4, True, True)
    """
    names = sorted(splits, reverse=True)  # train before eval
    height = _HEIGHT * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11" fill="#888">'
    ]
    for number, name in enumerate(names):
        parts += _split(name, splits[name], number * _HEIGHT)
    return "".join([*parts, "</svg>"])


def _split(name: str, side: PackStatistics, top: int) -> list[str]:
    color = _COLORS.get(name, "#2ca02c")
    title = (
        f"{html_text(name)}: {counted(side.num_sequences, 'record')} by length in tokens, "
        f"seq_len {side.seq_len:,}"
    )
    fill_top = top + _HEIGHT - 14
    full = _WIDTH - _LEFT - 10
    return [
        f'<text x="{_LEFT}" y="{top + 14}">{title}</text>',
        *_bars(side.length_histogram, top + 20, color),
        f'<text x="4" y="{fill_top + 9}">fill {side.fill:.2%}</text>',
        f'<rect x="{_LEFT + 24}" y="{fill_top}" width="{full - 24}" height="10" '
        'fill="#888" fill-opacity=".3"/>',
        f'<rect x="{_LEFT + 24}" y="{fill_top}" width="{(full - 24) * side.fill:.1f}" '
        f'height="10" fill="{color}"/>',
    ]


def _bars(bars: Sequence[Sequence[int]], top: int, color: str) -> list[str]:
    room = _HEIGHT - 20 - _BOTTOM - 14
    most = max((count for _, count in bars), default=1)
    step = (_WIDTH - _LEFT - 10) / max(1, len(bars))
    parts = [f'<text x="4" y="{top + 9}">{most:,}</text>']
    for place, (length, count) in enumerate(bars):
        x, tall = _LEFT + place * step, max(1.0, room * count / most)
        parts.append(
            f'<rect x="{x:.1f}" y="{top + room - tall:.1f}" width="{max(1.0, step - 2):.1f}" '
            f'height="{tall:.1f}" fill="{color}"><title>{count:,} up to {length:,}</title></rect>'
        )
        # Label about 12 bars: more labels would overlap.
        if place % max(1, len(bars) // 12) == 0:
            parts.append(f'<text x="{x:.1f}" y="{top + room + 12}">{length:,}</text>')
    return parts


_RECORDS = 3
_TOKENS = 240  # per record
_MAX_BYTES = 2**26  # largest file that is fetched for a cell


class Record(NamedTuple):
    """A record to show."""

    title: str
    ids: Sequence[int]
    trained: Sequence[bool]


def cell(
    lines: Iterable[tuple[str, str]],
    splits: Mapping[str, PackStatistics],
    records: Iterable[Record],
    pipeline: Pipeline | None,
) -> str:
    """Return names and values, a picture of the lengths, and the first records with their masks.

    Args:
        lines: names and values.
        splits: statistics to draw, by split.
        records: the first three are shown, at most 240 tokens each, trained tokens in green.
        pipeline: tokenization pipeline; if None, ids are shown.
    """
    parts = [html_table(lines), lengths_svg(splits) if splits else ""]
    shown = list(islice(records, _RECORDS))
    parts.append(_LEGEND if shown else "")
    for title, ids, trained in shown:
        cut = f", the first {_TOKENS:,} of them" if len(ids) > _TOKENS else ""
        title = html_text(f"{title}: a record of {counted(len(ids), 'token')}{cut}")
        mask = np.asarray(trained[:_TOKENS], np.bool_)
        parts.append(f'<div class="quiet">{title}</div>')
        parts.append(html_runs(runs_of(ids[:_TOKENS], mask, pipeline)))
    return "".join(parts)


_LEGEND = (
    '<div class="quiet"><span class="trained">trained</span> &nbsp; not trained &nbsp; '
    '<span class="special">special</span></div>'
)


def version_cell(opened: OpenVersion, tokenizers: Path) -> str:
    """Return the HTML of a version for a notebook cell.

    Args:
        opened: the version.
        tokenizers: folder of tokenizer snapshots; ids are shown if the snapshot is missing.
    """
    split = first_split(opened)
    data = opened.files("data", split)
    records: Iterable[Record] = ()
    labels = label_names(opened.manifest)
    if data and data[0].rows and data[0].size <= _MAX_BYTES:
        records = (
            _record_of(number, row, record)
            for number, row in read_packs(opened, split, 0, _RECORDS)
            for record in records_in(row, opened.manifest.preferences, labels)
        )
    shown = cell(
        numbers_of(opened.manifest),
        opened.manifest.facts.counts.splits(),
        records,
        pipeline_of(tokenizer_of(opened, tokenizers)),
    )
    title = html_text(opened.address)
    return f'{PAGE_STYLE}<div class="packhouse"><b>{title}</b>{shown}</div>'


def _record_of(number: int, row: Mapping[str, Any], record: PackRecord) -> Record:
    _, start, end, side = record
    parts = (f"pack {number}", side, weights_text(row["loss_weights"][start:end]))
    title = ", ".join(part for part in parts if part)
    return Record(title, row["input_ids"][start:end], row["trained"][start:end])


@dataclass(frozen=True, slots=True)
class FramedPage:
    """A whole page in a sandboxed frame, so that its scripts cannot access the notebook."""

    html: str
    height: int = 900
    """Height in pixels."""

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="packhouse report" sandbox="allow-scripts" style="width:100%;'
            f'height:{self.height}px;border:0" srcdoc="{escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<a page of {len(self.html):,} characters, which a notebook shows>"
