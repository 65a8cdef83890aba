"""Measure whole processes: wall time, CPU with all children, peak memory of the tree, output.

Peak memory is sampled from /proc every 10 ms: the sum of resident pages of the process and its
descendants, and at least the largest high-water mark (VmHWM) among them. `ru_maxrss` of a child is
not used: right after the fork it is the peak of the parent.

Time spent in `import` statements is measured inside the process (`bench/contender.py`), so that
ratios can be given with and without the cost of imports, which every Python program has.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SAMPLE_S = 0.01
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to do the job, run as a separate process."""

    name: str
    command: tuple[str, ...]
    """Without the output folder, which is appended."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One run of one process."""

    wall_s: float
    cpu_s: float
    """User and system time of the process and all its children."""
    import_s: float
    """Part of `cpu_s` in import statements of the main process."""
    peak_mb: float
    facts: dict[str, Any]
    """Result printed by the process: rows, tokens, packs, bytes."""

    @property
    def work_s(self) -> float:
        """CPU without imports."""
        return self.cpu_s - self.import_s


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of several values, with minimum and maximum."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """Summarise values.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        Spread(median=2.0, least=1.0, most=3.0)
    """
    return Spread(statistics.median(values), min(values), max(values))


def interleave(contenders: Sequence[Contender], runs: int, log: Any) -> dict[str, list[Sample]]:
    """Run all contenders in turn, A B C A B C, so that a slow minute of the machine affects all."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(runs):
        for contender in contenders:
            sample = run_once(contender)
            samples[contender.name].append(sample)
            log(
                f"  run {number + 1}/{runs} {contender.name}: {sample.cpu_s:.2f} s CPU "
                f"({sample.import_s:.2f} imports), {sample.peak_mb:,.0f} MB"
            )
    return samples


def run_once(contender: Contender) -> Sample:
    """Run one contender to its end.

    Raises:
        RuntimeError: it failed; the message has the end of its stderr.
    """
    folder = Path(tempfile.mkdtemp(prefix="packhouse-bench-"))
    try:
        return _run_in(contender, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(contender: Contender, folder: Path) -> Sample:
    env = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"TOKENIZERS_PARALLELISM": "true", "PYTHONPATH": str(ROOT), **contender.env}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # compile a checkout's modules once, as pip does
    with (folder / "stderr").open("wb") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            [*contender.command, str(folder)], env=env, cwd=ROOT, stdout=stderr, stderr=stderr
        )
        watch = _Watch(process.pid)
        watch.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.finish()
    if process.returncode != 0:
        said = (folder / "stderr").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{contender.name} ended with {process.returncode}:\n{said}")
    facts = json.loads((folder / "result.json").read_text())
    return Sample(
        wall_s=wall,
        cpu_s=usage.ru_utime + usage.ru_stime,
        import_s=facts.pop("import_s"),
        peak_mb=watch.peak_kib / 1024,
        facts=facts,
    )


class _Watch(threading.Thread):
    """Sample the memory of a process tree until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.peak_kib = 0
        self._pid = pid
        self._done = threading.Event()

    def run(self) -> None:
        """Take a sample every 10 ms."""
        while not self._done.wait(_SAMPLE_S):
            memory = [_memory_kib(pid) for pid in tree(self._pid)]
            resident = sum(now for now, _ in memory)
            highest = max((high for _, high in memory), default=0)
            self.peak_kib = max(self.peak_kib, resident, highest)

    def finish(self) -> None:
        """Stop sampling."""
        self._done.set()
        self.join()


def tree(pid: int) -> list[int]:
    """Return a process and its living descendants."""
    pids = [pid]
    for parent in pids:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return pids


def _memory_kib(pid: int) -> tuple[int, int]:
    """Return the current resident memory and its maximum so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(values.get("VmRSS", 0)), int(values.get("VmHWM", 0))
