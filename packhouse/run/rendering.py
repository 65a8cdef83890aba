"""Render shards, or a few sample rows, in a worker process (`packhouse.system.worker`).

`run_template` runs a call in a worker. The other functions are such calls: they take paths and
settings, write tables to a folder and return plain JSON. A worker imports this module when it
starts (0.5 s of CPU). Importing steps, sources or the store here would add 0.3 s.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import TemplateError
from packhouse.recipe import Recipe
from packhouse.recipe.settings import is_chat
from packhouse.records.identity import num_rows
from packhouse.records.lists import one_chunk
from packhouse.records.pairs import REJECTED, cut_behind_answers, keep_both
from packhouse.records.render_counts import RenderCounts
from packhouse.records.tables import REFUSED, read_table, write_table
from packhouse.render import WindowRule, make_renderer
from packhouse.system.worker import run_in_worker
from packhouse.tokenize import TokenizerSnapshot, load_snapshot, tokenize_shard
from packhouse.tokenize.encoders import TokenLimit
from packhouse.tokenize.loading import MEMORY_PER_BYTE, tokenizer_bytes, tokenizer_folder
from packhouse.tokenize.pretokenized import read_given
from packhouse.tokenize.tokenizing import cuts_prompts


def run_template(call: Callable[[], Any], recipe: Recipe, num_bytes: int = 0) -> Any:
    """Run a call that renders, and may tokenize, `num_bytes` of rows in a worker process."""
    # Loading it takes time and memory, too.
    num_bytes += tokenizer_bytes(recipe.tokenizer)
    return run_in_worker(
        call,
        what=f"template '{recipe.format.template}' with tokenizer '{recipe.tokenizer}'",
        blames=TemplateError,
        num_bytes=num_bytes,
        more_memory=num_bytes * MEMORY_PER_BYTE,
    )


def cuts_windows(recipe: Recipe) -> bool:
    """Return True if over-long conversations are split into windows."""
    return recipe.pack.over_length == "window" and recipe.pack.strategy != "concat"


def max_record_tokens(recipe: Recipe) -> int | None:
    """Return the length from which records of long rows are only counted; None if all are kept.

    It is `pack.seq_len` rounded up to a power of two, at least 8,192, so that the format step can
    be reused for most changes of `seq_len`.
    """
    pack, config = recipe.pack, recipe.format
    is_split = config.turns != "whole" and config.train_on != "all" and is_chat(config.template)
    if not is_split or pack.over_length != "drop" or pack.strategy == "concat":
        return None
    return int(max(8192, 2 ** (pack.seq_len - 1).bit_length()))


def make_window_rule(
    recipe: Recipe, snapshot: TokenizerSnapshot, cache: Path | None = None
) -> WindowRule | None:
    """Return the rule that fits conversations into windows, or None if the recipe has none."""
    if not cuts_windows(recipe):
        return None
    return WindowRule(recipe.pack.seq_len, snapshot, recipe.tokenize, cuts_prompts(recipe), cache)


def render_shard(
    validated: Path, recipe: Recipe, label_names: list[str] | None, cache: Path | None, folder: Path
) -> dict[str, Any]:
    """Write `formatted.arrow`, `refused.arrow` and, if records differ from rows, `examples.arrow`.

    For pairs, the rejected answers are read from `rejected.arrow` next to `validated` and written
    to `rejected.arrow` next to `formatted.arrow`.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    window = make_window_rule(recipe, snapshot, cache)
    tokenizer = tokenizer_folder(recipe.tokenizer)
    longest = max_record_tokens(recipe)
    limit = TokenLimit(longest, snapshot.backend) if longest else None
    renderer = make_renderer(recipe.format, snapshot, label_names, window, tokenizer, limit)
    table = read_table(validated)
    rendered = renderer.render(table)
    formatted, refused, notes = rendered.formatted, rendered.quarantined, Counter(rendered.notes)
    if recipe.preferences:
        assert not rendered.added, "each side of a pair has one trained answer, so is one record"
        formatted = cut_behind_answers(formatted)
    if recipe.preferences == "pairs":
        other = renderer.render(read_table(validated.with_name(REJECTED)))
        rejected = cut_behind_answers(other.formatted)
        formatted, rejected, refused = keep_both(formatted, rejected, refused, other.quarantined)
        write_table(folder / REJECTED, rejected)
        notes["text_bytes"] += pc.sum(pc.binary_length(rejected["text"])).as_py() or 0
        notes.update(other.notes)
    write_table(folder / "formatted.arrow", formatted)
    write_table(folder / REFUSED, refused)
    notes["text_bytes"] += pc.sum(pc.binary_length(formatted["text"])).as_py() or 0
    examples = rendered.examples
    is_unchanged = examples.num_rows == table.num_rows and all(
        one_chunk(examples[name]).equals(one_chunk(table[name]))
        for name in ("record_id", "group_key")
    )
    if not is_unchanged:
        write_table(folder / "examples.arrow", examples)
    return {
        "notes": dict(notes),
        "added": rendered.added,
        "stop_tokens": dict(rendered.stop_tokens),
    }


def try_rows(
    recipe: Recipe,
    row_format: str,
    label_names: list[str] | None,
    cache: Path | None,
    folder: Path,
) -> dict[str, Any]:
    """Render and tokenize `validated.arrow`; write `tokenized.arrow` and `refused.arrow`.

    Returns:
        The fields of `RenderCounts`.
    """
    if row_format == "tokenized":
        given = read_given(
            read_table(folder / "validated.arrow"),
            load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline),
        )
        write_table(folder / "tokenized.arrow", given.tokenized)
        write_table(folder / REFUSED, given.quarantined)
        return asdict(RenderCounts())
    texts, tokens = folder / "texts", folder / "tokens"
    for each in (texts, tokens):
        each.mkdir()
    reply = render_shard(folder / "validated.arrow", recipe, label_names, cache, texts)
    tokenized = tokenize_shard(texts / "formatted.arrow", recipe, cache, tokens)
    (tokens / "tokenized.arrow").rename(folder / "tokenized.arrow")
    bad = [read_table(each / REFUSED) for each in (texts, tokens)]
    write_table(folder / REFUSED, pa.concat_tables(bad))
    formatted = read_table(texts / "formatted.arrow")
    counts = RenderCounts(
        rows=num_rows(formatted),
        records=formatted.num_rows,
        stop_tokens=reply["stop_tokens"],
        notes={**reply["notes"], "straddles_start": tokenized["notes"].get("straddles_start", 0)},
    )
    return asdict(counts)


def usual_template(tokenizer: str, cache: Path, *, has_labels: bool) -> str:
    """Return the default template that fits the tokenizer, for labels or for answers.

    `classification` trains the EOS token, which BERT's tokenizer lacks.
    """
    snapshot = load_snapshot(tokenizer, cache, "class")  # the pipeline affects ids only
    if has_labels:
        has_end = snapshot.special_tokens.get("eos_token")
        return "classification" if has_end else "sequence_classification"
    return "alpaca_newline" if snapshot.chat_template is None else "chat"
