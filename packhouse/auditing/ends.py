"""BOS, end and unknown tokens where none belongs, found by ids alone."""

import numpy as np

from packhouse.auditing.second_look import are_written
from packhouse.auditing.tokens import Tokens
from packhouse.system.arrays import Int32s, Int64s
from packhouse.tokenize.pipeline import TokenizerSnapshot


def double_ends(tokens: Tokens, end_ids: Int32s) -> Int64s:
    """Return 1 for each row with an end token behind the same one, neither of them content."""
    ends = tokens.control[np.isin(tokens.ids[tokens.control], end_ids)]
    first, second = ends[:-1], ends[1:]
    rows = tokens.row_of(second)
    is_double = (second == first + 1) & (tokens.ids[first] == tokens.ids[second])
    is_double &= tokens.row_of(first) == rows
    is_double &= ~tokens.are_content(first, second)
    doubtful = np.flatnonzero(is_double & ~tokens.is_exact[rows])
    is_double[doubtful] = ~are_written(tokens, rows[doubtful], first[doubtful], second[doubtful])
    return np.minimum(np.bincount(rows[is_double], minlength=len(tokens.offsets) - 1), 1)


def bos_and_unknown(tokens: Tokens, snapshot: TokenizerSnapshot) -> dict[str, Int64s]:
    """Return of each row: is a BOS double, is BOS missing, and how many tokens are unknown."""
    num_rows = len(tokens.offsets) - 1
    named = snapshot.special_tokens
    bos_text = named.get("bos_token") or named.get("cls_token") or ""
    bos = snapshot.added_tokens.get(bos_text, -1)
    eos = snapshot.added_tokens.get(named.get("eos_token") or named.get("sep_token") or "", -1)
    double = missing = np.zeros(num_rows, np.int64)
    if bos >= 0:
        places = tokens.control[tokens.ids[tokens.control] == bos]
        rows = tokens.row_of(places)
        is_first = places == tokens.offsets[rows]
        # A BOS that the template writes is due: ChatML's may open every turn. One right behind
        # another is not: [BOS, BOS, a, BOS, b] has one double.
        is_double = ~is_first & (tokens.ids[places - 1] == bos)
        is_double &= ~tokens.are_content(places, places)
        if bos == eos:  # then it ends turns, and only a second one right behind the first is double
            is_double &= places == tokens.offsets[rows] + 1
        double = np.minimum(np.bincount(rows[is_double], minlength=num_rows), 1)
        for row in np.unique(rows[~tokens.is_exact[rows]]).tolist():  # places are not known there
            text = tokens.data[tokens.bases[row] : tokens.bases[row + 1]].tobytes()
            num_written = max(text.count(bos_text.encode()), 1)
            double[row] |= np.count_nonzero(rows == row) > num_written
        if snapshot.adds_bos:
            missing = 1 - np.bincount(rows[is_first], minlength=num_rows)
    unknown = np.zeros(num_rows, np.int64)
    if tokens.pipeline.unk_id is not None and tokens.pipeline.unk_id not in (bos, eos):
        places = np.flatnonzero(tokens.ids == tokens.pipeline.unk_id)
        unknown = np.bincount(tokens.row_of(places), minlength=num_rows)
    return {"double_bos": double, "missing_bos": missing, "unknown_tokens": unknown}
