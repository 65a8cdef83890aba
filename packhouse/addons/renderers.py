r"""Render conversations with Python packages, for models without a Jinja template.

Such a renderer returns only text. To find the row's own texts in it, each row is rendered twice:
once unchanged, and once with a placeholder word for each text. The words are then replaced by the
texts, unchanged, stripped, or as JSON:

    row             user "Hi ", assistant "Hi"
    with words      <|user|>Qz0000000<|end|><|assistant|>Qz0000001<|end|>
    unchanged       <|user|>Hi<|end|><|assistant|>Hi<|end|>
    found           "Hi" of "Hi ", "Hi"

A row is rejected unless exactly one way of replacing the words gives the directly rendered text.
This way control-token text in a content stays text, and spans are never guessed. It costs two
renderings per prompt. Rows are rendered one by one, because the renderer's code may depend on any
text.

Two come with packhouse: `Harmony` writes for gpt-oss as vLLM and SGLang serve it, `Mistral` for
models with a tekken.json.
"""

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

from packhouse.errors import PluginError, TemplateError
from packhouse.recipe import FormatConfig
from packhouse.records.conversation_shapes import DEFAULTS
from packhouse.render.provenance import (
    Field,
    JsonForm,
    Part,
    Piece,
    TracedText,
    encoder,
    fields_in,
    plain,
    traced,
)
from packhouse.render.rendered_texts import RefusedError
from packhouse.render.row_renderer import RowRenderer
from packhouse.render.template_arguments import strings_in
from packhouse.system.plugins import Plugin
from packhouse.system.worker import limited
from packhouse.tokenize.encoders import TokenizerSnapshot

_PREFIXES = [first + second for first in "QZXJ" for second in "zxqj"]
_TRIMMED = (None, "\n", " ")  # what renderers strip: white space, line breaks, spaces
_JSON_FORMS = [
    JsonForm(is_ascii, None, separators)
    for separators in (None, (",", ":"))
    for is_ascii in (False, True)
]


def make_rows(
    plugin: Plugin, config: FormatConfig, snapshot: TokenizerSnapshot, folder: Path | None
) -> RowRenderer:
    """Create the row renderer for a Python renderer.

    Args:
        plugin: the renderer.
        config: format section of the recipe.
        snapshot: tokenizer whose control tokens are used.
        folder: folder of the tokenizer.

    Raises:
        PluginError: the plugin cannot be loaded, or is not a renderer.
        TemplateError: the renderer does not fit the recipe or the tokenizer.
    """
    control = RowRenderer(config, snapshot, "", "").control
    own = {k: v for k, v in config.chat_template_kwargs.items() if k not in DEFAULTS}
    template = PythonRenderer(plugin, folder, control, own)
    unknown = sorted({*template.stop_tokens} - {*snapshot.added_tokens})
    if unknown:
        raise TemplateError(
            f"{plugin} stops at {unknown[0]!r}, which is not a control token of the "
            "tokenizer. Use the tokenizer of the model that the renderer is for."
        )
    stops = dict.fromkeys(template.stop_tokens, str(plugin))
    rows = RowRenderer(config, replace(snapshot, stop_tokens=stops), "", template.where)
    rows.template = template
    return rows


class PythonRenderer:
    """A template whose text a plugin writes.

    Args:
        plugin: an object or module with `render` and `stop_tokens`, or a class or function that
            creates one from the tokenizer's folder.
        folder: folder of the tokenizer.
        control: pattern that matches control tokens.
        arguments: arguments from the recipe.

    Raises:
        PluginError: the plugin cannot be loaded, or is not a renderer.
        TemplateError: it does not read one of the arguments.
    """

    has_generation = False
    values: Mapping[str, tuple[object, ...]] = {}

    def __init__(
        self,
        plugin: Plugin,
        folder: Path | None,
        control: re.Pattern[str],
        arguments: Mapping[str, object] = {},
    ) -> None:
        self.where = str(plugin)
        self._plugin, self._control, self._arguments = plugin, control, arguments
        made = plugin.load()
        if isinstance(made, type | FunctionType):
            with plugin.named_in_errors(f" on tokenizer folder '{folder}'"):
                made = made(folder)
        write, stops = getattr(made, "render", None), getattr(made, "stop_tokens", None)
        if not callable(write) or isinstance(stops, str | None) or not stops:
            raise PluginError(
                f"{plugin} is not a renderer. It needs a function `render` and `stop_tokens`, "
                "a list of control tokens.",
                plugin=plugin.name,
            )
        self._write_text: Callable[..., object] = write
        self.stop_tokens = tuple(stops)
        """Control tokens at which the model stops."""
        self.names = frozenset(getattr(made, "arguments", ()))
        """Arguments that it reads; other arguments of a row are not passed."""
        unread = sorted(set(arguments) - self.names)
        if unread:
            known = ", ".join(sorted(self.names)) or "no argument"
            raise TemplateError(
                f"{plugin} does not support {unread[0][:60]!r} in format.chat_template_kwargs "
                f"(known: {known}). Fix the name, or remove it."
            )

    def render(
        self,
        messages: Sequence[object],
        tools: Sequence[object] | None = None,
        arguments: Mapping[str, object] = {},
        *,
        is_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; arguments as for `ChatTemplate.render`.

        Raises:
            RefusedError: the plugin rejects the row, or its texts cannot be found in the result.
            PluginError: the plugin does not return text.
        """
        given = {**self._arguments, **arguments}
        read = {name: value for name, value in given.items() if name in self.names}
        own, shared = _walk((read, tools), str.__str__)
        # Joined with NUL, so that two texts cannot form a control token together.
        self._check_control("\0".join(strings_in([own, shared])), "a tool or argument")

        def write(texts: Callable[[TracedText], str]) -> str:
            named = None if tools is None else [_with_name(tool, texts) for tool in tools]
            rewritten = [_walk(message, texts) for message in messages]
            return self._write(rewritten, named, dict(own), is_prompt)

        direct = write(str.__str__)
        # A prefix that does not occur in the text, so that placeholder words are unambiguous.
        prefix = next((each for each in _PREFIXES if each not in direct), None)
        if prefix is None:
            raise RefusedError(
                "template", f"the row contains too many words such as {_PREFIXES[0]}"
            )
        results = {
            field
            for message in messages
            if isinstance(message, dict) and message.get("role") == "tool"
            for field in fields_in(message.get("content"))
            if _as_json(field)
        }
        words = _Words(prefix, self._check_control)
        marked = write(words)
        if not words.fields:
            return direct
        parts = _fill(marked, direct, words)
        if parts is None and results:  # Mistral parses tool results and writes them as JSON
            words = _Words(prefix, self._check_control, results)
            parts = _fill(write(words), direct, words)
        if parts is None:
            raise RefusedError(
                "template",
                f"{self.where} changes its output when the row's texts are replaced by marker "
                "words, so spans cannot be determined. Move reasoning to reasoning_content, "
                "or remove the row.",
            )
        for part in parts:
            if isinstance(part, Piece) and part.form is None:
                part.field.is_stripped |= part.end - part.start < len(part.field.value)
        return traced(parts)

    def _write(self, messages: object, tools: object, arguments: object, is_prompt: bool) -> str:
        try:
            with limited():
                text = self._write_text(messages, tools, arguments, is_prompt)
            str(text).encode()  # lone surrogates cannot be stored
        except MemoryError:
            raise
        except RecursionError:
            raise RefusedError("template_limit", f"{self.where}: recursion too deep") from None
        except Exception as error:  # third-party code may raise anything
            detail = f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
            raise RefusedError(
                "template", f"{self.where} rejected the row: {detail[:300]}"
            ) from None
        if not isinstance(text, str):
            raise PluginError(
                f"{self._plugin} returned a {type(text).__name__} instead of a string",
                plugin=self._plugin.name,
            )
        return text

    def _check_control(self, text: str, place: str) -> None:
        noise = self._control.search(text)
        if noise is not None:
            raise RefusedError("template", f"control-token text {noise.group()!r} in {place}")


class _Words:
    """Gives each text of a row its own placeholder word.

    Ids and texts of only white space stay unchanged.
    """

    def __init__(
        self,
        prefix: str,
        check_control: Callable[[str, str], None],
        results: set[Field] | frozenset[Field] = frozenset(),
    ) -> None:
        self.pattern = re.compile(rf'({prefix}[0-9]{{7}}|"{prefix}r[0-9]{{7}}")')
        self.fields: dict[str, Field] = {}
        self.results = results
        """Tool results replaced by a JSON string, including its quotes."""
        self._words: dict[Field, str] = {}
        self._prefix, self._check_control = prefix, check_control

    def __call__(self, text: TracedText) -> str:
        (field,) = fields_in(text)
        value: str = field.value
        field.trace.unrecorded.add((field.message, "rendered in Python"))
        if field.kind == "id":
            self._check_control(value, "an id or name")
            return value
        if not value.strip():
            field.is_stripped = True
            return value
        number = f"{len(self._words):07d}"
        new = f'"{self._prefix}r{number}"' if field in self.results else self._prefix + number
        word = self._words.setdefault(field, new)
        self.fields[word] = field
        return word


def _walk(value: Any, texts: Callable[[TracedText], str]) -> Any:
    """Copy a value, with each text of the row replaced by `texts`."""
    if isinstance(value, TracedText):
        return texts(value)
    if isinstance(value, dict):
        items = list(value.items())  # opens a `DataObject`
        for key in sorted((key for key, _ in items), key=str.__str__):
            _walk(key, texts)  # words sort like the keys, for renderers that sort keys
        return {_walk(key, texts): _walk(item, texts) for key, item in items}
    if isinstance(value, list | tuple):
        return [_walk(item, texts) for item in value]
    return value


def _with_name(tool: Any, texts: Callable[[TracedText], str]) -> Any:
    """Copy a tool definition, with its name replaced by `texts`.

    The rest stays constant, because words in schemas have a meaning. The name marks the tool's
    place.
    """
    copy = _walk(tool, str.__str__)
    if isinstance(tool, dict):
        is_nested = isinstance(tool.get("function"), dict)
        name = (tool["function"] if is_nested else tool).get("name")
        if isinstance(name, TracedText):
            (copy["function"] if is_nested else copy)["name"] = texts(name)
    return copy


def _fill(marked: str, direct: str, words: _Words) -> list[Part] | None:
    """Return the parts of the direct rendering, or None unless exactly one way fits."""
    # Ways to write the text so far, by its end: (previous way, last part); None: several.
    ways: dict[int, Any] = {0: ()}
    for number, text in enumerate(words.pattern.split(marked)):
        field = words.fields.get(text) if number % 2 else None
        options: Sequence[Part] = [text]
        if field is not None:
            options = list(_options(field, is_result=field in words.results))
        longer: dict[int, Any] = {}
        for at, way in ways.items():
            for part in options:
                if direct.startswith(plain(part), at):
                    end = at + len(plain(part))
                    longer[end] = None if way is None or end in longer else (way, part)
        ways = longer
    way = ways.get(len(direct))
    if way is None:
        return None
    parts: list[Part] = []
    while way:
        way, part = way
        parts.append(part)
    return parts[::-1]


def _options(field: Field, *, is_result: bool) -> Iterator[Piece]:
    """Yield the different ways to write a text."""
    value: str = field.value
    seen = set[str]()

    def new(text: str, first: int, last: int, form: JsonForm | str | None) -> Iterator[Piece]:
        if text not in seen:
            seen.add(text)
            yield Piece(text, field, first, last, form)

    if is_result:
        for form in _JSON_FORMS:
            yield from new(encoder(form)(json.loads(value)), 0, len(value), form)
        return
    ranges = [(0, len(value))]
    for chars in _TRIMMED:
        first, last = len(value) - len(value.lstrip(chars)), len(value.rstrip(chars))
        ranges += [(first, last), (first, len(value)), (0, last)]
    for first, last in ranges:
        yield from new(value[first:last], first, last, None)
    for first, last in ranges:
        for form in _JSON_FORMS[:2]:
            yield from new(encoder(form)(value[first:last])[1:-1], first, last, "string")


def _as_json(field: Field) -> bool:
    """Return True for JSON text other than a JSON string."""
    try:
        return not isinstance(json.loads(field.value), str)
    except ValueError:
        return False


_VOCABULARY, _NUM_TOKENS = "o200k_base.tiktoken", 199_998
_SETTINGS = ("reasoning_effort", "model_identity", "conversation_start_date")


class Harmony:
    """Writes harmony: reasoning on channel `analysis`, text before a tool call on `commentary`."""

    stop_tokens = ("<|return|>", "<|call|>")
    arguments = _SETTINGS

    def __init__(self, folder: Path) -> None:
        import openai_harmony

        self._library = openai_harmony
        with TemporaryDirectory() as vocabulary:
            _write_vocabulary(folder / "tokenizer.json", Path(vocabulary) / _VOCABULARY)
            set_before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
            # The library reads the folder of its vocabulary from this variable.
            os.environ["TIKTOKEN_ENCODINGS_BASE"] = vocabulary
            try:
                self._encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")
            except openai_harmony.HarmonyError:  # another hash of the vocabulary
                raise TemplateError(
                    f"format.template harmony: '{folder}' is not the gpt-oss tokenizer. Use "
                    "that one, or set format.template: chat."
                ) from None
            finally:
                del os.environ["TIKTOKEN_ENCODINGS_BASE"]
                if set_before is not None:
                    os.environ["TIKTOKEN_ENCODINGS_BASE"] = set_before

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Return the text, with the last answer as the model would have generated it.

        `render_conversation` would drop the reasoning of a finished answer, so the messages of the
        answer are written one by one after the prompt.
        """
        last = messages[-1] if messages else {}
        is_answered = last.get("role") == "assistant" and not add_generation_prompt
        history = messages[:-1] if is_answered else messages
        known = self._messages(history, tools, arguments)
        conversation = self._library.Conversation.from_messages(known)
        if not is_answered and not add_generation_prompt:
            return self._text(self._encoding.render_conversation(conversation))
        role = self._library.Role.ASSISTANT
        prompt = self._encoding.render_conversation_for_completion(conversation, role)
        if not is_answered:
            return self._text(prompt)
        answer = "".join(self._text(self._encoding.render(each)) for each in self._answer(last))
        if not last.get("tool_calls"):
            answer = answer.removesuffix("<|end|>") + "<|return|>"
        return self._text(prompt).removesuffix("<|start|>assistant") + answer

    def _text(self, ids: list[int]) -> str:
        text: str = self._encoding.decode_utf8(ids)
        return text

    def _messages(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> list[Any]:
        """Convert messages and tools to those of the library."""
        library, role = self._library, self._library.Role
        settings = {name: arguments[name] for name in _SETTINGS if name in arguments}
        effort = settings.get("reasoning_effort")
        if isinstance(effort, str):
            # The library's values are capitalized: `high` -> `High`.
            settings["reasoning_effort"] = effort.capitalize()
        new = library.Message.from_role_and_content
        made = [new(role.SYSTEM, library.SystemContent(**settings))]
        developer = library.DeveloperContent.new()
        if messages and messages[0]["role"] == "system":
            developer = developer.with_instructions(messages[0]["content"])
            messages = messages[1:]
        if tools:
            functions = [tool["function"] for tool in tools]
            described = [
                library.ToolDescription.new(
                    f["name"], f.get("description") or "", f.get("parameters")
                )
                for f in functions
            ]
            developer = developer.with_function_tools(described)
        if tools or developer.instructions:
            made.append(new(role.DEVELOPER, developer))
        called, called_as = "", dict[str, str]()
        for message in messages:
            if message["role"] == "assistant":
                made += self._answer(message)
                for call in message.get("tool_calls") or []:
                    called = called_as[call.get("id") or ""] = call["function"]["name"]
            elif message["role"] == "tool":
                # A result without id and name belongs to the last call. An id may occur again.
                given = message.get("tool_call_id")
                name = (given and called_as.get(given)) or message.get("name") or called
                author = library.Author.new(role.TOOL, f"functions.{name}")
                result = library.Message.from_author_and_content(author, message["content"])
                made.append(result.with_recipient("assistant").with_channel("commentary"))
            elif message["role"] == "system":
                content = library.DeveloperContent.new().with_instructions(message["content"])
                made.append(new(role.DEVELOPER, content))
            else:
                made.append(new(role.USER, message["content"]))
        return made

    def _answer(self, message: Mapping[str, Any]) -> list[Any]:
        """Convert an assistant message: reasoning, text, then one message per tool call."""

        def new_message(text: str, channel: str) -> Any:
            role = self._library.Role.ASSISTANT
            return self._library.Message.from_role_and_content(role, text).with_channel(channel)

        calls = message.get("tool_calls") or []
        made = []
        if reasoning := message.get("reasoning_content"):
            made.append(new_message(reasoning, "analysis"))
        if (content := message.get("content") or "") or not calls:
            made.append(new_message(content, "commentary" if calls else "final"))
        for function in (call["function"] for call in calls):
            given = function["arguments"]
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            one = new_message(text, "commentary").with_recipient(f"functions.{function['name']}")
            made.append(one.with_content_type("json"))
        return made


def _write_vocabulary(tokenizer: Path, file: Path) -> None:
    """Write the tokens of a byte-level tokenizer.json in tiktoken's format (base64)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocabulary = json.loads(tokenizer.read_bytes())["model"]["vocab"]
    texts = sorted(vocabulary, key=vocabulary.__getitem__)[:_NUM_TOKENS]
    tokens = [bytes(byte_of[char] for char in text) for text in texts]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    file.write_text("".join(lines))


_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class Mistral:
    """Writes what `mistral-common` encodes: prompts in its mode `test`, answers as `finetuning`."""

    stop_tokens = ("</s>",)

    def __init__(self, folder: Path) -> None:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.protocol.instruct.validator import ValidationMode
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        if not (folder / "tekken.json").is_file():
            raise TemplateError(
                f"format.template mistral: '{folder}' has no tekken.json. Use the tokenizer "
                "of a Mistral model that has one, or set format.template: chat."
            )
        self._request, self._keep = ChatCompletionRequest, SpecialTokenPolicy.KEEP
        modes = {"prompt": ValidationMode.test, "answer": ValidationMode.finetuning}
        self._tokenizers = {
            name: MistralTokenizer.from_file(str(folder / "tekken.json"), mode=mode)
            for name, mode in modes.items()
        }

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Return the text; there is no generation prompt."""
        is_answered = messages[-1]["role"] == "assistant" and not add_generation_prompt
        tokenizer = self._tokenizers["answer" if is_answered else "prompt"]
        known = [{key: m[key] for key in _KEYS if key in m} for m in messages]
        request = self._request.from_openai(known, tools)
        ids = tokenizer.encode_chat_completion(request).tokens
        text: str = tokenizer.decode(ids, special_token_policy=self._keep)
        return text
