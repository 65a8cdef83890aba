"""Compare two versions: settings, counts and schema, then tokens and masks record by record.

Records are matched by id, a hash of their content, so it does not matter where packing put them.
Tokens, masks and loss weights are hashed separately. This distinguishes a changed template (tokens
differ) from a changed training rule (only masks differ), changed weights, and a changed number of
copies. A row whose content changed has a new id: an old and a new id of the same row that the
other version lacks are paired as `edited`.

The comparison is a join of the views `contents` and `records` of both versions in DuckDB. It reads
each data file once; compare manifests only (`records=False`) if settings and counts are enough.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from packhouse.addons.ask.duckdb_queries import (
    MEMORY,
    Question,
    fetch_files,
    find_records,
    open_views,
    read,
)
from packhouse.addons.ask.version_tables import VersionFiles
from packhouse.cli import cache_option, json_option
from packhouse.cli.store_commands import echo_json
from packhouse.cli.token_display import pipeline_of, plain, runs_of, tokenizer_of
from packhouse.errors import ContractError, IntegrityError
from packhouse.run.step_cache import Workspace
from packhouse.store.schema_drift import ManifestDiff, diff_manifests
from packhouse.store.version_reader import OpenVersion, open_address, open_relative
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import echo, print_table, print_text
from packhouse.system.wording import counted, cut_pair
from packhouse.system.worker import run_in_worker
from packhouse.tokenize.encoders import Pipeline
from packhouse.tokenize.tokenizer_loading import MEMORY_PER_BYTE

_MAX_EXAMPLES = 5

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Change:
    """One record that differs."""

    record_id: str
    """ID in the new version; for a removed record, in the old one."""
    old_id: str
    """ID in the old version; for an added record, in the new one. Differs only for edited rows."""
    place: str
    """File and row, such as `faq.jsonl row 7`; empty if the version does not record it."""
    detail: str
    """The change: `100 -> 108 tokens`, `loss weight 0.5 -> 1`, `1 -> 2 copies`, `train -> eval`,
    `now duplicate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDiff:
    """Number of records per kind of difference, with a few examples."""

    num_added: int
    num_removed: int
    num_edited: int
    """Rows whose content changed: same file and row, different record."""
    num_changed_tokens: int
    """Records of both versions whose tokens differ."""
    num_changed_masks: int
    """Records of both versions with the same tokens but different masks."""
    num_changed_weights: int
    """Records of both versions with the same tokens and masks but different loss weights."""
    num_copies: int
    """Records of both versions with a different number of copies."""
    num_moved: int
    """Records of both versions in a different split."""
    num_same: int
    """Records of both versions without any difference."""
    examples: Mapping[str, list[Change]]
    """Examples by kind: `added`, `removed`, `edited`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff(ManifestDiff):
    """All differences between two versions."""

    records: RecordDiff | None
    """None if the rows were not compared or have no record ids."""


def diff_versions(old: OpenVersion, new: OpenVersion, *, records: bool = True) -> Diff:
    """Compare two versions; with `records`, read the data files of both.

    Raises:
        IntegrityError: a data file is damaged.
    """
    found = diff_manifests(old.manifest, new.manifest)
    return Diff(**asdict(found), records=_diff_records(old, new) if records else None)


_CONTENTS = """
WITH rows AS (
  SELECT
    record_id, source || ' row ' || row AS place, outcome,
    row_number() OVER (PARTITION BY source, row ORDER BY number) AS number,
    number + CASE WHEN outcome = 'kept' THEN 0 ELSE 2**61::BIGINT END AS first
  FROM files.records
)
FROM contents FULL JOIN (
  SELECT
    record_id, arg_min(place, first) AS place, arg_min(number, first) AS number,
    arg_min(outcome, first) AS outcome
  FROM rows GROUP BY record_id
) USING (record_id)
"""
"""Contents of each record with its row; of rows with equal content, the first that was kept.

`number` is the position of the record within its row. Columns of packs are null for a record that
is in no pack, and columns of rows for a record that has no row."""

_EDITED = """
CREATE TABLE edited AS
WITH unknown AS (
  SELECT new, row_number() OVER (PARTITION BY new.place ORDER BY new.number, new.record_id) AS nth
  FROM pairs WHERE old.copies IS NULL AND new.copies IS NOT NULL AND old.place IS NULL
), gone AS (
  SELECT old, row_number() OVER (PARTITION BY old.place ORDER BY old.number, old.record_id) AS nth
  FROM pairs WHERE old.copies IS NOT NULL AND new.copies IS NULL AND new.place IS NULL
)
SELECT old, new FROM unknown JOIN gone ON old.place = new.place AND gone.nth = unknown.nth
"""
"""Pairs of records of the same row that only one version has, matched in order: for windows
a b c and a x c of a row, b is paired with x. Rows of duplicates are not paired, because both
versions have their content."""

_IS_ALONE = """
record_id NOT IN (SELECT unnest([old.record_id, new.record_id]) FROM edited)
"""
_KINDS = {
    "added": f"old.copies IS NULL AND new.copies IS NOT NULL AND {_IS_ALONE}",
    "removed": f"old.copies IS NOT NULL AND new.copies IS NULL AND {_IS_ALONE}",
    "changed_tokens": "old.ids_digest <> new.ids_digest",
    "changed_masks": "old.mask_digest <> new.mask_digest AND old.ids_digest = new.ids_digest",
    "changed_weights": "old.weights_digest <> new.weights_digest "
    "AND old.ids_digest = new.ids_digest AND old.mask_digest = new.mask_digest",
    "copies": "old.copies <> new.copies",
    "moved": "old.split <> new.split",
    "same": "old.ids_digest = new.ids_digest AND old.mask_digest = new.mask_digest AND "
    "old.weights_digest = new.weights_digest AND old.copies = new.copies AND old.split = new.split",
}


class _Record(NamedTuple):
    """A record of one version; all null if the version lacks it."""

    record_id: str
    place: str | None
    outcome: str | None
    split: str | None
    copies: int | None
    label: int | None
    num_tokens: int | None
    num_trained: int | None
    total_weight: float | None
    ids_digest: str | None
    mask_digest: str | None
    weights_digest: str | None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "_Record":
        return cls(*(row[name] for name in cls._fields))


def _diff_records(old: OpenVersion, new: OpenVersion) -> RecordDiff | None:
    """Compare the records in a worker; None if the packs have no record ids."""
    with temporary_folder("diff") as folder:
        question = Question(query=_CONTENTS)
        before, size = fetch_files(old, question, folder / "old")
        after, more = fetch_files(new, question, folder / "new")
        # Both versions are joined in one database, so it needs memory for both.
        memory = MEMORY + (size + more) * MEMORY_PER_BYTE
        try:
            numbers, pairs = run_in_worker(
                partial(_compare, before, after, memory),
                what=f"the files of {old.dataset} and {new.dataset}",
                blames=IntegrityError,
                num_bytes=size + more,
                more_memory=memory,
            )
        except ContractError:
            return None
    shown = {
        name: [(_Record.of(row["old"]), _Record.of(row["new"])) for row in rows]
        for name, rows in pairs.items()
    }
    shown["added"] = _with_outcomes(old, new, shown["added"])
    removed = _with_outcomes(new, old, [(of_new, of_old) for of_old, of_new in shown["removed"]])
    shown["removed"] = [(of_old, of_new) for of_new, of_old in removed]
    examples = {name: [_change(name, *p) for p in own] for name, own in shown.items() if own}
    return RecordDiff(**numbers, examples=examples)


def _compare(
    before: VersionFiles, after: VersionFiles, memory: int
) -> tuple[dict[str, int], dict[str, Rows]]:
    """Join the contents of two versions (in a worker).

    Returns:
        Number of records by kind, and the old and the new record of the first ones of each kind.
    """
    with open_views(before, memory=memory) as views:
        old = views.rows(_CONTENTS)
    with open_views(after, memory=memory) as views:
        new = views.rows(_CONTENTS)
        views.database.register("old", old)
        views.database.register("new", new)
        # Each row has both records as objects; fields of one that does not exist are null.
        joined = "SELECT record_id, old, new FROM old FULL JOIN new USING (record_id)"
        views.database.execute(f"CREATE TABLE pairs AS {joined}")
        views.database.execute(_EDITED)

        def rows(query: str) -> Rows:
            found: Rows = views.database.sql(query).to_arrow_table().to_pylist()
            return found

        counts = ", ".join(f"count(*) FILTER ({each}) AS num_{n}" for n, each in _KINDS.items())
        counts += ", (SELECT count(*) FROM edited) AS num_edited"
        (numbers,) = rows(f"SELECT {counts} FROM pairs")
        chosen = {name: f"pairs WHERE {each} ORDER BY record_id" for name, each in _KINDS.items()}
        chosen["edited"] = "edited ORDER BY new.number, new.record_id"
        del chosen["same"]
        limit = f"LIMIT {_MAX_EXAMPLES}"
        shown = {name: rows(f"SELECT old, new FROM {of} {limit}") for name, of in chosen.items()}
    return numbers, shown


_PLACE = "source || ' row ' || row"
_NUM_RECORDS = f"""
SELECT {_PLACE} AS place, count(*) AS number FROM records
WHERE {_PLACE} IN (SELECT unnest(?)) GROUP BY place
"""
_LEFT_OUT = f"""
SELECT {_PLACE} AS place, reason, detail FROM (
  SELECT source, row, reason, detail FROM dropped UNION ALL
  SELECT source, row, reason, detail FROM quarantine
) WHERE {_PLACE} IN (SELECT unnest(?))
"""


def _with_outcomes(
    opened: OpenVersion, other: OpenVersion, pairs: Sequence[tuple[_Record, _Record]]
) -> list[tuple[_Record, _Record]]:
    """Return example records that a version lacks, each with the reason as its outcome.

    Args:
        opened: the version that lacks the records.
        other: the version that has them.
        pairs: each record in the two versions.
    """
    # Records with an outcome already explain themselves.
    wanted = {one.place or its.place for one, its in pairs if not one.outcome} - {None}
    details: dict[str | None, str] = {}
    if wanted:
        num_records, num_others = (
            {
                row["place"]: row["number"]
                for row in read(each, _NUM_RECORDS, [[*wanted]]).to_pylist()
            }
            for each in (opened, other)
        )
        for place, number in num_records.items():
            is_split = number < num_others.get(place, 0)
            details[place] = "split to fewer records" if is_split else "equal to another record"
        for row in read(opened, _LEFT_OUT, [[*wanted]]).to_pylist():
            details[row["place"]] = f"{row['reason']}: {row['detail']}".removesuffix(": ")
    return [
        (one._replace(outcome=one.outcome or details.get(one.place or its.place)), its)
        for one, its in pairs
    ]


def _change(name: str, old: _Record, new: _Record) -> Change:
    """Describe the difference of a record."""
    changes = []  # parts for an edited row with an unchanged number of tokens
    if name == "edited" and old.num_tokens == new.num_tokens:
        if old.label != new.label:
            changes.append(f"label {old.label} -> {new.label}")
        if old.weights_digest != new.weights_digest:
            changes.append(_weights(old, new))
        if old.ids_digest == new.ids_digest and old.mask_digest != new.mask_digest:
            changes.append(f"{old.num_trained} -> {new.num_trained} trained")
        if not changes:
            changes.append(f"different text of {counted(old.num_tokens or 0, 'token')}")
    tokens = f"{old.num_tokens} -> {counted(new.num_tokens or 0, 'token')}"
    details = {
        "added": f"was {old.outcome}" if old.outcome else "",
        "removed": f"now {new.outcome}" if new.outcome else "not in the sources",
        "edited": ", ".join(changes) or tokens,
        "changed_masks": f"{old.num_trained} -> {new.num_trained} trained",
        "changed_weights": _weights(old, new),
        "copies": f"{old.copies} -> {counted(new.copies or 0, 'copy')}",
        "moved": f"{old.split} -> {new.split}",
    }
    place = old.place if name == "removed" else new.place
    ids = new.record_id or old.record_id, old.record_id or new.record_id
    return Change(*ids, place or "", details.get(name, tokens))


def _weights(old: _Record, new: _Record) -> str:
    """Format the mean loss weight per trained token of both versions."""
    means = ((each.total_weight or 0) / (each.num_trained or 1) for each in (old, new))
    return "loss weight {:.4g} -> {:.4g}".format(*means)


_MOST_TEXTS = 2
"""Number of examples per kind of change that are shown with their text."""
_BEFORE, _AFTER = 12, 30
"""Number of tokens shown before the first difference, and from there on."""
_MOST_KEYS = 20
"""Maximum number of settings or counts shown per table."""
_VALUE = 30
"""Maximum number of characters shown of a setting's value."""


# Counts that are omitted because other counts are clearer.
_INNER = ("length_histogram", "lower_bound", "num_bins", "num_sequences", "sides.", ".filtered.")
_ENDS = (".rows_in", ".tokens_in")


@click.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.option(
    "--no-records", is_flag=True, help="Compare only the manifests, without reading data."
)
@cache_option("Cache folder.")
@json_option()
def diff(old: str, new: str, no_records: bool, cache: Path, as_json: bool) -> None:
    """Compare the settings, schema, rows, tokens, masks, repeats and splits of two versions.

    OLD and NEW are STORE/DATASET[@REF]. NEW can be just a ref or a version ID if it is in the same
    dataset. Examples are shown as text if the tokenizer is available.

    \b
    Example:
      $ packhouse diff ./store/demo@prod latest
      configuration        old  new
      split.eval_fraction  0.1  0.2
      ...
    """
    left = open_address(old)
    right = open_relative(left, new)
    found = diff_versions(left, right, records=not no_records)
    if as_json:
        echo_json(asdict(found))
    else:
        _print_facts(found)
        if found.records is not None:
            has_same_files = not any(key.endswith("sha256") for key in found.lineage)
            tokenizers = Workspace(cache=cache).tokenizers
            _print_records(found.records, left, right, tokenizers, has_same_files)


def _print_facts(found: Diff) -> None:
    echo(f"{found.old} -> {found.new}")
    if found.is_same_content:
        echo("the rows are identical (same content_id)")
    for name in ("configuration", "counts", "lineage", "engines", "libraries", "schema"):
        seen: list[object] = []
        rows = []
        for key, pair in getattr(found, name).items():
            if any(part in key for part in _INNER) or key.endswith(_ENDS):
                continue
            # A change in the rows of validate (47,369 -> 46,221) repeats in each later step.
            if name != "counts" or pair not in seen:
                rows.append((key, *_short(*pair)))
            seen.append(pair)
        if rows:
            echo()
            print_table((name, "old", "new"), rows[:_MOST_KEYS])
        if len(rows) > _MOST_KEYS:
            echo(f"... and {len(rows) - _MOST_KEYS:,} more; see --json")
    echo()
    print_table(("total", "old", "new"), [(k, *pair) for k, pair in found.totals.items()])


def _short(old: object, new: object) -> tuple[object, ...]:
    """Shorten both values to a few characters; numbers are unchanged.

    Example:
        >>> _short(["length(output) > 20", "lang = 'en'"], None)
        ('2 entries', '-')
    """
    texts = []
    for value, other in ((old, new), (new, old)):
        texts.append("-" if value is None else str(value))
        if isinstance(value, list | dict) and len(texts[-1]) > _VALUE and other is None:
            texts[-1] = f"{len(value):,} entries"
    pairs = zip((old, new), cut_pair(texts[0], texts[1], _VALUE), strict=True)
    return tuple(value if type(value) is int else text for value, text in pairs)


def _print_records(
    found: RecordDiff, old: OpenVersion, new: OpenVersion, tokenizers: Path, has_same_files: bool
) -> None:
    echo(f"\nrecords: {found.num_same:,} are the same")
    is_one = old.manifest.tokenizer_fingerprint == new.manifest.tokenizer_fingerprint
    why = "same row, read or split differently" if has_same_files else "the row changed"
    names = {
        "added": "added",
        "removed": "removed",
        "edited": f"edited ({why})",
        "changed_tokens": "other text" if is_one else "different token IDs",
        "changed_masks": "same text, different tokens trained",
        "changed_weights": "same text, different loss weights",
        "copies": "different number of copies",
        "moved": "moved to another split",
    }
    shown = [c for kind in _WITH_TEXT for c in found.examples.get(kind, ())[:_MOST_TEXTS]]
    opened = (old, new) if shown else ()
    pipelines = [pipeline_of(tokenizer_of(each, tokenizers)) for each in opened]
    before = find_records(old, {change.old_id for change in shown})
    after = find_records(new, {change.record_id for change in shown})
    for kind, name in names.items():
        if number := getattr(found, f"num_{kind}"):
            echo(f"{number:>9,} {name}")
        for change in found.examples.get(kind, ()):
            print_text(f"{change.place or change.record_id}: {change.detail}".rstrip(": "), 10)
            one, other = before.get(change.old_id), after.get(change.record_id)
            if change in shown and one and other:
                _print_texts([one, other], pipelines)


_WITH_TEXT = ("edited", "changed_tokens", "changed_masks")


def _print_texts(records: Rows, pipelines: Sequence[Pipeline | None]) -> None:
    """Print a record of both versions, starting shortly before the first difference."""
    sides = [(np.array(each["input_ids"]), np.array(each["trained"], bool)) for each in records]
    (old_ids, old_mask), (new_ids, new_mask) = sides
    shared = min(len(old_ids), len(new_ids))
    differs = old_ids[:shared] != new_ids[:shared]
    differs |= old_mask[:shared] != new_mask[:shared]
    # ids [5, 6, 7] and [5, 6, 9] differ from token 2 on; [5, 6] and [5, 6, 9] do, too.
    first = int(np.argmax(differs)) if differs.any() else shared
    start = max(0, first - _BEFORE)
    end = start + _BEFORE + _AFTER
    for sign, (ids, mask), pipeline in zip("-+", sides, pipelines, strict=True):
        if pipeline is not None:
            text = for_terminal(plain(runs_of(ids[start:end].tolist(), mask[start:end], pipeline)))
            more = " ..." if end < len(ids) else ""
            print_text(f"{sign} {'... ' if start else ''}{text}{more}", 12)
