"""Compare trained answers with inference prompts: correct ones pass, planted faults are counted."""

import json

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from packhouse.auditing import inference_prompts
from packhouse.auditing.audit_limits import check_audit
from packhouse.auditing.inference_prompts import audit_inference, combine_inference, inference_line
from packhouse.auditing.plain_template import PlainTemplate, open_template
from packhouse.auditing.token_checks import Side
from packhouse.errors import AuditError
from packhouse.recipe import AuditConfig, FormatConfig, Recipe, TokenizeConfig
from packhouse.records.table_schemas import FORMATTED
from packhouse.store.manifest import read_audit
from packhouse.tokenize import tokenize_table
from tests.audit.conftest import Sums, Tables, turns, validated_table
from tests.prepared import prepare_in

ROME = json.dumps([{"type": "function", "function": {"name": "look", "arguments": {"at": "Rome"}}}])
AGENT = [
    {"role": "user", "content": "How warm is it in Rome?"},
    {"role": "assistant", "content": "", "reasoning": "Must look.", "tool_calls": ROME},
    {"role": "tool", "content": "21 degrees"},
    {"role": "assistant", "content": "It has 21 degrees.", "reasoning": "A mild day."},
    {"role": "user", "content": "And is it dry?"},
    {"role": "assistant", "content": "It is.", "reasoning": "They told so before."},
]
ASKED = turns("Name a river.", "The Danube.", "And another?", "The Elbe, for example.")

# Output of Qwen3's template for a client that sets enable_thinking to false. Trained: { ... }.
NO_THOUGHT = "<think>\n\n</think>\n\n"
ASK_1 = "<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n"
ASK_2 = "\n<|im_start|>user\nAnd another?<|im_end|>\n<|im_start|>assistant\n"
ANSWER_1, ANSWER_2 = "{The Danube.<|im_end|>}", "{The Elbe, for example.<|im_end|>}"
JOINED = ASK_1 + NO_THOUGHT + ANSWER_1 + ASK_2 + NO_THOUGHT + ANSWER_2
ALONE = ASK_1 + "The Danube.<|im_end|>" + ASK_2 + NO_THOUGHT + ANSWER_2


@pytest.fixture(scope="module")
def qwen3(snapshots):
    return snapshots("qwen3")


class Planted:
    """Return a record of the given text; braces mark the trained parts."""

    def __init__(self, marked, talk, snapshot):
        self.snapshot = snapshot
        trained = [piece.split("}") for piece in marked.split("{")]
        text, spans = trained[0][0], []
        for inner, after in trained[1:]:
            spans.append({"start": len(text), "end": len(text + inner)})
            text += inner + after
        num_answers = sum(message["role"] == "assistant" for message in talk)
        history = num_answers - len(spans)  # answers that are not trained in this record
        messages = []
        for message in talk:
            is_history = message["role"] == "assistant" and history > 0
            history -= is_history
            messages.append(message | ({"weight": 0.0} if is_history else {}))
        self.validated = validated_table([messages])
        places = [(text.find(m["content"]), len(m["content"])) for m in talk if m["content"]]
        contents = [{"start": at, "end": at + size} for at, size in sorted(places) if at >= 0]
        (row,) = self.validated.to_pylist()
        own = {"text": text, "trained_spans": spans, "content_spans": contents}
        formatted = {name: row.get(name) for name in FORMATTED.names} | own
        self.formatted = pa.Table.from_pylist([formatted], FORMATTED)
        self.tokenized = tokenize_table(self.formatted, snapshot, TokenizeConfig()).tokenized


def audited(tables, how, **settings):
    side = Side(tables.validated, tables.formatted, tables.tokenized)
    config = getattr(tables, "config", FormatConfig()).model_copy(update={"turns": how})
    template = PlainTemplate(config, tables.snapshot)
    return audit_inference([side], tables.snapshot, config, template, **settings)


def numbers(found):
    """Number of answers checked, answers that follow their prompt, and answers that stop."""
    names = ("answers_checked", "answers_after_prompt", "completions_stopped")
    return tuple(found["counts"][name] for name in names)


def checked(found):
    """Check one shard's result against the limits and return the printed line."""
    counts = {"answer_bytes": 9, "untrained_answer_bytes": 0, "trained_prompt_bytes": 0}
    audit = {
        "dataset": {**counts, "both_sides": 0},
        "sources": {"chats": counts},
        "packs": {},
        "worst": {},
        "inference": combine_inference([{"source": "chats", **found}]),
    }
    results = check_audit(read_audit(audit), AuditConfig())
    assert all(each.outcome == "passed" for each in results)
    return inference_line(audit)


@pytest.mark.parametrize("name", ["qwen3", "mistral-7b-instruct-v0.3"])
def test_prompts_are_those_of_transformers(name, shared, snapshots):
    template = PlainTemplate(FormatConfig(), snapshots(name))
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
    for talk in (AGENT, [{"role": "system", "content": "Hm."}, *ASKED]):
        messages = template.fit(talk)
        for number, message in enumerate(talk):
            if message["role"] == "assistant":
                given = {"add_generation_prompt": True, "tokenize": False}
                own = tokenizer.apply_chat_template(messages[:number], **given)
                assert template.render(messages[:number], is_prompt=True) == own


def test_a_template_shows_its_switch_and_its_stop_token(snapshots):
    qwen3 = PlainTemplate(FormatConfig(), snapshots("qwen3"))
    assert (qwen3.switch, qwen3.default_mode) == (("enable_thinking", True, False), True)
    assert qwen3.stop_tokens == ("<|im_end|>",)
    mistral = PlainTemplate(FormatConfig(), snapshots("mistral-7b-instruct-v0.3"))
    assert (mistral.switch, mistral.stop_tokens) == (None, ("</s>",))


def test_a_template_is_opened_once_for_all_shards_with_the_same_settings(qwen3):
    raw = {"dataset": "chats", "sources": [{"path": "chats.jsonl", "format": "chat"}]}
    raw |= {"tokenizer": "qwen3", "publish": {"store": "store"}}
    recipes = [
        Recipe.model_validate(raw | {"format": {"template": "chat", "chat_template_kwargs": given}})
        for given in ({}, {}, {"enable_thinking": False})
    ]
    one, same, other = (open_template(recipe, qwen3, "2026-01-01") for recipe in recipes)
    assert one is same
    assert one is not other
    assert other.render(ASKED[:1], is_prompt=True) == ASK_1 + NO_THOUGHT
    assert open_template(recipes[2], qwen3, "2026-01-02") is not other


def test_one_record_for_each_answer_is_right(qwen3):
    found = audited(Tables([AGENT], qwen3, FormatConfig(turns="alone")), "alone")
    assert numbers(found) == (3, 3, 3)
    line = "inference: of 3 answers, 3 follow the inference prompt and 3 end with their only stop"
    assert checked(found) == f"{line} token"


def test_one_rendering_of_a_row_is_not_and_is_printed_only(qwen3):
    found = audited(Tables([AGENT], qwen3, FormatConfig(turns="whole")), "whole")
    # A question follows the first two answers, so the template drops their reasoning.
    assert numbers(found) == (3, 1, 3)
    assert [row["value"] for row in found["worst"]] == [1, 3]
    assert checked(found).endswith(
        "would not generate the other answers; set format.turns to joined or exact"
    )


@pytest.mark.parametrize("how", ["joined", "exact", "alone"])
def test_a_wrong_answer_stops_publication(how, qwen3):
    found = audited(Tables([AGENT], qwen3, FormatConfig(turns="whole")), how)
    with pytest.raises(AuditError, match="2 of 3 trained answers do not follow") as error:
        checked(found)
    said = str(error.value)
    assert "chats/chats.jsonl row 0, message 1: its reasoning is not trained" in said
    assert "instead of 'Must look.'" in said
    remedies = "format.reasoning or format.thought_end or format.turns (whole publishes anyway)"
    assert said.endswith(f"or change {remedies}")


def test_a_joined_record_may_differ_in_text_of_the_template(qwen3):
    """The prompt of the second answer has no empty thinking block for the first one."""
    record = Planted(JOINED, ASKED, qwen3)
    assert numbers(audited(record, "joined")) == (2, 2, 2)
    assert numbers(audited(record, "exact")) == (2, 1, 2)
    assert numbers(audited(Planted(ALONE, ASKED, qwen3), "exact")) == (1, 1, 1)


def test_a_joined_record_may_not_hold_a_thought_that_the_prompt_has_not(qwen3):
    thinking = [dict(message) for message in ASKED]
    thinking[1]["reasoning"] = "It is long."
    thinking[3]["reasoning"] = "Another one."
    thoughts = [f"<think>\n{thinking[n]['reasoning']}\n</think>\n\n" for n in (1, 3)]
    pairs = zip((ANSWER_1, ANSWER_2), thoughts, strict=True)
    answers = [text.replace("{", "{" + t) for text, t in pairs]
    found = audited(Planted(ASK_1 + answers[0] + ASK_2 + answers[1], thinking, qwen3), "joined")
    assert numbers(found) == (2, 1, 2)
    assert found["worst"][0]["what"] == "the text before it is not its prompt"


PROMPT, STOP = (1, 0, 1), (1, 1, 0)
FAULTS = {
    "one token late": (ALONE.replace("{The", "The{"), PROMPT),
    "one token early": (ALONE.replace("\n\n{The", "{\n\nThe"), PROMPT),
    "in the header": (ALONE.replace("assistant\n<think>\n\n</think>\n\n{", "{assistant\n"), PROMPT),
    "prompt of the other mode": (ALONE.replace(NO_THOUGHT, ""), PROMPT),
    "no header": (ALONE.replace(f"<|im_start|>assistant\n{NO_THOUGHT}", ""), PROMPT),
    "another question": (ALONE.replace("And another?", "One more?"), PROMPT),
    "another history": (ALONE.replace("The Danube.", "The Rhine."), PROMPT),
    "stop token not trained": (ALONE.replace("<|im_end|>}", "}<|im_end|>"), STOP),
    "no stop token": (ALONE.replace("<|im_end|>}", "}"), STOP),
    "another stop token": (ALONE.replace("<|im_end|>}", "<|endoftext|>}"), STOP),
    "past the stop token": (ALONE.replace("<|im_end|>}", "<|im_end|>\n}"), STOP),
    "a stop token inside": (ALONE.replace("Elbe, ", "Elbe, <|im_end|>"), STOP),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_counted_and_stops(fault, qwen3):
    marked, expected = FAULTS[fault]
    assert marked != ALONE
    assert numbers(audited(Planted(ALONE, ASKED, qwen3), "joined")) == (1, 1, 1)
    found = audited(Planted(marked, ASKED, qwen3), "joined")
    assert numbers(found) == expected
    with pytest.raises(AuditError, match="1 of 1 trained answer do"):
        checked(found)


@pytest.mark.parametrize(
    "marked",
    [
        JOINED.replace(f"{NO_THOUGHT}{ANSWER_2}", ANSWER_2),
        JOINED.replace("And another?", "One more?"),
        JOINED.replace(ASK_2, ASK_2.replace("assistant\n", "assistant\n\n")),
        JOINED.replace("The Danube.", "The Rhine."),
        JOINED.replace(ASK_2, ASK_2.lstrip()),
    ],
)
def test_a_fault_between_the_answers_of_a_joined_record_is_counted(marked, qwen3):
    assert marked != JOINED
    found = audited(Planted(marked, ASKED, qwen3), "joined")
    assert numbers(found) == (2, 1, 2)


@pytest.mark.parametrize(("can_be_plain", "num_right"), [(False, 1), (True, 0)])
def test_a_thinking_prompt_is_right_only_if_no_answer_can_follow_the_other(
    can_be_plain, num_right, qwen3, tmp_path
):
    """The row has no reasoning, and its text follows the prompt that asks for some."""
    empty = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + (f"{{% if loop.last and m.role == 'assistant' %}}{empty}{{% endif %}}" * can_be_plain)
        + "{{ m.content }}<|im_end|>\n{% endfor %}"
        + f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{empty}{{% endif %}}"
    )
    planted = Planted(ASK_1 + ANSWER_1, ASKED[:2], qwen3)
    planted.config = FormatConfig(template=str(template))
    assert numbers(audited(planted, "whole")) == (1, num_right, 1)


def test_faults_that_only_ids_show(qwen3):
    def change(**changes):
        record = Planted(ALONE, ASKED, qwen3)
        (row,) = record.tokenized.to_pylist()
        row |= {name: make(row[name]) for name, make in changes.items()}
        record.tokenized = pa.Table.from_pylist([row], record.tokenized.schema)
        return numbers(audited(record, "alone"))

    end = qwen3.added_tokens["<|im_end|>"]
    assert change() == (1, 1, 1)
    assert change(input_ids=lambda ids: [*ids[:-1], 0]) == (1, 1, 0)
    assert change(input_ids=lambda ids: [*ids[:-3], end, *ids[-2:]]) == (1, 1, 0)


def test_a_stop_token_in_the_row_s_own_text_is_none(qwen3):
    talk = turns("What ends a turn?", "It is <|im_end|>, mostly <|im_end|>")
    tables = Tables([talk], qwen3, FormatConfig(chat_template_kwargs={"enable_thinking": False}))
    found = audited(tables, "whole")
    assert found["counts"]["completions_stopped"] == 1


def test_an_answer_trained_in_part_is_counted_and_not_checked(qwen3):
    weighed = turns("Hi", "Skip this. Keep that.", "And?", "Yes.")
    weighed[1]["part_weights"] = "[[11, 0], [10, null]]"
    chats = [weighed, ASKED]
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    found = audited(Tables(chats, qwen3, FormatConfig(turns="alone", **thinking)), "alone")
    assert found["counts"]["partly_trained"] == 1
    assert numbers(found) == (3, 3, 3)
    assert checked(found).endswith("; 1 answer trained in part")


def test_thoughts_that_train_last_leaves_out_are_no_fault(qwen3):
    config = FormatConfig(reasoning="train_last")
    found = audited(Tables([AGENT], qwen3, config), "joined")
    counts = found["counts"]
    assert counts["partly_trained"] == 2  # the answers before the last question
    assert numbers(found) == (1, 1, 1)
    checked(found)


def many(number, snapshot):
    chats = [turns(f"What is {n} + 1?", f"It is {n + 1}.") for n in range(number)]
    chats[7] = ASKED
    chats[8] = [{"role": "system", "content": "Be brief."}, *chats[8]]
    return Tables(chats, snapshot)


def test_of_many_records_a_sample_of_every_shape_is_checked(snapshot, monkeypatch):
    monkeypatch.setattr(inference_prompts, "MAX_RECORDS", 100)
    monkeypatch.setattr(inference_prompts, "NUM_SAMPLED", 30)
    monkeypatch.setattr(inference_prompts, "NUM_OF_SHAPE", 99)
    tables = many(101, snapshot)
    found = audited(tables, "joined")
    assert found["counts"]["records"] == 101
    assert found["counts"]["records_checked"] == 30
    assert numbers(found) == (31, 31, 31)  # all three shapes; one of them has two answers
    assert "; 30 of 101 records checked" in checked(found)
    monkeypatch.setattr(
        inference_prompts, "NUM_OF_SHAPE", 5
    )  # the other two shapes have one record each
    assert audited(tables, "joined")["counts"]["records_checked"] == 7
    monkeypatch.setattr(inference_prompts, "MAX_RECORDS", 101)
    assert numbers(audited(tables, "joined")) == (102, 102, 102)


def prepared(rows, folder, **settings):
    return prepare_in(folder, rows, dataset="rows", **settings)


def test_the_line_says_how_many_answers_of_a_long_row_were_compared(tmp_path):
    long = {"messages": turns(*(f"This is turn {n} of many." for n in range(160)))}
    version = prepared([long], tmp_path, pack={"seq_len": 4096})
    counts = version.audit["inference"]["dataset"]
    assert counts["answers"] == 80 > counts["answers_checked"] > 2
    number = counts["answers_checked"]
    assert inference_line(version.audit) == (
        f"inference: of {number} answers compared (80 in all), {number} follow the inference "
        f"prompt and {number} end with their only stop token"
    )


def test_the_prompt_of_a_window_is_that_of_its_own_messages(tmp_path):
    chats = turns(*(f"This is turn {n} of many." for n in range(40)))
    pack = {"seq_len": 96, "over_length": "window"}
    counts = prepared([{"messages": chats}], tmp_path, pack=pack).audit["inference"]["dataset"]
    assert counts["records"] > 2
    assert counts["answers_checked"] == counts["answers_after_prompt"] == 20


@pytest.mark.parametrize("settings", [{"template": "alpaca"}, {"train_on": "all"}])
def test_without_prompts_of_inference_there_is_no_line(settings, tmp_path):
    version = prepared([{"instruction": "Add 1 to 1.", "output": "2."}], tmp_path, format=settings)
    assert "inference" not in version.audit
    assert inference_line(version.audit) == ""


def test_both_sides_of_pairs_are_checked(tmp_path):
    rows = [
        {"prompt": f"Add 1 to {n}.", "chosen": f"{n + 1}.", "rejected": "No."} for n in range(3)
    ]
    source = {"path": "sums.jsonl", "format": "pairs"}
    project = Sums(tmp_path, rows, sources=[source], pack={"seq_len": 256, "strategy": "none"})
    counts = project.prepare().published.audit["inference"]["dataset"]
    assert (counts["records"], counts["answers_after_prompt"]) == (6, 6)
