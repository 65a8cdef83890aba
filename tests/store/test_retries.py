"""Only transient errors are retried: with full jitter, growing, capped, and until a deadline."""

import pytest

from packhouse.errors import ConfigError, StoreError, StoreRefusedError, TransientError
from packhouse.store import store_requests
from packhouse.store.object_store import ObjectNotFoundError, ObjectStore, PreconditionFailedError
from packhouse.store.store_requests import RetryPolicy, ask, run


class Failing:
    """A store that fails the given number of times, then answers."""

    uri = "s3://bucket/d"

    def __init__(self, error, times):
        self.error, self.times, self.asked = error, times, 0

    def get(self, key):
        self.asked += 1
        if self.asked <= self.times:
            raise self.error
        return "answer"


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in sleeps; returns the list of them."""
    slept = []
    monkeypatch.setattr(store_requests.time, "sleep", slept.append)
    monkeypatch.setattr(store_requests.time, "monotonic", lambda: sum(slept))
    return slept


def test_waits_are_spread_from_zero_to_a_bound_that_doubles_up_to_a_cap():
    policy = RetryPolicy(base_s=0.1, cap_s=2.0)
    for attempt, bound in [(0, 0.1), (1, 0.2), (3, 0.8), (5, 2.0), (60, 2.0)]:
        waits = [policy.delay_s(attempt) for _ in range(400)]
        assert max(waits) <= bound
        assert max(waits) > 0.8 * bound
        assert min(waits) < 0.2 * bound


def test_a_hiccup_is_tried_again_until_it_is_over(clock):
    store = Failing(TransientError("busy"), 5)
    assert run(store, ask(ObjectStore.get, "d/x")) == "answer"
    assert (store.asked, len(clock)) == (6, 5)


def test_the_deadline_raises_the_hiccup_itself_and_does_not_sleep_beyond_it(clock):
    store = Failing(TransientError("busy"), 10**6)
    with pytest.raises(TransientError, match="busy"):
        run(store, ask(ObjectStore.get, "d/x"), retry=RetryPolicy(deadline_s=30))
    assert sum(clock) <= 30
    assert sum(clock) > 15


@pytest.mark.parametrize(
    "error",
    [
        StoreError("no bucket"),
        StoreRefusedError("501"),
        ConfigError("no credentials"),
        ObjectNotFoundError("absent"),
        PreconditionFailedError("exists"),
    ],
)
def test_a_mistake_or_an_answer_is_asked_once(clock, error):
    store = Failing(error, 1)
    with pytest.raises(type(error)):
        run(store, ask(ObjectStore.get, "d/x"))
    assert (store.asked, clock) == (1, [])
