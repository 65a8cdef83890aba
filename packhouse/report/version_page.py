"""How a published version shows itself in a notebook: numbers, lengths, three records.

Names, reasons and tokens are of others: all text is escaped, and nothing is fetched from the web.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from packhouse.packing import PackStatistics
from packhouse.pages import PAGE_STYLE, html_table, html_text
from packhouse.report.pictures import lengths_svg
from packhouse.report.samples import first_split, read_packs, trained_mask_of
from packhouse.store import OpenVersion
from packhouse.store.manifest import Manifest
from packhouse.token_runs import html_runs, runs_of
from packhouse.tokenization import TokenizerSnapshot
from packhouse.tokenization.of_version import tokenizer_of
from packhouse.tokenization.pipeline import read_pipeline

__all__ = ["numbers_of", "records_html", "version_html"]

_RECORDS = 3
_TOKENS = 240  # of a record
_MAX_BYTES = 2**26  # of a file that is fetched for it

# Attributes of `PackStatistics` that a manifest holds.
_COUNTS = ("num_packs", "num_sequences", "num_tokens", "num_trained", "lower_bound", "seq_len")


def version_html(opened: OpenVersion, tokenizers: Path) -> str:
    """Return a version as HTML.

    Args:
        opened: the version.
        tokenizers: folder of tokenizer snapshots; of one that is not there, ids are shown.
    """
    lines, splits = numbers_of(opened.manifest)
    uri = f"{opened.store.uri}/{opened.dataset}@{opened.version}"
    parts = [
        PAGE_STYLE,
        f'<div class="packhouse"><b>{html_text(uri)}</b>{html_table(lines)}',
        lengths_svg(splits) if splits else "",
        *_samples(opened, tokenizers),
        "</div>",
    ]
    return "".join(parts)


def numbers_of(manifest: Manifest) -> tuple[list[tuple[str, str]], dict[str, PackStatistics]]:
    """Return what a manifest says of rows and splits: names and values, and the lengths."""
    ledger = manifest.counts.get("ledger", [])
    splits = _splits(manifest.counts.get("statistics", {}))
    lines = [("rows read", f"{int(ledger[0].get('rows_in', 0)):,}" if ledger else "0")]
    for what in ("quarantined", "dropped"):
        lines.append((what, _reasons(ledger, what)))
    for name, side in splits.items():
        share = side.num_trained / max(side.num_tokens, 1)
        lines.append(
            (
                name,
                f"{side.num_packs:,} packs of {side.seq_len:,} tokens, {side.fill:.1%} full; "
                f"{side.num_sequences:,} records, {side.num_tokens:,} tokens, {share:.1%} trained",
            )
        )
    return lines, splits


def _splits(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, PackStatistics]:
    """Splits with packs, train before eval; not those whose counts are no numbers."""
    found = {}
    for name in sorted(statistics, reverse=True):
        with suppress(KeyError, TypeError, ValueError):
            side = statistics[name]
            bars = [(int(length), int(count)) for length, count in side["length_histogram"]]
            counts = {key: int(side[key]) for key in _COUNTS}
            strategy = str(side["strategy"])
            if counts["num_packs"]:
                found[name] = PackStatistics(length_histogram=bars, strategy=strategy, **counts)
    return found


def _reasons(ledger: list[Mapping[str, Any]], what: str) -> str:
    sums: dict[str, int] = {}
    for line in ledger:
        for reason, rows in line.get(what, {}).items():
            sums[reason] = sums.get(reason, 0) + int(rows)
    named = ", ".join(f"{reason} {rows:,}" for reason, rows in sorted(sums.items()))
    return f"{sum(sums.values()):,} ({named})" if sums else "0"


def _samples(opened: OpenVersion, tokenizers: Path) -> Iterator[str]:
    entries = opened.files("data", first_split(opened))
    if not entries or entries[0].size > _MAX_BYTES or not entries[0].rows:
        return
    load = tokenizer_of(opened, tokenizers)
    yield from records_html(_records(opened), load() if load else None)


Record = tuple[str, npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Title, ids, and which of them are trained."""


def records_html(records: Iterable[Record], snapshot: TokenizerSnapshot | None) -> Iterator[str]:
    """Yield a legend and the first records, trained tokens in colour; without snapshot, as ids."""
    pipeline = read_pipeline(snapshot.backend) if snapshot else None
    known = pipeline.token_bytes if pipeline else None
    yield _LEGEND
    for title, ids, trained in islice(records, _RECORDS):
        cut = f", the first {_TOKENS:,} of them" if len(ids) > _TOKENS else ""
        yield f'<div class="quiet">{title}: a record of {len(ids):,} tokens{cut}</div>'
        is_control = pipeline.is_control if pipeline else np.zeros(ids.max() + 1, np.bool_)
        yield html_runs(runs_of(ids[:_TOKENS], trained[:_TOKENS], known, is_control))


def _records(opened: OpenVersion) -> Iterator[Record]:
    for number, row in read_packs(opened, first_split(opened), 0, _RECORDS):
        ids, trained = np.asarray(row["input_ids"], np.int64), trained_mask_of(row)
        for start, end in pairwise(np.cumsum([0, *row["seq_lengths"]]).tolist()):
            yield f"pack {number}", ids[start:end], trained[start:end]


_LEGEND = (
    '<div class="quiet"><span class="trained">trained</span> &nbsp; not trained &nbsp; '
    '<span class="special">special</span></div>'
)
