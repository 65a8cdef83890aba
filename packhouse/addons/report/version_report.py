"""Build the report of a version: one HTML file that shows what is trained and works offline.

Built when a version is published, and by `packhouse report`. The same files give the same bytes: no
timestamps, and samples at fixed positions. The file is below 3 MB, of which charts need 0.9 MB;
samples have room for 40,000 tokens. Alpaca (52,002 rows, 5.4 million tokens) takes 0.6 s of CPU
time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from packhouse.addons.ask.files import TABLES, VersionFiles
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
from packhouse.addons.report.sections import Measured, MeasuredSplit, Samples
from packhouse.cli.tokens import pipeline_of, special_tokens, token_texts, tokenizer_of
from packhouse.errors import ConfigError, IntegrityError
from packhouse.recipe import AuditConfig
from packhouse.records.lists import one_chunk
from packhouse.store import OpenVersion
from packhouse.store.contracts import read_batches
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.publish import LocalFile, draft_manifest, name_files
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.worker import run_in_worker
from packhouse.tokenize.encoders import Pipeline
from packhouse.tokenize.loading import find_snapshot

# Counts over the files of a version.
#
# Everything is read in one worker with limits, because the store may be untrusted. Packs are read
# in parts, so memory holds counts, a few rows and one part. Masks and samples come from the first
# 16 million tokens of each split, which packing has shuffled; the report says if that is not all of
# it.


MAX_READ_TOKENS = 2**24
"""Number of tokens per split whose masks are read."""
_PACKS = 40  # samples per split
_PACK_TOKENS = 16_000
_EXAMPLES = 3  # rows per reason
_MOST_TEXT = 400  # characters of a quarantined row
_BINS = 20  # histogram bins of a share
_TURNS = 12

_COUNTED = ("tokens", "trained")
_PACK_COLUMNS = TABLES["packs"].keys() - {"num_trained", "total_weight"}
_SEQUENCES = pa.schema([("record_id", pa.string()), *((name, pa.int64()) for name in _COUNTED)])

Ints = npt.NDArray[np.int64]


def measure(files: VersionFiles, num_packs: Mapping[str, int], num_shown: int) -> Measured:
    """Query the files of a version.

    Args:
        files: files of the version.
        num_packs: number of packs in the files of each split to read.
        num_shown: approximate number of tokens in samples.

    Raises:
        ContractError: packs violate the data contract.
        IntegrityError: the content of a file is invalid.
    """
    sequences: list[pa.Table] = [_SEQUENCES.empty_table()]
    splits = {
        name: _read_split(files, name, number, num_shown // len(num_packs), sequences)
        for name, number in num_packs.items()
    }
    found = _Records(pa.concat_tables(sequences))
    first_rows: dict[str, Samples] = {}
    for batch in _rows(files, "records", _RECORDS):
        found.add(batch)
        left_out = batch.filter(pc.not_equal(batch["outcome"], "kept"))
        _add_first(first_rows, "outcome", left_out)
    dropped = _explain_left_out(files, first_rows)
    for batch in _rows(files, "dropped", ["source", "row", "reason", "detail"]):
        _add_first(dropped, "reason", batch)
    bad: dict[str, Samples] = {}
    for batch in _rows(files, "quarantine", _BAD, _BAD_ROWS):
        reasons = pc.binary_join_element_wise(batch["step"], batch["reason"], "/")
        _add_first(bad, "reason", batch.set_column(_BAD.index("reason"), "reason", reasons))
    found.add_places(
        [r for split in splits.values() for sample in split.samples for r in sample["records"]]
    )
    trained, lengths, too_long = found.counts()
    return Measured(
        trained=trained,
        lengths=lengths,
        too_long=too_long,
        dropped=_cut(dropped),
        quarantine=_cut(bad),
        splits=splits,
    )


_RECORDS = ["record_id", "source", "row", "split", "outcome", "num_tokens", "times", "repeats"]
_BAD = ["source", "row", "step", "reason", "detail", "raw", "raw_size"]
_BAD_ROWS = 2**8  # each may hold 64 KiB


def _rows(
    files: VersionFiles, kind: str, columns: list[str], max_rows: int = 2**16
) -> Iterator[pa.RecordBatch]:
    for path, _ in files.files.get(kind, []):
        for batch in read_batches(path, columns, max_rows=max_rows):
            if lacking := {*columns} - {*batch.schema.names}:
                raise IntegrityError(f"'{path.name}' has no column '{min(lacking)}'")
            yield batch


def _add_first(found: dict[str, Samples], key: str, batch: pa.RecordBatch) -> None:
    """Add the first rows of each reason that has fewer than `_EXAMPLES`."""
    reasons = batch[key].cast(pa.string())
    for reason in reasons.unique().to_pylist():
        rows = found.setdefault(reason, [])
        own = np.flatnonzero(pc.equal(reasons, reason))[: _EXAMPLES - len(rows)]
        rows += batch.take(pa.array(own)).to_pylist()


def _explain_left_out(files: VersionFiles, found: dict[str, Samples]) -> dict[str, Samples]:
    """Add a sentence to records that were left out, as the view `dropped` has it."""
    wanted = {row["repeats"] for rows in found.values() for row in rows} - {None}
    kept: dict[str, str] = {}
    for batch in _rows(files, "records", _RECORDS) if wanted else ():
        is_kept = pc.is_in(batch["record_id"], value_set=pa.array(sorted(wanted), pa.string()))
        is_kept = pc.and_(is_kept, pc.equal(batch["outcome"], "kept"))
        for row in batch.filter(is_kept).to_pylist():
            kept.setdefault(row["record_id"], f"{row['source']} row {row['row']}")
    explained: dict[str, Samples] = {}
    for reason, rows in found.items():
        for row in rows:
            detail = f"repeats {kept[row['repeats']]}" if row["repeats"] in kept else ""
            if reason == "over_seq_len":
                detail = f"more than seq_len {files.seq_len:,} tokens"
            elif reason == "contaminated":
                detail = f"shares words with {row['repeats']}" if row["repeats"] else ""
            own = {"source": row["source"], "row": row["row"], "detail": detail}
            explained.setdefault(reason, []).append(own)
    return explained


class _Records:
    """Counts over the records, and the origin of those in the packs that were read."""

    def __init__(self, sequences: pa.Table) -> None:
        sums = sequences.group_by("record_id").aggregate([(name, "sum") for name in _COUNTED])
        self.ids = one_chunk(sums["record_id"])
        self.sums = [sums[f"{name}_sum"].to_numpy() for name in _COUNTED]
        self.lengths: Counter[tuple[str, str, int]] = Counter()
        self.too_long: Counter[tuple[str, int]] = Counter()
        self.files: list[str] = []
        """Names of the files of records."""
        self.file = np.full(len(self.ids), -1)
        """Index in `files` for each id: that of its first record; -1 if it has none."""
        self.row = np.zeros(len(self.ids), np.int64)
        self.num_tokens = np.ones(len(self.ids), np.int64)

    def add(self, records: pa.RecordBatch) -> None:
        """Add records of the file."""
        is_long = pc.is_in(records["outcome"].cast(pa.string()), value_set=_TOO_LONG)
        for row in _grouped(records.filter(is_long), ["split", "num_tokens"], [([], "count_all")]):
            self.too_long[row["split"], row["num_tokens"]] += row["count_all"]
        records = records.filter(pc.greater(records["times"], 0))
        keys = ["source", "split", "num_tokens"]
        for row in _grouped(records, keys, [("times", "sum")]):
            source = row["source"].split("/")[0]
            self.lengths[source, row["split"], row["num_tokens"]] += row["times_sum"]
        place = pc.fill_null(pc.index_in(records["record_id"], value_set=self.ids), -1).to_numpy()
        (at,) = np.nonzero(place >= 0)
        place, first = np.unique(place[at], return_index=True)
        is_new = self.file[place] < 0
        place, at = place[is_new], pa.array(at[first[is_new]])
        files = records["source"].cast(pa.string()).take(at).dictionary_encode()
        self.file[place] = files.indices.to_numpy() + len(self.files)
        self.files += files.dictionary.to_pylist()
        self.row[place] = records["row"].take(at)
        self.num_tokens[place] = pc.max_element_wise(records["num_tokens"].take(at), 1)

    def add_places(self, samples: Samples) -> None:
        """Add the source row to each sampled record that is known."""
        ids = pa.array([sample["id"] for sample in samples], pa.string())
        places = pc.index_in(ids, value_set=self.ids).to_pylist()
        for sample, at in zip(samples, places, strict=True):
            if at is not None and self.file[at] >= 0:
                sample["place"] = f"{self.files[self.file[at]]}:{self.row[at]}"

    def counts(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return `trained`, `lengths` and `too_long` of `Measured`."""
        tokens, trained = self.sums
        names = np.array([*(file.split("/")[0] for file in self.files), None], object)[self.file]
        own = {"source": pa.array(names, pa.string()), "copies": tokens / self.num_tokens}
        sums = pa.table(own | {"tokens": tokens, "trained": trained})
        sums = sums.group_by("source", use_threads=False).aggregate(
            [("copies", "sum"), ("tokens", "sum"), ("trained", "sum")]
        )
        return (
            [(*row.values(),) for row in sums.sort_by("source").to_pylist()],
            [(*key, number) for key, number in sorted(self.lengths.items())],
            [(*key, number) for key, number in sorted(self.too_long.items())],
        )


_TOO_LONG = pa.array(["over_seq_len", "first_turn_too_long"])


def _grouped(rows: pa.RecordBatch, keys: list[str], counts: list[Any]) -> Samples:
    table = pa.Table.from_batches([rows]).group_by(keys, use_threads=False).aggregate(counts)
    found: Samples = table.to_pylist()
    return found


def _cut(found: dict[str, Samples]) -> dict[str, Samples]:
    """Return rows as the page shows them, with long texts cut."""
    shown: dict[str, Samples] = {}
    for reason, rows in sorted(found.items()):
        for row in rows:
            each = {name: row[name] for name in _SHOWN if name in row}
            if "raw" in each:
                each["raw"] = each["raw"].decode("utf-8", "replace")[:_MOST_TEXT]
            shown.setdefault(reason, []).append(each | {"detail": each["detail"][:_MOST_TEXT]})
    return shown


_SHOWN = ("source", "row", "detail", "raw", "raw_size")


def _read_split(
    files: VersionFiles, split: str, num_packs: int, num_shown: int, sequences: list[pa.Table]
) -> MeasuredSplit:
    """Count masks and fill of the packs that are read, and take evenly spaced samples.

    Appends the sequences of the packs to `sequences`.
    """
    preferences, labels = files.manifest.preferences, label_names(files.manifest)
    own = [(path, name) for path, name in files.files.get("data", []) if name == split]
    tally = _Tally(files.seq_len, labels, sequences)
    seen = tokens = shown = 0
    samples: Samples = []
    step = 1
    for part in each_packs(replace(files, files={"data": own}, checks_packs=True), _PACK_COLUMNS):
        if not part.num_rows:
            continue
        if not seen:  # packs have similar lengths, so the first part sets the spacing
            mean = max(1, pc.sum(part["num_tokens"]).as_py() // part.num_rows)
            count = max(1, min(_PACKS, num_shown // min(mean, _PACK_TOKENS)))
            # Packs of 2,000 tokens, 20,000 to show: 10 packs. If 1,000 are read, every 100th.
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
    return MeasuredSplit(
        fill=tally.fill.tolist(),
        per_pack=sorted(tally.per_pack.items()),
        shares=tally.shares.tolist(),
        trained=sorted(tally.trained.items()),
        turns=[(tokens, answers) for tokens, answers in tally.turns.T.tolist()],
        labels=dict(sorted(tally.labels.items())),
        weights=sorted(tally.weights.items()) if tally.weights.keys() - {1} else [],
        read_packs=seen,
        read_tokens=tokens,
        samples=samples,
    )


class _Tally:
    """Counts over packs, updated one part at a time."""

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
        """Count packs, and return their number of tokens."""
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
        """Count trained spans by their number in the record: [0,1,1,0,1 | 1,1] -> 2 + 2, 1."""
        begins = flags.copy()
        begins[1:] &= ~flags[:-1]
        # A span also begins at the start of a record, even if the previous record ends trained.
        begins[starts] = flags[starts]
        at = np.flatnonzero(begins)
        if not len(at):
            return
        sizes = np.add.reduceat(flags, at, dtype=np.int64)
        record = np.searchsorted(starts, at, side="right")
        # Number the spans within each record: records [1 1 1 2 2] -> [0 1 2 0 1].
        first = np.r_[True, record[1:] != record[:-1]]
        number = np.arange(len(at)) - np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))
        number = np.minimum(number, _TURNS - 1)
        self.turns[0] += np.bincount(number, sizes, _TURNS).astype(np.int64)
        self.turns[1] += np.bincount(number, minlength=_TURNS)


def _binned(parts: Ints, wholes: Ints | int) -> Ints:
    """Count shares in bins of 5%."""
    return np.bincount(np.minimum(parts * _BINS // wholes, _BINS - 1), minlength=_BINS)


def _counts(values: npt.NDArray[Any]) -> dict[Any, int]:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _sample(
    number: int, row: Mapping[str, Any], preferences: str | None, labels: Sequence[str]
) -> dict[str, Any]:
    """Return a pack as the page's script reads it, cut after the first 16,000 tokens."""
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
_SAMPLES = (40_000, 10_000, 0)  # tokens in samples: fewer if their texts are long
_TOKEN_CHARS = 200  # characters per token; some vocabularies have tokens of 128 spaces

_MEASURED = TypeAdapter(Measured)

Fetch = Callable[[FileEntry], Path]


def version_report(opened: OpenVersion, tokenizers: Path) -> str:
    """Return the report of a published version as HTML.

    Args:
        opened: the version; its files are fetched and verified.
        tokenizers: folder of tokenizers in the cache; ids are shown if the tokenizer is missing.

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
    """Return the report of a version before it is published; arguments as for `publish_version`."""
    uploads = name_files(files)
    draft = draft_manifest(dataset, vid, uploads, facts)
    paths = {entry.key: body.path for entry, body in uploads}
    pipeline = pipeline_of(partial(find_snapshot, draft.tokenizer_fingerprint, tokenizers))
    return report_of(draft, lambda entry: paths[entry.key], pipeline)


def report_of(
    manifest: Manifest, fetch: Fetch, pipeline: Pipeline | None, uri: str | None = None
) -> str:
    """Return the report as HTML, smaller than `MAX_BYTES`.

    Args:
        manifest: manifest of the version, or a draft of it.
        fetch: returns the local path of a file.
        pipeline: tokenization pipeline; if None, ids are shown instead of text.
        uri: address of the version for the commands that load it; if None, they use `STORE`.
    """
    for room in _SAMPLES:
        html = _page(manifest, measured_of(manifest, fetch, room), pipeline, uri)
        if len(html.encode()) < MAX_BYTES:
            break
    return html


def measured_of(manifest: Manifest, fetch: Fetch, samples: int = 0) -> Measured:
    """Run `measure` over the files of a version in a worker with limits.

    Args:
        manifest: manifest of the version.
        fetch: returns the local path of a file.
        samples: approximate number of tokens in samples.

    Raises:
        IntegrityError: the content of a file is invalid, or contradicts the manifest.
    """
    files: dict[str, list[tuple[Path, str]]] = {}
    packs: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    num_bytes = 0
    for entry in manifest.files:
        if entry.kind == "data":  # only the first files of each split
            if not entry.rows or tokens[entry.split] >= MAX_READ_TOKENS:
                continue
            packs[entry.split] += entry.rows
            tokens[entry.split] += entry.tokens
        # Other kinds (card, report, exports) have nothing to count.
        elif entry.kind not in ("records", "quarantine", "dropped"):
            continue
        files.setdefault(entry.kind, []).append((fetch(entry), entry.split))
        num_bytes += entry.size
    version_files = VersionFiles(files=files, manifest=replace(manifest, files=()))
    found = run_in_worker(  # a few compressed KB may expand to GB
        partial(measure, version_files, dict(sorted(packs.items(), reverse=True)), samples),
        what=f"version '{manifest.version}'",
        blames=IntegrityError,
        num_bytes=num_bytes,
    )
    measured = _MEASURED.validate_python(found)
    counted = sum(tokens * records for *_, tokens, records in measured.lengths)
    published = sum(entry.tokens for entry in manifest.files if entry.kind == "data")
    # Charts would be wrong without an error if the records counted more tokens than were published.
    if counted > published:
        raise IntegrityError(
            f"the records of version '{manifest.version}' count {counted:,} tokens, its "
            f"manifest {published:,}. Run `packhouse verify` to check the version."
        )
    return measured


def _page(
    manifest: Manifest, measured: Measured, pipeline: Pipeline | None, uri: str | None
) -> str:
    """Render the page from the manifest and the counts."""
    num_packs = num_tokens = 0
    samples = []
    for name, split in measured.splits.items():
        packs = [with_texts(pack, pipeline) for pack in split.samples]
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
            has_weights=any(each.weights for each in measured.splits.values()),
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
    """Add the text of each token of a sample, escaped for display, and mark special tokens."""
    for record in pack["records"]:
        texts = token_texts(record["ids"], pipeline)
        record["texts"] = [for_terminal(text, keep_lines=True)[:_TOKEN_CHARS] for text in texts]
        record["special"] = special_tokens(record["ids"], pipeline).nonzero()[0].tolist()
    return pack


def _limits(manifest: Manifest) -> AuditConfig:
    """Return the audit limits of the version, or the defaults if it does not record them."""
    try:
        return AuditConfig.model_validate(manifest.facts.provenance.limits)
    except ValueError:
        raise ConfigError(
            "the manifest contains invalid audit limits. Check the version with `packhouse verify`."
        ) from None
