"""Render validated tables to formatted ones with any kind of template, in a worker process.

`make_renderer` picks the engine for the template of a recipe. `run_template` runs a call in a
worker (`packhouse.system.worker`). The functions after it are such calls: they take paths and
settings, write tables to a folder and return plain JSON. A worker imports this module when it
starts (0.5 s of CPU). Importing steps, sources or the store here would add 0.3 s.

An engine renders the rows that its template supports and refuses each other row with a reason.
Nothing is dropped: rows in = rows formatted + rows quarantined, asserted here. Tables are rendered
in parts of bounded size, so memory is a few times `PART_BYTES` for tables of any size.

Conversations that are too long for a pack can be split into windows that fit. A window is a run of
exchanges (a user turn and all up to the next) after the system prompt, which each window repeats.
Windows are filled from the end, so that the last answer has as much context as fits. Each trained
message is trained in exactly one window, and a window with nothing trained is left out. An exchange
that does not fit even by itself becomes a window, which pack drops and counts. The template renders
each window as a conversation, so this works with any template, and lengths are counted in real
tokens. A long row is rendered and tokenized about 2 log2(exchanges) times per window.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig, Recipe, TokenizeConfig
from packhouse.recipe.sections import TEMPLATES, is_chat, is_renderer
from packhouse.records.arrays import Bools, Float32s, Int64s, one_chunk
from packhouse.records.conversation_shapes import Conversations, strip_thinking
from packhouse.records.ledger import RenderCounts
from packhouse.records.message_rules import SYSTEM, USER, FlatMessages
from packhouse.records.preference_pairs import REJECTED, cut_behind_answers, keep_both
from packhouse.records.record_ids import derive, num_rows, replace_rows, rewrites, take_records
from packhouse.records.table_schemas import (
    FORMATTED,
    QUARANTINED,
    REFUSED,
    VALIDATED,
    read_table,
    refused_rows,
    with_column,
    write_table,
)
from packhouse.registry import function_of_addon
from packhouse.render.chat_engine import ChatEngine
from packhouse.render.jinja_sandbox import pinned_date
from packhouse.render.rendered_texts import TEXTS, Texts
from packhouse.render.row_renderer import RowRenderer
from packhouse.render.single_turn import SINGLE_TURN, SingleTurnEngine, make_single_turn
from packhouse.system.plugins import find_plugin, pip_install
from packhouse.system.worker import run_in_worker
from packhouse.tokenize import TokenizerSnapshot, load_snapshot, tokenize_shard, tokenize_table
from packhouse.tokenize.encoders import (
    EncoderError,
    GigatokenEncoder,
    TokenLimit,
    ends_of,
    load_tokenizer,
    read_pipeline,
)
from packhouse.tokenize.text_to_tokens import cuts_prompts
from packhouse.tokenize.tokenizer_loading import MEMORY_PER_BYTE, tokenizer_bytes, tokenizer_folder

# Memory is a few times this for tables of any size.
PART_BYTES = 128 * 2**20
PART_ROWS = 2**18
TURN_FACTOR = 4  # about how much larger a part may become as records of single turns

Window = tuple[int, int, int]
"""Row, and its first and last exchange, both inclusive."""


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Decides which conversations fit in one window."""

    seq_len: int
    """Maximum number of tokens in a window."""
    snapshot: TokenizerSnapshot
    config: TokenizeConfig
    cut_at_spans: bool
    """See `tokenize_table`."""
    cache: Path | None = None
    """Folder of tokenizer snapshots."""

    def num_tokens(self, formatted: pa.Table) -> Int64s:
        """Return the number of tokens in each row of a FORMATTED table; -1 if it is refused."""
        # Several records may share a row, so number them: refused ones are missing below.
        numbers = pa.array(np.arange(formatted.num_rows))
        numbered = with_column(formatted, "row", numbers)
        tokenized = tokenize_table(
            numbered, self.snapshot, self.config, self.cache, cut_at_spans=self.cut_at_spans
        ).tokenized
        lengths = np.full(formatted.num_rows, -1, np.int64)
        lengths[tokenized["row"].to_numpy()] = tokenized["num_tokens"].to_numpy()
        return lengths

    def over(self, formatted: pa.Table) -> Bools:
        """Return which rendered rows are too long."""
        # Most fit by their bytes and are not tokenized. A token covers at least one byte, and a
        # tokenizer adds fewer than 8: a text of 1,500 bytes has at most 1,508 and fits into 2,048.
        over = pc.binary_length(formatted.column("text")).to_numpy() + 8 > self.seq_len
        if over.any():
            over[over] = self.num_tokens(formatted.filter(pa.array(over))) > self.seq_len
        return np.asarray(over)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Result of `Renderer.render`."""

    formatted: pa.Table = field(default_factory=FORMATTED.empty_table)
    """Schema FORMATTED, in the order of the input."""
    quarantined: pa.Table = field(default_factory=QUARANTINED.empty_table)
    """Schema QUARANTINED; the step adds the bytes of the rows."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """Counts that are not errors, such as `reasoning_not_rendered`."""
    examples: pa.Table = field(default_factory=VALIDATED.empty_table)
    """Schema VALIDATED: the conversations that were rendered or refused. They differ from the input
    if thinking was stripped or rows were split."""
    stop_tokens: Mapping[str, str] = field(default_factory=dict)
    """Tokens that end answers, with their sources."""
    added: Mapping[str, int] = field(default_factory=dict)
    """Number of rows in excess of the input, by reason: `turns`, `windows`."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders conversations with one template. Created by `make_renderer`.

    The output for a row does not depend on the table's size or on other rows.
    """

    _engine: ChatEngine | SingleTurnEngine
    _config: FormatConfig
    _window: WindowRule | None = None

    def render(self, table: pa.Table) -> Rendered:
        """Render a VALIDATED table.

        Returns:
            Formatted and quarantined rows; together as many as the input and the added rows.

        Raises:
            TemplateError: the template itself cannot be used or proven, for any row.
        """
        factor = TURN_FACTOR if rewrites(self._config) else 1
        num_parts = max(factor * table.nbytes // PART_BYTES, table.num_rows // PART_ROWS) + 1
        step = max(-(-table.num_rows // num_parts), 1)
        done = [Rendered()]
        for start in range(0, table.num_rows, step):
            done += self._render_part(table.slice(start, step))
        rendered = Rendered(
            formatted=pa.concat_tables(each.formatted for each in done),
            quarantined=pa.concat_tables(each.quarantined for each in done),
            examples=pa.concat_tables(each.examples for each in done),
            notes=_total(each.notes for each in done),
            added=_total(each.added for each in done),
            stop_tokens=self._engine.stop_tokens,
        )
        num_out = rendered.formatted.num_rows + rendered.quarantined.num_rows
        assert num_out == table.num_rows + sum(rendered.added.values())
        return rendered

    def _render_part(self, part: pa.Table) -> Iterator[Rendered]:
        part, faults = strip_thinking(part, self._config)
        whole = part
        if faults:  # answers that are only thinking, or whose thinking does not end
            is_bad = np.isin(np.arange(part.num_rows), list(faults))
            bad = refused_rows(part, faults, "format")
            yield Rendered(quarantined=bad, examples=part.filter(pa.array(is_bad)))
            part = part.filter(pa.array(~is_bad))
        num_windows, over = 0, np.zeros(0, np.int64)
        records, formatted, texts = self._records(part)
        if self._window is not None:
            over = np.unique(texts.filled.rows[self._window.over(formatted)])
            if len(over):
                windows, origin = self._windows(part.take(pa.array(over)), self._window)
                num_windows = windows.num_rows - len(over)
                part = replace_rows(part, over, windows, origin)
                records, formatted, texts = self._records(part)
        rows = texts.filled.rows
        # Records of a row are adjacent, so equal neighbours are the records beyond the first.
        num_turns = int(np.count_nonzero(np.diff(rows) == 0))  # rows are ascending
        notes = texts.notes + Counter(windowed_rows=len(over))
        if num_turns and self._window is None:
            notes["repeated_bytes"] += _repeated_bytes(whole, formatted)
        examples, refused = records, np.array(sorted(texts.refused), np.int64)
        if len(refused):
            order = np.argsort(np.concatenate([rows, refused]), kind="stable")
            bad = part.take(pa.array(refused))
            examples = pa.concat_tables([records, bad]).unify_dictionaries().take(pa.array(order))
        yield Rendered(
            formatted=formatted,
            quarantined=refused_rows(part, texts.refused, "format"),
            examples=examples,
            notes=notes,
            added={"turns": num_turns, "windows": num_windows},
        )

    def _records(self, part: pa.Table) -> tuple[pa.Table, pa.Table, Texts]:
        """Return the conversation and the formatted row of each record, and the engine's result."""
        conversations = Conversations.from_table(part, self._config)
        texts = self._engine.render(conversations)
        filled, records = texts.filled, part
        if filled.extents.any():
            # Extents count the recipe's system turn, which is not a message of the row.
            own = FlatMessages.of_table(part)
            added = conversations.messages.counts - own.counts
            each = zip(filled.extents, added[filled.rows].tolist(), strict=True)
            extents = np.fromiter((own and own.without_first(n) for own, n in each), np.object_)
            records = take_records(part, filled.rows, extents, self._config)
        elif len(filled.rows) < part.num_rows:
            records = part.take(pa.array(filled.rows))
        made, names = filled.texts, TEXTS.names
        columns = [made[name] if name in names else records[name] for name in FORMATTED.names]
        return records, pa.table(columns, schema=FORMATTED), texts

    def _windows(self, table: pa.Table, rule: WindowRule) -> tuple[pa.Table, Int64s]:
        """Split over-long conversations into windows.

        Returns:
            The windows (schema VALIDATED), and the row of `table` that each comes from, ascending.
        """
        flat = FlatMessages.of_table(table)
        starts, roles, weights = flat.offsets, flat.roles, flat.decide_weights(self._config)
        edges: list[list[int]] = []  # of each row: start of each exchange, and end of the last
        for start, end in pairwise(starts.tolist()):
            first = start + int(roles[start] == SYSTEM)
            # Several user turns in a row begin one exchange, because the answer is to all of them.
            places = range(first + 1, end)
            begins = (at for at in places if roles[at] == USER and roles[at - 1] != USER)
            edges.append([first, *begins, end])

        def cut(windows: Sequence[Window]) -> pa.Table:
            """Return windows as conversations; only a row's first one trains the system turn."""
            ranges, own_weights = list[list[tuple[int, int]]](), list[Float32s | None]()
            for row, first, last in windows:
                head = int(starts[row]), edges[row][0]
                body = edges[row][first], edges[row][last + 1]
                own = [weights[slice(*head)] * (first == 0), weights[slice(*body)]]
                is_whole = body == (edges[row][0], edges[row][-1])
                ranges.append([head, body])
                own_weights.append(None if is_whole else np.concatenate(own))
            rows = np.array([row for row, _, _ in windows], np.int64)
            return derive(table, self._config, rows, ranges, own_weights)

        def fit(windows: Sequence[Window]) -> list[bool]:
            """Return which windows can be rendered and are short enough."""
            _, formatted, texts = self._records(cut(windows))
            rows = texts.filled.rows
            fitting = np.setdiff1d(rows, rows[rule.over(formatted)])
            return [bool(fits) for fits in np.isin(np.arange(len(windows)), fitting)]

        windows = [
            (row, first, last)
            for row, first, last in _fill_windows([len(own) - 1 for own in edges], fit)
            if (weights[edges[row][first] : edges[row][last + 1]] > 0).any()
        ]
        return cut(windows), np.array([row for row, _, _ in windows], np.int64)


def _repeated_bytes(part: pa.Table, formatted: pa.Table) -> int:
    """Return the bytes of the records of split rows, without the longest record of each row."""
    # A row whose records have 100 and 130 bytes repeats 100.
    texts = pa.table({"row": formatted["row"], "size": pc.binary_length(formatted["text"])})
    sizes = texts.group_by("row").aggregate([("size", "sum"), ("size", "max")])
    # Paths of a message tree share a row; those rows are not counted.
    rows, counts = np.unique(part["row"].to_numpy(), return_counts=True)
    is_alone = np.isin(sizes["row"].to_numpy(), rows[counts == 1])
    repeated = sizes["size_sum"].to_numpy() - sizes["size_max"].to_numpy()
    return int(repeated[is_alone].sum())


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter[str]()).items()))


def _fill_windows(
    num_exchanges: Sequence[int], fit: Callable[[Sequence[Window]], list[bool]]
) -> list[Window]:
    """Return the windows that cover all exchanges of each row, filled from the end of the row.

    Args:
        num_exchanges: number of exchanges of each row.
        fit: says which windows fit. It is asked about one window of every unfinished row at a time.

    Example:
        >>> _fill_windows([5, 1], lambda windows: [last - first < 2 for _, first, last in windows])
        [(0, 0, 0), (0, 1, 2), (0, 3, 4), (1, 0, 0)]
    """
    windows: list[Window] = []
    # Of each row: last exchange of the window, the lowest first one that fits so far, the highest
    # that does not, and the number of exchanges to add next.
    last = np.array(num_exchanges, np.int64) - 1
    good, bad, step = last.copy(), np.full(len(last), -1), np.zeros(len(last), np.int64)
    while len(rows := np.flatnonzero(last >= 0)):
        # Gallop, starting with the last exchange by itself, then halve.
        first = np.where(bad < 0, np.maximum(good - step, 0), (good + bad) // 2)
        asked = [(row, int(first[row]), int(last[row])) for row in rows.tolist()]
        for (row, begin, end), fits in zip(asked, fit(asked), strict=True):
            if fits:
                good[row], step[row] = begin, max(2 * step[row], 1)
            else:
                bad[row] = begin
            if good[row] - bad[row] <= 1:
                windows.append((row, int(good[row]), end))
                last[row] = good[row] = good[row] - 1
                bad[row], step[row] = -1, 0
    return sorted(windows)


VERSION = 4
"""Version of rendering. Raise it when the text, spans or counts of any rows change."""

MAX_ENGINES = 8
_ENGINES: dict[str, ChatEngine] = {}
"""Facts about chat templates, kept because a process renders many shards with the same one."""


def make_renderer(
    config: FormatConfig,
    snapshot: TokenizerSnapshot,
    label_names: list[str] | None = None,
    window: WindowRule | None = None,
    folder: Path | None = None,
    limit: TokenLimit | None = None,
) -> Renderer:
    """Return the renderer of `config.template`.

    Cheap for templates: a chat template is compiled and probed at the first `render`. A renderer in
    Python is imported, which may take seconds.

    Args:
        config: the recipe's format section.
        snapshot: tokenizer whose control tokens and chat template are used.
        label_names: text of label 0, 1, ..., which `classification` trains.
        window: rule for windows, if over-long conversations are split.
        folder: folder of the tokenizer, for renderers in Python that read its files.
        limit: for long rows with many answers: records over it are only counted.

    Raises:
        ConfigError: the template is unknown, a Jinja file cannot be read, or the prompt is invalid.
        TemplateError: the tokenizer lacks something that the template needs (EOS, a chat template).
    """
    name = config.template
    if name in SINGLE_TURN:
        return Renderer(make_single_turn(config, snapshot, label_names), config, window)
    plugin = find_plugin("renderers", name) if is_renderer(name) else None
    source, where = _chat_source(name, snapshot, folder) if plugin is None else ("", str(plugin))
    tokens = snapshot.special_tokens, snapshot.added_tokens, snapshot.stop_tokens
    # Only templates that write the date are compiled again when it changes.
    today = pinned_date() if "strftime_now" in source else None
    # Everything that decides what the engine renders, or which rows it refuses.
    of_template = config.model_dump_json(), where, source, snapshot.fingerprint, tokens, today
    key = repr((*of_template, limit and limit.max_tokens))
    if key not in _ENGINES:
        while len(_ENGINES) >= MAX_ENGINES:
            # With a default, because another thread may have removed it.
            _ENGINES.pop(next(iter(_ENGINES)), None)
        if plugin is None:
            rows = RowRenderer(config, snapshot, source, where)
        else:
            rows = function_of_addon("make_rows")(plugin, config, snapshot, folder)
        _ENGINES[key] = ChatEngine(rows, config, limit)
    return Renderer(_ENGINES[key], config, window)


def _chat_source(name: str, snapshot: TokenizerSnapshot, folder: Path | None) -> tuple[str, str]:
    """Return the Jinja source and its name for errors; the tokenizer's `folder` is for advice."""
    if name.endswith((".jinja", ".j2")):
        try:
            return Path(name).read_text(encoding="utf-8"), f"template '{name}'"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"format.template '{name}' cannot be read: {error}") from None
    if name == "mistral_system":
        source = resources.files("packhouse.render").joinpath("mistral_system.jinja")
        return source.read_text(encoding="utf-8"), f"template '{name}'"
    if name.startswith("dart-math/") and name in TEMPLATES:
        write = function_of_addon("dart_math_template")
        return write(name, ends_of(snapshot, "")), f"template '{name}'"
    if name != "chat":
        known = ", ".join(TEMPLATES)
        raise ConfigError(f"unknown template '{name}'. Known: {known}, or a .jinja or .j2 file")
    if not snapshot.chat_template:
        fix = "Set format.template to alpaca, completion or text, or to a Jinja file"
        if folder is not None and (folder / "tekken.json").is_file():
            mistral = f"mistral, which supports tekken.json ({pip_install('mistral')})"
            fix = f"Set format.template to {mistral}"
        raise TemplateError(f"the tokenizer ({snapshot.class_name}) has no chat template. {fix}")
    return snapshot.chat_template, "the tokenizer's chat template"


def run_template(call: Callable[[], Any], recipe: Recipe, num_bytes: int = 0) -> Any:
    """Run a call that renders, and may tokenize, `num_bytes` of rows in a worker process."""
    # Loading it takes time and memory, too.
    num_bytes += tokenizer_bytes(recipe.tokenizer)
    return run_in_worker(
        call,
        what=f"template '{recipe.format.template}' with tokenizer '{recipe.tokenizer}'",
        blames=TemplateError,
        num_bytes=num_bytes,
        more_memory=num_bytes * MEMORY_PER_BYTE,
    )


def load_encoders(recipe: Recipe, cache: Path) -> None:
    """Load the recipe's tokenizer for rendering and tokenizing, before a worker is forked."""
    # Encoding starts threads, which a fork would lose. `tokenizers` starts none with this setting.
    parallelism = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    load_tokenizer(snapshot.backend)
    if read_pipeline(snapshot.backend).token_bytes is not None and recipe.tokenize.encoder != "hf":
        with suppress(EncoderError):
            GigatokenEncoder.load(snapshot.backend)
    del os.environ["TOKENIZERS_PARALLELISM"]
    if parallelism is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = parallelism


def cuts_windows(recipe: Recipe) -> bool:
    """Return True if over-long conversations are split into windows."""
    return recipe.pack.over_length == "window" and recipe.pack.strategy != "concat"


def max_record_tokens(recipe: Recipe) -> int | None:
    """Return the length from which records of long rows are only counted; None if all are kept.

    It is `pack.seq_len` rounded up to a power of two, at least 8,192, so that the format step can
    be reused for most changes of `seq_len`.
    """
    pack, config = recipe.pack, recipe.format
    is_split = config.turns != "whole" and config.train_on != "all" and is_chat(config.template)
    if not is_split or pack.over_length != "drop" or pack.strategy == "concat":
        return None
    return int(max(8192, 2 ** (pack.seq_len - 1).bit_length()))


def make_window_rule(
    recipe: Recipe, snapshot: TokenizerSnapshot, cache: Path | None = None
) -> WindowRule | None:
    """Return the rule that fits conversations into windows, or None if the recipe has none."""
    if not cuts_windows(recipe):
        return None
    return WindowRule(recipe.pack.seq_len, snapshot, recipe.tokenize, cuts_prompts(recipe), cache)


def render_shard(
    validated: Path, recipe: Recipe, label_names: list[str] | None, cache: Path | None, folder: Path
) -> dict[str, Any]:
    """Write `formatted.arrow`, `refused.arrow` and, if records differ from rows, `examples.arrow`.

    For pairs, the rejected answers are read from `rejected.arrow` next to `validated` and written
    to `rejected.arrow` next to `formatted.arrow`.
    """
    snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
    window = make_window_rule(recipe, snapshot, cache)
    tokenizer = tokenizer_folder(recipe.tokenizer)
    longest = max_record_tokens(recipe)
    limit = TokenLimit(longest, snapshot.backend) if longest else None
    renderer = make_renderer(recipe.format, snapshot, label_names, window, tokenizer, limit)
    table = read_table(validated)
    rendered = renderer.render(table)
    formatted, refused, notes = rendered.formatted, rendered.quarantined, Counter(rendered.notes)
    texts = list[pa.ChunkedArray]()
    if recipe.preferences:
        assert not rendered.added, "each side of a pair has one trained answer, so is one record"
        formatted = cut_behind_answers(formatted)
    if recipe.preferences == "pairs":
        other = renderer.render(read_table(validated.with_name(REJECTED)))
        rejected = cut_behind_answers(other.formatted)
        formatted, rejected, refused = keep_both(formatted, rejected, refused, other.quarantined)
        write_table(folder / REJECTED, rejected)
        notes.update(other.notes)
        texts.append(rejected["text"])
    write_table(folder / "formatted.arrow", formatted)
    write_table(folder / REFUSED, refused)
    texts.append(formatted["text"])
    notes.update(text_bytes=sum(pc.sum(pc.binary_length(each)).as_py() or 0 for each in texts))
    examples = rendered.examples
    is_unchanged = examples.num_rows == table.num_rows and all(
        one_chunk(examples[name]).equals(one_chunk(table[name]))
        for name in ("record_id", "group_key")
    )
    if not is_unchanged:
        write_table(folder / "examples.arrow", examples)
    stop_tokens = dict(rendered.stop_tokens)
    return {"notes": dict(notes), "added": rendered.added, "stop_tokens": stop_tokens}


def try_rows(
    recipe: Recipe, row_format: str, label_names: list[str] | None, cache: Path | None, folder: Path
) -> dict[str, Any]:
    """Render and tokenize `validated.arrow`; write `tokenized.arrow` and `refused.arrow`.

    Returns:
        The fields of `RenderCounts`.
    """
    if row_format == "tokenized":
        snapshot = load_snapshot(recipe.tokenizer, cache, recipe.tokenize.pipeline)
        given = function_of_addon("read_given")(read_table(folder / "validated.arrow"), snapshot)
        write_table(folder / "tokenized.arrow", given.tokenized)
        write_table(folder / REFUSED, given.quarantined)
        return asdict(RenderCounts())
    texts, tokens = folder / "texts", folder / "tokens"
    for each in (texts, tokens):
        each.mkdir()
    reply = render_shard(folder / "validated.arrow", recipe, label_names, cache, texts)
    tokenized = tokenize_shard(texts / "formatted.arrow", recipe, cache, tokens)
    (tokens / "tokenized.arrow").rename(folder / "tokenized.arrow")
    bad = [read_table(each / REFUSED) for each in (texts, tokens)]
    write_table(folder / REFUSED, pa.concat_tables(bad))
    formatted = read_table(texts / "formatted.arrow")
    counts = RenderCounts(
        rows=num_rows(formatted),
        records=formatted.num_rows,
        stop_tokens=reply["stop_tokens"],
        notes={**reply["notes"], "straddles_start": tokenized["notes"].get("straddles_start", 0)},
    )
    return asdict(counts)


def usual_template(tokenizer: str, cache: Path, *, has_labels: bool) -> str:
    """Return the default template that fits the tokenizer, for labels or for answers.

    `classification` trains the EOS token, which BERT's tokenizer lacks.
    """
    snapshot = load_snapshot(tokenizer, cache, "class")  # the pipeline affects ids only
    if has_labels:
        has_end = snapshot.special_tokens.get("eos_token")
        return "classification" if has_end else "sequence_classification"
    return "alpaca_newline" if snapshot.chat_template is None else "chat"
