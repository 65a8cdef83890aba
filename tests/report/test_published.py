"""`report.html` in versions: published by default, pulled, verified, and not part of the ID."""

import pytest

import packhouse
from packhouse.addons.report.version_report import version_report
from packhouse.store import pull_version, verify_version
from packhouse.store.commit import LocalFile, publish_version
from packhouse.store.object_store import open_store
from packhouse.store.version_reader import open_address
from tests.prepared import TOKENIZER

ROWS = [{"instruction": f"Say {n}.", "output": f"{n}!"} for n in range(99)]


def test_a_version_holds_its_report(hostile, tmp_path):
    opened = open_address(hostile.version.uri)
    folder = pull_version(opened, tmp_path / "pulled")
    html = (folder / "report.html").read_text("utf-8")

    assert verify_version(opened).problems == ()
    assert f"open_version(&#x27;STORE/rows@{opened.version}&#x27;)" in html
    assert str(tmp_path) not in html  # no path of this machine
    note = "<p class=quiet>STORE is the folder or bucket that this file came from.</p>"
    again = version_report(opened, hostile.tokenizers)
    assert again.replace(opened.address, f"STORE/rows@{opened.version}") == html.replace(note, "")


def test_the_key_leaves_it_out_and_the_version_is_the_same(hostile, tmp_path):
    ids = []
    for name, report in (("a", True), ("b", False)):
        version = packhouse.prepare(
            ROWS,
            tokenizer=TOKENIZER,
            dataset="numbers",
            format={"template": "alpaca"},
            publish={"report": report},
            store=tmp_path / name,
            cache=tmp_path / f"cache-{name}",
            progress=False,
        )
        kinds = [entry.kind for entry in open_address(version.uri).manifest.files]
        assert ("report" in kinds) is report
        ids.append(version.id)
    assert ids[0] == ids[1]


@pytest.mark.parametrize("kind", ["card", "report"])
def test_another_page_is_the_same_version(kind, tmp_path):
    store = open_store(str(tmp_path / "store"))
    data = tmp_path / "data.bin"
    data.write_bytes(b"data")
    done = []
    for text in ("one", "two"):
        page = tmp_path / f"{text}.html"
        page.write_text(text)
        files = [LocalFile(data, "train"), LocalFile(page, "all", kind=kind)]  # type: ignore[arg-type]
        done.append(publish_version(store, "tiny", "aaaa", files, {"content_id": "1"}))

    assert [each.created for each in done] == [True, False]
    assert done[0].manifest == done[1].manifest
