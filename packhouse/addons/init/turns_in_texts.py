"""Find conversations in texts, and marks of turns that a reading would train."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from packhouse.addons.init.file_survey import Field
from packhouse.addons.init.reading import (
    ANSWER,
    ASSISTANTS,
    BAD,
    BOTH_NAMES,
    HEADED,
    MAX_EMPTY,
    TALK,
    TEMPLATED,
    Reading,
    best_of,
    read_as,
    sql,
    texts_of,
    words_of,
)
from packhouse.read.unread_fields import MIN_SHARE
from packhouse.system.wording import counted

# How texts name their speakers, and divide turns.

_WHO_ASKS = "human|user|customer|client|patient|student|you|me|question|q|用户|问"
# Also the wide colon of Chinese (file 593), and the spaces of French (file 1712).
_COLON = "[ \u00a0\u202f]?[:\uff1a]"
_NAME = r"\w[\w '\u00a0\u202f-]{0,29}"
_ASKS = rf"(?i)^\s*(?:{_WHO_ASKS}){_COLON}\s*"
"""Start of a prompt with the name of the speaker who asks."""
_SAYS = re.compile(rf"\s*(\w[\w -]{{0,29}}?)(?<!\d){_COLON}(?!//)")
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
_ONE_TURN = re.compile(r"^\s*[^\n:]{1,30}: ?([^\n]+)\n\s*[^\n:]{1,30}:\s*$")
"""A prompt with one line of one speaker, followed by the name of the next speaker."""
_SPOKEN = re.compile(
    rf"{_ASKS}"
    rf".*\n\s*{_NAME}:\s*\Z|.*(?:\n#|\s##)#* ?{_NAME}:\s*\Z",
    re.DOTALL | re.IGNORECASE,
)
r"""A prompt that names its speakers and ends with the name of the one who answers, such as
`User: Hi\nBot:` and `### Question: Hi ### Answer:`."""
_TAGGED = re.compile(rf"(?is)^\s*<(?:{_WHO_ASKS})>\s*(.*?)\s*<\w{{1,30}}>\s*$")
"""A prompt between tags that name the speakers, such as `<user> Hi <assistant>`."""
_OPEN = re.compile(r"<(\w+)>\s*\Z|[\[({][\"']?\s*\Z")
"""A prompt that ends with a tag such as `<think>`, or with an opening bracket."""
# Files 578 and 596 continue `답변:` and `Next Subgoal:` without a chat template, but became turns.
_LABEL = re.compile(rf"(?:\n\s*(?=\w)|(?=[<\[]))([<\[]?{_NAME}[:\uff1a>\]])\s*\Z")
"""End of a prompt that names what follows: a last line `Answer:`, or a tag `<assistant>`."""
# Files 770 and 777 became turns of a chat that end with `===` and `END`. All answers of file 724
# end with `---`, which divides their parts.
_ONE_SEPARATOR = r"(?:[-=]+>|##+|={3,}|-{3,})"
# Space between separators: without it, one line of 89 hyphens (file 1781) took minutes.
_SEPARATOR = rf"\s*{_ONE_SEPARATOR}(?:\s+{_ONE_SEPARATOR})*\s*$"
"""End of a prompt in the style of OpenAI's first fine-tuning guide; two of them in file 1725."""
_STOP = r"\s*(?:\s->|##+|\sEND)\s*$"
"""End of an answer in the same style; `-->` ends a comment of HTML (file 1690)."""
_RUNS = re.compile(r"\s{21,}|(\W)\1{20,}")
_SIGNS = r"([^\w\s\u200b-\u200f\u2060\ufeff])\1\1\Z"
"""The same sign three times at the end of a text, but none without width, as in file 2135."""
_PUNCTUATION = "()[]{}<>\"'`;,.:?!=+-/\\"
_ANSWERS = {"answer": "completion"} | {n: n for n in ("completion", "chosen", "rejected")}
"""Fields of one answer, or of a preferred and a rejected one, by their role in a reading."""
# File 151 was trained with `<bos>` and `<eos>` as part of its texts.
_EDGE = r"<bos>|<eos>|</?s>|<\|(?:begin_of_text|end_of_text|endoftext)\|>"
_EDGES = rf"^\s*(?:{_EDGE})\s*|\s*(?:{_EDGE})\s*$"
_LAST = rf"\s*(?:{_EDGE}|<\|im_end\|>|<\|eot_id\|>|<end_of_turn>)\s*$"
"""A control token at the end of a message."""
_HEADING = re.compile(r"\n[ \t]*(#+ ?\w[\w ]{0,29}(?::|(?m:$)))")
"""A heading such as `### Response:`, or `### Response` alone in its line, after other text."""
_EMPTY_HEADING = rf"\s*(?:{_HEADING.pattern}\s*)?(?:{_EDGE})?\s*$"
"""End of a text, with a heading that has nothing after it, if any."""
_HEADER = (
    r"<(?:\|(?:im_start\|>|start_header_id\|>)?|start_of_turn>)"
    r"(system|developer|user|human|assistant|model|tool)"
    r"(?:(?:<\|end_header_id)?\|>(?:\s*\n)?|\s*\n)"
)
"""Start of a turn, such as `<|im_start|>user`, `<|user|>` and `<start_of_turn>model`."""
_FOOTER = (
    r"(?:\s*(?:<\|\w+\|>|</s>|<end_of_turn>|<eos>))*\s*$"  # file 1025 ends turns with `<|end|>`
)
_ANSWER_NEXT = re.compile(
    r"(?:\[/INST\]|<\|(?:im_start\|>)?assistant(?:\|>)?|assistant<\|end_header_id\|>"
    r"|<start_of_turn>model)\s*(?:</?\w+>\s*)*$"
)
"""End of a prompt that a chat template wrote; tags such as `<think>` may begin the answer."""
_LLAMA_2 = {
    r"\[INST\]\s*<<SYS>>\s*": "<|system|>",
    r"\s*<</SYS>>\s*": "<|user|>",
    r"(?:\s*</?s>)*\s*\[INST\]\s*": "<|user|>",
    r"\s*\[/INST\]\s*": "<|assistant|>",
}
"""Marks of Llama 2 and Mistral, and the starts of turns that replace them."""
_MARK_OF_TEMPLATE = (
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\|(?:user|assistant)\|>"
    r"|<\|start\|>\w+<\|message\|>"  # gpt-oss, in file 1836
)
SPEAKER_MARKS = "marks of speakers"
_MARKS = {
    SPEAKER_MARKS: re.compile(
        r"###\s?(?:Human|Assistant|User):|(?:^|\s)\[\|(?:Human|AI)\|\]"
        r"|(?:^|\n)(?:Human|Assistant|USER|ASSISTANT|User): "
    ),
    "marks of a chat template": re.compile(_MARK_OF_TEMPLATE),
}
_ALL = frozenset(("system", "user", "assistant"))
_LEFT_MARKS = (
    # In file 995, 7% of the prompts are `<<NO PROMPT>>`; most answers of file 1092 have `{{NAME}}`.
    (
        "a mark in place of a text",
        _ALL,
        MIN_SHARE,
        r"\{\{\s*[A-Z][A-Z_ ]{2,}\s*\}\}|<<[A-Z][A-Z_ ]{2,}>>|<(?:image|audio|video)>",
    ),
    # `<extra_id_1>` is in 16% of the prompts of file 999, `<channel|>` in all answers of file 1277.
    (
        "a mark of a chat template",
        _ALL,
        MIN_SHARE,
        r"<\|\w+\|?>|<\w+\|>|<extra_id_\d+>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>",
    ),
    # In most answers of file 1139. A prompt may name the tag (file 1242).
    (
        "the end of reasoning without a beginning",
        {"assistant"},
        MIN_SHARE,
        r"\A(?:(?!<think>).)*?(</think>)",
    ),
    # All answers of file 1311.
    ("a mark of the end of answers", {"assistant"}, 1 - MAX_EMPTY, r"(#{3,})\s*\Z"),
)
"""Description, roles of the messages in which it is searched, share of rows, and pattern."""
_NO_NAMES = frozenset(
    "answer output response reply summary explanation solution result note".split()
)


def _condensed(text: str) -> str:
    """Return text with at most 20 of the same sign, or of white space, in succession.

    Patterns are searched in it: in runs of hundreds, some would take minutes (file 1781).

    Example:
        >>> _condensed("a" + " " * 90 + "b" + "-" * 5)
        'a                    b-----'
    """
    return _RUNS.sub(lambda run: run[0][:20], text)


def _at_end(pattern: str, text: str) -> bool:
    """Return True if a pattern for the end of a text matches; others would be searched for long."""
    return re.search(pattern, text[-300:]) is not None


def with_speakers(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    r"""Return a reading, or several if its texts already mark where a turn begins or ends.

    The first reads them without these marks, the second continues the prompts without a chat
    template, and the last reads them unchanged.

    Example:
        >>> row = {"prompt": "User: Hi\nBot:", "completion": " Hello"}
        >>> plain = read_as("prompt_completion", {name: name for name in row})
        >>> [(made.template, "select" in made.settings) for made in with_speakers(plain, [row], {})]
        [('', True), ('completion', False), ('', False)]
    """
    asks = reading.prompt or ""
    talks = [row for row in rows if isinstance(row.get(asks), str)]
    texts = [_condensed(row[asks]) for row in talks]
    answers = [
        "\n".join(_condensed(str(row.get(name))) for name in reading.trained) for row in talks
    ]
    ends = _shared_end(texts) or _SEPARATOR, _shared_end(answers) or _STOP
    marked = [_is_marked(*each, *ends) for each in zip(texts, answers, strict=True)]
    # In file 388, `Bot:` at the start of each answer was trained.
    name = name_of_answers(texts, answers)
    if sum(marked) <= MAX_EMPTY * len(texts) and name is None and not _end_on_a_label(texts):
        return [reading]
    unsure = replace(reading, is_sure=False)
    made = [replace(unsure, template="completion"), unsure]
    said = {name: ours for name, ours in reading.reads.items() if ours in _ANSWERS}
    removed = _marks_of_all(texts, answers, ends, name)
    if removed is None or not said or len(reading.reads) > 1 + len(said):
        return made
    what, of_prompt, of_answer = removed
    select = {"prompt": _without(sql(asks), of_prompt)}
    for each, ours in said.items():
        # OpenAI's first fine-tuning guide asked for a space at the start of each completion.
        select[_ANSWERS[ours]] = _without(_without(sql(each), r"^\s+"), of_answer)
    row_format = "preference" if "chosen" in select else "prompt_completion"
    reads = {asks: f"prompt, without {what}"} | {
        name: _ANSWERS[ours] for name, ours in said.items()
    }
    return [read_as(row_format, reads, select=select), *made]


def _is_marked(prompt: str, answer: str, separator: str, stop: str) -> bool:
    """Return True for a prompt that a model continues without a chat template.

    It names its speakers, ends with a separator, or opens a tag or bracket that the answer closes.
    """
    # They became turns of a chat: `User: ...\nNAME:` (file 68), `### Answer: ` (554), `<think>`
    # (212), `-> ["` (1582), and prompts of answers that end with `###` (317).
    tag = _OPEN.search(prompt)
    return bool(
        _SPOKEN.match(prompt)
        or _at_end(separator, prompt)
        or _at_end(stop, answer)
        or (tag is not None and (tag[1] is None or f"</{tag[1]}>" in answer))
    )


def _marks_of_all(
    prompts: Sequence[str], answers: Sequence[str], ends: tuple[str, str], name: str | None
) -> tuple[str, str, str] | None:
    """Return the marks that all rows have, and patterns for them in prompts and in answers."""
    for whole in (_ONE_TURN, _TAGGED):
        if all(map(whole.fullmatch, prompts)):
            return "names", whole.pattern, ""
    for end, texts in zip(ends, (prompts, answers), strict=True):
        if all(_at_end(end, text) for text in texts):
            # Without a mark, the guide's answers end with a line break.
            return "separators at its end or the answer's", ends[0], rf"{ends[1]}|\s+$"
    header = rf"{name}{_COLON}"
    if name and not any(re.search(rf"\n{header}", text) for text in (*prompts, *answers)):
        return BOTH_NAMES, _ASKS, rf"^\s*{header}\s*"  # one turn each
    return None


def _without(text: str, pattern: str) -> str:
    """Return SQL for a text without the part that matches, or for the pattern's group if any."""
    quoted = pattern.replace("'", "''")
    if re.compile(pattern).groups:  # a row that does not match gets no text, and is quarantined
        return f"regexp_extract({text}, '{quoted}', 1)"
    return f"regexp_replace({text}, '{quoted}', '')" if pattern else text


def _shared_end(texts: Sequence[str]) -> str | None:
    r"""Return a pattern for the signs, or lines without words, that all texts end with, or None.

    Punctuation alone ends sentences and code, as does a line that a text contains more than once.
    File 835 has `( ͡° ͜ʖ ͡°)` there, and the answers of file 1821 end with `$$$$`.

    Example:
        >>> _shared_end(["1 + 1?\n\n(*_*)\n***", "2 + 2?\n\n(*_*)\n***"])
        '\\s*\\(\\*_\\*\\)\\s+\\*\\*\\*\\s*$'
        >>> _shared_end(["{\n11\n}", "{\n22\n}"]), _shared_end(["1?\n1\n2\n3", "2?\n1\n2\n3"])
        (None, None)
        >>> _shared_end(["Yes. $$$$", "No. $$$$"]), _shared_end(["It is $1$.", "It is $2$."])
        ('\\s*\\${3,}\\s*$', None)
    """
    lines = [text.rstrip().split("\n")[::-1] for text in {*texts}]
    shared = takewhile(lambda last: len({*last}) == 1, zip(*lines, strict=False))
    ends = takewhile(_is_symbols, (last[0] for last in shared))
    end = "\n".join([*ends][::-1]).strip() if len(lines) > 1 else ""
    if not end and len(lines) > 1:
        # Three or more of one sign; brackets, stars and `$` may end code, bold text and formulas.
        signs = {(re.findall(_SIGNS, last[0].rstrip()) or [""])[0] for last in lines}
        sign = signs.pop() if len(signs) == 1 else ""
        return rf"\s*{re.escape(sign)}{{3,}}\s*$" if sign.strip(_PUNCTUATION + "*") else None
    if re.search(_SEPARATOR, end):  # which also fits rows with another separator
        return None
    parts = [re.escape(part) for part in end.split()]
    symbols = "".join(end.split())
    is_short = len(symbols) < 3 or not symbols.strip(_PUNCTUATION)
    if is_short or any(text.count(end) > 1 for text in texts):
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
    return name if number and number >= (1 - MAX_EMPTY) * len(prompts) else None


def with_talks(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    r"""Return a reading, or two if its text is a conversation of two named speakers.

    Example:
        >>> plain, row = read_as("text", {"text": "text"}), {"text": "User: Hi\nModel: Hello"}
        >>> [list(made.reads.values()) for made in with_talks(plain, [row], {})]
        [['messages, without the names of their speakers'], ['text']]
    """
    name, texts = _plain_texts(reading, rows)
    # Of such texts, the questions were trained, too (files 418 and 494; 963 in Bulgarian).
    for start in (_VICUNA, _TALK, _TALK_LATER, _LABELLED):
        pairs = Counter(found.groups() for text in texts if (found := start.match(text)))
        ((speakers, number),) = pairs.most_common(1) or [((), 0)]
        if number and number >= (1 - MAX_EMPTY) * len(texts):
            break
    else:
        return [reading]
    asks, says = speakers
    begin = r"(?:^|\s|</s>)" if start is _VICUNA else r"(?:^|\n)[ \t]*"
    header, text = rf"{begin}({asks}|{says}) ?:\s*", sql(name)
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
    talk, plain = read_as("chat", {name: TALK}, select=select), replace(reading, is_sure=False)
    return [plain, talk] if start is _LABELLED else [talk, plain]


def with_headings(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    r"""Return a reading, or two if its text has the same heading before its last part in most rows.

    Example:
        >>> row = {"text": "### Instruction:\n1 + 1?\n\n### Response:\n2"}
        >>> made = with_headings(read_as("text", {"text": "text"}), [row], {})
        >>> [list(each.reads.values()) for each in made]
        [['prompt, and completion after the last heading'], ['text']]
    """
    name, texts = _plain_texts(reading, rows)
    # Of the texts of file 828, the instructions were trained, too.
    found = [_HEADING.findall(text) for text in texts]
    counts = Counter(heading for each in found for heading in {*each})
    least = (1 - MAX_EMPTY) * len(texts)
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
    prompt, answer = (f"regexp_extract({sql(name)}, '{parts}', {number})" for number in (1, 2))
    # Rows without the heading, or with another one after it, get no answer and are quarantined.
    answer = f"CASE WHEN NOT regexp_matches({answer}, '{_HEADING.pattern}') THEN {answer} END"
    select = {"prompt": prompt, "completion": answer}
    made = replace(
        read_as("prompt_completion", {name: HEADED}, select=select), template="completion"
    )
    # Documents have headings, too: only a name tells that the last part is an answer.
    is_named = {*words_of(last)} & {*ANSWER, *ASSISTANTS}
    return [made, unsure] if is_named else [unsure, made]


def _conversations(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield fields that may hold a conversation: each text, and each prompt with its answer."""
    texts = texts_of(rows[0], rows)
    yield from ((name,) for name in texts)
    # Prompts that a chat template wrote became single turns, with its marks as their text (file
    # 233), or were refused (736). Next to rejected answers, those would be lost.
    says = best_of(texts, ANSWER)
    if says and not any(BAD & {*words_of(name)} for name in rows[0]):
        for name in texts:
            if all(_ANSWER_NEXT.search(_condensed(str(row[name]))) for row in rows):
                yield name, says


def templated_texts(rows: Sequence[dict[str, Any]]) -> Iterator[Reading]:
    r"""Yield readings of conversations written by a chat template, in one field or in two.

    Example:
        >>> row = {"prompt": "<|user|>\nHi\n<|assistant|>\n", "output": "Hello"}
        >>> [each.reads["output"] for each in templated_texts([row])]
        ['messages, without the marks of a chat template']
    """
    for names in _conversations(rows):
        texts = [_condensed("".join(str(row[name]) for name in names)) for row in rows]
        text = " || ".join(map(sql, names))
        if all("[INST]" in text for text in texts):
            for mark, header in _LLAMA_2.items():
                texts = [re.sub(mark, header + "\n", text) for text in texts]
                text = f"regexp_replace({text}, '{mark}', '{header}' || chr(10), 'g')"
        # Rows with empty turns, such as 12% of file 1858, are bad rows.
        are_templated = [_is_templated(text) for text in texts]
        if None not in are_templated and any(are_templated):
            content = f"string_split_regex({text}, '{_HEADER}')[i + 1]"
            role = "CASE role WHEN 'model' THEN 'assistant' ELSE role END"
            said = f"{{'role': {role}, 'content': regexp_replace({content}, '{_FOOTER}', '')}}"
            roles = f"regexp_extract_all({text}, '{_HEADER}', 1)"
            messages = f"list_transform({roles}, lambda role, i: {said})"
            # Text before the first message must not get lost.
            begins = f"regexp_matches({text}, '^\\s*(?:{_EDGE})?\\s*{_HEADER}')"
            select = {"messages": f"CASE WHEN {begins} THEN {messages} END"}
            yield read_as("chat", dict.fromkeys(names, TEMPLATED), select=select)


def _is_templated(text: str) -> bool | None:
    """Return True if a text consists of messages with marks, of which the last is an answer.

    Returns:
        False for a bad row: a message is empty, or the last is not an answer. None if other text
        would be lost, or other marks would be trained.
    """
    before, *parts = re.split(_HEADER, text)
    # Only at the end: searching 30,000 marks took 75 s.
    contents = [part[:-300] + re.sub(_FOOTER, "", part[-300:]) for part in parts[1::2]]
    is_other = any(re.search(_MARK_OF_TEMPLATE, content) for content in contents)
    if is_other or re.fullmatch(rf"\s*(?:{_EDGE})?\s*", before) is None:
        return None
    return parts[-2:-1] in (["assistant"], ["model"]) and all(contents)


def with_ends(
    reading: Reading, rows: Sequence[dict[str, Any]], fields: Mapping[str, Field]
) -> list[Reading]:
    """Return a reading, or two if its texts begin or end with a control token of some tokenizer."""
    if (cut := _without_ends(reading, rows)) is not None:
        return [cut, replace(reading, is_sure=False)]
    name, texts = _plain_texts(reading, rows)
    if not texts or not all(re.search(_EDGES, text) for text in texts):
        return [reading]
    select = {"text": f"regexp_replace({sql(name)}, '{_EDGES}', '', 'g')"}
    reads = {name: "text, without the control tokens at its ends"}
    return [read_as("text", reads, select=select), replace(reading, is_sure=False)]


def _without_ends(reading: Reading, rows: Sequence[dict[str, Any]]) -> Reading | None:
    """Return a reading of messages without the control tokens at their ends, or None.

    Such as `</s>` after all questions and answers of file 2166. The SQL copies only the role and
    the content, so the messages must have no other keys.
    """
    (name, *others), settings = reading.reads or [""], reading.settings
    talks = [row.get(name) for row in rows]
    if others or "select" in settings or settings["format"] not in ("chat", "sharegpt"):
        return None
    usual = ("from", "value") if settings["format"] == "sharegpt" else ("role", "content")
    fields = settings.get("fields", {})
    keys = dict(zip(usual, (fields.get(key, key) for key in usual), strict=True))
    speaker, content = keys.values()
    said = [m for talk in talks if isinstance(talk, list) for m in talk]
    if not said or not all(isinstance(m, dict) and {*m} == {speaker, content} for m in said):
        return None
    texts = [str(m[content]) for m in said]
    if sum(re.search(_LAST, _condensed(text)) is not None for text in texts) < MIN_SHARE * len(
        texts
    ):
        return None
    cut = f"regexp_replace(m.{sql(content)}, '{_LAST}', '')"
    made = f"{{'role': m.{sql(speaker)}, 'content': {cut}}}"
    select = {"messages": f"list_transform({sql(name)}, lambda m: {made})"}
    reads = {name: "messages, without the control tokens at their ends"}
    return read_as("chat", reads, select=select, roles=settings.get("roles"))


def _plain_texts(reading: Reading, rows: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the field of a reading as plain text, and its texts; none for another reading."""
    (name, *others) = reading.reads or [""]
    is_plain = reading.settings["format"] == "text" and "select" not in reading.settings
    if others or not is_plain:
        return name, []
    return name, [_condensed(text) for row in rows if isinstance(text := row.get(name), str)]


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


def marks_left(talks: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """Describe marks in messages that a program should have replaced, or names of speakers.

    Of 500 public files, five had such marks, and no other had any.

    Example:
        >>> marks_left(3 * [[{"role": "assistant", "content": "Dear {{NAME}},"}]])
        '3 of 3 examples contain {{NAME}}, which looks like a mark in place of a text'
    """
    examples = counted(len(talks), "example")
    for what, roles, share, pattern in _LEFT_MARKS:
        texts = ["\n".join(_said(talk, roles)) for talk in talks]
        marks = [mark for text in texts if (mark := re.search(pattern, text, re.DOTALL))]
        if len(marks) >= max(3, share * len(talks)):
            shown = marks[0][marks[0].re.groups]
            return f"{len(marks):,} of {examples} contain {shown}, which looks like {what}"
    asked, answered = (
        [next(_said(talk, {role}), "") for talk in talks] for role in ("user", "assistant")
    )
    name = name_of_answers(asked, answered)  # `Freya:` begins the answers of file 1313
    if name and len(talks) > 2 and name.lower() not in _NO_NAMES:
        return f"most answers of {examples} begin with {name!r}, like the name of a speaker"
    return None


def _said(talk: Sequence[Mapping[str, Any]], roles: Collection[str]) -> Iterator[str]:
    return (_condensed(said["content"] or "") for said in talk if said["role"] in roles)
