"""Write a report as one HTML file: `packhouse report VERSION|RECIPE`.

With `--diff`, compare two versions: counts, lengths, rows, and masks token by token. Records are
matched by ID. For each kind of change, the examples of `packhouse diff` are shown with up to 1,500
tokens each. For numbers to process in scripts, use `packhouse diff --json`.
"""

import json
import webbrowser
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from packhouse.addons.ask.diff import Change, Diff, diff_versions
from packhouse.addons.ask.duckdb_queries import find_records
from packhouse.addons.ask.inspect import label_names, label_text, weights_text
from packhouse.addons.report.charts_and_tables import (
    compare_figure,
    details,
    header,
    page,
    section,
    table,
)
from packhouse.addons.report.recipe_report import recipe_report
from packhouse.addons.report.sections import Measured, totals_of
from packhouse.addons.report.version_report import measured_of, version_report
from packhouse.cli import cache_option, json_option
from packhouse.cli.token_display import pipeline_of, token_texts, tokenizer_of
from packhouse.recipe.recipe_file import is_recipe_path
from packhouse.run.prepare_arguments import read_recipe
from packhouse.run.step_cache import Workspace
from packhouse.store import OpenVersion
from packhouse.store.manifest import Manifest
from packhouse.store.version_reader import open_address, open_relative
from packhouse.system.disks import temporary_folder
from packhouse.system.escaping import html_text
from packhouse.system.terminal import echo
from packhouse.system.wording import counted
from packhouse.tokenize.encoders import Pipeline


@click.command()
@click.argument("targets", metavar="VERSION|RECIPE", nargs=-1, required=True)
@click.option("--diff", "is_diff", is_flag=True, help="Compare two versions: --diff OLD NEW.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("report.html"),
    show_default=True,
    help="File to write.",
)
@click.option("--open", "is_opened", is_flag=True, help="Open the report in the browser.")
@cache_option("Cache folder.")
@json_option()
def report(
    targets: tuple[str, ...],
    is_diff: bool,
    output: Path,
    is_opened: bool,
    cache: Path,
    as_json: bool,
) -> None:
    """Write a report on a version: one HTML file with charts and samples.

    VERSION is STORE/DATASET[@REF]. For a RECIPE, report on the version it published or, if it has
    not run yet, on the expected result. With --diff, NEW can be just a ref or a version ID if it
    is in the same dataset as OLD.

    \b
    Example:
      $ packhouse report ./store/demo -o demo.html
      demo.html: 1.3 MB
      $ packhouse report --diff ./store/demo@prod latest
    """
    if len(targets) != 1 + is_diff:
        raise click.UsageError("Pass one VERSION or RECIPE, or --diff with two versions.")
    tokenizers = Workspace(cache=cache).tokenizers
    if is_diff:
        opened = open_address(targets[0])
        html = diff_report(opened, open_relative(opened, targets[1]), tokenizers)
    elif is_recipe_path(targets[0]):
        html = recipe_report(read_recipe(targets[0]), cache)
    else:
        html = version_report(open_address(targets[0]), tokenizers)
    output.write_text(html, encoding="utf-8")
    if as_json:
        echo(json.dumps({"report": str(output), "bytes": output.stat().st_size}))
    else:
        echo(f"{output}: {output.stat().st_size / 1e6:.1f} MB")
    if is_opened:
        webbrowser.open(output.absolute().as_uri())


_NAMES = ("old", "new")
_TOKENS = 1500  # maximum number of tokens shown per record
_MEANINGS = {
    "added": "only in the new version",
    "removed": "only in the old version",
    "edited": "same row, different content",
    "changed_tokens": "in both, with different tokens",
    "changed_masks": "in both, same tokens, different mask",
    "changed_weights": "in both, same tokens and mask, different loss weights",
    "copies": "in both, with a different number of copies",
    "moved": "in both, in a different split",
    "same": "alike",
}

Record = Mapping[str, Any]
"""A value of the dictionary that `find_records` returns."""


def diff_report(old: OpenVersion, new: OpenVersion, tokenizers: Path) -> str:
    """Return the comparison as HTML.

    Args:
        old: a version.
        new: another version, of the same dataset or a different one.
        tokenizers: folder of tokenizers in the cache. Token ids are shown if a tokenizer is
            missing.

    Raises:
        IntegrityError: a file is damaged.
    """
    found = diff_versions(old, new)
    versions = [_read(each, found, tokenizers) for each in (old, new)]
    parts = [
        _numbers_section(versions),
        _settings_section(found),
        _lengths_section(versions),
        _records_section(found, versions),
    ]
    title = old.dataset if old.dataset == new.dataset else f"{old.dataset} and {new.dataset}"
    addresses = "".join(
        f"<div class=quiet>{name}: <code>{html_text(f'{each.dataset}@{each.version}')}</code></div>"
        for name, each in zip(_NAMES, (old, new), strict=True)
    )
    addresses += "<p>Both versions contain the same rows.</p>" if found.is_same_content else ""
    title += ": two versions"
    return page(f"{title} - packhouse report", header(title, addresses), parts, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Version:
    """Data read from one of the two versions."""

    manifest: Manifest
    pipeline: Pipeline | None
    measured: Measured
    records: Mapping[str, Record]

    def mean_weight(self) -> float:
        """Mean loss weight of the trained tokens that were read."""
        counts: Counter[float] = Counter()
        for split in self.measured.splits.values():
            # Splits whose weights are all 1 store none, so each trained token counts with weight 1.
            trained = sum(length * number for length, number in split.trained)
            counts.update(dict(split.weights) or {1.0: trained})
        total = counts.total()
        return sum(weight * number for weight, number in counts.items()) / total if total else 1.0


def _read(opened: OpenVersion, found: Diff, tokenizers: Path) -> _Version:
    examples = found.records.examples.values() if found.records else ()
    names = {name for kind in examples for each in kind for name in (each.record_id, each.old_id)}
    with temporary_folder("report") as folder:
        measured = measured_of(
            opened.manifest, lambda entry: opened.fetch(entry, folder / Path(entry.key).name)
        )
    return _Version(
        manifest=opened.manifest,
        pipeline=pipeline_of(tokenizer_of(opened, tokenizers)),
        measured=measured,
        records=find_records(opened, names),
    )


def _numbers_section(versions: Sequence[_Version]) -> str:
    before, after = (totals_of(version.manifest) for version in versions)
    rows: list[list[Any]] = []
    for name, number in before.items():
        change = after[name] - number
        rows.append([name, number, after[name], f"{change:+,}" if change else "same"])
    means = [round(version.mean_weight(), 4) for version in versions]
    if {*means} != {1}:
        moved = means[1] - means[0]
        rows.append(["mean loss weight", *means, f"{moved:+.4g}" if moved else "same"])
    return section("numbers", "Numbers", table(("what", *_NAMES, "change"), rows, "Numbers"))


def _settings_section(found: Diff) -> str:
    parts = []
    for kind in ("configuration", "schema", "engines", "libraries", "lineage"):
        rows = [[key, *map(_short, pair)] for key, pair in getattr(found, kind).items()]
        inner = table((kind, *_NAMES), rows, f"Changed: {kind}") if rows else ""
        if inner and kind == "lineage":
            is_open = len(rows) <= 12  # 10,000 files give 10,000 lines of digests
            parts.append(details("Sources and tokenizer differ", inner, is_open=is_open))
        elif inner:
            parts.append(f"<h3>{kind}</h3>{inner}")
    return section("settings", "Settings", *(parts or ["<p>All settings are the same.</p>"]))


def _short(value: Any) -> str:
    """Format a setting as in a recipe.

    Example:
        >>> _short(True), _short({"seed": None}), _short("all")
        ('true', '{"seed": null}', 'all')
    """
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def _lengths_section(versions: Sequence[_Version]) -> str:
    lengths = {name: Counter[int]() for name in _NAMES}
    trained = {name: Counter[int]() for name in _NAMES}
    for name, version in zip(_NAMES, versions, strict=True):
        for _, _, length, number in version.measured.lengths:
            lengths[name][length] += number
        for split in version.measured.splits.values():
            trained[name].update(dict(split.trained))
    figures = ""
    if any(lengths.values()):
        says = "As a share of each version's records. Bin width doubles every four bins."
        measured = "tokens in a record"
        figures += compare_figure("lengths", "Records by length", says, measured, lengths)
    if any(trained.values()):
        says = "How many tokens of each record count in the loss."
        measured = "trained tokens in a record"
        figures += compare_figure("trained", "Records by trained tokens", says, measured, trained)
    return section("lengths", "Lengths", f"<div class=grid>{figures}</div>" if figures else "")


def _records_section(found: Diff, versions: Sequence[_Version]) -> str:
    if found.records is None:
        caption = "<p>The data files have no record IDs, so records cannot be compared.</p>"
        return section("records", "Records", caption)
    rows, parts = [], []
    for name, meaning in _MEANINGS.items():
        number = getattr(found.records, f"num_{name}", None)
        if number is None:
            continue
        rows.append([name.replace("_", " "), number, meaning])
        if changes := found.records.examples.get(name):
            parts.append(f"<h3>{html_text(name.replace('_', ' '))}</h3>")
            parts += [_record(each, versions) for each in changes]
    legend = (
        "<div class=legend><i class=t>trained</i><i class=gain>newly trained</i>"
        "<i class=loss>no longer trained</i><i><ins>added</ins></i><i><del>removed</del></i></div>"
    )
    head = table(("records", "number", "what"), rows, "Records")
    return section("records", "Records", head, legend if parts else "", *parts)


def _record(change: Change, versions: Sequence[_Version]) -> str:
    """Render one changed record, with its tokens marked."""
    old = versions[0].records.get(change.old_id)
    new = versions[1].records.get(change.record_id)
    texts: list[list[str]] = []
    notes = []
    length = 0
    for record, version in zip((old, new), versions, strict=True):
        ids = record["input_ids"] if record else []
        texts.append(token_texts(ids[:_TOKENS], version.pipeline))
        length = max(length, len(ids))
        if record:
            label = label_text(record["label"], label_names(version.manifest))
            notes.append((label, weights_text(record["loss_weights"])))
    runs = mask_runs(old, new, *texts)
    same = notes[0] if notes and notes[0] == notes[-1] else ()  # otherwise the detail shows it
    caption = ", ".join(part for part in (change.place, change.detail, *same) if part)
    caption += f" (record {change.record_id}, {counted(length, 'token')}"
    if length > _TOKENS:
        caption += f", the first {_TOKENS:,} of them"
    caption += ")"
    body = "".join(_tagged(kind, text) for kind, text in runs)
    return f"<p class=quiet>{html_text(caption)}</p><p class=raw dir=auto>{body}</p>"


def _tagged(kind: str, text: str) -> str:
    shown = html_text(text)
    if kind in ("ins", "del"):
        return f"<{kind}>{shown}</{kind}>"
    return f"<span class={kind}>{shown}</span>" if kind else shown


def mask_runs(
    old: Record | None, new: Record | None, old_texts: Sequence[str], new_texts: Sequence[str]
) -> list[tuple[str, str]]:
    """Merge the tokens of a record in two versions into runs of (kind, text).

    Kinds: `ins` and `del` for tokens of only one version; `t` if trained in both, `gain` only in
    the new one, `loss` only in the old one, and empty in neither. If a version lacks the record,
    its tokens in the other one are `t` or empty.

    Example:
        >>> old = {"input_ids": [1, 2, 3], "trained": [False, False, True]}
        >>> new = {"input_ids": [1, 2, 4], "trained": [False, True, True]}
        >>> mask_runs(old, new, ["a", "b", "c"], ["a", "b", "d"])
        [('', 'a'), ('gain', 'b'), ('del', 'c'), ('ins', 'd')]
    """
    if old is None or new is None:
        one, texts = (old, old_texts) if old is not None else (new, new_texts)
        masks = one["trained"][:_TOKENS] if one else []
        return _joined(("t" if m else "", text) for m, text in zip(masks, texts, strict=True))
    pieces: list[tuple[str, str]] = []
    old_ids, new_ids = (each["input_ids"][:_TOKENS] for each in (old, new))
    # With autojunk, tokens that occur often, such as spaces, would not be matched.
    matcher = SequenceMatcher(None, old_ids, new_ids, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(a, b), range(c, d), strict=True):
                pieces.append((_KINDS[old["trained"][i], new["trained"][j]], new_texts[j]))
        else:
            pieces += [("del", text) for text in old_texts[a:b]]
            pieces += [("ins", text) for text in new_texts[c:d]]
    return _joined(pieces)


_KINDS = {(True, True): "t", (False, True): "gain", (True, False): "loss", (False, False): ""}


def _joined(pieces: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge neighbouring pieces of the same kind."""
    runs = groupby(pieces, key=lambda piece: piece[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in runs]
