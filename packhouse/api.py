"""The front door: raw data in, a published version out, in one call of this process.

    version = packhouse.prepare("data.json", tokenizer="Qwen/Qwen2.5-0.5B-Instruct", seq_len=4096)
    trainer = SFTTrainer(..., train_dataset=version.train, eval_dataset=version.eval)

The same steps as the flow runs, with the same keys in the same cache and the same bytes: what
starts here goes on as a recipe, with schedules and clusters.
"""

import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from packhouse.cache.mirror import open_mirror
from packhouse.cache.places import CachePlace, check_cache, default_cache, find_cache
from packhouse.chain import Prepared
from packhouse.chain import prepare as prepare_chain
from packhouse.contracts import check as check_table
from packhouse.engine.local_pool import local_runner
from packhouse.engine.workspace import Check, Workspace
from packhouse.errors import ConfigError, EmptyDatasetError, QuarantineLimitError
from packhouse.estimate import Estimate, estimate
from packhouse.given import (
    data_uri,
    is_rows,
    is_settings,
    pinned,
    read_recipe,
    tokenizer_name,
)
from packhouse.loaders import load_packed, load_preferences
from packhouse.quarantine import read_quarantined
from packhouse.recipe import Recipe, SourceConfig, parse_recipe
from packhouse.recipe.reading import (
    apply_override,
    changes_data,
    is_recipe_path,
    merge_settings,
)
from packhouse.runtime.progress import show_progress, start_phase
from packhouse.steps.plan import plan_jobs
from packhouse.store import OpenVersion
from packhouse.store import open_version as open_stored
from packhouse.store.address import parse_address
from packhouse.views import ask

__all__ = [
    "Version",
    "name_of",
    "open_version",
    "plan",
    "prepare",
    "prepare_recipe",
    "recipe_for",
]

log = logging.getLogger("packhouse.cache")


class Version:
    """A published version: what a trainer loads, and the account of every row.

    Attributes:
        id: `<version id>.g<N>`, the same for the same data and settings.
        uri: `<store>/<dataset>@<id>`, as every command of packhouse takes it.
        is_new: False where `prepare` found it published already; None where it was opened.
        held_back: why the ref stayed where it was; empty where it moved.
    """

    def __init__(
        self,
        opened: OpenVersion,
        *,
        cache: Path | None = None,
        is_new: bool | None = None,
        held_back: tuple[str, ...] = (),
    ) -> None:
        self._opened = opened
        self._cache = cache and cache.absolute()  # `train` may be read from another folder
        self.is_new, self.held_back = is_new, held_back
        self.id: str = opened.version
        self.dataset: str = opened.dataset
        self.uri = f"{opened.store.uri}/{opened.dataset}@{opened.version}"

    @cached_property
    def train(self) -> Any:
        """The `datasets.Dataset` of the training split, memory-mapped; see `load_packed`.

        Of pairs and verdicts, the rows that TRL takes; see `load_preferences`.
        """
        return self._load("train")

    @cached_property
    def eval(self) -> Any | None:
        """The `datasets.Dataset` of the evaluation split; None where the version has none."""
        return self._load("eval") if any(f.rows for f in self._opened.files(split="eval")) else None

    def _load(self, split: str) -> Any:
        load = load_preferences if self._opened.manifest.preferences else load_packed
        return load(self.uri, split=split, cache=self._cache)

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """A dict for each step: rows in, out, quarantined and dropped by reason, and tokens."""
        return [dict(line) for line in self._opened.manifest.counts["ledger"]]

    @property
    def dropped(self) -> dict[str, int]:
        """Rows that a policy of the recipe left out, by reason."""
        return self._sum_of("dropped")

    def _sum_of(self, name: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for line in self.ledger:
            for reason, rows in line.get(name, {}).items():
                sums[reason] = sums.get(reason, 0) + rows
        return sums

    @cached_property
    def quarantined(self) -> pa.Table:
        """The bad rows: source, row, step, reason, detail and the first 64 KiB of their bytes."""
        return read_quarantined(self._opened)

    @property
    def audit(self) -> Mapping[str, Any]:
        """What the tokens teach, measured before publication; `dataset` and each of `sources`."""
        return self._opened.manifest.audit

    @property
    def sources(self) -> list[dict[str, Any]]:
        """A dict for each shard of input: its file, rows and sha256."""
        return [dict(source) for source in self._opened.manifest.lineage["sources"]]

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Packs, tokens, trained tokens and lengths of each split."""
        statistics: Mapping[str, Any] = self._opened.manifest.counts["statistics"]
        return statistics

    def sql(self, query: str) -> pa.Table:
        """Answer one SELECT over the views of this version; needs the extra `sql` (DuckDB).

        Views are records, packs, quarantine, dropped, ledger, audit and versions; `packhouse sql
        --help` names their columns.

        Raises:
            ConfigError: the query does not run; the message says which views or columns there are.

        Example:
            >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
            >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
            ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False)
            >>> version.sql("select outcome, count(*) as n from records group by 1").to_pylist()
            [{'outcome': 'kept', 'n': 99}]
        """
        cache = self._cache or find_cache(None).folder
        return ask(self._opened, query, Workspace(cache=cache).tokenizers)

    def report(self, path: str | Path | None = None) -> str:
        """Return the report as HTML, one page with charts and samples; write it to `path`, too.

        Example:
            >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
            >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
            ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False,
            ...     cache=getfixture("tmp_path") / "cache")
            >>> version.report(getfixture("tmp_path") / "report.html")[:15]
            '<!doctype html>'
        """
        from packhouse.report.version_report import version_report

        workspace = Workspace(cache=self._cache or default_cache())
        html = version_report(self._opened, workspace.tokenizers)
        if path is not None:
            Path(path).write_text(html, encoding="utf-8")
        return html

    def show(self, height: int = 900) -> Any:
        """Return the report for a notebook, which shows it in a frame of `height` pixels."""
        from packhouse.report.notebook import FramedPage

        return FramedPage(self.report(), height)

    def _repr_html_(self) -> str:
        from packhouse.report.notebook import version_cell

        workspace = Workspace(cache=self._cache or default_cache())
        return version_cell(self._opened, workspace.tokenizers)

    def __repr__(self) -> str:
        lines = [f"Version {self.uri}"]
        for split, counts in sorted(self.statistics.items(), reverse=True):
            if counts["num_packs"]:
                lines.append(
                    f"  {split}: {counts['num_packs']:,} packs, {counts['num_tokens']:,} tokens, "
                    f"{counts['num_trained']:,} of them trained"
                )
        bad = self._sum_of("quarantined")
        for what, reasons in (("quarantined", bad), ("dropped", self.dropped)):
            if reasons:
                counts = ", ".join(f"{name} {rows:,}" for name, rows in sorted(reasons.items()))
                lines.append(f"  {what}: {sum(reasons.values()):,} rows ({counts})")
        return "\n".join([*lines, *(f"  ref held back: {reason}" for reason in self.held_back)])


def open_version(uri: str | Path, ref: str = "latest") -> Version:
    """Open a published version.

    Args:
        uri: `<store>/<dataset>`, a folder or an address; may end in `@<ref>` or `@<version>`.
        ref: a ref, a version or a version id, where `uri` names none.

    Raises:
        VersionNotFoundError: there is none.
        IntegrityError: its manifest is damaged.
    """
    address = parse_address(str(uri))
    name = ref if address.name == "latest" else address.name
    return Version(open_stored(address.root, address.dataset, name))


def prepare(
    data: Any,
    *,
    tokenizer: Any = None,
    seq_len: int | None = None,
    store: str | Path | None = None,
    dataset: str | None = None,
    cache: str | Path | None = None,
    workers: int = 1,
    progress: bool = True,
    **settings: Any,
) -> Version:
    """Turn raw instruction data into a published version of packed token data.

    Steps that are done already, with the same rows and settings, are found in the cache and not
    done again. Nothing becomes visible in the store unless every step and check succeeded.

    Args:
        data: a recipe file (`.yaml`) or a `Recipe`; or rows: a file, folder, glob, `s3://` or
            `hf://` address, a dataset of the Hub (`org/name`, if no folder `org` is here), a
            `datasets.Dataset`, a pandas or polars frame, an Arrow table, a list of dicts or of
            conversations (lists of messages); or a list of several of these.
        tokenizer: a folder, a name of the Hub (`org/name[@revision]`) or a tokenizer object.
        seq_len: pack size in tokens; by default 2,048.
        store: where the version goes: a folder or `s3://bucket/prefix`; by default `./store`.
        dataset: its name there; by default the name of the first file.
        cache: folder of finished steps; by default PACKHOUSE_CACHE, else one for all projects,
            such as `~/.cache/packhouse`; or `.packhouse`, if it holds finished steps.
        workers: processes of this machine that do the work; the bytes are the same.
        progress: show bars and a line for each step on stderr.
        settings: sections and keys of a recipe: `format={"template": "alpaca"}`,
            `split={"eval_fraction": 0.02}`. They go over those of a recipe, and paths in them
            start at its folder; what has an argument of its own is given once.

    Returns:
        The version, published or found. `latest` points to it, unless a gate held it back, or
        settings changed what a recipe makes: others may read `latest`, so it stays where it is;
        `publish={"move_ref": True}` moves it.

    Raises:
        PackhouseError: nothing was published; see `packhouse.errors`. Each names file, row, limit
            and remedy.

    Example:
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False,
        ...     cache=getfixture("tmp_path") / "cache")
        >>> version.train.num_rows, version.eval, version.ledger[0]["rows_in"]
        (4, None, 99)
    """
    place = find_cache(None if cache is None else str(cache))
    with show_progress() if progress else nullcontext():
        start_phase("looking at what was given")
        recipe = recipe_for(
            data,
            tokenizer=tokenizer,
            seq_len=seq_len,
            store=store,
            dataset=dataset,
            cache=check_cache(place.folder),
            settings=settings,
        )
        done, notes = prepare_recipe(recipe, place, workers)
        for note in notes:
            log.warning("%s", note)
    published = done.published
    left = f"it stays at {published.ref_version}, for the recipe was changed for this call, or says"
    left += " publish.move_ref: false; publish={'move_ref': True} moves it"
    return Version(
        open_stored(recipe.publish.store, recipe.dataset, done.version),
        cache=place.folder,
        is_new=done.created,
        held_back=published.held_back or ((left,) if published.is_ref_left else ()),
    )


def plan(
    data: Any,
    *,
    tokenizer: Any = None,
    seq_len: int | None = None,
    cache: str | Path | None = None,
    **settings: Any,
) -> Estimate:
    """Estimate what `prepare` would give, before any work; arguments are those of `prepare`.

    Reads, renders and tokenizes a megabyte of each source; what is tokenized already is counted.

    Returns:
        Rows, tokens, packs and bytes, and rows and tokens of each source.

    Raises:
        PackhouseError: a setting, source or tokenizer that `prepare` would refuse as well.

    Example:
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> plan(rows, tokenizer="deployments/demo/tokenizer", format={"template": "alpaca"},
        ...     cache=getfixture("tmp_path")).packs
        4
    """
    folder = check_cache(find_cache(None if cache is None else str(cache)).folder)
    recipe = recipe_for(data, tokenizer=tokenizer, seq_len=seq_len, cache=folder, settings=settings)
    return estimate(recipe, plan_jobs(recipe), Workspace(cache=folder))


def prepare_recipe(
    recipe: Recipe,
    place: CachePlace,
    workers: int = 1,
    check: Check = check_table,
    *,
    file: str | None = None,
) -> tuple[Prepared, list[str]]:
    """Run the chain in this process, or in processes of this machine.

    Args:
        recipe: what to do.
        place: where finished steps lie.
        workers: number of processes.
        check: contract of every table; the flows give those of `schemas`.
        file: the recipe's, where it has one: what `packhouse quarantine show` is to look at.

    Returns:
        What the run did, and notes on a mirror that could not be used.

    Raises:
        PackhouseError: nothing was published.
    """
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers must be a whole number of at least 1, got {workers!r:.40}")
    mirror, workspace = open_mirror(place), Workspace(cache=place.folder, check=check)
    with local_runner(recipe, workspace, workers) as run:
        try:
            done = prepare_chain(recipe, run, place.folder, mirror=mirror)
        except (EmptyDatasetError, QuarantineLimitError) as error:
            target = file or next(iter(error.facts.get("places", [])), "RECIPE")
            said = str(error).replace("show RECIPE`", f"show {shlex.quote(target)}`")
            raise type(error)(said, **error.facts) from None
    return done, list(mirror.notes) if mirror else []


def recipe_for(
    data: Any,
    *,
    tokenizer: Any = None,
    seq_len: int | None = None,
    store: str | Path | None = None,
    dataset: str | None = None,
    cache: Path,
    settings: Mapping[str, Any],
    overrides: Sequence[str] = (),
) -> Recipe:
    """Return the recipe of what was given to `prepare`; rows in memory are written to the cache.

    Arguments are those of `prepare`; `overrides` (`section.key=value`) go over `settings`. Where
    they change what a given recipe makes, `publish.move_ref` is false unless they say it, too.

    Raises:
        ConfigError: a setting that no recipe has, or no tokenizer.
        TokenizerError: there is no such tokenizer.
    """
    for key, section, given_too in (("seq_len", "pack", seq_len), ("store", "publish", store)):
        if given_too is not None and key in _keys_of(settings.get(section)):
            raise ConfigError(f"{key} is given twice, as {key}= and in {section}=; give it once")
    over: dict[str, Any] = {
        "dataset": dataset,
        "tokenizer": None if tokenizer is None else tokenizer_name(tokenizer, cache),
        "pack": {} if seq_len is None else {"seq_len": seq_len},
        "publish": {} if store is None else {"store": str(store)},
    }
    if os.path.isdir(over["tokenizer"] or ""):  # noqa: PTH112 - a Path raises on long names
        over["tokenizer"] = str(Path(over["tokenizer"]).absolute())  # not of the recipe's folder
    is_recipe = isinstance(data, Recipe) or is_recipe_path(data)
    put = [*merge_settings({}, over), *merge_settings({}, settings), *overrides]
    if is_recipe and changes_data(put):
        over["publish"]["move_ref"] = False
    merge_settings(over, settings)
    if is_recipe_path(data):
        return read_recipe(data, overrides, over)
    raw = _raw_recipe(data, cache, settings)
    merge_settings(raw, over)
    for override in overrides:
        apply_override(raw, override)
    if not raw.get("tokenizer"):
        raise ConfigError("no tokenizer; give a name of the Hub (`org/name`) or a folder")
    return pinned(parse_recipe(raw, where="prepare"))


def _raw_recipe(data: Any, cache: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's mapping of what was given, before settings go over it."""
    if isinstance(data, Recipe):
        return data.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if "sources" in settings:
        raise ConfigError("data and sources= both name rows; give all of them as data: a list")
    several = isinstance(data, list | tuple) and not is_rows(data)
    given = list(data) if several else [data]
    if not given:
        raise ConfigError("data is an empty list; give rows, or at least one file")
    sources = [_source(each, cache) for each in given]
    in_memory = [s for s in sources if Path(s["path"]).is_relative_to(cache / "given")]
    if len(in_memory) > 1:  # their files in the cache are all called `rows`
        for number, source in enumerate(in_memory, 1):
            source.setdefault("name", f"rows-{number}")
    return {"dataset": name_of(given[0]), "sources": sources}


def _keys_of(section: Any) -> Mapping[str, Any]:
    """What a section sets, given as a mapping or as one of the recipe's models."""
    if isinstance(section, BaseModel):
        return section.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return section if isinstance(section, Mapping) else {}


def _source(data: Any, cache: Path) -> dict[str, Any]:
    if isinstance(data, SourceConfig):
        return data.model_dump(mode="json", exclude_unset=True)
    if is_settings(data):
        return {**data, "path": data_uri(data["path"], cache)}
    return {"path": data_uri(data, cache)}


def name_of(data: Any) -> str:
    """A dataset's name from its first file: `My Data.v2.jsonl.gz` -> `my-data`."""
    if isinstance(data, SourceConfig | dict):
        data = data.path if isinstance(data, SourceConfig) else data.get("path")
    if not isinstance(data, str | Path):
        return "dataset"
    stem = re.split(r"[\\/]", str(data).rstrip("/"))[-1].partition(".")[0].lower()
    return re.sub(r"[^a-z0-9_]+", "-", stem).strip("-_")[:64] or "dataset"
