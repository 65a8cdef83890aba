"""Windows: conversations that are too long for a pack, as several that fit.

Conversations that are too long become windows of whole turns, the system prompt in each. A window
is a run of exchanges: a user turn and all up to the next. Windows are filled from the end, so that
the last answer has as much before it as fits. What is trained in the conversation is trained in one
window, and a window with nothing trained is left out; an exchange that does not fit even alone is a
window by itself, which pack drops and counts. Each window is a conversation that the template
renders, so no template is too odd; lengths are those of its real tokens. A long row is rendered and
tokenized some 2 log2(exchanges) times a window.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.arrays import Bools, Float32s, Int64s
from packhouse.recipe import FormatConfig
from packhouse.records.conversations import decide_weights
from packhouse.records.excerpts import derive
from packhouse.records.lists import list_items
from packhouse.records.messages import ROLES

Window = tuple[int, int]
"""First and last exchange, both inclusive."""

_MARGIN = 8  # tokens that a tokenizer may add to those that stand for bytes


@dataclass(frozen=True, slots=True)
class WindowRule:
    """What fits."""

    seq_len: int
    """Tokens that a window may have."""
    measure: Callable[[pa.Table], Int64s]
    """FORMATTED table -> tokens of each row; -1 where it has no tokens (it is quarantined)."""

    def over(self, formatted: pa.Table) -> Bools:
        """Which rendered rows are too long. Most are shorter in bytes already, and not measured.

        A token stands for a byte or more, so a text of 1,500 bytes has at most 1,508 tokens with
        those that the tokenizer adds: it fits into 2,048 without being tokenized.
        """
        num_bytes = pc.binary_length(formatted.column("text")).to_numpy()
        over = num_bytes + _MARGIN > self.seq_len
        if over.any():
            over[over] = self.measure(formatted.filter(pa.array(over))) > self.seq_len
        return np.asarray(over)


def split_to_windows(
    table: pa.Table,
    config: FormatConfig,
    fits: Callable[[pa.Table], Bools],
) -> tuple[pa.Table, Int64s]:
    """Split conversations, all of them over-long.

    Args:
        table: schema VALIDATED.
        config: what is trained.
        fits: VALIDATED table -> which of its conversations fit.

    Returns:
        The windows (schema VALIDATED), and the row of `table` that each comes from, rising.
    """
    talks = _Talks(table, config)
    plans = [_plan(talks.num_exchanges(row)) for row in range(table.num_rows)]
    done: list[list[Window]] = [[] for _ in plans]
    asked = {row: next(plan) for row, plan in enumerate(plans)}
    while asked:
        rows = sorted(asked)
        answers = fits(talks.windows(rows, [asked[row] for row in rows]))
        for row, answer in zip(rows, answers.tolist(), strict=True):
            try:
                asked[row] = plans[row].send(answer)
            except StopIteration as stop:
                del asked[row]
                done[row] = stop.value
    chosen = [(row, w) for row, windows in enumerate(done) for w in windows if talks.trains(row, w)]
    origin = np.array([row for row, _ in chosen], np.int64)
    return talks.windows(origin.tolist(), [window for _, window in chosen]), origin


def _plan(num_exchanges: int) -> Generator[Window, bool, list[Window]]:
    """Ask whether windows fit, and return the ones that cover all exchanges.

    Example:
        >>> plan, answer = _plan(5), None  # windows of up to two exchanges fit
        >>> try:
        ...     while True:
        ...         first, last = plan.send(answer)
        ...         answer = last - first < 2
        ... except StopIteration as stop:
        ...     stop.value
        [(0, 0), (1, 2), (3, 4)]
    """
    windows: list[Window] = []
    last = num_exchanges - 1
    while last >= 0:
        good, bad, step = last, -1, 1
        if (yield last, last):
            while good > 0 and bad < 0:  # gallop, then halve
                first = max(0, good - step)
                if (yield first, last):
                    good, step = first, 2 * step
                else:
                    bad = first
            while good - bad > 1 and bad >= 0:
                middle = (good + bad) // 2
                if (yield middle, last):
                    good = middle
                else:
                    bad = middle
        windows.append((good, last))
        last = good - 1
    return windows[::-1]


class _Talks:
    """Conversations as a head (the system turn) and exchanges."""

    def __init__(self, table: pa.Table, config: FormatConfig) -> None:
        self._table, self._config = table, config
        messages, self._starts = list_items(table["messages"])
        self._weights = decide_weights(messages, self._starts, config)
        roles = messages.field("role").to_pylist()
        self._edges = [self._edges_of(roles, row) for row in range(table.num_rows)]

    def _edges_of(self, roles: list[str], row: int) -> list[int]:
        """Where each exchange begins, and the end of the last."""
        start, end = int(self._starts[row]), int(self._starts[row + 1])
        first = start + (roles[start] == ROLES[0])
        # Several user turns in a row begin one exchange: their answer is to all of them.
        begins = [
            at for at in range(first + 1, end) if roles[at] == "user" and roles[at - 1] != "user"
        ]
        return [first, *begins, end]

    def num_exchanges(self, row: int) -> int:
        return len(self._edges[row]) - 1

    def _ranges(self, row: int, window: Window) -> list[tuple[int, int]]:
        edges = self._edges[row]
        head = (int(self._starts[row]), edges[0])
        return [head, (edges[window[0]], edges[window[1] + 1])]

    def trains(self, row: int, window: Window) -> bool:
        """Return True if anything in the window's own exchanges is trained."""
        start, end = self._ranges(row, window)[1]
        return bool((self._weights[start:end] > 0).any())

    def windows(self, rows: list[int], windows: list[Window]) -> pa.Table:
        """Windows as conversations; the system turn is trained in the first one alone."""
        ranges, weights = list[list[tuple[int, int]]](), list[Float32s | None]()
        for row, window in zip(rows, windows, strict=True):
            head, body = self._ranges(row, window)
            of_head, of_body = (self._weights[start:end] for start, end in (head, body))
            own = np.concatenate([of_head * (window[0] == 0), of_body])
            ranges.append([head, body])
            weights.append(None if window == (0, self.num_exchanges(row) - 1) else own)
        return derive(self._table, self._config, np.array(rows, np.int64), ranges, weights)
