"""Public data sets by the shape of their rows: `init` finds it, or says what to do."""

import json
import os
import re
import subprocess
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from packhouse.addons.init.files import look_at
from packhouse.addons.init.remedies import is_whole_talk
from packhouse.api import open_version
from packhouse.errors import SourceError
from tests.commands.public_datasets import ROWS, SYSTEM, THOUGHT, TOOL, chat
from tests.commands.test_init import PUBLIC, TALKS, project

__all__ = ["project"]

REFUSED = {
    "Salesforce/xlam-function-calling-60k",
    "glaiveai/glaive-function-calling-v2",
    "nvidia/Llama-Nemotron-Post-Training-Dataset",
    "simplescaling/s1K",
    "facebook/natural_reasoning",
}


def write(name: str, path: Path) -> None:
    rows = [ROWS[name](talk.question, talk.answer) for talk in TALKS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_the_shape_is_found_and_nothing_is_a_guess(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "rows.jsonl")

    (look,) = look_at(str(tmp_path / "rows.jsonl"))

    assert not look.is_guess
    said = ROWS[name]("QUESTION", "ANSWER")
    fields = look.settings.get("fields", {})
    if "completion" in fields:
        assert said[fields["completion"]] == "ANSWER"
    if "prompt" in fields:
        assert said[fields["prompt"]] == "QUESTION"


# What a row says beside its question and answer: system prompt, template arguments, a thought.
SYSTEM_OF = {
    "open-thoughts/OpenThoughts-114k": SYSTEM,
    "NousResearch/hermes-function-calling-v1": SYSTEM,
    "nvidia/Llama-Nemotron-Post-Training-Dataset": "detailed thinking on",
    "glaiveai/glaive-function-calling-v2": "You are a helpful assistant with no functions.",
    "OpenOrca": "Help.",
    "messages in an object": "Help.",
    "orca_dpo_pairs": "Help.",
    "SlimOrca": "Think.",
}
THINKS = {
    *("open-thoughts/OpenThoughts-114k", "open-thoughts/OpenThoughts3-1.2M"),
    *("open-r1/Mixture-of-Thoughts", "open-r1/OpenR1-Math-220k"),
    "nvidia/Llama-Nemotron-Post-Training-Dataset",
}


WITH_REASONING = ("simplescaling/s1K", "open-thoughts/OpenThoughts-114k (metadata)")


def meant(name: str, number: int, talk: Any) -> list[dict[str, Any]]:
    answer = (THOUGHT if name in THINKS else "") + talk.answer
    found = chat(f"{number}: {talk.question}", answer, system=SYSTEM_OF.get(name, ""))
    if name in WITH_REASONING:
        found[-1]["reasoning_content"] = "Add both."
    if name == "Salesforce/xlam-function-calling-60k":
        call = {"name": "add", "arguments": {"say": talk.answer}}
        found[-1] |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
    return found


def rows_of(name: str, number: int) -> bytes:
    """The first three rows of a data set, with its number in each question."""
    if name in ROWS:
        made = [ROWS[name](f"{number}: {talk.question}", talk.answer) for talk in TALKS[:3]]
        return "".join(json.dumps(row) + "\n" for row in made).encode()
    text = b"\n".join(PUBLIC[name].splitlines()[:3]) + b"\n"
    for talk in TALKS[:3]:
        text = text.replace(talk.question.encode(), f"{number}: {talk.question}".encode())
    return text


@pytest.mark.slow
def test_every_shape_is_published_with_the_ids_of_transformers(project: Any, shared: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared / "tokenizers" / "qwen2.5-instruct"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    # Qwen2.5's template never writes reasoning from a field: a run with such rows stops.
    names = [name for name in (*ROWS, *PUBLIC) if name not in WITH_REASONING]
    Path("all").mkdir()
    expected = []
    for number, name in enumerate(names):
        path = Path(f"all/{number}.jsonl")
        path.write_bytes(rows_of(name, number))
        if name in REFUSED:
            mend(path)
        tools = [{"type": "function", "function": TOOL}] if "function-calling" in name else None
        tools = None if name.startswith("glaiveai") else tools
        for talk in TALKS[:3]:
            given = {"enable_thinking": False} if name.endswith("smoltalk2") else {}
            text = theirs.apply_chat_template(
                meant(name, number, talk), tools=tools, tokenize=False, **given
            )
            expected.append((name, theirs(text, add_special_tokens=False)["input_ids"]))

    code, said = project.call("init", "all", "--tokenizer", str(folder), "--yes")
    assert code == 0, said
    code, said = project.call("prepare", "recipe.yaml")
    assert code == 0, said

    version = open_version("store/all")
    published = Counter(
        tuple(row["input_ids"][end - size : end])
        for row in version.train
        for end, size in zip(accumulate(row["seq_lengths"]), row["seq_lengths"], strict=True)
    )
    missing = [name for name, ids in expected if not published[tuple(ids)]]
    assert (missing, version.quarantined.num_rows) == ([], 0)
    assert published.total() == 3 * len(names)


def mend(path: Path) -> None:
    """Run the command of a refusal, and put its rows in the place of the file's."""
    with pytest.raises(SourceError) as refused:
        look_at(str(path))
    found = re.search(r"then give (\S+):\n(.*)", str(refused.value), re.DOTALL)
    assert found
    subprocess.run(found[2], shell=True, check=True, env=dict(os.environ))
    Path(found[1]).replace(path)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_command_of_a_refusal_makes_rows_that_are_read(name: str, project: Any) -> None:
    write(name, Path("rows.jsonl"))

    mend(Path("rows.jsonl"))

    (look,) = look_at("rows.jsonl")
    assert look.settings["format"] == "chat"
    (first, *_) = map(json.loads, Path("rows.jsonl").read_text().splitlines())
    due = meant(name, 0, TALKS[0])
    due[-2]["content"] = TALKS[0].question
    assert first["messages"] == due


def test_talks_with_functions_are_not_split_into_questions_and_answers(tmp_path: Path) -> None:
    chat = "USER: a\n\nASSISTANT: <functioncall> {}\n\nFUNCTION RESPONSE: {}\n\nASSISTANT: b"
    rows = [{"system": "SYSTEM: x", "chat": chat} for _ in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(SourceError, match="with the role `tool`"):
        look_at(str(tmp_path / "rows.jsonl"))


def test_prompts_with_earlier_turns_are_no_whole_talks() -> None:
    assert not is_whole_talk("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:")
    assert not is_whole_talk("Human: a\n\nAssistant: b\n\nHuman: c")
    assert not is_whole_talk("What does Assistant: mean?")
    assert not is_whole_talk(None)


@pytest.mark.parametrize(
    ("row", "asked", "said"),
    [
        (
            {"question": "2 + 2?", "subject": "sums", "choices": ["3", "4"], "answer": 1},
            "2 + 2?\nA. 3\nB. 4",
            "B",
        ),
        (
            {"question": "2 + 2?", "options": ["A)3", "B)4"], "rationale": "", "correct": "B"},
            "2 + 2?\nA)3\nB)4",
            "B",
        ),
    ],
    ids=["cais/mmlu", "deepmind/aqua_rat"],
)
def test_a_question_is_not_trained_without_its_choices(
    row: dict[str, Any], asked: str, said: str, project: Any
) -> None:
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 2)

    mend(Path("rows.jsonl"))

    first = json.loads(Path("rows.jsonl").read_text().splitlines()[0])
    assert [m["content"] for m in first["messages"]] == [asked, said]


def test_a_passage_is_the_context_of_its_question(project: Any) -> None:
    row = {"passage": "The sky is blue.", "question": "What is blue?", "answer": "The sky"}
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 2)

    (look,) = look_at("rows.jsonl")

    assert look.settings == {"format": "question_answer", "fields": {"context": "passage"}}
