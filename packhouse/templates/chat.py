r"""Chat templates: the tokenizer's own Jinja, or the user's, with proven trained spans.

Text is byte-equal to `apply_chat_template(messages, tools=tools, tokenize=False)`. What the
template gets is what transformers would give it: dicts with the keys that the row has. A context
is part of its turn: content + "\n" + context. Arguments of tool calls are parsed, reasoning is
`reasoning_content`. BOS is the template's business.

A conversation costs two Jinja renderings, plain and marked (see marks.py).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from packhouse.errors import TemplateError
from packhouse.recipe import FormatConfig
from packhouse.templates.conversations import Conversations, Shape, Turn
from packhouse.templates.marks import Leaf, Marked, Marker, TornError, inspected_literals
from packhouse.templates.renderer import Refusal, RefusedError, Texts
from packhouse.templates.sandbox import ChatTemplate
from packhouse.templates.segments import Filled, Slot, concat_filled, fill, span_lists
from packhouse.templates.shapes import CompiledShape, make_program
from packhouse.templates.single_turn import trained_turns
from packhouse.templates.tracing import Check, Trace, is_traceable
from packhouse.templates.turns import TurnRules, learn_rules, locate_turns
from packhouse.tokenization.snapshot import TokenizerSnapshot

__all__ = ["ChatEngine", "chat_messages"]

MIN_SHAPE_ROWS = 8  # compiling a shape costs about as much as rendering this many rows
MAX_WAYS = 4  # rows of a shape to learn from before the rest is rendered one by one
PROBE = ("Perhaps", "Certainly", "Otherwise", "Naturally")


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""Canonical messages as transformers hands them to a template.

    Example:
        >>> chat_messages([{"role": "user", "content": "Sum up:", "context": "Long text"}])
        [{'role': 'user', 'content': 'Sum up:\nLong text'}]
    """
    return [_chat_message(message) for message in messages]


def _chat_message(message: dict[str, Any]) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if "reasoning" in message:
        chat["thinking"] = message["reasoning"]
    content = message["content"]
    if message.get("context"):
        content = f"{content}\n{message['context']}"
    chat |= {"role": message["role"], "content": content}
    if "tool_calls" in message:
        chat["tool_calls"] = [_tool_call(call) for call in json.loads(message["tool_calls"])]
    chat |= {key: message[key] for key in ("tool_call_id", "name") if key in message}
    if "reasoning" in message:
        chat["reasoning_content"] = message["reasoning"]
    return chat


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" not in call and "name" in call:
        function = {key: call[key] for key in ("name", "arguments") if key in call}
        rest = {key: value for key, value in call.items() if key not in function}
        call = {"type": "function", **rest, "function": function}
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        call = {**call, "function": {**function, "arguments": _parsed(function["arguments"])}}
    return call


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class ChatEngine:
    """Renders conversations with one Jinja template."""

    def __init__(
        self, config: FormatConfig, snapshot: TokenizerSnapshot, source: str, where: str
    ) -> None:
        self._train_on = config.train_on
        self._template_args = (source, dict(snapshot.special_tokens), where)
        tokens = {*snapshot.added_tokens, *snapshot.special_tokens.values()} - {""}
        longest_first = sorted(tokens, key=lambda token: (-len(token), token))
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._control, self._control_bytes = re.compile(pattern), re.compile(pattern.encode())
        self._compiled: dict[Shape, list[CompiledShape]] = {}
        self._starts: dict[tuple[str, bool, bytes], int] = {}

    @cached_property
    def template(self) -> ChatTemplate:
        """The compiled template."""
        source, tokens, where = self._template_args
        return ChatTemplate(source, tokens, where=where)

    @cached_property
    def rules(self) -> TurnRules | None:
        """The template's turn rules; None where it marks what is generated or all is trained."""
        template = self.template
        if self._train_on == "all" or template.has_generation:
            return None
        rules = learn_rules(self._probe, self._control_bytes, template.where)
        if not rules.ends_inner_turns and self._train_on == "assistant":
            raise TemplateError(
                f"{template.where} ends only the last assistant turn with"
                f" {rules.end_token.decode()!r}: earlier turns would teach the model to go on."
                " Use train_on: last_assistant, or a template that ends every turn."
            )
        return rules

    def render(self, conversations: Conversations) -> Texts:
        """Render plain rows shape by shape, all others one by one."""
        _ = self.rules  # a template that cannot be used is refused before any row
        alone = np.ones(conversations.num_rows, dtype=bool)
        parts = []
        if self._is_traceable:
            content = conversations.joined_content()
            for shape, rows in conversations.shapes(with_context=False):
                plain = rows[conversations.is_plain[rows]]
                for part in self._fill_shape(conversations, content, shape, plain):
                    parts.append(part)
                    alone[part.rows] = False
        texts = self._render_rows(conversations, np.flatnonzero(alone))
        texts.filled = concat_filled([*parts, texts.filled])
        return texts

    @cached_property
    def _is_traceable(self) -> bool:
        return is_traceable(self.template.ast)

    def _fill_shape(
        self, conversations: Conversations, content: pa.Array, shape: Shape, rows: np.ndarray
    ) -> Iterator[Filled]:
        """Fill the rows that known ways through the template fit; then learn further ways."""
        known = self._compiled.setdefault(shape, [])
        untried, tries = list(known), 0
        while len(rows) >= MIN_SHAPE_ROWS:
            positions = conversations.starts[rows]
            columns = [content.take(pa.array(positions + at)) for at in range(len(shape))]
            if untried:
                compiled = untried.pop(0)
            elif tries < MAX_WAYS and (learnt := self._compile(conversations, shape, rows[tries])):
                known.append(learnt)
                compiled, tries = learnt, tries + 1
            elif tries < MAX_WAYS:
                tries += 1
                continue
            else:
                return
            fitting = compiled.fits(columns)
            chosen = pa.array(np.flatnonzero(fitting))
            if not len(chosen):
                continue
            picked = [column.take(chosen) for column in columns]
            filled = fill(compiled.program, rows[fitting], _slots_of(picked))
            if not self._agrees(conversations, filled):
                known.remove(compiled)
                return
            yield filled
            rows, tries = rows[~fitting], 0

    def _compile(
        self, conversations: Conversations, shape: Shape, row: int
    ) -> CompiledShape | None:
        """The way that one row takes through the template; None where it is not a simple one."""
        raw, _ = next(conversations.messages_of(np.array([row])))
        messages = chat_messages(raw)
        if not all(message["content"] for message in messages):
            return None
        try:
            marked, marker = self._marked(messages, None, _MARKINGS[:1])
            self._check_nothing_lost(messages, None, marked, marker.leaves, Counter())
            trained = self._trained(raw, marked, marker)
            trace = Trace(len(messages))
            traced = [
                {**message, "content": trace.text(message["content"], number)}
                for number, message in enumerate(messages)
            ]
            text = self.template.render(traced, None, is_traced=True)
        except RefusedError:
            return None
        if trace.is_opaque or "".join([text]).encode() != marked.text:
            return None
        owners = [leaf.message for leaf in marker.leaves]
        program = make_program(marked.text, marked.occurrences, owners, trained)
        checks = [frozenset(asked | {Check("filled", None, True)}) for asked in trace.checks]
        return CompiledShape(program, tuple(checks))

    def _agrees(self, conversations: Conversations, filled: Filled) -> bool:
        """Whether some rows, rendered by Jinja, come out as they were filled."""
        last = len(filled.rows) - 1
        for at in sorted({0, last // 3, last // 2, last}):
            raw, tools = next(conversations.messages_of(filled.rows[at : at + 1]))
            try:
                text, content, trained = self._render_row(raw, tools, Counter())
            except RefusedError:
                return False
            if (
                filled.text[at].as_buffer().to_pybytes() != text
                or _pairs(filled.content_spans[at]) != content
                or _pairs(filled.trained_spans[at]) != trained
            ):
                return False
        return True

    def _render_rows(self, conversations: Conversations, rows: np.ndarray) -> Texts:
        kept, texts, content, trained = [], [], [], []
        refused: dict[int, Refusal] = {}
        notes: Counter[str] = Counter()
        for row, (messages, tools) in zip(
            rows.tolist(), conversations.messages_of(rows), strict=True
        ):
            try:
                text, of_content, of_trained = self._render_row(messages, tools, notes)
            except RefusedError as error:
                refused[row] = error.refusal
                continue
            kept.append(row)
            texts.append(text)
            content.append(of_content)
            trained.append(of_trained)
        filled = Filled(
            np.array(kept, dtype=np.int64),
            pa.array(texts, pa.string()),
            _lists(content),
            _lists(trained),
        )
        return Texts(filled, refused, notes)

    def _render_row(
        self,
        raw: list[dict[str, Any]],
        tools_text: str | None,
        notes: Counter[str],
    ) -> tuple[bytes, list[tuple[int, int]], list[tuple[int, int]]]:
        if not raw:
            raise RefusedError("template", "the conversation has no message")
        messages = chat_messages(raw)
        tools = None if tools_text is None else json.loads(tools_text)
        marked, marker = self._marked(messages, tools, _MARKINGS)
        self._check_nothing_lost(messages, tools, marked, marker.leaves, notes)
        content = [(o.start, o.end) for o in marked.occurrences]
        return marked.text, content, self._trained(raw, marked, marker)

    def _trained(
        self,
        raw: list[dict[str, Any]],
        marked: Marked,
        marker: Marker,
    ) -> list[tuple[int, int]]:
        """Trained spans of a rendering, ascending; there is at least one."""
        if self._train_on == "all":
            return [(0, len(marked.text))]
        shape = tuple(Turn(m["role"], is_trained=m.get("weight") != 0) for m in raw)
        wanted = trained_turns(shape, self._train_on)
        trained = sorted(self._turns(marked, marker, wanted))
        if not trained:
            raise RefusedError("nothing_trained", "no turn of the conversation is trained")
        return trained

    def _turns(self, marked: Marked, marker: Marker, wanted: set[int]) -> Iterator[tuple[int, int]]:
        roles = [message["role"] for message in marker.messages]
        owners = [leaf.message for leaf in marker.leaves]
        if self.rules is None:
            yield from _generated(marked, owners, roles, wanted)
            return

        def prompt_tail(number: int) -> tuple[int, bytes]:
            return self._prompt_tail(marker, number)

        turns = locate_turns(marked, owners, roles, wanted, self.rules, prompt_tail, self._starts)
        yield from turns.values()

    def _prompt_tail(self, marker: Marker, number: int) -> tuple[int, bytes]:
        """Last leaf, and the text behind it, of the prompt that ends before message `number`."""
        if number == 0:
            raise RefusedError("template", "the conversation starts with the assistant")
        prompt = self.template.render(
            marker.messages[:number], marker.tools, add_generation_prompt=True
        )
        try:
            marked = marker.read(prompt)
        except TornError:
            raise _UNPROVEN from None
        last = marked.occurrences[-1] if marked.occurrences else None
        return (last.leaf, marked.text[last.end :]) if last else (-1, marked.text)

    def _marked(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        markings: tuple[tuple[bool, bool, bool], ...],
    ) -> tuple[Marked, Marker]:
        """The first marking that leaves the rendering as it is."""
        plain = self.template.render(messages, tools)
        expected = plain.encode()
        for inner, calls, shared in markings:
            if not calls and not self._calls_are_quiet(messages):
                continue
            marker = Marker(
                messages,
                tools,
                literals=self._literals,
                inner=inner,
                calls=calls,
                shared=shared,
                noisy=self._control,
            )
            try:
                rendering = self.template.render(
                    marker.messages, marker.tools, generation_marks=marker.generation_marks
                )
                marked = marker.read(rendering)
            except (RefusedError, TornError):
                continue
            if marked.text == expected:
                return marked, marker
        raise _UNPROVEN

    def _calls_are_quiet(self, messages: list[dict[str, Any]]) -> bool:
        calls = [message["tool_calls"] for message in messages if "tool_calls" in message]
        return not self._control.search(json.dumps(calls, ensure_ascii=False))

    @cached_property
    def _literals(self) -> re.Pattern[str] | None:
        literals = inspected_literals(self.template.ast)
        return re.compile("|".join(map(re.escape, literals))) if literals else None

    def _check_nothing_lost(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        marked: Marked,
        leaves: list[Leaf],
        notes: Counter[str],
    ) -> None:
        found = {occurrence.leaf for occurrence in marked.occurrences}
        for number, leaf in enumerate(leaves):
            if number in found:
                continue
            if leaf.kind == "thought":
                notes["reasoning_not_rendered"] += 1
                continue
            where = (
                "a tool definition"
                if leaf.message < 0
                else f"message {leaf.message} ({messages[leaf.message]['role']})"
            )
            raise RefusedError("content_lost", f"text of {where} is not in the rendering")
        self._check_unmarked(messages, tools, marked.text)

    def _check_unmarked(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: bytes
    ) -> None:
        for number, message in enumerate(messages):
            for name in _called(message):
                if name.encode() not in text:
                    raise RefusedError(
                        "content_lost", f"a tool call of message {number} is not in the rendering"
                    )
            for key in ("tool_call_id", "name"):
                if key in message and self._control.search(str(message[key])):
                    raise RefusedError("template", f"control-token text in a message's {key}")
        for name in _defined(tools):
            if name.encode() not in text:
                raise RefusedError("content_lost", f"tool '{name}' is not in the rendering")

    def _probe(
        self, num_messages: int, add_generation_prompt: bool
    ) -> tuple[Marked, Marker] | None:
        roles = ("user", "assistant", "user", "assistant")
        messages = [
            {"role": role, "content": text}
            for role, text in zip(roles[:num_messages], PROBE, strict=False)
        ]
        marker = Marker(
            messages,
            None,
            literals=None,
            inner=False,
            calls=False,
            shared=False,
            noisy=self._control,
        )
        try:
            rendering = self.template.render(
                marker.messages, None, add_generation_prompt=add_generation_prompt
            )
            return marker.read(rendering), marker
        except (RefusedError, TornError):
            return None


# inner, calls, shared: the plainest first
_MARKINGS = (
    (False, True, False),
    (True, True, False),
    (True, True, True),
    (True, False, False),
    (True, False, True),
)
_UNPROVEN = RefusedError(
    "template", "the template writes other text when contents are marked: no spans can be proven"
)


def _generated(
    marked: Marked, owners: list[int], roles: list[str], wanted: set[int]
) -> Iterator[tuple[int, int]]:
    """The template's own generation blocks that hold a wanted assistant message."""
    for start, end in marked.generation:
        inside = {owners[o.leaf] for o in marked.occurrences if start <= o.start and o.end <= end}
        held = [number for number in sorted(inside) if number >= 0 and roles[number] == "assistant"]
        if not held:  # a turn without text: the message after those before the block
            before = [owners[o.leaf] for o in marked.occurrences if o.end <= start]
            held = [n for n in [max(before, default=-1) + 1] if roles[n : n + 1] == ["assistant"]]
        if end > start and held and held[0] in wanted:
            yield start, end


def _called(message: dict[str, Any]) -> Iterator[str]:
    for call in message.get("tool_calls", ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _defined(tools: list[Any] | None) -> Iterator[str]:
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]


def _slots_of(columns: list[pa.Array]) -> Callable[[Slot], pa.Array]:
    return lambda slot: columns[slot.message]


def _pairs(spans: pa.Scalar) -> list[tuple[int, int]]:
    return [(span["start"], span["end"]) for span in spans.as_py()]


def _lists(rows: list[list[tuple[int, int]]]) -> pa.Array:
    flat = np.array([span for row in rows for span in row], dtype=np.int64).reshape(-1, 2)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return span_lists(flat[:, 0], flat[:, 1], counts)
