"""The list of phrases finds them in prose, and nowhere else."""

import pytest

from bench.prose import hits


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", "It is behind the header.\n```\nbehind\n```\nBehind the scenes.", [1]),
        ("a.py", '"""What a row has."""\n\nBESIDE = 1  # beside it\n', [1, 3]),
        ("a.py", 'print("the text lies behind it")\nprint("behind")\n', [1, 1]),
        ("a.py", '"""Return a row.\n\n    It is no row.\n"""\n', [3]),
        ("a.py", "behind = 1\n", []),
    ],
)
def test_phrases_are_found_in_prose_only(name, text, lines, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    assert [line for line, _, _ in hits(path)] == lines
