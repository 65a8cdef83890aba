"""What rows give beside their conversation: arguments of the chat template, and a loss weight.

`chat_template_kwargs` and `documents` are fields of any shape of row, as TRL and transformers call
them; `loss_weight` is one where `fields` names it. `allowed_fields` names those that are not read.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.read.chat_messages import kind_of, parse_field, read_tools
from packhouse.read.message_weights import MAX_WEIGHT
from packhouse.read.records import Ints, Rows
from packhouse.recipe import SourceConfig
from packhouse.recipe.rows import check_arguments
from packhouse.system.plugins import BadRowError

_ARGUMENTS = ("chat_template_kwargs", "documents")
BESIDE = (*_ARGUMENTS, "loss_weight")
"""Our names of these fields."""

_LEAVE_OUT = "if it is not for the chat template, name it in `allowed_fields`"
_WEIGHTS = (1e-6, MAX_WEIGHT)  # a product of two, and of a message's own, is a float32 over 0


@dataclass(frozen=True, slots=True)
class Beside:
    """What rows give beside their conversation: an item for each row, null where it gives none."""

    arguments: pa.Array
    """JSON object, keys sorted."""
    tools: pa.Array
    """JSON list of definitions that stand among the arguments."""
    weights: pa.Array
    """float32, the source's factor in it."""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Index of each bad row -> reason, sentence."""

    def take(self, rows: Ints | list[int]) -> "Beside":
        """The same for some of the rows."""
        at = pa.array(rows, pa.int64())
        return Beside(self.arguments.take(at), self.tools.take(at), self.weights.take(at))


def names_beside(keys: Collection[str], config: SourceConfig) -> dict[str, str]:
    """Our field -> the row's, for those among its keys.

    Example:
        >>> config = SourceConfig(path="", fields={"loss_weight": "quality"})
        >>> names_beside(["messages", "documents", "quality"], config)
        {'documents': 'documents', 'loss_weight': 'quality'}
    """
    taken = {*config.fields.values(), *(config.allowed_fields or ())}
    names = {ours: ours for ours in _ARGUMENTS if ours not in taken}
    names |= {ours: config.fields[ours] for ours in BESIDE if ours in config.fields}
    return {ours: theirs for ours, theirs in names.items() if theirs in keys}


def read_beside(rows: Rows, config: SourceConfig) -> Beside:
    """Read these fields of rows."""
    number = len(rows)
    arguments: list[str | None] = [None] * number
    tools: list[str | None] = [None] * number
    weights: list[float | None] = [None if config.loss_weight == 1 else config.loss_weight] * number
    failures: dict[int, tuple[str, str]] = {}
    naming = {keys: names_beside(keys, config) for keys in rows.layouts}
    for index, row in enumerate(rows) if any(naming.values()) else ():
        names = naming[tuple(row)] if isinstance(row, dict) else {}
        present = {ours: row[theirs] for ours, theirs in names.items() if row[theirs] is not None}
        try:
            if "loss_weight" in present:
                own = _read_weight(present.pop("loss_weight"), names["loss_weight"])
                weight = own * config.loss_weight
                weights[index] = None if weight == 1 else weight
            if present:
                arguments[index], tools[index] = _read_arguments(present, names)
        except BadRowError as bad:
            failures[index] = bad.reason, bad.detail
    return Beside(
        pa.array(arguments, pa.string()),
        pa.array(tools, pa.string()),
        pc.cast(pa.array(weights, pa.float64()), pa.float32()),
        failures,
    )


def _read_weight(value: object, name: str) -> float:
    try:
        weight = float(value) if isinstance(value, str | int | float) else math.nan
    except (ValueError, OverflowError):
        weight = math.nan
    if isinstance(value, bool) or not _WEIGHTS[0] <= weight <= _WEIGHTS[1]:
        low, high = _WEIGHTS
        detail = f"{name} is {str(value)[:40]!r}, not a weight from {low:g} to {high:g}"
        raise BadRowError("loss_weight", detail)
    return weight


def _read_arguments(
    fields: dict[str, object], names: dict[str, str]
) -> tuple[str | None, str | None]:
    """Arguments and tools as JSON."""
    values: dict[str, object] = {}
    for ours in _ARGUMENTS:
        value, name = fields.get(ours), names.get(ours)
        if isinstance(value, str) and value.strip():  # a column of text that holds JSON
            value = parse_field(value, f"{name} ({_LEAVE_OUT})", reason="arguments")
        if not value:
            continue
        if ours == "documents":
            value = {"documents": value}
        if not isinstance(value, dict):
            raise BadRowError("arguments", f"{name} is {kind_of(value)}, no object; {_LEAVE_OUT}")
        if "documents" in value:
            documents = value["documents"]
            if not isinstance(documents, list) or not all(type(each) is dict for each in documents):
                what = f"{name} is no list of objects, such as {{title, text}}"
                raise BadRowError("arguments", f"{what}; {_LEAVE_OUT}")
            own = [{key: v for key, v in each.items() if v is not None} for each in documents]
            value = value | {"documents": own}
        # A null is none: Arrow fills the keys of other rows with them.
        values |= {key: item for key, item in value.items() if item is not None}
    tools = read_tools(values.pop("tools", None))
    try:
        check_arguments(values)
        text = orjson.dumps(dict(sorted(values.items()))).decode() if values else None
    except (ValueError, TypeError) as error:  # of orjson as well
        raise BadRowError("arguments", f"{error}") from None
    if text is not None and "\\u0000" in text:
        raise BadRowError("control", "an argument of the chat template holds the NUL character")
    return text, tools
