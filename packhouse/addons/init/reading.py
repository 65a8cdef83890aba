"""A reading of a file's rows, and what the names and values of its fields suggest."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packhouse.addons.init.file_survey import Field
from packhouse.read.unread_fields import UNSPACED
from packhouse.system.wording import counted

QUESTION = (
    "question instruction prompt query ask user human problem request input inputs 问题 提问 问 "
    "指令 質問 질문 vraag domanda soru pytanie fråga spørgsmål frage pregunta pergunta вопрос soal"
).split()
ANSWER = (
    "solution answer output response completion assistant reply bot gpt chosen target targets "
    "truth 答案 回答 答 输出 回复 답변 答え antwoord risposta cevap odpowiedź svar antwort "
    "respuesta resposta réponse ответ jawaban"
).split()
LIKELY_QUESTION = (
    "q patient customer utterance task title source src document article text passage"
).split()
LIKELY_ANSWER = "a doctor agent chatbot tgt summary highlights result translation".split()
PLAIN = ("text", "content", "body")
CONTEXT = (
    "context input background passage material paragraph document article story evidence "
    "knowledge schema sql_context 背景 输入"
).split()
SYSTEM = "system sys persona".split()
REASONING = "reasoning thinking thought thoughts cot rationale chain_of_thought".split()
_FILLERS = frozenset("text content body string message msg prompt field json".split())
"""Last words that are ignored, as in `question_text`."""
GOOD = frozenset("chosen preferred better best good winning accepted positive".split())
BAD = frozenset("rejected dispreferred wrong incorrect bad worse worst negative losing non".split())
GOOD_ANSWER = frozenset("correct right good accepted approved".split())
BAD_ANSWER = frozenset("incorrect wrong bad rejected".split())
ID_WORDS = frozenset("id ids uuid hash index".split())
LABEL_WORDS = ID_WORDS | frozenset(
    "source sources origin provenance url link date time type kind category categories "
    "topic subject domain tag tags lang language license licence model dataset split subset author "
    "difficulty level score len length count num name file path metadata".split()
)
"""Words in names of ids, sources, categories and other metadata."""
_MEASURES = frozenset(
    "meta unnamed idx i row line n pos offset page chunk batch epoch iteration qid pid docid guid "
    "key timestamp datetime ts created updated modified published fetched crawled year version "
    "seed temperature top p k penalty token tokens chars words sentences turns bytes size duration "
    "latency ms cost price usage finish perplexity ppl loss logprob confidence quality similarity "
    "views likes upvotes votes priority cluster embedding md5 sha sha1 sha256 hexsha simhash "
    "minhash etag digest checksum moderation user username worker annotator provider engine "
    "generator repo branch commit corpus collection config country region locale format keyword "
    "keywords".split()
)
"""Words in names of what is counted, measured or recorded about a row."""
_MEANINGS = frozenset(
    "answer label correct gold right wrong best chosen preferred winner target option choice turn "
    "step round expected utterance image images audio video picture photo".split()
)
"""Words in names of fields that say something about the answer, or hold a part of the row."""
_TALKS = frozenset("chat conversation conv convo dialog dialogue message session thread".split())
"""Words in names of ids that several rows share if each row is one turn of a conversation."""
_SCORES = frozenset("score quality level confidence similarity votes key i n".split())
VERDICTS = (GOOD | BAD | GOOD_ANSWER | BAD_ANSWER) | frozenset(
    "pass passed fail failed safe unsafe factual hallucinated harmful harmless win lose".split()
)
"""Words in values, or names of parts of an object, that may call an answer good or bad."""
_VERDICT_VALUES = VERDICTS | frozenset("denied yes no y n true false".split())
ORIGIN_WORDS = LABEL_WORDS - frozenset(
    "type kind category categories topic subject domain tag tags level difficulty score".split()
)
"""Words in names of fields that describe the origin of a text rather than its content."""
CLASSES = frozenset(("label", "class", "intent", "sentiment", "emotion", "target"))
USERS = frozenset(
    "user human customer client patient person prompter question student visitor caller kunde 用户 "
    "问 患者".split()
)
ASSISTANTS = frozenset(
    "assistant gpt bot ai model agent chatgpt chatbot doctor answer claude llm 助手 "
    "机器人 答 医生".split()
)
MAX_EMPTY = 0.1
"""Largest share of a layout's rows that may not fit a format; they become bad rows."""
SHOWN = 6
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
    def answers(self) -> set[str]:
        """Names of the fields of which an answer is made, such as `answer: the letter`."""
        return self.trained | {n for n, ours in self.reads.items() if ours.startswith("answer")}

    @property
    def removes_marks(self) -> bool:
        """True if it reads turns from texts and leaves out the marks or names of their speakers."""
        return not {UNNAMED, TEMPLATED, TALK}.isdisjoint(self.reads.values())

    @property
    def prompt(self) -> str | None:
        """Name of the field with the prompt."""
        by_role = {ours: name for name, ours in self.reads.items()}
        return by_role.get("prompt") or by_role.get("question") or by_role.get("instruction")


def read_as(
    row_format: str, reads: Mapping[str, str], *, is_sure: bool = False, **settings: Any
) -> Reading:
    """Return a reading with the given format, roles of fields, and other settings of the source."""
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


def names_like(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names that match known ones, the best match first."""
    ranked = [(rank, name) for name in names if (rank := rank_of(name, known)) is not None]
    return [name for _, name in sorted(ranked, key=lambda item: item[0])]


def has_text(name: str, fields: Mapping[str, Field]) -> bool:
    """Return True if a field contains text, or short values of several words."""
    if name not in fields or fields[name].num_texts:
        return True
    return any(
        # Chinese has no spaces: of file 87, the one way shown left out `q`.
        isinstance(value, str) and (" " in value.strip() or UNSPACED.search(value))
        for value in fields[name].values
    )


def sql(name: str) -> str:
    """Return SQL for the field of a name."""
    return '"' + name.replace('"', '""') + '"'


def as_text(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return SQL for a field as text: texts of a list joined, and other lists and objects as JSON.

    Example:
        >>> [as_text("a", [{"a": value}]) for value in ("x", ["x", "y"], {"x": 1})]
        ['"a"', 'array_to_string("a", chr(10) || chr(10))', 'json("a")']
    """
    values = [value for row in rows if isinstance(value := row.get(name), dict | list)]
    if not values:
        return sql(name)
    if all(type(value) is list and {*map(type, value)} <= {str} for value in values):
        return f"array_to_string({sql(name)}, chr(10) || chr(10))"
    return f"json({sql(name)})"


BOTH_NAMES = "the names of both speakers"
UNNAMED = f"prompt, without {BOTH_NAMES}"


def texts_of(names: Iterable[str], rows: Sequence[Any]) -> list[str]:
    """Return the names of fields that contain text in some row and no other type in any row."""
    return [
        name
        for name in names
        if all(isinstance(row.get(name), str | None) for row in rows)
        and any(str(row.get(name) or "").strip() for row in rows)
    ]


def is_told(row: Mapping[str, Any], name: str, others: Iterable[str]) -> bool:
    """Return True if a value of several words occurs in another field of its row."""
    value = json.dumps(str(row.get(name) or "").strip())[1:-1].lower()
    texts = json.dumps([row.get(other) for other in others], default=str).lower()
    return " " in value and value in texts


def is_class(name: str, *more: str) -> bool:
    """Return True for names like `label` and `label_str`, but not for `label_path` and `target`.

    A target can be a translation. In file 856, the paths of labels were offered as answers.
    """
    words = {*words_of(name)}
    return not words & {"path", "file"} and bool(words & ((CLASSES - {"target"}) | {*more}))


def words_of_label(name: str) -> set[str]:
    """Return the words that mark a name as an id, source, category or other metadata."""
    words = [word for word in words_of(name) if word not in _FILLERS]
    return {*words} & LABEL_WORDS if words != ["source"] else set()


def holds_letters(value: object) -> bool:
    """Return True if a value is a text with a letter, or a list or object with one.

    Unlike `holds_text`, also for a single word, which may be an answer.
    """
    if isinstance(value, list | dict):
        return any(map(holds_letters, value.values() if isinstance(value, dict) else value))
    # Not the times in file 2016, losses of a training run.
    return isinstance(value, str) and re.search(r"[^\W\d_]", value) is not None


def best_of(names: Iterable[str], known: Sequence[str]) -> str | None:
    """Return the name that best matches a known one, or None if no name matches."""
    return next(iter(names_like(list(names), known)), None)


def rank_of(name: str, known: Sequence[str]) -> int | None:
    """Return how well a name matches known words, 0 for the best; None if it does not."""
    words = words_of(name)
    if name.lower() in known:
        return known.index(name.lower())
    # Not `prompt_id` or `rejected_answer`.
    if len(words) < 2 or (LABEL_WORDS | BAD).intersection(words):
        return None
    while len(words) > 1 and words[-1] in _FILLERS:
        words.pop()
    is_known = len(words[-1]) > 1 and words[-1] in known  # not the `a` of `candidate_a`
    return len(known) + known.index(words[-1]) if is_known else None


def words_of(name: str) -> list[str]:
    """Split a name into words: `userMessage` -> user, message."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|[\W_]+", " ", name).lower().split()


def empty_answers(fields: Mapping[str, Field]) -> list[str]:
    """Return the fields named like answers if none of them has words in any row.

    Example:
        >>> from collections import Counter
        >>> empty_answers({"question": Field(Counter(text=2)), "answer": Field(Counter(nothing=2))})
        ['answer']
    """
    answers = names_like([*fields], ANSWER)
    is_empty = all(explanation(name, fields[name], 1) == "empty" for name in answers)
    return answers if is_empty else []


def is_explained(name: str, held: Field, num_rows: int) -> bool:
    """Return True for a field that is empty, constant, an id, a source, a category or a measure.

    The name decides, since values tell too little: `is_safe` may call answers bad, `opa` may be
    what an answer `A` names, and `numbers` may belong to the question. But values such as `pass`
    and `fail` are a verdict, whatever the name.

    Example:
        >>> from collections import Counter
        >>> held = Field(Counter({"number": 2}), values=Counter([0, 1]))
        >>> [is_explained(name, held, 2) for name in ("row_id", "is_safe", "correct_answer_id")]
        [True, False, False]
    """
    words, num_values, number = {*words_of(name)}, len(held.values), held.values.total()
    if explanation(name, held, 1) == "empty" or held.kind in ("date", "datetime", "bytes"):
        return True
    # The same value in all rows, but no text such as `eggs; milk`.
    if num_values == 1 and number == num_rows:
        if re.fullmatch(r"[\w.:/ -]*", str(next(iter(held.values)))):
            return True
    if words & _TALKS and num_values < number:
        return False  # each row may be one turn
    if 1 < num_values < 5 and num_values < number / 2 and not words & ID_WORDS:
        said = {str(value).lower() for value in held.values}
        are_two = num_values == 2 and all(re.fullmatch(r"-?[\d.]+", each) for each in said)
        if (are_two and words & _SCORES) or any(_VERDICT_VALUES & {*words_of(v)} for v in said):
            return False
    return bool(words & (LABEL_WORDS | _MEASURES)) and not words & _MEANINGS


def explanation(name: str, held: Field, num_rows: int) -> str | None:
    """Explain why a field can be ignored, by what it contains; None if it cannot be explained.

    Example:
        >>> from collections import Counter
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
            return f"{kind}s with little or no text"
        if not held.has_few_values or num_values > 0.9 * held.kinds["text"]:
            return "short values"
        return counted(num_values, "different short value")
    if LABEL_WORDS.intersection(words_of(name)) and held.has_few_values:
        if 0 < num_values <= max(1, num_rows // 4):
            return f"a category: {counted(num_values, 'different value')}"
    return None
