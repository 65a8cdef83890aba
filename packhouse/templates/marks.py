r"""Find where a conversation's own text lands in a rendering, by marks that data cannot forge.

Every text that data brings (a *leaf*: content, reasoning, strings in tool calls) is wrapped in two
private-use characters that occur nowhere in the row. The template is rendered with the marks; with
the marks taken out again the text must equal the plain rendering, so they changed nothing.

    content "hi"  ->  "<S0>hi<E0>"  ->  "<|im_start|>user\n<S0>hi<E0><|im_end|>\n"

Templates look at contents, too: they trim them, or take `<think>...</think>` apart. Where a mark
gets in the way of that, *inner* marks go inside of outer whitespace and around such literals.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from jinja2 import nodes

from packhouse.templates.leaves import JsonForm, Leaf, WholeJson, replace_leaves
from packhouse.templates.renderer import RefusedError

__all__ = [
    "MARKINGS",
    "MARKINGS_OF_TEXTS",
    "Marked",
    "Marker",
    "Marking",
    "Occurrence",
    "TornError",
    "inspected_literals",
]

# Supplementary private use planes, without the two noncharacters at the end of each.
_FIRST, _LAST = 0xF0000, 0x10FFFD
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


class TornError(Exception):
    """The template took a marked text apart, or moved its marks."""


class Occurrence(NamedTuple):
    """A leaf found in the rendering, in bytes of the text."""

    leaf: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Marked:
    """A marked rendering with its marks taken out."""

    text: bytes
    occurrences: list[Occurrence]
    generation: list[tuple[int, int]]
    """Byte ranges of the template's own `{% generation %}` blocks."""
    parts: Sequence[str] = ()
    """By trace: constants and traced texts in rendering order."""


def inspected_literals(ast: nodes.Template) -> tuple[str, ...]:
    """String constants that a template looks for in texts: `'</think>' in c`, `c.split('<x>')`.

    Longest first. Whitespace alone and single characters are left out: they trim.
    """
    found: set[str] = set()
    for compare in ast.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in compare.ops):
            found.update(_constants([compare.expr]))
    for call in ast.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            found.update(_constants(call.args))
    for text_filter in ast.find_all(nodes.Filter):
        if text_filter.name == "replace":
            found.update(_constants(text_filter.args))
    return tuple(sorted((t for t in found if len(t.strip()) > 1), key=lambda t: (-len(t), t)))


def _constants(expressions: list[nodes.Expr]) -> Iterator[str]:
    for expression in expressions:
        if isinstance(expression, nodes.Const) and isinstance(expression.value, str):
            yield expression.value


@dataclass(frozen=True, slots=True)
class Marking:
    """One manner of marking; see `MARKINGS`."""

    is_inner: bool = False
    """Marks go inside of outer whitespace and around literals."""
    calls: Literal["whole", "pieces", "none"] = "whole"
    """Tool calls and definitions: objects as templates write them by `tojson`, their strings one by
    one (of definitions only those with control-token text), or not at all."""
    is_shared: bool = False
    """Equal texts get equal marks, for templates that compare messages."""


# Tried in this order until one leaves the rendering as it is.
MARKINGS = (
    Marking(),
    Marking(is_inner=True),
    Marking(calls="pieces"),
    Marking(is_inner=True, calls="pieces"),
    Marking(is_inner=True, calls="pieces", is_shared=True),
    Marking(is_inner=True, calls="none", is_shared=True),
)


MARKINGS_OF_TEXTS = (Marking(), Marking(is_inner=True), Marking(is_inner=True, is_shared=True))
"""For conversations without tools."""


class MarkedJson(WholeJson):
    """A JSON leaf that is written between marks."""

    def __init__(self, copy: dict[str, Any], value: Any, marks: tuple[str, str]) -> None:
        super().__init__(copy)
        self._value, self._marks = value, marks

    def write(self, dumps: Callable[[Any], str], form: JsonForm) -> str:
        """The leaf's JSON between its marks."""
        begin, end = self._marks
        return f"{begin}{dumps(self._value)}{end}"


class Marker:
    """Marks one conversation.

    Args:
        messages: as the template gets them.
        tools: parsed tool definitions.
        marking: in what manner.
        literals: from `inspected_literals`; used only with inner marks.
        noisy: matches control tokens.

    Raises:
        RefusedError: the row holds so much private-use text that no marks are left.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        marking: Marking,
        literals: re.Pattern[str] | None,
        noisy: re.Pattern[str],
    ) -> None:
        self.leaves: list[Leaf] = []
        self._offsets: dict[int, int] = {}  # of leaves that are parts of contents, in bytes
        self._marking = marking
        self._literals = literals if marking.is_inner else None
        self._known: dict[str, int] | None = {} if marking.is_shared else None
        self._order: list[list[int]] = []  # of each mark: the leaves that wear it
        self._noisy = noisy
        self._base = _free_base(messages, tools, self._literals)
        self.whole: set[int] = set()
        """Messages whose content the template writes as one piece; set for inner marks."""
        self._contents = [message["content"] for message in messages]
        self.plain_messages, self.plain_tools = messages, tools
        self.messages, self.tools = replace_leaves(messages, tools, self._replace)

    def _replace(self, leaf: Leaf, copy: Any) -> Any:
        if leaf.kind == "content":
            return self._text(leaf.message, leaf.value)
        if leaf.kind == "thought":
            return self._segment(leaf, leaf.value)
        if self._marking.calls == "none":
            return copy
        if self._marking.calls == "whole" and leaf.is_json:
            self.leaves.append(leaf)
            self._order.append([len(self.leaves) - 1])
            return MarkedJson(copy, leaf.value, self._marks(len(self._order) - 1))
        if leaf.kind == "function":
            return copy
        return self._deep(leaf, copy) if leaf.kind == "call" else self._noisy_only(leaf, copy)

    def _deep(self, leaf: Leaf, value: Any) -> Any:
        if isinstance(value, str):
            return self._segment(leaf, value)
        if isinstance(value, dict):
            return {self._deep(leaf, k): self._deep(leaf, v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._deep(leaf, item) for item in value]
        return value

    def _noisy_only(self, leaf: Leaf, value: Any) -> Any:
        if isinstance(value, str):
            return self._segment(leaf, value) if self._noisy.search(value) else value
        if isinstance(value, dict):
            return {self._noisy_only(leaf, k): self._noisy_only(leaf, v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._noisy_only(leaf, item) for item in value]
        return value

    def _text(self, number: int, content: str) -> str:
        last = Leaf(number, "content", content)
        if self._literals is None:
            return self._segment(last, content)
        thought_end = content.rfind("</think>")
        thought_start = content.rfind("<think>", 0, max(thought_end, 0))
        pieces, at = [], 0
        for match in self._literals.finditer(content):
            is_thought = thought_start < match.start() <= thought_end
            leaf = last._replace(kind="thought") if is_thought else last
            pieces += [self._part(leaf, at, match.start()), match.group()]
            at = match.end()
        return "".join([*pieces, self._part(last, at, len(content))])

    def _part(self, leaf: Leaf, start: int, end: int) -> str:
        text = leaf.value[start:end]
        blank = len(text) - len(text.lstrip())
        self._offsets[len(self.leaves)] = len(leaf.value[: start + blank].encode())
        return self._segment(leaf, text)

    def _segment(self, leaf: Leaf, text: str) -> str:
        core = text.strip() if self._marking.is_inner else text
        if not core:
            return text
        mark = self._mark(core)
        self._order[mark].append(len(self.leaves))
        self.leaves.append(Leaf(leaf.message, leaf.kind, core))
        begin, end = self._marks(mark)
        before, _, after = text.partition(core)
        return f"{before}{begin}{core}{end}{after}"

    def _marks(self, mark: int) -> tuple[str, str]:
        return chr(self._base + 2 * mark), chr(self._base + 2 * mark + 1)

    def _mark(self, core: str) -> int:
        mark = len(self._order)
        if self._known is not None:
            mark = self._known.setdefault(core, mark)
        if mark == len(self._order):
            self._order.append([])
        return mark

    @property
    def generation_marks(self) -> tuple[str, str]:
        """Two more characters, for the template's `{% generation %}` blocks."""
        first = self._base + 2 * len(self._order)
        return chr(first), chr(first + 1)

    def read(self, rendering: str) -> Marked:
        """Take the marks out of a rendering and say where the leaves were.

        Raises:
            TornError: a leaf does not stand between its marks as one piece.
        """
        generation = 2 * len(self._order)
        seen = [0] * len(self._order)
        text, occurrences, blocks = bytearray(), [], []
        opened: tuple[int, int] | None = None
        block_start = 0
        at = 0
        for match in _PRIVATE.finditer(rendering):
            text += rendering[at : match.start()].encode()
            at = match.end()
            mark = ord(match.group()) - self._base
            if mark == generation:
                block_start = len(text)
            elif mark == generation + 1:
                blocks.append((block_start, len(text)))
            elif not 0 <= mark < generation:
                text += match.group().encode()  # the row's own private-use text
            elif mark % 2 == 0 and opened is None:
                opened = mark // 2, len(text)
            elif opened is not None and opened[0] == mark // 2 and mark % 2:
                occurrences.append(self._occurrence(opened, seen, text))
                opened = None
            else:
                raise TornError
        if opened is not None:
            raise TornError
        text += rendering[at:].encode()
        return Marked(bytes(text), self._covering(bytes(text), occurrences), blocks)

    def written_whole(self, rendering: str) -> set[int]:
        """Messages whose content stands in a rendering as one marked piece."""
        return {
            leaf.message
            for number, leaf in enumerate(self.leaves)
            if leaf.kind == "content" and leaf.value.join(self._marks(number)) in rendering
        }

    def _covering(self, text: bytes, found: list[Occurrence]) -> list[Occurrence]:
        """Let the leaves of contents that are written whole cover the literals between them, too.

        Inner marks leave out the literals that a template looks for. In a content that it writes
        as one piece they are the data's own, control tokens among them.
        """
        for message in sorted(self.whole):
            own = [at for at, o in enumerate(found) if self._is_part(o, message)]
            if not own:
                continue
            start, end = self._place(text, self._contents[message], found[own[0]])
            edges = [start, *(found[at].start for at in own[1:]), end]
            for at, (begin, stop) in zip(own, pairwise(edges), strict=True):
                found[at] = Occurrence(found[at].leaf, begin, stop)
        return found

    def _is_part(self, occurrence: Occurrence, message: int) -> bool:
        return occurrence.leaf in self._offsets and self.leaves[occurrence.leaf].message == message

    def _place(self, text: bytes, content: str, first: Occurrence) -> tuple[int, int]:
        """Where a content is, by its first leaf; as it is or stripped."""
        start = first.start - self._offsets[first.leaf]
        blank = len(content[: len(content) - len(content.lstrip())].encode())
        for begin, data in ((start, content), (start + blank, content.strip())):
            if begin >= 0 and text.startswith(data.encode(), begin):
                return begin, begin + len(data.encode())
        raise RefusedError("template", "a content is not found around the texts it holds")

    def has_bare_noise(self) -> bool:
        """Whether control-token text is in a content that is written whole but has no leaf."""
        marked = {leaf.message for leaf in self.leaves}
        return any(self._noisy.search(self._contents[m]) for m in self.whole - marked)

    def _occurrence(self, opened: tuple[int, int], seen: list[int], text: bytearray) -> Occurrence:
        mark, start = opened
        wearers = self._order[mark]
        leaf = wearers[min(seen[mark], len(wearers) - 1)]
        seen[mark] += 1
        if not _is_written(self.leaves[leaf], text[start:].decode()):
            raise TornError
        return Occurrence(leaf, start, len(text))


def _is_written(leaf: Leaf, rendered: str) -> bool:
    """Whether a leaf was written as it is, or as the inside of a JSON string."""
    if leaf.is_json or rendered == leaf.value:
        return True
    return any(rendered == json.dumps(leaf.value, ensure_ascii=way)[1:-1] for way in (False, True))


def _free_base(
    messages: list[dict[str, Any]], tools: list[Any] | None, literals: re.Pattern[str] | None
) -> int:
    """First code point of a private-use run that the row does not touch and that is long enough."""
    taken, needed = set[int](), 4
    for text in _strings([messages, tools]):
        needed += 4 if literals is None else 4 + 2 * len(literals.findall(text))
        if not text.isascii():
            taken.update(map(ord, _PRIVATE.findall(text)))
    base = _FIRST
    for point in sorted(taken):
        if point - base >= needed:
            break
        base = point + 1
    if _LAST - base < needed or 0xFFFFD - needed < base < 0x100000:
        raise RefusedError("template", "the row holds too much private-use text to be marked")
    return base


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield ""  # an object can be marked, too
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
