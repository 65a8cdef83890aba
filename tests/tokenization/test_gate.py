"""A fast encoder is used only if it gives HF's ids."""

import unicodedata
from dataclasses import replace

import pyarrow as pa
import pytest

from packhouse.errors import TokenizerError
from packhouse.recipe import TokenizeConfig
from packhouse.tokenize import encoder_choice, tokenize_table
from packhouse.tokenize.encoder_choice import adversarial_texts, sample_texts, short_texts
from packhouse.tokenize.encoders import EncoderError, GigatokenEncoder, HFEncoder, read_pipeline

FAST = ["qwen3", "mistral-7b-instruct-v0.3"]


class Sabotaged:
    """Gigatoken's name and HF's ids, except for one id where `trigger` occurs."""

    name = "gigatoken"
    version = "0.0.0"
    is_reference = False

    def __init__(self, snapshot, trigger):
        self.reference = HFEncoder(snapshot.backend)
        self.trigger = trigger

    def encode(self, texts):
        ids, offsets = self.reference.encode(texts)
        ids = ids.copy()
        for row, text in enumerate(texts.to_pylist()):
            if self.trigger in text and offsets[row + 1] > offsets[row]:
                ids[offsets[row + 1] - 1] ^= 1
        return ids, offsets


@pytest.fixture(autouse=True)
def _much_text(monkeypatch):
    """Use a fast encoder for texts of any size."""
    monkeypatch.setattr(encoder_choice, "FEW_BYTES", -1)


@pytest.fixture
def sabotage(monkeypatch):
    def put(encoder):
        def load(backend):
            if isinstance(encoder, Exception):
                raise encoder
            return encoder

        load.holds = lambda backend: False
        monkeypatch.setattr(GigatokenEncoder, "load", staticmethod(load))

    return put


@pytest.fixture
def table(make_formatted):
    rows = [[("a", "template"), (f" the {n}", "answer"), ("<|end|>", "end")] for n in range(30)]
    return make_formatted(rows)


@pytest.mark.parametrize("name", FAST)
def test_gigatoken_passes_on_real_tokenizers(name, real_snapshots, alpaca_formatted):
    snapshot = real_snapshots(name)
    table = alpaca_formatted(snapshot, 1000)

    fast = tokenize_table(table, snapshot, TokenizeConfig(encoder="fast"))
    reference = tokenize_table(table, snapshot, TokenizeConfig(encoder="hf"))

    assert fast.encoder["name"] == "gigatoken"
    assert fast.encoder["gate"] == "passed"
    assert fast.encoder["sample_size"] >= 30
    assert reference.encoder["name"] == "tokenizers"
    assert reference.encoder["gate"] == "not asked"
    assert fast.tokenized.equals(reference.tokenized)
    assert fast.notes == reference.notes


# Gigatoken uses Unicode 17, HF 16 and its normalizer 9.
NEW_LETTERS = ["\U0001e6d0's", "\U00032ea2's \U000323b0'll", "\u088f's", "\U00016ea1's"]
NEW_MARKS = ["a\u089c\u0323", "\u0f37\u1df8x\u0323", "e\u1aca\u0327 \u1df7\u0325"]


@pytest.mark.parametrize("name", FAST)
def test_rows_on_which_libraries_may_disagree_are_left_to_hf(name, real_snapshots, make_formatted):
    snapshot = real_snapshots(name)
    texts = [*NEW_LETTERS, *NEW_MARKS, "e\u0301", "the cat \u4f60 \U0001f600"]
    table = make_formatted([[(f"a {text}", "template"), (f" {text}", "answer")] for text in texts])

    fast = tokenize_table(table, snapshot, TokenizeConfig(encoder="fast"))
    reference = tokenize_table(table, snapshot, TokenizeConfig(encoder="hf"))

    assert fast.tokenized.equals(reference.tokenized)
    assert fast.notes == reference.notes
    assert 7 <= fast.encoder["rows_by_hf"] <= 8  # Mistral has no normalizer for the eighth
    assert reference.encoder["rows_by_hf"] == 0


def test_the_fixed_corpus_holds_every_known_trap(byte_level, monkeypatch):
    monkeypatch.undo()
    texts = adversarial_texts(read_pipeline(byte_level.backend))
    everything = "".join(texts)

    assert max(map(len, texts)) == 2**17
    traps = ["   ", "\n\n", "\t", "\u200d", "\u0301", "\u212b", "\x00", "\x7f", "<|end|>", "0x1F"]
    assert [trap for trap in traps if trap not in everything] == []
    scripts = {unicodedata.name(character, "NONE").split()[0] for character in set(everything)}
    known = "LATIN GREEK CYRILLIC HEBREW ARABIC DEVANAGARI THAI HANGUL CJK TELUGU YI RUNIC ADLAM"
    assert set(known.split()) <= scripts
    assert len(scripts) > 100


def why_refused(table, snapshot):
    """The reason for which HF encoded the table instead."""
    done = tokenize_table(table, snapshot, TokenizeConfig())
    assert done.encoder["name"] == "tokenizers"
    reference = tokenize_table(table, snapshot, TokenizeConfig(encoder="hf"))
    assert done.tokenized.equals(reference.tokenized)
    return done.encoder["gate"]


DIFFERS = "failed: gigatoken 0.0.0 gives different ids than HF for "


def test_an_encoder_that_fails_on_the_fixed_corpus_is_refused(byte_level, table, sabotage):
    sabotage(Sabotaged(byte_level, "\u200d"))  # emoji with ZWJ: none in the data

    assert why_refused(table, byte_level).startswith(DIFFERS)


def test_an_encoder_that_fails_on_the_data_is_refused(byte_level, table, sabotage):
    sabotage(Sabotaged(byte_level, "the 17<|end|>"))

    assert "for 'a the 17<|end|>': token" in why_refused(table, byte_level)


def test_a_fault_that_no_sample_shows_is_caught_by_the_round_trip(
    byte_level, make_formatted, sabotage
):
    rows = [[("a", "template"), (f" the {n}" * 200, "answer")] for n in range(300)]
    table = make_formatted(rows)
    sampled = sample_texts(table["text"])
    missed = next(n for n in range(300) if table["text"][n].as_py() not in sampled)
    sabotage(Sabotaged(byte_level, f"a the {missed} the"))

    assert why_refused(table, byte_level).startswith(DIFFERS)


def test_fast_is_an_error_where_it_cannot_be_used(byte_level, table, sabotage):
    sabotage(EncoderError("gigatoken 0.0.0 cannot read this tokenizer: no"))

    with pytest.raises(TokenizerError, match=r"cannot read this .* Set tokenize.encoder to 'auto'"):
        tokenize_table(table, byte_level, TokenizeConfig(encoder="fast"))
    done = tokenize_table(table, byte_level, TokenizeConfig())
    assert done.encoder["gate"] == "failed: gigatoken 0.0.0 cannot read this tokenizer: no"


def test_wordpiece_falls_back_with_a_reason(real_snapshots, alpaca_formatted):
    snapshot = real_snapshots("bert-base-uncased")

    said = why_refused(alpaca_formatted(snapshot, 30), snapshot)
    assert said == "failed: a WordPiece tokenizer does not keep its text"


def test_little_text_goes_to_hf_at_once(byte_level, table, monkeypatch):
    monkeypatch.undo()
    assert why_refused(table, byte_level).startswith("not asked: HF encodes a text this short")


def test_the_verdict_on_the_fixed_corpus_is_kept_and_checked(
    byte_level, table, sabotage, tmp_path, monkeypatch
):
    calls = []
    made = encoder_choice.adversarial_texts
    monkeypatch.setattr(encoder_choice, "adversarial_texts", lambda p: calls.append(1) or made(p))
    sabotage(Sabotaged(byte_level, "\u200d"))

    first = tokenize_table(table, byte_level, TokenizeConfig(), cache=tmp_path)
    second = tokenize_table(table, byte_level, TokenizeConfig(), cache=tmp_path)
    assert first.encoder == second.encoder
    assert len(calls) == 1

    (file,) = tmp_path.glob("gate-*.json")
    file.write_bytes(file.read_bytes().replace(b"gives different", b"gives equal"))
    assert tokenize_table(table, byte_level, TokenizeConfig(), cache=tmp_path).encoder == (
        first.encoder
    )
    assert len(calls) == 2


def test_the_sample_is_small_spread_and_looks_at_foreign_rows():
    texts = ["ascii " * 20] * 5000
    texts[4321] = "caf\u00e9"
    texts[100] = "x" * 10**6

    sample = sample_texts(pa.chunked_array([texts]))

    assert "caf\u00e9" in sample
    assert 50 < len(sample) <= 200
    assert sum(map(len, sample)) < 120_000
    assert sample == sample_texts(pa.chunked_array([texts[:7], texts[7:]]))
    assert sample_texts(pa.chunked_array([], pa.string())) == []


def test_of_very_many_added_tokens_some_are_tested(byte_level):
    pipeline = read_pipeline(byte_level.backend)
    many = replace(pipeline, added=pipeline.added[:1] * 300_000)
    assert len(short_texts(many)) < 20_000 + len(short_texts(pipeline))
