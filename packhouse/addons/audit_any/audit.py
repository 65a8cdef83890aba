"""`packhouse audit`: audit data prepared with any tool, without a recipe and without publishing.

    report = packhouse.audit("prepared/", "Qwen/Qwen2.5-0.5B-Instruct")
    report.is_clean, report.counts["untrained"]

Rows with `input_ids` are checked without changes, whether TRL, Axolotl, LLaMA-Factory or your own
code wrote them. Other rows are raw. They are prepared in a temporary folder, as by
`packhouse.prepare`, and the report shows the findings of its audit.
"""

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import click
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.audit_any.template_turns import learn_turns
from packhouse.addons.audit_any.token_audit import NUM_SAMPLES, Sample, TokenAudit, audit_token_rows
from packhouse.addons.audit_any.tokenized_rows import token_batches
from packhouse.api import Version, open_version
from packhouse.auditing.inference_prompts import inference_line
from packhouse.cli import json_option, set_option
from packhouse.cli.result_summary import quality_lines
from packhouse.cli.token_display import (
    Run,
    coloured,
    html_runs,
    pipeline_of_version,
    plain,
    runs_of,
)
from packhouse.errors import ConfigError
from packhouse.pack.pack_columns import expand_labels
from packhouse.recipe import AuditConfig, parse_recipe
from packhouse.recipe.recipe_file import apply_override, merge_settings
from packhouse.records.ledger import sum_by_reason
from packhouse.records.table_schemas import read_table
from packhouse.registry import function_of_addon
from packhouse.run.chain import Prepared, prepare_recipe
from packhouse.run.prepare_arguments import recipe_for, tokenizer_name
from packhouse.run.step_cache import Workspace
from packhouse.store import open_version as open_stored
from packhouse.store.manifest import AuditedRow
from packhouse.system.disks import CachePlace, check_cache, find_cache, temporary_folder
from packhouse.system.escaping import PAGE_STYLE, html_text
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.terminal import Interrupted, console, echo
from packhouse.system.wording import by_name, counted
from packhouse.tokenize import load_snapshot
from packhouse.tokenize.encoders import Pipeline, read_pipeline


class Meaning(NamedTuple):
    """Explanation of a finding."""

    says: str
    remedy: str
    of: str = "records"
    """Count that the finding is a part of; `says` names the unit of `tokens` itself."""


MEANINGS = {
    "untrained": Meaning("no trained token", "drop them or fix their mask: their loss is 0 or NaN"),
    "empty": Meaning("no tokens, or only padding", "drop them", "rows"),
    "hidden": Meaning(
        "attention_mask is 0 at tokens other than padding",
        "set it to 1 there, or remove these tokens: the model would not see them",
        "rows",
    ),
    "unmasked": Meaning(
        "unlike other rows, they do not mark which tokens are trained",
        "set the label to -100 for tokens that are not trained, or drop the rows",
        "rows",
    ),
    "untrained_ends": Meaning(
        "the end token of an answer is not trained", "train it: the model would not learn to stop"
    ),
    "past_stops": Meaning(
        "trained spans go past the stop token",
        "set labels to -100 after it: the model stops generating there",
    ),
    "other_ends": Meaning(
        "trained spans end with a token that does not stop generation",
        "train the stop token instead, or configure inference to stop there",
    ),
    "unended": Meaning(
        "an answer has no end token",
        "add the end token of the template: the model would not learn to stop",
    ),
    "truncated": Meaning(
        "cut in the middle of an answer, at the length of the longest row",
        "drop them or raise the length limit: the model would not learn to stop",
    ),
    "padding": Meaning(
        "pad tokens are trained or not masked, or end tokens after the end are trained",
        "set labels to -100 and attention_mask to 0 there",
        "rows",
    ),
    "untrained_starts": Meaning(
        "the first tokens of an answer are not trained",
        "start the trained span right after the header",
    ),
    "untrained_answers": Meaning(
        "bytes of answers are not trained", "check the template", "tokens"
    ),
    "trained_prompts": Meaning(
        "tokens of prompts are trained", "mask everything except the assistant's answers"
    ),
    "trained_headers": Meaning(
        "the header of an answer is trained", "start the trained span after the header"
    ),
    "other_prompts": Meaning(
        "an answer begins right after its header, but prompts at inference continue after "
        "it, for example with <think>",
        "start the trained span where the generation prompt ends",
    ),
    "missing_headers": Meaning(
        "the record does not begin as the template does, or has no header before the answer",
        "the prompt was truncated (drop the rows or raise the limit), or a record boundary "
        "is wrong",
    ),
    "double_bos": Meaning("two BOS", "tokenize rendered text with add_special_tokens=False"),
    "missing_bos": Meaning(
        "the BOS token that the tokenizer adds is missing", "add it: the model expects it"
    ),
    "double_ends": Meaning(
        "two end tokens in a row", "add it in the tokenizer or the template, not in both"
    ),
    "positions": Meaning(
        "position_ids do not restart at each record", "count from 0 in each record", "rows"
    ),
    "boundaries": Meaning(
        "seq_lengths or cu_seqlens do not add up to the tokens", "recompute the boundaries", "rows"
    ),
    "leaks": Meaning(
        "a row contains several records, but attention does not separate them",
        "add seq_lengths, or position_ids that restart, and remove the all-ones attention_mask",
        "rows",
    ),
    "crossing": Meaning(
        "the first token of a later record is trained, so it is predicted from the previous record",
        "set its label to -100",
        "rows",
    ),
    "mislabeled": Meaning(
        "a label is neither its token nor -100",
        "do not shift labels (trainers do), or check that ids and labels are from the same row",
        "rows",
    ),
    "uneven": Meaning(
        "columns differ in length, ids are negative, or a value is null",
        "write the rows again",
        "rows",
    ),
    "foreign_ids": Meaning(
        "ids outside the tokenizer's vocabulary",
        "check that the rows were made with this tokenizer",
    ),
    "unknown_tokens": Meaning(
        "tokens are unknown to the tokenizer",
        "check that the rows were made with this tokenizer",
        "tokens",
    ),
    "duplicates": Meaning("repeat an earlier record", "drop them"),
    "quarantined": Meaning(
        "`prepare` would reject them", "fix them; the reasons are below", "rows_in"
    ),
}
OF_SPANS = ("spans", "spans_stopped", "spans_of_one_stop", "spans_after_header")
"""Counts of trained spans, present if the chat template is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row with a finding."""

    place: str
    """The row, and the token within it."""
    runs: tuple[Run, ...] = ()
    """Tokens around the position; empty if there are none."""
    detail: str = ""

    @property
    def title(self) -> str:
        """The place and the detail, if there is one."""
        return f"{self.place}{': ' * bool(self.detail)}{self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One kind of problem: how often it occurs, and examples."""

    name: str
    number: int
    total: int
    of: str
    """Unit of `total`: `records` or `rows`, or empty if `says` names the unit."""
    says: str
    remedy: str
    examples: tuple[Example, ...]

    @property
    def title(self) -> str:
        """The finding in one line, without its remedy."""
        of = f"of {self.total:,} {self.of}: " if self.of else ""
        return f"{self.name}: {self.number:,} {of}{self.says}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """Result of an audit. Prints as text, and renders in a notebook.

    Example:
        >>> from packhouse import audit
        >>> rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, -100, 8]}]
        >>> report = audit(rows, "deployments/demo/tokenizer", progress=False,
        ...     cache=getfixture("tmp_path"))
        >>> report.summary()[0]
        '1 tokenized row, 1 record, 4 tokens, 25.0% of them trained'
    """

    data: str
    """Kind of rows audited: `tokenized` or `raw`."""
    tokenizer: str
    counts: Mapping[str, int]
    """`rows_in`, `rows` (packed rows for raw data), `records`, `tokens`, `trained_tokens`,
    `longest_row`, the number of each finding, and the counts in `OF_SPANS`."""
    findings: tuple[Finding, ...]
    """Findings that occur, in the order of `MEANINGS`."""
    notes: tuple[str, ...]
    """Checks that were skipped, with the reason."""

    @property
    def is_clean(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    @property
    def fill(self) -> float:
        """Share of real tokens if all rows were padded to the length of the longest one."""
        return self.counts["tokens"] / max(self.counts["rows"] * self.counts["longest_row"], 1)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return asdict(self) | {"is_clean": self.is_clean, "fill": round(self.fill, 4)}

    def summary(self) -> list[str]:
        """Return the counts, then the notes, as lines of text."""
        counts = self.counts
        share = counts["trained_tokens"] / max(counts["tokens"], 1)
        lines = [
            f"{counted(counts['rows_in'], f'{self.data} row')}, "
            f"{counted(counts['records'], 'record')}, {counted(counts['tokens'], 'token')}, "
            f"{share:.1%} of them trained",
            f"longest row {counted(counts['longest_row'], 'token')}, fill {self.fill:.1%}",
        ]
        if "spans" in counts:
            lines.append(
                f"of {counted(counts['spans'], 'trained span')}, "
                f"{counts['spans_after_header']:,} follow a generation header, "
                f"{counts['spans_stopped']:,} end with a stop token, "
                f"{counts['spans_of_one_stop']:,} contain no other"
            )
        return lines + [f"note: {note}" for note in self.notes]

    def __repr__(self) -> str:
        lines = self.summary()
        for finding in self.findings:
            lines += ["", finding.title, f"  {finding.remedy}"]
            for example in finding.examples:
                lines.append(f"    {example.title}")
                if example.runs:
                    lines.append(indent(plain(example.runs).rstrip(), " " * 6))
        return "\n".join([*lines, "" if self.findings else "nothing found"])

    def _repr_html_(self) -> str:
        lines = "<br>".join(html_text(line) for line in self.summary())
        parts = [PAGE_STYLE, '<div class="packhouse">', f"<p>{lines}</p>"]
        for finding in self.findings:
            remedy = html_text(finding.remedy)
            parts.append(f"<p><b>{html_text(finding.title)}</b><br>{remedy}</p>")
            for example in finding.examples:
                parts.append(f'<div class="quiet">{html_text(example.title)}</div>')
                parts.append(html_runs(example.runs) if example.runs else "")
        if self.is_clean:
            parts.append("<b>nothing found</b>")
        return "".join([*parts, "</div>"])


def make_report(
    data: str,
    tokenizer: str,
    counts: Mapping[str, int],
    examples: Mapping[str, tuple[Example, ...]],
    notes: tuple[str, ...],
) -> AuditReport:
    """Build a report from counts. A few findings are tolerated, as in `prepare`."""
    limits = AuditConfig()
    allowed = {
        "unknown_tokens": limits.max_unknown_tokens * counts["tokens"],
        "untrained_answers": (1 - limits.min_answer_coverage) * counts.get("answer_bytes", 0),
    }
    findings = tuple(
        Finding(
            name=name,
            number=counts[name],
            total=counts[of],
            of="" if of == "tokens" else of.removesuffix("_in"),
            says=says,
            remedy=remedy,
            examples=examples.get(name, ()),
        )
        for name, (says, remedy, of) in MEANINGS.items()
        if counts.get(name, 0) > allowed.get(name, 0)
    )
    return AuditReport(
        data=data, tokenizer=tokenizer, counts=counts, findings=findings, notes=notes
    )


# Names of the same findings in the audit of `prepare`.
_PREPARED = {
    "untrained": "untrained_rows",
    "untrained_ends": "unterminated_turns",
    "untrained_answers": "untrained_answer_bytes",
    "trained_prompts": "trained_prompt_bytes",
    "trained_headers": "leaked_headers",
    "double_bos": "double_bos",
    "missing_bos": "missing_bos",
    "double_ends": "double_ends",
    "unknown_tokens": "unknown_tokens",
    "duplicates": "duplicates",
    # Only for tokenized rows in files that this audit does not read directly.
    "leaks": "leaks",
    "missing_headers": "missing_headers",
    "untrained_starts": "untrained_starts",
}


def audit(
    data: object,
    tokenizer: object,
    *,
    template: str | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
    overrides: Sequence[str] = (),
    **settings: object,
) -> AuditReport:
    """Audit rows prepared with any tool: check what they would teach, and list problems.

    Args:
        data: rows with `input_ids` and `labels` or a mask: a Parquet, Arrow, JSON or JSON Lines
            file, a folder of these, a saved or loaded `datasets.Dataset`, a data frame, a list of
            dicts, or a torch dataset; a published version (a `Version`, or
            `<store>/<dataset>@<ref>`); or raw rows, as `prepare` accepts them.
        tokenizer: the tokenizer of the rows: a folder, a Hub name or a tokenizer object.
        template: the template of the rows: `chat`, `alpaca`, ... or a Jinja file. Default: the
            tokenizer's chat template, if it has one.
        cache: cache folder. Default: the same as for `prepare`.
        progress: show progress on stderr.
        overrides: `section.key=value` settings that override `settings`.
        settings: sections and keys of a recipe, as for `prepare`. Tokenized rows accept only
            `tokenize.pipeline`.

    Raises:
        PackhouseError: the data, the tokenizer or a setting cannot be used.

    Example:
        >>> rows = [{"input_ids": [5, 6, 7], "labels": [-100, -100, -100]}]
        >>> report = audit(rows, "deployments/demo/tokenizer", progress=False,
        ...     cache=getfixture("tmp_path"))
        >>> report.counts["untrained"], report.is_clean
        (1, False)
    """
    place = find_cache(None if cache is None else str(cache))
    folder = check_cache(place.folder)
    with show_progress() if progress else nullcontext():
        start_phase("reading input")
        if isinstance(data, str | Path):
            # A dataset in a store has the folders v/ (versions) and refs/.
            is_dataset = all((Path(data) / name).is_dir() for name in ("v", "refs"))
            if is_dataset or ("@" in str(data) and not Path(data).exists()):
                data = open_version(str(data))
        batches = _version_batches(data) if isinstance(data, Version) else token_batches(data)
        name = tokenizer_name(tokenizer, folder)
        if batches is None:
            return _audit_raw(data, name, template, place, settings, overrides)
        minimal = {
            "dataset": "audit",
            "tokenizer": name,
            "format": {"template": template or "chat"},
            # A recipe needs a source; this path is never read.
            "sources": [{"path": "rows"}],
            **_token_settings(data, settings, overrides),
        }
        recipe = parse_recipe(minimal, where="audit")
        tokenizers = Workspace(cache=folder).tokenizers
        snapshot = load_snapshot(name, tokenizers, recipe.tokenize.pipeline)
        pipeline = read_pipeline(snapshot.backend)
        start_phase("analyzing the template")
        has_template = template is not None or snapshot.chat_template is not None
        known = recipe if has_template else None
        turns, notes = learn_turns(known, snapshot, pipeline, tokenizers)
        start_phase("auditing rows")
        found = audit_token_rows(batches, snapshot, turns, pipeline)
    # The template's headers occur nowhere, so it is probably not the one of these rows.
    if turns.answer_opens and not found.has_turns and found.totals.records:
        notes.append(
            "no row contains the header that the template writes before an answer, so prompts "
            "and headers were not checked. Check that the rows use this template."
        )
    return _report_tokens(found, name, pipeline, tuple(notes))


def _token_settings(
    data: object, settings: Mapping[str, object], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return `tokenize.pipeline`, the only setting of tokenized rows; versions bring their own.

    Raises:
        ConfigError: any other setting is given.
    """
    given: dict[str, Any] = {}
    if isinstance(data, Version):
        given["tokenize"] = {"pipeline": pipeline_of_version(data._opened)}
    keys = merge_settings(given, settings)
    for override in overrides:
        apply_override(given, override)
        keys.append(override.partition("=")[0])
    if others := [key for key in keys if key != "tokenize.pipeline"]:
        raise ConfigError(f"{others[0]}= applies to raw rows, but these are tokenized. Remove it.")
    return given


def _version_batches(version: Version) -> Iterator[pa.RecordBatch]:
    with warnings.catch_warnings():  # nothing is trained here
        warnings.filterwarnings("ignore", "each row contains several records")
        splits = [split for split in (version.train, version.eval) if split is not None]
    return chain.from_iterable(token_batches(split) or () for split in splits)


def _report_tokens(
    found: TokenAudit, tokenizer: str, pipeline: Pipeline, notes: tuple[str, ...]
) -> AuditReport:
    """Build the report of tokenized rows."""
    totals = found.totals
    shown = ["rows", "records", "tokens", "trained_tokens", "longest_row"]
    shown += OF_SPANS if totals.spans else ()
    counts = {name: getattr(totals, name) for name in shown} | {"rows_in": totals.rows}
    names = [name for name in MEANINGS if name not in ("untrained_answers", "quarantined")]
    counts |= {name: found.findings[name].number for name in names}

    def example(sample: Sample) -> Example:
        runs = runs_of(sample.ids.tolist(), sample.trained, pipeline)
        return Example(place=f"row {sample.row:,}, token {sample.token:,}", runs=runs)

    examples = {name: tuple(map(example, found.findings[name].samples)) for name in names}
    return make_report("tokenized", tokenizer, counts, examples, notes)


def _audit_raw(
    data: object,
    tokenizer: str,
    template: str | None,
    place: CachePlace,
    settings: Mapping[str, Any],
    overrides: Sequence[str],
) -> AuditReport:
    """Prepare raw rows with all limits lifted, and report what the audit found."""
    shares = [name for name in AuditConfig.model_fields if name.startswith("max_")]
    audit, validate, format_ = (settings.get(n, {}) for n in ("audit", "validate", "format"))
    quality = audit.get("quality") or {}
    # Limits would stop the preparation at the first problem, but a report lists all problems.
    lifted = {
        **settings,
        "audit": {
            **audit,
            "min_answer_coverage": 0.0,
            **dict.fromkeys(shares, 1.0),
            "quality": {n: value for n, value in quality.items() if not n.startswith("max_")},
        },
        "validate": {**validate, "max_quarantined": 1.0},
    }
    if template is not None:
        lifted["format"] = {**format_, "template": template}
    with temporary_folder("audit") as store:
        recipe = recipe_for(
            data,
            tokenizer=tokenizer,
            store=store,
            dataset="audit",
            cache=place.folder,
            settings=lifted,
            overrides=overrides,
        )
        prepared, _ = prepare_recipe(recipe, place)
        opened = open_stored(str(store), recipe.dataset, prepared.version)
        quarantined = function_of_addon("read_quarantined")(opened)
    facts = opened.manifest.facts
    sides = [side for side in facts.counts.statistics.values() if side.num_packs]
    found = facts.audit.dataset
    counts: dict[str, int] = {
        "rows_in": facts.counts.ledger[0].rows_in,
        "rows": sum(side.num_packs for side in sides),
        "records": sum(side.num_sequences for side in sides),
        "tokens": sum(side.num_tokens for side in sides),
        "trained_tokens": sum(side.num_trained for side in sides),
        "longest_row": recipe.pack.seq_len,
        "answer_bytes": found["answer_bytes"],
        "truncated": facts.audit.packs.get("cut_sequences", 0),
        "quarantined": sum(line.num_bad_rows for line in facts.counts.ledger),
    }
    counts |= {name: found.get(known, 0) for name, known in _PREPARED.items()}
    tokenizers = Workspace(cache=place.folder).tokenizers
    snapshot = load_snapshot(recipe.tokenizer, tokenizers, recipe.tokenize.pipeline)
    pipeline = read_pipeline(snapshot.backend)
    examples = {
        name: tuple(_example(row, prepared, pipeline) for row in worst[:NUM_SAMPLES])
        for name, known in _PREPARED.items()
        if (worst := facts.audit.worst.get(known))
    }
    examples["quarantined"] = tuple(
        Example(place=f"{row['source']} row {row['row']:,}", detail=row["detail"])
        for line in function_of_addon("count_reasons")(quarantined, NUM_SAMPLES)
        for row in line.samples
    )[:NUM_SAMPLES]
    dropped = by_name(sum_by_reason(facts.counts.ledger, "dropped"))
    notes = [
        f"rows were packed to {recipe.pack.seq_len:,} tokens, as `prepare` would",
        f"dropped by policy: {dropped}" if dropped else "",
        inference_line(opened.manifest.audit),
        *(quality_lines(facts.audit.quality) if facts.audit.quality else ()),
    ]
    return make_report("raw", recipe.tokenizer, counts, examples, tuple(filter(None, notes)))


def _example(row: AuditedRow, prepared: Prepared, pipeline: Pipeline) -> Example:
    """Return one of the worst rows of the audit, with its first 160 tokens."""
    place = f"{row.source} row {row.row:,}"
    tokenized = (each for each in prepared.receipts if each.step == "tokenize")
    for table in (read_table(receipt.path("tokenized.arrow")) for receipt in tokenized):
        number = pc.index(table["record_id"], row.record_id).as_py()
        if number < 0:
            continue
        batch = table.slice(number, 1).combine_chunks().to_batches()[0]
        ids = batch["input_ids"].flatten().to_numpy()[:160]
        runs = runs_of(ids.tolist(), expand_labels(batch)[:160] >= 0, pipeline)
        return Example(place=place, runs=runs)
    return Example(place=place)


FOUND = 4
"""Exit code if there are findings."""


@click.command("audit")
@click.argument("data", metavar="DATA...", nargs=-1, required=True)
@click.option(
    "--tokenizer", required=True, help="Tokenizer folder, or Hub name: org/name[@revision]."
)
@click.option("--template", help="Chat template used for the rows. [default: the tokenizer's]")
@set_option("Set a recipe value for raw rows: --set pack.seq_len=4096. May be repeated.")
@click.option("--cache", metavar="PATH", help="Cache folder.")
@json_option("Print the report as one line of JSON.")
def audit_command(
    data: tuple[str, ...],
    tokenizer: str,
    template: str | None,
    overrides: tuple[str, ...],
    cache: str | None,
    as_json: bool,
) -> None:
    """Check the tokens and masks of rows from any tool, without publishing anything.

    DATA can be files or folders of rows with `input_ids` and either `labels` or a mask (Parquet,
    Arrow, JSON, JSON Lines or `save_to_disk` output), a version (STORE/DATASET[@REF]), or raw rows
    as for `packhouse prepare`.

    \b
    Example:
      $ packhouse audit chats.jsonl --tokenizer Qwen/Qwen2.5-0.5B-Instruct
      100 raw rows, 97 records, 15,166 tokens, 39.1% of them trained
      ...

    \b
    Exit codes:
      0    no findings
      2    invalid option
      3    a file or the tokenizer cannot be read, or no rows are left
      4    findings
      5    a disk error
      130  stopped by Ctrl-C (143: by SIGTERM)
    """
    from packhouse.cli import exit_interrupted

    try:
        with show_progress():
            report = audit(
                data[0] if len(data) == 1 else list(data),
                tokenizer,
                template=template,
                cache=cache,
                progress=False,
                overrides=overrides,
            )
    except Interrupted as error:
        exit_interrupted(error, keeps_steps=False)
    if as_json:
        echo(json.dumps(report.to_json(), sort_keys=True))
    else:
        _print(report)
    sys.exit(0 if report.is_clean else FOUND)


def _print(report: AuditReport) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out = console(soft_wrap=False)
    for line in report.summary():
        out.print(line)
    for finding in report.findings:
        out.print(Text(f"\n{finding.title}", "bold yellow"))
        out.print(f"  {finding.remedy}")
        for example in finding.examples:
            out.print(Padding(Text(example.title, "cyan"), (0, 0, 0, 4), expand=False))
            if example.runs and not out.is_terminal:
                echo(indent(plain(example.runs).rstrip(), " " * 6))
            elif example.runs:
                text = coloured(example.runs)
                text.rstrip()
                out.print(Padding(text, (0, 0, 0, 6), expand=False))
    if report.is_clean:
        out.print(Text("nothing found", "bold green"))
