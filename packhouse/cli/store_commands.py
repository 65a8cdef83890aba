"""The commands `packhouse ls`, `show`, `verify`, `pull` and `ref`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from packhouse.cli import json_option, number_option
from packhouse.cli.result_summary import audit_blocks, ledger_block, print_block
from packhouse.errors import IntegrityError, VersionNotFoundError
from packhouse.store import version_reader
from packhouse.store.manifest import TABLES, Manifest
from packhouse.store.object_keys import is_name, manifest_key, parse_address
from packhouse.store.object_store import ObjectStore, open_store
from packhouse.store.refs import Ref, load_ref, rollback_ref, scan_refs, set_ref
from packhouse.store.store_requests import ask, run
from packhouse.store.version_reader import open_address, open_dataset
from packhouse.system.terminal import echo, print_facts, print_note, print_table
from packhouse.system.wording import counted


def echo_json(value: object) -> None:
    """Print JSON with sorted keys."""
    echo(json.dumps(value, sort_keys=True, indent=2))


@contextmanager
def warning_of(damaged: Sequence[IntegrityError]) -> Iterator[None]:
    """Warn on stderr about damaged objects; after the rest is printed, exit with code 5."""
    for error in damaged:
        print_note(f"warning: {error}")
    yield
    if damaged:
        raise click.exceptions.Exit(IntegrityError.exit_code)


@click.command()
@click.argument("place", metavar="STORE[/DATASET]")
@json_option()
def ls(place: str, as_json: bool) -> None:
    """List the datasets in a store, or the versions and refs of a dataset.

    If any are damaged, they are reported, the rest are listed, and the exit code is 5.

    \b
    Example:
      $ packhouse ls ./store
      dataset  refs
      demo     latest -> 0bc8b616aa87002e.g0 2026-11-27
    """
    store = open_store(place)
    folders = set(store.list_folders(""))
    if not folders and ("://" in store.uri or not Path(store.uri).is_dir()):
        raise VersionNotFoundError(
            f"no store or dataset at '{store.uri}'. Pass STORE or STORE/DATASET, where STORE is "
            "the recipe's publish.store"
        )
    # A dataset, given as a store: its folders are `v` and `refs`.
    if folders & {"v", "refs"}:
        address = parse_address(place)
        _list_dataset(open_store(address.root), address.dataset, as_json)
        return
    rows: list[dict[str, Any]] = []
    lines, all_damaged = [], []
    # A bucket may have other folders too.
    for dataset in sorted(filter(is_name, folders)):
        refs, damaged = scan_refs(store, dataset)
        all_damaged += damaged
        if refs or damaged or any(True for _ in store.list_folders(f"{dataset}/v/")):
            moved = {ref.name: ref.note.time for ref in refs}
            versions = {ref.name: ref.version for ref in refs}
            rows.append({"dataset": dataset, "refs": versions, "moved": moved})
            said = (f"{ref.name} -> {ref.version} {ref.note.time[:10]}".strip() for ref in refs)
            lines.append((dataset, ", ".join(said)))
    with warning_of(all_damaged):
        if as_json:
            echo_json(rows)
        else:
            print_table(("dataset", "refs"), lines)


def _list_dataset(store: ObjectStore, dataset: str, as_json: bool) -> None:
    refs, damaged_refs = scan_refs(store, dataset)
    versions, damaged = version_reader.scan_versions(store, dataset)
    rows: list[dict[str, Any]] = []
    for manifest in versions:
        # When it was committed, by the store's clock: manifests contain no times.
        head = run(store, ask(ObjectStore.head, manifest_key(dataset, manifest.version)))
        time = datetime.fromtimestamp(head.last_modified, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        names = [ref.name for ref in refs if ref.version == manifest.version]
        rows.append({"refs": names, "published": time} | _summary(manifest))
    with warning_of([*damaged_refs, *damaged]):
        if as_json:
            echo_json(rows)
            return
        columns = ("version", "published", "refs", "records", "packs", "tokens", "bytes")
        rows = [row | {"refs": ", ".join(row["refs"])} for row in rows]
        print_table(columns, [[row[name] for name in columns] for row in rows])


def _summary(manifest: Manifest) -> dict[str, object]:
    data = [entry for entry in manifest.files if entry.kind == "data"]
    ledger = manifest.facts.counts.ledger
    return {
        "version": manifest.version,
        "manifest_id": manifest.manifest_id,
        "content_id": manifest.content_id,
        "splits": manifest.splits(),
        "files": len(manifest.files),
        "records": ledger[-1].rows_out if ledger else None,
        "packs": sum(entry.rows for entry in data),
        "tokens": sum(entry.tokens for entry in data),
        "bytes": manifest.num_bytes,
    }


@click.command()
@click.argument("address", metavar="STORE/DATASET[@REF]")
@json_option()
def show(address: str, as_json: bool) -> None:
    """Show the files, counts, lineage and settings of a version.

    REF is a ref or a version ID. [default: latest]

    \b
    Example:
      $ packhouse show ./store/demo@latest
      demo 0bc8b616aa87002e.g0
      splits       train, eval
      tokens       29,487
      ...
    """
    opened = open_address(address)
    if as_json:
        echo_json(json.loads(opened.manifest.to_bytes()))
        return
    manifest = opened.manifest
    facts = [("address", opened.address), *_summary(manifest).items()]
    _print_facts(f"{opened.dataset} {opened.version}", facts)
    units = dict.fromkeys(TABLES, "record") | {"data": "pack", "quarantine": "bad record"}
    files = [
        (e.key, counted(e.rows, units[e.kind]) if e.kind in units else "-", e.tokens, e.size)
        for e in manifest.files
    ]
    echo()
    print_table(("file", "holds", "tokens", "bytes"), files)
    for block in audit_blocks(manifest.audit) if manifest.audit else ():
        print_block(block)
    if ledger := manifest.facts.counts.ledger:
        print_block(ledger_block(ledger, manifest.filters()))
    for name in ("counts", "lineage", "configuration", "engines", "libraries"):
        # The ledger is the table above, and a histogram has dozens of lines.
        hidden = ("ledger.", "length_histogram") if name == "counts" else ()
        lines = _flat(getattr(manifest, name))
        if lines := [line for line in lines if not any(key in line[0] for key in hidden)]:
            echo()
            _print_facts(name, lines)


def _print_facts(title: str, facts: Sequence[tuple[str, object]]) -> None:
    shown = []
    for name, value in facts:
        text = f"{value:,}" if type(value) is int else str(value)
        if isinstance(value, list):
            text = ", ".join(map(str, value)) or "none"
        shown.append((name, text))
    print_facts(title, shown)


def _flat(value: object, prefix: str = "") -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [line for k, v in value.items() for line in _flat(v, f"{prefix}.{k}".lstrip("."))]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [line for i, v in enumerate(value) for line in _flat(v, f"{prefix}.{i}")]
    return [(prefix, value)]


@click.command()
@click.argument("address", metavar="STORE/DATASET[@REF]")
@json_option()
def verify(address: str, as_json: bool) -> None:
    """Check every byte, schema, count and value of a version.

    Reads only the store, not the cache or the sources. The exit code is 5 if anything is damaged.

    \b
    Example:
      $ packhouse verify ./store/demo
      0bc8b616aa87002e.g0: 6 files, 1,385,921 bytes, 59 packs, ...: intact
    """
    report = version_reader.verify_version(open_address(address))
    sizes = {
        "files": report.num_files,
        "bytes": report.num_bytes,
        "packs": report.num_rows,
        "tokens": report.num_tokens,
    }
    if as_json:
        found = {"version": report.version, "problems": list(report.problems)}
        echo_json(found | {"is_intact": report.is_intact} | sizes)
    else:
        said = ", ".join(counted(number, name[:-1]) for name, number in sizes.items())
        echo(f"{report.version}: {said}: {'intact' if report.is_intact else 'DAMAGED'}")
        for problem in report.problems:
            echo(f"  {problem}")
    if not report.is_intact:
        raise click.exceptions.Exit(IntegrityError.exit_code)


@click.command()
@click.argument("address", metavar="STORE/DATASET[@REF]")
@click.argument("dest", type=click.Path(file_okay=False))
@number_option("--threads", "Number of files to copy at the same time.", default=8, least=1)
@click.option("--data-only", is_flag=True, help="Copy only the packs and the card.")
@json_option()
def pull(address: str, dest: str, threads: int, data_only: bool, as_json: bool) -> None:
    """Copy a version to folder DEST and verify it.

    If the copy is interrupted, run the command again to resume.

    \b
    Example:
      $ packhouse pull ./store/demo demo-copy
      demo 0bc8b616aa87002e.g0 -> demo-copy
    """
    opened = open_address(address)
    kinds = ("data", "card") if data_only else ()
    folder = version_reader.pull_version(opened, dest, num_threads=threads, kinds=kinds)
    if as_json:
        echo_json(_summary(opened.manifest) | {"folder": str(folder)})
    else:
        echo(f"{opened.dataset} {opened.version} -> {folder}")


@click.group()
def ref() -> None:
    """List, move or roll back refs such as `latest` and `prod`.

    \b
    Example:
      $ packhouse ref set ./store/demo prod latest
      prod -> 0bc8b616aa87002e.g0 (move 1, new ref)
      $ packhouse ref rollback ./store/demo latest
    """


_WHY = "Reason for the move, shown by `packhouse ref log`."
_reason_option = click.option("--reason", default="", help=_WHY)


def _ref_json(found: Ref) -> dict[str, object]:
    now, *past = ({"version": m.version, "seq": m.seq, **asdict(m.note)} for m in found.moves)
    return {"name": found.name, "parent": found.parent, **now, "past": past}


@ref.command("ls")
@click.argument("dataset", metavar="STORE/DATASET")
@json_option()
def list_refs(dataset: str, as_json: bool) -> None:
    """List the refs of a dataset.

    \b
    Example:
      $ packhouse ref ls ./store/demo
      ref     version              moved                 moves  previous
      latest  eb8b8745c6423e4b.g0  2026-11-27T17:01:52Z      2  0bc8b616aa87...
    """
    found, damaged = scan_refs(*open_dataset(dataset))
    rows = [(r.name, r.version, r.note.time, r.seq, r.parent or "") for r in found]
    with warning_of(damaged):
        if as_json:
            echo_json([_ref_json(item) for item in found])
        else:
            print_table(("ref", "version", "moved", "moves", "previous"), rows)


@ref.command("log")
@click.argument("dataset", metavar="STORE/DATASET")
@click.argument("name", metavar="REF")
@json_option()
def show_moves(dataset: str, name: str, as_json: bool) -> None:
    """List the moves of a ref, newest first.

    \b
    Example:
      $ packhouse ref log ./store/demo latest
      move  version              time                  by       reason
         2  eb8b8745c6423e4b.g0  2026-11-27T17:01:52Z  ann@gpu  published
         1  0bc8b616aa87002e.g0  2026-11-27T17:01:34Z  ann@gpu  published
    """
    store, dataset_name = open_dataset(dataset)
    found = load_ref(store, dataset_name, name)
    if found is None:
        raise VersionNotFoundError(
            f"'{dataset}' has no ref '{name}'. Run `packhouse ref ls {store.uri}/{dataset_name}`"
        )
    if as_json:
        echo_json(_ref_json(found))
    else:
        rows = [(move.seq, move.version, *astuple(move.note)) for move in found.moves]
        print_table(("move", "version", "time", "by", "reason"), rows)


@ref.command("set")
@click.argument("dataset", metavar="STORE/DATASET")
@click.argument("name", metavar="REF")
@click.argument("version")
@click.option("--expected", help="Move the ref only if it currently points to this version.")
@click.option("--force", is_flag=True, help="Also replace a damaged ref; its history is lost.")
@_reason_option
@json_option()
def set_version(
    dataset: str,
    name: str,
    version: str,
    expected: str | None,
    force: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Point REF at VERSION (a version ID or another ref).

    \b
    Example:
      $ packhouse ref set ./store/demo prod latest
      prod -> 0bc8b616aa87002e.g0 (move 1, new ref)
    """
    place = open_dataset(dataset)
    target = version_reader.open_version(*place, version).version
    reason = reason or f"set to {version}"
    moved = set_ref(*place, name, target, expected=expected, force=force, reason=reason)
    _say_moved(moved, as_json)


@ref.command("rollback")
@click.argument("dataset", metavar="STORE/DATASET")
@click.argument("name", metavar="REF")
@number_option("--steps", "Number of moves to go back.", default=1, least=1)
@_reason_option
@json_option()
def roll_back(dataset: str, name: str, steps: int, reason: str, as_json: bool) -> None:
    """Point REF at an earlier version from its history.

    \b
    Example:
      $ packhouse ref rollback ./store/demo latest --reason "eval regressed"
      latest -> 0bc8b616aa87002e.g0 (move 3, was eb8b8745c6423e4b.g0)
    """
    _say_moved(rollback_ref(*open_dataset(dataset), name, steps, reason), as_json)


def _say_moved(moved: Ref, as_json: bool) -> None:
    if as_json:
        echo_json(_ref_json(moved))
    else:
        before = f"was {moved.parent}" if moved.parent else "new ref"
        echo(f"{moved.name} -> {moved.version} (move {moved.seq}, {before})")
