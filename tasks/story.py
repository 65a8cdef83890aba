"""Log what happens to the data of a run: one line per step, a warning for bad rows, the ledger.

    validate: 304 rows in, 295 rows out; quarantined: duplicate_key 1, json 1 (0.2 s)
    tokenize: 295 rows in, 295 rows out; 30,246 tokens (cached)
    audit: 9 jobs (0.4 s)

The line of a step that quarantined rows is a WARNING, and names the location of the first row with
the most frequent reason.
"""

import logging
from collections.abc import Sequence
from textwrap import shorten

from packhouse.addons.quarantine import count_reasons, read_bad_rows
from packhouse.cli.summary import ledger_block
from packhouse.read.streams import lines_of_rows, place_of
from packhouse.recipe import Recipe
from packhouse.records.ledger import RowCounts, filters_of, ledger_of, units_of
from packhouse.run.cache import AnyReceipt
from packhouse.run.chain import Prepared
from packhouse.system.escaping import for_terminal
from packhouse.system.wording import counted, text_table

log = logging.getLogger("packhouse.flows")

_MOST_DETAIL = 200


def log_step(
    recipe: Recipe, before: Sequence[AnyReceipt], receipts: Sequence[AnyReceipt], seconds: float
) -> None:
    """Log the result of a step.

    Args:
        recipe: recipe of the run.
        before: receipts of the previous steps.
        receipts: receipts of the step's jobs.
        seconds: wall time of the whole step.
    """
    step, said = receipts[0].step, [counted(len(receipts), "job")]
    is_bad = False
    if any(isinstance(receipt.facts, RowCounts) for receipt in receipts):
        ledger = ledger_of([*before, *receipts])
        line, (taken, given) = ledger[-1], units_of(ledger)[step]
        is_bad = bool(line.quarantined)
        said = [f"{counted(line.rows_in, taken)} in, {counted(line.rows_out, given)} out"]
        if line.tokens_out is not None:
            said[0] += f", {counted(line.tokens_out, 'token')}"
        reasons = ledger_block(ledger, []).lines
        said += [text.removeprefix(step).strip() for text in reasons if text.startswith(f"{step} ")]
    cached = sum(receipt.cached for receipt in receipts)
    how = "cached" if cached == len(receipts) else f"{seconds:.1f} s"
    if 0 < cached < len(receipts):
        how += f", {cached:,} of {counted(len(receipts), 'job')} cached"
    said[-1] += f" ({how})"
    if is_bad and (first := _first_bad_row(recipe, receipts)):
        said.append(first)
    log.log(logging.WARNING if is_bad else logging.INFO, "%s: %s", step, "; ".join(said))


def _first_bad_row(recipe: Recipe, receipts: Sequence[AnyReceipt]) -> str:
    files = [r.path("quarantined.arrow") for r in receipts if "quarantined.arrow" in r.files]
    bad = read_bad_rows(files)
    if bad is None:
        return ""
    most = count_reasons(bad, 1)[0]
    (row,) = most.samples
    place = place_of(row, lines_of_rows([row], recipe.sources))
    detail = shorten(row["detail"], _MOST_DETAIL, placeholder="...")
    return for_terminal(f"the first {most.reason} is {place}: {detail}")


def log_end(prepared: Prepared) -> None:
    """Log the ledger: rows in and out of every step."""
    block = ledger_block(prepared.ledger, filters_of(prepared.published.sources))
    table = text_table([block.columns, *block.rows])
    log.info("%s", "\n".join(["the ledger of the run", table, *block.lines]))
