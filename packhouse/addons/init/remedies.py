"""What to do with files that no setting of a source reads: each answer is a command that works."""

import ast
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packhouse.addons.init.fields import shape_of
from packhouse.read.chat_messages import SPEAKERS
from packhouse.read.extra_fields import PARTS

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
    first, _, rest = head.lstrip("\ufeff \n\t").partition("\n")
    if first.rstrip().endswith("},") and rest.lstrip().startswith("{"):
        out = _out(path, ".json")
        command = f"(echo '['; sed '$ s/,[[:space:]]*$//' {shlex.quote(path)}; echo ']') > {out}"
        why = "its objects are divided by commas, with no brackets around them"
        return _mending(why, command, out)
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
