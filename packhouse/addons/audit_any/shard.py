"""The audit of a shard whose ids were given: by ids and masks alone, as `tokenized` looks at them.

The limits are those of rows that packhouse tokenized; what another tool did is measured by them.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.audit_any.probes import learn_template
from packhouse.addons.audit_any.token_audit import audit_token_rows
from packhouse.auditing.shard import worst_rows
from packhouse.pack.layout import expand_labels
from packhouse.recipe import Recipe
from packhouse.records.lists import list_array
from packhouse.system.arrays import Int64s
from packhouse.tokenize.pipeline import TokenizerSnapshot, read_pipeline

_BATCH_ROWS = 1000

# Count of `audit_shard` -> findings that are it. `trained_prompt_bytes` is counted in bytes.
_FINDINGS = {
    "unterminated_turns": ("untrained_ends", "unended", "truncated"),
    "leaked_headers": ("trained_headers",),
    "trained_prompt_bytes": ("trained_prompts", "padding"),
    "missing_headers": ("missing_headers",),
    "untrained_starts": ("untrained_starts",),
    "leaks": ("leaks",),
    "untrained_rows": ("untrained", "empty"),
    "double_bos": ("double_bos",),
    "missing_bos": ("missing_bos",),
}


def audit_given(
    tokenized: pa.Table, recipe: Recipe, snapshot: TokenizerSnapshot, tokenizers: Path
) -> dict[str, object]:
    """Measure a shard.

    Args:
        tokenized: schema `tables.TOKENIZED`, a record a row.
        recipe: names the template of the rows.
        snapshot: the tokenizer.
        tokenizers: folder of tokenizer snapshots.

    Returns:
        As `audit_shard` does.
    """
    pipeline = read_pipeline(snapshot.backend)
    turns, _ = learn_template(recipe, snapshot, pipeline, tokenizers)
    found = audit_token_rows(_with_labels(tokenized), snapshot, turns, pipeline)
    trained_bytes = found.counts["trained_bytes"]
    counts = {
        "rows": tokenized.num_rows,
        "tokens": found.counts["tokens"],
        "trained_tokens": found.counts["trained_tokens"],
        "turns": len(pc.list_flatten(tokenized["trained_ranges"])),
        "unlocated_rows": 0,
        "answer_bytes": trained_bytes - found.counts["trained_prompt_bytes"],
        "untrained_answer_bytes": 0,
        "double_ends": 0,
        "unknown_tokens": found.counts["unknown_tokens"],
        **{name: sum(found.counts[own] for own in names) for name, names in _FINDINGS.items()},
        # At least a byte of each record in which padding is trained.
        "trained_prompt_bytes": found.counts["trained_prompt_bytes"] + found.counts["padding"],
    }
    worst = {}
    for name, names in _FINDINGS.items():
        values: Int64s = np.zeros(tokenized.num_rows, np.int64)
        for own in names:
            values[[sample.row for sample in found.samples.get(own, ())]] += 1
        if rows := worst_rows(tokenized, values):
            worst[name] = rows
    return {"counts": counts, "worst": worst}


def _with_labels(tokenized: pa.Table) -> Iterator[pa.RecordBatch]:
    for batch in tokenized.to_batches(_BATCH_ROWS):
        ids = batch["input_ids"]
        offsets = ids.offsets.to_numpy() - ids.offsets[0].as_py()
        labels = list_array(pa.array(expand_labels(batch)), offsets, pa.int32())
        yield pa.RecordBatch.from_arrays([ids, labels], names=["input_ids", "labels"])
