"""`packhouse plan` and `packhouse explain`: estimate a run before doing it, and show its steps.

The estimate (rows, tokens, packs and bytes) reads, renders and tokenizes about the first megabyte
of each source with the code of the run, and scales the result by bytes. Shards that are already
tokenized are counted exactly.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packhouse.cli import recipe_options
from packhouse.errors import SourceError
from packhouse.pack.overlength import apply_over_length
from packhouse.pack.strategies import (
    SeqLenTrial,
    pack_costs,
    plan_packs,
    step_imbalance,
    try_seq_lens,
)
from packhouse.read import ShardRows, read_shard, scan_source
from packhouse.read.source_files import source_name
from packhouse.read.unread_fields import UnreadText
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.arrays import Bools, Int64s
from packhouse.records.ledger import Filter, RenderCounts, factor_note, filters_of, share_allowed
from packhouse.records.reasons import ROW_STEPS
from packhouse.records.record_ids import number_rows
from packhouse.records.table_schemas import REFUSED, read_table
from packhouse.registry import function_of_addon, has_function
from packhouse.render.renderer import run_template, try_rows
from packhouse.run.chain import Plan, bytes_needed, output_jobs, plan_jobs
from packhouse.run.moved_shards import Move, find_moves
from packhouse.run.prepare_arguments import read_recipe, recipe_for
from packhouse.run.step import AnyJob
from packhouse.run.step_cache import LastJob, Workspace, load_last_run
from packhouse.run.steps import STEPS
from packhouse.run.steps.format import FORMAT
from packhouse.run.steps.pack import PACK
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import (
    VALIDATE,
    TextOfShard,
    render_counts,
    unread_texts,
)
from packhouse.store.schema_drift import changed_keys
from packhouse.system.disks import check_cache, find_cache, free_space, temporary_folder
from packhouse.system.terminal import console, echo, print_table, print_text
from packhouse.system.wording import by_name, counted, cut_pair, in_mb, rows_and_records

_Lengths = npt.NDArray[np.integer]
_BYTES_PER_TOKEN = {"labels": 2.6, "compact": 1.5}  # zstd-1 Parquet, docs/performance.md


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Expected output of a run."""

    rows: int
    """Rows, as often as `weight` and `max_records` take them."""
    records: int
    """More than rows if rows are split (`format.turns`, windows, paths of a tree)."""
    tokens: int
    packs: int
    bytes: int
    is_exact: bool
    """True if every shard is already tokenized."""
    sources: Mapping[str, Mapping[str, int]]
    """Rows, records and tokens by source file, before dropping and mixing."""
    notes: tuple[str, ...] = ()
    """Notes on what the numbers are based on, and what they omit."""
    rendering: RenderCounts = field(default_factory=RenderCounts)
    """How rows become records, before mixing sources."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Records by reason that would be quarantined (rows, if not split yet)."""
    refusals: tuple[str, ...] = ()
    """Reasons why the run would publish nothing, as far as the estimate shows."""
    filters: tuple[Filter, ...] = ()
    """Rows that each `where` expression leaves out, by source."""
    seq_lens: tuple[SeqLenTrial, ...] = ()
    """Results of other `pack.seq_len` values with the run's planner, without `over_length`. Empty
    for windows, which depend on `seq_len`."""

    def lines(self) -> list[str]:
        """Return the notes, how answers end, and why rows would be quarantined, as text."""
        bad = [f"quarantined: {by_name(self.quarantined)}"] if self.quarantined else []
        return [*self.notes, *self.rendering.lines(), *bad]

    @property
    def num_rows(self) -> str:
        """Number of rows, with records if there are more: `40 rows (100 records)`."""
        return rows_and_records(self.rows, self.records)

    @property
    def totals(self) -> str:
        """Rows, tokens, packs and size in one line."""
        return (
            f"{'' if self.is_exact else 'about '}{self.num_rows}, {counted(self.tokens, 'token')}, "
            f"{counted(self.packs, 'pack')}, {self.bytes / 2**20:,.1f} MiB"
        )

    def by_source(self) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Return column names and a line for each source file; with records if rows are split."""
        lines = self.sources.items()
        is_split = any(line["records"] != line["rows"] for _, line in lines)
        names = ("rows", "records", "tokens") if is_split else ("rows", "tokens")
        return ("source", *names), [(file, *(line[n] for n in names)) for file, line in lines]


@dataclass(frozen=True, slots=True, eq=False)
class _Records:
    """Records in order, those of a row next to each other."""

    lengths: _Lengths
    """Number of tokens of each record."""
    is_first: Bools
    """True for the first record of each row."""

    @property
    def num_rows(self) -> int:
        return int(self.is_first.sum())

    @classmethod
    def of(cls, lengths: _Lengths, rows: Int64s) -> "_Records":
        """Create records from lengths and the row number of each record, in ascending order."""
        return cls(lengths, np.diff(rows, prepend=-1) != 0)

    @classmethod
    def concat(cls, parts: Sequence["_Records"]) -> "_Records":
        lengths = np.concatenate([np.zeros(0, np.int32), *(each.lengths for each in parts)])
        is_first = np.concatenate([np.zeros(0, np.bool_), *(each.is_first for each in parts)])
        return cls(lengths, is_first)

    def scaled(self, share: float) -> "_Records":
        """Repeat the records to multiply their number: [5, 9] by 2.5 gives [5, 9, 5, 9, 5]."""
        return self.resized(round(len(self.lengths) * share))

    def resized(self, size: int) -> "_Records":
        """Return the first `size` records; start over if there are fewer."""
        return _Records(np.resize(self.lengths, size), np.resize(self.is_first, size))

    def take(self, num_rows: int) -> "_Records":
        """Return the first `num_rows` rows with all their records; start over if there are fewer.

        Records [5 9 4] of rows [0 0 1], 3 rows: [5 9 4 5 9].
        """
        starts = np.flatnonzero(self.is_first)
        if not len(starts):
            return self
        often, rest = divmod(num_rows, len(starts))
        return self.resized(often * len(self.lengths) + int(starts[rest]))


@dataclass(frozen=True, slots=True, eq=False)
class _Counted:
    """Records of a shard, or of a sample of it."""

    every: _Records
    """All records, before any is dropped."""
    packed: _Records
    """Records that `pack` would take, cut as it would cut them."""
    num_read: int = 0
    """Number of rows read."""
    num_bytes: int = 1
    """Number of bytes read for them."""
    rendered: RenderCounts = field(default_factory=RenderCounts)
    """How rows became records."""
    quarantined: Mapping[str, int] = field(default_factory=dict)
    """Records by reason that would be quarantined (rows, if not split yet)."""
    num_bad: int = 0
    """Rows with a record that would be quarantined."""
    lineage: Mapping[str, Any] = field(default_factory=dict)
    """Rows of the file, and those that `where` leaves out, in the format of a manifest."""
    unread_text: Mapping[str, UnreadText] = field(default_factory=dict)
    """Fields with text that nothing reads."""

    @classmethod
    def of(cls, tokenized: pa.Table, recipe: Recipe, **read: Any) -> "_Counted":
        """Count tokenized rows. Overlong records are dropped here if they would fail the run."""
        rule = recipe.pack
        if rule.over_length == "error":
            rule = rule.model_copy(update={"over_length": "drop"})
        admitted, rows = apply_over_length(tokenized, rule), number_rows(tokenized)
        every = _Records.of(tokenized["num_tokens"].to_numpy(), rows)
        return cls(every, _Records.of(admitted.lengths, rows[admitted.rows]), **read)

    def scaled(self, share: float) -> "_Counted":
        """Return the counts multiplied by `share`."""
        filtered = {name: round(n * share) for name, n in self.lineage["filtered"].items()}
        return _Counted(
            self.every.scaled(share),
            self.packed.scaled(share),
            rendered=self.rendered.scaled(share),
            quarantined={name: round(n * share) for name, n in self.quarantined.items()},
            num_bad=round(self.num_bad * share),
            lineage={"rows": round(self.lineage["rows"] * share), "filtered": filtered},
        )


def plan(
    data: object,
    *,
    tokenizer: object = None,
    seq_len: int | None = None,
    cache: str | Path | None = None,
    **settings: object,
) -> Estimate:
    """Estimate the result of `prepare` without running it. Takes the same arguments.

    Reads, renders and tokenizes a megabyte of each source; tokenized shards are counted exactly.

    Returns:
        Rows, tokens, packs and bytes, and rows and tokens of each source.

    Raises:
        PackhouseError: a setting, source or tokenizer that `prepare` would reject too.

    Example:
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> plan(rows, tokenizer="deployments/demo/tokenizer", format={"template": "alpaca"},
        ...     cache=getfixture("tmp_path")).packs
        4
    """
    folder = check_cache(find_cache(None if cache is None else str(cache)).folder)
    recipe = recipe_for(data, tokenizer=tokenizer, seq_len=seq_len, cache=folder, settings=settings)
    return estimate(recipe, plan_jobs(recipe), Workspace(cache=folder))


def estimate(recipe: Recipe, plan: Plan, workspace: Workspace) -> Estimate:
    """Estimate a run of `recipe`; takes one or two seconds for each source that is not cached."""
    shards: list[_Counted] = []
    by_source: dict[str, list[_Counted]] = {}
    sources: dict[str, dict[str, int]] = {}
    samples: dict[str, _Counted] = {}
    num_bytes = 0
    quarantined: Counter[str] = Counter()
    lineage: list[dict[str, Any]] = []
    of_texts: list[TextOfShard] = []
    jobs = zip(plan.validate, plan.format, plan.tokenize, strict=True)
    for validate, formatted, tokenize in jobs:
        shard, source = validate.parameters.shard, validate.parameters.source
        receipt = TOKENIZE.peek(tokenize.key, workspace)
        checked = VALIDATE.peek(validate.key, workspace)
        if checked is not None:
            rows_out, unread = checked.facts.rows_out, checked.facts.unread_text
            of_texts.append(TextOfShard(source, shard, rows_out, unread))
        if receipt is not None:
            rendered = FORMAT.peek(formatted.key, workspace)
            counts = [checked, rendered, receipt]
            bad = sum(each.facts.num_bad_rows for each in counts if each)
            reasons = sum((Counter(each.facts.quarantined) for each in counts if each), Counter())
            tokenized = read_table(receipt.path("tokenized.arrow"))
            counted_texts = render_counts([rendered] if rendered else [])
            bad_rows = {"num_bad": bad, "quarantined": reasons}
            counted = _Counted.of(tokenized, recipe, rendered=counted_texts, **bad_rows)
        else:
            # All shards of a file share one sample, which is its first megabyte.
            if shard.file not in samples:
                samples[shard.file] = _sampled(recipe, source, shard.uri, workspace)
                if checked is None:
                    unread, read = samples[shard.file].unread_text, samples[shard.file].num_read
                    of_texts.append(TextOfShard(source, shard, read, unread))
            sample = samples[shard.file]
            size = shard.byte_end - shard.byte_start
            num_bytes += size
            # Scale by bytes, or by rows if the number of rows in the shard is known. This assumes
            # that the sample is like the rest, so it is wrong for files sorted by length.
            share = checked.facts.rows_out / max(1, sample.num_read) if checked else None
            counted = sample.scaled(size / max(1, sample.num_bytes) if share is None else share)
            if checked:  # a stopped run: 0 rows out are not informative
                bad = max(counted.num_bad, checked.facts.num_bad_rows)
                reasons = Counter(counted.quarantined) | Counter(checked.facts.quarantined)
                counted = replace(counted, num_bad=bad, quarantined=reasons)
        settings = {"file": shard.file, "settings": {"where": source.where}}
        lineage.append(checked.facts.lineage() if checked else {**counted.lineage, **settings})
        shards.append(counted)
        by_source.setdefault(source_name(source), []).append(counted)
        quarantined.update(counted.quarantined)
        line = sources.setdefault(shard.file, {"rows": 0, "records": 0, "tokens": 0})
        line["rows"] += counted.every.num_rows
        line["records"] += len(counted.every.lengths)
        line["tokens"] += int(counted.every.lengths.sum())
    num_over = sum(int((each.every.lengths > recipe.pack.seq_len).sum()) for each in shards)
    mixed, every = (
        _mixed(recipe, {n: [getattr(each, kind) for each in own] for n, own in by_source.items()})
        for kind in ("packed", "every")
    )
    tokens = int(mixed.lengths.sum())
    packs, balance_notes = _packs(recipe, mixed.lengths)
    rendering = RenderCounts.total([each.rendered for each in shards])
    factor = factor_note(rendering, recipe.format)
    num_read = sum(each["rows"] for each in lineage)
    num_bad = sum(each.num_bad for each in shards)
    notes = [*_notes(recipe, samples.values(), num_bytes, num_over), *balance_notes, factor]
    refusals = _refusals(recipe, num_bad, num_over, num_read, len(mixed.lengths))
    return Estimate(
        rows=mixed.num_rows,
        records=len(mixed.lengths),
        tokens=tokens,
        packs=packs,
        bytes=round(tokens * _BYTES_PER_TOKEN[recipe.publish.layout]),
        is_exact=not samples,
        sources=sources,
        notes=tuple(filter(None, notes)),
        rendering=rendering,
        quarantined=dict(quarantined.most_common()),
        filters=tuple(filters_of(lineage)),
        refusals=(*refusals, *unread_texts(recipe, of_texts)),
        # `every`, because a longer pack has room for records that this one drops.
        seq_lens=_other_seq_lens(recipe, every),
    )


def _refusals(
    recipe: Recipe, num_bad: int, num_over: int, num_read: int, num_left: int
) -> Iterator[str]:
    limit = recipe.validate_.max_quarantined
    if num_read and num_bad / num_read > share_allowed(limit, num_read):
        yield (
            f"{num_bad:,} of {counted(num_read, 'row')} ({num_bad / num_read:.2%}) are bad; "
            f"validate.max_quarantined is {limit:.2%}. `packhouse inspect RECIPE` shows the "
            "first ones."
        )
    is_checked = recipe.pack.over_length == "error" and recipe.pack.strategy != "concat"
    if num_over and is_checked:
        yield (
            f"{counted(num_over, 'record has', 'records have')} more tokens than pack.seq_len "
            f"{recipe.pack.seq_len:,}, but pack.over_length is error. Change it, or raise "
            "pack.seq_len."
        )
    if not num_left:
        yield "no rows are left to pack"


def _other_seq_lens(recipe: Recipe, every: _Records) -> tuple[SeqLenTrial, ...]:
    pack = recipe.pack
    if pack.over_length == "window":  # windows depend on seq_len
        return ()
    values, numbers = np.unique(every.lengths, return_counts=True)
    counts = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    multiple = pack.pad_record_to_multiple_of
    return tuple(try_seq_lens([counts], pack.seq_len, pack.strategy, pack.seed, multiple))


_OVER_LENGTH = {
    "drop": "and will be dropped",
    "truncate_turns": "and will be cut after a turn or dropped",
    "window": "even as windows, and will be dropped",
}


def _notes(
    recipe: Recipe, samples: Collection[_Counted], num_bytes: int, num_over: int
) -> Iterator[str]:
    """Yield notes on what the numbers are based on, and what they omit.

    Args:
        recipe: recipe of the run.
        samples: samples of shards that are not tokenized yet.
        num_bytes: total size of these shards.
        num_over: number of records over `pack.seq_len`.
    """
    if samples:
        rows, read = (sum(getattr(s, name) for s in samples) for name in ("num_read", "num_bytes"))
        yield (
            f"estimated from {counted(rows, 'row')}: the first {read / 1e6:,.2f} MB of "
            f"{counted(len(samples), 'file')} with {num_bytes / 1e6:,.2f} MB: assumes that the "
            "other rows are similar"
        )
    policy = recipe.pack.over_length
    if num_over and recipe.pack.strategy != "concat" and policy != "error":
        yield (
            f"{counted(num_over, 'record has', 'records have')} more tokens than pack.seq_len "
            f"{recipe.pack.seq_len:,}, "
            f"{_OVER_LENGTH[policy]}"
        )
    policies = {"exact": recipe.dedup.exact, "near": recipe.dedup.near}
    if recipe.audit.benchmarks and recipe.audit.on_match == "drop":
        yield "contaminated rows are still counted here, but audit.on_match will drop them"
    dropped = [f"dedup.{name}" for name, policy in policies.items() if policy == "drop"]
    if dropped:
        yield f"duplicates are still counted here, but {' and '.join(dropped)} will drop them"


def _mixed(recipe: Recipe, records: Mapping[str, list[_Records]]) -> _Records:
    """Return the records of all sources, repeated or cut about as `weight` and `max_records` do."""
    mixed = []
    for source in recipe.sources:
        own = _Records.concat(records.get(source_name(source), []))
        taken = own.num_rows
        if source.max_records is not None:
            taken = min(taken, source.max_records)
        # Lengths [5 9] of two rows with weight 1.5: [5 9 5].
        mixed.append(own.take(taken).take(round(taken * source.weight)))
    return _Records.concat(mixed)


def _sampled(recipe: Recipe, source: SourceConfig, uri: str, workspace: Workspace) -> _Counted:
    """Return the counts for the first megabyte of a file."""
    rows = try_first_rows(recipe, source, workspace.tokenizers, uri=uri, max_rows=None)
    left_out = Counter(rows.read.dropped["detail"].to_pylist())
    return _Counted.of(
        rows.tokenized,
        recipe,
        rendered=rows.rendered,
        quarantined=Counter(rows.bad["reason"].to_pylist()),
        num_read=rows.read.validated.num_rows,
        num_bytes=rows.num_bytes,
        unread_text=rows.read.unread_text,
        num_bad=len(np.unique(rows.bad["row"].to_numpy())),
        lineage={
            "rows": rows.read.num_records,
            "filtered": {text: left_out[text] for text in source.filters},
        },
    )


def _packs(recipe: Recipe, lengths: _Lengths) -> tuple[int, list[str]]:
    """Return the number of packs if all lengths are planned together, ignoring train and eval.

    With `pack.balance`, a note gives the improvement.
    """
    if not len(lengths):
        return 0, []
    pack = recipe.pack
    multiple = pack.pad_record_to_multiple_of
    plan = partial(plan_packs, lengths, pack.seq_len, pack.strategy, pack.seed, multiple)
    if pack.balance == 1:
        return plan().num_packs, []
    balanced = plan(pack.balance)
    without, with_ = (
        step_imbalance(pack_costs(each, lengths), pack.balance) for each in (plan(), balanced)
    )
    return balanced.num_packs, [
        f"pack.balance: in steps of {pack.balance} packs, the most expensive pack costs "
        f"{with_:.2f} times the mean attention (without balancing: {without:.2f} times)"
    ]


_SAMPLE_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRows:
    """Result of reading, rendering and tokenizing the first rows of a source."""

    read: ShardRows
    num_bytes: int
    """Number of source bytes read."""
    tokenized: pa.Table
    """Records of rows that pass (schema `table_schemas.TOKENIZED`)."""
    bad: pa.Table
    """Rows rejected by any step (schema `table_schemas.QUARANTINED`)."""
    rendered: RenderCounts

    def refused(self) -> list[dict[str, Any]]:
        """Return source, row, reason and detail of bad rows, in the order of the steps."""
        return list(self.bad.select(["source", "row", "reason", "detail"]).to_pylist())


def try_first_rows(
    recipe: Recipe,
    source: SourceConfig,
    tokenizers: Path,
    *,
    uri: str | None = None,
    max_rows: int | None = 500,
) -> FirstRows:
    """Read, render and tokenize the first megabyte of a source.

    Args:
        recipe: recipe with the settings for reading, rendering and tokenizing.
        source: a source of the recipe.
        tokenizers: folder of tokenizer snapshots.
        uri: file of the source; None for the first one with rows.
        max_rows: maximum number of rows to render; None for all.

    Raises:
        SourceError: the source has no rows.
    """
    scanned = scan_source(source, _SAMPLE_BYTES, recipe.validate_.max_row_bytes)
    wanted = (each for each in scanned if (each.num_rows != 0 if uri is None else each.uri == uri))
    shard = next(wanted, None)
    if shard is None:
        raise SourceError(f"source '{source.path}' has no rows")
    rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)
    with temporary_folder("sample") as folder:
        rows.write(folder, max_rows)
        call = partial(try_rows, recipe, shard.row_format, source.label_names, tokenizers, folder)
        reply = run_template(call, recipe, rows.validated.slice(0, max_rows).nbytes)
        return FirstRows(
            read=rows,
            num_bytes=shard.byte_end - shard.byte_start,
            tokenized=read_table(folder / "tokenized.arrow"),
            bad=pa.concat_tables([rows.quarantined, read_table(folder / REFUSED)]),
            rendered=RenderCounts(**reply),
        )


@click.command("plan")
@recipe_options
def plan_command(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Estimate the rows, records, tokens, packs and bytes that RECIPE would produce.

    Also show which rows would be quarantined, which steps are cached, and how much cache space a
    run needs. Only a sample of each source is read; counts of tokenized shards are exact.

    \b
    Example:
      $ packhouse plan recipe.yaml
      demo 0bc8b616aa87002e
        294 rows, 29,487 tokens, 58 packs, 0.1 MiB
      pack.seq_len  packs   fill  padding  records too long
               512     58  99.3%      209                 1
      ...
    """
    recipe = read_recipe(recipe_path, overrides)
    workspace = Workspace(cache=cache)
    jobs = plan_jobs(recipe)
    rows = explain_plan(jobs, workspace, recipe)
    hits = Counter(row.step for row in rows if row.cached)
    totals = Counter(row.step for row in rows if row.key)
    estimated = estimate(recipe, jobs, workspace)
    room = function_of_addon("cache_room")(cache) if has_function("cache_room") else None
    needed = bytes_needed(jobs, workspace)
    names = [step.name for step in STEPS]
    if as_json:
        cached = {step: {"cached": hits[step], "jobs": totals[step]} for step in names}
        facts = {"version_id": jobs.version_id, **asdict(estimated), "steps": cached}
        for line, other in zip(facts["seq_lens"], estimated.seq_lens, strict=True):
            line |= {"fill": other.fill, "num_padding": other.num_padding}
        facts["cache"] = {"needed_bytes": needed, **(asdict(room) if room else {})}
        echo(json.dumps(facts))
        return
    about = "" if estimated.is_exact else "about "
    console().print(f"{recipe.dataset} {jobs.version_id}", style="bold")
    console().print(f"  {estimated.totals}")
    for note in estimated.lines():
        print_text(f"note: {note}", 2)
    for refusal in estimated.refusals:
        print_text(f"the run would fail: {refusal}", 2)
    columns, lines = estimated.by_source()
    # An exact count stays a number, which is aligned to the right.
    cells = [[source, f"{about}{n:,}" if about else n, *others] for source, n, *others in lines]
    print_table(columns, cells)
    if estimated.seq_lens:
        trials = [
            (t.seq_len, t.num_packs, f"{t.fill:.1%}", t.num_padding, t.records_too_long)
            for t in estimated.seq_lens
        ]
        print_table(("pack.seq_len", "packs", "fill", "padding", "records too long"), trials)
    found = [f"{name} {hits[name]}/{totals[name] or '?'}" for name in names]
    print_text(f"cached: {', '.join(found)}")
    for each in estimated.filters:
        left_out = f"{each.filtered:,} of {counted(each.rows, 'row')}"
        print_text(f"source '{each.source}': `where: {each.where}` drops {about}{left_out}")
    for source in recipe.sources:
        for name, expression in source.select.items():
            print_text(f"source '{source_name(source)}': `select` {name} = {expression}")
    print_text(f"cache: this run adds about {in_mb(needed)}{f'; {room}' if room else ''}")
    if needed > free_space(cache).bytes:
        echo("note: the run needs more space than is free. Free some with `packhouse cache gc`.")


@click.command()
@recipe_options
def explain(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Show which steps of RECIPE would run, which are cached, and what changed since the last run.

    No steps are run: the sources and the tokenizer are hashed and looked up in the cache.

    \b
    Example:
      $ packhouse explain recipe.yaml
       validate  cached (2 of 2 jobs)
           pack  runs (1 of 1 jobs)
                 pack.seq_len: 512 -> 1024
      ...
    """
    from rich.text import Text

    recipe = read_recipe(recipe_path, overrides)
    plan = plan_jobs(recipe)
    rows = explain_plan(plan, Workspace(cache=cache), recipe)
    if as_json:
        echo(json.dumps({"version_id": plan.version_id, "jobs": [asdict(row) for row in rows]}))
        return
    for step in (step.name for step in STEPS):
        jobs = [row for row in rows if row.step == step]
        runs = [row for row in jobs if not row.cached]
        what, style = ("runs", "yellow") if runs else ("cached", "green")
        count = f" ({len(runs or jobs)} of {len(jobs)} jobs)"
        console().print(Text.assemble((f"{step:>9}  {what}", style), count))
        for row in runs[:5]:
            label = f"{row.label}: " if len(jobs) > 1 else ""
            console().print(f"{'':>11}{label}{'; '.join(row.why)}")
        if len(runs) > 5:
            console().print(f"{'':>11}... and {len(runs) - 5} more")
    console().print(f"  version  {plan.version_id}")


@dataclass(slots=True)
class ExplainedJob:
    """Result of looking up one job in the cache."""

    step: str
    label: str
    key: str | None
    """None if it depends on a job that is not done."""
    cached: bool = True
    why: list[str] = field(default_factory=list)
    """Why the job runs; empty if it is cached."""


def explain_plan(plan: Plan, workspace: Workspace, recipe: Recipe) -> list[ExplainedJob]:
    """Return the jobs of a run in the order of the steps.

    Jobs after pack depend on its result. If pack is not done, each of these steps has a single row.
    """
    last = load_last_run(workspace.cache, recipe.dataset)
    packed = PACK.peek(plan.pack.key, workspace)
    jobs = tuple(plan)
    if packed is not None:
        written, last_job = output_jobs(plan, recipe, packed.facts)
        jobs = (*jobs[:-1], *written, last_job)
    moves = find_moves(plan.movable_jobs, last.values())
    rows = [_explain_job(job, workspace, last, moves.get(job.key)) for job in jobs]
    if packed is None:
        why = ["the number of jobs is not known until pack is done"]
        rows.append(ExplainedJob("files", "output", None, False, why))
    order = [step.name for step in STEPS]
    rows.sort(key=lambda row: order.index(row.step))
    # A removed shard has no job to explain, but it changes the input of pack.
    moved = {move.key for move in moves.values()}
    gone = {job.label for job in last.values() if job.step == "validate" and job.key not in moved}
    gone -= {job.label for job in plan.validate}
    if gone:
        (pack,) = [row for row in rows if row.step == "pack"]
        pack.why.insert(0, f"missing: {', '.join(sorted(gone)[:3])}")
    return rows


def _explain_job(
    job: AnyJob,
    workspace: Workspace,
    last: dict[tuple[str, str], LastJob],
    move: Move | None,
) -> ExplainedJob:
    step = job.step.name
    # `find` compares files with their digests, as a run does; `peek` would miss a damaged step.
    if workspace.steps.find(step, job.key, job.step.read_facts) is not None:
        return ExplainedJob(step, job.label, job.key)
    before = last.get((step, job.label))
    if move and workspace.steps.find(step, move.key, job.step.read_facts):
        why = ["its rows moved in their file, so it is copied"]
    elif before is None:
        why = ["new shard" if last and step in ROW_STEPS else "never run"]
    elif before.key == job.key:
        why = ["its files are missing or changed"]
    else:
        changed = changed_keys(before.parts, dict(job.parts))
        # Changed inputs come from an earlier step, which has its own row with the reason.
        why = [
            f"{name}: {' -> '.join(cut_pair(json.dumps(old), json.dumps(new), 24))}"
            for name, (old, new) in sorted(changed.items())
            if name.partition(".")[0] != "inputs"
        ] or ["an earlier step changed"]
    return ExplainedJob(step, job.label, job.key, False, why)
