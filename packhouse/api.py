"""Prepare raw data as a published version, in one call in this process.

    version = packhouse.prepare("data.json", tokenizer="Qwen/Qwen2.5-0.5B-Instruct", seq_len=4096,
                                split={"eval_fraction": 0.02})
    trainer = SFTTrainer(..., train_dataset=version.train, eval_dataset=version.eval)

It runs the same steps as the flow, with the same keys, cache and bytes, so the work can continue
later as a recipe, on a schedule or a cluster.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from packhouse.errors import ConfigError
from packhouse.load.mapped_rows import load_packed, load_preferences
from packhouse.records.ledger import sum_by_reason
from packhouse.registry import function_of_addon, has_function
from packhouse.run.chain import prepare_recipe
from packhouse.run.prepare_arguments import recipe_for
from packhouse.run.step_cache import Workspace
from packhouse.store import OpenVersion, open_version as open_stored
from packhouse.store.version_reader import open_address
from packhouse.system.disks import check_cache, default_cache, find_cache
from packhouse.system.progress import show_progress, start_phase
from packhouse.system.wording import by_name, counted, text_table

log = logging.getLogger("packhouse.run.step_cache")


class _Table(ABC):
    """Prints as a table, and converts to a pandas frame."""

    @abstractmethod
    def _columns(self) -> dict[str, list[Any]]:
        """Return the cells of each column; the first one names the rows."""

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`, its rows named by the first column."""
        columns = self._columns()
        return pa.table(columns).to_pandas().set_index(next(iter(columns)))

    @override
    def __repr__(self) -> str:
        columns = self._columns()
        return text_table([columns.keys(), *zip(*columns.values(), strict=True)])


class Ledger(_Table, list[dict[str, Any]]):
    """A dict for each step: rows in, out, quarantined and dropped by reason, and tokens.

    Example:
        >>> from packhouse.records.ledger import LedgerLine
        >>> line = LedgerLine(step="validate", rows_in=9, rows_out=8, quarantined={"json": 1})
        >>> Ledger([line.to_json()])
        step      rows_in  added  quarantined  dropped  rows_out  tokens_in  tokens_out
        validate        9      0            1        0         8          -           -
    """

    @override
    def _columns(self) -> dict[str, list[Any]]:
        names = ("step", "rows_in", "added", "quarantined", "dropped", "rows_out")
        return {
            name: [sum(v.values()) if isinstance(v := line[name], dict) else v for line in self]
            for name in (*names, "tokens_in", "tokens_out")
        }


class Audit(_Table, dict[str, Any]):
    """Counts of what the tokens train, measured before publication, overall and per source.

    Example:
        >>> Audit(dataset={"rows": 3, "turns": 4}, packs={"packs": 1}, sources={"a": {"rows": 3}})
        count  dataset  a
        rows         3  3
        turns        4  -
        packs        1  -
    """

    @override
    def _columns(self) -> dict[str, list[Any]]:
        whole = {**self.get("dataset", {}), **self.get("packs", {})}
        counts = {"dataset": whole, **self.get("sources", {})}
        columns = {name: [own.get(count) for count in whole] for name, own in counts.items()}
        return {"count": [*whole], **columns}


class Version:
    """A published version: datasets for a trainer, and a record of what happened to every row.

    Attributes:
        id: `<version id>.g<N>`, the same for the same data and settings.
        uri: `<store>/<dataset>@<id>#<digest>`, which every packhouse command accepts.
        is_new: True if `prepare` published it, False if it was already published, None if it was
            opened with `open_version`.
        held_back: why the ref did not move; empty if it moved.

    Example:
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False,
        ...     cache=getfixture("tmp_path") / "cache")
        >>> version.statistics["train"]["num_packs"], version.dropped, version.quarantined.num_rows
        (4, {}, 0)
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
        self.uri = opened.address

    @cached_property
    def train(self) -> Any:
        """The training split as a memory-mapped `datasets.Dataset`; see `load_packed`.

        For preferences, the rows that TRL's trainers expect; see `load_preferences`.
        """
        return self._load("train")

    @cached_property
    def eval(self) -> Any | None:
        """The evaluation split as a `datasets.Dataset`; None if the version has none."""
        return self._load("eval") if any(f.rows for f in self._opened.files(split="eval")) else None

    @property
    def _tokenizers(self) -> Path:
        return Workspace(cache=self._cache or default_cache()).tokenizers

    def _load(self, split: str) -> Any:
        load = load_preferences if self._opened.manifest.preferences else load_packed
        return load(self.uri, split=split, cache=self._cache)

    @property
    def ledger(self) -> Ledger:
        """Rows in and out of each step: a list of dicts that prints as a table."""
        return Ledger(line.to_json() for line in self._opened.manifest.facts.counts.ledger)

    @property
    def dropped(self) -> dict[str, int]:
        """Number of rows that the recipe's policies dropped, by reason."""
        return dict(sum_by_reason(self._opened.manifest.facts.counts.ledger, "dropped"))

    @cached_property
    def quarantined(self) -> pa.Table:
        """The bad rows: source, row, step, reason, detail and the first 64 KiB of their bytes."""
        return function_of_addon("read_quarantined")(self._opened)

    @property
    def audit(self) -> Audit:
        """Counts of what the tokens train, a dict that prints as a table."""
        return Audit(self._opened.manifest.audit)

    @property
    def sources(self) -> list[dict[str, Any]]:
        """One dict per input shard: its file, rows and sha256."""
        return [dict(source) for source in self._opened.manifest.sources]

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Packs, tokens, trained tokens and lengths of each split."""
        statistics = self._opened.manifest.facts.counts.statistics
        return {split: each.to_dict() for split, each in statistics.items()}

    def sql(self, query: str) -> pa.Table:
        """Run one SELECT over the views of this version, in DuckDB.

        Views are records, packs, quarantine, dropped, ledger, audit and versions; `packhouse sql
        --help` lists their columns.

        Raises:
            ConfigError: the query failed; the message lists the views or columns.

        Example:
            >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
            >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
            ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False)
            >>> version.sql("select outcome, count(*) as n from records group by 1").to_pylist()
            [{'outcome': 'kept', 'n': 99}]
        """
        return function_of_addon("ask")(self._opened, query, self._tokenizers)

    def report(self, path: str | Path | None = None) -> str:
        """Return the report as one HTML page with charts and samples; also write it to `path`.

        Example:
            >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
            >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
            ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False,
            ...     cache=getfixture("tmp_path") / "cache")
            >>> version.report(getfixture("tmp_path") / "report.html")[:15]
            '<!doctype html>'
        """
        html: str = function_of_addon("version_report")(self._opened, self._tokenizers)
        if path is not None:
            Path(path).write_text(html, encoding="utf-8")
        return html

    def show(self, height: int = 900) -> Any:
        """Return the report for a notebook, in a frame that is `height` pixels high."""
        return function_of_addon("FramedPage")(self.report(), height)

    def _repr_html_(self) -> str | None:
        if not has_function("version_cell"):
            return None  # the notebook shows `__repr__`
        return str(function_of_addon("version_cell")(self._opened, self._tokenizers))

    def __repr__(self) -> str:
        lines = [f"Version {self.uri}"]
        counts = self._opened.manifest.facts.counts
        lines += [
            f"  {split}: {counted(each.num_packs, 'pack')}, "
            f"{counted(each.num_tokens, 'token')}, {each.num_trained:,} of them trained"
            for split, each in counts.splits().items()
        ]
        for what in ("quarantined", "dropped"):
            if reasons := sum_by_reason(counts.ledger, what):
                lines.append(f"  {what}: {counted(reasons.total(), 'row')} ({by_name(reasons)})")
        return "\n".join([*lines, *(f"  ref held back: {reason}" for reason in self.held_back)])


def open_version(uri: str | Path, ref: str = "latest") -> Version:
    """Open a published version.

    Args:
        uri: `<store>/<dataset>`, a folder or an address; may end in `@<ref>` or
            `@<version>#<digest>`.
        ref: a ref, a version or a version ID, used if `uri` names none.

    Raises:
        VersionNotFoundError: there is no such version.
        IntegrityError: its manifest is damaged.

    Example:
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> store = getfixture("tmp_path")
        >>> made = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     format={"template": "alpaca"}, store=store, progress=False, cache=store / "cache")
        >>> open_version(store / "numbers").id == made.id
        True
    """
    return Version(open_address(str(uri), ref))


def prepare(
    data: object,
    *,
    tokenizer: object = None,
    seq_len: int | None = None,
    store: str | Path | None = None,
    dataset: str | None = None,
    cache: str | Path | None = None,
    workers: int = 1,
    progress: bool = True,
    **settings: object,
) -> Version:
    """Turn raw instruction data into a published version of packed token data.

    Steps that have already run with the same rows and settings are read from the cache. Nothing
    becomes visible in the store unless every step and check succeeds.

    Args:
        data: a recipe file (`.yaml`) or a `Recipe`; or rows: a file, folder, glob, `s3://` or
            `hf://` address, a Hub dataset (`org/name`, if there is no folder `org`), a
            `datasets.Dataset`, a pandas or polars frame, an Arrow table, a list of dicts or of
            conversations (lists of messages); or a list of several of these.
        tokenizer: a folder, a Hub name (`org/name[@revision]`) or a tokenizer object.
        seq_len: pack size in tokens; by default 2,048.
        store: store to publish to, a folder or `s3://bucket/prefix`; by default `./store`.
        dataset: name of the dataset in the store; by default the name of the first file.
        cache: folder of finished steps; by default PACKHOUSE_CACHE, or else one shared by all
            projects, such as `~/.cache/packhouse`; or `.packhouse`, if it contains finished steps.
        workers: number of worker processes on this machine; does not affect the output.
        progress: show bars and a line for each step on stderr.
        settings: sections and keys of a recipe: `format={"template": "alpaca"}`,
            `split={"eval_fraction": 0.02}`. They override those of a recipe file, and paths in
            them are relative to its folder. A key may be set only once, here or by another
            argument.

    Returns:
        The version, newly published or already in the store. `latest` points to it, unless a gate
        held it back or `settings` override a recipe file. In the second case, `latest` moves
        with `publish={"move_ref": True}`.

    Raises:
        PackhouseError: nothing was published; see `packhouse.errors`. The message gives the file,
            row, limit and fix.

    Example:
        >>> rows = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]
        >>> version = prepare(rows, tokenizer="deployments/demo/tokenizer", dataset="numbers",
        ...     format={"template": "alpaca"}, store=getfixture("tmp_path"), progress=False,
        ...     cache=getfixture("tmp_path") / "cache")
        >>> version.train.num_rows, version.eval, version.ledger[0]["rows_in"]
        (4, None, 99)
    """
    # By type, because True is an int.
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers must be a whole number of at least 1, got {workers!r:.40}")
    place = find_cache(None if cache is None else str(cache))
    with show_progress() if progress else nullcontext():
        start_phase("reading input")
        recipe = recipe_for(
            data,
            tokenizer=tokenizer,
            seq_len=seq_len,
            store=store,
            dataset=dataset,
            cache=check_cache(place.folder),
            settings=settings,
        )
        prepared, notes = prepare_recipe(recipe, place, workers)
        for note in notes:
            log.warning("%s", note)
    published = prepared.published
    left = (
        f"it stays at {published.ref_version}, because arguments of this call override the recipe, "
        "or it sets publish.move_ref: false. To move it, pass publish={'move_ref': True}"
    )
    return Version(
        open_stored(recipe.publish.store, recipe.dataset, prepared.version),
        cache=place.folder,
        is_new=prepared.created,
        held_back=published.held_back or ((left,) if published.is_ref_left else ()),
    )
