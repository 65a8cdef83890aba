"""Render conversations for gpt-oss as vLLM and SGLang do, with OpenAI's `openai-harmony`.

The result differs from the checkpoint's Jinja template in tool calls and results. The library would
download its vocabulary, so the vocabulary is written from the tokenizer's own tokenizer.json
instead. The library checks its hash, so the tokenizer of another model is rejected.
"""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packhouse.errors import TemplateError

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
                    f"format.template harmony: '{folder}' is not the tokenizer of gpt-oss. Give "
                    "that one, or set format.template: chat"
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
        known = self._messages(history, tools, arguments, self._call_names(messages))
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
        call_names: Mapping[str, str],
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
            developer = developer.with_function_tools([self._tool(tool) for tool in tools])
        if tools or developer.instructions:
            made.append(new(role.DEVELOPER, developer))
        called = ""
        for message in messages:
            if message["role"] == "assistant":
                made += self._answer(message)
                calls = message.get("tool_calls") or [{"function": {"name": called}}]
                called = calls[-1]["function"]["name"]
            elif message["role"] == "tool":
                given = call_names.get(message.get("tool_call_id") or "")
                # A result without id and name belongs to the last call.
                name = given or message.get("name") or called
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
        if message.get("reasoning_content"):
            made.append(new_message(message["reasoning_content"], "analysis"))
        if message.get("content") or not calls:
            made.append(
                new_message(message.get("content") or "", "commentary" if calls else "final")
            )
        for call in calls:
            given = call["function"]["arguments"]
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            one = new_message(text, "commentary").with_recipient(
                f"functions.{call['function']['name']}"
            )
            made.append(one.with_content_type("json"))
        return made

    def _tool(self, tool: Mapping[str, Any]) -> Any:
        function = tool["function"]
        return self._library.ToolDescription.new(
            function["name"], function.get("description") or "", function.get("parameters")
        )

    @staticmethod
    def _call_names(messages: Sequence[dict[str, Any]]) -> dict[str, str]:
        return {
            call["id"]: call["function"]["name"]
            for message in messages
            for call in message.get("tool_calls") or []
            if call.get("id")
        }


def _write_vocabulary(tokenizer: Path, file: Path) -> None:
    """Write the tokens of a byte-level tokenizer.json in tiktoken's format (base64)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocabulary = json.loads(tokenizer.read_bytes())["model"]["vocab"]
    texts = sorted(vocabulary, key=vocabulary.__getitem__)[:_NUM_TOKENS]
    tokens = [bytes(byte_of[char] for char in text) for text in texts]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    file.write_text("".join(lines))
