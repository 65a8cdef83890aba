"""Store a preference pair as one record of two sequences, and check that they share a prompt.

Until tokenization, a pair is one row in two tables, `validated.arrow` and `rejected.arrow`, which
have the same ids and rows in the same order. Its tokens form one record: the chosen sequence, then
the rejected one, each a prompt and an answer. A sequence ends with its answer and has one trained
range, so the ranges alone give the start of the rejected sequence and the length of the prompt:

    prompt 5 6, chosen 7 8, rejected 9 -> input_ids 5 6 7 8 5 6 9, trained_ranges [2, 4) [6, 7)

So a pair is counted, packed, split and dropped as a whole, like any record. All functions work on
flat arrays.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.records.arrays import (
    Bools,
    TokenColumns,
    count_up,
    flat_list,
    list_array,
    list_offsets,
    one_chunk,
    ranges_array,
    read_ranges,
    string_bytes,
)
from packhouse.records.table_schemas import PACKED, TOKENIZED, with_column

REJECTED = "rejected.arrow"
"""File with the rejected side of each row of `validated.arrow` or `formatted.arrow`."""

Faults = dict[int, tuple[str, str]]
"""Row of a table -> reason code and a sentence."""

_NOT_ONE = ("not_one_answer", "the trained tokens are not one contiguous run at the end")
_OTHER_PROMPT = ("prompt_differs", "the tokens before the chosen and the rejected answer differ")
_SAME = ("same_answers", "the chosen and the rejected answer have the same tokens")


def both_sides(chosen: pa.Table, rejected: pa.Table) -> pa.Table:
    """Return pairs as conversations with the messages of both sides, the chosen ones first.

    For comparing texts: two pairs are equal if and only if these messages are equal.

    Args:
        chosen: chosen sides, schema `table_schemas.VALIDATED`.
        rejected: rejected sides, in the same order.
    """
    sides = [one_chunk(table["messages"]) for table in (chosen, rejected)]
    joined = _interleaved(pa.concat_arrays(sides))
    offsets = list_offsets(joined)[::2]
    both = pa.ListArray.from_arrays(pa.array(offsets), joined.values, type=joined.type)
    return with_column(chosen, "messages", both)


def _interleaved(sides: pa.Array) -> pa.Array:
    """Reorder all chosen rows, then all rejected ones, to chosen, rejected, chosen, rejected.

    Example:
        >>> _interleaved(pa.array(["a", "b", "not a", "not b"])).to_pylist()
        ['a', 'not a', 'b', 'not b']
    """
    return sides.take(pa.array(np.arange(len(sides)).reshape(2, -1).T.ravel()))


def keep_both(
    chosen: pa.Table, rejected: pa.Table, bad_chosen: pa.Table, bad_rejected: pa.Table
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Keep the pairs whose sides both passed, and list each bad pair once.

    Args:
        chosen: chosen sides that passed, identified by `row`.
        rejected: rejected sides that passed.
        bad_chosen: bad rows of the chosen sides, schema `table_schemas.QUARANTINED`.
        bad_rejected: bad rows of the rejected sides.

    Returns:
        Chosen and rejected sides in the same order, and bad rows in order of `row`.
    """
    details = pc.binary_join_element_wise("rejected", bad_rejected["detail"], ": ")
    others = with_column(bad_rejected, "detail", details)
    # List a pair once, with the reason of its chosen side.
    others = others.filter(pc.invert(pc.is_in(others["row"], value_set=bad_chosen["row"])))
    bad = pa.concat_tables([bad_chosen, others]).sort_by("row")
    # Both tables are filtered by the rows of the other one and keep their order, so row i of one
    # still belongs to row i of the other.
    kept_chosen = chosen.filter(pc.is_in(chosen["row"], value_set=rejected["row"]))
    kept_rejected = rejected.filter(pc.is_in(rejected["row"], value_set=chosen["row"]))
    return kept_chosen, kept_rejected, bad


def cut_behind_answers(formatted: pa.Table) -> pa.Table:
    r"""Cut texts after their last trained byte: `...<|im_end|>\n` loses its `\n`.

    TRL trains everything after a prompt, so nothing untrained may follow the answer.

    Args:
        formatted: texts, schema `table_schemas.FORMATTED`.
    """
    texts, bounds = string_bytes(formatted["text"])
    ends = np.diff(bounds).astype(np.int64)
    trained, content = (read_ranges(formatted[n]) for n in ("trained_spans", "content_spans"))
    last = np.zeros(len(ends), np.int64)
    # `last[rows] = np.maximum(last[rows], ends)` would keep only the last range of a row, because
    # numpy assigns each repeated index once.
    np.maximum.at(last, trained.rows, trained.ends)
    is_cut = last > 0
    # A text with content after its answer is left unchanged; `check_answers` rejects it later.
    rows = content.rows
    is_cut[rows[content.ends > last[rows]]] = False
    ends = np.where(is_cut, last, ends)
    view = memoryview(texts.data)
    places = zip(bounds[:-1].tolist(), ends.tolist(), strict=True)
    data = pa.py_buffer(b"".join([view[start : start + length] for start, length in places]))
    offsets = np.concatenate([[0], np.cumsum(ends)]).astype(np.int32)
    cut = pa.StringArray.from_buffers(len(ends), pa.py_buffer(offsets), data)
    return with_column(formatted, "text", cut)


def check_answers(tokenized: pa.Table) -> Faults:
    """Return the rows that are not a prompt followed by one trained answer up to the end.

    Args:
        tokenized: sequences, schema `table_schemas.TOKENIZED`, one per row.
    """
    ranges = read_ranges(tokenized["trained_ranges"])
    counts, rows = ranges.counts, ranges.rows
    is_good = counts == 1
    is_good[rows[ranges.starts < 1]] = False
    is_good[rows[ranges.ends != tokenized["num_tokens"].to_numpy()[rows]]] = False
    return dict.fromkeys(np.flatnonzero(~is_good).tolist(), _NOT_ONE)


def join_sides(chosen: pa.Table, rejected: pa.Table) -> tuple[pa.Table, Faults]:
    """Join the tokens of both sides of each pair into one record, and check that they are a pair.

    Each side must end with one trained answer, the tokens before it must be the same on both sides,
    and the answers must differ.

    Args:
        chosen: chosen sequences, schema `table_schemas.TOKENIZED`, one per row.
        rejected: rejected sequences, in the same order.

    Returns:
        Valid pairs, schema `table_schemas.TOKENIZED`, and the faults of the other rows.
    """
    bad = check_answers(rejected).items()
    of_rejected = {row: (reason, f"rejected: {detail}") for row, (reason, detail) in bad}
    faults = of_rejected | check_answers(chosen)  # one fault per pair: the chosen side's
    good = np.setdiff1d(np.arange(chosen.num_rows), list(faults))
    chosen_good, rejected_good = (table.take(pa.array(good)) for table in (chosen, rejected))
    tokens = [TokenColumns.of(table) for table in (chosen_good, rejected_good)]
    is_same_prompt = _are_equal(tokens, [each.ranges.starts for each in tokens])
    is_same = _are_equal(tokens, [np.diff(each.offsets) for each in tokens])
    faults |= dict.fromkeys(good[~is_same_prompt].tolist(), _OTHER_PROMPT)
    faults |= dict.fromkeys(good[is_same].tolist(), _SAME)
    kept = pa.array(is_same_prompt & ~is_same)
    return _joined(chosen_good.filter(kept), rejected_good.filter(kept)), faults


def _are_equal(sides: list[TokenColumns], lengths: Sequence[npt.NDArray[np.integer]]) -> Bools:
    """Return a mask of rows whose first `lengths` tokens are the same on both sides."""
    is_equal = np.asarray(lengths[0] == lengths[1], np.bool_)
    # Lengths [2 3] -> tokens [0 1 0 1 2] of rows [0 0 1 1 1].
    counts = np.where(is_equal, lengths[0], 0)
    rows, within = np.repeat(np.arange(len(counts)), counts), count_up(counts)
    first, second = (each.ids[each.offsets[:-1][rows] + within] for each in sides)
    is_equal[rows[first != second]] = False
    return is_equal


def _joined(chosen: pa.Table, rejected: pa.Table) -> pa.Table:
    ids = pa.concat_arrays([one_chunk(table["input_ids"]) for table in (chosen, rejected)])
    values, offsets = flat_list(_interleaved(ids))
    num_tokens = [table["num_tokens"].to_numpy() for table in (chosen, rejected)]
    ranges = [read_ranges(table["trained_ranges"]) for table in (chosen, rejected)]
    # The chosen answer is [2, 4) of 4 tokens, the rejected one [2, 3): in the record, these are
    # [2, 4) and [6, 7).
    first, second = ranges
    pairs = (first.starts, second.starts + num_tokens[0]), (first.ends, second.ends + num_tokens[0])
    starts, ends = (np.stack(pair, axis=1).ravel().astype(np.int32) for pair in pairs)
    columns = {
        "input_ids": list_array(pa.array(values), offsets[::2], pa.int32()),
        "trained_ranges": ranges_array(starts, ends, np.full(chosen.num_rows, 2)),
        "range_weights": pa.nulls(chosen.num_rows, TOKENIZED.field("range_weights").type),
        "num_tokens": pa.array(num_tokens[0] + num_tokens[1]),
        "num_trained": pc.add(chosen["num_trained"], rejected["num_trained"]),
    }
    arrays = [columns.get(name, chosen[name]) for name in TOKENIZED.names]
    return pa.Table.from_arrays(arrays, schema=TOKENIZED)


def split_sides(tokenized: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Undo `join_sides`: return a table of the chosen and one of the rejected sequences.

    Args:
        tokenized: pairs, schema `table_schemas.TOKENIZED`.
    """
    ids, offsets, ranges = TokenColumns.of(tokenized)
    num_chosen = ranges.ends[::2]  # a side ends with its answer
    # Records [0, 7) and [7, 12), chosen sides of 4 and 2 tokens: bounds [0 4 7 9], to which the end
    # is added. Of the four lists, the first and third are chosen.
    bounds = np.stack([offsets[:-1], offsets[:-1] + num_chosen], axis=1).ravel()
    lists = list_array(pa.array(ids), np.append(bounds, offsets[-1]), pa.int32())
    sides = []
    for side in (0, 1):
        own = lists.take(pa.array(np.arange(side, len(lists), 2)))
        before = num_chosen * side
        starts, ends = ranges.starts[side::2] - before, ranges.ends[side::2] - before
        columns = {
            "input_ids": own,
            "trained_ranges": ranges_array(starts, ends, np.ones(len(own), np.int64)),
            "num_tokens": pc.list_value_length(own),
            "num_trained": pa.array(ends - starts),
        }
        arrays = [columns.get(name, tokenized[name]) for name in TOKENIZED.names]
        sides.append(pa.Table.from_arrays(arrays, schema=TOKENIZED))
    return sides[0], sides[1]


def as_sequences(packs: pa.RecordBatch) -> pa.RecordBatch:
    """Return packs of pairs in which each side is a sequence, so that each record has two.

    Args:
        packs: packs, schema `table_schemas.PACKED`, with one length per pair.

    Example:
        >>> packs = pa.RecordBatch.from_pylist([{
        ...     "input_ids": [5, 6, 7, 8, 5, 6, 9], "trained_ranges": [{"start": 2, "end": 4},
        ...     {"start": 6, "end": 7}], "range_weights": None, "seq_lengths": [7],
        ...     "record_ids": ["a"], "label": None}], PACKED)
        >>> as_sequences(packs).to_pylist()[0]["seq_lengths"]
        [4, 3]
        >>> as_sequences(packs).to_pylist()[0]["record_ids"]
        ['a', 'a']
    """
    ranges = read_ranges(packs["trained_ranges"])
    offsets = list_offsets(packs["record_ids"]).astype(np.int64)
    offsets = 2 * (offsets - offsets[0])
    assert np.array_equal(offsets, ranges.offsets), "a pair has two answers"
    before = np.append(0, ranges.ends[:-1])
    before[ranges.offsets[:-1]] = 0
    lengths = ranges.ends - before
    names = one_chunk(packs["record_ids"]).flatten()
    twice = names.take(pa.array(np.repeat(np.arange(len(names)), 2)))
    columns = {
        "seq_lengths": list_array(pa.array(lengths.astype(np.int32)), offsets, pa.int32()),
        "record_ids": list_array(twice, offsets, pa.string()),
    }
    arrays = [columns.get(name, packs[name]) for name in PACKED.names]
    return pa.RecordBatch.from_arrays(arrays, schema=PACKED)
