"""Build the report of a version: one HTML file that shows what is trained and works offline.

Built when a version is published, and by `packhouse report`. The same files give the same bytes: no
timestamps, and samples at fixed positions. Alpaca (52,002 rows, 4.5 million tokens) takes 1.2 s of
CPU time.
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
from pydantic import TypeAdapter

from packhouse.addons.ask.duckdb_queries import open_views
from packhouse.addons.ask.inspect import (
    each_packs,
    label_names,
    label_text,
    page_record,
    records_in,
    weight_runs,
)
from packhouse.addons.ask.version_tables import TABLES, VersionFiles
from packhouse.addons.report import sections
from packhouse.addons.report.charts_and_tables import page
from packhouse.addons.report.sections import Measured, MeasuredSplit, Samples
from packhouse.cli.token_display import pipeline_of, special_tokens, token_texts, tokenizer_of
from packhouse.errors import IntegrityError
from packhouse.records.arrays import Bools, Int64s, count_up
from packhouse.store import OpenVersion
from packhouse.store.commit import LocalFile, draft_manifest, name_files
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.worker import run_in_worker
from packhouse.tokenize.encoders import Pipeline
from packhouse.tokenize.tokenizer_loading import find_snapshot

# Queries of the report over the views of a version, and counts that no view gives: trained spans.
#
# Everything is read in one worker with limits, because the store may be untrusted. Packs are read
# in parts, so memory holds counts, a few rows and one part. Masks and samples come from the first
# 5 million tokens of each split, which packing has shuffled; the report says if that is not all of
# it.


MAX_READ_TOKENS = 5_000_000
"""Number of tokens per split whose masks are read; a million takes 0.06 s of CPU time."""
_PACKS = 40  # samples per split
_PACK_TOKENS = 16_000
_EXAMPLES = 3  # rows per reason
_MOST_TEXT = 400  # characters of a quarantined row
_BINS = 20  # histogram bins of a share
_TURNS = 12

_COUNTED = ("tokens", "trained")
_PACK_COLUMNS = TABLES["packs"].keys() - {"num_trained", "total_weight"}
_SEQUENCES = pa.schema([("record_id", pa.string()), *((name, pa.int64()) for name in _COUNTED)])


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
    # Packs come first: their sequences become a table for the queries below.
    sequences: list[pa.Table] = []
    splits = {
        name: _read_split(files, name, number, num_shown // len(num_packs), sequences)
        for name, number in num_packs.items()
    }
    shown: dict[str, Samples] = {}  # copies of a record and sides of a pair share an id
    for sample in (sample for split in splits.values() for sample in split.samples):
        for record in sample["records"]:
            shown.setdefault(record["id"], []).append(record)
    with open_views(files) as views:
        for row in views.rows(_PLACES, [sorted(shown)]).to_pylist():
            for record in shown[row["record_id"]]:
                record["place"] = row["place"]
        packed = pa.concat_tables([_SEQUENCES.empty_table(), *sequences])
        views.database.register("packed", packed)

        def tuples(query: str) -> list[Any]:
            return [(*row.values(),) for row in views.rows(query).to_pylist()]

        def examples(query: str) -> dict[str, Samples]:
            found: dict[str, Samples] = {}
            for row in views.rows(query).to_pylist():
                own = {name: row[name][:_MOST_TEXT] for name in ("detail", "raw") if name in row}
                found.setdefault(row.pop("reason"), []).append(row | own)
            return found

        return Measured(
            trained=tuples(_TRAINED),
            lengths=tuples(_LENGTHS),
            too_long=tuples(_TOO_LONG),
            dropped=examples(_DROPPED),
            quarantine=examples(_BAD),
            splits=splits,
        )


# Ordered, like the next ones: without, DuckDB's groups gave four results in six runs.
_LENGTHS = """
SELECT split_part(source, '/', 1) AS source, split, num_tokens, sum(times)::BIGINT AS records
FROM records WHERE times > 0 GROUP BY ALL ORDER BY ALL
"""

_TOO_LONG = """
SELECT split, num_tokens, count(*) AS records FROM records
WHERE outcome IN ('over_seq_len', 'first_turn_too_long') GROUP BY ALL ORDER BY ALL
"""

# `concat` cuts records: the parts of one add up to 1 in `copies`. Equal records of several sources
# belong to the first (`arg_min`), because their ids are equal.
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

# Only the first rows of each reason are kept and decoded.
_DROPPED = f"""
SELECT reason, row.source, row.row, row.detail FROM (
  SELECT reason, unnest(arg_min(left_out, number, {_EXAMPLES})) AS row
  FROM files.left_out GROUP BY reason)
ORDER BY reason, row.number
"""

_BAD = f"""
SELECT step || '/' || reason AS reason, row.source, row.row, row.detail,
  decode_bytes(row.raw) AS raw, row.raw_size
FROM (
  SELECT step, reason, unnest(arg_min(quarantine, number, {_EXAMPLES})) AS row
  FROM files.quarantine GROUP BY step, reason)
ORDER BY step, reason, row.number
"""


def _read_split(
    files: VersionFiles, split: str, num_packs: int, num_shown: int, sequences: list[pa.Table]
) -> MeasuredSplit:
    """Count masks and fill of the packs that are read, and take evenly spaced samples.

    Appends the sequences of the packs to `sequences`.
    """
    preferences, names = files.manifest.preferences, label_names(files.manifest)
    own = [(path, name) for path, name in files.files.get("data", []) if name == split]
    fill, shares = np.zeros(_BINS, np.int64), np.zeros(_BINS, np.int64)
    turns = np.zeros((2, _TURNS), np.int64)  # trained tokens, answers
    per_pack, trained_of_records = Counter[int](), Counter[int]()
    weights_of_tokens, labels = Counter[float](), Counter[str]()
    seen = tokens = shown = 0
    samples: Samples = []
    step = 1
    for part in each_packs(replace(files, files={"data": own}), _PACK_COLUMNS):
        if not part.num_rows:
            continue
        flags, weights, lengths = (
            pc.list_flatten(part[name]).to_numpy()
            for name in ("trained", "loss_weights", "seq_lengths")
        )
        starts = np.cumsum(lengths) - lengths
        trained = np.add.reduceat(flags, starts, dtype=np.int64)
        fill += _binned(part["num_tokens"].to_numpy(), files.seq_len)
        shares += _binned(trained, lengths)
        turns += _count_turns(flags, starts)
        per_pack.update(part["num_records"].to_pylist())
        trained_of_records.update(_counts(trained))
        weights_of_tokens.update(_counts(weights[flags]))
        labels.update(label_text(n, names) for n in part["label"].drop_null().to_pylist())
        ids = pc.list_flatten(part["record_ids"])
        sequences.append(pa.table([ids, lengths, trained], schema=_SEQUENCES))
        if not seen:  # packs have similar lengths, so the first part sets the spacing
            mean = max(1, pc.sum(part["num_tokens"]).as_py() // part.num_rows)
            count = max(1, min(_PACKS, num_shown // min(mean, _PACK_TOKENS)))
            # Packs of 2,000 tokens, 20,000 to show: 10 packs. If 1,000 are read, every 100th.
            step = max(1, min(num_packs, MAX_READ_TOKENS // mean) // count)
        for number in range(-seen % step, part.num_rows, step):
            if shown < num_shown and len(samples) < _PACKS:
                (row,) = part.slice(number, 1).to_pylist()
                samples.append(_sample(seen + number, row, preferences, names))
                shown += sum(len(record["ids"]) for record in samples[-1]["records"])
        seen += part.num_rows
        tokens += len(flags)
        if tokens >= MAX_READ_TOKENS:
            break
    return MeasuredSplit(
        fill=fill.tolist(),
        per_pack=sorted(per_pack.items()),
        shares=shares.tolist(),
        trained=sorted(trained_of_records.items()),
        turns=[(own, answers) for own, answers in turns.T.tolist()],
        labels=dict(sorted(labels.items())),
        weights=sorted(weights_of_tokens.items()) if weights_of_tokens.keys() - {1} else [],
        read_packs=seen,
        samples=samples,
    )


def _count_turns(flags: Bools, starts: Int64s) -> Int64s:
    """Count trained spans by their number in the record: [0,1,1,0,1 | 1,1] -> 2 + 2, 1.

    Returns:
        Trained tokens, and number of spans: shape [2, _TURNS].
    """
    begins = flags.copy()
    begins[1:] &= ~flags[:-1]
    # A span also begins at the start of a record, even if the previous record ends trained.
    begins[starts] = flags[starts]
    at = np.flatnonzero(begins)
    if not len(at):
        return np.zeros((2, _TURNS), np.int64)
    sizes = np.add.reduceat(flags, at, dtype=np.int64)
    record = np.searchsorted(starts, at, side="right")
    # Number the spans within each record: records [1 1 1 2 2] -> [0 1 2 0 1].
    number = np.minimum(count_up(np.unique(record, return_counts=True)[1]), _TURNS - 1)
    counts = np.bincount(number, sizes, _TURNS), np.bincount(number, minlength=_TURNS)
    return np.array(counts).astype(np.int64)


def _binned(parts: Int64s, wholes: Int64s | int) -> Int64s:
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


# Charts need 0.9 MB of the file, for their JavaScript.
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
        IntegrityError: the content of a file is invalid.
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
    return _MEASURED.validate_python(found)


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
    has_weights = any(each.weights for each in measured.splits.values())
    parts = [
        sections.load_section(manifest, uri),
        sections.flow_section(manifest),
        sections.lengths_section(manifest, measured),
        sections.packs_section(manifest, measured),
        sections.trained_section(manifest, measured),
        sections.samples_section(num_packs, num_tokens, pipeline is not None, "", has_weights),
        sections.left_out_section(manifest, measured),
        sections.quality_section(manifest),
        sections.duplicates_section(manifest),
        sections.audit_section(manifest),
        sections.recipe_section(manifest),
    ]
    title = f"{manifest.dataset} {manifest.version} - packhouse report"
    head = sections.heading(manifest) + sections.overview(manifest)
    return page(title, head, parts, {"samples-data": samples} if num_packs else {})


def with_texts(pack: dict[str, Any], pipeline: Pipeline | None) -> dict[str, Any]:
    """Add the text of each token of a sample, escaped for display, and mark special tokens."""
    for record in pack["records"]:
        texts = token_texts(record["ids"], pipeline)
        record["texts"] = [for_terminal(text, keep_lines=True)[:_TOKEN_CHARS] for text in texts]
        record["special"] = special_tokens(record["ids"], pipeline).nonzero()[0].tolist()
    return pack
