"""What is simulated is what runs: no second protocol, no write beside it, a store that agrees.

The simulation performs the production generators, so the protocol itself cannot drift. What could
is all around it: a function that writes to the store past the generators, a request that only one
side knows, a real store that answers otherwise than the one in memory. Each is tested here.
"""

import ast
import hashlib
import inspect
import random
import typing
from pathlib import Path

import pytest

import packhouse
from packhouse.errors import PackhouseError, StoreError
from packhouse.store import gc, open_store, protocol, publish, publish_version, refs, set_ref
from packhouse.store.draft import card_file, draft_manifest, name_files
from packhouse.store.objects import FileBody, ObjectStore, file_body
from tests.store import simulation
from tests.store.simulation import SimStore
from tests.store.versions import FACTS, pack_file

WRITES = {"put_create", "put_if_match", "delete"}
PACKAGE = Path(packhouse.__file__).parent


def writers():
    """Module and method of every call of a writing method of a store in the whole library."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_write = isinstance(node, ast.Attribute) and node.attr in WRITES
            if is_write and getattr(node.value, "id", "") not in ("np", "obstore"):
                yield path.relative_to(PACKAGE).as_posix(), node.attr


def test_one_module_alone_knows_obstore():
    """Its `delete` is no method of a store of ours, so `writers` passes over it."""
    found = [path.name for path in PACKAGE.rglob("*.py") if "import obstore" in path.read_text()]
    assert found == ["cloud.py"]


def test_nobody_writes_to_a_store_but_the_runner_of_steps_and_the_doctor():
    assert {module for module, _ in writers()} <= {"store/protocol.py", "store/doctor.py"}
    assert {method for module, method in writers() if module == "store/protocol.py"} == WRITES


def test_the_simulation_holds_no_protocol_of_its_own():
    """It makes requests nowhere but in its reader's look at a file."""
    tree = ast.parse(inspect.getsource(simulation))
    made = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", "") == "protocol"
    }
    assert made == {"Fingerprint", "request"}
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", "") in ("publish", "gc", "refs", "read")
    }
    protocols = {name for name in used if name.endswith("_steps")}
    assert protocols == {
        "gc.collect_steps",
        "gc.find_garbage_steps",
        "publish.find_slot_steps",
        "publish.publish_steps",
        "read.resolve_steps",
        "refs.set_ref_steps",
    }
    for name in protocols:
        module, _, function = name.partition(".")
        real = getattr(
            {"publish": publish, "gc": gc, "refs": refs}.get(module, simulation.read), function
        )
        assert real.__module__.startswith("packhouse.store.")


def test_every_request_is_known_to_the_runner_and_to_the_simulation():
    known = {kind.__name__ for kind in typing.get_args(protocol.Request)}
    matched = inspect.getsource(protocol._perform)
    simulated = inspect.getsource(simulation)
    assert len(known) == 13
    assert {name for name in known if f"case {name}(" not in matched} == set()
    # No simulated protocol lists folders; a run of one that does ends with "no such request".
    assert {name for name in known if f"protocol.{name}" not in simulated} == {"ListFolders"}


class Recorder:
    """A real store that writes down what it is asked."""

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


NAMES = {
    protocol.Read: "get",
    protocol.Create: "put_create",
    protocol.Swap: "put_if_match",
    protocol.Stat: "head",
    protocol.ListAll: "list",
    protocol.Delete: "delete",
}


def simulate(store, generator, asked):
    """Perform a protocol against the store in memory, without faults; write down what it asks."""
    answer, error = None, None
    while True:
        try:
            wanted = generator.send(answer) if error is None else generator.throw(error)
        except StopIteration as stop:
            return stop.value
        answer, error = None, None
        if isinstance(wanted, protocol.All):
            answer = [simulate(store, part, asked) for part in wanted.parts]
        elif isinstance(wanted, protocol.NewId):
            answer = f"w{len(asked)}"
        else:
            if type(wanted) in NAMES:
                asked.append((NAMES[type(wanted)], getattr(wanted, "key", None) or wanted.prefix))
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
        draft = draft_manifest("d", vid, [entry for entry, _ in uploads], FACTS, [file])
        card = card_file(draft, tmp_path)
        draft = publish.replace(draft, files=(*draft.files, card[0]))
        simulate(memory, publish.publish_steps(draft, (*uploads, card), "latest"), asked)
    # Beside the protocol, `publish_version` reads: the ref, and the version that it points to.
    before = [("get", "d/refs/latest.json")]
    real = list(store.asked)
    for number in range(times):
        start = real.index(before[0], 0 if not number else len(asked) // times)
        del real[start : start + 1 + number]
    assert sorted(real) == sorted(asked)
    assert {key for key, _ in memory.objects.items()} == {info.key for info in store.list("d/")}


def test_moving_a_ref_asks_a_store_and_the_simulation_the_same(tmp_path):
    plain, memory = open_store(str(tmp_path / "store")), SimStore()
    for number in range(2):
        publish_version(
            plain, "d", f"aaa{number}", [pack_file(tmp_path, 1 + number)], FACTS, "latest"
        )
    for info in plain.list("d/"):
        memory.objects[info.key] = (plain.get(info.key).data, 0.0)
    store, asked = Recorder(plain), []
    set_ref(store, "d", "latest", "aaa0.g0")
    simulate(memory, refs.set_ref_steps("d", "latest", "aaa0.g0"), asked)
    assert store.asked == asked
    assert memory.ref("latest").version == "aaa0.g0"


KEYS = ["d/refs/a.json", "d/refs/b.json", "d/v/aaaa.g0/data/x", "d/v/aaaa.g0/data/y"]


def random_request(choose, bodies, tags):
    key = choose.choice(KEYS)
    is_file = "/data/" in key
    kinds = ["Read", "Create", "Delete", "ListAll", "Swap"] if not is_file else ["Stat", "Create"]
    kind = choose.choice([*kinds, "Fingerprint"] if is_file else kinds)
    if kind == "Create":
        body = choose.choice(bodies) if is_file else str(choose.randrange(3)).encode()
        return protocol.Create(key, body)
    if kind == "Swap":
        return protocol.Swap(key, str(choose.randrange(3)).encode(), choose.choice(tags))
    if kind == "ListAll":
        return protocol.ListAll(choose.choice(["d/", "d/refs/", "d/v/", "e/"]))
    return getattr(protocol, kind)(key)


def outcome(perform, wanted):
    """What was answered, in words that both sides share."""
    try:
        answer = perform(wanted)
    except StoreError as error:
        return type(error).__name__
    if isinstance(wanted, protocol.ListAll):
        return [info.key for info in answer]
    if isinstance(wanted, protocol.Stat):
        return answer.key, answer.size
    return (
        getattr(answer, "data", answer)
        if not isinstance(wanted, protocol.Create | protocol.Swap)
        else ""
    )


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
        if isinstance(wanted, protocol.Swap):
            # A tag of these stores names a write: take the one of the key's bytes as they are.
            tag = real_tags[b"never"]
            if current.get(wanted.key) == wanted.etag:
                tag = any_store.get(wanted.key).etag
            real = protocol.Swap(wanted.key, wanted.body, tag)
        expected = outcome(memory.perform, wanted)
        got = outcome(lambda w: protocol._perform(any_store, w, protocol.RetryPolicy(), 1), real)
        assert got == expected, wanted
        current = {k: v for k, (v, _) in memory.objects.items() if isinstance(v, bytes)}
    for key, data in current.items():
        assert any_store.get(key).data == data
