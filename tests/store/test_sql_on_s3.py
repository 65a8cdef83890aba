"""Bytes that a query reads from a version on S3, counted at a proxy in front of a real server."""

from packhouse.api import open_version
from tests.prepared import prepare_in
from tests.store.proxy import FaultyProxy

ROWS = 12_000
COUNT = "select source, count(*) as n, avg(num_tokens) from records group by 1"


def test_ranges_are_asked_for_again_as_other_reads_are(s3_server, use, tmp_path, monkeypatch):
    rows = [{"instruction": f"Say {n}.", "output": f"{n} {n * 7} {n * 13}!"} for n in range(ROWS)]
    made = prepare_in(
        tmp_path,
        rows,
        dataset="numbers",
        store=use(s3_server),
        format={"template": "alpaca"},
        pack={"seq_len": 256},
        split={"eval_fraction": 0.0},
    )
    due = made.sql(COUNT).to_pylist()
    left = ["drop_before", "busy_before", "truncate"]

    def rule(method: str, path: str) -> str | None:
        return left.pop() if "/records" in path and left else None

    with FaultyProxy(s3_server["AWS_ENDPOINT_URL"], rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert open_version(made.uri).sql(COUNT).to_pylist() == due
    assert not left
    assert due[0]["n"] == ROWS
