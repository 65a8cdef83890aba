"""Bytes that a query reads from a version on S3, counted at a proxy in front of a real server."""

import pytest

from packhouse.api import open_version
from tests.prepared import prepare_in
from tests.store.proxy import FaultyProxy


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.e2e)])
def server(request):
    environment = request.getfixturevalue(f"{request.param}_environment")
    return environment


ROWS = 12_000
COUNT = "select source, count(*) as n, avg(num_tokens) from records group by 1"


@pytest.fixture
def made(server, use, tmp_path):
    """A version on a server, with files large enough to be read by columns."""
    rows = [{"instruction": f"Say {n}.", "output": f"{n} {n * 7} {n * 13}!"} for n in range(ROWS)]
    return prepare_in(
        tmp_path,
        rows,
        dataset="numbers",
        store=use(server),
        format={"template": "alpaca"},
        pack={"seq_len": 256},
        split={"eval_fraction": 0.0},
    )


@pytest.mark.parametrize("fault", ["drop_before", "busy_before", "truncate"])
def test_ranges_are_asked_for_again_as_other_reads_are(server, made, monkeypatch, fault):
    due = made.sql(COUNT).to_pylist()
    failed = []

    def rule(method: str, path: str) -> str | None:
        if "/records" in path and len(failed) < 2:
            failed.append(path)
            return fault
        return None

    with FaultyProxy(server["AWS_ENDPOINT_URL"], rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert open_version(made.uri).sql(COUNT).to_pylist() == due
    assert len(failed) == 2
    assert due[0]["n"] == ROWS
