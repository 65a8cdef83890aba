"""Each message in docs/troubleshooting.md matches packhouse's output; `...` stands for any text."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse import PackedCollator, load_packed
from packhouse.cli import cli
from packhouse.errors import ContractError
from tests.docs.test_tutorial import assert_shown

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
QUESTION = "Tell me in detail how a bicycle stays upright when it moves along a straight road."
ENDLESS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ROWS = [{"instruction": f"Say {number}.", "output": f"{number}!"} for number in range(50)]
SECRET = {"instruction": "Show a key.", "output": "AKIAIOSFODNN7EXAMPLE"}
CUSTOMER = [{"role": "customer", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
FILES = {
    "rows.jsonl": ROWS,
    "bad.jsonl": [*ROWS, {"instruction": "Say 50.", "output": ""}, {"instruction": "Say 51."}],
    "names.jsonl": [{"q": "What is 2?", "a": "2"}] * 50,
    "notes.jsonl": [row | {"comment": "text that nothing reads"} for row in ROWS],
    "roles.jsonl": [{"messages": CUSTOMER}] * 20,
    "long.jsonl": [{"instruction": "Go on.", "output": "word " * 400}] * 3,
    "secret.jsonl": [*ROWS, SECRET],
    "copied.jsonl": [*ROWS, {"instruction": QUESTION, "output": "By steering."}],
    "test.jsonl": [{"question": QUESTION, "answer": "By steering."}],
}
CASES = (
    "row.jsonl",
    "rows.jsonl --set pack.seq_length=4096",
    "names.jsonl",
    "notes.jsonl",
    "bad.jsonl",
    "roles.jsonl",
    "rows.jsonl --set 'sources.0.where=score > 3'",
    "rows.jsonl --tokenizer ./models/tokenizer",
    "rows.jsonl --tokenizer ./base",
    "rows.jsonl --set format.template=./endless.jinja",
    "long.jsonl --seq-len 128",
    "long.jsonl --seq-len 128 --set pack.over_length=error",
    "secret.jsonl --set audit.quality.max_secrets=0",
    "copied.jsonl --set 'audit.benchmarks=[{path: test.jsonl}]'",
    "rows.jsonl --store s3://bucket/prefix",
)


def run(command: str) -> str:
    return CliRunner().invoke(cli, shlex.split(command)).output


def prepare(arguments: str) -> str:
    tokenizer = "" if "--tokenizer" in arguments else "--tokenizer tokenizer"
    return run(f"prepare {arguments} {tokenizer}")


@pytest.fixture
def here(home, monkeypatch):
    monkeypatch.setenv("PACKHOUSE_CACHE", str(home / "cache"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, rows in FILES.items():
        Path(name).write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    for name in ("tokenizer", "base"):
        shutil.copytree(ROOT / "deployments/demo/tokenizer", name)
    Path("base/chat_template.jinja").unlink()
    Path("endless.jinja").write_text(ENDLESS + HEADER)
    return home


@pytest.mark.parametrize(("number", "arguments"), list(enumerate(CASES)))
def test_a_message_of_prepare(number, arguments, here):
    assert_shown(MESSAGES[number], prepare(arguments))


def test_messages_about_a_version(here, monkeypatch):
    missing, moved, damaged, several, weights = MESSAGES[len(CASES) :]
    assert "published" in prepare("rows.jsonl")

    assert_shown(missing, run("show ./store/row"))

    drift = prepare(
        "rows.jsonl --set publish.max_length_drift=0.01 --set format.system='Be brief.'"
    )
    assert_shown(moved, drift)

    monkeypatch.setattr("packhouse.load.known_packs.GUARDS", [])
    monkeypatch.setattr("packhouse.load.known_packs._WARNED", set())
    with pytest.warns(UserWarning, match="several records") as caught:
        rows = load_packed("./store/rows")
    assert_shown(several, str(caught[0].message))

    with pytest.raises(ContractError) as error:
        PackedCollator()([rows[0] | {"loss_weights": [1.0] * len(rows[0]["input_ids"])}])
    assert_shown(weights, f"ContractError: {error.value}")

    for file in Path("store/rows").glob("v/*/data/*.parquet"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert_shown(damaged, run("verify ./store/rows"))
