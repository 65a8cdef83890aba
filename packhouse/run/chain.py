"""Run the chain: validate -> format -> tokenize -> pack -> split -> publish.

```
validate -> format -> tokenize -> pack -> files -> publish
   (per shard of input)      (whole  (per file)
            audit of shards   dataset)
                              split, audit of records
```

`plan_jobs` plans all jobs up to pack, with their keys, before any work is done. Pack plans the
packs of the whole dataset from lengths alone. Only then is the number of packs known, so
`output_jobs` plans the files, with keys derived from the key of pack.
Jobs of a step do not read one another, so they can run at the same time, on any number of workers.

- Changing `seq_len` changes the keys of pack and later steps, but no earlier key.
- Appending rows to a file changes only the keys of its last shards, up to tokenize.
- The key of publish is the version id, so the id is known before the first byte is written.

A `run` executes the jobs of a step and returns their receipts, either on this machine
(`packhouse.run.step.LocalRunner`) or as Prefect tasks (`tasks.runner`). Both call
`packhouse.run.step.execute`, so the output is the same.
"""

import logging
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from packhouse.errors import DiskError, EmptyDatasetError, QuarantineLimitError
from packhouse.read import SourceShard
from packhouse.read.parquet_files import TABULAR
from packhouse.recipe import Recipe
from packhouse.records.gate_results import GateLog, GateResult
from packhouse.records.ledger import LedgerLine, RowCounts, check_quarantine, factor_note, ledger_of
from packhouse.registry import function_of_addon, has_function
from packhouse.run import step_cache
from packhouse.run.moved_shards import Move, find_moves
from packhouse.run.step import AnyJob, Job, LocalRunner, Run
from packhouse.run.step_cache import AnyReceipt, Mirror, Workspace
from packhouse.run.steps import (
    STEPS,
    audit,
    check_split,
    files,
    format,
    pack,
    publish,
    tokenize,
    validate,
)
from packhouse.run.steps.audit import AuditParameters
from packhouse.run.steps.check_split import SplitParameters
from packhouse.run.steps.files import FilesParameters
from packhouse.run.steps.format import FormatParameters
from packhouse.run.steps.pack import PackFacts, PackParameters
from packhouse.run.steps.publish import PUBLISH, Published, PublishParameters
from packhouse.run.steps.tokenize import TokenizeParameters
from packhouse.run.steps.validate import QUARANTINE, ValidateParameters
from packhouse.store.conditional_writes import check_usable
from packhouse.store.object_keys import pinned
from packhouse.system.disks import CachePlace, default_cache, free_space, make_cache
from packhouse.system.plugins import import_extra
from packhouse.system.progress import say, start_phase
from packhouse.system.terminal import check_interrupted
from packhouse.system.wording import counted, in_mb
from packhouse.system.worker import end_idle_workers, return_freed_memory, run_if_idle
from packhouse.tokenize import fingerprint_tokenizer
from packhouse.tokenize.encoders import forget_encoders

log = logging.getLogger("packhouse.run.step_cache")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Result of a run: the version it published or found, and a count of every row."""

    dataset: str
    store: str
    sources: tuple[str, ...] = ()
    """Paths and URIs of the raw rows, as in the recipe."""
    published: Published
    """Facts of the publish step: the version, its statistics, audit and ref."""
    gates: tuple[GateResult, ...]
    """Result of each gate."""
    golden: int = 0
    """Golden conversations that match their pinned output."""
    ledger: list[LedgerLine]
    factor_note: str | None = None
    """A sentence about how much splitting rows repeats their text, if by more than 1.1 times."""
    receipts: list[AnyReceipt] = field(repr=False)
    seconds: dict[str, float] = field(repr=False)
    """Wall time of each step, over all its jobs."""

    @property
    def version(self) -> str:
        """The version that was published, or found."""
        return self.published.version

    @property
    def pinned(self) -> str:
        """`<version>#<digest>`, which matches only this manifest."""
        return pinned(self.version, self.published.manifest_id)

    @property
    def uri(self) -> str:
        """`<store>/<dataset>`."""
        return f"{self.store.rstrip('/')}/{self.dataset}"

    @property
    def address(self) -> str:
        """`<store>/<dataset>@<version>#<digest>`."""
        return f"{self.uri}@{self.pinned}"

    @property
    def created(self) -> bool:
        """False if the version already existed."""
        return self.published.created


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Jobs known before any work is done. `output_jobs` returns the rest."""

    validate: tuple[Job[ValidateParameters], ...]
    format: tuple[Job[FormatParameters], ...]
    tokenize: tuple[Job[TokenizeParameters], ...]
    pack: Job[PackParameters]
    split: Job[SplitParameters]
    audit: tuple[Job[AuditParameters], ...]
    """Audits of shards and records; the files step audits packs."""
    publish: Job[PublishParameters]
    """Its key is final. Its inputs other than the split are added by `output_jobs`."""

    @property
    def version_id(self) -> str:
        """First 16 hex digits (64 bits) of the key of publish."""
        return self.publish.key[:16]

    @property
    def side_jobs(self) -> list[AnyJob]:
        """Side jobs of the format jobs."""
        return [other for job in self.format for other in job.side_jobs]

    @property
    def shards(self) -> list[SourceShard]:
        """Shards of the sources, in order."""
        return [job.parameters.shard for job in self.validate]

    @property
    def movable_jobs(self) -> list[AnyJob]:
        """Jobs that read one shard, each after the jobs that it reads.

        Except for a plug-in's checks, which see row numbers and may write them into their findings.
        """
        audits = [job for job in self.audit if job.parameters.of not in ("records", "check")]
        return [*self.validate, *self.format, *self.tokenize, *self.side_jobs, *audits]

    def __iter__(self) -> Iterator[AnyJob]:
        """Iterate over all jobs except side jobs; each comes after the jobs that it reads."""
        yield from (*self.validate, *self.format, *self.tokenize)
        yield from (self.pack, self.split, *self.audit, self.publish)


def plan_jobs(recipe: Recipe) -> Plan:
    """Scan the sources and create every job with its key.

    Reads the sources (for their sha256) and the tokenizer's files once.

    Raises:
        ConfigError: a package that an export needs is not installed.
        SourceError: a source does not exist or is not in the stated format.
        TokenizerError: the tokenizer folder is not valid.
    """
    if "msgpack" in (export.format for export in recipe.publish.exports):
        # Fail now rather than after all other work is done.
        import_extra("msgpack", "msgpack", "export format 'msgpack'")
    tokenizer = fingerprint_tokenizer(recipe.tokenizer)
    validated = tuple(validate.jobs(recipe, tokenizer))
    benchmarks = function_of_addon("benchmarks_of")(recipe) if recipe.audit.benchmarks else {}
    formatted = tuple(format.job(recipe, tokenizer, job, benchmarks) for job in validated)
    tokenized = tuple(tokenize.job(recipe, tokenizer, job) for job in formatted)
    packed = pack.job(recipe, validated, formatted, tokenized, benchmarks)
    split_job = check_split.job(recipe, packed)
    return Plan(
        validate=validated,
        format=formatted,
        tokenize=tokenized,
        pack=packed,
        split=split_job,
        audit=tuple(audit.jobs(validated, formatted, tokenized, packed, recipe)),
        publish=publish.job(recipe, split_job, {**benchmarks, **audit.checks_of(recipe)}),
    )


def output_jobs(
    plan: Plan, recipe: Recipe, packed: PackFacts
) -> tuple[tuple[Job[FilesParameters], ...], Job[PublishParameters]]:
    """Create the jobs that can be planned only after pack.

    Returns:
        Jobs of the files (data of train and eval, exports, records, quarantine), in the order of
        the manifest; the publish job of the plan with all its inputs.

    Raises:
        EmptyDatasetError: no record was packed.
    """
    if not any(side.num_packs for side in packed.sides.values()):
        raise EmptyDatasetError(
            f"no record fits in seq_len {recipe.pack.seq_len:,}, so there is nothing to publish. "
            "Raise pack.seq_len, or set pack.over_length to truncate_turns."
        )
    written = files.jobs(recipe, plan.validate, plan.format, plan.tokenize, plan.pack, packed)
    reads = [plan.split, *plan.validate, *plan.format, *plan.tokenize, plan.pack]
    reads += [*plan.side_jobs, *plan.audit, *written]
    # Its key does not change: the keys of these jobs are derived from keys that it covers already.
    return written, replace(plan.publish, inputs=tuple(job.ref for job in reads))


_MANY_SHARDS = 4
"""With more shards, the worker ends before the files are written, and the report gets a new one: at
520,020 rows, the peak fell from 750 MB to 576, for 0.3 s."""

# Bytes written per raw byte, measured on Alpaca (docs/performance.md).
_WRITTEN = {"validate": 1.3, "format": 1.6, "tokenize": 1.3}
_WRITTEN_AFTER_PACK = 1.0
# Approximate raw bytes per byte of a Parquet or Arrow file.
_COLUMNAR = 4.0


def bytes_needed(plan: Plan, workspace: Workspace) -> int:
    """Estimate how many bytes a run will add to the cache."""
    num_shards = Counter(shard.file for shard in plan.shards)
    raw = needed = 0.0
    for jobs in zip(plan.validate, plan.format, plan.tokenize, strict=True):
        shard, size = jobs[0].parameters.shard, float(jobs[0].size)
        if shard.file_format in TABULAR:  # each shard has the size of its whole file
            size *= _COLUMNAR / num_shards[shard.file]
        raw += size
        todo = (job.step.name for job in jobs if job.step.peek(job.key, workspace) is None)
        needed += sum(_WRITTEN[step] * size for step in todo)
    if PUBLISH.peek(plan.publish.key, workspace) is None:
        needed += _WRITTEN_AFTER_PACK * raw
    return round(needed)


def prepare_recipe(
    recipe: Recipe, place: CachePlace, workers: int | None = 1, *, file: str | None = None
) -> tuple[Prepared, list[str]]:
    """Run the chain in this process, or in several processes of this machine.

    Args:
        recipe: recipe to run.
        place: location of the cache.
        workers: number of processes; see `LocalRunner`.
        file: path of the recipe, if it has one, for the command in the error about bad rows.

    Returns:
        Result of the run, and notes on a mirror that could not be used.

    Raises:
        PackhouseError: nothing was published.
    """
    make_cache(place.folder)
    mirror, workspace = step_cache.open_mirror(place), Workspace(cache=place.folder)
    with LocalRunner(recipe=recipe, workspace=workspace, workers=workers) as run:
        try:
            prepared = prepare(recipe, run, place.folder, mirror=mirror)
        except (EmptyDatasetError, QuarantineLimitError) as error:
            target = file or next(iter(error.facts.get("places", [])), "RECIPE")
            command = f"show {shlex.quote(target)}"
            if file and place.folder != default_cache():  # else the command would not find the run
                command += f" --cache {shlex.quote(str(place.folder))}"
            said = str(error).replace("show RECIPE`", f"{command}`")
            raise type(error)(said, **error.facts) from None
    return prepared, list(mirror.notes) if mirror else []


def prepare(
    recipe: Recipe,
    run: Run,
    cache: Path,
    plan: Plan | None = None,
    gates: GateLog | None = None,
    mirror: Mirror | None = None,
) -> Prepared:
    """Turn raw rows into a published version.

    Nothing becomes visible in the store unless every step, contract and count checks out. The run's
    steps stay in the cache until it succeeds (`pin_steps`). The add-on `cache` keeps the limits
    of the cache before and after the run.

    Args:
        recipe: recipe to run.
        run: executes the jobs of one step.
        cache: folder of finished steps.
        plan: plan of the recipe, if already made; making one reads the sources.
        gates: receives the result of each gate as soon as it is known. An error carries its gate
            results itself, as its fact `gates`.
        mirror: shares steps with machines that use another cache.

    Raises:
        PackhouseError: see `packhouse.errors`; each names the file, place, limit and fix.
    """
    gates, workspace = gates or GateLog(), Workspace(cache=cache)
    start_phase("planning" if plan is None else "checking the store")
    # Before any work, so that a wrong bucket or a changed tokenizer ends the run in seconds.
    check_usable(recipe.publish.store)
    golden = check_golden(recipe, workspace.tokenizers)
    gates.add([golden])
    plan = plan or plan_jobs(recipe)
    # Before this run replaces it: data that it read and this run does not may be gone.
    last_run = step_cache.load_last_run(cache, recipe.dataset).values()
    is_limited = has_function("keep_limits")
    planned = [*plan, *plan.side_jobs]
    with step_cache.pin_steps(cache, plan.version_id, [job.key for job in planned]) as hold:
        room = function_of_addon("keep_limits")(cache) if is_limited else "no limits"
        needed, free = bytes_needed(plan, workspace), free_space(cache).bytes
        log.info("cache '%s': %s; this run adds about %s", cache, room, in_mb(needed))
        if needed > free:
            said = (
                "cache '%s' has %s free, but this run needs about %s. Free some space, or the "
                "disk may fill up during the run."
            )
            log.warning(said, cache, in_mb(free), in_mb(needed))
        moves = find_moves(plan.movable_jobs, last_run)
        hold(move.key for move in moves.values())
        steps = _Steps(recipe, run, mirror, moves)

        validated = steps.do(plan.validate)
        steps.check_rows()
        # After the last shard: a field is reported by its share of all rows of its source.
        validate.check_all_text_is_read(recipe, plan.validate, validated)
        # Without this, the peak of both processes is 690 MB at 520,020 rows, not 620.
        # The worker needs some of it for tokenizers now.
        return_freed_memory()

        formatted = steps.do(plan.format)
        steps.check_rows()

        steps.do(plan.tokenize)
        gates.add([steps.check_rows()])
        # 150 MB for Qwen; the steps that follow encode nothing.
        run_if_idle(forget_encoders)

        # One job: packs planned per group of shards would be half empty at the ends of groups.
        (packed,) = steps.do([plan.pack])
        written, last = output_jobs(plan, recipe, packed.facts)
        hold(job.key for job in (*written, last))
        steps.do([plan.split])
        ledger = ledger_of(steps.done)  # raises if a row is not accounted for

        steps.do(plan.audit)
        if len(plan.shards) > _MANY_SHARDS:
            end_idle_workers()
        steps.do(written)
        return_freed_memory()  # the worker needs some for the report
        (published,) = steps.do([last])
        step_cache.save_last_run(cache, recipe.dataset, (*planned, *written, last))
        gates.add(published.facts.gates, steps.seconds["audit"])
        note = factor_note(validate.render_counts(formatted), recipe.format)
    try:
        if is_limited:
            function_of_addon("keep_limits")(cache, last_run, plan.shards)
    except DiskError as error:  # the version is published; the next run tries again
        log.warning("cache '%s' is over its limits and could not be trimmed: %s", cache, error)
    return Prepared(
        dataset=recipe.dataset,
        store=recipe.publish.store,
        sources=tuple(source.path for source in recipe.sources),
        published=published.facts,
        gates=tuple(gates.results),
        golden=golden.total,
        ledger=ledger,
        factor_note=note,
        receipts=steps.done,
        seconds=steps.seconds,
    )


def check_golden(recipe: Recipe, tokenizers: Path) -> GateResult:
    """Check the recipe's golden conversations, if it has any.

    Raises:
        AuditError: a conversation differs from its pinned output.
        ConfigError: the golden file cannot be read or is not one.
    """
    if recipe.golden is None:
        detail = "the recipe pins no conversations"
        return GateResult(name="golden", outcome="not reached", detail=detail)
    return cast("GateResult", function_of_addon("check_pinned")(recipe, tokenizers))


@dataclass(slots=True)
class _Steps:
    """Steps of a run that are done, with their receipts and times."""

    recipe: Recipe
    run: Run
    mirror: Mirror | None
    moves: Mapping[str, Move]
    done: list[AnyReceipt] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def do(self, jobs: Sequence[AnyJob]) -> list[AnyReceipt]:
        """Run the jobs of one step and print a line about it."""
        # C code may have swallowed the exception of a signal.
        check_interrupted()
        start = time.perf_counter()
        refs = [each.ref for job in jobs for each in (job, *job.side_jobs)]
        with self.mirror.sharing(refs) if self.mirror else nullcontext():
            receipts = self.run([self._with_move(job) for job in jobs])
        step, seconds = receipts[0].step, time.perf_counter() - start
        self.seconds[step] = seconds
        facts = [receipt.facts for receipt in receipts if isinstance(receipt.facts, RowCounts)]
        before = [receipt.facts for receipt in self.done if isinstance(receipt.facts, RowCounts)]
        # A row may have become several records, unless it was only repeated.
        unit = "record" if any(set(each.added) - {"repeated"} for each in before) else "row"
        rows = sum(each.rows_in for each in facts)
        what = counted(rows, unit) if rows else counted(len(receipts), "job")
        num_cached = sum(receipt.cached for receipt in receipts)
        if num_cached == len(receipts):
            what += " cached"
        elif num_cached:
            what += f" ({num_cached:,} of {counted(len(receipts), 'job')} cached)"
        number = [each.name for each in STEPS].index(step) + 1
        say(f"{number}/{len(STEPS)} {step:<8} {what:>18}", seconds)
        self.done += receipts
        return receipts

    def _with_move(self, job: AnyJob) -> AnyJob:
        """Return a job that may copy the output of a job of the last run."""
        side_jobs = tuple(map(self._with_move, job.side_jobs))
        return replace(job, moved_from=self.moves.get(job.key), side_jobs=side_jobs)

    def check_rows(self) -> GateResult:
        """Check that rows are left, and that not too many were bad in the steps so far."""
        try:
            limit = self.recipe.validate_.max_quarantined
            return check_quarantine(ledger_of(self.done), limit, validate.filters_of_run(self.done))
        except (EmptyDatasetError, QuarantineLimitError) as error:
            bad = [each.path(QUARANTINE) for each in self.done if QUARANTINE in each.files]
            if has_function("explain_bad_rows"):
                error = function_of_addon("explain_bad_rows")(error, bad, self.recipe)
            raise error from None
