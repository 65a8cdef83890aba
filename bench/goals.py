"""Measure the goals of docs/performance.md as ratios of interleaved runs, and check them.

`python -m bench.goals [--rows N] [--runs N] [--only NAME ...] [--check] [--record]`

Every number is the least CPU of its runs (or memory, or wall time), so other work on the machine
adds as little as possible. With `--check`, the command fails if a ratio is more than 10% below the
one in `bench/goals.json`, which `--record` writes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.inputs import DEMO, ROOT, chats, edited, find_shared, grown_alpaca, small_alpaca
from bench.measuring import Contender, Sample, interleave, run_once
from bench.peers import python_of
from bench.reporting import markdown_table

RECORDED = ROOT / "bench" / "goals.json"
HEAD = ("measure", "packhouse", "compared with", "ratio", "goal", "met")
_FALL = 0.9
_MANY_ROWS = 200_000
_LEAST = {52_002: (8.5, 1 / 0.85), 520_020: (0, 1 / 0.35)}
"""Rows -> what the ratios of CPU and memory to TRL should be at least."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio, and what it should be."""

    name: str
    runs: tuple[str, ...]
    """Names of the runs it needs."""
    ours: Callable[..., float]
    """Returns our number from the least values of these runs."""
    theirs: Callable[..., float]
    least: float
    """The ratio `theirs / ours` should be at least this; 0 if only `most` is a goal."""
    most: Callable[..., float] | None = None
    """Returns what our number should be at most."""


def _goals(small: int, large: int) -> list[Goal]:
    def slope(one: Sample, two: Sample) -> float:
        return (two.cpu_s - one.cpu_s) / (large - small) * 1e6

    def wall_slope(one: Sample, two: Sample) -> float:
        return (two.wall_s - one.wall_s) / (large - small) * 1e6

    a, b = (small, f"{small:,}"), (large, f"{large:,}")
    ours, theirs = [f"packhouse {n}" for _, n in (a, b)], [f"trl {n}" for _, n in (a, b)]
    goals = [
        Goal(
            f"CPU for each further row, {a[1]} to {b[1]} rows (us)",
            (*ours, *theirs),
            lambda one, two, *_: slope(one, two),
            lambda *runs: slope(*runs[2:]),
            20,
        ),
        Goal(
            "CPU, 1,000 rows, known tokenizer", ("known", "trl 1,000"), _first, _second, 0, _s(2.4)
        ),
        Goal("CPU, 1,000 rows, new tokenizer", ("new", "trl 1,000"), _first, _second, 0, _s(3.3)),
    ]
    for number, rows in (a, b):
        least, memory = _LEAST.get(number, (0, 0))
        runs = f"packhouse {rows}", f"trl {rows}"
        goals += [
            Goal(f"CPU, {rows} rows", runs, _first, _second, least),
            Goal(f"peak MB, {rows} rows", runs, _first_peak, _second_peak, memory),
        ]
    if large >= _MANY_ROWS:  # smaller files have one shard, for which one process is used
        few, two = (f"2 workers {rows}" for _, rows in (a, b))
        goals += [
            Goal(
                f"wall, 2 workers, {b[1]} rows",
                (two, ours[1]),
                lambda own, _: own.wall_s,
                lambda _, one: one.wall_s,
                1.6,
            ),
            Goal(
                f"wall for each further row, 2 workers, {a[1]} to {b[1]} rows (us)",
                (few, two, *ours),
                lambda *runs: wall_slope(*runs[:2]),
                lambda *runs: wall_slope(*runs[2:]),
                1.85,
            ),
            Goal(
                f"CPU with a further worker, {b[1]} rows",
                (two, ours[1]),
                _first,
                _second,
                0,
                lambda _, one: one.cpu_s + 0.3,
            ),
        ]
    goals += [
        Goal(f"CPU, one row of {b[1]} changed", ("changed", ours[1]), _first, _second, 1 / 0.35),
        Goal(f"CPU, one row of {b[1]} inserted", ("inserted", ours[1]), _first, _second, 1 / 0.35),
        Goal("CPU, chats, Qwen3", ("chats", "chats by template"), _first, _second, 10),
        Goal("CPU, tool chats, Qwen3", ("tools", "tools by template"), _first, _second, 8),
        Goal(
            "CPU for each token, chats, default turns (us)",
            ("chats, default", "chats by template"),
            lambda own, _: 1e6 * own.cpu_s / own.facts["tokens"],
            lambda _, one: 1e6 * one.cpu_s / one.facts["tokens"],
            0,
        ),
    ]
    return goals


def _s(seconds: float) -> Callable[..., float]:
    return lambda *_: seconds


def _first(one: Sample, *_: Sample) -> float:
    return one.cpu_s


def _second(_: Sample, two: Sample) -> float:
    return two.cpu_s


def _first_peak(one: Sample, *_: Sample) -> float:
    return one.peak_mb


def _second_peak(_: Sample, two: Sample) -> float:
    return two.peak_mb


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, and compare with the recorded ratios."""
    options = _options(arguments)
    shared = None if options.small else find_shared()
    if shared is None and not options.small:
        print("skipped: PACKHOUSE_SHARED names no folder that holds data/alpaca_data.json")
        return 1 if options.check else 0
    small, large = (100, 500) if options.small else sorted((52_002, options.rows))
    if small == large:
        small = 1_000
    goals = [
        goal
        for goal in _goals(small, large)
        if not options.only or any(word in goal.name for word in options.only)
    ]
    with tempfile.TemporaryDirectory(prefix="packhouse-goals-") as folder:
        contenders = _contenders(shared, small, large, Path(folder))
        needed = dict.fromkeys(name for goal in goals for name in goal.runs)
        best = _least_of(contenders, list(needed), options.runs)
    ratios: dict[str, float] = {}
    rows = []
    for goal in goals:
        if any(name not in best for name in goal.runs):
            rows.append([goal.name, "", "", "skipped", "", ""])
            continue
        runs = [best[name] for name in goal.runs]
        ours, theirs = goal.ours(*runs), goal.theirs(*runs)
        ratios[goal.name] = round(theirs / ours, 3)
        most = goal.most(*runs) if goal.most else 0
        met = ("yes" if theirs / ours >= goal.least else "no") if goal.least else ""
        met = ("yes" if ours <= most else "no") if most else met
        due = f"at most {most:.2f}" if most else f"{goal.least:.2f}" if goal.least else ""
        rows.append([goal.name, f"{ours:,.2f}", f"{theirs:,.2f}", f"{theirs / ours:.2f}", due, met])
    print(markdown_table(HEAD, rows))
    if options.record:
        known = json.loads(RECORDED.read_bytes()) if RECORDED.exists() else {}
        RECORDED.write_text(json.dumps({**known, **ratios}, indent=1) + "\n")
    return _compare(ratios, [goal.name for goal in goals]) if options.check else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.goals", description=__doc__)
    parser.add_argument("--rows", type=int, default=52_002)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="goals whose names contain one of these")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--small", action="store_true", help="rows of the demo")
    return parser.parse_args(arguments)


def _compare(ratios: dict[str, float], names: Iterable[str]) -> int:
    """Print the ratios that fell, and return 1 if there are any, or if a goal was not measured."""
    known = json.loads(RECORDED.read_bytes()) if RECORDED.exists() else {}
    fallen = {n: r for n, r in ratios.items() if n in known and r < known[n] * _FALL}
    for name, ratio in fallen.items():
        print(f"{name}: the ratio fell from {known[name]} to {ratio}, by more than 10%")
    num_known = len(ratios.keys() & known.keys())
    print(f"{num_known - len(fallen)} ratios are as recorded or better")
    if skipped := sorted(set(names) & known.keys() - ratios.keys()):
        print(f"not measured: {', '.join(skipped)}")
    return 1 if fallen or skipped or not num_known else 0


def _contenders(shared: Path | None, small: int, large: int, folder: Path) -> dict[str, Contender]:
    """Return every run by name; runs of peers are left out without their environment."""
    qwen2, qwen3 = DEMO / "tokenizer", DEMO / "tokenizer"
    if shared is not None:
        qwen2, qwen3 = (shared / "tokenizers" / n for n in ("qwen2.5-instruct", "qwen3"))

    def rows(number: int) -> Path:
        return small_alpaca(number) if shared is None else grown_alpaca(shared, number)

    def contender(name: str, module: str, data: Path, tokenizer: Path, **env: str) -> Contender:
        python = str(python_of(module) or sys.executable)
        command = (python, "bench/contender.py", module, str(data), str(tokenizer), "2048")
        return Contender(name=name, command=command, env=env)

    known, warm = str(folder / "known"), str(folder / "warm")
    made: list[Contender] = []
    for number in dict.fromkeys((1_000, small, large)):
        made += [
            contender(f"packhouse {number:,}", "packhouse", rows(number), qwen2),
            contender(f"trl {number:,}", "trl", rows(number), qwen2),
        ]
    # The first runs of these keep their caches.
    made += [
        contender("keep known", "packhouse", rows(1_000), qwen2, BENCH_KEEP=known),
        contender("keep warm", "packhouse", rows(large), qwen2, BENCH_KEEP=warm),
        contender("new", "packhouse", rows(1_000), qwen2),
        contender("known", "packhouse", rows(1_000), qwen2, BENCH_TOKENIZERS=f"{known}/tokenizers"),
    ]
    made += [
        contender(f"2 workers {number:,}", "packhouse", rows(number), qwen2, BENCH_WORKERS="2")
        for number in (small, large)
    ]
    for name in ("changed", "inserted"):
        data = edited(rows(large), inserts=name == "inserted")
        made.append(contender(name, "packhouse", data, qwen2, BENCH_CACHE=warm))
    if shared is not None:
        chat = "sources.0.format=chat format.template=chat"
        whole = f"{chat} format.turns=whole"
        for name, number in (("chats", 100_000), ("tools", 50_000)):
            data = chats(shared, name, number)
            made += [
                contender(name, "packhouse", data, qwen3, BENCH_SETTINGS=whole),
                contender(f"{name} by template", "chat_template", data, qwen3),
            ]
        data = chats(shared, "chats", 100_000)
        made.append(contender("chats, default", "packhouse", data, qwen3, BENCH_SETTINGS=chat))
    return {each.name: each for each in made if python_of(each.command[2])}


_KEPT_FOR = {"known": "keep known", "changed": "keep warm", "inserted": "keep warm"}
"""Run -> the run whose cache it needs."""


def _least_of(
    contenders: dict[str, Contender], needed: Sequence[str], runs: int
) -> dict[str, Sample]:
    """Run everything in turn, and return the least CPU, wall time and memory of each."""
    for name in dict.fromkeys(_KEPT_FOR[each] for each in needed if each in _KEPT_FOR):
        run_once(contenders[name])
    samples = interleave(
        [contenders[name] for name in needed if name in contenders],
        runs,
        lambda line: print(line, file=sys.stderr),
    )
    return {
        name: replace(
            own[0],
            cpu_s=min(run.cpu_s for run in own),
            wall_s=min(run.wall_s for run in own),
            peak_mb=min(run.peak_mb for run in own),
        )
        for name, own in samples.items()
    }


if __name__ == "__main__":
    sys.exit(main())
