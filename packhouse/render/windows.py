"""Split conversations that are too long for a pack into windows that fit.

A window is a run of exchanges (a user turn and all up to the next) after the system prompt, which
each window repeats. Windows are filled from the end, so that the last answer has as much context as
fits. Each trained message is trained in exactly one window, and a window with nothing trained is
left out. An exchange that does not fit even by itself becomes a window, which pack drops and
counts. The template renders each window as a conversation, so this works with any template, and
lengths are counted in real tokens. A long row is rendered and tokenized about 2 log2(exchanges)
times per window.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.recipe import FormatConfig
from packhouse.records.identity import derive
from packhouse.records.messages import ROLES, FlatMessages
from packhouse.system.arrays import Bools, Float32s, Int64s

Window = tuple[int, int]
"""First and last exchange, both inclusive."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Decides which conversations fit in one window."""

    seq_len: int
    """Maximum number of tokens in a window."""
    measure: Callable[[pa.Table], Int64s]
    """FORMATTED table -> number of tokens in each row; -1 if the row is quarantined."""

    def over(self, formatted: pa.Table) -> Bools:
        """Return which rendered rows are too long. Most fit by their bytes and are not tokenized.

        A token covers at least one byte, so a text of 1,500 bytes has at most 1,508 tokens,
        including those that the tokenizer adds, and fits into 2,048.
        """
        num_bytes = pc.binary_length(formatted.column("text")).to_numpy()
        over = num_bytes + 8 > self.seq_len  # a tokenizer adds fewer than 8 tokens
        if over.any():
            over[over] = self.measure(formatted.filter(pa.array(over))) > self.seq_len
        return np.asarray(over)


def split_to_windows(
    table: pa.Table, config: FormatConfig, fits: Callable[[pa.Table], Bools]
) -> tuple[pa.Table, Int64s]:
    """Split over-long conversations into windows.

    Args:
        table: over-long conversations, schema VALIDATED.
        config: decides which messages are trained.
        fits: VALIDATED table -> True for each conversation that fits.

    Returns:
        The windows (schema VALIDATED), and the row of `table` that each comes from, ascending.
    """
    flat = FlatMessages.of(table["messages"])
    starts, weights, roles = flat.offsets, flat.decide_weights(config), flat["role"].to_pylist()
    edges = [_edges(roles, start, end) for start, end in pairwise(starts.tolist())]

    def cut(windows: list[tuple[int, Window]]) -> pa.Table:
        """Return windows as conversations; the system turn is trained only in a row's first one."""
        ranges, own_weights = list[list[tuple[int, int]]](), list[Float32s | None]()
        for row, (first, last) in windows:
            head = int(starts[row]), edges[row][0]
            body = edges[row][first], edges[row][last + 1]
            own = [weights[slice(*head)] * (first == 0), weights[slice(*body)]]
            is_whole = body == (edges[row][0], edges[row][-1])
            ranges.append([head, body])
            own_weights.append(None if is_whole else np.concatenate(own))
        rows = np.array([row for row, _ in windows], np.int64)
        return derive(table, config, rows, ranges, own_weights)

    plans = [_plan(len(own) - 1) for own in edges]
    asked = {row: next(plan) for row, plan in enumerate(plans)}
    chosen: list[tuple[int, Window]] = []
    while asked:
        windows = [*asked.items()]
        for (row, _), answer in zip(windows, fits(cut(windows)), strict=True):
            try:
                asked[row] = plans[row].send(bool(answer))
            except StopIteration as stop:
                del asked[row]
                chosen += [(row, window) for window in stop.value]
    trained = [
        (row, (first, last))
        for row, (first, last) in sorted(chosen)
        if (weights[edges[row][first] : edges[row][last + 1]] > 0).any()
    ]
    return cut(trained), np.array([row for row, _ in trained], np.int64)


def _edges(roles: list[str], start: int, end: int) -> list[int]:
    """Return the start of each exchange of a conversation, and the end of the last."""
    first = start + (roles[start] == ROLES[0])
    # Several user turns in a row begin one exchange, because the answer is to all of them.
    begins = [at for at in range(first + 1, end) if roles[at] == "user" and roles[at - 1] != "user"]
    return [first, *begins, end]


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
            while good - bad > 1:  # gallop, then halve
                first = max(0, good - step) if bad < 0 else (good + bad) // 2
                if (yield first, last):
                    good, step = first, 2 * step
                else:
                    bad = first
        windows.append((good, last))
        last = good - 1
    return windows[::-1]
