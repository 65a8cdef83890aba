"""The plan of a run: its jobs with their keys. Those up to pack are known before any work is done.

```
validate -> format -> tokenize -> pack -> gather -> audit of packs, files -> publish
   (by shard of input)       (of all)  (by shard of output)
               audit of shards    split, audit of records
```

Each step lays out its own jobs in its own file; here they are put in order. How many packs there
are is known once pack is done: `output_jobs` then lays out gather, the audit of packs and files,
with keys made from the key of pack. They read parts of the output by number, so all jobs of a step
run at the same time, on any number of workers.

- Changing `seq_len` changes the keys of pack and of what follows, and no key before it;
- appending rows to a file changes the keys of its last shards only, up to tokenize;
- the key of publish is the id of the version, known before the first byte is written.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from packhouse.errors import EmptyDatasetError
from packhouse.pack.dedup import needs_fingerprints
from packhouse.read import SourceShard
from packhouse.read.tabular import TABULAR
from packhouse.recipe import Recipe
from packhouse.registry import function_of_addon
from packhouse.run.cache import Workspace
from packhouse.run.step import AnyJob, Job
from packhouse.run.steps import (
    audit,
    files,
    format,
    gather,
    pack,
    publish,
    split,
    tokenize,
    validate,
)
from packhouse.run.steps.audit import AuditParameters
from packhouse.run.steps.files import FilesParameters
from packhouse.run.steps.format import FormatParameters
from packhouse.run.steps.gather import PackRange
from packhouse.run.steps.pack import SIDES, PackFacts, PackParameters
from packhouse.run.steps.publish import PUBLISH, PublishParameters
from packhouse.run.steps.split import SplitParameters
from packhouse.run.steps.tokenize import TokenizeParameters
from packhouse.run.steps.validate import ValidateParameters
from packhouse.system.plugins import import_extra
from packhouse.tokenize import fingerprint_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All jobs that are known before any work; the rest come from `output_jobs`."""

    validate: tuple[Job[ValidateParameters], ...]
    format: tuple[Job[FormatParameters], ...]
    beside: tuple[AnyJob, ...]
    """Done beside the jobs of format: fingerprints, if the recipe looks for repeats, and a search
    for benchmarks, if it names some."""
    tokenize: tuple[Job[TokenizeParameters], ...]
    pack: Job[PackParameters]
    split: Job[SplitParameters]
    audit: tuple[Job[AuditParameters], ...]
    """Of shards and of records; what it says of packs comes with the output's jobs."""
    publish: Job[PublishParameters]
    """Its key is final; what it reads beside the split is added when the packs are planned."""

    @property
    def version_id(self) -> str:
        """First 16 hex digits of the key of publish: 64 bits of input address."""
        return self.publish.key[:16]

    @property
    def shards(self) -> list[SourceShard]:
        """What is read of the sources, in order."""
        return [job.parameters.shard for job in self.validate]

    def __iter__(self) -> Iterator[AnyJob]:
        """Iterate over the jobs, but for those beside format, each after those that it reads."""
        yield from (*self.validate, *self.format, *self.tokenize)
        yield from (self.pack, self.split, *self.audit, self.publish)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputJobs:
    """The jobs that follow from a plan of packs, step by step."""

    gather: tuple[Job[PackRange], ...]
    audit: tuple[Job[AuditParameters], ...]
    """Of the gathered packs."""
    files: tuple[Job[FilesParameters], ...]
    """Data files of train and eval, exports, records, quarantine: in the order of the manifest."""
    publish: Job[PublishParameters]
    """The job of the plan, and all it reads."""

    def __iter__(self) -> Iterator[AnyJob]:
        """Iterate over the jobs, each after those that it reads."""
        yield from (*self.gather, *self.audit, *self.files, self.publish)


def plan_jobs(recipe: Recipe) -> Plan:
    """Scan the sources and lay out every job with its key.

    Costs one read of the sources (for their sha256) and of the tokenizer's files.

    Raises:
        ConfigError: a package that an export needs is not installed.
        SourceError: a source does not exist or cannot be what it says.
        TokenizerError: the tokenizer folder is not one.
    """
    if "msgpack" in (export.format for export in recipe.publish.exports):
        # Now, and not when all other work is done.
        import_extra("msgpack", "msgpack", "export format 'msgpack'")
    tokenizer = fingerprint_tokenizer(recipe.tokenizer)
    validated = tuple(validate.jobs(recipe, tokenizer))
    benchmarks = function_of_addon("benchmarks_of")(recipe) if recipe.audit.benchmarks else {}
    formatted = tuple(format.job(recipe, tokenizer, job, benchmarks) for job in validated)
    tokenized = tuple(tokenize.job(recipe, tokenizer, job) for job in formatted)
    packed = pack.job(recipe, validated, formatted, tokenized, benchmarks)
    split_job = split.job(recipe, packed)
    searched = validated if benchmarks else ()
    described = zip(validated, formatted, strict=True) if needs_fingerprints(recipe.dedup) else ()
    return Plan(
        validate=validated,
        format=formatted,
        beside=(
            *(
                format.fingerprint_job(recipe, old.ref, job.ref, job.label)
                for old, job in described
            ),
            *(
                function_of_addon("benchmark_job")(benchmarks, job.ref, job.label, job.size)
                for job in searched
            ),
        ),
        tokenize=tokenized,
        pack=packed,
        split=split_job,
        audit=tuple(audit.jobs(validated, formatted, tokenized, packed, recipe)),
        publish=publish.job(recipe, split_job, {**benchmarks, **audit.checks_of(recipe)}),
    )


def output_jobs(plan: Plan, recipe: Recipe, packed: PackFacts) -> OutputJobs:
    """Lay out the jobs behind pack.

    Raises:
        EmptyDatasetError: no record was packed.
    """
    if not any(side.num_packs for side in packed.sides.values()):
        raise EmptyDatasetError(
            f"no record fits into seq_len {recipe.pack.seq_len:,}: nothing to publish. "
            "Raise pack.seq_len, or set pack.over_length to truncate_turns"
        )
    by_side = {side: gather.jobs(plan.pack, side, packed.sides[side]) for side in SIDES}
    gathered = tuple(chain(*by_side.values()))
    audited = audit.pack_jobs(gathered)
    shards = {"validate": plan.validate, "format": plan.format, "tokenize": plan.tokenize}
    written = files.jobs(recipe, shards, plan.pack, packed, by_side)
    reads = (
        *(plan.split, *plan.validate, *plan.format, *plan.tokenize, plan.pack),
        *(*plan.beside, *gathered, *plan.audit, *audited, *written),
    )
    last = replace(plan.publish, inputs=tuple(job.ref for job in reads))
    return OutputJobs(gather=gathered, audit=audited, files=written, publish=last)


_WRITTEN = {"validate": 1.3, "format": 1.6, "tokenize": 1.3}
"""Bytes written by raw byte of Alpaca; docs/performance.md, "What a shard costs"."""
_WRITTEN_BEHIND_PACK = 2.0
_COLUMNAR = 4.0
"""Raw bytes of a Parquet or Arrow file by byte of it, about."""


def bytes_needed(plan: Plan, workspace: Workspace) -> int:
    """Return about how many bytes a run will add to the cache, by what Alpaca took."""
    num_shards = Counter(shard.file for shard in plan.shards)
    raw = needed = 0.0
    for jobs in zip(plan.validate, plan.format, plan.tokenize, strict=True):
        shard, size = jobs[0].parameters.shard, float(jobs[0].size)
        if shard.file_format in TABULAR:  # each shard is given the file's whole size
            size *= _COLUMNAR / num_shards[shard.file]
        raw += size
        todo = (job.step.name for job in jobs if job.step.peek(job.key, workspace) is None)
        needed += sum(_WRITTEN[step] * size for step in todo)
    if PUBLISH.peek(plan.publish.key, workspace) is None:
        needed += _WRITTEN_BEHIND_PACK * raw
    return round(needed)
