"""Templates of families that the design does not list, each with what it once was trained wrong."""

from tests.templates.toys import chat_renderer, make_table, pieces, render_chat

METHARME = (  # EOS after the last turn alone; headers end the turns before
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|model|>{{ m.content }}"
    "{% if loop.last %}</s>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
TOKENS = {"<|system|>": 1, "<|user|>": 2, "<|model|>": 3, "</s>": 4}
LAST_WORD = (  # the last message alone decides whether the prompt or the model writes <|system|>
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' %}<|system|>{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: "
    "{% if messages[-1].content.endswith('/no') %}<|system|>{% endif %}{% endif %}"
)
OPENS = (
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.role == 'assistant' and loop.last %}<think>\n{% endif %}"
    "{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: <think>\n{% endif %}"
)


def test_the_next_header_is_no_end_of_a_turn():
    roles = [("system", "Be kind."), ("user", "Two?"), ("assistant", "2.")]
    out = render_chat(
        METHARME, [[*roles, ("user", "Three?"), ("assistant", "3.")]], added_tokens=TOKENS
    )

    texts = out.formatted["text"].to_pylist()
    assert [text for text in texts if text.endswith("3.</s>")] == [
        "<|system|>Be kind.<|user|>Two?<|model|>2.<|user|>Three?<|model|>3.</s>"
    ]


def test_what_a_prompt_asks_of_its_last_message_alone_makes_another_kind():
    turns = [
        (("user", "assistant")[at % 2], f"turn {at}" + " /no" * (at in (0, 50))) for at in range(80)
    ]
    renderer = chat_renderer(LAST_WORD, {"turns": "exact"}, added_tokens=TOKENS)
    out = renderer.render(make_table([turns]))

    (trained,) = pieces(out.formatted)
    assert trained == [
        f"{'' if at in (1, 51) else '<|system|>'}{turns[at][1]}</s>" for at in range(1, 80, 2)
    ]


def test_a_plain_answer_is_not_trained_within_a_thought_that_the_prompt_opens():
    out = render_chat(OPENS, [[("user", "Two?"), ("assistant", "2.")]], added_tokens=TOKENS)

    assert out.quarantined["reason"].to_pylist() == ["no_reasoning"]
