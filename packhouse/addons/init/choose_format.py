"""Choose the reading of a file, or collect the candidates if the user has to choose.

Each reading is tried on examples from the whole file, with the code of a real run. The trial counts
rows that become conversations, bad rows, and fields whose text is not read.
"""

import ast
import hashlib
import json
import math
import operator
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packhouse.addons.init.candidate_formats import readings_of, with_context
from packhouse.addons.init.file_survey import Layout, Survey, as_line, refusal
from packhouse.addons.init.lists_and_objects import questions_in
from packhouse.addons.init.reading import (
    ANSWER,
    CONTEXT,
    ID_WORDS,
    LABEL_WORDS,
    LIKELY_ANSWER,
    ORIGIN_WORDS,
    REASONING,
    VERDICTS,
    Reading,
    best_of,
    empty_answers,
    explanation,
    holds_letters,
    is_explained,
    is_told,
    names_like,
    words_of,
)
from packhouse.addons.init.turns_in_texts import SPEAKER_MARKS, marks_in, marks_left
from packhouse.errors import PackhouseError
from packhouse.read import read_shard, scan_source
from packhouse.read.chat_messages import WEIGHTS
from packhouse.read.conversation_formats import is_transcript
from packhouse.read.csv_files import DELIMITERS
from packhouse.read.json_parsing import parse_text
from packhouse.read.row_formats import (
    MESSAGE_FIELDS,
    option_names,
    row_format_of,
    row_formats,
)
from packhouse.read.unread_fields import MIN_SHARE, is_media
from packhouse.recipe import Recipe, SourceConfig, ValidateConfig
from packhouse.records.ledger import RenderCounts
from packhouse.records.reasons import QUARANTINE_REASONS
from packhouse.records.table_schemas import REFUSED, read_table, write_table
from packhouse.render.renderer import run_template, try_rows
from packhouse.system.disks import temporary_folder
from packhouse.system.progress import advance
from packhouse.system.wording import counted

_RARE = 0.1
"""Largest share of a file's rows that may not fit any reading; they become bad rows."""
_FOUND = ("encoding", "file_format", "rows_at", "table")
"""Settings that describe the file, not its rows."""
_MAX_CANDIDATES = 6
NAME_THE_FIELDS = """name the fields:
- a question and an answer: --set format=question_answer --set \
fields='{"question": "FIELD", "answer": "FIELD"}'; add "context": "FIELD" for a text that the \
question is about
- several fields, or a part of an object, in SQL: --set format=question_answer --set \
select='{"question": "concat_ws(chr(10), FIELD, FIELD.NAME)", "answer": "FIELD"}'; write \
json(FIELD) for a whole object, and \\"FIELD\\" for a name that SQL reserves
- plain text: --set format=text --set fields='{"text": "FIELD"}'
- none of these: write rows that have answers: {"question": "...", "answer": "..."} or \
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}"""
"""Advice for fields whose roles no name or value tells."""
_SAMPLE_ROWS = 500
_LONGEST = 20
"""Number of the longest rows of each shard in a sample."""


BadRow = tuple[int, int | None, str]
"""Number of a bad row, its byte offset, and its fault."""


@dataclass(slots=True)
class Trial:
    """Result of reading the rows of a source."""

    num_rows: int = 0
    num_dropped: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    """Number of bad rows by reason."""
    first_bad: dict[str, BadRow] = field(default_factory=dict)
    """First bad row, by reason."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of rows with unread text, by field."""
    num_good: int = 0
    num_repeats: int = 0
    """Number of rows that equal an earlier one."""
    ids: set[bytes] = field(default_factory=set)
    """Record ids of the conversations in `sample`."""
    sample: pa.Table | None = None
    """Conversations spread over the source, including the longest of each shard."""
    rejected: pa.Table | None = None
    row_format: str = "text"


def try_source(source: SourceConfig, rules: ValidateConfig) -> Trial:
    """Read all rows of a source, as the validate step does.

    Raises:
        PackhouseError: the error that a run of the source would raise.
    """
    trial = Trial()
    shards = scan_source(source)
    samples, rejected, ids, unread = [], [], [], Counter[str]()
    for shard in shards:
        rows = read_shard(shard, source, rules, "prompt")
        trial.num_rows += rows.num_records
        trial.num_dropped += rows.dropped.num_rows
        trial.num_good += rows.validated.num_rows
        for reason, bad in bad_rows(rows.quarantined):
            trial.bad[reason] += 1
            trial.first_bad.setdefault(reason, bad)
        unread.update({name: text.rows for name, text in rows.unread_text.items()})
        places = _spread(rows.validated, max(2, _SAMPLE_ROWS // len(shards)))
        samples.append(rows.validated.take(places))
        ids.append(rows.validated["record_id"])
        if rows.rejected is not None:
            rejected.append(rows.rejected.take(places))
        if rows.validated.num_rows:
            trial.row_format = shard.row_format
        advance(1 / len(shards))
    for name, number in unread.items():
        is_outer = any(other.startswith(f"{name}.") for other in unread)
        if number >= MIN_SHARE * trial.num_good and not is_outer:
            trial.unread[name] = number
    all_ids = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string())
    trial.num_repeats = len(all_ids) - pc.count_distinct(all_ids).as_py()
    trial.sample = pa.concat_tables(samples)
    trial.rejected = pa.concat_tables(rejected) if rejected else None
    trial.ids = set(trial.sample["record_id"].to_pylist())
    return trial


def bad_rows(table: pa.Table) -> Iterator[tuple[str, BadRow]]:
    """Yield the rows of a table of bad rows, with their reasons."""
    columns = table.select(["row", "byte_offset", "detail"]).columns
    places = zip(*(column.to_pylist() for column in columns), strict=True)
    return zip(table["reason"].to_pylist(), places, strict=True)


def _spread(table: pa.Table, number: int) -> npt.NDArray[np.int64]:
    """Return indices of rows spread over a table, including those with the longest messages."""
    if table.num_rows <= number:
        return np.arange(table.num_rows)
    messages = table["messages"].combine_chunks()
    content = messages.flatten().field("content")
    # A digit is often a token, and an English word of five letters, too: of file 1769, the most
    # tokens were not in the row with the most bytes.
    digits = pc.multiply(pc.count_substring_regex(content, "[0-9]"), 4)
    sizes = pc.fill_null(pc.add(pc.binary_length(content), digits), 0)
    ends = np.cumsum(np.append(0, sizes.to_numpy(zero_copy_only=False)))
    offsets = np.asarray(messages.offsets) - messages.offsets[0].as_py()
    longest = np.argsort(np.diff(ends[offsets]))[-_LONGEST:]
    return np.unique(np.append(np.linspace(0, table.num_rows - 1, number).astype(int), longest))


def render_sample(
    recipe: Recipe,
    source: SourceConfig,
    trial: Trial,
    tokenizers: Path,
) -> tuple[pa.Table, pa.Table, RenderCounts]:
    """Render and tokenize the conversations of a trial.

    Returns:
        The records (schema `table_schemas.TOKENIZED`), the refused records, and counts.
    """
    assert trial.sample is not None
    with temporary_folder("sample") as folder:
        write_table(folder / "validated.arrow", trial.sample)
        if trial.rejected is not None:
            write_table(folder / "rejected.arrow", trial.rejected)
        call = partial(try_rows, recipe, trial.row_format, source.label_names, tokenizers, folder)
        reply = run_template(call, recipe, trial.sample.nbytes)
        return (
            read_table(folder / "tokenized.arrow"),
            read_table(folder / REFUSED),
            RenderCounts(**reply),
        )


@dataclass(frozen=True)
class Candidate:
    """A reading and its result on the examples."""

    reading: Reading
    trial: Trial
    source: SourceConfig
    """Source that reads the examples."""
    layout: Layout
    """The examples, with their row numbers in the file."""
    unexplained: Mapping[str, str] = field(default_factory=dict)
    """Fields that it leaves out although they may matter, and what they contain."""

    @property
    def is_usable(self) -> bool:
        """True if more than half of the rows become conversations, without most of their text.

        A guess that leaves out more fields of text than it reads was never right (files 491, 818).
        A whole conversation in one field is not a guess: that of file 892 leaves out three fields.
        Several texts in an object are one field (file 2101).
        """
        unread = {name.partition(".")[0] for name in self.trial.unread}
        is_guess = self.reading.is_guess and len(unread) > len(self.reading.reads)
        num_kept = self.trial.num_rows - self.trial.num_dropped
        return self.trial.num_good * 2 > num_kept and not is_guess


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Contents of a file and the proposed reading of its rows."""

    path: str
    """Path for the recipe: a file, folder, glob or address."""
    survey: Survey
    reading: Reading | None
    """The chosen reading, or None if the user has to choose one of `candidates`."""
    candidates: Sequence[Candidate] = ()
    """The best candidates, at most six."""
    num_candidates: int = 0
    num_files: int = 1
    size: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of the recipe's source, except `path`."""
        assert self.reading is not None
        settings = {**self.survey.settings, **self.reading.settings}
        reads, ignored = self.reading.reads, [*settings.get("ignored_fields", ())]
        if reads:
            held, kept = self.survey.fields, []  # `kept` are not written to `ignored_fields`
            if settings.get("format") == "mixed":  # only those that can be explained
                kept = [*held.keys() - explained(self.survey)]
            # If fields with media were ignored, marks such as `<image>` would stay in the texts.
            elif settings.get("media"):
                kept = [name for name in held if held[name].has_media]
            ignored += [name for name in held if name not in (*reads, *ignored, *kept)]
        return settings | ({"ignored_fields": ignored} if ignored else {})


def explained(survey: Survey) -> dict[str, str]:
    """Return the fields that can be ignored, with the reason."""
    found = {name: explanation(name, held, survey.num_rows) for name, held in survey.fields.items()}
    return {name: why for name, why in found.items() if why is not None}


def propose(
    survey: Survey, given: Mapping[str, Any], rules: ValidateConfig, folder: Path
) -> Proposal:
    """Find the readings of a file and choose one if it is unambiguous.

    Args:
        survey: survey of the file.
        given: source settings from the user; if they include `format`, they define the reading.
        rules: validation rules for the rows.
        folder: folder for temporary files with examples.

    Raises:
        SourceError: no reading fits, or the rows have shapes that one source cannot read.
    """
    proposal = Proposal(path=survey.file.uri, survey=survey, reading=None, size=survey.file.size)
    given = {key: value for key, value in given.items() if key not in survey.settings}
    if "format" in given:
        return replace(proposal, reading=_given(survey, given))
    layouts = sorted(survey.layouts.values(), key=lambda layout: -layout.num_rows)
    chosen: list[Candidate] = []
    undecided: list[Candidate] = []
    unknown = num_chosen = 0
    for layout in layouts:
        tried = _candidates(survey, layout, given, rules, folder)
        candidates = [each for each in tried if each.is_usable]
        is_rare = layout.num_rows <= _RARE * survey.num_rows
        only = _only_one(candidates, survey)
        if only is not None and not (only.unexplained and len(layouts) == 1):
            chosen.append(only)
            num_chosen += layout.num_rows
        elif is_rare and not any(each.reading.is_sure for each in candidates):
            unknown += layout.num_rows
        elif candidates:
            undecided = undecided or candidates
        else:
            unknown += layout.num_rows
            if not is_rare and not undecided:
                sure = [each for each in tried if each.reading.is_sure]
                # Of file 1038, with bad rows in both readings, one that leaves out the answers was
                # reported.
                failed = max(sure, key=lambda each: len(each.reading.reads), default=None)
                raise refusal(survey.file, _unknown(survey, layout, failed, given))
    joined, fitting = _join([each.reading for each in chosen]), undecided
    if num_chosen > _RARE * survey.num_rows:  # the user's choice has to read the other rows, too
        settings = joined.settings if joined is not None else {}
        fitting = [
            each
            for each in undecided
            if each.reading.settings == settings
            or all(_reads_alike(each, other, rules, folder) for other in chosen)
        ]
    # Of file 831, whose answers are empty, a part of the prompts was offered as the answer.
    has_answers = any(
        not each.reading.is_guess or names_like([*each.reading.trained], LIKELY_ANSWER)
        for each in fitting
    )
    empty = empty_answers(survey.fields)
    trains_none = any(each.reading.trained & {*empty} for each in chosen)
    if empty and (trains_none or (fitting and not has_answers)):
        raise refusal(survey.file, _no_answers(empty))
    if fitting:
        return replace(proposal, candidates=fitting[:_MAX_CANDIDATES], num_candidates=len(fitting))
    if not chosen and not undecided:
        raise refusal(survey.file, _unknown(survey, layouts[0], None, given))
    if undecided or joined is None or unknown > _RARE * survey.num_rows:
        raise refusal(
            survey.file,
            f"its rows have {counted(len(layouts), 'shape')} that one source cannot read. "
            "Write each shape to a separate file.",
        )
    if left_out := {name: what for each in chosen for name, what in each.unexplained.items()}:
        ignored = [*given.get("ignored_fields", ()), *left_out]
        raise refusal(
            survey.file,
            f"{', '.join(f'{name!r} ({what})' for name, what in left_out.items())} would be left "
            "out, and may matter. To leave it out, add "
            f"{shlex.join(as_options({'ignored_fields': ignored}))}. To leave out some rows, use "
            "`where` (docs/how-to/filter-and-reshape.md)",
        )
    settings = {**joined.settings, **given}
    samples = [each.trial.sample for each in chosen if each.trial.sample is not None]
    talks = [talk for sample in samples for talk in sample["messages"].to_pylist()]
    if (found := marks_left(talks)) is not None:
        raise refusal(
            survey.file,
            f"{found}. Replace or remove such marks, or leave out these rows. If they are meant "
            f"to be trained, add {shlex.join(as_options(settings))}",
        )
    return replace(proposal, reading=replace(joined, settings=settings))


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return settings of a source as options of the command line.

    Example:
        >>> as_options({"format": "text", "fields": {"text": "body"}})
        ['--set', 'format=text', '--set', 'fields={"text": "body"}']
    """
    options = []
    for key, value in settings.items():
        is_plain = isinstance(value, str) and value.isidentifier()
        shown = value if is_plain else json.dumps(value, ensure_ascii=False)
        options += ["--set", f"{key}={shown}"]
    return options


def _reads_alike(
    candidate: Candidate, other: Candidate, rules: ValidateConfig, folder: Path
) -> bool:
    """Return True if a candidate makes the same conversations of the rows of another layout.

    Such as a list as context, of which rows with null or an empty list are another layout.
    """
    rows = [*candidate.layout.rows, *other.layout.rows]
    path = _write(rows, folder, Path(candidate.source.path).name)
    try:
        trial = try_source(candidate.source.model_copy(update={"path": str(path)}), rules)
    except PackhouseError:
        return False
    return other.trial.ids <= trial.ids


def _write(rows: Sequence[Any], folder: Path, name: str) -> Path:
    """Write rows to a file with the name of theirs, in a separate folder.

    All layouts of all files share `folder`, and messages show the name.
    """
    written = b"".join(map(as_line, rows))
    path = folder / hashlib.sha256(written).hexdigest()[:16] / f"{Path(name).stem}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(written)
    return path


def _given(survey: Survey, given: Mapping[str, Any]) -> Reading:
    """Return the reading defined by the user's settings."""
    config = SourceConfig(path="", **given)
    reads: dict[str, str] = {}
    names = list(survey.fields)
    for ours, expression in (config.select or {}).items():
        code = re.sub(r"'[^']*'|\"[^\"]*\"|\b(?i:as)\s+\w+", " ", expression)
        bare = re.findall(r"(?<![\w.])\w+", code)
        reads |= {name: ours for name in names if f'"{name}"' in expression or name in bare}
    if not config.select and config.format in row_formats():
        found = row_formats()[config.format].names_read(names, config)
        reads = {theirs: ours for ours, theirs in found.items()}
    return Reading(settings=dict(given), reads=reads)


def _candidates(
    survey: Survey,
    layout: Layout,
    given: Mapping[str, Any],
    rules: ValidateConfig,
    folder: Path,
) -> list[Candidate]:
    """Try all readings of a layout on its examples and return them, the best first."""
    found: list[Candidate] = []
    path = _write(layout.rows, folder, survey.file.name)
    located = {key: value for key, value in survey.settings.items() if key not in _FOUND}
    located |= {"media": given["media"]} if "media" in given else {}
    ignored, can_be_ignored = given.get("ignored_fields", ()), explained(survey)
    objects = [row for row in layout.rows if isinstance(row, dict)]
    is_rare = layout.num_rows <= _RARE * survey.num_rows
    names = {*layout.rows[0]} if isinstance(layout.rows[0], dict) else set()
    with_media = {n for n in names.difference(ignored) if survey.fields[n].has_media}
    files = {n for n in with_media if all(is_media(row[n]) for row in layout.rows)}
    readings = readings_of(layout, survey.fields)
    for reading in readings:
        row_format = reading.settings["format"]
        is_parsed = row_format == "transcript" or reading.removes_marks
        marks = None if is_parsed else marks_in(layout.rows, list(reading.reads))
        # It reads transcripts. The names in other texts were trained (file 1762).
        if row_format == "preference" and marks == SPEAKER_MARKS:
            said = [row.get(name) for row in layout.rows for name in reading.trained]
            marks = None if all(map(is_transcript, said)) else marks
        # A prompt may quote a conversation, as in file 1200.
        if marks == SPEAKER_MARKS and not marks_in(layout.rows, reading.trained):
            reading, marks = replace(reading, is_sure=False), None
        if marks or reading.reads.keys() & set(ignored):
            continue
        # Rows that `select` makes show no images: of file 726, questions about them were offered.
        if with_media and "media" not in given and "select" in reading.settings:
            continue
        if files & reading.reads.keys():  # their paths are not text (file 818)
            continue
        # Texts in one object may be turns: of file 2144, each post of a thread was trained alone.
        if row_format == "text" and "rows_at" in survey.settings:
            reading = replace(reading, is_sure=False)
        if survey.file_format in DELIMITERS and _are_literals(layout.rows, reading):
            reading = replace(reading, is_sure=False)
        others = [name for name in can_be_ignored if name not in reading.reads]
        settings = {**located, **reading.settings, "ignored_fields": [*ignored, *others]}
        try:
            source = SourceConfig(path=str(path), **settings)
            trial = try_source(source, rules)
            known = {*ignored, *(with_media if "media" in given else ())}
            topics = _topics_in_answers(objects, reading)
            left_out = _unexplained(survey, objects, reading, trial, is_rare=is_rare)
            left_out |= dict.fromkeys(topics, "answers repeat it")
            left_out = {name: what for name, what in left_out.items() if name not in known}
            candidate = Candidate(reading, trial, source, layout, left_out)
        except PackhouseError:
            continue
        is_new = all(
            (each.trial.ids, each.trial.unread, each.reading.template)
            != (candidate.trial.ids, candidate.trial.unread, reading.template)
            for each in found
        )
        if is_new or not candidate.is_usable:
            found.append(candidate)
        reasoning = names_like([*trial.unread], REASONING)
        # The texts of an object are one context, as in file 2101.
        outer = [name if name in names else name.partition(".")[0] for name in trial.unread]
        unread = [name for name in dict.fromkeys(outer) if name not in reasoning]
        unread += [n for n in left_out if n.lower() in CONTEXT or n in topics]
        if (more := with_context(reading, unread, layout.rows)) is not None:
            # The loop goes over `readings`, so the longer reading is tried, too.
            readings.append(more)
    answers = {*names_like([*survey.fields], ANSWER)}
    return sorted(
        found,
        key=lambda each: (
            # Of a question, a passage and whether it is so, the passage was offered first.
            bool(each.reading.prompt and answers and not each.reading.answers & answers),
            *(len(each.trial.unread), not each.reading.is_sure),
            "choices" not in each.reading.reads.values(),
        ),
    )


def _are_literals(rows: Sequence[Any], reading: Reading) -> bool:
    """Return True if texts of a table are lists, or objects of Python, that it cannot hold."""
    texts = [name for name, ours in reading.reads.items() if ours not in MESSAGE_FIELDS]
    return any(2 * sum(_is_literal(row.get(name)) for row in rows) > len(rows) for name in texts)


def _is_literal(text: object) -> bool:
    if not isinstance(text, str) or text.lstrip()[:1] not in ("[", "{"):
        return False
    value, _ = parse_text(text)
    if value is not None:
        return isinstance(value, list)
    try:
        return isinstance(ast.literal_eval(text.strip()), list | dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _unexplained(
    survey: Survey,
    rows: Sequence[dict[str, Any]],
    reading: Reading,
    trial: Trial,
    *,
    is_rare: bool,
) -> dict[str, str]:
    """Return the fields that a reading leaves out although they may matter, and their contents.

    Not those with text: what no field repeats is in `Trial.unread`. Equal prompts with different
    answers do not count in a rare layout: in file 2199, 15 of 754 rows would decide.
    """
    # The only number next to a text may be what a model should predict.
    left_out = _left_out(rows, reading)
    is_target = reading.settings["format"] == "text" and len(left_out) == 1
    decides = not is_rare and _are_ambiguous(trial)
    found = {}
    for name in left_out:
        held = survey.fields[name]
        is_same = held.has_few_values and len(held.values) < 2
        may_decide = decides or (is_target and held.kind == "number")
        may_decide = may_decide and not is_same and not ID_WORDS.intersection(words_of(name))
        filled = _filled(rows, name)
        if (
            held.num_texts < MIN_SHARE * survey.num_rows
            and (may_decide or not is_explained(name, held, survey.num_rows))
            and not (filled and all(is_told(row, name, reading.reads) for row in filled))
        ):
            found[name] = explanation(name, held, survey.num_rows) or held.kind
            if decides and may_decide:
                found[name] += ", and equal prompts have different answers"
    return found | _verdicts_inside(rows, left_out) | _flags_of_messages(rows, reading)


def _left_out(rows: Sequence[dict[str, Any]], reading: Reading) -> list[str]:
    """Return the fields that a reading does not read and that do not hold options of the row."""
    left_out = {name for row in rows for name in row} - {*reading.reads}
    return sorted(left_out - {*option_names(left_out, SourceConfig(path="")).values()})


def _filled(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row.get(name) not in (None, "")]


def _verdicts_inside(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """Return the objects with a key that may call an answer good or bad, and what the key holds."""
    found = {}
    for name in names:
        parts = [row[name] for row in rows if isinstance(row.get(name), dict)]
        for key in dict.fromkeys(key for part in parts for key in part):
            values = {str(part.get(key)) for part in parts}
            if VERDICTS & {*words_of(key)} and 1 < len(values) < 5:
                found[name] = f"{key!r} in it has {len(values)} different values"
    return found


def _topics_in_answers(rows: Sequence[dict[str, Any]], reading: Reading) -> list[str]:
    """Return the topics and categories that answers repeat and prompts do not.

    A model can only learn such an answer if the topic is in its prompt. Of 180 public files, one
    had such answers, in 8% of its rows, and the next most had 1%.
    """
    prompts = reading.reads.keys() - reading.trained
    found = []
    for name in _left_out(rows, reading):
        if prompts and (LABEL_WORDS - ORIGIN_WORDS) & {*words_of(name)}:
            filled = _filled(rows, name)
            told = [is_told(row, name, reading.trained) for row in filled]
            asked = [is_told(row, name, prompts) for row in filled]
            if sum(map(operator.gt, told, asked)) >= max(2, MIN_SHARE * len(rows)):
                found.append(name)
    return found


def _are_ambiguous(trial: Trial) -> bool:
    """Return True if a fifth of the examples have the prompt of another one, but another answer."""
    talks = [] if trial.sample is None else trial.sample["messages"].to_pylist()
    talks = [talk for talk in talks if len(talk) > 1]  # not plain texts
    answers: dict[str, set[str]] = {}
    prompts = [json.dumps(talk[:-1]) for talk in talks]
    for prompt, talk in zip(prompts, talks, strict=True):
        answers.setdefault(prompt, set()).add(json.dumps(talk[-1:]))
    return sum(len(answers[prompt]) > 1 for prompt in prompts) > 0.2 * len(talks)


_NO = (False, None, "false", "no", "n")
_FLAGS = (True, *_NO, "true", "yes", "y")


def _flags_of_messages(rows: Sequence[Mapping[str, Any]], reading: Reading) -> dict[str, str]:
    """Return keys that are true in some messages of a role and false in others, such as `mask`."""
    found: dict[str, str] = {}
    for name in (name for name, ours in reading.reads.items() if ours == "messages"):
        talks = [row[name] for row in rows if isinstance(row.get(name), list)]
        said = [each for talk in talks for each in talk if isinstance(each, dict)]
        for key in {key: None for each in said for key in each if key not in WEIGHTS}:
            values = [each.get(key) for each in said]
            if not all(isinstance(v, bool | int | str | None) and v in _FLAGS for v in values):
                continue
            roles = [str(each.get("role", each.get("from"))) for each in said]
            told = {(role, value in _NO) for role, value in zip(roles, values, strict=True)}
            if len(told) > len({*roles}):
                found[f"{name}[].{key}"] = "true or false"
    return found


def media_advice(some_have_none: bool) -> str:
    """Return how to read rows with images; `drop_rows` only if some rows have none."""
    more = ", or --set media=drop_rows to leave out these rows" if some_have_none else ""
    return f"Add --set media=drop_parts to train their text without images, audio and video{more}"


def _only_one(candidates: Sequence[Candidate], survey: Survey) -> Candidate | None:
    """Return the candidate that is sure and complete, or None if another one could be meant.

    Another candidate could be meant if it reads all fields of the first and more. It also could if
    it is sure and trains a field that the first leaves out, even if that field repeats text that is
    read, such as the best of several answers.
    """
    sure = [each for each in candidates if each.reading.is_sure]
    structured = [each for each in sure if each.reading.settings["format"] != "text"]
    complete = [each for each in structured or sure if not each.trial.unread]
    if not complete:
        return None
    first = complete[0]
    if any(each.reading.reads.keys() > first.reading.reads.keys() for each in candidates):
        return None  # the other one reads more fields
    for other in structured:
        left_out = other.reading.trained - first.reading.reads.keys()
        is_held = any(survey.fields[name].kind != "nothing" for name in left_out)
        is_other = other.trial.ids != first.trial.ids
        if is_other and (is_held or (not other.trial.unread and other is not first)):
            return None
    return first


def _join(readings: Sequence[Reading]) -> Reading | None:
    """Combine several readings into one, or return None if their settings conflict."""
    if not readings:
        return None
    if all(each.settings == readings[0].settings for each in readings):
        reads = {name: ours for each in readings for name, ours in each.reads.items()}
        return replace(readings[0], reads=reads)
    if any(each.settings.keys() - {"format", "fields", "roles"} for each in readings):
        return None
    settings: dict[str, Any] = {"format": "mixed", "fields": {}, "roles": {}}
    for each in readings:
        for key in ("fields", "roles"):
            for ours, theirs in each.settings.get(key, {}).items():
                if settings[key].setdefault(ours, theirs) != theirs:
                    return None
    formats = {each.settings["format"] for each in readings}
    if len(formats) == 1:
        settings["format"] = formats.pop()
    elif formats & {"text", "classification"}:
        return None
    reads = {name: ours for each in readings for name, ours in each.reads.items()}
    return Reading(settings={k: v for k, v in settings.items() if v}, reads=reads)


def _unknown(
    survey: Survey, layout: Layout, failed: Candidate | None, given: Mapping[str, Any]
) -> str:
    """Return a message with the reason why a layout has no usable reading, and the fix.

    `failed` is a likely reading of which most rows are bad, or None.
    """
    row = layout.rows[0]
    if isinstance(row, dict) and {"role", "content"} <= row.keys():
        return (
            "each row is a single message. Write one row per conversation with all its "
            'messages: {"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    items = row if isinstance(row, list) else ()
    if any(isinstance(item, dict) and row_format_of(item, {}) for item in items):
        return "its rows are lists of rows, which packhouse cannot read. Write all rows as one list"
    if not isinstance(row, dict) and not any(isinstance(item, dict) for item in items):
        return (
            f"its rows are {'lists' if items else 'values'} without field names. Write each as an "
            'object: {"question": "...", "answer": "..."} or {"text": "..."}'
        )
    names = row if isinstance(row, dict) else {}
    if survey.num_rows == 1 and names and all(isinstance(each, dict) for each in names.values()):
        inside = [value for each in names.values() for value in each.values()]
        # Such as texts by intent in one object (file 115 of
        # docs/decisions/2026-11-27-thirty-files.md), for which advice about fields was wrong.
        if any(isinstance(value, list) and value and isinstance(value[0], str) for value in inside):
            return (
                "it is one object with lists of texts. Write one row per text, with its "
                "answer or label."
            )
        return "its rows are the values of one object. Write them as a list."
    # Words with a label for each (files 100 and 339): naming the fields, as the last message
    # advises, cannot help.
    lists = {
        name: value
        for name, value in names.items()
        if isinstance(value, list) and not (value and type(value[0]) is dict)
    }
    are_parallel = len(lists) > 1 and len({*map(len, lists.values())}) == 1
    if survey.num_rows > 1 and are_parallel and any(map(holds_letters, lists.values())):
        return (
            f"its rows contain {_kinds_of(lists)} of the same length, such as a label for each "
            "word, which packhouse does not support. Write each row as a text with its answer."
        )
    # Not again once it is followed: for file 349, the advice repeated itself.
    media = {} if "media" in given else {n: _num_rows(survey, n, is_media) for n in names}
    if any(media.values()):
        if not any(held.num_texts for held in survey.fields.values()):
            return f"its rows contain {_kinds_of(row)}: media and no text. Add text to the rows."
        name = max(media, key=lambda name: media[name])
        number, some_have_none = media[name], media[name] < survey.num_rows
        return (
            f"{number:,} of {counted(survey.num_rows, 'row')} {'contain' + 's' * (number == 1)} "
            f"images, audio or video in {name!r}. {media_advice(some_have_none)}."
        )
    if empty := empty_answers(survey.fields):
        return _no_answers(empty)
    if isinstance(row, dict) and (empty := [n for n in MESSAGE_FIELDS if row.get(n) == []]):
        return _no_answers(empty)
    if survey.num_rows == 1 and len(names) > 2 and all(isinstance(v, str) for v in names.values()):
        return (
            "its only row is an object of texts. If its names are questions and its values "
            'answers, write a row for each: {"question": "...", "answer": "..."}. '
            f"Otherwise, {NAME_THE_FIELDS}"
        )
    if failed is not None and not failed.trial.bad:
        return "media=drop_rows leaves out all of its rows. Use media=drop_parts"
    if failed is not None:
        trial = failed.trial
        ((reason, number),) = trial.bad.most_common(1)
        known = QUARANTINE_REASONS["validate"].get(reason)
        helps = {
            "media": media_advice(number < trial.num_rows),
            "no_assistant": "Add a field with the answer to each row",
            "ends_on_user": "Add --set validate.allow_ends_on_user=true to train their answers; "
            "the last user turn is not trained",
        }.get(reason, f"Remedy: {known.remedy}" if known else "Fix the rows")
        index, _, detail = trial.first_bad[reason]
        return (
            f"read as {failed.reading.settings['format']}, {number:,} of "
            f"{counted(trial.num_rows, 'example')} are bad rows ({reason}: "
            f"row {failed.layout.examples[index][0]:,}: {detail}). {helps}"
        )
    place = f" in {rows_at!r}" if (rows_at := survey.settings.get("rows_at")) else ""
    texts = [name for name, value in names.items() if isinstance(value, str)]
    num_texts = sum(survey.fields[name].num_texts > 0 for name in texts)
    for name, value in names.items():
        if what := marks_in(layout.rows, [name]):
            return (
                f"the text in '{name}' contains {what}, which packhouse cannot parse. "
                "Write rows with messages ([{role, content}])."
            )
        # Of file 1012, papers with an abstract and a title, a row for each author was advised.
        is_list = isinstance(value, list) and value and isinstance(value[0], str)
        if is_list and num_texts < 2:
            if not any(" " in str(each) for each in value):  # words
                return (
                    f"its rows contain {_kinds_of(row)}: a list of words in {name!r}, which "
                    "packhouse does not support. Write each row as a text with its answer."
                )
            number = _num_rows(survey, name, lambda value: isinstance(value, list))
            return (
                f"{number:,} of {counted(survey.num_rows, 'row')}{place} "
                f"{'contain' if number != 1 else 'contains'} a list of texts in {name!r}. "
                "Write one row per text, with its answer or label; of a conversation, one row "
                "with messages ([{role, content}])."
            )
    all_rows = [row for each in survey.layouts.values() for row in each.rows]
    if names and not any(map(holds_letters, all_rows)):  # file 1862, losses of a training run
        return _no_words(row)
    held = survey.fields
    others = [n for n in names if not is_explained(n, held[n], survey.num_rows)]
    values = [value for row in all_rows if isinstance(row, dict) for value in row.values()]
    has_words = any(isinstance(each, list | dict) or " " in str(each).strip() for each in values)
    if names and not others and not has_words:  # the ids and paths of file 2159
        return _no_words(row)
    others = others or [*names]
    is_text = len(others) == 1 and isinstance(row[others[0]], str)
    asked = questions_in(layout.rows)
    if asked and best_of(texts, ANSWER):
        return (
            f"the messages in {' and '.join(map(repr, sorted(asked)))} end with a question. Write "
            "its answer as the last message"
        )
    if is_text or asked:
        return (
            f"its rows contain {_kinds_of(row)} but no answers. Add a field with the answer to "
            "each row."
        )
    return (
        f"{layout.num_rows:,} of {counted(survey.num_rows, 'row')}{place} "
        f"{'has' if layout.num_rows == 1 else 'have'} {_kinds_of(row)}, "
        "but it is not clear which fields hold the question and the answer. If the file has "
        f"something to train, {NAME_THE_FIELDS}"
    )


def _num_rows(survey: Survey, name: str, holds: Callable[[object], bool]) -> int:
    """Return the number of rows with a value of some kind in a field, estimated from examples."""
    number = 0.0
    for layout in survey.layouts.values():
        rows = [row for row in layout.rows if isinstance(row, dict) and holds(row.get(name))]
        number += layout.num_rows * len(rows) / len(layout.rows)
    return math.ceil(number)


def _no_words(row: object) -> str:
    return (
        f"its rows contain {_kinds_of(row)} and no sentence, so there may be nothing to train. To "
        "train numbers or single words, name the fields (docs/how-to/init.md)"
    )


def _no_answers(empty: Sequence[str]) -> str:
    named = f"{' and '.join(map(repr, empty))} {'has' if len(empty) == 1 else 'have'}"
    return (
        f"it has no answers: {named} no words in any row. Add the answers. If another field has "
        "them, name it with --set format=question_answer --set "
        'fields=\'{"question": "FIELD", "answer": "FIELD"}\''
    )


def _kinds_of(row: object) -> str:
    if not isinstance(row, dict):
        return "a list"
    kinds = {str: "text", dict: "an object", list: "a list", bool: "true or false"}
    shown = [
        f"{name[:40]!r} ({kinds.get(type(value), 'nothing' if value is None else 'a number')})"
        for name, value in list(row.items())[:8]
    ]
    return f"{', '.join(shown)}{', ...' if len(row) > 8 else ''}"
