"""Row format `tokenized`: rows that another tool tokenized, `input_ids` with `labels` or masks.

Each run of tokens with the same weight becomes a turn: an assistant turn if it is trained, else a
user turn. Contents are the ids in hex, eight digits each, so that the record's id and group, which
are computed from contents, depend on the ids and the mask:

    input_ids [7, 8, 9], labels [-100, 8, 9] -> user 00000007, assistant 0000000800000009

`packhouse.tokenize.pretokenized` turns them back into ids and text, with the tokenizer.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from packhouse.read.chat_messages import MAX_WEIGHT, Conversation, Turn, kind_of
from packhouse.read.json_parsing import Ints
from packhouse.read.row_formats import Names, Row, RowFormat, aliases, check_present
from packhouse.recipe import SourceConfig
from packhouse.records.message_rules import Answers
from packhouse.system.plugins import BadRowError

_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
_TRAINED = ("labels", *_MASKS)
_MOST = 2**31 - 1
# Fewer untrained tokens than this at the start are BOS or a header, equal in many records.
_LEAST_PROMPT = 8

Weights = npt.NDArray[np.float32]


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


def _weights(ids: Ints, per_token: Mapping[str, npt.NDArray[Any]]) -> Weights:
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


def _turns(ids: Ints, weights: Weights) -> list[Turn]:
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
