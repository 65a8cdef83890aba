"""Give the files of a version their keys and write its manifest, before anything is published.

Keys are made of content, so the same files get the same keys whoever publishes them.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packhouse.errors import ConfigError
from packhouse.store.counts import numbers_of
from packhouse.store.manifest import (
    FACTS,
    PULLED_NAMES,
    FileEntry,
    FileKind,
    Manifest,
    schema_fingerprint,
    schema_to_json,
)
from packhouse.store.objects import FileBody, file_body
from packhouse.system.escaping import for_markdown, markdown_code, markdown_table
from packhouse.system.fingerprint import canonical_json
from packhouse.system.wording import counted

if TYPE_CHECKING:
    import pyarrow as pa


def dataset_card(manifest: Manifest) -> str:
    """README.md in Markdown.

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
    """How to load it, and what its rows are."""
    split = next(iter(manifest.splits()), "train")
    ends = "Labels are unshifted; sequences of a row end where `seq_lengths` says."
    if manifest.preferences is None:
        load = f'from datasets import load_dataset\nrows = load_dataset("FOLDER", split="{split}")'
        return f"```python\n{load}\n```\n\n{ends}\n"
    of = {
        "pairs": "Each record is a pair, counted once: of two sequences of one `record_id`, the "
        "first has the chosen answer and the second the rejected one.",
        "kto": "Each row is an answer; `label` is 1 where it is good and 0 where it is bad.",
    }[manifest.preferences]
    load = (
        "from packhouse import load_preferences\n"
        f'rows = load_preferences("FOLDER", split="{split}")  # columns of TRL'
    )
    return (
        f"```python\n{load}\n```\n\n{of} Bad answers have labels, too: not for supervised "
        f"training. {ends}\n"
    )


def _splits_table(manifest: Manifest) -> str:
    rows = []
    for split in manifest.splits():
        files = [e for e in manifest.files if e.kind == "data" and e.split == split]
        sums = (sum(getattr(e, name) for e in files) for name in ("rows", "tokens", "size"))
        rows.append((split, *sums))
    return "\n".join([*markdown_table(("split", "packs", "tokens", "bytes"), rows), ""])


def _account(manifest: Manifest) -> str:
    """Rows from the sources to the packs, and a picture of lengths in characters of block."""
    if not manifest.facts.counts.ledger:
        return ""
    lines = [f"- {for_markdown(name)}: {for_markdown(said)}" for name, said in numbers_of(manifest)]
    for split, side in manifest.facts.counts.splits().items():
        if bars := _bars(side.length_histogram):
            lines += ["", f"Records of {for_markdown(split)} by length:", "", *bars]
    return "\n".join([*lines, ""])


def _bars(histogram: Sequence[Sequence[int]]) -> list[str]:
    """Records by length as text: a bar for each doubling of tokens.

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
    """Rows of each source file, and what `where` left out."""
    rows = sorted(manifest.rows_by_file().items())
    lines = [*markdown_table(("source", "rows"), rows), ""] if rows else []
    for each in manifest.filters():
        kept = f"{each.filtered:,} of {counted(each.rows, 'row')} of {for_markdown(each.source)}"
        lines += [f"Left out are {kept}: where {markdown_code(each.where)} does not hold.", ""]
    return "\n".join(lines)


def _quality(manifest: Manifest) -> str:
    """Rows that the quality counters found."""
    quality = manifest.facts.audit.quality
    rows = [
        (counter, number)
        for counter, number in sorted(quality.dataset.items() if quality else ())
        if counter != "rows" and number
    ]
    return "\n".join([*markdown_table(("quality", "rows"), rows), ""]) if rows else ""


_HASHING_THREADS = 4

# Each file's entry in the manifest, and its bytes on this disk.
Uploads = tuple[tuple[FileEntry, FileBody], ...]


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A finished local file that becomes part of a version."""

    path: str | Path
    split: str
    rows: int = 0
    tokens: int = 0
    sha256: str | None = None
    """If given, the file must still have it."""
    kind: FileKind = "data"
    """Also its folder, but that of a `card` (README.md) and a `report` (report.html)."""
    name: str | None = None
    """Path in that folder, for readers that look for a name; by default one made of its content."""
    source: str | None = None
    """The source of all its rows, where a split has files by source."""


def name_files(files: Sequence[LocalFile]) -> Uploads:
    """Give each file its content-hashed key, e.g. `data/train-00000-of-00002-0a1b2c3d4e5f.parquet`.

    A file of one source is `data/eval-chats-00000-of-00002-...`; a split counts on through all its.
    A file whose sha256 is given is not read here: the store compares it as it reads the file.

    Raises:
        ConfigError: no such file, or a split with a name that is not allowed.
    """
    totals = Counter((file.kind, file.split) for file in files)
    numbers: Counter[tuple[str, str]] = Counter()
    with ThreadPoolExecutor(_HASHING_THREADS, "packhouse-hash") as pool:
        bodies = list(pool.map(_body, files))
    uploads = []
    for file, body in zip(files, bodies, strict=True):
        group = (file.kind, file.split)
        short = body.sha256[:12]
        if file.kind in PULLED_NAMES:
            name, _, ending = PULLED_NAMES[file.kind].partition(".")
            name = f"{name}-{short}.{ending}"
        elif file.name is not None:
            name = file.name
        else:
            of = f"{file.split}-{file.source}" if file.source else file.split
            shard = f"{of}-{numbers[group]:05d}-of-{totals[group]:05d}-{short}"
            name = shard + body.path.suffix
        entry = FileEntry(
            key=f"{file.kind}/{name}",
            kind=file.kind,
            split=file.split,
            size=body.size,
            sha256=body.sha256,
            rows=file.rows,
            tokens=file.tokens,
            source=file.source,
        )
        numbers[group] += 1
        uploads.append((entry, body))
    return tuple(uploads)


def _body(file: LocalFile) -> FileBody:
    path = Path(file.path)
    if file.sha256 is None or not path.is_file():
        return file_body(path)
    return FileBody(path, path.stat().st_size, file.sha256)


def draft_manifest(
    dataset: str, vid: str, uploads: Uploads, facts: Mapping[str, object]
) -> Manifest:
    """The manifest of generation 0.

    Raises:
        ConfigError: an unknown fact, or a credential in one.
    """
    known = {*FACTS, "provenance", "schema"}
    if unknown := sorted(set(facts) - known):
        raise ConfigError(f"unknown facts {unknown}; known: {sorted(known)}")
    plain = {name: value for name, value in facts.items() if name != "schema"}
    try:
        plain = json.loads(canonical_json(plain))  # as a reader will see it: lists, string keys
    except (TypeError, ValueError) as error:  # NaN, bytes, a set, ...
        raise ConfigError(f"a manifest holds plain JSON only: {error}") from None
    _refuse_secrets(plain)
    schema = facts.get("schema")
    if schema is None:
        schema = _schema_of(uploads)
    described = schema_to_json(schema) if schema is not None else {}
    return Manifest(
        dataset=dataset,
        vid=vid,
        generation=0,
        files=tuple(entry for entry, _ in uploads),
        schema=described,
        schema_fingerprint=schema_fingerprint(described),
        **plain,
    )


_SECRET = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|X-Amz-Signature=|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{30,}"
)


def _refuse_secrets(value: object, where: str = "the manifest") -> None:
    """Fail if any string inside holds a credential.

    Raises:
        ConfigError: a password in a URI, a signed URL, or a key with a known form.
    """
    if isinstance(value, str) and _SECRET.search(value):
        raise ConfigError(f"{where} would publish a credential; take it from the environment")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_secrets(key, where)
            _refuse_secrets(item, f"{where}, key '{key}'")
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_secrets(item, where)


def _schema_of(uploads: Uploads) -> "pa.Schema | None":
    """The schema of the first Parquet or Arrow data file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in (body.path for entry, body in uploads if entry.kind == "data"):
        if path.suffix == ".parquet":
            return pq.read_schema(path)
        if path.suffix == ".arrow":
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                return reader.schema
    return None


def card_file(draft: Manifest, folder: Path) -> tuple[FileEntry, FileBody]:
    """Write the dataset card of a version."""
    path = folder / "README.md"
    path.write_text(dataset_card(draft), encoding="utf-8")
    ((entry, body),) = name_files([LocalFile(path, "all", kind="card")])
    return entry, body
