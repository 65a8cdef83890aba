"""A store keeps the tokenizers of its versions, so any machine can show text."""

import gzip
import hashlib

import pytest
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.cli.token_display import tokenizer_of
from packhouse.errors import IntegrityError
from packhouse.store import open_store, open_version, pull_version, verify_version
from packhouse.store.commit import fetch_tokenizer, keep_tokenizer
from packhouse.store.object_keys import tokenizer_key
from packhouse.tokenize.tokenizer_loading import fingerprint_tokenizer, fingerprinted_bytes
from tests.prepared import TOKENIZER, prepare_in

pytestmark = pytest.mark.usefixtures("own_tokenizers")  # other caches fetch them from the store

ROWS = [{"instruction": f"Say {n}.", "output": f"It is {n}!"} for n in range(20)]


def publish(tmp_path, root, **settings):
    return prepare_in(
        tmp_path,
        ROWS,
        dataset="numbers",
        store=str(root),
        format={"template": "alpaca"},
        **settings,
    )


def test_every_store_keeps_a_tokenizer_and_gives_it_back(any_store):
    wanted = fingerprint_tokenizer(TOKENIZER)
    asked = []

    def read():
        asked.append(1)
        return fingerprinted_bytes(TOKENIZER)

    assert fetch_tokenizer(any_store, wanted) is None
    assert keep_tokenizer(any_store, wanted, read)
    assert keep_tokenizer(any_store, wanted, read)
    assert len(asked) == 1  # already there the second time
    files = fetch_tokenizer(any_store, wanted)
    assert files
    for name, content in files.items():
        assert (TOKENIZER / name).read_bytes() == content


def test_another_machine_shows_text_from_the_store_alone(tmp_path):
    version = publish(tmp_path, tmp_path / "store")
    elsewhere = ("--cache", str(tmp_path / "elsewhere"))
    done = CliRunner().invoke(cli, ["inspect", version.uri, *elsewhere])

    assert done.exit_code == 0
    assert "{+It is 7!<|im_end|>" in done.stdout
    assert done.stderr == ""


def test_a_switch_leaves_it_out_and_changes_no_id(tmp_path):
    private = publish(tmp_path, tmp_path / "private", publish={"keep_tokenizer": False})
    open_one = publish(tmp_path, tmp_path / "open")

    assert private.id == open_one.id
    ids = [v._opened.manifest.manifest_id for v in (private, open_one)]
    assert ids[0] == ids[1]
    assert not (tmp_path / "private" / "_tokenizers").exists()
    elsewhere = ("--cache", str(tmp_path / "elsewhere"))
    done = CliRunner().invoke(cli, ["inspect", private.uri, *elsewhere])
    assert "neither the cache nor the store has the tokenizer" in done.stderr
    assert tokenizer_of(open_one._opened, tmp_path / "third") is not None


def test_pull_brings_the_tokenizer_and_verify_misses_it(tmp_path):
    version = publish(tmp_path, tmp_path / "store")
    opened = open_version(str(tmp_path / "store"), "numbers")

    folder = pull_version(opened, tmp_path / "copy") / "tokenizer"
    assert fingerprint_tokenizer(folder) == fingerprint_tokenizer(TOKENIZER)
    assert verify_version(opened).is_intact

    kept = tmp_path / "store" / tokenizer_key(fingerprint_tokenizer(TOKENIZER))
    whole = kept.read_bytes()
    kept.unlink()
    assert "is missing. Publish the version again" in verify_version(opened).problems[0]
    kept.write_bytes(whole[:-100])
    assert "is damaged" in verify_version(opened).problems[0]
    kept.unlink()
    assert publish(tmp_path, tmp_path / "store").id == version.id
    assert verify_version(opened).is_intact


@pytest.mark.parametrize(
    "document",
    [
        b"transformers=1\ntokenizers=1\n../../evil 4\nevil",
        b"transformers=1\ntokenizers=1\nvocab.json 400\nshort",
        b"transformers=1\ntokenizers=1\n" + b"a.json 0\n" * 33,
        b"other",
    ],
)
def test_bytes_with_the_right_digest_and_no_files_are_refused(tmp_path, document):
    store, name = open_store(str(tmp_path)), hashlib.sha256(document).hexdigest()
    store.put_create(tokenizer_key(name), gzip.compress(document))
    with pytest.raises(IntegrityError, match="does not contain tokenizer files"):
        fetch_tokenizer(store, name)


def test_a_bomb_is_not_unpacked_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("packhouse.store.commit._MAX_BYTES", 2**20)
    store, bomb = open_store(str(tmp_path)), bytes(2**21)
    name = hashlib.sha256(bomb).hexdigest()
    store.put_create(tokenizer_key(name), gzip.compress(bomb))
    with pytest.raises(IntegrityError, match="is damaged"):  # its digest is that of all bytes
        fetch_tokenizer(store, name)
