"""The jobs behind pack: one for each shard of output, laid out as soon as the packs are planned.

```
pack -> gather (train 0, train 1, ..., eval 0) -> audit of each -> files (data, records, ...)
     -> split, audit of records                                              -> publish
```

Every job here reads a part of the output by numbers that the plan gave, so all of a step run at
the same time, on any number of workers. Keys are made from that of pack and those numbers, so they
follow from the recipe as all keys do; only how many there are is known later. Where gather cuts
decides no published byte: a published file is cut at rows of its side, whatever shards they lie in.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from packhouse.data_files import FileCut, cut_files
from packhouse.errors import EmptyDatasetError
from packhouse.fingerprint import digest
from packhouse.jobs import FILE_SETTINGS, Job, Plan, make_job
from packhouse.recipe import Recipe

__all__ = ["SIDES", "OutputJobs", "gather_jobs", "output_jobs"]

SIDES = ("train", "eval")

_GATHER_TOKENS = 2**24
"""Tokens of a gathered shard, about: 64 MiB of ids. What a worker holds while it gathers."""
_MOST_SHARDS = 1024
"""From here on shards grow instead: each one looks into all shards of input."""
_MOST_TOKENS = 2**27

_RECORDS_PER_FILE = 2**23


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputJobs:
    """The jobs that follow from a plan of packs, step by step."""

    gather: tuple[Job, ...]
    audit: tuple[Job, ...]
    """Of the gathered packs."""
    files: tuple[Job, ...]
    """Data files of train and eval, exports, records, quarantine: in the order of the manifest."""
    publish: Job
    """That of the plan, and all it reads."""

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs in the order of the data's way."""
        yield from (*self.gather, *self.audit, *self.files, self.publish)


def output_jobs(plan: Plan, recipe: Recipe, packed: Mapping[str, Any]) -> OutputJobs:
    """Lay out the jobs behind pack.

    Args:
        plan: the jobs before.
        recipe: what was planned.
        packed: facts of the pack step: `sides`, each with `num_packs` and `num_tokens`; `rows_in`.

    Raises:
        EmptyDatasetError: no record was packed.
    """
    if not any(packed["sides"][side]["num_packs"] for side in SIDES):
        raise EmptyDatasetError(
            f"no record fits into seq_len {recipe.pack.seq_len:,}: nothing to publish. "
            "Raise pack.seq_len, or set pack.over_length to truncate_turns"
        )
    gather = {side: gather_jobs(plan, side, packed["sides"][side]) for side in SIDES}
    gathered = tuple(chain(*gather.values()))
    audits = tuple(
        make_job("audit", [job], {"of": "packs"}, label=job.label, size=job.size)
        for job in gathered
    )
    data = [
        job
        for side in SIDES
        for job in _data_files(recipe, side, packed["sides"][side], gather[side])
    ]
    files = (
        *data,
        *(_export_files(data, name) for name in recipe.publish.exports),
        *_records_files(plan, packed["rows_in"]),
        _quarantine_file(plan),
    )
    shards = (*plan.validate, *plan.format, *plan.tokenize)
    reads = (plan.split, *shards, plan.pack, *gathered, *plan.audit, *audits, *files)
    publish = replace(plan.publish, inputs=tuple((job.step, job.key) for job in reads))
    return OutputJobs(gather=gathered, audit=audits, files=files, publish=publish)


def gather_jobs(plan: Plan, side: str, planned: Mapping[str, Any]) -> tuple[Job, ...]:
    """Lay out the jobs that bring the tokens of one side together; none for an empty side.

    Args:
        plan: the jobs before.
        side: `train` or `eval`.
        planned: `num_packs` and `num_tokens` of the side.
    """
    num_packs, num_tokens = planned["num_packs"], planned["num_tokens"]
    size = min(max(_GATHER_TOKENS, num_tokens // _MOST_SHARDS), _MOST_TOKENS)
    step = max(1, -(-num_packs // max(1, -(-num_tokens // size))))
    pack_bytes = 4 * num_tokens // max(1, num_packs)
    return tuple(
        make_job(
            "gather",
            [plan.pack],
            {"packs": {"side": side, "first": first, "last": min(first + step, num_packs)}},
            label=f"{side} packs from {first:,}",
            size=pack_bytes * min(step, num_packs - first),
        )
        for first in range(0, num_packs, step)
    )


def _data_files(
    recipe: Recipe, side: str, planned: Mapping[str, Any], gathered: tuple[Job, ...]
) -> Iterator[Job]:
    settings = recipe.publish.model_dump(mode="json", include=set(FILE_SETTINGS) - {"max_file_mb"})
    for cut in cut_files(side, planned["num_packs"], planned["num_tokens"], recipe.publish):
        parts = {"of": "data", "cut": cut.to_json(), "publish": settings}
        parts["with_label"] = planned["with_label"]
        parts["with_weights"] = planned["with_weights"]
        inputs = [job for job in gathered if _overlaps(job, cut)]
        size = 4 * planned["num_tokens"] * (cut.last - cut.first) // planned["num_packs"]
        yield make_job("files", inputs, parts, label=f"{side} file {cut.number}", size=size)


def _overlaps(gathered: Job, cut: FileCut) -> bool:
    packs = gathered.parts["packs"]
    return bool(packs["first"] < cut.last and cut.first < packs["last"])


def _export_files(data: list[Job], name: str) -> Job:
    return make_job("files", data, {"of": "exports", "format": name}, label=f"export {name}")


def _records_files(plan: Plan, num_records: int) -> Iterator[Job]:
    for number, first in enumerate(range(0, num_records, _RECORDS_PER_FILE)):
        rows = {"first": first, "last": min(first + _RECORDS_PER_FILE, num_records)}
        parts = {"of": "records", "number": number, "rows": rows}
        size = 64 * (rows["last"] - first)
        yield make_job("files", [plan.pack], parts, label=f"records file {number}", size=size)


def _quarantine_file(plan: Plan) -> Job:
    parts = {"of": "quarantine", "shards": digest([job.key for job in plan.tokenize])}
    shards = (*plan.validate, *plan.format, *plan.tokenize)
    return make_job("files", [], parts, label="quarantine file", also_reads=shards)
