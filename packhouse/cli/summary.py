"""What a run or a version holds, in blocks that the terminal, markdown and CI show alike."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packhouse.auditing import audit_rows, inference_line
from packhouse.pack import PackStatistics
from packhouse.recipe.audit import QUALITY_COUNTERS
from packhouse.records.ledger import Filter, LedgerLine, in_and_out, units_of
from packhouse.system.escaping import for_markdown, markdown_table
from packhouse.system.terminal import echo, print_table, print_text
from packhouse.system.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A table with a title, and lines below it; either may be missing."""

    title: str
    columns: tuple[str, ...] = ()
    """The first names the row; the others are numbers."""
    rows: Sequence[tuple[Any, ...]] = ()
    """Whole numbers, texts, and None for what is not known."""
    lines: tuple[str, ...] = ()


def ledger_block(ledger: Sequence[LedgerLine], filters: Iterable[Filter]) -> Block:
    """Say where every row went, and why those that are not there left.

    Example:
        >>> line = LedgerLine(step="validate", rows_in=9, rows_out=8, quarantined={"json": 1})
        >>> block = ledger_block([line], [])
        >>> block.rows, block.lines
        ([('validate', 9, 8, 1, None, None, None)], ('validate quarantined: json 1',))
    """
    heads, cells = in_and_out(ledger)
    rows = [
        (
            line.step,
            *own,
            sum(line.quarantined.values()) or None,
            sum(line.dropped.values()) or None,
            line.tokens_in,
            line.tokens_out,
        )
        for line, own in zip(ledger, cells, strict=True)
    ]
    units = units_of(ledger)
    reasons = [text for line in ledger for text in _reason_lines(line, *units[line.step])]
    left_out = [
        f"where of {each.source} left out {each.filtered:,} of {counted(each.rows, 'row')}: "
        f"{each.where}"
        for each in filters
    ]
    return Block(
        title="ledger",
        columns=("step", *heads, "quarantined", "dropped", "tokens in", "tokens out"),
        rows=rows,
        lines=(*reasons, *left_out),
    )


def _reason_lines(line: LedgerLine, taken: str, given: str) -> Iterator[str]:
    """Reasons of a step that takes in rows (or records), and gives such."""
    for what, unit in (
        ("added", given),
        ("quarantined", ""),
        ("dropped", taken),
        ("tokens_dropped", "token"),
        ("tokens_added", "token"),
    ):
        if counts := getattr(line, what):
            reasons = ", ".join(
                f"{reason} {counted(n, unit) if unit else f'{n:,}'}"
                for reason, n in sorted(counts.items())
            )
            yield f"{line.step} {what.removeprefix('tokens_')}: {reasons}"


def splits_block(statistics: Mapping[str, PackStatistics], records: Mapping[str, int]) -> Block:
    """Say what the splits hold, train before eval; those without packs are left out."""
    return Block(
        title="splits",
        columns=("split", "packs", "records", "tokens", "trained", "fill", "lower bound"),
        rows=[
            (
                split,
                side.num_packs,
                records[split],
                side.num_tokens,
                side.num_trained,
                f"{side.fill:.2%}",
                side.lower_bound,
            )
            for split, side in sorted(statistics.items(), reverse=True)
            if side.num_packs
        ],
    )


def audit_blocks(audit: Mapping[str, Any]) -> Iterator[Block]:
    """Yield what the tokens teach by source, then what quality counters, checks and benchmarks say.

    Args:
        audit: of a manifest, not empty.
    """
    rows = audit_rows(audit)
    lines = [line] if (line := inference_line(audit)) else []
    lines += [
        f"{found['plugin']}: {found['failed']:,} of {counted(found['rows'], 'row')}"
        for found in audit.get("checks", {}).values()
    ]
    if found := audit.get("contamination"):
        outcome = {"drop": ": left out", "same_side": ": put into eval"}
        lines.append(
            f"contamination: {found['contaminated']:,} of {counted(found['rows'], 'row')} share "
            f"{found['ngram']} words in a row with a benchmark"
            f"{outcome.get(found['on_match'], '') * bool(found['contaminated'])}"
        )
        lines += [f"{name}: {counted(n, 'row')}" for name, n in found["by_benchmark"].items()]
    cells = [tuple(row.values()) for row in rows]
    yield Block(title="audit", columns=tuple(rows[0]), rows=cells, lines=tuple(lines))
    quality = audit.get("quality")
    if quality and (found_lines := quality_lines(quality)):
        title = f"quality (of {counted(quality['dataset'].get('rows', 0), 'row')})"
        yield Block(title=title, lines=tuple(found_lines))


def quality_lines(found: Mapping[str, Any]) -> list[str]:
    """Say what was found, counter by counter, with the first rows of one file.

    Example:
        >>> worst = [{"source": "a/a.jsonl", "row": 4, "record_id": "5f", "value": 1}]
        >>> quality_lines({"dataset": {"rows": 50, "html": 1}, "worst": {"html": worst}})
        ['html: 1 (2.00%) hold HTML in prose: a/a.jsonl row 4']
    """
    lines = []
    for counter, rows in found["worst"].items():
        number, file = found["dataset"].get(counter, 0), rows[0]["source"]
        first = [f"{row['row']:,}" for row in rows if row["source"] == file][:3]
        named = f"{file} row{'s' * (len(first) > 1)} {', '.join(first)}"
        more = ", ..." * (number > len(first))
        share = f"{number / max(found['dataset'].get('rows', 0), 1):.2%}"
        lines.append(
            f"{counter}: {number:,} ({share}) {QUALITY_COUNTERS.get(counter, '')}: {named}{more}"
        )
    return lines


def print_block(block: Block) -> None:
    """Print a block; where the terminal is narrow, the names of its rows are cut."""
    from rich.table import Table

    echo()
    if block.columns:
        table = Table(title=block.title, title_justify="left", box=None, pad_edge=False)
        for number, name in enumerate(block.columns):
            is_name = number == 0
            table.add_column(
                name,
                justify="left" if is_name else "right",
                overflow="ellipsis",
                no_wrap=not is_name,
            )
        for row in block.rows:
            table.add_row(*map(_cell, row))
        print_table(table)
    else:
        echo(block.title)
    for line in block.lines:
        print_text(line, 2)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def block_markdown(block: Block, level: int = 2) -> list[str]:
    """Return a block as lines of markdown: a heading, a table, a list.

    Example:
        >>> block_markdown(Block(title="splits", columns=("split", "packs"), rows=[("train", 4)]))
        ['## Splits', '', '| split | packs |', '|---|---:|', '| train | 4 |', '']
    """
    lines = [f"{'#' * level} {for_markdown(block.title[:1].upper() + block.title[1:])}", ""]
    if block.columns:
        lines += [*markdown_table(block.columns, block.rows), ""]
    lines += [f"- {for_markdown(line)}" for line in block.lines]
    return [*lines, ""] if block.lines else lines
