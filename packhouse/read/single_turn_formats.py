"""Formats whose rows have texts in fields: Alpaca and the like, classification, SQuAD."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from packhouse.read.chat_messages import Conversation, kind_of, optional_text, text_turn
from packhouse.read.json_parsing import Rows, value_of
from packhouse.read.row_formats import (
    Adapted,
    Names,
    Row,
    RowFormat,
    aliases,
    check_present,
    class_index,
)
from packhouse.read.unread_fields import is_text
from packhouse.recipe import SourceConfig
from packhouse.records.message_rules import assemble
from packhouse.system.plugins import BadRowError


@dataclass(frozen=True, kw_only=True)
class TextFields(RowFormat):
    """Rows with one field per turn: Alpaca and the like, plain text, classification.

    The answer's reasoning is read if `fields` names its field.
    """

    turns: tuple[tuple[str, str], ...] = (("user", "question"), ("assistant", "answer"))
    """(role, our field) of each turn."""
    context: str = ""
    """Our field with the context of the question."""

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read the system prompt, earlier turns, and the turns of the row."""
        fields = [ours for _, ours in self.turns]
        check_present(row, fields, names, config)
        for ours in fields:
            if type(row[names[ours]]) is not str:
                value = row[names[ours]]
                hint = ""
                if isinstance(value, int | float):
                    made = ", ".join(f"{each}: '\"{names[each]}\"::VARCHAR'" for each in fields)
                    hint = f"; to convert it to text, use `select: {{{made}}}` instead of `fields`"
                if isinstance(value, list) and value and isinstance(value[0], dict):
                    hint = "; use `format: chat` for messages, or join the texts with `select`"
                raise BadRowError("type", f"{names[ours]} is {kind_of(value)}, not text{hint}")
        context = optional_text(row, names.get(self.context))
        reasoning = optional_text(row, names.get("reasoning"))
        system = optional_text(row, names.get("system"))
        turns = [text_turn("system", system)] if system else []
        # Earlier questions and answers, as in LLaMA-Factory's Alpaca files.
        history = row.get(names.get("history"))
        history = [] if history in (None, "") else value_of(history)
        if not isinstance(history, list):
            raise BadRowError("type", f"history is {kind_of(history)}, not a list of pairs")
        for pair in history:
            is_pair = isinstance(pair, list) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                detail = "history is not a list of [question, answer] pairs of text"
                raise BadRowError("type", detail)
            turns += [text_turn("user", pair[0]), text_turn("assistant", pair[1])]
        for role, ours in self.turns:
            aside = (context, None) if role == "user" else (None, reasoning)
            turns.append((role, row[names[ours]], *aside, None, None, None, None, None))
        label = None
        if "label" in self.required:
            check_present(row, ["label"], names, config)
            label = class_index(row[names["label"]], config.label_names)
        return [Conversation(turns, None, label)]

    def read_all(self, rows: Rows, config: SourceConfig) -> Adapted:
        """Read all rows as columns if possible, else row by row."""
        # Columns are 10 times as fast. They need text in these fields of all rows of a block.
        one_by_one = partial(super().read_all, rows, config)
        names: dict[str, str] = {}
        for keys in rows.layouts:
            own = self.names_read(keys, config)
            is_one = all(names.setdefault(ours, name) == name for ours, name in own.items())
            if not is_one or not self.required.keys() <= own.keys():
                return one_by_one()  # a field has two names, or is missing
        if not names or not rows.are_objects or "system" in names or "history" in names:
            return one_by_one()
        columns = [[row[names[ours]] for row in rows] for _, ours in self.turns]
        asides = ("context", self.context, 0), ("reasoning", "reasoning", len(columns) - 1)
        extra = {  # our name of the message's field -> its turn, and the texts of all rows
            field: (turn, [row.get(names[ours]) for row in rows])
            for field, ours, turn in asides
            if ours in names
        }
        if not rows.value_types <= {str}:
            are_texts = all(set(map(type, column)) == {str} for column in columns)
            optional = [set(map(type, texts)) for _, texts in extra.values()]
            if not are_texts or not all(types <= {str, type(None)} for types in optional):
                return one_by_one()
        labels: list[int] | list[None] = [None] * len(rows)
        if "label" in self.required:
            stated = [row[names["label"]] for row in rows]
            if not set(map(type, stated)) <= {int, str}:
                return one_by_one()
            try:  # check each distinct label once
                known = {label: class_index(label, config.label_names) for label in set(stated)}
            except BadRowError:
                return one_by_one()
            labels = [known[label] for label in stated]
        # Columns [q1, q2], [a1, a2] -> contents [q1, a1, q2, a2], contexts [c1, None, c2, None],
        # reasoning [None, r1, None, r2].
        num_rows, step = len(rows), len(columns)
        contents = [""] * (num_rows * step)
        for at, column in enumerate(columns):
            contents[at::step] = column
        flat = {"role": [role for role, _ in self.turns] * num_rows, "content": contents}
        arrays = {name: pa.array(values, pa.string()) for name, values in flat.items()}
        for field, (turn, texts) in extra.items():
            spread: list[str | None] = [None] * len(contents)
            spread[turn::step] = [text or None for text in texts]
            arrays[field] = pa.array(spread, pa.string())
        return Adapted(
            messages=assemble(arrays, np.full(num_rows, step, np.int64)),
            tools=pa.nulls(num_rows, pa.string()),
            labels=pa.array(labels, pa.int64()),
            origin=np.arange(num_rows),
        )


@dataclass(frozen=True, kw_only=True)
class Squad(RowFormat):
    """Questions about a text, with answers found in it: SQuAD's articles, or one question per row.

    Only the first of several answers is read. Without a context, in which they are found, they may
    be answers of different people (those of Stack Exchange have scores), so the recipe must name
    the format. Questions without answers, as in SQuAD 2.0, are left out of an article and counted
    in the note `unanswered`.
    """

    def fits(self, keys: Collection[str], renamed: Mapping[str, str]) -> bool:
        """Return True for an article with paragraphs, and for a question with answers."""
        names = self.names(keys, renamed)
        return "paragraphs" in names or {"question", "answers"} <= names.keys()

    def holds(self, row: Row, names: Names) -> bool:
        """Return False for answers that are not text, such as numbers of sentences."""
        return isinstance(_first_answer(row.get(names.get("answers", ""))), str | None)

    def read(self, row: Row, names: Names, config: SourceConfig) -> list[Conversation]:
        """Read each question that has an answer."""
        if "paragraphs" in names:
            return _read_questions(row[names["paragraphs"]], "question", "answers")
        check_present(row, ("question", "answers"), names, config)
        context = row.get(names.get("context"))
        if not context and config.format != "squad" and (found := different_answers(row, names)):
            raise BadRowError("several_answers", f"{len(found):,} different answers")
        paragraph = {"context": context, "qas": [row]}
        return _read_questions([paragraph], names["question"], names["answers"])


def _read_questions(paragraphs: object, question: str, answers: str) -> list[Conversation]:
    """Return a conversation for each question that has an answer.

    Args:
        paragraphs: `[{"context": text, "qas": [{question: text, answers: ...}]}]`, or its JSON.
        question: key of the question.
        answers: key of the answers: `[{"text": ...}]`, `{"text": [...]}` or `[...]`.

    Raises:
        BadRowError: the paragraphs have another form, or no question has an answer.
    """
    paragraphs = value_of(paragraphs)
    found: list[Conversation] = []
    num_unanswered = 0
    for paragraph in paragraphs if isinstance(paragraphs, list) else [paragraphs]:
        asked = paragraph.get("qas") if isinstance(paragraph, dict) else None
        if not isinstance(paragraph, dict) or not isinstance(asked, list):
            raise BadRowError("type", "paragraphs is not a list of objects with a list 'qas'")
        context = paragraph.get("context")
        for item in asked:
            if not isinstance(item, dict) or not isinstance(context, str | None):
                raise BadRowError("type", "a context is not text, or a question not an object")
            answer, text = _first_answer(item.get(answers)), item.get(question)
            if answer is None:
                num_unanswered += 1
                continue
            if not isinstance(text, str) or not isinstance(answer, str):
                raise BadRowError("type", "a question or an answer is not text")
            asks = text_turn("user", text, context or None)
            found.append(Conversation([asks, text_turn("assistant", answer)]))
    if not found:
        raise BadRowError("no_assistant", "no question of the row has an answer")
    found[-1] = found[-1]._replace(num_unanswered=num_unanswered)
    return found


def different_answers(row: Row, names: Names) -> set[str]:
    """Return the answers of a question, if there are several and one is a sentence; else none."""
    found = {text for text in _answers(row[names["answers"]]) if isinstance(text, str)}
    return found if len(found) > 1 and any(map(is_text, found)) else set()


def _first_answer(answers: object) -> object:
    """Return the first answer, None if there is none."""
    first = next(iter(_answers(answers)), None)
    return None if first in ([], "") else first


def _answers(answers: object) -> list[object]:
    """Return the texts of answers: `[{"text": ...}]`, `{"text": [...]}`, `[...]` or one text."""
    if isinstance(answers, str) and answers.lstrip()[:1] in ("[", "{"):
        answers = value_of(answers)
    if isinstance(answers, dict):
        answers = answers.get("text")
    items = answers if isinstance(answers, list) else [answers]
    return [item.get("text") if isinstance(item, dict) else item for item in items]


_ASIDE = "system|system_prompt history"
_REASONING: dict[str, tuple[str, ...]] = {"reasoning": ()}  # no usual name: only `fields` names it
TEXT_FORMATS: dict[str, RowFormat] = {
    "alpaca": TextFields(
        required=aliases("instruction output"),
        optional=aliases(f"input|context {_ASIDE}") | _REASONING,
        turns=(("user", "instruction"), ("assistant", "output")),
        context="input",
    ),
    "dolly": TextFields(
        required=aliases("instruction response"),
        optional=aliases(f"context|input category {_ASIDE}") | _REASONING,
        turns=(("user", "instruction"), ("assistant", "response")),
        context="context",
    ),
    "prompt_completion": TextFields(
        required=aliases("prompt completion|response"),
        optional=aliases(_ASIDE) | _REASONING,
        turns=(("user", "prompt"), ("assistant", "completion")),
    ),
    "question_answer": TextFields(
        required=aliases("question|query answer|response|resp"),
        optional=aliases(f"context|input {_ASIDE}") | _REASONING,
        turns=(("user", "question"), ("assistant", "answer")),
        context="context",
    ),
    "classification": TextFields(
        required=aliases("text|sentence|content label"), turns=(("user", "text"),), answers="label"
    ),
    "text": TextFields(required=aliases("text"), turns=(("assistant", "text"),), answers="text"),
    "squad": Squad(
        required=aliases("paragraphs"), optional=aliases("context question answers title id")
    ),
}
"""Formats in the order in which they are tried: those with more required fields come first."""
