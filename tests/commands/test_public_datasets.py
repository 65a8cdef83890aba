"""Public data sets by the shape of their rows: `init` finds it, or says what to do."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from packhouse.errors import SourceError
from packhouse.proposal.files import look_at
from packhouse.proposal.remedies import is_whole_talk
from tests.commands.public_datasets import ROWS
from tests.commands.test_init import TALKS, check, project

__all__ = ["project"]

REFUSED = {
    "Salesforce/xlam-function-calling-60k",
    "glaiveai/glaive-function-calling-v2",
    "nvidia/Llama-Nemotron-Post-Training-Dataset",
}
OTHER_ANSWER = {"simplescaling/s1K", "facebook/natural_reasoning"}
"""Two columns answer, and the one that is named so is taken."""


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
    if "completion" in fields and name not in OTHER_ANSWER:
        assert said[fields["completion"]] == "ANSWER"
    if "prompt" in fields:
        assert said[fields["prompt"]] == "QUESTION"


# One of each way that rows are read; the others differ in columns that nobody reads.
@pytest.mark.parametrize(
    "name",
    [
        "tatsu-lab/alpaca",
        "teknium/OpenHermes-2.5",
        "HuggingFaceH4/ultrafeedback_binarized",
        "CohereForAI/aya_dataset",
        "allenai/WildChat-1M",
        "jondurbin/airoboros-3.2",
    ],
)
def test_the_recipe_that_is_written_publishes_what_was_meant(name: str, project: Any) -> None:
    write(name, Path("rows.jsonl"))

    code, said = project.init("rows.jsonl")

    assert code == 0, said
    check(project.prepare(), TALKS)


@pytest.mark.parametrize(
    "name", ["Salesforce/xlam-function-calling-60k", "glaiveai/glaive-function-calling-v2"]
)
def test_the_command_of_a_refusal_makes_rows_that_are_read(name: str, tmp_path: Path) -> None:
    write(name, tmp_path / "rows.jsonl")

    with pytest.raises(SourceError) as refused:
        look_at(str(tmp_path / "rows.jsonl"))
    found = re.search(r"then give (\S+):\n(.*)", str(refused.value), re.DOTALL)
    assert found
    subprocess.run(found[2], shell=True, check=True, cwd=tmp_path, env=dict(os.environ))

    (look,) = look_at(str(tmp_path / found[1]))
    assert look.settings["format"] == "chat"
    (first, *_) = map(json.loads, (tmp_path / found[1]).read_text().splitlines())
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    if "xlam" in name:
        (call,) = first["messages"][1]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"say": TALKS[0].answer}}


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
