"""Find all possible readings of a file's rows, with the fields that each leaves out.

Field names and values only produce readings and rank them. `choose_format` accepts a reading if it
is the only one based on known field names and leaves no text unread; otherwise the user chooses.

    {"query": ..., "reply": ...}                  one reading: query asks, reply answers
    {"query": ..., "original": ..., "reply": ...} two: query or original asks, and the other is
                                                  left out
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from packhouse.addons.init.file_survey import HELD_OUT, Field, Layout
from packhouse.read.chat_messages import SPEAKERS
from packhouse.read.conversation_formats import is_transcript
from packhouse.read.json_parsing import parse_text
from packhouse.read.row_formats import MESSAGE_FIELDS, row_format_of, row_formats
from packhouse.read.single_turn_formats import TextFields
from packhouse.read.unread_fields import UNSPACED, is_text
from packhouse.system.wording import counted

# `file 98` below is the file of that number in docs/decisions/2026-11-27-thirty-files.md: public
# files that were read wrongly, or asked about without a right way.

# Words in field names. Words in `_LIKELY_*` are not evidence; they only produce candidates.

_QUESTION = (
    "question instruction prompt query ask user human problem request input inputs 问题 提问 问 "
    "指令 質問 질문 vraag domanda soru pytanie fråga spørgsmål frage pregunta pergunta вопрос soal"
).split()
_ANSWER = (
    "solution answer output response completion assistant reply bot gpt chosen target targets "
    "truth 答案 回答 答 输出 回复 답변 答え antwoord risposta cevap odpowiedź svar antwort "
    "respuesta resposta réponse ответ jawaban"
).split()
_LIKELY_QUESTION = (
    "q patient customer utterance task title source src document article text passage"
).split()
_LIKELY_ANSWER = "a doctor agent chatbot tgt summary highlights result translation".split()
_PLAIN = ("text", "content", "body")
_CONTEXT = (
    "context input background passage reference material paragraph document article story evidence "
    "knowledge schema sql_context 背景 输入"
).split()
_SYSTEM = "system sys persona".split()
_REASONING = "reasoning thinking thought thoughts cot rationale chain_of_thought".split()
_TOOLS = ("tools", "functions", "available_tools", "tool_definitions")
_FILLERS = frozenset("text content body string message msg prompt field".split())
"""Last words that are ignored, as in `question_text`."""
_GOOD = frozenset("chosen preferred better best good winning accepted positive".split())
_BAD = frozenset(
    "rejected dispreferred wrong incorrect bad worse worst negative losing non".split()
)
_GOOD_ANSWER = frozenset("correct right good accepted approved".split())
_BAD_ANSWER = frozenset("incorrect wrong bad rejected".split())
_ID_WORDS = frozenset("id ids uuid hash index".split())
_LABEL_WORDS = _ID_WORDS | frozenset(
    "source sources origin url link date time type kind category categories "
    "topic subject domain tag tags lang language license licence model dataset split subset author "
    "difficulty level score len length count num name file path metadata".split()
)
"""Words in names of ids, sources, categories and other metadata."""
_ORIGIN_WORDS = _LABEL_WORDS - frozenset(
    "type kind category categories topic subject domain tag tags level difficulty score".split()
)
"""Words in names of fields that describe the origin of a text rather than its content."""
_SCORES = ("similarity", "similarity_score", "score", "label", "is_duplicate")
"""Names of fields with the similarity of two texts."""
_DIALOG = frozenset("dialog dialogue dialogs conversation conversations turns chat talk".split())
"""Words in names of fields that contain turns as a list of texts."""

_UTTERANCES = frozenset("patterns examples utterances".split())
"""Words in names of lists of texts that have the same intent and answer."""
_PIECES = frozenset("words tokens characters chars sentences".split())
"""Words in names of lists with the pieces of one text."""
_CLASSES = frozenset(("label", "class", "intent", "sentiment", "emotion", "target"))
_SPEAKER_KEYS = ("role", "from", "speaker", "sender", "author", "who", "name", "user")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")
_USERS = frozenset(
    "user human customer client patient person prompter question student visitor caller kunde 用户 "
    "问 患者".split()
)
_ASSISTANTS = frozenset(
    "assistant gpt bot ai model agent chatgpt chatbot doctor answer claude llm 助手 "
    "机器人 答 医生".split()
)
_MAX_EMPTY = 0.1
"""Largest share of a layout's rows that may not fit a format; they become bad rows."""
_MAX_CLASSES = 200
_SHOWN = 6
"""Number of candidates shown."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read the rows of a file."""

    settings: Mapping[str, Any]
    """Keys of the recipe's source."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Role of each field that is read, by the field's name in the file."""
    is_sure: bool = True
    """False if only the order of the fields or a likely name suggests the roles."""
    is_guess: bool = False
    """True if it is not sure, no variant of a sure reading, and does not remove marks."""
    template: str = ""
    """Template of the recipe, unless it is the usual one."""

    @property
    def trained(self) -> set[str]:
        """Names of the fields that are trained."""
        prompts = {"text"} if self.settings["format"] == "classification" else set()
        return {name for name, ours in self.reads.items() if ours in _TRAINED - prompts}

    @property
    def removes_marks(self) -> bool:
        """True if it reads turns from texts and leaves out the marks or names of their speakers."""
        return not {UNNAMED, TEMPLATED, TALK}.isdisjoint(self.reads.values())

    @property
    def prompt(self) -> str | None:
        """Name of the field with the prompt."""
        by_role = {ours: name for name, ours in self.reads.items()}
        return by_role.get("prompt") or by_role.get("question") or by_role.get("instruction")


def _reading(
    row_format: str, reads: Mapping[str, str], *, is_sure: bool = False, **settings: Any
) -> Reading:
    kept = {key: value for key, value in settings.items() if value}
    return Reading(settings={"format": row_format, **kept}, reads=reads, is_sure=is_sure)


TEMPLATED = "messages, without the marks of a chat template"
TALK = "messages, without the names of their speakers"
HEADED = "prompt, and completion after the last heading"
INSIDE = "question and answer in an object"
_TRAINED = {
    *(TEMPLATED, TALK, HEADED, INSIDE),
    *("answer", "completion", "output", "response", "chosen", "text", "messages", "conversations"),
    *("transcript", "label", "answers", "paragraphs", "input_ids"),
}


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
    found = [
        *_natural(rows, fields),
        *_preferences(rows),
        *_messages(rows),
        *_made_of_lists(rows),
        *_choices(rows, fields),
        *_pairs(rows, fields),
        *_as_json(rows),
        *_templated_texts(rows),
        *_tokens(rows),
    ]
    # Passages that fit a query (files 465 and 628) and scored translations (file 452) were offered
    # as answers.
    if is_compared := _are_compared(rows):
        found = [replace(each, is_sure=False) for each in _preferences(rows)]
    found = [_with_context(each, rows) for each in found]
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
            and "answer, as JSON" not in other.reads.values()
            and each.trained <= other.trained
            and (other.is_sure or not each.is_sure)
            and each.settings["format"] != "text"  # training on the text itself or on its class
            for other in found
        )
        if not is_less and not any(dict(each.reads) == dict(d.reads) for d in different):
            different.append(each)
    # `_with_topics` comes first: it takes only readings without `select` and `where`, which the
    # others add.
    varied = (
        *(_with_topics, _with_short_contexts, _with_verdicts, _with_speakers, _with_talks),
        *(_with_headings, _with_ends, _with_splits),
    )
    different = [replace(each, is_guess=not each.is_sure) for each in different]
    for vary in varied:
        different = [
            replace(made, is_guess=each.is_guess and not made.removes_marks)
            for each in different
            for made in vary(each, rows, fields)
        ]
    return sorted(different, key=lambda each: not each.is_sure)


# Formats whose field names occur in the rows.


def _natural(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    for name, known in row_formats().items():
        fitting = [
            row
            for row in rows
            if known.fits(tuple(row), {}) and known.holds(row, known.names(tuple(row), {}))
        ]
        # `prepare` quarantines the few that do not fit. A single row without messages would
        # otherwise refuse a whole file of chats.
        if len(fitting) < (1 - _MAX_EMPTY) * len(rows):
            continue
        names = known.names(list(rows[0]), {})
        if isinstance(known, TextFields):
            turns = [names[ours] for _, ours in known.turns]
            if not any(all(isinstance(row[name], str) for name in turns) for row in rows):
                continue
        more: dict[str, str] = {}
        if name in ("chat", "sharegpt"):
            yield from _of_messages(names[next(iter(known.required))], fitting)
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
            more = {"prompt": best} if (best := _best(rest, _QUESTION)) else {}
            prompts = [each for each in _texts_of(rest, rows) if _has_text(each, fields)]
            # Any text may be the prompt if no name tells: one reading for each, five for file 289.
            # The transcripts of hh-rlhf already contain their prompts.
            if prompts and best is None and marks_in(rows, [names["chosen"]]) is None:
                chosen = {theirs: ours for ours, theirs in names.items()}
                for each in prompts:
                    yield _reading(name, {each: "prompt", **chosen}, fields={"prompt": each})
                continue
        if isinstance(known, TextFields) and known.answers == "required":
            # The context of a question and the reasoning of an answer, if the format reads them.
            texts = _texts_of([n for n in rows[0] if n not in names.values()], rows)
            beside = {"reasoning": _best(texts, _REASONING)}
            contexts = [each for each in texts if each.lower() in _CONTEXT]
            if "context" not in names and len(contexts) == 1:
                beside["context"] = contexts[0]
            more = {part: each for part, each in beside.items() if each and part in known.optional}
        reads = {theirs: ours for ours, theirs in (names | more).items()}
        # An object as the input of an instruction made each row of file 801 bad, and objects as
        # preferred answers those of file 1354.
        parts = names.values() if isinstance(known, TextFields) and "history" not in names else ()
        if name == "preference" and all(isinstance(row[names["chosen"]], dict) for row in rows):
            parts = names.values()
        if any(isinstance(row.get(each), dict | list) for row in rows for each in parts):
            select = {ours: _as_text(each, rows) for each, ours in reads.items()}
            yield _reading(name, reads, select=select)
            continue
        rest = [each for each in rows[0] if each not in reads]
        # Of a text with annotations next to it, as in file 32, the annotations may be the answer.
        is_marked = name == "text" and any(
            isinstance(value, list) and value and isinstance(value[0], dict)
            for row in rows
            for value in row.values()
        )
        # Texts next to a category (file 76) or to true and false (80) were trained as plain text.
        classes = list(_classes(names["text"], rest, fields)) if name == "text" else []
        is_sure = not classes and not is_marked
        yield _reading(name, reads, is_sure=is_sure, fields=dict(more), label_names=labels)
        yield from classes
        if "reasoning" in more:
            del more["reasoning"]
            kept = {theirs: ours for theirs, ours in reads.items() if ours != "reasoning"}
            yield _reading(name, kept, is_sure=True, fields=more)


def _classes(text: str, names: Sequence[str], fields: Mapping[str, Field]) -> Iterator[Reading]:
    """Yield classification readings of a text, one for each field with few distinct values.

    Fields with a source, language or id are skipped.
    """
    for name in names:
        held = fields.get(name)
        if held is None or not held.has_few_values or set(_words(name)) & _ORIGIN_WORDS:
            continue
        num_rows = held.kinds.total() - held.kinds["nothing"]
        if not 1 < len(held.values) <= max(2, num_rows / 2) and name not in _CLASSES:
            continue
        reads = {text: "text", name: "label"}
        if held.values.keys() == {False, True} and held.kind == "true or false":
            select = {"text": _sql(text), "label": f"CAST({_sql(name)} AS INTEGER)"}
            yield _reading("classification", reads, select=select, label_names=["false", "true"])
        elif (labels := _label_names(held)) is not None:
            usual = row_formats()["classification"].names([text, name], {})
            renamed = {ours: theirs for theirs, ours in reads.items() if usual.get(ours) != theirs}
            yield _reading("classification", reads, fields=renamed, label_names=labels)


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


# Messages with any names of their field and keys.


def _messages(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if all(is_transcript(value) for value in values):
            known = row_formats()["transcript"].names([name], {})
            fields = {} if known else {"transcript": name}
            yield _reading("transcript", {name: "transcript"}, is_sure=True, fields=fields)
        elif name not in MESSAGE_FIELDS or row_format_of(rows[0], {}) not in ("chat", "sharegpt"):
            yield from _of_messages(name, rows)


def _of_messages(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings of rows with messages in the field `name`.

    Example:
        >>> said = [{"speaker": "human", "text": "1+1?"}, {"speaker": "bot", "text": "2"}]
        >>> (reading,) = _of_messages("talk", [{"talk": said}])
        >>> reading.settings["fields"], reading.settings["roles"]
        ({'messages': 'talk', 'role': 'speaker', 'content': 'text'}, {'bot': 'assistant'})
    """
    # `_natural` and `_preferences` read these as a pair. Here, the rejected one would be trained.
    if name in ("chosen", "rejected"):
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
    least = (1 - _MAX_EMPTY) * len(said)
    named = (k for k in _SPEAKER_KEYS if sum(type(m.get(k)) is str for m in said) >= least)
    speaker = next(named, None)
    # Calls of tools may have no content, as in file 122, which was refused for it.
    texts = [m for m in said if not (m.get("tool_calls") or m.get("function_call"))]
    keys = (key for key in _CONTENT_KEYS if key != speaker)
    held = (k for k in keys if sum(k not in m for m in texts) <= _MAX_EMPTY * len(said))
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
        yield _reading(row_format, reads, is_sure=is_sure, roles=roles, **settings)


def _roles_of(speakers: list[list[str]]) -> list[dict[str, str]]:
    """Return roles for unknown speaker names, in several ways if the roles are ambiguous.

    Rows with a rare unknown name are left to `prepare`, which quarantines them.
    """
    rows_with = Counter(name for names in speakers for name in dict.fromkeys(names))
    # One row with an unknown speaker hid the messages of a whole file.
    least = _MAX_EMPTY * len(speakers)
    unknown = [name for name, rows in rows_with.items() if name not in SPEAKERS and rows > least]
    roles: dict[str, str] = {}
    for name in unknown:
        words = set(_words(name))
        role = "user" if words & _USERS else "assistant" if words & _ASSISTANTS else ""
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


# Question and answer in separate fields.


def _pairs(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    texts = [
        name
        for name in _texts_of(rows[0], rows)
        if sum(isinstance(row[name], str) for row in rows) > (1 - _MAX_EMPTY) * len(rows)
    ]
    if any(name.lower() in _SCORES for name in rows[0]):
        # If `text1` and `text2` come with a score (file 78), neither is an answer to the other.
        stems = Counter(re.sub(r"[\W_]*\d$", "", name) for name in texts)
        texts = [name for name in texts if stems[re.sub(r"[\W_]*\d$", "", name)] == 1]
    # File 841 has the same tag as context in every row.
    texts = [name for name in texts if name.lower() not in _CONTEXT or not _is_tag(name, fields)]
    # Ids, labels and system prompts neither ask nor answer. A rejected answer does not ask: one of
    # the five ways for file 289 asked with it.
    free = [
        name
        for name in texts
        if not _words_of_label(name)
        and _rank(name, _SYSTEM) is None
        and not _is_class(name)
        and not _BAD & {*_words(name)}
    ]
    # With few values, `source` says where rows come from. In file 149, texts were shown as answers
    # to it.
    if (held := fields.get("source")) and explanation("source", held, held.kinds.total()):
        free = [name for name in free if name != "source"]  # not the source of a translation
    asking, answering = _called(free, _QUESTION), _called(free, _ANSWER)
    # With `expected_source`, an `expected_answer` may be what a test looks for: in file 514,
    # `setup` was trained as the answer to "How do I set up my account?".
    expected = {name for name in rows[0] if "expected" in _words(name)}
    is_sure = bool(asking and answering) and not (len(expected) > 1 and expected & {*answering})
    # Of file 1018, one object with questions as names, its answers were offered as pairs.
    if len(rows) == 1 and len(texts) > 2 and not asking + answering:
        return
    others = [name for name in free if _has_text(name, fields) and name not in asking + answering]
    # Without a name for the answer, the second question may be one, as in `question` and `query`.
    guesses = [name for name in others if "context" not in _words(name)] + asking[1:]
    asking = asking or _called(others, _LIKELY_QUESTION) or others
    answering = answering or _called(others, _LIKELY_ANSWER) or guesses
    pairs = [(question, answer) for question in asking for answer in answering]
    for question, answer in pairs[: 2 * _SHOWN]:
        if question != answer:
            yield from _pair(question, answer, texts, rows, is_sure=is_sure)


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
    return not _called(_texts_of(names, rows), _ANSWER) and (
        (bool(names & {"positive", "pos"}) and bool(names & {"anchor", "query"}))
        or (are_scored and {"reference", "hypothesis"} <= names)
    )


def is_reasoning(name: str) -> bool:
    """Return True for a name like `rationale` or `safety_rationale`."""
    return _rank(name, _REASONING) is not None


def _called(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names that match known ones, the best match first."""
    ranked = [(rank, name) for name in names if (rank := _rank(name, known)) is not None]
    return [name for _, name in sorted(ranked, key=lambda item: item[0])]


def _has_text(name: str, fields: Mapping[str, Field]) -> bool:
    """Return True if a field contains text, or short values of several words."""
    if name not in fields or fields[name].num_texts:
        return True
    return any(
        # Chinese has no spaces: of file 87, the one way shown left out `q`.
        isinstance(value, str) and (" " in value.strip() or UNSPACED.search(value))
        for value in fields[name].values
    )


def _is_tag(name: str, fields: Mapping[str, Field]) -> bool:
    """Return True if a field has the same value in several rows, and no text."""
    held = fields.get(name, Field())
    return held.kinds["text"] > 1 == len(held.values) and not _has_text(name, fields)


def _pair(
    question: str, answer: str, texts: Sequence[str], rows: Sequence[Any], *, is_sure: bool
) -> Iterator[Reading]:
    """Yield readings of a question and its answer, with and without the reasoning.

    Both include the context and the system prompt if the rows have them.
    """
    rest = [name for name in texts if name not in (question, answer)]
    contexts = [name for name in rest if name.lower() in _CONTEXT]
    row_format, ours = "prompt_completion", ("prompt", "completion")
    if len(contexts) == 1:
        row_format, ours = "question_answer", ("question", "answer")
    fields = dict(zip(ours, (question, answer), strict=True))
    if len(contexts) == 1:
        fields["context"] = contexts[0]
    if system := _best(rest, _SYSTEM):
        fields["system"] = system
    reasoning = _best([n for n in rest if n not in fields.values()], _REASONING)
    usual = row_formats()[row_format].names(rows[0], {})
    # Also without the reasoning, which a template may not write (files 176 and 181).
    for more in ({"reasoning": reasoning}, {}) if reasoning else ({},):
        reads = {name: ours for ours, name in (fields | more).items()}
        renamed = {ours: name for name, ours in reads.items() if usual.get(ours) != name}
        yield _reading(row_format, reads, is_sure=is_sure, fields=renamed)


def _plain(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    """Yield readings of the only text of a row: about the other fields, or trained as a whole."""
    # The values of one row tell nothing: of file 830, a log, each part was offered as the answer.
    parts = [name for name, value in rows[0].items() if isinstance(value, str | list | dict)]
    is_one = len(rows) == 1 and len(parts) > 1
    if is_one and not _called([*rows[0]], (*_PLAIN, *_QUESTION, *_ANSWER)):
        return
    texts = [n for n in _texts_of(rows[0], rows) if not _ORIGIN_WORDS & {*_words(n)}]
    sentences = [name for name in texts if name not in fields or fields[name].num_texts]
    lists = [name for name in rows[0] if isinstance(rows[0][name], list)]
    listed = {word for name in lists for word in _words(name)}
    # Examples of an intent were shown as turns of a chat (file 81).
    if listed & _UTTERANCES or (listed & _PIECES and not sentences):
        return  # each text needs its own row, or the text is in pieces
    others = [n for n in rows[0] if n not in sentences and not _ID_WORDS & {*_words(n)}]
    # Either of the two may be the answer. Of file 125, only the text was shown.
    if len(sentences) == 1 and any(isinstance(rows[0][name], dict | list) for name in others):
        yield _in_json(rows, {"question": sentences, "answer": others})
        yield _in_json(rows, {"question": others, "answer": sentences})
        # Of file 863, the action after the message was offered as part of the question.
        rest = [*takewhile(lambda name: name != sentences[0], rows[0])]
        before, after = ([n for n in others if (n in rest) == is_in] for is_in in (True, False))
        if before and after:
            yield _in_json(rows, {"question": before, "answer": [*sentences, *after]})
    # Question and answer may both be objects (file 302), which cannot be named as fields.
    objects = [
        name
        for name in others
        if all(isinstance(row[name], dict) for row in rows) and not _words_of_label(name)
    ]
    if not sentences:
        for n in range(1, len(objects)):
            yield _in_json(rows, {"question": objects[:n], "answer": objects[n:]})
        if len(objects) == 2:
            yield _in_json(rows, {"question": objects[1:], "answer": objects[:1]})
    texts = [name for name in texts if _has_text(name, fields)]
    # `_pairs` leaves out topics. Of e-mails with subjects (file 843), either may be the answer.
    if len(texts) == 2 and any(map(_words_of_label, texts)):
        for question, answer in (texts, texts[::-1]):
            yield from _pair(question, answer, texts, rows, is_sure=False)
    if len(texts) == 1 and texts[0] != "text":
        is_named = texts[0].lower() in _PLAIN
        has_lists = any(isinstance(value, list | dict) and value for value in rows[0].values())
        is_question = _rank(texts[0], _QUESTION) is not None
        labels = [n for n in rows[0] if n != texts[0] and (_is_class(n) or not is_question)]
        classes = list(_classes(texts[0], labels, fields))
        is_sure = is_named and not has_lists and not classes
        # Questions without answers (file 77) are refused: the way shown trained the questions.
        if not is_question:
            yield _reading("text", {texts[0]: "text"}, is_sure=is_sure, fields={"text": texts[0]})
        yield from classes


def _without_prompt(reading: Reading, rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of the answers as plain text if hardly a row has a prompt.

    Example:
        >>> found = readings_of(Layout(1, [(0, {"prompt": "", "completion": "It rains."})]), {})
        >>> [each.settings for each in found if not each.is_sure]
        [{'format': 'text', 'fields': {'text': 'completion'}}]
    """
    texts = _texts_of(reading.trained, rows)
    others = [name for name in reading.reads if name not in texts]
    # File 387 has an empty prompt before each tweet. As questions and answers, all are bad.
    num_asked = sum(any(str(row.get(n) or "").strip() for n in others) for row in rows)
    if reading.prompt and len(texts) == 1 and num_asked <= _MAX_EMPTY * len(rows):
        yield _reading("text", {texts[0]: "text"}, fields={"text": texts[0]})


# Preferred and rejected answers.


def _preferences(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of two answers ranked by their names: `better_output`, `worse_output`."""
    words = {name: set(_words(name)) for name in rows[0]}
    bad = [name for name in words if words[name] & _BAD]
    pairs = [
        (one, other)
        for one in words
        for other in bad
        if words[one] & _GOOD and words[one] - _GOOD == words[other] - _BAD - _GOOD
    ]
    if len(pairs) != 1:
        return
    prompt = _best([name for name in words if name not in pairs[0]], _QUESTION)
    if prompt is None:
        return
    fields = {"prompt": prompt, "chosen": pairs[0][0], "rejected": pairs[0][1]}
    if {*pairs[0]} != {"chosen", "rejected"}:
        reads = {name: ours for ours, name in fields.items()}
        yield _reading("preference", reads, is_sure=True, fields=fields)


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
        is_split = {*map(str.lower, rest)} <= {"train", "training"} or "split" in _words(name)
        if is_split and 0 < len(rest) < len(values) and name not in reading.reads:
            shown = ", ".join("'" + each.replace("'", "''") + "'" for each in rest)
            where = [f"{_sql(name)} IN ({shown})"]
            if "where" in reading.settings:  # it leaves out bad answers
                where.insert(0, reading.settings["where"])
            settings = {**reading.settings, "where": where if len(where) > 1 else where[0]}
            reads = {**reading.reads, name: f"split: {', '.join(rest)} alone"}
            unsure = replace(reading, is_sure=False)
            return [replace(unsure, settings=settings, reads=reads), unsure]
    return [reading]


def _with_speakers(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    r"""Return a reading, or several if its texts already mark where a turn begins or ends.

    Prompts name the speakers, as chat templates also do, or open a tag that the answer closes;
    prompts and answers begin with names of speakers; prompts or answers end with a separator.

    Example:
        >>> rows = [{"prompt": "User: Hi\nBot:", "completion": " Hello"}]
        >>> found = readings_of(Layout(1, list(enumerate(rows))), {})
        >>> [(each.template, "select" in each.settings) for each in found]
        [('', True), ('completion', False), ('', False)]
    """
    prompt = reading.prompt
    talks = [row for row in rows if isinstance(row.get(prompt or ""), str)]
    texts = [str(row[prompt or ""]) for row in talks]
    answers = ["\n".join(str(row.get(name)) for name in reading.trained) for row in talks]
    # Such prompts are continued without a chat template, but became turns of a chat: `User:
    # ...\nNAME:` (file 68), `### Answer: ` (554), `<think>` that the answer closes (212), and
    # answers that end with `###` (317).
    separator = _shared_end(texts) or _SEPARATOR
    num_begun = sum(
        _SPOKEN.match(text) is not None
        or re.search(separator, text) is not None
        or re.search(_STOP, answer) is not None
        or ((tag := _OPEN.search(text)) is not None and f"</{tag[1]}>" in answer)
        for text, answer in zip(texts, answers, strict=True)
    )
    # In file 388, `Bot:` at the start of each answer was trained.
    name = name_of_answers(texts, answers)
    if num_begun <= _MAX_EMPTY * len(texts) and name is None and not _end_on_a_label(texts):
        return [reading]
    unsure = replace(reading, is_sure=False)
    made = [replace(unsure, template="completion"), unsure]
    said = {name: ours for name, ours in reading.reads.items() if ours in _ANSWERS}
    if not prompt or not said or len(reading.reads) > 1 + len(said):
        return made
    said = {name: _ANSWERS[ours] for name, ours in said.items()}
    # OpenAI's first fine-tuning guide asked for a space at the start of each completion.
    select = {"prompt": _sql(prompt)} | {
        ours: f"ltrim({_sql(name)})" for name, ours in said.items()
    }
    if one := next(
        (each for each in (_ONE_TURN, _TAGGED) if all(map(each.fullmatch, texts))), None
    ):
        what = "names"
        select["prompt"] = f"regexp_extract({_sql(prompt)}, '{one.pattern}', 1)"
    elif any(
        all(re.search(end, each) for each in part)
        for end, part in ((separator, texts), (_STOP, answers))
    ):
        what = "separators at its end or the answer's"
        for ours in select:
            quoted = (separator if ours == "prompt" else _STOP).replace("'", "''")
            select[ours] = f"regexp_replace({select[ours]}, '{quoted}', '')"
    elif name and not any(  # one turn each
        re.search(rf"\n{name} ?{_COLON}", text) for text in texts + answers
    ):
        what = _BOTH_NAMES
        for ours in select:
            begin = _ASKS if ours == "prompt" else rf"^\s*{name} ?{_COLON}\s*"
            select[ours] = f"regexp_replace({select[ours]}, '{begin}', '')"
    else:
        return made
    row_format = "preference" if "chosen" in select else "prompt_completion"
    reads = {prompt: f"prompt, without {what}"} | said
    return [_reading(row_format, reads, select=select), *made]


_ANSWERS = {"answer": "completion"} | {n: n for n in ("completion", "chosen", "rejected")}
"""Fields of one answer, or of a preferred and a rejected one, by their role in a reading."""
_PUNCTUATION = "()[]{}<>\"'`;,.:?!=+-/\\"


def _shared_end(prompts: Sequence[str]) -> str | None:
    r"""Return a pattern for the lines without words that all prompts end with, or None.

    Punctuation alone ends sentences and code, as does a line that a prompt contains more than once.
    File 835 has `( ͡° ͜ʖ ͡°)` there.

    Example:
        >>> _shared_end(["1 + 1?\n\n(*_*)\n***", "2 + 2?\n\n(*_*)\n***"])
        '\\s*\\(\\*_\\*\\)\\s+\\*\\*\\*\\s*$'
        >>> _shared_end(["{\n11\n}", "{\n22\n}"]), _shared_end(["1?\n1\n2\n3", "2?\n1\n2\n3"])
        (None, None)
    """
    lines = [text.rstrip().split("\n")[::-1] for text in {*prompts}]
    shared = takewhile(lambda last: len({*last}) == 1, zip(*lines, strict=False))
    ends = takewhile(_is_symbols, (last[0] for last in shared))
    end = "\n".join([*ends][::-1]).strip() if len(lines) > 1 else ""
    if re.search(_SEPARATOR, end):  # which also fits rows with another separator
        return None
    parts = [re.escape(part) for part in end.split()]
    symbols = "".join(end.split())
    is_short = len(symbols) < 3 or not symbols.strip(_PUNCTUATION)
    if is_short or any(text.count(end) > 1 for text in prompts):
        return None
    return r"\s*" + r"\s+".join(parts) + r"\s*$"


def _is_symbols(line: str) -> bool:
    """Return True for a line without words, numbers and letters of choices, such as `A:`."""
    has_words = re.search(r"\w\w|\d", line) or line.lower() != line.upper()
    return not has_words and not re.fullmatch(r"\W{0,3}[^\W_]\W{0,3}", line)


def _end_on_a_label(prompts: Sequence[str]) -> bool:
    r"""Return True if at least half of the prompts end with the same label, before the answer.

    Example:
        >>> _end_on_a_label(["1 + 1?\nAnswer:", "2 + 2?\nAnswer:"]), _end_on_a_label(["1?\nSo:"])
        (True, False)
    """
    labels = Counter(found[1] for text in prompts if (found := _LABEL.search(text)))
    # Half, because prompts of a file may end differently: 72% with `Your guess is:` in file 617.
    return max(labels.values(), default=0) >= max(2, len(prompts) / 2)


def name_of_answers(prompts: Sequence[str], answers: Sequence[str]) -> str | None:
    """Return the name that answers begin with if prompts begin with the name of who asks.

    Example:
        >>> name_of_answers(["User: Hi", "User: Bye"], ["Bot: Hello.", "Bot: See you."])
        'Bot'
    """
    names = Counter(
        found[1]
        for prompt, answer in zip(prompts, answers, strict=True)
        if re.match(_ASKS, prompt) and (found := _SAYS.match(answer))
    )
    ((name, number),) = names.most_common(1) or [("", 0)]
    return name if number and number >= (1 - _MAX_EMPTY) * len(prompts) else None


def _with_talks(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    r"""Return a reading, or two if its text is a conversation of two named speakers.

    Example:
        >>> row = {"text": "User: Hi\nModel: Hello"}
        >>> [list(each.reads.values()) for each in readings_of(Layout(1, [(0, row)]), {})]
        [['messages, without the names of their speakers'], ['text']]
    """
    name, texts = _plain_texts(reading, rows)
    # Of such texts, the questions were trained, too (files 418 and 494; 963 in Bulgarian).
    for start in (_VICUNA, _TALK, _TALK_LATER, _LABELLED):
        pairs = Counter(found.groups() for text in texts if (found := start.match(text)))
        ((speakers, number),) = pairs.most_common(1) or [((), 0)]
        if number and number >= (1 - _MAX_EMPTY) * len(texts):
            break
    else:
        return [reading]
    asks, says = speakers
    begin = r"(?:^|\s|</s>)" if start is _VICUNA else r"(?:^|\n)[ \t]*"
    header, text = rf"{begin}({asks}|{says}) ?:\s*", _sql(name)
    role = f"CASE WHEN role = '{says}' THEN 'assistant' ELSE 'user' END"
    parts = f"string_split_regex({text}, '{header}')"
    content = f"regexp_replace({parts}[i + 1], '\\s*(?:{_EDGE})?\\s*$', '')"
    # Other rows get NULL and are quarantined: splitting would lose the text before a speaker.
    begins = f"regexp_matches({text}, '^\\s*{asks} ?:')"
    if start in (_VICUNA, _TALK_LATER):  # the text before the first question is part of it
        before = f"CASE i WHEN 1 THEN nullif(trim({parts}[1]), '') END"
        content = f"concat_ws(chr(10), {before}, {content})"
        begins = f"regexp_extract({text}, '{header}', 1) = '{asks}'"
    said = f"{{'role': {role}, 'content': {content}}}"
    messages = f"list_transform(regexp_extract_all({text}, '{header}', 1), lambda role, i: {said})"
    select = {"messages": f"CASE WHEN {begins} THEN {messages} END"}
    talk, plain = _reading("chat", {name: TALK}, select=select), replace(reading, is_sure=False)
    return [plain, talk] if start is _LABELLED else [talk, plain]


def _with_headings(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    r"""Return a reading, or two if its text has the same heading before its last part in most rows.

    Example:
        >>> row = {"text": "### Instruction:\n1 + 1?\n\n### Response:\n2"}
        >>> [list(each.reads.values()) for each in readings_of(Layout(1, [(0, row)]), {})]
        [['prompt, and completion after the last heading'], ['text']]
    """
    name, texts = _plain_texts(reading, rows)
    # Of the texts of file 828, the instructions were trained, too.
    found = [_HEADING.findall(text) for text in texts]
    counts = Counter(heading for each in found for heading in {*each})
    least = (1 - _MAX_EMPTY) * len(texts)
    if not texts or max(counts.values(), default=0) < least:
        return [reading]
    unsure = replace(reading, is_sure=False)
    ends = Counter(end[1] for text in texts if (end := re.search(_EMPTY_HEADING, text)))
    closing = {heading for heading, number in ends.items() if 2 * number > len(texts)}
    lasts = Counter(next((h for h in each[::-1] if h not in closing), "") for each in found)
    ((last, number),) = lasts.most_common(1)
    # Of several turns, the answers before the last one would not be trained.
    if not last or number < least or sum(h.count(last) > 1 for h in found) > len(texts) - least:
        return [unsure]
    # Spaces before the answer are part of it: a token such as ` B` would cross the boundary.
    parts = rf"(?s)^\s*(?:{_EDGE})?\s*(.*\n[ \t]*{last}(?:\s*\n)?)(.*?)(?:{_EMPTY_HEADING})"
    prompt, answer = (f"regexp_extract({_sql(name)}, '{parts}', {number})" for number in (1, 2))
    # Rows without the heading, or with another one after it, get no answer and are quarantined.
    answer = f"CASE WHEN NOT regexp_matches({answer}, '{_HEADING.pattern}') THEN {answer} END"
    select = {"prompt": prompt, "completion": answer}
    made = replace(
        _reading("prompt_completion", {name: HEADED}, select=select), template="completion"
    )
    # Documents have headings, too: only a name tells that the last part is an answer.
    is_named = {*_words(last)} & {*_ANSWER, *_ASSISTANTS}
    return [made, unsure] if is_named else [unsure, made]


def _with_context(reading: Reading, rows: Sequence[dict[str, Any]]) -> Reading:
    """Return a preference reading with the context in its prompt, if the prompt lacks it."""
    names = {ours: theirs for theirs, ours in reading.reads.items()}
    texts = _texts_of(rows[0], rows)
    # File 237 was read without the context that its chosen answers repeat.
    contexts = [name for name in texts if name.lower() in _CONTEXT and name not in reading.reads]
    if (
        reading.settings["format"] != "preference"
        or names.keys() - {"rejected", "system"} != {"prompt", "chosen"}
        or not {names["prompt"], names["chosen"]} <= {*texts}
        or len(contexts) != 1
        or all(str(row[contexts[0]] or "") in str(row[names["prompt"]]) for row in rows)
    ):
        return reading
    return _in_prompt(reading, contexts[0])


def _in_prompt(reading: Reading, name: str) -> Reading:
    """Return a reading that adds a field to the prompt, on a line of its own."""
    assert reading.prompt is not None
    select = {ours: _sql(theirs) for theirs, ours in reading.reads.items()}
    # DuckDB's `concat_ws` skips NULL, so an empty field adds no line.
    both = f"concat_ws(chr(10), {_sql(reading.prompt)}, nullif({_sql(name)}, ''))"
    select[reading.reads[reading.prompt]] = both
    reads = {**reading.reads, name: "context"}
    row_format = reading.settings["format"]
    return _reading(row_format, reads, is_sure=reading.is_sure, select=select)


def _with_topics(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    """Return a reading, or two if answers repeat a topic of several words that prompts lack.

    Only the first reads the topic. It takes 5% of the rows: of 180 public files, one had such
    answers, in 8% of its rows, and the next most had 1%.

    Example:
        >>> row = {"topic": "Warm seas", "ask": "Why?", "output": "Warm seas rise."}
        >>> found = readings_of(Layout(2, list(enumerate([row, row]))), {})
        >>> [list(each.reads) for each in found]
        [['ask', 'output', 'topic'], ['ask', 'output']]
    """
    if reading.prompt is None or reading.settings.keys() - {"format", "fields"}:
        return [reading]
    prompts = reading.reads.keys() - reading.trained
    for name in _texts_of(rows[0], rows):
        if name in reading.reads or not (_LABEL_WORDS - _ORIGIN_WORDS) & {*_words(name)}:
            continue
        num_told = sum(
            _is_told(row, name, reading.trained) and not _is_told(row, name, prompts)
            for row in rows
        )
        if num_told >= max(2, 0.05 * len(rows)):
            unsure = replace(reading, is_sure=False)
            return [_in_prompt(unsure, name), unsure]
    return [reading]


def _is_told(row: Mapping[str, Any], name: str, others: Iterable[str]) -> bool:
    """Return True if a value of several words occurs in another field of its row."""
    value = str(row.get(name) or "").strip().lower()
    return " " in value and any(value in str(row.get(other)).lower() for other in others)


_CONTEXT_OF = {"alpaca": "input", "dolly": "context", "question_answer": "context"}
"""Field for a question's context, by format."""


def with_context(
    reading: Reading, unread: Sequence[str], rows: Sequence[dict[str, Any]]
) -> Reading | None:
    """Return a reading that also reads an unread field as the question's context, or None.

    Of several unread fields, it is the only one named like a context, or the only one not named
    like a source, category or other metadata, such as `contexts` next to `sources` (file 897).

    Example:
        >>> reads = {"ask": "prompt", "output": "completion"}
        >>> fields = {"prompt": "ask", "completion": "output"}
        >>> plain = Reading(settings={"format": "prompt_completion", "fields": fields}, reads=reads)
        >>> with_context(plain, ["law"], [{"law": "No."}]).settings["fields"]
        {'question': 'ask', 'answer': 'output', 'context': 'law'}
        >>> with_context(plain, ["law"], [{"law": ["No.", "Go."]}]).settings["select"]["context"]
        'array_to_string("law", chr(10) || chr(10))'
    """
    named = [name for name in unread if name.lower() in _CONTEXT]
    named = named or [name for name in unread if not _words_of_label(name)] or [*unread]
    if len(named) != 1:
        return None
    (name,) = named
    row_format = reading.settings["format"]
    fields, reads = dict(reading.settings.get("fields", {})), dict(reading.reads)
    if "select" in reading.settings:
        return None
    if row_format == "prompt_completion":
        row_format, ours = "question_answer", {"prompt": "question", "completion": "answer"}
        reads = {theirs: ours.get(role, role) for theirs, role in reads.items()}
        fields = {role: theirs for theirs, role in reads.items() if not role.startswith("split")}
    context = _CONTEXT_OF.get(row_format)
    if context is None or context in reads.values() or _rank(name, _ANSWER) is not None:
        return None
    reads[name] = context
    if (text := _as_text(name, rows)) != _sql(name):  # passages of file 787, in a list
        select = {ours: _sql(theirs) for theirs, ours in reads.items()} | {context: text}
        return replace(_reading(row_format, reads, select=select), is_guess=reading.is_guess)
    return replace(
        reading,
        settings={**reading.settings, "format": row_format, "fields": {**fields, context: name}},
        reads=reads,
        is_sure=False,
    )


def _with_short_contexts(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    """Return a reading, or two if its context may be the source of the answer, as in file 931."""
    role = {ours: theirs for theirs, ours in reading.reads.items()}
    name, named = role.get("context"), dict(reading.settings.get("fields", {}))
    if named.pop("context", None) is None or name is None or _has_text(name, fields):
        return [reading]
    reads = {theirs: ours for theirs, ours in reading.reads.items() if theirs != name}
    settings = {key: value for key, value in reading.settings.items() if key != "fields"}
    settings |= {"fields": named} if named else {}
    without = replace(reading, settings=settings, reads=reads, is_sure=False)
    return [without, replace(reading, is_sure=False)]


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
    where = {(False,): _sql(name), (True,): f"NOT {_sql(name)}"}.get(
        tuple(bad[name]), f"coalesce({_sql(name)}, '') NOT IN ({shown})"
    )
    settings, good = {**reading.settings, "where": where}, {**reads, name: "bad answers left out"}
    found = [Reading(settings=settings, reads=good, is_sure=False)]
    answer = reading.trained
    if name != "label":
        found.append(replace(reading, is_sure=False))
    if bad[name] == [False] and reading.prompt and len(answer) == 1:
        kto = {"prompt": reading.prompt, "completion": next(iter(answer)), "label": name}
        found.append(_reading("kto", reads, fields=kto))
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
        (word, *more) = [each for each in _words(name) if each != "is"] or [""]
        value = word in _BAD_ANSWER  # `is_incorrect`, but not `not_correct` or `is_right_to_left`
        is_verdict = not more and (value or word in _GOOD_ANSWER | {"label"})
        return [value] if is_verdict and value in held.values else []
    words = {value: value.lower().strip(" .!") for value in held.values if isinstance(value, str)}
    bad = [value for value, word in words.items() if word in _BAD_ANSWER]
    return bad if held.has_few_values and _GOOD_ANSWER & {*words.values()} else []


# Rows that `select` turns into messages, or into a question and an answer.


def _sql(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _as_text(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return SQL for a field as text: texts of a list joined, and other lists and objects as JSON.

    Example:
        >>> [_as_text("a", [{"a": value}]) for value in ("x", ["x", "y"], {"x": 1})]
        ['"a"', 'array_to_string("a", chr(10) || chr(10))', 'json("a")']
    """
    values = [value for row in rows if isinstance(value := row.get(name), dict | list)]
    if not values:
        return _sql(name)
    if all(type(value) is list and {*map(type, value)} <= {str} for value in values):
        return f"array_to_string({_sql(name)}, chr(10) || chr(10))"
    return f"json({_sql(name)})"


_KEYS = {"chat": ("role", "content"), "sharegpt": ("from", "value")}
"""Keys of a message's speaker and content, by format."""
_BESIDE = ("system", "system_prompt", "tools")
"""Other fields read by formats with messages."""
_PROMPTS = (*_QUESTION, "messages")


def _made_of_lists(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    for row_format in _KEYS:
        beside = {name: _sql(name) for name in _BESIDE if name in rows[0]}
        for select, reads, is_sure in (
            *_nested(rows, row_format),
            *_in_two_lists(rows, row_format),
            *_without_answer(rows, row_format),
        ):
            reads = {name: name for name in beside} | reads
            yield _reading(row_format, reads, is_sure=is_sure, select=beside | select)
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
                path = f"{_sql(outer)}.{_sql(inner)}"
                select = {n: f"{_sql(outer)}.{_sql(n)}" for n in names} | {"messages": path}
                yield select, {outer: "messages"}, True


def _inner_pairs(rows: Sequence[Mapping[str, Any]]) -> Iterator[Reading]:
    """Yield readings of a question and an answer in an object, as in file 1387."""
    for outer in rows[0]:
        objects = [row[outer] for row in rows]
        if not all(isinstance(each, dict) for each in objects):
            continue
        texts = _texts_of(objects[0], objects)
        known = {"question": _QUESTION, "answer": _ANSWER, "context": _CONTEXT, "system": _SYSTEM}
        inner = {ours: name for ours, names in known.items() if (name := _best(texts, names))}
        if {"question", "answer"} <= inner.keys() and len({*inner.values()}) == len(inner):
            select = {ours: f"{_sql(outer)}.{_sql(name)}" for ours, name in inner.items()}
            yield _reading("question_answer", {outer: INSIDE}, is_sure=True, select=select)


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
    yield _reading("chat", reads, is_sure=True, select=select)


def _in_two_lists(rows: Sequence[Mapping[str, Any]], row_format: str) -> Iterator[Made]:
    """Yield readings of a prompt and an answer that are both message lists.

    The prompt has no loss.
    """
    if "chosen" in rows[0] or "rejected" in rows[0]:
        return
    lists = [name for name in rows[0] if _are_messages([row[name] for row in rows], row_format)]
    prompts = [name for name in lists if _rank(name, _PROMPTS) is not None]
    answers = [name for name in lists if _rank(name, _ANSWER) is not None]
    for prompt in prompts:
        for answer in answers:
            said = [message for row in rows for name in (prompt, answer) for message in row[name]]
            speaker, content = _KEYS[row_format]
            # The SQL copies these two keys. Others, such as a `weight`, would be lost.
            if any(set(each) != {speaker, content} for each in said):
                continue
            parts = [
                f"list_transform({_sql(name)}, lambda m: {{'{speaker}': m.\"{speaker}\", "
                f"'{content}': m.\"{content}\", 'loss': {loss}}})"
                for name, loss in ((prompt, "false"), (answer, "true"))
            ]
            select = {"messages": f"list_concat({', '.join(parts)})"}
            yield select, {prompt: "prompt", answer: "answer"}, len(prompts) == len(answers) == 1


def _without_answer(rows: Sequence[Mapping[str, Any]], row_format: str) -> Iterator[Made]:
    """Yield readings of messages that end on a question, with the answer in a text field."""
    answers = [n for n in _texts_of(rows[0], rows) if _rank(n, _ANSWER) is not None]
    for prompt in rows[0]:
        talks, messages = [row[prompt] for row in rows], _sql(prompt)
        speaker, content = _KEYS[row_format]
        if row_format == "chat" and _have_keys(talks, {"role", "text"}):
            talks = [[{"role": m["role"], "content": m["text"]} for m in talk] for talk in talks]
            made = "{'role': m.\"role\", 'content': m.\"text\"}"
            messages = f"list_transform({messages}, lambda m: {made})"
        if not _are_messages(talks, row_format) or not _are_questions(talks, row_format):
            continue
        if any(set(each) != {speaker, content} for talk in talks for each in talk):
            continue
        name = "assistant" if speaker == "role" else "gpt"
        for said in answers:
            answer = f"{{'{speaker}': '{name}', '{content}': {_sql(said)}}}"
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
        if _words_of_label(name):
            continue
        asks = _best([n for n in _texts_of(rows[0], rows) if n != name], _QUESTION)
        items = [item for value in lists for item in value]
        role = "CASE WHEN i % 2 = 1 THEN 'user' ELSE 'assistant' END"
        if all(isinstance(item, str) for item in items):
            if asks is not None:
                select = {"question": _sql(asks), "answer": f"{_sql(name)}[1]"}
                reads = {asks: "question", name: "answer: its first item"}
                yield _reading("question_answer", reads, select=select)
            elif _are_turns(name, lists, rows):
                said = f"{{'role': {role}, 'content': text}}"
                messages = f"list_transform({_sql(name)}, lambda text, i: {said})"
                reads = {name: "messages: user and assistant by turns"}
                yield _reading("chat", reads, select={"messages": messages})
        elif all(isinstance(item, dict) for item in items):
            asks, says = _best(items[0], _QUESTION), _best(items[0], _ANSWER)
            if asks is None or says is None or asks == says:
                continue
            if not all(isinstance(item.get(key), str) for item in items for key in (asks, says)):
                continue
            asked = f"{{'role': 'user', 'content': pair.{_sql(asks)}}}"
            said = f"{{'role': 'assistant', 'content': pair.{_sql(says)}}}"
            messages = f"flatten(list_transform({_sql(name)}, lambda pair: [{asked}, {said}]))"
            reads = {name: f"messages: {asks} asks, {says} answers"}
            yield _reading("chat", reads, select={"messages": messages})


def _are_turns(name: str, lists: Sequence[list[str]], rows: Sequence[dict[str, Any]]) -> bool:
    """Return True for lists that may be turns: by name, or two texts and no other field but ids."""
    # Only by name, because lists of texts may also be examples of an intent (file 81). Two texts
    # and nothing else are a question and its answer (file 477).
    if _DIALOG & {*_words(name)}:
        return all(len(value) % 2 == 0 for value in lists)
    others = [n for n in rows[0] if n != name and not _ID_WORDS & {*_words(n)}]
    return not others and all(len(value) == 2 for value in lists)


_CALL = {"name", "arguments"}


def _with_tools(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of a question, an answer and tool definitions.

    The answer is text, or tool calls in a list or as JSON text.
    """
    # Without this reading, files 183 and 198 lost their tools, and their calls became plain JSON.
    tools = next((name for name in _TOOLS if rows[0].get(name)), None)
    texts = [name for name in _texts_of(rows[0], rows) if name != tools]
    asks = _best(texts, _QUESTION)
    lists = [name for name in rows[0] if _have_keys([row[name] for row in rows], _CALL)]
    names = [name for name in (*texts, *lists) if name not in (asks, tools)]
    says = _best(names, [*_ANSWER, "answers", "calls", "tool_calls"])
    if tools is None or asks is None or says is None:
        return
    are_calls = says in lists or all(str(row[says] or "").lstrip()[:1] == "[" for row in rows)
    role = "function_call" if are_calls else "assistant"
    content = f"json({_sql(says)})" if says in lists else _sql(says)
    said = (
        f"[{{'role': 'user', 'content': {_sql(asks)}}}, {{'role': '{role}', 'content': {content}}}]"
    )
    reads = {asks: "question", says: "calls" if are_calls else "answer", tools: "tools"}
    yield _reading("chat", reads, select={"messages": said, "tools": _sql(tools)})


def _as_json(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield readings in which the question, the answer or both are objects or lists, read as JSON.

    A whole number can be the answer to the only text. If no field is named like an answer, all
    other texts, labels and objects together can be the answer, as one object. A label can be the
    answer to all of them.

    Example:
        >>> [reading] = _as_json([{"text": "Ann is 7.", "output": {"name": "Ann", "age": 7}}])
        >>> reading.settings["select"]
        {'question': '"text"', 'answer': 'json("output")'}
    """
    texts = [
        name
        for name in _texts_of(rows[0], rows)
        if not _words_of_label(name) and name != "source" and not _is_class(name)
    ]
    classes = [name for name in _texts_of(rows[0], rows) if _is_class(name)]
    objects = [
        name
        for name in rows[0]
        if all(isinstance(row[name], dict | list) for row in rows)
        and any(row[name] for row in rows)
        and not _words_of_label(name)
        and name not in (*MESSAGE_FIELDS, *_TOOLS)
        and not any(_are_messages([row[name] for row in rows], known) for known in _KEYS)
    ]
    names = [*texts, *objects]
    asking = _called(names, _QUESTION) or _called(texts, _PLAIN)
    answering = _called(names, _ANSWER)
    contexts = [name for name in texts if name.lower() in _CONTEXT]
    # `type`, because `isinstance(True, int)` is true.
    numbers = [n for n in _called([*rows[0]], _ANSWER) if all(type(row[n]) is int for row in rows)]
    if len(names) == 1 and asking and numbers:  # such as classes by number
        yield replace(_in_json(rows, {"question": asking, "answer": numbers[:1]}), is_sure=False)
        return
    pairs: list[tuple[list[str], list[str]]] = []
    if answering:
        asking = asking or _called(texts, _LIKELY_QUESTION)
    else:
        answering = objects
        short = [
            name
            for name in texts
            if name not in asking and name not in contexts and _rank(name, _SYSTEM) is None
        ] + classes
        # The short texts belong to the answer. With the entities of file 615 in the question, no
        # way was right, nor with one of two objects as the answer (files 1457 and 1459).
        if len(asking) == 1 and objects and len(short) + len(objects) > 1:
            pairs.append((asking, [name for name in rows[0] if name in (*short, *objects)]))
        labels = [n for n in rows[0] if _is_class(n, "target") and type(rows[0][n]) in (str, int)]
        labels.sort(key=lambda name: type(rows[0][name]) is int)  # names before numbers
        if labels and len(names) > 1:
            pairs.append(([name for name in rows[0] if name in names], labels[:1]))
    pairs += [
        ([asks], [says])
        for asks in asking
        for says in answering
        if asks != says and (asks in objects or says in objects)
    ]
    for asked, said in pairs[:_SHOWN]:
        read = {"question": asked, "answer": said}
        if system := _best([name for name in texts if name not in asked + said], _SYSTEM):
            read["system"] = [system]
        # Of file 790, the text that its questions are about was offered as part of the answers.
        if len(about := [name for name in contexts if name not in asked + said]) == 1:
            read["context"] = about
        made = _in_json(rows, read)
        if len(said) == 1 and (reply := _reply_in(rows, asked[0], said[0])):
            reads = {**made.reads, said[0]: "answer: the reply in it"}
            select = {**made.settings["select"], "answer": reply}
            made = _reading("question_answer", reads, select=select)
        yield made


def _reply_in(rows: Sequence[dict[str, Any]], asks: str, says: str) -> str | None:
    """Return SQL for the only other text of an object that repeats the question, such as a log.

    Example:
        >>> log = {"input": "Q: Can it rain all day?", "reply": {"text": "Yes, it can and did."}}
        >>> rows = [{"ask": "Why?", "log": {}}, *2 * [{"ask": "Can it rain all day?", "log": log}]]
        >>> _reply_in(rows, "ask", "log")
        '"log"."reply"."text"'
    """
    # Of file 791, such objects were offered as the answers.
    paths = [
        {path: text for path, text in _texts_in(row[says], _sql(says)) if is_text(text)}
        for row in rows
    ]
    asked = [str(row[asks]) for row in rows]
    every = dict.fromkeys(path for each in paths for path in each)
    common = [path for path in every if sum(path in each for each in paths) * 2 > len(rows)]
    repeats = [
        path
        for path in common
        if all(ask in each.get(path, ask) for ask, each in zip(asked, paths, strict=True))
    ]
    rest = [path for path in common if path not in repeats]
    return rest[0] if repeats and len(rest) == 1 else None


def _texts_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the texts in nested objects, with the SQL for each."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts_in(inner, f"{path}.{_sql(name)}")


def _in_json(rows: Sequence[dict[str, Any]], read: Mapping[str, list[str]]) -> Reading:
    """Return the reading of our fields from fields of the file; several, or an object, as JSON."""
    select: dict[str, str] = {}
    reads: dict[str, str] = {}
    for ours, names in read.items():
        is_json = len(names) > 1 or isinstance(rows[0][names[0]], dict | list)
        select[ours] = f"json({', '.join(map(_sql, names))})" if is_json else _sql(names[0])
        reads |= dict.fromkeys(names, f"{ours}, as JSON" if is_json else ours)
    # Answers must be text: naming the numbers of files 15, 299 and 530 as answers failed.
    if type(rows[0][read["answer"][0]]) is int:
        select["answer"] = f"CAST({select['answer']} AS VARCHAR)"
    return _reading("question_answer", reads, select=select)


def _tokens(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    """Yield a reading of token ids with a mask of those trained, such as `tokens` and `mask`."""
    lists = [
        name
        for name in rows[0]
        if all(
            isinstance(row[name], list) and {*map(type, row[name])} <= {int, bool} for row in rows
        )
    ]
    ids = [name for name in lists if {"tokens", "ids"} & {*_words(name)}]
    # An attention mask tells padding from tokens, not what is trained.
    masks = [
        name
        for name in lists
        if "mask" in _words(name)
        and "attention" not in _words(name)
        and {weight for row in rows for weight in row[name]} == {0, 1}
    ]
    if len(ids) == len(masks) == 1:
        fields = {"input_ids": ids[0], "loss_mask": masks[0]}
        reads = {name: ours for ours, name in fields.items()}
        yield _reading("tokenized", reads, fields=fields)


# Multiple-choice questions.

_CHOICE_NAMES = re.compile(r"(?i)(?:option|choice|answer|opt|ending|sol)?[_ ]?([a-h]|[0-9])")


def _choices(rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]) -> Iterator[Reading]:
    """Yield readings of multiple-choice questions with the choices in a list or separate fields.

    The answer is either the letter or the text of the right choice.
    """
    first = rows[0]
    texts = _texts_of(first, rows)
    asks = texts[0] if len(texts) == 1 else _best(texts, _QUESTION)
    if asks is None:
        return
    names = [
        name for name in first if _CHOICE_NAMES.fullmatch(name) and isinstance(first[name], str)
    ]
    lists = [
        name
        for name in ("choices", "options")
        if all(
            isinstance(row.get(name), list) and all(isinstance(text, str) for text in row[name])
            for row in rows
        )
    ]
    if lists:
        choices, read = _sql(lists[0]), lists[:1]
        most = max(len(row[lists[0]]) for row in rows)
    elif len(names) >= 2:
        choices, read = f"[{', '.join(map(_sql, names))}]", names
        most = len(names)
    else:
        return
    right = [
        name
        for name in first
        if name not in (asks, *read)
        and {"answer", "label", "correct", "answerkey", "gold", "target", "idx"} & {*_words(name)}
        and type(first[name]) in (str, int)
    ]
    for name in right:
        values = fields[name].values if name in fields else Counter(row[name] for row in rows)
        number = _number_of(name, values, most)
        said = f"{choices}[{number}]" if number else _sql(name)
        # A letter such as E of four choices says that none is right.
        are_letters = all(isinstance(value, str) and value.isupper() for value in values)
        is_letter = not number and are_letters and all(len(str(value)) == 1 for value in values)
        if not (number or is_letter) and not all(
            row[name] in (row[lists[0]] if lists else [row[each] for each in read]) for row in rows
        ):
            continue
        letter = "chr(CAST(64 + i AS INTEGER))"
        letters = f"list_transform({choices}, lambda text, i: {letter} || '. ' || text)"
        asked = f"{_sql(asks)} || chr(10) || array_to_string({letters}, chr(10))"
        if lists and all(
            re.match(r"\W?[A-Z][).:]", text) for row in rows for text in row[lists[0]]
        ):
            asked = f"{_sql(asks)} || chr(10) || array_to_string({choices}, chr(10))"
        of = {"letter": f"chr(64 + CAST({number} AS INTEGER))", "text": said}
        for what, answer in of.items() if number else [("letter" if is_letter else "text", said)]:
            reads = {asks: "question", **dict.fromkeys(read, "choices")}
            reads[name] = f"answer: the {what} of the choice"
            select = {"question": asked, "answer": answer}
            yield _reading("question_answer", reads, select=select)


def _number_of(name: str, values: Iterable[Any], most: int) -> str | None:
    """Return SQL for the number of the right choice, counted from 1.

    Return None if the field contains neither numbers nor letters of choices.
    """
    known = set(values)
    if known and all(type(value) is int for value in known):
        # Of three choices, 0 to 1 counts from 0, and 1 to 3 from 1. With 1 to 2, both are possible.
        if min(known) == 0 and max(known) < most:
            return f"{_sql(name)} + 1"
        return _sql(name) if min(known) == 1 and max(known) == most else None
    letters = {value.strip().upper() for value in known if isinstance(value, str)}
    if letters and letters <= {chr(65 + n) for n in range(most)}:
        return f"ascii(upper(trim({_sql(name)}))) - 64"
    return None


# Texts that already contain a whole conversation.

_ONE_TURN = re.compile(r"^\s*[^\n:]{1,30}: ?([^\n]+)\n\s*[^\n:]{1,30}:\s*$")
"""A prompt with one line of one speaker, followed by the name of the next speaker."""
_WHO_ASKS = "human|user|customer|client|patient|student|you|me|question|q|用户|问"
_COLON = "[:\uff1a]"  # also the wide one of Chinese (file 593)
_ASKS = rf"(?i)^\s*(?:{_WHO_ASKS}) ?{_COLON}\s*"
"""Start of a prompt with the name of the speaker who asks."""
_SAYS = re.compile(rf"\s*(\w[\w -]{{0,29}}?)(?<!\d) ?{_COLON}(?!//)")
"""Start of an answer with a name."""


def _two_labels(first: str) -> re.Pattern[str]:
    return re.compile(rf"\s*({first}) ?:.*?\n\s*(?!\1 ?:)(\w[\w -]{{0,29}}?) ?:", re.DOTALL)


_TALK = _two_labels(f"(?i:{_WHO_ASKS})")
"""Start of a conversation in one text: a question, and the name of the speaker who answers."""
_LABELLED = _two_labels(r"\w[\w -]{0,29}?")
"""Start of a text with two labels, which may name speakers in any language."""
_VICUNA = re.compile(r"(?:.*?\s)?(USER) ?:.*?\s(ASSISTANT) ?:", re.DOTALL)
"""Start of a conversation in one line, as Vicuna's template writes it."""
_TALK_LATER = re.compile(rf".+?\n(?={_TALK.pattern})", re.DOTALL)
"""Text before a conversation, such as the context of its question."""
_HEADING = re.compile(r"\n[ \t]*(#+ ?\w[\w ]{0,29}(?::|(?m:$)))")
"""A heading such as `### Response:`, or `### Response` alone in its line, after other text."""
_BOTH_NAMES = "the names of both speakers"
UNNAMED = f"prompt, without {_BOTH_NAMES}"
_SPOKEN = re.compile(
    rf"{_ASKS}"
    r".*\n\s*\w[\w '-]{0,29}:\s*\Z|.*(?:\n#|\s##)#* ?\w[\w ]{0,29}:\s*\Z",
    re.DOTALL | re.IGNORECASE,
)
r"""A prompt that names its speakers and ends with the name of the one who answers, such as
`User: Hi\nBot:` and `### Question: Hi ### Answer:`."""

_TAGGED = re.compile(rf"(?is)^\s*<(?:{_WHO_ASKS})>\s*(.*?)\s*<\w{{1,30}}>\s*$")
"""A prompt between tags that name the speakers, such as `<user> Hi <assistant>`."""

# Files 578 and 596 continue `답변:` and `Next Subgoal:` without a chat template, but became turns.
_LABEL = re.compile(r"(?:\n\s*(?=\w)|(?=[<\[]))([<\[]?\w[\w '-]{0,29}[:\uff1a>\]])\s*\Z")
"""End of a prompt that names what follows: a last line `Answer:`, or a tag `<assistant>`."""

# Files 770 and 777 became turns of a chat that end with `===` and `END`. All answers of file 724
# end with `---`, which divides their parts.
_SEPARATOR = r"\s*(?:[-=]+>|##+|={3,}|-{3,})\s*$"
"""End of a prompt in the style of OpenAI's first fine-tuning guide."""
_STOP = r"\s*(?:->|##+|\sEND)\s*$"
"""End of an answer in the same style."""

_OPEN = re.compile(r"<(\w+)>\s*\Z")
"""A prompt that ends with a tag such as `<think>`."""

_ANSWER_NEXT = re.compile(
    r"(?:\[/INST\]|<\|(?:im_start\|>)?assistant(?:\|>)?|assistant<\|end_header_id\|>"
    r"|<start_of_turn>model)\s*(?:</?\w+>\s*)*$"
)
"""End of a prompt that a chat template wrote; tags such as `<think>` may begin the answer."""


def _conversations(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield fields that may hold a conversation: each text, and each prompt with its answer."""
    texts = _texts_of(rows[0], rows)
    yield from ((name,) for name in texts)
    # Prompts that a chat template wrote became single turns, with its marks as their text (file
    # 233), or were refused (736). Next to rejected answers, those would be lost.
    says = _best(texts, _ANSWER)
    if says and not any(_BAD & {*_words(name)} for name in rows[0]):
        for name in texts:
            if all(_ANSWER_NEXT.search(str(row[name])) for row in rows):
                yield name, says


_HEADER = (
    r"<(?:\|(?:im_start\|>|start_header_id\|>)?|start_of_turn>)"
    r"(system|developer|user|human|assistant|model|tool)"
    r"(?:(?:<\|end_header_id)?\|>(?:\s*\n)?|\s*\n)"
)
"""Start of a turn, such as `<|im_start|>user`, `<|user|>` and `<start_of_turn>model`."""
_FOOTER = (
    r"(?:\s*(?:<\|\w+\|>|</s>|<end_of_turn>|<eos>))*\s*$"  # file 1025 ends turns with `<|end|>`
)


_LLAMA_2 = {
    r"\[INST\]\s*<<SYS>>\s*": "<|system|>",
    r"\s*<</SYS>>\s*": "<|user|>",
    r"(?:\s*</?s>)*\s*\[INST\]\s*": "<|user|>",
    r"\s*\[/INST\]\s*": "<|assistant|>",
}
"""Marks of Llama 2 and Mistral, and the starts of turns that replace them."""


def _templated_texts(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    r"""Yield readings of conversations written by a chat template, in one field or in two.

    Example:
        >>> row = {"prompt": "<|user|>\nHi\n<|assistant|>\n", "output": "Hello"}
        >>> [each.reads["output"] for each in _templated_texts([row])]
        ['messages, without the marks of a chat template']
    """
    for names in _conversations(rows):
        texts = ["".join(str(row[name]) for name in names) for row in rows]
        text = " || ".join(map(_sql, names))
        if all("[INST]" in text for text in texts):
            for mark, header in _LLAMA_2.items():
                texts = [re.sub(mark, header + "\n", text) for text in texts]
                text = f"regexp_replace({text}, '{mark}', '{header}' || chr(10), 'g')"
        if all(map(_is_templated, texts)):
            content = f"string_split_regex({text}, '{_HEADER}')[i + 1]"
            role = "CASE role WHEN 'model' THEN 'assistant' ELSE role END"
            said = f"{{'role': {role}, 'content': regexp_replace({content}, '{_FOOTER}', '')}}"
            roles = f"regexp_extract_all({text}, '{_HEADER}', 1)"
            messages = f"list_transform({roles}, lambda role, i: {said})"
            # Text before the first message must not get lost.
            begins = f"regexp_matches({text}, '^\\s*(?:{_EDGE})?\\s*{_HEADER}')"
            select = {"messages": f"CASE WHEN {begins} THEN {messages} END"}
            yield _reading("chat", dict.fromkeys(names, TEMPLATED), select=select)


def _is_templated(text: str) -> bool:
    """Return True if a text consists of messages with marks, of which the last is an answer."""
    before, *parts = re.split(_HEADER, text)
    contents = [re.sub(_FOOTER, "", content) for content in parts[1::2]]
    return (
        re.fullmatch(rf"\s*(?:{_EDGE})?\s*", before) is not None
        and parts[-2:-1] in (["assistant"], ["model"])
        and all(content and not re.search(_MARK_OF_TEMPLATE, content) for content in contents)
    )


_MARK_OF_TEMPLATE = (
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\|(?:user|assistant)\|>"
)

# File 151 was trained with `<bos>` and `<eos>` as part of its texts.
_EDGE = r"<bos>|<eos>|</?s>|<\|(?:begin_of_text|end_of_text|endoftext)\|>"
_EDGES = rf"^\s*(?:{_EDGE})\s*|\s*(?:{_EDGE})\s*$"
_EMPTY_HEADING = rf"\s*(?:{_HEADING.pattern}\s*)?(?:{_EDGE})?\s*$"
"""End of a text, with a heading that has nothing after it, if any."""


def _with_ends(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    """Return a reading, or two if its texts begin or end with a control token of some tokenizer."""
    name, texts = _plain_texts(reading, rows)
    if not texts or not all(re.search(_EDGES, text) for text in texts):
        return [reading]
    select = {"text": f"regexp_replace({_sql(name)}, '{_EDGES}', '', 'g')"}
    reads = {name: "text, without the control tokens at its ends"}
    return [_reading("text", reads, select=select), replace(reading, is_sure=False)]


def _plain_texts(reading: Reading, rows: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the field of a reading as plain text, and its texts; none for another reading."""
    (name, *others) = reading.reads or [""]
    is_plain = reading.settings["format"] == "text" and "select" not in reading.settings
    if others or not is_plain:
        return name, []
    return name, [text for row in rows if isinstance(text := row.get(name), str)]


SPEAKER_MARKS = "marks of speakers"
_MARKS = {
    SPEAKER_MARKS: re.compile(
        r"###\s?(?:Human|Assistant|User):|(?:^|\s)\[\|(?:Human|AI)\|\]"
        r"|(?:^|\n)(?:Human|Assistant|USER|ASSISTANT|User): "
    ),
    "marks of a chat template": re.compile(_MARK_OF_TEMPLATE),
}


def marks_in(rows: Sequence[Any], names: Iterable[str]) -> str | None:
    """Describe the turn markers that some fields contain in every row; None if there are none.

    Example:
        >>> marks_in([{"text": "USER: Hi\\nASSISTANT: Hello"}], ["text"])
        'marks of speakers'
    """
    texts = [
        "\n".join(value for name in names if isinstance(value := row.get(name), str))
        for row in rows
        if isinstance(row, dict)
    ]
    for what, mark in _MARKS.items():
        # One name is not a conversation: the questions of file 436 begin with `User:`, its answers
        # with no name.
        least = 2 if what == SPEAKER_MARKS else 1
        if texts and all(len(mark.findall(text)) >= least for text in texts):
            return what
    return None


# Names.


def _texts_of(names: Iterable[str], rows: Sequence[Any]) -> list[str]:
    """Return the names of fields that contain text in some row and no other type in any row."""
    return [
        name
        for name in names
        if all(isinstance(row.get(name), str | None) for row in rows)
        and any(str(row.get(name) or "").strip() for row in rows)
    ]


def _is_class(name: str, *more: str) -> bool:
    """Return True for names like `label` and `label_str`, but not for `label_path` and `target`.

    A target can be a translation. In file 856, the paths of labels were offered as answers.
    """
    words = {*_words(name)}
    return not words & {"path", "file"} and bool(words & ((_CLASSES - {"target"}) | {*more}))


def _words_of_label(name: str) -> set[str]:
    """Return the words that mark a name as an id, source, category or other metadata."""
    words = [word for word in _words(name) if word not in _FILLERS]
    return {*words} & _LABEL_WORDS if words != ["source"] else set()


def _best(names: Iterable[str], known: Sequence[str]) -> str | None:
    """Return the name that best matches a known one, or None if no name matches."""
    return next(iter(_called(list(names), known)), None)


def _rank(name: str, known: Sequence[str]) -> int | None:
    """Return how well a name matches known words, 0 for the best; None if it does not."""
    words = _words(name)
    if name.lower() in known:
        return known.index(name.lower())
    # Not `prompt_id` or `rejected_answer`.
    if len(words) < 2 or (_LABEL_WORDS | _BAD).intersection(words):
        return None
    while len(words) > 1 and words[-1] in _FILLERS:
        words.pop()
    is_known = len(words[-1]) > 1 and words[-1] in known  # not the `a` of `candidate_a`
    return len(known) + known.index(words[-1]) if is_known else None


def _words(name: str) -> list[str]:
    """Split a name into words: `userMessage` -> user, message."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", name).lower().split()


def is_metadata(name: str, held: Field) -> bool:
    """Return True if a field holds an id, a source, or one of a few categories, but no answer.

    Example:
        >>> held = Field(kinds=Counter(text=4), values=Counter(("easy", "hard", "easy", "easy")))
        >>> is_metadata("how", held), is_metadata("uuid", Field()), is_metadata("how", Field())
        (True, True, False)
    """
    num_texts = held.kinds["text"]
    return bool(_words_of_label(name)) or 0 < 2 * len(held.values) <= num_texts


def is_likely_answer(name: str) -> bool:
    """Return True for a name like `summary`, which may hold an answer."""
    return _rank(name, _LIKELY_ANSWER) is not None


def empty_answers(fields: Mapping[str, Field]) -> list[str]:
    """Return the fields named like answers if none of them has words in any row.

    Example:
        >>> empty_answers({"question": Field(Counter(text=2)), "answer": Field(Counter(nothing=2))})
        ['answer']
    """
    answers = _called([*fields], _ANSWER)
    is_empty = all(explanation(name, fields[name], 1) == "empty" for name in answers)
    return answers if is_empty else []


def explanation(name: str, held: Field, num_rows: int) -> str | None:
    """Explain why a field can be ignored, by what it contains; None if it cannot be explained.

    Example:
        >>> explanation("score", Field(Counter({"number": 9})), 9)
        'numbers'
    """
    kind = held.kind
    num_values = len(held.values)
    # The only answer of file 1064 is `...`.
    is_mark = num_values < 2 and not any(re.search(r"\w", str(value)) for value in held.values)
    if kind == "nothing" or (kind == "text" and held.has_few_values and is_mark):
        return "empty"
    if kind in ("number", "true or false"):
        return "numbers" if kind == "number" else kind
    if num_rows and held.num_texts < max(1, 0.05 * num_rows):
        if held.has_media:  # the text in other fields is probably about the media
            return None
        if kind != "text":
            return f"no text: {kind}s"
        if not held.has_few_values or num_values > 0.9 * held.kinds["text"]:
            return "short values"
        return counted(num_values, "different short value")
    if _LABEL_WORDS.intersection(_words(name)) and held.has_few_values:
        if 0 < num_values <= max(1, num_rows // 4):
            return f"a category: {counted(num_values, 'different value')}"
    return None
