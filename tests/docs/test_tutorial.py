"""The tutorial, step by step: its files, its Python and its commands, in the order of the page."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from packhouse.cli import cli

ROOT = Path(__file__).parents[2]
STEPS = re.findall(
    r"^```(\w+)([^\n]*)\n(.*?)^```",
    (ROOT / "docs/tutorial.md").read_text(),
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_tutorial_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "deployments", "deployments")
    names: dict[str, object] = {"__name__": "tutorial"}
    said = []

    for language, title, code in STEPS:
        if language == "yaml":
            Path(title.split('"')[1]).write_text(code)
        elif language == "python":
            exec(compile(code, "tutorial.md", "exec"), names)
        else:
            for line in re.findall(r"^\$ packhouse (.*)$", code, re.MULTILINE):
                done = CliRunner().invoke(cli, shlex.split(line))
                expected = re.search(r"^(\w+Error: [^,]*)", code, re.MULTILINE)
                assert (done.exit_code == 0) is (expected is None), done.output
                if expected:
                    assert expected[1] in " ".join(done.output.split())
                said.append(done.output)

    losses = names["losses"]
    assert losses[-1] < losses[0] / 2
    assert "<|im_end|>" in names["answer"]
    _, _, bad, published, inspected, _, _, listed, _ = said
    assert "empty_answer: 1" in bad
    assert "32        32" in published
    assert "The capital of France is Paris." in inspected
    assert listed.count("latest ->") == 1
