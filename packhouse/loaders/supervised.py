"""Prepare data in the trainer's own process: raw rows in, a torch dataset out, in one call.

The same steps as a flow runs (`packhouse.steps`), with the same keys in the same cache: ids,
labels and packs equal those of a published version of the same recipe, and what a flow did on this
machine is not done again. Ranks that start at once do the work once, behind a file lock that the
kernel frees if its holder is killed; where the cache is not shared, each host does it once.
"""

import atexit
import functools
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from packhouse.cache_holds import Hold, hold_steps
from packhouse.disks import disk_errors
from packhouse.errors import ConfigError, EmptyDatasetError, TokenizerError
from packhouse.fingerprint import digest
from packhouse.jobs import Job, Plan, plan_jobs
from packhouse.ledger import LedgerLine, check_quarantine, ledger_of
from packhouse.loaders.dataset import PackedDataset
from packhouse.loaders.rows import ArrowRows
from packhouse.loaders.versions import cache_folder
from packhouse.output_jobs import gather_jobs
from packhouse.packing.layout import IGNORE_INDEX
from packhouse.packing.shuffle import permutation
from packhouse.recipe import FormatConfig, Recipe, SourceConfig
from packhouse.step_store import Receipt
from packhouse.steps import execute
from packhouse.steps.selection import fingerprint_jobs
from packhouse.tokenization import fingerprint_tokenizer
from packhouse.workspace import Workspace, read_table

__all__ = ["TokenizedDataset", "make_supervised_dataset"]

Fields = str | Sequence[str | None] | None


def make_supervised_dataset(
    tokenizer: Any,
    data_path: Any,
    *,
    query_field: Fields = None,
    resp_field: Fields = None,
    input_field: str | None = None,
    system_field: str | None = None,
    history_field: str | None = None,
    prompt_template: str | Path | FormatConfig = "alpaca",
    pack_len: int | None = None,
    shuffle_seed: int | None = 42,
    over_length: Literal["drop", "error", "truncate_turns", "window"] = "drop",
    max_quarantined: float = 0.01,
    cache: str | Path | None = None,
) -> Any:
    """Make a dataset for supervised fine-tuning from raw instruction data.

    Args:
        tokenizer: a folder, a name that `AutoTokenizer` knows, or a tokenizer object.
        data_path: a file, folder, glob, `s3://` or `hf://` address, dataset id (`org/name`) or
            `datasets.Dataset`; or a list of such.
        query_field: the column of the question, for all sources or a list of one for each; without
            it (and `resp_field`) a row's shape is recognised.
        resp_field: the column of the answer, likewise.
        input_field: the column of the text that a question is about (Alpaca's `input`), for all
            sources; by default `input` where `query_field` is `instruction` or not given, and none
            where another column is the question.
        system_field: the column of a system prompt, for all sources. Where `query_field` is given,
            a column `system` of the file enters no prompt unless it is named here.
        history_field: the column of earlier turns, `[[question, answer], ...]`, likewise.
        prompt_template: `alpaca`, `chat`, `completion`, ...; a Jinja file; the text of a Jinja chat
            template; or a whole `FormatConfig`.
        pack_len: pack size in tokens; None gives one record a row.
        shuffle_seed: order of packs or of records; None leaves records in order (and is 0 for
            packs).
        over_length: what happens to records over `pack_len`, as in a recipe.
        max_quarantined: share of bad rows that is tolerated.
        cache: folder of finished steps; by default PACKHOUSE_CACHE, else `.packhouse`.

    Returns:
        A `PackedDataset` if `pack_len` is given, else a `TokenizedDataset`. Its `ledger` counts
        rows in, out, quarantined and dropped at every step.

    Raises:
        ConfigError: a source, field list or template that makes no sense.
        DiskError: the cache cannot be written: no room, no right.
        TokenizerError: there is no such tokenizer.
        QuarantineLimitError: more rows are bad than tolerated.
        EmptyDatasetError: nothing is left.
    """
    if pack_len is not None and pack_len < 1:
        raise ConfigError(f"pack_len is {pack_len}; it must be at least 1, or None for no packs")
    folder = cache_folder(cache)
    recipe = Recipe.model_validate(
        {
            "dataset": "supervised",
            "sources": _sources(
                data_path,
                query_field,
                resp_field,
                {"input": input_field, "system": system_field, "history": history_field},
                folder,
            ),
            "tokenizer": _tokenizer_folder(tokenizer, folder),
            "validate": {"max_quarantined": max_quarantined},
            "format": _format(prompt_template, folder),
            "pack": {
                "seq_len": 2**24 if pack_len is None else pack_len,
                "seed": shuffle_seed or 0,
                "over_length": over_length,
            },
        }
    )
    plan = plan_jobs(recipe)
    steps: list[Sequence[Job]] = [plan.validate, plan.format, plan.tokenize]
    if pack_len is not None:
        steps.append([plan.pack])
    workspace = Workspace(cache=folder)
    hold = _hold_until_exit(folder, plan, recipe)
    receipts = _done(steps, recipe, workspace)
    ledger = ledger_of(receipts)
    if pack_len is not None:
        num_dropped = sum(ledger[-1].dropped.values())
        planned = receipts[-1].facts["sides"]["train"]
        if not planned["num_packs"]:
            raise EmptyDatasetError(
                f"no record fits into pack_len {pack_len:,} ({num_dropped:,} dropped)"
            )
        gather = gather_jobs(plan, "train", planned)
        hold(job.key for job in gather)
        gathered = _done([gather], recipe, workspace)
        packs = PackedDataset(tuple(receipt.path("packs.arrow") for receipt in gathered))
        packs.seq_len, packs.ledger, packs.num_dropped = pack_len, ledger, num_dropped
        return packs
    tokenized = [r.path("tokenized.arrow") for r in receipts if r.step == "tokenize"]
    dataset = TokenizedDataset(tokenized, ledger=ledger)
    return dataset if shuffle_seed is None else dataset.shuffle(shuffle_seed)


@dataclass(frozen=True, kw_only=True)
class _Padding:
    pad_token_id: int
    length: int
    side: Literal["left", "right"]


class TokenizedDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    """Tokenized records: `input_ids`, `labels`, `attention_mask` as int64 tensors.

    Made by `make_supervised_dataset`. `concat`, `shuffle` and `pad` return another view of the
    same mapped files; nothing is copied.
    """

    def __init__(self, paths: Sequence[Path], *, ledger: Sequence[LedgerLine] = ()) -> None:
        self.ledger = list(ledger)
        self._paths = [Path(path) for path in paths]
        self._padding: _Padding | None = None
        self._map()
        self._order: npt.NDArray[np.int64] = np.arange(len(self._rows))

    def _map(self) -> None:
        tables = [read_table(path) for path in self._paths]
        columns = ("input_ids", "trained_ranges", "range_weights", "label")
        there = [name for name in columns if name in tables[0].column_names]
        table = pa.concat_tables([table.select(there) for table in tables])
        self._rows = ArrowRows(table, whole_rows=True)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[int(self._order[index])]
        item: dict[str, npt.NDArray[Any]] = {
            "input_ids": row.input_ids,
            "labels": row.labels,
            "attention_mask": np.ones_like(row.input_ids),
        }
        if row.loss_weights is not None:
            item["loss_weights"] = row.loss_weights
        if self._padding is not None:
            item = {name: self._padded(name, values) for name, values in item.items()}
        tensors = {name: torch.from_numpy(values) for name, values in item.items()}
        return tensors if row.label is None else tensors | {"label": torch.tensor(row.label)}

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each record, in order."""
        return self._rows.num_tokens()[self._order]

    def concat(self, *others: "TokenizedDataset") -> "TokenizedDataset":
        """These records and then those of the others, each in its own order.

        Raises:
            ConfigError: they are padded, and not alike.
        """
        parts = [self, *others]
        if len({part._padding for part in parts}) > 1:
            raise ConfigError("these records are padded differently; concat first, then pad")
        made = TokenizedDataset(
            [path for part in parts for path in part._paths],
            ledger=list(chain.from_iterable(part.ledger for part in parts)),
        )
        starts = np.cumsum([0, *(len(part._rows) for part in parts)])
        orders = [part._order + start for part, start in zip(parts, starts, strict=False)]
        made._order = np.concatenate(orders)
        made._padding = self._padding
        return made

    def shuffle(self, seed: int = 42) -> "TokenizedDataset":
        """The same records in an order that `seed` decides, on every platform alike."""
        made = self._copy()
        made._order = self._order[permutation(len(self), seed)]
        return made

    def pad(
        self,
        pad_token_id: int,
        length: int | Literal["longest"] = "longest",
        side: Literal["left", "right"] = "right",
    ) -> "TokenizedDataset":
        """The same records padded to one length; labels of pads are -100, by length.

        Raises:
            ConfigError: a record is longer than `length`, or no such side.
        """
        if side not in ("left", "right"):
            raise ConfigError(f"side '{side}' is not known; use left or right")
        longest = int(self.num_tokens.max(initial=0))
        width = longest if length == "longest" else length
        if width < longest:
            raise ConfigError(f"a record has {longest:,} tokens, more than length {width:,}")
        made = self._copy()
        made._padding = _Padding(pad_token_id=pad_token_id, length=width, side=side)
        return made

    def _copy(self) -> "TokenizedDataset":
        made = TokenizedDataset(self._paths, ledger=self.ledger)
        made._order, made._padding = self._order, self._padding
        return made

    def _padded(self, name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        padding = self._padding
        assert padding is not None
        fill = {"input_ids": padding.pad_token_id, "labels": IGNORE_INDEX}
        room = padding.length - len(values)
        width = (0, room) if padding.side == "right" else (room, 0)
        return np.pad(values, width, constant_values=fill.get(name, 0))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


@functools.cache
def _until_exit() -> ExitStack:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack


def _hold_until_exit(folder: Path, plan: Plan, recipe: Recipe) -> Hold:
    """Hold the steps for as long as a dataset of this process may map their files."""
    keys = [job.key for job in (*plan, *fingerprint_jobs(plan, recipe))]
    return _until_exit().enter_context(hold_steps(folder, plan.version_id, keys))


def _done(steps: list[Sequence[Job]], recipe: Recipe, workspace: Workspace) -> list[Receipt]:
    """Receipts of all jobs; whoever comes first does them, the others wait and find them done."""
    receipts: list[Receipt] = []
    with (
        disk_errors(workspace.cache),
        _one_at_a_time(workspace.cache / "locks" / digest([job.key for job in steps[-1]])),
    ):
        for jobs in steps:
            receipts += [execute(job, recipe, workspace) for job in jobs]
            if ledger := ledger_of(receipts):
                places = [
                    r.path("quarantined.arrow") for r in receipts if r.facts.get("quarantined")
                ]
                check_quarantine(ledger, recipe.validate_.max_quarantined, map(str, places[:3]))
    return receipts


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sources(
    data: Any, query: Fields, resp: Fields, others: Mapping[str, str | None], cache: Path
) -> list[SourceConfig]:
    paths = list(data) if isinstance(data, list | tuple) else [data]
    if not paths:
        raise ConfigError("data_path is an empty list; give at least one source")
    queries = _for_each("query_field", query, len(paths))
    answers = _for_each("resp_field", resp, len(paths))
    return [
        _source(path, query_field, resp_field, others, cache)
        for path, query_field, resp_field in zip(paths, queries, answers, strict=True)
    ]


def _for_each(name: str, fields: Fields, number: int) -> list[str | None]:
    if fields is None or isinstance(fields, str):
        return [fields] * number
    if len(fields) != number:
        raise ConfigError(f"{name} lists {len(fields)} columns for {number} sources")
    return list(fields)


def _source(
    path: Any, query: str | None, resp: str | None, others: Mapping[str, str | None], cache: Path
) -> SourceConfig:
    if (query is None) != (resp is None):
        raise ConfigError("give query_field and resp_field both, or neither")
    uri = _uri(path, cache)
    if query is None or resp is None:
        if given := [name for name, column in others.items() if column is not None]:
            raise ConfigError(f"{given[0]}_field needs query_field and resp_field")
        return SourceConfig(path=uri)
    # Columns that happen to be called `input`, `system` or `history` are none of a question's.
    fields = {name: column or _NO_COLUMN for name, column in others.items()}
    if query == "instruction" and others["input"] is None:
        fields["input"] = "input"
    fields |= {"instruction": query, "output": resp}
    return SourceConfig(
        path=uri,
        format="alpaca",
        fields={ours: theirs for ours, theirs in fields.items() if ours != theirs},
    )


_NO_COLUMN = "\0"
"""A name that no column has; the empty one is that of the index in many a CSV file."""


def _uri(data: Any, cache: Path) -> str:
    if hasattr(data, "to_parquet"):
        return _write_content(cache, "rows.parquet", data.to_parquet)
    uri = str(data)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", uri) and not Path(uri).exists():
        return f"hf://datasets/{uri}"
    return uri


def _tokenizer_folder(tokenizer: Any, cache: Path) -> str:
    if not hasattr(tokenizer, "save_pretrained"):
        if Path(tokenizer).is_dir():
            return str(tokenizer)
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer))
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"no tokenizer '{tokenizer}': {str(error).splitlines()[0]} Give a folder, a name "
                "that AutoTokenizer knows, or a tokenizer"
            ) from error
    staged = cache / "given" / f".tokenizer.{uuid.uuid4().hex}"
    tokenizer.save_pretrained(str(staged))
    return str(_moved(staged, cache / "given" / fingerprint_tokenizer(str(staged))))


def _format(template: str | Path | FormatConfig, cache: Path) -> FormatConfig:
    if isinstance(template, FormatConfig):
        return template
    text = str(template)
    if "{{" in text or "{%" in text:
        text = _write_content(
            cache, "template.jinja", lambda path: Path(path).write_bytes(text.encode())
        )
    return FormatConfig(template=text)


def _write_content(cache: Path, name: str, write: Any) -> str:
    """Write a file to a folder named by its content, and return its path."""
    import hashlib

    staged = cache / "given" / f".{name}.{uuid.uuid4().hex}"
    with disk_errors(cache):
        staged.mkdir(parents=True)
        write(str(staged / name))
    content = hashlib.sha256((staged / name).read_bytes()).hexdigest()
    return str(_moved(staged, cache / "given" / content) / name)


def _moved(staged: Path, place: Path) -> Path:
    """Move a folder to where its content belongs, unless another process was quicker."""
    import shutil

    try:
        staged.rename(place)
    except OSError:
        shutil.rmtree(staged)
    return place
