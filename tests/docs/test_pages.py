"""Run the code shown on the pages: each Python block, recipe and `packhouse` command.

The blocks of a page run in order, in a folder that looks like the root of a clone, with a version
of the demo recipe in ./store and a tiny model.
"""

import importlib.util
import re
import runpy
import shlex
import shutil
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from packhouse.cli import cli
from packhouse.recipe import Recipe, load_recipe
from packhouse.run.chain import prepare
from packhouse.run.step import LocalRunner
from packhouse.run.step_cache import Workspace
from tests.loaders.models import tiny_model

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
DEMO = ROOT / "deployments" / "demo"
NEEDS = {"how-to/preferences.md": ("trl", "accelerate"), "how-to/renderers.md": ("renderers",)}
SAYS = {
    "how-to/keep-records-apart.md": "RECORDS SEE EACH OTHER",
    "how-to/pack-in-memory.md": "5 rows, 12 tokens: 1 empty",
    "how-to/megatron.md": "2 splits in one metadata.json\n240 [torch.Size([4, 240])",
}
# Run by test_tutorial.py, test_pages_train.py and tests/chain/test_plugins.py.
SHOWN = {"index.md", "README.md", "get-started.md", "tutorial.md", "how-to/trl.md", "plugins.md"}


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text()
    found = re.findall(rf"^```{language}[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(found) == len(re.findall(rf"^\s*```{language}\b", text, re.MULTILINE)), page
    return found


def pages(language: str) -> list[pytest.param]:
    return [pytest.param(page, id=name_of(page)) for page in PAGES if blocks(page, language)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the pages start."""
    folder = tmp_path_factory.mktemp("clone")
    workspace = Workspace(cache=folder / ".packhouse")
    for seq_len in (256, 512):  # two versions, so that a ref can be rolled back
        settings = (f"publish.store={folder}/store", f"pack.seq_len={seq_len}")
        recipe = load_recipe(DEMO / "recipe.yaml", settings)
        prepare(recipe, LocalRunner(recipe=recipe, workspace=workspace), cache=workspace.cache)
    shutil.copytree(ROOT / "deployments", folder / "deployments")
    shutil.copytree(DEMO / "tokenizer", folder / "tokenizer")
    shutil.copy(DEMO / "instructions.jsonl", folder)
    tiny_model("llama", "sdpa", vocabulary=8192).save_pretrained(folder / "tiny-model")
    return folder


@pytest.fixture
def here(clone: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder to work in."""
    shutil.copytree(clone, home, dirs_exist_ok=True)
    monkeypatch.setenv("PACKHOUSE_CACHE", str(home / ".packhouse"))
    return home


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("page", [p for p in pages("python") if p.id not in SHOWN])
def test_the_python_of_a_page_runs(page, here, capsys):
    import torch

    for package in NEEDS.get(name_of(page), ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    Path("page.py").write_text("\n".join(blocks(page, "python")))

    torch.compiler.set_stance("force_eager")
    try:
        runpy.run_path("page.py", run_name="page")
    finally:
        torch.compiler.set_stance("default")

    assert SAYS.get(name_of(page), "") in capsys.readouterr().out


@pytest.mark.parametrize("page", [p for p in pages("yaml") if p.id != "plugins.md"])
def test_every_key_of_a_recipe_exists(page):
    for block in blocks(page, "yaml"):
        found = yaml.safe_load(block)
        if not set(found) <= {*Recipe.model_fields, "validate"}:
            continue  # from another program
        filled = {"dataset": "x", "tokenizer": "x", "sources": [{"path": "x"}]} | found
        Recipe.model_validate(filled)


def packhouse_lines(page: Path) -> list[list[str]]:
    """Return the words of each `$ packhouse ...` line, up to its comment or `&&`."""
    text = "\n".join(blocks(page, "console")).replace("\\\n", "")
    found = []
    for line in re.findall(r"^\$ (packhouse .*|.*&& packhouse .*)$", text, re.MULTILINE):
        for part in line.split(" && "):
            words = shlex.split(part, comments=True)
            if words[0] == "packhouse" and words[1:] != ["--version"]:
                found.append(words[1:])
    return found


@pytest.mark.parametrize("page", pages("console"))
def test_every_packhouse_command_of_a_page_exists_with_its_options(page):
    for words in packhouse_lines(page):
        command: click.Command = cli
        while isinstance(command, click.Group):
            with click.Context(command) as context:
                name = words.pop(0)
                inner = command.get_command(context, name)
            assert inner is not None, name
            command = inner
        command.make_context(command.name, words, resilient_parsing=False)


GUIDES = ("init", "run", "rerun", "approve", "ask", "look", "export", "axolotl", "megatron")
RUNS = {f"how-to/{name}.md" for name in GUIDES}
RUN = [page for page in PAGES if name_of(page) in RUNS]


def shown_lines(page: Path) -> list[str]:
    """Return the lines of output that a page shows, without `...`."""
    lines = "".join(blocks(page, "console")).replace("\\\n", "").splitlines()
    return [line for line in lines if line != "..." and not line.startswith("$ ")]


def without_ids(text: str) -> str:
    return re.sub(r"\b[0-9a-f]{16,}", "ID", text)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_commands_of_a_page_run(page, here, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # it breaks long lines
    for recipe in blocks(page, "yaml"):
        Path("recipe.yaml").write_text(recipe)
    runner = CliRunner()
    said = ""
    for words in packhouse_lines(page):
        if any(word.startswith(".packhouse/") for word in words):
            continue  # shown for a store that has had several versions
        done = runner.invoke(cli, words)
        assert done.exit_code == 0, (words, done.output)
        said += done.output
    said = without_ids(said)
    assert [line for line in shown_lines(page) if without_ids(line) not in said] == []


def is_for_trainers(public: object) -> bool:
    module = getattr(public, "__module__", "")
    return module.startswith(("packhouse.load.", "packhouse.addons.torch."))


def test_the_pages_name_every_export_and_every_public_name():
    import packhouse
    import packhouse.addons.exports

    text = "\n".join(page.read_text() for page in (DOCS / "how-to").glob("*.md"))
    for name in packhouse.addons.exports.FORMATS:
        assert f"`{name}`" in text
    told = set(re.findall(r"\w+", text))
    internal = {"PackingHandle", "PackingReport", "TokenizedDataset", "packed_mask_mod"}
    public = {name: getattr(packhouse, name) for name in packhouse.__all__}
    trains = {name for name, each in public.items() if is_for_trainers(each)}
    assert trains - internal - told == {"split_batch_into_microbatches"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, target


def test_files_that_name_a_page_name_one_that_is_there():
    folders = ("packhouse", "tasks", "flows", "schemas", "deployments", "docker", "bench", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = [
        (path, page)
        for path in [*files, ROOT / "CHANGELOG.md", ROOT / "Makefile"]
        if path.suffix in {".py", ".md", ".yaml", ".yml", ".jinja", ".sh"} or not path.suffix
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(errors="ignore"))
    ]
    assert len(named) > 20
    assert [pair for pair in named if not (ROOT / pair[1]).is_file()] == []


def test_every_decision_is_listed():
    listed = re.findall(r"\]\((2.*?\.md)\)", (DOCS / "decisions" / "index.md").read_text())
    assert sorted(listed) == sorted(path.name for path in (DOCS / "decisions").glob("2*.md"))
