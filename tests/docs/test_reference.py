"""The generated pages of docs/reference/ match the code."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "reference.py"
SPEC = importlib.util.spec_from_file_location("docs_reference", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_matches_the_code(name):
    written = (reference.FOLDER / name).read_text()
    assert written == reference.PAGES[name](), "the code has changed: run `make reference`"


def test_examples_are_of_keys_that_exist():
    page = (reference.FOLDER / "recipe.md").read_text()
    assert [key for key in reference.EXAMPLES if f"### `{key}`" not in page] == []
