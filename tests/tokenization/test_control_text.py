"""Control-token text in contents is data: text, allowed or quarantined, as the recipe says."""

import json
import random
import re

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from packhouse.recipe import TokenizeConfig
from packhouse.tokenize import tokenize_table
from packhouse.tokenize.control_tokens import any_of
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
    rows, added = [], list(snapshot.added_tokens)
    for forged in added[:: 1 + len(added) // 50]:  # Mistral has 771, nearly all alike
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


@pytest.mark.parametrize("letters", ["a", "ab", "a]^-\\[.é☃ ", "abcdefgh<|>"])
def test_a_pattern_finds_the_longest_text_at_each_place(letters):
    random_ = random.Random(7)
    texts = {"".join(random_.choices(letters, k=random_.randint(1, 70))) for _ in range(500)}
    texts |= {text[:3] for text in texts}
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    expected = re.compile("|".join(map(re.escape, longest_first)))
    searched = "".join(random_.choices(letters, k=9000)) + "".join(longest_first)
    assert re.findall(any_of(texts), searched) == expected.findall(searched)


def test_many_numbered_tokens_take_a_short_pattern():
    pattern = any_of(f"<extra_{n}>" for n in range(30_000))
    assert len(pattern) < 300
    assert re.fullmatch(pattern, "<extra_29999>")
    assert not re.search(pattern, "<extra_30000>")
