"""validate: one shard of raw rows -> conversations, and rows that are not."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from packhouse import read
from packhouse.errors import ConfigError, SourceError
from packhouse.read import SourceShard, read_shard, scan_source, with_raw_rows
from packhouse.read.extra_fields import MIN_ROWS, MIN_SHARE, UnreadText
from packhouse.read.files import source_name
from packhouse.read.shards import MAX_SHARD_BYTES
from packhouse.read.streams import name_row
from packhouse.read.where_select import expression_key
from packhouse.recipe import MIXING, Recipe, SourceConfig, ValidateConfig
from packhouse.recipe.settings import PipelineChoice
from packhouse.recipe.source import RowFormatName
from packhouse.records import messages
from packhouse.records.identity import GroupBy
from packhouse.records.ledger import Filter, RowCounts, filters_of
from packhouse.records.render_counts import RenderCounts
from packhouse.records.tables import REFUSED, read_table, write_table
from packhouse.run.cache import AnyReceipt, Receipt
from packhouse.run.step import Job, Step, Work
from packhouse.system.escaping import for_terminal
from packhouse.system.plugins import plugin_key
from packhouse.system.worker import start_early
from packhouse.tokenize.given import GIVEN_VERSION, read_given
from packhouse.tokenize.loading import check_unchanged

QUARANTINE = "quarantined.arrow"
"""Bad rows of a shard, in the folder of the step that refused them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCounts(RowCounts):
    """What came of the rows of a shard."""

    notes: Mapping[str, int]
    """How often something was seen that a reader should know, though no row was lost by it."""
    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Of the format step: tokens that end answers, and where each is from."""
    rows_rendered: int | None = None
    """Of the format step: rows that gave a record."""


def render_counts(receipts: Iterable[Receipt[ShardCounts]]) -> RenderCounts:
    """Return what the format step says of all shards, and the notes of whatever steps are given."""
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
    """Which rows to read, and how."""

    shard: SourceShard
    source: SourceConfig
    rules: ValidateConfig
    group_by: GroupBy
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that the rows' ids are of, where rows are tokenized."""
    pipeline: PipelineChoice | None = None
    """`tokenize.pipeline`, where rows are tokenized."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key: the rows of the shard, not their path."""
        return {
            "shard": self.shard.identity(),
            "source": self.source.model_dump(mode="json", exclude={"path", *MIXING}),
            "validate": self.rules.model_dump(mode="json", exclude={"max_quarantined"}),
            "group_by": self.group_by,
            **expression_key(self.source),
            **plugin_key("row_formats", self.source.format, get_args(RowFormatName)),
            "python": list(sys.version_info[:2]),  # its Unicode tables normalise group keys
            **({"given": [self.tokenizer, GIVEN_VERSION]} if self.tokenizer else {}),
            **({"pipeline": self.pipeline} if self.pipeline else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the rows of a shard come from."""

    file: str
    """`source/name`."""
    row_start: int
    sha256: str
    settings: dict[str, object]
    """Of the source, as plain JSON."""
    is_tokenized: bool = False
    """True if its rows came with their ids."""

    @property
    def source(self) -> str:
        """Name of the source."""
        return self.file.split("/")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateFacts(ShardCounts):
    """What came of a shard of raw rows."""

    extra_fields: Mapping[str, int]
    """Rows by name of a field that no format reads."""
    origin: Origin
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Rows by the expression that left them out, where `where` is a list of several."""
    unread_text: Mapping[str, UnreadText] = field(default_factory=dict)
    """Fields with text that nobody reads and that the source does not ignore."""

    def lineage(self) -> dict[str, object]:
        """Return what the manifest says of the shard."""
        facts = {**asdict(self.origin), "rows": self.rows_in}
        if self.dropped:
            facts["dropped"] = dict(self.dropped)
        if self.filtered:
            facts["filtered"] = dict(self.filtered)
        if not self.origin.is_tokenized:  # manifests of other sources stay as they were
            del facts["is_tokenized"]
        return facts | ({"unused_fields": self.extra_fields} if self.extra_fields else {})


def jobs(recipe: Recipe, tokenizer: str) -> Iterator[Job[ValidateParameters]]:
    """Scan the sources; yield a job for each shard, in the order of files, not of the recipe.

    `tokenizer` is a fingerprint.
    """
    size = shard_bytes(recipe)
    longest = recipe.validate_.max_row_bytes
    scanned = [(source, scan_source(source, size, longest)) for source in recipe.sources]
    _refuse_same_names(scanned)
    pairs = [(shard, source) for source, shards in scanned for shard in shards]
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
    """Return how many raw bytes a shard has at most: `shard_mb` of the recipe, or the usual."""
    return MAX_SHARD_BYTES if recipe.shard_mb is None else recipe.shard_mb * 2**20


def filters_of_run(receipts: Iterable[AnyReceipt]) -> list[Filter]:
    """Return what each expression of `where` left out, by source; of receipts of any steps."""
    facts = (receipt.facts for receipt in receipts)
    return filters_of(each.lineage() for each in facts if isinstance(each, ValidateFacts))


def may_drop(parameters: ValidateParameters) -> bool:
    """Return True if rows of a shard may be left out before they are records."""
    source = parameters.source
    is_tree = parameters.shard.row_format == "oasst_flat"
    return bool(source.filters) or source.media == "drop_rows" or is_tree


@dataclass(frozen=True, slots=True)
class TextOfShard:
    """Text that nothing reads in the rows of a shard, or of a part of it."""

    source: SourceConfig
    shard: SourceShard
    rows: int
    """Rows that gave a conversation."""
    unread: Mapping[str, UnreadText]


def check_all_text_is_read(
    recipe: Recipe, jobs: Sequence[Job[ValidateParameters]], receipts: Sequence[AnyReceipt]
) -> None:
    """Refuse sources with text that nothing reads and that `ignored_fields` does not list.

    Raises:
        SourceError: names each such field, with the option that leaves it out.
    """
    shards = []
    for job, receipt in zip(jobs, receipts, strict=True):
        facts = receipt.facts
        assert isinstance(facts, ValidateFacts)
        rows = facts.rows_in - facts.num_bad_rows - sum(facts.dropped.values())
        source, shard = job.parameters.source, job.parameters.shard
        shards.append(TextOfShard(source, shard, rows, facts.unread_text))
    if said := unread_texts(recipe, shards):
        raise SourceError("\n".join(said))


def unread_texts(recipe: Recipe, shards: Sequence[TextOfShard]) -> list[str]:
    """Return what `check_all_text_is_read` says of each source, of those that it refuses."""
    said = []
    for number, source in enumerate(recipe.sources):
        own = [each for each in shards if each.source == source]
        rows = sum(each.rows for each in own)
        found: dict[str, list[tuple[SourceShard, UnreadText]]] = {}
        for each in own:
            for name, unread in each.unread.items():
                found.setdefault(name, []).append((each.shard, unread))
        least = max(MIN_ROWS, MIN_SHARE * rows)
        counts = {name: sum(unread.rows for _, unread in found[name]) for name in found}
        names = [name for name in counts if counts[name] >= least]
        # Of a field and one inside of it, the inner one says more.
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
            f"source '{source_name(source)}': nothing reads the text in {', '.join(shown)}"
            f"{', ...' if len(names) > 20 else ''}. Read it with `fields` or `select`, or leave it "
            f"out: --set {option} (in Python, give the data as "
            f'{{"path": ..., "ignored_fields": {ignored}}})'
        )
    return said


def _refuse_same_names(scanned: list[tuple[SourceConfig, list[SourceShard]]]) -> None:
    """Lineage says `source/file`; two files of one name would make it ambiguous."""
    owner: dict[str, tuple[int, str]] = {}
    for number, (_, shards) in enumerate(scanned):
        for file, uri in sorted({(shard.file, shard.uri) for shard in shards}):
            first = owner.setdefault(file, (number, uri))
            if first == (number, uri):
                continue
            if first[1] == uri:
                raise ConfigError(
                    f"'{uri}' is in two sources: its rows would count twice; if that is meant, or "
                    "`where` gives each other rows, give each source a `name` of its own",
                    uri=uri,
                )
            raise ConfigError(
                f"'{uri}' and '{first[1]}' are both called '{file}' in lineage; "
                "give each source a `name` of its own",
                file=file,
            )


def compute(work: Work[ValidateParameters], folder: Path) -> ValidateFacts:
    """Write `validated.arrow`; `quarantined.arrow` and `dropped.arrow` where rows are.

    Of pairs, `rejected.arrow` has the other sides; where the rows are tokenized, `tokens.arrow` has
    what tokenize passes on.
    """
    start_early("packhouse.run.rendering")  # format comes next
    parameters = work.parameters
    rows = read_shard(parameters.shard, parameters.source, parameters.rules, parameters.group_by)
    if parameters.tokenizer is not None:
        token_rows = read_given(rows.validated, work.load_tokenizer())
        bad = with_raw_rows(token_rows.quarantined, parameters.shard, parameters.rules)
        quarantined = pa.concat_tables([rows.quarantined, bad]).sort_by("row")
        rows = replace(rows, validated=token_rows.conversations, quarantined=quarantined)
        write_table(folder / "tokens.arrow", token_rows.tokenized)
        check_unchanged(work.recipe.tokenizer, parameters.tokenizer)
    rows.write(folder)
    by_expression = Counter(rows.dropped["detail"].to_pylist())
    return ValidateFacts(
        rows_in=rows.num_records,  # what was read, not what came out: the ledger compares
        rows_out=rows.validated.num_rows,
        added={"extra_paths": rows.extra_paths} if rows.extra_paths else {},
        **write_quarantined(folder, rows.quarantined),
        dropped=write_with_reasons(folder / "dropped.arrow", rows.dropped),
        notes=dict(sorted(rows.notes.items())),
        extra_fields=rows.extra_fields,
        unread_text=rows.unread_text,
        filtered={
            text: by_expression[text] for text in parameters.source.filters if by_expression[text]
        }
        if len(parameters.source.filters) > 1
        else {},
        origin=Origin(
            file=parameters.shard.file,
            row_start=parameters.shard.row_start,
            sha256=parameters.shard.sha256,
            settings=parameters.source.model_dump(mode="json", exclude={"path", "name", *MIXING}),
            is_tokenized=parameters.tokenizer is not None,
        ),
    )


def take_refused(
    folder: Path, shard: SourceShard, rules: ValidateConfig, before: Sequence[Receipt[ShardCounts]]
) -> dict[str, Any]:
    """Give the rows that a worker refused their raw bytes; write and count them.

    Args:
        folder: of the step.
        shard: where the raw bytes are.
        rules: how many of them are kept.
        before: receipts of the steps before, of the same shard.

    Returns:
        `quarantined` and `quarantined_again` of `RowCounts`.
    """
    refused = folder / REFUSED
    quarantined = with_raw_rows(read_table(refused), shard, rules)
    refused.unlink()
    files = [each.path(QUARANTINE) for each in before if QUARANTINE in each.files]
    known = [read_table(file)["row"] for file in files]
    return write_quarantined(folder, quarantined, known)


def write_quarantined(
    folder: Path, rows: pa.Table, before: Sequence[pa.ChunkedArray] = ()
) -> dict[str, Any]:
    """Write bad rows, if any; `before` are the numbers of those that earlier steps found.

    Returns:
        `quarantined` and `quarantined_again` of `RowCounts`.
    """
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *map(np.asarray, before)]))
    new = np.setdiff1d(rows["row"].to_numpy(), every)
    return {
        "quarantined": write_with_reasons(folder / QUARANTINE, rows),
        "quarantined_again": rows.num_rows - len(new),
    }


def write_with_reasons(path: Path, rows: pa.Table) -> dict[str, int]:
    """Write bad rows, or those that the recipe leaves out, if any; count them by reason."""
    if rows.num_rows:
        write_table(path, rows)
    return dict(sorted(Counter(rows["reason"].to_pylist()).items()))


VALIDATE = Step(
    name="validate",
    title="Raw rows in, conversations and quarantined rows out.",
    version=f"1.{read.VERSION}.{messages.VERSION}",
    libraries=("numpy", "orjson", "pyarrow"),
    facts=ValidateFacts,
    compute=compute,
    contracts={
        "validated.arrow": "validated",
        "tokens.arrow": "tokenized",
        "rejected.arrow": "validated",
        "quarantined.arrow": "quarantined",
        "dropped.arrow": "dropped",
    },
)
