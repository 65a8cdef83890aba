"""publish: turn the written files into an immutable version in the store.

The files already exist, one job each (`packhouse.run.steps.files`). This step adds up the facts of
all steps. Every run commits again, so that a version that was deleted from the store, or is
published to another store, is published without repeating any work.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from packhouse.auditing.audit_limits import check_audit
from packhouse.errors import PackhouseError
from packhouse.pack.dedup import DedupFacts
from packhouse.pack.gather_tokens import PackStatistics
from packhouse.recipe import PublishConfig, Recipe
from packhouse.recipe.recipe import plugins_of
from packhouse.recipe.sections import HUB_NAME
from packhouse.records.gate_results import GateResult
from packhouse.records.ledger import LedgerLine, RenderCounts, ledger_of
from packhouse.registry import function_of_addon, has_function
from packhouse.run.step import AnyStep, Job, JobContext, Step
from packhouse.run.step_cache import Receipt
from packhouse.run.steps.audit import AUDIT, combine_audits
from packhouse.run.steps.check_split import SPLIT, SplitParameters
from packhouse.run.steps.files import FILE_SETTINGS, FILES, local_files
from packhouse.run.steps.format import FORMAT
from packhouse.run.steps.pack import PACK, SIDES, Side, SplitCounts, mix_of
from packhouse.run.steps.tokenize import TOKENIZE
from packhouse.run.steps.validate import VALIDATE, render_counts
from packhouse.store import LocalFile, load_ref, open_store, open_version, publish_version
from packhouse.store.manifest import SideCounts, TokenizerFacts, read_audit
from packhouse.store.schema_drift import ref_gates, schema_gate
from packhouse.system.fingerprint import canonical_json, digest, library_versions
from packhouse.tokenize.tokenizer_loading import check_unchanged, fingerprinted_bytes

STEPS_BEFORE: tuple[AnyStep, ...] = (VALIDATE, FORMAT, TOKENIZE, PACK, SPLIT, AUDIT, FILES)
"""All steps before publish."""

_REPORT = "report.html"
_VERSION = "1"
ENGINE_VERSIONS = {step.name: step.version for step in STEPS_BEFORE} | {"publish": _VERSION}
"""Version of each step. The manifest lists them, and they are part of the version id."""

ALL_LIBRARIES = sorted(
    {name for step in STEPS_BEFORE for name in step.libraries} | {"tokenizers", "transformers"}
)
"""Libraries whose versions are part of the version id and listed in the manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishParameters:
    """Parameters of a version other than the keys of earlier steps."""

    dataset: str
    publish: PublishConfig
    benchmarks: Mapping[str, object]
    """Results of `benchmarks_of` and `checks_of`. They are in the key, because their findings are
    published."""

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key: how files are written, not where they go."""
        files = self.publish.model_dump(mode="json", include=set(FILE_SETTINGS))
        if self.publish.exports:
            files["exports"] = [each.model_dump(mode="json") for each in self.publish.exports]
        return {
            "publish": files,
            "dataset": self.dataset,
            "engines": ENGINE_VERSIONS,
            **self.benchmarks,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishFacts:
    """Contents of a version."""

    content_id: str
    """Hash of the logical rows, from the content hash of each data file in order."""
    ledger: tuple[LedgerLine, ...]
    statistics: Mapping[Side, PackStatistics]
    sides: Mapping[Side, SideCounts]
    rendering: RenderCounts
    """Counts of how rows became records."""
    mixed: Mapping[str, Mapping[str, int]]
    """Records and tokens by source; see `pack.source_counts`."""
    dedup: DedupFacts | None
    split: SplitCounts | None
    sources: tuple[dict[str, Any], ...]
    """Origin of the rows of each shard, as plain JSON."""
    tokenizer: TokenizerFacts
    encoders: tuple[dict[str, object], ...]
    """Distinct encoder reports of the tokenize jobs, in order of first use."""
    audit: dict[str, Any]
    """Sum of all audits, as plain JSON; see `audit.combine_audits`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published(PublishFacts):
    """Contents of a version, and the result of publishing it in this run."""

    version: str
    manifest_id: str
    created: bool
    """False if the version already existed."""
    ref: str
    ref_version: str | None
    """Version that the ref points to now."""
    ref_before: str | None
    """Version that the ref pointed to before this run."""
    held_back: tuple[str, ...]
    """Reasons why the ref did not move to this version; empty if it points to it."""
    is_ref_left: bool
    """True if the ref stays at another version because of `publish.move_ref`."""
    gates: tuple[GateResult, ...]
    """Results of the gates `audit`, `schema` and `drift`."""
    mirrors: Mapping[str, str]
    """URI of each store in `publish.also` -> name of the version there."""
    quarantine: str | None
    """URI of the quarantine file; None if there are no bad rows."""

    @property
    def is_ref_moved(self) -> bool:
        """True if this run pointed the ref to the version."""
        return self.ref_version == self.version != self.ref_before


def job(
    recipe: Recipe, split: Job[SplitParameters], benchmarks: Mapping[str, object]
) -> Job[PublishParameters]:
    """Return the publish job; its inputs are added once the packs are planned.

    Its key is final, so the version id is known before any work is done.
    """
    name, publish = recipe.dataset, recipe.publish
    parameters = PublishParameters(dataset=name, publish=publish, benchmarks=benchmarks)
    return PUBLISH.job(parameters, inputs=[split.ref])


def compute(work: JobContext[PublishParameters], folder: Path) -> PublishFacts:
    """Collect the contents of the version; nothing becomes visible yet.

    Raises:
        ContractError: the ledger of the earlier steps does not add up.
    """
    packed, split = work.input(PACK), work.input(SPLIT)
    validated, tokenized = work.inputs(VALIDATE), work.inputs(TOKENIZE)
    receipts = [*validated, *work.inputs(FORMAT), *tokenized, packed, split]
    data = [each.facts for each in work.inputs(FILES) if each.facts.content is not None]
    # By their JSON, because a dict cannot be a key.
    encoders = {canonical_json(r.facts.encoder): r.facts.encoder for r in tokenized}
    tallies: dict[str, Counter[str]] = {side: Counter() for side in SIDES}
    for written in data:
        assert written.tally is not None
        tallies[written.files[0].split].update(asdict(written.tally))
    facts = PublishFacts(
        content_id=digest([[each.files[0].split, each.content] for each in data]),
        ledger=tuple(ledger_of(receipts)),
        statistics={
            # Statistics of the plan, with the `num_` fields that the files jobs counted.
            side: PackStatistics(**{**asdict(packed.facts.sides[side].statistics), **tallies[side]})
            for side in SIDES
        },
        sides=split.facts.sides,
        rendering=render_counts(work.inputs(FORMAT)),
        mixed=packed.facts.sources,
        dedup=packed.facts.dedup,
        split=packed.facts.split,
        sources=tuple(receipt.facts.lineage() for receipt in validated),
        tokenizer=tokenized[0].facts.tokenizer,
        encoders=tuple(encoders.values()),
        audit=combine_audits(work),
    )
    # Made here rather than in `commit`, so that an unchanged run does not draw it again.
    if work.recipe.publish.report and has_function("unpublished_report"):
        # Publishing Alpaca takes 1.9 s with the report and 0.1 s without.
        html = function_of_addon("unpublished_report")(
            work.recipe.dataset,
            work.job.key[:16],
            local_files(work),
            _manifest_facts(facts, work.recipe),
            work.workspace.tokenizers,
        )
        (folder / _REPORT).write_text(html, encoding="utf-8")
    return facts


def commit(
    work: JobContext[PublishParameters], receipt: Receipt[PublishFacts]
) -> Receipt[PublishFacts]:
    """Publish the files unless the store has them, then move the ref.

    Runs every time, cached or not, so that a version that was deleted from the store is published
    again without repeating work, and the audit is checked against the current limits. The returned
    receipt has facts of type `Published`. An error carries the gate results as its fact `gates`.

    Raises:
        AuditError: the audit exceeds a limit; nothing was written to the store.
        ConflictError: the store has different bytes for the same inputs.
        StoreRefusedError: the store cannot guarantee a safe publish.
    """
    recipe, config, facts = work.recipe, work.recipe.publish, receipt.facts
    audited = check_audit(read_audit(facts.audit), recipe.audit)
    files = local_files(work)
    if config.report and _REPORT in receipt.files:
        sha256 = receipt.files[_REPORT].sha256
        files.append(LocalFile(receipt.path(_REPORT), "all", sha256=sha256, kind="report"))
    store = open_store(config.store)
    # Current ref if it must stay where it is; None if it may move or does not exist yet.
    at = None if config.move_ref else load_ref(store, recipe.dataset, config.ref)
    read = partial(_tokenizer_bytes, recipe.tokenizer, facts.tokenizer.fingerprint)
    try:
        published = publish_version(
            store,
            recipe.dataset,
            work.job.key[:16],
            files,
            _manifest_facts(facts, recipe),
            ref=None if at else config.ref,
            limits=config,
            tokenizer=read if config.keep_tokenizer else None,
            by=work.workspace.moved_by,
        )
    except PackhouseError as error:
        refused = [schema_gate(error.changes, str(error))] if "changes" in error.facts else []
        error.facts["gates"] = (*audited, *refused)
        raise
    opened = open_version(store, recipe.dataset, published.version)
    bad = [e.key for e in published.manifest.files if e.kind == "quarantine"]
    root = f"{config.store.rstrip('/')}/{recipe.dataset}/v/{published.version}"
    return replace(
        receipt,
        cached=receipt.cached and not published.created,
        facts=Published(
            **{each.name: getattr(facts, each.name) for each in fields(PublishFacts)},
            **{name: getattr(published, name) for name in ("version", "created", "held_back")},
            manifest_id=opened.manifest.manifest_id,
            ref=config.ref,
            ref_version=ref.version if (ref := at or published.ref) else None,
            ref_before=at.version if at else published.ref_before,
            is_ref_left=at is not None and at.version != published.version,
            gates=(*audited, *ref_gates(config, config.ref, published.change)),
            mirrors={
                uri: function_of_addon("copy_version")(opened, uri, recipe) for uri in config.also
            },
            quarantine=f"{root}/{bad[0]}" if bad else None,
        ),
    )


def _manifest_facts(facts: PublishFacts, recipe: Recipe) -> dict[str, object]:
    """Return the manifest's contents other than its files, as plain JSON."""
    counts: dict[str, object] = {
        "rendering": asdict(facts.rendering),
        "ledger": [line.to_json() for line in facts.ledger],
        "statistics": {side: each.to_dict() for side, each in facts.statistics.items()},
        "sides": {side: asdict(each) for side, each in facts.sides.items()},
        "sources": facts.mixed,
    }
    if facts.dedup is not None:
        counts["dedup"] = facts.dedup.to_json()
    if facts.split is not None:
        counts["split"] = asdict(facts.split)
    tokenizer = asdict(facts.tokenizer)
    tokenizer["class"] = tokenizer.pop("class_name")
    sql: set[str] = set()
    for source in filter(lambda source: source.is_reshaped, recipe.sources):
        sql.update(function_of_addon("expression_libraries")(source))
    # The name is not part of the version: the same tokenizer files from a folder give the same one.
    name = {"tokenizer": recipe.tokenizer} if HUB_NAME.fullmatch(recipe.tokenizer) else {}
    limits = recipe.audit.model_dump(
        mode="json", exclude_defaults=True, exclude={"benchmarks", "benchmark_ngram", "checks"}
    )
    return {
        "content_id": facts.content_id,
        "counts": counts,
        "audit": facts.audit,
        "lineage": {"sources": facts.sources, "tokenizer": tokenizer},
        "configuration": configuration_of(recipe),
        "engines": dict(ENGINE_VERSIONS),
        "libraries": library_versions([*ALL_LIBRARIES, *sql])
        | {plugin.distribution or plugin.name: plugin.version for plugin in plugins_of(recipe)},
        "provenance": {
            # Not part of `manifest_id`: both encoders give the same ids.
            "encoders": facts.encoders,
            **name,
            **({"limits": limits} if limits else {}),
        },
    }


def _tokenizer_bytes(tokenizer: str, fingerprint: str) -> bytes:
    """Return the tokenizer files that the store keeps, as one archive.

    Raises:
        TokenizerError: the tokenizer has changed since the version was made.
    """
    check_unchanged(tokenizer, fingerprint)
    return fingerprinted_bytes(tokenizer)


def configuration_of(recipe: Recipe) -> dict[str, object]:
    """Return the recipe without machine-specific settings: paths, store, ref, encoder."""
    decides = {*FILE_SETTINGS, *(["exports"] if recipe.publish.exports else [])}
    mix = mix_of(recipe)
    audit = {name: getattr(recipe.audit, name) for name in ("on_match", "benchmark_ngram")}
    drops = recipe.audit.benchmarks and recipe.audit.on_match != "stop"
    settings: dict[str, object] = recipe.model_dump(
        mode="json",
        by_alias=True,
        exclude={
            "shard_mb": True,
            "sources": True,  # lineage lists them by file, independent of order and grouping
            "tokenizer": True,
            "tokenize": {"encoder"},
            "publish": set(PublishConfig.model_fields) - decides,
            "audit": True,
            "golden": True,
            "validate_": {"max_quarantined"},
        },
    )
    return settings | ({"mix": mix} if mix else {}) | ({"audit": audit} if drops else {})


PUBLISH = Step(
    name="publish",
    title="Publish the packs as an immutable version.",
    version=_VERSION,
    libraries=tuple(ALL_LIBRARIES),
    facts=PublishFacts,
    compute=compute,
    after_each_run=commit,
)
