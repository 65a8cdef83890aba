"""`format.chat_template_kwargs`: arguments that a recipe passes to a chat template."""

import pytest

from packhouse.errors import ConfigError, TemplateError
from packhouse.recipe import FormatConfig, parse_recipe
from packhouse.render import make_renderer
from tests.templates.toys import CHATML, make_snapshot, make_table, snapshot_of

TALK = [("user", "Hi"), ("assistant", "Hello!")]
RECIPE = {"dataset": "made", "tokenizer": "org/name", "sources": [{"path": "rows.jsonl"}]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"messages": []}, "'messages' cannot be set as an argument"),
        ({"eos_token": "x"}, "'eos_token' cannot be set as an argument"),
        ({"a b": 1}, "'a b' cannot be set as an argument"),
        ({"x": float("nan")}, "cannot be written as JSON"),
        ({"x": "y" * 70_000}, "characters as JSON; the limit is 65,536"),
    ],
)
def test_arguments_that_no_template_can_have_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        parse_recipe(RECIPE | {"format": {"chat_template_kwargs": arguments}}, where="test")


def test_a_template_without_arguments_refuses_them():
    settings = {"template": "alpaca", "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ConfigError, match="template alpaca does not accept chat_template_kwargs"):
        parse_recipe(RECIPE | {"format": settings}, where="test")


def test_a_misspelt_argument_is_refused_with_those_that_the_template_reads(load_tokenizer):
    config = FormatConfig(chat_template_kwargs={"enable_thinkin": False})
    renderer = make_renderer(config, snapshot_of(load_tokenizer("qwen3")))

    with pytest.raises(TemplateError, match=r"does not read 'enable_thinkin'.*enable_thinking"):
        renderer.render(make_table([TALK]))


def test_a_name_with_a_default_of_the_template_is_an_argument():
    default = "{% if not day is defined %}{% set day = 'Mon' %}{% endif %}{{ day ~ '\\n' }}"
    config = FormatConfig(chat_template_kwargs={"day": "Tue"})

    rendered = make_renderer(config, make_snapshot(chat_template=default + CHATML)).render(
        make_table([TALK])
    )

    assert rendered.formatted["text"][0].as_py().startswith("Tue\n")


def test_rows_with_arguments_that_nothing_reads_are_counted():
    own = ['{"xml_tools": [1]}', None, '{"documents": [{"text": "a"}]}', '{"xml_tools": [1]}']
    template = "{% if documents %}{{ documents[0].text }}{% endif %}" + CHATML
    snapshot = make_snapshot(chat_template=template)

    rendered = make_renderer(FormatConfig(), snapshot).render(make_table([TALK] * 4, arguments=own))

    assert rendered.notes["arguments_not_read"] == 2
