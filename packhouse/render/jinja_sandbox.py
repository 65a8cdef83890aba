"""Run chat templates in Jinja's sandbox, configured as in transformers.

A chat template is code that arrives with a tokenizer. The immutable sandbox protects the
interpreter from it, and the worker process that renders (`packhouse.system.worker`) the machine.

Differences from transformers: filters and globals that are random or that no template needs
(`random`, `lipsum`, `batch`, `slice`, `wordwrap`, `urlize`) do not exist, and `strftime_now` gives
one date for the whole run (SOURCE_DATE_EPOCH if set), so that a run over midnight is consistent and
a build is reproducible.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup, escape

from packhouse.errors import TemplateError
from packhouse.render.provenance import (
    BLOCK_EDGES,
    UNPROVEN,
    DataObject,
    JsonForm,
    TracedText,
    as_text,
    forget,
    is_traced,
    join_texts,
    parts_of,
    rewriting,
    rewritten,
    to_json,
    traced,
)
from packhouse.render.rendered_texts import RefusedError
from packhouse.system.worker import at, limited


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`, which marks text that the assistant generates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        assert isinstance(self.environment, _Sandbox), "extensions are given to no other"
        self.environment.has_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("generation")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def generation(self, caller: Callable[[], str]) -> str:
        begin, end = BLOCK_EDGES
        return traced((begin, *parts_of(caller()), end))


class _Operators(NodeTransformer):
    """Turns operators that call no method of the row's text into filters: `a ~ b`, `a in b`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            return node
        if len(node.ops) > 1:
            raise jinja2.TemplateSyntaxError("`in` within a chain of comparisons", node.lineno)
        found = nodes.Filter(node.expr, "_in", [node.ops[0].expr], [], None, None)
        return found if node.ops[0].op == "in" else nodes.Not(found)

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise jinja2.TemplateSyntaxError("a chat template escapes nothing", node.lineno)


@jinja2.pass_context  # prevents constant folding at compile time
def _joined(context: object, items: Sequence[object]) -> str:
    """Compute `a ~ b`."""
    return join_texts("", items)


def _is_in(value: Any, container: Any) -> bool:
    """Compute `value in container`."""
    # `'x' in content` calls a `TracedText`, which records it; `content in 'abc'` calls a constant.
    if isinstance(value, TracedText) and type(container) is str:
        forget(value, "in")
    return value in container


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, items: Any, separator: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        items = map(make_attrgetter(environment, attribute), items)
    return join_texts(as_text(separator), items)


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    # Trace even a constant: `'Hello NAME' | replace('NAME', content)`.
    whole = traced(parts_of(as_text(text)))
    return whole.replace(as_text(old), as_text(new), -1 if count is None else count)


class _Safe(TracedText):
    """A text of the row after `safe`. Text added to it is escaped, which cannot be traced."""

    def __add__(self, other: str) -> TracedText:
        return super().__add__(_unescaped(other))

    def __radd__(self, other: str) -> TracedText:
        return super().__radd__(_unescaped(other))


def _unescaped(text: str) -> str:
    if escape(text) != text:
        raise UNPROVEN
    return text


def _safe(value: object) -> str:
    text = as_text(value)
    if not is_traced(text):
        return Markup(text)
    safe = _Safe(text)
    safe._parts = parts_of(text)
    return safe


_TEXT_METHODS = {name for name in dir(str) if name[0] != "_"} - {"format", "format_map"}
_DICT_METHODS = frozenset(dir(dict))


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandboxed environment in which texts keep their provenance."""

    intercepted_binops = frozenset(["*", "**", "%"])  # evaluated per row, not at compile time

    has_generation = False
    """True if a template has generation blocks."""

    @staticmethod
    def concat(pieces: Iterable[object]) -> str:
        """Join the output of a macro or a block."""
        return join_texts("", pieces)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        fitted: nodes.Template = _Operators().visit(super()._parse(source, name, filename))
        fitted.set_environment(self)
        return fitted

    def getattr(self, obj: object, attribute: str) -> object:
        """Look up `obj.attribute`; the most common cases skip further checks."""
        if isinstance(obj, str) and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        if isinstance(obj, dict) and attribute not in _DICT_METHODS and attribute in obj:
            return obj[attribute]
        if isinstance(obj, LoopContext | Namespace) and attribute[0] != "_":
            with suppress(AttributeError):
                return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> object:
        """Call a function or method; methods of constants keep the provenance of arguments."""
        # `', '.join(names)` is a method of a constant, which does not trace the joined texts.
        owner = getattr(called, "__self__", None)
        if type(owner) is str and (called.__name__ == "join" or is_traced((args, kwargs))):
            called = getattr(traced((owner,)), called.__name__)
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> object:
        """Compute `left % right` and the like."""
        result = super().call_binop(context, operator, left, right)
        return rewritten(result, left, right) if operator == "%" else result

    def wrap_str_format(self, value: Any) -> Callable[..., Any] | None:
        """Trace the texts that the sandbox's formatter formats."""
        wrapped = super().wrap_str_format(value)
        return wrapped and rewriting(wrapped, value.__self__)


class _PlainNamespace(Namespace):
    """A namespace without underscore names, which lead into the interpreter."""

    def __init__(self, /, *args: Any, **kwargs: object) -> None:  # namespace(self=1) is valid
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no place for '{name}'")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# As transformers' filter. Jinja's own sorts the keys and writes `<` as `\u003c`.
def _tojson(value: object, *settings: Any, **named: Any) -> str:
    form = JsonForm(*settings, **named)
    pair = form.separators and (form.separators[0], form.separators[1])
    text = to_json(value, form._replace(separators=pair))
    return as_text(rewritten(text, form.indent, form.separators))


_UNWANTED_FILTERS = ("random", "batch", "slice", "wordwrap", "urlize", "format", "pprint")
# These use methods of texts or pass on their input.
_TRANSPARENT_FILTERS = frozenset(
    "length count list first last items map select selectattr reject rejectattr default d "
    "dictsort sort reverse unique min max sum groupby attr".split()
)
_OWN_FILTERS = {
    "trim": lambda text, chars=None: as_text(text).strip(chars),
    "tojson": _tojson,
    "join": _join,
    "replace": _replace,
    "safe": _safe,
    "string": as_text,
    "_joined": _joined,
    "_in": _is_in,
}


def _make_environment(today: datetime) -> _Sandbox:
    environment = _Sandbox(
        # As in transformers. Without both, each line with only `{% if ... %}` would leave its line
        # break and its indent in the text.
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=as_text,
    )
    for name in _UNWANTED_FILTERS:
        del environment.filters[name]
    for name in environment.filters.keys() - _TRANSPARENT_FILTERS:
        environment.filters[name] = rewriting(environment.filters[name])
    environment.filters |= _OWN_FILTERS
    environment.tests["in"] = _is_in
    del environment.globals["lipsum"]
    environment.globals["namespace"] = _PlainNamespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = rewriting(today.strftime)
    return environment


def pinned_date() -> datetime:
    """Return today at midnight, or SOURCE_DATE_EPOCH (UTC) for reproducible builds."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is not None:
        return datetime.fromtimestamp(int(epoch), UTC)
    return datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)


@lru_cache(maxsize=16)
def _compile(
    source: str, today: datetime
) -> tuple[jinja2.Template, bool, frozenset[str], Mapping[str, tuple[object, ...]]]:
    """Compile a template; also return if it has generation blocks, its arguments and their values.

    Takes 10 to 30 ms, once per process.
    """
    environment = _make_environment(today)
    template = environment.from_string(source)
    tree = environment.parse(source)
    values = values_to_try(tree)  # before Jinja folds a list of words into one constant
    return template, environment.has_generation, arguments_of(tree), values


def arguments_of(tree: nodes.Template) -> frozenset[str]:
    """Return the names that a template looks up before it sets them.

    `find_undeclared_variables` also returns names that only some branches of the template set.

    Example:
        >>> source = "{% if tools %}{% set text = tools[0] %}{% endif %}{{ text }}{{ thinking }}"
        >>> sorted(arguments_of(jinja2.Environment().parse(source)))
        ['thinking', 'tools']
    """
    first = dict[str, str]()
    found: Iterable[Any] = tree.find_all((nodes.Assign, nodes.Name))
    for node in found:
        # An assignment reads its source before it sets its target.
        for name in [node] if isinstance(node, nodes.Name) else node.node.find_all(nodes.Name):
            first.setdefault(name.name, name.ctx)
    return frozenset(n for n in find_undeclared_variables(tree) if first.get(n) == "load")


def values_to_try(tree: nodes.Template) -> dict[str, tuple[object, ...]]:
    """Return values to try for names that the template compares with constants.

    For `mode == "thinking"`: the word, then False, which equals no word, and True. Empty if there
    is a number, because `thinking_budget == 0` holds for False too.
    """
    compared = defaultdict[str, list[object]](list)
    for node in tree.find_all((nodes.Compare, nodes.Filter)):
        if getattr(node, "name", "_in") == "_in":  # which is a filter here
            for each in node.find_all(nodes.Name):
                compared[each.name] += [c.value for c in node.find_all(nodes.Const)]
    found = dict[str, tuple[object, ...]]()
    for name, constants in compared.items():
        words = dict.fromkeys(each for each in constants if isinstance(each, str))
        if not {int, float}.isdisjoint(map(type, constants)):
            found[name] = ()
        elif words:
            found[name] = (*words, False, True)
    return found


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: `bos_token`, `eos_token`, ... as the template sees them.
        where: name of the template in errors.
        arguments: further arguments, such as `enable_thinking`.

    Raises:
        TemplateError: the source is not a template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        where: str,
        arguments: Mapping[str, object] = {},
    ) -> None:
        self.where = where
        self._arguments = {"documents": None, **special_tokens, **arguments}
        try:
            with limited():
                at("while it is compiled")
                compiled = _compile(source, pinned_date())
                self._template, self.has_generation, self.names, self.values = compiled
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{where}, line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise TemplateError(f"{where}: nested too deeply to compile") from None

    def render(
        self,
        messages: Sequence[object],
        tools: Sequence[object] | None = None,
        arguments: Mapping[str, object] = {},
        *,
        is_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation, equal to `apply_chat_template(..., tokenize=False)`.

        Args:
            messages: messages in the form for templates; their texts may be `TracedText`.
            tools: parsed tool definitions.
            arguments: arguments of the row, which override the recipe's.
            is_prompt: add the generation prompt.

        Raises:
            RefusedError: the template refuses the conversation or fails on it.
            MemoryError: the template needs more memory than this process may use.
        """
        try:
            with limited():
                given = {**self._arguments, **arguments, "messages": messages, "tools": tools}
                pieces = self._template.generate(given, add_generation_prompt=is_prompt)
                text = join_texts("", pieces)
            str.encode(text)  # raises for lone surrogates, which cannot be stored
            return text
        except RecursionError:
            raise RefusedError("template_limit", f"{self.where}: recursion too deep") from None
        except (MemoryError, RefusedError):
            raise
        except Exception as error:
            kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
            said = f"{kind}{error}".encode(errors="backslashreplace").decode()
            # Python's error names our types, which the template's author does not know.
            for ours, name in ((TracedText, "str"), (DataObject, "dict")):
                said = said.replace(f"{ours.__module__}.{ours.__name__}", name)
            raise RefusedError("template", f"{self.where} rejects the row: {said}") from None
