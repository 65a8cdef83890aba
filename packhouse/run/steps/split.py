"""split: check that train and eval share no record and no group, and count both.

A record's side follows from its group key, so pack already keeps the sides apart. This step
verifies the result on the records that were actually packed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from packhouse.pack.splitting import LeakCheck
from packhouse.recipe import Recipe, SplitConfig
from packhouse.records.identity import num_different
from packhouse.records.ledger import RowCounts
from packhouse.run.cache import Receipt, Workspace
from packhouse.run.step import Job, Step, Work
from packhouse.run.steps.gather import read_records
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


def compute(work: Work[SplitParameters], folder: Path) -> SplitFacts:
    """Write `sides.json`: records, groups and tokens of each side.

    Reads the records of each side one block at a time. Memory: 9 bytes per train record and 46 per
    eval record.

    Raises:
        ContractError: a group or a record is on both sides.
    """
    packed = work.input(PACK)
    checks = [LeakCheck("record_id"), LeakCheck("group_key")]
    sides: dict[Side, SideCounts] = {}
    eval_first: list[tuple[Side, Callable[[LeakCheck, pa.Array], None]]]
    eval_first = [("eval", LeakCheck.add_eval), ("train", LeakCheck.check_train)]
    for side, take_in in eval_first:
        records = tokens = 0  # a record that is packed twice counts twice
        for batch in _of_side(packed, work.workspace, side, ["num_tokens"]):
            times = batch["times"].cast(pa.int64())
            records += pc.sum(times).as_py() or 0
            tokens += pc.sum(pc.multiply(batch["num_tokens"].cast(pa.int64()), times)).as_py() or 0
        names = [check.what for check in checks]
        batches = _of_side(packed, work.workspace, side, names) if records else ()
        groups = num_different(_groups(batches, checks, take_in), packed.facts.rows_in)
        sides[side] = SideCounts(records=records, groups=groups, tokens=tokens)
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


def _groups(
    batches: Iterable[pa.RecordBatch],
    checks: Sequence[LeakCheck],
    take_in: Callable[[LeakCheck, pa.Array], None],
) -> Iterator[pa.Array]:
    """Pass the keys of each batch to the checks, and yield the group keys for counting."""
    for batch in batches:
        for check in checks:
            take_in(check, batch[check.what])
        yield batch["group_key"]


def _of_side(
    packed: Receipt[RowCounts], workspace: Workspace, side: str, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield the packed records of a side."""
    needed = [*columns, "split", "times"]
    for batch in read_records(packed, workspace, columns=needed):
        is_side = pc.equal(batch["split"], side)
        yield batch.filter(pc.and_(is_side, pc.greater(batch["times"], 0)))


SPLIT = Step(
    name="split",
    title="Check that train and eval share nothing, and count both.",
    version="1",
    libraries=("pyarrow",),
    facts=SplitFacts,
    compute=compute,
)
