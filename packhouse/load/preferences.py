"""Preferences as TRL trains them: prompts and answers as ids, in columns that it pads and masks.

TRL's collators train whatever follows `prompt_ids`, so a row has its prompt, which is not trained,
and its answers, which are, to the last token. The published packs have the same tokens with labels
and bounds, for trainers that take packs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from packhouse.errors import ConfigError, ContractError
from packhouse.load.versions import cache_folder, map_rows, mapped_file, open_split
from packhouse.pack.layout import IGNORE_INDEX, preference_names
from packhouse.records.lists import count_up, flat_list, list_array, one_chunk, zero_based

if TYPE_CHECKING:
    from datasets import Dataset

Form = Literal["trl", "reward", "packed"]


def load_preferences(
    uri: str | Path,
    version: str = "latest",
    split: str = "train",
    *,
    form: Form = "trl",
    cache: str | Path | None = None,
    verify: bool = True,
) -> "Dataset":
    """Load a split of a version of preferences as a memory-mapped `datasets.Dataset`.

    | `form` | of `format: pairs` | of `format: kto` |
    |---|---|---|
    | `trl` | `prompt_ids`, `chosen_ids`, `rejected_ids` | `prompt_ids`, `completion_ids`, `label` |
    | `reward` | `chosen_ids`, `rejected_ids`, each with its prompt | none |
    | `packed` | packs, with the columns of the files | the same, one answer each |

    `trl` and `reward` also have `record_id`, and a row for each pair or answer. Of a pair in a
    pack, the chosen sequence stands before the rejected one, with the same record id. Answers are
    trained to their last token, which ends the turn; prompts are not. Of a pair both sides have
    the same `prompt_ids`.

    Args:
        uri: `<store>/<dataset>`, as `load_packed` takes it.
        version: a ref, a version (`<vid>.g<N>`) or a version id.
        split: `train` or `eval`.
        form: which columns.
        cache: folder of local copies; by default that of `packhouse.prepare`.
        verify: as for `load_packed`.

    Raises:
        ConfigError: the version holds no preferences, or none of that form.
        VersionNotFoundError: no such dataset, version or split.
        EmptyDatasetError: the split holds no row.
        IntegrityError: the store's bytes are not the published ones.

    Example:
        >>> import json
        >>> from packhouse import Recipe, prepare
        >>> row = {"prompt": "1 + 1?", "chosen": " 2", "rejected": " 3"}
        >>> folder = getfixture("tmp_path")
        >>> written = (folder / "pairs.jsonl").write_text(json.dumps(row))
        >>> recipe = Recipe.model_validate({"dataset": "pairs",
        ...     "sources": [{"path": str(folder / "pairs.jsonl"), "format": "pairs"}],
        ...     "tokenizer": "deployments/demo/tokenizer", "format": {"template": "alpaca"}})
        >>> version = prepare(recipe, store=folder, progress=False, cache=folder / "cache")
        >>> load_preferences(folder / "pairs", cache=folder / "cache").column_names
        ['prompt_ids', 'chosen_ids', 'rejected_ids', 'record_id']
    """
    opened, entries = open_split(uri, version, split, preferences=True)
    kind = str(opened.manifest.preferences)
    if form not in ("trl", "reward", "packed") or (kind, form) == ("kto", "reward"):
        raise ConfigError(f"form {form!r:.40} is none of a version of `format: {kind}`")
    folder = cache_folder(cache)
    convert = preference_names if form == "packed" else _CONVERT[kind, form]
    paths = [mapped_file(opened, entry, folder, verify, convert) for entry in entries]
    return map_rows(paths, f"packhouse {opened.dataset} {opened.version} {split}")


def preference_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of pairs or of answers, with the columns of TRL's DPOTrainer and KTOTrainer.

    Args:
        batch: published rows with `labels`; those with a `label` are single answers.

    Raises:
        ContractError: a row is neither.

    Example:
        >>> batch = pa.RecordBatch.from_pylist([{"input_ids": [5, 6, 7, 8, 5, 6, 9],
        ...     "labels": [-100, -100, 7, 8, -100, -100, 9], "seq_lengths": [4, 3],
        ...     "record_ids": ["a", "a"]}])
        >>> preference_columns(batch).to_pylist()
        [{'prompt_ids': [5, 6], 'chosen_ids': [7, 8], 'rejected_ids': [9], 'record_id': 'a'}]
    """
    found = _Sequences(batch)
    # Sequences of 2 + 2 and of 2 + 1 tokens -> pieces from 0, 2, 4, 6: prompt, answer, prompt, ...
    starts = np.stack([found.starts, found.starts + found.num_prompt], axis=1).ravel()
    pieces = list_array(
        pa.array(found.ids, pa.int32()), np.append(starts, len(found.ids)), pa.int32()
    )
    if found.is_paired:
        columns = {
            "prompt_ids": _every(pieces, 0, 4),
            "chosen_ids": _every(pieces, 1, 4),
            "rejected_ids": _every(pieces, 3, 4),
            "record_id": _every(found.names, 0, 2),
        }
    else:
        columns = {
            "prompt_ids": _every(pieces, 0, 2),
            "completion_ids": _every(pieces, 1, 2),
            "label": one_chunk(batch["label"]).cast(pa.bool_()),
            "record_id": found.names,
        }
    return pa.RecordBatch.from_pydict(columns)


def reward_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Pairs with the prompt in both sides, as TRL's RewardTrainer takes them.

    Args:
        batch: published rows of pairs, with `labels`.
    """
    found = _Sequences(batch)
    whole = list_array(
        pa.array(found.ids, pa.int32()), np.append(found.starts, len(found.ids)), pa.int32()
    )
    columns = {"chosen_ids": _every(whole, 0, 2), "rejected_ids": _every(whole, 1, 2)}
    return pa.RecordBatch.from_pydict(columns | {"record_id": _every(found.names, 0, 2)})


class _Sequences:
    """All sequences of rows, each a prompt and a trained answer."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.is_paired = "label" not in batch.schema.names
        self.ids, _ = zero_based(*flat_list(batch["input_ids"]))
        lengths, _ = zero_based(*flat_list(batch["seq_lengths"]))
        self.names = one_chunk(batch["record_ids"]).flatten()
        labels, _ = zero_based(*flat_list(batch["labels"]))
        self.starts = np.cumsum(lengths, dtype=np.int64) - lengths
        is_prompt = labels == IGNORE_INDEX
        # Sequences of 4 and 3 tokens with 2 of prompt each: what is not trained must be places 0 1
        # of 0 1 2 3 and of 0 1 2, and something must follow it.
        self.num_prompt = np.add.reduceat(is_prompt, self.starts, dtype=np.int64)
        is_due = count_up(lengths) < np.repeat(self.num_prompt, lengths)
        is_whole = (0 < self.num_prompt) & (self.num_prompt < lengths)
        is_bad = not is_whole.all() or not np.array_equal(is_due, is_prompt)
        if self.is_paired and not is_bad:
            chosen, rejected = _every(self.names, 0, 2), _every(self.names, 1, 2)
            is_bad = not chosen.equals(rejected)
        if is_bad:
            raise ContractError(
                "a row is not made of prompts and the answers to them: it holds no preferences"
            )


def _every(values: pa.Array, first: int, step: int) -> pa.Array:
    return values.take(pa.array(np.arange(first, len(values), step)))


_CONVERT = {
    ("pairs", "trl"): preference_columns,
    ("pairs", "reward"): reward_columns,
    ("kto", "trl"): preference_columns,
}
