"""Every stock template of TRL: trained text is the inference prompt's continuation, up to its stop.

The rule is in docs/masks.md. `check` compares each answer with `apply_chat_template`.
"""

import json
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed")

from tests.templates.families import (
    CHOSEN,
    SHAPES,
    SPLITTING,
    TOOLS,
    Outcome,
    cases,
    check,
    family,
    has_thoughts,
    outcome,
    outcome_of,
    render,
    rendered_by_packhouse,
    table,
    tools_of,
)

pytestmark = pytest.mark.usefixtures("shared")
TURNS = ("joined", "exact", "alone")

NEVER_THINKS = (
    *("cohere", "deepseek", "gemma.", "gemma3", "idefics3", "lfm2.", "llama3", "llava_next"),
    *("phi3", "qwen2_5", "smolvlm"),
)
"""Templates that write no reasoning in any turn: refused as a whole if a row has reasoning."""

CALLS = (
    *("tools", "parallel", "callast", "textcall"),
    *("toolsthink", "agent", "lookthink", "answerthink"),
)
_NO_CALLS = dict.fromkeys(CALLS, "content_lost")
REFUSED = {
    # The prompt opens a thinking block, and no setting prevents it.
    ("deepseek",): dict.fromkeys(("chat2", "sys", *CALLS), "no_reasoning"),
    ("cohere", "gemma3", "lfm2.", "llama3.", "phi3", "qwen2_5_vl"): _NO_CALLS,
    ("gemma.",): {"sys": "template", **_NO_CALLS},
    ("idefics3", "llava_next", "smolvlm"): {
        **dict.fromkeys(CALLS, "template"),
        "textcall": "content_lost",
    },
    # One call in a turn, and no text with it.
    ("llama3_2",): {"parallel": "template", "textcall": "content_lost"},
    # Only reasoning before a call is written.
    ("gemma4.",): dict.fromkeys(
        ("think2", "mixed", "toolsthink", "answerthink", "agent"), "thought_lost"
    ),
    # The prompt after a result opens a thinking block if the turn is already closed (a text after
    # the call closes it), or if the template writes another header.
    ("gemma4_v5",): {"agent": "template", "textcall": "template"},
    ("diffusion_gemma",): dict.fromkeys(
        ("toolsthink", "answerthink", "agent", "textcall"), "template"
    ),
    # The first of two calls is written; reasoning, text and a call in one turn raise an error.
    ("gptoss",): {"parallel": "content_lost", "agent": "template"},
    # A text before a call is not written.
    ("muse_glimmer",): {"agent": "content_lost", "textcall": "content_lost"},
}
"""Rows that the rule refuses, by prefix of the template's name: shape and reason code."""

RECORDS = {
    ("glm4moe",): {"think2": (2, 2), "mixed": (2, 2), "agent": (2, 2)},
    # A text before a call is written as reasoning.
    ("gptoss",): {"chat2": (1, 2), "think2": (2, 2), "mixed": (1, 2), "textcall": (2, 2)},
    # A text before a call moves after the result.
    ("gemma4.",): {"textcall": (2, 2)},
    ("nemotron_3",): {"think2": (2, 2), "agent": (2, 2)},
    ("lfm2_2_5",): {"think2": (2, 2), "agent": (2, 2)},
    ("diffusion_gemma", "gemma4_v5"): {
        "think2": (2, 2),
        "mixed": (2, 2),
        "lookthink": (2, 2),
    },
    ("qwen3.",): {
        **{"chat2": (1, 2), "think2": (2, 2), "mixed": (2, 2), "agent": (2, 2)},
        **{"tools": (1, 2), "parallel": (1, 2), "answerthink": (1, 2), "textcall": (1, 3)},
    },
    ("qwen3_5_nothink", "qwen3_6"): {
        **{"chat2": (1, 2), "think2": (2, 2), "mixed": (2, 2), "agent": (2, 2)},
        "textcall": (1, 2),
    },
    ("qwen3_8",): {"mixed": (2, 2)},  # reasoning stays; the switch changes the system prompt
}
"""Records of a shape with `joined` and `exact`; one each if not listed."""


def expected_refusal(name: str, shape: str) -> str | None:
    if has_thoughts(SHAPES[shape]) and name.startswith(NEVER_THINKS):
        return "TemplateError"
    of = (reasons for prefixes, reasons in REFUSED.items() if name.startswith(prefixes))
    return next(of, {}).get(shape)


def expected_records(name: str, shape: str, turns: str) -> int:
    if turns == "alone":
        return sum(m["role"] == "assistant" for m in SHAPES[shape])
    of = (counts for prefixes, counts in RECORDS.items() if name.startswith(prefixes))
    return next(of, {}).get(shape, (1, 1))[turns == "exact"]


@cache
def outcomes(name: str, turns: str) -> dict[str, Outcome]:
    return {shape: outcome(family(name), shape, turns) for shape in SHAPES}


@pytest.mark.parametrize(("name", "turns"), cases(*TURNS))
def test_trained_answers_follow_the_prompt_of_inference_and_are_what_it_samples(name, turns):
    faults = []
    for shape, got in outcomes(name, turns).items():
        expected = expected_refusal(name, shape)
        if got.reason != expected:
            faults.append(f"{shape}: refused as {got.reason}, expected {expected}: {got.detail}")
        if got.reason is None:
            found = check(family(name), SHAPES[shape], tools_of(shape), turns, got.records)
            faults += [f"{shape}: {fault}" for fault in found]
            if len(got.records) != expected_records(name, shape, turns):
                faults.append(f"{shape}: {len(got.records)} records")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", [n for n in CHOSEN if n.startswith("deepseek")])
def test_thought_end_writes_the_thoughts_of_templates_that_only_open_them(name):
    made = outcome(family(name), "think2", thought_end="\n</think>\n\n")
    end = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    assert [[a.completion for a in record] for record in made.records] == [
        ["Counting up.\n</think>\n\nIt is 2." + end],
        ["One further.\n</think>\n\nIt is 3." + end],
    ]
    for record in made.records:
        prompt = render(family(name), SHAPES["think2"][: record[0].message], is_prompt=True)
        assert record[0].before == prompt


def test_a_base_checkpoint_learns_to_end_turns_as_its_template_does():
    """ChatML on a model whose EOS is `<|endoftext|>`, with no other information."""
    of = family("qwen3_vl.jinja")
    base = of.base("<|endoftext|>")
    ((first, second),) = outcome_of(base, SHAPES["chat2"], None).records
    assert (first.completion, second.completion) == ("It is 2.<|im_end|>", "It is 3.<|im_end|>")


@pytest.mark.parametrize("name", [n for n in SPLITTING if not n.startswith(NEVER_THINKS)])
def test_history_starts_no_record_and_is_not_refused(name):
    """Earlier answers lost their reasoning, or could not have been generated."""
    name = f"{name}.jinja"
    of = family(name)
    for shape in ("think2", "mixed"):
        if expected_refusal(name, shape) is None:
            ((answer,),) = outcome(of, shape, train_on="last_assistant").records
            assert answer.message == 3
            assert [answer] == outcome(of, shape, "alone").records[-1]


def test_a_last_answer_with_reasoning_is_trained_after_one_without():
    """DeepSeek's prompt opens a thinking block: a first answer is refused unless it is history."""
    of = family("deepseek_r1_distill.jinja")
    options = {"thought_end": "\n</think>\n\n"}
    assert outcome(of, "mixed", **options).reason == "no_reasoning"
    ((answer,),) = outcome(of, "mixed", train_on="last_assistant", **options).records
    assert answer.completion.startswith("One further.\n</think>\n\nIt is 3.")
    messages = [dict(m) for m in SHAPES["mixed"]]
    messages[1]["weight"] = 0.0
    assert outcome_of(of, messages, None, **options).records == [[answer]]


def test_a_stop_token_in_a_text_of_the_row_ends_nothing():
    messages = [SHAPES["chat2"][0], {"role": "assistant", "content": "Say <|im_end|> to stop."}]
    for name in ("qwen2_5.jinja", "qwen3.jinja", "glm4moe.jinja"):
        of = family(name)
        ((answer,),) = outcome_of(of, messages, None).records
        assert "Say <|im_end|> to stop." in answer.completion
        assert answer.completion.endswith(of.stops)


CALLS_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.tool_calls %}{{ '<think>' + (m.reasoning_content or '') + '</think>' + m.content }}"
    "{% for c in m.tool_calls %}{{ '[' + c.id + ']' + c.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'assistant' %}{{ '<think></think>' + m.content }}"
    "{% elif m.role == 'tool' %}{{ m.tool_call_id + ': ' + m.content }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Like Kimi's: reasoning only before calls, and only the id and the arguments of a call."""


def completions(made: Outcome) -> list[list[str]]:
    return [[answer.completion for answer in record] for record in made.records]


def test_thoughts_that_only_calls_keep_are_written_before_answers_too():
    of = family("qwen3.jinja").with_template(CALLS_ONLY)
    assert completions(outcome(of, "think2")) == [
        ["<think>Counting up.</think>It is 2.<|im_end|>"],
        ["<think>One further.</think>It is 3.<|im_end|>"],
    ]
    assert completions(outcome(of, "chat2")) == [
        ["<think></think>It is 2.<|im_end|>", "<think></think>It is 3.<|im_end|>"]
    ]


def test_a_call_whose_name_is_only_in_its_id():
    of = family("qwen3.jinja").with_template(CALLS_ONLY)
    refused = outcome(of, "parallel")
    assert refused.reason is not None
    assert "call_ids: functions" in refused.detail
    ((call, answer),) = outcome(of, "parallel", call_ids="functions").records
    assert call.completion == (
        '<think></think>[functions.get_weather:0]{"city": "Rome"}'
        '[functions.get_weather:1]{"city": "Oslo"}<|im_end|>'
    )
    assert "functions.get_weather:0: Sunny now<|im_end|>" in answer.before
    assert "functions.get_weather:1: Snowy now<|im_end|>" in answer.before


@pytest.mark.parametrize(
    "value", [["Rome", "Oslo"], ["Rome", "Rome"], [["Rome"], ["Oslo"]], ["Rome", {"a": ["b", "c"]}]]
)
def test_lists_in_calls_may_be_written_as_python_writes_them(value):
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": value}}}
    asked = {"role": "assistant", "content": "", "tool_calls": json.dumps([call])}
    made = outcome_of(family("lfm2_2_5_v2.jinja"), [SHAPES["chat2"][0], asked], None)
    ((answer,),) = made.records
    assert f"look(at={value})" in answer.completion.replace('"', "'")


CALL_STOPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments | tojson"
    " + '<|call|>' }}{% else %}{{ '<|im_end|>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALL_WITHOUT_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments | tojson }}"
    "{% else %}{{ '<|im_end|>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_one_call_that_stops_is_no_refusal():
    of = family("gptoss.jinja").with_template(CALL_STOPS, "<|im_end|>")
    ((call, answer),) = outcome(of, "tools").records
    assert call.completion == 'get_weather{"city": "Rome"}<|call|>'
    assert answer.completion == "It is sunny.<|im_end|>"


def test_the_docs_have_the_table_of_families():
    """The table is written by `python -m tests.templates.families`."""
    page = (Path(__file__).parents[2] / "docs" / "masks.md").read_text("utf-8")
    _, _, rest = page.partition("<!-- families -->\n")
    assert rest.partition("<!-- /families -->")[0] == table()
    assert len(page.split()) <= 1200


def test_stop_tokens_are_those_of_the_files_or_of_the_recipe():
    """GLM ends turns with tokens that only generation_config.json names."""
    of = family("glm4moe.jinja")
    without = of.base(of.vendor.eos)
    assert outcome(of, "tools").reason is None
    assert outcome(without, "tools").reason == "TemplateError"
    assert outcome(without, "tools", stop_tokens=list(of.stops)) == outcome(of, "tools")
    other = outcome(family("qwen3.jinja"), "chat2", stop_tokens=["<|endoftext|>"])
    assert other.reason == "TemplateError"
    assert "but format.stop_tokens lists '<|endoftext|>'" in other.detail


@pytest.mark.parametrize("name", ["qwen3.jinja", "glm4moe.jinja"])
def test_records_that_differ_only_in_the_thinking_switch_have_names_of_their_own(name):
    # The first answer gets the thinking prompt if a later one of its exchange thinks.
    done = [
        rendered_by_packhouse(family(name), [*SHAPES["tools"][:3], last], TOOLS, turns="alone")
        for last in (
            {"role": "assistant", "content": "Sunny.", "reasoning": "The sun is out."},
            {"role": "assistant", "content": "Sunny."},
        )
    ]
    first = [each.formatted.to_pylist()[0] for each in done]
    trained = [(record["text"], record["trained_spans"]) for record in first]
    assert trained[0] != trained[1]
    assert first[0]["record_id"] != first[1]["record_id"]


THOUGHT_END = {"deepseek_r1_distill": {"thought_end": "\n</think>\n\n"}}


@pytest.mark.parametrize("turns", ["joined", "alone"])
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss", "deepseek_r1_distill"])
def test_messages_after_the_last_trained_answer_are_not_refused(name, turns):
    of, config = family(f"{name}.jinja"), {"turns": turns, **THOUGHT_END.get(name, {})}
    talk = SHAPES["think2"]
    for end in ([talk[2]], [talk[2], {**talk[3], "weight": 0.0}]):
        made = outcome_of(of, [*talk[:2], *end], None, **config)
        assert made.reason is None, made.detail
        assert made.records == outcome_of(of, talk[:2], None, **config).records


@pytest.mark.parametrize(("name", "shape"), [("gptoss", "parallel"), ("muse_glimmer", "textcall")])
def test_text_of_an_untrained_answer_that_the_template_leaves_out_refuses_nothing(name, shape):
    talk = [dict(message) for message in SHAPES[shape]]
    assert outcome_of(family(f"{name}.jinja"), talk, TOOLS).reason == "content_lost"
    talk[1]["weight"] = 0.0
    done = rendered_by_packhouse(family(f"{name}.jinja"), talk, TOOLS)
    assert done.quarantined.num_rows == 0, done.quarantined.to_pylist()
    assert done.notes["history_not_rendered"] == 1


def test_reasoning_in_a_field_and_in_the_text_is_not_trained_in_part():
    talk = [SHAPES["think2"][0], {**SHAPES["think2"][1], "content": "Before.</think>After."}]
    config = THOUGHT_END["deepseek_r1_distill"]
    assert outcome_of(family("deepseek_r1_distill.jinja"), talk, None, **config).reason == (
        "thought_lost"
    )
