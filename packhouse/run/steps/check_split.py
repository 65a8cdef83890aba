"""split: check that train and eval share no record and no group, and count both.

A record's side follows from its group key, so pack already keeps the sides apart. This step
verifies the result on the records that were actually packed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack.train_eval_split import LeakCheck
from packhouse.recipe import Recipe, SplitConfig
from packhouse.records.ledger import RowCounts
from packhouse.records.record_ids import num_different
from packhouse.run.packs_and_records import read_records
from packhouse.run.step import Job, JobContext, Step
from packhouse.run.step_cache import Receipt, Workspace
from packhouse.run.steps.pack import PACK, PackParameters, Side
from packhouse.store.manifest import SideCounts
from packhouse.system.fingerprint import canonical_json


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitParameters:
    """Settings that divided the records."""

    split: SplitConfig

    def to_json(self) -> dict[str, object]:
        """Return the JSON that goes into the key."""
        return {"split": self.split.model_dump(mode="json")}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts(RowCounts):
    """Counts of both sides."""

    sides: Mapping[Side, SideCounts]


def job(recipe: Recipe, pack: Job[PackParameters]) -> Job[SplitParameters]:
    """Return the job that checks both sides."""
    return SPLIT.job(SplitParameters(split=recipe.split), inputs=[pack.ref])


def compute(work: JobContext[SplitParameters], folder: Path) -> SplitFacts:
    """Write `sides.json`: records, groups and tokens of each side.

    Reads the records of each side one block at a time. Memory: 9 bytes per train record and 46 per
    eval record.

    Raises:
        ContractError: a group or a record is on both sides.
    """
    packed = work.input(PACK)
    checks = [LeakCheck("record_id"), LeakCheck("group_key")]
    sides: dict[Side, SideCounts] = {}
    eval_first: tuple[Side, ...] = ("eval", "train")  # train is compared with it
    for side in eval_first:
        counts = Counter[str]()
        keys = _check_side(packed, work.workspace, side, checks, counts)
        # `keys` is read here, which also checks and counts the records.
        groups = num_different(keys, packed.facts.rows_in)
        sides[side] = SideCounts(records=counts["records"], groups=groups, tokens=counts["tokens"])
    for check in checks:
        check.finish()
    written = {side: asdict(counts) for side, counts in sides.items()}
    (folder / "sides.json").write_bytes(canonical_json(written))
    return SplitFacts(
        rows_in=packed.facts.rows_out,
        rows_out=sum(side.records for side in sides.values()),
        tokens_in=packed.facts.tokens_out,
        tokens_out=sum(side.tokens for side in sides.values()),
        sides=sides,
    )


def _check_side(
    packed: Receipt[RowCounts],
    workspace: Workspace,
    side: Side,
    checks: Sequence[LeakCheck],
    counts: Counter[str],
) -> Iterator[pa.Array]:
    """Check the packed records of a side, add them to `counts`, and yield their group keys."""
    columns = [*(check.what for check in checks), "num_tokens", "split", "times"]
    for batch in read_records(packed, workspace, columns=columns):
        is_packed = pc.and_(pc.equal(batch["split"], side), pc.greater(batch["times"], 0))
        batch = batch.filter(is_packed)
        # A record that is packed twice counts twice.
        times = batch["times"].to_numpy().astype(np.int64)
        counts["records"] += int(times.sum())
        counts["tokens"] += int(times @ batch["num_tokens"].to_numpy())
        for check in checks:
            add = check.add_eval if side == "eval" else check.check_train
            add(batch[check.what])
        yield batch["group_key"]


SPLIT = Step(
    name="split",
    title="Check that train and eval share nothing, and count both.",
    version="1",
    libraries=("pyarrow",),
    facts=SplitFacts,
    compute=compute,
)
