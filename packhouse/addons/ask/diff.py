"""`packhouse diff OLD NEW`: print what changed between two versions, with examples."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from packhouse.addons.ask.compare import Change, Diff, RecordDiff, diff_versions
from packhouse.addons.ask.query import find_records
from packhouse.cli.options import cache_option, json_option
from packhouse.cli.tokens import pipeline_of, plain, runs_of
from packhouse.cli.versions import echo_json, print_table
from packhouse.run.cache import Workspace
from packhouse.store import OpenVersion
from packhouse.store.read import open_address, open_beside
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import echo, print_text
from packhouse.system.wording import cut_pair
from packhouse.tokenize.of_version import tokenizer_of
from packhouse.tokenize.pipeline import Pipeline

_MOST_TEXTS = 2
"""Number of examples per kind of change whose text is shown."""
_BEFORE, _AFTER = 12, 30
"""Number of tokens shown before the first difference, and from it on."""
_MOST_KEYS = 20
"""Maximum number of rows per table of settings or counts."""
_VALUE = 30
"""Maximum number of characters of a setting's value."""

_KINDS = {
    "added": "added",
    "removed": "removed",
    "edited": "edited (the row's content changed)",
    "changed_tokens": "",
    "changed_masks": "same text, another part trained",
    "changed_weights": "same text, other loss weights",
    "copies": "another number of copies",
    "moved": "in another split",
}

_READ_OTHERWISE = "edited (the same row, read or split otherwise)"
"""Used instead if both versions were made from the same files."""

# Counts that other counts already explain.
_INNER = ("length_histogram", "lower_bound", "num_bins", "num_sequences", "sides.", ".filtered.")
_ENDS = (".rows_in", ".tokens_in")

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]


@click.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@click.option("--no-records", is_flag=True, help="Compare manifests only; read no data.")
@cache_option("Folder of tokenizers and finished steps.")
@json_option()
def diff(old: str, new: str, no_records: bool, cache: Path, as_json: bool) -> None:
    """Compare two versions: settings, counts, schema; rows, tokens, masks, copies and splits.

    Examples include their text if the tokenizer is available. NEW may be a bare NAME of the same
    dataset.

    \b
    packhouse diff ./store/alpaca@prod latest
    """
    left = open_address(old)
    right = open_beside(left, new)
    found = diff_versions(left, right, records=not no_records)
    if as_json:
        echo_json(asdict(found))
    else:
        _print_facts(found)
        if found.records is not None:
            is_other_source = any(key.endswith("sha256") for key in found.lineage)
            kinds = _KINDS if is_other_source else _KINDS | {"edited": _READ_OTHERWISE}
            _print_records(found.records, left, right, Workspace(cache=cache).tokenizers, kinds)


def _print_facts(found: Diff) -> None:
    echo(f"{found.old} -> {found.new}")
    if found.is_same_content:
        echo("the rows are the same (content_id)")
    for name in ("configuration", "counts", "lineage", "engines", "libraries", "schema"):
        changed = {
            key: pair
            for key, pair in getattr(found, name).items()
            if not any(part in key for part in _INNER) and not key.endswith(_ENDS)
        }
        seen: list[object] = []
        rows = []
        for key, pair in changed.items():
            # A change in validate (47,369 -> 46,221 rows) repeats in all later steps: show it once.
            if name != "counts" or pair not in seen:
                rows.append((key, *_short(*pair)))
            seen.append(pair)
        if rows:
            echo()
            print_table((name, "old", "new"), rows[:_MOST_KEYS])
        if len(rows) > _MOST_KEYS:
            echo(f"... and {len(rows) - _MOST_KEYS:,} more; see --json")
    echo()
    print_table(("total", "old", "new"), [(k, *pair) for k, pair in found.totals.items()])


def _short(old: object, new: object) -> tuple[object, ...]:
    """Return both values shortened for a table; integers are returned unchanged.

    Example:
        >>> _short(["length(output) > 20", "lang = 'en'"], None)
        ('2 entries', '-')
    """
    texts = cut_pair(_text(old, new), _text(new, old), _VALUE)
    pairs = zip((old, new), texts, strict=True)
    return tuple(value if type(value) is int else text for value, text in pairs)


def _text(value: object, other: object) -> str:
    text = "-" if value is None else str(value)
    if isinstance(value, list | dict) and len(text) > _VALUE and other is None:
        return f"{len(value):,} entries"
    return text


def _print_records(
    found: RecordDiff,
    old: OpenVersion,
    new: OpenVersion,
    tokenizers: Path,
    kinds: Mapping[str, str],
) -> None:
    echo(f"\nrecords: {found.num_same:,} are the same")
    is_one = old.manifest.tokenizer_fingerprint == new.manifest.tokenizer_fingerprint
    names = {**kinds, "changed_tokens": "other text" if is_one else "other token ids"}
    show = _Texts(found, old, new, tokenizers)
    for kind, name in names.items():
        if number := getattr(found, f"num_{kind}"):
            echo(f"{number:>9,} {name}")
        for at, change in enumerate(found.examples.get(kind, ())):
            print_text(f"{change.place or change.record_id}: {change.detail}".rstrip(": "), 10)
            if at < _MOST_TEXTS and kind in _WITH_TEXT:
                show(change)


_WITH_TEXT = ("edited", "changed_tokens", "changed_masks")


class _Texts:
    """Print a record before and after, starting shortly before the first difference."""

    def __init__(
        self, found: RecordDiff, old: OpenVersion, new: OpenVersion, tokenizers: Path
    ) -> None:
        shown = [c for kind in _WITH_TEXT for c in found.examples.get(kind, ())[:_MOST_TEXTS]]
        opened = (old, new) if shown else ()
        self._pipelines = [pipeline_of(tokenizer_of(each, tokenizers)) for each in opened]
        self._old = find_records(old, {change.old_id for change in shown})
        self._new = find_records(new, {change.record_id for change in shown})

    def __call__(self, change: Change) -> None:
        found = self._old.get(change.old_id), self._new.get(change.record_id)
        if found[0] is None or found[1] is None:
            return
        sides = [(np.array(each["input_ids"]), np.array(each["trained"])) for each in found if each]
        (old_ids, old_mask), (new_ids, new_mask) = sides
        shared = min(len(old_ids), len(new_ids))
        differs = old_ids[:shared] != new_ids[:shared]
        differs |= old_mask[:shared] != new_mask[:shared]
        # [5, 6, 7] and [5, 6, 9] differ from token 2 on, and so do [5, 6] and [5, 6, 9].
        first = int(np.argmax(differs)) if differs.any() else shared
        start = max(0, first - _BEFORE)
        for sign, tokens, pipeline in zip("-+", sides, self._pipelines, strict=True):
            if pipeline is not None:
                text = _shown(tokens, start, pipeline)
                print_text(f"{sign} {'... ' if start else ''}{text}", 12)


def _shown(tokens: Tokens, start: int, pipeline: Pipeline) -> str:
    """Return some tokens as text, trained ones between {+ and +}."""
    ids, mask = (each[start : start + _BEFORE + _AFTER] for each in tokens)
    text = plain(runs_of(ids.tolist(), mask.astype(np.bool_), pipeline))
    more = " ..." if start + len(ids) < len(tokens[0]) else ""
    return for_terminal(text) + more
