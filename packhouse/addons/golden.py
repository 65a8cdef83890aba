"""Check golden conversations: pinned output of a recipe, compared in every build.

A file contains conversations with the text, ids and trained tokens that their owner reviewed once
(in `examples`, if one gives several examples or windows). Before any step runs, they go through the
recipe's own renderer and tokenizer, and any difference stops the build and is shown. A dozen
conversations cost the load of the tokenizer, 0.2 to 0.5 s.

    {"name": "...", "messages": [{"role": "user", "content": "Hi"}, ...], "text": "<|im_start|>...",
     "input_ids": [1, 85, ...], "trained": [[12, 15]], "trained_text": ["Hello.<|im_end|>"]}

`packhouse golden write` pins them, `packhouse golden check` and each run check them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import orjson
import pyarrow as pa
import yaml

from packhouse.cli import recipe_options
from packhouse.errors import AuditError, ConfigError
from packhouse.read.source_files import source_name
from packhouse.recipe import Recipe
from packhouse.records.gate_results import GateResult
from packhouse.records.message_rules import Answers, role_violations
from packhouse.records.record_ids import conversation_ids
from packhouse.records.table_schemas import (
    CONVERSATION,
    MESSAGE,
    VALIDATED,
    read_table,
    with_column,
)
from packhouse.render import make_renderer
from packhouse.render.renderer import make_window_rule, run_template
from packhouse.run.chain import plan_jobs
from packhouse.run.prepare_arguments import read_recipe
from packhouse.run.step import execute
from packhouse.run.step_cache import Workspace
from packhouse.system.terminal import echo
from packhouse.system.wording import counted
from packhouse.tokenize import load_snapshot, tokenize_table
from packhouse.tokenize.text_to_tokens import cuts_prompts
from packhouse.tokenize.tokenizer_loading import tokenizer_folder

GIVEN = ("name", "source", "messages", "tools", "arguments", "weight", "label")
"""Input keys of a conversation; all other keys of an item are the expected output."""

_PINNED = ("text", "input_ids", "trained", "trained_text", "weights")
_EXAMPLES = "examples"
_CONTEXT = 40
_OTHER_BREAKS = "\r\x85\u2028\u2029"  # YAML folds these, except in double quotes


def check_pinned(recipe: Recipe, tokenizers: Path | None = None) -> GateResult:
    """Check the recipe's golden conversations.

    Args:
        recipe: recipe with `golden`, the path of the file.
        tokenizers: folder of tokenizer snapshots.

    Raises:
        AuditError: the output of a conversation differs; the message shows where.
        ConfigError: the file cannot be read or is invalid.
    """
    assert recipe.golden is not None
    try:
        golden = read_golden(recipe.golden)
    except ConfigError as error:
        error.facts["gates"] = (GateResult(name="golden", outcome="failed", detail=str(error)),)
        raise
    made = pin(golden, recipe, tokenizers)
    faults = [
        f"conversation {number} ({item.get('name', 'no name')}): {fault}"
        for number, (item, new) in enumerate(zip(golden, made, strict=True))
        if (fault := _difference(item, new)) is not None
    ]
    total = len(golden)
    text = f"{counted(total, 'conversation')} match"
    if faults:
        more = f"\n  ... and {len(faults) - 3} more" if len(faults) > 3 else ""
        text = (
            f"{len(faults)} of {total} golden conversations in '{recipe.golden}' do not match:\n  "
            + "\n  ".join(faults[:3])
            + f"{more}\nIf this is intended, review and accept them with `packhouse golden "
            "write RECIPE`"
        )
    result = GateResult(
        name="golden",
        outcome="failed" if faults else "passed",
        value=len(faults),
        limit=0,
        total=total,
        detail=text,
    )
    if faults:
        raise AuditError(text, differences=faults, gates=(result,))
    return result


def read_golden(path: str | Path) -> list[dict[str, object]]:
    """Read a file of golden conversations, JSON Lines or YAML.

    Raises:
        ConfigError: the file does not exist or is invalid.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if path.suffix in (".yaml", ".yml"):
            items = yaml.safe_load(data)
        else:
            items = [orjson.loads(line) for line in data.split(b"\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"golden file '{path}' cannot be read: {error}") from None
    except (yaml.YAMLError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"golden file '{path}' cannot be parsed: {error}") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"golden file '{path}' is not a list of conversations")
    for number, item in enumerate(items):
        _check_form(item, f"golden file '{path}', conversation {number}")
    return items


def write_golden(path: Path, items: Sequence[Mapping[str, object]]) -> None:
    """Write pinned conversations as YAML or JSON Lines, depending on the suffix."""
    if path.suffix in (".yaml", ".yml"):
        text = yaml.dump(
            list(items), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
        )
        path.write_text(text, encoding="utf-8")
    else:
        path.write_bytes(b"".join(orjson.dumps(item) + b"\n" for item in items))


class _Dumper(yaml.SafeDumper):
    """Writes texts as blocks and ids on one line, so that people can read them."""

    # PyYAML writes a list that two items share as `&id001` and `*id001`.
    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        if any(c in data for c in _OTHER_BREAKS):
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_items(self, data: Sequence[object]) -> yaml.SequenceNode:
        is_flat = all(isinstance(item, int) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_flat)


_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(list, _Dumper.represent_items)


def pin(
    items: Sequence[Mapping[str, object]], recipe: Recipe, tokenizers: Path | None = None
) -> list[dict[str, Any]]:
    """Return conversations with the output that the recipe gives for them.

    Returns:
        The items with `text`, `input_ids`, `trained` (token ranges), `trained_text`, and `weights`
        of the ranges if one is not 1; with `refused` instead if a step quarantines the
        conversation; or with `examples`, a list of these, if it becomes several.
    """
    made: list[dict[str, object]] = run_template(partial(_pin, items, recipe, tokenizers), recipe)
    return made


def _pin(
    items: Sequence[Mapping[str, Any]], recipe: Recipe, tokenizers: Path | None
) -> list[dict[str, object]]:
    """Render and tokenize the items (in a worker)."""
    snapshot = load_snapshot(recipe.tokenizer, tokenizers, recipe.tokenize.pipeline)
    config = recipe.tokenize.model_copy(update={"encoder": "hf"})  # the ids are the same
    window = make_window_rule(recipe, snapshot, tokenizers)
    folder = tokenizer_folder(recipe.tokenizer)
    # Lists, because a conversation may become several examples. When only the last was compared, a
    # template that renders earlier answers otherwise passed.
    made: dict[int, list[dict[str, object]]] = {number: [] for number in range(len(items))}
    names = {source_name(source): source.label_names for source in recipe.sources}
    default = source_name(recipe.sources[0])
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.get("source", default), []).append(number)
    # Label names differ between sources, so each source needs its own renderer.
    for source, group in groups.items():
        labels = names.get(source.split("/")[0])
        renderer = make_renderer(recipe.format, snapshot, labels, window, folder)
        rendered = renderer.render(_validated(items, group))
        # If item 2 becomes two examples, rows come from items [0 2 2]. They are numbered 0, 1, 2
        # while they are tokenized, so that each can be identified afterwards.
        origin = rendered.formatted["row"].to_pylist()
        numbers = pa.array(range(len(origin)), pa.int64())
        numbered = with_column(rendered.formatted, "row", numbers)
        tokenized = tokenize_table(
            numbered, snapshot, config, tokenizers, cut_at_spans=cuts_prompts(recipe)
        )
        texts, spans = _lists(numbered, "text", "trained_spans")
        results = _lists(tokenized.tokenized, "row", "input_ids", "trained_ranges", "range_weights")
        for row, ids, ranges, weights in zip(*results, strict=True):
            data = texts[row].encode()
            output = {
                "text": texts[row],
                "input_ids": ids,
                "trained": [[*span.values()] for span in ranges],
                "trained_text": [data[slice(*span.values())].decode() for span in spans[row]],
            }
            made[origin[row]].append(output | _given({"weights": weights}))
        for table, items_of in ((tokenized.quarantined, origin), (rendered.quarantined, None)):
            for row, reason, detail in zip(*_lists(table, "row", "reason", "detail"), strict=True):
                number = row if items_of is None else items_of[row]
                made[number].append({"refused": f"{reason}: {detail}"})
    return [
        _given({key: item.get(key) for key in GIVEN})
        | (made[number][0] if len(made[number]) == 1 else {_EXAMPLES: made[number]})
        for number, item in enumerate(items)
    ]


def _check_form(item: object, where: str) -> None:
    """Reject an item that is not a valid conversation."""
    given = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(given, list):
        raise ConfigError(f"{where} has no list of messages")
    known = {*GIVEN, *_PINNED, _EXAMPLES, "refused"}
    unknown = sorted(item.keys() - known)
    if unknown:
        raise ConfigError(f"{where} has an unknown key '{unknown[0]}'; known: {sorted(known)}")
    for at, message in enumerate(given):
        is_object = isinstance(message, dict)
        unknown = sorted(message.keys() - {f.name for f in MESSAGE}) if is_object else ["?"]
        if unknown:
            names = ", ".join(f.name for f in MESSAGE)
            raise ConfigError(f"{where}, message {at}: unknown key '{unknown[0]}'; known: {names}")
    try:
        messages = pa.array([given], CONVERSATION)
        messages.validate(full=True)
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    answers: Answers = "text" if len(given) == 1 else "required"
    if item.get("label") is not None:
        answers = "label"
    violations = role_violations(messages, allow_ends_on_user=True, answers=answers)
    for reason, detail in violations.values():
        raise ConfigError(f"{where}: {detail} ({reason})")


def _validated(items: Sequence[Mapping[str, object]], numbers: list[int]) -> pa.Table:
    """Return the items in the format of the validate step, with their number as `row`."""
    messages = pa.array([items[i]["messages"] for i in numbers], CONVERSATION)
    tools, arguments, weights, labels = (
        pa.array([items[i].get(name) for i in numbers], VALIDATED.field(name).type)
        for name in ("tools", "arguments", "weight", "label")
    )
    ids = conversation_ids(messages, tools, labels, arguments, weights)
    source = pa.array(["golden"] * len(numbers)).dictionary_encode()
    rows = pa.array(numbers, pa.int64())
    columns = [ids, source, rows, messages, tools, arguments, weights, labels, ids]
    return pa.table(columns, schema=VALIDATED)


def _lists(table: pa.Table, *names: str) -> list[list[Any]]:
    """Return columns as lists."""
    return [table[name].to_pylist() for name in names]


def _difference(item: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe the first difference; None if the output is as pinned."""
    if _EXAMPLES in item or _EXAMPLES in new:
        items, made = item.get(_EXAMPLES, [item]), new.get(_EXAMPLES, [new])
        if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
            return f"`{_EXAMPLES}` is not a list of expected results"
        if len(items) != len(made):
            return f"was {counted(len(items), 'example')}, now {len(made)}"
        faults = (_difference(*pair) for pair in zip(items, made, strict=True))
        named = (f"example {number}: {fault}" for number, fault in enumerate(faults) if fault)
        return next(named, None)
    if "refused" in new or "refused" in item:
        was, now = item.get("refused", "accepted"), new.get("refused", "accepted")
        return None if was == now else f"was {was}, now {now}"
    if all(name not in item for name in _PINNED):
        return "nothing is pinned: add text, input_ids or trained"
    # In the order of the steps, so that a changed text is named before the ids that it changes.
    for name in (name for name in _PINNED if name in item and item[name] != new.get(name)):
        was, now = item[name], new.get(name, [])
        pairs = enumerate(zip(was, now, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(was), len(now)))
        if name == "text":
            low = max(0, at - 10)
            cut = slice(low, low + _CONTEXT)
            return f"text differs at character {at}:\n    - {was[cut]!r}\n    + {now[cut]!r}"
        cut = slice(max(0, at - 2), at + 3)
        return f"{name} differ at [{at}]:\n    - {was[cut]}\n    + {now[cut]}"
    return None


_LOOK_AT = 1000  # rows per shard searched for different shapes


@click.group()
def golden() -> None:
    """Pin the text, IDs and trained tokens that a recipe must produce for chosen conversations.

    \b
    Example:
      $ packhouse golden write recipe.yaml --count 5
      5 golden conversations in golden.yaml. Check what is trained:
      ...                       # review them and set `golden: golden.yaml`
      $ packhouse golden check recipe.yaml
    """


@golden.command()
@recipe_options
def check(recipe_path: str, overrides: tuple[str, ...], cache: Path, as_json: bool) -> None:
    """Check the golden conversations of RECIPE, as every run does.

    \b
    Example:
      $ packhouse golden check recipe.yaml
      golden: 5 conversations match
    """
    recipe = read_recipe(recipe_path, overrides)
    if recipe.golden is None:
        raise ConfigError(
            f"recipe '{recipe_path}' has no `golden: FILE`. Create one with `packhouse golden "
            "write`."
        )
    result = check_pinned(recipe, Workspace(cache=cache).tokenizers)
    if as_json:
        echo(json.dumps({"golden": result.total}))
    else:
        echo(f"golden: {result.detail}")


@golden.command()
@recipe_options
@click.option(
    "--row",
    "rows",
    multiple=True,
    metavar="SOURCE/FILE:ROW",
    help="Pin this row, such as chats/chats.jsonl:12. May be repeated.",
)
@click.option(
    "--count", type=int, help="Number of rows to pin, starting with rows of different shapes."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Golden file to write. [default: the one in the recipe, or golden.yaml next to it]",
)
def write(
    recipe_path: str,
    overrides: tuple[str, ...],
    cache: Path,
    as_json: bool,
    rows: tuple[str, ...],
    count: int | None,
    out: Path | None,
) -> None:
    """Pin the output of RECIPE for the selected rows and for rows already in the file.

    Review the file before you rely on it: it pins the current output, right or wrong.

    \b
    Example:
      $ packhouse golden write recipe.yaml --row chats/chats.jsonl:12
      1 golden conversation in golden.yaml. Check what is trained:
        chats/chats.jsonl:12: ['You need 730 boxes.<|im_end|>']
    """
    recipe = read_recipe(recipe_path, overrides)
    path = out or Path(recipe.golden or Path(recipe_path).parent / "golden.yaml")
    items = read_golden(path) if path.exists() else []
    workspace = Workspace(cache=cache)
    if rows or count or not items:
        chosen = _chosen(recipe, workspace, rows, count if count or rows else 5)
        names = {item.get("name") for item in items}
        items += [item for item in chosen if item["name"] not in names]
    pinned = pin(items, recipe, workspace.tokenizers)
    write_golden(path, pinned)
    if as_json:
        echo(json.dumps({"golden": len(pinned), "file": str(path)}))
        return
    echo(f"{len(pinned)} golden conversations in {path}. Check what is trained:")
    for item in pinned:
        for example in item.get("examples", [item]):
            shown = example.get("trained_text") or example.get("refused")
            echo(f"  {item.get('name', '')}: {shown}")


def _chosen(
    recipe: Recipe, workspace: Workspace, rows: Sequence[str], count: int | None
) -> list[dict[str, Any]]:
    """Return the named rows, then `count` more: first one row per shape (its roles in order).

    With 900 rows (user, assistant), 90 rows (system, user, assistant) and `count` 3: one row of
    each shape, then the first of the others.
    """
    wanted = set(rows)
    found: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[str, ...], dict[str, Any]] = {}
    others: list[dict[str, Any]] = []
    for item in _rows(recipe, workspace, everything=bool(wanted)):
        if item["name"] in wanted:
            found[item["name"]] = item
        shape = tuple(message["role"] for message in item["messages"])
        if shape not in shapes:
            shapes[shape] = item
        elif len(others) < (count or 0):
            others.append(item)
    missing = wanted - found.keys()
    if missing:
        raise ConfigError(
            f"no row '{sorted(missing)[0]}' passed validation. Names look like SOURCE/FILE:0."
        )
    more = [item for item in (*shapes.values(), *others) if item["name"] not in wanted]
    return [*(found[row] for row in dict.fromkeys(rows)), *more[: count or 0]]


def _rows(recipe: Recipe, workspace: Workspace, *, everything: bool) -> Iterator[dict[str, Any]]:
    """Yield the conversations of every shard, named by source, file and row."""
    for job in plan_jobs(recipe).validate:
        # The step stays in the cache, where the next run finds it.
        table = read_table(execute(job, recipe, workspace).path("validated.arrow"))
        asides = ["tools", "arguments", "weight", "label"]
        table = table.select(["source", "row", "messages", *asides])
        for row in (table if everything else table.slice(0, _LOOK_AT)).to_pylist():
            source, number, messages = (row.pop(name) for name in ("source", "row", "messages"))
            item = {"name": f"{source}:{number}", "source": source.split("/")[0]}
            yield {**item, "messages": [*map(_given, messages)], **_given(row)}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
