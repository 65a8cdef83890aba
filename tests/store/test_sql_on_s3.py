"""What a question to a version on S3 reads, counted at a proxy before a real server."""

import io
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from packhouse.api import Version, open_version, prepare
from tests.store.proxy import FaultyProxy

TOKENIZER = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "tokenizer"


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.e2e)])
def server(request: pytest.FixtureRequest) -> dict[str, str]:
    environment: dict[str, str] = request.getfixturevalue(f"{request.param}_environment")
    return environment


ROWS = 12_000
COUNT = "select source, count(*) as n, avg(num_tokens) from records group by 1"


@pytest.fixture
def made(server, use, tmp_path) -> Version:
    """A version whose files are large enough to be read by columns, in a bucket of a server."""
    rows = [{"instruction": f"Say {n}.", "output": f"{n} {n * 7} {n * 13}!"} for n in range(ROWS)]
    return prepare(
        rows,
        tokenizer=TOKENIZER,
        dataset="numbers",
        store=use(server),
        cache=tmp_path / "cache",
        progress=False,
        format={"template": "alpaca"},
        pack={"seq_len": 256},
        split={"eval_fraction": 0.0},
    )


def test_a_question_reads_the_columns_that_it_needs_and_no_others(server, made, monkeypatch):
    opened = made._opened
    sizes, columns = Counter(), Counter()
    for entry in opened.manifest.files:
        sizes[entry.kind] += entry.size
        if entry.key.endswith(".parquet"):
            content = b"".join(opened.store.chunks(opened.key(entry)))
            footer = pq.read_metadata(io.BytesIO(content))
            for group in map(footer.row_group, range(footer.num_row_groups)):
                for chunk in map(group.column, range(footer.num_columns)):
                    name = chunk.path_in_schema.partition(".")[0]
                    columns[entry.kind, name] += chunk.total_compressed_size
    with FaultyProxy(server["AWS_ENDPOINT_URL"], lambda method, path: None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

        def read(query: str) -> Counter[str]:
            proxy.answered.clear()
            open_version(made.uri).sql(query)
            found = Counter[str]()
            for path, num_bytes in proxy.answered.items():
                of = [kind for kind in ("manifest", *sizes) if f"/{kind}" in path]
                found[of[0] if of else "other"] += num_bytes
            return found

        def assert_read(found: Counter[str], kind: str, *names: str) -> None:
            """The tail with the footer, the columns, and gaps of less than 16 KiB among them."""
            asked = sum(columns[kind, name] for name in names)
            assert asked <= found[kind] <= asked + 2**16 + 2**14 * (1 + len(names))
            assert found[kind] < sizes[kind] * 2 / 3

        found = read(COUNT)
        assert set(found) == {"manifest", "records"}
        assert_read(found, "records", "source", "num_tokens")
        found = read("select avg(fill) from packs")
        assert set(found) == {"manifest", "data"}
        assert_read(found, "data", "seq_lengths")
        found = read("select sum(pack), avg(num_trained) from records")
        assert set(found) == {"manifest", "records"}
        assert_read(found, "records", "pack", "num_trained")
        found = read("select sum(len(input_ids)) from records")
        assert set(found) == {"manifest", "data", "records"}
        assert columns["data", "input_ids"] < found["data"]
        assert found["data"] < sizes["data"] - columns["data", "labels"] / 2
        found = read("select * from ledger")
        assert set(found) == {"manifest"}


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
