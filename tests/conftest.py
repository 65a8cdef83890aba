"""Fixtures that all tests share, and rules that apply to all tests."""

import gc
import json
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.server_logs import new_errors

# Tests do not assert seconds, because they would fail on a busy machine. The build tries the same
# inputs in every run, so only a commit can break it. `--hypothesis-profile random` tries new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("packhouse", settings.get_profile("random"), derandomize=True)
settings.load_profile("packhouse")

# Prefect 3.8.8: once a process has run a flow, its forks exit with code 1, because Prefect's
# handlers for the end of threads fail there. Some tests fork, or use a DataLoader's workers. The
# list of handlers is private to `threading`; no public function empties it.
os.register_at_fork(after_in_child=threading._threading_atexits.clear)  # type: ignore[attr-defined]


# In a process that has imported the tests and libraries of all files, a full collection takes 1 to
# 3 s, and transformers' Trainer runs one in each `train()`. Imported objects never become garbage.
_num_modules_frozen = 0


def _freeze_modules() -> None:
    """Exclude existing objects from later collections if many modules were imported."""
    global _num_modules_frozen
    if len(sys.modules) > _num_modules_frozen + 100:
        gc.collect()
        gc.freeze()
        _num_modules_frozen = len(sys.modules)


USE_THE_STACK = {
    "tests/browser/test_ui.py",
    "tests/e2e/test_stack.py",
    "tests/load/test_load.py",
    "tests/security/test_api.py",
    "tests/security/test_pickles.py",
    "tests/security/test_secrets.py",
}


class Scheduling(LoadFileScheduling):
    """Files that use the stack go to one process: starting another stack takes 75 s.

    So do tests of flows, whose Prefect server takes 25 s to start, and of the store, with 8 s for
    Ceph.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        for folder in ("tests/prefect", "tests/store"):
            if file.startswith(f"{folder}/"):
                return folder
        return "stack" if file in USE_THE_STACK else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    _freeze_modules()


def pytest_runtest_setup() -> None:
    _freeze_modules()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # C++ libraries report objects that still exist at exit as leaks


@pytest.fixture(scope="session", autouse=True)
def no_cache_in_the_real_home(tmp_path_factory):
    """Use a temporary folder as the user's cache of finished steps, unless a test names another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        patch.delenv("PACKHOUSE_CACHE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_folder_of_tokenizers(tmp_path_factory):
    """Share loaded tokenizers between the caches of all tests; loading takes 1 s or more.

    Processes that tests start, and tests that name a folder of tokenizers, have their own.
    """
    from packhouse.run.step_cache import Workspace

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the base folders of all workers are in one
    folder /= "tokenizers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "tokenizers", property(lambda _: folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_disks():
    """Skip the fsyncs of a folder store: 54 per run, which take longer than the run's work.

    No test cuts the power. Other tests check that fsync is called, and in which order.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def empty_reports():
    """Publish an empty page as the report: drawing it is half of the work of a small run."""
    from packhouse.addons.report import version_report

    with pytest.MonkeyPatch.context() as patch:
        real = version_report.unpublished_report
        patch.setattr(version_report, "unpublished_report", lambda *_: "<!doctype html>\n")
        yield real


@pytest.fixture(scope="module")
def real_reports(empty_reports):
    """Draw the reports of this module's runs all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packhouse.addons.report.version_report.unpublished_report", empty_reports)
        yield


@pytest.fixture
def own_tokenizers(monkeypatch):
    """Let each cache keep its own tokenizers again, for tests of a missing one."""
    from packhouse.run.step_cache import Workspace

    folder = property(lambda workspace: workspace.cache / "tokenizers")
    monkeypatch.setattr(Workspace, "tokenizers", folder)


@pytest.fixture(scope="module", autouse=True)
def packs_of_other_files_are_forgotten():
    """Forget the packs of other tests, because generated records look alike."""
    if loaded := sys.modules.get("packhouse.load.known_packs"):
        loaded._KNOWN.clear()
        loaded._WARNED.clear()


@pytest.fixture(autouse=True)
def servers_log_no_error():
    """Fail a test that left an error in the log of a running server or worker."""
    yield
    errors = new_errors()
    assert not errors, "\n".join(errors)


def find_shared() -> Path | None:
    """Folder of real data and tokenizers: PACKHOUSE_SHARED, else `shared` next to the checkout."""
    named = os.environ.get("PACKHOUSE_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if (folder / "data").is_dir() else None


@pytest.fixture(scope="session")
def shared():
    folder = find_shared()
    if folder is None:
        pytest.skip("no real data here: set PACKHOUSE_SHARED to the folder that holds it")
    return folder


@pytest.fixture(scope="session")
def tekken(tmp_path_factory):
    """A folder with one of Mistral's vocabularies, cut to its first 20,000 tokens."""
    common = pytest.importorskip("mistral_common", reason="mistral-common is not installed")
    whole = Path(common.__path__[0]) / "data" / "tekken_240911.json"
    vocabulary = json.loads(whole.read_bytes())
    vocabulary["vocab"] = vocabulary["vocab"][:20_000]
    vocabulary["config"] |= {"num_vocab_tokens": 20_000, "default_vocab_size": 21_000}
    folder = tmp_path_factory.mktemp("tekken")
    (folder / "tekken.json").write_text(json.dumps(vocabulary))
    return folder


@pytest.fixture(scope="session")
def ceph_endpoint(tmp_path_factory):
    """Endpoint of Ceph's S3 gateway, shared by all tests because starting it takes 20 s."""
    from tests.store import ceph

    if not ceph.is_installed():
        pytest.skip("no Ceph here: apt-get install radosgw ceph-mon ceph-mgr ceph-osd")
    with ceph.running(tmp_path_factory.mktemp("ceph"), ceph.free_port()) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def stack(tmp_path_factory, ceph_endpoint):
    """The stack of docker/compose.yaml, without containers; see tests/e2e/stack.py."""
    from tests.e2e import stack as by_hand

    if lacking := by_hand.missing():
        pytest.skip(lacking)
    with by_hand.running(tmp_path_factory.mktemp("stack"), ceph_endpoint) as started:
        yield started


@pytest.fixture(scope="session")
def deployed(stack):
    """The stack with deployments/prefect.yaml deployed on it."""
    from tests.e2e.deployments import deploy

    deploy(stack)
    return stack
