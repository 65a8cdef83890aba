"""Read and count the bad rows of a run or version, and explain those that stop a run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import Any

import pyarrow as pa

from packhouse.errors import ConfigError, IntegrityError, PackhouseError
from packhouse.read.files import source_name
from packhouse.read.row_formats import row_format_of, row_formats
from packhouse.read.streams import lines_of_rows, place_of
from packhouse.read.text_files import LinesFile
from packhouse.recipe import Recipe, SourceConfig
from packhouse.records.reasons import QUARANTINE_REASONS, WITH_REMEDY
from packhouse.records.tables import QUARANTINED, read_table
from packhouse.store import OpenVersion
from packhouse.store.contracts import read_batches
from packhouse.system.disks import temporary_folder
from packhouse.system.worker import stream_from_worker

_MOST_FILES = 200
"""Maximum number of files opened for samples; counts always cover all rows."""
_MOST_ROWS = 1000
_MOST_DETAIL = 240


def count_reasons(table: pa.Table, num_samples: int = 3) -> list[dict[str, Any]]:
    """Count bad rows and records by step and reason, most frequent first, with sample rows.

    Args:
        table: schema `tables.QUARANTINED`.
        num_samples: sample rows per reason, the first ones by source and row.

    Example:
        >>> from packhouse.records.tables import QUARANTINED
        >>> row = {"source": "a/a.jsonl", "row": 7, "byte_offset": 90, "step": "validate",
        ...        "reason": "json", "detail": "not JSON", "raw": b"{", "raw_size": 1,
        ...        "raw_sha256": ""}
        >>> (line,) = count_reasons(pa.Table.from_pylist([row], QUARANTINED))
        >>> line["step"], line["reason"], line["rows"], line["records"], line["samples"]
        ('validate', 'json', 1, 1, [{'source': 'a/a.jsonl', 'row': 7, 'byte_offset': 90, ...}])
    """
    counts: Counter[tuple[str, str]] = Counter()
    rows: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    samples: dict[tuple[str, str], list[dict[str, object]]] = defaultdict(list)
    wanted = table.select(["step", "reason", "source", "row", "byte_offset", "detail"])
    for row in sorted(wanted.to_pylist(), key=lambda row: (row["source"], row["row"])):
        key = row.pop("step"), row.pop("reason")
        counts[key] += 1
        rows[key].add((row["source"], row["row"]))
        if len(samples[key]) < num_samples:
            samples[key].append(row)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        {
            "step": key[0],
            "reason": key[1],
            "rows": len(rows[key]),
            "records": records,
            "samples": samples[key],
        }
        for key, records in ordered
    ]


def count_rows(table: pa.Table) -> int:
    """Count the rows with at least one bad record."""
    return int(table.group_by(["source", "row"]).aggregate([]).num_rows)


def read_quarantined(opened: OpenVersion) -> pa.Table:
    """Read the quarantined rows of a published version (schema `tables.QUARANTINED`)."""
    with temporary_folder("quarantine") as folder:
        parts = [
            read_quarantine_file(opened.fetch(entry, folder / f"{number}.parquet"))
            for number, entry in enumerate(opened.files("quarantine"))
        ]
    return pa.concat_tables([QUARANTINED.empty_table(), *parts])


def read_quarantine_file(path: Path) -> pa.Table:
    """Read a file of quarantined rows, Parquet or Arrow.

    Raises:
        ConfigError: the file contains something else.
    """
    call, size = partial(_read_file, path), path.stat().st_size
    # In a worker, because a few kilobytes can expand to gigabytes.
    found = stream_from_worker(call, what=f"file '{path.name}'", blames=ConfigError, num_bytes=size)
    return pa.Table.from_batches(list(found), QUARANTINED)


def _read_file(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        for batch in read_batches(path):
            yield batch.select(QUARANTINED.names).cast(QUARANTINED)
    # Not `pa.ArrowException`, which includes running out of memory: that is not the file's fault.
    except (pa.ArrowNotImplementedError, IntegrityError, KeyError, ValueError) as error:
        raise ConfigError(f"'{path}' is not a quarantine file: {error}") from None


def editable(row: Mapping[str, Any]) -> dict[str, object]:
    """Convert a quarantined row into a line that can be fixed.

    `raw` is the parsed row if its bytes parse as one row, otherwise their text. Bytes that are not
    UTF-8 become U+FFFD and must be replaced. `is_cut` means that the end of the row is missing.

    Example:
        >>> row = {"source": "a/a.jsonl", "row": 7, "step": "validate", "reason": "fields",
        ...        "detail": "no field 'output'", "raw": b'{"instruction": "Hi"}', "raw_size": 21}
        >>> editable(row)["raw"]
        {'instruction': 'Hi'}
        >>> editable(row | {"raw": b'{"instruction": "Hi",}', "raw_size": 22})["raw"]
        '{"instruction": "Hi",}'
    """
    names = ("source", "row", "step", "reason", "detail")
    line = {name: row[name] for name in (*names, "raw_sha256") if name in row}
    if row["raw_size"] > len(row["raw"]):
        return line | {"raw": row["raw"].decode("utf-8", "replace"), "is_cut": True}
    records = LinesFile("").parse(row["raw"].replace(b"\n", b" "), max(row["raw_size"], 1))
    # Parsing would lose data for objects with duplicate keys and numbers outside float range.
    is_whole = not records.failures and len(records.rows) == 1
    return line | {
        "raw": records.rows[0] if is_whole else row["raw"].decode("utf-8", "replace"),
    }


def likely_causes(rows: Iterable[Mapping[str, Any]], recipe: Recipe) -> list[str]:
    """Return likely causes of bad rows, such as a source in another format than the recipe's.

    Args:
        rows: quarantined rows, with the columns of `tables.QUARANTINED`.
        recipe: the recipe that they were read with.

    Returns:
        A sentence for each source whose rows mostly look like another format, or are text in
        another encoding.

    Example:
        >>> source = {"path": "a.jsonl", "format": "alpaca"}
        >>> recipe = Recipe.model_validate({"dataset": "d", "tokenizer": "t", "sources": [source]})
        >>> row = {"source": "a/a.jsonl", "row": 0, "step": "validate", "reason": "fields",
        ...        "detail": "no field 'output'", "raw": b'{"question": "1+1?", "answer": "2"}'}
        >>> likely_causes([row | {"raw_size": len(row["raw"])}], recipe)
        ["Rows of 'a' look like `question_answer`, but the recipe reads them as `alpaca`. Try ..."]
    """
    shapes: dict[str, Counter[str | None]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    sources = {source_name(source): source for source in recipe.sources}
    for row in rows:
        name = row["source"].partition("/")[0]
        if name in sources and row["reason"] != "media":  # media rows have the right shape
            reasons[name][row["reason"]] += 1
            shapes[name][_other_format(editable(row)["raw"], sources[name])] += 1
    causes = []
    for name, counts in sorted(shapes.items()):
        if reasons[name].most_common(1)[0][0] == "encoding" and sources[name].encoding == "utf-8":
            causes.append(f"'{name}' is not UTF-8. `packhouse init` detects its encoding.")
        if (found := counts.most_common(1)[0][0]) is not None:
            causes.append(
                f"Rows of '{name}' look like `{found}`, but the recipe reads them as "
                f"`{sources[name].format}`. Try `format: {found}`, or `format: mixed` if rows "
                "have several shapes."
            )
    return causes


def _other_format(row: Any, source: SourceConfig) -> str | None:
    """Return the format of a row if it differs from its source's; None if no other format fits."""
    if source.format not in row_formats() or source.format == "mixed":
        return None
    wanted = row_formats()[source.format]
    if isinstance(row, dict) and wanted.required:
        names = wanted.names(tuple(row), source.fields)
        if wanted.required.keys() <= names.keys() and wanted.holds(row, names):
            return None  # the shape of the row is not the problem
    found = row_format_of(row, source.fields)
    return None if found == source.format else found


def read_bad_rows(files: Iterable[Path]) -> pa.Table | None:
    """Read the first bad rows of the first files; None if this machine has none.

    The files of a run may be on another worker.
    """
    tables = []
    for file in islice(files, _MOST_FILES):
        with suppress(OSError, pa.ArrowException):
            tables.append(read_table(file).slice(0, _MOST_ROWS))
    return pa.concat_tables(tables) if tables else None


def explain_bad_rows(
    error: PackhouseError, files: Sequence[Path], recipe: Recipe, target: str = "RECIPE"
) -> PackhouseError:
    """Return the error with the place and reason of the first bad row, and the command to see more.

    The command line, the page of a run and the summaries of a CI job all print this sentence.

    Args:
        error: raised by `check_quarantine`.
        files: files of quarantined rows, which become the error's fact `places`.
        recipe: the recipe that the rows were read with.
        target: argument of `packhouse quarantine show` in the command.
    """
    bad = read_bad_rows(files)
    if bad is None:
        return error
    line = count_reasons(bad)[0]
    sample = line["samples"][0]
    place = place_of(sample, lines_of_rows([sample], recipe.sources))
    causes = "".join(f" {cause}" for cause in likely_causes(bad.to_pylist(), recipe))
    has_remedy = line["reason"] in WITH_REMEDY
    # Details of some reasons include the remedy, which must not be cut off.
    most = 4 * _MOST_DETAIL if has_remedy else _MOST_DETAIL
    detail = shorten(sample["detail"], most, placeholder="...")
    known = None if has_remedy else QUARANTINE_REASONS[line["step"]].get(line["reason"])
    helps = f" Remedy: {known.remedy}." if known and not causes else causes
    more = f"first '{line['reason']}': {place}, {detail.rstrip('.')}.{helps}"
    gates = tuple(replace(gate, detail=f"{gate.detail}; {more}") for gate in error.gates)
    return type(error)(
        f"{error}; {more} To see them, run `packhouse quarantine show {target}`.",
        **error.facts | {"gates": gates, "places": [str(file) for file in files]},
    )
