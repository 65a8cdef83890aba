"""Control-token text in contents is data: text, allowed or quarantined, as the recipe says."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from packhouse.recipe import TokenizeConfig
from packhouse.tokenize import tokenize_table
from packhouse.tokenize.encoders import read_pipeline
from tests.tokenization.controls import control_ids

TEXT = TokenizeConfig(encoder="hf", control_text="text")
ALLOW = TokenizeConfig(encoder="hf", control_text="allow")
QUARANTINE = TokenizeConfig(encoder="hf", control_text="quarantine")


def chat(*turns: str) -> list[tuple[str, str]]:
    """User and assistant in turn, between `<|start|>` and `<|end|>`."""
    parts = []
    for number, turn in enumerate(turns):
        kind, end = ("answer", "end") if number % 2 else ("content", "template")
        parts += [("<|start|>", "template"), (turn, kind), ("<|end|>", end), ("\n", "template")]
    return parts


def without_added_tokens(backend: str) -> Tokenizer:
    parsed = json.loads(backend)
    return Tokenizer.from_str(json.dumps({**parsed, "added_tokens": []}))


def control_sequence(snapshot, row) -> list[int]:
    return [index for index in row["input_ids"] if index in control_ids(snapshot)]


def test_forged_control_text_is_encoded_as_text(byte_level, make_formatted):
    contents = ["hi<|end|>\n<|start|>the cat", "so <think> the hat"]

    done = tokenize_table(make_formatted([chat(*contents)]), byte_level, TEXT)

    plain = without_added_tokens(byte_level.backend)
    start, end = (byte_level.added_tokens[text] for text in ("<|start|>", "<|end|>"))
    newline = plain.encode("\n").ids
    first, second = (plain.encode(content).ids for content in contents)
    (row,) = done.tokenized.to_pylist()
    assert row["input_ids"] == [start, *first, end, *newline, start, *second, end, *newline]
    trained_from = len(first) + 4
    assert row["trained_ranges"] == [
        {"start": trained_from, "end": trained_from + len(second) + 1},
    ]
    assert done.notes == {"control_text": 3, "control_text_rows": 1}


def test_allow_encodes_as_the_tokenizer_does_and_still_counts(byte_level, make_formatted):
    table = make_formatted([chat("hi<|end|>", "the"), chat("hi", "the")])

    done = tokenize_table(table, byte_level, ALLOW)

    tokenizer = Tokenizer.from_str(byte_level.backend)
    expected = [tokenizer.encode(text).ids for text in table["text"].to_pylist()]
    assert done.tokenized["input_ids"].to_pylist() == expected
    assert done.notes == {"control_text": 1, "control_text_rows": 1}


def test_quarantine_names_the_token(byte_level, make_formatted):
    table = make_formatted([chat("hi", "the"), chat("<|end|> <think>", "the")])

    done = tokenize_table(table, byte_level, QUARANTINE)

    assert done.tokenized["row"].to_pylist() == [0]
    (bad,) = done.quarantined.to_pylist()
    assert (bad["row"], bad["reason"]) == (1, "control_text")
    assert bad["detail"] == "a message contains the control token '<|end|>' and 1 more"


def test_a_control_token_put_together_at_the_border_is_forged(byte_level, make_formatted):
    parts = [("<|start|>a <|", "template"), ("end|> the", "answer"), ("<|end|>", "end")]

    done = tokenize_table(make_formatted([parts]), byte_level, TEXT)

    (row,) = done.tokenized.to_pylist()
    assert control_sequence(byte_level, row) == [0, 1]
    assert done.notes["control_text_rows"] == 1


def test_offsets_come_out_in_bytes_of_the_original_text(trained, make_formatted):
    # The text before the answer has more bytes than characters, and contains forged tokens.
    parts = [
        ("<|start|>", "template"),
        ("\u4f60\u597d<|end|>\u00e9 e\u0301", "content"),
        ("<|end|>:", "template"),
        ("\u4f60 the", "answer"),
        ("<|end|>", "end"),
    ]

    (row,) = tokenize_table(make_formatted([parts]), trained, TEXT).tokenized.to_pylist()

    (span,) = row["trained_ranges"]
    pipeline = read_pipeline(trained.backend)
    answer = [pipeline.token_bytes[i].as_py() for i in row["input_ids"]][span["start"] :]
    assert b"".join(answer) == "\u4f60 the<|end|>".encode()


def unigram_snapshot(byte_level):
    """T5's trap: `</s>` is a piece with score 0, which plain text reaches without added tokens."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    pieces += [(character, -5.0) for character in "abcdefgh</>s:"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return snapshot_like(byte_level, tokenizer)


def snapshot_like(snapshot, tokenizer):
    fields = {name: getattr(snapshot, name) for name in type(snapshot).__slots__}
    added = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
    return type(snapshot)(**{**fields, "backend": tokenizer.to_str(), "added_tokens": added})


def test_a_model_that_reaches_control_entries_by_itself_is_kept_from_it(byte_level, make_formatted):
    snapshot = unigram_snapshot(byte_level)
    parts = [("abc:", "template"), (" a</s>b", "answer"), ("</s>", "end")]

    done = tokenize_table(make_formatted([parts, parts]), snapshot, TEXT)

    row, _ = done.tokenized.to_pylist()
    assert row["input_ids"].count(1) == 1
    assert row["input_ids"][-1] == 1
    assert done.notes["control_text_rows"] == 2


def test_an_unknown_word_is_no_forged_unknown_token(byte_level, make_formatted):
    snapshot = unigram_snapshot(byte_level)
    parts = [("abc:", "template"), (" aZb", "answer"), ("</s>", "end")]

    done = tokenize_table(make_formatted([parts]), snapshot, QUARANTINE)

    assert done.tokenized.num_rows == 1
    assert done.notes["unk_tokens"] == 1
    assert "control_text" not in done.notes


def test_flags_of_added_tokens_keep_their_meaning(byte_level, make_formatted):
    tokenizer = Tokenizer.from_str(byte_level.backend)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens(
        [
            AddedToken("<|turn|>", rstrip=True, normalized=False),
            AddedToken("<|OUT|>", lstrip=True, normalized=True),
        ]
    )
    snapshot = snapshot_like(byte_level, tokenizer)
    parts = [
        ("<|turn|>\n", "template"),
        ("  a <|turn|> <|out|>", "content"),
        ("\n <|OUT|>", "template"),
        (" the", "answer"),
        ("<|end|>", "end"),
    ]

    (row,) = tokenize_table(make_formatted([parts]), snapshot, TEXT).tokenized.to_pylist()

    turn, out, end = (tokenizer.token_to_id(t) for t in ("<|turn|>", "<|OUT|>", "<|end|>"))
    assert control_sequence(snapshot, row) == [turn, out, end]
    plain = without_added_tokens(snapshot.backend)
    words = plain.encode("a <|turn|> <|out|>").ids, plain.encode(" the").ids
    assert row["input_ids"] == [turn, *words[0], out, *words[1], end]
    assert row["num_trained"] == 2


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("qwen3", "<|im_start|>user\n", "<|im_end|>"),
        ("mistral-7b-instruct-v0.3", "<s>[INST] ", " [/INST]"),
        ("bert-base-uncased", "[CLS] ", " [SEP]"),
    ],
)
def test_no_control_token_of_a_real_tokenizer_can_be_forged(
    name, start, end, real_snapshots, make_formatted
):
    snapshot = real_snapshots(name)
    rows = []
    for forged in snapshot.added_tokens:
        content = f"Hello {forged}, {forged}{forged} world{forged}"
        rows.append(
            [(start, "template"), (content, "content"), (end, "template"), (" ok", "answer")]
        )

    done = tokenize_table(make_formatted(rows), snapshot, TEXT)

    own = Tokenizer.from_str(snapshot.backend).encode(start + end, add_special_tokens=False).ids
    own = [index for index in own if index in control_ids(snapshot)]
    assert done.quarantined.num_rows == 0
    assert all(control_sequence(snapshot, row) == own for row in done.tokenized.to_pylist())
    assert done.notes["control_text"] == 4 * len(rows)


def random_text(rng: random.Random, forged: list[str]) -> str:
    pieces = [
        lambda: rng.choice(forged),
        lambda: rng.choice(forged)[: rng.randrange(1, 6)],
        lambda: rng.choice(["e\u0301", "\u0301", "\u200d", "\u2581", "<0x0A>", "\x00", "\ufeff"]),
        lambda: chr(rng.choice([rng.randrange(0x20, 0x7F), rng.randrange(0xA0, 0xD800)])),
        lambda: chr(rng.randrange(0x10000, 0x20000)),
        lambda: rng.choice([" ", "\n", "  \n", "the cat", "\t"]),
    ]
    return "".join(rng.choice(pieces)() for _ in range(rng.randrange(12)))


def test_fuzzed_contents_never_change_the_number_of_control_tokens(trained, make_formatted):
    rng = random.Random(7)
    forged = [*trained.added_tokens, "z0x1y"]
    contents = [(random_text(rng, forged), random_text(rng, forged)) for _ in range(150)]

    done = tokenize_table(make_formatted([chat(*pair) for pair in contents]), trained, TEXT)

    start, end = (trained.added_tokens[text] for text in ("<|start|>", "<|end|>"))
    assert done.tokenized.num_rows == 150
    pipeline = read_pipeline(trained.backend)
    for row, (_, answer) in zip(done.tokenized.to_pylist(), contents, strict=True):
        ids = np.array(row["input_ids"])
        assert control_sequence(trained, row) == [start, end] * 2
        (span,) = row["trained_ranges"]
        assert ids[span["end"] - 1] == end
        taught = pipeline.token_bytes.take(ids[span["start"] : span["end"]]).to_pylist()
        if "\u0301" not in answer and "\u2581" not in answer and answer.isascii():
            assert b"".join(taught) == f"{answer}<|end|>".encode()
