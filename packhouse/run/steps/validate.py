"""validate: read raw rows and separate conversations from bad rows."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from packhouse import read
from packhouse.errors import ConfigError, SourceError
from packhouse.read import SourceShard, read_shard, scan_source, with_raw_rows
from packhouse.read.compression import name_row
from packhouse.read.sharding import MAX_SHARD_BYTES
from packhouse.read.source_files import source_name
from packhouse.read.unread_fields import MIN_ROWS, MIN_SHARE, UnreadText
from packhouse.recipe import MIXING, Recipe, SourceConfig, ValidateConfig
from packhouse.recipe.sections import DETECTED, ROW_FORMATS, PipelineChoice
from packhouse.records import message_rules
from packhouse.records.ledger import Filter, RenderCounts, RowCounts, filters_of
from packhouse.records.record_ids import GroupBy
from packhouse.records.table_schemas import REFUSED, read_table, write_table
from packhouse.registry import GIVEN_VERSION, function_of_addon
from packhouse.run.moved_shards import Move
from packhouse.run.step import Job, JobContext, Step
from packhouse.run.step_cache import AnyReceipt, Receipt
from packhouse.system.escaping import for_terminal
from packhouse.system.plugins import plugin_key
from packhouse.system.worker import start_early
from packhouse.tokenize.tokenizer_loading import check_unchanged

QUARANTINE = "quarantined.arrow"
"""Bad rows of a shard, in the folder of the step that rejected them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts(RowCounts):
    """Row counts and notes of a shard."""

    notes: Mapping[str, int]
    """Counts of observations that users should know about, although no row was lost."""
    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Tokens that end answers -> where each comes from. Format step only."""
    rows_rendered: int | None = None
    """Rows that gave a record. Format step only."""


def render_counts(receipts: Iterable[Receipt[ShardCounts]]) -> RenderCounts:
    """Add up the counts of the format step and the notes of all given steps."""
    return RenderCounts.total(
        RenderCounts(
            rows=(facts.rows_rendered or facts.rows_out) * (receipt.step == "format"),
            records=facts.rows_out * (receipt.step == "format"),
            stop_tokens=facts.stop_tokens,
            notes=facts.notes,
        )
        for receipt in receipts
        if isinstance(facts := receipt.facts, ShardCounts)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateParameters:
    """Parameters for reading one shard."""

    shard: SourceShard
    source: SourceConfig
    rules: ValidateConfig
    group_by: GroupBy
    tokenizer: str | None = None
    """Fingerprint of the tokenizer of the rows' ids, if rows are already tokenized."""
    pipeline: PipelineChoice | None = None
    """`tokenize.pipeline`, if rows are already tokenized."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key: the rows of the shard, not their path."""
        return {
            "shard": self.shard.identity(),
            # Weights are applied in pack, so that another one does not read the rows again.
            "source": self.source.model_dump(mode="json", exclude={"path", *MIXING}),
            # The limit changes no row. It is checked in every run, cached or not.
            "validate": self.rules.model_dump(mode="json", exclude={"max_quarantined"}),
            "group_by": self.group_by,
            **(function_of_addon("expression_key")(self.source) if self.source.is_reshaped else {}),
            **plugin_key("row_formats", self.source.format, ROW_FORMATS),
            # These formats choose among all others, so a new one may read the same rows in another
            # way.
            **({"formats": sorted(ROW_FORMATS)} if self.source.format in DETECTED else {}),
            # Group keys depend on Python's Unicode tables.
            "python": list(sys.version_info[:2]),
            **({"given": [self.tokenizer, GIVEN_VERSION]} if self.tokenizer else {}),
            **({"pipeline": self.pipeline} if self.pipeline else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Origin of the rows of a shard."""

    file: str
    """`source/name`."""
    row_start: int
    sha256: str
    settings: dict[str, object]
    """Settings of the source, as plain JSON."""
    is_tokenized: bool = False
    """True if its rows came with token ids."""

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.file.split("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateFacts(ShardCounts):
    """Counts of a validated shard."""

    extra_fields: Mapping[str, int]
    """Field that no format reads -> rows that have it."""
    origin: Origin
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Expression of `where` -> rows that it left out, if there are several expressions."""
    unread_text: Mapping[str, UnreadText] = field(default_factory=dict)
    """Text fields that nothing reads and that `ignored_fields` does not list."""

    def lineage(self) -> dict[str, object]:
        """Return the shard's entry for the manifest."""
        facts = {**asdict(self.origin), "rows": self.rows_in}
        if not self.origin.is_tokenized:  # only manifests of tokenized sources have this key
            del facts["is_tokenized"]
        counts = {"dropped": self.dropped, "filtered": self.filtered}
        counts["unused_fields"] = self.extra_fields
        return facts | {name: dict(each) for name, each in counts.items() if each}


def jobs(recipe: Recipe, tokenizer: str) -> Iterator[Job[ValidateParameters]]:
    """Scan the sources and yield a job per shard, ordered by file name rather than by recipe.

    `tokenizer` is a fingerprint.
    """
    size = shard_bytes(recipe)
    longest = recipe.validate_.max_row_bytes
    scanned = [(source, scan_source(source, size, longest)) for source in recipe.sources]
    pairs = [(shard, source) for source, shards in scanned for shard in shards]
    # Lineage names files `source/file`.
    owner: dict[str, tuple[SourceConfig, str]] = {}
    for shard, source in pairs:
        first, uri = owner.setdefault(shard.file, (source, shard.uri))
        if uri != shard.uri:
            raise ConfigError(
                f"'{shard.uri}' and '{uri}' are both named '{shard.file}' in lineage. "
                "Give each source its own `name`.",
                file=shard.file,
            )
        if first is not source:
            raise ConfigError(
                f"'{uri}' is in two sources, so its rows would be counted twice. If this is "
                "intended, or `where` selects different rows, give each source its own `name`.",
                uri=uri,
            )
    # The order of records decides packs and bytes, so it must not depend on the order of sources in
    # the recipe.
    pairs.sort(key=lambda pair: (pair[0].file, pair[0].byte_start))
    for shard, source in pairs:
        yield VALIDATE.job(
            ValidateParameters(
                shard=shard,
                source=source,
                rules=recipe.validate_,
                group_by=recipe.split.group_by,
                tokenizer=tokenizer if shard.row_format == "tokenized" else None,
                pipeline=recipe.tokenize.pipeline if shard.row_format == "tokenized" else None,
            ),
            inputs=[],
            label=for_terminal(
                f"{shard.file} from row {shard.row_start:,}" if shard.row_start else shard.file
            ),
            size=shard.byte_end - shard.byte_start,
        )


def shard_bytes(recipe: Recipe) -> int:
    """Return the maximum raw bytes of a shard: the recipe's `shard_mb`, or the default."""
    return MAX_SHARD_BYTES if recipe.shard_mb is None else recipe.shard_mb * 2**20


def filters_of_run(receipts: Iterable[AnyReceipt]) -> list[Filter]:
    """Return how many rows each `where` expression left out; ignores receipts of other steps."""
    facts = (receipt.facts for receipt in receipts)
    return filters_of(each.lineage() for each in facts if isinstance(each, ValidateFacts))


def may_drop(parameters: ValidateParameters) -> bool:
    """Return True if rows of a shard may be dropped before they become records."""
    source = parameters.source
    is_tree = parameters.shard.row_format == "oasst_flat"
    return bool(source.filters) or source.media == "drop_rows" or is_tree


@dataclass(frozen=True, slots=True)
class TextOfShard:
    """Text fields that nothing reads in a shard or a part of it."""

    source: SourceConfig
    shard: SourceShard
    rows: int
    """Rows that became conversations."""
    unread: Mapping[str, UnreadText]


def check_all_text_is_read(
    recipe: Recipe, jobs: Sequence[Job[ValidateParameters]], receipts: Sequence[AnyReceipt]
) -> None:
    """Reject sources with text fields that nothing reads and `ignored_fields` does not list.

    Raises:
        SourceError: names each such field, and the option that ignores it.
    """
    shards = []
    for job, receipt in zip(jobs, receipts, strict=True):
        facts: ValidateFacts = receipt.facts
        rows = facts.rows_in - facts.num_bad_rows - sum(facts.dropped.values())
        source, shard = job.parameters.source, job.parameters.shard
        shards.append(TextOfShard(source, shard, rows, facts.unread_text))
    if said := unread_texts(recipe, shards):
        raise SourceError("\n".join(said))


def unread_texts(recipe: Recipe, shards: Sequence[TextOfShard]) -> list[str]:
    """Return a message for each source that `check_all_text_is_read` rejects."""
    said = []
    for number, source in enumerate(recipe.sources):
        own = [each for each in shards if each.source == source]
        rows = sum(each.rows for each in own)
        found: dict[str, list[tuple[SourceShard, UnreadText]]] = {}
        for each in own:
            for name, unread in each.unread.items():
                found.setdefault(name, []).append((each.shard, unread))
        # A field that few rows have is a stray note rather than a column of the data.
        least = max(MIN_ROWS, MIN_SHARE * rows)
        counts = {name: sum(unread.rows for _, unread in found[name]) for name in found}
        names = [name for name in counts if counts[name] >= least]
        # Report the nested field rather than the field that contains it.
        names = [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
        if not names:
            continue
        shown = []
        for name in names[:20]:
            shard, unread = found[name][0]
            row = name_row(shard.uri, unread.row, unread.byte_offset, shard.encoding)
            shown.append(f"'{name}' ({counts[name]:,} of {rows:,} rows, as in {shard.file} {row})")
        ignored = json.dumps([*source.ignored_fields, *names], ensure_ascii=False)
        option = shlex.quote(f"sources.{number}.ignored_fields={ignored}")
        said.append(
            f"source '{source_name(source)}': no setting reads the text in "
            f"{', '.join(shown)}{', ...' if len(names) > 20 else ''}. Read it with `fields` or "
            f'`select`, or ignore it: --set {option} (in Python, pass the data as {{"path": ..., '
            f'"ignored_fields": {ignored}}})'
        )
    return said


def compute(work: JobContext[ValidateParameters], folder: Path) -> ValidateFacts:
    """Write `validated.arrow`, and `quarantined.arrow` and `dropped.arrow` if they have rows.

    For pairs, `rejected.arrow` holds the rejected conversations. For rows that are already
    tokenized, `tokens.arrow` holds the tokens that the tokenize step passes on.
    """
    start_early("packhouse.render.renderer")  # format runs next, and its worker takes time to start
    parameters = work.parameters
    rows = read_shard(parameters.shard, parameters.source, parameters.rules, parameters.group_by)
    if parameters.tokenizer is not None:
        token_rows = function_of_addon("read_given")(rows.validated, work.load_tokenizer())
        bad = pa.concat_tables([rows.quarantined, token_rows.quarantined]).sort_by("row")
        rows = replace(rows, validated=token_rows.conversations, quarantined=bad)
        write_table(folder / "tokens.arrow", token_rows.tokenized)
        check_unchanged(work.recipe.tokenizer, parameters.tokenizer)
    rows.write(folder)
    by_expression = Counter(rows.dropped["detail"].to_pylist())
    filters = parameters.source.filters
    return ValidateFacts(
        # Count what was read, not what came out, so that the ledger can compare both.
        rows_in=rows.num_records,
        rows_out=rows.validated.num_rows,
        added={"extra_paths": rows.extra_paths} if rows.extra_paths else {},
        **write_quarantined(work, folder, rows.quarantined),
        dropped=write_with_reasons(folder / "dropped.arrow", rows.dropped),
        notes=dict(sorted(rows.notes.items())),
        extra_fields=rows.extra_fields,
        unread_text=rows.unread_text,
        filtered={n: by_expression[n] for n in filters if by_expression[n] and len(filters) > 1},
        origin=Origin(
            file=parameters.shard.file,
            row_start=parameters.shard.row_start,
            sha256=parameters.shard.sha256,
            settings=parameters.source.model_dump(mode="json", exclude={"path", "name", *MIXING}),
            is_tokenized=parameters.tokenizer is not None,
        ),
    )


def write_quarantined(
    work: JobContext[Any], folder: Path, rows: pa.Table, before: Sequence[Receipt[ShardCounts]] = ()
) -> dict[str, Any]:
    """Write bad rows, if any, with their original bytes, and count them.

    Args:
        work: job with the shard of the rows.
        folder: folder of the step.
        rows: schema `table_schemas.QUARANTINED`.
        before: receipts of earlier steps for the same shard.

    Returns:
        `quarantined` and `quarantined_again` of `RowCounts`.
    """
    # Here, because the rows of format and tokenize come from a worker, which cannot open the
    # source.
    rows = with_raw_rows(rows, work.parameters.shard, work.recipe.validate_)
    (folder / REFUSED).unlink(missing_ok=True)  # a worker's bad rows, replaced by this file
    files = [each.path(QUARANTINE) for each in before if QUARANTINE in each.files]
    known = {row for file in files for row in read_table(file)["row"].to_pylist()}
    # A row that was split may be bad in two steps, but the ledger counts it once.
    new = set(rows["row"].to_pylist()) - known
    return {
        "quarantined": write_with_reasons(folder / QUARANTINE, rows),
        "quarantined_again": rows.num_rows - len(new),
    }


def write_with_reasons(path: Path, rows: pa.Table) -> dict[str, int]:
    """Write bad or dropped rows, if any, and count them by reason."""
    if rows.num_rows:
        write_table(path, rows)
    return dict(sorted(Counter(rows["reason"].to_pylist()).items()))


def _moved(facts: ValidateFacts, move: Move) -> ValidateFacts:
    """Change the row numbers in facts; see `packhouse.run.moved_shards`."""
    unread = {}
    for name, each in facts.unread_text.items():
        offset = None if each.byte_offset is None else each.byte_offset + move.num_bytes
        unread[name] = replace(each, row=each.row + move.rows, byte_offset=offset)
    origin = replace(facts.origin, row_start=facts.origin.row_start + move.rows)
    return replace(facts, unread_text=unread, origin=origin)


VALIDATE = Step(
    name="validate",
    title="Read raw rows and separate conversations from bad rows.",
    version=f"1.{read.VERSION}.{message_rules.VERSION}",
    libraries=("numpy", "orjson", "pyarrow"),
    facts=ValidateFacts,
    compute=compute,
    move=_moved,
    contracts={
        "validated.arrow": "validated",
        "tokens.arrow": "tokenized",
        "rejected.arrow": "validated",
        "quarantined.arrow": "quarantined",
        "dropped.arrow": "dropped",
    },
)
