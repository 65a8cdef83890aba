"""Write the dataset card (README.md) of a version from its manifest."""

from collections import Counter
from collections.abc import Sequence

from packhouse.records.ledger import sum_by_reason
from packhouse.store.manifest import Manifest
from packhouse.system.escaping import for_markdown, markdown_code, markdown_table
from packhouse.system.wording import by_name, counted, rows_and_records


def dataset_card(manifest: Manifest) -> str:
    """Return the dataset card as Markdown.

    Example:
        >>> manifest = Manifest(dataset="tiny", vid="abcd", generation=0, files=())
        >>> print(dataset_card(manifest).splitlines()[6])
        # tiny
    """
    splits, ledger = manifest.splits(), manifest.facts.counts.ledger
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in splits:
        lines += [f"  - split: {split}", f"    path: data/{split}-*"]
    lines += ["---", "", f"# {for_markdown(manifest.dataset)}", ""]
    content = markdown_code(manifest.content_id[:16])
    lines += [f"Packed token data, written by packhouse. Content {content}.", ""]
    sizes = []
    for split in splits:
        files = [e for e in manifest.files if e.kind == "data" and e.split == split]
        sums = (sum(getattr(e, name) for e in files) for name in ("rows", "tokens", "size"))
        sizes.append((split, *sums))
    lines += [*markdown_table(("split", "packs", "tokens", "bytes"), sizes), ""]
    if ledger:
        found = numbers_of(manifest)
        lines += [f"- {for_markdown(name)}: {for_markdown(said)}" for name, said in found]
        for split, side in manifest.facts.counts.splits().items():
            if bars := _bars(side.length_histogram):
                lines += ["", f"Record lengths of {for_markdown(split)}:", "", *bars]
        lines.append("")
    lines += _settings(manifest)
    if rows := sorted(manifest.rows_by_file().items()):
        lines += [*markdown_table(("source", "rows"), rows), ""]
    for each in manifest.filters():
        cut = f"{each.filtered:,} of {counted(each.rows, 'row')} of {for_markdown(each.source)}"
        lines += [f"`where` dropped {cut} that do not match {markdown_code(each.where)}.", ""]
    quality = manifest.facts.audit.quality
    counters = sorted(quality.dataset.items()) if quality else ()
    if rows := [(name, number) for name, number in counters if name != "rows" and number]:
        lines += [*markdown_table(("quality", "rows"), rows), ""]
    return "\n".join([*lines, _usage(manifest)])


def _usage(manifest: Manifest) -> str:
    """Return how to load the version, and what its rows contain."""
    split = next(iter(manifest.splits()), "train")
    ends = (
        "Labels are not shifted. `seq_lengths` gives the lengths of the sequences in a row. Most "
        "collators let them attend to each other: call packhouse's `enable_packing(model)`, and "
        "use `PackedCollator` or TRL's `SFTConfig(padding_free=True, max_length=None)`."
    )
    if manifest.preferences is None:
        load = f'from datasets import load_dataset\nrows = load_dataset("FOLDER", split="{split}")'
        return f"```python\n{load}\n```\n\n{ends}\n"
    of = {
        "pairs": "Each record is a pair, counted once. Of its two sequences with the same "
        "`record_id`, the first has the chosen answer and the second the rejected one.",
        "kto": "Each row is an answer; `label` is 1 if it is good and 0 if it is bad.",
    }[manifest.preferences]
    load = (
        "from packhouse import load_preferences\n"
        f'rows = load_preferences("FOLDER", split="{split}")  # columns of TRL'
    )
    return (
        f"```python\n{load}\n```\n\n{of} Bad answers have labels too, so do not use the rows for "
        f"supervised training. {ends}\n"
    )


def _bars(histogram: Sequence[Sequence[int]]) -> list[str]:
    """Return a histogram of record lengths as text, with one bar per power of two.

    Example:
        >>> _bars([(20, 2), (24, 2), (40, 1)])[1:-1]
        ['    17 to     32 tokens  ######################## 4', '    33 to     64 tokens  ###### 1']
    """
    sums: Counter[int] = Counter()
    for length, records in histogram:
        sums[1 << max(length - 1, 0).bit_length()] += records
    if not sums:
        return []
    most = max(sums.values())
    rows = [
        f"{top // 2 + 1:>6,} to {top:>6,} tokens  {'#' * -(-24 * records // most)} {records:,}"
        for top, records in sorted(sums.items())
    ]
    return ["```text", *rows, "```"]


def _settings(manifest: Manifest) -> list[str]:
    form, pack = manifest.facts.configuration.format, manifest.facts.configuration.pack
    found = {
        "format.template": form.template,
        "format.train_on": form.train_on,
        "pack.seq_len": pack.seq_len,
        "pack.strategy": pack.strategy,
    }
    lines = [f"- `{key}`: {for_markdown(str(value))}" for key, value in found.items() if value]
    if tokenizer := manifest.tokenizer_fingerprint:
        lines.append(f"- tokenizer: {markdown_code(tokenizer[:16])}")
    lines += [
        f"- column {markdown_code(column.name)}: {for_markdown(column.type)}"
        for column in manifest.facts.schema.fields
    ]
    return [*lines, ""] if lines else []


def numbers_of(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the numbers of rows and splits in a manifest, as names and values."""
    ledger = manifest.facts.counts.ledger
    lines = [("rows read", f"{ledger[0].rows_in:,}" if ledger else "0")]
    bad, dropped = (sum_by_reason(ledger, kind) for kind in ("quarantined", "dropped"))
    rows = rows_and_records(sum(line.num_bad_rows for line in ledger), bad.total())
    lines.append(("quarantined", f"{rows}: {by_name(bad)}" if bad else "0"))
    lines.append(("dropped", f"{dropped.total():,} ({by_name(dropped)})" if dropped else "0"))
    for name, side in manifest.facts.counts.splits().items():
        share = side.num_trained / max(side.num_tokens, 1)
        said = (
            f"{counted(side.num_packs, 'pack')} of {side.seq_len:,} tokens, {side.fill:.2%} full; "
            f"{counted(side.num_sequences, 'record')}, {counted(side.num_tokens, 'token')}, "
            f"{share:.1%} trained"
        )
        lines.append((name, said))
    return lines
