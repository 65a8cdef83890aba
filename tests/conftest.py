"""Fixtures that every room shares."""

import os
from pathlib import Path

import pytest


def find_shared() -> Path | None:
    """Folder of real data and tokenizers: PACKHOUSE_SHARED, else `shared` beside the checkout."""
    named = os.environ.get("PACKHOUSE_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if (folder / "data").is_dir() else None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = find_shared()
    if folder is None:
        pytest.skip("no real data here: set PACKHOUSE_SHARED to the folder that holds it")
    return folder
