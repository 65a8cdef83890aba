"""Find all possible readings of a file's rows, with the fields that each leaves out.

Field names and values only produce readings and rank them. `choose_format` accepts a reading if it
is the only one based on known field names and leaves no text unread; otherwise the user chooses.

    {"query": ..., "reply": ...}                  one reading: query asks, reply answers
    {"query": ..., "original": ..., "reply": ...} two: query or original asks, and the other is
                                                  left out
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from packhouse.addons.init.file_survey import HELD_OUT, Field, Layout
from packhouse.addons.init.lists_and_objects import (
    CHOICE_NAMES,
    as_json,
    in_json,
    made_of_lists,
    message_lists,
    multiple_choice,
    of_messages,
    questions_in,
)
from packhouse.addons.init.reading import (
    ANSWER,
    BAD,
    BAD_ANSWER,
    CLASSES,
    CONTEXT,
    GOOD,
    GOOD_ANSWER,
    ID_WORDS,
    LIKELY_ANSWER,
    LIKELY_QUESTION,
    MAX_EMPTY,
    ORIGIN_WORDS,
    PLAIN,
    QUESTION,
    REASONING,
    SHOWN,
    SYSTEM,
    Reading,
    as_text,
    best_of,
    has_text,
    holds_letters,
    is_class,
    names_like,
    rank_of,
    read_as,
    sql,
    texts_of,
    words_of,
    words_of_label,
)
from packhouse.addons.init.turns_in_texts import (
    marks_in,
    templated_texts,
    with_ends,
    with_headings,
    with_speakers,
    with_talks,
)
from packhouse.read.row_formats import row_format_of, row_formats
from packhouse.read.single_turn_formats import TextFields, different_answers

_SCORES = ("similarity", "similarity_score", "score", "label", "is_duplicate")
"""Names of fields with the similarity of two texts."""
_UTTERANCES = frozenset("patterns examples utterances".split())
"""Words in names of lists of texts that have the same intent and answer."""
_PIECES = frozenset("words tokens characters chars sentences".split())
"""Words in names of lists with the pieces of one text."""
_MAX_CLASSES = 200
_WINNERS = frozenset("winner winning preferred preference better safer best chosen choice".split())
"""Words in names of the number of the better of two answers."""


def readings_of(layout: Layout, fields: Mapping[str, Field]) -> list[Reading]:
    """Return all readings of one layout, the most likely first.

    Args:
        layout: a layout with at least one example.
        fields: counts of each field's values over the whole file.

    Example:
        >>> rows = Layout(1, [(0, {"id": 1, "query": "1 + 1?", "reply": "It is 2."})])
        >>> [each.settings for each in readings_of(rows, {})]
        [{'format': 'prompt_completion', 'fields': {'prompt': 'query', 'completion': 'reply'}}]
    """
    rows = layout.rows
    if all(isinstance(row, list) for row in rows):
        is_known = row_format_of(rows[0], {}) == "messages"
        return [Reading(settings={"format": "messages"})] if is_known else []
    rows = [row for row in rows if isinstance(row, dict)]
    if not rows or {"role", "content"} <= rows[0].keys():  # each row is a single message
        return []
    if any(row.keys() != rows[0].keys() for row in rows):  # the rest of a file with many layouts
        names = dict.fromkeys(name for row in rows for name in row)
        rows = [names | row for row in rows]
    found = [
        *multiple_choice(rows, fields),
        *_natural(rows, fields),
        *_preferences(rows),
        *_numbered_winners(rows, fields),
        *message_lists(rows),
        *made_of_lists(rows),
        *_pairs(rows, fields),
        *as_json(rows),
        *templated_texts(rows),
        *_tokens(rows),
    ]
    # Passages that fit a query (files 465 and 628) and scored translations (file 452) were offered
    # as answers.
    if is_compared := _are_compared(rows):
        found = [replace(each, is_sure=False) for each in _preferences(rows)]
    if {"chosen", "rejected"} <= rows[0].keys():
        # In file 1758, whose prompts contain marks, `rejected` was offered as the context.
        found = [each for each in found if {"chosen", "messages"} & {*each.reads.values()}]
    found += [text for each in found for text in _without_prompt(each, rows)]
    # Of file 742, a description was offered as the question, and the messages were left out.
    if asked := questions_in(rows):
        found = [each for each in found if each.is_sure or asked & each.reads.keys()]
    if not found and not is_compared and not asked:
        found = list(_plain(rows, fields))
    different: list[Reading] = []
    for each in found:
        # Drop a reading that uses fewer fields than another one and trains nothing else.
        is_less = any(
            each.reads.keys() < {n for n, ours in other.reads.items() if ours != "reasoning"}
            and not any("as JSON" in ours for ours in other.reads.values())
            and each.trained <= other.trained
            and (other.is_sure or not each.is_sure)
            and each.settings["format"] != "text"  # training on the text itself or on its class
            for other in found
        )
        if not is_less and not any(dict(each.reads) == dict(d.reads) for d in different):
            different.append(each)
    varied = (_with_verdicts, with_speakers, with_talks, with_headings, with_ends, _with_splits)
    different = [
        replace(each, is_guess=not each.is_sure and "choices" not in each.reads.values())
        for each in different
    ]
    for vary in varied:
        different = [
            replace(made, is_guess=each.is_guess and not made.removes_marks)
            for each in different
            for made in vary(each, rows, fields)
        ]
    return sorted(different, key=lambda each: not each.is_sure)


def _natural(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    for name, known in row_formats().items():
        fitting = [
            row
            for row in rows
            if known.fits(tuple(row), {}) and known.holds(row, known.names(tuple(row), {}))
        ]
        # `prepare` quarantines the few that do not fit. A single row without messages would
        # otherwise refuse a whole file of chats.
        if len(fitting) < (1 - MAX_EMPTY) * len(rows):
            continue
        names = known.names(list(rows[0]), {})
        if isinstance(known, TextFields):
            turns = [names[ours] for _, ours in known.turns]
            if not any(all(isinstance(row[name], str) for name in turns) for row in rows):
                continue
        more: dict[str, str] = {}
        if name in ("chat", "sharegpt"):
            yield from of_messages(names[next(iter(known.required))], fitting)
            continue
        labels: list[str] | None = []
        if name == "classification":
            labels = _label_names(fields.get(names["label"]))
        if labels is None:
            continue
        if (
            name == "preference"
            and "prompt" not in names
            and isinstance(rows[0][names["chosen"]], str)
        ):
            rest = [n for n in rows[0] if n not in names.values()]
            more = {"prompt": best} if (best := best_of(rest, QUESTION)) else {}
            prompts = [each for each in texts_of(rest, rows) if has_text(each, fields)]
            # Any text may be the prompt if no name tells: one reading for each, five for file 289.
            # The transcripts of hh-rlhf already contain their prompts.
            if prompts and best is None and marks_in(rows, [names["chosen"]]) is None:
                chosen = {theirs: ours for ours, theirs in names.items()}
                for each in prompts:
                    yield read_as(name, {each: "prompt", **chosen}, fields={"prompt": each})
                continue
        if isinstance(known, TextFields) and known.answers == "required":
            # The context of a question and the reasoning of an answer, if the format reads them.
            texts = texts_of([n for n in rows[0] if n not in names.values()], rows)
            beside = {"reasoning": best_of(texts, REASONING)}
            contexts = [n for n in texts if n.lower() in CONTEXT and has_text(n, fields)]
            if "context" not in names and len(contexts) == 1:
                beside["context"] = contexts[0]
            more = {part: each for part, each in beside.items() if each and part in known.optional}
        reads = {theirs: ours for ours, theirs in (names | more).items()}
        if name == "oasst_flat":
            reads["message_tree_id"] = "conversation"
        # An object as the input of an instruction made each row of file 801 bad, and objects as
        # preferred answers those of file 1354.
        parts = names.values() if isinstance(known, TextFields) and "history" not in names else ()
        answers = [row[names["chosen"]] for row in rows] if name == "preference" else []
        if any(isinstance(each, dict) and {"role", "from"}.isdisjoint(each) for each in answers):
            parts = names.values()
        if any(isinstance(row.get(each), dict | list) for row in rows for each in parts):
            select = {ours: as_text(each, rows) for each, ours in reads.items()}
            yield read_as(name, reads, select=select)
            continue
        rest = [each for each in rows[0] if each not in reads]
        # Texts next to a category (file 76) or to true and false (80) were trained as plain text.
        classes = list(_classes(names["text"], rest, fields)) if name == "text" else []
        is_sure = not classes
        if name == "squad" and "context" not in names and "answers" in names:
            is_sure = not any(different_answers(row, names) for row in fitting)
        yield read_as(name, reads, is_sure=is_sure, fields=dict(more), label_names=labels)
        yield from classes
        if "reasoning" in more:
            del more["reasoning"]
            kept = {theirs: ours for theirs, ours in reads.items() if ours != "reasoning"}
            yield read_as(name, kept, is_sure=True, fields=more)


def _classes(text: str, names: Sequence[str], fields: Mapping[str, Field]) -> Iterator[Reading]:
    """Yield classification readings of a text, one for each field with few distinct values.

    Fields with a source, language or id are skipped.
    """
    for name in names:
        held = fields.get(name)
        if held is None or not held.has_few_values:
            continue
        if ORIGIN_WORDS & {*words_of(name)} and not is_class(name):  # not `label_name`
            continue
        num_rows = held.kinds.total() - held.kinds["nothing"]
        if not 1 < len(held.values) <= max(2, num_rows / 2) and name not in CLASSES:
            continue
        reads = {text: "text", name: "label"}
        if held.values.keys() == {False, True} and held.kind == "true or false":
            select = {"text": sql(text), "label": f"CAST({sql(name)} AS INTEGER)"}
            yield read_as("classification", reads, select=select, label_names=["false", "true"])
        elif (labels := _label_names(held)) is not None:
            usual = row_formats()["classification"].names([text, name], {})
            renamed = {ours: theirs for theirs, ours in reads.items() if usual.get(ours) != theirs}
            yield read_as("classification", reads, fields=renamed, label_names=labels)


def _label_names(label: Field | None) -> list[str] | None:
    """Return the class names of a label field, or None if it contains no labels."""
    if label is None or not label.has_few_values or not 0 < len(label.values) <= _MAX_CLASSES:
        return None
    texts = [value for value in label.values if isinstance(value, str)]
    if any(not text.strip().isdigit() for text in texts):
        return None if len(texts) < len(label.values) or label.num_texts else sorted(texts)
    if not all(type(value) in (int, str) for value in label.values):
        return None
    return [str(n) for n in range(max(map(int, label.values)) + 1)]


def _pairs(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    texts = [
        name
        for name in texts_of(rows[0], rows)
        if sum(isinstance(row[name], str) for row in rows) > (1 - MAX_EMPTY) * len(rows)
    ]
    if any(name.lower() in _SCORES for name in rows[0]):
        # If `text1` and `text2` come with a score (file 78), neither is an answer to the other.
        stems = Counter(re.sub(r"[\W_]*\d$", "", name) for name in texts)
        texts = [name for name in texts if stems[re.sub(r"[\W_]*\d$", "", name)] == 1]
    # A short one may be the source of the answer, as in file 931: `with_context` offers it.
    texts = [name for name in texts if name.lower() not in CONTEXT or has_text(name, fields)]
    # Ids, labels and system prompts neither ask nor answer. A rejected answer does not ask: one of
    # the five ways for file 289 asked with it.
    free = [
        name
        for name in texts
        if not words_of_label(name)
        and rank_of(name, SYSTEM) is None
        and not is_class(name)
        and not BAD & {*words_of(name)}
    ]
    asking, answering = names_like(free, QUESTION), names_like(free, ANSWER)
    if not asking + answering:  # `Questions` and `Answers` of file 1869
        plurals = {name.removesuffix("s"): name for name in free}
        both = [[plurals[n] for n in names_like([*plurals], k)] for k in (QUESTION, ANSWER)]
        asking, answering = both if all(both) else ([], [])
    is_sure, named = bool(asking and answering), [*answering]
    # Of file 1018, one object with questions as names, its answers were offered as pairs.
    if len(rows) == 1 and len(texts) > 2 and not asking + answering:
        return
    others = [name for name in free if has_text(name, fields) and name not in asking + answering]
    # Without a name for the answer, the second question may be one, as in `question` and `query`.
    guesses = [name for name in others if "context" not in words_of(name)] + asking[1:]
    asking = asking or names_like(others, LIKELY_QUESTION) or others
    # Of file 2201, two results were offered as the answer, and not the code that computes them.
    if answering and not any(has_text(name, fields) for name in answering):
        answering += [
            n for n in guesses if n.lower() not in CONTEXT and not CHOICE_NAMES.fullmatch(n)
        ]
    answering = answering or names_like(others, LIKELY_ANSWER) or guesses
    pairs = [(question, answer) for question in asking for answer in answering]
    for question, answer in pairs[: 2 * SHOWN]:
        if question != answer:
            is_named = is_sure and answer in named
            yield from _pair(question, answer, texts, rows, is_sure=is_named)


def _are_compared(rows: Sequence[dict[str, Any]]) -> bool:
    """Return True for texts of which none answers another, and no answer is next to them.

    They train a model that finds similar texts, or one that scores translations.

    Example:
        >>> _are_compared([{"query": "Why?", "positive": "A passage."}])
        True
        >>> _are_compared([{"query": "Why?", "positive": "A passage.", "answer": "So."}])
        False
    """
    names = rows[0].keys()
    are_scored = any(type(value) is float for row in rows for value in row.values())
    return not names_like(texts_of(names, rows), ANSWER) and (
        (bool(names & {"positive", "pos"}) and bool(names & {"anchor", "query"}))
        or (are_scored and {"reference", "hypothesis"} <= names)
    )


def _pair(
    question: str, answer: str, texts: Sequence[str], rows: Sequence[Any], *, is_sure: bool
) -> Iterator[Reading]:
    """Yield readings of a question and its answer, with and without the reasoning.

    Both include the context and the system prompt if the rows have them.
    """
    rest = [name for name in texts if name not in (question, answer)]
    contexts = [name for name in rest if name.lower() in CONTEXT]
    row_format, ours = "prompt_completion", ("prompt", "completion")
    if len(contexts) == 1:
        row_format, ours = "question_answer", ("question", "answer")
    fields = dict(zip(ours, (question, answer), strict=True))
    if len(contexts) == 1:
        fields["context"] = contexts[0]
    if system := best_of(rest, SYSTEM):
        fields["system"] = system
    reasoning = best_of([n for n in rest if n not in fields.values()], REASONING)
    usual = row_formats()[row_format].names(rows[0], {})
    # Also without the reasoning, which a template may not write (files 176 and 181).
    for more in ({"reasoning": reasoning}, {}) if reasoning else ({},):
        reads = {name: ours for ours, name in (fields | more).items()}
        renamed = {ours: name for name, ours in reads.items() if usual.get(ours) != name}
        yield read_as(row_format, reads, is_sure=is_sure, fields=renamed)


def _plain(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    """Yield readings of the only text of a row: about the other fields, or trained as a whole."""
    # The values of one row tell nothing: of file 830, a log, each part was offered as the answer.
    parts = [name for name, value in rows[0].items() if isinstance(value, str | list | dict)]
    is_one = len(rows) == 1 and len(parts) > 1
    if is_one and not names_like([*rows[0]], (*PLAIN, *QUESTION, *ANSWER)):
        return
    texts = [n for n in texts_of(rows[0], rows) if not ORIGIN_WORDS & {*words_of(n)}]
    sentences = [name for name in texts if name not in fields or fields[name].num_texts]
    lists = [name for name in rows[0] if isinstance(rows[0][name], list)]
    listed = {word for name in lists for word in words_of(name)}
    # Examples of an intent were shown as turns of a chat (file 81).
    if listed & _UTTERANCES or (listed & _PIECES and not sentences):
        return  # each text needs its own row, or the text is in pieces
    others = [n for n in rows[0] if n not in sentences and not ID_WORDS & {*words_of(n)}]
    # Either of the two may be the answer. Of file 125, only the text was shown.
    if len(sentences) == 1 and any(isinstance(rows[0][name], dict | list) for name in others):
        yield in_json(rows, {"question": sentences, "answer": others})
        yield in_json(rows, {"question": others, "answer": sentences})
        # Of file 863, the action after the message was offered as part of the question.
        rest = [*takewhile(lambda name: name != sentences[0], rows[0])]
        before, after = ([n for n in others if (n in rest) == is_in] for is_in in (True, False))
        if before and after:
            yield in_json(rows, {"question": before, "answer": [*sentences, *after]})
    # Question and answer may both be objects (file 302) or lists of them (file 1718), which cannot
    # be named as fields. Two lists of texts may be turns, or words with their labels.
    held = [name for name in others if not words_of_label(name)]
    objects = [name for name in held if all(isinstance(row[name], dict) for row in rows)]
    pair = [name for name in held if all(isinstance(row[name], list | dict) for row in rows)]
    if len(pair) == 2 and any(isinstance(item, dict) for n in pair for item in rows[0][n]):
        objects = pair
    if not sentences:
        divided = [(objects[:n], objects[n:]) for n in range(1, len(objects))]
        divided += [(objects[1:], objects[:1])] if len(objects) == 2 else []
        # Of file 1847, counts of tokens were offered as the answer to a verdict.
        said = {name for name in objects if any(holds_letters(row[name]) for row in rows)}
        for asked, answered in divided:
            if said.intersection(asked) and said.intersection(answered):
                yield in_json(rows, {"question": asked, "answer": answered})
    texts = [name for name in texts if has_text(name, fields)]
    # `_pairs` leaves out topics. Of e-mails with subjects (file 843), either may be the answer.
    # Labels of several words only answer.
    if len(texts) == 2 and any(words_of_label(name) or is_class(name) for name in texts):
        for question, answer in (texts, texts[::-1]):
            if not is_class(question):
                yield from _pair(question, answer, texts, rows, is_sure=False)
            # Of file 2161, code with keywords, the way to train the code was missing.
            if words_of_label(answer) and rank_of(question, QUESTION) is None:
                yield read_as("text", {question: "text"}, fields={"text": question})
    if len(texts) == 1 and texts[0] != "text":
        is_named = texts[0].lower() in PLAIN
        has_lists = any(isinstance(value, list | dict) and value for value in rows[0].values())
        is_question = rank_of(texts[0], QUESTION) is not None
        labels = [n for n in rows[0] if n != texts[0] and (is_class(n) or not is_question)]
        classes = list(_classes(texts[0], labels, fields))
        is_sure = is_named and not has_lists and not classes
        # Questions without answers (file 77) are refused: the way shown trained the questions.
        if not is_question:
            yield read_as("text", {texts[0]: "text"}, is_sure=is_sure, fields={"text": texts[0]})
        yield from classes
        # Of file 1865, the short answers to questions are called labels.
        for label in filter(is_class, labels if is_question else ()):
            if fields.get(label, Field()).kind == "text" and not words_of_label(label):
                yield from _pair(texts[0], label, [texts[0], label], rows, is_sure=False)


def _without_prompt(reading: Reading, rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of the answers as plain text if hardly a row has a prompt.

    Example:
        >>> found = readings_of(Layout(1, [(0, {"prompt": "", "completion": "It rains."})]), {})
        >>> [each.settings for each in found if not each.is_sure]
        [{'format': 'text', 'fields': {'text': 'completion'}}]
    """
    texts = texts_of(reading.trained, rows)
    others = [name for name in reading.reads if name not in texts]
    # File 387 has an empty prompt before each tweet. As questions and answers, all are bad.
    num_asked = sum(any(str(row.get(n) or "").strip() for n in others) for row in rows)
    if reading.prompt and len(texts) == 1 and num_asked <= MAX_EMPTY * len(rows):
        yield read_as("text", {texts[0]: "text"}, fields={"text": texts[0]})


def _preferences(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of two answers ranked by their names: `better_output`, `worse_output`."""
    words = {name: set(words_of(name)) for name in rows[0]}
    bad = [name for name in words if words[name] & BAD]
    pairs = [
        (one, other)
        for one in words
        for other in bad
        if words[one] & GOOD and words[one] - GOOD == words[other] - BAD - GOOD
    ]
    if len(pairs) != 1:
        return
    fields = {"chosen": pairs[0][0], "rejected": pairs[0][1]}
    if prompt := best_of([name for name in words if name not in pairs[0]], QUESTION):
        fields["prompt"] = prompt
    # Messages, as in file 2156, contain their prompt.
    elif not all(isinstance(row[name], list) for row in rows for name in pairs[0]):
        return
    if {*pairs[0]} != {"chosen", "rejected"}:
        reads = {name: ours for ours, name in fields.items()}
        yield read_as("preference", reads, is_sure=True, fields=fields)


def _numbered_winners(
    rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> Iterator[Reading]:
    """Yield readings of two answers and the number of the better one, counted from 0 or 1.

    Example:
        >>> row = {"prompt": "1 + 1?", "response_0": "3", "response_1": "2", "better_response": 1}
        >>> fields = {"better_response": Field(values=Counter([0, 1]))}
        >>> [reading] = _numbered_winners([row], fields)
        >>> reading.settings["select"]["chosen"]
        '["response_0", "response_1"][CAST("better_response" AS INTEGER) + 1]'
    """
    winners = [name for name in rows[0] if _WINNERS & {*words_of(name)}]
    texts = texts_of([name for name in rows[0] if name not in winners], rows)
    stems = Counter(name[:-1].lower() for name in texts if re.search(r"[abAB012]$", name))
    sides = sorted(name for name in texts if stems[name[:-1].lower()] == 2)
    prompt = best_of([name for name in texts if name not in sides], QUESTION)
    if len(sides) != 2 or prompt is None:
        return
    both = f"[{', '.join(map(sql, sides))}]"
    reads = {prompt: "prompt", **dict.fromkeys(sides, "answers")}
    # `winner_model_a` and `winner_model_b` of Chatbot Arena: one is 1, or neither in a tie.
    won = [name for side in sides for name in winners if name[-1:].lower() == side[-1:].lower()]
    if len(won) == 2 and all(_whole_numbers(fields.get(name)) == {0, 1} for name in won):
        one, other = (f"CAST({sql(name)} AS INTEGER)" for name in won)
        number, where = f"2 - {one}", f"{one} + {other} = 1"
        reads |= dict.fromkeys(won, "the better answer; ties left out")
        yield _of_winner(prompt, both, number, reads, where=where)
        return
    for name in winners:
        numbers = _whole_numbers(fields.get(name))
        start = min(numbers, default=0)
        # Not `is_a_better`, which does not count answers.
        if start in (0, 1) and numbers == {start, start + 1} and "is" not in words_of(name):
            number = f"CAST({sql(name)} AS INTEGER){' + 1' * (not start)}"
            yield _of_winner(prompt, both, number, {**reads, name: "the better answer"})


def _whole_numbers(held: Field | None) -> set[int]:
    """Return the values of a field if all are whole numbers, also as text; else an empty set."""
    values = {*held.values} if held is not None else set()
    are_numbers = all(str(value).isdigit() for value in values)
    return {int(value) for value in values} if are_numbers else set()


def _of_winner(
    prompt: str, both: str, number: str, reads: Mapping[str, str], where: str = ""
) -> Reading:
    """Return the reading of two answers, of which SQL tells the number of the better one."""
    chosen, rejected = f"{both}[{number}]", f"{both}[3 - ({number})]"
    select = {"prompt": sql(prompt), "chosen": chosen, "rejected": rejected}
    return read_as("preference", reads, select=select, where=where)


def _with_splits(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    """Return a reading, or two if a field assigns rows to training and test splits.

    The first reads only the training rows, and the second reads all rows.
    """
    for name, held in fields.items():
        values = {str(value).lower(): value for value in held.values}
        rest = [str(values[each]) for each in values if each not in HELD_OUT]
        # In file 98, rows that `data_split` reserved for tests were trained.
        is_split = {*map(str.lower, rest)} <= {"train", "training"} or "split" in words_of(name)
        if is_split and 0 < len(rest) < len(values) and name not in reading.reads:
            shown = ", ".join("'" + each.replace("'", "''") + "'" for each in rest)
            where = [f"{sql(name)} IN ({shown})"]
            if "where" in reading.settings:  # it leaves out bad answers
                where.insert(0, reading.settings["where"])
            settings = {**reading.settings, "where": where if len(where) > 1 else where[0]}
            reads = {**reading.reads, name: f"split: {', '.join(rest)} alone"}
            unsure = replace(reading, is_sure=False)
            return [replace(unsure, settings=settings, reads=reads), unsure]
    return [reading]


_CONTEXT_OF = {"alpaca": "input", "dolly": "context", "question_answer": "context"}
"""Field for a question's context, by format."""


def with_context(
    reading: Reading, unread: Sequence[str], rows: Sequence[dict[str, Any]]
) -> Reading | None:
    """Return a reading that also reads an unread field as the question's context, or None.

    If the format has no context, or the rows have another one, the field is added to the prompt.
    Of several unread fields, it is the only one named like a context, the only one whose name ends
    in `context`, or the only one not named like a source, category or other metadata, such as
    `contexts` next to `sources` (file 897).

    Example:
        >>> reads = {"ask": "prompt", "output": "completion"}
        >>> fields = {"prompt": "ask", "completion": "output"}
        >>> plain = Reading(settings={"format": "prompt_completion", "fields": fields}, reads=reads)
        >>> with_context(plain, ["law"], [{"law": "No."}]).settings["fields"]
        {'question': 'ask', 'answer': 'output', 'context': 'law'}
        >>> with_context(plain, ["law"], [{"law": ["No.", "Go."]}]).settings["select"]["context"]
        'array_to_string("law", chr(10) || chr(10))'
    """
    # `response_2` next to `response_1` is another answer.
    unread = [name for name in unread if name[:-1] not in {each[:-1] for each in reading.reads}]
    named = [name for name in unread if name.lower() in CONTEXT]
    # Such as `input_context` in file 1848.
    named = named or [name for name in unread if words_of(name)[-1:] == ["context"]]
    if "choices" not in reading.reads.values():  # else it may explain the answer
        named = named or [name for name in unread if not words_of_label(name)] or [*unread]
    if len(named) != 1:
        return None
    (name,) = named
    # Calls give the answer away, as in file 2197.
    if rank_of(name, ANSWER) is not None or {"calls", "call"} & {*words_of(name)}:
        return None
    row_format, where = reading.settings["format"], reading.settings.get("where")
    fields, reads = dict(reading.settings.get("fields", {})), dict(reading.reads)
    if "select" in reading.settings:
        select = {"context": as_text(name, rows), **reading.settings["select"]}
        if select.keys() != {"question", "answer", "context"} or "context" in reads.values():
            return None
        return read_as(row_format, {**reads, name: "context"}, select=select, where=where)
    if row_format == "prompt_completion":
        row_format, ours = "question_answer", {"prompt": "question", "completion": "answer"}
        reads = {theirs: ours.get(role, role) for theirs, role in reads.items()}
        fields = {role: theirs for theirs, role in reads.items() if not role.startswith("split")}
    role = _CONTEXT_OF.get(row_format)
    # Not `bad answers left out`, of a field that `where` reads.
    select = {ours: sql(theirs) for theirs, ours in reads.items() if ours.isidentifier()}
    text, prompt, more = as_text(name, rows), reading.prompt or "", {**reads, name: "context"}
    if role is not None and role not in select and text == sql(name):
        settings = {**reading.settings, "format": row_format, "fields": {**fields, role: name}}
        return replace(reading, settings=settings, reads={**reads, name: role}, is_sure=False)
    if role is not None and role not in select:  # passages of file 787, in a list
        select[role] = text
    elif texts_of([prompt], rows):
        # DuckDB's `concat_ws` skips NULL, so an empty field adds no line.
        select[reads[prompt]] = f"concat_ws(chr(10), {sql(prompt)}, nullif({text}, ''))"
    else:
        return None
    is_sure = row_format == "preference" and name.lower() in CONTEXT and reading.is_sure
    made = read_as(row_format, more, is_sure=is_sure, select=select, where=where)
    return replace(made, is_guess=reading.is_guess)


def _with_verdicts(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    """Return a reading, or several if a field marks some answers as bad, as `label` does in KTO."""
    bad = {name: _bad_values(name, fields.get(name, Field())) for name in rows[0]}
    name = next((name for name in bad if bad[name] and name not in reading.reads), None)
    if name is None:
        return [reading]
    reads = {**reading.reads, name: "whether the answer is good"}
    # `where` leaves the bad answers out: otherwise, they would be trained like good ones, as were
    # 13 `incorrect` ones of file 1347.
    shown = ", ".join(f"'{value}'" for value in bad[name])
    where = {(False,): sql(name), (True,): f"NOT {sql(name)}"}.get(
        tuple(bad[name]), f"coalesce({sql(name)}, '') NOT IN ({shown})"
    )
    settings, good = {**reading.settings, "where": where}, {**reads, name: "bad answers left out"}
    found = [Reading(settings=settings, reads=good, is_sure=False)]
    answer = reading.trained
    if name != "label":
        found.append(replace(reading, is_sure=False))
    if bad[name] == [False] and reading.prompt and len(answer) == 1:
        kto = {"prompt": reading.prompt, "completion": next(iter(answer)), "label": name}
        found.append(read_as("kto", reads, fields=kto))
        # If the answer alone tells the label, as of `yes` and `no`, it may be what the answer says.
        # In file 510, such a label was only offered as the quality of the answer.
        told = {(str(row.get(kto["completion"])), row.get("label")) for row in rows}
        num_answers = len({said for said, _ in told})
        if name == "label" and len(told) == num_answers and 2 * num_answers <= len(rows):
            found.insert(0, replace(reading, is_sure=False))
    return found


def _bad_values(name: str, held: Field) -> list[Any]:
    """Return the values that call an answer bad, if others call one good.

    Example:
        >>> held = Field()
        >>> held.add(["Correct", "incorrect", "unclear"])
        >>> _bad_values("verdict", held)
        ['incorrect']
    """
    if held.kind == "true or false":
        (word, *more) = [each for each in words_of(name) if each != "is"] or [""]
        value = word in BAD_ANSWER  # `is_incorrect`, but not `not_correct` or `is_right_to_left`
        is_verdict = not more and (value or word in GOOD_ANSWER | {"label"})
        return [value] if is_verdict and value in held.values else []
    words = {value: value.lower().strip(" .!") for value in held.values if isinstance(value, str)}
    bad = [value for value, word in words.items() if word in BAD_ANSWER]
    return bad if held.has_few_values and GOOD_ANSWER & {*words.values()} else []


def _tokens(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of token ids with a mask of those trained, such as `tokens` and `mask`."""
    lists = [
        name
        for name in rows[0]
        if all(
            isinstance(row[name], list) and {*map(type, row[name])} <= {int, bool} for row in rows
        )
    ]
    ids = [name for name in lists if {"tokens", "ids"} & {*words_of(name)}]
    # An attention mask tells padding from tokens, not what is trained.
    masks = [
        name
        for name in lists
        if "mask" in words_of(name)
        and "attention" not in words_of(name)
        and {weight for row in rows for weight in row[name]} == {0, 1}
    ]
    if len(ids) == len(masks) == 1:
        fields = {"input_ids": ids[0], "loss_mask": masks[0]}
        reads = {name: ours for ours, name in fields.items()}
        yield read_as("tokenized", reads, fields=fields)
