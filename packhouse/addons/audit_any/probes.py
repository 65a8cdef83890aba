"""What a recipe's template writes around contents, learnt from conversations that it renders."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from packhouse.auditing.inference import has_prompts
from packhouse.auditing.plain_template import PlainTemplate
from packhouse.auditing.turns import PROBES, TokenBytes, Turns, learn_turns
from packhouse.errors import TemplateError
from packhouse.recipe import Recipe
from packhouse.registry import function_of_addon
from packhouse.render.sandbox import pinned_date
from packhouse.run.rendering import run_template
from packhouse.tokenize import TokenizerSnapshot, load_snapshot
from packhouse.tokenize.pipeline import Pipeline


def learn_template(
    recipe: Recipe | None, snapshot: TokenizerSnapshot, pipeline: Pipeline, tokenizers: Path
) -> tuple[Turns, list[str]]:
    """Return what a template writes, and what of it could not be learnt.

    Args:
        recipe: names template and tokenizer; None: the template is not known.
        snapshot: the tokenizer.
        pipeline: of the tokenizer.
        tokenizers: folder of tokenizer snapshots.
    """
    named = snapshot.special_tokens
    ids = [snapshot.added_tokens.get(named.get(f"{kind}_token", "")) for kind in ("eos", "bos")]
    table = TokenBytes.of(pipeline)
    if recipe is None:
        note = "no template, so prompts and headers were not looked at: give the one of the rows"
        return learn_turns([], table, *ids), [note]
    if pipeline.token_bytes is None:
        note = "the tokenizer's ids do not spell text, so prompts and headers were not looked at"
        return learn_turns([], table, *ids), [note]
    rendered, notes = [], []
    try:
        # Records of single answers would all have what the template writes in the prompt alone
        # (Qwen3's empty thinking block), which then looked like a part of the header.
        whole = recipe.model_copy(
            update={"format": recipe.format.model_copy(update={"turns": "whole"})}
        )
        made = function_of_addon("pin")(PROBES, whole, tokenizers)
        rendered = [item["input_ids"] for item in made if "input_ids" in item]
    except TemplateError as error:
        notes.append(f"prompts and headers were not looked at: {error}")
    turns = learn_turns(rendered, table, *ids)
    if rendered and has_prompts(recipe.format):
        edges = run_template(partial(_answer_edges, recipe, tokenizers), recipe)
        added = snapshot.added_tokens
        turns = replace(
            turns,
            generation_opens=tuple(table.of_text(text, added) for text in edges["opens"]),
            stop_ids=frozenset(added[text] for text in edges["stops"] if text in added),
        )
    return turns, notes


def _answer_edges(recipe: Recipe, cache: Path | None) -> dict[str, list[str]]:
    """In a worker: return what opens answers at inference, and the tokens that end them."""
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    template = PlainTemplate(recipe.format, snapshot, pinned_date().isoformat())
    return {"opens": template.openings(), "stops": list(template.stop_tokens)}
