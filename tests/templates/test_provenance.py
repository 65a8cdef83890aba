"""Text of the row is never mistaken for the template's own, whatever a template does to it.

Contents are Greek and templates are ASCII, so a Greek letter in a constant is a leak.
"""

import re
from copy import deepcopy
from datetime import datetime

import jinja2
import pytest

from packhouse.render import provenance
from packhouse.render.jinja_sandbox import ChatTemplate, _make_environment
from packhouse.render.provenance import Piece, TracedText
from packhouse.render.rendered_texts import RefusedError
from packhouse.render.template_arguments import TemplateArguments
from packhouse.render.text_positions import TracedRow

GREEK = re.compile("[\u0370-\u03ff]")
CONTENT = " \u03b1\u03b2 <b>\u03b3\u03b4</b>\n\u03b5 "
CALL = {"name": "f\u03b6", "arguments": {"k\u03b7": ["v\u03b8", {"n": "\u03b9"}], "x": 1}}
MESSAGES = [
    {"role": "user", "content": CONTENT},
    {
        "role": "assistant",
        "content": "\u03ba",
        "tool_calls": [{"type": "function", "id": "i\u03bb", "function": CALL}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "t\u03bc", "parameters": {"p\u03bd": "\u03be"}}}]
PREFIX = "{% set m = messages[0].content %}{% set call = messages[1].tool_calls[0] %}"
ARGUMENTS = [
    "",
    "m",
    "3",
    "'-', 2",
    "'<b>', m",
    "m, m",
    "{'a': m}",
]


def check(source, messages=MESSAGES, tools=TOOLS):
    """Check that traced and plain renderings are equal and no constant contains row text."""
    try:
        template = ChatTemplate(source, {}, where="toy")
        expected = template.render(deepcopy(messages), deepcopy(tools))  # indent changes lists
    except (RefusedError, jinja2.TemplateError):
        return False
    nothing = re.compile("(?!)")
    try:
        rendering = TracedRow(template, messages, TemplateArguments(tools), nothing).rendering
    except RefusedError:
        return False  # refused, not guessed
    text, expected = (re.sub("0x[0-9a-f]+", "", t) for t in (rendering.text.decode(), expected))
    assert text == expected, source
    for part in rendering.parts:
        if not isinstance(part, Piece):
            assert not GREEK.search(part), source
        elif part.form is None:
            assert part.field.value[part.start : part.end] == part.text, source
    return True


def check_uses(expression):
    """Write the value, and its items if it has any."""
    source = "{% set u = EXPRESSION %}{{ u }}{% if u is iterable %}{% for x in u %}{{ x }}|"
    check(PREFIX + source.replace("EXPRESSION", expression) + "{% endfor %}{% endif %}")


ALIASES = {"count", "d", "e"}
FILTERS = sorted(name for name in _make_environment(datetime.now()).filters if name[0] != "_")


@pytest.mark.parametrize("name", [name for name in FILTERS if name not in ALIASES])
def test_no_filter_leaks(name):
    for value in ["m", "[m, m]", "call", "messages", "m.split()"]:
        for arguments in ARGUMENTS if value == "m" else ["", "m"]:
            check_uses(f"{value} | {name}({arguments})")


@pytest.mark.parametrize("name", sorted(n for n in dir(str) if n[0] != "_"))
def test_no_method_leaks(name):
    for arguments in ARGUMENTS:
        check_uses(f"m.{name}({arguments})")
    for owner in ("'a <b> c'", "m[2:-3]"):
        for arguments in ("", "'<b>', m"):
            check_uses(f"{owner}.{name}({arguments})")


@pytest.mark.parametrize(
    "source",
    [
        "{{ '%s and %s' % (m, 'a') }}",
        "{{ m % 3 }}",
        "{{ '{} {x}'.format(m, x=m) }}",
        "{{ '{0[0]}'.format([m]) }}",
        "{{ m ~ 1 ~ m }}",
        "{{ 'a' + m + 'b' }}",
        "{{ m * 2 }}{{ 2 * m }}",
        "{{ [m] }}{{ {m: m} }}{{ (m, 1) }}",
        "{{ messages }}{{ tools }}{{ call }}",
        "{{ messages | string }}{{ 'x' ~ [m] }}",
        "{{ dict(a=m) }}{{ dict(call.function) }}",
        "{{ namespace(a=m).a }}",
        "{{ call | tojson }}{{ tools | tojson(indent=2) }}",
        "{{ {'a': m, m: 1} | tojson(sort_keys=true) }}",
        "{{ (call.function | tojson)[:-1] }}{{ (call.function | tojson)[3:7] }}",
        "{{ call.function.arguments | tojson | tojson }}",
        "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        "{% for k in call.function.arguments %}{{ k ~ call.function.arguments[k] }}{% endfor %}",
        "{{ call.function.arguments.copy() }}{{ call.function.arguments | dictsort }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(m) | upper }}{{ f(m).split('<') | join }}",
        "{% set x %}a{{ m }}b{% endset %}{{ x | trim }}{{ x | length }}",
        "{% filter upper %}a{{ m }}{% endfilter %}",
        "{{ (m | safe) + 'a' }}",
        "{% generation %}{{ m }}{% endgeneration %}",
        "{{ strftime_now(m) }}{{ strftime_now('%Y') }}",
        "{{ cycler(m, 'a').next() }}{{ joiner(m)() }}",
        "{{ m[::-1] }}{{ m[0] }}{{ m[-1] }}{{ m[2:5] }}",
        "{{ m.translate({945: m}) }}{{ 'a'.translate({97: m}) }}",
        "{{ m.encode().decode() }}",
        "{{ m | safe + '<' }}{{ '<' + (m | safe) }}",
        "{{ m if m in 'abc' else 'x' }}{{ 'y' if 'b' in m and m not in ['a'] }}",
    ],
)
def test_no_operator_leaks(source):
    check(PREFIX + source)


@pytest.mark.parametrize("number", ["0", "7"])
def test_a_row_cannot_forge_the_placeholders_of_its_texts_in_json(number):
    call = MESSAGES[1]["tool_calls"][0] | {"type": f"\0{number}\0", f"\0{number}\0": 1}
    messages = [MESSAGES[0], MESSAGES[1] | {"tool_calls": [call]}]
    for form in ("", "indent=1", "ensure_ascii=true"):
        assert check("{{ messages[1].tool_calls | tojson(" + form + ") }}", messages, None)


@pytest.mark.parametrize("use", ["m.join([1])", "m.removeprefix((' ', 'b'))", "m.removesuffix(1)"])
def test_calls_that_str_refuses_are_refused(use):
    template = ChatTemplate(PREFIX + "{{ " + use + " }}", {}, where="toy")
    talk = TracedRow(template, MESSAGES, TemplateArguments(), re.compile("(?!)"))
    with pytest.raises(RefusedError, match="TypeError"):
        _ = talk.rendering


@pytest.mark.parametrize(
    "use", [".split(' ') | join(' ')", ".splitlines() | join", " | list | join"]
)
def test_the_work_grows_with_the_length_of_a_text(use, monkeypatch):
    looks = []
    plain = provenance.plain
    monkeypatch.setattr(provenance, "plain", lambda part: looks.append(part) or plain(part))
    source = "{{ messages[0].content.replace('\n', ' \n')USE }}".replace("USE", use)
    template = ChatTemplate(source, {}, where="toy")
    work = []
    for size in (200, 400):
        looks.clear()
        messages = [{"role": "user", "content": "x\n" * size}]
        talk = TracedRow(template, messages, TemplateArguments(), re.compile("(?!)"))
        assert talk.rendering.text.count(b"x") == size
        work.append(len(looks))

    assert 200 < work[0] < work[1] < 2.1 * work[0]


def test_a_template_cannot_reach_the_provenance_of_a_text():
    own = set(vars(TracedText)) - set(dir(str))
    assert all(name.startswith("_") for name in own)
