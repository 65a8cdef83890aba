"""A shard's conversations as flat Arrow columns, so that templates work on columns, not on rows.

A `list<message>` column is one long run of messages plus row starts. Rows whose messages have the
same roles in the same order are one *shape*: a template puts the same constants between the
contents of all of them, so a shape is rendered with a handful of Arrow kernels.
Costs about 10 ms per 50,000 rows; `messages_of` (dicts for Jinja) costs 5 us a message and is only
for rows that no shape covers. `decide_weights` says which messages are trained, and how much.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Float32s, Int64s
from packhouse.recipe import FormatConfig
from packhouse.records.lists import list_items, one_chunk
from packhouse.records.messages import ROLES, with_field
from packhouse.records.tables import MESSAGE

_OTHER = 7
_TRAINED, _SCALED, _CONTEXT = 8, 16, 32


class Turn(NamedTuple):
    """What a template may know of a message without reading its text."""

    role: str
    has_context: bool = False
    is_trained: bool = True
    is_scaled: bool = False
    """Trained with a weight other than 1."""


Shape = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Flat columns of `num_rows` conversations; message j of row i is at `starts[i] + j`."""

    source: pa.Array
    row: pa.Array
    starts: np.ndarray
    """int64 [num_rows + 1], positions in the columns below."""
    values: pa.StructArray
    """All messages, type MESSAGE; `weight` as decided by `decide_weights`."""
    content: pa.Array
    context: pa.Array
    """Null where a message has none; empty context counts as none."""
    is_plain: np.ndarray
    """bool [num_rows]: nothing but roles, contents and contexts (no tools, arguments, reasoning,
    names)."""
    tools: pa.Array
    arguments: pa.Array
    label: pa.Array
    row_weights: np.ndarray
    """float32 [num_rows]: factor of each row, which is in the weights of its messages."""

    @classmethod
    def from_table(cls, table: pa.Table, config: FormatConfig) -> "Conversations":
        """Take the columns apart, put in system turns that the recipe adds, and decide weights."""
        values, starts = list_items(table.column("messages"))
        if config.system is not None:
            starts, values = _put_system(starts, values, config.system)
        row_weights = pc.fill_null(one_chunk(table.column("weight")), 1).to_numpy()
        weights = decide_weights(values, starts, config) * np.repeat(row_weights, np.diff(starts))
        values = with_field(values, "weight", pa.array(weights, pa.float32()))
        context = values.field("context")
        blank = pc.equal(pc.fill_null(context, ""), "")
        context = pc.if_else(blank, pa.scalar(None, pa.string()), context)
        tools, arguments = _with_defaults(
            one_chunk(table.column("tools")), one_chunk(table.column("arguments")), config
        )
        extras = [
            values.field(name)
            for name in ("reasoning", "tool_calls", "tool_call_id", "name", "part_weights")
        ]
        rich = np.zeros(len(values), dtype=bool)
        for extra in extras:
            if extra.null_count != len(extra):
                rich |= extra.is_valid().to_numpy(zero_copy_only=False)
        is_plain = ~_any_per_row(rich, starts)
        for aside in (tools, arguments):
            is_plain &= aside.is_null().to_numpy(zero_copy_only=False)
        label = one_chunk(table.column("label"))
        source, row = one_chunk(table.column("source")), one_chunk(table.column("row"))
        content = values.field("content")
        return cls(
            source,
            row,
            starts,
            values,
            content,
            context,
            is_plain,
            tools,
            arguments,
            label,
            row_weights,
        )

    @property
    def num_rows(self) -> int:
        """Number of conversations."""
        return len(self.starts) - 1

    def name_of(self, number: int) -> str:
        """Return the source and row of a conversation, as lineage names them."""
        return f"{self.source[number]} row {self.row[number]}"

    def codes(self, *, with_context: bool = False) -> np.ndarray:
        """int64 [number of messages]: role, whether it is trained, and by what kind of weight.

        Without `with_context`, contexts are not told apart (they are part of the content).
        """
        roles = pc.index_in(self.values.field("role"), value_set=pa.array(ROLES))
        codes = pc.fill_null(roles, _OTHER).to_numpy().astype(np.int64)
        weight = self.weights
        codes |= np.where(weight > 0, _TRAINED, 0) | np.where(
            (weight > 0) & (weight != 1), _SCALED, 0
        )
        if with_context:
            codes |= np.where(self.context.is_valid().to_numpy(False), _CONTEXT, 0)
        return np.asarray(codes)

    def group(
        self, codes: np.ndarray, row_codes: np.ndarray, wanted: np.ndarray
    ) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield the rows (ascending) whose messages, and they themselves, have equal codes.

        Args:
            codes: int64 [number of messages].
            row_codes: int64 [num_rows].
            wanted: bool [num_rows]; others are left out.

        Returns:
            The codes of the messages and the row as bytes, and the numbers of the rows.
        """
        # A row's code goes behind those of its messages: messages [1 9 | 1 9 9] and rows [5 6]
        # become [1 9 5 1 9 9 6], cut at [0 3 7]. Each row is a binary of 8 bytes a code, and Arrow
        # groups equal ones.
        codes = np.insert(codes, self.starts[1:], row_codes)
        bounds = (self.starts + np.arange(len(self.starts))) * 8
        keys = pa.Array.from_buffers(
            pa.large_binary(), self.num_rows, [None, pa.py_buffer(bounds), pa.py_buffer(codes)]
        )
        rows = np.flatnonzero(wanted)
        encoded = pc.dictionary_encode(keys.take(pa.array(rows)))
        of_row = encoded.indices.to_numpy()
        order = rows[np.argsort(of_row, kind="stable")]
        ends = np.cumsum(np.bincount(of_row, minlength=len(encoded.dictionary)))
        for number, key in enumerate(encoded.dictionary.to_pylist()):
            yield key, order[ends[number - 1] if number else 0 : ends[number]]

    @property
    def weights(self) -> np.ndarray:
        """float32 [number of messages]; 0: not trained."""
        return np.asarray(self.values.field("weight").to_numpy())

    def weights_of(self, message: int, rows: np.ndarray) -> np.ndarray:
        """Weight of a message in each of the rows; of -1, which is a label's text, the row's."""
        own = self.row_weights[rows] if message < 0 else self.weights[self.starts[rows] + message]
        return np.asarray(own)

    def messages_of(
        self, rows: np.ndarray
    ) -> Iterator[tuple[list[dict[str, object]], tuple[str | None, str | None]]]:
        """Yield each row's messages (dicts of MESSAGE, nulls left out); its tools and arguments."""
        if len(rows) == 1:  # to gather costs more than it does for many
            start, end = self.starts[rows[0] : rows[0] + 2]
            given = self.tools[rows[0]].as_py(), self.arguments[rows[0]].as_py()
            yield list(_dicts(self.values.slice(start, end - start))), given
            return
        asides = (each.take(pa.array(rows)).to_pylist() for each in (self.tools, self.arguments))
        givens = list(zip(*asides, strict=True))
        for first in range(0, len(rows), 512):
            block = rows[first : first + 512]
            lengths = self.starts[block + 1] - self.starts[block]
            flat = self.values.take(pa.array(_ranges(self.starts[block], lengths)))
            items = _dicts(flat)
            for position, length in enumerate(lengths.tolist()):
                yield [next(items) for _ in range(length)], givens[first + position]


DEFAULTS = ("tools", "documents")
"""Arguments of a recipe that stand in for those of rows that have none."""


def _with_defaults(
    tools: pa.Array, arguments: pa.Array, config: FormatConfig
) -> tuple[pa.Array, pa.Array]:
    given = config.chat_template_kwargs
    if given.get("tools"):
        tools = pc.fill_null(tools, json.dumps(given["tools"]))
    if given.get("documents"):
        own = {"documents": given["documents"]}
        texts = [json.dumps(own | json.loads(text or "{}")) for text in arguments.to_pylist()]
        arguments = pa.array(texts, pa.string())
    return tools, arguments


def _put_system(
    starts: np.ndarray, values: pa.StructArray, system: str
) -> tuple[np.ndarray, pa.StructArray]:
    is_system = pc.equal(values.field("role"), "system").to_numpy(zero_copy_only=False)
    lacking = np.flatnonzero(~_any_per_row(is_system, starts))
    message = pa.array([{"role": "system", "content": system}], MESSAGE)
    # Starts [0 2 4], row 1 lacks it: messages [0 1 4 2 3], of which 4 is the new one; [0 2 5].
    order = np.insert(np.arange(len(values)), starts[lacking], len(values))
    added = np.zeros(len(starts), dtype=np.int64)
    added[lacking + 1] = 1
    return starts + np.cumsum(added), pa.concat_arrays([values, message]).take(pa.array(order))


def _any_per_row(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return True for each row with a flagged message; rows may be empty.

    Example:
        >>> _any_per_row(np.array([False, True, False]), np.array([0, 2, 2, 3])).tolist()
        [True, False, False]
    """
    total = np.concatenate([[0], np.cumsum(flags)])
    return np.asarray(total[starts[1:]] > total[starts[:-1]])


def _ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    # Begins [4, 9], lengths [2, 3] -> [4, 5, 9, 10, 11].
    before = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(lengths.sum()) + np.repeat(begins - before, lengths))


def _dicts(values: pa.StructArray) -> Iterator[dict[str, object]]:
    names = [f.name for f in values.type if values.field(f.name).null_count != len(values)]
    for items in zip(*(values.field(name).to_pylist() for name in names), strict=True):
        yield {n: item for n, item in zip(names, items, strict=True) if item is not None}


def make_shape(codes: np.ndarray) -> Shape:
    """The shape that codes of messages stand for."""
    return tuple(
        Turn(
            ROLES[code & 7] if code & 7 < len(ROLES) else "other",
            bool(code & _CONTEXT),
            bool(code & _TRAINED),
            bool(code & _SCALED),
        )
        for code in codes.tolist()
    )


def decide_weights(messages: pa.StructArray, starts: Int64s, config: FormatConfig) -> Float32s:
    """Loss weight of each message, decided before any rendering; 0: not trained.

    What a row says of a message (`weight`, `loss_weight`, `train`) goes before `train_on`, whatever
    the message's role and the template; but roles of `never_train` weigh 0, and tool results weigh
    more than that only under `train_on: all`.

    Args:
        messages: all messages of all conversations, type MESSAGE.
        starts: where each conversation's begin, shape [num_conversations + 1].
        config: `train_on`, `never_train` and `template` are read.

    Example:
        >>> from packhouse.records.tables import MESSAGE
        >>> turns = [("user", None), ("assistant", 0.5), ("user", 1.0), ("assistant", None)]
        >>> messages = [{"role": role, "content": "", "weight": weight} for role, weight in turns]
        >>> decide_weights(pa.array(messages, MESSAGE), np.array([0, 4]), FormatConfig()).tolist()
        [0.0, 0.5, 1.0, 1.0]
    """
    role = pc.fill_null(pc.index_in(messages.field("role"), value_set=pa.array(ROLES)), 4)
    role = role.to_numpy(zero_copy_only=False)
    if config.train_on == "all" or config.template == "text":
        is_trained = np.ones(len(role), np.bool_)
    else:
        is_trained = np.asarray(role == ROLES.index("assistant"))
        if config.train_on == "last_assistant":
            # Answers [0 1 0 1 | 0 1], starts [0 4 6]: the 1st, 2nd and 3rd of all; the last ones
            # of their rows are the 2nd and the 3rd.
            through = np.cumsum(is_trained)
            total = np.append(0, through)[starts]
            is_trained &= through == np.repeat(total[1:], np.diff(starts))
    weights = is_trained.astype(np.float32)
    given = messages.field("weight")
    if given.null_count < len(given):
        own = given.to_numpy(zero_copy_only=False)  # NaN where null
        weights = np.where(np.isnan(own), weights, own).astype(np.float32)
    never = [ROLES.index(name) for name in config.never_train]
    if config.train_on != "all":
        never.append(ROLES.index("tool"))
    weights[np.isin(role, never)] = 0
    return weights
