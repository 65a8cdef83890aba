"""Read one shard: bytes in, checked conversations and quarantined rows out.

Nothing is lost: every record of the shard is in exactly one of the tables: validated; quarantined,
with its place, its reason and its bytes; or dropped by `where`, with its place. Memory is the
shard's bytes and its tables, and the rows of one block; of the whole shard only where blocks cannot
be judged by themselves. What those bytes may come to is limited in `streams`, `text_files` and
`tabular`.
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

from packhouse.errors import SourceError
from packhouse.read.extra_fields import (
    IN_MESSAGES,
    UnreadText,
    UnreadTexts,
    bounded,
    check_labels,
    drop_media_parts,
    find_extra_fields,
    look_at_extra_fields,
)
from packhouse.read.records import MAX_BAD_ROWS, Failure, Rows, gc_paused, unwrapped
from packhouse.read.row_formats import (
    Adapted,
    RowOptions,
    adapt,
    check_same_format,
    read_options,
    row_format_called,
)
from packhouse.read.shards import Part, SourceShard, for_parts
from packhouse.read.streams import name_row
from packhouse.read.where_select import reshape
from packhouse.recipe import SourceConfig, ValidateConfig
from packhouse.records.identity import GroupBy, conversation_ids, group_keys, pair_ids
from packhouse.records.messages import role_violations
from packhouse.records.tables import DROPPED, QUARANTINED, VALIDATED, write_table

# The bytes of rows as they stand in their file: for the quarantine and for messages.


RAW_BYTES = 64 * 2**10
"""Bytes of a bad row that are kept."""


def raw_rows(
    shard: SourceShard, rules: ValidateConfig, rows: Sequence[int]
) -> dict[int, tuple[bytes, int | None]]:
    """Read and parse a shard again for the bytes of some rows, as they stand in its file.

    Args:
        shard: from `scan_source`.
        rules: as for `read_shard`.
        rows: numbers in the file, of rows of this shard.

    Returns:
        Row -> its bytes, and where they begin in the uncompressed file. Rows of Parquet and other
        tables have no bytes: they are JSON, which begins nowhere (None).

    Raises:
        SourceError: the file changed since it was scanned.
    """

    def find(part: Part) -> dict[int, tuple[bytes, int | None]]:
        first = part.row_start
        inside = [row for row in rows if first <= row < first + part.records.num_records]
        return dict(zip(inside, read_raw(part, [row - first for row in inside]), strict=True))

    found: dict[int, tuple[bytes, int | None]] = {}
    with gc_paused():
        for of_part in for_parts(shard, rules, find) if rows else []:
            found |= of_part
    return found


def with_raw_rows(quarantined: pa.Table, shard: SourceShard, rules: ValidateConfig) -> pa.Table:
    """Put each row's bytes and place, as they stand in its file, into a table of bad rows.

    For bad rows of later steps, which see conversations: what is to be mended is the row. Arguments
    and errors are those of `raw_rows`; all rows are of this shard.
    """
    rows = quarantined["row"].to_pylist()
    found = raw_rows(shard, rules, rows)
    for name, values in raw_columns([found[row] for row in rows]).items():
        field = QUARANTINED.field(name)
        place = QUARANTINED.get_field_index(name)
        quarantined = quarantined.set_column(place, field, pa.array(values, field.type))
    return quarantined


def raw_columns(found: list[tuple[bytes, int | None]]) -> dict[str, list[object]]:
    """Columns of QUARANTINED with the bytes of rows, given whole, and their places."""
    return {
        "byte_offset": [offset for _, offset in found],
        "raw": [raw[:RAW_BYTES] for raw, _ in found],
        "raw_size": [len(raw) for raw, _ in found],
        "raw_sha256": [hashlib.sha256(raw).hexdigest() for raw, _ in found],
    }


def name_row_of(part: Part, index: int) -> str:
    """Name of a good row for messages."""
    return name_row(part.shard.uri, *_place_of(part, index), part.shard.encoding)


def _place_of(part: Part, index: int) -> tuple[int, int | None]:
    """Number of a good row in its file, and where it begins in the uncompressed file."""
    number = int(part.records.numbers[index])
    ((_, offset),) = read_raw(part, [number])
    return part.row_start + number, offset


def read_raw(part: Part, numbers: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
    """Bytes of records, and where they begin in the uncompressed file (None: nowhere)."""
    records = part.records
    if records.spans is not None:
        for start, end in records.spans[list(numbers)].tolist():
            piece = part.data[start:end]
            yield piece.strip(), part.byte_start + start + len(piece) - len(piece.lstrip())
    else:  # rows of Parquet and Arrow have no bytes of their own: they are shown as JSON
        rows = dict(zip(records.numbers.tolist(), records.rows, strict=True)) | records.failed
        for number in numbers:
            row = rows.get(number)
            yield orjson.dumps(row, default=repr, option=orjson.OPT_NON_STR_KEYS), None


@dataclass(frozen=True, slots=True)
class ShardRows:
    """The rows of a shard, good and bad."""

    validated: pa.Table
    """`tables.VALIDATED`, in the file's order."""
    quarantined: pa.Table
    """`tables.QUARANTINED`, in the file's order."""
    dropped: pa.Table
    """`tables.DROPPED`: rows that `where` leaves out, in the file's order."""
    num_records: int
    """Records that the shard holds, counted where they were parsed."""
    extra_paths: int
    """Conversations beyond the first of a message tree, counted where they were made."""
    extra_fields: dict[str, int]
    """Rows by name of a field that they have beyond their format; `messages[].name` where it is
    their messages that have it."""
    notes: dict[str, int]
    """Counts of what is no error: `blank_lines`, `bom`, `truncated_files`, `empty_files`,
    `misnamed_compression`, `bidi_controls` and `media_parts` (rows)."""
    unread_text: dict[str, UnreadText] = field(default_factory=dict)
    """Fields with text that nobody reads and that the source does not ignore."""
    rejected: pa.Table | None = None
    """Of pairs, the rejected sides, row by row as `validated` has the chosen ones; else None."""

    def write(self, folder: Path, max_rows: int | None = None) -> None:
        """Write `validated.arrow` and, of pairs, `rejected.arrow`."""
        write_table(folder / "validated.arrow", self.validated.slice(0, max_rows))
        if self.rejected is not None:
            write_table(folder / "rejected.arrow", self.rejected.slice(0, max_rows))


def read_shard(
    shard: SourceShard, config: SourceConfig, rules: ValidateConfig, group_by: GroupBy
) -> ShardRows:
    """Read, check and name the rows of a shard.

    `num_records + extra_paths` = validated rows + quarantined rows + dropped rows: independent
    counts, which the ledger holds against each other.

    Args:
        shard: from `scan_source`.
        config: the source it comes from.
        rules: what makes a row bad.
        group_by: `prompt` or `record`, see `messages.group_keys`.

    Returns:
        The tables; equal input gives equal tables, whatever the shard sizes.

    Raises:
        SourceError: the file changed since the scan, mixes shapes, or cannot be read.
        TransientError: the storage did not answer.
    """
    reader = _Reader(config, rules, group_by)
    with gc_paused():
        parts = for_parts(shard, rules, reader.read)
    notes, fields = Counter(shard.notes), Counter[str]()
    for part in parts:
        notes.update(part.notes)
        fields.update(part.extra_fields)
    if notes["truncated_files"]:  # scan and parse may both have seen it
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
    """Makes tables of the records of a shard, part by part."""

    config: SourceConfig
    rules: ValidateConfig
    group_by: GroupBy
    num_bad: int = 0
    unread_texts: UnreadTexts = field(init=False)

    def __post_init__(self) -> None:
        self.unread_texts = UnreadTexts(self.config)

    def read(self, part: Part) -> ShardRows:
        """Check and name the rows of a part.

        Records 0 to 4; 1 is no JSON, `where` drops 3, 4 has no answer: rows of [0, 2, 3, 4] ->
        [0, 2, 4] -> conversations of [0, 2]; quarantined [1, 4], dropped [3].
        """
        shard, records, config = part.shard, part.records, self.config
        if part.row_start == shard.row_start:  # the shard is read, or read again as one part
            self.num_bad, self.unread_texts = 0, UnreadTexts(config)
        if config.unwrap:
            records.rows = Rows(unwrapped(records.rows))
        if shard.encoding != "utf-8":
            records.failures = [
                failure._replace(detail=f"bytes of the row are not {shard.encoding}")
                if failure.reason == "encoding" and failure.detail.startswith("byte ")
                else failure
                for failure in records.failures
            ]
        dropped: list[Failure] = []
        given: list[dict[str, object]] | None = None
        if config.is_reshaped:
            reshaped = reshape(records.rows, config, shard.columns or {})
            self._check_bad(
                shard.uri, part.row_start, len(records.failures) + len(reshaped.failures)
            )
            if records.spans is None:  # rows of Parquet have no bytes: they are shown as they were
                records.failed |= dict(zip(records.numbers.tolist(), records.rows, strict=True))
            records.failures += records.failures_of(reshaped.failures)
            dropped = records.failures_of((n, "filtered", text) for n, text in reshaped.filtered)
            if config.select:
                given = list(map(records.rows.__getitem__, reshaped.places))
            records.rows, records.numbers = reshaped.rows, records.numbers[reshaped.places]
        has_media: set[int] = set()
        if config.media == "drop_parts":
            records.rows, has_media = drop_media_parts(records.rows)
        # The format, and fields that it does not read.
        row_format = shard.row_format
        name_of = partial(name_row_of, part)
        if row_format == "auto":  # the file has only bare values, which no format takes for a row
            row_format = "text"
            self._check_bad(shard.uri, part.row_start, len(records.rows))
        elif config.format == "auto":
            check_same_format(records.rows, name_of, row_format, config.fields, shard.uri)
        extra = find_extra_fields(records.rows.layouts, row_format, config)
        check_labels(records.rows, name_of, extra, row_format, config, shard.uri)
        extra_fields, media_fields = look_at_extra_fields(records.rows, extra, config)
        if config.media == "drop_parts":  # nobody reads these fields
            has_media, media_fields = has_media | media_fields.keys(), {}
        options = read_options(records.rows, config)
        unfit = options.failures | media_fields
        if unfit:
            records.failures += records.failures_of((i, *why) for i, why in unfit.items())
            records.failed |= {int(records.numbers[i]): records.rows[i] for i in unfit}
            fit = [i for i in range(len(records.rows)) if i not in unfit]
            records.keep(fit)
            options = options.take(fit)
            given = given and [given[i] for i in fit]
        self._check_bad(shard.uri, part.row_start, len(records.failures))
        # Rows become conversations, and these a table.
        adapted = adapt(records.rows, row_format, config)
        kept, bad = _apply_rules(adapted, self.rules, row_format)
        failures = records.failures + records.failures_of([*adapted.failures, *bad])
        dropped += records.failures_of(adapted.dropped)
        if config.media == "drop_rows":
            dropped += [failure for failure in failures if failure.reason == "media"]
            failures = [failure for failure in failures if failure.reason != "media"]
        self._check_bad(shard.uri, part.row_start, len(failures))
        self.num_bad += len(failures)
        is_paired = row_format == "pairs"
        sides = [kept]  # of pairs, chosen and rejected conversations by turns
        if is_paired:
            sides = [kept.take(np.arange(side, len(kept.origin), 2)) for side in (0, 1)]
        if row_format != "tokenized":  # ids say all that a row teaches
            arguments = options.arguments.take(pa.array(kept.origin))
            unread = adapted.unread_fields
            self.unread_texts.count(
                records.rows, given, extra, unread, kept, arguments, partial(_place_of, part)
            )
        options = options.take(sides[0].origin)
        validated = self._validated(part, sides, options)
        rejected = None
        if is_paired:
            place, column = VALIDATED.get_field_index("messages"), VALIDATED.field("messages")
            rejected = validated.set_column(place, column, sides[1].messages)
        return ShardRows(
            validated=validated,
            quarantined=_refused(part, failures, QUARANTINED),
            dropped=_refused(part, dropped, DROPPED),
            num_records=records.num_records,
            extra_paths=0 if is_paired else len(adapted.origin) - len(np.unique(adapted.origin)),
            extra_fields=extra_fields
            | {IN_MESSAGES + name: rows for name, rows in adapted.unread_fields.items()},
            notes=Counter(records.notes)
            + Counter(bidi_controls=_bidi_rows(kept.messages), unanswered=adapted.num_unanswered)
            + Counter(media_parts=len(has_media)),
            rejected=rejected,
        )

    def _validated(self, part: Part, sides: list[Adapted], options: RowOptions) -> pa.Table:
        """The conversations; of pairs the chosen ones, called by the contents of both sides."""
        kept = sides[0]
        tools = pc.coalesce(kept.tools, options.tools)
        given = (options.arguments, options.weights)
        classes = self.config.label_names
        names = [
            conversation_ids(side.messages, tools, side.labels, *given, label_names=classes)
            for side in sides
        ]
        ids = pair_ids(*names) if len(names) == 2 else names[0]
        groups = group_keys(kept.messages, ids, self.group_by)
        rows = pa.array(part.records.numbers[kept.origin] + part.row_start, pa.int64())
        source = pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(len(rows), np.int32)), pa.array([part.shard.file])
        )
        columns = [ids, source, rows, kept.messages, tools, *given, kept.labels, groups]
        return pa.Table.from_arrays(columns, schema=VALIDATED)

    def _check_bad(self, uri: str, row: int, number: int) -> None:
        """Refuse a shard with too many bad rows, before they fill memory."""
        if self.num_bad + number > MAX_BAD_ROWS:
            raise SourceError(
                f"source file '{uri}': more than {MAX_BAD_ROWS:,} rows from row "
                f"{row:,} on are bad; is it the right file, and are its format and "
                "file_format right?",
                uri=uri,
                max_bad_rows=MAX_BAD_ROWS,
            )


def _apply_rules(
    adapted: Adapted, rules: ValidateConfig, row_format: str
) -> tuple[Adapted, list[tuple[int, str, str]]]:
    """Take out conversations that break the rules; each path of a tree stands for itself.

    A pair goes whole, for what is wrong with its first bad side.
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
        good = np.repeat(good.reshape(-1, 2).all(axis=1), 2)
        bad = list({why[0]: why for why in reversed(bad)}.values())
    return adapted.take(np.flatnonzero(good)), bad


def _refused(part: Part, failures: list[Failure], schema: pa.Schema) -> pa.Table:
    """The table of records that are quarantined, or dropped, in the file's order."""
    failures = sorted(failures)
    numbers, reasons, details = zip(*failures, strict=True) if failures else ((), (), ())
    columns: dict[str, Sequence[object]] = {
        "source": [part.shard.file] * len(failures),
        "row": [part.row_start + number for number in numbers],
        "reason": reasons,
        "detail": details,
    }
    if schema is QUARANTINED:
        columns["step"] = ["validate"] * len(failures)
        columns |= raw_columns(list(read_raw(part, numbers)) if failures else [])
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _bidi_rows(messages: pa.Array) -> int:
    """Rows whose contents hold a bidirectional control (U+202A-202E, U+2066-2069)."""
    content = messages.flatten().field("content")
    # All contents lie behind one another, so three bytes are looked for in one array of bytes,
    # E2 80 AA to AE or E2 81 A6 to A9, and the ends of contents say whose they are.
    data = content.buffers()[2]
    if data is None:
        return 0
    raw = np.frombuffer(data, np.uint8)
    lead = np.flatnonzero(raw[:-2] == 0xE2) if len(raw) > 2 else np.zeros(0, np.int64)
    second, third = raw[lead + 1], raw[lead + 2]
    marks = (second == 0x80) & (third >= 0xAA) & (third <= 0xAE)
    marks |= (second == 0x81) & (third >= 0xA6) & (third <= 0xA9)
    if not marks.any():
        return 0
    text_ends = np.frombuffer(content.buffers()[1], np.int32)[content.offset + 1 :][: len(content)]
    touched = np.unique(np.searchsorted(text_ends, lead[marks], side="right"))
    rows = np.searchsorted(np.asarray(messages.offsets)[1:], touched, side="right")
    return len(np.unique(rows))
