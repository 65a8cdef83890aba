"""The plan of a run: every step of every shard with its key, known before any work is done.

A key is the sha256 of what decides the step's bytes: the keys of its inputs, its section of the
recipe, the tokenizer's fingerprint, the engine version and the library versions. Hence:

- changing `seq_len` changes the keys of pack and what follows, and of nothing before;
- appending rows to a file changes the keys of its last shards only, up to tokenize;
- the key of publish is the id of the version, known before the first byte is written.

How many packs there are is known once pack has planned them; the jobs that follow from it, one for
each shard of output, are laid out by `packhouse.output_jobs`, with keys made from that of pack.

What does not decide bytes stays out: paths, the store, refs, the encoder, the number of workers.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from packhouse import (
    audit,
    dedup,
    exports,
    messages,
    packing,
    sources,
    splitting,
    templates,
    tokenization,
)
from packhouse.errors import ConfigError
from packhouse.escaping import for_terminal
from packhouse.fingerprint import digest, library_versions
from packhouse.recipe import MIXING, Recipe, SourceConfig
from packhouse.sources import SourceShard, scan_source
from packhouse.sources.files import source_name
from packhouse.templates.sandbox import pinned_date
from packhouse.tokenization import fingerprint_tokenizer

__all__ = [
    "ALL_LIBRARIES",
    "ENGINE_VERSIONS",
    "FILE_SETTINGS",
    "SHARD_BYTES",
    "STEPS",
    "Job",
    "Plan",
    "make_job",
    "plan_jobs",
]

FILE_SETTINGS = ("file_format", "layout", "max_file_mb", "position_ids")
"""What of the publish section decides bytes; the rest says where they go."""

SHARD_BYTES = 32 * 2**20
"""Raw bytes of a shard: what bounds a step's memory, and what an appended row costs. A recipe may
say `shard_mb`."""

STEPS = (
    "validate",
    "format",
    "tokenize",
    "pack",
    "gather",
    "split",
    "audit",
    "files",
    "publish",
)
"""In the order of the data's way: by shard up to tokenize; gather and files by output shard."""

# A room raises its VERSION, or a step its number here, whenever it writes other bytes for the same
# input; the CHANGELOG says so under Data. Every key made with it, and every version id, changes.
ENGINE_VERSIONS = {
    "validate": f"1.{sources.VERSION}.{messages.VERSION}",
    "format": f"1.{templates.VERSION}",
    "tokenize": f"1.{tokenization.VERSION}",
    "pack": f"2.{packing.VERSION}.{splitting.VERSION}.{dedup.VERSION}",
    "gather": f"1.{packing.VERSION}",
    "split": "1",
    "audit": f"1.{audit.VERSION}",
    "files": f"1.{exports.VERSION}",
    "publish": "2",
}

# Libraries whose version may change a step's bytes. The tokenizer's fingerprint holds its own.
_LIBRARIES = {
    "validate": ("numpy", "orjson", "pyarrow"),
    "format": ("jinja2", "pyarrow"),
    "tokenize": ("numpy", "pyarrow"),
    "pack": ("numpy", "pyarrow"),
    "gather": ("numpy", "pyarrow"),
    "split": ("pyarrow",),
    "audit": ("numpy", "pyarrow"),
    "files": ("orjson", "pyarrow"),
}
ALL_LIBRARIES = sorted(
    {name for names in _LIBRARIES.values() for name in names} | {"tokenizers", "transformers"}
)
"""Every library whose version is part of a version's id; the manifest lists them."""
_LIBRARIES["publish"] = tuple(ALL_LIBRARIES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One step of one shard (or of the whole dataset): what a worker is told to do."""

    step: str
    key: str
    parts: Mapping[str, Any]
    """The components of the key, for `packhouse explain`."""
    inputs: tuple[tuple[str, str], ...]
    """(step, key) of the jobs whose output it reads."""
    label: str
    """For people: which shard."""
    size: int = 0
    """Bytes that it works on, about: by what jobs are put together into tasks."""
    shard: SourceShard | None = None
    source: SourceConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All jobs that are known before any work; the rest come from `packhouse.output_jobs`."""

    validate: tuple[Job, ...]
    format: tuple[Job, ...]
    tokenize: tuple[Job, ...]
    pack: Job
    split: Job
    audit: tuple[Job, ...]
    """Of shards and of records; what it says of packs comes with the output's jobs."""
    publish: Job
    """Its key is final; what it reads beside the split is added when the packs are planned."""

    @property
    def version_id(self) -> str:
        """First 16 hex digits of the key of publish: 64 bits of input address."""
        return self.publish.key[:16]

    def __iter__(self) -> Iterator[Job]:
        """Iterate over the jobs in the order of the data's way."""
        yield from (*self.validate, *self.format, *self.tokenize)
        yield from (self.pack, self.split, *self.audit, self.publish)


def plan_jobs(recipe: Recipe) -> Plan:
    """Scan the sources and lay out every job with its key.

    Costs one read of the sources (for their sha256) and of the tokenizer's files.

    Raises:
        SourceError: a source does not exist or cannot be what it says.
        TokenizerError: the tokenizer folder is not one.
    """
    tokenizer = fingerprint_tokenizer(recipe.tokenizer)
    validate = tuple(_validate_jobs(recipe))
    format_ = tuple(_format_job(recipe, tokenizer, job) for job in validate)
    tokenize = tuple(_tokenize_job(recipe, tokenizer, job) for job in format_)
    sides = recipe.split.model_dump(mode="json")
    packing_ = {
        "mix": _mix_of(recipe),
        "pack": recipe.pack.model_dump(mode="json"),
        "dedup": recipe.dedup.model_dump(mode="json"),
        **dedup.near_libraries(recipe.dedup),
        "split": sides,
    }
    pack = make_job("pack", tokenize, packing_, also_reads=(*validate, *format_))
    split = make_job("split", [pack], {"split": sides})
    benchmarks = _benchmarks(recipe)
    audits = (
        *map(_audit_job, validate, format_, tokenize),
        *(_contamination_job(job, benchmarks) for job in validate if benchmarks),
        make_job("audit", [pack], {"of": "records"}, label="records"),
    )
    files = recipe.publish.model_dump(mode="json", include=set(FILE_SETTINGS))
    if recipe.publish.exports:
        files["exports"] = recipe.publish.exports
    publish = make_job(
        "publish",
        [split],
        {"publish": files, "dataset": recipe.dataset, "engines": ENGINE_VERSIONS, **benchmarks},
    )
    return Plan(
        validate=validate,
        format=format_,
        tokenize=tokenize,
        pack=pack,
        split=split,
        audit=audits,
        publish=publish,
    )


def _mix_of(recipe: Recipe) -> dict[str, Any]:
    """How often records are taken, of the sources that do not take each one once."""
    usual = {name: SourceConfig.model_fields[name].default for name in MIXING}
    mix = {source_name(s): s.model_dump(mode="json", include=set(MIXING)) for s in recipe.sources}
    return {name: settings for name, settings in mix.items() if settings != usual}


def _benchmarks(recipe: Recipe) -> dict[str, Any]:
    """What is found of benchmarks is published, so they decide the version; limits do not."""
    if not recipe.audit.benchmarks:
        return {}
    shards = [shard.identity() for s in recipe.audit.benchmarks for shard in scan_source(s)]
    return {"benchmarks": {"ngram": recipe.audit.benchmark_ngram, "shards": shards}}


def make_job(
    step: str,
    inputs: Sequence[Job],
    parameters: Mapping[str, Any],
    *,
    label: str = "all shards",
    also_reads: Sequence[Job] = (),
    size: int = 0,
    shard: SourceShard | None = None,
    source: SourceConfig | None = None,
) -> Job:
    """Return a job with its key.

    Args:
        step: one of `STEPS`.
        inputs: jobs whose output it reads, and whose keys decide its own.
        parameters: what else decides its bytes, as plain JSON.
        label: for people.
        also_reads: jobs whose output it reads, and which the inputs' keys decide.
        size: bytes that it works on, about.
        shard: what validate reads, and what the bad rows of format and tokenize are read from.
        source: settings of the shard's source.
    """
    parts = {
        "step": step,
        "engine": ENGINE_VERSIONS[step],
        "inputs": [job.key for job in inputs],  # which decide the keys of all before them
        "libraries": library_versions(_LIBRARIES[step]),
        **parameters,
    }
    return Job(
        step=step,
        key=digest(parts),
        parts=parts,
        inputs=tuple((job.step, job.key) for job in chain(inputs, also_reads)),
        label=label,
        size=size,
        shard=shard,
        source=source,
    )


def _validate_jobs(recipe: Recipe) -> Iterator[Job]:
    size = SHARD_BYTES if recipe.shard_mb is None else recipe.shard_mb * 2**20
    scanned = [(source, scan_source(source, size)) for source in recipe.sources]
    _refuse_same_names(scanned)
    pairs = [(shard, source) for source, shards in scanned for shard in shards]
    pairs.sort(key=lambda pair: (pair[0].file, pair[0].byte_start))  # not the recipe's order
    rules = recipe.validate_.model_dump(mode="json", exclude={"max_quarantined"})
    for shard, source in pairs:
        parameters = {
            "shard": shard.identity(),
            "source": source.model_dump(mode="json", exclude={"path", *MIXING}),
            "validate": rules,
            "group_by": recipe.split.group_by,
            "python": list(sys.version_info[:2]),  # its Unicode tables normalise group keys
        }
        label = for_terminal(f"{shard.file} from byte {shard.byte_start:,}")
        size = shard.byte_end - shard.byte_start
        yield make_job(
            "validate", [], parameters, shard=shard, source=source, label=label, size=size
        )


def _refuse_same_names(scanned: list[tuple[SourceConfig, list[SourceShard]]]) -> None:
    """Lineage says `source/file`; two files of one name would make it ambiguous."""
    owner: dict[str, tuple[int, str]] = {}
    for number, (_, shards) in enumerate(scanned):
        for file, uri in sorted({(shard.file, shard.uri) for shard in shards}):
            first = owner.setdefault(file, (number, uri))
            if first == (number, uri):
                continue
            if first[1] == uri:
                raise ConfigError(f"'{uri}' is in two sources: its rows would count twice", uri=uri)
            raise ConfigError(
                f"'{uri}' and '{first[1]}' are both called '{file}' in lineage; "
                "give each source a `name` of its own",
                file=file,
            )


def _format_job(recipe: Recipe, tokenizer: str, validated: Job) -> Job:
    assert validated.source is not None
    parameters = {
        "format": recipe.format.model_dump(mode="json", exclude={"template"}),
        "template": _template_identity(recipe.format.template),
        "date": _date_of(recipe),
        "label_names": validated.source.label_names,
        "tokenizer": tokenizer,  # its chat template and control tokens
        **_windows(recipe),
    }
    return _next_job("format", validated, parameters)


def _windows(recipe: Recipe) -> dict[str, Any]:
    """What decides how over-long conversations are split, where they are: their tokens."""
    if recipe.pack.over_length != "window" or recipe.pack.strategy == "concat":
        return {}
    tokenize = recipe.tokenize.model_dump(mode="json", exclude={"encoder"})
    engine = ENGINE_VERSIONS["tokenize"]
    return {"window": {"seq_len": recipe.pack.seq_len, "tokenize": tokenize, "engine": engine}}


def _tokenize_job(recipe: Recipe, tokenizer: str, formatted: Job) -> Job:
    parameters = {
        "tokenize": recipe.tokenize.model_dump(mode="json", exclude={"encoder"}),
        "tokenizer": tokenizer,
    }
    return _next_job("tokenize", formatted, parameters)


def _next_job(step: str, before: Job, parameters: Mapping[str, Any]) -> Job:
    return make_job(
        step,
        [before],
        parameters,
        shard=before.shard,
        source=before.source,
        label=before.label,
        size=before.size,
    )


def _audit_job(validated: Job, formatted: Job, tokenized: Job) -> Job:
    return make_job(
        "audit",
        [tokenized],
        {"of": "shard"},
        label=tokenized.label,
        also_reads=(validated, formatted),
        size=validated.size,
        source=validated.source,
    )


def _contamination_job(validated: Job, benchmarks: Mapping[str, Any]) -> Job:
    label = f"benchmarks in {validated.label}"
    parts = {"of": "benchmarks", **benchmarks}
    return make_job("audit", [validated], parts, label=label, size=validated.size)


def _date_of(recipe: Recipe) -> str | None:
    """The day that a template may print, if it can: text of another day is another text."""
    template = recipe.format.template
    folder = Path(recipe.tokenizer)
    is_file = template.endswith((".jinja", ".j2"))
    names = [Path(template)] if is_file else [folder / "chat_template.jinja"]
    if template == "chat":
        names.append(folder / "tokenizer_config.json")
    if any(name.is_file() and b"strftime_now" in name.read_bytes() for name in names):
        return pinned_date().date().isoformat()
    return None


def _template_identity(template: str) -> str:
    if not template.endswith((".jinja", ".j2")):
        return template
    path = Path(template)
    if not path.is_file():
        raise ConfigError(f"format.template: no file at '{template}'")
    return hashlib.sha256(path.read_bytes()).hexdigest()
