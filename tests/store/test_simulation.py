"""The protocol under 5,000 schedules, and proof that the simulation notices mistakes.

PACKHOUSE_SCHEDULES and PACKHOUSE_SEED select other schedules. A violation names its seed;
`python -m tests.store.soak --seed N --schedules 1` repeats it. `make soak` runs 100,000
and more.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.store.mutants import MUTANTS, mutated
from tests.store.simulation import Violation, simulate

SCHEDULES = int(os.environ.get("PACKHOUSE_SCHEDULES", "5000"))
SEED = int(os.environ.get("PACKHOUSE_SEED", "0"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_schedule_breaks_an_invariant(capsys):
    blocks = [range(SEED + n, SEED + SCHEDULES, 2) for n in range(2)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        done = list(pool.map(simulate, blocks))

    num_requests, num_faults = (sum(column) for column in zip(*done, strict=True))
    with capsys.disabled():
        sys.stderr.write(
            f"\n{SCHEDULES:,} schedules from seed {SEED}: {num_requests:,} requests, "
            f"{num_faults:,} faults, 0 violations\n"
        )
    assert num_faults > SCHEDULES


def test_a_seed_always_gives_the_same_schedule():
    assert simulate(range(50)) == simulate(range(50))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutants_are_killed(mutant):
    with mutated(mutant), pytest.raises(Violation, match="seed"):
        simulate(range(mutant.seed, 20_000))


@pytest.mark.parametrize("ignored", ["honours_create", "honours_match"])
def test_a_store_that_ignores_conditions_is_noticed(ignored):
    with pytest.raises(Violation):
        simulate(range(5_000), **{ignored: False})
