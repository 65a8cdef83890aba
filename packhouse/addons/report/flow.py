"""The ledger as a picture: a band of rows from step to step, and what falls out of it."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from packhouse.addons.report.figures import KIND_COLORS, Figure
from packhouse.records.ledger import in_and_out, units_of
from packhouse.wording import by_name, counted


def flow_figure(ledger: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw rows from step to step as a band; what leaves it falls away below.

    A loss is drawn at least 1.5% of the height wide, so that one row in 52,002 can be seen.
    """
    drawn = [
        line for line in ledger if line["rows_in"] != line["rows_out"] or line["step"] != "split"
    ]
    most = max([1, *(line["rows_in"] for line in drawn)])
    units = units_of(ledger)
    bands: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    for i, line in enumerate(drawn):
        came, left = line["rows_in"] / most, line["rows_out"] / most
        said = counted(line["rows_out"], units[line["step"]][1])
        bands += _band("rows", i, 1, 1 - came, 1, 1 - left, said)
        if not i or line["rows_in"] != drawn[i - 1]["rows_in"]:
            labels.append({"x": i, "y": 1.04, "text": f"{line['rows_in']:,}", "is_end": False})
        low = 1 - came
        for kind in ("quarantined", "dropped"):
            lost = sum(line.get(kind, {}).values())
            if lost:
                wide = max(lost / most, 0.015)
                said = f"{lost:,} {kind}: {by_name(line[kind])}"
                top = min(low + wide, 1)
                bands += _band(f"{kind} {i}", i, top, low, low - 0.08, low - 0.08 - wide, said)
                text = f"{lost:,} {kind}"
                labels.append({"x": i + 1, "y": low - 0.22 - wide, "text": text, "is_end": True})
                low -= 0.24 + wide
    names = [line["step"] for line in drawn]
    last = drawn[-1]["rows_out"] if drawn else 0
    labels.append({"x": len(drawn), "y": 1.04, "text": f"{last:,}", "is_end": True})
    ends = [*names, "out"]
    x = {
        "field": "x",
        "type": "quantitative",
        "scale": {"domain": [0, len(drawn)], "nice": False},
        "axis": {
            "title": None,
            "values": list(range(len(ends))),
            "labelExpr": f"{json.dumps(ends)}[datum.value]",
            "grid": False,
            "labelOverlap": False,
            "labelFlush": False,
            "labelAlign": {
                "condition": {"test": f"datum.value === {len(drawn)}", "value": "right"},
                "value": "left",
            },
            "labelPadding": 16,
            "labelFontSize": 10.5,
            "orient": "top",
            "ticks": False,
            "domain": False,
        },
    }
    lowest = min([0, *(band["y2"] for band in bands)]) - 0.16
    y_scale = {"domain": [lowest, 1.1], "nice": False}
    spec = {
        "width": "container",
        "height": 170,
        "layer": [
            {
                "data": {"values": bands},
                "mark": {"type": "area", "interpolate": "monotone", "tooltip": True},
                "encoding": {
                    "x": x,
                    "y": {"field": "y", "type": "quantitative", "axis": None, "scale": y_scale},
                    "y2": {"field": "y2"},
                    "detail": {"field": "band", "type": "nominal"},
                    "color": {
                        "field": "kind",
                        "type": "nominal",
                        "legend": None,
                        "scale": {
                            "domain": list(KIND_COLORS),
                            "range": list(KIND_COLORS.values()),
                        },
                    },
                    "opacity": {
                        "condition": {"test": "datum.kind === 'rows'", "value": 0.55},
                        "value": 0.95,
                    },
                    "tooltip": {"field": "said", "type": "nominal", "title": "number"},
                },
            },
            *(
                {
                    "data": {"values": [each for each in labels if each["is_end"] == is_end]},
                    "mark": {"type": "text", "style": "ink", "align": align, "baseline": "bottom"},
                    "encoding": {
                        "x": {"field": "x", "type": "quantitative"},
                        "y": {"field": "y", "type": "quantitative", "scale": y_scale},
                        "text": {"field": "text"},
                    },
                }
                for is_end, align in ((False, "left"), (True, "right"))
            ),
        ],
    }
    heads, cells = in_and_out(ledger)
    columns = ("step", heads[0], "added", "quarantined", "dropped", heads[1], "tokens out")
    rows = [
        [
            line["step"],
            came_in,
            *(by_name(line.get(kind, {})) for kind in ("added", "quarantined", "dropped")),
            went_out,
            "" if line.get("tokens_out") is None else line["tokens_out"],
        ]
        for line, (came_in, went_out) in zip(ledger, cells, strict=True)
    ]
    return Figure(
        name="flow",
        title="Where every row went",
        says="Each step takes in what the one before put out; what it refuses falls out below.",
        spec=spec,
        columns=columns,
        rows=rows,
    )


def _band(
    name: str, x: int, y: float, y2: float, end: float, end2: float, said: str
) -> list[dict[str, Any]]:
    """A band from (x, y2..y) to (x + 1, end2..end), bent like the arms of a Sankey diagram."""
    kind = name.partition(" ")[0]
    points = []
    for number in range(9):
        t = number / 8
        bend = (1 - math.cos(math.pi * t)) / 2
        points.append(
            {
                "band": f"{name} {x}",
                "kind": kind,
                "said": said,
                "x": x + t,
                "y": y + (end - y) * bend,
                "y2": y2 + (end2 - y2) * bend,
            }
        )
    return points
