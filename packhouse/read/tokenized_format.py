"""Rows that another tool tokenized: `input_ids`, and `labels` or masks that say what is trained.

A record becomes turns, one for each run of tokens that are trained alike: an assistant's where they
are, a user's where they are not. Their contents are the ids in hex, eight digits each, so that what
is made of contents, such as the record's id and its group, is made of ids and mask:

    input_ids [7, 8, 9], labels [-100, 8, 9] -> user 00000007, assistant 0000000800000009

`packhouse.tokenize.tokenizing` makes ids and text of them, where the tokenizer is known.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from packhouse.read.chat_messages import MAX_WEIGHT, Conversation, Turn, kind_of
from packhouse.read.records import Ints
from packhouse.read.row_formats import Names, Row, RowFormat, aliases, check_present
from packhouse.recipe import SourceConfig
from packhouse.records.messages import Answers
from packhouse.system.plugins import BadRowError

_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
_TRAINED = ("labels", *_MASKS)
_MOST = 2**31 - 1
_LEAST_PROMPT = 8
"""Tokens before the first trained one; fewer are BOS or a header, the same in many records."""

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TokenRows(RowFormat):
    """Rows of token ids, each one record or several packed ones."""

    answers: Answers = "tokens"

    def fits(self, keys: Collection[str], renamed: Mapping[str, str]) -> bool:
        """Return True for ids with a mask, and for ids with nothing that is no column of tokens."""
        names = self.names(keys, renamed)
        has_mask = not names.keys().isdisjoint(_TRAINED)
        return "input_ids" in names and (has_mask or len(names) == len(keys))

    def unread(self, keys: Collection[str], renamed: Mapping[str, str]) -> list[str]:
        """Those beside the columns of tokens; a length follows from the ids."""
        return [key for key in super().unread(keys, renamed) if key not in ("length", "num_tokens")]

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read a record, or each of those that a row holds one behind another."""
        check_present(row, self.required, names, config)
        named = {ours: name for ours, name in names.items() if row[name] is not None}
        ids = _numbers(row, names["input_ids"], {int})
        if not len(ids):
            raise BadRowError("token_ids", f"{names['input_ids']} holds no token")
        if (wrong := (ids < 0) | (ids > _MOST)).any():
            at = int(np.argmax(wrong))
            raise BadRowError("token_ids", f"token {at:,} is {ids[at]}, which is no id")
        per_token: dict[str, npt.NDArray[Any]] = {
            ours: _numbers(row, named[ours], _KINDS.get(ours, {int}))
            for ours in (*_TRAINED, "attention_mask", "position_ids")
            if ours in named
        }
        for ours, values in per_token.items():
            if len(values) != len(ids):
                raise BadRowError(
                    "uneven", f"{named[ours]} has {len(values):,} values, {len(ids):,} tokens"
                )
        weights = _weights(ids, per_token)
        is_token = per_token.get("attention_mask", np.ones(len(ids), np.int64)) != 0
        if (weights[~is_token] > 0).any():
            raise BadRowError("labels", "a token is trained that attention_mask leaves out")
        places = np.flatnonzero(is_token)
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise BadRowError("boundaries", "attention_mask is 0 between tokens, not at the ends")
        starts = _starts(row, named, per_token, places, len(ids))
        bounds = list(pairwise([*starts.tolist(), len(places)]))
        ids, weights = ids[places], weights[places]
        # LLaMA-Factory's packs end with pads at positions 0, 0, 0, which its mask takes for tokens.
        while len(bounds) > 1 and not weights[bounds[-1][0] :].any():
            if len(set(ids[bounds[-1][0] :].tolist())) > 1:
                break
            bounds.pop()
        return [Conversation(_turns(ids[start:end], weights[start:end])) for start, end in bounds]


FORMAT = TokenRows(
    required=aliases("input_ids"),
    optional=aliases(
        "labels loss_mask|loss_weights assistant_masks|assistant_mask completion_mask "
        "attention_mask position_ids seq_lengths cu_seqlens|cu_seq_lens|cu_seq_lens_q"
    ),
)


_KINDS: dict[str, Collection[type]] = {
    **dict.fromkeys((*_MASKS, "attention_mask"), (int, bool)),
    "loss_mask": (int, bool, float),
}
"""What may stand in a list; in others whole numbers alone: `true` is no id, and no label."""


def _numbers(row: Mapping[str, Any], name: str, kinds: Collection[type]) -> npt.NDArray[Any]:
    """The numbers in a field, shape [num_tokens].

    Raises:
        BadRowError: it holds something else.
    """
    values = row[name]
    if not isinstance(values, list):
        raise BadRowError("type", f"{name} is {kind_of(values)}, not a list of numbers")
    strange = set(map(type, values)) - set(kinds)
    if strange:
        value = next(each for each in values if type(each) in strange)
        hint = ""
        if isinstance(value, list):
            hint = "; a row holds one list of numbers, so write each of these as a row of its own"
        elif isinstance(value, float):
            hint = f": {value}, and must hold whole numbers, written as such"
        at = values.index(value)
        raise BadRowError("type", f"{name} holds {kind_of(value)} at place {at:,}{hint}")
    try:
        return np.array(values, np.float64 if float in kinds else np.int64)
    except OverflowError:
        raise BadRowError("token_ids", f"{name} holds a number over 64 bits") from None


def _weights(ids: Ints, per_token: Mapping[str, npt.NDArray[Any]]) -> Weights:
    """How much each token counts; 0: it is not trained. Of several masks, all must say so."""
    if per_token.keys().isdisjoint(_TRAINED):
        raise BadRowError(
            "labels",
            "nothing says which tokens are trained; write labels (-100 where a token is not), "
            "equal to input_ids to train them all",
        )
    weights = np.ones(len(ids), np.float32)
    for name in _MASKS:
        if name in per_token:
            mask = per_token[name]
            if not (is_weight := (mask >= 0) & (mask <= MAX_WEIGHT)).all():  # NaN is none, too
                at = int(np.argmin(is_weight))
                raise BadRowError(
                    "labels",
                    f"{name} is {mask[at]} at token {at:,}, and weights are 0 to {MAX_WEIGHT:,.0f}",
                )
            weights *= mask if name == "loss_mask" else mask > 0
    labels = per_token.get("labels")
    if labels is not None:
        _check_labels(ids, labels)
        weights[labels == -100] = 0
    return weights


def _check_labels(ids: Ints, labels: Ints) -> None:
    """Refuse labels that are neither -100 nor their token, and say so where they are shifted."""
    is_trained = labels != -100
    if not (wrong := is_trained & (labels != ids)).any():
        return
    at = int(np.argmax(wrong))
    says = f"label {at:,} is {labels[at]}, and the token there {ids[at]}"
    for what, own, others in (
        ("behind", labels[:-1], ids[1:]),
        ("before", labels[1:], ids[:-1]),
    ):
        if (own != -100).any() and (own[own != -100] == others[own != -100]).all():
            says += f": labels are shifted by one, each is the token {what} its own"
            break
    raise BadRowError("labels", f"{says}; a label is its own token or -100, trainers shift them")


def _starts(
    row: Mapping[str, Any],
    named: Mapping[str, str],
    per_token: Mapping[str, Ints],
    places: Ints,
    num_values: int,
) -> Ints:
    """Where records begin among the tokens at `places`; whatever says so must say the same."""
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
        if bounds[-1] == num_values:  # they count pads; two in front: 0, 5, 8 -> 0, 3, 6
            bounds = np.unique(np.maximum(bounds - places[:1].sum(), 0))
        said[ours] = bounds[bounds < len(places)]
    segments = per_token.get("attention_mask", places[:0])
    if segments.max(initial=0) > 1:
        said["attention_mask"] = np.flatnonzero(np.diff(segments[places], prepend=-1))
    if "position_ids" in per_token and len(places):
        positions = per_token["position_ids"][places]
        if len(positions) > 1 and not np.diff(positions).any():
            raise BadRowError(
                "boundaries", f"position_ids are {positions[0]} everywhere, so they count nothing"
            )
        # Positions 0 1 2 0 1 -> records begin at 0 and 3; the first always does.
        begins = np.flatnonzero(np.diff(positions, prepend=positions[0] - 2) != 1)
        if positions[begins].any():
            at = int(begins[np.argmax(positions[begins] != 0)])
            raise BadRowError(
                "boundaries",
                f"position_ids go on with {positions[at]} at token {at:,}: they count from 0 in "
                "each record",
            )
        said["position_ids"] = begins
    (first, starts), *others = [*said.items()] or [("", np.zeros(1, np.int64))]
    for name, other in others:
        if not np.array_equal(starts, other):
            raise BadRowError(
                "boundaries",
                f"by {first} {len(starts):,} records begin in the row, by {name} {len(other):,} or "
                "at other tokens; leave out the one that is wrong",
            )
    return starts


def _turns(ids: Ints, weights: Weights) -> list[Turn]:
    """One turn for each run of tokens of equal weight."""
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(ids)]  # 0 0 1 1 -> [0, 2, 4]
    # Without a user's turn, the group of a record is all of it: see `identity.group_keys`.
    untrained = "user" if not weights[:_LEAST_PROMPT].any() else "system"
    turns: list[Turn] = []
    for start, end in pairwise(edges if len(ids) else []):
        weight = float(weights[start])
        role = "assistant" if weight else untrained
        content = ids[start:end].astype(">u4").tobytes().hex()
        loss_weight = None if weight in (0, 1) else weight
        turns.append((role, content, None, None, None, None, None, loss_weight, None))
    return turns
