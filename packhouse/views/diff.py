"""Compare two versions: settings, counts, schema, and record by record, tokens and masks.

A record is known by its id (a hash of its content), wherever packing put it. The tokens and the
mask of one copy are hashed apart, so a changed template (tokens differ) is told from a changed
rule of what is trained (only masks differ), from changed loss weights and from another number of
copies. A row whose content
changed has another id: of ids that only one version has, those of one row are pairs, `edited`.
It is a join of the views `contents` and `records` of both; their data files are read once.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ContractError
from packhouse.store.manifest import Manifest
from packhouse.store.read import OpenVersion
from packhouse.system.wording import counted
from packhouse.views.contents import CONTENTS
from packhouse.views.locating import sum_before
from packhouse.views.query import read_view

_MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Change:
    """A record that differs."""

    record_id: str
    """In the new version, or in the old one where it was removed."""
    old_id: str
    """In the old version, or in the new one where it was added; another one where edited."""
    place: str
    """File and row, `faq.jsonl row 7`; empty where the version does not say."""
    detail: str
    """What changed: `100 -> 108 tokens`, `loss weight 0.5 -> 1`, `1 -> 2 copies`, `train -> eval`,
    `now duplicate`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordDiff:
    """How many records differ in which way, and a few ids of each."""

    num_added: int
    num_removed: int
    num_edited: int
    """Rows whose content changed: the same place, another record."""
    num_changed_tokens: int
    """In both versions, with other tokens."""
    num_changed_masks: int
    """In both versions, with the same tokens and another mask."""
    num_changed_weights: int
    """In both versions, with the same tokens and mask and other loss weights."""
    num_copies: int
    """In both versions, more or less often."""
    num_moved: int
    """In both versions, on another side (train or eval)."""
    num_same: int
    """In both versions, with none of these."""
    examples: Mapping[str, list[Change]]
    """By `added`, `removed`, `edited`, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """Everything in which two versions differ."""

    old: str
    new: str
    is_same_content: bool
    configuration: Mapping[str, list[Any]]
    """Key, e.g. `pack.seq_len`, to [old, new]; a missing side is None."""
    counts: Mapping[str, list[Any]]
    lineage: Mapping[str, list[Any]]
    engines: Mapping[str, list[Any]]
    libraries: Mapping[str, list[Any]]
    schema: Mapping[str, list[Any]]
    """Column to [old, new] type."""
    totals: Mapping[str, list[int]]
    """Rows and tokens of each split, as [old, new]."""
    records: RecordDiff | None
    """None if the rows were not read, or hold no record ids."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def diff_versions(old: OpenVersion, new: OpenVersion, *, records: bool = True) -> Diff:
    """Compare two versions; with `records`, read the data files of both.

    Raises:
        IntegrityError: a data file is damaged.
    """
    left, right = old.manifest, new.manifest
    before, after = _totals(old), _totals(new)
    same = bool(left.content_id) and left.content_id == right.content_id
    return Diff(
        old=old.version,
        new=new.version,
        is_same_content=same,
        configuration=changed_settings(left.configuration, right.configuration),
        counts=changed_keys(_by_step(left.counts), _by_step(right.counts)),
        lineage=changed_keys(_by_file(left.lineage), _by_file(right.lineage)),
        engines=changed_keys(left.engines, right.engines),
        libraries=changed_keys(left.libraries, right.libraries),
        schema=changed_keys(_columns(left), _columns(right)),
        totals={key: [before[key], after[key]] for key in sorted({*before, *after})},
        records=_diff_records(old, new) if records else None,
    )


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Dotted keys of a configuration whose values differ; one that is in neither is no change.

    Example:
        >>> changed_settings({"pack": {"seq_len": 8}}, {"mix": {"chats.weight": 2.0}})
        {'mix.chats.weight': [None, 2.0], 'pack': [{'seq_len': 8}, None]}
    """
    empty: dict[str, Any] = {"mix": {}, "audit": {}}
    return changed_keys(empty | {**old}, empty | {**new})


def changed_keys(old: Any, new: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Dotted keys whose values differ, with both values.

    Texts of lists that are as long as one another are compared one by one, other lists whole.

    Example:
        >>> old = {"pack": {"seq_len": 8, "seed": 0}, "where": ["a > 2", "b"], "lengths": [5, 7]}
        >>> new = {"pack": {"seq_len": 16, "seed": 0}, "where": ["a > 3", "b"], "lengths": [5, 8]}
        >>> changed_keys(old, new)
        {'pack.seq_len': [8, 16], 'where.0': ['a > 2', 'a > 3'], 'lengths': [[5, 7], [5, 8]]}
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if all(isinstance(value, str) for value in (*old, *new)):
            old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changed: dict[str, list[Any]] = {}
        for key in dict.fromkeys([*old, *new]):
            changed |= changed_keys(old.get(key), new.get(key), f"{prefix}.{key}".lstrip("."))
        return changed
    return {} if old == new else {prefix: [old, new]}


def _by_step(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Counts with the ledger's lines by their step, so that a changed number is named alone."""
    if "ledger" not in counts:
        return dict(counts)
    ledger = {
        line.get("step", ""): {name: value for name, value in line.items() if name != "step"}
        for line in counts["ledger"]
    }
    return {**counts, "ledger": ledger}


def _by_file(lineage: Mapping[str, Any]) -> dict[str, Any]:
    """Lineage with its sources by file and first row, so that a changed setting is named alone."""
    sources = {}
    for entry in lineage.get("sources", ()):
        start = f" from row {entry['row_start']}" if entry.get("row_start") else ""
        sources[f"{entry.get('file', '')}{start}"] = entry
    return {**lineage, "sources": sources}


def _diff_records(old: OpenVersion, new: OpenVersion) -> RecordDiff | None:
    try:
        read = [_records(version) for version in (old, new)]
        before, after = (_contents(*each) for each in zip((old, new), read, strict=True))
    except ContractError:
        return None
    both = before.join(after, "record_id", join_type="full outer", right_suffix=" new")
    both = both.sort_by("record_id")
    is_old, is_new = both["copies"].is_valid(), both["copies new"].is_valid()
    is_other = {  # false where one of the versions has no such record
        name: pc.fill_null(pc.not_equal(both[name], both[f"{name} new"]), False)
        for name in ("ids_digest", "mask_digest", "weights_digest", "copies", "split")
    }
    added, removed = pc.and_not(is_new, is_old), pc.and_not(is_old, is_new)
    # A row of a duplicate is no pair: its content is there in both versions.
    unknown = both.filter(pc.and_(added, both["place"].is_null()))
    gone = both.filter(pc.and_(removed, both["place new"].is_null()))
    olds, news = _numbered(gone, ""), _numbered(unknown, " new")
    edited = [(new_id, olds[key]) for key, new_id in news.items() if key in olds]
    paired = pa.array([name for pair in edited for name in pair], pa.string())
    is_alone = pc.invert(pc.is_in(both["record_id"], paired))
    groups = {
        "added": both.filter(pc.and_(added, is_alone)),
        "removed": both.filter(pc.and_(removed, is_alone)),
        "changed_tokens": both.filter(is_other["ids_digest"]),
        "changed_masks": both.filter(
            pc.and_not(is_other["mask_digest"], is_other["ids_digest"]),
        ),
        "changed_weights": both.filter(
            pc.and_not(
                is_other["weights_digest"], pc.or_(is_other["ids_digest"], is_other["mask_digest"])
            ),
        ),
        "copies": both.filter(is_other["copies"]),
        "moved": both.filter(is_other["split"]),
    }
    shown = {name: rows.slice(0, _MAX_EXAMPLES).to_pylist() for name, rows in groups.items()}
    _set_outcomes(old, "outcome", shown["added"], *read)
    _set_outcomes(new, "outcome new", shown["removed"], *read[::-1])
    examples = {
        name: [_change(name, row, row) for row in rows] for name, rows in shown.items() if rows
    }
    if edited:
        named = pa.array([name for pair in edited[:_MAX_EXAMPLES] for name in pair])
        found = both.filter(pc.is_in(both["record_id"], named)).to_pylist()
        rows = {row["record_id"]: row for row in found}
        pairs = ((rows[old_id], rows[new_id]) for new_id, old_id in edited[:_MAX_EXAMPLES])
        examples["edited"] = [_change("edited", *pair) for pair in pairs]
    same = pc.and_not(pc.and_(is_old, is_new), reduce(pc.or_, is_other.values()))
    return RecordDiff(
        **{f"num_{name}": rows.num_rows for name, rows in groups.items()},
        num_edited=len(edited),
        num_same=pc.sum(same).as_py() or 0,
        examples=examples,
    )


def _records(opened: OpenVersion) -> pa.Table:
    """Return each record of the sources: its id, place, number in its row, and outcome."""
    read = read_view(opened, "records", ("record_id", "source", "row", "outcome"))
    record_id, source, row, outcome = (read[name].cast(pa.string()) for name in read.column_names)
    place = pc.binary_join_element_wise(source, "row", row, " ").combine_chunks()
    # Places a b b: numbers 0, 0, 1.
    codes = place.dictionary_encode().indices.to_numpy().astype(np.int64)
    number = sum_before(codes, np.ones_like(codes))
    names = ["record_id", "place", "number", "outcome"]
    return pa.table([record_id, place, pa.array(number), outcome], names)


def _contents(opened: OpenVersion, rows: pa.Table) -> pa.Table:
    """Join what the packs hold of each record with its first row and what became of that row.

    Columns of packs are null for a record that is in none, those of rows for one that has none.
    """
    contents = read_view(opened, "contents", CONTENTS.names)
    rows = rows.append_column("is_late", pc.not_equal(rows["outcome"], "kept"))
    rows = rows.sort_by("is_late")  # a kept row first; stable
    firsts = [(name, "first") for name in ("place", "number", "outcome")]
    found = rows.group_by("record_id", use_threads=False).aggregate(firsts)
    found = found.rename_columns([name.removesuffix("_first") for name in found.column_names])
    return contents.join(found, "record_id", join_type="full outer")


def _numbered(changed: pa.Table, end: str) -> dict[tuple[str, int], str]:
    """Ids of records by place and number, so that those of a row are paired in their order.

    Of a row's windows a b c and a x c, b is paired with x: a and c are no changed records.
    """
    by_place: Counter[str] = Counter()
    found = {}
    for row in changed.sort_by(f"number{end}").to_pylist():
        if place := row[f"place{end}"]:
            found[place, by_place[place]] = row["record_id"]
            by_place[place] += 1
    return found


def _set_outcomes(
    opened: OpenVersion, name: str, records: list[dict[str, Any]], rows: pa.Table, others: pa.Table
) -> None:
    """Say of examples that are no records of a version why.

    Args:
        opened: the version.
        name: of the column that says it.
        records: examples; all of the other version.
        rows: of the version.
        others: rows of the other one.
    """
    wanted = {row["place"] or row["place new"] for row in records if not row[name]} - {None}
    chosen = pa.array([*wanted], pa.string())
    num_records, num_others = (
        Counter(each["place"].filter(pc.is_in(each["place"], chosen)).to_pylist())
        for each in (rows, others)
    )
    said = {
        place: "split to fewer records" if number < num_others[place] else "equal to another record"
        for place, number in num_records.items()
    }
    for view in ("dropped", "quarantine") if wanted else ():
        left = read_view(opened, view, ("source", "row", "reason", "detail"))
        row = pc.cast(left["row"], pa.string())
        place = pc.binary_join_element_wise(left["source"].cast(pa.string()), "row", row, " ")
        found = left.append_column("place", place)
        for each in found.filter(pc.is_in(place, chosen)).to_pylist():
            said[each["place"]] = f"{each['reason']}: {each['detail']}".removesuffix(": ")
    for row in records:
        row[name] = row[name] or said.get(row["place"] or row["place new"])


def _change(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Change:
    """Say how a record differs, from its row of both versions; or from two rows, where edited."""
    told = []  # of a row that was edited, and has as many tokens as before
    if name == "edited" and old["num_tokens"] == new["num_tokens new"]:
        if old["label"] != new["label new"]:
            told.append(f"label {old['label']} -> {new['label new']}")
        if old["weights_digest"] != new["weights_digest new"]:
            told.append(_weights(old, new))
        is_trained_otherwise = old["mask_digest"] != new["mask_digest new"]
        if old["ids_digest"] == new["ids_digest new"] and is_trained_otherwise:
            told.append(f"{old['num_trained']} -> {new['num_trained new']} trained")
        if not told:
            told.append(f"other text of {counted(old['num_tokens'], 'token')}")
    tokens = f"{old['num_tokens']} -> {counted(new['num_tokens new'] or 0, 'token')}"
    said = {
        "added": f"was {old['outcome']}" if old["outcome"] else "",
        "removed": f"now {new['outcome new']}" if new["outcome new"] else "not in the sources",
        "edited": ", ".join(told) or tokens,
        "changed_masks": f"{old['num_trained']} -> {new['num_trained new']} trained",
        "changed_weights": _weights(old, new),
        "copies": f"{old['copies']} -> {counted(new['copies new'] or 0, 'copy')}",
        "moved": f"{old['split']} -> {new['split new']}",
    }
    place = old["place"] if name == "removed" else new["place new"]
    return Change(new["record_id"], old["record_id"], place or "", said.get(name, tokens))


def _weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Mean loss weights of the trained tokens of both."""
    means = (
        (row[f"total_weight{end}"] or 0) / (row[f"num_trained{end}"] or 1)
        for row, end in ((old, ""), (new, " new"))
    )
    return "loss weight {:.4g} -> {:.4g}".format(*means)


def _columns(manifest: Manifest) -> dict[str, str]:
    fields = manifest.schema.get("fields", ())
    return {f["name"]: f["type"] + ("" if f["nullable"] else " not null") for f in fields}


def _totals(opened: OpenVersion) -> Counter[str]:
    """Rows and tokens of each split, e.g. {"train.rows": 3, "train.tokens": 4096}."""
    totals: Counter[str] = Counter()
    for entry in opened.files():
        totals[f"{entry.split}.rows"] += entry.rows
        totals[f"{entry.split}.tokens"] += entry.tokens
    return totals
