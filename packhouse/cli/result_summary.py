"""Result of a run or content of a version, as blocks for the terminal, Markdown and CI.

`print_result` prints what a user sees at the end of a run: the version, the ledger, how to load it.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packhouse.auditing.inference_prompts import inference_line
from packhouse.errors import HELD_BACK
from packhouse.recipe.audit_section import QUALITY_COUNTERS
from packhouse.recipe.recipe import preferences_in
from packhouse.records.ledger import Filter, LedgerLine, filters_of, in_and_out, units_of
from packhouse.run.chain import Prepared
from packhouse.run.steps import STEPS
from packhouse.run.steps.pack import SplitCounts
from packhouse.run.steps.publish import Published
from packhouse.run.steps.validate import ValidateFacts, render_counts
from packhouse.store.manifest import Audit, Quality, read_audit
from packhouse.system.escaping import for_markdown, markdown_table
from packhouse.system.terminal import console, echo, print_table, print_text
from packhouse.system.wording import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A title with a table, lines below it, or both."""

    title: str
    columns: tuple[str, ...] = ()
    """Column names. The first column names the row; the others are numbers."""
    rows: Sequence[tuple[Any, ...]] = ()
    """Cells: integers, text, or None if unknown."""
    lines: tuple[str, ...] = ()


def ledger_block(ledger: Sequence[LedgerLine], filters: Iterable[Filter]) -> Block:
    """Return the rows in and out of each step, with the reasons for quarantined and dropped rows.

    Example:
        >>> line = LedgerLine(step="validate", rows_in=9, rows_out=8, quarantined={"json": 1})
        >>> block = ledger_block([line], [])
        >>> block.rows, block.lines
        ([('validate', 9, 8, 1, None, None, None)], ('validate quarantined: json 1',))
        >>> counts = {"dropped": {"over_seq_len": 1}, "tokens_dropped": {"over_seq_len": 759}}
        >>> ledger_block([LedgerLine(step="pack", rows_in=9, rows_out=8, **counts)], []).lines
        ('pack dropped: over_seq_len 1 row with 759 tokens',)
    """
    heads, cells = in_and_out(ledger)
    rows = []
    for line, own in zip(ledger, cells, strict=True):
        bad, dropped = (sum(each.values()) or None for each in (line.quarantined, line.dropped))
        rows.append((line.step, *own, bad, dropped, line.tokens_in, line.tokens_out))
    lines, units = [], units_of(ledger)
    for line in ledger:
        taken, given = units[line.step]
        for what, unit in (
            ("added", given),
            ("quarantined", ""),
            ("dropped", given if line.step == "format" else taken),
        ):
            said = defaultdict(list)
            for name, of in ((what, unit), (f"tokens_{what}", "token")):
                for why, n in getattr(line, name, {}).items():
                    said[why].append(counted(n, of) if of else f"{n:,}")
            if said:
                reasons = (f"{why} {' with '.join(each)}" for why, each in sorted(said.items()))
                lines.append(f"{line.step} {what}: {', '.join(reasons)}")
    for each in filters:
        cut = f"{each.filtered:,} of {counted(each.rows, 'row')}"
        lines.append(f"source '{each.source}': `where: {each.where}` dropped {cut}")
    columns = ("step", *heads, "quarantined", "dropped", "tokens in", "tokens out")
    return Block(title="ledger", columns=columns, rows=rows, lines=tuple(lines))


def splits_of(published: Published) -> Block:
    """Return sizes of the splits, train before eval; a split without packs is omitted."""
    return Block(
        title="splits",
        columns=("split", "packs", "records", "tokens", "trained", "fill", "lower bound"),
        rows=[
            (
                split,
                side.num_packs,
                published.sides[split].records,
                side.num_tokens,
                side.num_trained,
                f"{side.fill:.2%}",
                side.lower_bound,
            )
            for split, side in sorted(published.statistics.items(), reverse=True)
            if side.num_packs
        ],
    )


_AUDIT_COLUMNS = (
    "answers, ended: share of answers and end tokens that are trained (should be 100%); other "
    "columns: number of trained headers and prompts, wrong BOS and end tokens, unknown tokens, "
    "repeated rows, and control tokens in text"
)


def audit_rows(audit: Audit) -> list[dict[str, Any]]:
    """Return the audit as table rows: one per source, and one overall.

    Columns: `answers`, share of the answers' bytes that are trained; `ended`, share of trained
    turns with a trained end token; then counts of trained headers, trained prompt bytes, misplaced
    BOS and end tokens, unknown tokens, repeated rows, and control-token texts in messages.

    Example:
        >>> counts = {"rows": 4, "turns": 4, "answer_bytes": 50, "untrained_answer_bytes": 5}
        >>> (row,) = audit_rows(Audit(dataset=counts, sources={"a": counts}))
        >>> row["source"], row["answers"], row["ended"]
        ('a', '90.00%', '100.00%')
    """
    sources = {**audit.sources, **({"all": audit.dataset} if len(audit.sources) != 1 else {})}
    rows = []
    for name, found in sources.items():
        counts = Counter[str](found)
        kinds = ("untrained_answer_bytes", "answer_bytes"), ("unterminated_turns", "turns")
        answers, ended = (
            f"{1 - counts[finding] / counts[of]:.2%}" if counts[of] else "-"
            for finding, of in kinds
        )
        rows.append(
            {
                "source": name,
                "records": counts["rows"],
                "answers": answers,
                "ended": ended,
                "headers": counts["leaked_headers"],
                "prompts": counts["trained_prompt_bytes"],
                "BOS/end": counts["double_bos"] + counts["missing_bos"] + counts["double_ends"],
                "unknown": counts["unknown_tokens"],
                "repeats": counts["duplicates"],
                "control text": counts["control_text"],
            }
        )
    return rows


def audit_blocks(document: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the audit by source, with checks and benchmarks, and the quality counters.

    Args:
        document: Audit of a manifest, not empty.
    """
    audit = read_audit(document)
    rows = audit_rows(audit)
    lines = [_AUDIT_COLUMNS, *([line] if (line := inference_line(document)) else [])]
    for check in audit.checks.values():
        lines.append(f"{check.plugin}: {check.failed:,} of {counted(check.rows, 'row')}")
    if found := audit.contamination:
        outcome = {"drop": ": dropped", "same_side": ": moved to eval"}
        lines.append(
            f"contamination: {found.contaminated:,} of {counted(found.rows, 'row')} share "
            f"{found.ngram} consecutive words with a benchmark"
            f"{outcome.get(found.on_match, '') * bool(found.contaminated)}"
        )
        lines += [f"{name}: {counted(n, 'row')}" for name, n in found.by_benchmark.items()]
    cells = [tuple(row.values()) for row in rows]
    yield Block(title="audit", columns=tuple(rows[0]), rows=cells, lines=tuple(lines))
    if (quality := audit.quality) and (found_lines := quality_lines(quality)):
        title = f"quality (of {counted(quality.dataset.get('rows', 0), 'row')})"
        yield Block(title=title, lines=tuple(found_lines))


def quality_lines(found: Quality) -> list[str]:
    """Return one line per quality counter, with the first rows of one file as examples.

    Example:
        >>> from packhouse.store.manifest import AuditedRow
        >>> worst = {"html": (AuditedRow(source="a/a.jsonl", row=4),)}
        >>> quality_lines(Quality(dataset={"rows": 50, "html": 1}, sources={}, worst=worst))
        ['html: 1 (2.00%) contain HTML outside code: a/a.jsonl row 4']
    """
    lines = []
    for counter, rows in found.worst.items():
        number, file = found.dataset.get(counter, 0), rows[0].source
        first = [f"{row.row:,}" for row in rows if row.source == file][:3]
        named = f"{file} row{'s' * (len(first) > 1)} {', '.join(first)}"
        more = ", ..." * (number > len(first))
        share = f"{number / max(found.dataset.get('rows', 0), 1):.2%}"
        lines.append(
            f"{counter}: {number:,} ({share}) {QUALITY_COUNTERS.get(counter, '')}: {named}{more}"
        )
    return lines


def print_block(block: Block) -> None:
    """Print a block."""
    echo()
    if block.columns:
        print_table(block.columns, block.rows, block.title)
    else:
        echo(block.title)
    for line in block.lines:
        print_text(line, 2)


def block_markdown(block: Block, level: int = 2) -> list[str]:
    """Return a block as lines of Markdown: a heading, a table, a list.

    Example:
        >>> block_markdown(Block(title="splits", columns=("split", "packs"), rows=[("train", 4)]))
        ['## Splits', '', '| split | packs |', '|---|---:|', '| train | 4 |', '']
    """
    lines = [f"{'#' * level} {for_markdown(block.title[:1].upper() + block.title[1:])}", ""]
    if block.columns:
        lines += [*markdown_table(block.columns, block.rows), ""]
    lines += [f"- {for_markdown(line)}" for line in block.lines]
    return [*lines, ""] if block.lines else lines


def report_json(prepared: Prepared) -> dict[str, object]:
    """Return the result of a run as plain JSON."""
    published = prepared.published
    return {
        "dataset": prepared.dataset,
        "version": prepared.version,
        "address": prepared.address,
        "store": prepared.store,
        "created": prepared.created,
        "ledger": [line.to_json() for line in prepared.ledger],
        "steps": list(_steps(prepared)),
        "quarantine": published.quarantine,
        "statistics": {side: each.to_dict() for side, each in published.statistics.items()},
        "ref": published.ref,
        "ref_version": published.ref_version,
        "held_back": list(published.held_back),
        "mirrors": dict(published.mirrors),
        "golden": prepared.golden,
        "audit": published.audit,
        "unused_fields": _unused_fields(prepared),
        "sources": published.mixed,
        "dedup": published.dedup.to_json() if published.dedup else None,
        "split": asdict(published.split) if published.split else None,
    }


def print_result(prepared: Prepared, *, as_json: bool) -> None:
    """Print the result of a run; if its ref was held back, exit with code `HELD_BACK`."""
    if as_json:
        echo(json.dumps(report_json(prepared), sort_keys=True))
    else:
        print_report(prepared)
    if prepared.published.held_back:
        sys.exit(HELD_BACK)


def print_report(prepared: Prepared) -> None:
    """Print the result of a run for people."""
    from rich.text import Text

    out, published = console(), prepared.published
    verb = "published" if prepared.created else "unchanged, already published:"
    if published.is_ref_moved and not prepared.created:
        verb = "already published:"
    dataset = f" {prepared.dataset} "
    out.print(Text.assemble("\n", (verb, "bold green"), (dataset, "bold"), prepared.version))
    print_text(f"in {prepared.address}, {_ref(prepared)}", 2)
    print_block(ledger_block(prepared.ledger, filters_of(published.sources)))
    for note in _notes(prepared):
        print_text(note, 2)
    print_block(splits_of(published))
    for block in audit_blocks(published.audit):
        print_block(block)
    if prepared.golden:
        out.print(f"golden: {counted(prepared.golden, 'conversation')} unchanged")
    for target, name in published.mirrors.items():
        out.print(f"also in {target} ({name})")
    steps = []
    for each in _steps(prepared):
        step, jobs, cached, seconds = each.values()
        some = f"{cached} of {jobs} cached, " if cached else ""
        steps.append(f"{step} cached" if cached == jobs else f"{step} {some}{seconds:.1f} s")
    print_text(f"steps: {', '.join(steps)}")
    if prepared.receipts:
        # `echo` does not wrap it, so that it can be copied.
        echo(f"cache: {Path(prepared.receipts[0].folder).parents[2]}")
    if published.quarantine:
        rows = sum(line.num_bad_rows for line in prepared.ledger)
        out.print(f"quarantine: {counted(rows, 'row')} in {published.quarantine}")
    out.print("\nload it:")
    is_latest = (published.ref, published.ref_version) == ("latest", prepared.version)
    for line in loading_lines(prepared, prepared.uri if is_latest else prepared.address):
        out.print(f"  {line}")


def loading_lines(prepared: Prepared, uri: str) -> list[str]:
    """Return the Python code that loads the version published at `uri`."""
    formats = (str(source["settings"].get("format")) for source in prepared.published.sources)
    load = "load_preferences" if preferences_in(formats) else "load_packed"
    split = "train" if prepared.published.statistics["train"].num_packs else "eval"
    return [f"from packhouse import {load}", f'{split} = {load}("{uri}", split="{split}")']


def _ref(prepared: Prepared) -> str:
    ref, at = prepared.published.ref, prepared.published.ref_version
    if prepared.published.is_ref_moved and not prepared.created:
        return f"ref '{ref}' moved here from {prepared.published.ref_before or 'nothing'}"
    if at == prepared.version:
        return f"ref '{ref}'"
    move = f"packhouse ref set {prepared.uri} {ref} {prepared.pinned}"
    if prepared.published.held_back:
        reasons = "; ".join(prepared.published.held_back)
        return f"but ref '{ref}' was held back: {reasons}. To move it anyway, run: {move}"
    if prepared.published.is_ref_left:
        return (
            f"and ref '{ref}' stays at {at}, because an option such as --set overrides the "
            "recipe, or the recipe sets publish.move_ref: false. To move it, pass --move-ref or "
            f"run: {move}"
        )
    return (
        f"but ref '{ref}' was later moved from this version to {at} and stays there. To move it "
        f"back, run: {move}"
    )


def _unused_fields(prepared: Prepared) -> dict[str, dict[str, int]]:
    """Count the rows of each source that have fields which no format reads, by field."""
    found: dict[str, Counter[str]] = {}
    for receipt in prepared.receipts:
        if isinstance(receipt.facts, ValidateFacts) and receipt.facts.extra_fields:
            source = receipt.facts.origin.source
            found.setdefault(source, Counter()).update(receipt.facts.extra_fields)
    return {source: dict(sorted(counts.items())) for source, counts in sorted(found.items())}


def _notes(prepared: Prepared) -> Iterator[str]:
    """Yield how rows were rendered, read, mixed, repeated and split, if that needs a note."""
    published = prepared.published
    found = render_counts(prepared.receipts)
    for note in (*found.record_lines(), *found.lines(), prepared.factor_note):
        if note:
            yield f"note: {note}"
    for source, counts in _unused_fields(prepared).items():
        shown = ", ".join(f"{name} {number:,}" for name, number in list(counts.items())[:8])
        more = f", and {len(counts) - 8} more" if len(counts) > 8 else ""
        yield f"note: source '{source}' has unused fields (number of rows): {shown}{more}"
    mixed = published.mixed
    if any(line.get("sampled_out") or line["repeated"] for line in mixed.values()):
        for name, line in mixed.items():
            packed, *others = (line[each] for each in ("packed", "records", "repeated", "tokens"))
            records, again, tokens = map(counted, others, ("record", "repeat", "token"))
            yield f"mix: source '{name}': {packed:,} of {records}, {again}, {tokens}"
    dedup, equal = published.dedup, "row"
    if any(line.num_added_records for line in prepared.ledger):
        equal = "record"
    kinds = (("equal", equal, dedup.equal), ("near", "row", dedup.near)) if dedup else ()
    for kind, unit, repeats in kinds:
        if repeats.rows:
            row, apart = repeats.samples[0], repeats.on_both_sides
            first = row["repeats"]
            split = f"{counted(apart, 'pair is', 'pairs are')} in train and eval; " if apart else ""
            yield (
                f"{kind}: {counted(repeats.rows, f'{unit} repeats', f'{unit}s repeat')} another, "
                f"{repeats.dropped:,} dropped; {split}for example, {row['source']} row "
                f"{row['row']:,} repeats {first['source']} row {first['row']:,} "
                f"({row['similarity']:.0%})"
            )
    side = published.split
    if side is not None and is_uneven(side):
        joined = f", and dedup merged {counted(side.joined, 'row')} into other groups"
        yield (
            f"note: eval has {side.eval:,} of {counted(side.rows, 'row')} instead of "
            f"{side.asked:,}, because groups are not split{joined * bool(side.joined)}. To change "
            "this, see split and dedup in the recipe"
        )


def is_uneven(split: SplitCounts) -> bool:
    """Return True if eval is further from the requested size than chance explains.

    The limit is 20%, or three standard deviations of drawing each row by chance. For 50 of 1,000
    rows, that is max(10, 20.7): 40 is even, 10 is not.

    Example:
        >>> is_uneven(SplitCounts(rows=1000, eval=40, asked=50, joined=0))
        False
        >>> is_uneven(SplitCounts(rows=1000, eval=10, asked=50, joined=700))
        True
    """
    asked, found = split.asked, split.eval
    by_chance = 3 * (asked * (1 - min(1.0, asked / max(split.rows, 1)))) ** 0.5
    return abs(found - asked) > max(asked / 5, by_chance) or (found == 0) != (asked == 0)


def _steps(prepared: Prepared) -> Iterator[dict[str, Any]]:
    """Yield the number of jobs, of cached ones, and the wall time of each step of a run."""
    for step in STEPS:
        receipts = [receipt for receipt in prepared.receipts if receipt.step == step.name]
        cached = sum(receipt.cached for receipt in receipts)
        seconds = round(prepared.seconds.get(step.name, 0.0), 3)
        yield {"step": step.name, "jobs": len(receipts), "cached": cached, "seconds": seconds}
