"""Check that the benchmark runs, not what it measures."""

import re
from pathlib import Path

import pytest

from bench import goals
from bench.measuring import Sample
from bench.prose import hits
from bench.simulate import Cluster, Step, main, simulate

ROOT = Path(__file__).resolve().parents[2]


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


CALM = {"handout_s": 0.0, "skew": 0.0, "hours_to_failure": 1e9}


def test_four_equal_tasks_on_two_workers_take_twice_a_task():
    step = Step(name="format", num_tasks=4, jobs_per_task=3, job_s=10.0)
    outcome = simulate(step, Cluster(workers=2, **CALM), seed=0)
    assert outcome.makespan_s == 60.0
    assert (outcome.worked_s, outcome.lost_s, outcome.num_retries) == (120.0, 0.0, 0)


def test_a_worker_that_dies_loses_one_job_and_its_task_goes_on():
    step = Step(name="format", num_tasks=8, jobs_per_task=10, job_s=60.0)
    cluster = Cluster(workers=4, **CALM | {"hours_to_failure": 0.2})
    outcome = simulate(step, cluster, seed=1)
    assert outcome.num_retries > 0
    assert outcome.worked_s == 8 * 10 * 60.0
    assert outcome.lost_s < 60.0 * outcome.num_retries


def test_the_same_seed_prints_the_same_table(capsys):
    arguments = ["--tb", "0.1", "--rows", "1e7", "--workers", "2", "8"]
    tables = []
    for seed in ("0", "0", "1"):
        assert main([*arguments, "--seed", seed]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]
    assert tables[0].count("\n") == 4


def test_a_ratio_that_fell_or_was_not_measured_fails_the_check(tmp_path, monkeypatch, capsys):
    def run(name, packhouse):
        rows = re.findall(r"\d+", name.replace(",", "")) or ["10"]
        is_other = name.startswith(("trl", goals.BEFORE)) or "by template" in name
        seconds = (0.5 + int(rows[-1]) / 100) * (10 if is_other else packhouse)
        return Sample(wall_s=seconds, cpu_s=seconds, import_s=0, peak_mb=9, facts={"tokens": 9})

    def least(packhouse, without=""):
        def measured(_, names, runs):
            return {name: run(name, packhouse) for name in names if name != without}

        return measured

    monkeypatch.setattr(goals, "RECORDED", tmp_path / "goals.json")
    monkeypatch.setattr(goals, "_least_of", least(1.0))
    assert goals.main(["--small", "--record"]) == 0
    assert goals.main(["--small", "--check"]) == 0
    monkeypatch.setattr(goals, "_least_of", least(1.09))
    assert goals.main(["--small", "--check"]) == 0
    monkeypatch.setattr(goals, "_least_of", least(1.2))
    assert goals.main(["--small", "--check"]) == 1
    assert "CPU, chats, Qwen3: the ratio fell from 10.0 to 8.333" in capsys.readouterr().out
    monkeypatch.setattr(goals, "_least_of", least(1.0, without="chats by template"))
    assert goals.main(["--small", "--check"]) == 1
    assert "not measured: CPU for each token, chats, default" in capsys.readouterr().out
    monkeypatch.setattr(goals, "find_shared", lambda: None)
    assert [goals.main([]), goals.main(["--check"])] == [0, 1]
