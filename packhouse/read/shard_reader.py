"""Read one shard: bytes in, checked conversations and quarantined rows out.

Nothing is lost: every record of the shard is in exactly one table: validated; quarantined with its
place, reason and bytes; or dropped by `where`, with its place. Memory holds the shard's bytes, its
tables and the rows of one block, or all rows if blocks cannot be parsed separately. `compression`,
`record_boundaries` and `parquet_files` limit how many bytes that can be.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.read.compression import name_row
from packhouse.read.file_formats import file_error
from packhouse.read.json_parsing import MAX_BAD_ROWS, Failure, Records, Rows, gc_paused, unwrapped
from packhouse.read.record_boundaries import OTHER_LIST
from packhouse.read.row_formats import (
    Adapted,
    RowOptions,
    check_same_format,
    read_options,
    row_format_called,
)
from packhouse.read.sharding import SourceShard, read_parts
from packhouse.read.unread_fields import (
    IN_MESSAGES,
    UnreadText,
    UnreadTexts,
    bounded,
    drop_media_marks,
    drop_media_parts,
    find_extra_fields,
    look_at_extra_fields,
)
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.records.arrays import one_chunk, string_bytes
from packhouse.records.message_rules import FlatMessages, role_violations
from packhouse.records.record_ids import GroupBy, conversation_ids, group_keys, pair_ids
from packhouse.records.table_schemas import (
    DROPPED,
    QUARANTINED,
    VALIDATED,
    with_column,
    write_table,
)
from packhouse.registry import function_of_addon

# Original bytes of rows, for the quarantine and for messages.


RAW_BYTES = 64 * 2**10
"""Bytes kept of a bad row."""


def raw_rows(
    shard: SourceShard, rules: ValidateConfig, rows: Sequence[int]
) -> dict[int, tuple[bytes, int | None]]:
    """Read and parse a shard again for the original bytes of some rows.

    Args:
        shard: from `scan_source`.
        rules: as for `read_shard`.
        rows: numbers, in the file, of rows of this shard.

    Returns:
        Row -> its bytes and their offset in the uncompressed file. Rows of Parquet and other
        tables have no bytes: they are written as JSON, with offset None.

    Raises:
        SourceError: the file changed since it was scanned.
    """
    found: dict[int, tuple[bytes, int | None]] = {}
    with gc_paused():
        for part in read_parts(shard, rules) if rows else ():
            end = part.row_start + part.num_records
            inside = [row for row in rows if part.row_start <= row < end]
            numbers = [row - part.row_start for row in inside]
            found |= zip(inside, read_raw(part, numbers), strict=True)
    return found


def with_raw_rows(quarantined: pa.Table, shard: SourceShard, rules: ValidateConfig) -> pa.Table:
    """Add original bytes and offsets to the bad rows that lack them, those of `refused_rows`.

    Templates and tokenizers see conversations, but what a user has to fix is the row. Arguments
    and errors are those of `raw_rows`; all rows belong to this shard.
    """
    lacks_bytes = pc.equal(one_chunk(quarantined["raw_sha256"]), "")
    rows = quarantined["row"].filter(lacks_bytes).to_pylist()
    if not rows:
        return quarantined
    found = raw_rows(shard, rules, rows)
    for name, values in raw_columns([found[row] for row in rows]).items():
        new = pa.array(values, QUARANTINED.field(name).type)
        filled = pc.replace_with_mask(quarantined[name], lacks_bytes, new)
        quarantined = with_column(quarantined, name, filled)
    return quarantined


def raw_columns(found: list[tuple[bytes, int | None]]) -> dict[str, list[object]]:
    """Return the columns of QUARANTINED for whole rows and their offsets."""
    return {
        "byte_offset": [offset for _, offset in found],
        "raw": [raw[:RAW_BYTES] for raw, _ in found],
        "raw_size": [len(raw) for raw, _ in found],
        "raw_sha256": [hashlib.sha256(raw).hexdigest() for raw, _ in found],
    }


def place_of(part: Records, index: int) -> tuple[int, int | None]:
    """Return the number in the file and the byte offset of the row at an index of `rows`."""
    number = int(part.numbers[index])
    ((_, offset),) = read_raw(part, [number])
    return part.row_start + number, offset


def read_raw(part: Records, numbers: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
    """Yield the bytes of records and their offset in the uncompressed file (None without bytes)."""
    if part.spans is not None:
        for start, end in part.spans[list(numbers)].tolist():
            piece = part.data[start:end]
            yield piece.strip(), part.byte_start + start + len(piece) - len(piece.lstrip())
    else:  # rows of Parquet and Arrow have no bytes: they are shown as JSON
        rows = dict(zip(part.numbers.tolist(), part.rows, strict=True)) | part.failed
        for number in numbers:
            row = rows.get(number)
            # Parquet has decimals, bytes and maps with keys other than text, which JSON lacks.
            yield orjson.dumps(row, default=repr, option=orjson.OPT_NON_STR_KEYS), None


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of a shard, good and bad."""

    validated: pa.Table
    """`table_schemas.VALIDATED`, in file order."""
    quarantined: pa.Table
    """`table_schemas.QUARANTINED`, in file order."""
    dropped: pa.Table
    """`table_schemas.DROPPED`: rows that `where` leaves out, in file order."""
    num_records: int
    """Records of the shard, counted by the parser."""
    extra_paths: int
    """Conversations of message trees beyond the first, counted where they are made."""
    extra_fields: dict[str, int]
    """Number of rows that have a field which their format does not read, by field; a field of
    messages is named `messages[].name`."""
    notes: dict[str, int]
    """Counts of things that are not errors: `blank_lines`, `bom`, `truncated_files`,
    `empty_files`, `misnamed_compression`, `bidi_controls` and `media_parts` (rows)."""
    unread_text: dict[str, UnreadText] = field(default_factory=dict)
    """Fields with text that nothing reads and that the source does not ignore."""
    rejected: pa.Table | None = None
    """For pairs, the rejected conversations, in the rows of `validated`, which has the chosen."""

    def write(self, folder: Path, max_rows: int | None = None) -> None:
        """Write `validated.arrow` and, for pairs, `rejected.arrow`."""
        write_table(folder / "validated.arrow", self.validated.slice(0, max_rows))
        if self.rejected is not None:
            write_table(folder / "rejected.arrow", self.rejected.slice(0, max_rows))


def read_shard(
    shard: SourceShard, config: SourceConfig, rules: ValidateConfig, group_by: GroupBy
) -> ShardRows:
    """Read and check the rows of a shard, and give them ids.

    `num_records + extra_paths` equals validated + quarantined + dropped rows. These are independent
    counts, which the ledger compares.

    Args:
        shard: from `scan_source`.
        config: the source it comes from.
        rules: limits and rules for rows.
        group_by: `prompt` or `record`, see `record_ids.group_keys`.

    Returns:
        The tables; equal input gives equal tables, whatever the shard sizes.

    Raises:
        SourceError: the file changed since the scan, mixes formats, or cannot be read.
        TransientError: the storage did not answer.
    """
    reader = _Reader(shard, config, rules, group_by, UnreadTexts(config))
    with gc_paused():
        parts = list(map(reader.read, read_parts(shard, rules)))  # frees each part
    notes, fields = Counter(shard.notes), Counter[str]()
    for part in parts:
        notes.update(part.notes)
        fields.update(part.extra_fields)
    for name in [name for name in notes if name.startswith(OTHER_LIST)]:
        fields[name] = notes.pop(name)
    if notes["truncated_files"]:  # the scan and the parser may both have counted it
        notes["truncated_files"] = 1
    of_messages = {name for name in fields if name.startswith(IN_MESSAGES)}
    of_rows = bounded({name: fields[name] for name in fields.keys() - of_messages})
    inside = bounded({name.removeprefix(IN_MESSAGES): fields[name] for name in of_messages})
    rejected = [part.rejected for part in parts if part.rejected is not None]
    return ShardRows(
        validated=pa.concat_tables([part.validated for part in parts]).combine_chunks(),
        quarantined=pa.concat_tables([part.quarantined for part in parts]).combine_chunks(),
        dropped=pa.concat_tables([part.dropped for part in parts]).combine_chunks(),
        num_records=sum(part.num_records for part in parts),
        extra_paths=sum(part.extra_paths for part in parts),
        extra_fields=of_rows | {IN_MESSAGES + name: count for name, count in inside.items()},
        notes={name: count for name, count in notes.items() if count},
        unread_text=reader.unread_texts.result(),
        rejected=pa.concat_tables(rejected).combine_chunks() if rejected else None,
    )


@dataclass(slots=True)
class _Reader:
    """Turns the records of a shard into tables, part by part."""

    shard: SourceShard
    config: SourceConfig
    rules: ValidateConfig
    group_by: GroupBy
    unread_texts: UnreadTexts
    num_bad: int = 0

    def read(self, records: Records) -> ShardRows:
        """Check the rows of a part and give them ids.

        `records.rows` shrinks from stage to stage. Its other lists shrink with it, so an index is
        valid until the next stage. Failures and dropped rows have record numbers.

        Example: record 1 of [0, 1, 2, 3, 4] is not JSON, `where` drops 3, and 4 has no answer. The
        rows are those of [0, 2, 3, 4], then of [0, 2, 4], which become conversations with the
        origins 0, 1 and 2; the rules keep 0 and 1. Quarantined are [1, 4], dropped [3].
        """
        shard, config = self.shard, self.config
        place = partial(place_of, records)

        def name_row_of(index: int) -> str:
            return name_row(shard.uri, *place(index), shard.encoding)

        # Leave the rows that `where` keeps, in the form that `select` and `media` give them.
        if config.unwrap:
            records.rows = Rows(unwrapped(records.rows))
        for at, bad in enumerate(records.failures if shard.encoding != "utf-8" else ()):
            if bad.reason == "encoding" and bad.detail.startswith("byte "):
                detail = f"bytes of the row are not {shard.encoding}"
                records.failures[at] = bad._replace(detail=detail)
        drops_parts, has_media = config.media == "drop_parts", set[int]()  # numbers of records
        if drops_parts:
            records.rows, places = drop_media_marks(records.rows, config.ignored_fields)
            has_media.update(records.numbers[[*places]].tolist())
        dropped = self._reshape(records) if config.is_reshaped else []
        if drops_parts:
            records.rows, places = drop_media_parts(records.rows)
            has_media.update(records.numbers[[*places]].tolist())
        # Leave the rows that can have a conversation: of the file's format, without media, with
        # valid options.
        row_format = shard.row_format
        if row_format == "auto":  # the file has only bare values, which are rows in no format
            row_format = "text"
            self._check_bad(records, len(records.rows))
        elif config.format == "auto":
            check_same_format(records.rows, name_row_of, row_format, config.fields, shard.uri)
        extra = find_extra_fields(records.rows.layouts, row_format, config)
        known = extra, name_row_of, row_format, config, shard.uri
        extra_fields, media_fields = look_at_extra_fields(records.rows, *known)
        if drops_parts:  # nothing reads these fields
            has_media.update(records.numbers[[*media_fields]].tolist())
            has_media, media_fields = has_media & {*records.numbers.tolist()}, {}
        records.reject(media_fields)
        # Before the conversations, because it rejects rows: `origin` counts the rows that remain.
        options = read_options(records, config)
        self._check_bad(records, len(records.failures))
        # Rows become conversations.
        adapted = row_format_called(row_format).read_all(records.rows, config)
        kept, broken = _apply_rules(adapted, self.rules, row_format)
        failures = records.failures + records.failures_of([*adapted.failures, *broken])
        dropped += records.failures_of(adapted.dropped)
        if config.media == "drop_rows":
            dropped += [failure for failure in failures if failure.reason == "media"]
            failures = [failure for failure in failures if failure.reason != "media"]
        self._check_bad(records, len(failures))
        self.num_bad += len(failures)
        # Conversations become a table; for pairs, chosen and rejected conversations alternate.
        is_paired = row_format == "pairs"
        sides = [kept]
        if is_paired:
            sides = [kept.take(np.arange(side, len(kept.origin), 2)) for side in (0, 1)]
        arguments = options.arguments.take(pa.array(kept.origin))
        unread = adapted.unread_fields
        self.unread_texts.count(records, extra, unread, kept, arguments, place)
        validated = self._validated(records, sides, options.take(sides[0].origin))
        rejected = with_column(validated, "messages", sides[1].messages) if is_paired else None
        return ShardRows(
            validated=validated,
            quarantined=self._refused(records, failures, QUARANTINED),
            dropped=self._refused(records, dropped, DROPPED),
            num_records=records.num_records,
            extra_paths=0 if is_paired else len(adapted.origin) - len(np.unique(adapted.origin)),
            extra_fields=extra_fields | {IN_MESSAGES + name: n for name, n in unread.items()},
            notes=Counter({**records.notes, "media_parts": len(has_media)})
            + Counter(bidi_controls=_bidi_rows(kept.messages), unanswered=adapted.num_unanswered),
            rejected=rejected,
        )

    def _reshape(self, records: Records) -> list[Failure]:
        """Apply `where` and `select` to the rows; return those that `where` leaves out."""
        reshape = function_of_addon("reshape")
        reshaped = reshape(records.rows, self.config, self.shard.columns or {})
        self._check_bad(records, len(records.failures) + len(reshaped.failures))
        if records.spans is None:  # no bytes to show later, so keep the rows before `select`
            records.failed |= dict(zip(records.numbers.tolist(), records.rows, strict=True))
        records.failures += records.failures_of(reshaped.failures)
        dropped = records.failures_of((n, "filtered", text) for n, text in reshaped.filtered)
        if self.config.select:
            records.originals = list(map(records.rows.__getitem__, reshaped.places))
        records.rows, records.numbers = reshaped.rows, records.numbers[reshaped.places]
        return dropped

    def _validated(self, records: Records, sides: list[Adapted], options: RowOptions) -> pa.Table:
        """Return the table of conversations; for pairs the chosen ones, with ids of both sides."""
        kept = sides[0]
        tools = pc.coalesce(kept.tools, options.tools)
        given = (options.arguments, options.weights)
        name = partial(conversation_ids, label_names=self.config.label_names)
        names = [name(side.messages, tools, side.labels, *given) for side in sides]
        ids = pair_ids(*names) if len(names) == 2 else names[0]
        groups = group_keys(kept.messages, ids, self.group_by)
        rows = pa.array(records.row_start + records.numbers[kept.origin], pa.int64())
        codes = pa.array(np.zeros(len(rows), np.int32))
        source = pa.DictionaryArray.from_arrays(codes, pa.array([self.shard.file]))
        columns = [ids, source, rows, kept.messages, tools, *given, kept.labels, groups]
        return pa.Table.from_arrays(columns, schema=VALIDATED)

    def _refused(self, records: Records, failures: list[Failure], schema: pa.Schema) -> pa.Table:
        """Return the table of quarantined or dropped records, in file order."""
        # Parser, expressions and rules add failures in turn. Equal input must give equal tables.
        failures = sorted(failures)
        numbers, reasons, details = zip(*failures, strict=True) if failures else ((), (), ())
        columns: dict[str, Sequence[object]] = {
            "source": [self.shard.file] * len(failures),
            "row": [records.row_start + number for number in numbers],
            "reason": reasons,
            "detail": details,
        }
        if schema is QUARANTINED:
            columns["step"] = ["validate"] * len(failures)
            columns |= raw_columns(list(read_raw(records, numbers)) if failures else [])
        return pa.table({name: columns[name] for name in schema.names}, schema=schema)

    def _check_bad(self, records: Records, number: int) -> None:
        """Refuse a shard with too many bad rows, before they fill memory."""
        if self.num_bad + number > MAX_BAD_ROWS:
            shown = ""
            for first in records.failures[:1]:  # an open quote makes all rows after it bad
                ((_, offset),) = read_raw(records, [first.number])
                row = records.row_start + first.number
                place = name_row(self.shard.uri, row, offset, self.shard.encoding)
                shown = f"; the first is {place}: {first.detail}"
            raise file_error(
                self.shard.uri,
                f" has more than {MAX_BAD_ROWS:,} bad rows, counted from row "
                f"{records.row_start:,}{shown}. Check that it is the right file, and that format "
                "and file_format are right",
                max_bad_rows=MAX_BAD_ROWS,
            )


def _apply_rules(
    adapted: Adapted, rules: ValidateConfig, row_format: str
) -> tuple[Adapted, list[tuple[int, str, str]]]:
    """Remove conversations that break the rules; each path of a tree is checked separately.

    A pair is removed as a whole, with the reason of its first bad conversation.
    """
    violations = role_violations(
        adapted.messages,
        allow_ends_on_user=rules.allow_ends_on_user,
        refused_orders=rules.refused_orders,
        answers=row_format_called(row_format).answers,
        max_chars=rules.max_chars,
    )
    if not violations:
        return adapted, []
    good = np.ones(len(adapted.origin), np.bool_)
    good[list(violations)] = False
    bad = [(int(adapted.origin[place]), *why) for place, why in sorted(violations.items())]
    if row_format == "pairs":
        # Sides [good, bad, good, good] of two pairs: only the second pair is kept, as a whole.
        good = np.repeat(good.reshape(-1, 2).all(axis=1), 2)
        bad = list({why[0]: why for why in reversed(bad)}.values())
    return adapted.take(np.flatnonzero(good)), bad


def _bidi_rows(messages: pa.Array) -> int:
    """Count rows whose contents have a bidirectional control (U+202A-202E, U+2066-2069)."""
    flat = FlatMessages.of(messages)
    # All contents are in one buffer, so search it once for E2 80 AA-AE and E2 81 A6-A9, and find
    # the content of each match by the ends of the contents.
    raw, offsets = string_bytes(flat.content)
    lead = np.flatnonzero(raw[:-2] == 0xE2)
    second, third = raw[lead + 1], raw[lead + 2]
    marks = (second == 0x80) & (third >= 0xAA) & (third <= 0xAE)
    marks |= (second == 0x81) & (third >= 0xA6) & (third <= 0xA9)
    touched = np.searchsorted(offsets[1:], lead[marks], side="right")
    return len(np.unique(flat.rows[touched]))
