"""Compare two versions: settings, counts and schema, then tokens and masks record by record.

Records are matched by id, a hash of their content, so it does not matter where packing put them.
Tokens, masks and loss weights are hashed separately. This distinguishes a changed template (tokens
differ) from a changed training rule (only masks differ), changed weights, and a changed number of
copies. A row whose content changed has a new id: an old and a new id of the same row that the
other version lacks are paired as `edited`.

The comparison is a join of the views `contents` and `records` of both versions in DuckDB. It reads
each data file once; compare manifests only (`records=False`) if settings and counts are enough.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypedDict

from packhouse.addons.ask.files import VersionFiles
from packhouse.addons.ask.query import MEMORY, Question, fetch_files, open_views, read
from packhouse.errors import ContractError, IntegrityError
from packhouse.store.evolution import ManifestDiff, diff_manifests
from packhouse.store.read import OpenVersion
from packhouse.system.disks import temporary_folder
from packhouse.system.wording import counted
from packhouse.system.worker import run_in_worker
from packhouse.tokenize.loading import MEMORY_PER_BYTE

_MAX_EXAMPLES = 5


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
  SELECT *, row_number() OVER (PARTITION BY "place new" ORDER BY "number new", record_id) AS nth
  FROM pairs WHERE copies IS NULL AND "copies new" IS NOT NULL AND place IS NULL
), gone AS (
  SELECT *, row_number() OVER (PARTITION BY place ORDER BY number, record_id) AS nth
  FROM pairs WHERE copies IS NOT NULL AND "copies new" IS NULL AND "place new" IS NULL
)
SELECT gone.record_id AS old_id, unknown.record_id AS new_id, unknown."number new" AS number
FROM unknown JOIN gone ON gone.place = unknown."place new" AND gone.nth = unknown.nth
"""
"""Pairs of records of the same row that only one version has, matched in order: for windows
a b c and a x c of a row, b is paired with x. Rows of duplicates are not paired, because both
versions have their content."""

_EXAMPLES_OF_EDITED = f"""
SELECT old, new
FROM edited JOIN pairs old ON old.record_id = old_id JOIN pairs new ON new.record_id = new_id
ORDER BY edited.number, new_id LIMIT {_MAX_EXAMPLES}
"""

_IS_ALONE = "record_id NOT IN (SELECT unnest([old_id, new_id]) FROM edited)"
_KINDS = {
    "added": f'copies IS NULL AND "copies new" IS NOT NULL AND {_IS_ALONE}',
    "removed": f'copies IS NOT NULL AND "copies new" IS NULL AND {_IS_ALONE}',
    "changed_tokens": 'ids_digest <> "ids_digest new"',
    "changed_masks": 'mask_digest <> "mask_digest new" AND ids_digest = "ids_digest new"',
    "changed_weights": 'weights_digest <> "weights_digest new" AND ids_digest = "ids_digest new" '
    'AND mask_digest = "mask_digest new"',
    "copies": 'copies <> "copies new"',
    "moved": 'split <> "split new"',
    "same": 'ids_digest = "ids_digest new" AND mask_digest = "mask_digest new" '
    'AND weights_digest = "weights_digest new" AND copies = "copies new" AND split = "split new"',
}


def _diff_records(old: OpenVersion, new: OpenVersion) -> RecordDiff | None:
    """Compare the records in a worker; None if the packs have no record ids."""
    with temporary_folder("diff") as folder:
        question = Question(query=_CONTENTS)
        before, size = fetch_files(old, question, folder / "old")
        after, more = fetch_files(new, question, folder / "new")
        # Both versions are joined in one database, so it needs memory for both.
        memory = MEMORY + (size + more) * MEMORY_PER_BYTE
        try:
            found: _Found = run_in_worker(
                partial(_compare, before, after, memory),
                what=f"the files of {old.dataset} and {new.dataset}",
                blames=IntegrityError,
                num_bytes=size + more,
                more_memory=memory,
            )
        except ContractError:
            return None
    shown, pairs = found["shown"], found["pairs"]
    _set_outcomes(old, new, "outcome", shown["added"])
    _set_outcomes(new, old, "outcome new", shown["removed"])
    examples = {
        name: [_change(name, row, row) for row in rows] for name, rows in shown.items() if rows
    }
    if pairs:
        examples["edited"] = [_change("edited", *pair) for pair in pairs]
    return RecordDiff(**found["numbers"], examples=examples)


class _Found(TypedDict):
    numbers: dict[str, int]
    shown: dict[str, list[dict[str, Any]]]
    """First records of each kind."""
    pairs: list[list[dict[str, Any]]]
    """The old and the new record of each edited row."""


def _compare(before: VersionFiles, after: VersionFiles, memory: int) -> _Found:
    """Join the contents of two versions (in a worker)."""
    with open_views(before, memory=memory) as views:
        old = views.rows(_CONTENTS)
    with open_views(after, memory=memory) as views:
        new = views.rows(_CONTENTS)
        # Columns of the new version get a suffix (`place new`); `record_id` is shared.
        new = new.rename_columns([n if n == "record_id" else f"{n} new" for n in new.column_names])
        views.database.register("old", old)
        views.database.register("new", new)
        views.database.execute("CREATE TABLE pairs AS FROM old FULL JOIN new USING (record_id)")
        views.database.execute(_EDITED)

        def rows(query: str) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = views.database.sql(query).to_arrow_table().to_pylist()
            return found

        counts = ", ".join(f"count(*) FILTER ({each}) AS num_{n}" for n, each in _KINDS.items())
        (numbers,) = rows(
            f"SELECT {counts}, (SELECT count(*) FROM edited) AS num_edited FROM pairs"
        )
        first = f"ORDER BY record_id LIMIT {_MAX_EXAMPLES}"
        shown = {n: rows(f"FROM pairs WHERE {each} {first}") for n, each in _KINDS.items()}
        del shown["same"]
        pairs = [[row["old"], row["new"]] for row in rows(_EXAMPLES_OF_EDITED)]
    return {"numbers": numbers, "shown": shown, "pairs": pairs}


_PLACE = "source || ' row ' || row"
_NUM_RECORDS = f"SELECT {_PLACE} AS place, count(*) AS number FROM records "
_NUM_RECORDS += f"WHERE {_PLACE} IN (SELECT unnest(?)) GROUP BY place"
_LEFT_OUT = f"SELECT {_PLACE} AS place, reason, detail FROM (SELECT source, row, reason, detail "
_LEFT_OUT += "FROM dropped UNION ALL SELECT source, row, reason, detail FROM quarantine) "
_LEFT_OUT += f"WHERE {_PLACE} IN (SELECT unnest(?))"


def _set_outcomes(
    opened: OpenVersion, other: OpenVersion, name: str, records: list[dict[str, Any]]
) -> None:
    """Add the reason why example records are missing from a version.

    Args:
        opened: the version that lacks the records.
        other: the version that has them.
        name: column of `records` to fill.
        records: the examples, changed in place.
    """
    # Records with an outcome already explain themselves.
    wanted = {row["place"] or row["place new"] for row in records if not row[name]} - {None}
    if not wanted:
        return
    num_records, num_others = (
        {row["place"]: row["number"] for row in read(each, _NUM_RECORDS, [[*wanted]]).to_pylist()}
        for each in (opened, other)
    )
    details = {
        place: "split to fewer records"
        if number < num_others.get(place, 0)
        else "equal to another record"
        for place, number in num_records.items()
    }
    for row in read(opened, _LEFT_OUT, [[*wanted]]).to_pylist():
        details[row["place"]] = f"{row['reason']}: {row['detail']}".removesuffix(": ")
    for row in records:
        row[name] = row[name] or details.get(row["place"] or row["place new"])


def _change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    """Describe the difference of a record from its joined row (for edited rows, from two rows)."""
    changes = []  # parts for an edited row with an unchanged number of tokens
    if name == "edited" and old["num_tokens"] == new["num_tokens new"]:
        if old["label"] != new["label new"]:
            changes.append(f"label {old['label']} -> {new['label new']}")
        if old["weights_digest"] != new["weights_digest new"]:
            changes.append(_weights(old, new))
        is_trained_otherwise = old["mask_digest"] != new["mask_digest new"]
        if old["ids_digest"] == new["ids_digest new"] and is_trained_otherwise:
            changes.append(f"{old['num_trained']} -> {new['num_trained new']} trained")
        if not changes:
            changes.append(f"other text of {counted(old['num_tokens'], 'token')}")
    tokens = f"{old['num_tokens']} -> {counted(new['num_tokens new'] or 0, 'token')}"
    details = {
        "added": f"was {old['outcome']}" if old["outcome"] else "",
        "removed": f"now {new['outcome new']}" if new["outcome new"] else "not in the sources",
        "edited": ", ".join(changes) or tokens,
        "changed_masks": f"{old['num_trained']} -> {new['num_trained new']} trained",
        "changed_weights": _weights(old, new),
        "copies": f"{old['copies']} -> {counted(new['copies new'] or 0, 'copy')}",
        "moved": f"{old['split']} -> {new['split new']}",
    }
    place = old["place"] if name == "removed" else new["place new"]
    return Change(new["record_id"], old["record_id"], place or "", details.get(name, tokens))


def _weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Format the mean loss weight per trained token of both versions."""
    means = (
        (row[f"total_weight{end}"] or 0) / (row[f"num_trained{end}"] or 1)
        for row, end in ((old, ""), (new, " new"))
    )
    return "loss weight {:.4g} -> {:.4g}".format(*means)
