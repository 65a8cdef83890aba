"""Tokenizers beside the versions: a store keeps each one once, so a version is read anywhere.

An object holds the very bytes whose sha256 is the tokenizer's fingerprint, compressed:

    transformers=5.1.0
    tokenizers=0.22.1
    merges.txt 1671839
    <1,671,839 bytes>tokenizer_config.json 7305
    <7,305 bytes>...

So its name is its digest: `zcat <fingerprint>.gz | sha256sum` gives it back, and a version's
manifest, which says the fingerprint, vouches for the files. Qwen 2.5 takes 2.1 MB (1.8 at zlib's
level 6, which needs 0.2 s more).
Garbage collection leaves these objects alone: a publisher of any dataset may be about to name one.
"""

import gzip
import hashlib
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from packhouse.errors import IntegrityError
from packhouse.store.layout import tokenizer_key
from packhouse.store.objects import (
    MAX_GET_BYTES,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
)
from packhouse.store.protocol import ask, read_checked, run

_MAX_BYTES = 2**27
"""Largest sum of a tokenizer's files; Gemma 3 has 38 MB."""
_MAX_FILES = 32
_HEADER = re.compile(rb"transformers=[^\n]{1,64}\ntokenizers=[^\n]{1,64}\n")
_ENTRY = re.compile(rb"([A-Za-z0-9_][A-Za-z0-9._-]{0,99}) (0|[1-9][0-9]{0,9})\n")


def keep_tokenizer(store: ObjectStore, fingerprint: str, read: Callable[[], bytes]) -> bool:
    """Write a tokenizer to the store unless it is there; False if it is too large for one.

    What is there is not compared: bytes of zlib differ by its version, and readers check them.

    Args:
        store: where to.
        fingerprint: of the tokenizer.
        read: returns the bytes that have it as their sha256.
    """
    key = tokenizer_key(fingerprint)
    try:
        run(store, ask(ObjectStore.head, key))
        return True
    except ObjectNotFoundError:
        document = read()
    assert hashlib.sha256(document).hexdigest() == fingerprint, "the caller compared it"
    body = gzip.compress(document, compresslevel=1, mtime=0)
    if len(document) > _MAX_BYTES or len(body) > MAX_GET_BYTES:
        return False
    with suppress(PreconditionFailedError):  # another publisher, or our own lost success
        run(store, ask(ObjectStore.put_create, key, body))
    return True


def fetch_tokenizer(store: ObjectStore, fingerprint: str) -> dict[str, bytes] | None:
    """Return the files of a tokenizer by name, or None if the store does not keep it.

    Raises:
        IntegrityError: what is kept there is not what the fingerprint says.
    """
    if not re.fullmatch("[0-9a-f]{64}", fingerprint):
        return None
    parse = partial(_parse, fingerprint=fingerprint)
    found = run(store, read_checked(tokenizer_key(fingerprint), parse))
    return found[0] if found else None


def _parse(data: bytes, key: str, fingerprint: str) -> dict[str, bytes]:
    """The files, of bytes that anybody may have put there.

    No file is made here, and no more is unpacked than a tokenizer may hold.
    """
    unpacker = zlib.decompressobj(wbits=31)
    try:
        document = unpacker.decompress(data, _MAX_BYTES + 1)
    except zlib.error:
        document = b""
    if hashlib.sha256(document).hexdigest() != fingerprint:
        raise IntegrityError(
            f"the tokenizer at '{key}' is damaged: its bytes are not those of its name. Remove "
            "that object and publish the version again",
            key=key,
        )
    files: dict[str, bytes] = {}
    header = _HEADER.match(document)
    at = header.end() if header else len(document)
    while at < len(document) and len(files) < _MAX_FILES:
        entry = _ENTRY.match(document, at)
        if entry is None or entry[1].decode() in files:
            break
        start, size = entry.end(), int(entry[2])
        files[entry[1].decode()] = document[start : start + size]
        at = start + size
    if header is None or at != len(document):
        raise IntegrityError(f"'{key}' holds no files of a tokenizer", key=key)
    return files
