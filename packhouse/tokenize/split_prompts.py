"""Records whose prompt ends inside a token: prompt and completion are encoded apart.

At inference the prompt is encoded alone, and the model continues it. If one encoding of the record
has a token that crosses the end of the prompt, it begins with other ids than inference gives. Such
a record is encoded in pieces cut there; others (all, of most templates) cost two binary searches.

    text            a the</s>      trained span [2, 9): the prompt ends with a space
    one encoding    a  _the  </s>
    in pieces       a  _  |  the  </s>

Without such a token, only white space at the end of the prompt can be encoded otherwise: GPT-2's
pattern leaves the last of several to the word after them, so that two line breaks are one token at
the end of a text and two before an answer.

A later piece goes on in the middle of a text: it gets none of the spaces that SentencePiece puts
before a text, up to its first added token.
"""

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from packhouse.recipe import Recipe
from packhouse.recipe.rows import CHAT_TEMPLATES, TEMPLATES
from packhouse.system.arrays import Bools, Bytes, Int64s
from packhouse.tokenize.control_text import encode_plain
from packhouse.tokenize.encoders import load_tokenizer
from packhouse.tokenize.offsets import EncodedRow, EncodedRows, Spans, are_crossed, prompt_ends
from packhouse.tokenize.pipeline import read_pipeline

_BEFORE, _AFTER = 8, 4  # bytes around the end of a prompt


def cuts_prompts(recipe: Recipe) -> bool:
    """Return True if prompts are encoded apart where a token crosses their end.

    That is so where a prompt at inference is rendered by a chat template, which ends with the
    header of the answer; other templates say how to write the border themselves.
    """
    config = recipe.format
    is_chat = config.template not in set(TEMPLATES) - set(CHAT_TEMPLATES)
    return is_chat and config.turns != "whole" and config.train_on != "all"


def split_prompts(
    encoded: EncodedRows, spans: Spans, written: Spans, contents: Spans | None, backend: str
) -> tuple[EncodedRows, int]:
    """Encode records in pieces where a token crosses the end of a prompt.

    Args:
        encoded: one encoding of each text.
        spans: trained spans. A prompt ends where one follows text that is not trained; spans that
            touch, such as parts of an answer with weights of their own, are one completion.
        written: spans of the row's own texts, in which no prompt ends.
        contents: spans in which control-token text is plain text; None if there are none.
        backend: the pipeline.

    Returns:
        The rows, and the number of prompts that were cut off. A row that the tokenizer cannot
        encode with plain contents stays as it is.
    """
    ends = prompt_ends(spans)
    # Text [10, 20) is the row's: a span that begins at 14 is a part of an answer with weights, and
    # so is one that begins at 20 if another one ends at 10: the text between is a thought, say.
    before = np.searchsorted(written.starts, spans.starts[ends], "left") - 1
    text_ends = np.append(written.ends, -1)[before]
    goes_on = np.isin(np.append(written.starts, -1)[before], spans.ends)
    is_inside = spans.starts[ends] < text_ends
    is_inside |= (spans.starts[ends] == text_ends) & goes_on
    ends = ends[~is_inside]
    rows, places = spans.rows[ends], spans.starts[ends]
    is_due = _ends_otherwise(encoded.text, places, backend) & (places > encoded.bases[rows])
    is_due |= are_crossed(encoded, spans)[ends]
    cuts: dict[int, set[int]] = {}
    num_split = 0
    while is_due.any():
        changed: dict[int, int] = {}  # row -> how many prompts are cut off anew
        for row, place in zip(rows[is_due].tolist(), places[is_due].tolist(), strict=True):
            if place not in cuts.setdefault(row, set()):
                cuts[row].add(place)
                changed[row] = changed.get(row, 0) + 1
        sorted_cuts = {row: sorted(cuts[row]) for row in changed}
        new = {
            row: found
            for row, found in _encode_in_pieces(sorted_cuts, encoded, contents, backend).items()
            if not np.array_equal(found.ids, encoded.ids_of(row))
        }
        num_split += sum(changed[row] for row in new)
        encoded = encoded.with_rows(new, read_pipeline(backend))
        # Pieces hold other tokens than the whole had: one may cross another prompt's end.
        is_due = are_crossed(encoded, spans)[ends] & np.isin(rows, list(new))
    return encoded, num_split


def _ends_otherwise(text: Bytes, places: Int64s, backend: str) -> Bools:
    """Return, for each place, if white space before it is encoded otherwise at the end of a text.

    Tried on the white space and the character after it, once for all places that have the same.
    """
    is_white = np.zeros(256, np.bool_)
    is_white[list(b" \t\n\v\f\r")] = True
    is_otherwise = (places > 1) & is_white[text[places - 1]] & is_white[text[places - 2]]
    if read_pipeline(backend).has_word_marks:  # SentencePiece has no pattern that looks ahead
        is_otherwise[:] = False
    tried = np.flatnonzero(is_otherwise)
    if not len(tried):
        return is_otherwise
    # "hi \n\nYes", at "Y": the bytes before it are 0 0 0 0 0 32 10 10, those from it on 89 0 0 0.
    before = text.take(places[tried, None] + np.arange(-_BEFORE, 0), mode="clip")
    after = text.take(places[tried, None] + np.arange(_AFTER), mode="clip")
    before[~np.logical_and.accumulate(is_white[before][:, ::-1], axis=1)[:, ::-1]] = 0
    after[after[:, 0] < 0x80, 1:] = 0
    around = np.ascontiguousarray(np.concatenate([before, after], axis=1))
    kinds, which = np.unique(around.view(f"V{_BEFORE + _AFTER}"), return_inverse=True)
    pairs = []
    for kind in kinds.tolist():
        white, rest = (
            part.strip(b"\0").decode(errors="ignore") for part in (kind[:_BEFORE], kind[_BEFORE:])
        )
        pairs.append((white, rest[:1]))
    tokenizer = load_tokenizer(backend)
    whole, apart, rest = (
        [each.ids for each in tokenizer.encode_batch_fast(parts, add_special_tokens=False)]
        for parts in ([a + b for a, b in pairs], [a for a, _ in pairs], [b for _, b in pairs])
    )
    differs = [w != a + r for w, a, r in zip(whole, apart, rest, strict=True)]
    is_otherwise[tried] = np.array(differs)[which.reshape(-1)]
    return is_otherwise


def _encode_in_pieces(
    cuts: dict[int, list[int]], encoded: EncodedRows, contents: Spans | None, backend: str
) -> dict[int, EncodedRow]:
    """Encode rows in pieces, and join these; a row of which one cannot be encoded is left out.

    Text between a cut and the next added token is a piece of its own, an inner one, before which
    nothing is put. `a the</s>[INST] b`, cut at 2: `a ` and `the`, which is inner, and
    `</s>[INST] b`.
    """
    is_added = read_pipeline(backend).is_added
    pieces: dict[int, list[tuple[int, int, bool]]] = {}  # row -> first byte, end, is it inner
    for row, own_cuts in cuts.items():
        start, end = encoded.bases[row : row + 2].tolist()
        own = slice(encoded.offsets[row], encoded.offsets[row + 1])
        added = encoded.starts[own][is_added[encoded.ids[own]]]
        edges = [start]
        for cut, next_cut in pairwise([*own_cuts, end]):
            after = np.searchsorted(added, cut)
            edges += [cut, min(int(added[after]), next_cut) if after < len(added) else next_cut]
        numbered = enumerate(pairwise([*edges, end]))
        pieces[row] = [(first, last, n % 2 == 1) for n, (first, last) in numbered if last > first]
    found: dict[int, EncodedRow | None] = {}  # by the first byte
    for is_inner, its_backend in ((False, backend), (True, _without_prefix(backend))):
        group = [
            (row, first, last)
            for row, parts in pieces.items()
            for first, last, inner in parts
            if inner == is_inner
        ]
        texts = [encoded.text[first:last].tobytes().decode() for _, first, last in group]
        inside = [contents.within(*each) if contents else [] for each in group]
        encodings = encode_plain(texts, inside, its_backend)
        found.update(zip((first for _, first, _ in group), encodings, strict=True))
    joined = {}
    for row, parts in pieces.items():
        base = int(encoded.bases[row])
        done = [(first - base, found[first]) for first, _, _ in parts]
        good = [(shift, part) for shift, part in done if part is not None]
        if len(good) == len(done):
            joined[row] = EncodedRow(
                np.concatenate([part.ids for _, part in good]),
                np.concatenate([part.starts + shift for shift, part in good]),
                np.concatenate([part.ends + shift for shift, part in good]),
            )
    return joined


@lru_cache(maxsize=4)
def _without_prefix(backend: str) -> str:
    """The pipeline without spaces before the text; most have none."""
    parsed = orjson.loads(backend)
    before = {name: parsed[name] for name in ("normalizer", "pre_tokenizer")}
    after = {name: _no_prefix(step) for name, step in before.items()}
    return backend if after == before else orjson.dumps(parsed | after).decode()


def _no_prefix(step: Any) -> Any:
    """A step of a pipeline, with those inside it, that puts nothing before a text; None: no step.

    Steps that do are `Prepend`, `Metaspace`, and those with `add_prefix_space`.
    """
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    if step["type"] == "Metaspace":
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    for name in {"normalizers", "pretokenizers"} & step.keys():
        step[name] = [kept for each in step[name] if (kept := _no_prefix(each)) is not None]
    return step
