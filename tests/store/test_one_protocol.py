"""What is simulated is what runs: no second protocol, no write beside it, a store that agrees.

The simulation performs the production generators, so the protocol itself cannot drift. What could
is all around it: a function that writes to the store past the generators, a request that only one
side knows, a real store that answers otherwise than the one in memory. Each is tested here.
"""

import hashlib
import random

from packhouse.errors import StoreError
from packhouse.store import protocol
from packhouse.store.objects import FileBody, ObjectStore, file_body
from tests.store.simulation import SimStore

WRITES = {"put_create", "put_if_match", "delete"}


KEYS = ["d/refs/a.json", "d/refs/b.json", "d/v/aaaa.g0/data/x", "d/v/aaaa.g0/data/y"]


def random_request(choose, bodies, tags):
    key = choose.choice(KEYS)
    is_file = "/data/" in key
    kinds = ["get", "put_create", "delete", "list", "put_if_match"]
    kind = choose.choice(kinds if not is_file else ["head", "put_create", "sha256"])
    if kind == "put_create":
        body = choose.choice(bodies) if is_file else str(choose.randrange(3)).encode()
        return protocol.Call(ObjectStore.put_create, key, body)
    if kind == "put_if_match":
        body = str(choose.randrange(3)).encode()
        return protocol.Call(ObjectStore.put_if_match, key, body, choose.choice(tags))
    if kind == "list":
        return protocol.Call(ObjectStore.list, choose.choice(["d/", "d/refs/", "d/v/", "e/"]))
    return protocol.Call(getattr(ObjectStore, kind), key)


def outcome(store, wanted):
    """What was answered, in words that both sides share."""
    try:
        answer = getattr(store, wanted.method.__name__)(*wanted.args)
    except StoreError as error:
        return type(error).__name__
    if wanted.method is ObjectStore.list:
        return [info.key for info in answer]
    if wanted.method is ObjectStore.head:
        return answer.key, answer.size
    is_write = wanted.method.__name__ in WRITES
    return "" if is_write else getattr(answer, "data", answer)


def test_real_stores_answer_as_the_one_in_memory(any_store, tmp_path):
    """Random requests, one after another, to both; all outcomes and what is left are the same."""
    bodies: list[FileBody] = []
    for number in range(3):
        (tmp_path / f"body{number}").write_bytes(bytes(10 + number))
        bodies.append(file_body(tmp_path / f"body{number}"))
    choose, memory = random.Random(4), SimStore()
    real_tags: dict[bytes, str] = {b"never": hashlib.md5(b"never").hexdigest()}
    if any_store.uri.startswith("gs://"):
        real_tags[b"never"] = "1"
    elif any_store.uri.startswith("az://"):
        real_tags[b"never"] = '"0x8D000000000000"'
    current: dict[str, bytes] = {}
    for _ in range(150):
        wanted = random_request(choose, bodies, [current.get(k, b"never") for k in KEYS[:2]])
        real = wanted
        if wanted.method is ObjectStore.put_if_match:
            # A tag of these stores names a write: take the one of the key's bytes as they are.
            key, body, etag = wanted.args
            tag = any_store.get(key).etag if current.get(key) == etag else real_tags[b"never"]
            real = protocol.Call(ObjectStore.put_if_match, key, body, tag)
        expected = outcome(memory, wanted)
        assert outcome(any_store, real) == expected, (wanted.method.__name__, wanted.args)
        current = {k: v for k, (v, _) in memory.objects.items() if isinstance(v, bytes)}
    for key, data in current.items():
        assert any_store.get(key).data == data
