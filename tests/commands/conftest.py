"""A shared working directory for tests that call commands in it."""

import shutil

import pytest


@pytest.fixture(scope="session")
def one_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def home(one_folder, monkeypatch):
    """The working directory, emptied. It is always the same, so a waiting process can be reused.

    A new one imports its libraries first, which takes 0.5 s.
    """
    for path in one_folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.chdir(one_folder)
    return one_folder
