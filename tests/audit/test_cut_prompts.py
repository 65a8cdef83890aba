"""Find truncated prompts and masks that begin late in rows tokenized by other tools."""

import functools

import pytest

import packhouse
from packhouse.addons.golden import pin
from packhouse.recipe import parse_recipe
from packhouse.tokenize import load_snapshot
from packhouse.tokenize.encoders import load_tokenizer

SYSTEM = {"role": "system", "content": "Answer in one line, and be kind to everyone who asks."}
TALK = [
    {"role": "user", "content": "What may a visitor to the harbour see on a Sunday?"},
    {"role": "assistant", "content": "Ships, gulls and the old crane."},
    {"role": "user", "content": "And on a Monday?"},
    {"role": "assistant", "content": "The same, without the crowd."},
]
CALL = [
    {"role": "user", "content": "How warm is it in the harbour of Oslo today?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": '[{"type":"function","id":"abcdefghi","function":{"name":"weather",'
        '"arguments":{"city":"Oslo"}}}]',
    },
    {"role": "tool", "content": "21 degrees", "tool_call_id": "abcdefghi", "name": "weather"},
    {"role": "assistant", "content": "It is 21 degrees."},
]
NAMES = ("Ada", "Boris", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana")
CHATS = [
    *[[{**turn, "content": f"{name}: {turn['content']}"} for turn in TALK] for name in NAMES],
    [SYSTEM, *TALK],
    CALL,
]
CHATML = ("<|im_start|>", "<|im_start|>assistant")
MISTRAL = ("[INST]", "[/INST]")
# For each tokenizer: its template, the start of a turn, and the text before an answer.
TEMPLATES = {
    "qwen2.5-instruct": ("chat", *CHATML),
    "qwen3": ("chat", *CHATML),
    "mistral-7b-instruct-v0.3": ("chat", *MISTRAL),
    "qwen3 with Alpaca": ("alpaca_newline", "### Instruction:", "### Response:"),
}


class Rowmaker:
    """A tokenizer with a template, set up as another tool would have it."""

    def __init__(self, name, shared, cache):
        self.template, self.opens, self.header = TEMPLATES[name]
        self.fixed = "<|im_start|>system" if name == "qwen2.5-instruct" else ""
        self.tokenizer = str(shared / "tokenizers" / name.partition(" ")[0])
        self.cache = cache
        self.backend = load_tokenizer(load_snapshot(self.tokenizer).backend)

    def rows(self, chats):
        recipe = parse_recipe(
            {
                "dataset": "made",
                "tokenizer": self.tokenizer,
                "sources": [{"path": "rows"}],
                "format": {"template": self.template, "turns": "whole"},
            },
            where="test",
        )
        made = []
        for item in pin([{"messages": chat} for chat in chats], recipe):
            if "input_ids" not in item:
                continue
            labels = [-100] * len(item["input_ids"])
            for start, end in item["trained"]:
                labels[start:end] = item["input_ids"][start:end]
            made.append({"input_ids": item["input_ids"], "labels": labels})
        return made

    def found(self, rows):
        report = packhouse.audit(
            rows, self.tokenizer, template=self.template, cache=self.cache, progress=False
        )
        return {finding.name: finding.number for finding in report.findings}

    def text(self, ids):
        return str(self.backend.decode(ids, skip_special_tokens=False)).lstrip()


@pytest.fixture(scope="module")
def make(shared, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return functools.cache(lambda name: Rowmaker(name, shared, cache))


@pytest.fixture(params=["qwen2.5-instruct", "mistral-7b-instruct-v0.3", "qwen3 with Alpaca"])
def maker(request, make):
    return make(request.param)


def first_trained(row):
    return next(n for n, label in enumerate(row["labels"]) if label != -100)


def late(row, *numbers):
    """Return the row with the first tokens of each answer left out of the mask."""
    labels = list(row["labels"])
    begins = [n for n, label in enumerate(labels) if label != -100 and labels[n - 1] == -100]
    for begin, number in zip(begins, numbers, strict=False):
        labels[begin : begin + number] = [-100] * len(labels[begin : begin + number])
    return {**row, "labels": labels}


def test_every_cut_inside_a_prompt_is_found_and_whole_rows_are_not(maker):
    rows = maker.rows(CHATS)
    assert not maker.found(rows)
    chosen = rows[0] if maker.opens in ("[INST]", "### Instruction:") else rows[8]
    cut, num_visible = [], 0
    for at in range(1, first_trained(chosen)):
        left = {name: values[at:] for name, values in chosen.items()}
        prompt = maker.text(chosen["input_ids"][at : first_trained(chosen)])
        before, header, _ = prompt.partition(maker.header)
        if header and before:
            cut.append(left)
            is_whole = before.startswith(maker.opens) and maker.text(left["input_ids"][:1]) != ""
            is_whole &= maker.fixed == ""  # Qwen2.5 writes a system turn first
            if maker.opens == "### Instruction:":  # the preamble does not belong to a turn
                is_whole = maker.opens in before
            num_visible += not is_whole

    assert num_visible > 8
    assert (num_visible < len(cut)) == (maker.fixed == "")
    found = maker.found([*rows, *cut])
    assert found.pop("missing_headers") == num_visible
    assert found.keys() <= {"missing_bos"}


def test_cuts_between_turns_are_found_where_the_template_begins_all_alike(make):
    maker = make("qwen2.5-instruct")
    rows = maker.rows(CHATS)
    user = maker.backend.encode("<|im_start|>user\n", add_special_tokens=False).ids
    cut = []
    for row in rows[:3]:
        at = max(n for n in range(len(row["labels"])) if row["input_ids"][n : n + 3] == user)
        cut.append({name: values[at:] for name, values in row.items()})

    assert maker.found([*rows[3:], *cut]) == {"missing_headers": 3}
    assert not maker.found(cut)  # all the same, so another template made them


def test_answers_whose_first_tokens_are_not_trained_are_found(maker):
    rows = maker.rows(CHATS)
    spoiled = [late(rows[0], 1), late(rows[1], 0, 5), late(rows[2], 2, 2), *rows[3:]]

    assert maker.found(spoiled) == {"untrained_starts": 3}


def _without(row, begin, maker):
    """Return the row with the beginning of each answer left out of the mask."""
    start = first_trained(row)
    for end in range(start, len(row["labels"])):
        if maker.text(row["input_ids"][start:end]).rstrip() == begin:
            break
    return {**row, "labels": [*[-100] * end, *row["labels"][end:]]}


def test_thoughts_and_the_tags_of_a_prompt_may_be_left_out(make):
    maker = make("qwen3")
    thought = "<think>\nGulls live there.\n</think>"
    chats = [[TALK[0], {"role": "assistant", "content": f"{thought}\n\nGulls."}]]
    (thinking,) = maker.rows(chats)
    (silent,) = maker.rows([TALK[:2]])

    for row, begin in (
        (thinking, "<think>"),
        (thinking, thought),
        (silent, "<think>\n\n</think>"),
    ):
        left = _without(row, begin, maker)
        assert not maker.found([*maker.rows(CHATS), left]), begin
    half = _without(thinking, "<think>\nGulls live", maker)
    assert maker.found([*maker.rows(CHATS), half]) == {"untrained_starts": 1}
