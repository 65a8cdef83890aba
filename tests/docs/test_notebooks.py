"""The notebooks in the docs run from top to bottom and are stored without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
SAYS = {
    "first-dataset": ["validate 144 -> 142", "[.][<|im_end|>]", "True False"],
    "breaking-a-mask": [
        "does not end inside a generation block",
        "would never learn to stop",
        "unterminated_turns 0",
    ],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs_in_jupyter(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    (path,) = (each for each in NOTEBOOKS if each.stem == "first-dataset")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    root = str(path.parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    notebook = nbformat.read(path, as_version=4)

    # If a cell raises, the test shows its traceback.
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}
    ).execute()

    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    said = "".join(str(out.get("text", out.get("data", ""))) for out in outputs)
    for words in SAYS[path.stem]:
        assert words in said


def test_the_cells_of_the_other_notebook_run(monkeypatch, capsys):
    (path,) = (each for each in NOTEBOOKS if each.stem == "breaking-a-mask")
    monkeypatch.chdir(path.parent)
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)

    said = capsys.readouterr().out
    for words in SAYS[path.stem]:
        assert words in said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
