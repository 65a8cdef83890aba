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
    splits = manifest.splits()
    front_matter = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split in splits:
        front_matter += [f"  - split: {split}", f"    path: data/{split}-*"]
    parts = [
        "\n".join([*front_matter, "---", ""]),
        f"# {for_markdown(manifest.dataset)}\n",
        "Packed token data, written by packhouse. "
        f"Content {markdown_code(manifest.content_id[:16])}.\n",
        _splits_table(manifest),
        _account(manifest),
        _settings(manifest),
        _sources(manifest),
        _quality(manifest),
        _usage(manifest),
    ]
    return "\n".join(part for part in parts if part)


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


def _splits_table(manifest: Manifest) -> str:
    rows = []
    for split in manifest.splits():
        files = [e for e in manifest.files if e.kind == "data" and e.split == split]
        sums = (sum(getattr(e, name) for e in files) for name in ("rows", "tokens", "size"))
        rows.append((split, *sums))
    return "\n".join([*markdown_table(("split", "packs", "tokens", "bytes"), rows), ""])


def _account(manifest: Manifest) -> str:
    """Return the row counts from source to packs, and a histogram of record lengths as text."""
    if not manifest.facts.counts.ledger:
        return ""
    lines = [f"- {for_markdown(name)}: {for_markdown(said)}" for name, said in numbers_of(manifest)]
    for split, side in manifest.facts.counts.splits().items():
        if bars := _bars(side.length_histogram):
            lines += ["", f"Record lengths of {for_markdown(split)}:", "", *bars]
    return "\n".join([*lines, ""])


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


def _settings(manifest: Manifest) -> str:
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
    return "\n".join([*lines, ""]) if lines else ""


def _sources(manifest: Manifest) -> str:
    """Return the rows of each source file, and the rows dropped by `where`."""
    rows = sorted(manifest.rows_by_file().items())
    lines = [*markdown_table(("source", "rows"), rows), ""] if rows else []
    for each in manifest.filters():
        cut = f"{each.filtered:,} of {counted(each.rows, 'row')} of {for_markdown(each.source)}"
        lines += [f"`where` dropped {cut} that do not match {markdown_code(each.where)}.", ""]
    return "\n".join(lines)


def _quality(manifest: Manifest) -> str:
    """Return the number of rows that each quality counter found."""
    quality = manifest.facts.audit.quality
    rows = [
        (counter, number)
        for counter, number in sorted(quality.dataset.items() if quality else ())
        if counter != "rows" and number
    ]
    return "\n".join([*markdown_table(("quality", "rows"), rows), ""]) if rows else ""


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
