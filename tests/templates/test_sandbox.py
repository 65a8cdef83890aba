"""Hostile templates: what they cannot reach, and what they cannot use up."""

import pytest

from packhouse.errors import TemplateError
from packhouse.templates import limits
from tests.templates.toys import CHATML, render_chat

HI = [("user", "hi"), ("assistant", "hello")]
# Harmless to the probe, hostile to the row.
ON_ROW = "{% if messages[0].content == 'hi' %}"


@pytest.mark.parametrize(
    "hostile",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | indent(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
        "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
        "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    ],
)
def test_a_template_that_uses_up_the_machine_is_stopped_on_the_row(hostile):
    out = render_chat(ON_ROW + hostile + "{% endif %}" + CHATML, [HI])

    assert out.quarantined["reason"].to_pylist() == ["template_limit"]


def test_a_template_that_only_takes_time_ends_the_run(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", -1.0)
    slow = ON_ROW + "{% for a in range(999) %}{% endfor %}{% endif %}" + CHATML

    with pytest.raises(TemplateError, match="on one conversation"):
        render_chat(slow, [HI])


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_reaches_for_the_interpreter_is_refused(escape):
    out = render_chat(ON_ROW + escape + "{% endif %}" + CHATML, [HI])

    assert out.quarantined["reason"].to_pylist() == ["template"]


@pytest.mark.parametrize(
    "escape", ["{{ raise_exception.__globals__ }}", "{{ messages.__class__ }}", "{{ lipsum }}"]
)
def test_the_interpreter_is_undefined_to_a_template(escape):
    out = render_chat(ON_ROW + escape + "{% endif %}" + CHATML, [HI])

    assert (
        out.formatted["text"].to_pylist() == render_chat(CHATML, [HI]).formatted["text"].to_pylist()
    )


def test_randomness_does_not_exist():
    with pytest.raises(TemplateError, match="No filter named 'random'"):
        render_chat("{{ [1, 2] | random }}" + CHATML, [HI])
