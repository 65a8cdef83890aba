"""Figures that `make check` prints: the size of the library and the path of a row."""

from dataclasses import dataclass

import pyarrow as pa
import pytest

from bench import row_walk, size


@dataclass
class Held:
    texts: object


@pytest.mark.parametrize(
    "value",
    [
        "a zebrafish",
        b"a zebrafish",
        ["x", ("a zebrafish",)],
        {"x": "a zebrafish"},
        Held(["a zebrafish"]),
        pa.array(["a zebrafish"]),
        pa.table({"x": ["a zebrafish"]}),
    ],
)
def test_the_text_of_a_row_is_found_in_any_container(value):
    assert row_walk.holds(value)
    assert not row_walk.holds(Held("another animal"))


def test_lines_of_code_are_those_that_do_something(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""Says what."""\n\n# Why.\nx = 1  # a note\n\n\ndef _f():\n    """Do."""\n')
    found = size.measure(module)
    assert (found["lines"], found["code"], found["comments"]) == (8, 2, 1)
    assert (found["functions"], found["private"]) == (1, 1)
