"""Tokenizers trained in this process, real ones if available, and tables to feed them."""

import json
from collections.abc import Sequence

import pyarrow as pa
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from packhouse.records.table_schemas import FORMATTED
from packhouse.tokenize import TokenizerSnapshot, load_snapshot

CONTROL = ["<|start|>", "<|end|>"]

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30, isn't it?",
    "def f(x):\n    return x ** 2  # square\n",
    "na\u00efve caf\u00e9 \u2014 \u4f60\u597d\u4e16\u754c \u3053\u3093\u306b\u3061\u306f",
    "the cat and the hat and the bat " * 8,
]


def snapshot_of(tokenizer: Tokenizer, **special: str) -> TokenizerSnapshot:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    return TokenizerSnapshot(
        fingerprint="0" * 64,
        class_name="PreTrainedTokenizerFast",
        backend=tokenizer.to_str(),
        vocab_size=max(vocab.values()) + 1,
        added_tokens={token.content: index for index, token in added.items()},
        special_tokens=special,
        adds_bos=False,
        chat_template=None,
    )


def train_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def train_metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=["<unk>", *bytes_], limit_alphabet=40
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    parsed = json.loads(tokenizer.to_str())
    kept = [token for token in parsed["added_tokens"] if token["content"] == "<unk>"]
    tokenizer = Tokenizer.from_str(json.dumps({**parsed, "added_tokens": kept}))
    tokenizer.add_special_tokens(CONTROL)
    return tokenizer


@pytest.fixture(scope="session")
def byte_level():
    """Byte-level BPE with NFC, like Qwen's."""
    return snapshot_of(train_byte_level(), eos_token="<|end|>")


@pytest.fixture(scope="session")
def metaspace():
    """SentencePiece-like BPE with byte fallback and a dummy prefix, like Mistral's."""
    return snapshot_of(train_metaspace(), eos_token="<|end|>", unk_token="<unk>")


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def trained(request):
    snapshot = request.getfixturevalue(request.param)
    return snapshot


@pytest.fixture(scope="session")
def real_snapshots(shared, tmp_path_factory):
    cache = tmp_path_factory.mktemp("snapshots")
    return lambda name: load_snapshot(shared / "tokenizers" / name, cache)


@pytest.fixture(scope="session")
def alpaca(shared):
    text = (shared / "data" / "alpaca_data.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


Part = tuple[str, str]
"""Text and its kind: `template`, `content` or `answer` (content that is trained)."""


def formatted_table(rows: Sequence[Sequence[Part]], labels: Sequence[int | None] = ()) -> pa.Table:
    """Join the parts of each row, with their content and trained spans."""
    records = []
    for number, parts in enumerate(rows):
        text = ""
        content, trained = [], []
        for piece, kind in parts:
            span = {"start": len(text.encode()), "end": len((text + piece).encode())}
            text += piece
            if kind in ("content", "answer"):
                content.append(span)
            if kind in ("answer", "end"):
                trained.append(span)
        records.append(
            {
                "record_id": f"{number:020x}",
                "source": "s/f",
                "row": number,
                "text": text,
                "content_spans": content,
                "trained_spans": _merged(trained),
                "label": labels[number] if labels else None,
                "group_key": f"{number:020x}",
            }
        )
    return pa.Table.from_pylist(records, schema=FORMATTED)


def _merged(spans: list[dict[str, int]]) -> list[dict[str, int]]:
    merged = []
    for span in spans:
        if merged and merged[-1]["end"] == span["start"]:
            merged[-1] = {"start": merged[-1]["start"], "end": span["end"]}
        else:
            merged.append(span)
    return merged


@pytest.fixture(scope="session")
def make_formatted():
    """Build a FORMATTED table from rows of (text, kind) parts; see `formatted_table`."""
    return formatted_table


@pytest.fixture(scope="session")
def alpaca_formatted(alpaca):
    def build(snapshot: TokenizerSnapshot, number: int) -> pa.Table:
        eos = snapshot.special_tokens.get("eos_token", "[SEP]")
        return formatted_table(
            [
                [
                    ("### Instruction:\n", "template"),
                    (f"{row['instruction']} {row['input']}", "content"),
                    ("\n\n### Response:\n", "template"),
                    (row["output"], "answer"),
                    (eos, "end"),
                ]
                for row in alpaca[:number]
            ]
        )

    return build


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    """Shorten the corpus: 1 MB of one character takes toy tokenizers seconds. One test uses it."""
    monkeypatch.setattr("packhouse.tokenize.encoder_choice._LONG_RUN", 2**14)
