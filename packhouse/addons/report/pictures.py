"""The picture of a version: how long its records are, and how full its packs.

Drawn as SVG; no library draws it and nothing is fetched. Bars are shares of a split's records by
length class (a quarter octave wide). Gray and half transparent, it goes with light and dark pages.
"""

from collections.abc import Mapping, Sequence

from packhouse.escaping import html_text
from packhouse.packing import PackStatistics
from packhouse.wording import counted

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 170, 64, 34
_COLORS = {"train": "#1f77b4", "eval": "#ff7f0e"}


def lengths_svg(splits: Mapping[str, PackStatistics]) -> str:
    """Draw a row of bars for each split, and under it a gauge of its fill.

    Example:
        >>> side = PackStatistics(length_histogram=[(5, 1), (10, 2)], seq_len=16, lower_bound=2,
        ...     strategy="best_fit", num_packs=2, num_sequences=3, num_tokens=24)
        >>> svg = lengths_svg({"train": side})
        >>> svg.count("<rect"), "fill 75.00%" in svg, "seq_len 16" in svg
        (4, True, True)
    """
    names = sorted(splits, reverse=True)  # train before eval
    height = _HEIGHT * len(names)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="11" fill="#888">'
    ]
    for number, name in enumerate(names):
        parts += _split(name, splits[name], number * _HEIGHT)
    return "".join([*parts, "</svg>"])


def _split(name: str, side: PackStatistics, top: int) -> list[str]:
    color = _COLORS.get(name, "#2ca02c")
    title = (
        f"{html_text(name)}: {counted(side.num_sequences, 'record')} by length in tokens, "
        f"seq_len {side.seq_len:,}"
    )
    fill_top = top + _HEIGHT - 14
    full = _WIDTH - _LEFT - 10
    return [
        f'<text x="{_LEFT}" y="{top + 14}">{title}</text>',
        *_bars(side.length_histogram, top + 20, color),
        f'<text x="4" y="{fill_top + 9}">fill {side.fill:.2%}</text>',
        f'<rect x="{_LEFT + 24}" y="{fill_top}" width="{full - 24}" height="10" '
        'fill="#888" fill-opacity=".3"/>',
        f'<rect x="{_LEFT + 24}" y="{fill_top}" width="{(full - 24) * side.fill:.1f}" '
        f'height="10" fill="{color}"/>',
    ]


def _bars(bars: Sequence[Sequence[int]], top: int, color: str) -> list[str]:
    room = _HEIGHT - 20 - _BOTTOM - 14
    most = max((count for _, count in bars), default=1)
    step = (_WIDTH - _LEFT - 10) / max(1, len(bars))
    parts = [f'<text x="4" y="{top + 9}">{most:,}</text>']
    for place, (length, count) in enumerate(bars):
        x, tall = _LEFT + place * step, max(1.0, room * count / most)
        parts.append(
            f'<rect x="{x:.1f}" y="{top + room - tall:.1f}" width="{max(1.0, step - 2):.1f}" '
            f'height="{tall:.1f}" fill="{color}"><title>{count:,} up to {length:,}</title></rect>'
        )
        if place % max(1, len(bars) // 12) == 0:
            parts.append(f'<text x="{x:.1f}" y="{top + room + 12}">{length:,}</text>')
    return parts
