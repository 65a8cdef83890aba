"""Loss weights of rows and sources, from the recipe to a trainer's loss."""

import itertools
import json

import numpy as np
import pytest

from packhouse import load_packed
from packhouse.addons.exports import export_version
from packhouse.errors import ConfigError
from packhouse.store import open_version
from tests.chain.conftest import Project

SCORES = {0: 0.5, 1: 2.0, 2: 1.0}


@pytest.fixture
def project(tmp_path):
    """Source `a` (30 rows with a score) and `b` (30 others without)."""
    project = Project(tmp_path)
    for name, first in (("a", 0), ("b", 100)):
        rows = [
            {"instruction": f"Add 1 to {n}.", "output": f"{n + 1}.", "score": SCORES[n % 3]}
            for n in range(first, first + 30)
        ]
        project.write(rows, f"{name}.jsonl")
    return project


def publish(project: Project, a=(), b=(), **sections):
    more = {"a.jsonl": dict(a), "b.jsonl": dict(b)}
    sources = [{"path": path, "format": "alpaca", **keys} for path, keys in more.items()]
    project.write_recipe(sources=sources, **sections)
    return project.prepare()


SCORED = {"fields": {"loss_weight": "score"}}
WEIGHTED = {"a": SCORED, "b": {"loss_weight": 0.25}}


def rows_of(project, prepared, cache, split="train"):
    return load_packed(project.uri(prepared), split=split, cache=cache)


@pytest.mark.parametrize(("strategy", "layout"), [("best_fit", "compact"), ("concat", "labels")])
def test_every_token_has_the_weight_of_its_row_and_source(project, tmp_path, strategy, layout):
    prepared = publish(
        project,
        **WEIGHTED,
        pack={"seq_len": 256, "strategy": strategy},
        split={"eval_fraction": 0},
        publish={"layout": layout},
    )
    weights = []
    for row in rows_of(project, prepared, tmp_path / "copies"):
        bounds = np.cumsum([0, *row["seq_lengths"]])
        trained = np.array(row["labels"]) != -100
        given = np.array(row["loss_weights"])
        assert ((given > 0) == trained).all()
        for start, end in itertools.pairwise(bounds):
            own = set(given[start:end][trained[start:end]].tolist())
            weights += own
    if strategy != "concat":  # may cut a record in two
        assert sorted(weights) == [0.25] * 30 + [0.5] * 10 + [1.0] * 10 + [2.0] * 10
    assert set(weights) == {0.25, 0.5, 1.0, 2.0}


def test_without_weights_nothing_changes_and_with_them_the_version_does(project):
    plain, half = publish(project), publish(project, b={"loss_weight": 0.5})
    assert publish(project, b={"loss_weight": 1.0}).version == plain.version != half.version
    for prepared, is_told in ((plain, False), (half, True)):
        manifest = (project.folder(prepared) / "manifest.json").read_text()
        assert ('"loss_weight":0.5' in manifest) == is_told


def test_exports_hold_the_weights_or_refuse(project, tmp_path):
    prepared = publish(project, **WEIGHTED, split={"eval_fraction": 0})
    opened = open_version(str(project.root / "store"), "sums", prepared.version)
    with pytest.raises(ConfigError, match="'axolotl' cannot store loss weights"):
        export_version(opened, "axolotl", tmp_path / "axolotl", cache=tmp_path / "copies")
    export_version(opened, "jsonl", tmp_path / "jsonl", cache=tmp_path / "copies")
    (first, *_) = (tmp_path / "jsonl" / "train.jsonl").read_text().splitlines()
    assert set(json.loads(first)["loss_weights"]) >= {0.0}


def test_a_class_has_no_place_for_a_weight(project):
    with pytest.raises(ConfigError, match="loss_weight"):
        publish(
            project,
            b={"loss_weight": 0.5},
            format={"template": "sequence_classification"},
            pack={"seq_len": 256, "strategy": "none"},
        )
