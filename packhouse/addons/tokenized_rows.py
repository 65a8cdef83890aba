"""Row format `tokenized`: rows that another tool tokenized, `input_ids` with `labels` or masks.

Each run of tokens with the same weight becomes a turn: an assistant turn if it is trained, else a
user turn. Contents are the ids in hex, eight digits each, so that the record's id and group, which
are computed from contents, depend on the ids and the mask:

    input_ids [7, 8, 9], labels [-100, 8, 9] -> user 00000007, assistant 0000000800000009

`read_given` turns them back into ids and text, with the tokenizer. Nothing is encoded: the packed
ids are those of the rows. They are decoded only for readers of text (quality counters, benchmarks,
near duplicates, people). If the same ids would give other tables, raise `registry.GIVEN_VERSION`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.read.chat_messages import MAX_WEIGHT, Conversation, Turn, kind_of
from packhouse.read.json_parsing import Ints
from packhouse.read.row_formats import Names, Row, RowFormat, aliases, check_present
from packhouse.recipe import SourceConfig
from packhouse.records.arrays import (
    Float32s,
    Int32s,
    Int64s,
    list_array,
    ranges_array,
    string_bytes,
    weights_column,
)
from packhouse.records.message_rules import ASSISTANT, Answers, FlatMessages
from packhouse.records.table_schemas import FORMATTED, QUARANTINED, TOKENIZED, refused_rows
from packhouse.system.plugins import BadRowError
from packhouse.tokenize.encoders import TokenizerSnapshot, decode_lists, read_pipeline

_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
_TRAINED = ("labels", *_MASKS)
_MOST = 2**31 - 1
# Fewer untrained tokens than this at the start are BOS or a header, equal in many records.
_LEAST_PROMPT = 8


@dataclass(frozen=True, kw_only=True)
class TokenRows(RowFormat):
    """Rows of token ids, each of which is one record or several packed ones."""

    answers: Answers = "tokens"
    ignored: ClassVar[tuple[str, ...]] = ("length", "num_tokens")  # they follow from the ids

    def fits(self, keys: Collection[str], renamed: Mapping[str, str]) -> bool:
        """Return True for ids with a mask, and for ids with only per-token columns."""
        names = self.names(keys, renamed)
        has_mask = not names.keys().isdisjoint(_TRAINED)
        return "input_ids" in names and (has_mask or len(names) == len(keys))

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the record, or the packed records, of a row."""
        check_present(row, self.required, names, config)
        named = {ours: name for ours, name in names.items() if row[name] is not None}
        ids = _numbers(row, names["input_ids"], {int})
        if not len(ids):
            raise BadRowError("token_ids", f"{names['input_ids']} is empty")
        if (wrong := (ids < 0) | (ids > _MOST)).any():
            at = int(np.argmax(wrong))
            raise BadRowError("token_ids", f"token {at:,} is {ids[at]}, which is not a token id")
        per_token: dict[str, npt.NDArray[Any]] = {
            ours: _numbers(row, named[ours], _KINDS.get(ours, {int}))
            for ours in (*_TRAINED, "attention_mask", "position_ids")
            if ours in named
        }
        for ours, values in per_token.items():
            if len(values) != len(ids):
                raise BadRowError(
                    "uneven",
                    f"{named[ours]} has {len(values):,} values for {len(ids):,} tokens",
                )
        weights = _weights(ids, per_token)
        is_token = per_token.get("attention_mask", np.ones(len(ids), np.int64)) != 0
        if (weights[~is_token] > 0).any():
            raise BadRowError("labels", "a trained token has attention_mask 0")
        places = np.flatnonzero(is_token)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise BadRowError("boundaries", "attention_mask is 0 between tokens, not at the ends")
        starts = _starts(row, named, per_token, places, len(ids))
        bounds = list(pairwise([*starts.tolist(), len(places)]))
        ids, weights = ids[places], weights[places]
        # LLaMA-Factory's packs end with pads at positions 0, 0, 0, for which its mask is 1.
        while len(bounds) > 1 and not weights[bounds[-1][0] :].any():
            if len(set(ids[bounds[-1][0] :].tolist())) > 1:
                break
            bounds.pop()
        return [Conversation(_turns(ids[start:end], weights[start:end])) for start, end in bounds]


# Types allowed in a list. All other lists take only integers: `true` is not an id or a label.
_KINDS: dict[str, Collection[type]] = {
    **dict.fromkeys((*_MASKS, "attention_mask"), (int, bool)),
    "loss_mask": (int, bool, float),
}


def _numbers(row: Mapping[str, Any], name: str, kinds: Collection[type]) -> npt.NDArray[Any]:
    """Return the numbers in a field, shape [num_tokens].

    Raises:
        BadRowError: it has another value.
    """
    values = row[name]
    if not isinstance(values, list):
        raise BadRowError("type", f"{name} is {kind_of(values)}, not a list of numbers")
    strange = set(map(type, values)) - set(kinds)
    if strange:
        value = next(each for each in values if type(each) in strange)
        hint = ""
        if isinstance(value, list):
            hint = "; write each of these lists as a separate row"
        elif isinstance(value, float):
            hint = f" ({value}); only integers are allowed"
        at = values.index(value)
        raise BadRowError("type", f"{name} has {kind_of(value)} at index {at:,}{hint}")
    try:
        return np.array(values, np.float64 if float in kinds else np.int64)
    except OverflowError:
        raise BadRowError("token_ids", f"{name} has a number over 64 bits") from None


def _weights(ids: Ints, per_token: Mapping[str, npt.NDArray[Any]]) -> Float32s:
    """Return each token's weight, 0 if it is not trained; several masks are multiplied."""
    if per_token.keys().isdisjoint(_TRAINED):
        raise BadRowError(
            "labels",
            "the row has no labels or mask; add labels, -100 for tokens that are not trained, or "
            "equal to input_ids to train all tokens",
        )
    weights = np.ones(len(ids), np.float32)
    for name in _MASKS:
        if name in per_token:
            mask = per_token[name]
            if not (is_weight := (mask >= 0) & (mask <= MAX_WEIGHT)).all():  # False for NaN too
                at = int(np.argmin(is_weight))
                raise BadRowError(
                    "labels",
                    f"{name} is {mask[at]} at token {at:,}; weights are 0 to {MAX_WEIGHT:,.0f}",
                )
            weights *= mask if name == "loss_mask" else mask > 0
    labels = per_token.get("labels")
    if labels is not None:
        weights[labels == -100] = 0
        if (wrong := (labels != -100) & (labels != ids)).any():
            at = int(np.argmax(wrong))
            detail = f"label {at:,} is {labels[at]}, but token {at:,} is {ids[at]}"
            for what, own, others in (
                ("next", labels[:-1], ids[1:]),
                ("previous", labels[1:], ids[:-1]),
            ):
                # Models of transformers shift labels themselves. If the file has them shifted
                # already, each token would learn the token after the next one.
                if (own != -100).any() and (own[own != -100] == others[own != -100]).all():
                    detail += f" (labels are shifted: each is the {what} token)"
                    break
            detail += "; set each label to its own token or to -100, since trainers shift them"
            raise BadRowError("labels", detail)
    return weights


def _starts(
    row: Mapping[str, Any],
    named: Mapping[str, str],
    per_token: Mapping[str, Ints],
    places: Ints,
    num_values: int,
) -> Ints:
    """Return where records begin among the tokens at `places`; all columns must agree."""
    said: dict[str, Ints] = {}
    ends_at = (len(places), num_values)
    for ours in ("seq_lengths", "cu_seqlens"):
        if ours not in named:
            continue
        bounds = _numbers(row, named[ours], {int})
        if ours == "seq_lengths":
            bounds = np.append(0, np.cumsum(bounds))
        is_rising = len(bounds) > 0 and not bounds[0] and (np.diff(bounds) > 0).all()
        if not is_rising or bounds.max() > num_values or bounds[-1] not in ends_at:
            raise BadRowError(
                "boundaries", f"{named[ours]} do not add up to the row's {len(places):,} tokens"
            )
        if bounds[-1] == num_values:  # they include pads; with two pads in front 0, 5, 8 -> 0, 3, 6
            bounds = np.unique(np.maximum(bounds - places[:1].sum(), 0))
        said[ours] = bounds[bounds < len(places)]
    segments = per_token.get("attention_mask", places[:0])
    if segments.max(initial=0) > 1:
        said["attention_mask"] = np.flatnonzero(np.diff(segments[places], prepend=-1))
    if "position_ids" in per_token and len(places):
        positions = per_token["position_ids"][places]
        if len(positions) > 1 and not np.diff(positions).any():
            raise BadRowError(
                "boundaries", f"position_ids are {positions[0]} everywhere, instead of counting up"
            )
        # Positions 0 1 2 0 1 -> records begin at 0 and 3; the first always does.
        begins = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
        if positions[begins].any():
            at = int(begins[np.argmax(positions[begins] != 0)])
            raise BadRowError(
                "boundaries",
                f"position_ids jump to {positions[at]} at token {at:,}; they must start at 0 in "
                "each record",
            )
        said["position_ids"] = begins
    (first, starts), *others = [*said.items()] or [("", np.zeros(1, np.int64))]
    for name, other in others:
        if not np.array_equal(starts, other):
            raise BadRowError(
                "boundaries",
                f"{first} and {name} disagree on where records begin ({len(starts):,} and "
                f"{len(other):,} records); remove the wrong one",
            )
    return starts


def _turns(ids: Ints, weights: Float32s) -> list[Turn]:
    """Return one turn for each run of tokens with the same weight."""
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(ids)]  # 0 0 1 1 -> [0, 2, 4]
    # A record without a user turn forms its group as a whole: see `record_ids.group_keys`.
    untrained = "user" if not weights[:_LEAST_PROMPT].any() else "system"
    turns: list[Turn] = []
    for start, end in pairwise(edges if len(ids) else []):
        weight = float(weights[start])
        role = "assistant" if weight else untrained
        # Hex, because contents are UTF-8 text, which bytes of ids are not. Big-endian, so that the
        # digits read like the id.
        content = ids[start:end].astype(">u4").tobytes().hex()
        loss_weight = None if weight in (0, 1) else weight
        turns.append((role, content, None, None, None, None, None, loss_weight, None))
    return turns


FORMATS = {
    "tokenized": TokenRows(
        required=aliases("input_ids"),
        optional=aliases(
            "labels loss_mask|loss_weights assistant_masks|assistant_mask completion_mask "
            "attention_mask position_ids seq_lengths cu_seqlens|cu_seq_lens|cu_seq_lens_q"
        ),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class GivenTokens:
    """The records of a shard whose ids are given."""

    conversations: pa.Table
    """Schema `table_schemas.VALIDATED`: one message for each run of tokens with the same loss."""
    tokenized: pa.Table
    """Schema `table_schemas.TOKENIZED`: the same records with their ids."""
    quarantined: pa.Table
    """Schema `table_schemas.QUARANTINED` without raw bytes: the refused records."""


def read_given(validated: pa.Table, snapshot: TokenizerSnapshot) -> GivenTokens:
    """Return ids and text of records whose contents are ids in hex.

    Records are refused with reason `vocabulary` if the tokenizer does not have an id, or `padding`
    if they have pad tokens at either end that no mask marks.

    Args:
        validated: schema `table_schemas.VALIDATED`, from rows of format `tokenized`.
        snapshot: the tokenizer of the ids.
    """
    flat = FlatMessages.of_table(validated)
    data, bounds = string_bytes(flat.content)
    ids = np.frombuffer(bytes.fromhex(data.tobytes().decode("ascii")), ">u4").astype(np.int32)
    # Index of each message's first id: contents of 16 and 8 digits are ids [0, 2) and [2, 3).
    bounds = bounds.astype(np.int64) // 8
    of_record = bounds[flat.offsets]  # index of each record's first id
    faults = _faults(ids, of_record, snapshot)
    if faults:
        is_good = np.ones(validated.num_rows, np.bool_)
        is_good[list(faults)] = False
        rest = read_given(validated.filter(pa.array(is_good)), snapshot)
        quarantined = refused_rows(validated, faults, "validate")
        return GivenTokens(rest.conversations, rest.tokenized, quarantined)
    ranges, weights = _trained_runs(flat, bounds)
    num_trained = flat.sums(np.where(flat.roles == ASSISTANT, np.diff(bounds), 0))
    columns = {
        "input_ids": list_array(pa.array(ids), of_record, pa.int32()),
        "trained_ranges": ranges,
        "range_weights": weights,
        "num_tokens": pa.array(np.diff(of_record).astype(np.int32)),
        "num_trained": pa.array(num_trained.astype(np.int32)),
    }
    arrays = [columns[n] if n in columns else validated[n] for n in TOKENIZED.names]
    lists = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(ids))
    texts = decode_lists(lists, snapshot).cast(pa.string())
    return GivenTokens(
        flat.put_into(validated, content=texts),
        pa.Table.from_arrays(arrays, schema=TOKENIZED),
        QUARANTINED.empty_table(),
    )


def _trained_runs(flat: FlatMessages, edges: Int64s) -> tuple[pa.Array, pa.Array]:
    """Return the trained messages of each record, as ranges that start at 0, and their weights.

    Args:
        flat: messages.
        edges: start of each message, in ids or bytes of all records, and the end of the last one.
    """
    is_trained = flat.roles == ASSISTANT
    counts = flat.sums(is_trained)
    first = edges[flat.offsets][flat.rows[is_trained]]
    starts, ends = ((edge[is_trained] - first).astype(np.int32) for edge in (edges[:-1], edges[1:]))
    weights = np.asarray(pc.fill_null(flat.weight, 1), np.float32)[is_trained]
    return ranges_array(starts, ends, counts), weights_column(weights, counts)


def text_of_given(conversations: pa.Table) -> pa.Table:
    """Return the text of already tokenized records: their concatenated messages.

    Args:
        conversations: from `read_given`.

    Returns:
        Schema `table_schemas.FORMATTED`. Which text in trained runs a template wrote is unknown.
    """
    flat = FlatMessages.of_table(conversations)
    contents = flat.content
    edges = np.append(0, np.cumsum(np.asarray(pc.binary_length(contents)), dtype=np.int64))
    spans, weights = _trained_runs(flat, edges)
    columns = {
        "text": flat.join(contents, ""),
        "content_spans": spans,
        "trained_spans": spans,
        "span_weights": weights,
    }
    arrays = [columns[n] if n in columns else conversations[n] for n in FORMATTED.names]
    return pa.Table.from_arrays(arrays, schema=FORMATTED)


def _faults(
    ids: Int32s, of_record: Int64s, snapshot: TokenizerSnapshot
) -> dict[int, tuple[str, str]]:
    """Return record -> reason and detail, for records that the tokenizer cannot have produced."""
    faults: dict[int, tuple[str, str]] = {}
    pad_id = snapshot.added_tokens.get(snapshot.special_tokens.get("pad_token", ""), -1)
    for where, edges, step in (("ends", of_record[1:] - 1, -1), ("begins", of_record[:-1], 1)):
        for row in np.flatnonzero(ids[edges] == pad_id).tolist():
            is_pad = ids[of_record[row] : of_record[row + 1]][::step] == pad_id
            number = int(np.argmin(np.append(is_pad, False)))
            if number > 1:  # one may be the end of a turn, or BOS
                faults[row] = (
                    "padding",
                    f"the record {where} with {number:,} pad tokens; set their attention_mask to "
                    "0 and their labels to -100, or remove them",
                )
    token_bytes = read_pipeline(snapshot.backend).token_bytes
    is_known = np.ones(snapshot.vocab_size, np.bool_)
    if token_bytes is not None:  # ids that the vocabulary leaves out have no text
        is_known[: len(token_bytes)] = np.asarray(pc.binary_length(token_bytes)) > 0
    is_wrong = ids >= snapshot.vocab_size
    is_wrong |= ~is_known[np.where(is_wrong, 0, ids)]
    wrong = np.flatnonzero(is_wrong)
    rows = np.searchsorted(of_record, wrong, "right") - 1
    for row, at in zip(rows[::-1].tolist(), wrong[::-1].tolist(), strict=True):  # the first wins
        faults[row] = (
            "vocabulary",
            f"token {at - of_record[row]:,} of the record is {ids[at]:,}, which the tokenizer "
            f"does not have (its ids are below {snapshot.vocab_size:,}); check that it is the one "
            "the row was made with",
        )
    return faults
