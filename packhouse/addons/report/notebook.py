"""What a cell of a notebook shows: numbers, lengths and three records; or a whole report.

Names, reasons and tokens are of others: all text is escaped, and nothing is fetched from the web.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packhouse.addons.report.pictures import lengths_svg
from packhouse.escaping import PAGE_STYLE, html_table, html_text
from packhouse.packing import PackStatistics
from packhouse.store import OpenVersion
from packhouse.store.counts import numbers_of, splits_of
from packhouse.tokenization.of_version import tokenizer_of
from packhouse.tokenization.pipeline import Pipeline
from packhouse.views.samples import (
    PackRecord,
    first_split,
    label_names,
    read_packs,
    records_in,
    weights_text,
)
from packhouse.views.tokens import html_runs, pipeline_of, runs_of
from packhouse.wording import counted

_RECORDS = 3
_TOKENS = 240  # of a record
_MAX_BYTES = 2**26  # of a file that is fetched for it


class Record(NamedTuple):
    """A record to be shown."""

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
        splits: what the picture shows.
        records: trained tokens are green; three of them, 240 tokens of each.
        pipeline: of the tokenizer; without, ids are shown.
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
    """Return a version as a cell shows it.

    Args:
        opened: the version.
        tokenizers: folder of tokenizer snapshots; of one that is not there, ids are shown.
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
        splits_of(opened.manifest),
        records,
        pipeline_of(tokenizer_of(opened, tokenizers)),
    )
    title = html_text(f"{opened.store.uri}/{opened.dataset}@{opened.version}")
    return f'{PAGE_STYLE}<div class="packhouse"><b>{title}</b>{shown}</div>'


def _record_of(number: int, row: Mapping[str, Any], record: PackRecord) -> Record:
    _, start, end, side = record
    parts = (f"pack {number}", side, weights_text(row["loss_weights"][start:end]))
    title = ", ".join(part for part in parts if part)
    return Record(title, row["input_ids"][start:end], row["trained"][start:end])


@dataclass(frozen=True, slots=True)
class FramedPage:
    """A whole page in a frame of its own, where its scripts reach nothing of the notebook."""

    html: str
    height: int = 900
    """Pixels."""

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="packhouse report" sandbox="allow-scripts" style="width:100%;'
            f'height:{self.height}px;border:0" srcdoc="{escape(self.html)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<a page of {len(self.html):,} characters, which a notebook shows>"
