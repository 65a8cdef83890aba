"""The report of a version: one HTML file that shows what is trained, and needs no network.

Made when a version is published, and by `packhouse report`. The same files give the same bytes: no
time stamps, samples at fixed places. Under 3 MB: 0.9 MB of it draws charts, and samples have room
for 40,000 tokens. Alpaca (52,002 rows, 4.5 million tokens) takes 1.2 s of CPU time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.ask.files import VersionFiles
from packhouse.addons.ask.query import Views, open_views
from packhouse.addons.ask.samples import (
    each_packs,
    label_names,
    label_text,
    page_record,
    records_in,
    weight_runs,
)
from packhouse.addons.report import sections
from packhouse.addons.report.html import page
from packhouse.cli.tokens import pipeline_of, special_tokens, token_texts, tokenizer_of
from packhouse.errors import ConfigError, IntegrityError
from packhouse.recipe import AuditConfig
from packhouse.store import OpenVersion
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.publish import LocalFile, draft_manifest, name_files
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.worker import run_in_worker
from packhouse.tokenize.encoders import Pipeline
from packhouse.tokenize.loading import find_snapshot

# What a report asks of the views of a version, and what no view says: runs of trained tokens.
#
# All of it is read in one worker with limits, for a store may be a stranger's. Packs are read in
# parts: what is held is counts, a few rows, and one part. Masks and samples come from the packs:
# the first 16 million tokens of each split, which packing has shuffled; the report says when that
# is not all.


MAX_READ_TOKENS = 2**24
"""Tokens of a split whose masks are read."""
_PACKS = 40  # of a split, at most
_PACK_TOKENS = 16_000
_EXAMPLES = 3  # rows of each reason
_MOST_TEXT = 400  # characters of a bad row
_BINS = 20  # of the share of a pack that is tokens, and of a record that is trained
_TURNS = 12

_COUNTED = ("tokens", "trained")
_SEQUENCES = pa.schema([("record_id", pa.string()), *((name, pa.int64()) for name in _COUNTED)])

Ints = npt.NDArray[np.int64]
Samples = list[dict[str, Any]]


def measure(files: VersionFiles, num_packs: Mapping[str, int], num_shown: int) -> dict[str, Any]:
    """Ask the views and return plain JSON.

    Args:
        files: of the version.
        num_packs: splits whose packs are read, with how many there are in the files.
        num_shown: tokens of samples, about.

    Returns:
        `trained`: `[source, records, tokens, trained tokens]` of the packs that are read, copies
        included. `lengths`: `[source, split, tokens, records]` of each length that occurs, too.
        `too_long`: `[split, tokens, records]` of those that were left out for their length.
        `dropped`: examples by reason. `quarantine`: examples by step and reason.
        `splits`: packs, fill, records per pack, trained shares, tokens by answer, records
        of each label, trained tokens of each loss weight (none where all are 1), samples. Of
        pairs, shares and trained tokens are of each side.

    Raises:
        ContractError: a pack is none that a run writes.
        IntegrityError: a file is not what such a file holds.
    """
    sequences: list[pa.Table] = []
    splits = {
        name: _read_split(files, name, number, num_shown // len(num_packs), sequences)
        for name, number in num_packs.items()
    }
    with open_views(files) as views:
        _add_places(views, [sample for split in splits.values() for sample in split["samples"]])
        packed = pa.concat_tables([_SEQUENCES.empty_table(), *sequences])
        views.database.register("packed", packed)

        def lists(query: str) -> list[list[Any]]:
            return [[*row.values()] for row in views.rows(query).to_pylist()]

        dropped: dict[str, Samples] = {}
        for row in _cut(views.rows(_DROPPED)):
            dropped.setdefault(row.pop("reason"), []).append(row)
        bad: dict[tuple[str, str], Samples] = {}
        for row in _cut(views.rows(_BAD)):
            bad.setdefault((row.pop("step"), row.pop("reason")), []).append(row)
        return {
            "trained": lists(_TRAINED),
            "lengths": lists(_LENGTHS),
            "too_long": lists(_TOO_LONG),
            "dropped": dropped,
            "quarantine": [
                {"step": step, "reason": reason, "examples": rows}
                for (step, reason), rows in bad.items()
            ],
            "splits": splits,
        }


_LENGTHS = """
SELECT split_part(source, '/', 1) AS source, split, num_tokens, sum(times)::BIGINT AS records
FROM records WHERE times > 0 GROUP BY ALL ORDER BY ALL
"""

_TOO_LONG = """
SELECT split, num_tokens, count(*) AS records FROM records
WHERE outcome IN ('over_seq_len', 'first_turn_too_long') GROUP BY ALL ORDER BY ALL
"""

_TRAINED = """
WITH own AS (
  SELECT record_id, sum(tokens) AS tokens, sum(trained) AS trained FROM packed GROUP BY record_id
)
SELECT
  split_part(r.source, '/', 1) AS source, sum(tokens / greatest(r.num_tokens, 1)) AS copies,
  sum(tokens)::BIGINT AS tokens, sum(trained)::BIGINT AS trained
FROM own LEFT JOIN (
  SELECT record_id, arg_min(source, number) AS source, arg_min(num_tokens, number) AS num_tokens
  FROM files.records WHERE times > 0 AND record_id IN (SELECT record_id FROM own) GROUP BY record_id
) r USING (record_id)
GROUP BY ALL ORDER BY source NULLS LAST
"""

_PLACES = """
SELECT record_id, arg_min(source || ':' || row, number) AS place FROM files.records
WHERE times > 0 AND record_id IN (SELECT unnest(?)) GROUP BY record_id
"""

# The first rows of each reason; no others are held, nor decoded.
_DROPPED = f"""
SELECT reason, row.source, row.row, row.detail FROM (
  SELECT reason, unnest(arg_min(left_out, number, {_EXAMPLES})) AS row
  FROM files.left_out GROUP BY reason)
ORDER BY reason, row.number
"""

_BAD = f"""
SELECT step, reason, row.source, row.row, row.detail, decode_bytes(row.raw) AS raw, row.raw_size
FROM (
  SELECT step, reason, unnest(arg_min(quarantine, number, {_EXAMPLES})) AS row
  FROM files.quarantine GROUP BY step, reason)
ORDER BY step, reason, row.number
"""


def _cut(rows: pa.Table) -> Samples:
    return [
        {name: v[:_MOST_TEXT] if name in ("detail", "raw") else v for name, v in row.items()}
        for row in rows.to_pylist()
    ]


def _add_places(views: Views, samples: Samples) -> None:
    """Say of each record that is shown which row it is."""
    shown: dict[str, Samples] = {}  # copies of a record, and both sides of a pair
    for record in (record for sample in samples for record in sample["records"]):
        shown.setdefault(record["id"], []).append(record)
    for row in views.rows(_PLACES, [sorted(shown)]).to_pylist():
        for record in shown[row["record_id"]]:
            record["place"] = row["place"]


def _read_split(
    files: VersionFiles, split: str, num_packs: int, num_shown: int, sequences: list[pa.Table]
) -> dict[str, Any]:
    """Masks and fill of the packs that are read, and samples evenly among them.

    Appends their sequences to `sequences`.
    """
    preferences, labels = files.manifest.preferences, label_names(files.manifest)
    own = [(path, name) for path, name in files.files.get("data", []) if name == split]
    tally = _Tally(files.seq_len, labels, sequences)
    seen = tokens = shown = 0
    samples: Samples = []
    step = 1
    for part in each_packs(replace(files, files={"data": own}, checks_packs=True)):
        if not part.num_rows:
            continue
        if not seen:  # packs are alike in length: as many as the room for samples holds
            mean = max(1, pc.sum(part["num_tokens"]).as_py() // part.num_rows)
            count = max(1, min(_PACKS, num_shown // min(mean, _PACK_TOKENS)))
            # Packs of 2,000 tokens, 20,000 to be shown: 10 packs. 1,000 are read, so every 100th.
            step = max(1, min(num_packs, MAX_READ_TOKENS // mean) // count)
        tokens += tally.add(part)
        for number in range(-seen % step, part.num_rows, step):
            if shown < num_shown and len(samples) < _PACKS:
                (row,) = part.slice(number, 1).to_pylist()
                samples.append(_sample(seen + number, row, preferences, labels))
                shown += sum(len(record["ids"]) for record in samples[-1]["records"])
        seen += part.num_rows
        if tokens >= MAX_READ_TOKENS:
            break
    return {**tally.to_json(), "read_packs": seen, "read_tokens": tokens, "samples": samples}


class _Tally:
    """Counts over packs, a part of the view at a time."""

    def __init__(self, seq_len: int, names: Sequence[str], sequences: list[pa.Table]) -> None:
        self.seq_len, self.names, self.sequences = seq_len, names, sequences
        self.fill = np.zeros(_BINS, np.int64)
        self.per_pack: Counter[int] = Counter()
        self.shares = np.zeros(_BINS, np.int64)
        self.trained: Counter[int] = Counter()
        self.turns = np.zeros((2, _TURNS), np.int64)  # trained tokens, answers
        self.weights: Counter[float] = Counter()
        self.labels: Counter[str] = Counter()

    def add(self, packs: pa.Table) -> int:
        """Count packs; return their tokens."""
        flags, weights, lengths = (
            pc.list_flatten(packs[name]).to_numpy()
            for name in ("trained", "loss_weights", "seq_lengths")
        )
        num_tokens = packs["num_tokens"].to_numpy()
        self.fill += _binned(num_tokens, self.seq_len)
        self.per_pack.update(packs["num_records"].to_pylist())
        self.weights.update(_counts(weights[flags]))
        self.labels.update(
            label_text(label, self.names) for label in packs["label"].drop_null().to_pylist()
        )
        starts = np.cumsum(lengths) - lengths
        trained = np.add.reduceat(flags, starts, dtype=np.int64)
        self.shares += _binned(trained, lengths)
        self.trained.update(_counts(trained))
        names = pc.list_flatten(packs["record_ids"])
        self.sequences.append(pa.table([names, lengths, trained], schema=_SEQUENCES))
        self._add_turns(flags, starts)
        return len(flags)

    def _add_turns(self, flags: npt.NDArray[np.bool_], starts: Ints) -> None:
        """Count trained runs by their number in the record: [0,1,1,0,1 | 1,1] -> 2 + 2, 1."""
        begins = flags.copy()
        begins[1:] &= ~flags[:-1]
        begins[starts] = flags[starts]
        at = np.flatnonzero(begins)
        if not len(at):
            return
        sizes = np.add.reduceat(flags, at, dtype=np.int64)
        record = np.searchsorted(starts, at, side="right")
        first = np.r_[True, record[1:] != record[:-1]]
        number = np.arange(len(at)) - np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))
        number = np.minimum(number, _TURNS - 1)
        self.turns[0] += np.bincount(number, sizes, _TURNS).astype(np.int64)
        self.turns[1] += np.bincount(number, minlength=_TURNS)

    def to_json(self) -> dict[str, Any]:
        return {
            "fill": self.fill.tolist(),
            "per_pack": sorted(self.per_pack.items()),
            "shares": self.shares.tolist(),
            "trained": sorted(self.trained.items()),
            "turns": self.turns.T.tolist(),
            "labels": sorted(self.labels.items()),
            "weights": sorted(self.weights.items()) if self.weights.keys() - {1} else [],
        }


def _binned(parts: Ints, wholes: Ints | int) -> Ints:
    """Count shares by bins of 5%."""
    return np.bincount(np.minimum(parts * _BINS // wholes, _BINS - 1), minlength=_BINS)


def _counts(values: npt.NDArray[Any]) -> dict[Any, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _sample(
    number: int, row: Mapping[str, Any], preferences: str | None, labels: Sequence[str]
) -> dict[str, Any]:
    """A pack as the page's script takes it; of a long one, the first records."""
    records, room = [], _PACK_TOKENS
    weights: Sequence[float] = row["loss_weights"]
    is_weighted = {*weights} - {0, 1}
    for name, start, end, side in records_in(row, preferences, labels):
        if room <= 0:
            break
        ids, trained = (row[column][start:end] for column in ("input_ids", "trained"))
        record = page_record(name, ids, trained, start, room)
        if side:
            record["side"] = side
        if is_weighted:
            record["weights"] = weight_runs(weights[start : start + len(record["ids"])])
        records.append(record)
        room -= len(record["ids"])
    counts = {"num_tokens": row["num_tokens"], "num_records": row["num_records"]}
    return {"pack": number, **counts, "records": records}


MAX_BYTES = 3_000_000
_SAMPLES = (40_000, 10_000, 0)  # tokens of samples: fewer where their texts are long
_TOKEN_CHARS = 200  # of a token that is shown; some vocabularies have tokens of 128 spaces

Fetch = Callable[[FileEntry], Path]


def version_report(opened: OpenVersion, tokenizers: Path) -> str:
    """Return the report of a published version as HTML.

    Args:
        opened: the version; its files are fetched and checked.
        tokenizers: folder of tokenizers in the cache; if store and cache lack it, ids are shown.

    Raises:
        IntegrityError: a file is damaged.
    """
    pipeline = pipeline_of(tokenizer_of(opened, tokenizers))
    with temporary_folder("report") as folder:
        return report_of(
            opened.manifest,
            lambda entry: opened.fetch(entry, folder / Path(entry.key).name),
            pipeline,
            uri=opened.address,
        )


def unpublished_report(
    dataset: str, vid: str, files: Sequence[LocalFile], facts: Mapping[str, Any], tokenizers: Path
) -> str:
    """Return the report of what will be a version; arguments as those of `publish_version`."""
    uploads = name_files(files)
    draft = draft_manifest(dataset, vid, uploads, facts)
    paths = {entry.key: body.path for entry, body in uploads}
    pipeline = pipeline_of(partial(find_snapshot, draft.tokenizer_fingerprint, tokenizers))
    return report_of(draft, lambda entry: paths[entry.key], pipeline)


def report_of(
    manifest: Manifest, fetch: Fetch, pipeline: Pipeline | None, uri: str | None = None
) -> str:
    """Return the report as HTML, under `MAX_BYTES`.

    Args:
        manifest: of the version, or what it will be.
        fetch: gives the local path of a file.
        pipeline: of the tokenizer; None: ids are shown for texts.
        uri: where the version lies, for the commands that load it; None: `STORE` stands there.
    """
    for room in _SAMPLES:
        html = _page(manifest, measured_of(manifest, fetch, room), pipeline, uri)
        if len(html.encode()) < MAX_BYTES:
            break
    return html


def measured_of(manifest: Manifest, fetch: Fetch, samples: int = 0) -> dict[str, Any]:
    """Return what `measure` finds in the files of a version, read in a worker with limits.

    Args:
        manifest: of the version.
        fetch: gives the local path of a file.
        samples: tokens of samples, about.

    Raises:
        IntegrityError: a file holds what no run writes, or counts more than the manifest.
    """
    files: dict[str, list[tuple[Path, str]]] = {}
    packs: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    num_bytes = 0
    for entry in manifest.files:
        if entry.kind == "data":  # each split's first files
            if not entry.rows or tokens[entry.split] >= MAX_READ_TOKENS:
                continue
            packs[entry.split] += entry.rows
            tokens[entry.split] += entry.tokens
        elif entry.kind not in ("records", "quarantine", "dropped"):
            continue
        files.setdefault(entry.kind, []).append((fetch(entry), entry.split))
        num_bytes += entry.size
    version_files = VersionFiles(files=files, manifest=replace(manifest, files=()))
    measured: dict[str, Any] = run_in_worker(  # some kilobytes of a file may stand for gigabytes
        partial(measure, version_files, dict(sorted(packs.items(), reverse=True)), samples),
        what=f"version '{manifest.version}'",
        blames=IntegrityError,
        num_bytes=num_bytes,
    )
    counted = sum(tokens * records for *_, tokens, records in measured["lengths"])
    published = sum(entry.tokens for entry in manifest.files if entry.kind == "data")
    if counted > published:
        raise IntegrityError(
            f"the records of version '{manifest.version}' count {counted:,} tokens, its manifest "
            f"{published:,}; `packhouse verify` says what else is wrong"
        )
    return measured


def _page(
    manifest: Manifest, measured: dict[str, Any], pipeline: Pipeline | None, uri: str | None
) -> str:
    num_packs = num_tokens = 0
    samples = []
    for name, split in measured["splits"].items():
        split["all_packs"] = sum(
            e.rows for e in manifest.files if e.kind == "data" and e.split == name
        )
        packs = [with_texts(pack, pipeline) for pack in split["samples"]]
        samples.append({"name": name, "packs": packs})
        num_packs += len(packs)
        num_tokens += sum(len(record["ids"]) for pack in packs for record in pack["records"])
    parts = [
        sections.load_section(manifest, uri),
        sections.flow_section(manifest),
        sections.lengths_section(manifest, measured),
        sections.packs_section(manifest, measured),
        sections.trained_section(manifest, measured),
        sections.samples_section(
            num_packs,
            num_tokens,
            pipeline is not None,
            has_weights=any(each["weights"] for each in measured["splits"].values()),
        ),
        sections.left_out_section(manifest, measured),
        sections.quality_section(manifest),
        sections.duplicates_section(manifest),
        sections.audit_section(manifest, _limits(manifest)),
        sections.recipe_section(manifest),
    ]
    name = f"{manifest.dataset} {manifest.version}"
    return page(
        f"{name} - packhouse report",
        sections.heading(manifest) + sections.overview(manifest),
        parts,
        {"samples-data": samples} if num_packs else {},
    )


def with_texts(pack: dict[str, Any], pipeline: Pipeline | None) -> dict[str, Any]:
    """Add the text of each token of a sample, harmless to show, and which tokens are special."""
    for record in pack["records"]:
        texts = token_texts(record["ids"], pipeline)
        record["texts"] = [for_terminal(text, keep_lines=True)[:_TOKEN_CHARS] for text in texts]
        record["special"] = special_tokens(record["ids"], pipeline).nonzero()[0].tolist()
    return pack


def _limits(manifest: Manifest) -> AuditConfig:
    """The limits that the version was held to; the usual ones where it does not say them."""
    try:
        return AuditConfig.model_validate(manifest.facts.provenance.limits)
    except ValueError:
        raise ConfigError("the manifest names limits of the audit that there are not") from None
