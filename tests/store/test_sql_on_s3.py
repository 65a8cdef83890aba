"""What a question to a version on S3 reads, counted at a proxy before a real server."""

from pathlib import Path

import pytest

from packhouse.api import Version, open_version, prepare
from tests.store.proxy import FaultyProxy

TOKENIZER = Path(__file__).resolve().parents[2] / "deployments" / "demo" / "tokenizer"


@pytest.fixture(params=["moto", pytest.param("ceph", marks=pytest.mark.e2e)])
def server(request: pytest.FixtureRequest) -> dict[str, str]:
    environment: dict[str, str] = request.getfixturevalue(f"{request.param}_environment")
    return environment


def test_a_question_reads_the_files_that_it_needs_and_no_others(server, use, monkeypatch, tmp_path):
    root = use(server)
    rows = [{"instruction": f"Say {n}.", "output": f"{n} {n * 7} {n * 13}!"} for n in range(2000)]
    made = prepare(
        rows,
        tokenizer=TOKENIZER,
        dataset="numbers",
        store=root,
        cache=tmp_path / "cache",
        progress=False,
        format={"template": "alpaca"},
        pack={"seq_len": 256},
    )
    sizes = {entry.kind: 0 for entry in made._opened.manifest.files}
    for entry in made._opened.manifest.files:
        sizes[entry.kind] += entry.size
    with FaultyProxy(server["AWS_ENDPOINT_URL"], lambda method, path: None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)

        def read(query: str) -> tuple[Version, dict[str, int]]:
            proxy.answered.clear()
            version = open_version(f"{root}/numbers")
            version.sql(query)
            kinds = {"refs": 0, "manifest": 0, **dict.fromkeys(sizes, 0), "other": 0}
            for path, num_bytes in proxy.answered.items():
                of = [kind for kind in kinds if f"/{kind}" in path]
                kinds[of[0] if of else "other"] += num_bytes
            return version, {kind: number for kind, number in kinds.items() if number}

        _, found = read("select source, count(*) as n, avg(num_tokens) from records group by 1")
        assert found["records"] == sizes["records"]
        assert set(found) == {"refs", "manifest", "records"}
        assert sum(found.values()) < made._opened.manifest.num_bytes / 4
        _, found = read("select avg(fill) from packs")
        assert found["data"] == sizes["data"]
        assert set(found) == {"refs", "manifest", "data"}
        _, found = read("select * from ledger")
        assert set(found) == {"refs", "manifest"}
