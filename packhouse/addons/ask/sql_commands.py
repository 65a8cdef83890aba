"""`packhouse sql VERSION QUERY` and `packhouse stats VERSION`: query a version."""

import csv
import json
import math
import os
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pyarrow as pa

from packhouse.addons.ask.duckdb_queries import ask, read
from packhouse.cli import cache_option, json_option, number_option
from packhouse.run.step_cache import Workspace
from packhouse.store.version_reader import open_address
from packhouse.system.escaping import for_terminal
from packhouse.system.terminal import cell_text, console, echo, echo_data, print_facts, print_table
from packhouse.system.wording import counted

_CELL = 400
"""Maximum number of characters per table cell; --json and --csv print all."""


@click.command()
@click.argument("target", metavar="STORE/DATASET[@REF]")
@click.argument("query", metavar="QUERY")
@json_option("Print one line of JSON per row.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@number_option("--limit", "Number of rows to print; 0 prints all.", default=50)
@cache_option("Cache folder.")
def sql(target: str, query: str, as_json: bool, as_csv: bool, limit: int, cache: Path) -> None:
    """Query a version with SQL (DuckDB).

    QUERY is a SELECT statement over these tables:

    \b
      records     source, row, split, outcome, num_tokens, ...
      packs       split, pack, num_records, num_tokens, num_trained, fill
      quarantine  source, row, step, reason, detail
      dropped     source, row, reason, detail
      ledger      step, event, reason, number, unit, tokens
      audit       source, name, value
      versions    version, refs, packs, tokens, bytes

    The large columns text, input_ids, trained, loss_weights and quarantine.raw are returned only
    if QUERY names them; `select *` returns all others.

    \b
    Example:
      $ packhouse sql ./store/demo "select split, count(*) from packs group by 1"
      split  count_star()
      train            51
      eval              8
    """
    tokenizers = Workspace(cache=cache).tokenizers
    table = ask(open_address(target), query, tokenizers, is_printed=True)
    if as_json:
        for row in _plain_rows(table):
            echo(json.dumps(row))
    elif as_csv:
        lines: list[str] = []
        writer = csv.writer(SimpleNamespace(write=lines.append))
        writer.writerow(table.column_names)
        for row in _plain_rows(table):
            plain = row.values()
            writer.writerow([json.dumps(v) if isinstance(v, list | dict) else v for v in plain])
        echo_data("\n".join(line.removesuffix("\r\n") for line in lines))
    else:
        print_rows(table, limit)


def _plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows with JSON values only; columns of JSON are parsed."""
    is_json = {field.name for field in table.schema if isinstance(field.type, pa.JsonType)}
    return [
        {
            name: _plain(json.loads(value) if value is not None and name in is_json else value)
            for name, value in row.items()
        }
        for row in table.to_pylist()
    ]


def _plain(value: object) -> object:
    """Convert a value to JSON's types: DuckDB's sums are decimals, and JSON has no infinity."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_rows(table: pa.Table, limit: int = 0) -> None:
    """Print rows as a table, or as one block per row if the terminal is too narrow for the columns.

    Args:
        table: rows to print.
        limit: maximum number of rows; 0 prints all.
    """
    shown = [
        [_cut(value) for value in row.values()]
        for row in _plain_rows(table.slice(0, limit or table.num_rows))
    ]
    names = [for_terminal(name) for name in table.schema.names]
    cells = [[cell_text(value) for value in row] for row in shown]
    widths = [max(map(len, (name, *of))) for name, *of in zip(names, *cells, strict=True)]
    # Text columns are folded, but not below 16 characters: `from records` has 11 columns.
    folded = [
        min(width, 16) if pa.types.is_nested(kind) or pa.types.is_string(kind) else width
        for width, kind in zip(widths, table.schema.types, strict=True)
    ]
    out = console()
    # In a pipe the width is unknown, and programs expect one line per row.
    has_width = out.is_terminal or "COLUMNS" in os.environ
    if has_width and sum(folded) + 2 * len(folded) - 2 > out.width:
        for number, row in enumerate(cells, 1):
            print_facts(f"-- {number:,} of {len(cells):,} --", list(zip(names, row, strict=True)))
    else:
        print_table(names, shown)
    if len(shown) < table.num_rows:
        echo(f"{len(shown):,} of {counted(table.num_rows, 'row')}; --limit 0 shows all")


def _cut(value: object) -> object:
    text = json.dumps(value) if isinstance(value, list | dict) else value
    is_long = isinstance(text, str) and len(text) > _CELL
    return f"{str(text)[: _CELL - 4]} ..." if is_long else value


@click.command()
@click.argument("target", metavar="STORE/DATASET[@REF]")
@json_option()
def stats(target: str, as_json: bool) -> None:
    """Print record counts, lengths and the share of trained tokens, by source and by split.

    By source, each record is counted once; by split, each of its copies in the packs is counted.

    \b
    Example:
      $ packhouse stats ./store/demo
      source  split  records  tokens  trained  median  p90  p99  longest
      chats   train       78  11,216   0.3844     131  247  270      271
      ...
      split  packs    fill  records  tokens  trained
      train     43  0.9981      216  21,975   0.4905
    """
    opened = open_address(target)
    sources, splits = read(opened, _BY_SOURCE), read(opened, _BY_SPLIT)
    if as_json:
        echo(json.dumps({"sources": sources.to_pylist(), "splits": splits.to_pylist()}))
        return
    print_rows(sources)
    echo()
    print_rows(splits)


_BY_SOURCE = """
WITH lengths AS (  -- how many records and copies of each length, chats/chats.jsonl being of chats
  SELECT
    split_part(source, '/', 1) AS source, split, num_tokens, count(*) AS records,
    sum(times) AS copies, sum(coalesce(num_trained, 0) * times) AS trained
  FROM records WHERE times > 0 GROUP BY ALL
), counted AS (
  SELECT
    *, sum(copies) OVER own AS total,
    sum(copies) OVER (own ORDER BY num_tokens) AS up_to  -- copies that are as long or shorter
  FROM lengths WINDOW own AS (PARTITION BY source, split)
)
-- Lengths 5 7 9 with 1, 3 and 1 copies: 1 4 5 are as long or shorter. The median, copy 2 from 0, is
-- the first length with more than 2: 7.
SELECT
  source, split, sum(records)::BIGINT AS records, sum(num_tokens * copies)::BIGINT AS tokens,
  round(sum(trained) / greatest(sum(num_tokens * copies), 1), 4) AS trained,
  min(num_tokens) FILTER (up_to > (total - 1) * 5 // 10) AS median,
  min(num_tokens) FILTER (up_to > (total - 1) * 9 // 10) AS p90,
  min(num_tokens) FILTER (up_to > (total - 1) * 99 // 100) AS p99,
  max(num_tokens) AS longest
FROM counted GROUP BY source, split ORDER BY source, split DESC
"""

_BY_SPLIT = """
SELECT
  split, count(*) AS packs, round(avg(fill), 4) AS fill,
  coalesce(any_value(r.records), 0)::BIGINT AS records, sum(num_tokens)::BIGINT AS tokens,
  round(sum(num_trained) / greatest(sum(num_tokens), 1), 4) AS trained
FROM packs LEFT JOIN (SELECT split, sum(times) AS records FROM records GROUP BY split) r
  USING (split)
GROUP BY split ORDER BY split DESC
"""
