"""Names that a recipe accepts are on the pages that explain them."""

import re
from pathlib import Path

import pytest

from packhouse.pack import strategies
from packhouse.pack.strategies import STRATEGIES
from packhouse.read.row_formats import row_formats
from packhouse.recipe import FormatConfig
from packhouse.recipe.sections import docstrings_of
from packhouse.render import single_turn

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMATS = DOCS / "how-to" / "own-format.md"
TEMPLATE = docstrings_of(FormatConfig)["template"]


def first_cells(text: str) -> set[str]:
    """Names in backticks in the first column of the tables in a text."""
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (FORMATS.read_text(), set(row_formats())),
        ((DOCS / "packing.md").read_text(), set(STRATEGIES)),
        (strategies.__doc__, set(STRATEGIES)),
    ],
    ids=["row formats", "strategies", "strategies in the code"],
)
def test_a_table_has_a_row_for_each_name(text, names):
    assert names - first_cells(text) == set()


@pytest.mark.parametrize("page", ["architecture.md", "contributor.md"])
def test_files_that_a_page_names_are_there(page):
    text = (DOCS / page).read_text()
    # A row about `read/` lists files of that package; a row's path has names without backticks.
    for package, row in re.findall(r"^\| `(\w+/)` \|(.*)$", text, re.MULTILINE):
        text = text.replace(row, re.sub(r"`((?:steps/)?\w+\.py)`", rf"`{package}\1`", row))
    named = set(re.findall(r"`([\w./-]+/[\w./-]*|\w+\.py)`", text))
    named |= set(re.findall(r"^ *(\w+/[\w/]+\.py)\b", text, re.MULTILINE))
    roots = (DOCS.parent, DOCS.parent / "packhouse")
    assert len(named) > 10
    assert [
        path for path in sorted(named) if not any((root / path).exists() for root in roots)
    ] == []


@pytest.mark.parametrize("name", single_turn.SINGLE_TURN)
def test_each_template_is_explained(name):
    assert re.search(rf"^    {name}\s", single_turn.__doc__, re.MULTILINE)
    assert f"`{name}`" in TEMPLATE
