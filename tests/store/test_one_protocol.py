"""The simulated protocol is the one that runs: no second protocol, no other writes, same answers.

The simulation executes the production generators, so the protocol itself cannot differ. Everything
around it could: a function that writes to the store without the generators, a request that only one
side knows, a real store that answers differently from the one in memory. Each is tested here.
"""

import ast
import hashlib
import random
from pathlib import Path

import pytest

import packhouse
from packhouse.errors import PackhouseError, StoreError
from packhouse.store import commit, open_store, publish_version, store_requests
from packhouse.store.commit import LocalFile, dataset_card, draft_manifest, name_files
from packhouse.store.object_store import FileBody, ObjectStore, file_body
from tests.store.simulation import SimStore
from tests.store.versions import FACTS, pack_file

WRITES = {"put_create", "put_if_match", "delete"}
PACKAGE = Path(packhouse.__file__).parent


def methods_named(name):
    """Return module, method and syntax tree of every `x.put_create` or similar in the library."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            is_write = isinstance(node, ast.Attribute) and node.attr in WRITES
            if is_write and (getattr(node.value, "id", "") == "ObjectStore") == (name == "asked"):
                if getattr(node.value, "id", "") not in ("np", "obstore"):
                    yield path.relative_to(PACKAGE).as_posix(), node, tree


def test_nobody_writes_to_a_store_but_the_runner_of_steps_and_the_doctor():
    assert {module for module, _, _ in methods_named("called")} == {"addons/doctor.py"}


class Recorder:
    """A real store that records its requests."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.asked = store, []

    def __getattr__(self, name):
        method = getattr(self.store, name)
        if name not in (*WRITES, "get", "head", "list"):
            return method

        def recorded(key, *rest):
            if "doctor-" not in key:
                self.asked.append((name, key))
            return method(key, *rest)

        return recorded


def simulate(store, generator, asked):
    """Run a protocol on the store in memory, without faults, and record its requests."""
    answer, error = None, None
    while True:
        try:
            wanted = generator.send(answer) if error is None else generator.throw(error)
        except StopIteration as stop:
            return stop.value
        answer, error = None, None
        if isinstance(wanted, store_requests.All):
            answer = [simulate(store, part, asked) for part in wanted.parts]
        elif isinstance(wanted, store_requests.NewId):
            answer = f"w{len(asked)}"
        else:
            if wanted.method is not ObjectStore.sha256:
                asked.append((wanted.method.__name__, wanted.args[0]))
            try:
                answer = store.perform(wanted)
            except PackhouseError as raised:
                error = raised


@pytest.mark.parametrize("times", [1, 2])
def test_a_publication_asks_a_store_and_the_simulation_the_same(tmp_path, times):
    store, memory, asked = Recorder(open_store(str(tmp_path / "store"))), SimStore(), []
    for number in range(times):
        file = pack_file(tmp_path, 1 + number)
        vid = f"aaa{number}"
        publish_version(store, "d", vid, [file], FACTS, "latest")
        uploads = name_files([file])
        draft = draft_manifest("d", vid, uploads, FACTS)
        (tmp_path / "README.md").write_text(dataset_card(draft))
        uploads += name_files([LocalFile(tmp_path / "README.md", "all", kind="card")])
        draft = commit.replace(draft, files=tuple(entry for entry, _ in uploads))
        simulate(memory, commit.publish_steps(draft, uploads, "latest"), asked)
    # Outside the protocol, `publish_version` reads the ref and the version that it points to.
    before = [("get", "d/refs/latest.json")]
    real = list(store.asked)
    for number in range(times):
        start = real.index(before[0], 0 if not number else len(asked) // times)
        del real[start : start + 1 + number]
    assert sorted(real) == sorted(asked)
    assert {key for key, _ in memory.objects.items()} == {info.key for info in store.list("d/")}


KEYS = ["d/refs/a.json", "d/refs/b.json", "d/v/aaaa.g0/data/x", "d/v/aaaa.g0/data/y"]


def random_request(choose, bodies, tags):
    key = choose.choice(KEYS)
    is_file = "/data/" in key
    kinds = ["get", "put_create", "delete", "list", "put_if_match"]
    kind = choose.choice(kinds if not is_file else ["head", "put_create", "sha256"])
    if kind == "put_create":
        body = choose.choice(bodies) if is_file else str(choose.randrange(3)).encode()
        return store_requests.Call(ObjectStore.put_create, key, body)
    if kind == "put_if_match":
        body = str(choose.randrange(3)).encode()
        return store_requests.Call(ObjectStore.put_if_match, key, body, choose.choice(tags))
    if kind == "list":
        return store_requests.Call(ObjectStore.list, choose.choice(["d/", "d/refs/", "d/v/", "e/"]))
    return store_requests.Call(getattr(ObjectStore, kind), key)


def outcome(store, wanted):
    """Return the answer in a form that both sides share."""
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
    """Random requests to both stores, one after another: answers and final contents are equal."""
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
    for _ in range(100):
        wanted = random_request(choose, bodies, [current.get(k, b"never") for k in KEYS[:2]])
        real = wanted
        if wanted.method is ObjectStore.put_if_match:
            # A tag of these stores identifies a write: use the tag of the key's current bytes.
            key, body, etag = wanted.args
            tag = any_store.get(key).etag if current.get(key) == etag else real_tags[b"never"]
            real = store_requests.Call(ObjectStore.put_if_match, key, body, tag)
        expected = outcome(memory, wanted)
        assert outcome(any_store, real) == expected, (wanted.method.__name__, wanted.args)
        current = {k: v for k, (v, _) in memory.objects.items() if isinstance(v, bytes)}
    for key, data in current.items():
        assert any_store.get(key).data == data
