"""Renderers in Python: where a plug-in's text contains the row's texts, and what is refused."""

import importlib
import itertools
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from packhouse.errors import ConfigError, PluginError, TemplateError
from packhouse.recipe import (
    FormatConfig,
)
from packhouse.render import make_renderer
from packhouse.store import open_version
from packhouse.system import plugins, worker
from packhouse.tokenize import load_snapshot
from tests.prepared import prepare_in
from tests.templates.toys import make_snapshot, make_table, pieces, refusals

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "deployments" / "demo" / "tokenizer"
PAGE = (ROOT / "docs" / "how-to" / "renderers.md").read_text("utf-8")
TOY = """
    import json

    class Toy:
        stop_tokens = ["<|im_end|>"]
        arguments = ["mood"]

        def __init__(self, folder):
            self.folder = folder

        def render(self, messages, tools, arguments, add_generation_prompt):
            text = arguments.get("mood", "") + (json.dumps(tools) if tools else "")
            for message in messages:
                text += f"<|im_start|>{message['role']}\\n{self.said(message)}<|im_end|>\\n"
            return text + "<|im_start|>assistant\\n" * add_generation_prompt

        def said(self, message):
            calls = [call["function"] for call in message.get("tool_calls", ())]
            return message["content"].strip() + "".join(map(json.dumps, calls))
"""
TALK = [("user", "Hi"), ("assistant", "Hello <|im_end|> you"), ("user", "Hi"), ("assistant", "Hi")]


VERSIONS = itertools.count(1)


class Toys:
    """Distributions in a separate folder, as pip installs them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.version = folder, 0
        """The version of the latest distribution; no other test has it."""

    def install(self, code: str, name: str = "toy", value: str = ":Toy") -> str:
        self.version = next(VERSIONS)  # a process caches what it knows about a renderer
        module = f"toy_renderer_{name}_{self.version}"
        info = self.folder / f"acme_{name}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        version = f"Version: {self.version}.0"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\n{version}\n")
        (info / "entry_points.txt").write_text(f"[packhouse.renderers]\n{name} = {module}{value}\n")
        (self.folder / f"{module}.py").write_text(textwrap.dedent(code), "utf-8")
        importlib.invalidate_caches()
        plugins.installed.cache_clear()
        return name


@pytest.fixture
def toys(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    worker.end_idle_workers()  # a waiting worker of an earlier test does not know the folder
    yield Toys(tmp_path / "site")
    plugins.installed.cache_clear()


def render(name: str, *talks: Any, tools: Any = None, **config: Any) -> Any:
    renderer = make_renderer(
        FormatConfig(template=name, **config), make_snapshot(), folder=Path("tokenizer")
    )
    return renderer.render(make_table(list(talks), tools=tools and [tools] * len(talks)))


def test_control_text_and_equal_contents_are_found_where_they_are(toys):
    name = toys.install(TOY)

    formatted = render(name, TALK, turns="exact").formatted

    assert formatted["text"].to_pylist() == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello <|im_end|> you<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
    ]
    assert pieces(formatted) == [["Hello <|im_end|> you<|im_end|>", "Hi<|im_end|>"]]
    assert pieces(formatted, "content_spans") == [["Hi", "Hello <|im_end|> you", "Hi", "Hi"]]


def test_an_object_or_a_module_is_a_renderer_too(toys):
    whole = render(toys.install(TOY), TALK).formatted
    made = toys.install(TOY + "\n    toy = Toy(None)\n", "object", ":toy")
    assert render(made, TALK).formatted.equals(whole)
    functions = TOY + "\n    stop_tokens, render = ('<|im_end|>',), Toy(None).render\n"
    assert render(toys.install(functions, "module", ""), TALK).formatted.equals(whole)


def test_texts_are_found_stripped_and_those_of_white_space_may_be_gone(toys):
    name = toys.install(TOY)
    talk = [("system", " \n"), ("user", "\n Hi  "), ("assistant", " Hello\n")]

    formatted = render(name, talk).formatted

    assert pieces(formatted) == [["Hello<|im_end|>"]]
    assert pieces(formatted, "content_spans") == [["Hi", "Hello"]]


def test_arguments_of_calls_are_found_in_json(toys):
    name = toys.install(TOY)
    arguments = {"b": 'Ro"me\n', "a": [1, None, {"c": "\u00e9"}], "n": 2.5, "empty": ""}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([call])},
        {"role": "tool", "content": '{"t":20}'},
        {"role": "assistant", "content": "20"},
    ]
    tool = json.dumps([{"type": "function", "function": {"name": "look", "description": "Hi"}}])

    formatted = render(name, talk, tools=tool).formatted

    assert pieces(formatted)[0][0] == json.dumps(call["function"]) + "<|im_end|>"
    found = pieces(formatted, "content_spans")[0]
    expected = ["look", "Hi", "look", "b", 'Ro\\"me\\n', "a", "c", "\\u00e9", "n", "empty"]
    assert found == [*expected, '{"t":20}', "20"]

    sorting = TOY.replace("map(json.dumps, calls)", "json.dumps(c, sort_keys=True) for c in calls")
    formatted = render(toys.install(sorting), talk, tools=tool).formatted
    assert '{"a": [1, null, {"c": "\\u00e9"}], "b": ' in pieces(formatted)[0][0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('message["content"].strip()', 'self.other(message["content"].upper(), message)'),
        ('message["content"].strip()', 'self.other(str(len(message["content"])), message)'),
        ("in messages:", "in sorted(messages, key=lambda m: len(m['content']) > 6):"),
    ],
)
def test_a_row_is_refused_if_words_are_written_otherwise(toys, old, new):
    assert old in TOY
    other = """
        def other(self, text, message):
            return text if " " in message["content"] else message["content"]
"""
    name = toys.install(TOY.replace(old, new, 1) + other)
    talk = [("user", "Qz and you"), ("assistant", "Aha"), ("user", "Be"), ("assistant", "A")]

    rendered = render(name, talk, [("user", "Unlike"), ("assistant", "Others")])

    assert rendered.formatted["row"].to_pylist() == [1]
    assert "spans cannot be determined" in refusals(rendered)[0]


def test_a_row_is_refused_if_its_texts_fit_in_two_ways(toys):
    """ "a" and " b" or "a " and "b": both texts may have been stripped."""
    code = TOY.replace("<|im_end|>\\\\n", "").replace(
        "def said(self, message):",
        """def said(self, message):
            if message["role"] == "assistant":
                return message["content"] + "<|im_end|>"
            return message["content"].strip()

        def render(self, messages, tools, arguments, add_generation_prompt):
            texts = [m["content"] for m in messages if m["role"] == "user"]
            texts = [t.strip() if t == "a " else t for t in texts]
            rest = [self.said(m) for m in messages if m["role"] == "assistant"]
            return "".join([*texts, "<|im_start|>", *rest])

        def unused(self, message):""",
    )
    name = toys.install(code)

    rendered = render(name, [("user", "a "), ("user", " b"), ("assistant", "c")])
    assert "changes its output" in refusals(rendered)[0]
    assert "spans cannot be determined" in refusals(rendered)[0]
    assert render(name, [("user", "a"), ("user", " b"), ("assistant", "c")]).formatted.num_rows == 1


def test_rows_that_the_library_refuses_are_quarantined_with_its_message(toys):
    check = """
    def check(messages):
        if "bad" in messages[0]["content"]:
            raise KeyError("no such turn")
"""
    name = toys.install(
        TOY.replace("            text =", "            check(messages); text =") + check
    )

    rendered = render(name, TALK, [("user", "bad"), ("assistant", "Hi")])
    assert rendered.formatted["row"].to_pylist() == [0]
    (said,) = refusals(rendered)
    assert said == (
        f"template: renderer 'toy' of acme-toy {toys.version}.0 rejected the row: KeyError: "
        "'no such turn'"
    )


def test_control_text_outside_of_contents_is_refused(toys):
    name = toys.install(TOY)
    tool = json.dumps([{"type": "function", "function": {"name": "look", "description": "</s>"}}])
    assert "control-token text '</s>' in a tool" in refusals(render(name, TALK, tools=tool))[0]
    named = [{"role": "user", "content": "Hi", "name": "<|im_end|>"}, TALK[1]]
    assert "control-token text '<|im_end|>' in an id" in refusals(render(name, named))[0]


def test_a_row_has_only_the_arguments_that_the_renderer_reads(toys):
    name = toys.install(TOY)
    renderer = make_renderer(FormatConfig(template=name), make_snapshot())
    own = json.dumps({"mood": "glad ", "else": 1})

    rendered = renderer.render(make_table([TALK, TALK], arguments=[own, None]))

    texts = rendered.formatted["text"].to_pylist()
    assert texts[0] == "glad " + texts[1]
    assert rendered.notes["arguments_not_read"] == 1
    with pytest.raises(
        TemplateError, match=r"does not support 'moood'.*known: mood\)\. Fix the name"
    ):
        render(name, TALK, chat_template_kwargs={"moood": "sad"})


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        ("stop_tokens =", "stops =", PluginError, "is not a renderer. It needs a function"),
        ('["<|im_end|>"]', '"<|im_end|>"', PluginError, "`stop_tokens`, a list of control tokens"),
        ('["<|im_end|>"]', '["<|eot|>"]', TemplateError, "at '<|eot|>', which is not a control"),
        ("return text +", "return b'' and", PluginError, "returned a bytes instead of a string"),
        ("self.folder = folder", "open(folder)", PluginError, "on tokenizer folder 'tokenizer'"),
    ],
)
def test_an_invalid_renderer_is_reported_by_name(toys, old, new, error, said):
    assert old in TOY
    name = toys.install(TOY.replace(old, new))
    with pytest.raises(error, match="renderer 'toy' of acme-toy") as caught:
        render(name, TALK)
    assert said in str(caught.value)


def test_stop_tokens_of_the_renderer_go_before_those_of_the_model(toys):
    name = toys.install(TOY.replace('["<|im_end|>"]', '["<s>", "<|im_start|>"]'))
    snapshot = make_snapshot(stop_tokens={"<|im_end|>": "generation_config.json"})
    rendered = make_renderer(FormatConfig(template=name), snapshot).render(make_table([TALK[:2]]))
    assert pieces(rendered.formatted) == [["Hello <|im_end|> you<|im_end|>\n<|im_start|>"]]


# Recipes.


def test_a_recipe_names_a_renderer_whose_version_is_part_of_the_id(toys, tmp_path):
    rows = [
        {"messages": [{"role": role, "content": f"{text} {number}"} for role, text in TALK]}
        for number in range(6)
    ]
    settings = {"dataset": "toys", "format": {"template": toys.install(TOY)}}
    version = prepare_in(tmp_path, rows, **settings)
    manifest = open_version(str(tmp_path / "store"), "toys").manifest
    assert manifest.libraries["acme-toy"] == f"{toys.version}.0"
    assert manifest.audit["inference"]["dataset"] == dict(
        records=6, records_checked=6, answers=12, answers_checked=12,
        answers_after_prompt=12, completions_stopped=12, partly_trained=0,
    )  # fmt: skip
    assert manifest.configuration["format"]["template"] == "toy"
    toys.install(TOY)
    assert prepare_in(tmp_path, rows, **settings).id != version.id


def test_a_renderer_of_packhouse_names_the_extra_that_it_needs(monkeypatch):
    def missing(name: str) -> str:
        raise plugins.PackageNotFoundError(name)

    monkeypatch.setattr(plugins, "version_of", missing)
    for name, library in (("harmony", "openai-harmony"), ("mistral", "mistral-common")):
        with pytest.raises(ConfigError) as caught:
            render(name, TALK)
        command = plugins.pip_install(name)
        assert str(caught.value) == (
            f"renderer '{name}' needs {library}, which is not installed: {command}"
        )


# Real libraries.


CALL = {"name": "get_weather", "arguments": {"city": "Rome"}}
DEEPSEEK = (
    *("begin\u2581of\u2581sentence", "User", "Assistant", "latest_reminder", "action", "query"),
    *("authority", "domain", "title", "read_url"),
)
STOP = "<\uff5cend\u2581of\u2581sentence\uff5c>"
OTHERS = [
    *(f"<\uff5c{name}\uff5c>" for name in DEEPSEEK),
    "\uff5cDSML\uff5c",
    "<think>",
    "</think>",
]
SAMPLED = (
    'Must look.</think>\n\n<|DSML|tool_calls>\n<|DSML|invoke name="get_weather">\n'
    '<|DSML|parameter name="city" string="true">Rome</|DSML|parameter>\n'
    "</|DSML|invoke>\n</|DSML|tool_calls><|end\u2581of\u2581sentence|>".replace("|", "\uff5c")
)
"""Output of DeepSeek V4 that thinks and calls."""


def test_the_plug_in_of_the_page_writes_a_thought_and_a_call(toys, tmp_path):
    pytest.importorskip("renderers", reason="renderers is not installed")
    from transformers import AutoTokenizer

    toys.install(PAGE.partition("```python\n")[2].partition("```")[0], "thinker", ":DeepSeekV4")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.add_special_tokens({"eos_token": STOP, "extra_special_tokens": [*OTHERS, STOP]})
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    calls = json.dumps([{"id": "a", "type": "function", "function": CALL}])
    talk = [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": "", "reasoning": "Must look.", "tool_calls": calls},
    ]
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "parameters": parameters}
    tools = json.dumps([{"type": "function", "function": function}])

    config, snapshot = FormatConfig(template="thinker"), load_snapshot(tmp_path / "tokenizer")
    renderer = make_renderer(config, snapshot, folder=tmp_path / "tokenizer")
    done = renderer.render(make_table([talk], tools=[tools]))

    assert not refusals(done)
    assert pieces(done.formatted) == [[SAMPLED]]
