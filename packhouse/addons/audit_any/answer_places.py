"""Where answers stand in rows that another tool tokenized, and what is missing around them.

The places come from what a template writes (`turns`): the header before an answer, the header of a
user's turn, and the control token that conversations begin with.
"""

import re
from dataclasses import dataclass

import numpy as np

from packhouse.addons.audit_any.token_rows import TokenRows
from packhouse.auditing.turns import TokenBytes, Turns
from packhouse.system.arrays import Bools, Int64s

_LEAST_PROMPT = 8  # tokens before an answer without a header; fewer are no conversation's


@dataclass(frozen=True, slots=True, eq=False)
class AnswerPlaces:
    """The answers behind headers, in the order of the rows; arrays of shape [num_answers]."""

    rows: TokenRows
    data: bytes
    """Bytes of all tokens, as `TokenBytes.join` lays them."""
    edges: Int64s
    """Where each token begins in `data`, and the end of all."""
    turns: Turns
    table: TokenBytes
    headers: Int64s
    """Token that each header begins in."""
    begins: Int64s
    """First token behind the header."""
    stops: Int64s
    """Behind the answer's end token, or where the next header or record begins."""
    records: Int64s

    @staticmethod
    def of(
        rows: TokenRows, data: bytes, edges: Int64s, turns: Turns, table: TokenBytes
    ) -> "AnswerPlaces":
        """Find the answers, where it is known what opens them."""
        opens = re.compile(b"|".join(map(re.escape, turns.answer_opens)))
        num_tokens = len(rows.ids)
        spans = np.array([m.span() for m in opens.finditer(data)], np.int64).reshape(-1, 2)
        # Tokens at bytes [0 5 15 20], a header in bytes [5, 15): it begins in token 1, and the
        # answer with token 2.
        first, begins = np.searchsorted(edges, spans[:, 0]), np.searchsorted(edges, spans[:, 1])
        records = np.searchsorted(rows.starts, np.minimum(first, num_tokens - 1), "right") - 1
        limits = np.minimum(rows.starts[records + 1], np.append(first[1:], num_tokens))
        at = _next(np.isin(rows.ids, list(turns.end_ids)), begins)
        stops = np.minimum(np.where(at < limits, at + 1, limits), num_tokens)
        stops = np.maximum(stops, begins)
        return AnswerPlaces(rows, data, edges, turns, table, first, begins, stops, records)

    def untrained_starts(self, thought_tags: tuple[bytes, ...]) -> Int64s:
        r"""First tokens of answers that are trained, but not from their first token on.

        Thoughts may be left out, and the tags that a prompt of inference ends with:

            <|im_start|>assistant\n<think>\n\n</think>\n\nFour.<|im_end|>
                                   ------ untrained -----  --- trained ---

        An answer that is not trained but for its end token counts where its record teaches nothing
        else: some tools train the end of every turn.

        Args:
            thought_tags: `<think>` and `</think>`, as bytes of the table.
        """
        rows, num_tokens = self.rows, len(self.rows.ids)
        is_text = ~self.table.is_blank[rows.ids]
        is_said = is_text & ~np.isin(rows.ids, list(self.turns.end_ids))
        first, taught = _next(is_text, self.begins), _next(is_text & rows.trained, self.begins)
        # Counts of trained words before each token: of [begin, stop) they are a difference.
        said = np.append(0, np.cumsum(is_said & rows.trained))
        teaches = said[self.stops] > said[self.begins]
        of_record = said[rows.starts[self.records + 1]] - said[rows.starts[self.records]]
        is_late = (first < taught) & (taught < self.stops) & (teaches | (of_record == 0))
        is_late &= is_said[np.minimum(first, num_tokens - 1)]
        found = [
            begin
            for begin, end in zip(first[is_late].tolist(), taught[is_late].tolist(), strict=True)
            if not self.data[self.edges[begin] : self.edges[end]].rstrip().endswith(thought_tags)
        ]
        return np.array(found, np.int64)

    def cut_prompts(self, runs: Int64s, bos_id: int) -> Int64s:
        r"""Return a place in each record whose prompt was cut.

        - At its end: an answer behind a prompt, and no header between them.
        - In front: the record does not begin with a control token, as all that the template writes
          do (`no?<|im_end|>\n<|im_start|>assistant\nYes.`); of a template that begins with text,
          no user's turn opens before the first answer.

        A cut between two turns leaves a whole conversation: `begin_otherwise`.

        Args:
            runs: where runs of trained tokens begin.
            bos_id: the BOS that stands before conversations; -1: none.
        """
        rows = self.rows
        record = np.searchsorted(rows.starts, runs, "right") - 1
        record, first = np.unique(record, return_index=True)
        is_bare = ~np.isin(record, self.records)
        is_bare &= runs[first] - rows.starts[record] >= _LEAST_PROMPT
        bare = runs[first][is_bare]
        record, first = np.unique(self.records, return_index=True)
        starts, until = rows.starts[record], self.headers[first]
        starts = starts + (rows.ids[starts] == bos_id)
        is_cut = _next(~self.table.is_blank[rows.ids], starts) < until
        if self.turns.begins_with_control:
            own = rows.ids[np.minimum(starts, len(rows.ids) - 1)]
            is_cut &= ~self.table.is_control[own] | np.isin(own, list(self.turns.end_ids))
        elif self.turns.user_opens:
            opens = re.finditer(re.escape(self.turns.user_opens), self.data)
            users = np.array([match.start() for match in opens], np.int64)
            before, behind = (np.searchsorted(users, self.edges[at]) for at in (starts, until))
            is_cut &= before == behind
        else:
            is_cut[:] = False
        return np.sort(np.append(bare, starts[is_cut]))

    def begin_otherwise(self, bos_id: int) -> tuple[Int64s, int]:
        r"""Return where records begin that do not begin as the template's, and how many do.

        Qwen2.5's template writes a system turn in front of all conversations. One that begins with
        `<|im_start|>user` lost its first turns, or another template made it: the number says which.

        Args:
            bos_id: the BOS that stands before conversations; -1: none.
        """
        rows, begins = self.rows, self.turns.begins
        starts = rows.starts[np.unique(self.records)]
        starts = starts + (rows.ids[starts] == bos_id)
        is_other = np.array(
            [not self.data.startswith(begins, edge) for edge in self.edges[starts].tolist()],
            np.bool_,
        )
        return starts[is_other], int((~is_other).sum())


def _next(is_one: Bools, places: Int64s) -> Int64s:
    """The first token at or behind each place that is one; the number of tokens: none is."""
    # [0 1 0 0 1], places [0 2 5]: [1 4 5].
    ones = np.append(np.flatnonzero(is_one), len(is_one))
    return np.asarray(ones[np.searchsorted(ones, places)])
