"""A folder becomes a snapshot once; broken files are named; cached snapshots are checked."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from packhouse.errors import TokenizerError
from packhouse.tokenize import fingerprint_tokenizer, load_snapshot, tokenizer_loading
from packhouse.tokenize.encoders import load_tokenizer
from packhouse.tokenize.tokenizer_loading import find_snapshot


@pytest.fixture
def folder(tmp_path):
    """A small tokenizer as `save_pretrained` writes it."""
    vocab = {character: index for index, character in enumerate("abcde ")}
    tokenizer = Tokenizer(models.BPE({**vocab, "ab": 6}, [("a", "b")]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.enable_truncation(3)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_snapshot_has_the_files_of_templates_and_encoders(folder):
    snapshot = load_snapshot(folder)

    assert snapshot.class_name in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert snapshot.vocab_size == 9
    assert snapshot.added_tokens == {"<s>": 7, "</s>": 8}
    assert snapshot.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert snapshot.chat_template == "{{ messages }}"
    assert not snapshot.adds_bos
    assert Tokenizer.from_str(snapshot.backend).truncation is None


@pytest.mark.parametrize(
    ("name", "size", "adds_bos", "special"),
    [
        ("qwen2.5-instruct", 151665, False, {"eos": "<|im_end|>", "pad": "<|endoftext|>"}),
        ("qwen3", 151669, False, {"eos": "<|im_end|>", "pad": "<|endoftext|>"}),
        ("mistral-7b-instruct-v0.3", 32768, True, {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}),
        (
            "bert-base-uncased",
            30522,
            True,
            {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]"},
        ),
    ],
)
def test_real_tokenizers_are_known(name, size, adds_bos, special, real_snapshots):
    snapshot = real_snapshots(name)

    assert (snapshot.vocab_size, snapshot.adds_bos) == (size, adds_bos)
    assert snapshot.special_tokens == {f"{kind}_token": text for kind, text in special.items()}
    assert (snapshot.chat_template is None) == (name == "bert-base-uncased")
    assert snapshot.pipeline == "class"  # a class with other ids than the file is refused


def test_fingerprint_changes_with_any_tokenizer_file_and_with_no_other(folder, tmp_path):
    before = fingerprint_tokenizer(folder)
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)

    (copy / "model.safetensors").write_bytes(b"weights")
    assert fingerprint_tokenizer(copy) == before
    for name in ("chat_template.jinja", "generation_config.json", "tekken.json"):
        (copy / name).write_text("{}")
        assert fingerprint_tokenizer(copy) != before
        (copy / name).unlink()


@pytest.mark.parametrize(
    ("stated", "stops"),
    [
        (None, []),
        (7, ["<s>"]),
        ([8, 7], ["</s>", "<s>"]),
        ([7, 6, 99, -1], ["<s>"]),  # 6 is "ab", which is not an added token; the others are not ids
    ],
)
def test_generation_config_names_stop_tokens_before_the_eos(folder, tmp_path, stated, stops):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))

    snapshot = load_snapshot(folder, tmp_path)

    named = dict.fromkeys(stops, "generation_config.json")
    expected = named | ({} if "</s>" in named else {"</s>": "tokenizer"})
    assert list(snapshot.stop_tokens.items()) == list(expected.items())
    kept = find_snapshot(snapshot.fingerprint, tmp_path)
    assert kept is not None
    assert list(kept.stop_tokens.items()) == list(expected.items())


def test_without_generation_config_the_eos_stops_if_there_is_one(folder):
    assert load_snapshot(folder).stop_tokens == {"</s>": "tokenizer"}
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert load_snapshot(folder).stop_tokens == {}


def test_tekken_has_the_ids_of_mistral_common_and_its_control_tokens(tekken):
    tekkenizer = pytest.importorskip("mistral_common.tokens.tokenizers.tekken").Tekkenizer

    snapshot = load_snapshot(tekken)

    own = tekkenizer.from_file(tekken / "tekken.json")
    encode = load_tokenizer(snapshot.backend).encode
    for text in ("Hello, world 12345\n\n x", "na\u00efve \u4f60\u597d", "[1, 2]"):
        assert encode(text).ids == own.encode(text, False, False)
    named = {name: snapshot.special_tokens[name] for name in ("bos_token", "eos_token")}
    assert named == {"bos_token": "<s>", "eos_token": "</s>"}
    assert snapshot.added_tokens["[INST]"] == own.get_special_token("[INST]")
    assert snapshot.chat_template is None
    assert snapshot.stop_tokens == {"</s>": "tokenizer"}


@pytest.mark.parametrize("place", ["{folder}", "../elsewhere", "{outside}"])
def test_no_config_names_a_vocabulary_that_the_fingerprint_does_not_know(place, folder, tmp_path):
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    shutil.copy(folder / "tokenizer.json", outside / "tokenizer.4.0.json")
    shutil.copy(folder / "tokenizer.json", folder / "tokenizer.4.0.json")
    name = f"{place.format(folder=folder, outside=outside)}/tokenizer.4.0.json"
    config = folder / "tokenizer_config.json"
    named = json.loads(config.read_text()) | {"fast_tokenizer_files": [name]}
    config.write_text(json.dumps(named))

    with pytest.raises(TokenizerError, match="names another vocabulary file"):
        load_snapshot(folder)


def test_a_template_that_the_fingerprint_does_not_know_is_not_taken(folder):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    more = folder / "additional_chat_templates"
    more.mkdir()
    before = fingerprint_tokenizer(folder)
    (more / "default.jinja").write_text("{{ messages }}")

    assert fingerprint_tokenizer(folder) == before
    assert load_snapshot(folder).chat_template is None


def test_a_file_of_the_same_size_and_time_is_another_one(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    before = fingerprint_tokenizer(copy)
    file = copy / "tokenizer.json"
    state = file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))

    assert file.stat().st_size == state.st_size
    assert fingerprint_tokenizer(copy) != before


def test_no_folder_and_no_vocabulary_are_named_with_the_remedy(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer folder at '.*gone'.*save_pretrained"):
        fingerprint_tokenizer(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has no vocabulary file \(config.json\). It needs"):
        load_snapshot(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", "tokenizer.json is empty"),
        ("tokenizer.json", '{"model": {"type"', "tokenizer.json, line 1, column 18"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json: "),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json, line 1"),
        ("tokenizer_config.json", "[]", "contains a list, not an object"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template in .* be text, got 3"),
        ("tokenizer_config.json", '{"chat_template": {"default": 3}}', "must be text, got"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}}',
            "requires custom code",
        ),
        ("generation_config.json", "", "generation_config.json, line 1"),
        ("generation_config.json", "[1]", "contains a list, not an object"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "a list of ids, got '</s>'"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', r"ids, got \[1, True\]"),
    ],
)
def test_a_broken_file_is_named(folder, name, content, message):
    (folder / name).write_text(content)

    with pytest.raises(TokenizerError, match=message) as caught:
        load_snapshot(folder)
    assert str(folder) in str(caught.value)


def test_a_file_missing_next_to_a_vocabulary_is_named_in_a_sentence(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    with pytest.raises(TokenizerError, match=r"vocab.json has no merges.txt next to it"):
        load_snapshot(folder)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "NoneSuchTokenizer"}')
    with pytest.raises(TokenizerError, match=r"'NoneSuchTokenizer', which transformers .* not"):
        load_snapshot(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json, which names"):
        load_snapshot(folder)


def test_a_tokenizer_is_a_local_folder():
    with pytest.raises(TokenizerError, match=r"cannot be a URI .* Pass a local folder"):
        load_snapshot("s3://x/y")


def test_random_ids_are_refused(folder):
    file = folder / "tokenizer.json"
    parsed = json.loads(file.read_text())
    parsed["model"]["dropout"] = 0.1
    file.write_text(json.dumps(parsed))

    with pytest.raises(TokenizerError, match=r"BPE dropout 0.1.*Set model.dropout to null"):
        load_snapshot(folder)


def test_a_kept_snapshot_is_read_without_transformers(folder, tmp_path):
    snapshot = load_snapshot(folder, tmp_path / "kept")

    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from packhouse.tokenize import load_snapshot\n"
        f"snapshot = load_snapshot({str(folder)!r}, Path({str(tmp_path / 'kept')!r}))\n"
        "assert not {'transformers', 'tokenizers', 'torch'} & set(sys.modules)\n"
        "sys.stdout.write(snapshot.backend)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == snapshot.backend
    assert find_snapshot(snapshot.fingerprint, tmp_path / "kept") == snapshot
    assert find_snapshot("0" * 64, tmp_path / "kept") is None


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b.replace(b'"a"', b'"b"'), bytes])
def test_a_damaged_kept_file_is_built_again(folder, tmp_path, damage, monkeypatch):
    snapshot = load_snapshot(folder, tmp_path)
    (file,) = tmp_path.glob("tokenizer-*.json")
    good = file.read_bytes()
    file.write_bytes(damage(good) if damage is not bytes else b"")
    monkeypatch.setattr(tokenizer_loading, "_IN_PROCESS", {})

    assert load_snapshot(folder, tmp_path) == snapshot
    assert file.read_bytes() == good
