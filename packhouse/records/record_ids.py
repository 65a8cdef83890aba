"""Compute ids of conversations from their content, and keys of groups that a split keeps together.

The messages of a shard are in one flat buffer, so an id is one sha256 over a slice of it: 52,002
Alpaca rows take about 0.1 s. Ids and keys are 20 hex digits; `leading_bits` and the functions after
it compare them as numbers.

Most rows make one record, but `format.turns` and `pack.over_length: window` may split a
conversation into several, and a message tree makes one per path. `weight`, `max_records`,
`eval_count` and deduplication treat all records of a row as one, so a mixture does not change with
the template. Conversations that merely share a line of the file, such as the questions of a SQuAD
article, have different prompts (and so groups) and count as separate rows.

If a template rewrites history (`packhouse.render.trained_answers`), a record holds the beginning of
its row; a row that is too long for a pack is cut into windows. `derive` makes such conversations
and computes their ids from the messages that they have.
"""

import hashlib
import struct
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.recipe.sections import is_chat
from packhouse.records.arrays import (
    Bools,
    Bytes,
    Float32s,
    Int64s,
    Objects,
    Uint64s,
    one_chunk,
    string_bytes,
)
from packhouse.records.message_rules import ASSISTANT, TEXT_FIELDS, UNKNOWN, USER, FlatMessages
from packhouse.records.table_schemas import VALIDATED

GroupBy = Literal["prompt", "record"]

# Numbers that no message begins with, since it begins with its role, 0 to 3. They never change.
_TOOLS_TAG, _LABEL_TAG, _ARGUMENTS_TAG, _WEIGHT_TAG, _LABEL_NAME_TAG, _THOUGHT_TAG = range(100, 106)


def conversation_ids(
    messages: pa.Array,
    tools: pa.Array,
    labels: pa.Array,
    arguments: pa.Array | None = None,
    weights: pa.Array | None = None,
    *,
    label_names: Sequence[str] | None = None,
    awaits_thought: pa.Array | None = None,
) -> pa.Array:
    """Return an id for each conversation: the first 20 hex digits of a sha256 of its content.

    Equal conversations have equal ids, regardless of file, shard and order. The hashed bytes are
    unambiguous: for each message, its role, the byte length of each text field (-1: null) and its
    weight, followed by the texts; then the row's other values, each with its own tag.

    Args:
        messages: array of `list<MESSAGE>`, roles in `ROLES`.
        tools: canonical JSON text or null per conversation.
        labels: class index or null per conversation.
        arguments: canonical JSON text or null per conversation; None: no row has any.
        weights: float32 or null per conversation; None: no row has one.
        label_names: names of classes 0, 1, ...; included because a template may train the name.
        awaits_thought: true for a conversation whose prompt asks for reasoning that its messages
            lack, else null; see `Extent`.

    Returns:
        Array of strings, 20 hex digits each. 80 bits: among 10 million conversations the chance
        of any collision is 4e-11.

    Example:
        >>> from packhouse.records.table_schemas import CONVERSATION
        >>> turns = ("user", "Hi"), ("assistant", "Hello")
        >>> messages = [{"role": role, "content": text} for role, text in turns]
        >>> none = pa.array([None])
        >>> conversation_ids(pa.array([messages], CONVERSATION), none, none).to_pylist()
        ['c6c3e5adcc25374549f0']
    """
    flat = FlatMessages.of(messages)
    assert not (flat.roles == UNKNOWN).any(), "conversations with unknown roles have no id"
    num_messages = len(flat.roles)
    head = np.zeros((num_messages, 8), "<i4")  # role, length of each text, weight
    head[:, 0] = flat.roles
    texts = []
    for place, name in enumerate(TEXT_FIELDS, start=1):
        column = flat.values.field(name)
        head[:, place] = np.asarray(pc.fill_null(pc.binary_length(column), -1))
        if column.null_count < num_messages:
            texts.append(pc.fill_null(column.cast(pa.binary()), b""))
    parts = flat.part_weights
    if parts.null_count < num_messages:  # unambiguous: it begins with `[`, unlike any message head
        texts.append(pc.fill_null(parts.cast(pa.binary()), b""))
    # The bits of the weight; -1, which is the bits of a NaN, if there is none.
    weight = np.asarray(pc.fill_null(flat.weight.cast(pa.float32()), np.nan), "<f4")
    head[:, 7] = np.where(np.isnan(weight), -1, weight.view("<i4"))
    # 8 integers of 4 bytes each. "<i4" and "<f4" fix the byte order: ids must not depend on the
    # machine.
    starts = pa.py_buffer(np.arange(0, 32 * num_messages + 1, 32, dtype=np.int32))
    buffers = [None, starts, pa.py_buffer(head.tobytes())]
    heads = pa.BinaryArray.from_buffers(pa.binary(), num_messages, buffers)
    joined = pc.binary_join_element_wise(heads, *texts, pa.scalar(b"", pa.binary()))
    data, offsets = string_bytes(joined)

    asides = [(tools, _TOOLS_TAG), (labels, _LABEL_TAG)]
    asides += [(arguments, _ARGUMENTS_TAG), (weights, _WEIGHT_TAG), (awaits_thought, _THOUGHT_TAG)]
    if label_names is not None:
        classes = pa.array(range(len(label_names)), labels.type)
        places = pc.index_in(labels, classes)  # null for a class without a name
        asides.append((pa.array(label_names, pa.string()).take(places), _LABEL_NAME_TAG))
    view, bounds = memoryview(data.data), pairwise(offsets[flat.offsets].tolist())
    return _names(
        b"".join((view[start:end], aside)) if aside else view[start:end]
        for (start, end), aside in zip(bounds, _encode(asides, len(messages)), strict=True)
    )


def _encode(columns: list[tuple[pa.Array | None, int]], num_rows: int) -> list[bytes]:
    """Return the values of each row's columns as bytes, each after the tag of its column."""
    encoded = [b""] * num_rows
    for column, tag in columns:
        if column is None or column.null_count == num_rows:
            continue
        for row, value in enumerate(column.to_pylist()):
            if value is None:
                continue
            if isinstance(value, str):
                text = value.encode()
                raw = len(text).to_bytes(8, "little") + text
            elif isinstance(value, float):
                raw = struct.pack("<f", value)
            else:
                raw = value.to_bytes(8, "little", signed=True)
            encoded[row] += tag.to_bytes(4, "little") + raw
    return encoded


def rename(
    table: pa.Table,
    is_changed: Bools,
    groups: pa.Array | None = None,
    awaits_thought: pa.Array | None = None,
) -> pa.Table:
    """Recompute the ids of conversations whose messages have changed.

    The group key changes only if it equals the record id, that is, with `group_by: record`.

    Args:
        table: conversations, schema VALIDATED.
        is_changed: bool [num_rows]; other rows keep their ids.
        groups: new group keys; None: the new record ids.
        awaits_thought: see `conversation_ids`.
    """
    columns = {name: one_chunk(table[name]) for name in VALIDATED.names}
    names = ("record_id", "group_key", "messages", "tools", "label", "arguments", "weight")
    old, old_groups, *parts = (columns[name] for name in names)
    new = conversation_ids(*parts, awaits_thought=awaits_thought)
    regroup = pc.and_(pa.array(is_changed), pc.equal(old_groups, old))
    columns |= {
        "group_key": pc.if_else(regroup, new if groups is None else groups, old_groups),
        "record_id": pc.if_else(pa.array(is_changed), new, old),
    }
    return pa.table(columns, schema=VALIDATED)


def pair_ids(chosen: pa.Array, rejected: pa.Array) -> pa.Array:
    """Return an id for each pair from the ids of its two conversations, in order.

    Example:
        >>> a, b = pa.array(["0" * 20]), pa.array(["1" * 20])
        >>> pair_ids(a, b).to_pylist() == pair_ids(b, a).to_pylist()
        False
    """
    pairs = pc.binary_join_element_wise(chosen, rejected, "")
    return _names(name.encode() for name in pairs.to_pylist())


def _names(texts: Iterable[bytes | memoryview]) -> pa.Array:
    """Return the first 20 hex digits of each text's sha256."""
    # blake2b is not faster for texts of this length.
    names = [hashlib.sha256(text).hexdigest()[:20] for text in texts]
    return pa.array(names, pa.string())


def group_keys(messages: pa.Array, record_ids: pa.Array, group_by: GroupBy) -> pa.Array:
    """Return a key for each conversation; the train/eval split keeps equal keys together.

    `prompt`: hash the user turns up to the first answer, with contexts but without system turns,
    in Unicode NFC, case-folded, with white space collapsed. So the same question with a different
    answer, system prompt or layout has the same key. Rows without a user turn (plain text) are
    hashed whole. `record`: the record id, which groups only exact duplicates.

    Args:
        messages: array of `list<MESSAGE>`.
        record_ids: ids from `conversation_ids`.
        group_by: definition of a group.

    Returns:
        Array of strings, 20 hex digits each.

    Example:
        >>> from packhouse.records.table_schemas import CONVERSATION
        >>> prompts = [[{"role": "user", "content": text}] for text in ("Hi  there", "hi there ")]
        >>> messages = pa.array(prompts, CONVERSATION)
        >>> group_keys(messages, pa.array(["x", "y"]), "prompt").unique().to_pylist()
        ['9b96a1fe1d548cbbc960']
    """
    if group_by == "record":
        return record_ids
    flat = FlatMessages.of(messages)
    # Messages assistant (a greeting), user, assistant, user: a question was seen before [0 0 1 1],
    # and an answer to it before [0 0 0 1], so [0 1 0 0] asked.
    seen = np.ones(len(flat.roles), np.bool_)
    for role in (USER, ASSISTANT):
        total = np.append(0, np.cumsum(seen & (flat.roles == role)))
        seen = total[:-1] > np.repeat(total[flat.offsets[:-1]], flat.counts)
    asked = (flat.roles == USER) & ~seen
    asked |= np.repeat(flat.sums(asked) == 0, flat.counts)  # no question: all of the text
    texts = flat.content.filter(pa.array(asked))
    context = flat.context.filter(pa.array(asked))
    if context.null_count < len(context):
        behind = pc.fill_null(pc.binary_join_element_wise("\n", context, ""), "")
        texts = pc.binary_join_element_wise(texts, behind, "")
    offsets = np.append(0, np.cumsum(asked))[flat.offsets]
    if (np.diff(offsets) != 1).any():
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts)
        texts = pc.binary_join(lists, "\n")
    # Use Arrow for ASCII, at 1.4 us per text instead of 2.0 us in Python.
    spaced = pc.replace_substring_regex(pc.utf8_lower(texts), _SPACES, " ")
    normal = [text.encode() for text in pc.utf8_trim(spaced, " ").to_pylist()]
    # Tables of Unicode come with Python, so the key of the validate step has Python's version.
    for row in np.flatnonzero(~np.asarray(pc.string_is_ascii(texts), np.bool_)).tolist():
        # Case-folding may undo NFC, so normalize again.
        composed = unicodedata.normalize("NFC", texts[row].as_py()).casefold()
        normal[row] = " ".join(unicodedata.normalize("NFC", composed).split()).encode()
    return _names(normal)


# The white space of str.split() below 0x80, as a pattern for RE2.
_SPACES = r"[\t-\r\x1c-\x20]{2,}|[\t-\r\x1c-\x1f]"

NUM_DIGITS = 20

Keys: TypeAlias = pa.Array | pa.ChunkedArray
"""Strings of `NUM_DIGITS` hex digits; the contract of their table checks them."""


def leading_bits(keys: Keys) -> Uint64s:
    """Return the first 16 digits of each key as an integer.

    Example:
        >>> leading_bits(pa.array(["000000000000000f0001"])).tolist()
        [15]
    """
    leading = np.ascontiguousarray(_parsed(keys)[:, :8])
    return leading.view(">u8").reshape(-1).astype(np.uint64)


def is_among(bits: Uint64s, some: Uint64s) -> Bools:
    """Return a mask of the values in `bits` that are in `some`, which must be sorted.

    Example:
        >>> is_among(np.array([3, 9], np.uint64), np.array([1, 3], np.uint64)).tolist()
        [True, False]
    """
    found = np.zeros(len(bits), np.bool_)
    if len(some):
        # Filter by the first 20 bits: the table fits into the CPU cache and avoids most searches.
        begins = np.zeros(2**20, np.bool_)
        begins[some >> np.uint64(44)] = True
        likely = np.flatnonzero(begins[bits >> np.uint64(44)])
        places = np.minimum(np.searchsorted(some, bits[likely]), len(some) - 1)
        found[likely] = some[places] == bits[likely]
    return found


def key_bytes(keys: Keys) -> np.ndarray:
    """Return each key as a 10-byte value."""
    return _parsed(keys).view("S10").reshape(-1)


def sort_leading_bits(parts: Iterable[Keys], at_most: int) -> Uint64s:
    """Return `leading_bits` of all parts, sorted. Memory: 8 bytes per key, and one part.

    Args:
        parts: keys.
        at_most: maximum number of keys; memory is used only for the actual number.

    Example:
        >>> sort_leading_bits([pa.array(["1" * 20, "0" * 20])], at_most=9).tolist()
        [0, 1229782938247303441]
    """
    bits = np.empty(at_most, np.uint64)
    end = 0
    for part in parts:
        bits[end : end + len(part)] = leading_bits(part)
        end += len(part)
    bits[:end].sort()
    return bits[:end]


def num_different(parts: Iterable[Keys], at_most: int) -> int:
    """Count distinct keys by their leading bits. Memory: 9 bytes per key, and one part.

    Example:
        >>> num_different([pa.array(["0" * 20, "1" * 20]), pa.array(["0" * 20])], at_most=9)
        2
    """
    # [3 5 5 9]: two values differ from the one before; plus the first one, that is 3.
    bits = sort_leading_bits(parts, at_most)
    return int(np.count_nonzero(bits[1:] != bits[:-1])) + bool(len(bits))


def _parsed(keys: Keys) -> Bytes:
    """Decode the digits of each key to 10 bytes, shape [num_keys, 10]."""
    digits, _ = string_bytes(keys)
    parsed = bytes.fromhex(digits.tobytes().decode("ascii"))
    return np.frombuffer(parsed, np.uint8).reshape(-1, NUM_DIGITS // 2)


def number_rows(shard: pa.Table) -> Int64s:
    """Number the rows of a shard from 0, and return the number for each record.

    Args:
        shard: table with `row` and `group_key`; records of a row are adjacent.

    Example:
        >>> shard = pa.table({"row": [4, 4, 7, 8, 8], "group_key": ["a", "a", "a", "b", "c"]})
        >>> number_rows(shard).tolist()
        [0, 0, 1, 2, 3]
    """
    if not shard.num_rows:
        return np.zeros(0, np.int64)
    rows, groups = np.asarray(one_chunk(shard["row"])), one_chunk(shard["group_key"])
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = rows[1:] != rows[:-1]
    # Questions of one SQuAD article share a line of the file, but they are different rows.
    is_first[1:] |= np.asarray(pc.not_equal(groups[1:], groups[:-1]), np.bool_)
    return np.cumsum(is_first) - 1


def num_rows(shard: pa.Table) -> int:
    """Return the number of rows that the records of a shard come from."""
    numbers = number_rows(shard)
    return int(numbers[-1]) + 1 if len(numbers) else 0


def number_all_rows(shards: Sequence[Int64s]) -> Int64s:
    """Number the rows of all shards consecutively.

    Example:
        >>> number_all_rows([np.array([0, 0, 1]), np.array([0, 1])]).tolist()
        [0, 0, 1, 2, 3]
    """
    first = np.cumsum([0, *(int(each[-1]) + 1 if len(each) else 0 for each in shards)])
    parts = [each + start for each, start in zip(shards, first, strict=False)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


class Extent(NamedTuple):
    """The part of a row that a record holds."""

    num_messages: int
    """Number of messages, from the beginning of the row."""
    trained: tuple[int, ...]
    """Numbers of the messages that the record trains."""
    awaits_thought: bool = False
    """True if its last prompt asks for reasoning, but only later messages of the row have any."""

    def without_first(self, count: int) -> "Extent":
        """Return the extent for the same row without its first `count` messages."""
        trained = tuple(number - count for number in self.trained)
        return Extent(self.num_messages - count, trained, self.awaits_thought)


def rewrites(config: FormatConfig) -> bool:
    """Return True if records may have different messages than their rows."""
    is_split = config.turns != "whole" and config.train_on != "all"
    return config.reasoning == "strip" or (is_split and is_chat(config.template))


def derive(
    table: pa.Table,
    config: FormatConfig,
    origin: Int64s,
    ranges: list[list[tuple[int, int]]],
    weights: Sequence[Float32s | None],
    awaits_thought: pa.Array | None = None,
) -> pa.Table:
    """Return conversations made from parts of others.

    The id of a part is computed from its content, and from its weights if they differ from those
    that `config` would decide. So equal examples have equal ids, including whole rows. A part keeps
    its source, row and group. With `group_by: record` its group becomes the first question of the
    whole row, so that all parts, and equal beginnings of other records, are in the same split.

    Args:
        table: conversations, schema VALIDATED.
        config: decides the default weights of messages.
        origin: row of each new conversation.
        ranges: ranges of the table's messages that make up each new conversation.
        weights: weights of the messages of each; None: an unchanged row, which keeps its id.
        awaits_thought: true or null for each, see `Extent`; None: null for all.
    """
    # Ranges [(0, 1), (3, 5)] and [(0, 1), (5, 7)] -> messages 0 3 4 and 0 5 6, bounds [0 3 6].
    pieces = [np.arange(a, b) for parts in ranges for a, b in parts]
    counts = np.array([sum(b - a for a, b in parts) for parts in ranges], np.int64)
    places = np.concatenate([np.zeros(0, np.int64), *pieces])
    bounds = np.append(0, np.cumsum(counts))
    values = FlatMessages.of_table(table).values.take(pa.array(places))
    taken = FlatMessages(bounds, values)
    given = taken.weight.to_numpy(zero_copy_only=False).astype(np.float32)
    decided = taken.decide_weights(config)
    for start, end, wanted in zip(bounds, bounds[1:], weights, strict=False):
        if wanted is not None and not np.array_equal(decided[start:end], wanted):
            given[start:end] = wanted
    whole = table.take(pa.array(origin))
    parts = taken.put_into(whole, weight=pa.array(given, pa.float32(), from_pandas=True))
    asked = group_keys(one_chunk(whole["messages"]), one_chunk(whole["record_id"]), "prompt")
    is_part = np.array([own is not None for own in weights], np.bool_)
    return rename(parts, is_part, asked, awaits_thought)


def take_records(table: pa.Table, rows: Int64s, extents: Objects, config: FormatConfig) -> pa.Table:
    """Return the conversation of each record, cutting rows to the part that the record holds.

    Args:
        table: rows, schema VALIDATED.
        rows: row of each record.
        extents: part of the row that each record holds (`Extent`); None: all of it.
        config: decides the default weights of messages.
    """
    flat = FlatMessages.of_table(table)
    weights = flat.decide_weights(config)
    ranges, own_weights, awaits = list[list[tuple[int, int]]](), list[Float32s | None](), []
    is_part = np.array([extent is not None for extent in extents], np.bool_)
    for row, extent in zip(rows[is_part].tolist(), extents[is_part].tolist(), strict=True):
        start = int(flat.offsets[row])
        ranges.append([(start, start + extent.num_messages)])
        own, trained = np.zeros(extent.num_messages, np.float32), list(extent.trained)
        own[trained] = weights[start:][trained]
        own_weights.append(own)
        awaits.append(extent.awaits_thought or None)
    is_awaiting = pa.array(awaits, pa.bool_())
    parts = derive(table, config, rows[is_part], ranges, own_weights, is_awaiting)
    whole = table.take(pa.array(rows[~is_part]))
    # Whole rows are taken in one go and parts are built, so both are put back into their order:
    # parts at 1 of 3 -> [0 2 1] -> argsort [0 2 1].
    places = np.argsort(np.append(np.flatnonzero(~is_part), np.flatnonzero(is_part)))
    return pa.concat_tables([whole, parts]).unify_dictionaries().take(pa.array(places))


def replace_rows(
    part: pa.Table, rows: np.ndarray, windows: pa.Table, origin: np.ndarray
) -> pa.Table:
    """Return the table with some rows replaced by their windows, in order."""
    # Row 1 of 3 becomes two windows: places [0, 2, 1, 1] sort to [row 0, window, window, row 2].
    kept = np.setdiff1d(np.arange(part.num_rows), rows)
    places = np.concatenate([kept, rows[origin]])
    whole = pa.concat_tables([part.take(pa.array(kept)), windows]).unify_dictionaries()
    return whole.take(pa.array(np.argsort(places, kind="stable"))).combine_chunks()
