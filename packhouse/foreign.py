"""What runs the code of strangers, templates and tokenizers: each function here works in a child.

They take paths and settings, leave tables in a folder and return plain JSON; see
`packhouse.runtime.confine`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.arrays import Int64s
from packhouse.errors import TemplateError, TokenizerError
from packhouse.recipe import Recipe
from packhouse.records.pairs import (
    check_answers,
    cut_behind_answers,
    join_sides,
    keep_both,
)
from packhouse.records.tables import FORMATTED, read_table, refused_rows, write_table
from packhouse.runtime.confine import run_confined
from packhouse.templates import WindowRule, make_renderer, rewrites
from packhouse.tokenization import TokenizerSnapshot, load_snapshot, tokenize_table
from packhouse.tokenization.encoders import load_tokenizer
from packhouse.tokenization.given import pass_tokens, read_given
from packhouse.tokenization.loading import MEMORY_PER_BYTE, tokenizer_bytes

REFUSED = "refused.arrow"
"""Rows that a template or tokenizer refused; their raw bytes are in the source, not here."""

REJECTED = "rejected.arrow"
"""Of pairs, the other sides of `validated.arrow` and of `formatted.arrow`, row by row."""


def run_template(call: Callable[[], Any], recipe: Recipe, num_bytes: int = 0) -> Any:
    """Do a call in a child that renders, and may tokenize, `num_bytes` of rows."""
    num_bytes += tokenizer_bytes(recipe.tokenizer)
    return run_confined(
        call,
        what=f"template '{recipe.format.template}' with tokenizer '{recipe.tokenizer}'",
        blames=TemplateError,
        num_bytes=num_bytes,
        more_memory=num_bytes * MEMORY_PER_BYTE,
    )


def run_tokenizer(call: Callable[[], Any], tokenizer: str, num_bytes: int = 0) -> Any:
    """Do a call in a child that tokenizes `num_bytes` of text."""
    return run_confined(
        call,
        what=f"tokenizer '{tokenizer}'",
        blames=TokenizerError,
        num_bytes=num_bytes,
        more_memory=num_bytes * MEMORY_PER_BYTE,
    )


def render_shard(
    validated: Path, recipe: Recipe, label_names: list[str] | None, cache: Path | None, folder: Path
) -> dict[str, object]:
    """Write `formatted.arrow`, `refused.arrow` and, where rows were split, `examples.arrow`.

    Of pairs, `rejected.arrow` beside `validated` has the other sides, and so has the one that is
    written beside `formatted.arrow`.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache=cache)
    window = make_window_rule(recipe, snapshot, cache)
    renderer = make_renderer(recipe.format, snapshot, label_names, window)
    rendered = renderer.render(read_table(validated))
    formatted, refused, notes = rendered.formatted, rendered.quarantined, Counter(rendered.notes)
    if recipe.preferences:
        formatted = cut_behind_answers(formatted)
    if recipe.preferences == "pairs":
        other = renderer.render(read_table(validated.with_name(REJECTED)))
        rejected = cut_behind_answers(other.formatted)
        both = (refused, other.quarantined)
        formatted, rejected, refused = keep_both(formatted, rejected, both)
        write_table(folder / REJECTED, rejected)
        notes.update(other.notes)
    write_table(folder / "formatted.arrow", formatted)
    write_table(folder / REFUSED, refused)
    if window is not None or rewrites(recipe.format):
        write_table(folder / "examples.arrow", rendered.examples)
    return {"notes": dict(notes), "added": rendered.added}


def tokenize_shard(
    formatted: Path, recipe: Recipe, cache: Path | None, folder: Path, given: Path | None = None
) -> dict[str, object]:
    """Write `tokenized.arrow` and `refused.arrow`; both sides of a pair become one record.

    `given` holds ids that rows came with.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache=cache)
    if given is None:
        result = tokenize_table(read_table(formatted), snapshot, recipe.tokenize, cache=cache)
    else:
        result = pass_tokens(read_table(given), snapshot)
    tokenized, refused, notes = result.tokenized, result.quarantined, Counter(result.notes)
    if recipe.preferences == "pairs":
        other = tokenize_table(
            read_table(formatted.with_name(REJECTED)), snapshot, recipe.tokenize, cache=cache
        )
        both = (refused, other.quarantined)
        chosen, rejected, refused = keep_both(tokenized, other.tokenized, both)
        tokenized, faults = join_sides(chosen, rejected)
        bad = refused_rows(chosen, faults, "tokenize")
        refused = pa.concat_tables([refused, bad]).sort_by("row")
        notes.update(other.notes)
    elif recipe.preferences:
        faults = check_answers(tokenized)
        bad = refused_rows(tokenized, faults, "tokenize")
        refused = pa.concat_tables([refused, bad]).sort_by("row")
        tokenized = tokenized.take(np.setdiff1d(np.arange(tokenized.num_rows), list(faults)))
    write_table(folder / "tokenized.arrow", tokenized)
    write_table(folder / REFUSED, refused)
    tokenizer = {
        "fingerprint": snapshot.fingerprint,
        "class": snapshot.class_name,
        "vocab_size": snapshot.vocab_size,
    }
    return {"notes": dict(notes), "encoder": result.encoder, "tokenizer": tokenizer}


def try_rows(
    recipe: Recipe,
    row_format: str,
    label_names: list[str] | None,
    cache: Path | None,
    folder: Path,
) -> None:
    """Render and tokenize `validated.arrow`; write `tokenized.arrow` and `refused.arrow`."""
    if row_format == "tokenized":
        given = read_given(
            read_table(folder / "validated.arrow"), load_snapshot(recipe.tokenizer, cache=cache)
        )
        write_table(folder / "tokenized.arrow", given.tokenized)
        write_table(folder / REFUSED, given.quarantined)
        return
    texts, tokens = folder / "texts", folder / "tokens"
    for each in (texts, tokens):
        each.mkdir()
    render_shard(folder / "validated.arrow", recipe, label_names, cache, texts)
    tokenize_shard(texts / "formatted.arrow", recipe, cache, tokens)
    (tokens / "tokenized.arrow").rename(folder / "tokenized.arrow")
    bad = [read_table(each / REFUSED) for each in (texts, tokens)]
    write_table(folder / REFUSED, pa.concat_tables(bad))


def usual_template(tokenizer: str, cache: Path, *, has_labels: bool) -> str:
    """The template for labels or for answers, by what the tokenizer brings: BERT's has no EOS."""
    snapshot = load_snapshot(tokenizer, cache=cache)
    if has_labels:
        has_end = snapshot.special_tokens.get("eos_token")
        return "classification" if has_end else "sequence_classification"
    return "alpaca_newline" if snapshot.chat_template is None else "chat"


def decode(
    load: Callable[[], TokenizerSnapshot | None], rows: Sequence[Sequence[int]]
) -> list[str]:
    """Text of each row of ids, control tokens included."""
    snapshot = load()
    assert snapshot is not None, "the caller loaded it before"
    tokenizer = load_tokenizer(snapshot.backend)
    return [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in rows]


def cuts_windows(recipe: Recipe) -> bool:
    """Return True if over-long conversations are split to windows."""
    return recipe.pack.over_length == "window" and recipe.pack.strategy != "concat"


def make_window_rule(
    recipe: Recipe, snapshot: TokenizerSnapshot, cache: Path | None = None
) -> WindowRule | None:
    """What fits into a window, by the recipe's own tokens; None where there are no windows."""
    if not cuts_windows(recipe):
        return None

    def measure(formatted: pa.Table) -> Int64s:
        numbered = formatted.set_column(
            formatted.schema.get_field_index("row"),
            FORMATTED.field("row"),
            pa.array(np.arange(formatted.num_rows)),
        )
        tokenized = tokenize_table(numbered, snapshot, recipe.tokenize, cache=cache).tokenized
        lengths = np.full(formatted.num_rows, -1, np.int64)
        lengths[tokenized["row"].to_numpy()] = tokenized["num_tokens"].to_numpy()
        return lengths

    return WindowRule(recipe.pack.seq_len, measure)
