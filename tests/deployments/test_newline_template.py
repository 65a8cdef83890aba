"""alpaca_newline.jinja: Alpaca with answers that begin at the beginning of a token."""

from pathlib import Path

import pyarrow as pa
import pytest

from packhouse.recipe import FormatConfig, SourceConfig, TokenizeConfig, ValidateConfig
from packhouse.sources import read_shard, scan_source
from packhouse.templates import Rendered, make_renderer
from packhouse.tokenization import load_snapshot, tokenize_table

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
NEWLINE = str(DEPLOYMENTS / "templates" / "alpaca_newline.jinja")


def read(path: Path, row_format: str) -> pa.Table:
    config = SourceConfig(path=str(path), format=row_format)
    shards = [read_shard(s, config, ValidateConfig(), "prompt") for s in scan_source(config)]
    return pa.concat_tables([shard.validated for shard in shards])


def render(rows: pa.Table, tokenizer: Path, template: str) -> Rendered:
    return make_renderer(FormatConfig(template=template), load_snapshot(str(tokenizer))).render(
        rows
    )


def test_the_response_header_ends_with_a_line_break_and_answer_and_end_token_are_trained(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"instruction": "Add.", "input": "1 and 2", "output": "3"}\n'
        '{"instruction": "Say hi.", "input": "", "output": "Hi!"}\n'
    )
    rendered = render(read(file, "alpaca"), DEPLOYMENTS / "demo" / "tokenizer", NEWLINE).formatted

    preamble = (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request."
    )
    texts = rendered["text"].to_pylist()
    assert texts == [
        f"{preamble}\n\n### Instruction:\nAdd.\n1 and 2\n\n### Response:\n3<|im_end|>",
        f"{preamble}\n\n### Instruction:\nSay hi.\n\n### Response:\nHi!<|im_end|>",
    ]
    spans = rendered["trained_spans"].to_pylist()
    trained = [t[s["start"] : s["end"]] for t, (s,) in zip(texts, spans, strict=True)]
    assert trained == ["3<|im_end|>", "Hi!<|im_end|>"]


@pytest.mark.parametrize(
    ("tokenizer", "num_straddling"), [("qwen2.5-instruct", 156), ("mistral-7b-instruct-v0.3", 8)]
)
def test_no_answer_begins_inside_a_token_of_the_prompt(shared, tokenizer, num_straddling):
    rows = read(shared / "data" / "alpaca_data.json", "alpaca").slice(0, 300)
    folder = shared / "tokenizers" / tokenizer
    straddling = {}
    for template in ("alpaca", NEWLINE):
        rendered = render(rows, folder, template)
        assert rendered.quarantined.num_rows == 0
        done = tokenize_table(rendered.formatted, load_snapshot(str(folder)), TokenizeConfig())
        straddling[template] = done.notes.get("straddles_start", 0)

    assert straddling == {"alpaca": num_straddling, NEWLINE: 0}
