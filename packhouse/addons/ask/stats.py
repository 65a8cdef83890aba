"""`packhouse stats VERSION`: how much there is of what, by source and by split."""

import json

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.ask.sql import print_rows
from packhouse.cli.options import json_option
from packhouse.store import OpenVersion
from packhouse.store.address import open_address
from packhouse.system.terminal import echo
from packhouse.views import read_view

_QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}


@click.command()
@click.argument("target", metavar="VERSION")
@json_option()
def stats(target: str, as_json: bool) -> None:
    """Print records, tokens, trained share and lengths by source, packs and fill by split.

    Records by source are counted once each, those by split as often as they are packed, as are
    tokens and lengths.

    \b
    packhouse stats ./store/demo
    """
    opened = open_address(target)
    found = {"sources": _by_source(opened), "splits": _by_split(opened)}
    if as_json:
        echo(json.dumps(found))
        return
    for number, rows in enumerate(found.values()):
        echo() if number else None
        print_rows(pa.Table.from_pylist(rows))


def _by_source(opened: OpenVersion) -> list[dict[str, object]]:
    columns = ("source", "split", "num_tokens", "times", "num_trained")
    table = read_view(opened, "records", columns)
    table = table.filter(pc.greater(table["times"], 0))
    # chats/chats.jsonl -> chats
    names = pc.list_element(pc.split_pattern(table["source"], "/", max_splits=1), 0)
    table = table.set_column(0, "source", names)
    keys = table.group_by(["source", "split"]).aggregate([])
    found = []
    for key in keys.sort_by([("source", "ascending"), ("split", "descending")]).to_pylist():
        is_of = pc.and_(*(pc.equal(table[column], value) for column, value in key.items()))
        tokens, times, trained = (
            pc.fill_null(table[column].filter(is_of), 0).to_numpy().astype(np.int64)
            for column in columns[2:]
        )
        total = int(tokens @ times)
        order = np.argsort(tokens)
        # Lengths 5 7 9 with 1, 3 and 1 copies: 1 4 5 are as long or shorter, and the median, copy 2
        # from 0, is the first with more than 2: 7.
        copies = np.cumsum(times[order])
        wanted = [int(share * (copies[-1] - 1)) for share in _QUANTILES.values()]
        lengths = tokens[order][np.searchsorted(copies, wanted, "right")]
        found.append(
            {
                **key,
                "records": len(tokens),
                "tokens": total,
                "trained": round(int(trained @ times) / max(total, 1), 4),
                **dict(zip(_QUANTILES, map(int, lengths), strict=True)),
            }
        )
    return found


def _by_split(opened: OpenVersion) -> list[dict[str, object]]:
    columns = ("split", "num_tokens", "num_trained", "fill")
    packs = read_view(opened, "packs", columns)
    records = read_view(opened, "records", ("split", "times")).group_by("split")
    num_records = dict(
        zip(*records.aggregate([("times", "sum")]).to_pydict().values(), strict=True)
    )
    sums = [("num_tokens", "sum"), ("num_trained", "sum")]
    grouped = packs.group_by("split").aggregate([*sums, ("fill", "count"), ("fill", "mean")])
    return [
        {
            "split": row["split"],
            "packs": row["fill_count"],
            "fill": round(row["fill_mean"], 4),
            "records": num_records.get(row["split"], 0),
            "tokens": row["num_tokens_sum"],
            "trained": round(row["num_trained_sum"] / max(row["num_tokens_sum"], 1), 4),
        }
        for row in grouped.sort_by([("split", "descending")]).to_pylist()
    ]
