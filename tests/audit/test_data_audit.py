"""`packhouse.audit` on rows of TRL, Axolotl, LLaMA-Factory and people; one test for each fault."""

import gzip
import json
import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import packhouse
from packhouse.errors import SourceError
from tests.prepared import TOKENIZER

Rows = list[dict[str, Any]]
END = 151645  # <|im_end|>


@pytest.fixture(scope="module")
def qwen(shared):
    return str(shared / "tokenizers/qwen2.5-instruct")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def conversations(shared):
    rows = json.loads((shared / "data/alpaca_data.json").read_text())[:40]
    return [
        [
            {"role": "user", "content": f"{row['instruction']}\n{row['input']}"},
            {"role": "assistant", "content": row["output"]},
        ]
        for row in rows
    ]


@pytest.fixture(scope="module")
def good(qwen, conversations):
    """Rows as Axolotl writes them before packing: the answer and its end token are trained."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen)
    rows = []
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=False
        )
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert ids[-2] == END
        labels = [-100] * len(prompt) + ids[len(prompt) : -1] + [-100]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


@pytest.fixture
def audited(qwen, cache):
    def run(data, tokenizer=qwen, **more):
        return packhouse.audit(data, tokenizer, cache=cache, progress=False, **more)

    return run


def numbers(report):
    return {finding.name: finding.number for finding in report.findings}


def copied(rows):
    return [{name: list(values) for name, values in row.items()} for row in rows]


def joined(rows, *extra):
    """Join several rows into one, with columns that mark the boundaries."""
    lengths = [len(row["input_ids"]) for row in rows]
    whole = {
        name: [value for row in rows for value in row[name]] for name in ("input_ids", "labels")
    }
    made = {
        "position_ids": [place for length in lengths for place in range(length)],
        "attention_mask": [n + 1 for n, length in enumerate(lengths) for _ in range(length)],
        "ones": [1] * sum(lengths),
        "seq_lengths": lengths,
        "cu_seqlens": np.cumsum([0, *lengths]).tolist(),
    }
    names = {"ones": "attention_mask"}
    return whole | {names.get(name, name): made[name] for name in extra}


def test_sound_rows_of_any_container_and_any_boundaries_have_no_finding(audited, good, tmp_path):
    from datasets import Dataset, DatasetDict

    table = pa.Table.from_pylist(good)
    pq.write_table(table, tmp_path / "rows.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in good)
    (tmp_path / "rows.json").write_text(json.dumps(good))
    DatasetDict(train=Dataset.from_list(good)).save_to_disk(tmp_path / "saved")

    class Torchlike:
        def __len__(self):
            return len(good)

        def __getitem__(self, number):
            return {name: np.array(values) for name, values in good[number].items()}

    tokens = sum(len(row["input_ids"]) for row in good)
    files = [tmp_path / name for name in ("rows.json", "saved")]
    (tmp_path / "zipped").mkdir()
    for name, part in (("a.jsonl.gz", lines.encode()), ("b.json.gz", b'{"num_rows": 40}')):
        (tmp_path / "zipped" / name).write_bytes(gzip.compress(part))
    (tmp_path / "rows").write_text(lines.replace("\n", "\r\n"))
    first = json.dumps({"text": "x" * 2**23, **good[0]})
    (tmp_path / "long.jsonl").write_text(first + lines.removeprefix(json.dumps(good[0])))
    files += [tmp_path / name for name in ("zipped", "rows", "long.jsonl", "*.parquet")]
    for data in (*files, good, table, Dataset.from_list(good), Torchlike(), table.to_pandas()):
        report = audited(data)
        assert report.is_clean, (data, report)
        assert (report.counts["rows"], report.counts["tokens"]) == (40, tokens), data

    for extra in (["position_ids"], ["attention_mask"], ["seq_lengths"], ["cu_seqlens"],
                  ["attention_mask", "position_ids"], ["seq_lengths", "position_ids"]):  # fmt: skip
        packed = [joined(good[at : at + 4], *extra) for at in range(0, 40, 4)]
        report = audited(packed)
        assert report.is_clean, (extra, report)
        assert (report.counts["rows"], report.counts["records"]) == (10, 40), extra


def test_masks_with_other_names_show_what_is_trained(audited, good):
    for name in ("completion_mask", "assistant_masks", "loss_mask", "loss_weights"):
        rows = [
            {"input_ids": row["input_ids"], name: [int(label != -100) for label in row["labels"]]}
            for row in good
        ]
        assert audited(rows).is_clean, name
    both = [
        {"input_ids": row["input_ids"], "labels": row["input_ids"],
         "assistant_masks": [label != -100 for label in row["labels"]]}
        for row in good
    ]  # fmt: skip
    assert audited(both).is_clean


def padded(rows, pad, label=-100, attention=None, in_front=False):
    """Rows of equal length; without `attention` they have no mask."""
    fills = {"input_ids": pad, "labels": label}
    fills |= {} if attention is None else {"attention_mask": attention}
    longest = max(len(row["input_ids"]) for row in rows)
    made = []
    for row in rows:
        number = longest - len(row["input_ids"])
        filled = {name: [value] * number for name, value in fills.items()}
        made.append({
            name: values + row[name] if in_front else row[name] + values
            for name, values in filled.items()
        })  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("pad", "attention", "in_front"),
    [(151643, None, False), (END, 1, False), (151643, 1, True), (END, None, True)],
)
def test_trained_padding_is_found_and_nothing_else(audited, good, pad, attention, in_front):
    trained = audited(padded(good, pad, pad, attention, in_front))
    longest = max(len(row["input_ids"]) for row in good)
    number = sum(len(row["input_ids"]) < longest - (in_front and pad == END) for row in good)

    assert numbers(trained) == {"padding": number}, trained
    assert trained.counts["tokens"] == sum(len(row["input_ids"]) for row in good)
    untrained = numbers(audited(padded(good, pad, -100, attention, in_front)))
    assert untrained == ({"padding": number} if in_front else {})


def _begin(row):
    return next(n for n, label in enumerate(row["labels"]) if label != -100)


def _set(number, name, change):
    """Change a column of one row."""

    def spoil(rows):
        rows[number][name] = change(rows[number][name])
        return rows

    return spoil


def _relabel(ignored):
    return _set(0, "labels", lambda labels: [ignored if x == -100 else x for x in labels])


def _untrained_end(rows):
    for row in rows[:2]:
        row["labels"][row["input_ids"].index(END, len(row["input_ids"]) - 3)] = -100
        row["labels"][-1] = -100
    return rows


def _without_end(rows):
    for number in (5, 6):
        rows[number] = {name: values[:-2] for name, values in rows[number].items()}
    return rows


def _train(place):
    """Also train a token of the first row."""

    def spoil(rows):
        at = place(rows[0])
        rows[0]["labels"][at] = rows[0]["input_ids"][at]
        return rows

    return spoil


def _crossing(rows):
    row, at = joined(rows[:2], "position_ids"), len(rows[0]["input_ids"])
    row["labels"][at] = row["input_ids"][at]
    return [row]


def _positions(make, *more):
    def spoil(rows):
        row = joined(rows[:3], "position_ids", *more)
        return [row | {"position_ids": make(len(row["labels"]))}]

    return spoil


def _wrong_lengths(rows):
    row = joined(rows[:3], "seq_lengths")
    row["seq_lengths"][-1] += 1
    return [row, *rows[3:]]


def _joined_by_attention(rows):
    return [joined(rows[:3], "position_ids", "ones"), *({**r, "position_ids": None} for r in rows)]


def _no_labels(rows):
    return [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows[:2]] + [
        {**row, "labels": None} for row in rows[2:]
    ]


def _null_among_labels(rows):
    rows[0]["labels"][5] = rows[1]["labels"][-3] = None
    rows[2]["attention_mask"][5] = None
    return rows


def _hidden(rows):
    rows[0]["attention_mask"][5] = 0
    rows[1]["attention_mask"] = [0] * len(rows[1]["attention_mask"])
    return rows


def _foreign(rows):
    rows[0]["input_ids"][40] = rows[0]["labels"][40] = 10**6
    return rows


EMPTY = [{"input_ids": [], "labels": []}, {"input_ids": [151643] * 3, "labels": [-100] * 3}]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (_set(3, "labels", lambda labels: [-100] * len(labels)), {"untrained": 1}),
        (_untrained_end, {"untrained_ends": 2}),
        (_without_end, {"unended": 2}),
        (_train(lambda row: 30), {"trained_prompts": 1}),
        (_train(lambda row: _begin(row) - 2), {"trained_headers": 1}),  # `assistant`
        (_positions(lambda size: list(range(size)), "seq_lengths"), {"positions": 1}),
        (_wrong_lengths, {"boundaries": 1, "leaks": 1}),
        (lambda rows: [joined(rows[:3]), *rows[3:]], {"leaks": 1}),
        (_joined_by_attention, {"leaks": 1, "duplicates": 3}),
        (_crossing, {"crossing": 1, "trained_prompts": 1}),
        (_set(0, "labels", lambda labels: [*labels[1:], -100]), {"mislabeled": 1}),
        (_relabel(-1), {"mislabeled": 1}),
        (_relabel(-200), {"mislabeled": 1}),
        (_set(0, "labels", lambda labels: labels[:-1]), {"uneven": 1}),
        (_hidden, {"hidden": 2}),
        (_positions(lambda size: [0] * size), {"positions": 1, "leaks": 1}),
        (lambda rows: rows + EMPTY, {"empty": 2}),
        (_set(3, "labels", lambda labels: None), {"unmasked": 1, "trained_prompts": 1}),
        (_no_labels, {"unmasked": 40, "trained_prompts": 40}),
        (_null_among_labels, {"uneven": 3}),
        (_foreign, {"foreign_ids": 1}),
        (lambda rows: [*rows, rows[0], rows[0]], {"duplicates": 2}),
    ],
)
def test_each_fault_is_found_and_shown(spoil, found, audited, good):
    report = audited(spoil(copied(good)))

    for name, number in found.items():
        assert report.counts[name] == number, report
    for finding in report.findings:
        assert finding.name in (*found, "trained_headers", "untrained_ends"), report
        assert finding.examples
    assert not report.is_clean


def spans(report):
    """Count trained spans: all, after a header, ending in a stop token, with one stop token."""
    names = ("spans", "spans_after_header", "spans_stopped", "spans_of_one_stop")
    return tuple(report.counts[name] for name in names)


def stopped(rows):
    """The rows, cut after their last end token."""
    made = []
    for row in rows:
        end = len(row["input_ids"]) - row["input_ids"][::-1].index(END)
        made.append({name: row[name][:end] for name in ("input_ids", "labels")})
    return made


def test_spans_are_compared_with_headers_and_stop_tokens(audited, good):
    def of(change):
        rows = stopped(copied(good))
        for row in rows[:5]:
            change(row["input_ids"], row["labels"], _begin(row))
        return spans(audited(rows))

    def late(ids, labels, begin):
        labels[begin] = -100

    def early(ids, labels, begin):
        labels[begin - 1] = ids[begin - 1]

    def without_end(ids, labels, begin):
        labels[-1] = -100

    def behind_end(ids, labels, begin):
        ids.append(198)
        labels.append(198)

    def another_end(ids, labels, begin):
        ids.insert(begin + 1, END)
        labels.insert(begin + 1, END)

    assert of(lambda ids, labels, begin: None) == (40, 40, 40, 40)
    assert of(late) == of(early) == (40, 35, 40, 40)
    assert of(without_end) == (40, 40, 35, 40)
    assert of(behind_end) == (40, 40, 35, 35)
    assert of(another_end) == (40, 40, 40, 35)
    report = audited(stopped(copied(good)))
    assert report.summary()[2] == (
        "of 40 trained spans, 40 follow a generation header, 40 end with a stop token, "
        "40 contain no other"
    )


def test_a_token_that_ends_turns_and_stops_nothing_is_found(audited, conversations, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|quad_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '<|im_end|>' if loop.last and m.role == 'assistant' else '<|quad_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    talk = [*conversations[0], *conversations[1]]
    ids = tokenizer.apply_chat_template(talk, return_dict=False)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|quad_end|>"])
    labels = [-100] * len(ids)
    for number in (1, 3):
        prompt = tokenizer.apply_chat_template(
            talk[:number], add_generation_prompt=True, return_dict=False
        )
        begin = len(prompt)
        end = next(n for n in range(begin, len(ids)) if ids[n] in ends) + 1
        labels[begin:end] = ids[begin:end]
    found = numbers(audited([{"input_ids": ids, "labels": labels}], str(tmp_path)))
    assert found == {"other_ends": 1}


def test_bos_twice_and_bos_missing(audited, conversations, shared):
    from transformers import AutoTokenizer

    folder = str(shared / "tokenizers/mistral-7b-instruct-v0.3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for messages in conversations:
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        begin = ids.index(4) + 1  # [/INST]
        rows.append({"input_ids": ids, "labels": [-100] * begin + ids[begin:]})
    assert audited(rows, folder).is_clean

    rows[0] = {"input_ids": [1, *rows[0]["input_ids"]], "labels": [-100, *rows[0]["labels"]]}
    rows[1] = {name: values[1:] for name, values in rows[1].items()}
    assert numbers(audited(rows, folder)) == {"double_bos": 1, "missing_bos": 1}

    whole = {name: [v for row in rows[2:5] for v in row[name]] for name in ("input_ids", "labels")}
    assert numbers(audited([whole, *rows[5:]], folder)) == {"leaks": 1}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers, with TRL's defaults
def test_rows_prepared_by_trl(audited, conversations, shared, tmp_path):
    folder = str(shared / "tokenizers" / "qwen3")
    prepared = _prepared_by_trl(folder, conversations, tmp_path)
    report = audited(prepared["packed"], folder)
    # TRL's training templates also train the line break after the end token.
    assert numbers(report) == {"past_stops": 40}, report
    assert report.counts["records"] == 40
    wrapped = audited(prepared["wrapped"], folder)
    assert wrapped.counts["leaks"] > wrapped.counts["rows"] / 2, wrapped
    assert wrapped.counts["truncated"]


def _prepared_by_trl(folder, conversations, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads))
    settings = {
        "packed": {"assistant_only_loss": True, "packing": True, "max_length": 512},
        "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 256},
    }
    made = {}
    for how, more in settings.items():
        args = trl.SFTConfig(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **more
        )
        rows = Dataset.from_list([{"messages": messages} for messages in conversations])
        trainer = trl.SFTTrainer(
            model=model, args=args, train_dataset=rows, processing_class=tokenizer
        )
        made[how] = trainer.train_dataset
    return made


def test_a_published_version_has_no_finding(audited, cache, qwen, conversations, tmp_path):
    rows = [{"messages": messages} for messages in conversations]
    for layout in ("labels", "compact"):
        version = packhouse.prepare(
            rows, tokenizer=qwen, seq_len=512, store=tmp_path / layout, dataset="own",
            publish={"layout": layout}, cache=cache, progress=False,
        )  # fmt: skip
        files = sorted((tmp_path / layout / "own/v").glob("*/data/*.parquet"))
        every = (version, version.train, f"{tmp_path / layout}/own", files)
        for data in every if layout == "labels" else every[:1]:
            report = audited(data)
            assert report.is_clean, report
            assert report.counts["records"] == 40


def test_raw_rows_are_audited_as_prepare_would(audited, conversations, tmp_path):
    rows = [{"messages": messages} for messages in conversations]
    report = audited([*rows, rows[0], {"messages": []}, {"messages": [{"role": "user"}]}])

    assert report.data == "raw"
    assert numbers(report) == {"duplicates": 1, "quarantined": 2}
    shown = {finding.name: finding.examples for finding in report.findings}
    assert "row 0" in shown["duplicates"][0].place
    assert any(run.is_trained for run in shown["duplicates"][0].runs)
    assert shown["quarantined"][0].detail
    assert not list(tmp_path.iterdir())


def test_a_report_escapes_text_of_rows(audited, qwen):
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(qwen)("<script>alert(1)</script>\x1b[31m")["input_ids"]
    report = audited([{"input_ids": ids, "labels": [-100] * len(ids)}])

    assert "<script>" not in report._repr_html_()
    assert "&lt;script&gt;" in report._repr_html_()
    assert "\x1b" not in repr(report)
    assert "\\x1b[31m" in repr(report)
    assert json.loads(json.dumps(report.to_json()))["counts"]["untrained"] == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [True, False]}, "'input_ids' contains booleans"),
        ({"input_ids": [5, 6], "labels": [True, False]}, "'labels' contains booleans"),
        ({"input_ids": [5, 6.5], "labels": [5, 6]}, "row 1: column 'input_ids' holds 6.5"),
        ({"input_ids": [[5, 6]]}, "'input_ids' holds list<item: list<item: int64>>"),
        ({"input_ids": [5, 6], "labels": ["5", "6"]}, "'labels' holds list<item: string>"),
    ],
)
def test_columns_that_hold_no_whole_numbers_are_refused_by_name(audited, row, said):
    empty = {name: [] for name in row}
    with pytest.raises(SourceError, match=re.escape(said)):
        audited([empty, row])


def test_rows_without_ids_are_empty_and_masks_may_be_booleans(audited):
    assert numbers(audited([{"input_ids": []}, {"input_ids": None}])) == {"empty": 2}
    masked = {"input_ids": [5, 6, END], "assistant_masks": [False, True, True]}
    assert audited([masked]).counts["trained_tokens"] == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([[5], [6]], "row 1: column 'labels' holds a list with [5], not a list of numbers"),
        (5, "row 1: column 'labels' holds 5, not a list of numbers"),
    ],
)
def test_a_row_of_another_kind_than_the_others_is_named(audited, value, said, tmp_path):
    rows = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [5, 6], "labels": value}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (rows, tmp_path / "rows.jsonl"):
        with pytest.raises(SourceError, match=re.escape(said)):
            audited(data)
