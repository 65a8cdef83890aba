"""Order packs so that data-parallel ranks wait little for each other."""

import json
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from packhouse import StreamingPackedDataset, load_packed
from packhouse.addons.plan import estimate
from packhouse.errors import ConfigError
from packhouse.pack.strategies import STRATEGIES, PackPlan, pack_costs, plan_packs, step_imbalance
from packhouse.run.chain import plan_jobs
from packhouse.run.step_cache import Workspace
from tests.chain.conftest import Project, question

LENGTHS = st.lists(st.integers(1, 64), max_size=200)


def pieces(plan: PackPlan) -> list[tuple[tuple[int, int, int], ...]]:
    """Contents of each pack: sequence, first token, and end (exclusive)."""
    starts = np.zeros(len(plan.order), int) if plan.starts is None else plan.starts
    ends = np.full(len(plan.order), -1) if plan.ends is None else plan.ends
    of_each = list(zip(plan.order.tolist(), starts.tolist(), ends.tolist(), strict=True))
    bounds = plan.pack_offsets.tolist()
    return [tuple(of_each[a:b]) for a, b in pairwise(bounds)]


def test_neighbours_cost_alike_and_the_cheapest_are_left_over():
    lengths = np.array([2, 8, 3, 7, 4])  # one record per pack: costs 4, 64, 9, 49, 16

    plan = plan_packs(lengths, 8, "none", seed=0, balance=2)

    steps = [sorted(step) for step in pack_costs(plan, lengths)[:4].reshape(2, 2).tolist()]
    assert sorted(steps) == [[9, 16], [49, 64]]
    assert plan.order[-1] == 0


def test_a_cost_is_the_sum_of_squared_lengths_of_pieces_too():
    lengths = np.array([6, 5])
    plan = plan_packs(lengths, 4, "concat", seed=None)  # 4 | 2 + 2 | 3

    assert pack_costs(plan, lengths).tolist() == [16, 8, 9]
    assert step_imbalance(np.array([16, 8, 9]), 2) == 16 / 12


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(lengths=LENGTHS, balance=st.integers(2, 9), seed=st.sampled_from([None, 0, 1]))
@settings(deadline=None, max_examples=20)
def test_the_packs_are_the_same_and_no_two_steps_overlap_in_cost(strategy, lengths, balance, seed):
    lengths = np.array(lengths, dtype=np.int64)
    plain = plan_packs(lengths, 64, strategy, seed)
    plan = plan_packs(lengths, 64, strategy, seed, balance=balance)

    assert sorted(pieces(plan)) == sorted(pieces(plain))
    assert plan.num_tokens == plain.num_tokens
    costs = pack_costs(plan, lengths)
    whole = len(costs) // balance * balance
    steps = sorted((min(s), max(s)) for s in costs[:whole].reshape(-1, balance).tolist())
    for (_, most), (least, _) in pairwise(steps):
        assert most <= least
    if whole:
        assert costs[whole:].max(initial=0) <= costs[:whole].min()


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    lengths = np.arange(1, 200) % 61 + 1
    orders = [plan_packs(lengths, 64, "best_fit", s, balance=4).order.tolist() for s in (5, 5, 6)]

    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ConfigError, match="balance is 0"):
        plan_packs(lengths, 64, balance=0)


def test_a_recipe_publishes_balanced_packs_and_plan_says_what_it_gains(tmp_path):
    project = Project(tmp_path)
    rows = [question(n) | {"output": " ".join(["yes"] * (n * n % 97 + 1))} for n in range(300)]
    project.rows.write_text("\n".join(map(json.dumps, rows)))
    plain = project.prepare("split.eval_fraction=0")
    version = project.prepare("split.eval_fraction=0", "pack.balance=4")

    def packs(published):
        files = sorted(project.folder(published).glob("data/train-*.parquet"))
        return [row for file in files for row in pq.read_table(file)["seq_lengths"].to_pylist()]

    before, after = packs(plain), packs(version)
    costs = [np.array([sum(n * n for n in pack) for pack in each]) for each in (before, after)]
    assert version.version != plain.version
    assert sorted(map(sorted, before)) == sorted(map(sorted, after))
    assert step_imbalance(costs[1], 4) < step_imbalance(costs[0], 4)

    recipe = project.recipe("split.eval_fraction=0", "pack.balance=4")
    notes = estimate(recipe, plan_jobs(recipe), Workspace(cache=project.cache)).notes
    said = [note for note in notes if note.startswith("pack.balance: in steps of 4 packs")]
    assert len(said) == 1
    assert f"{step_imbalance(costs[1], 4):.2f} times the mean attention" in said[0]


def test_a_stream_that_shuffles_warns_that_it_undoes_the_balance(tmp_path):
    project = Project(tmp_path)
    project.write_rows(range(60))
    project.prepare("pack.balance=2")

    with pytest.warns(UserWarning, match="pack.balance 2, which shuffle=True undoes"):
        StreamingPackedDataset(str(tmp_path / "store" / "sums"), cache=tmp_path / "local")
    rows = StreamingPackedDataset(
        str(tmp_path / "store" / "sums"), shuffle=False, cache=tmp_path / "local"
    )
    published = load_packed(str(tmp_path / "store" / "sums"), cache=tmp_path / "local")
    assert [row["input_ids"].tolist() for row in rows] == published["input_ids"][:]
