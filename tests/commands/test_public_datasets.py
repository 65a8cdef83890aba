"""Public datasets by the shape of their rows: `init` detects it, or shows it as a candidate."""

import json
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from packhouse.addons.init.choose_format import Proposal, propose
from packhouse.addons.init.file_survey import survey
from packhouse.api import open_version, prepare
from packhouse.errors import SourceError
from packhouse.read.source_files import find_files
from packhouse.recipe import SourceConfig, ValidateConfig
from tests.commands.public_datasets import ROWS, SYSTEM, THOUGHT, TOOL, chat
from tests.commands.test_init import PUBLIC, TALKS

# Datasets with text besides the conversation, or two questions or answers: the right candidate.
ASKED = {
    "Magpie-Align/Magpie-Pro-300K-Filtered": 1,
    "open-r1/OpenR1-Math-220k": 0,
    "AI-MO/NuminaMath-1.5": 0,
    "nvidia/OpenMathInstruct-2": 0,
    "Salesforce/xlam-function-calling-60k": 0,
    "MetaMath": 0,
    "OpenMathInstruct": 0,
    "camel-ai": 0,
}
# None of their candidates is right: reasoning, an attempt, or only the first of some objects.
UNKNOWN = {"simplescaling/s1K", "facebook/natural_reasoning"}


def look(path: Path, folder: Path) -> Proposal:
    (file,) = find_files(SourceConfig(path=str(path)))
    return propose(survey(file, {}), {}, ValidateConfig(), folder)


def settings_of(name: str, path: Path, folder: Path) -> dict[str, Any]:
    """Settings for reading, or of the right candidate."""
    found = look(path, folder)
    assert (found.reading is None) == (name in ASKED)
    if found.reading is not None:
        return found.settings
    chosen = found.candidates[ASKED[name]]
    settings = replace(found, reading=chosen.reading).settings
    return settings | {
        "ignored_fields": sorted({*settings.get("ignored_fields", ()), *chosen.trial.unread})
    }


def test_texts_that_hold_a_whole_conversation_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rows_of("glaiveai/glaive-function-calling-v2", 0))

    with pytest.raises(SourceError, match="'chat' contains marks of speakers"):
        look(path, tmp_path)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_reading_that_is_not_a_candidate_is_never_chosen(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rows_of(name, 0))

    assert look(path, tmp_path).reading is None


# Other content of a row: system prompt, template arguments, reasoning.
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
    """The first three rows of a dataset, with a row number in each question."""
    if name in ROWS:
        made = [ROWS[name](f"{number}: {talk.question}", talk.answer) for talk in TALKS[:3]]
        return "".join(json.dumps(row) + "\n" for row in made).encode()
    text = b"\n".join(PUBLIC[name].splitlines()[:3]) + b"\n"
    for talk in TALKS[:3]:
        text = text.replace(talk.question.encode(), f"{number}: {talk.question}".encode())
    return text


@pytest.mark.slow
def test_every_shape_is_published_with_the_ids_of_transformers(tmp_path, shared, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    folder = shared / "tokenizers" / "qwen2.5-instruct"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    # Qwen2.5's template never writes reasoning from a field, so a run with such rows stops.
    left_out = {*WITH_REASONING, *UNKNOWN, "glaiveai/glaive-function-calling-v2"}
    names = [name for name in (*ROWS, *PUBLIC) if name not in left_out]
    expected, sources = [], []
    for number, name in enumerate(names):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(rows_of(name, number))
        settings = settings_of(name, path, tmp_path)
        sources.append({"path": str(path), "name": f"s{number}", **settings})
        tools = [{"type": "function", "function": TOOL}] if "function-calling" in name else None
        for talk in TALKS[:3]:
            given = {"enable_thinking": False} if name.endswith("smoltalk2") else {}
            text = theirs.apply_chat_template(
                meant(name, number, talk), tools=tools, tokenize=False, **given
            )
            expected.append((name, theirs(text, add_special_tokens=False)["input_ids"]))

    result = prepare(sources, tokenizer=str(folder), seq_len=2048, store="store", dataset="all")

    version = open_version(f"store/{result.dataset}")
    published = Counter(
        tuple(row["input_ids"][end - size : end])
        for row in version.train
        for end, size in zip(accumulate(row["seq_lengths"]), row["seq_lengths"], strict=True)
    )
    missing = [name for name, ids in expected if not published[tuple(ids)]]
    assert (missing, version.quarantined.num_rows) == ([], 0)
    assert published.total() == 3 * len(names)


def test_a_passage_is_the_context_of_its_question(tmp_path):
    row = {"passage": "The sky is blue.", "question": "What is blue?", "answer": "The sky"}
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps(row) + "\n") * 2)

    found = look(path, tmp_path)

    assert found.settings == {"format": "question_answer", "fields": {"context": "passage"}}
