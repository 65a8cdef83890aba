"""Hostile templates: limits on what they can access and use up."""

import resource
from functools import partial

import pytest

from packhouse.errors import TemplateError
from packhouse.system import worker
from tests.templates.toys import CHATML, render_chat

HI = [("user", "hi"), ("assistant", "hello")]
# Harmless for the probe, hostile for the row.
ON_ROW = "{% if messages[0].content == 'hi' %}"
MIB = 2**20


def render_hostile(hostile: str) -> list[str]:
    """In a worker: the reasons for which the row was refused."""
    out = render_chat(ON_ROW + hostile + "{% endif %}" + CHATML, [HI])
    return out.quarantined["reason"].to_pylist()


def in_worker(call):
    return worker.run_in_worker(call, what="template 'toy'", blames=TemplateError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    [
        "{{ (['a' * 1000000] * 20000) | join }}",
        "{{ [0] * 10 ** 10 }}",
    ],
)
def test_the_kernel_limits_the_memory_of_a_template(hostile, monkeypatch):
    monkeypatch.setenv(worker.MEMORY_MB, "256")

    with pytest.raises(TemplateError, match="needs more memory than its limit of 256 MB") as caught:
        in_worker(partial(render_hostile, hostile))

    assert caught.value.limit_mb == 256
    assert f"set {worker.MEMORY_MB} above 256" in str(caught.value)
    limit, _ = in_worker(partial(resource.getrlimit, resource.RLIMIT_DATA))
    assert 256 * MIB <= limit < 1024 * MIB  # and what a worker that is used again holds


@pytest.mark.slow
def test_the_kernel_limits_the_time_of_a_template(monkeypatch):
    monkeypatch.setenv(worker.SECONDS, "1")

    with pytest.raises(TemplateError, match="more CPU time than its limit of 1 s") as caught:
        in_worker(partial(render_hostile, "{{ 10 ** (10 ** 9) }}"))

    assert f"set {worker.SECONDS} above 1" in str(caught.value)


@pytest.mark.parametrize("hostile", ["{{ '\\ud800' }}", "{{ raise_exception('\\ud800') }}"])
def test_half_a_character_refuses_the_row_and_is_shown(hostile):
    (row,) = in_worker(partial(refusals, hostile))

    assert row[0] == "template"
    assert "\\ud800" in row[1]
    assert row[1].isascii()


def refusals(hostile: str) -> list[list[str]]:
    out = render_chat(ON_ROW + hostile + "{% endif %}" + CHATML, [HI]).quarantined
    return [[row["reason"], row["detail"]] for row in out.to_pylist()]


def test_the_error_names_the_row_and_the_next_template_renders_as_in_this_process():
    with pytest.raises(TemplateError, match=r"template 'toy', toy/rows\.jsonl row 0: needs"):
        in_worker(partial(render_hostile, "{{ 'a' * 10 ** 12 }}"))

    text = render_chat(CHATML, [HI]).formatted["text"].to_pylist()
    assert in_worker(partial(render_honest, CHATML)) == text


def render_honest(template: str) -> list[str]:
    return render_chat(template, [HI]).formatted["text"].to_pylist()


@pytest.mark.parametrize(
    "endless",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    ],
)
def test_recursion_without_end_refuses_the_row(endless):
    assert render_hostile(endless) == ["template_limit"]


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
