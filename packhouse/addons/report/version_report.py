"""The report of a version: one HTML file that shows what is trained, and needs no network.

Made when a version is published, and by `packhouse report`. The same files give the same bytes: no
time stamps, samples at fixed places. Under 3 MB: 0.9 MB of it draws charts, and samples have room
for 40,000 tokens. Alpaca (52,002 rows, 4.5 million tokens) takes 1.2 s of CPU time.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from packhouse.addons.report import checks, sections
from packhouse.addons.report.html import page
from packhouse.addons.report.measure import MAX_READ_TOKENS, measure
from packhouse.errors import ConfigError, IntegrityError
from packhouse.escaping import for_terminal
from packhouse.recipe import AuditConfig
from packhouse.runtime.confine import run_confined
from packhouse.runtime.disks import temporary_folder
from packhouse.store import OpenVersion
from packhouse.store.draft import LocalFile, draft_manifest, name_files
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.tokenization.loading import find_snapshot
from packhouse.tokenization.of_version import tokenizer_of
from packhouse.tokenization.pipeline import Pipeline
from packhouse.views.tables import Tables
from packhouse.views.tokens import pipeline_of, special_tokens, token_texts

MAX_BYTES = 3_000_000
_SAMPLES = (40_000, 10_000, 0)  # tokens of samples: fewer where their texts are long
_TOKEN_CHARS = 200  # of a token that is shown; some vocabularies have tokens of 128 spaces

Fetch = Callable[[FileEntry], Path]


def version_report(opened: OpenVersion, tokenizers: Path) -> str:
    """Return the report of a published version as HTML.

    Args:
        opened: the version; its files are fetched and checked.
        tokenizers: folder of tokenizers in the cache; if store and cache lack it, ids are shown.

    Raises:
        IntegrityError: a file is damaged.
    """
    pipeline = pipeline_of(tokenizer_of(opened, tokenizers))
    uri = f"{opened.store.uri}/{opened.dataset}@{opened.version}"
    with temporary_folder("report") as folder:
        return report_of(
            opened.manifest,
            lambda entry: opened.fetch(entry, folder / Path(entry.key).name),
            pipeline,
            uri=uri,
        )


def unpublished_report(
    dataset: str, vid: str, files: Sequence[LocalFile], facts: Mapping[str, Any], tokenizers: Path
) -> str:
    """Return the report of what will be a version; arguments as those of `publish_version`."""
    uploads = name_files(files)
    draft = draft_manifest(dataset, vid, uploads, facts)
    paths = {entry.key: body.path for entry, body in uploads}
    wanted = str(draft.lineage.get("tokenizer", {}).get("fingerprint", ""))
    pipeline = pipeline_of(partial(find_snapshot, wanted, tokenizers))
    return report_of(draft, lambda entry: paths[entry.key], pipeline)


def report_of(
    manifest: Manifest, fetch: Fetch, pipeline: Pipeline | None, uri: str | None = None
) -> str:
    """Return the report as HTML, under `MAX_BYTES`.

    Args:
        manifest: of the version, or what it will be.
        fetch: gives the local path of a file.
        pipeline: of the tokenizer; None: ids are shown for texts.
        uri: where the version lies, for the commands that load it; None: `STORE` stands there.
    """
    for room in _SAMPLES:
        html = _page(manifest, measured_of(manifest, fetch, room), pipeline, uri)
        if len(html.encode()) < MAX_BYTES:
            break
    return html


def measured_of(manifest: Manifest, fetch: Fetch, samples: int = 0) -> dict[str, Any]:
    """Return what `measure` finds in the files of a version, read in a child with limits.

    Args:
        manifest: of the version.
        fetch: gives the local path of a file.
        samples: tokens of samples, about.

    Raises:
        IntegrityError: a file holds what no run writes, or counts more than the manifest.
    """
    files: dict[str, list[tuple[Path, str]]] = {}
    packs: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    num_bytes = 0
    for entry in manifest.files:
        if entry.kind == "data":  # each split's first files
            if not entry.rows or tokens[entry.split] >= MAX_READ_TOKENS:
                continue
            packs[entry.split] += entry.rows
            tokens[entry.split] += entry.tokens
        elif entry.kind not in ("records", "quarantine", "dropped"):
            continue
        files.setdefault(entry.kind, []).append((fetch(entry), entry.split))
        num_bytes += entry.size
    tables = Tables(files=files, manifest=replace(manifest, files=()), columns=())
    measured: dict[str, Any] = run_confined(  # some kilobytes of a file may stand for gigabytes
        partial(measure, tables, dict(sorted(packs.items(), reverse=True)), samples),
        what=f"version '{manifest.version}'",
        blames=IntegrityError,
        num_bytes=num_bytes,
    )
    counted = sum(tokens * records for *_, tokens, records in measured["lengths"])
    published = sum(entry.tokens for entry in manifest.files if entry.kind == "data")
    if counted > published:
        raise IntegrityError(
            f"the records of version '{manifest.version}' count {counted:,} tokens, its manifest "
            f"{published:,}; `packhouse verify` says what else is wrong"
        )
    return measured


def _page(
    manifest: Manifest, measured: dict[str, Any], pipeline: Pipeline | None, uri: str | None
) -> str:
    num_packs = num_tokens = 0
    samples = []
    for name, split in measured["splits"].items():
        split["all_packs"] = sum(
            e.rows for e in manifest.files if e.kind == "data" and e.split == name
        )
        packs = [with_texts(pack, pipeline) for pack in split["samples"]]
        samples.append({"name": name, "packs": packs})
        num_packs += len(packs)
        num_tokens += sum(len(record["ids"]) for pack in packs for record in pack["records"])
    parts = [
        sections.load_section(manifest, uri),
        sections.flow_section(manifest),
        sections.lengths_section(manifest, measured),
        sections.packs_section(manifest, measured),
        sections.trained_section(manifest, measured),
        sections.samples_section(
            num_packs,
            num_tokens,
            pipeline is not None,
            has_weights=any(each["weights"] for each in measured["splits"].values()),
        ),
        checks.left_out_section(manifest, measured),
        checks.quality_section(manifest),
        checks.duplicates_section(manifest),
        checks.audit_section(manifest, _limits(manifest)),
        sections.recipe_section(manifest),
    ]
    name = f"{manifest.dataset} {manifest.version}"
    return page(
        f"{name} - packhouse report",
        sections.heading(manifest) + sections.overview(manifest),
        parts,
        {"samples-data": samples} if num_packs else {},
    )


def with_texts(pack: dict[str, Any], pipeline: Pipeline | None) -> dict[str, Any]:
    """Add the text of each token of a sample, harmless to show, and which tokens are special."""
    for record in pack["records"]:
        texts = token_texts(record["ids"], pipeline)
        record["texts"] = [for_terminal(text, keep_lines=True)[:_TOKEN_CHARS] for text in texts]
        record["special"] = special_tokens(record["ids"], pipeline).nonzero()[0].tolist()
    return pack


def _limits(manifest: Manifest) -> AuditConfig:
    """The limits that the version was held to; the usual ones where it does not say them."""
    given = manifest.provenance.get("limits", {})
    try:
        return AuditConfig.model_validate(given)
    except ValueError:
        raise ConfigError("the manifest names limits of the audit that there are not") from None
