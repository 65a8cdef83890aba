"""Pages that a newcomer follows from top to bottom: their files, commands, Python and outputs.

Every shown output (lines of a console block without `$`, or a text block) must appear in the output
of the block itself or of the one before it; `...` stands for any text.
"""

import contextlib
import html
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.cli import cli

ROOT = Path(__file__).parents[2]
NEEDS_TRL = "docs/tutorial.md"
PAGES = ("README.md", "docs/index.md", "docs/get-started.md", "docs/tutorial.md")


def run_command(line: str) -> str:
    done = CliRunner().invoke(cli, shlex.split(line, comments=True))
    assert done.exit_code == 0 or "Error: " in done.output, done.output
    return done.output


def run_python(code: str, names: dict[str, object]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "page.py", "exec"), names)
    return output.getvalue()


def assert_shown(shown: str, output: str) -> None:
    words = " ".join(shown.split())
    pattern = ".*".join(re.escape(part.strip()) for part in words.split("..."))
    assert re.search(pattern, " ".join(output.split())), (shown, output)


def test_the_picture_shows_the_rows_of_the_first_example():
    picture = html.unescape((ROOT / "docs/pictures/rows-to-packs.svg").read_text())
    rows = (ROOT / "deployments/demo/three-rows.jsonl").read_text().splitlines()
    assert re.findall(r'\{"instruction.*?\}', picture) == rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", PAGES)
def test_a_page_from_top_to_bottom(page, home, monkeypatch):
    if page == NEEDS_TRL:
        pytest.importorskip("trl")
        pytest.importorskip("accelerate")
    monkeypatch.setenv("PACKHOUSE_CACHE", str(home / "cache"))
    monkeypatch.delenv("COLUMNS", raising=False)  # it breaks long lines
    shutil.copytree(ROOT / "deployments", "deployments")
    if page == "docs/get-started.md":
        shutil.copy("deployments/demo/three-rows.jsonl", "data.jsonl")  # the reader's own file
    names = {"__name__": "page"}
    output = ""

    text = (ROOT / page).read_text()
    for language, title, code in re.findall(
        r"^```(\w+)([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    ):
        shown = code
        if language == "yaml":
            Path(title.split('"')[1]).write_text(code)
        elif language == "python":
            output = run_python(code, names)
        elif language == "console":
            lines = code.replace("\\\n", "").splitlines()
            commands = [line[12:] for line in lines if line.startswith("$ packhouse ")]
            output = "".join(run_command(line) for line in commands if line != "--version")
            shown = "\n".join(line for line in lines if not line.startswith("$ "))
            assert_shown(shown, output)
        elif language == "text":
            assert_shown(shown, output)

    if page == NEEDS_TRL:
        first, *_, last = names["losses"]
        assert last < first / 2
