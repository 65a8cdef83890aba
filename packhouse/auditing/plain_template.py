"""Render a chat template in plain Jinja, as transformers does, for the audit only.

This module deliberately shares nothing with the environment of `packhouse.render`, which makes
texts and masks, so that the audit detects a fault there. A template that gets here has already
rendered the same rows under the stricter rules of that sandbox, and runs in the same kind of
worker.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, partial
from importlib import resources
from itertools import product
from pathlib import Path
from typing import cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from packhouse.recipe import FormatConfig, Recipe
from packhouse.recipe.sections import CHAT_TEMPLATES, is_renderer
from packhouse.registry import function_of_addon
from packhouse.render.jinja_sandbox import values_to_try
from packhouse.render.rendered_texts import RefusedError
from packhouse.render.template_arguments import MessageForm, Messages, best_form, chat_messages
from packhouse.render.text_positions import Template
from packhouse.system.plugins import find_plugin
from packhouse.system.worker import limited
from packhouse.tokenize.encoders import TokenizerSnapshot
from packhouse.tokenize.tokenizer_loading import tokenizer_folder

_TEXT = ("Perhaps", "Certainly", "Otherwise", "Naturally", "Therefore")
# Arguments of marked renderings; these private-use characters are in no template or row.
_MARKS = {"_generation_begins": "\ue0b0", "_generation_ends": "\ue0b1"}
_DICT_METHODS = frozenset(dir(dict))
_DOCUMENTS = [{"title": "Likewise", "text": "Moreover"}]


class PromptError(Exception):
    """The template rejects messages, or fails on them."""


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which puts marks around its body if they are arguments."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # Names and not constants: undefined names write nothing, so one compiled template renders
        # with and without marks.
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in _MARKS)
        return [begin, nodes.Scope(body), end]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with shorter checks of the most frequent look-ups, which are harmless."""

    def getattr(self, obj: object, attribute: str) -> object:
        """Look up `message.role`, `loop.index0` or `namespace.name`: a third of the time."""
        if type(obj) is dict and attribute not in _DICT_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) in (LoopContext, Namespace) and attribute[0] != "_":
            with suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class PlainTemplate:
    """A chat template as transformers renders it, and the text it writes around answers.

    Args:
        config: the recipe's format section.
        snapshot: snapshot of the tokenizer.
        date: date on which the texts were rendered; None if the template prints none.
    """

    def __init__(
        self, config: FormatConfig, snapshot: TokenizerSnapshot, date: str | None = None
    ) -> None:
        source = _source(config.template, snapshot)
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        # Jinja's own filter sorts keys and escapes `<`; transformers replaces it as well.
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        if date is not None:
            environment.globals["strftime_now"] = datetime.fromisoformat(date).strftime
        with limited():
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        # Each rendering copies them: a dictionary is copied ten times faster than Jinja's chain.
        self._template.globals = dict(self._template.globals)
        self._values = values_to_try(tree)  # before Jinja makes one constant of a list of words
        self._names = find_undeclared_variables(tree)
        self.reads_prompt = "add_generation_prompt" in self._names
        constants = [node.value for node in tree.find_all(nodes.Const)]
        constants += [node.data for node in tree.find_all(nodes.TemplateData)]
        self._texts = {text for text in constants if isinstance(text, str)}
        self._config, self._snapshot = config, snapshot
        self.arguments = {
            "documents": None,
            **snapshot.special_tokens,
            **{k: v for k, v in config.chat_template_kwargs.items() if k != "tools"},
        }
        self.control = _control_tokens(snapshot)

    def render(
        self,
        messages: Messages,
        tools: object = None,
        arguments: Mapping[str, object] = {},
        *,
        is_prompt: bool,
        is_marked: bool = False,
    ) -> str:
        """Return the text of a conversation, or the prompt for its next answer.

        Args:
            messages: messages in the form that the template takes.
            tools: tools of the row.
            arguments: template arguments of the row, which override those of the recipe.
            is_prompt: True to end with the opening of an answer.
            is_marked: True to put marks around generation blocks.

        Raises:
            PromptError: the template rejects the messages or fails on them.
        """
        try:
            with limited():
                given = {**self.arguments, **arguments, **(_MARKS if is_marked else {})}
                given |= {"messages": messages, "tools": tools}
                return self._template.render(given, add_generation_prompt=is_prompt)
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise PromptError(f"{error}"[:200]) from None

    def text_before_block(
        self, prompt: str, messages: Messages, tools: object, arguments: Mapping[str, object]
    ) -> str:
        """Return the beginning of the last answer that comes before its generation block.

        Args:
            prompt: prompt of the answer.
            messages: messages up to and including the answer.
            tools: tools of the row.
            arguments: template arguments of the prompt.
        """
        begin, end = _MARKS.values()
        if self._names.isdisjoint(_MARKS):  # no generation block
            return ""
        try:
            marked = self.render(messages, tools, arguments, is_prompt=False, is_marked=True)
        except PromptError:
            return ""
        whole = ""
        for piece in re.split(f"([{begin}{end}])", marked):
            if piece == begin and whole.startswith(prompt) and len(whole) > len(prompt):
                return whole[len(prompt) :]
            whole += piece * (piece not in (begin, end))
        return ""

    def probe(
        self,
        messages: Messages,
        form: MessageForm | None = None,
        /,
        *,
        is_prompt: bool,
        **arguments: object,
    ) -> str | None:
        """Render canonical messages, or return None if the template rejects them."""
        given = self.fit(messages, form)
        # Some templates fail without documents.
        tries: list[dict[str, object]] = [{}, {"documents": _DOCUMENTS}]
        for documents in tries:
            with suppress(PromptError):
                return self.render(given, None, documents | arguments, is_prompt=is_prompt)
        return None

    def fit(self, messages: Messages, form: MessageForm | None = None) -> Messages:
        """Convert canonical messages to a form, by default the one that the template takes."""
        return chat_messages(messages, form or self._form)

    @cached_property
    def _form(self) -> MessageForm:
        """First message form in which no text is lost; otherwise, the first that renders at all."""
        plain, parts = MessageForm(), MessageForm(has_content_parts=True)
        only_parts = not self._writes(_CHAT[:2], plain) and bool(self._writes(_CHAT[:2], parts))
        return best_form(
            partial(self._writes, _CALL),
            has_function_ids=self._config.call_ids is not None,
            has_content_parts=only_parts,
        )

    def _writes(self, messages: Messages, form: MessageForm) -> bool | None:
        """Return True if all texts of a probe are written, None if the template rejects it."""
        written = self.probe(messages, form, is_prompt=False)
        texts = _TEXT if messages is _CALL else [message["content"] for message in messages]
        return None if written is None else all(text in written for text in texts)

    @cached_property
    def switch(self) -> tuple[str, object, object] | None:
        """The argument that changes the opening of answers, its thinking and its other value."""
        known = {*self.arguments, *_MARKS, "messages", "tools", "add_generation_prompt"}
        for name, (probe, last) in product(sorted(self._names - known), _ASKED):
            values = self._values.get(name, (True, False))
            values = tuple(value for value in values if self._leads_to_answer({name: value}))
            done = {value: self.probe(probe, is_prompt=True, **{name: value}) for value in values}
            opened = {value: prompt.rpartition(last)[2] for value, prompt in done.items() if prompt}
            if len({*opened.values()}) > 1:
                own = self.probe(probe, is_prompt=True)
                usual = sorted(opened, key=lambda value: done[value] != own)
                asks = opened[self._thinking(name, list(opened))]
                thinking = next(value for value in usual if opened[value] == asks)
                return name, thinking, next(value for value in usual if opened[value] != asks)
        return None

    def _leads_to_answer(self, arguments: dict[str, object]) -> bool:
        """Return True if the prompt ends as answers begin, not counting empty reasoning."""
        asked, answer = _CHAT[:2]
        prompt = self.probe([asked], is_prompt=True, **arguments)
        opening = (prompt or "").rpartition(_TEXT[0])[2]
        if prompt is None or "think>" in opening:
            return prompt is not None
        for own in (answer, {**answer, "reasoning": "Likewise"}):
            whole = self.probe([asked, own], is_prompt=False, **arguments) or ""
            written = whole.rpartition(_TEXT[0])[2]
            header = re.split(f"Likewise|{_TEXT[1]}", written)[0]
            if written and (header.startswith(opening) or opening.startswith(header)):
                return True
        return False

    @cached_property
    def default_mode(self) -> bool | None:
        """True if the template asks for reasoning by default, False if not, None if neither."""
        assert self.switch is not None
        name, *values = self.switch
        asked = _CHAT[:1]
        own = self.probe(asked, is_prompt=True)
        for value, thinks in zip(values, (True, False), strict=True):
            if own is not None and own == self.probe(asked, is_prompt=True, **{name: value}):
                return thinks
        return None

    def _thinking(self, name: str, values: Sequence[object]) -> object:
        """Return the first value whose prompt reasoning can follow, or just the first value."""
        thought = [*_CHAT[:1], {**_CHAT[1], "reasoning": "Likewise"}]
        for value in values:
            prompt = self.probe(thought[:1], is_prompt=True, **{name: value})
            whole = self.probe(thought, is_prompt=False, **{name: value})
            if prompt and whole and whole.startswith(prompt):
                return value
        return values[0]

    @cached_property
    def _modes(self) -> list[dict[str, object]]:
        """Arguments for each way to ask for an answer: as by default, thinking, and not."""
        values = self.switch[1:] if self.switch else ()
        return [{}, *({self.switch[0]: value} for value in values if self.switch)]

    def starts(self) -> list[str]:
        """Return the text before the first question, in all modes."""
        prompts = [self.probe(_CHAT[:1], is_prompt=True, **mode) for mode in self._modes]
        return [prompt.partition(_TEXT[0])[0] for prompt in prompts if prompt]

    def openings(self) -> list[str]:
        """Return the openings of an answer after a question and after a tool result, in all modes.

        An opening is the text that the generation prompt adds, or, if it adds nothing, the text
        after the last content: `[/INST]`.
        """
        found: dict[str, None] = {}
        for (asked, last), mode in product(_ASKED, self._modes):
            prompt = self.probe(asked, is_prompt=True, **mode)
            bare = self.probe(asked, is_prompt=False, **mode)
            if prompt is not None:
                is_longer = bare is not None and prompt.startswith(bare)
                added = prompt[len(bare or "") :] if is_longer else ""
                found[added or prompt.rpartition(last)[2]] = None
        return [opening for opening in found if opening]

    @cached_property
    def stop_tokens(self) -> tuple[str, ...]:
        """Stop tokens of the recipe or the model; if none follows an answer, the template's."""
        eos = self._snapshot.special_tokens.get("eos_token")
        known = getattr(self._snapshot, "stop_tokens", None) or ([eos] if eos else [])
        stops = tuple(self._config.stop_tokens or known)
        # Text after the last answer, after an answer before a question, and after the last of two.
        tails = [
            (self.probe(_CHAT[:number], is_prompt=False) or "").rpartition(answer)[2]
            for number, answer in ((2, _TEXT[1]), (3, _TEXT[1]), (4, _TEXT[3]))
        ]
        after = [tail.partition(_TEXT[2])[0] for tail in tails]
        if any(stop in tail for tail in after for stop in stops):
            return stops
        pattern = re.compile("|".join(map(re.escape, self.control)) or "(?!)")
        own = [match.group() for tail in after if (match := pattern.search(tail))]
        return tuple(dict.fromkeys(own)) or stops

    @cached_property
    def _own_text(self) -> re.Pattern[str]:
        """Pattern of control tokens, white space, and lines in the template's source."""
        edges = re.compile("|".join([*map(re.escape, self.control), "\n"]))
        lines = {line.strip() for text in self._texts for line in edges.split(text)}
        longest_first = sorted({*self.control, *lines} - {""}, key=lambda t: (-len(t), t))
        return re.compile("|".join([*map(re.escape, longest_first), r"\s+"]))

    def differ_in_rows(self, first: str, second: str) -> bool:
        """Return True if two texts differ in more than text that the template writes."""
        if first == second:
            return False
        return self._own_text.sub("", first) != self._own_text.sub("", second)


class RendererTemplate(PlainTemplate):
    """A renderer in Python, called with only the row's own texts.

    Args:
        config: the recipe's format section.
        snapshot: snapshot of the tokenizer.
        written: the renderer.
        stop_tokens: stop tokens of the renderer.
    """

    reads_prompt = True

    def __init__(
        self,
        config: FormatConfig,
        snapshot: TokenizerSnapshot,
        written: Template,
        stop_tokens: Sequence[str],
    ) -> None:
        self._config, self._snapshot, self._written = config, snapshot, written
        self._names, self._values = {*written.names}, {}
        own = config.chat_template_kwargs.items()
        self.arguments = {key: value for key, value in own if key != "tools"}
        self.control = _control_tokens(snapshot)
        self.stop_tokens = tuple(config.stop_tokens or stop_tokens)
        words = re.compile("|".join(_TEXT))
        probes = [self.probe(talk, is_prompt=True) for talk in (_CHAT, _CALL[:3], _CALL)]
        self._texts = {text for probe in probes for text in words.split(probe or "")}

    def render(
        self,
        messages: Messages,
        tools: object = None,
        arguments: Mapping[str, object] = {},
        *,
        is_prompt: bool,
        is_marked: bool = False,
    ) -> str:
        """Return the text of a conversation, never with marks."""
        given = {**self.arguments, **arguments}
        try:
            named = cast("list[object] | None", tools)
            return str(self._written.render(messages, named, given, is_prompt=is_prompt))
        except RefusedError as error:
            raise PromptError(f"{error}"[:200]) from None


_opened: tuple[tuple[str, ...], PlainTemplate] | None = None


def open_template(
    recipe: Recipe, snapshot: TokenizerSnapshot, date: str | None = None
) -> PlainTemplate:
    """Open the template that renders prompts as at inference: Jinja, or the recipe's renderer.

    The last Jinja template is kept, since a process audits many shards with the same one.
    """
    global _opened
    config = recipe.format
    if not is_renderer(config.template):
        source = _source(config.template, snapshot)
        key = config.model_dump_json(), source, snapshot.fingerprint, snapshot.pipeline, str(date)
        if _opened is None or _opened[0] != key:
            _opened = key, PlainTemplate(config, snapshot, date)
        return _opened[1]
    plugin, folder = find_plugin("renderers", config.template), tokenizer_folder(recipe.tokenizer)
    written = function_of_addon("make_rows")(plugin, config, snapshot, folder).template
    return RendererTemplate(config, snapshot, written, written.stop_tokens)


def _control_tokens(snapshot: TokenizerSnapshot) -> list[str]:
    tokens = {*snapshot.added_tokens, *snapshot.special_tokens.values()} - {""}
    return sorted(tokens, key=lambda token: (-len(token), token))


def writes_prompts(config: FormatConfig, snapshot: TokenizerSnapshot) -> bool:
    """Return False if the template ignores `add_generation_prompt`.

    Inference then sends no header before an answer: the model writes it, so it is trained.
    """
    name = config.template
    is_jinja = name.endswith((".jinja", ".j2")) or name in CHAT_TEMPLATES
    if is_renderer(name) or not is_jinja:
        return True
    return "add_generation_prompt" in _source(name, snapshot)


def _source(name: str, snapshot: TokenizerSnapshot) -> str:
    if name.endswith((".jinja", ".j2")):
        return Path(name).read_text(encoding="utf-8")
    if name == "chat":
        return snapshot.chat_template or ""
    return resources.files("packhouse.render").joinpath(f"{name}.jinja").read_text("utf-8")


_CHAT: Messages = [
    {"role": "user", "content": _TEXT[0]},
    {"role": "assistant", "content": _TEXT[1]},
    {"role": "user", "content": _TEXT[2]},
    {"role": "assistant", "content": _TEXT[3]},
]
_CALLS = [{"type": "function", "function": {"name": _TEXT[3], "arguments": {"a": _TEXT[4]}}}]
_CALL: Messages = [
    _CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": json.dumps(_CALLS)},
    {"role": "tool", "content": _TEXT[1]},
    {"role": "assistant", "content": _TEXT[2]},
]
_ASKED = ((_CHAT[:1], _TEXT[0]), (_CALL[:3], _TEXT[1]))
"""What an answer follows, a question or a tool result, and the last text of it."""
