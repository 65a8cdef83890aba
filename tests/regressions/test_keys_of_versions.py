"""Defects of other tools' caches: a version depends on all inputs of its bytes, nothing else."""

import json
import os
import shutil
import types
import typing
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from packhouse.recipe import Recipe, SourceConfig
from packhouse.recipe.audit_section import QualityConfig
from packhouse.recipe.sections import ExportConfig
from packhouse.run.chain import plan_jobs
from tests.chain.conftest import DEMO, Project

DECIDES_NO_BYTE = {
    # Limits stop a run or a ref; they do not change the published version.
    "validate_.max_quarantined",
    *(
        "audit." + name
        for name in Recipe.model_fields["audit"].annotation.model_fields
        if name != "quality"  # counting rows; the limits are in tests/quality/test_gates.py
    ),
    "publish.allow_breaking_schema",
    *(f"publish.max_{what}_drift" for what in ("length", "source", "quarantine", "trained")),
    # The destination, and which of two encoders with equal ids was asked for.
    *(
        "publish.store",
        "publish.ref",
        "publish.move_ref",
        "publish.also",
        "publish.keep_tokenizer",
        "publish.report",
        "tokenize.encoder",
    ),
}
NEEDS = {
    # A field that only has an effect together with another one, and that other one.
    "split.eval_count": {"split": {"eval_fraction": 0.0}},
}

NAMES = {
    "format.template": "completion",
    "pack.strategy": "next_fit",
    "audit.quality": QualityConfig(max_refusals=0.5),
    "publish.exports": [ExportConfig(format="trl")],
}


@pytest.fixture
def project(tmp_path) -> Project:
    project = Project(tmp_path)
    project.write_rows(range(20))
    return project


def version_of(project: Project, *overrides: str) -> str:
    return plan_jobs(project.recipe(*overrides)).version_id


def section_fields() -> list[str]:
    sections = {
        name: field.annotation
        for name, field in Recipe.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    return [f"{name}.{field}" for name, model in sections.items() for field in model.model_fields]


def another(annotation: Any, value: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return another(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        inner = next(a for a in arguments if a is not type(None))
        return another(inner, value)
    if origin is Literal:
        return next(choice for choice in arguments if choice != value)
    if annotation is bool:
        return not value
    if annotation is int:
        return (value or 0) + 1
    if annotation is float:
        return 0.25 if value != 0.25 else 0.5
    if annotation is str:
        return f"{value or ''}x"
    return None


# Belongs to plug-ins, which must be installed: tests/chain/test_plugins.py.
@pytest.mark.parametrize("path", [path for path in section_fields() if path != "audit.checks"])
def test_a_field_is_in_the_key_or_decides_no_byte(project, path):
    # axolotl's key leaves out the strategy for long rows, the seed, and the bytes of the files.
    section, name = path.split(".")
    recipe = project.recipe()
    model = getattr(recipe, section)
    model = model.model_copy(update=NEEDS.get(path, {}).get(section, {}))
    field = type(model).model_fields[name]
    value = getattr(model, name)
    if path in NAMES:
        other: Any = NAMES[path]
    elif get_origin(field.annotation) in (list, dict):
        other = ["x"] if get_origin(field.annotation) is list else {"x": "y"}
    else:
        other = another(field.annotation, value)
    assert other is not None, f"say what another value of {path} is"
    before, after = (
        recipe.model_copy(update={section: model.model_copy(update={name: v})})
        for v in (value, other)
    )
    if path == "audit.benchmarks":  # the files that it names are in the key
        source = SourceConfig(path=str(project.rows), format="alpaca")
        after = recipe.model_copy(update={section: model.model_copy(update={name: [source]})})
        assert plan_jobs(after).version_id != plan_jobs(before).version_id
        return

    same = plan_jobs(before).version_id == plan_jobs(after).version_id

    assert same == (path in DECIDES_NO_BYTE)


def test_an_edit_of_equal_size_and_time_is_another_version(project):
    # axolotl issue 1136: preprocessing used its cache although local files had been edited.
    before = version_of(project)
    status = project.rows.stat()
    project.rows.write_text(project.rows.read_text().replace("plus", "join"))
    os.utime(project.rows, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert project.rows.stat().st_size == status.st_size
    assert version_of(project) != before


def test_a_copy_elsewhere_is_the_same_version(project, tmp_path):
    # marin issue 4219: a changed glob retokenized everything, until the path was hard-coded.
    before = version_of(project, "sources.0.name=rows")
    (tmp_path / "copy").mkdir()
    shutil.copy(project.rows, tmp_path / "copy" / "rows.jsonl")

    glob = tmp_path / "copy" / "row*.jsonl"
    assert version_of(project, "sources.0.name=rows", f"sources.0.path={glob}") == before


@pytest.mark.parametrize("change", ["tokenizer.json", "tokenizer_config.json"])
def test_another_tokenizer_in_the_same_folder_is_another_version(project, tmp_path, change):
    # open-instruct issue 1518, axolotl issue 33, LMFlow issue 394: tokenizers shared a cache.
    folder = tmp_path / "tokenizer"
    shutil.copytree(DEMO / "tokenizer", folder)
    before = version_of(project, f"tokenizer={folder}")
    content = json.loads((folder / change).read_text())
    if change == "tokenizer.json":
        content["added_tokens"][0]["special"] = not content["added_tokens"][0]["special"]
    else:
        content["pad_token"] = content["eos_token"]
    (folder / change).write_text(json.dumps(content))

    assert version_of(project, f"tokenizer={folder}") != before


def test_a_used_tokenizer_has_the_key_of_a_fresh_one(project):
    # datasets issues 7982 and 3847, trl issue 6206: hashes of live objects changed with use, and
    # every run tokenized again; open-instruct issue 1818 lost 16 hours of work.
    before = version_of(project)

    prepared = project.prepare()

    assert prepared.version.startswith(before)
    assert version_of(project) == before
