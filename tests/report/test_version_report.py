"""The report of a version: its numbers, and the effect of untrusted text in it."""

import json
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import packhouse
from packhouse.addons.ask.version_tables import VersionFiles
from packhouse.addons.report.charts_and_tables import page
from packhouse.addons.report.version_report import MAX_BYTES, measure, version_report
from packhouse.cli import cli
from packhouse.cli.token_display import Run, plain, runs_of, token_texts
from packhouse.pack.pack_columns import published_schema
from packhouse.pack.strategies import plan_packs, try_seq_lens
from packhouse.recipe import Recipe
from packhouse.records.table_schemas import PACKED
from packhouse.store.manifest import Manifest
from packhouse.store.version_reader import open_address
from packhouse.system.escaping import for_terminal
from packhouse.tokenize.encoders import read_pipeline
from packhouse.tokenize.tokenizer_loading import load_snapshot
from tests.prepared import TOKENIZER


def island(html, name):
    found = re.search(
        f'<script type="application/json" id="{name}"[^>]*>(.*?)</script>', html, re.S
    )
    assert found, name
    return json.loads(found[1])


def test_the_same_version_gives_the_same_bytes(hostile):
    again = version_report(open_address(hostile.version.uri), hostile.tokenizers)

    assert again == hostile.html
    assert len(hostile.html.encode()) < MAX_BYTES


def test_no_tag_comes_from_data(hostile):
    """Scripts are those of the page, listed by sha256 in its policy; rows add no other tag."""
    code = re.sub(r"<script>.*?</script>", "", hostile.html, flags=re.S)
    tags = Counter(re.findall(r"<(script|img|iframe|object|link|base|form)\b", code))

    assert set(tags) == {"script"}
    assert tags["script"] == code.count('<script type="application/json" id=')
    assert "window.pwned = 1</script>" not in code
    assert not re.search(r"(?:src|href)=\"?(?:https?:|javascript:)", code)
    assert "script-src 'sha256-" in code
    assert "unsafe-eval" not in code
    assert not set(code) & set("\x00\x1b\u202e\u2066\u2028\ud800")


def test_samples_hold_the_tokens_of_the_version(hostile):
    tokenizer = read_pipeline(load_snapshot(TOKENIZER).backend)
    (train,) = (s for s in island(hostile.html, "samples-data") if s["name"] == "train")
    rows = hostile.version.train

    assert train["packs"]
    for pack in train["packs"]:
        row = rows[pack["pack"]]
        for record in pack["records"]:
            start, end = record["start"], record["start"] + len(record["ids"])
            mask = np.zeros(len(record["ids"]), bool)
            for first, last in record["trained"]:
                mask[first:last] = True
            assert record["id"] in row["record_ids"]
            assert record["ids"] == row["input_ids"][start:end]
            assert mask.tolist() == [label != -100 for label in row["labels"][start:end]]
            texts = token_texts(record["ids"], tokenizer)
            assert record["texts"] == [for_terminal(text, keep_lines=True) for text in texts]


def test_left_out_rows_are_shown_with_reason_example_and_remedy(hostile):
    assert "half a pair" in hostile.html
    assert "&lt;script&gt;window.pwned = 1&lt;/script&gt;" in hostile.html
    for reason in ("empty_answer", "json", "encoding", "over_seq_len"):
        assert f"<h3>{reason} " in hostile.html
    assert "Remedy: remove the row" in hostile.html


def test_without_vega_a_report_shows_numbers_and_says_so(hostile, monkeypatch):
    monkeypatch.setattr("packhouse.addons.report.charts_and_tables.vega_bundle", lambda: None)
    html = version_report(open_address(hostile.version.uri), hostile.tokenizers)

    assert "Charts need JavaScript from the packhouse wheel" in html
    assert 'class="spec"' not in html
    assert html.count("<table><caption") == hostile.html.count("<table><caption") > 10


def test_data_for_scripts_cannot_end_them():
    html = page("t", "", [], {"d": ["</script><!--", "\ud800", "a&b"]})

    assert island(html, "d") == ["</script><!--", "\ud800", "a&b"]
    assert html.encode()


def test_other_sizes_are_planned_as_a_run_plans():
    lengths = {300: 40, 90: 100, 17: 500}
    flat = np.repeat(list(lengths), list(lengths.values()))
    found = {each.seq_len: each for each in try_seq_lens([lengths], 512, "best_fit", seed=3)}

    assert sorted(found) == [128, 256, 384, 512, 768, 1024, 2048]
    assert found[512].num_packs == plan_packs(flat, 512, "best_fit", 3).num_packs
    assert (found[256].records_too_long, found[256].tokens_too_long) == (40, 12000)
    assert found[256].num_tokens == 100 * 90 + 500 * 17

    padded = {each.seq_len: each for each in try_seq_lens([lengths], 512, "best_fit", 3, 256)}
    assert sorted(padded) == [256, 512, 768, 1024, 2048]  # multiples
    assert padded[512].num_packs == plan_packs(flat, 512, "best_fit", 3, 256).num_packs


def test_masks_are_counted_by_record_and_by_answer_in_both_layouts(tmp_path):
    """Records of 5 and 3 tokens: the first answers twice (2 and 1 tokens), the second once (2)."""
    ids = [[1, 2, 3, 4, 5, 6, 7, 8]]
    rows = {"input_ids": ids, "seq_lengths": [[5, 3]], "record_ids": [["a", "b"]]}
    ranges = pa.array([[(1, 3), (4, 5), (6, 8)]], PACKED.field("trained_ranges").type)
    layouts = {
        "labels": {**rows, "labels": [[-100, 2, 3, -100, 5, -100, 7, 8]]},
        "compact": {**rows, "trained_ranges": ranges},
    }
    manifest = Manifest(
        dataset="tiny", vid="0000", generation=0, files=(), configuration={"pack": {"seq_len": 16}}
    )
    for layout, columns in layouts.items():
        schema = published_schema(layout)
        batch = pa.record_batch([pa.array(columns[f.name], f.type) for f in schema], schema=schema)
        pq.write_table(pa.table(batch), tmp_path / "x.parquet")
        files = {"data": [(tmp_path / "x.parquet", "train")]}
        read = VersionFiles(files=files, manifest=manifest)
        found = measure(read, {"train": 1}, 100).splits["train"]
        assert found.trained == [(2, 1), (3, 1)]
        assert found.turns[:3] == [(4, 2), (1, 1), (0, 0)]
        assert found.per_pack == [(2, 1)]
        assert found.fill[10] == 1
        assert (found.shares[12], found.shares[13]) == (1, 1)
        assert found.weights == []
        (sample,) = found.samples
        assert [each["trained"] for each in sample["records"]] == [[[1, 3], [4, 5]], [[1, 3]]]


def test_a_character_of_several_tokens_is_text_of_the_last():
    pipeline = read_pipeline(load_snapshot(TOKENIZER).backend)
    byte = {pipeline.token_bytes[i].as_py(): i for i in range(len(pipeline.token_bytes))}
    ids = [byte[bytes([b])] for b in "a\U0001f600".encode()]

    assert token_texts(ids, pipeline) == ["a", "", "", "", "\U0001f600"]
    assert token_texts(ids[:3], pipeline) == ["a", "", "\ufffd"]
    assert token_texts([7, 10**6], None) == ["7 ", "1000000 "]


def test_runs_end_where_tokens_are_trained_or_special():
    pipeline = read_pipeline(load_snapshot(TOKENIZER).backend)
    byte = {pipeline.token_bytes[i].as_py(): i for i in range(len(pipeline.token_bytes))}
    ids = [byte[each] for each in (b"4", b"2", b"<|im_end|>", b"\n")] + [10**6]
    runs = runs_of(ids, np.array([False, True, True, False, False]), pipeline)

    assert [run.text for run in runs] == ["4", "2", "<|im_end|>", "\n[1000000]"]
    assert [(run.start, run.end) for run in runs] == [(0, 1), (1, 2), (2, 3), (3, 5)]
    assert [run.is_special for run in runs] == [False, False, True, False]
    assert plain(runs) == "4{+2<|im_end|>+}\n[1000000]"
    assert runs_of([], np.zeros(0, bool), pipeline) == ()


def test_text_cannot_pass_for_the_signs_of_trained_text():
    own = [Run(0, 1, "{+a", False), Run(1, 2, "b+}{+c", True), Run(2, 3, "d", True)]
    assert plain(own) == r"{\+a{+b+\}{\+cd+}"


def _samples(html):
    return [pack for split in island(html, "samples-data") for pack in split["packs"]]


def test_both_sides_of_a_pair_are_named_and_are_one_record(tmp_path):
    """3 pairs in a pack of 6 sequences: every sequence has its side and the place of its row."""
    rows = [{"prompt": f"Say {n}", "chosen": f"{n}", "rejected": "No."} for n in range(3)]
    version = _prepared(tmp_path, rows, "pairs")
    html = version.report()
    (pack,) = _samples(html)

    assert pack["num_records"] == 3
    assert [record["side"] for record in pack["records"]] == ["chosen", "rejected"] * 3
    assert all(record["place"].startswith("rows/rows.jsonl:") for record in pack["records"])
    assert "<td>3 / 3 / 3</td>" in html


def test_verdicts_and_loss_weights_are_shown(tmp_path):
    verdicts = [
        {"prompt": f"Say {n}", "completion": f"{n}", "label": bool(n % 2)} for n in range(4)
    ]
    html = _prepared(tmp_path / "kto", verdicts, "kto").report()
    sides = {record["side"] for pack in _samples(html) for record in pack["records"]}
    assert sides == {"good", "bad"}
    labels = "<td>bad</td><td class=number>2</td></tr><tr><td>good</td><td class=number>2</td>"
    assert labels in html
    assert "packhouse.load_preferences(" in html
    assert "SFTTrainer" not in html

    turns = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "a b c"}]
    rows = [{"messages": [turns[0], {**turns[1], "weight": w}]} for w in (0.25, 1)]
    weighted = _prepared(tmp_path / "weights", rows, "auto").report()
    (pack,) = _samples(weighted)
    weights = [run for record in pack["records"] for run in record["weights"]]
    trained = [run for record in pack["records"] for run in record["trained"]]
    assert [run[:2] for run in weights] == trained
    assert sorted(run[2] for run in weights) == [0.25, 1]
    assert "loss weight other than 1" in weighted
    assert "loss weight" not in html.split("<script>", 1)[0]


def test_labels_are_charted_if_classes_are_trained(tmp_path, shared):
    """There are no trained tokens to chart: 3 records of class 0, 2 of class 1."""
    rows = [{"text": f"It is {n}.", "label": n % 2} for n in range(5)]
    bert = {
        "tokenizer": str(shared / "tokenizers" / "bert-base-uncased"),
        "format": {"template": "sequence_classification"},
        "pack": {"seq_len": 16, "strategy": "none"},
    }
    html = _prepared(tmp_path, rows, "classification", **bert).report()
    shown = re.search('<section [^>]*"trained".*?</section>', html, re.S)
    assert shown
    assert "<td>label 0</td><td class=number>3</td>" in shown[0]
    assert "is trained; its tokens are not" in shown[0]
    assert "<figure" not in shown[0]
    assert "trained on: labels." in html
    assert "SFTTrainer" not in html


@pytest.mark.parametrize("strategy", ["best_fit", "concat"])
def test_trained_tokens_by_source_are_those_of_the_packs(tmp_path, strategy):
    """A long record with most of the trained tokens is dropped for its length, or cut."""
    rows = [{"instruction": f"Say {n}", "output": "a " * n} for n in (3, 5, 2000)]
    more = [{"instruction": "Say 5", "output": "a " * 5}, {"instruction": "Go", "output": "b"}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    sources = [
        {"path": str(tmp_path / "rows.jsonl")},
        {"path": str(tmp_path / "more.jsonl"), "weight": 3},
    ]
    pack, split = {"seq_len": 512, "strategy": strategy}, {"eval_fraction": 0.3}
    version = _prepared(tmp_path, rows, "alpaca", sources=sources, pack=pack, split=split)
    query = "select source, num_tokens, num_trained, times from records where times > 0"
    expected = {}
    owner = {}
    for row in version.sql(query).to_pylist():
        # Rows with equal content, of which there is one here, belong to the first source.
        source = owner.setdefault(row["num_trained"], row["source"].partition("/")[0])
        own = expected.setdefault(source, [0, 0, 0])
        for at, number in enumerate((1, row["num_tokens"], row["num_trained"])):
            own[at] += number * row["times"]

    html = version.report()

    told = re.search("<caption[^>]*>Trained tokens by source</caption>.*?</table>", html, re.S)
    assert told
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in told[0].split("<tr>")[2:]]
    assert {row[0]: [int(cell.replace(",", "")) for cell in row[1:4]] for row in cells} == expected
    side = version._opened.manifest.counts["statistics"]
    assert sum(own[2] for own in expected.values()) == sum(
        each["num_trained"] for each in side.values()
    )


def test_a_record_that_concat_cuts_is_one_record_everywhere(tmp_path):
    rows = [{"instruction": f"Say {n}", "output": "a " * n} for n in (3, 5, 300)]
    version = _prepared(tmp_path, rows, "alpaca", pack={"seq_len": 64, "strategy": "concat"})
    assert version.statistics["train"]["num_sequences"] > 3
    html = version.report()
    assert "<dt>Records packed</dt><dd>3</dd>" in html
    assert "charts count each part separately" in html
    assert "; 3 records, " in version._repr_html_()
    done = CliRunner().invoke(cli, ["stats", version.uri, "--json"])
    assert json.loads(done.stdout)["splits"][0]["records"] == 3
    words = [str(tmp_path / "rows.jsonl"), "--set", "pack.seq_len=64"]
    words += ["--set", "pack.strategy=concat", "--set", f"publish.store={tmp_path / 'other'}"]
    words += ["--tokenizer", str(TOKENIZER), "--cache", str(tmp_path / "cache")]
    again = CliRunner().invoke(cli, ["prepare", *words])
    assert re.search(r"^train +[0-9]+ +3 ", again.stdout, re.M), again.output


def _prepared(folder, rows, row_format, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe.model_validate(
        {
            "dataset": "rows",
            "sources": [{"path": str(folder / "rows.jsonl"), "format": row_format}],
            "tokenizer": str(TOKENIZER),
            "pack": {"seq_len": 512, **({"strategy": "none"} if row_format == "kto" else {})},
            "publish": {"store": str(folder / "store")},
            **settings,
        }
    )
    return packhouse.prepare(recipe, cache=folder / "cache", progress=False)
