"""Chat templates in Jinja's sandbox, set up as transformers does.

A chat template is code that arrives with a tokenizer. The immutable sandbox keeps it from the
interpreter; the child process that renders (see `packhouse.confine`) keeps it from the machine.

What differs from transformers: filters and globals that are random or that no template needs
(`random`, `lipsum`, `batch`, `slice`, `wordwrap`, `urlize`) do not exist, and `strftime_now` gives
one date for the whole run (SOURCE_DATE_EPOCH where it is set), so that a run over midnight is
consistent and a build can be repeated.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from packhouse.confine import at, limited
from packhouse.errors import TemplateError
from packhouse.templates.leaves import JsonForm, WholeJson
from packhouse.templates.marks import inspected_literals
from packhouse.templates.renderer import RefusedError
from packhouse.templates.traceable import is_traceable
from packhouse.templates.tracing import OpaqueError, TracedText, concat_traced

__all__ = ["ChatTemplate"]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what the assistant generates, between the marks of this rendering."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("generation")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def generation(self, caller: Callable[[], str]) -> str:
        begin, end = _rendering.generation
        return begin + caller() + end if begin else caller()


class _Rendering(threading.local):
    """What the rendering of this thread was asked for."""

    generation: tuple[str, str] = ("", "")
    is_traced = False


_rendering = _Rendering()


@jinja2.pass_context  # keeps Jinja from calling it once, when it compiles
def _joined(context: Any, pieces: list[Any]) -> str:
    """`a ~ b`, so that traced texts stay traced."""
    if context.eval_ctx.autoescape:
        return markup_join(pieces)
    return concat_traced(map(str, pieces))


def _length_of(value: Any) -> int:
    return value.length() if isinstance(value, TracedText) else len(value)


class _Concats(NodeTransformer):
    """Turns `a ~ b` into a filter, which is called directly and not through the sandbox."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment, which keeps traced texts traced."""

    concat = staticmethod(concat_traced)
    intercepted_binops = frozenset(["*", "**", "%"])  # run with a row, not when it is compiled

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        fitted: nodes.Template = _Concats().visit(super()._parse(source, name, filename))
        fitted.set_environment(self)
        return fitted


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
    form = JsonForm(ensure_ascii, indent, separators and (separators[0], separators[1]), sort_keys)
    dumps = _encoder(form).encode
    if isinstance(value, WholeJson):
        return value.write(dumps, form)
    if _rendering.is_traced and _holds_traced(value):
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
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    for name in _UNWANTED_FILTERS:
        del environment.filters[name]
    environment.filters |= {"tojson": _tojson, "_joined": _joined}
    environment.filters |= {"length": _length_of, "count": _length_of}
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
        at("while it is compiled")
        try:
            with limited():
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
            RefusedError: the template refuses the conversation or fails on it.
            MemoryError: it needs more than this process may use.
        """
        _rendering.generation, _rendering.is_traced = generation_marks, False
        return "".join(self._pieces(messages, tools, add_generation_prompt))

    def trace(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        add_generation_prompt: bool,
    ) -> list[str]:
        """The text of a traced conversation as constants and traced texts; raises as `render`."""
        _rendering.generation, _rendering.is_traced = ("", ""), True
        return self._pieces(messages, tools, add_generation_prompt)

    def _pieces(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool
    ) -> list[str]:
        try:
            with limited():
                return list(
                    self._template.generate(
                        messages=messages,
                        tools=tools,
                        documents=None,
                        add_generation_prompt=add_generation_prompt,
                        **self._tokens,
                    )
                )
        except RecursionError:
            raise RefusedError("template_limit", f"{self.where}: recursion too deep") from None
        except (MemoryError, OpaqueError):
            raise
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            raise RefusedError("template", f"{self.where} refuses the row: {kind}{error}") from None
