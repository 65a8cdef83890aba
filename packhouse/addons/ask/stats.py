"""`packhouse stats VERSION`: how much there is of what, by source and by split."""

import json

import click

from packhouse.addons.ask.query import read
from packhouse.addons.ask.sql import print_rows
from packhouse.cli.options import json_option
from packhouse.store.read import open_address
from packhouse.system.terminal import echo


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
