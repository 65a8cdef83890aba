"""Prepare data inside the training process: raw rows in, a torch dataset out, in one call.

Runs the steps of `packhouse.run.steps` with the same keys and cache as `prepare`, so ids, labels
and packs equal those of a published version of the same recipe. Ranks that start together do the
work once, using a file lock that the kernel releases if its owner is killed. Without a shared
cache, each host does the work once.

`TokenizedDataset` holds one record per row; its views shuffle, concatenate and pad records. Nothing
is published or audited: use `packhouse.prepare` for data that others read.
"""

import atexit
import copy
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from packhouse.addons.dart_math import TEXTS, texts_to_jinja
from packhouse.errors import ConfigError, EmptyDatasetError, QuarantineLimitError
from packhouse.load.dataset import ArrowRows, PackedDataset, Row, open_rows
from packhouse.load.mapped_rows import cache_folder, locked
from packhouse.pack.pack_columns import IGNORE_INDEX, position_ids
from packhouse.pack.shuffle import permutation
from packhouse.recipe import FormatConfig, Recipe, SourceConfig
from packhouse.records.arrays import Int64s
from packhouse.records.ledger import LedgerLine, check_quarantine, ledger_of
from packhouse.registry import function_of_addon
from packhouse.run.chain import plan_jobs
from packhouse.run.prepare_arguments import data_uri, source_settings, tokenizer_name, write_content
from packhouse.run.step import AnyJob, execute
from packhouse.run.step_cache import AnyReceipt, Workspace, pin_steps
from packhouse.run.steps import files
from packhouse.run.steps.validate import check_all_text_is_read
from packhouse.system.disks import disk_errors
from packhouse.system.fingerprint import digest
from packhouse.tokenize import load_snapshot
from packhouse.tokenize.encoders import ends_of

Fields = str | Sequence[str | None] | None


def make_supervised_dataset(
    tokenizer: object,
    data_path: object,
    *,
    query_field: Fields = None,
    resp_field: Fields = None,
    input_field: str | None = None,
    system_field: str | None = None,
    history_field: str | None = None,
    prompt_template: object = "alpaca",
    pack_len: int | None = None,
    shuffle_seed: int | None = 42,
    over_length: Literal["drop", "error", "truncate_turns", "window"] = "drop",
    max_quarantined: float = 0.01,
    cache: str | Path | None = None,
) -> object:
    """Create a dataset for supervised fine-tuning from raw instruction data.

    Args:
        tokenizer: a folder, a Hub name (`org/name`), or a tokenizer object.
        data_path: a file, folder, glob, address (`s3://`, `hf://`, ...), dataset id (`org/name`) or
            `datasets.Dataset`; a dict of a source's settings; or a list of these.
        query_field: column of the question, for all sources or as a list with one per source. If
            neither this nor `resp_field` is given, the row format is detected, and rows with unread
            text are rejected. Otherwise, columns that are not named are not read.
        resp_field: column of the answer, in the same form.
        input_field: column of the text that a question refers to (Alpaca's `input`), for all
            sources. Default: `input` if `query_field` is `instruction` or not given, otherwise
            none.
        system_field: column of a system prompt, for all sources. With `query_field`, a column
            `system` of the file is used only if it is named here.
        history_field: column of earlier turns, `[[question, answer], ...]`; otherwise like
            `system_field`.
        prompt_template: `alpaca`, `chat`, `completion`, `dart-math/qa`, ...; a Jinja file; the text
            of a Jinja chat template; a `FormatConfig`; the texts around questions and answers, as a
            dict or an object such as dart-math's `PromptTemplate`: `sys_prompt`, `query_prompt`,
            `prompt_after_query`, `resp_prompt`, `prompt_before_resp`, `delim`; or the path of a
            JSON file with such a dict.
        pack_len: pack size in tokens; None, 0 or less gives one record per row.
        shuffle_seed: seed for the order of packs or records. None or a negative value keeps
            records in order (and uses seed 0 for packs).
        over_length: policy for records over `pack_len`, as in a recipe.
        max_quarantined: tolerated share of bad rows.
        cache: cache folder. Default: that of `packhouse.prepare`.

    Returns:
        A `PaddedPacks`, padded to `pack_len`, if it is given, otherwise a `TokenizedDataset`. Its
        `ledger` counts rows in, out, quarantined and dropped at every step.

    Raises:
        ConfigError: a source, field list or template is invalid.
        DiskError: the cache cannot be written: no space or no permission.
        TokenizerError: the tokenizer does not exist.
        QuarantineLimitError: more rows are bad than tolerated.
        SourceError: the row format is unknown, or a field has text that is not read.
        EmptyDatasetError: no records are left.

    Example:
        >>> file = getfixture("tmp_path") / "rows.jsonl"
        >>> _ = file.write_text('{"instruction": "Say one.", "output": "One!"}')
        >>> packs = make_supervised_dataset("deployments/demo/tokenizer", file, pack_len=256,
        ...     query_field="instruction", resp_field="output", cache=file.parent)
        >>> len(packs)
        1
    """
    pack_len = pack_len if pack_len is not None and pack_len > 0 else None
    seed = shuffle_seed if shuffle_seed is not None and shuffle_seed >= 0 else None
    folder = cache_folder(cache)
    tokenizer = tokenizer_name(tokenizer, folder)
    others = {"input": input_field, "system": system_field, "history": history_field}
    recipe = Recipe.model_validate(
        {
            "dataset": "supervised",
            "sources": _sources(data_path, query_field, resp_field, others, folder),
            "tokenizer": tokenizer,
            "validate": {"max_quarantined": max_quarantined},
            "format": _format(prompt_template, tokenizer, folder),
            "pack": {
                # Without packing, no record should be too long.
                "seq_len": 2**24 if pack_len is None else pack_len,
                "seed": seed or 0,
                "over_length": over_length,
            },
            "publish": {"file_format": "arrow", "layout": "compact"},
        }
    )
    plan = plan_jobs(recipe)
    steps: list[Sequence[AnyJob]] = [plan.validate, plan.format, plan.tokenize]
    if pack_len is not None:
        steps.append([plan.pack])
    workspace = Workspace(cache=folder)
    keys = [job.key for job in (*plan, *plan.side_jobs)]
    hold = _HELD.enter_context(pin_steps(folder, plan.version_id, keys))
    receipts = _run_jobs(steps, recipe, workspace)
    named = _for_each("query_field", query_field, len(recipe.sources))
    detected = [each for each, query in zip(recipe.sources, named, strict=True) if query is None]
    jobs = [job for job in plan.validate if job.parameters.source in detected]
    by_key = {receipt.key: receipt for receipt in receipts}
    check_all_text_is_read(recipe, jobs, [by_key[job.key] for job in jobs])
    ledger = ledger_of(receipts)
    snapshot = load_snapshot(tokenizer, workspace.tokenizers, "class")
    # Padding is masked, so any id works if the tokenizer has none for it.
    pad_token_id = snapshot.added_tokens.get(snapshot.special_tokens.get("pad_token", ""), 0)
    if pack_len is not None:
        num_dropped = sum(ledger[-1].dropped.values())
        planned = receipts[-1].facts.sides["train"]
        if not planned.num_packs:
            raise EmptyDatasetError(
                f"no record fits in pack_len {pack_len:,} ({num_dropped:,} dropped). Raise "
                "pack_len."
            )
        parts = tuple(files.data_jobs(recipe, "train", planned, plan.pack))
        hold(job.key for job in parts)
        written = _run_jobs([parts], recipe, workspace)
        paths = tuple(each.path(each.facts.files[0].name) for each in written)
        packs = PaddedPacks(paths, pad_token_id=pad_token_id)
        packs.seq_len, packs.ledger, packs.num_dropped = pack_len, ledger, num_dropped
        return packs
    tokenized = [r.path("tokenized.arrow") for r in receipts if r.step == "tokenize"]
    dataset = TokenizedDataset(tokenized, ledger=ledger, pad_token_id=pad_token_id)
    return dataset if seed is None else dataset.shuffle(seed)


_HELD = ExitStack()  # steps whose files datasets of this process may map
atexit.register(_HELD.close)


def _run_jobs(
    steps: list[Sequence[AnyJob]], recipe: Recipe, workspace: Workspace
) -> list[AnyReceipt]:
    """Return the receipts of all jobs. Only the first process runs them; others wait."""
    receipts: list[AnyReceipt] = []
    place = workspace.cache / "locks" / digest([job.key for job in steps[-1]])
    with disk_errors(workspace.cache), locked(place):
        for jobs in steps:
            receipts += [execute(job, recipe, workspace) for job in jobs]
            if ledger := ledger_of(receipts):
                try:
                    check_quarantine(ledger, recipe.validate_.max_quarantined)
                except (EmptyDatasetError, QuarantineLimitError) as error:
                    name = "quarantined.arrow"
                    bad = [each.path(name) for each in receipts if name in each.files]
                    target = shlex.quote(str(bad[0])) if bad else ""
                    explain = function_of_addon("explain_bad_rows")
                    raise explain(error, bad, recipe, target) from None
    return receipts


def _sources(
    data: object, query: Fields, resp: Fields, others: Mapping[str, str | None], cache: Path
) -> list[SourceConfig]:
    paths = list(data) if isinstance(data, list | tuple) else [data]
    if not paths:
        raise ConfigError("data_path is an empty list. Pass at least one source.")
    queries = _for_each("query_field", query, len(paths))
    answers = _for_each("resp_field", resp, len(paths))
    return [_source(*own, others, cache) for own in zip(paths, queries, answers, strict=True)]


def _for_each(name: str, fields: Fields, number: int) -> list[str | None]:
    if fields is None or isinstance(fields, str):
        return [fields] * number
    if len(fields) != number:
        raise ConfigError(
            f"{name} lists {len(fields)} columns for {number} sources. Pass one per source."
        )
    return list(fields)


def _source(
    path: object, query: str | None, resp: str | None, others: Mapping[str, str | None], cache: Path
) -> SourceConfig:
    """Return the settings of one source."""
    if (query is None) != (resp is None):
        raise ConfigError("query_field and resp_field must be set together. Pass both, or neither.")
    if query is None or resp is None:
        if given := [name for name, column in others.items() if column is not None]:
            raise ConfigError(
                f"{given[0]}_field requires query_field and resp_field. Pass them too, or remove "
                "it."
            )
        return SourceConfig.model_validate(source_settings(path, cache))
    uri = data_uri(path, cache)
    # Columns named `input`, `system` or `history` by coincidence do not belong to a question.
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
"""A name that no column has. An empty name would be the index column of many CSV files."""


def _format(template: object, tokenizer: str, cache: Path) -> FormatConfig:
    """Return the format section for a template in any supported form."""
    if isinstance(template, FormatConfig):
        return template
    if not isinstance(template, str | Path | Mapping):
        if not (hasattr(template, "query_prompt") and hasattr(template, "resp_prompt")):
            raise ConfigError(
                f"prompt_template is a {type(template).__name__:.60}. Pass a name, a file, a "
                "Jinja template, texts by name, or an object with query_prompt and "
                "resp_prompt."
            )
        template = {name: getattr(template, name) for name in TEXTS if hasattr(template, name)}
    if str(template).endswith(".json") and Path(str(template)).is_file():
        file, remedy = Path(str(template)), "Pass a JSON object of texts."
        try:
            template = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"'{file}' is not JSON ({error}). {remedy}") from None
        if not isinstance(template, dict):
            raise ConfigError(f"'{file}' holds a {type(template).__name__}. {remedy}")
    if isinstance(template, Mapping):
        ends = ends_of(load_snapshot(tokenizer, Workspace(cache=cache).tokenizers, "class"), "")
        text, turns = texts_to_jinja(template, ends), "whole"  # encoded whole, as in dart-math
    else:
        text, turns = str(template), "joined"
    if "{{" in text or "{%" in text:
        data = text.encode()
        text = write_content(cache, "template.jinja", lambda path: Path(path).write_bytes(data))
    return FormatConfig.model_validate({"template": text, "turns": turns})


@dataclass(frozen=True, kw_only=True)
class _Padding:
    pad_token_id: int
    length: int
    side: Literal["left", "right"] = "right"

    def tensors(self, row: Row, attention_mask: Int64s) -> dict[str, torch.Tensor]:
        """Return the padded columns of a row."""
        num_pads = self.length - len(row.input_ids)
        width = (0, num_pads) if self.side == "right" else (num_pads, 0)
        columns: dict[str, tuple[npt.NDArray[Any] | None, int]] = {
            "input_ids": (row.input_ids, self.pad_token_id),
            "labels": (row.labels, IGNORE_INDEX),
            "attention_mask": (attention_mask, 0),
            "loss_weights": (row.loss_weights, 0),
        }
        return {
            # np.pad copies, which a read-only view of a mapped file needs in any case.
            name: torch.from_numpy(
                np.pad(values, width, constant_values=fill)
                if num_pads or not values.flags.writeable
                else values
            )
            for name, (values, fill) in columns.items()
            if values is not None
        }


class PaddedPacks(PackedDataset):
    """Packs in dart-math's format: all padded to `seq_len` tokens, for collators that stack.

    `attention_mask` numbers the records, [1, 1, 2, 2, 0], which `enable_packing` reads as
    boundaries. `position_ids` restart at each record and at the padding.
    """

    def __init__(self, paths: Sequence[Path], *, pad_token_id: int) -> None:
        super().__init__(tuple(paths))
        self._pad_token_id = pad_token_id

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row, size = self._watched(index), self.seq_len or 0
        numbers = np.repeat(np.arange(1, len(row.seq_lengths) + 1), row.seq_lengths)
        lengths = np.append(row.seq_lengths, size - len(row.input_ids))
        positions = torch.from_numpy(position_ids(lengths, np.int64))
        padding = _Padding(pad_token_id=self._pad_token_id, length=size)
        return padding.tensors(row, numbers) | {"position_ids": positions}


class TokenizedDataset(torch.utils.data.Dataset):
    """Tokenized records, one per row: `input_ids`, `labels`, `attention_mask` as int64 tensors.

    Returned by `make_supervised_dataset`. `concat`, `shuffle` and `pad` return views of the same
    mapped files without copying.
    """

    def __init__(
        self, paths: Sequence[Path], *, ledger: Sequence[LedgerLine] = (), pad_token_id: int = 0
    ) -> None:
        self.ledger = list(ledger)
        self._pad_token_id = pad_token_id
        self._paths = tuple(Path(path) for path in paths)
        self._padding: _Padding | None = None
        self._rows = open_rows(self._paths, whole_rows=True)
        self._order: npt.NDArray[np.int64] = np.arange(len(self._rows))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[int(self._order[index])]
        padding = self._padding or _Padding(pad_token_id=0, length=len(row.input_ids))
        tensors = padding.tensors(row, np.ones_like(row.input_ids))
        return tensors if row.label is None else tensors | {"label": torch.tensor(row.label)}

    @property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each record, in order."""
        assert isinstance(self._rows, ArrowRows)
        return self._rows.num_tokens()[self._order]

    def concat(self, *others: "TokenizedDataset | list[TokenizedDataset]") -> "TokenizedDataset":
        """Return these records followed by those of the others, each in its own order.

        Args:
            others: datasets, or a list of them.

        Raises:
            ConfigError: one is not a `TokenizedDataset`, or they are padded differently.
        """
        parts = [self]
        flat = chain.from_iterable(each if isinstance(each, list) else [each] for each in others)
        for number, other in enumerate(flat, start=1):
            if not isinstance(other, TokenizedDataset):
                raise ConfigError(
                    f"concat takes TokenizedDataset, and argument {number} is a "
                    f"{type(other).__name__}. Create it with make_supervised_dataset, or "
                    "combine other datasets with torch.utils.data.ConcatDataset."
                )
            parts.append(other)
        if len({part._padding for part in parts}) > 1:
            raise ConfigError(
                "these records are padded differently. Concatenate them first, then pad."
            )
        made = TokenizedDataset(
            [path for part in parts for path in part._paths],
            ledger=list(chain.from_iterable(part.ledger for part in parts)),
            pad_token_id=self._pad_token_id,
        )
        # Rows of 3 and 2 records: those of the second dataset are numbered from 3.
        starts = np.cumsum([0, *(len(part._rows) for part in parts)])
        orders = [part._order + start for part, start in zip(parts, starts, strict=False)]
        made._order = np.concatenate(orders)
        made._padding = self._padding
        return made

    def shuffle(self, seed: int = 42) -> "TokenizedDataset":
        """Return the same records in an order determined by `seed`, equal on every platform."""
        made = copy.copy(self)
        made._order = self._order[permutation(len(self), seed)]
        return made

    def pad(
        self,
        pad_token_id: int | None = None,
        length: int | Literal["longest"] = "longest",
        side: Literal["left", "right"] = "right",
    ) -> "TokenizedDataset":
        """Return the same records padded to one length; padding has label -100 and no attention.

        Args:
            pad_token_id: default: the tokenizer's pad token, or 0 if it has none.
            length: number of tokens, or "longest" for the length of the longest record.
            side: side of the padding.

        Raises:
            ConfigError: a record is longer than `length`, or the side is unknown.
        """
        if side not in ("left", "right"):
            raise ConfigError(f"side '{side}' is unknown. Use left or right.")
        longest = int(self.num_tokens.max(initial=0))
        width = longest if length == "longest" else length
        if width < longest:
            raise ConfigError(
                f"a record has {longest:,} tokens; length is {width:,}. Raise length."
            )
        made = copy.copy(self)
        pad_token_id = self._pad_token_id if pad_token_id is None else pad_token_id
        made._padding = _Padding(pad_token_id=pad_token_id, length=width, side=side)
        return made

    def __getstate__(self) -> dict[str, object]:
        # Memory maps cannot be pickled: worker processes open the files again.
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = open_rows(self._paths, whole_rows=True)
