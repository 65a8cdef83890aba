"""Files as people publish them: `packhouse init` proposes or asks, `packhouse prepare` reads."""

import gzip
import io
import json
import re
import shlex
import zipfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from packhouse.addons.init import file_survey as init_survey
from packhouse.addons.init.file_survey import guess_encoding
from packhouse.api import open_version
from packhouse.cli import cli
from packhouse.read import scan_source
from packhouse.read.shard_reader import read_shard
from packhouse.recipe import load_recipe
from packhouse.render import make_renderer
from packhouse.tokenize import load_snapshot, tokenize_table
from packhouse.tokenize.encoders import load_tokenizer
from tests.prepared import TOKENIZER
from tests.sources.test_odd_files import workbook

NUM_ROWS = 12


class Talk(NamedTuple):
    """A question and its answer, as the version must contain them."""

    question: str
    answer: str


def talks(question: str = "What is {} plus {}?", answer: str = "I think it is {}.") -> list[Talk]:
    return [Talk(question.format(n, n), answer.format(2 * n)) for n in range(3, 3 + NUM_ROWS)]


TALKS = talks()
CHINESE = talks(
    "请问 {} 加 {} 等于多少 我不知道这个问题的答案", "这个问题的答案是 {} 你可以自己算一下"
)
RUSSIAN = talks("Сколько будет {} плюс {}?", "Это будет {} если сложить.")
JAPANESE = talks("{} たす {} はいくつですか。", "こたえは {} になります。")


def lines(rows: list[Any], *, ascii: bool = False) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows).encode()


def named(question: str, answer: str, **more: Any) -> list[dict[str, Any]]:
    rows = [{"id": n, question: t.question, answer: t.answer} for n, t in enumerate(TALKS)]
    return [row | more for row in rows]


def each(row: Callable[[Talk], dict[str, Any]]) -> bytes:
    return lines([row(talk) for talk in TALKS])


def table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = [delimiter.join(map(str, row)) for row in [rows[0].keys(), *(r.values() for r in rows)]]
    return "\n".join(text).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written)
    return written.getvalue()


def chats(speaker: str, content: str, user: str, bot: str) -> list[list[dict[str, str]]]:
    return [
        [{speaker: user, content: t.question}, {speaker: bot, content: t.answer}] for t in TALKS
    ]


def chats_of(talk: Talk) -> list[dict[str, str]]:
    said = zip(("user", "assistant"), talk, strict=True)
    return [{"role": role, "content": content} for role, content in said]


def squad(talks: list[Talk]) -> dict[str, Any]:
    asked = [
        {"id": str(n), "question": t.question, "answers": [{"text": t.answer, "answer_start": 0}]}
        for n, t in enumerate(talks)
    ]
    unanswered = {"id": "x", "question": "Who?", "answers": [], "is_impossible": True}
    paragraphs = [
        {"context": f"{asked[n]['question']} Sums.", "qas": [asked[n], unanswered]}
        for n in range(len(asked))
    ]
    articles = [{"title": "Sums", "paragraphs": paragraphs[n : n + 3]} for n in range(0, 12, 3)]
    return {"version": "v2.0", "data": articles}


def zipped() -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("inside.jsonl", lines(named("question", "answer")))
    return written.getvalue()


def dumped(value: Any, **options: Any) -> bytes:
    return json.dumps(value, **options).encode()


def pairs(question: str, answer: str, talks: list[Talk]) -> list[dict[str, str]]:
    return [dict(zip((question, answer), talk, strict=True)) for talk in talks]


SHAPES = named("instruction", "output", input="")[:4] + named("question", "answer")[4:8]
SHAPES += [{"messages": said} for said in chats("role", "content", "user", "assistant")[8:]]
GOOGLE = [
    {
        "contents": [
            {"role": "user", "parts": [{"text": q}]},
            {"role": "model", "parts": [{"text": a}]},
        ]
    }
    for q, a in TALKS
]
GOOGLE_SYSTEM = {"systemInstruction": {"role": "system", "parts": [{"text": "Add them."}]}}
SQUAD = [
    {"context": "Sums.", "question": q, "answers": {"text": [a], "answer_start": [0]}}
    for q, a in TALKS
]
DIALOGS = [{"dialog": said} for said in chats("speaker", "text", "Customer", "Agent")]
BOT = [{"conversations": said} for said in chats("from", "value", "human", "bing-bot")]
OVER_LINES = [b'{"messages": [\n%b,\n%b\n]}\n' % (*map(orjson.dumps, chats_of(t)),) for t in TALKS]
IN_ONE = {"status": "ok", "rows": named("prompt", "response"), "next": None}
DEEP = {"of": {"version": 1, "rows": named("question", "answer")}}
SPLITS = {"train": named("question", "answer"), "eval": named("question", "answer")[:2]}
CUT_BY_PANDAS = [{"0": f"### Human: {q}### Assistant: {a}"} for q, a in TALKS]


def encoded(data: bytes, encoding: str) -> bytes:
    return data.decode().encode(encoding)


# name -> (file, its bytes, conversations if others than TALKS)
# fmt: off
RIGHT: dict[str, tuple[Any, ...]] = {
    "lists of messages in one object": ("a.json", dumped({"all": chats("from", "value", "human",
        "gpt")}, indent=1)),
    "alpaca in an array": ("data.json", dumped(named("instruction", "output", input=""))),
    "alpaca with a history": ("a.jsonl", lines(named("instruction", "output", history=[]))),
    "query and answer": ("a.jsonl", lines(named("query", "answer"))),
    "input text and output as JSON": ("a.jsonl", lines(named("input_text", "output_json"))),
    "categories next to the rows": ("a.json", dumped({"rows": named("question", "answer"),
        "kinds": [{"id": n, "name": f"Sums, {n} of it"} for n in range(20)]})),
    "preferences after a conversation": ("dpo.json", dumped([{"conversations": [{"from": "human",
        "value": t.question}], "chosen": {"from": "gpt", "value": t.answer},
        "rejected": {"from": "gpt", "value": "No."}} for t in TALKS])),
    "plural names": ("a.jsonl", lines(named("Questions", "Answers"))),
    "ask and answer": ("a.jsonl", lines(named("ask", "answer", score=0.5))),
    "system, user, assistant": ("a.jsonl", lines(named("user", "assistant", system="Be brief."))),
    "input and preferred output":
        ("dpo.jsonl", lines(named("input", "preferred_output", rejected_output="I do not know."))),
    "prompt and completion": ("a.jsonl", lines(named("prompt", "completion"))),
    "question and solution": ("maths.parquet", parquet(named("question", "solution"))),
    "problem and solution with a source":
        ("a.json", dumped(named("problem", "solution", source="olympiad"))),
    "an array named jsonl": ("a.jsonl", dumped(named("query", "reply"))),
    "a pretty array named jsonl": ("a.jsonl", dumped(named("question", "answer"), indent=2)),
    "pretty objects one after another":
        ("a.json", b"\n".join(dumped(row, indent=4) for row in named("Prompt", "Response"))),
    "rows in lists of one":
        ("a.jsonl", lines([[row] for row in named("instruction", "output", input="")])),
    "several shapes": ("a.jsonl", lines(SHAPES)),
    "GBK lines": ("a.jsonl", encoded(lines(pairs("问题", "答案", CHINESE)), "gbk"), CHINESE),
    "GBK columns": ("faq.csv", encoded(table(pairs("问题", "回答", CHINESE), ","), "gbk"), CHINESE),
    "Windows Cyrillic":
        ("a.csv", encoded(table(pairs("вопрос", "ответ", RUSSIAN), ","), "cp1251"), RUSSIAN),
    "Shift JIS":
        ("a.tsv", encoded(table(pairs("質問", "答え", JAPANESE), "\t"), "cp932"), JAPANESE),
    "Excel's text": ("a.csv", encoded(table(named("Question", "Answer"), "\t"), "utf-16")),
    "Excel's CSV of Europe": ("a.csv", table(named("Frage", "Antwort"), ";")),
    "a workbook": ("faq.xlsx", workbook([["Question", "Answer"], *map(list, TALKS)])),
    "SQuAD, nested": ("dev-v2.0.json", dumped(squad(TALKS))),
    "SQuAD, a question a row": ("a.jsonl", lines(SQUAD)),
    "rows in a field of one object": ("api.json", dumped(IN_ONE)),
    "turns with other names of speakers": ("a.jsonl", lines(DIALOGS)),
    "objects over several lines": ("a.jsonl", b"".join(OVER_LINES)),
    "a list in an object in an object": ("a.json", dumped(DEEP)),
    "a question and an answer in an object": ("a.jsonl", lines([{"item": row} for row in
        pairs("question", "answer", TALKS)])),
    "a list for each split": ("a.json", dumped(SPLITS)),
    "a column that pandas wrote without a name": ("a.csv", table(CUT_BY_PANDAS, ",")),
    "Google's messages": ("a.jsonl", lines(GOOGLE)),
    "Google's messages with a system prompt":
        ("a.jsonl", lines([GOOGLE_SYSTEM | row for row in GOOGLE])),
    "ShareGPT with a bot": ("a.json", dumped(BOT)),
}
# fmt: on


# Public datasets by the names of their fields.
# fmt: off
PUBLIC: dict[str, bytes] = {
    "TRL's prompt and completion": each(lambda t: {"prompt": [{"role": "user",
        "content": t.question}], "completion": [{"role": "assistant", "content": t.answer}]}),
    "messages in an object": each(lambda t: {"talk": {"id": 7, "messages": chats_of(t),
        "system": "Help."}, "meta": {"a": 1}}),
    "an answer next to messages": each(lambda t: {"id": "7", "messages": chats_of(t)[:1],
        "answer": t.answer}),
    "an answer next to messages with texts": each(lambda t: {"request": [{"role": "user",
        "text": t.question}], "response": t.answer}),
    "an answer next to ShareGPT's": each(lambda t: {"input": [{"from": "human",
        "value": t.question}], "reply": t.answer}),
    "OpenOrca": each(lambda t: {"id": "flan.1", "system_prompt": "Help.", "question": t[0],
        "response": t[1]}),
    "MetaMath": each(lambda t: {"type": "GSM_Rephrased", "query": t.question,
        "original_question": "A question before.", "response": t.answer}),
    "OpenMathInstruct": each(lambda t: {"question": t.question, "expected_answer": "7",
        "predicted_answer": "7", "error_message": "<not_executed>", "is_correct": True,
        "generated_solution": t.answer}),
    "Magicoder": each(lambda t: {"lang": "python", "seed": "x = 1", "problem": t.question,
        "solution": t.answer}),
    "code-alpaca": each(lambda t: {"instruction": t.question, "input": "", "output": t.answer,
        "prompt": f"### Instruction: {t.question} ### Output:"}),
    "HelpSteer": each(lambda t: {"prompt": t.question, "response": t.answer, "helpfulness": 4,
        "verbosity": 1}),
    "SlimOrca": each(lambda t: {"conversations": [{"from": "system", "value": "Think.",
        "weight": None}, {"from": "human", "value": t.question, "weight": 0}, {"from": "gpt",
        "value": t.answer, "weight": 1}]}),
    "no_robots": each(lambda t: {"prompt": t.question, "prompt_id": "a1",
        "messages": [{"role": "user", "content": t.question}, {"role": "assistant",
        "content": t.answer}], "category": "Generation"}),
    "camel-ai": each(lambda t: {"role_1": "Mathematician_RoleType.ASSISTANT", "topic;": "Algebra",
        "sub_topic": "Sums", "message_1": t.question, "message_2": t.answer}),
    "orca_dpo_pairs": each(lambda t: {"system": "Help.", "question": t[0], "chosen": t[1],
        "rejected": "No."}),
    "firefly": each(lambda t: {"kind": "NLI", "input": t.question, "target": t.answer}),
    "SciQ": each(lambda t: {"question": t.question, "distractor1": "x", "distractor2": "y",
        "correct_answer": t.answer, "support": "A text."}),
    "hh-rlhf": each(lambda t: {"chosen": f"\n\nHuman: {t.question}\n\nAssistant: {t.answer}",
        "rejected": f"\n\nHuman: {t.question}\n\nAssistant: No."}),
    "guanaco": each(lambda t: {"text": f"### Human: {t.question}### Assistant: {t.answer}"}),
}
# fmt: on


IMAGE = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]


def messages_of(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def notes(n: int) -> dict[str, str]:
    return {name: f"Here is {name} {n} of all" for name in ("remark", "poem", "tale")}


HALVES = ("train", "test")


def bad(talk: Talk) -> str:
    return f"I am not at all sure about {talk.question}"


def half(number: int) -> float:
    return number / 2 if number % 2 else number // 2


# Fields with several meanings: rows, the number of the right candidate, and its conversations.
# fmt: off
ASKED: dict[str, tuple[Callable[[int, Talk], dict[str, Any]], int, list[Talk]]] = {
    "short answers that are called labels": (lambda n, t: {"input": f"Question: {t[0]}\nAnswer:",
        "label": f"Ada-{n:02}"}, 2, [Talk(t[0], f"Ada-{n:02}") for n, t in enumerate(TALKS)]),
    "long answers that are called labels": (lambda n, t: {"input": t[0], "label": t[1]}, 1, TALKS),
    "instructions with an input, in a list": (lambda n, t: {"talk": [{"instruction": "Answer it.",
        "input": t[0], "output": t[1], "kind": "sum"}]}, 1, TALKS),
    "a context with a longer name": (lambda n, t: {"question": "What is asked?", "answer": t[1],
        "rule": f"The rule of {n} sums", "input_context": f"He asked: {t[0]}"}, 1, TALKS),
    "labels of another language": (lambda n, t: {"text": f"질문: {t[0]}\n답변: {t[1]}"}, 2,
        TALKS),
    "two columns of any name": (lambda n, t: {"v1": t.question, "v2": t.answer}, 1, TALKS),
    "an object as input": (lambda n, t: {"instruction": "Answer.", "input": {"n": n,
        "ask": f"Go: {t[0]}"}, "output": t[1]}, 1, TALKS),
    "the source of an answer": (lambda n, t: {"Question": t[0], "Answer": t[1],
        "Reference": f"2024q{n}"}, 1, TALKS),
    "a list of passages and text of no known use": (lambda n, t: {"question": "What is asked?",
        "context": [f"He asked: {t[0]}", "Nobody knew it."], "response": t[1],
        "chart": f"A chart of the numbers up to {n}"}, 1, TALKS),
    "an object as input, or null": (lambda n, t: {"instruction": "Answer." if n % 4 else t[0],
        "input": {"n": n, "ask": f"Go: {t[0]}"} if n % 4 else None, "output": t[1]}, 1, TALKS),
    "a list of passages, or an empty one": (lambda n, t: {"question": "Why?" if n % 4 else t[0],
        "context": [f"He asked: {t[0]}", "Nobody knew it."] if n % 4 else [], "response": t[1]}, 1,
        TALKS),
    "passages next to their sources": (lambda n, t: {"question": "What is asked?", "contexts":
        f"He asked: {t[0]}", "answer": t[1], "sources": [f"The book of {n} pages"]}, 1, TALKS),
    "numbers of sentences as answers": (lambda n, t: {"question": "Where is it?", "context": t[0],
        "answers": [n, n + 1]}, 1, [Talk(t[0], f"[{n},{n + 1}]") for n, t in enumerate(TALKS)]),
    "two questions": (lambda n, t: {"query": t[0], "original_question": f"Before that: {t[0]}",
        "response": t[1]}, 1, TALKS),
    "a class next to a completion": (lambda n, t: {"query": t[0], "completion": t[1],
        "content": bad(t), "label": n % 3}, 1, TALKS),
    "several answers and the best one": (lambda n, t: {"question": t[0], "answers": [bad(t), t[1]],
        "best_answer": t[1]}, 1, TALKS),
    "answers in a list": (lambda n, t: {"prompt": t[0], "responses": [t[1], bad(t)]}, 1, TALKS),
    "a short answer, its reasoning, and the whole": (lambda n, t: {"question": t.question,
        "answer": str(n), "chain_of_thought": f"First take {n} and then {n}, for {t.question}",
        "full_response": t.answer}, 1, TALKS),
    "choices and the number of one": (lambda n, t: {"question": t.question, "choice1": (t.answer,
        bad(t))[n % 2], "choice2": (bad(t), t.answer)[n % 2], "label": n % 2}, 2, TALKS),
    "choices in a list, and the letter of one": (lambda n, t: {"question": t[0], "options": [t[1],
        bad(t)][:: 1 - n % 2 * 2], "answer": "AB"[n % 2]}, 2, TALKS),
    "choices in a list, and the number of one as text": (lambda n, t: {"question": t[0],
        "options": [t[1], bad(t)][:: 1 - n % 2 * 2], "answer": f"option {n % 2 + 1}"}, 2, TALKS),
    "choices in an object, and the letter of one": (lambda n, t: {"question": t[0], "options":
        dict(zip("AB", [t[1], bad(t)][:: 1 - n % 2 * 2], strict=True)),
        "answer": f"({'ab'[n % 2]})"}, 2, TALKS),
    "choices with labels, and the label of one": (lambda n, t: {"question": t[0], "choices":
        {"text": [t[1], bad(t)][:: 1 - n % 2 * 2], "label": ["A", "B"]}, "answer": "AB"[n % 2]},
        2, TALKS),
    "choices in a list, and numbers from 0 or 1": (lambda n, t: {"question": t[0], "options":
        [[t[1], bad(t)], [bad(t), t[1]]][n % 2] + ["None"], "answer": 1 + n % 2}, 4, TALKS),
    "answers that are objects": (lambda n, t: {"input": t[0], "output": {"z": t[1],
        "items": [n]} | ({"odd": n} if n % 2 else {})}, 1, [Talk(t[0], json.dumps({"z": t[1],
        "items": [n]} | ({"odd": n} if n % 2 else {}), separators=(",", ":"))) for n,
        t in enumerate(TALKS)]),
    "messages whose answers are objects": (lambda n, t: {"messages": [*chats_of(t)[:1], {"role":
        "assistant", "content": {"z": t[1], "n": [n]} if n else t[1]}]}, 1, [Talk(t[0],
        f'{{"z":"{t[1]}","n":[{n}]}}' if n else t[1]) for n, t in enumerate(TALKS)]),
    "a tool and its arguments": (lambda n, t: {"id": n, "prompt": t[0], "tool": "say",
        "args": {"what": t[1], "again": n}}, 1, [Talk(t[0],
        f'{{"tool":"say","args":{{"what":"{t[1]}","again":{n}}}}}') for n, t in enumerate(TALKS)]),
    "a text, its intent and its parts": (lambda n, t: {"user_input": t[0], "intent": "ab"[n % 2],
        "entities": {"n": n}}, 1, [Talk(t[0],
        f'{{"intent":"{"ab"[n % 2]}","entities":{{"n":{n}}}}}') for n, t in enumerate(TALKS)]),
    "a text and its parts": (lambda n, t: {"id": n, "note": f"Please tell me: {t[0]}", "size": None,
        "length": f"{n} m", "parts": [n]}, 1, [Talk(t[0],
        f'{{"size":null,"length":"{n} m","parts":[{n}]}}') for n, t in enumerate(TALKS)]),
    "parts and a text about them": (lambda n, t: {"note": t[1], "parts": {"n": n}}, 2,
        [Talk(f'{{"n":{n}}}', t[1]) for n, t in enumerate(TALKS)]),
    "a context of any name": (lambda n, t: {"instruction": "Which sum?",
        "content": f"Please tell me: {t[0]}", "output": t[1]}, 1, TALKS),
    "objects as context and answer": (lambda n, t: {"ask": f"Which sum is it, {n}?", "page": {
        "rule": f"Please tell me: {t[0]}", "note": f"The note of page {n}"},
        "answer": {"is": t[1]}}, 1, [Talk(t[0], f'{{"is":"{t[1]}"}}') for t in TALKS]),
    "topics that answers repeat": (lambda n, t: {"topic": f"Sums of the {'abc'[n % 3]}s",
        "instruction": "Tell me!", "input": t[0], "output": f"Sums of the {'abc'[n % 3]}s? {t[1]}"},
        2, [Talk(f"Tell me!\nSums of the {'abc'[n % 3]}s\n{t[0]}",
        f"Sums of the {'abc'[n % 3]}s? {t[1]}") for n, t in enumerate(TALKS)]),
    "a context of any name next to a question": (lambda n, t: {"question": f"Which one, {n}?",
        "quote": f"Please tell me: {t[0]}", "gold_answer": t[1]}, 1, TALKS),
    "a question between [INST] and [/INST]": (lambda n,
        t: {"text": f"<s>[INST] {t[0]} [/INST] {t[1]} </s>"}, 1, TALKS),
    "a question after <<SYS>> and a system prompt": (lambda n, t: {"text":
        f"<s>[INST] <<SYS>>\nHelp.\n<</SYS>>\n\n{t[0]} [/INST] {t[1]}</s>"}, 1, TALKS),
    "a question between [INST] and [/INST], and a class": (lambda n,
        t: {"text": f"<s>[INST] {t[0]} [/INST] {t[1]} </s>", "risk": "ab"[n % 2]}, 1, TALKS),
    "a question between [INST] and [/INST], and its answer next to it": (lambda n,
        t: {"text": f"[INST] {t[0]} [/INST]", "answer": t[1]}, 1, TALKS),
    "prompts that quote a conversation": (lambda n, t: {  # file 1200
        "input": f"Go on.\nUser: Hi\nAssistant: Hello\nUser: {t[0]} (end)", "output": t[1]},
        1, TALKS),
    "two questions between [INST] and [/INST]": (lambda n, t: {"text":
        f"<s>[INST] {t[0]} [/INST] {t[1]} </s><s>[INST] Thanks. [/INST] Bye. </s>"}, 1,
        [Talk(t[0], f"{t[1]} Bye.") for t in TALKS]),
    "a conversation written by Llama 3's template": (lambda n, t: {"text": "<|begin_of_text|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{t[0]}<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{t[1]}<|eot_id|>"}, 1, TALKS),
    "a conversation written by Gemma's template": (lambda n, t: {"text": "<bos><start_of_turn>"
        f"user\n{t[0]}<end_of_turn>\n<start_of_turn>model\n{t[1]}<end_of_turn>\n<eos>"}, 1, TALKS),
    "a conversation written by Vicuna's template": (lambda n, t: {"text":
        f"A chat. USER: {t[0]} ASSISTANT: {t[1]}</s>USER: Thanks. ASSISTANT: Bye.</s>"}, 1,
        [Talk(f"A chat.\n{t[0]}", f"{t[1]} Bye.") for t in TALKS]),
    "prompts that open a bracket of the answer": (lambda n, t: {"prompt": f'{t[0]} -> ["',
        "completion": f'{t[1]}"]'}, 1, [Talk(f'{t[0]} -> ["', f'{t[1]}"]') for t in TALKS]),
    "prompts that open a tag of the answer": (lambda n, t: {"prompt": f"{t[0]}\n<think>\n",
        "response": f"{t[1]}</think>"}, 1, [Talk(t[0], f"{t[1]}</think>") for t in TALKS]),
    "a conversation written by a template": (lambda n, t: {"text":
        f"<|im_start|>user\n{t[0]}<|im_end|>\n<|im_start|>assistant\n{t[1]}<|im_end|>"}, 1, TALKS),
    "a conversation written by a template, next to several texts": (lambda n, t: {"text":
        f"<|im_start|>user\n{t[0]}<|im_end|>\n<|im_start|>assistant\n{t[1]}<|im_end|>",
        **{name: f"Here is the {name} of number {n}" for name in ("proof", "hint")}}, 1, TALKS),
    "a prompt written by a template": (lambda n, t: {"prompt":
        f"<|system|>\nAdd.\n<|user|>\n{t[0]}\n<|assistant|>\n", "chosen": t[1]}, 1, TALKS),
    "marks without line breaks": (lambda n, t: {"text":  # file 1154
        f"<|user|>{t[0]}<|end|>\n<|assistant|>{t[1]}<|end|>"}, 1, TALKS),
    "turns that end with a mark": (lambda n, t: {"text":
        f"<|user|>\n{t[0]}<|end|>\n<|assistant|>\n{t[1]}<|end|>"}, 1, TALKS),
    "a prompt written by a template, with tags": (lambda n, t: {"prompt":
        f"<|im_start|>user\n{t[0]}<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n",
        "response": t[1]}, 1, [Talk(t[0], f"<think>\n</think>\n{t[1]}") for t in TALKS]),
    "choices, and letters of which one is for none": (lambda n, t: {"question": t[0],
        "choices": [t[1], bad(t)], "answer": "ABC"[n % 3]}, 1, [Talk(t[0], "ABC"[n % 3]) for n,
        t in enumerate(TALKS)]),
    "bad answers, and rows for tests": (lambda n, t: {"prompt": t[0], "completion": t[1] if n % 2
        else bad(t), "label": n % 2 == 1, "split": "train" if n % 3 else "test"}, 1,
        [t for n, t in enumerate(TALKS) if n % 2 and n % 3]),
    "prompts between tags of speakers": (lambda n, t: {"prompt": f"<user> {t[0]} <assistant>",
        "completion": t[1]}, 1, TALKS),
    "prompts that end with a separator": (lambda n, t: {"prompt": f"{t[0]}\n\n###\n\n",
        "completion": f" {t[1]} ###"}, 1, TALKS),
    "prompts that end with two separators": (lambda n, t: {"prompt": f"{t[0]} ->{' ->' * (n % 2)}",
        "completion": f" {t[1]}\n"}, 1, TALKS),
    "answers that end with the same signs": (lambda n, t: {"prompt": f"{t[0]} (sum {n})",
        "completion": f"\r\n{t[1]} $$$$"}, 1, [Talk(f"{t[0]} (sum {n})", t[1]) for n, t in
        enumerate(TALKS)]),
    "prompts with a French label": (lambda n, t: {"prompt": f"{t[0]}\n\nR\u00e9ponse\u00a0:",
        "completion": f" {t[1]}"}, 1, [Talk(f"{t[0]}\n\nR\u00e9ponse\u00a0:", t[1])
        for t in TALKS]),
    "a list of texts and a list of objects": (lambda n, t: {"messages": [t[0], "Thanks."],
        "signals": [{"kind": t[1]}] * (n != 5)}, 1,
        [Talk(json.dumps([t[0], "Thanks."], separators=(",", ":")), json.dumps([{"kind": t[1]}] *
        (n != 5), separators=(",", ":"))) for n, t in enumerate(TALKS)]),
    "prompts that end with another separator": (lambda n, t: {"prompt": f"{t[0]}\n\n===\n\n",
        "completion": f" {t[1]}\n"}, 1, TALKS),
    "prompts that end with a line of symbols": (lambda n, t: {
        "prompt": f"{t[0]}\n\n(o_'o)\n~~~\n", "completion": f" {t[1]}"}, 1, TALKS),
    "texts with a heading before the answer": (lambda n, t: {"text": f"<s>### Ask:\n{t[0]}\n\n"
        f"### Reply:\n{t[1]}</s>"}, 1, [Talk(f"### Ask:\n{t[0]}\n\n### Reply:\n", t[1])
        for t in TALKS]),
    "texts with indented headings without a colon": (lambda n, t: {  # file 1116
        "text": f"### Ask\n  {t[0]}\n\n  ### Reply\n  {t[1]}"}, 1,
        [Talk(f"### Ask\n  {t[0]}\n\n  ### Reply\n", t[1]) for t in TALKS]),
    "answers that end with a stop sequence": (lambda n, t: {"prompt": t[0],
        "completion": f" {t[1]} END"}, 1, TALKS),
    "answers that end with a separator": (lambda n, t: {"prompt": f"{t[0]}\nAda {n}:",
        "completion": f" {t[1]}\n\n###\n\n"}, 1, [Talk(f"{t[0]}\nAda {n}:", t[1]) for n,
        t in enumerate(TALKS)]),
    "a question, its tables, and a query as the answer": (lambda n, t: {"Question": t[0],
        "Context": "", "Query": t[1]}, 1, TALKS),
    "a source text and an output": (lambda n, t: {"source_text": t[0], "new_output": t[1],
        "condition": "ab"[n % 2]}, 1, TALKS),
    "choices of a text, next to a time": (lambda n, t: {"text": t[0], "made_at": f"2021-04-01 {n}",
        "choices": [t[1], bad(t)][:: 1 - n % 2 * 2], "label": n % 2}, 2, TALKS),
    "choices of a text of any name": (lambda n, t: {"line": t[0], "choices": [t[1],
        bad(t)][:: 1 - n % 2 * 2], "answer": n % 2}, 2, TALKS),
    "two objects": (lambda n, t: {"id": n, "ours": {"ask": t[0], "n": n}, "theirs": {"say": t[1]}},
        1, [Talk(f'{{"ask":"{t[0]}","n":{n}}}', f'{{"say":"{t[1]}"}}') for n,
        t in enumerate(TALKS)]),
    "three objects, next to a path and metadata": (lambda n, t: {"label_path": f"/ada/all/{n}.json",
        "state": {"ask": t[0]}, "view": {"n": n}, "advice": {"say": t[1]}, "metadata": {"n": n}},
        1, [Talk(f'{{"ask":"{t[0]}"}}', f'{{"view":{{"n":{n}}},"advice":{{"say":"{t[1]}"}}}}')
        for n, t in enumerate(TALKS)]),
    "the state of a game, what a player says, and the move": (lambda n, t: {"hand": [n],
        "said": t[1], "move": "ab"[n % 2]}, 3, [Talk(f"[{n}]",
        f'{{"said":"{t[1]}","move":"{"ab"[n % 2]}"}}') for n, t in enumerate(TALKS)]),
    "a subject and a text": (lambda n, t: {"subject": t[0], "body": t[1], "tone": "ab"[n % 2]}, 1,
        TALKS),
    "prompts that name their speakers": (lambda n, t: {"prompt": f"User: {t[0]}\nAda:",
        "completion": t[1]}, 1, TALKS),
    "prompts and answers that begin with names": (lambda n, t: {"prompt": f"Client: {t[0]}",
        "completion": f" Ada: {t[1]}"}, 1, TALKS),
    "prompts and answers that begin with User and Assistant": (lambda n, t: {
        "question": f"User : {t[0]}", "answer": f"Assistant: {t[1]}"}, 1, TALKS),
    "texts of two named speakers": (lambda n, t: {"text": f"User: {t[0]}\nAda: {t[1]}"}, 1, TALKS),
    "texts of USER and ASSISTANT": (lambda n, t: {
        "chat": f"USER: {t[0]}\n\n\nASSISTANT: {t[1]}\n\n\n"}, 1, TALKS),
    "texts of two named speakers after a context": (lambda n, t: {
        "text": f"Context: Sum {n}.\nUser: {t[0]}\nAda: {t[1]}"}, 1, TALKS),
    "rows for training and for tests": (lambda n, t: {"question": t[0], "answer": t[1],
        "split": "train" if n % 2 else "test"}, 1, TALKS[1::2]),
    "rows to look up and for tests, with a remark": (lambda n, t: {
        "remark": f"Here is a sum, and it is sum {n} of the twelve", "question": t[0],
        "reference_reply": t[1], "split": "index" if n % 2 else "test"}, 3, TALKS[1::2]),
    "preferred answers to a prompt of any name": (lambda n, t: {"brief": t[0], "chosen": t[1],
        "rejected": bad(t), "reason": f"Answer {n} is better."}, 1, TALKS),
    "two texts and a label": (lambda n, t: {"premise": t[0], "hypothesis": t[1], "label": n,
        "label_str": f"no {n}"}, 3, [Talk(f'{{"premise":"{t[0]}"', f"no {n}") for n,
        t in enumerate(TALKS)]),
    "q and a without spaces": (lambda n, t: {"q": t[0].replace(" ", ""), "a": t[1]}, 1,
        [Talk(t[0].replace(" ", ""), t[1]) for t in CHINESE]),
    "instructions next to a skill": (lambda n, t: {"skill": t.question,
        "instructions": t.answer}, 1, TALKS),
    "a play": (lambda n, t: {"role": f"Hamlet {n}", "script": t.answer}, 1, [Talk("",
        t.answer) for t in TALKS]),
    "good and bad answers of KTO": (lambda n, t: {"prompt": t[0], "completion": t[1],
        "label": n % 2 == 0}, 1, TALKS[::2]),
    "a role in place of the assistant in a fifth of the rows": (lambda n, t: {"messages": [
        *chats_of(t)[:1], {"role": "assistant" if n % 5 else "content", "content": t[1]}]}, 1,
        TALKS),
    "answers that are not correct": (lambda n, t: {"prompt": t[0], "completion": t[1] if n % 3 else
        bad(t), "is_incorrect": n % 3 == 0}, 1, [t for n, t in enumerate(TALKS) if n % 3]),
    "answers that a field does not accept": (lambda n, t: {"prompt": t[0], "completion": t[1] if
        n % 3 else bad(t), "accepted": n % 3 > 0}, 1, [t for n, t in enumerate(TALKS) if n % 3]),
    "two objects about a question": (lambda n, t: {"query": t[0], "names": [{"say": t[1]}],
        "links": [{"of": n}]}, 1, [Talk(t[0], json.dumps({"names": [{"say": t[1]}], "links":
        [{"of": n}]}, separators=(",", ":"))) for n, t in enumerate(TALKS)]),
    "answers that another field calls wrong": (lambda n, t: {"question": t[0], "answer": (t[1],
        bad(t))[n % 2], "verdict": ("Correct", "incorrect")[n % 2]}, 1, TALKS[::2]),
    "pairs of objects": (lambda n, t: {"prompt": t[0], "chosen": {"say": t[1]}, "rejected":
        {"say": bad(t)}}, 1, [Talk(t[0], json.dumps({"say": t[1]}, separators=(",", ":"))) for
        t in TALKS]),
    "pairs that begin with names of speakers": (lambda n, t: {"prompt": f"用户: {t[0]}",
        "chosen": f"助手: {t[1]}", "rejected": f"助手: {bad(t)}"}, 1, TALKS),
    "text next to messages": (lambda n, t: {"messages": chats_of(t),
        "remark": f"{n} people of {2 * n} saw no {'abcdefghijklm'[n:]} here"}, 1, TALKS),
    "an answer and a source that a test expects": (lambda n, t: {"query": t[0],
        "expected_source": f"doc{n}.md", "expected_answer": t[1]}, 1, TALKS),
    "numbers as answers": (lambda n, t: {"prompt": t[0], "completion": n}, 1,
        [Talk(t[0], str(n)) for n, t in enumerate(TALKS)]),
    "numbers as answers about a passage": (lambda n, t: {"question": "How much is it?", "answer":
        half(n), "passage": t[0]}, 1, [Talk(t[0], str(half(n))) for n, t in enumerate(TALKS)]),
    "the better of two answers, counted from 0": (lambda n, t: {"prompt": t[0], "response_0":
        (bad(t), t[1])[n % 2], "response_1": (t[1], bad(t))[n % 2], "better_response_id":
        1 - n % 2}, 1, TALKS),
    "the better of two answers, counted from 1": (lambda n, t: {"prompt": t[0], "output_1":
        (bad(t), t[1])[n % 2], "output_2": (t[1], bad(t))[n % 2], "preference": 2 - n % 2}, 1,
        TALKS),
    "a long text next to answers that are numbers": (lambda n, t: {"prompt": t[0], "code": t[1],
        "actual_answer": f"{n}", "expected_answer": f"{n + 1}"}, 5, TALKS),
    "the winner of two answers in a column for each": (lambda n, t: {"prompt": t[0], "response_a":
        (bad(t), t[1])[n % 2], "response_b": (t[1], bad(t))[n % 2], "winner_model_a": n % 2,
        "winner_model_b": 1 - n % 2}, 1, TALKS),
    "answers of which one is rated best": (lambda n, t: {"question": t[0], "answers": [{"text":
        f"I {'do not ' * k} know {n}.", "pm_score": k} for k in range(2)] + [{"text": t[1],
        "pm_score": 9}]}, 2, TALKS),
    "answers of which one is accepted": (lambda n, t: {"question": t[0], "answers": [{"text":
        f"I do not know that, {n}.", "selected": False}, {"text": t[1], "selected": True}]}, 2,
        TALKS),
    "code with its keywords": (lambda n, t: {"tags": f"sum {n}" if n % 3 else "", "code": f"{t[0]} "
        f"{t[1]}"}, 3, [Talk("", f"{t[0]} {t[1]}") for t in TALKS]),
    "an object as the answer, next to its origin": (lambda n, t: {"input_text": t[0], "provenance":
        {"made_by": "Ann Bell", "of_row": n}, "contract": {"say": t[1]}}, 1, [Talk(t[0],
        json.dumps({"say": t[1]}, separators=(",", ":"))) for t in TALKS]),
    "messages that end with a control token": (lambda n, t: {"conversations": [{"from": who,
        "value": f"{x}</s>"} for who, x in zip(("human", "gpt"), t, strict=True)]}, 1, TALKS),
    "turns without speakers": (lambda n, t: {"dialog": [*t], "source": "x"}, 1, TALKS),
    "two texts in a list of any name": (lambda n, t: {"id": n, "texts": [*t]}, 1, TALKS),
    "a passage that fits a query and one that does not": (lambda n, t: {"query": t[0],
        "positive": t[1], "negative": bad(t)}, 1, TALKS),
    "passages that fit a query, next to an answer": (lambda n, t: {"query": t[0],
        "positive": f"{n} people of {2 * n} saw no {'abcdefghijklm'[n:]} here", "answer": t[1]}, 1,
        TALKS),
    "pairs in a list": (lambda n, t: {"conversation": [{"input": t[0], "output": t[1]}], "id": n},
        1, TALKS),
    "two speakers of any name": (lambda n, t: {"dialog": [{"speaker": who, "text": x} for who,
        x in zip("XY", t, strict=True)]}, 1, TALKS),
}
# fmt: on

# Unreadable data: file, its bytes, the message.
# fmt: off
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "marked turns, most of them empty": ("a.jsonl", each(lambda t: {"text":
        f"<|user|>\n{t[0]}\n<|assistant|>\n{t[1] if t == TALKS[0] else ''}"}),
        "contains marks of a chat template"),
    "numbers in lists": ("a.jsonl", each(lambda t: {"step": 1, "losses": [0.5], "sizes": [2]}),
        "and no sentence, so there may be nothing to train"),
    "names next to mails": ("a.json", dumped({"shops": [{"id": "s1", "name": "Ann"}], "mails": [
        {"sender": "a@b.c", "body": f"Dear Ann, {t[0]}"} for t in TALKS]}),
        "its rows are in 2 lists: 'shops', "),
    "ids of which some are images": ("a.jsonl", lines([{"id": f"{n}.jpg" if n % 3 == 0 else n,
        "image": f"{n}.jpg", "question": t[0], "answer": t[1]} for n, t in enumerate(TALKS)]),
        "12 of 12 rows contain images, audio or video in 'image'"),
    "lists of rows": ("a.json", dumped([named("question", "answer")[:6]] * 3),
        "lists of rows, which packhouse cannot read. Write all rows as one list"),
    "IDs and paths": ("a.jsonl", each(lambda t: {"id": "Q1", "path": "raw/Q1.json", "line": 5}),
        "'line' (a number) and no sentence, so there may be nothing to train."),
    "vectors": ("a.json", dumped([{f"{n}": n / 7 for n in range(1200)}] * 3),
        "1,200 fields; at most 1,000 are read). Write rows with fewer fields"),
    "marks of gpt-oss": ("a.jsonl", each(lambda t: {"input": f"<|start|>user<|message|>{t[0]}",
        "generated": t[1]}), "contains marks of a chat template"),
    "verdicts with counts": ("a.jsonl", each(lambda t: {"parsed": {"reason": t[1]}, "usage": {
        "tokens": 9}, "kind": "ab"}), "not clear which fields hold the question"),
    "columns without names": ("a.csv",
        "".join(f"{t.question},{t.answer}\n" for t in TALKS).encode(), "does not name the columns"),
    "labels without names": ("a.tsv",
        "".join(f"film {n}\t{('bad', 'good')[n % 2]}\n" for n in range(9)).encode(),
        "does not name the columns"),
    "a zip archive": ("a.zip", zipped(), "Unpack it"),
    "rows of Python": ("a.jsonl", b"{'question': 'Why?'}\n",
        "Python literals, not JSON. Write them with `json.dumps`"),
    "a table named like JSON": ("a.json", b"question\tanswer\nWhy?\tSo.\n",
        "--set file_format=FORMAT"),
    "texts with JSON in a list": ("a.json", dumped([json.dumps(row) for row in named("q", "a")]),
        "Write each as an object"),
    "an id that is called a label": ("a.jsonl", each(lambda t: {"prompt": t[0], "label_id": "l7"}),
        "but no answers"),
    "a few questions next to articles": ("a.json", dumped({"articles": [{"text": t[1]} for t in
        TALKS], "talks": named("question", "answer")[:3]}), "2 lists: 'articles', 'talks'"),
    "articles next to questions": ("a.json", dumped({"articles": [{"title": t[0], "text": t[1]} for
        t in TALKS[:6]], "talks": named("question", "answer")}), "2 lists: 'articles', 'talks'"),
    "rows in several lists": ("a.json", dumped({"of": {"Sums, small": named("question", "answer"),
        "Sums. Large": named("question", "answer", level=2)}}), "its rows are in 2 lists of 'of'"),
    "a comment before JSON": ("a.json", b"# one of them\n" + dumped(DIALOGS, indent=1),
        "Remove the comment"),
    "a comment between asterisks before JSON": ("a.json", b"/* one ** of */ " + dumped(DIALOGS,
        indent=1), "Remove the comment"),
    "a heading and a link": ("a.jsonl", b"# Title of it\n[link](a) is text\n",
        "no row of it can be read as jsonl"),
    "an empty line": ("a.jsonl", b"\n", "(it is empty). Pass a file with rows.\n"),
    "line breaks between rows as two characters": ("a.jsonl",
        lines(named("question", "answer")).replace(b"\n", b"\\n"), "is followed by \\n{"),
    "lists of texts": ("a.jsonl", lines([[*t] for t in TALKS]), "rows are lists without field"),
    "one object of pairs": ("a.json", dumped({f"Case_{n}": pair for n, pair in
        enumerate(named("prompt", "completion"))}), "the values of one object. Write them as a"),
    "a line before JSON": ("a.json", b"x\n" + dumped(named("prompt", "completion"), indent=2),
        "begins with a line that is not JSON: x. Remove this line"),
    "rows without their last fields": ("a.csv", b"Label,Raw," + table(
        named("Question", "Answer"), ","), "in quotes). Write every field of the header in each"),
    "names in preferred answers": ("a.jsonl", each(lambda t: {"chosen":
        f"Human: {t[0]}\nAssistant: {t[1]}", "rejected": f"Human: {t[0]}\nAssistant: No."}),
        "'chosen' contains marks of speakers"),
    "a prompt with marks, a question, and preferred answers": ("a.jsonl", each(lambda t: {"prompt":
        f"<|im_start|>user\n{t[0]}<|im_end|>\n<|im_start|>assistant\n", "question": t[0],
        "chosen": t[1], "rejected": "I do not know."}), "contains marks of a chat template"),
    "questions with images, and answers": ("a.jsonl", each(lambda t: {"messages": [{"role": "user",
        "content": IMAGE}], "answer": t[1]}), "end with a question. Write its answer as the last"),
    "keys that occur twice": ("a.jsonl", b'{"prompt": "a", "prompt": "b"}\n' * 9,
        "the key 'prompt' occurs twice"),
    "raw line breaks in texts": ("a.jsonl",
        b"".join(lines([{"prompt": t[0] + "#", "completion": t[1]}]) for t in TALKS).replace(
            b"#", b"\n"), "its texts contain raw line breaks"),
    "turns with marks": ("a.jsonl",
        each(lambda t: {"chat": f"[|Human|] {t.question}\n[|AI|] {t.answer}\n"}),
        "contains marks of speakers"),
    "videos next to messages": ("a.jsonl", each(lambda t: {"messages": chats_of(t),
        "videos": ["videos/1.mp4"]}), "Add --set media=drop_parts"),
    "preferred answers to what a template wrote": ("a.jsonl",
        each(lambda t: {"prompt": f"[INST] {t[0]} [/INST]", "chosen": t[1], "rejected": "?"}),
        "contains marks of a chat template"),
    "four columns without names": ("a.csv",
        "".join(f"one;2;{t.question};{t.answer}\n" for t in TALKS).encode(),
        "names its 4 columns, such as column1;column2;question;answer"),
    "quotes after spaces": ("a.csv", b'q,a\n' + b'Why?, "So, that is why."\n' * 9,
        "remove the spaces before quotes"),
    "quotes after spaces, in the place of another column": ("a.csv",
        b'q,a,b\n' + b'Why?, "So, that is why."\n' * 9, "remove the spaces before quotes"),
    "quotes after spaces, without commas": ("a.csv", b'q,a\n' + b'Why?, "That is why."\n' * 9,
        "remove the spaces before quotes"),
    "what a template wrote": ("a.jsonl",
        each(lambda t: {"text": f"[INST] {t[0]} [/INST] {t[1]} [INST] Thanks."}),
        "contains marks of a chat template"),
    "rows that are the values of an object": ("a.json",
        json.dumps({str(n): {"question": str(n)} for n in range(1001)}).encode(),
        "its rows are the values of one object"),
    "rows in a list of no answers": ("a.json", dumped({"tree": {"items": [{"name": t[0],
        "path": t[1], "kind": "file"} for t in TALKS]}}), "12 of 12 rows in 'tree.items' have"),
    "rows of one message": ("a.jsonl", each(lambda t: {"turn": 0, "role": "user",
        "content": t.question}), "each row is a single message"),
    "conversations without a last answer": ("a.jsonl",
        each(lambda t: {"text": f"### Human: {t[0]}### Assistant: {t[1]}### Human: Thanks."}),
        "Add --set validate.allow_ends_on_user=true"),
    "a shape that is asked about and one that is not": ("a.jsonl", lines([{"text": t[0],
        "type": "ab"[n % 2]} for n,
        t in enumerate(TALKS)]) + each(lambda t: {"messages": chats_of(t)}),
        "its rows have 2 shapes"),
    "labels of words": ("a.jsonl", each(lambda t: {"tokens": t.question.split(),
        "tags": ["O"] * len(t.question.split())}), "a label for each word"),
    "words with places of names": ("a.jsonl", each(lambda t: {"words": t.question.split(),
        "names": [[0, 1, "x"]]}), "a list of words in 'words'"),
    "texts by intent in one object": ("a.json",
        json.dumps({"intents": {"sum": [t.question for t in TALKS]}}).encode(),
        "Write one row per text"),
    "columns that have no name": ("a.csv", b"question,answer,,\nWhy?,For no reason,,\n",
        "2 columns have no name"),
    "questions without answers": ("a.jsonl", each(lambda t: {"question": t.question}),
        "Add a field with the answer"),
    "questions with ids and topics": ("a.jsonl", lines([{"question_id": n, "question": t.question,
        "topic": "ab"[n % 2]} for n, t in enumerate(TALKS)]), "but no answers. Add a field with"),
    "texts of an intent": ("a.jsonl", each(lambda t: {"intent": "sum", "examples": [t.question,
        f"Please: {t.question}"]}), "Write one row per text"),
    "pairs for an embedding model": ("a.jsonl", each(lambda t: {"anchor": t[0], "positive": t[1],
        "source": "The book of all the sums"}), "it is not clear which fields hold"),
    "texts of an intent and their answer": ("a.jsonl", each(lambda t: {"tag": "sum",
        "patterns": [t[0], f"Please: {t[0]}"], "response": f"Here is the answer to it: {t[1]}"}),
        "contain a list of texts in 'patterns'. Write one row per text"),
    "turns in two lists": ("a.jsonl", each(lambda t: {"client": [t[0], "Thanks!"],
        "shop": [t[1]]}), "of a conversation, one row with messages"),
    "words next to a short text": ("a.jsonl", each(lambda t: {"words": t.question.split(),
        "spans": [[0, 1, "a"]], "topic": "sums of two"}), "a list of words in 'words'"),
    "queries and passages": ("a.jsonl", each(lambda t: {"query": t[0], "positive": t[1],
        "why": "The passage says it."}), "it is not clear which fields hold"),
    "queries and lists of passages": ("a.jsonl", each(lambda t: {"query": t[0], "pos": [t[1]],
        "neg": [bad(t), "No."]}), "Write one row per text"),
    "translations with a score": ("a.jsonl", each(lambda t: {"reference": t[0],
        "hypothesis": t[1], "da": 0.5}), "it is not clear which fields hold"),
    "images next to objects": ("a.jsonl", each(lambda t: {"image": "iVBORw0KGgo=",
        "meta": {"instruction": f"Please: {t[0]}"}, "label": {"answer": t[1]}}),
        "contain images, audio or video in 'image'. Add --set media=drop_parts"),
    "images in messages": ("a.jsonl", each(lambda t: {"messages": [{"role": "user",
        "content": IMAGE}, *messages_of("assistant", t[1])]}),
        "Add --set media=drop_parts to train their text without images, audio and video"),
    "videos alone": ("a.jsonl", each(lambda t: {"video": f"videos/{len(t[0])}.mp4", "frame": 3}),
        "media and no text"),
    "keys that differ in each row": ("a.jsonl", lines([{f"{n}": [t.question, t.answer]} for n,
        t in enumerate(TALKS)]), "Write one row per text"),
    "how alike two texts are": ("a.jsonl", each(lambda t: {"text1": t.question, "text2": t.answer,
        "similarity": 0.5}), "it is not clear which fields hold"),
    "a question alone": ("a.jsonl", each(lambda t: {"body": {"messages": messages_of("user",
        t.question)}}), "it is not clear which fields hold"),
    "prompts in messages next to a system prompt": ("a.jsonl", each(lambda t: {
        "system_prompt": "You are good at sums.", "tools": "[]",
        "messages": [{"from": "human", "value": t.question}]}), "Add a field with the answer"),
    "calls whose results have no answer": ("a.jsonl", each(lambda t: {"messages": [
        *messages_of("user", t[0]), {"role": "assistant", "tool_calls": [{"function":
        {"name": "sum", "arguments": {}}}]}, *messages_of("tool", t[1])]}),
        "Remedy: add the answer, or end with the call"),
    "questions in messages next to what judges their answers": ("a.jsonl", each(lambda t: {
        "messages": messages_of("user", f"Please tell me: {t[0]}"), "about": "It is good at sums.",
        "rubric": f"Is it {t[1]}? Then it is good."}), "Add a field with the answer"),
    "empty answers to instructions with an object": ("a.jsonl", each(lambda t: {
        "instruction": "Please write the sum", "input": {"sum": t[0]}, "output": None}),
        "it has no answers: 'output' has no words in any row"),
    "one empty row": ("a.jsonl", lines([{"source": "", "target": ""}]),
        "it has no answers: 'target' has no words in any row"),
    "one object of questions": ("a.json", dumped({f"What about {t[0]}": t[1] for t in TALKS[:4]}),
        "If its names are questions and its values answers, write a row for each"),
    "papers with authors and judgements": ("a.jsonl", each(lambda t: {"title": f"About {t[0]}",
        "abstract": f"We ask: {t[0]}", "authors": ["Ann Bell", "Carl Dee"], "relevance": {"why":
        f"It says {t[1]}", "level": f"It is {t[1]}"}, "history": [{"by": "Sent by the author"}]}),
        "name the fields:"),
    "one row with a mark as its answer": ("a.jsonl", lines([{"question": "What is kept?",
        "reference_answer": "...", "doc_ids": ["<uuid1>"]}]),
        "it has no answers: 'reference_answer' has no words in any row"),
    "one row with an empty completion": ("a.csv", b"prompt,completion\nSum up:,\n",
        "it has no answers: 'completion' has no words in any row"),
    "one row of a log": ("a.jsonl", lines([{"event": "start", "time": 1.5, "gpus": [8, 9],
        "host": "The first machine of the lab"}]), "it is not clear which fields hold"),
    "results without calls in lists of messages": ("a.jsonl", lines([{"prompt": [
        *messages_of("user", t[0]), *[*messages_of("assistant", "I look it up."),
        *messages_of("tool", t[1])][:n % 2 * 2]], "completion": messages_of("assistant", t[1])}
        for n, t in enumerate(TALKS)]), "Remedy: add the call, or remove the result"),
    "a system prompt and a question": ("a.jsonl", each(lambda t: {"messages": [*messages_of(
        "system", "Add."), *messages_of("user", t.question)]}), "Add a field with the answer"),
}
# fmt: on


class Project:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, *arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, arguments)
        return result.exit_code, result.output

    def init(self, *data: str) -> tuple[int, str]:
        return self.call("init", *data, "--tokenizer", str(TOKENIZER), "--yes")

    def choose(self, said: str, number: int = 1) -> tuple[int, str]:
        commands = [line for line in said.splitlines() if line.startswith("packhouse init ")]
        return self.call(*shlex.split(commands[number - 1])[1:], "--yes")

    def prepare(self) -> list[Talk]:
        """Prepare the recipe and return question and answer of each record, in any order."""
        code, said = self.call("prepare", "recipe.yaml")
        assert code == 0, said
        dataset = yaml.safe_load(Path("recipe.yaml").read_text())["dataset"]
        version = open_version(f"store/{dataset}")
        assert version.quarantined.num_rows == 0
        found = []
        for row in version.train:
            start = 0
            for size in row["seq_lengths"]:
                ids = row["input_ids"][start : start + size]
                labels = row["labels"][start : start + size]
                trained = [label for label in labels if label != -100]
                prompt = [i for i, label in zip(ids, labels, strict=True) if label == -100]
                found.append(Talk(text_of(prompt), text_of(trained)))
                start += size
        return found

    def read(self) -> list[Talk]:
        """Read and render the rows of the recipe like `prepare`, and publish nothing."""
        recipe = load_recipe("recipe.yaml")
        (source,) = recipe.sources
        (shard,) = scan_source(source)
        rows = read_shard(shard, source, recipe.validate_, recipe.split.group_by)
        snapshot = load_snapshot(TOKENIZER)
        renderer = make_renderer(recipe.format, snapshot, source.label_names)
        done = renderer.render(rows.validated)
        assert rows.quarantined.num_rows == done.quarantined.num_rows == 0
        found = []
        for row in tokenize_table(done.formatted, snapshot, recipe.tokenize).tokenized.to_pylist():
            spans, ids = row["trained_ranges"], row["input_ids"]
            answers = [text_of(ids[span["start"] : span["end"]]) for span in spans]
            found.append(Talk(text_of(ids[: spans[0]["start"]]), " ".join(answers)))
        return found


def text_of(ids: list[int]) -> str:
    tokenizer = load_tokenizer(load_snapshot(TOKENIZER).backend)
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PACKHOUSE_CACHE", str(home / "cache"))
    return Project(home)


def check(found: list[Talk], expected: list[Talk]) -> None:
    assert len(found) == len(expected)
    assert sorted(t.answer.strip() for t in found) == sorted(t.answer for t in expected)
    answer_of = {t.answer: t.question for t in expected}
    for prompt, answer in found:
        assert answer_of[answer.strip()] in prompt
        assert answer.strip() not in prompt


@pytest.mark.parametrize("name", RIGHT)
def test_init_and_prepare_read_a_file_as_it_was_meant(name, project):
    file, data, *others = RIGHT[name]
    if file.endswith(".xlsx"):
        pytest.importorskip("python_calamine")
    Path(file).write_bytes(data)

    code, said = project.init(file)

    assert code == 0, said
    check(project.read(), *others or [TALKS])
    assert "trained (green)" in said


@pytest.mark.parametrize("name", ASKED)
def test_nothing_is_written_where_rows_can_be_read_in_several_ways(name, project):
    row, number, expected = ASKED[name]
    of = CHINESE if "without spaces" in name else TALKS
    Path("a.jsonl").write_bytes(lines([row(n, talk) for n, talk in enumerate(of)]))

    code, said = project.init("a.jsonl")

    assert (code, Path("recipe.yaml").exists()) == (7, False), said
    code, said = project.choose(said, number)
    assert code == 0, said
    found = project.read()
    if "choices" in name:  # the answer is in the question too
        assert sorted(t.answer for t in found) == sorted(t.answer for t in expected)
    else:
        check(found, expected)


def test_the_winner_of_two_answers_in_a_table_leaves_out_ties(project):
    rows = [
        {
            "prompt": t[0],
            "response_a": (bad(t), t[1])[n % 2],
            "response_b": (t[1], bad(t))[n % 2],
            "winner_a": n % 2,
            "winner_b": 1 - n % 2,
            "winner_tie": 0,
        }
        for n, t in enumerate(TALKS)
    ]
    rows += [row | {"winner_a": 0, "winner_b": 0, "winner_tie": 1} for row in rows[:3]]
    Path("a.csv").write_bytes(table(rows, ","))
    _, said = project.init("a.csv")

    code, said = project.choose(said)

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_field_whose_name_tells_one_side_is_no_number_of_the_better_answer(project):
    rows = [
        {"prompt": t[0], "response_a": t[1], "response_b": bad(t), "is_a_better": n % 2}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "the better answer" not in said


def test_the_number_of_a_choice_is_no_answer_without_the_choices(project):
    rows = [
        {"question": t[0], "choices": ["so", t[1]], "answer": n % 2} for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "of the choice" in said
    assert "leaves out choices" not in said


def test_better_and_worse_texts_without_a_prompt_are_no_preference(project):
    rows = [{"anchor": t[0], "positive": t[1], "negative": bad(t)} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "preference" not in said


def test_true_and_false_answer_a_question_about_a_passage(project):
    rows = [
        {"question": "Is it?", "answer": n % 3 > 0, "passage": t[0]} for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))
    code, said = project.init("a.jsonl")
    assert code == 7, said
    assert "there is nothing to train." in said  # such as in the results of an evaluation

    project.choose(said)

    read = sorted((prompt.count(t[0]), said) for prompt, said in project.read() for t in TALKS)
    assert [said for is_in, said in read if is_in] == ["false"] * 4 + ["true"] * 8


MAY_MATTER = {
    "is_safe (true or false)": lambda n, t: {"is_safe": n % 2 == 0},
    "label (numbers)": lambda n, t: {"label": n % 2},
    "score (numbers)": lambda n, t: {"score": n % 2},
    "verdict (2 different short values)": lambda n, t: {"verdict": ["pass", "fail"][n % 2]},
    "numbers (short values)": lambda n, t: {"numbers": f"{n} {n}"},
    "cells (objects with little or no text)": lambda n, t: {"cells": {"a": [n], "b": [2 * n]}},
    "of (lists with little or no text)": lambda n, t: {"of": [{"is": "a"}, {"is": "b"}]},
    "correct_id (numbers)": lambda n, t: {"correct_id": n % 4},
    "is_train (true or false)": lambda n, t: {"is_train": n != 3},
    "dialogue_id (4 different short values)": lambda n, t: {"dialogue_id": f"d{n // 3}"},
    "category (2 different short values)": lambda n, t: {"category": ["safe", "unsafe"][n % 2]},
    "metadata ('is_correct' in it has 2 different values)": lambda n, t: {
        "metadata": {"is_correct": n % 3 > 0, "source": "sums"}
    },
    "unit (1 different short value)": lambda n, t: {"unit": "sums(a INT)"},
}


@pytest.mark.parametrize("left_out", MAY_MATTER)
def test_a_field_whose_name_does_not_explain_it_is_asked_about(left_out, project):
    rows = [
        {"prompt": t[0], "response": t[1]} | MAY_MATTER[left_out](n, t) for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, Path("recipe.yaml").exists()) == (7, False), said
    assert f"leaves out {left_out}" in said


def test_fields_whose_names_explain_them_are_ignored(project):
    more = [
        {"source": "sums", "url": f"of/{n}", "category": "ab"[n % 2], "quality_score": n / 7}
        | {"n_tokens": n, "created_at": f"2024-{n}", "conversation_id": f"c{n}", "kind": 1}
        for n in range(len(TALKS))
    ]
    rows = [row | each for row, each in zip(named("prompt", "response"), more, strict=True)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_flag_that_is_rarely_true_is_asked_about(project):
    rows = [
        {"prompt": f"{n} + 1?", "response": f"It is {n + 1}.", "is_harmful": n == 1234}
        for n in range(3000)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "leaves out is_harmful (true or false)" in said) == (7, True), said


def test_plain_texts_do_not_share_a_prompt(project):
    rows = [
        {"text": t.answer, "url": f"of/{n}", "lang": "en-fr"[n % 5]} for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said


def test_two_rows_with_two_numbers_have_no_verdict(project):
    rows = [row | {"n_tokens": n} for n, row in enumerate(named("prompt", "response")[:2])]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said


def test_a_field_that_tells_rows_with_the_same_prompt_apart_is_asked_about(project):
    rows = [
        {"prompt": "Add this to itself.", "topic": f"of {n}", "response": t[1]}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "leaves out topic (" in said) == (7, True), said


@pytest.mark.parametrize("key", ["mask", "trainable"])
def test_flags_of_messages_that_nothing_reads_are_asked_about(key, project):
    flags = (True, False) if key == "trainable" else (1, 0)
    talks = [[said | {key: flags[n % 2]} for said in chats_of(t)] for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines([{"messages": talk} for talk in talks]))

    code, said = project.init("a.jsonl")

    assert (code, f"leaves out messages[].{key} (true or false)" in said) == (7, True), said


def test_flags_of_messages_that_are_weights_are_not_asked_about(project):
    talks = [[*chats_of(t), *chats_of(t)] for t in TALKS]
    talks = [[said | {"weight": int(n > 1)} for n, said in enumerate(talk)] for talk in talks]
    Path("a.jsonl").write_bytes(lines([{"messages": talk} for talk in talks]))

    code, said = project.init("a.jsonl")

    assert code == 0, said


def test_a_flag_that_only_bad_rows_have_is_not_left_out_without_a_question(project):
    rows = [
        row | ({"unsafe": True} if n % 2 else {})
        for n, row in enumerate(named("prompt", "response"))
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code != 0
    assert "'unsafe' (true or false) would be left out" in " ".join(said.split())


@pytest.mark.parametrize("written", [str, json.dumps])
def test_lists_written_into_a_table_are_asked_about(written, project):
    rows = [{"question": t[0], "answer": written([t[1]])} for t in TALKS]
    Path("b.tsv").write_bytes(table(rows, "\t"))

    code, said = project.init("b.tsv")

    assert (code, Path("recipe.yaml").exists()) == (7, False), said


def test_marks_in_place_of_images_are_refused(project):
    Path("a.jsonl").write_bytes(each(lambda t: {"prompt": f"<image>\n{t[0]}", "response": t[1]}))

    code, said = project.init("a.jsonl")

    assert code not in (0, 7), said
    assert "12 of 12 examples contain <image>, which looks like a mark" in " ".join(said.split())


@pytest.mark.parametrize(
    "row",
    [
        lambda n, t: {"options": [t[1], bad(t)], "answer": (-1, 0, 1)[n % 3]},
        lambda n, t: {"options": {"text": [t[1], bad(t)], "label": ["B", "A"]}, "answer": "A"},
        lambda n, t: {"options": [t[1], bad(t)], "answer": ("A", "0", "B")[n % 3]},
        lambda n, t: {"options": [{"text": t[1]}, None], "answer": 1},
        lambda n, t: {"options": [{"text": t[1]}, bad(t)], "answer": 1},
    ],
)
def test_choices_whose_order_or_number_is_unclear_are_not_offered(row, project):
    Path("a.jsonl").write_bytes(
        lines([{"question": t[0]} | row(n, t) for n, t in enumerate(TALKS)])
    )

    code, said = project.init("a.jsonl")

    assert (code, "of the choice" in said) == (7, False), said


def test_rows_with_over_200_sets_of_keys_are_looked_at(project):
    rows = [{"question": t[0], "answer": t[1]} for t in TALKS]
    rows += [{"question": f"{n} + 1?", f"f{n}": f"It is {n + 1}, I think."} for n in range(300)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, _ = project.init("a.jsonl")

    assert (code, Path("recipe.yaml").exists()) != (0, True)


def test_choices_in_fields_are_sorted_by_their_letters(project):
    rows = [
        {"question": t[0], "option_b": bad(t), "option_a": t[1], "answer": "aA"[n % 2]}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")
    assert code == 7
    project.choose(said, 2)

    assert sorted(t.answer for t in project.read()) == sorted(t.answer for t in TALKS)


def test_times_of_messages_in_parquet_are_no_flags(project):
    said = [[each | {"at": datetime(2024, 1, 1)} for each in chats_of(t)] for t in TALKS]
    Path("a.parquet").write_bytes(parquet([{"messages": talk} for talk in said]))

    code, said = project.init("a.parquet")

    assert code == 0, said


def test_a_field_that_only_one_of_several_shapes_has_is_left_out_as_advised(project):
    rows = [{"prompt": t[0], "response": t[1], "stars": 1 + n % 5} for n, t in enumerate(TALKS[:6])]
    rows += [{"messages": chats_of(t)} for t in TALKS[6:]]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")
    (option,) = re.findall(r"add --set '([^']*)'", " ".join(said.split()))
    assert code not in (0, 7)
    code, said = project.init("a.jsonl", "--set", option)

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_part_of_an_object_is_read_with_the_setting_that_the_error_names(project):
    Path("a.jsonl").write_bytes(each(lambda t: {"talk": {"ask": t[0]}, "say": t[1]}))
    fields = {"question": "talk.ask", "answer": "say"}
    set_format = ["--set", "format=question_answer"]

    code, said = project.init("a.jsonl", *set_format, "--set", f"fields={json.dumps(fields)}")

    assert code == 3
    assert f"use `select` in place of `fields`: {json.dumps(fields)}" in said
    code, _ = project.init("a.jsonl", *set_format, "--set", f"select={json.dumps(fields)}")
    assert code == 0
    check(project.read(), TALKS)


def test_a_context_that_is_the_same_tag_in_all_rows_is_ignored(project):
    rows = [{"raw_words": t[0], "clean_words": t[1], "context": "sums"} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "context: text; ignored" in said
    assert "raw_words (prompt), clean_words (completion)" in said


@pytest.mark.parametrize(
    ("row", "command"),
    [
        (lambda n, t: {"text": t.question, "intent": "ab"[n % 2]}, "format=classification"),
        (lambda n, t: {"text": t.question, "entities": [{"start": n, "label": "a"}]}, "text"),
        (lambda n, t: {"text": t.question, "category": "ab"[n % 2]}, "format=classification"),
        (lambda n, t: {"content": t.question, "keep": n % 2 == 0}, '["false", "true"]'),
        (lambda n, t: {"prompt": t.question, "label": n % 2}, 'label_names=["0", "1"]'),
        (
            lambda n, t: {"brief": t[0], "why": f"{n} is it.", "chosen": t[1], "rejected": bad(t)},
            "format=preference",
        ),
        (lambda n, t: {"heard": t.question, "mood": "ab"[n % 2]}, "format=classification"),
        (lambda n, t: {"text": f"<bos>{t.question}\n<eos>"}, "regexp_replace"),
        (
            lambda n, t: {"text": f"## Ask: {t[0]}\n## Say: {t[1]}\n## Ask: Why?\n## Say: So."},
            "Only one way to read these rows was found, and it may be wrong",
        ),
        (
            lambda n, t: {"prompt": f"### Ask:\n{t[0]}\n### Response:", "completion": t[1]},
            "template=completion",
        ),
        (
            lambda n, t: {"prompt": f"### Q: {t[0]} ### A: ", "chosen": t[1], "rejected": bad(t)},
            "template=completion",
        ),
        (
            lambda n, t: {"prompt": f"Add it.\nAsk: {t[0]}\n\nSay:", "completion": t[1]},
            "template=completion",
        ),
        (
            lambda n, t: {"prompt": t[0] + ("\n\nSay:", "\nGo on.")[n % 2], "completion": t[1]},
            "template=completion",
        ),
        (
            lambda n, t: {"prompt": f"Q: {t[0]}\nTom: Ah.\nQ: Yes?", "completion": f"Tom: {t[1]}"},
            "template=completion",
        ),
        (
            lambda n, t: {"prompt": t[0], "completion": ("No", "Yes")[n % 2], "label": n % 2 == 1},
            "--set format=prompt_completion\n",  # all rows: the answer tells the label
        ),
        (
            lambda n, t: {
                "user_task": t[0],
                "page": f"{n} people of {2 * n} saw no {n}{n} here",
                "target": t[1],
                "safety_rationale": f"The text of page {n} has no command.",
            },
            "page (context)",
        ),
        (lambda n, t: {"tokens": [n, 7, 8], "mask": [0, 1, 1], "kind": "a"}, "format=tokenized"),
        (
            lambda n, t: {"prompt": f"{t[0]}\n\n###\n\n", "completion": f" {t[1]} END", **notes(n)},
            "prompt, without separators",
        ),
        (
            lambda n, t: {"question": t[0], "answer": t[1], "split": HALVES[n % 2], **notes(n)},
            "2 ways",
        ),
        (
            lambda n, t: {"query": t[0], "summary": t[1], "target": None, "why": f"Note {n} on it"},
            "summary (",
        ),
        (
            lambda n, t: {"messages": chats_of(t), "answer": None, "split": HALVES[n % 2]},
            "2 ways",
        ),
        (
            lambda n, t: {"text": f"{t[0]}\n\n# Ingredients:\nsalt\n\n# Steps:\n{t[1]}"},
            "1. text (text)\n",
        ),
        (
            lambda n, t: {"text": f"Hi.\n### Bot:\n{t[1]}" + "\n### User:\nThanks." * (n % 4 == 0)},
            "Only one way to read these rows was found, and it may be wrong",
        ),
    ],
)
def test_ambiguous_rows_are_not_trained_without_a_choice(row, command, project):
    Path("a.jsonl").write_bytes(lines([row(n, talk) for n, talk in enumerate(TALKS)]))

    code, said = project.init("a.jsonl")

    assert (code, command in said) == (7, True), said


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_data_is_reported(name, project):
    file, data, says = REFUSED[name]
    Path(file).write_bytes(data)

    code, said = project.init(file)

    assert (code, says in said) == (3, True), said
    assert not Path("recipe.yaml").exists()


def test_a_category_next_to_rows_of_several_shapes_is_ignored(project):
    topics = [f"Sums of numbers, part {n % 2} of them" for n in range(len(SHAPES))]
    rows = [row | {"topic": topic} for row, topic in zip(SHAPES, topics, strict=True)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "would reject" in said) == (0, False), said
    (source,) = yaml.safe_load(Path("recipe.yaml").read_text())["sources"]
    assert (source["format"], source["ignored_fields"]) == ("mixed", ["id", "topic"])
    check(project.prepare(), TALKS)


@pytest.mark.parametrize("answer", [str, lambda text: {"is": text}])
@pytest.mark.parametrize("page", [str, lambda text: [text]])
def test_rows_for_tests_stay_out_if_a_context_is_read(answer, page, project):
    rows = [
        {"split": ["train", "test"][n % 4 == 0], "ask": t.question, "response": answer(t.answer)}
        | {"page": page(f"This page is about sum {n}")}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    ways = [" ".join(way.split()) for way in re.split(r"\n(?=\d\. )", said)[1:]]
    assert any("page (context)" in way for way in ways), said
    for way in ways:
        assert ("split: train alone" in way) == ("where=" in way), way


def test_texts_in_one_object_may_be_turns(project):
    posts = [{"author": "ab"[n % 2], "content": " ".join(t)} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines([{"title": "Sums", "posts": posts}]))

    code, said = project.init("a.jsonl")

    assert (code, Path("recipe.yaml").exists()) == (7, False), said


def test_signs_without_width_are_no_separator(project):
    rows = [
        {"text": f"About {t.question}", "marked": f"{t.answer}\u200d\u200d\u200d"} for t in TALKS
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "separators" not in said


def test_a_label_with_its_name_is_offered_as_a_class(project):
    rows = [{"sentence": t[0], "label_name": "ab"[n % 2]} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "sentence (text), label_name (label)" in said


def test_classes_of_questions_are_offered_before_answers(project):
    rows = [{"query": t[0], "intent": ("sum", "add")[n % 2]} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    assert said.index("format=classification") < said.index("format=prompt_completion"), said


def test_labels_of_several_words_do_not_ask(project):
    Path("a.jsonl").write_bytes(lines(pairs("input", "label", TALKS)))

    code, said = project.init("a.jsonl")

    assert (code, "label (prompt)" in said) == (7, False), said


def test_fields_of_rows_that_are_not_read_are_not_called_repeats(project):
    rows = [{"v1": t.question, "v2": t.answer} for t in TALKS]
    asked = [f"Please tell me, my friend: {t.question}" for t in TALKS[::3]]
    rows[::3] = [{"said": text, "result": {"reply": "I do not know."}} for text in asked]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    assert "said: text, in 4 rows; not read, in rows without the fields that are read" in said


def test_the_only_way_has_a_command_although_the_template_refuses_it(project):
    # Of file 946, the advice needed a recipe, and nothing led to one.
    thinks = {"role": "assistant", "reasoning_content": "3 more than 3.", "content": "It is 6."}
    about = {"about": {"what": "The first sum is about 3 and 3."}}
    talk = {"messages": [*messages_of("user", "What is 3 plus 3?"), thinks], **about}
    Path("talks.jsonl").write_bytes(lines([talk]))

    code, said = project.init("talks.jsonl")

    assert (code, said.count("packhouse init ")) == (7, 1)
    printed = " ".join(said.split())
    assert "refuse the recipe: the tokenizer's chat template never writes reasoning" in printed
    assert "but talks/talks.jsonl row 0 has some" in printed
    code, said = project.choose(said)
    assert code == 0, said
    assert project.call("prepare", "recipe.yaml")[0] != 0
    code, said = project.call("prepare", "recipe.yaml", "--set", "format.reasoning=strip")
    assert code == 0, said


def test_marked_turns_that_are_empty_in_some_rows_are_read_and_named(project):
    texts = [f"<|user|>\n{t[0]}\n<|assistant|>\n{t[1]}" for t in TALKS]
    texts[::4] = [f"{text}\n<|user|>\n\n<|assistant|>" for text in texts[::4]]
    Path("a.jsonl").write_bytes(lines([{"text": text} for text in texts]))

    code, said = project.init("a.jsonl")
    assert code == 7, said
    code, said = project.choose(said)

    assert code == 0, said
    assert "3 of 12 rows (25.00%) are bad (empty_prompt 3)" in " ".join(said.split()), said


def test_texts_with_one_label_are_no_conversation(project):
    rows = [{"text": f"Note: {t[0]}\nNote: {t[1]}"} for t in TALKS]
    Path("notes.jsonl").write_bytes(lines(rows))

    code, said = project.init("notes.jsonl")

    assert (code, "without the names of their speakers" in said) == (0, False), said


@pytest.mark.parametrize(
    "mark", ["{{NAME}}", "<<NO PROMPT>>", "<extra_id_1>", "<channel|>", "</think>"]
)
def test_marks_that_a_program_should_have_replaced_are_refused_unless_meant(mark, project):
    # Of files 995, 999, 1092 and 1139, such marks were trained without a word.
    expected = [Talk(t[0], t[1] + mark * (n % 3 == 0)) for n, t in enumerate(TALKS)]
    rows = [{"ask": t[0], "reply": t[1], "id": f"{mark} {n}"} for n, t in enumerate(expected)]
    Path("asked.jsonl").write_bytes(lines(rows))

    code, said = project.init("asked.jsonl")

    assert (code, Path("recipe.yaml").exists()) == (3, False), said
    assert f"4 of 12 examples contain {mark}" in said
    options = shlex.split(said.partition("meant to be trained, add ")[2])
    code, said = project.init("asked.jsonl", *options)
    assert (code, f"note: 4 of 12 examples contain {mark}" in said) == (0, True), said
    check(project.read(), expected)


@pytest.mark.parametrize(
    ("parts", "mark"),
    [(("{}", "{} ####"), "12 of 12 examples contain ####"), (("user: {}", "Ann: {}"), "'Ann'")],
)
def test_names_and_stop_marks_in_messages_are_refused_unless_meant(parts, mark, project):
    # Of files 1311 and 1313, they were trained without a word.
    expected = [Talk(parts[0].format(t[0]), parts[1].format(t[1])) for t in TALKS]
    Path("asked.jsonl").write_bytes(lines([{"messages": chats_of(t)} for t in expected]))

    code, said = project.init("asked.jsonl")

    assert (code, mark in said) == (3, True), said
    options = shlex.split(said.partition("meant to be trained, add ")[2])
    assert project.init("asked.jsonl", *options)[0] == 0
    check(project.read(), expected)


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        ("Question: {}", "Answer: {}"),
        ("Me: {}", "Step 1: {}"),
        ("Q: {}", "https://a.org/{}"),
        ("{}", "{} <!-- end -->"),
        ("{}", "BEGIN {} END"),
    ],
)
def test_labels_addresses_and_code_are_no_names_and_stop_marks(asks, says, project):
    rows = [{"messages": chats_of(Talk(asks.format(t[0]), says.format(t[1])))} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said


def test_the_order_of_fields_makes_no_other_shape(project):
    rows = [{"question": t[0], "answer": t[1], "id": n} for n, t in enumerate(TALKS)]
    rows = [dict([*row.items()][:: 1 - 2 * (n % 2)]) for n, row in enumerate(rows)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "different sets of fields" in said) == (0, False), said


def test_images_are_counted_in_rows_of_any_shape(project):
    rows = [
        {"ask": t[0], "answer": t[1], "image": f"{n}.jpg", "seen": ["x"] * (n % 2)}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "12 of 12 rows contain images" in said) == (3, True), said


def test_records_that_no_proposed_pack_can_hold_are_counted(project):
    rows = [
        {"question": t[0], "answer": t[1] + 40_000 * " so" * (n == 7)} for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "note: 1 record is longer than `pack.seq_len`" in said) == (0, True), said


@pytest.mark.parametrize("asks", ["prompt", "input"])
def test_a_list_in_the_only_prompt_or_its_answer_holds_no_rows(asks, project):
    steps = {"name": "sums", "steps": [{"name": "Read both numbers"}, {"name": "Add them up"}]}
    row = {"prompt": "How do you add?", "output": steps}
    row = row if asks == "prompt" else {"input": steps, "output": "So you add both numbers."}
    Path("a.jsonl").write_bytes(lines([row]))

    code, said = project.init("a.jsonl")

    assert (code, "1 row\n" in said, "rows_at" in said) == (7, True, False), said


def test_messages_that_are_empty_in_all_rows_are_named(project):
    Path("a.jsonl").write_bytes(lines([{"id": n, "messages": []} for n in range(3)]))

    code, said = project.init("a.jsonl")

    assert (code, "no answers: 'messages' has no words in any row" in said) == (3, True), said


ADD = {"name": "add", "arguments": {"a": 1}}


def test_a_conversation_over_a_megabyte_is_a_row(project):
    # Of the only row of file 1271, the messages were taken for rows.
    talk = [turn for t in TALKS for turn in chats_of(t)]
    for turn in talk[::2]:
        turn["content"] += " very" * 30_000
    Path("a.jsonl").write_bytes(lines([{"messages": talk}]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    (source,) = yaml.safe_load(Path("recipe.yaml").read_text())["sources"]
    assert source == {"path": "a.jsonl", "format": "chat"}


def test_prompts_may_name_the_tag_that_ends_reasoning(project):
    rule = {"role": "system", "content": "Do not write `</think>`."}
    Path("a.jsonl").write_bytes(lines([{"messages": [rule, *chats_of(t)]} for t in TALKS]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    check(project.read(), TALKS)


def test_objects_as_contents_do_not_lose_the_calls_of_other_messages(project):
    # Read as JSON, with `role` and `content` alone, these messages would lose their calls.
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": ADD}]}
    rows = [
        {"messages": [chats_of(t)[0], call, {"role": "tool", "content": {"n": n}}, chats_of(t)[1]]}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "message 2: content is an object, not text" in said) == (3, True), said


def test_a_ground_truth_may_be_the_answer(project):
    # Of file 949, only the replies of a tested model were offered.
    rows = [{"question": t[0], "ground_truth": t[1], "answer": f"I guess: {t[1]}"} for t in TALKS]
    Path("asked.jsonl").write_bytes(lines(rows))

    _, said = project.init("asked.jsonl")
    project.choose(said, 2)

    check(project.read(), TALKS)


def test_the_advice_joins_several_fields_and_parts_of_objects_with_sql(project):
    rows = [
        {"sym": f"It hurts, {t.question}", "order": f"Note on {t.question}", "reply": t.answer}
        | {"about": {"who": f"my mother {n}"}}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")
    advised = re.search(r"select='(.*?)'", " ".join(said.split()))
    assert advised, said
    assert r"\"FIELD\" for a name that SQL reserves" in " ".join(said.split())
    parts = advised[1].replace("FIELD.NAME", "about.who").replace("FIELD, ", 'sym, \\"order\\", ')
    select = parts.replace('"answer": "FIELD"', '"answer": "reply"')
    code, said = project.init(
        "a.jsonl", "--set", "format=question_answer", "--set", f"select={select}"
    )

    assert code == 0, said
    asked = f"{rows[0]['sym']}\n{rows[0]['order']}\nmy mother 0"
    assert asked in said, said


def test_paths_and_guesses_that_leave_out_most_texts_are_not_offered(project):
    rows = [
        {"clip": f"/home/ann b/{n}.mp3", "heard": t.answer, "title": f"The title of {t.question}"}
        | {name: f"Here is {name} {n} of all" for name in ("poet", "land", "time")}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "audio or video in 'clip'. Add --set media=drop_parts" in said) == (3, True), said
    code, said = project.init("a.jsonl", "--set", "media=drop_parts")
    assert (code, "name the fields: - a question" in " ".join(said.split())) == (3, True), said
    fields = '{"question": "title", "answer": "heard"}'
    named = ("--set", "format=question_answer", "--set", f"fields={fields}")
    code, said = project.init("a.jsonl", "--set", "media=drop_parts", *named)
    assert code == 0, said


@pytest.mark.parametrize(
    "clip",
    ["data/images/a plot.png", [{"video": "/data/a.mp4", "start": 0}]],
    ids=["space", "object"],
)
def test_marks_of_media_are_removed_as_advised(project, clip):
    rows = [{"messages": chats_of(Talk(f"<video>\n{t[0]}", t[1])), "clip": clip} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))
    code, said = project.init("a.jsonl")
    assert (code, "Add --set media=drop_parts" in said) == (3, True), said

    code, said = project.init("a.jsonl", "--set", "media=drop_parts")

    assert code == 0, said
    found = project.read()
    check(found, TALKS)
    assert not any("<video>" in prompt for prompt, _ in found)


@pytest.mark.parametrize("given", [(), ("--set", "rows_at=of.rows")], ids=["found", "given"])
def test_texts_next_to_the_rows_are_named(project, given):
    Path("a.json").write_bytes(dumped(DEEP | {"system": "Answer in one short sentence.", "n": 1}))

    code, said = project.init("a.json", *given)

    assert (code, "12 rows; not read: system, next to the rows" in said) == (0, True), said
    check(project.read(), TALKS)


@pytest.mark.parametrize("path", ["of.n.rows", "of.rows.question", "rows"])
def test_a_wrong_path_of_rows_is_refused(project, path):
    data = DEEP if path != "rows" else named("question", "answer")
    Path("a.json").write_bytes(dumped(data))

    code, said = project.init("a.json", "--set", f"rows_at={path}")

    assert (code, "no JSON object with a list in field" in " ".join(said.split())) == (3, True), (
        said
    )


def test_the_messages_of_a_log_are_not_trained_without_a_choice(project):
    rows = [{"chat_id": n % 3, "message_id": n, "text": t.question} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "Only one way" in said) == (7, True), said


def test_the_row_with_the_most_tokens_is_among_the_examples(project):
    rows = [{"question": f"Why {n}?", "answer": "word " * (1200 + n % 9)} for n in range(1500)]
    rows[701]["answer"] = "3 1 4 1 5 " * 400
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    (most,) = re.findall(r"including the longest texts: .*maximum ([\d,]+)", " ".join(said.split()))
    tokenizer = load_tokenizer(load_snapshot(TOKENIZER).backend)
    num_tokens = [len(tokenizer.encode(rows[n]["answer"]).ids) for n in (701, 800)]
    assert int(most.replace(",", "")) > num_tokens[0] > 1.5 * num_tokens[1]


@pytest.mark.parametrize("end", ["$\\boxed{4}$.", "**Answer**.", "**{}**"])
def test_ends_of_formulas_and_bold_texts_are_no_marks(project, end):
    Path("a.jsonl").write_bytes(
        lines(named("prompt", "completion")).replace(
            b'."}', json.dumps(f" {end}")[1:].encode() + b"}"
        )
    )

    code, said = project.init("a.jsonl")

    assert code == 0, said


@pytest.mark.parametrize("run", ["-" * 89, " " * 3000, "\n" * 3000, "### A:\n" * 999], ids=repr)
def test_long_runs_of_signs_take_no_longer_than_other_texts(project, run):
    rows = [named("prompt", "completion")[n] | {"prompt": f"{run}{n}?"} for n in range(12)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said  # patterns that backtrack would need minutes or days


def test_rows_that_all_have_images_cannot_all_be_left_out(project):
    rows = [{"messages": [{"role": "user", "content": IMAGE}, *chats_of(t)[1:]]} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl", "--set", "media=drop_rows")

    assert (code, "Use media=drop_parts" in said) == (3, True), said


def test_invalid_escapes_in_every_row_are_named_and_fixed_as_the_message_says(project):
    fixed = each(lambda t: {"messages": chats_of(Talk(t[0].replace("What", "What's"), t[1]))})
    broken = fixed.replace(b"'", b"\\'")
    Path("a.jsonl").write_bytes(broken)
    column = broken.index(b"\\") + 1

    code, said = project.init("a.jsonl")

    assert code == 3, said
    said = " ".join(said.split())
    assert f"(line 1: not JSON: invalid escape \\' in column {column} of the row)" in said
    assert "Remove or double the backslash" in said
    Path("a.jsonl").write_bytes(broken.replace(b"\\'", b"'"))
    code, said = project.init("a.jsonl")
    assert code == 0, said
    assert len(project.prepare()) == NUM_ROWS


def test_conversations_are_counted_although_their_texts_span_lines(project):
    good = each(lambda t: {"messages": chats_of(t)})
    broken = each(lambda t: {"messages": chats_of(Talk(t[0], f"{t[1]}#It is.#Yes.#So."))})
    Path("a.jsonl").write_bytes(good + broken.replace(b"#", b"\n"))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    said = " ".join(said.split())
    assert f"{2 * NUM_ROWS} rows" in said
    assert f"{NUM_ROWS} of {2 * NUM_ROWS} rows (50.00%) are bad (control {NUM_ROWS})" in said


def test_the_space_before_answers_goes_with_the_separators(project):
    rows = [{"prompt": f"{t[0]} ->", "completion": f" {t[1]}"} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    code, said = project.choose(said)
    assert code == 0, said
    assert sorted(t.answer for t in project.prepare()) == sorted(t.answer for t in TALKS)


def test_comments_after_whole_objects_take_no_row_with_them(project):
    Path("a.jsonl").write_bytes(lines(named("question", "answer")[:3]) + b"# Add more.\n" * 4)

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "file_format" not in said
    said = " ".join(said.split())
    assert "4 of 7 rows (57.14%) are bad (json 4)" in said
    assert "(json: line 4: " in said  # with the number that `prepare` prints


def test_a_system_prompt_of_google_is_read(project):
    system = {"system_instruction": {"parts": [{"text": "Add "}, {"text": "them."}]}}
    Path("a.jsonl").write_bytes(lines([system | row for row in GOOGLE]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert all("Add them." in talk.question for talk in project.prepare())


def test_answers_whose_first_word_is_not_trained_are_counted(project):
    rows = [{"prompt": f"User: {t[0]}\nAda: ", "completion": t[1]} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    shown, said = said, " ".join(said.split())
    note = "does not train the first word of 12 answers of 12 examples"
    assert said.count(note) == 1
    number = 1 if said.index(note) < said.index("2. prompt") else 2

    _, said = project.choose(shown, number)

    assert f"note: this recipe {note}" in " ".join(said.split())


def test_the_number_of_ways_counts_those_that_are_not_shown(project):
    rows = [
        {
            "pattern": t[0],
            "sense": t[1],
            "sample": f"{n} boats of {2 * n} left {'abcdefghijklm'[n:]}",
        }
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "can be read in 10 ways (the first 6 are shown)" in " ".join(said.split())
    assert said.count("\npackhouse init ") == 6


def test_equal_prompts_are_noted_before_and_after_the_choice(project):
    rows = [{"x": "Tell me more about it.", "y": t[1]} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))
    code, said = project.init("a.jsonl")
    assert code == 7, said
    note = "has the same prompt in all 12 examples"
    assert said.count(note) == 1

    _, said = project.choose(said)

    assert f"note: this recipe {note}" in said


@pytest.mark.parametrize("name", ["keywords", "tool_calls", "passages"])
def test_a_list_next_to_an_answer_is_neither_answer_nor_gives_it_away(name, project):
    rows = [
        {"question": t[0], "answer": t[1], name: [f"{n} of us left {'abcdefghijklm'[n:]}"]}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "its first item" not in said
    assert ("(context)" in said) == (name != "tool_calls")


def test_equal_prompts_in_few_rows_do_not_decide_over_a_file(project):
    """Of a public file, 50 of 754 rows have no keywords, and 15 of these repeat a prompt."""
    rows = [
        {"question": f"{n}: {t[0]}", "answer": t[1], "keywords": ["sum"], "difficulty": "ab"[n % 2]}
        for n in range(9)
        for t in TALKS
    ]
    rare = {"question": "What is it?", "keywords": []}
    rows += [rare | {"answer": f"It is {n}.", "difficulty": "ab"[n % 2]} for n in range(5)]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said


def test_of_a_list_of_answers_the_items_that_are_left_out_are_counted(project):
    rows = [{"question": t[0], "labels": [t[1], "so"][: 1 + n % 2]} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "answer: its first item; 6 of 12 examples have more" in " ".join(said.split())


def test_a_field_that_joins_prompt_and_answer_is_left_out_with_the_reason(project):
    rows = [
        row | {"full": f"Q: {t[0]} A: {t[1]}"}
        for row, t in zip(pairs("prompt", "completion", TALKS), TALKS, strict=True)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "full: text; ignored (its text is made of fields that are read)" in said


def test_a_field_in_one_row_does_not_repeat_another(project):
    rows: list[dict[str, Any]] = pairs("prompt", "completion", TALKS)
    rows[5][" completion"] = rows[5].pop("completion")
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "' completion': text, in 1 row; ignored (text in few rows)" in said


def test_the_beginning_of_the_answer_to_a_long_prompt_is_shown(project):
    rows = pairs("prompt", "completion", [Talk(f"{'Well. ' * 900}{t[0]}", t[1]) for t in TALKS])
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert f"{TALKS[0].question}<|im_end|>" in said
    assert f"{{+{TALKS[0].answer}" in said


def test_messages_with_images_in_some_rows_are_read_as_the_note_says(project):
    rows = [{"messages": chats_of(t)} for t in TALKS]
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    for row in rows[:3]:
        text = {"type": "text", "text": row["messages"][0]["content"]}
        row["messages"][0] |= {"content": [image, text]}
    Path("a.jsonl").write_bytes(lines(rows))
    code, said = project.init("a.jsonl")
    assert code == 0, said
    assert "or --set media=drop_rows to leave out these rows" in " ".join(said.split())
    Path("recipe.yaml").unlink()

    code, said = project.init("a.jsonl", "--set", "media=drop_rows")

    assert code == 0, said
    check(project.prepare(), TALKS[3:])


def test_advice_about_images_is_given_once(project):
    rows = [
        {"path": f"{n}.png", "question": f"Please tell me, my friend: {t[0]}"}
        for n, t in enumerate(TALKS)
    ]
    Path("a.jsonl").write_bytes(lines(rows))
    found = [project.init("a.jsonl", *more)[1] for more in ([], ["--set", "media=drop_parts"])]
    said = [" ".join(each.split()) for each in found]

    assert ["Add --set media=drop_parts" in each for each in said] == [True, False]


def test_conversations_that_end_on_the_user_are_read_as_the_refusal_says(project):
    rows = [{"messages": [*chats_of(t), {"role": "user", "content": "Thanks."}]} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl", "--set", "validate.allow_ends_on_user=true")

    assert code == 0, said
    assert sorted(t.answer for t in project.prepare()) == sorted(t.answer for t in TALKS)


@pytest.mark.parametrize("number", [0, 1])
def test_fields_that_no_name_tells_may_be_named(number, project):
    rows = [{"id": n, "x": t.answer, "y": t.question} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))
    code, said = project.init("a.jsonl")
    assert code == 7, said
    advice = [part.strip("'.") for part in said.split("If none is right")[1].split() if "=" in part]
    advice = [each for each in advice if each.startswith("format=")]
    assert advice == ["format=question_answer", "format=question_answer", "format=text"]
    fields = ('fields={"question": "y", "answer": "x"}', 'fields={"text": "x"}')[number]

    code, said = project.init("a.jsonl", "--set", advice[-number], "--set", fields)

    assert code == 0, said
    found = project.prepare()
    if number == 0:
        check(found, TALKS)
    else:
        assert sorted("".join(t) for t in found) == sorted(t.answer for t in TALKS)


def test_columns_whose_names_are_questions_are_read_as_the_refusal_says(project):
    rows = [{"What do you want to know?": t.question, "Answer": t.answer} for t in TALKS]
    Path("a.csv").write_bytes(table(rows, ","))
    code, said = project.init("a.csv")
    assert code != 0, said
    advised = re.search(r"--set (format=\w+) --set fields='(.*?)'", " ".join(said.split()))
    fields = advised[2].replace("FIELD", "What do you want to know?", 1).replace("FIELD", "Answer")

    code, said = project.init("a.csv", "--set", advised[1], "--set", f"fields={fields}")

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_way_that_rejects_rows_says_so(project):
    rows = [{"x": t.question, "y": t.answer if n % 4 else ""} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))

    _, said = project.init("a.jsonl")

    assert "rejects 3 of 12 examples (empty_answer)" in said


@pytest.mark.parametrize("number", [0, 1])
def test_rows_written_as_the_advice_says_are_read(number, project):
    rows = [{"id": n, "claim": t.question, "cited": {str(n): [n]}} for n, t in enumerate(TALKS)]
    Path("a.jsonl").write_bytes(lines(rows))
    code, said = project.init("a.jsonl")
    assert code == 7, said
    shape = (
        " ".join(said.split())
        .split("write rows that have answers:")[1]
        .split(" If nothing")[0]
        .split(" or ")[number]
        .strip()
    )
    told = [shape.replace("...", t.question, 1).replace("...", t.answer) for t in TALKS]
    Path("a.jsonl").write_text("\n".join(told))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_setting_of_the_recipe_is_refused_with_its_place(project):
    Path("a.jsonl").write_bytes(lines(named("question", "answer")))

    for setting in ("format.reasoning=strip", "dedup.exact=drop", "validate.most=1"):
        code, said = project.init("a.jsonl", "--set", setting)

        assert (code, Path("recipe.yaml").exists()) == (2, False), said
        assert "write other settings into the recipe" in " ".join(said.split())


@pytest.mark.parametrize(
    "row",
    [
        lambda n, t: {"prompt": "" if n else "Say this.", "completion": t.answer},
        lambda n, t: {"instruction": " \n", "input": "", "output": t.answer},
    ],
)
def test_answers_to_empty_prompts_may_be_trained_as_text(row, project):
    Path("a.jsonl").write_bytes(lines([row(n, t) for n, t in enumerate(TALKS)]))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    code, said = project.choose(said)
    assert code == 0, said
    assert sorted("".join(t) for t in project.prepare()) == sorted(t.answer for t in TALKS)


def test_prompts_in_system_messages_are_read_as_the_refusal_says(project):
    talks = [[("system", t[0]), ("user", ""), ("assistant", t[1])] for t in TALKS]
    rows = [
        {"messages": [message for said in talk for message in messages_of(*said)]} for talk in talks
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert (code, "messages[1].content" in said) == (3, True), said
    select = '{"question": "messages[1].content", "answer": "messages[-1].content"}'
    settings = ("--set", "format=question_answer", "--set", f"select={select}")
    code, said = project.init("a.jsonl", *settings)
    assert code == 0, said
    check(project.prepare(), TALKS)


def test_text_before_the_first_speaker_of_a_conversation_is_not_lost(project):
    rows = [{"text": f"User: {t[0]}\nModel: {t[1]}"} for t in TALKS]
    rows[5]["text"] = "Read this first.\n" + rows[5]["text"]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    code, said = project.choose(said)
    assert code == 0, said
    code, said = project.call("prepare", "recipe.yaml")
    assert code == 0, said
    assert open_version("store/a").quarantined["row"].to_pylist() == [5]


@pytest.mark.parametrize("begin", ["Instruction", "Content"])
def test_labels_that_name_no_speaker_stay(begin, project):
    rows = [{"prompt": f"{begin}: {t[0]}", "completion": f"Answer: {t[1]}"} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    check(project.prepare(), [Talk(t[0], f"Answer: {t[1]}") for t in TALKS])


@pytest.mark.parametrize(
    ("more", "answer"),
    [("\n### User:\nThanks.", None), ("\n### User:\nThanks.\n### Bot:\nAh.", "Ah.")],
)
def test_the_last_heading_of_a_row_begins_its_answer(more, answer, project):
    prompts = [f"Add.\n### User:\n{t[0]}\n### Bot:\n" for t in TALKS]
    parts = [[prompt, t.answer] for prompt, t in zip(prompts, TALKS, strict=True)]
    texts = ["".join(part) for part in parts]
    texts[5] += more
    Path("a.jsonl").write_bytes(lines([{"text": f"<s>{text}\n\n### End:</s>"} for text in texts]))

    code, said = project.init("a.jsonl")

    assert code == 7, said
    code, said = project.choose(said)
    assert code == 0, said
    recipe = load_recipe("recipe.yaml")
    (shard,) = scan_source(recipe.sources[0])
    rows = read_shard(shard, recipe.sources[0], recipe.validate_, "prompt")
    parts[5:6] = [[texts[5].removesuffix(answer), answer]] if answer else []
    found = [[each["content"] for each in row] for row in rows.validated["messages"].to_pylist()]
    assert found == parts
    assert rows.quarantined["row"].to_pylist() == ([] if answer else [5])


def test_the_only_text_of_one_row_may_be_trained(project):
    Path("a.jsonl").write_bytes(lines([{"lyrics": "A long song about the rain.", "year": 1970}]))

    code, said = project.init("a.jsonl")

    assert (code, "1. lyrics (text)" in said) == (7, True), said
    ((num_tokens, num_trained),) = re.findall(r"row 0: (\d+) tokens, (\d+) trained", said)
    assert int(num_trained) == int(num_tokens) - 1  # all but the first, as in a version


@pytest.mark.parametrize(
    "end",
    ["\n}", "\n```", "\n1\n2\n3\n4\n5", "\nA\nB\nC\nD", "\n=", "\n:)", "\n答", "\n???"],
)
def test_code_choices_and_punctuation_at_the_end_are_no_separator(end, project):
    rows = [{"prompt": f"```{{\n{t[0]}{end}", "completion": t[1]} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said


def test_text_that_a_chosen_format_does_not_read_is_named(project):
    rows = [
        {"question": f"{n} + 1?", "answer": f"{n + 1}.", "hint": f"Count up from {n}, then say it."}
        for n in range(12)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl", "--set", "format=mixed")

    assert code == 0, said
    assert "'hint' of 'a.jsonl' contains text in 12 of 12 rows that the" in " ".join(said.split())


def test_a_field_that_repeats_the_text_is_ignored(project):
    rows = [{"messages": chats_of(t), "prompt": t[0], "topic": "sums"} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "prompt: text; ignored (short values)" in said
    assert "topic: text; ignored (1 different short value)" in said
    (source,) = yaml.safe_load(Path("recipe.yaml").read_text())["sources"]
    assert source["ignored_fields"] == ["prompt", "topic"]
    check(project.prepare(), TALKS)


@pytest.mark.parametrize(
    "row",
    [
        lambda n, t: {
            "input": {"messages": messages_of("user", t.question), "tools": []},
            "preferred_output": messages_of("assistant", t.answer),
            "non_preferred_output": messages_of("assistant", bad(t)),
        },
        lambda n, t: {
            "prompt": t.question,
            "candidate_a": (t.answer, bad(t))[n % 2],
            "candidate_b": (bad(t), t.answer)[n % 2],
            "winner": "ab"[n % 2],
        },
        lambda n, t: {"request": t[0], "better_output": t[1], "worse_output": bad(t)},
        lambda n, t: {
            "chosen_messages": chats_of(t),
            "rejected_messages": chats_of(Talk(t[0], bad(t))),
        },
        lambda n, t: {
            "prompt": "Add!",
            "context": f"It rains today. {t[0]}",
            "chosen": t[1],
            "rejected": "?",
        },
    ],
)
def test_of_a_preference_the_better_answers_are_trained(row, project):
    Path("a.jsonl").write_bytes(lines([row(n, t) for n, t in enumerate(TALKS)]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_question_about_a_file_describes_all_of_its_rows(project):
    rows = []
    for n, talk in enumerate(TALKS):
        answer = f"I am sure that {talk.answer}"
        text = f"<|user|>\n{talk.question}\n<|assistant|>\n{answer}"
        rows.append({"text": text, "answer": answer, "tags": ["sum"] * (n % 2)})
    Path("a.jsonl").write_bytes(lines(rows) + b'{"text": ]\n')

    code, said = project.init("a.jsonl")

    assert code == 7, said
    assert "note: 1 row cannot be read (line 13: not JSON" in said
    assert "different sets of fields" not in said
    assert "answer: text, in 12 rows; ignored (its text also appears in other fields)" in said


@pytest.mark.parametrize("written", [json.dumps, lambda calls: calls])
def test_calls_are_trained_with_their_tools_or_not_at_all(written, project):
    tool = {"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object"}}
    calls = [
        {"name": "add", "arguments": {"say": t[1]} if n % 2 else {"n": n, "say": [t[1]]}}
        for n, t in enumerate(TALKS)
    ]
    rows = [
        {"query": t[0], "answers": written([call]), "tools": written([tool])}
        for t, call in zip(TALKS, calls, strict=True)
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")
    assert code == 7, said
    code, said = project.choose(said)

    assert code == 0, said
    (source,) = yaml.safe_load(Path("recipe.yaml").read_text())["sources"]
    assert source["select"]["tools"] == '"tools"'
    found = project.prepare()
    assert all("Adds two numbers." in question for question, _ in found)
    trained = "".join(answer for _, answer in found)
    assert all(json.dumps(call) in trained for call in calls)


@pytest.mark.parametrize(
    "calls", [{"tool_calls": [{"type": "function", "function": ADD}]}, {"function_call": ADD}]
)
def test_messages_with_calls_and_no_content_are_read(calls, project):
    rows = [{"messages": [chats_of(t)[0], {"role": "assistant", **calls}]} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert len(project.prepare()) == len(TALKS)


def test_a_shape_far_after_the_first_rows_is_found(project):
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(840)]
    rows += [{"messages": chats_of(t)} for t in TALKS]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "852 rows with 2 different sets of fields" in said
    assert 'proposed: {"format": "mixed"' in said
    code, said = project.call("prepare", "recipe.yaml")
    assert code == 0, said


def test_text_in_some_rows_next_to_messages_is_asked_about_and_read_as_chosen(project):
    rows = [{"messages": chats_of(t)} for t in TALKS]
    Path("a.jsonl").write_bytes(
        lines([row | {"log": [{"ran": "the sum of it all"}]} for row in rows[:5]] + rows[5:])
    )

    code, said = project.init("a.jsonl")

    assert code == 7, said
    assert "leaves out log (text in 5 examples)" in said
    code, said = project.choose(said)
    assert code == 0, said
    assert len(project.prepare()) == NUM_ROWS


def test_rows_of_one_long_object_are_found(project):
    rows = [row | {"question": row["question"] + " " * 1000} for row in named("question", "answer")]
    Path("a.json").write_bytes(json.dumps({"status": "ok", "data": rows * 100}).encode())

    code, said = project.init("a.json")

    assert code == 0, said
    assert '"rows_at": "data"' in said
    assert "1,200 rows" in said


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_only_parts_of_a_large_file_are_read_with_a_note(name, project, monkeypatch):
    rows = [{"question": f"What, {n}? " * 20, "answer": f"I say {n}."} for n in range(1200)]
    packed = {
        "a.jsonl": lines(rows),
        "a.json": json.dumps(rows, indent=1).encode(),
        "a.csv": table([{k: f'"{v}"' for k, v in row.items()} for row in rows], ","),
        "a.parquet": parquet(rows),
        "a.jsonl.gz": gzip.compress(lines(rows)),
    }
    Path(name).write_bytes(packed[name])
    monkeypatch.setattr(init_survey, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(init_survey, "_RANGE_BYTES", 4000)
    monkeypatch.setattr(init_survey, "_RANGE_ROWS", 10)

    code, said = project.init(name)

    assert code == 0, said
    assert "rows read, " in said
    assert ("spread over the file" in " ".join(said.split())) == (name != "a.jsonl.gz")
    code, said = project.call("prepare", "recipe.yaml")
    assert code == 0, said


def test_the_checks_of_prepare_say_which_limit_would_stop_it(project):
    rows = named("question", "answer") * 10
    for row in rows[5:50:6]:
        row["answer"] = ""
    notes = b"# A question and its answer\n" * len(rows)
    Path("a.jsonl").write_bytes(notes + lines([json.loads(json.dumps(row)) for row in rows]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "`packhouse prepare` would reject these rows: " in said
    assert "Next: change it as noted above, then run packhouse prepare" in said
    assert "max_quarantined" in said
    assert "Set `dedup: {exact: drop}`" in said
    assert "max_quarantined" not in Path("recipe.yaml").read_text()


@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value")])
def test_an_answer_in_the_prompt_of_two_lists_of_messages_has_no_loss(keys, project):
    def messages(*texts: str) -> list[dict[str, str]]:
        speakers = ("human", "gpt") if keys[0] == "from" else ("user", "assistant")
        return [dict(zip(keys, pair, strict=True)) for pair in zip(speakers, texts, strict=False)]

    rows = [
        {
            "prompt": [*messages("Hello.", "An answer before."), *messages(t.question)],
            "completion": messages(t.question, t.answer)[1:],
        }
        for t in TALKS
    ]
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    check(project.prepare(), TALKS)


def test_a_few_rows_without_messages_are_bad_rows_of_a_file(project):
    rows = [{"messages": chats_of(t)} for t in TALKS] * 2
    unsaid = [{"role": "user", "content": "And now?"}, {"role": "assistant"}]
    odd = [[{"role": "narrator", "content": "Once."}, *chats_of(TALKS[0])], [], None, unsaid]
    bad_rows = [{"messages": messages} for messages in odd]
    Path("a.jsonl").write_bytes(lines([*rows[:3], *bad_rows, *rows[3:]]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert 'proposed: {"format": "chat"}' in said


def test_a_list_in_place_of_a_role_is_a_bad_row(project):
    of_list = [*messages_of("user", "And now?"), {"role": ["assistant"], "content": "Nothing."}]
    talks = [*(chats_of(t) for t in TALKS), of_list]
    Path("a.jsonl").write_bytes(lines([{"messages": talk} for talk in talks]))

    code, said = project.init("a.jsonl")

    assert code == 0, said
    assert "1 row is bad and will be quarantined" in said


def test_several_files_become_sources_and_alike_ones_of_a_folder_become_one(project):
    Path("chats").mkdir()
    for name in ("a", "b"):
        Path(f"chats/{name}.jsonl").write_bytes(lines(named("query", "reply")))
    Path("faq.csv").write_bytes(table(named("Frage", "Antwort"), ";"))

    code, said = project.init("chats", "faq.csv", "-o", "sub.yaml")

    assert code == 0, said
    Path("chats/b.jsonl").write_bytes(lines(named("ask", "answer")))
    Path("more").mkdir()
    Path("more/a.jsonl").write_bytes(lines(named("instruction", "output")))
    assert project.init("chats", "more/a.jsonl")[0] == 0
    unlike = yaml.safe_load(Path("recipe.yaml").read_text())["sources"]
    assert [s["path"] for s in unlike] == ["chats/a.jsonl", "chats/b.jsonl", "more/a.jsonl"]
    assert [s.get("name") for s in unlike] == ["a-1", None, "a-3"]
    recipe = yaml.safe_load(Path("sub.yaml").read_text())
    assert [source["path"] for source in recipe["sources"]] == ["chats", "faq.csv"]
    assert recipe["sources"][1]["file_format"] == "csv_semicolon"


def test_without_a_terminal_the_recipe_is_written_with_a_note(project):
    Path("a.jsonl").write_bytes(lines(named("query", "reply")))

    code, said = project.call("init", "a.jsonl", "--tokenizer", str(TOKENIZER))

    assert code == 0
    assert "wrote recipe.yaml (not confirmed: no terminal)" in said
    assert "packhouse prepare recipe.yaml" in Path("recipe.yaml").read_text()


def test_a_no_at_the_terminal_writes_nothing(project, monkeypatch):
    Path("a.jsonl").write_bytes(lines(named("query", "reply")))
    monkeypatch.setattr("packhouse.addons.init.command.sys", Terminal)

    arguments = ["init", "a.jsonl", "--tokenizer", str(TOKENIZER)]
    result = CliRunner().invoke(cli, arguments, input="n\n")

    assert result.exit_code == 1
    assert "Is this right? Write recipe.yaml?" in result.output
    assert not Path("recipe.yaml").exists()


class Terminal:
    class stdin:
        isatty = staticmethod(lambda: True)


def test_a_recipe_that_is_there_is_never_written_over(project):
    Path("a.jsonl").write_bytes(lines(named("query", "reply")))
    Path("recipe.yaml").write_text("mine")

    code, said = project.init("a.jsonl")

    assert (code, Path("recipe.yaml").read_text()) == (2, "mine")
    assert "Choose another file with -o" in said


def test_names_of_a_file_and_its_fields_cannot_write_into_the_recipe_or_the_terminal(project):
    odd = "a # \n: x.jsonl"
    name = "an\x1b[2Jswer\nsplit: {eval_fraction: 0.5}"
    Path(odd).write_bytes(lines([{"question": q, "answer": a, name: "x"} for q, a in TALKS]))

    code, said = project.init(odd)

    assert code == 0, said
    assert "\x1b[2J" not in said
    recipe = yaml.safe_load(Path("recipe.yaml").read_text())
    assert recipe["sources"][0]["path"] == odd
    assert "split" not in recipe


def test_the_length_of_a_pack_takes_the_longest_row(project):
    rows = named("question", "answer")
    rows[3]["answer"] = "word " * 3000
    Path("a.jsonl").write_bytes(lines(rows))

    code, said = project.call("init", "a.jsonl", "--tokenizer", str(TOKENIZER), "--json")

    assert code == 0, said
    seq_len = json.loads(said.splitlines()[-1])["recipe"]["pack"]["seq_len"]
    assert 3000 < seq_len <= 32_768
    assert seq_len & (seq_len - 1) == 0


def test_a_tokenizer_without_a_chat_template_gets_alpaca_with_the_line_break(project):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("tokenizer").mkdir(exist_ok=True)
        Path("tokenizer", name).write_bytes((TOKENIZER / name).read_bytes())
    Path("a.jsonl").write_bytes(lines(named("question", "answer")))

    code, said = project.call("init", "a.jsonl", "--tokenizer", "tokenizer", "--json")

    assert code == 0, said
    recipe = json.loads(said.splitlines()[-1])["recipe"]
    assert recipe["format"]["template"] == "alpaca_newline"


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        ("안녕하세요 오늘은 날씨가 아주 좋습니다 내일도 그럴까요", "cp949", "cp949"),
        ("請問今天的天氣怎麼樣 明天會不會下雨", "big5", "big5"),
        ("今天天气怎么样 明天会不会下雨 我想知道", "gbk", "gb18030"),
        ("きょうの天気はどうですか あしたは雨ですか", "cp932", "cp932"),
        ("Où commence l'été? Là-bas, déjà: c'est ça.", "cp1252", "cp1252"),
        ("Какая сегодня погода? Завтра будет дождь.", "cp1251", "cp1251"),
        ("Ünïcödé, 你好, здравствуйте", "utf-8", "utf-8"),
        ("What\ufffds that?", "utf-8", "utf-8"),
        ("plain", "utf-16", "utf-16"),
        ("plain", "ascii", "utf-8"),
    ],
)
def test_the_encoding_of_a_text_is_found_by_its_letters(text, encoding, expected):
    data = ((text + "\n") * 5).encode(encoding)

    assert guess_encoding(data) == expected
    if encoding == "utf-8":
        assert guess_encoding(data * 3 + b"caf\xe9") == "utf-8"


def test_a_file_joined_from_two_encodings_is_no_third_one():
    text, other = RUSSIAN[0].answer, RUSSIAN[0].question.encode("cp1251")

    assert guess_encoding(b"\n".join([text.encode(), other, other, other])) == "utf-8"


def test_a_file_in_another_encoding_that_is_prepared_without_a_look_leads_to_init(project):
    file, data, _ = RIGHT["GBK lines"]
    Path(file).write_bytes(data)
    settings = ("--set", "sources.0.format=question_answer")

    code, said = project.call("prepare", file, "--tokenizer", str(TOKENIZER), *settings)

    assert code != 0
    assert "`packhouse init` detects its encoding" in said


def test_a_file_that_is_not_text_is_recognized(project):
    Path("a.json").write_bytes(b"%PDF-1.7\n" + bytes(range(128, 256)) * 9)

    code, said = project.init("a.json")

    assert (code, "it is a PDF document" in said) == (3, True)


def test_labels_for_a_tokenizer_without_eos_train_a_head_for_classes(project, shared):
    Path("rows.tsv").write_text("label\ttext\n1\tGood.\n0\tBad.\n")
    folder = shared / "tokenizers" / "bert-base-uncased"

    code, said = project.call("init", "rows.tsv", "--tokenizer", str(folder), "--yes")

    assert code == 0, said
    assert "template: sequence_classification" in Path("recipe.yaml").read_text()
    code, said = project.call("prepare", "recipe.yaml")
    assert code == 0, said


def test_init_shows_the_cost_of_split_rows(tmp_path, monkeypatch):
    from packhouse.addons.init import command
    from packhouse.records.ledger import RenderCounts

    monkeypatch.chdir(tmp_path)
    (tmp_path / "talks.jsonl").write_bytes(lines([{"messages": chats_of(t)} for t in TALKS]))
    render_sample = command.render_sample

    def split(*arguments: Any) -> Any:  # from a template that drops reasoning
        counts = RenderCounts(notes={"text_bytes": 1470, "repeated_bytes": 470})
        return *render_sample(*arguments)[:2], counts

    def printed(out: str) -> str:
        arguments = ["init", "talks.jsonl", "--tokenizer", str(TOKENIZER), "-o", out, "--yes"]
        result = CliRunner().invoke(cli, [*arguments, "--cache", str(tmp_path / "cache")])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    assert "records hold" not in printed("whole.yaml")
    monkeypatch.setattr(command, "render_sample", split)
    assert (
        "records contain 1.47 times as much text as one rendering per row, because the "
        "template writes a turn differently when later turns follow; to reduce this, set "
        "format.turns: whole or "
        "format.reasoning: strip or format.train_on: last_assistant, if the template allows it"
    ) in printed("split.yaml")
