"""The curator's exercise: faults planted in real rows are seen, left out, and gone from the next
version; no sound row goes with them."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packhouse
from tests.audit.conftest import DEMO
from tests.sources.test_odd_files import workbook

pytest.importorskip("datasketch")

COLUMNS = ("instruction", "input", "output")
NUM_EACH = 2
ALL = "instruction || ' ' || output"
WHERE = f"""
coalesce(not (has_email({ALL}) or has_phone({ALL}) or has_card({ALL}) or has_secret({ALL})
or has_html({ALL}) or has_mojibake({ALL}) or has_invisible({ALL}) or is_empty(output)
or is_refusal(output) or echoes(output, instruction) or repetition(output) > 0.6
or starts_with(output, '=')), true)
"""
COUNTED = {  # counter -> answer, of the sound row's
    "empty_answers": "#REF! ",
    "echoes": "",
    "refusals": "I'm sorry, but as an AI language model I cannot help with that.",
    "repetition": "and so on " * 40,
    "html": "<p>{}</p>",
    "mojibake": "{} It\u00e2\u20ac\u2122s so.",
    "invisible": "{}\u200b",
    "emails": "{} Write to jo@mail.org.",
    "phones": "{} Call (212) 684-4700.",
    "cards": "{} Pay with 4242 4242 4242 4242.",
    "secrets": "{} The key is AKIAIOSFODNN7EXAMPLE.",
}
OTHERS = {  # what becomes of them in the end
    "formula": "filtered",
    "blank": "quarantined",
    "over_long": "over_seq_len",
    "leak": "contaminated",
    "double": "duplicate",
    "near": "near_duplicate",
}


def planted(data: Path) -> tuple[list[dict[str, str]], dict[str, list[int]]]:
    """200 rows of Alpaca with faults; and the rows of each fault."""
    rows, seen = [], set()
    for row in json.loads((data / "alpaca_data.json").read_text())[:1500]:
        text = "".join(row.values())
        is_usual = text.isascii() and row["instruction"] not in seen and "<" not in text
        if is_usual and 100 < len(row["output"]) < 600 and len(row["instruction"]) > 40:
            rows.append({name: row[name] for name in COLUMNS})
            seen.add(row["instruction"])
    rows, of_fault = rows[:200], {}
    exam = list(map(json.loads, (data / "gsm8k_test.jsonl").read_text().splitlines()[:NUM_EACH]))
    for at, fault in enumerate([*COUNTED, *OTHERS]):
        of_fault[fault] = [50 + NUM_EACH * at + n for n in range(NUM_EACH)]
        for n, number in enumerate(of_fault[fault]):
            row, whole = rows[number], rows[n]
            said = row["output"]
            changed: dict[str, Any] = {
                "echoes": {"output": row["instruction"]},
                "formula": {"output": "=SUM(A1:A9)"},
                "blank": {"output": " "},
                "over_long": {"output": f"{said} " + " ".join(map(str, range(2000)))},
                "leak": {"instruction": exam[n]["question"], "input": ""},
                "double": whole,
                "near": {**whole, "output": whole["output"].replace(" the ", " one ", 1) + " Yes."},
            }
            row.update(changed.get(fault) or {"output": COUNTED[fault].format(said)})
    return rows, of_fault


def write(rows: list[dict[str, str]], path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".xlsx":
        path.write_bytes(workbook([list(COLUMNS), *(list(row.values()) for row in rows)]))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *(row.values() for row in rows)])


@pytest.mark.parametrize("suffix", ["csv", "xlsx", "parquet"])
def test_every_planted_fault_is_seen_and_gone_from_the_next_version(suffix, shared, tmp_path):
    if suffix == "xlsx":
        pytest.importorskip("python_calamine")
    rows, of_fault = planted(shared / "data")
    path = tmp_path / f"rows.{suffix}"
    write(rows, path)

    def prepare(source: dict[str, Any], **sections: Any) -> packhouse.Version:
        exam = {"path": str(shared / "data" / "gsm8k_test.jsonl"), "format": "question_answer"}
        audit = {"benchmarks": [exam], **sections.pop("audit")}
        return packhouse.prepare(
            [{"path": str(path), **source}],
            tokenizer=DEMO / "tokenizer",
            dataset="rows",
            store=tmp_path / "store",
            cache=tmp_path / "cache",
            progress=False,
            format={"template": "alpaca"},
            pack={"seq_len": 1024, "over_length": "drop"},
            validate={"max_quarantined": 0.1},
            audit=audit,
            **sections,
        )

    first = prepare(
        {},
        dedup={"near": "keep"},
        audit={"max_contaminated": 1, "max_duplicates": 1, "quality": {}},
    )
    counts = first.audit["quality"]["dataset"]
    assert {name: counts[name] for name in COUNTED} == dict.fromkeys(COUNTED, NUM_EACH)
    for name in COUNTED:
        assert [row["row"] for row in first.audit["quality"]["worst"][name]] == of_fault[name]
    assert first.audit["contamination"]["contaminated"] == NUM_EACH
    bad = first.sql("select row, reason from quarantine order by 1").to_pylist()
    assert bad == [{"row": n, "reason": "empty_answer"} for n in of_fault["blank"]]

    limits = {f"max_{name}": 0 for name in COUNTED}
    cleaned = prepare(
        {"where": WHERE},
        dedup={"exact": "drop", "near": "drop"},
        audit={"on_match": "drop", "quality": limits},
    )
    gone = cleaned.sql("select row, reason from dropped order by 1").to_pylist()
    meant = {number: "filtered" for name in COUNTED for number in of_fault[name]}
    meant |= {number: why for name, why in OTHERS.items() for number in of_fault[name]}
    meant |= dict.fromkeys(of_fault["blank"], "filtered")  # is_empty(output)
    assert {row["row"]: row["reason"] for row in gone} == meant
    kept = cleaned.sql("select row from records where outcome = 'kept'").column("row")
    assert sorted(kept.to_pylist()) == sorted({*range(len(rows))} - {*meant})
