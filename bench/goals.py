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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from bench.inputs import DEMO, ROOT, chats, edited, find_shared, grown_alpaca, small_alpaca
from bench.measuring import Contender, Sample, interleave, run_once
from bench.peers import python_of
from bench.reporting import markdown_table

RECORDED = ROOT / "bench" / "goals.json"
HEAD = ("measure", "packhouse", "compared with", "ratio", "goal", "met")
_FALL = 0.9
BEFORE = "e24885d"
"""Commit that the goals were set at; `make bench` extracts it."""
OLD = ROOT / ".packhouse" / f"bench-{BEFORE}"
_MANY_ROWS = 200_000
_LEAST = {52_002: (8.5, 1 / 0.85), 520_020: (0, 1 / 0.35)}
"""Rows -> what the ratios of CPU and memory to TRL should be at least."""


@dataclass(frozen=True, slots=True)
class Value:
    """A number computed from runs."""

    runs: tuple[str, ...]
    """Names of the runs."""
    of: Callable[..., float]
    """Returns the number from their samples, in the same order."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio, and what it should be."""

    name: str
    ours: Value
    theirs: Value
    least: float = 0
    """Smallest ratio `theirs / ours` that meets the goal; 0 without one."""
    most: Value | None = None
    """Limit of `ours`."""

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of all runs that it needs."""
        return tuple(
            run for each in (self.ours, self.theirs, self.most) if each for run in each.runs
        )


def cpu(run: str) -> Value:
    """Return the CPU seconds of a run."""
    return Value((run,), attrgetter("cpu_s"))


def wall(run: str) -> Value:
    """Return the wall time of a run in seconds."""
    return Value((run,), attrgetter("wall_s"))


def peak_mb(run: str) -> Value:
    """Return the peak memory of a run."""
    return Value((run,), attrgetter("peak_mb"))


def each_token(run: str) -> Value:
    """Return the CPU microseconds for each token."""
    return Value((run,), lambda one: 1e6 * one.cpu_s / one.facts["tokens"])


def constant(number: float) -> Value:
    """Return a fixed number."""
    return Value((), lambda: number)


def _goals(small: int, large: int) -> list[Goal]:
    def us_per_row(who: str, what: Callable[[str], Value] = cpu) -> Value:
        few, many = (what(f"{who} {rows:,}") for rows in (small, large))
        us = 1e6 / (large - small)
        return Value((*few.runs, *many.runs), lambda one, two: us * (many.of(two) - few.of(one)))

    ours = f"packhouse {large:,}"
    further = f"for each further row, {small:,} to {large:,} rows (us)"
    fixed, trl_fixed = "CPU, 1,000 rows", cpu("trl 1,000")
    goals = [
        Goal(f"CPU {further}", us_per_row("packhouse"), us_per_row("trl"), 20),
        Goal(f"CPU {further}, to {BEFORE}", us_per_row("packhouse"), us_per_row(BEFORE), 2),
        Goal(f"{fixed}, known tokenizer", cpu("known"), trl_fixed, most=constant(2.4)),
        Goal(f"{fixed}, new tokenizer", cpu("new"), trl_fixed, most=constant(3.3)),
    ]
    for number in (small, large):
        rows, (least, memory) = f"{number:,}", _LEAST.get(number, (0, 0))
        own, trl = f"packhouse {rows}", f"trl {rows}"
        goals += [
            Goal(f"CPU, {rows} rows", cpu(own), cpu(trl), least),
            Goal(f"CPU, {rows} rows, to {BEFORE}", cpu(own), cpu(f"{BEFORE} {rows}")),
            Goal(f"peak MB, {rows} rows", peak_mb(own), peak_mb(trl), memory),
        ]
    if large >= _MANY_ROWS:  # smaller files have one shard, for which one process is used
        two = f"2 workers {large:,}"
        a_worker_more = Value((ours,), lambda one: one.cpu_s + 0.3)
        by_wall = us_per_row("2 workers", wall), us_per_row("packhouse", wall)
        goals += [
            Goal(f"wall, 2 workers, {large:,} rows", wall(two), wall(ours), 1.6),
            Goal(f"wall {further.replace('rows (', 'rows, 2 workers (')}", *by_wall, 1.85),
            Goal(
                f"CPU with a further worker, {large:,} rows", cpu(two), cpu(ours), 0, a_worker_more
            ),
        ]
    template = "chats by template"
    goals += [
        Goal(f"CPU, one row of {large:,} changed", cpu("changed"), cpu(ours), 1 / 0.35),
        Goal(f"CPU, one row of {large:,} inserted", cpu("inserted"), cpu(ours), 1 / 0.35),
        Goal("CPU, chats, Qwen3", cpu("chats"), cpu(template), 10),
        Goal("CPU, tool chats, Qwen3", cpu("tools"), cpu("tools by template"), 8),
        Goal(
            "CPU for each token, chats, default turns (us)",
            each_token("chats, default"),
            each_token(template),
        ),
    ]
    return goals


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
        ours, theirs = _number(goal.ours, best), _number(goal.theirs, best)
        ratios[goal.name] = round(theirs / ours, 3)
        most = _number(goal.most, best) if goal.most else 0
        met = ("yes" if theirs / ours >= goal.least else "no") if goal.least else ""
        met = ("yes" if ours <= most else "no") if most else met
        due = f"at most {most:.2f}" if most else f"{goal.least:.2f}" if goal.least else ""
        rows.append([goal.name, f"{ours:,.2f}", f"{theirs:,.2f}", f"{theirs / ours:.2f}", due, met])
    print(markdown_table(HEAD, rows))
    if options.record:
        known = json.loads(RECORDED.read_bytes()) if RECORDED.exists() else {}
        RECORDED.write_text(json.dumps({**known, **ratios}, indent=1) + "\n")
    return _compare(ratios, [goal.name for goal in goals]) if options.check else 0


def _number(value: Value, samples: Mapping[str, Sample]) -> float:
    return value.of(*(samples[name] for name in value.runs))


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
    """Return every run by name; those of peers and of `BEFORE` only if they are there."""
    qwen2, qwen3 = DEMO / "tokenizer", DEMO / "tokenizer"
    if shared is not None:
        qwen2, qwen3 = (shared / "tokenizers" / n for n in ("qwen2.5-instruct", "qwen3"))

    def rows(number: int) -> Path:
        return small_alpaca(number) if shared is None else grown_alpaca(shared, number)

    def contender(
        name: str, module: str, data: Path, tokenizer: Path, *, at: Path = ROOT, **env: str
    ) -> Contender:
        python, script = str(python_of(module) or sys.executable), str(at / "bench/contender.py")
        command = (python, script, module, str(data), str(tokenizer), "2048")
        return Contender(name=name, command=command, env={"PYTHONPATH": str(at), **env})

    known, warm = str(folder / "known"), str(folder / "warm")
    made: list[Contender] = []
    for number in dict.fromkeys((1_000, small, large)):
        made += [
            contender(f"packhouse {number:,}", "packhouse", rows(number), qwen2),
            contender(f"trl {number:,}", "trl", rows(number), qwen2),
            contender(f"{BEFORE} {number:,}", "packhouse", rows(number), qwen2, at=OLD),
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
    return {
        each.name: each
        for each in made
        if python_of(each.command[2]) and Path(each.command[1]).is_file()
    }


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
