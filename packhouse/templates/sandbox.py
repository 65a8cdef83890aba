"""Chat templates in Jinja's sandbox, set up as transformers does, with limits on time and size.

A chat template is code that arrives with a tokenizer. The immutable sandbox keeps it from the
interpreter; the limits (see limits.py) keep it from the machine.

What differs from transformers: filters and globals that are random or only make text grow
(`random`, `lipsum`, `batch`, `slice`, `wordwrap`, `urlize`) do not exist, and `strftime_now` gives
one date for the whole run (SOURCE_DATE_EPOCH where it is set), so that a run over midnight is
consistent and a build can be repeated.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from packhouse.errors import TemplateError
from packhouse.templates.leaves import JsonForm, WholeJson
from packhouse.templates.limits import (
    BUDGET,
    LimitError,
    measure_method,
    measure_product,
    measured_filter,
    text_length,
)
from packhouse.templates.marks import inspected_literals
from packhouse.templates.renderer import RefusedError
from packhouse.templates.traceable import is_traceable
from packhouse.templates.tracing import OpaqueError, TracedText, concat_traced

__all__ = ["ChatTemplate"]


class _Limits(jinja2.ext.Extension):
    """`{% generation %}`, and the hooks that the parsed template is fitted with."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("generation")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def generation(self, caller: Callable[[], str]) -> str:
        begin, end = BUDGET.generation
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
    return BUDGET.tick()


@jinja2.pass_context
def _sized(context: Any, value: Any) -> Any:
    return BUDGET.sized(value)


@jinja2.pass_context
def _joined(context: Any, pieces: list[Any]) -> str:
    """`a ~ b`, so that traced texts stay traced."""
    if context.eval_ctx.autoescape:
        return markup_join(pieces)
    return concat_traced(map(str, pieces))


def _length_of(value: Any) -> int:
    return value.length() if isinstance(value, TracedText) else len(value)


class _Concats(NodeTransformer):
    """Turns `a ~ b` into a filter."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _hook("_joined", nodes.List(node.nodes))


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment: operators and calls that can make text grow are measured first."""

    concat = staticmethod(concat_traced)
    intercepted_binops = frozenset(["*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        limits = self.extensions[_Limits.identifier]
        assert isinstance(limits, _Limits)
        limits.fit(template)
        fitted: nodes.Template = _Concats().visit(template)
        fitted.set_environment(self)
        return fitted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str) and re.search(r"\d{4,}|\*", left):
            raise LimitError("the template formats text with a huge width")
        if operator == "*":
            measure_product(left, right)
        if operator == "**" and (abs(left) > 2**16 or abs(right) > 64):
            raise LimitError("the template takes a huge power")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            measure_method(owner, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\d{4,}|\{[^}]*\{", value.__self__):
            raise LimitError("the template formats text with a huge width")
        return wrapped


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
        raise LimitError("the template indents JSON by a huge width")
    form = JsonForm(ensure_ascii, indent, separators and (separators[0], separators[1]), sort_keys)
    dumps = _encoder(form).encode
    if isinstance(value, WholeJson):
        return value.write(dumps, form)
    if BUDGET.is_traced and _holds_traced(value):
        raise OpaqueError
    return dumps(value)


@lru_cache(maxsize=64)
def _encoder(form: JsonForm) -> json.JSONEncoder:
    return form.encoder()


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
        environment.filters[name] = measured_filter(name, environment.filters[name])
    environment.filters |= {"tojson": _tojson, "_tick": _tick, "_sized": _sized}
    environment.filters |= {"_joined": _joined, "length": _length_of, "count": _length_of}
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


class _Compiled(NamedTuple):
    template: jinja2.Template
    literals: tuple[str, ...]
    is_traceable: bool
    has_generation: bool


@lru_cache(maxsize=16)
def _compile(source: str, today: datetime) -> _Compiled:
    """A template and what its syntax tree says; some 10 to 30 ms, once a process."""
    environment = _make_environment(today)
    ast = environment.parse(source)
    facts = inspected_literals(ast), is_traceable(ast), _has_generation(ast)
    code = environment.compile(ast)  # folds constants in the tree: nothing may look at it after
    compiled = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    return _Compiled(compiled, *facts)


def _has_generation(ast: nodes.Template) -> bool:
    return any(
        isinstance(call.call.node, nodes.ExtensionAttribute) and call.call.node.name == "generation"
        for call in ast.find_all(nodes.CallBlock)
    )


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
        self.where = where
        self._tokens = dict(special_tokens)
        try:
            compiled = _compile(source, pinned_date())
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{where}, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise TemplateError(f"{where}: nested too deeply to compile") from None
        self._template = compiled.template
        self.literals = compiled.literals
        """What it looks for in texts."""
        self.is_traceable = compiled.is_traceable
        self.has_generation = compiled.has_generation
        """Whether the template itself says what the assistant generates."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of one conversation, equal to `apply_chat_template(..., tokenize=False)`.

        Raises:
            RefusedError: the template refuses the conversation, fails on it or goes over a limit.
            TemplateError: it runs for over MAX_SECONDS.
        """
        BUDGET.open(messages, tools, generation=generation_marks, is_traced=False)
        return "".join(self._pieces(messages, tools, add_generation_prompt))

    def trace(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
    ) -> list[str]:
        """The text of a traced conversation as constants and traced texts; raises as `render`."""
        BUDGET.open(messages, tools, generation=("", ""), is_traced=True)
        return self._pieces(messages, tools, add_generation_prompt)

    def _pieces(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool
    ) -> list[str]:
        measure = BUDGET.measure
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
                size += text_length(piece)
                measure(size)
        except TemplateError:
            raise
        except LimitError as error:
            raise RefusedError("template_limit", f"{self.where}: {error}") from None
        except RecursionError:
            raise RefusedError("template_limit", f"{self.where}: recursion too deep") from None
        except OpaqueError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RefusedError("template", f"{self.where} refuses the row: {kind}{error}") from None
        return pieces
