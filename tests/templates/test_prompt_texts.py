"""Templates made of constant texts: dart-math's, by name, and those of a dict or object."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packhouse.addons.dart_math import dart_math, texts_to_jinja
from packhouse.addons.dart_math.supervised import _format
from packhouse.errors import ConfigError
from packhouse.recipe import FormatConfig
from packhouse.recipe.sections import TEMPLATES
from packhouse.render import make_renderer
from packhouse.tokenize.encoders import Ends
from tests.templates.toys import make_snapshot, make_table, pieces

DEMO = str(Path(__file__).parents[2] / "deployments" / "demo" / "tokenizer")
# sha256 of the result of dart-math's PromptTemplate(...).make_full_prompt("What is 1 + 1?").
PROMPTS = {
    "dart-math/qa": "051c151e7d3cac30",
    "dart-math/alpaca": "73c325ae1680e61f",
    "dart-math/wizardmath-cot": "f672dafe464dbdfa",
    "dart-math/deepseekmath": "8f5ad5bb7c65ea3c",
    "dart-math/deepseekmath-tool": "0f3f3194a5926ca1",
    "dart-math/xwinmath": "a8f63a9b9115b180",
    "dart-math/mammoth2-cot": "e9605e4d127959a0",
    "dart-math/llama3-math": "1e5765f75006aefe",
}
QUESTION = [[("user", "What is 1 + 1?"), ("assistant", " It is 2.")]]


def render(name: str, conversations: Any = QUESTION, **snapshot: Any) -> Any:
    renderer = make_renderer(FormatConfig(template=name), make_snapshot(**snapshot))
    return renderer.render(make_table(conversations))


def test_the_names_of_all_are_those_that_a_recipe_takes():
    assert {name for name in TEMPLATES if "/" in name} == {*dart_math()} == {*PROMPTS}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_dart_math_s_to_the_byte_and_the_answer_alone_is_trained(name):
    done = render(name, adds_bos=False).formatted

    (text,) = done["text"].to_pylist()
    prompt = text.removesuffix(" It is 2.</s>")
    assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == PROMPTS[name]
    assert pieces(done) == [[" It is 2.</s>"]]


def test_a_bos_at_the_start_of_the_texts_appears_once():
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "</s>"}
    (text,) = render("dart-math/llama3-math", special_tokens=tokens).formatted["text"].to_pylist()

    assert text.startswith("<|begin_of_text|><|start_header_id|>system")
    assert text.count("<|begin_of_text|>") == 1
    other = render("dart-math/qa", special_tokens=tokens).formatted["text"].to_pylist()[0]
    assert other.startswith("<|begin_of_text|>User:\nWhat is")


def test_later_turns_follow_delim_and_system_turns_are_refused():
    talk = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    done = render("dart-math/qa", [talk, [("system", "s"), *talk]], adds_bos=False)

    assert done.formatted["text"].to_pylist() == [
        "User:\na\n\nAssistant:\nb</s>\n\nUser:\nc\n\nAssistant:\nd</s>"
    ]
    assert pieces(done.formatted) == [["b</s>", "d</s>"]]
    assert len(done.quarantined) == 1


@dataclass
class PromptTemplate:
    id: str = "mine"
    sys_prompt: str = 'You "solve" {{ problems }}.\n'
    query_prompt: str = "Q: "
    prompt_after_query: str = "\n"
    resp_prompt: str = "A: "
    prompt_before_resp: str = ""
    delim: str = "\n\n"

    def make_full_prompt(self, query: str) -> str:
        return f"{self.sys_prompt}Q: {query}\nA:"


def test_an_object_with_the_texts_is_taken_as_the_dict_of_them(tmp_path):
    texts = {
        "sys_prompt": PromptTemplate.sys_prompt,
        "query_prompt": "Q: ",
        "prompt_after_query": "\n",
        "resp_prompt": "A: ",
        "delim": "\n\n",
    }
    ours = _format(PromptTemplate(), DEMO, tmp_path)

    assert ours == _format(texts, DEMO, tmp_path)
    (text,) = render(ours.template, adds_bos=False).formatted["text"].to_pylist()
    expected = PromptTemplate().make_full_prompt("What is 1 + 1?") + " It is 2.</s>"
    assert text == expected


@pytest.mark.parametrize("given", [7, ["Q: "], object()])
def test_an_object_without_texts_is_refused(given, tmp_path):
    with pytest.raises(ConfigError, match="an object with query_prompt and resp_prompt"):
        _format(given, DEMO, tmp_path)


def test_an_attribute_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match="it takes texts named sys_prompt"):
        texts_to_jinja({"query_prompt": None}, Ends("", ""))
