"""Mistral's models with tekken.json: `mistral-common`, the only source of their format.

Which form is written (tools, system prompt, reasoning) depends on the version in tekken.json.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packhouse.errors import TemplateError

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
                f"format.template mistral: '{folder}' has no tekken.json. Give the tokenizer of a "
                "Mistral model that has one, or set format.template: chat"
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
