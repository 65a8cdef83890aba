"""Chat templates in Jinja's sandbox, set up as transformers does, with limits on time and size.

A chat template is code that arrives with a tokenizer. The immutable sandbox keeps it from the
interpreter; the limits keep it from the machine: every loop iteration and macro call costs a tick,
every assigned or multiplied text is measured, and so is the output. An honest template uses tens
of ticks a message. Ticks and sizes are deterministic, so the same rows are refused everywhere; the
clock is only the last resort and ends the run.

What differs from transformers: filters and globals that are random or only make text grow
(`random`, `lipsum`, `batch`, `slice`, `wordwrap`, `urlize`) do not exist, and `strftime_now` gives
one date for the whole run (SOURCE_DATE_EPOCH where it is set), so that a run over midnight is
consistent and a build can be repeated.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from packhouse.errors import TemplateError
from packhouse.templates.leaves import WholeJson
from packhouse.templates.renderer import RefusedError
from packhouse.templates.tracing import OpaqueError, TracedText, concat_traced

__all__ = ["ChatTemplate"]

MAX_TICKS = 200_000
MAX_SECONDS = 20.0
FREE_CHARS = 2**20  # output that any rendering may have ...
CHARS_PER_CHAR = 16  # ... and this many times its input on top


_length = str.__len__  # a traced text refuses `len`: a template may decide by it


class _LimitError(Exception):
    """A template went over a limit on this row."""


class _Budget(threading.local):
    """What is left to the rendering that runs in this thread."""

    ticks = 0
    inputs: tuple[Any, ...] = ()
    deadline = float("inf")
    generation: tuple[str, str] = ("", "")
    is_traced = False

    def open(self, *inputs: Any, generation: tuple[str, str], is_traced: bool) -> None:
        self.ticks = 0
        self.inputs = inputs
        self.deadline = time.monotonic() + MAX_SECONDS
        self.generation = generation
        self.is_traced = is_traced

    def tick(self) -> str:
        self.ticks += 1
        if self.ticks > MAX_TICKS:
            raise _LimitError(f"the template ran over {MAX_TICKS:,} loop iterations")
        if self.ticks % 256 == 0 and time.monotonic() > self.deadline:
            raise TemplateError(
                f"the chat template ran for over {MAX_SECONDS:.0f} s on one conversation"
            )
        return ""

    def measure(self, num_chars: int) -> None:
        if num_chars <= FREE_CHARS:
            return
        limit = FREE_CHARS + CHARS_PER_CHAR * sum(map(_num_chars, self.inputs))
        if num_chars > limit:
            raise _LimitError(f"the template makes text of over {limit:,} characters")

    def sized(self, value: Any) -> Any:
        if isinstance(value, str):
            self.measure(_length(value))
        elif isinstance(value, list | tuple):
            self.measure(len(value))
        elif isinstance(value, dict):
            self.measure(dict.__len__(value))
        return value


class _Limits(jinja2.ext.Extension):
    """`{% generation %}`, and the hooks that the parsed template is fitted with."""

    tags = {"generation"}  # noqa: RUF012
    budget = _Budget()

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("generation")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def generation(self, caller: Callable[[], str]) -> str:
        begin, end = self.budget.generation
        return begin + caller() + end if begin else caller()

    def fit(self, template: nodes.Template) -> None:
        """Put a tick into every loop and macro, and a measure around every assigned value."""
        for node in list(template.find_all((nodes.For, nodes.Macro))):
            node.body.insert(0, nodes.ExprStmt(_hook("_tick", nodes.Const(""))))  # type: ignore[attr-defined]
        for assign in list(template.find_all(nodes.Assign)):
            assign.node = _hook("_sized", cast(nodes.Expr, assign.node))


def _hook(name: str, value: nodes.Expr) -> nodes.Filter:
    # A filter is called directly; a function would go through the sandbox, at five times the cost.
    return nodes.Filter(value, name, [], [], None, None)


@jinja2.pass_context  # keeps Jinja from calling it once, when it compiles
def _tick(context: Any, value: str) -> str:
    return _Limits.budget.tick()


@jinja2.pass_context
def _sized(context: Any, value: Any) -> Any:
    return _Limits.budget.sized(value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment: operators and calls that can make text grow are measured first."""

    concat = staticmethod(concat_traced)
    intercepted_binops = frozenset(["*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        limits = self.extensions[_Limits.identifier]
        assert isinstance(limits, _Limits)
        limits.fit(template)
        return template.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and re.search(r"\d{4,}|\*", left):
            raise _LimitError("the template formats text with a huge width")
        if operator == "*":
            _measure_product(left, right)
        if operator == "**" and (abs(left) > 2**16 or abs(right) > 64):
            raise _LimitError("the template takes a huge power")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _measure_method(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\d{4,}|\{[^}]*\{", value.__self__):
            raise _LimitError("the template formats text with a huge width")
        return wrapped


def _measure_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            _Limits.budget.measure(len(sequence) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() > 4096:
        raise _LimitError("the template makes a huge number")


def _measure_method(owner: str, method: str, args: tuple[Any, ...]) -> None:
    measure = _Limits.budget.measure
    if method in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        measure(args[0])
    elif method == "expandtabs":
        measure(_length(owner) * (args[0] if args and isinstance(args[0], int) else 8))
    elif method == "replace" and len(args) > 1 and all(isinstance(a, str) for a in args[:2]):
        measure(_length(owner) + str.count(owner, args[0]) * _length(args[1]))
    elif method == "join" and args and isinstance(args[0], list | tuple):
        measure(sum(len(owner) + len(str(item)) for item in args[0]))


def _measured_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter that can make text grow; keeps what Jinja passes it first (context, ...)."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, int) and a > 0]
        texts = [a for a in (*args, *kwargs.values()) if isinstance(a, str)]
        size = sum(map(_length, texts))
        if name == "replace" and len(texts) > 2:
            size += str.count(texts[0], texts[1]) * _length(texts[2])
        elif name == "indent":
            size *= 1 + max(numbers, default=4)
        _Limits.budget.measure(size + max(numbers, default=0))
        return plain(*args, **kwargs)

    pass_arg = getattr(plain, "jinja_pass_arg", None)
    if pass_arg is not None:
        measured.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
    return measured


class _PlainNamespace(Namespace):
    """A namespace without underscore names, which lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        Namespace.__init__(self, _public(dict(*rest, **kwargs)))

    def __setitem__(self, name: str, value: Any) -> None:
        _public({name: value})
        super().__setitem__(name, value)


def _public(names: dict[str, Any]) -> dict[str, Any]:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no place for '{name}'")
    return names


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 64:
        raise _LimitError("the template indents JSON by a huge width")
    dumps = partial(
        json.dumps,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if isinstance(value, WholeJson):
        is_default = not (ensure_ascii or sort_keys) and indent is None and separators is None
        return value.write(dumps, is_default=is_default)
    if _Limits.budget.is_traced and _holds_traced(value):
        raise OpaqueError
    return dumps(value)


def _holds_traced(value: Any) -> bool:
    """Whether a traced text would be encoded unseen."""
    if isinstance(value, TracedText | WholeJson):
        return True
    if isinstance(value, dict):
        return any(map(_holds_traced, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_traced, value))


_UNWANTED_FILTERS = ("random", "batch", "slice", "wordwrap", "urlize", "format", "pprint")


def _make_environment(today: datetime) -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Limits, jinja2.ext.loopcontrols]
    )
    for name in _UNWANTED_FILTERS:
        del environment.filters[name]
    for name in ("center", "indent", "replace"):
        environment.filters[name] = _measured_filter(name, environment.filters[name])
    environment.filters |= {"tojson": _tojson, "_tick": _tick, "_sized": _sized}
    del environment.globals["lipsum"]
    environment.globals["namespace"] = _PlainNamespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = today.strftime
    return environment


def pinned_date() -> datetime:
    """Today at midnight, or SOURCE_DATE_EPOCH (UTC) where builds have to repeat."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None:
        return datetime.fromtimestamp(int(epoch), UTC)
    return datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: `bos_token`, `eos_token`, ... as the template sees them.
        where: what errors call the template.

    Raises:
        TemplateError: the source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, where: str) -> None:
        self.source = source
        self.where = where
        self._tokens = dict(special_tokens)
        self._environment = _make_environment(pinned_date())
        try:
            self.ast = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{where}, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise TemplateError(f"{where}: nested too deeply to compile") from None

    @property
    def has_generation(self) -> bool:
        """Whether the template itself says what the assistant generates."""
        return any(
            isinstance(call.call.node, nodes.ExtensionAttribute)
            and call.call.node.name == "generation"
            for call in self.ast.find_all(nodes.CallBlock)
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        generation_marks: tuple[str, str] = ("", ""),
        is_traced: bool = False,
    ) -> str:
        """The text of one conversation, equal to `apply_chat_template(..., tokenize=False)`.

        Raises:
            RefusedError: the template refuses the conversation, fails on it or goes over a limit.
            TemplateError: it runs for over MAX_SECONDS.
        """
        budget = _Limits.budget
        budget.open(messages, tools, generation=generation_marks, is_traced=is_traced)
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            ):
                pieces.append(piece)
                size += _length(piece)
                budget.measure(size)
        except TemplateError:
            raise
        except _LimitError as error:
            raise RefusedError("template_limit", f"{self.where}: {error}") from None
        except RecursionError:
            raise RefusedError("template_limit", f"{self.where}: recursion too deep") from None
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RefusedError("template", f"{self.where} refuses the row: {kind}{error}") from None
        return "".join(pieces)


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return _length(value)
    if isinstance(value, WholeJson):
        return sum(map(_num_chars, dict.values(value)))
    if isinstance(value, dict):
        return sum(map(_num_chars, value)) + sum(map(_num_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_num_chars, value))
    return 8
