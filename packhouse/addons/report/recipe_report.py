"""Show what a run of a recipe would produce, as a page or in a notebook cell.

If the recipe has already run, the page is the report of its version. Otherwise it is the estimate
of `packhouse plan`, with lengths and records of the first megabyte of each source. Nothing is
written except the tokenizer's snapshot in the cache.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from packhouse.addons.ask.inspect import (
    first_split,
    label_names,
    label_text,
    labels_of,
    page_record,
    pair_sides,
    read_packs,
    records_in,
    weights_text,
)
from packhouse.addons.report.charts_and_tables import (
    header,
    length_figures,
    page,
    preformatted,
    section,
    seq_len_figure,
    table,
    tiles,
)
from packhouse.addons.report.sections import filters_table, samples_section, short_number
from packhouse.addons.report.version_report import version_report, with_texts
from packhouse.cli.token_display import (
    html_runs,
    pipeline_of,
    rows_with_masks,
    runs_of,
    tokenizer_of,
)
from packhouse.errors import VersionNotFoundError
from packhouse.pack.gather_tokens import PackStatistics, length_histogram
from packhouse.read.source_files import find_files, source_name
from packhouse.recipe import Recipe, SourceConfig
from packhouse.registry import function_of_addon
from packhouse.run.chain import Plan, plan_jobs
from packhouse.run.prepare_arguments import recipe_for
from packhouse.run.step_cache import Workspace
from packhouse.store import OpenVersion, open_version
from packhouse.store.commit import numbers_of
from packhouse.system.disks import check_cache, find_cache
from packhouse.system.escaping import PAGE_STYLE, html_table, html_text
from packhouse.system.wording import counted
from packhouse.tokenize import fingerprint_tokenizer
from packhouse.tokenize.encoders import Pipeline
from packhouse.tokenize.tokenizer_loading import find_snapshot

if TYPE_CHECKING:
    from packhouse.addons.plan import Estimate


SourceRows = list[tuple[SourceConfig, pa.Table]]

_SOURCES = 8
_SHOWN_TOKENS = 4_000  # per source
_MOST_BYTES = 2**26  # total size of sources up to which a notebook reads them


def recipe_report(recipe: Recipe, cache: Path) -> str:
    """Return the report of a recipe as HTML.

    Args:
        recipe: recipe with its tokenizer pinned.
        cache: cache folder.

    Raises:
        PackhouseError: a source, tokenizer or template that a run would refuse too.
    """
    workspace = Workspace(cache=cache)
    plan = plan_jobs(recipe)
    try:
        opened = open_version(recipe.publish.store, recipe.dataset, plan.version_id)
    except VersionNotFoundError:
        return _estimate_page(recipe, plan, workspace)
    return version_report(opened, workspace.tokenizers)


def recipe_cell(recipe: Recipe) -> str:
    """Return the HTML of a recipe for a notebook cell, or "" if that takes too long.

    Takes one or two seconds, so it is limited to local files of at most 64 MiB in total and a local
    tokenizer.

    Raises:
        PackhouseError: the sources, the tokenizer or the template cannot be used.
    """
    if not Path(recipe.tokenizer).is_dir() or any("://" in each.path for each in recipe.sources):
        return ""
    if sum(file.size for each in recipe.sources for file in find_files(each)) > _MOST_BYTES:
        return ""
    workspace = Workspace(cache=check_cache(find_cache(None).folder))
    recipe = recipe_for(recipe, cache=workspace.cache, settings={})
    plan = plan_jobs(recipe)
    expected: Estimate = function_of_addon("estimate")(recipe, plan, workspace)
    ((source, sample),) = _first_rows(recipe, plan, workspace, 1)
    counts, size = expected.totals.rsplit(", ", 1)
    made = f"{counts} of {recipe.pack.seq_len:,} tokens, {size}"
    drawn = PackStatistics(
        seq_len=recipe.pack.seq_len,
        strategy=recipe.pack.strategy,
        num_sequences=sample.num_rows,
        num_packs=expected.packs,
        num_tokens=expected.tokens,
        lower_bound=0,
        length_histogram=length_histogram(sample["num_tokens"].to_numpy()),
    )
    shown = [
        Record(f"row {row['row']}{side and f', {side}'}", row["input_ids"][p], row["trained"][p])
        for row in rows_with_masks(sample.slice(0, 3))
        for side, p in _parts(row, recipe, source)
    ]
    lines = [("a run would make", made), *(("note", note) for note in expected.lines())]
    splits = {f"first rows of {source_name(source)}": drawn}
    return cell(lines, splits, shown, _pipeline(recipe, workspace))


def _first_rows(recipe: Recipe, plan: Plan, workspace: Workspace, most: int) -> SourceRows:
    """Return the tokenized rows in the first megabyte of the first sources."""
    rows, try_rows = [], function_of_addon("try_first_rows")
    for source in recipe.sources[:most]:
        uri = next(v.parameters.shard.uri for v in plan.validate if v.parameters.source == source)
        found = try_rows(recipe, source, workspace.tokenizers, uri=uri, max_rows=None)
        rows.append((source, found.tokenized))
    return rows


def _pipeline(recipe: Recipe, workspace: Workspace) -> Pipeline | None:
    fingerprint = fingerprint_tokenizer(recipe.tokenizer)
    return pipeline_of(lambda: find_snapshot(fingerprint, workspace.tokenizers))


def _estimate_page(recipe: Recipe, plan: Plan, workspace: Workspace) -> str:
    """Render the estimate of a recipe that has not run."""
    expected: Estimate = function_of_addon("estimate")(recipe, plan, workspace)
    pipeline = _pipeline(recipe, workspace)
    rows = _first_rows(recipe, plan, workspace, _SOURCES)
    packs = {
        source_name(source): with_texts(_as_pack(recipe, source, own), pipeline)
        for source, own in rows
    }
    shown = sum(pack["num_tokens"] for pack in packs.values())
    caption = (
        f"The first rows of each source, {counted(shown, 'token')}, as a run would train them."
    )
    about = "" if expected.is_exact else "<p class=quiet>Estimated from the sample.</p>"
    filters = about + filters_table(expected.filters) if expected.filters else ""
    sources = table(*expected.by_source(), "Sources")
    settings = recipe.model_dump_json(indent=2, by_alias=True, exclude_unset=True)
    parts = [
        _lengths_section(recipe, expected, rows),
        samples_section(len(packs), shown, pipeline is not None, caption),
        section("left-out", "Dropped rows", filters),
        section("recipe", "Recipe", sources, preformatted(settings, "Settings")),
    ]
    data = {"samples-data": [{"name": name, "packs": [pack]} for name, pack in packs.items()]}
    head = _head(recipe, plan.version_id, expected)
    return page(f"{recipe.dataset} - packhouse report", head, parts, data)


def _head(recipe: Recipe, version_id: str, expected: "Estimate") -> str:
    about = "" if expected.is_exact else "about; "
    how = "Counted from tokenized shards" if expected.is_exact else "Estimated from a sample"
    note = f"<p>{how}. This recipe has no version yet.</p>"
    top = header(recipe.dataset, f"<code class=quiet>{html_text(version_id)}</code>{note}")
    refusals = "".join(
        f"<p class=warning>The run would fail: {html_text(each)}.</p>" for each in expected.refusals
    )
    is_split = expected.records != expected.rows
    made = f"in {counted(expected.records, 'record')}, " if is_split else ""
    boxes = tiles(
        [
            ("Rows", f"{expected.rows:,}", about + made + counted(len(recipe.sources), "source")),
            ("Tokens", short_number(expected.tokens), f"{about}{expected.tokens:,}"),
            ("Packs", f"{expected.packs:,}", f"{about}of {recipe.pack.seq_len:,} tokens"),
            ("Size", f"{expected.bytes / 2**20:,.1f} MiB", f"{about}of data files"),
        ]
    )
    notes = "".join(f"<li>{html_text(note)}</li>" for note in expected.lines())
    return f"{top}{refusals}{boxes}" + (f"<ul class=quiet>{notes}</ul>" if notes else "")


def _as_pack(recipe: Recipe, source: SourceConfig, rows: pa.Table) -> dict[str, object]:
    """Return the first rows of a source in the form of a pack, as the page's script reads it."""
    records: list[dict[str, object]] = []
    tokens = num_rows = 0
    for row in rows_with_masks(rows.slice(0, 200)):
        if tokens >= _SHOWN_TOKENS:
            break
        num_rows += 1
        for side, part in _parts(row, recipe, source):
            record = page_record(row["record_id"], row["input_ids"][part], row["trained"][part])
            record |= {"side": side} if side else {}
            records.append({**record, "place": f"{row['source']}:{row['row']}"})
            tokens += len(record["ids"])
    label = f"the first rows of {source_name(source)}"
    counts = {"num_tokens": tokens, "num_records": num_rows}
    return {"pack": 0, "label": label, **counts, "records": records}


def _parts(row: Mapping[str, Any], recipe: Recipe, source: SourceConfig) -> list[tuple[str, slice]]:
    """Return both sides of a pair, or the whole row with its label name."""
    if recipe.preferences == "pairs":
        return pair_sides(row["trained"])
    return [(label_text(row["label"], labels_of(recipe, source)), slice(None))]


def _lengths_section(recipe: Recipe, expected: "Estimate", rows: SourceRows) -> str:
    lengths = {source_name(source): Counter(own["num_tokens"].to_pylist()) for source, own in rows}
    if not any(lengths.values()):
        return ""
    seq_len, trials = recipe.pack.seq_len, expected.seq_lens
    drawn = f"<div class=grid>{length_figures(lengths, seq_len)}</div><br>"
    other = seq_len_figure(trials, seq_len, "this recipe") if trials else ""
    read = counted(sum(own.num_rows for _, own in rows), "record")
    caption = f"<p class=quiet>From {read} in the first megabyte of each source.</p>"
    return section("lengths", "Lengths", caption, drawn, other)


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
    records = f"{html_text(name)}: {counted(side.num_sequences, 'record')}"
    fill_top, full = top + _HEIGHT - 14, _WIDTH - _LEFT - 34
    gauge = f'<rect x="{_LEFT + 24}" y="{fill_top}" width'
    return [
        f'<text x="{_LEFT}" y="{top + 14}">{records} by length in tokens, seq_len {side.seq_len:,}'
        "</text>",
        *_bars(side.length_histogram, top + 20, color),
        f'<text x="4" y="{fill_top + 9}">fill {side.fill:.2%}</text>',
        f'{gauge}="{full}" height="10" fill="#888" fill-opacity=".3"/>',
        f'{gauge}="{full * side.fill:.1f}" height="10" fill="{color}"/>',
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
    records = list[Record]()
    manifest, pipeline = opened.manifest, pipeline_of(tokenizer_of(opened, tokenizers))
    if data and data[0].rows and data[0].size <= _MAX_BYTES:
        labels = label_names(manifest)
        for number, row in read_packs(opened, split, 0, _RECORDS):
            ids, trained, weights = row["input_ids"], row["trained"], row["loss_weights"]
            for _, a, b, side in records_in(row, manifest.preferences, labels):
                title = ", ".join(
                    filter(None, (f"pack {number}", side, weights_text(weights[a:b])))
                )
                records.append(Record(title, ids[a:b], trained[a:b]))
    shown = cell(numbers_of(manifest), manifest.facts.counts.splits(), records, pipeline)
    title = html_text(opened.address)
    return f'{PAGE_STYLE}<div class="packhouse"><b>{title}</b>{shown}</div>'


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
        return f"<HTML page of {len(self.html):,} characters, shown in a notebook>"
