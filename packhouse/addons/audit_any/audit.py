"""Audit data of any tool, without a recipe and without a publication.

    report = packhouse.audit("prepared/", "Qwen/Qwen2.5-0.5B-Instruct")
    report.is_clean, report.counts["untrained"]

Rows with `input_ids` are looked at as they are: what TRL, Axolotl or LLaMA-Factory wrote, or you by
hand. Other rows are raw: they are prepared as `packhouse.prepare` would, into a temporary folder,
and what its audit found is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.audit_any.probes import learn_template
from packhouse.addons.audit_any.reading import token_batches
from packhouse.addons.audit_any.report import MEANINGS, OF_SPANS, AuditReport, Example, make_report
from packhouse.addons.audit_any.token_audit import NUM_SAMPLES, Sample, TokenAudit, audit_token_rows
from packhouse.api import Version, open_version, prepare_recipe
from packhouse.auditing.inference import inference_line
from packhouse.cli.summary import quality_lines
from packhouse.cli.tokens import runs_of
from packhouse.errors import ConfigError
from packhouse.pack.layout import expand_labels
from packhouse.recipe import AuditConfig, Recipe, parse_recipe
from packhouse.recipe.reading import apply_override, merge_settings
from packhouse.records.tables import read_table
from packhouse.registry import function_of_addon
from packhouse.run.cache import Workspace
from packhouse.run.chain import Prepared
from packhouse.run.given import recipe_for, tokenizer_name
from packhouse.store import open_version as open_stored
from packhouse.system.disks import CachePlace, check_cache, find_cache, temporary_folder
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.wording import by_name
from packhouse.tokenize import load_snapshot
from packhouse.tokenize.of_version import pipeline_of_version
from packhouse.tokenize.pipeline import Pipeline, read_pipeline

# What the audit of a preparation calls the same.
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
    # Of rows that are tokenized, in files that the audit does not read as they are.
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
    """Audit rows of any tool: what would they teach, and what is wrong with them?

    Args:
        data: rows with `input_ids` and `labels` or a mask: a Parquet, Arrow, JSON or JSON Lines
            file, a folder of these, a saved or loaded `datasets.Dataset`, a frame, a list of dicts,
            a dataset of torch; a published version (a `Version`, or `<store>/<dataset>@<ref>`);
            or raw rows, as `prepare` takes them.
        tokenizer: that they were made with: a folder, a name of the Hub or a tokenizer object.
        template: that they were made with: `chat`, `alpaca`, ... or a Jinja file; by default the
            tokenizer's chat template, if it has one.
        cache: folder of finished steps; by default that of `prepare`.
        progress: show what is being done on stderr.
        overrides: `section.key=value`, over `settings`.
        settings: sections and keys of a recipe, as `prepare` takes them. Rows that are tokenized
            have only `tokenize.pipeline`.

    Raises:
        PackhouseError: the data, the tokenizer or a setting cannot be used at all.

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
        start_phase("looking at what was given")
        data = _opened(data)
        batches = _version_batches(data) if isinstance(data, Version) else token_batches(data)
        name = tokenizer_name(tokenizer, folder)
        if batches is None:
            return _audit_raw(data, name, template, place, settings, overrides)
        minimal = {
            "dataset": "audit",
            "tokenizer": name,
            "format": {"template": template or "chat"},
            "sources": [{"path": "rows"}],
            **_token_settings(data, settings, overrides),
        }
        recipe = parse_recipe(minimal, where="audit")
        tokenizers = Workspace(cache=folder).tokenizers
        snapshot = load_snapshot(name, tokenizers, recipe.tokenize.pipeline)
        pipeline = read_pipeline(snapshot.backend)
        start_phase("learning the template")
        has_template = template is not None or snapshot.chat_template is not None
        turns, notes = learn_template(
            recipe if has_template else None, snapshot, pipeline, tokenizers
        )
        start_phase("auditing rows")
        found = audit_token_rows(batches, snapshot, turns, pipeline)
    if turns.answer_opens and not found.has_turns and found.counts["records"]:
        notes.append(
            "no row holds what the template writes before an answer, so prompts and headers were "
            "not looked at: is it the template that the rows were made with?"
        )
    return _report_tokens(found, name, pipeline, tuple(notes))


def _token_settings(
    data: object, settings: Mapping[str, object], overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the only setting of tokenized rows, `tokenize.pipeline`; versions know their own.

    Raises:
        ConfigError: another setting is given.
    """
    given: dict[str, Any] = {}
    if isinstance(data, Version):
        given["tokenize"] = {"pipeline": pipeline_of_version(data._opened)}
    keys = merge_settings(given, settings)
    for override in overrides:
        apply_override(given, override)
        keys.append(override.partition("=")[0])
    if others := [key for key in keys if key != "tokenize.pipeline"]:
        raise ConfigError(f"{others[0]}= is for raw rows, and these are tokenized already")
    return given


def _opened(data: object) -> object:
    """The version of an address or of a dataset's folder in a store; other data as it is."""
    if not isinstance(data, str | Path):
        return data
    path, text = Path(data), str(data)
    is_dataset = (path / "v").is_dir() and (path / "refs").is_dir()
    return open_version(text) if is_dataset or ("@" in text and not path.exists()) else data


def _version_batches(version: Version) -> Iterator[pa.RecordBatch]:
    for split in (version.train, version.eval):
        yield from token_batches(split) or () if split is not None else ()


def _report_tokens(
    found: TokenAudit, tokenizer: str, pipeline: Pipeline, notes: tuple[str, ...]
) -> AuditReport:
    names = [name for name in MEANINGS if name not in ("untrained_answers", "quarantined")]
    counts = {name: found.counts[name] for name in ("rows", "records", "tokens", "trained_tokens")}
    counts |= {"rows_in": counts["rows"], "longest_row": found.counts["longest_row"]}
    counts |= {name: found.counts[name] for name in names}
    if found.counts["spans"]:
        counts |= {name: found.counts[name] for name in OF_SPANS}

    def example(sample: Sample) -> Example:
        runs = runs_of(sample.ids.tolist(), sample.trained, pipeline)
        return Example(place=f"row {sample.row:,}, token {sample.token:,}", runs=runs)

    examples = {
        name: tuple(map(example, samples[:NUM_SAMPLES])) for name, samples in found.samples.items()
    }
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
    quality = settings.get("audit", {}).get("quality") or {}
    lifted = {
        **settings,
        "audit": {
            **settings.get("audit", {}),
            "min_answer_coverage": 0.0,
            **dict.fromkeys(shares, 1.0),
            "quality": {n: value for n, value in quality.items() if not n.startswith("max_")},
        },
        "validate": {**settings.get("validate", {}), "max_quarantined": 1.0},
    }
    if template is not None:
        lifted["format"] = {**settings.get("format", {}), "template": template}
    with ExitStack() as stack:
        store = stack.enter_context(temporary_folder("audit"))
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
        version = Version(open_stored(str(store), recipe.dataset, prepared.version))
        return _report_prepared(prepared, version, recipe, place)


def _report_prepared(
    prepared: Prepared, version: Version, recipe: Recipe, place: CachePlace
) -> AuditReport:
    found = version.audit["dataset"]
    sides = [side for side in version.statistics.values() if side["num_packs"]]
    counts: dict[str, int] = {
        "rows_in": version.ledger[0]["rows_in"],
        "rows": sum(side["num_packs"] for side in sides),
        "records": sum(side["num_sequences"] for side in sides),
        "tokens": sum(side["num_tokens"] for side in sides),
        "trained_tokens": sum(side["num_trained"] for side in sides),
        "longest_row": recipe.pack.seq_len,
        "answer_bytes": found["answer_bytes"],
    }
    counts |= {name: found.get(known, 0) for name, known in _PREPARED.items()}
    counts["truncated"] = version.audit["packs"].get("cut_sequences", 0)
    counts["quarantined"] = sum(
        line.num_bad_rows for line in version._opened.manifest.facts.counts.ledger
    )
    snapshot = load_snapshot(
        recipe.tokenizer, Workspace(cache=place.folder).tokenizers, recipe.tokenize.pipeline
    )
    pipeline = read_pipeline(snapshot.backend)
    examples = {
        name: tuple(_example(row, prepared, pipeline) for row in worst[:NUM_SAMPLES])
        for name, known in _PREPARED.items()
        if (worst := version.audit["worst"].get(known))
    }
    reasons = function_of_addon("count_reasons")(version.quarantined, NUM_SAMPLES)
    examples["quarantined"] = tuple(
        Example(place=f"{row['source']} row {row['row']:,}", detail=row["detail"])
        for line in reasons
        for row in line["samples"]
    )[:NUM_SAMPLES]
    dropped = by_name(version.dropped)
    notes = [f"rows were packed to {recipe.pack.seq_len:,} tokens, as `prepare` would"]
    notes += [f"dropped by policy: {dropped}"] if dropped else []
    notes += [line] if (line := inference_line(version.audit)) else []
    notes += quality_lines(version.audit["quality"])
    return make_report("raw", recipe.tokenizer, counts, examples, tuple(notes))


def _example(row: Mapping[str, object], prepared: Prepared, pipeline: Pipeline) -> Example:
    """A row of the audit's worst, with its first tokens."""
    place = f"{row['source']} row {row['row']:,}"
    for receipt in prepared.receipts:
        if receipt.step != "gather":
            continue
        for batch in read_table(receipt.path("packs.arrow")).to_batches():
            number = pc.index(batch["record_ids"].flatten(), row["record_id"]).as_py()
            if number < 0:
                continue
            ends = np.cumsum(batch["seq_lengths"].flatten().to_numpy(zero_copy_only=False))
            start, end = int(ends[number - 1]) if number else 0, int(ends[number])
            ids = batch["input_ids"].flatten().to_numpy()[start:end]
            trained = expand_labels(batch)[start:end] >= 0
            return Example(
                place=place,
                runs=runs_of(ids[:160].tolist(), trained[:160], pipeline),
            )
    return Example(place=place)
