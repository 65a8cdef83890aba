"""Find readings of rows with lists and objects: messages, pairs, turns, choices and JSON."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from packhouse.addons.init.file_survey import Field
from packhouse.addons.init.reading import (
    ANSWER,
    ASSISTANTS,
    BAD,
    CONTEXT,
    GOOD,
    ID_WORDS,
    INSIDE,
    LIKELY_QUESTION,
    MAX_EMPTY,
    PLAIN,
    QUESTION,
    SHOWN,
    SYSTEM,
    USERS,
    Reading,
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
from packhouse.read.chat_messages import SPEAKERS
from packhouse.read.conversation_formats import is_transcript
from packhouse.read.json_parsing import parse_text
from packhouse.read.row_formats import MESSAGE_FIELDS, row_format_of, row_formats

_TOOLS = ("tools", "functions", "available_tools", "tool_definitions")
_DIALOG = frozenset("dialog dialogue dialogs conversation conversations turns chat talk".split())
"""Words in names of fields that contain turns as a list of texts."""
_ACCEPTED = frozenset("selected accepted best correct chosen".split())
_RATINGS = frozenset("score votes upvotes rating likes".split())
"""Words in keys of the answers to one question."""
_SPEAKER_KEYS = ("role", "from", "speaker", "sender", "author", "who", "name", "user")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")


def message_lists(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings of messages in fields with any names, and with any keys."""
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if all(is_transcript(value) for value in values):
            known = row_formats()["transcript"].names([name], {})
            fields = {} if known else {"transcript": name}
            yield read_as("transcript", {name: "transcript"}, is_sure=True, fields=fields)
        elif name not in MESSAGE_FIELDS or row_format_of(rows[0], {}) not in ("chat", "sharegpt"):
            yield from of_messages(name, rows)


def of_messages(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings of rows with messages in the field `name`.

    Example:
        >>> said = [{"speaker": "human", "text": "1+1?"}, {"speaker": "bot", "text": "2"}]
        >>> (reading,) = of_messages("talk", [{"talk": said}])
        >>> reading.settings["fields"], reading.settings["roles"]
        ({'messages': 'talk', 'role': 'speaker', 'content': 'text'}, {'bot': 'assistant'})
    """
    # `_natural` and `_preferences` read these as a pair. Here, the rejected one would be trained.
    if (GOOD | BAD) & {*words_of(name)}:
        return
    lists = [
        parse_text(value)[0] if isinstance(value, str) and value.lstrip()[:1] == "[" else value
        for value in (row.get(name) for row in rows)
    ]
    talks = [messages for messages in lists if isinstance(messages, list) and messages]
    if len(talks) < len(lists):
        return
    said = [message for messages in talks for message in messages]
    if not all(isinstance(message, dict) for message in said):
        return
    # A few messages may lack a key: their rows are bad. One message of 22 without text had refused
    # file 635.
    least = (1 - MAX_EMPTY) * len(said)
    named = (k for k in _SPEAKER_KEYS if sum(type(m.get(k)) is str for m in said) >= least)
    speaker = next(named, None)
    # Calls of tools may have no content, as in file 122, which was refused for it.
    texts = [m for m in said if not (m.get("tool_calls") or m.get("function_call"))]
    keys = (key for key in _CONTENT_KEYS if key != speaker)
    held = (k for k in keys if sum(k not in m for m in texts) <= MAX_EMPTY * len(said))
    content = next(held, None)
    if speaker is None or content is None:
        return
    talks = [talk for talk in talks if all(type(m.get(speaker)) is str for m in talk)]
    row_format = "sharegpt" if speaker == "from" and content == "value" else "chat"
    if not any(len({message[speaker] for message in messages}) > 1 for messages in talks):
        return  # only one speaker: a prompt or an answer
    ours = {"role": speaker, "content": content}
    usual = {"role": "from", "content": "value"} if row_format == "sharegpt" else {}
    fields = {key: theirs for key, theirs in ours.items() if theirs != usual.get(key, key)}
    known = row_formats()[row_format]
    if name not in MESSAGE_FIELDS:
        fields = {next(iter(known.required)): name, **fields}
    beside = known.names([n for n in rows[0] if n != name], {})
    reads = {name: "messages"} | {n: ours for ours, n in beside.items() if n not in MESSAGE_FIELDS}
    settings: dict[str, Any] = {"fields": fields}
    # Objects in place of texts (file 633) become JSON. The SQL does not quote the names in it.
    # The SQL copies two fields of each message, so calls would get lost.
    is_plain = all({k for k in m if m[k]} <= {speaker, content} for m in said)
    has_objects = is_plain and any(isinstance(message.get(content), dict) for message in texts)
    if has_objects and all(map(str.isidentifier, (name, speaker, content))):
        row_format, reads = "chat", {name: "messages, objects in them as JSON"}
        text = f"{{'role': m.{speaker}, 'content': cast(m.{content} as varchar)}}"
        settings = {"select": {"messages": f"list_transform({name}, lambda m: {text})"}}
    choices = _roles_of([[message[speaker] for message in messages] for messages in talks])
    is_sure = len(choices) == 1 and not has_objects
    for roles in choices:
        yield read_as(row_format, reads, is_sure=is_sure, roles=roles, **settings)


def _roles_of(speakers: list[list[str]]) -> list[dict[str, str]]:
    """Return roles for unknown speaker names, in several ways if the roles are ambiguous.

    Rows with a rare unknown name are left to `prepare`, which quarantines them.
    """
    rows_with = Counter(name for names in speakers for name in dict.fromkeys(names))
    # One row with an unknown speaker hid the messages of a whole file.
    least = MAX_EMPTY * len(speakers)
    unknown = [name for name, rows in rows_with.items() if name not in SPEAKERS and rows > least]
    roles: dict[str, str] = {}
    for name in unknown:
        words = set(words_of(name))
        role = "user" if words & USERS else "assistant" if words & ASSISTANTS else ""
        role = role or ("system" if "system" in words else "")
        if role:
            roles[name] = role
    rest = [name for name in unknown if name not in roles]
    if len(rest) == 2 and not roles:  # the first speaker is probably the user
        first = Counter(names[0] for names in speakers).most_common(1)[0][0]
        both = sorted(rest, key=lambda name: name != first)
        parts = ("user", "assistant")
        return [dict(zip(names, parts, strict=True)) for names in (both, both[::-1])]
    if len(rest) == 1:
        # The role that its conversations lack: of file 1495, `content` in place of `assistant`.
        talks = [names for names in speakers if rest[0] in names]
        said = {SPEAKERS.get(name, roles.get(name)) for names in talks for name in names}
        missing = [role for role in ("user", "assistant") if role not in said]
        if len(missing) == 1 and "assistant" not in roles.values():
            # Two ways, because it may also be another speaker.
            both = sorted(("user", "assistant"), key=lambda role: role != missing[0])
            return [roles | {rest[0]: role} for role in both]
        if "assistant" in roles.values():
            return [roles | {rest[0]: "user"}]
    return [] if rest else [roles]


_KEYS = {"chat": ("role", "content"), "sharegpt": ("from", "value")}
"""Keys of a message's speaker and content, by format."""
_BESIDE = ("system", "system_prompt", "tools")
"""Other fields read by formats with messages."""
_PROMPTS = (*QUESTION, "messages")


def made_of_lists(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings for which `select` makes messages, or a question and an answer."""
    for row_format in _KEYS:
        beside = {name: sql(name) for name in _BESIDE if name in rows[0]}
        for select, reads, is_sure in (
            *_nested(rows, row_format),
            *_in_two_lists(rows, row_format),
            *_without_answer(rows, row_format),
        ):
            reads = {name: name for name in beside} | reads
            yield read_as(row_format, reads, is_sure=is_sure, select=beside | select)
    yield from _inner_pairs(rows)
    yield from _parts_of_gemini(rows)
    yield from _lists_of_texts(rows)
    yield from _with_tools(rows)


Made = tuple[dict[str, str], dict[str, str], bool]
"""The `select` setting, roles by field name, and True if the reading is sure."""


def _nested(rows: Sequence[Mapping[str, Any]], row_format: str) -> Iterator[Made]:
    """Yield readings of messages nested in an object."""
    if any(_are_messages([row[name] for row in rows], row_format) for name in rows[0]):
        return
    for outer in rows[0]:
        objects = [row[outer] for row in rows]
        if not all(isinstance(each, dict) for each in objects):
            continue
        for inner in MESSAGE_FIELDS:
            talks = [each.get(inner) for each in objects]
            if _are_messages(talks, row_format) and not _are_questions(talks, row_format):
                names = [n for n in _BESIDE if any(each.get(n) for each in objects)]
                path = f"{sql(outer)}.{sql(inner)}"
                select = {n: f"{sql(outer)}.{sql(n)}" for n in names} | {"messages": path}
                yield select, {outer: "messages"}, True


def _inner_pairs(rows: Sequence[Mapping[str, Any]]) -> Iterator[Reading]:
    """Yield readings of a question and an answer in an object, as in file 1387."""
    objects = [value for value in rows[0].values() if isinstance(value, dict)]
    if len(rows) == 1 and len({tuple(each) for each in objects}) < len(objects):
        return  # they may be rows, as in file 1674
    for outer in rows[0]:
        objects = [row[outer] for row in rows]
        if not all(isinstance(each, dict) for each in objects):
            continue
        texts = texts_of(objects[0], objects)
        known = {"question": QUESTION, "answer": ANSWER, "context": CONTEXT, "system": SYSTEM}
        inner = {ours: name for ours, names in known.items() if (name := best_of(texts, names))}
        if {"question", "answer"} <= inner.keys() and len({*inner.values()}) == len(inner):
            select = {ours: f"{sql(outer)}.{sql(name)}" for ours, name in inner.items()}
            yield read_as("question_answer", {outer: INSIDE}, is_sure=True, select=select)


def _parts_of_gemini(rows: Sequence[Mapping[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of Gemini messages: roles `user` and `model`, and texts in `parts`."""
    said = [message for row in rows for message in row.get("contents") or ()]
    # The only ways for file 429 left these system prompts out, or trained JSON.
    known = ("systemInstruction", "system_instruction")
    names = [name for name in known if name in rows[0]][:1]
    systems = [row[name] for name in names for row in rows if row[name]]
    if not said or not all(
        isinstance(message, dict)
        and {"parts"} <= message.keys() <= {"role", "parts"}
        and isinstance(message["parts"], list)
        and all(isinstance(part, dict) and part.keys() == {"text"} for part in message["parts"])
        for message in said + systems
    ):
        return
    if any(message.get("role") not in ("user", "model") for message in said):
        return
    text = "array_to_string(list_transform({}.parts, lambda p: p.text), '')"
    messages = (
        "list_transform(contents, lambda m: {'role': CASE m.role WHEN 'model' THEN 'assistant' "
        f"ELSE m.role END, 'content': {text.format('m')}}})"
    )
    select, reads = {"messages": messages}, {"contents": "messages"}
    for name in names:
        select["system"], reads[name] = text.format(name), "system"
    yield read_as("chat", reads, is_sure=True, select=select)


def _in_two_lists(rows: Sequence[Mapping[str, Any]], row_format: str) -> Iterator[Made]:
    """Yield readings of a prompt and an answer that are both message lists.

    The prompt has no loss.
    """
    if "chosen" in rows[0] or "rejected" in rows[0]:
        return
    lists = [name for name in rows[0] if _are_messages([row[name] for row in rows], row_format)]
    prompts = [name for name in lists if rank_of(name, _PROMPTS) is not None]
    answers = [name for name in lists if rank_of(name, ANSWER) is not None]
    for prompt in prompts:
        for answer in answers:
            said = [message for row in rows for name in (prompt, answer) for message in row[name]]
            speaker, content = _KEYS[row_format]
            # The SQL copies these two keys. Others, such as a `weight`, would be lost.
            if any(set(each) != {speaker, content} for each in said):
                continue
            parts = [
                f"list_transform({sql(name)}, lambda m: {{'{speaker}': m.\"{speaker}\", "
                f"'{content}': m.\"{content}\", 'loss': {loss}}})"
                for name, loss in ((prompt, "false"), (answer, "true"))
            ]
            select = {"messages": f"list_concat({', '.join(parts)})"}
            yield select, {prompt: "prompt", answer: "answer"}, len(prompts) == len(answers) == 1


def _without_answer(rows: Sequence[Mapping[str, Any]], row_format: str) -> Iterator[Made]:
    """Yield readings of messages that end on a question, with the answer in a text field."""
    answers = [n for n in texts_of(rows[0], rows) if rank_of(n, ANSWER) is not None]
    for prompt in rows[0]:
        talks, messages = [row[prompt] for row in rows], sql(prompt)
        speaker, content = _KEYS[row_format]
        if row_format == "chat" and _have_keys(talks, {"role", "text"}):
            talks = [[{"role": m["role"], "content": m["text"]} for m in talk] for talk in talks]
            made = "{'role': m.\"role\", 'content': m.\"text\"}"
            messages = f"list_transform({messages}, lambda m: {made})"
        if not _are_messages(talks, row_format) or not _are_questions(talks, row_format):
            continue
        said_before = [each for talk in talks for each in talk]
        if any(set(each) != {speaker, content} for each in said_before):
            continue
        if not all(isinstance(each[content], str) for each in said_before):
            continue  # parts of a message would become JSON, such as images of file 1744
        name = "assistant" if speaker == "role" else "gpt"
        for said in answers:
            answer = f"{{'{speaker}': '{name}', '{content}': {sql(said)}}}"
            select = {"messages": f"list_append({messages}, {answer})"}
            yield select, {prompt: "messages", said: "answer"}, len(answers) == 1


def _are_questions(talks: Sequence[Any], row_format: str) -> bool:
    """Return True if all conversations end with a question."""
    return all(talk[-1].get(_KEYS[row_format][0]) in ("user", "human") for talk in talks)


def questions_in(rows: Sequence[Any]) -> set[str]:
    """Return the fields with messages that all end with a question, such as prompts."""
    names = rows[0] if type(rows[0]) is dict else ()
    talks = {name: [row.get(name) for row in rows] for name in names}
    return {
        name
        for name, said in talks.items()
        for known in _KEYS
        if _are_messages(said, known) and _are_questions(said, known)
    }


def _are_messages(values: Sequence[Any], row_format: str) -> bool:
    """Return True if all values are lists of messages in the given format."""
    return _have_keys(values, {*_KEYS[row_format]})


def _have_keys(values: Sequence[Any], keys: set[str]) -> bool:
    """Return True if all values are lists of objects with these keys."""
    return all(
        isinstance(value, list)
        and value
        and all(isinstance(each, dict) and each.keys() >= keys for each in value)
        for value in values
    )


def _lists_of_texts(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings of lists of turns, of question-answer pairs, or of answers to one question."""
    for name in rows[0]:
        lists = [row[name] for row in rows if row[name]]
        if not lists or not all(isinstance(value, list) for value in lists):
            continue
        if words_of_label(name):
            continue
        beside = [n for n in texts_of(rows[0], rows) if n != name]
        asks = best_of(beside, QUESTION)
        # Not the first keyword of file 2199, next to an answer.
        if best_of(beside, ANSWER) and not best_of([name, name[:-1]], [*ANSWER, "generation"]):
            continue
        items = [item for value in lists for item in value]
        role = "CASE WHEN i % 2 = 1 THEN 'user' ELSE 'assistant' END"
        if all(isinstance(item, str) for item in items):
            if asks is not None:
                select = {"question": sql(asks), "answer": f"{sql(name)}[1]"}
                # Of file 2167, 329 questions have more labels than the first.
                num_more = sum(len(value) > 1 for value in lists)
                more = f"; {num_more:,} of {len(rows):,} examples have more" if num_more else ""
                reads = {asks: "question", name: f"answer: its first item{more}"}
                yield read_as("question_answer", reads, select=select)
            elif _are_turns(name, lists, rows):
                said = f"{{'role': {role}, 'content': text}}"
                messages = f"list_transform({sql(name)}, lambda text, i: {said})"
                reads = {name: "messages: user and assistant by turns"}
                yield read_as("chat", reads, select={"messages": messages})
        elif all(isinstance(item, dict) for item in items):
            if asks is not None and "text" in items[0]:
                yield from _rated_answers(asks, name, items)
            asks, says = best_of(items[0], QUESTION), best_of(items[0], ANSWER)
            if asks is None or says is None or asks == says:
                continue
            if not all(isinstance(item.get(key), str) for item in items for key in (asks, says)):
                continue
            # Of file 1956, the inputs of the instructions were lost without a word.
            texts = [
                key
                for key in dict.fromkeys(key for item in items for key in item)
                if key not in (asks, says) and any(holds_letters(item.get(key)) for item in items)
            ]
            contexts = [key for key in texts_of(texts, items) if key.lower() in CONTEXT]
            both = [asks, *contexts] if len(contexts) == 1 else [asks]
            parts = [f"nullif(pair.{sql(key)}, '')" for key in both]
            asked = f"concat_ws(chr(10), {', '.join(parts)})" if both[1:] else f"pair.{sql(asks)}"
            asked = f"{{'role': 'user', 'content': {asked}}}"
            said = f"{{'role': 'assistant', 'content': pair.{sql(says)}}}"
            messages = f"flatten(list_transform({sql(name)}, lambda pair: [{asked}, {said}]))"
            ours = f"messages: {' and '.join(both)} {'ask' if both[1:] else 'asks'}, {says} answers"
            left = [key for key in texts if key not in both and not words_of_label(key)]
            ours += f", without {', '.join(left)}" if left else ""
            yield read_as("chat", {name: ours}, select={"messages": messages})


def _rated_answers(asks: str, name: str, items: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings of a question and one of its answers: the accepted one, or the best rated."""
    for key in items[0]:
        values, words = [item.get(key) for item in items], {*words_of(key)}
        best = ""
        if words & _ACCEPTED and {*map(type, values)} == {bool}:
            best = f"list_filter({sql(name)}, lambda a: a.{sql(key)})[1]"
        elif words & _RATINGS and {*map(type, values)} <= {int, float}:
            better = f"CASE WHEN b.{sql(key)} > a.{sql(key)} THEN b ELSE a END"
            best = f"list_reduce({sql(name)}, lambda a, b: {better})"
        if best:
            reads = {asks: "question", name: f"answer: its item with the best {key!r}"}
            select = {"question": sql(asks), "answer": f'{best}."text"'}
            yield read_as("question_answer", reads, select=select)


def _are_turns(name: str, lists: Sequence[list[str]], rows: Sequence[dict[str, Any]]) -> bool:
    """Return True for lists that may be turns: by name, or two texts and no other field but ids."""
    # Only by name, because lists of texts may also be examples of an intent (file 81). Two texts
    # and nothing else are a question and its answer (file 477).
    if _DIALOG & {*words_of(name)}:
        return all(len(value) % 2 == 0 for value in lists)
    others = [n for n in rows[0] if n != name and not ID_WORDS & {*words_of(n)}]
    return not others and all(len(value) == 2 for value in lists)


_CALL = {"name", "arguments"}


def _with_tools(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of a question, an answer and tool definitions.

    The answer is text, or tool calls in a list or as JSON text.
    """
    # Without this reading, files 183 and 198 lost their tools, and their calls became plain JSON.
    tools = next((name for name in _TOOLS if rows[0].get(name)), None)
    texts = [name for name in texts_of(rows[0], rows) if name != tools]
    asks = best_of(texts, QUESTION)
    lists = [name for name in rows[0] if _have_keys([row[name] for row in rows], _CALL)]
    names = [name for name in (*texts, *lists) if name not in (asks, tools)]
    says = best_of(names, [*ANSWER, "answers", "calls", "tool_calls"])
    if tools is None or asks is None or says is None:
        return
    are_calls = says in lists or all(str(row[says] or "").lstrip()[:1] == "[" for row in rows)
    role = "function_call" if are_calls else "assistant"
    content = f"json({sql(says)})" if says in lists else sql(says)
    said = (
        f"[{{'role': 'user', 'content': {sql(asks)}}}, {{'role': '{role}', 'content': {content}}}]"
    )
    reads = {asks: "question", says: "calls" if are_calls else "answer", tools: "tools"}
    yield read_as("chat", reads, select={"messages": said, "tools": sql(tools)})


def as_json(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings in which the question, the answer or both are objects or lists, read as JSON.

    A number, or true or false, can be the answer, too. If no field is named like an answer, all
    other texts, labels and objects together can be the answer, as one object. A label can be the
    answer to all of them.

    Example:
        >>> [reading] = as_json([{"text": "Ann is 7.", "output": {"name": "Ann", "age": 7}}])
        >>> reading.settings["select"]
        {'question': '"text"', 'answer': 'json("output")'}
    """
    texts = [
        name
        for name in texts_of(rows[0], rows)
        if not words_of_label(name) and name != "source" and not is_class(name)
    ]
    classes = [name for name in texts_of(rows[0], rows) if is_class(name)]
    objects = [
        name
        for name in rows[0]
        if all(isinstance(row[name], dict | list) for row in rows)
        and any(row[name] for row in rows)
        and not words_of_label(name)
        and name not in (*MESSAGE_FIELDS, *_TOOLS)
        and not any(_are_messages([row[name] for row in rows], known) for known in _KEYS)
    ]
    names = [*texts, *objects]
    asking = names_like(names, QUESTION) or names_like(texts, PLAIN)
    answering = names_like(names, ANSWER)
    contexts = [name for name in texts if name.lower() in CONTEXT]
    values = [
        name
        for name in names_like([*rows[0]], ANSWER)
        if all(isinstance(row[name], int | float) for row in rows)  # also true and false
    ]
    pairs: list[tuple[list[str], list[str]]] = []
    if values and not answering and _choices(rows) is None:
        asking, answering = asking[:1], values[:1]
    elif answering:
        asking = asking or names_like(texts, LIKELY_QUESTION)
    else:
        answering = objects
        short = [
            name
            for name in texts
            if name not in asking and name not in contexts and rank_of(name, SYSTEM) is None
        ] + classes
        # The short texts belong to the answer. With the entities of file 615 in the question, no
        # way was right, nor with one of two objects as the answer (files 1457 and 1459).
        if len(asking) == 1 and objects and len(short) + len(objects) > 1:
            pairs.append((asking, [name for name in rows[0] if name in (*short, *objects)]))
        labels = [n for n in rows[0] if is_class(n, "target") and type(rows[0][n]) in (str, int)]
        labels.sort(key=lambda name: type(rows[0][name]) is int)  # names before numbers
        if labels and len(names) > 1:
            pairs.append(([name for name in rows[0] if name in names], labels[:1]))
    pairs += [
        ([asks], [says])
        for asks in asking
        for says in answering
        if asks != says and {asks, says}.intersection([*objects, *values])
    ]
    for asked, said in pairs[:SHOWN]:
        read = {"question": asked, "answer": said}
        if system := best_of([name for name in texts if name not in asked + said], SYSTEM):
            read["system"] = [system]
        # Of file 790, the text that its questions are about was offered as part of the answers.
        if len(about := [name for name in contexts if name not in asked + said]) == 1:
            read["context"] = about
        yield in_json(rows, read)


def in_json(rows: Sequence[dict[str, Any]], read: Mapping[str, list[str]]) -> Reading:
    """Return the reading of our fields from fields of the file; several, or an object, as JSON."""
    select: dict[str, str] = {}
    reads: dict[str, str] = {}
    for ours, names in read.items():
        is_json = len(names) > 1 or isinstance(rows[0][names[0]], dict | list)
        # Answers must be text: naming the numbers of files 15, 299 and 530 as answers failed.
        is_value = ours == "answer" and isinstance(rows[0][names[0]], int | float)
        written = f"json({', '.join(map(sql, names))})"
        select[ours] = written if is_json or is_value else sql(names[0])
        reads |= dict.fromkeys(names, f"{ours}, as JSON" if is_json else ours)
    return read_as("question_answer", reads, select=select)


_CHOICES = ("choices", "options", "answers", "endings", "candidates", "choice")
"""Names of fields with all choices."""
_RIGHT = frozenset("answer label correct answerkey gold target idx".split())
"""Words in names of fields that name the right choice, or hold its text."""
CHOICE_NAMES = re.compile(
    r"(?i)(?:option|choice|answer|opt|ending|sol)?[\W_]*([a-z]|[0-9]{1,2})[\W_]*"
)


def multiple_choice(
    rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> Iterator[Reading]:
    """Yield readings of multiple-choice questions with the choices in a list or separate fields.

    The answer is either the letter or the text of the right choice.
    """
    first = rows[0]
    if (found := _choices(rows)) is None:
        return
    choices, read, of_rows = found
    most = max(map(len, of_rows))
    texts = [n for n in texts_of(first, rows) if has_text(n, fields) and n not in read]
    asks = best_of(texts, [*QUESTION, *PLAIN])
    if asks is None and texts:  # such as `ctx` or `goal`
        asks = max(texts, key=lambda name: sum(len(row.get(name) or "") for row in rows))
    if asks is None:
        return
    others = [name for name in first if name not in (asks, *read)]
    is_found = False
    for name in sorted(others, key=lambda name: _RIGHT.isdisjoint(words_of(name))):
        is_right = not _RIGHT.isdisjoint(words_of(name))
        said = [row[name] for row in rows if row.get(name) is not None]
        values = (fields[name].values if name in fields else None) or dict.fromkeys(map(str, said))
        if not said or not {*map(type, said)} <= {str, int} or (is_found and not is_right):
            continue
        numbers = _numbers_of(name, values, most)
        # A letter such as E of four choices says that none is right.
        is_letter = not numbers and all(re.fullmatch("[A-Z]", str(value)) for value in values)
        if (not is_right and not numbers) or ID_WORDS & {*words_of(name)} - {"index"}:
            continue
        if not numbers and not is_letter:
            if not all(row.get(name) in each for row, each in zip(rows, of_rows, strict=True)):
                continue
        is_found = True
        letter = "chr(CAST(64 + i AS INTEGER))"
        letters = f"list_transform({choices}, lambda text, i: {letter} || '. ' || text)"
        asked = f"{sql(asks)} || chr(10) || array_to_string({letters}, chr(10))"
        if all(re.match(r"\W?[A-Z][).:]", text) for texts in of_rows for text in texts):
            asked = f"{sql(asks)} || chr(10) || array_to_string({choices}, chr(10))"
        ways = [(f"{'letter' if is_letter else 'text'} of the choice", sql(name))] * (not numbers)
        for start, number in enumerate(numbers):
            more = f", counted from {start}" * (len(numbers) > 1)
            ways.append((f"letter of the choice{more}", f"chr(64 + CAST({number} AS INTEGER))"))
            ways.append((f"text of the choice{more}", f"{choices}[{number}]"))
        for what, answer in ways:
            reads = {
                asks: "question",
                **dict.fromkeys(read, "choices"),
                name: f"answer: the {what}",
            }
            select = {"question": asked, "answer": answer}
            yield read_as("question_answer", reads, select=select)


def _choices(rows: Sequence[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]] | None:
    """Return SQL for the choices, the fields that hold them, and the choices of each row.

    They are in a list of texts, or of objects with a `text`; in an object `{"A": text, ...}` or
    `{"text": [...]}`; or in fields with names such as `choice1`.
    """
    name = next((n for n in _CHOICES if isinstance(rows[0].get(n), list | dict)), "")
    inside: Any = rows[0].get(name)
    owners: list[Any] = [row.get(name) for row in rows]
    path, read, labels = sql(name), [name], list[Any]()
    if isinstance(inside, dict) and "text" in inside:
        labels = [each.get("label") if isinstance(each, dict) else None for each in owners]
        owners = [each.get("text") if isinstance(each, dict) else None for each in owners]
        path = f'{path}."text"'
    elif isinstance(inside, list) and inside and isinstance(inside[0], dict):
        ones = [[o if isinstance(o, dict) else {} for o in each or ()] for each in owners]
        labels = [[one.get("label") for one in each] for each in ones]
        owners = [[one.get("text") for one in each] for each in ones]
        path = f'list_transform({path}, lambda c: c."text")'
    elif not isinstance(inside, list):
        is_object = isinstance(inside, dict)
        inside, owners = (inside, owners) if is_object else (rows[0], [*rows])
        names = [n for n in inside if CHOICE_NAMES.fullmatch(n) and isinstance(inside[n], str)]
        if len(names) < 2:  # or names that differ in their last sign, such as `opa` to `opd`
            stems = Counter(each[:-1] for each in inside if isinstance(inside[each], str))
            names = [n for n in inside if isinstance(inside[n], str) and stems[n[:-1]] > 2]
        if len(names) < 2:
            return None
        names.sort(key=lambda name: (len(name), name))
        read = read if is_object else names
        parts = [f"{path}.{sql(each)}" if is_object else sql(each) for each in names]
        path = f"[{', '.join(parts)}]"
        owners = [
            [each.get(one) for one in names] if isinstance(each, dict) else None for each in owners
        ]
    if not all(map(_are_in_order, labels)):
        return None
    if all(isinstance(texts, list) and {*map(type, texts)} <= {str} for texts in owners):
        return path, read, owners
    return None


def _are_in_order(labels: Any) -> bool:
    """Return True for no labels, or A, B, C and so on, or numbers from 1."""
    said = [str(each) for each in labels or () if each is not None]
    letters, numbers = (chr(65 + n) for n in range(26)), map(str, range(1, 27))
    return any(said == [*islice(known, len(said))] for known in (letters, numbers))


_NAMED_CHOICE = r"(?i)^\W*(?:option|choice|answer)?\W*([a-z]|\d{1,2})(?:\.0)?\W*$"
"""An answer that only names a choice, such as `2`, `B`, `(b)` and `option 2`."""


def _numbers_of(name: str, values: Iterable[Any], most: int) -> list[str]:
    """Return SQL for the number of the right choice, counted from 1.

    Return none if the values are not all numbers, or letters, of choices; two if they may be
    counted from 0 or from 1.
    """
    is_number = all(type(value) is int for value in values)
    if not all(re.search(_NAMED_CHOICE, str(value)) and str(value)[:1] != "-" for value in values):
        return []
    known = {re.sub(_NAMED_CHOICE, r"\1", str(value)).upper() for value in values}
    mark = sql(name) if is_number else f"regexp_extract({sql(name)}, '{_NAMED_CHOICE}', 1)"
    letter = f"ascii(upper({mark})) - 64"
    numbers = {int(each) for each in known if each.isdigit()}
    if not known <= {chr(65 + n) for n in range(most)} | {*map(str, range(most + 1))}:
        return []
    if len(numbers) < len(known):  # ARC names choices by letters, and by numbers in some rows
        mixed = [] if 0 in numbers else [f"coalesce(TRY_CAST({mark} AS INTEGER), {letter})"]
        return mixed if numbers else [letter]
    number = mark if is_number else f"CAST({mark} AS INTEGER)"
    # Of three choices, 0 to 1 counts from 0, and 1 to 3 from 1. With 1 to 2, both are possible.
    starts = [start for start in (0, 1) if start <= min(numbers) and max(numbers) < most + start]
    return [number if start else f"{number} + 1" for start in starts]
