"""Which fields of rows hold the question, the answer and the rest, by their names and values.

A format that the rows fit as they are goes first. Else names are compared with those that people
give: `preferred_output` ends in `output`, an answer's name. Where no name tells, the first two
texts of a row are question and answer, as a guess that is said to be one.

For files that no setting of a source reads, a remedy is said: each is a command that works.
"""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packhouse.read.chat_messages import SPEAKERS
from packhouse.read.conversation_formats import is_transcript
from packhouse.read.extra_fields import PARTS
from packhouse.read.records import parse_text
from packhouse.read.row_formats import MESSAGE_FIELDS, row_format_of, row_formats
from packhouse.read.text_formats import TextFields

_QUESTION = (
    "question instruction prompt query ask user human problem request input inputs q 问题 提问 问 "
    "指令 質問 질문 frage pregunta pergunta вопрос soal patient customer utterance task title "
    "source src document article text passage"
).split()
_ANSWER = (
    "solution answer output response completion assistant reply bot gpt chosen target targets a "
    "答案 回答 答 输出 回复 答え 답변 antwort respuesta resposta réponse ответ jawaban "
    "doctor agent chatbot tgt summary highlights result translation"
).split()
_PLAIN = ("text", "content", "body")
"""Names of a text that is no answer, whatever stands beside it."""
_CONTEXT = "context input background passage reference material 背景 输入".split()
_SYSTEM = "system sys persona".split()
_REASONING = "reasoning thinking thought thoughts cot".split()
_FILLERS = frozenset("text content body string message msg prompt field".split())
"""Last words of a name that say nothing: `question_text`."""
_OTHER = frozenset(
    "id ids rejected wrong incorrect bad worst negative dispreferred type source score len length "
    "lang language url date time count num model category topic tag name choices options".split()
)
"""Words of names that hold neither question nor answer: `question_id`, `rejected_output`."""

_SPEAKER_KEYS = ("role", "from", "speaker", "sender", "author", "who", "name", "user")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "body", "msg")
_USERS = frozenset(
    "user human customer client patient person prompter question q student visitor caller kunde me "
    "用户 问 患者".split()
)
_ASSISTANTS = frozenset(
    "assistant gpt bot ai model agent chatgpt chatbot doctor answer a teacher support machine "
    "claude llm response 助手 机器人 答 医生".split()
)
_MAX_EMPTY = 0.1
"""The share of rows that may be of no format; they are bad rows."""
_SLOTS = (
    ("prompt_completion", "prompt", "completion"),
    ("question_answer", "question", "answer"),
)
"""Formats whose fields may go by any name: (format, question, answer)."""


@dataclass(frozen=True)
class Shape:
    """How rows are read: settings of a source."""

    format: str
    fields: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    is_guess: bool = False
    """True where the order of the fields decided, not their names."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of a recipe's source."""
        keys = {"format": self.format, "fields": dict(self.fields), "roles": dict(self.roles)}
        return {key: value for key, value in keys.items() if value}


def shape_of(rows: Sequence[Any], taken: Iterable[str] = ()) -> Shape | None:
    """Return how rows of the same keys are read; None if nothing tells.

    Args:
        rows: at least one; objects of the same keys, or lists.
        taken: formats whose names of fields are in use by other rows of the file.

    Example:
        >>> shape_of([{"id": 1, "query": "1+1?", "preferred_output": "2", "rejected_output": "3"}])
        Shape(format='prompt_completion', fields={'prompt': 'query', ...}, roles={}, is_guess=False)
    """
    known = Counter(row_format_of(row, {}) for row in rows)
    if len(known) == 2 and 0 < known[None] <= _MAX_EMPTY * len(rows):  # messages are null or []
        rows = [row for row in rows if row_format_of(row, {}) is not None]
        del known[None]
    found = next(iter(known)) if len(known) == 1 else None
    if found in ("chat", "sharegpt"):
        of_chat = row_formats()[found]
        names = of_chat.names(rows[0], {})
        messages = names[next(iter(of_chat.required))]
        return _shape_of_messages(messages, [row[messages] for row in rows]) or Shape(found)
    if found == "preference":
        return _shape_of_preference(rows)
    if found not in (None, "text") and _has_texts(found, rows):
        rest = row_formats()[found].unread(rows[0], {}) if isinstance(rows[0], dict) else []
        return Shape(found, _beside(found, rest, rows))
    if not all(isinstance(row, dict) for row in rows):
        return None
    for name in rows[0]:
        if all(is_transcript(row[name]) for row in rows):
            known_names = row_formats()["transcript"].names([name], {})
            return Shape("transcript", {} if known_names else {"transcript": name})
        shape = _shape_of_messages(name, [row[name] for row in rows])
        if shape is not None:
            return shape
    shape = _shape_of_texts(rows, frozenset(taken))
    return Shape("text") if found == "text" and (shape is None or shape.is_guess) else shape


def _shape_of_preference(rows: Sequence[dict[str, Any]]) -> Shape:
    """Rows with a chosen answer, and the prompt by whatever name."""
    names = row_formats()["preference"].names(rows[0], {})
    rest = [name for name in rows[0] if name not in names.values()]
    is_answer = all(isinstance(row[names["chosen"]], str) for row in rows)
    prompt = None if "prompt" in names or not is_answer else _best(rest, _QUESTION)
    return Shape("preference", {} if prompt is None else {"prompt": prompt})


def _beside(row_format: str, names: Sequence[str], rows: Sequence[Any]) -> dict[str, str]:
    """The fields that hold a passage to the question and the answer's reasoning, where read."""
    texts = _texts_of(names, rows)
    known = {"reasoning": _best(texts, _REASONING)}
    if "context" not in row_formats()[row_format].names(rows[0], {}):
        known["context"] = next((name for name in texts if name in PARTS["context"]), None)
    optional = row_formats()[row_format].optional
    return {part: name for part, name in known.items() if name is not None and part in optional}


def _texts_of(names: Iterable[str], rows: Sequence[Any]) -> list[str]:
    """The names of fields that hold text in some row, and nothing but text in any."""
    return [
        name
        for name in names
        if all(isinstance(row[name], str | None) for row in rows)
        and any(str(row[name] or "").strip() for row in rows)
    ]


def _has_texts(row_format: str, rows: Sequence[Any]) -> bool:
    """Return True unless a format wants text in fields where no row has any."""
    reader = row_formats()[row_format]
    if not isinstance(reader, TextFields):
        return True
    names = [reader.names(rows[0], {})[ours] for _, ours in reader.turns]
    return any(all(isinstance(row[name], str) for name in names) for row in rows)


def join_shapes(shapes: Iterable[Shape]) -> Shape | None:
    """Return one shape for rows of several; None if their names of fields contradict each other."""
    different = list({(s.format, *s.fields.items()): s for s in shapes}.values())
    fields: dict[str, str] = {}
    roles: dict[str, str] = {}
    for shape in different:
        if any(fields.setdefault(ours, name) != name for ours, name in shape.fields.items()):
            return None
        roles |= shape.roles
    formats = {shape.format for shape in different}
    joined = replace(different[0], fields=fields, roles=roles)
    return joined if len(formats) == 1 else replace(joined, format="mixed")


def _shape_of_messages(name: str, values: Sequence[Any]) -> Shape | None:
    """The shape of rows with messages in the field `name`, whatever these call their parts.

    Example:
        >>> said = [{"speaker": "human", "text": "1+1?"}, {"speaker": "bot", "text": "2"}]
        >>> shape = _shape_of_messages("talk", [said])
        >>> shape.fields, shape.roles
        ({'messages': 'talk', 'role': 'speaker', 'content': 'text'}, {'bot': 'assistant'})
    """
    lists = [
        parse_text(value)[0] if isinstance(value, str) and value.lstrip()[:1] == "[" else value
        for value in values
    ]
    if not all(isinstance(messages, list) and messages for messages in lists):
        return None
    said = [message for messages in lists for message in messages]
    if not all(isinstance(message, dict) for message in said):
        return None
    speaker = _key_in_all(_SPEAKER_KEYS, said)
    content = _key_in_all([key for key in _CONTENT_KEYS if key != speaker], said, is_text=False)
    if speaker is None or content is None:
        return None
    row_format = "sharegpt" if speaker == "from" and content == "value" else "chat"
    ours = {"role": speaker, "content": content}
    usual = {"role": "from", "content": "value"} if row_format == "sharegpt" else {}
    fields = {key: theirs for key, theirs in ours.items() if theirs != usual.get(key, key)}
    if name not in MESSAGE_FIELDS:
        fields = {next(iter(row_formats()[row_format].required)): name, **fields}
    roles = _roles_of([[message[speaker] for message in messages] for messages in lists])
    return None if roles is None else Shape(row_format, fields, roles)


def _key_in_all(
    keys: Iterable[str], said: list[dict[str, Any]], is_text: bool = True
) -> str | None:
    for key in keys:
        if all(key in message and (not is_text or type(message[key]) is str) for message in said):
            return key
    return None


def _roles_of(speakers: list[list[str]]) -> dict[str, str] | None:
    """Role of each speaker that goes by a name of its own; None if nothing tells them apart."""
    unknown = list(dict.fromkeys(n for names in speakers for n in names if n not in SPEAKERS))
    roles: dict[str, str] = {}
    for name in unknown:
        words = set(_words(name))
        role = "user" if words & _USERS else "assistant" if words & _ASSISTANTS else ""
        role = role or ("system" if "system" in words else "")
        if role:
            roles[name] = role
    rest = [name for name in unknown if name not in roles]
    if len(rest) == 2 and not roles:  # who speaks first asks
        first = Counter(names[0] for names in speakers).most_common(1)[0][0]
        return {name: "user" if name == first else "assistant" for name in rest}
    if len(rest) == 1 and "assistant" in roles.values():
        return roles | {rest[0]: "user"}
    return None if rest else roles


def _shape_of_texts(rows: Sequence[dict[str, Any]], taken: frozenset[str]) -> Shape | None:
    """The shape of rows that give question and answer in fields of their own."""
    if {"role", "content"} <= rows[0].keys():  # it is one message
        return None
    texts = _texts_of(rows[0], rows)
    filled = [name for name in texts if all(isinstance(row[name], str) for row in rows)]
    answer = _best(filled, _ANSWER)
    question = _best([name for name in filled if name != answer], _QUESTION)
    is_guess = question is None or answer is None
    if answer is None and (plain := [name for name in filled if name.lower() in _PLAIN]):
        fields = {} if plain[0] == "text" else {"text": plain[0]}
        return Shape("text", fields, is_guess=len(filled) > 1)
    if is_guess:
        likely = [name for name in filled if not _OTHER.intersection(_words(name))]
        numbered = [n for n in likely if n.endswith("1") and f"{n[:-1]}2" in likely]
        if len(numbered) == 1:  # message_1 and message_2, whatever stands beside them
            likely = [numbered[0], f"{numbered[0][:-1]}2"]
        if len(likely) == 1:
            if _is_beside_answers(likely[0], rows[0]):
                return None
            return Shape("text", {} if likely[0] == "text" else {"text": likely[0]})
        if len(likely) != 2:
            return None
        question, answer = likely
    assert question is not None
    assert answer is not None
    rest = [name for name in texts if name not in (question, answer)]
    system, context = _best(rest, _SYSTEM), _best(rest, _CONTEXT)
    free = [slot for slot in _SLOTS if slot[0] not in taken]
    if context is not None or not free:
        free = [_SLOTS[1]]
    row_format, ours_question, ours_answer = free[0]
    fields = {ours_question: question, ours_answer: answer}
    if context is not None:
        fields["context"] = context
    if system is not None:
        fields["system"] = system
    if not is_guess:
        fields |= _beside(row_format, [n for n in rest if n not in (system, context)], rows)
    usual = row_formats()[row_format].names(rows[0], {})
    renamed = {ours: name for ours, name in fields.items() if usual.get(ours) != name}
    if context is None and row_format == "question_answer" and "context" in usual:
        return None  # it would be read as the context, whatever it is
    return Shape(row_format, renamed, is_guess=is_guess)


def _is_beside_answers(name: str, row: Mapping[str, Any]) -> bool:
    """Return True if a text is a question, or a title, and a list or object may hold the rest.

    Example:
        >>> _is_beside_answers("prompt", {"prompt": "1+1?", "responses": ["2", "3"]})
        True
        >>> _is_beside_answers("abstract", {"abstract": "We show ...", "authors": ["A. B."]})
        False
    """
    others = [value for other, value in row.items() if other != name and value]
    is_question = _rank(name, _QUESTION[: _QUESTION.index("document")]) is not None
    return any(
        (isinstance(value, list | dict) and is_question)
        or (isinstance(value, list) and isinstance(value[0], dict))
        for value in others
    )


def _best(names: Iterable[str], known: Sequence[str]) -> str | None:
    """The name that says most clearly that it is one of the known; None: none does."""
    ranked = [(rank, name) for name in names if (rank := _rank(name, known)) is not None]
    return min(ranked, key=lambda item: item[0])[1] if ranked else None


def _rank(name: str, known: Sequence[str]) -> int | None:
    words = _words(name)
    if len(words) == 1:
        return known.index(words[0]) if words[0] in known else None
    if _OTHER.intersection(words):
        return None
    while len(words) > 1 and words[-1] in _FILLERS:
        words.pop()
    return len(known) + known.index(words[-1]) if words and words[-1] in known else None


def _words(name: str) -> list[str]:
    """Words of a name: `userMessage` -> user, message."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", name).lower().split()


_MAX_CHARS = 20_000
"""Of a line that is tried as Python: its parser takes 1,000 times the memory of its text."""
_ROWS = {
    "json": "row in json.load(sys.stdin)",
    "jsonl": "row in map(json.loads, filter(str.strip, sys.stdin))",
}
"""Python that goes through the rows of a file on stdin."""


def remedy_for_text(head: str, path: str) -> str | None:
    """Return what to do with text of which no row can be read; None: nothing is known.

    Args:
        head: the first text of the file.
        path: of the file.
    """
    first = head.lstrip("\ufeff \n\t").partition("\n")[0]
    if first.startswith("{'") and len(first) < _MAX_CHARS:
        try:
            ast.literal_eval(first.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        row = "ast.literal_eval(line)"
        return _rewriting("its rows are Python, not JSON", row, "line in sys.stdin", path)
    return None


def remedy_for_header(names: Sequence[str], path: str) -> str | None:
    """Return what to do with columns that are named by the first row; None: they have names."""
    texts = [name for name in names if len(name.split()) > 4 or name.rstrip().endswith("?")]
    if not texts:
        return None
    why = "its first line is a row, where the names of the columns should be"
    if path.endswith(".xlsx"):
        return f"{why}; put a row with their names (question, answer) above it"
    between = "\\t" if path.endswith(".tsv") else ","
    wanted = between.join(["question", "answer", *(f"column{n}" for n in range(3, len(names) + 1))])
    return _mending(why, f"sed -i '1i {wanted}' {shlex.quote(path)}", "the file again")


def remedy_for_rows(rows: Sequence[Any], file_format: str, path: str) -> str | None:
    """Return what to do with rows that no format reads; None: nothing is known."""
    if file_format not in ("json", "jsonl", "objects") or not isinstance(rows[0], dict):
        return None
    row = rows[0]
    if len(rows) == 1 and row and file_format != "json":
        values = list(row.values())
        if all(isinstance(value, dict) for value in values):
            each = "row in json.load(sys.stdin).values()"
            return _rewriting("its rows are the values of one object", "row", each, path)
        if all(isinstance(v, list) and len(v) == len(values[0]) for v in values):
            each = "columns in [json.load(sys.stdin)] for row in zip(*columns.values())"
            why = "it holds a list for each column, not rows"
            return _rewriting(why, "dict(zip(columns, row))", each, path)
    if file_format == "objects":
        return None
    if all(_is_message(row) for row in rows):
        return (
            "each row is one message; write a row for each conversation, with all of its messages: "
            '{"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    each = _ROWS[file_format]
    if all(is_calls(row) for row in rows):
        call = "{'type': 'function', 'function': call}"
        calls = f"[{call} for call in json.loads(row['answers'])]"
        asked = "{'role': 'user', 'content': row['query']}"
        said = f"[{asked}, {{'role': 'assistant', 'content': '', 'tool_calls': {calls}}}]"
        rewritten = f"{{'messages': {said}, 'tools': json.loads(row['tools'])}}"
        return _rewriting(
            "'answers' holds calls of the functions in 'tools'", rewritten, each, path
        )
    for name, value in row.items():
        if not isinstance(value, list) or not value:
            continue
        texts = None
        is_texts = len(value) > 1 and all(isinstance(item, str) for item in value)
        if is_texts and (question := _question_beside(row)):
            return (
                f"'{name}' holds several answers to '{question}'. A recipe trains the first "
                f'with `select: {{question: {question}, answer: "{name}[1]"}}` for its source'
            )
        if is_texts:
            why, texts = f"'{name}' holds what is said in turn, without speakers", f"row[{name!r}]"
        shape = shape_of(value) if all(isinstance(item, dict) for item in value) else None
        if shape is not None and len(shape.fields) == 2 and "messages" not in shape.fields:
            keys = tuple(shape.fields.values())
            why = f"'{name}' holds pairs of question and answer"
            texts = f"[pair[key] for pair in row[{name!r}] for key in {keys!r}]"
        if texts is not None:
            message = "{'role': ('user', 'assistant')[n % 2], 'content': text}"
            said = f"{{'messages': [{message} for n, text in enumerate({texts})]}}"
            return _rewriting(why, said, each, path)
    return None


def _is_message(row: Any) -> bool:
    return isinstance(row.get("content"), str) and row.get("role") in SPEAKERS


def _question_beside(row: dict[str, Any]) -> str | None:
    """The field of a text that goes by the name of a question."""
    return next((n for n in row if n in PARTS["question"] and isinstance(row[n], str)), None)


def remedy_for_answers_elsewhere(rows: Sequence[Any], file_format: str, path: str) -> str | None:
    """Return what to do with rows whose answer no field of a format holds; None: they are none.

    Llama-Nemotron's `input` ends on a question that `output` answers, s1K's answer is a thought and
    an attempt, and that of natural_reasoning stands in a list beside a short reference. That of
    MMLU is the number of one of its `choices`, and that of AQuA-RAT the letter of one of `options`.
    """
    if file_format not in ("json", "jsonl") or not all(isinstance(row, dict) for row in rows):
        return None
    first: set[str] = set(rows[0]) if rows else set()
    user, answer = "{'role': 'user', 'content': row['question']}", "'role': 'assistant', 'content':"
    if {"thinking_trajectories", "attempt", "question"} <= first:
        why = "its answers are a thought in 'thinking_trajectories' and an 'attempt'"
        thought = "'reasoning_content': row['thinking_trajectories'][0]"
        said = f"[{user}, {{{answer} row['attempt'], {thought}}}]"
    elif {"reference_answer", "responses", "question"} <= first:
        why = "whole answers stand in 'responses', and 'reference_answer' is short"
        said = f"[{user}, {{{answer} row['responses'][0]['response']}}]"
    elif {"input", "output"} <= first and all(_ends_on_question(r["input"]) for r in rows):
        why = "'input' holds messages that end on a question, and 'output' the answer"
        system = "{'role': 'system', 'content': row['system_prompt']}"
        before = f"[{system}] * bool(row.get('system_prompt')) + " * ("system_prompt" in first)
        said = f"{before}row['input'] + [{{{answer} row['output']}}]"
    elif "question" in first and (found := _choices(rows)):
        choices, answer_name = found
        why = f"'{choices}' holds what the question lets one choose from"
        texts = f"row[{choices!r}]"
        if not all(re.match(r"\W?[A-Z]\W", text) for row in rows for text in row[choices]):
            texts = f"(chr(65 + n) + '. ' + text for n, text in enumerate({texts}))"
        asked = f"'\\n'.join([row['question'], *{texts}])"
        own = f"row[{answer_name!r}]"
        chosen = f"chr(65 + {own})" if isinstance(rows[0][answer_name], int) else own
        said = f"[{{'role': 'user', 'content': {asked}}}, {{{answer} {chosen}}}]"
    else:
        return None
    each = _ROWS[file_format]
    if "responses" in said:
        each += " if row['responses']"
    return _rewriting(why, f"{{'messages': {said}}}", each, path)


def _choices(rows: Sequence[Any]) -> tuple[str, str] | None:
    """The fields of the texts to choose from, and of the answer: a letter, a text or a number."""
    for choices in ("choices", "options"):
        for answer in ("answer", "correct", "answerKey"):
            if all(
                isinstance(row.get(choices), list)
                and all(isinstance(text, str) for text in row[choices])
                and type(row.get(answer)) in (str, int)
                for row in rows
            ):
                return choices, answer
    return None


def _ends_on_question(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "user"


def is_calls(row: object) -> bool:
    """Return True for a row of xLAM's form: a query, and JSON texts of calls and of tools."""
    texts = [row.get(name) for name in ("query", "answers", "tools")] if type(row) is dict else [0]
    if not all(isinstance(text, str) for text in texts):
        return False
    return all(str(text).lstrip().startswith("[") for text in texts[1:])


def is_whole_talk(text: object) -> bool:
    """Return True if the last of several marked turns is an answer: a prompt ends before it.

    Example:
        >>> is_whole_talk("### Human: Hi ### Assistant: Yes?"), is_whole_talk("### Human: Hi")
        (True, False)
    """
    if not isinstance(text, str):
        return False
    marks = list(re.finditer(_SPEAKER_MARK, text))
    is_answer = bool(marks) and "assistant" in marks[-1].group().lower()
    return len(marks) > 1 and is_answer and marks[-1].end() < len(text)


def remedy_for_transcripts(
    rows: Sequence[Any], name: str, file_format: str, path: str
) -> str | None:
    """Return what to do where the field `name` holds talks as one text; None: it does not."""
    texts = [row.get(name) for row in rows if isinstance(row, dict)]
    if file_format not in ("json", "jsonl") or not texts:
        return None
    if not all(isinstance(t, str) and len(re.findall(_SPEAKER_MARK, t)) > 1 for t in texts):
        return None
    if any("FUNCTION RESPONSE:" in str(text) for text in texts):
        return (
            f"'{name}' holds whole talks, with marks of speakers and of functions; write rows with "
            "messages ([{role, content}]), those of FUNCTION RESPONSE with the role `tool`"
        )
    each = _ROWS[file_format]
    parts = f"re.split({_SPEAKER_MARK!r}, row[{name!r}])[1:]"
    text = "text.replace('<|endoftext|>', '').strip()"
    message = f"{{'role': ('user', 'assistant')[n % 2], 'content': {text}}}"
    said = f"[{message} for n, text in enumerate({parts}) if text]"
    if all(isinstance(row, dict) and isinstance(row.get("system"), str) for row in rows):
        system = "row['system'].removeprefix('SYSTEM:').strip()"
        said = f"[{{'role': 'system', 'content': {system}}}] * bool({system}) + {said}"
    said = f"{{'messages': {said}}}"
    return _rewriting(f"'{name}' holds whole talks, with marks of speakers", said, each, path)


def remedy_for_rendered(
    rows: Sequence[Any], names: Sequence[str], file_format: str, path: str
) -> str | None:
    """Return what to do where fields hold text that a chat template wrote; None: they do not.

    Args:
        rows: of the file.
        names: the fields that are read, in the order of the conversation.
        file_format: of the file.
        path: of the file.
    """
    known = [row for row in rows if isinstance(row, dict)]
    texts = ["".join(str(row.get(name) or "") for name in names) for row in known]
    marks = [re.search(_RENDERED, text) for text in texts]
    if not texts or not all(marks):
        return None
    mark = str(marks[0].group() if marks[0] else "")
    why = f"its texts are those that a chat template wrote, with {mark!r} in them"
    if file_format in ("json", "jsonl") and all("<|im_start|>" in text for text in texts):
        text = " + ".join(f"row[{name!r}]" for name in names)
        turns = rf"re.findall(r'<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)', {text}, re.S)"
        message = "{'role': role, 'content': text.strip()}"
        said = f"{{'messages': [{message} for role, text in {turns}]}}"
        return _rewriting(why, said, _ROWS[file_format], path)
    return f"{why}; write rows with messages ([{{role, content}}]), which are rendered anew"


_RENDERED = (
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\|(?:user|assistant)\|>"
)
"""What templates write before turns."""

_SPEAKER_MARK = (
    r"\s*(?:###\s?(?:Human|Assistant|User):|\[\|(?:Human|AI)\|\]"
    r"|(?:^|\n)\n?(?:Human|Assistant|USER|ASSISTANT|User):)\s*"
)
"""What stands before each turn of talks that are one text: `### Human:`, `[|AI|]`."""


def _rewriting(why: str, row: str, each: str, path: str) -> str:
    """Say how to write each row of a file as a line of JSON."""
    code = f"import ast, json, re, sys; list(map(print, (json.dumps({row}) for {each})))"
    out = _out(path, ".jsonl")
    return _mending(why, f"python3 -c {shlex.quote(code)} < {shlex.quote(path)} > {out}", out)


def _mending(why: str, command: str, then: str) -> str:
    return f"{why}. This mends it; then give {then}:\n{command}"


def _out(path: str, ending: str) -> str:
    """Name of the file to write, in the folder where the command is called."""
    return shlex.quote(f"{Path(path).name.split('.')[0]}-rows{ending}")
