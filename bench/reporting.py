"""Tables of measurements: ratios of medians first, with minimum and maximum of each."""

from collections.abc import Mapping, Sequence

from bench.measuring import Sample, spread

HEAD = (
    "system", "CPU s", "without imports", "wall s", "peak MB", "packs", "tokens", "bytes/token",
    "CPU ratio", "ratio without imports", "memory ratio",
)  # fmt: skip


def peers_table(samples: Mapping[str, Sequence[Sample]], ours: str) -> list[list[str]]:
    """Return a row per system; ratios compare its CPU and memory with ours."""
    own_cpu, own_work, own_peak = (_medians(samples[ours])[i] for i in range(3))
    rows = []
    for name, runs in samples.items():
        cpu, work, peak = _medians(runs)
        facts = runs[0].facts
        rows.append(
            [
                name,
                _range([run.cpu_s for run in runs], 1),
                _range([run.work_s for run in runs], 1),
                _range([run.wall_s for run in runs], 1),
                _range([run.peak_mb for run in runs], 0),
                f"{facts['packs']:,}",
                f"{facts['tokens']:,}",
                f"{facts['bytes'] / facts['tokens']:.2f}",
                f"{cpu / own_cpu:.1f}",
                f"{work / own_work:.1f}",
                f"{peak / own_peak:.2f}",
            ]
        )
    return rows


def _medians(runs: Sequence[Sample]) -> tuple[float, float, float]:
    return (
        spread([run.cpu_s for run in runs]).median,
        spread([run.work_s for run in runs]).median,
        spread([run.peak_mb for run in runs]).median,
    )


def _range(values: Sequence[float], digits: int) -> str:
    found = spread(values)
    middle = f"{found.median:,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({found.least:,.{digits}f}-{found.most:,.{digits}f})"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with columns as wide as they need to be.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "22"]]))
        | a | b  |
        |---|----|
        | 1 | 22 |
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        for row in (head, *rows)
    ]
    text = [f"| {' | '.join(line)} |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)
