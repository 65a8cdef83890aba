"""What runs the code of strangers, templates and tokenizers: each function here works in a child.

They take paths and settings, leave tables in a folder and return plain JSON; see
`packhouse.system.confine`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.auditing.inference import InferenceSide, audit_inference
from packhouse.auditing.plain_template import PlainTemplate
from packhouse.errors import TemplateError, TokenizerError
from packhouse.recipe import Recipe
from packhouse.recipe.rows import CHAT_TEMPLATES, TEMPLATES
from packhouse.records.lists import one_chunk
from packhouse.records.pairs import (
    check_answers,
    cut_behind_answers,
    join_sides,
    keep_both,
    split_sides,
)
from packhouse.records.render_counts import RenderCounts
from packhouse.records.rows import num_rows
from packhouse.records.split_text import SplitText
from packhouse.records.tables import FORMATTED, read_table, refused_rows, write_table
from packhouse.render import WindowRule, make_renderer
from packhouse.render.sandbox import pinned_date
from packhouse.system.arrays import Int64s
from packhouse.system.confine import run_confined
from packhouse.tokenize import TokenizerSnapshot, load_snapshot, tokenize_table
from packhouse.tokenize.encoders import load_tokenizer
from packhouse.tokenize.given import pass_tokens, read_given
from packhouse.tokenize.loading import MEMORY_PER_BYTE, tokenizer_bytes
from packhouse.tokenize.names import tokenizer_folder

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
) -> dict[str, Any]:
    """Write `formatted.arrow`, `refused.arrow` and, if a record is not its row, `examples.arrow`.

    Of pairs, `rejected.arrow` beside `validated` has the other sides, and so has the one that is
    written beside `formatted.arrow`.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    window = make_window_rule(recipe, snapshot, cache)
    tokenizer = tokenizer_folder(recipe.tokenizer)
    renderer = make_renderer(recipe.format, snapshot, label_names, window, tokenizer)
    table = read_table(validated)
    rendered = renderer.render(table)
    formatted, refused, notes = rendered.formatted, rendered.quarantined, Counter(rendered.notes)
    if recipe.preferences:
        assert not rendered.added, "one answer of a side is trained, so a side is one record"
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
    if not _are_same(rendered.examples, table):
        write_table(folder / "examples.arrow", rendered.examples)
    return {
        "notes": dict(notes),
        "added": rendered.added,
        "stop_tokens": dict(rendered.stop_tokens),
    }


def _are_same(records: pa.Table, rows: pa.Table) -> bool:
    """Return True if each row is one record, as it came: ids and groups tell."""
    return records.num_rows == rows.num_rows and all(
        one_chunk(records[name]).equals(one_chunk(rows[name]))
        for name in ("record_id", "group_key")
    )


def tokenize_shard(
    formatted: Path, recipe: Recipe, cache: Path | None, folder: Path, given: Path | None = None
) -> dict[str, object]:
    """Write `tokenized.arrow` and `refused.arrow`; both sides of a pair become one record.

    `given` holds ids that rows came with.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    options = {"cut_at_spans": cuts_prompts(recipe)}
    if given is None:
        result = tokenize_table(read_table(formatted), snapshot, recipe.tokenize, cache, **options)
    else:
        result = pass_tokens(read_table(given), snapshot)
    tokenized, refused, notes = result.tokenized, result.quarantined, Counter(result.notes)
    if recipe.preferences == "pairs":
        rejected_texts = read_table(formatted.with_name(REJECTED))
        other = tokenize_table(rejected_texts, snapshot, recipe.tokenize, cache, **options)
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


def check_prompts(
    conversations: Path,
    formatted: Path,
    tokenized: Path,
    rejected: tuple[Path, Path] | None,
    recipe: Recipe,
    date: str | None,
    cache: Path | None,
) -> dict[str, object]:
    """Compare the answers of a shard with the prompts of inference; see `auditing.inference`.

    Args:
        conversations: those that were rendered: `examples.arrow` or `validated.arrow`.
        formatted: their texts.
        tokenized: their tokens.
        rejected: of pairs, conversations and texts of the rejected sides.
        recipe: of the run.
        date: the day that the texts were made at; None where the template prints none.
        cache: folder of tokenizer snapshots.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    tokens = read_table(tokenized)
    sides = [InferenceSide(read_table(conversations), read_table(formatted), tokens)]
    if rejected is not None:
        chosen, other = split_sides(tokens)
        sides = [
            InferenceSide(sides[0].conversations, sides[0].formatted, chosen),
            InferenceSide(read_table(rejected[0]), read_table(rejected[1]), other),
        ]
    allows_control = recipe.tokenize.control_text == "allow"
    return audit_inference(sides, snapshot, recipe.format, date=date, allows_control=allows_control)


def answer_edges(recipe: Recipe, cache: Path | None) -> dict[str, list[str]]:
    """Return what opens answers at inference, and the tokens that end them."""
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    template = PlainTemplate(recipe.format, snapshot, pinned_date().isoformat())
    return {"opens": template.openings(), "stops": list(template.stop_tokens)}


def try_rows(
    recipe: Recipe,
    row_format: str,
    label_names: list[str] | None,
    cache: Path | None,
    folder: Path,
) -> dict[str, Any]:
    """Render and tokenize `validated.arrow`; write `tokenized.arrow` and `refused.arrow`.

    Returns:
        `text`, the fields of `SplitText`, and `counts`, those of `RenderCounts`.
    """
    if row_format == "tokenized":
        given = read_given(
            read_table(folder / "validated.arrow"),
            load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline),
        )
        write_table(folder / "tokenized.arrow", given.tokenized)
        write_table(folder / REFUSED, given.quarantined)
        return {"text": asdict(SplitText()), "counts": asdict(RenderCounts())}
    texts, tokens = folder / "texts", folder / "tokens"
    for each in (texts, tokens):
        each.mkdir()
    reply = render_shard(folder / "validated.arrow", recipe, label_names, cache, texts)
    tokenize_shard(texts / "formatted.arrow", recipe, cache, tokens)
    (tokens / "tokenized.arrow").rename(folder / "tokenized.arrow")
    bad = [read_table(each / REFUSED) for each in (texts, tokens)]
    write_table(folder / REFUSED, pa.concat_tables(bad))
    sides = [texts / name for name in ("formatted.arrow", REJECTED) if (texts / name).exists()]
    formatted = read_table(texts / "formatted.arrow")
    counts = RenderCounts(
        rows=num_rows(formatted),
        records=formatted.num_rows,
        stop_tokens=reply["stop_tokens"],
        notes=reply["notes"],
    )
    text = SplitText.of(map(read_table, sides), reply["notes"])
    return {"text": asdict(text), "counts": asdict(counts)}


def usual_template(tokenizer: str, cache: Path, *, has_labels: bool) -> str:
    """The template for labels or for answers, by what the tokenizer brings: BERT's has no EOS."""
    snapshot = load_snapshot(tokenizer, cache, "class")  # no ids are asked for
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


def cuts_prompts(recipe: Recipe) -> bool:
    """Return True if prompts are encoded apart where a token crosses their end.

    That is so where a prompt at inference is rendered by a chat template, which ends with the
    header of the answer; other templates say how to write the border themselves.
    """
    config = recipe.format
    is_chat = config.template not in set(TEMPLATES) - set(CHAT_TEMPLATES)
    return is_chat and config.turns != "whole" and config.train_on != "all"


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
        tokenized = tokenize_table(
            numbered, snapshot, recipe.tokenize, cache, cut_at_spans=cuts_prompts(recipe)
        ).tokenized
        lengths = np.full(formatted.num_rows, -1, np.int64)
        lengths[tokenized["row"].to_numpy()] = tokenized["num_tokens"].to_numpy()
        return lengths

    return WindowRule(recipe.pack.seq_len, measure)
