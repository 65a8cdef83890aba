"""What a template looks at in a content before it writes it: recorded, then checked in bulk.

A chat template's path through its code depends on roles and on what it asks of contents
(`'</think>' in content`, `content.strip()`). `TracedText` is a string that records each question
and its answer. A row with the same roles and the same answers takes the same path, so its text is
the same constants around other contents. That needs no guess about which constants matter.

Not every use of a string passes through Python methods, so tracing counts only for templates that
`is_traceable` finds free of the others (`'%s' % content`, `content in 'abc'`, `a ~ b` kept in a
variable, conversions). Whatever is not understood makes the trace opaque: such rows are rendered
one by one.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import nodes

from packhouse.templates.leaves import Leaf, WholeJson

__all__ = [
    "Check",
    "OpaqueError",
    "Trace",
    "TracedText",
    "concat_traced",
    "is_traceable",
    "passing",
]


class Check(NamedTuple):
    """One question about a content and the answer it got."""

    kind: str
    """`contains`, `equals`, `startswith`, `endswith`, `filled`, or `strip`, `lstrip`, `rstrip`."""
    argument: str | None
    answer: bool


class OpaqueError(Exception):
    """The template did something with a content that is not understood."""


class Trace:
    """What one rendering asked of its contents."""

    def __init__(self) -> None:
        self.checks: list[set[Check]] = []
        self.is_opaque = False

    def leaf(self, leaf: Leaf, copy: Any) -> Any:
        """The next leaf, traced; for `replace_leaves`."""
        number = len(self.checks)
        self.checks.append(set())
        if leaf.kind == "function":
            return copy  # its name and arguments are leaves of their own
        if leaf.is_json:
            return TracedJson.make(self, number, leaf.value)
        return self.text(leaf.value, number)

    def text(self, text: str, leaf: int | None) -> "TracedText":
        """A traced text; `leaf` None stands for a text put together of others."""
        traced = TracedText(text)
        traced.trace, traced.leaf = self, leaf
        return traced

    def untouchable(self, value: Any) -> Any:
        """An id: a template that even writes it is not understood."""
        if not isinstance(value, str):
            return value
        text = UntouchableText(value)
        text.trace, text.leaf = self, None
        return text

    def refuse(self) -> NoReturn:
        """Note that the trace is worth nothing, and end the rendering."""
        self.is_opaque = True  # a template's test may swallow the exception
        raise OpaqueError


class TracedText(str):
    """A content that records what is asked of it, and refuses what is not understood."""

    trace: Trace
    leaf: int | None

    def _ask(self, kind: str, argument: Any, answer: bool) -> bool:
        if self.leaf is None or not (argument is None or type(argument) is str):
            self.trace.refuse()
        self.trace.checks[self.leaf].add(Check(kind, argument, answer))
        return answer

    def __contains__(self, item: Any) -> bool:
        if type(item) is not str:
            self.trace.refuse()
        return self._ask("contains", item, str.__contains__(self, item))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, str):
            return self is other
        if type(other) is not str:
            self.trace.refuse()
        return self._ask("equals", other, str.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self._ask("filled", None, str.__len__(self) > 0)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> "TracedText":
        return self.trace.text(str.__add__(self, other), None)

    def __radd__(self, other: str) -> "TracedText":
        return self.trace.text(str.__add__(other, self), None)

    def __hash__(self) -> int:
        self.trace.refuse()

    def __iter__(self) -> Iterator[str]:
        # `is iterable` asks for an iterator and does not use it.
        return map(_refuse, (self,))

    def startswith(self, prefix: Any, *rest: Any) -> bool:
        """Recorded."""
        return self._ask("startswith", rest or prefix, str.startswith(self, prefix, *rest))

    def endswith(self, suffix: Any, *rest: Any) -> bool:
        """Recorded."""
        return self._ask("endswith", rest or suffix, str.endswith(self, suffix, *rest))

    def strip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("strip", chars, str.strip(self, chars))

    def lstrip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("lstrip", chars, str.lstrip(self, chars))

    def rstrip(self, chars: Any = None) -> "TracedText":
        """Recorded if it changes nothing."""
        return self._stripped("rstrip", chars, str.rstrip(self, chars))

    def _stripped(self, kind: str, chars: Any, result: str) -> "TracedText":
        if str.__len__(result) != str.__len__(self):
            self.trace.refuse()
        self._ask(kind, chars, False)
        return self

    def split(self, sep: Any = None, maxsplit: Any = -1) -> list["TracedText"]:  # type: ignore[override]
        """Recorded if there is nothing to split at."""
        return [self._without(sep)]

    def rsplit(self, sep: Any = None, maxsplit: Any = -1) -> list["TracedText"]:  # type: ignore[override]
        """Recorded if there is nothing to split at."""
        return [self._without(sep)]

    def partition(self, sep: Any) -> tuple["TracedText", str, str]:
        """Recorded if there is nothing to split at."""
        return self._without(sep), "", ""

    def replace(self, old: Any, new: Any, count: Any = -1) -> "TracedText":
        """Recorded if there is nothing to replace."""
        return self._without(old)

    def _without(self, part: Any) -> "TracedText":
        if type(part) is not str or not part or part in self:
            self.trace.refuse()
        return self


def _refuse(text: "TracedText | TracedJson", *args: Any, **kwargs: Any) -> NoReturn:
    text.trace.refuse()


_KEPT = {
    *("__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__"),
    *("__init_subclass__", "__subclasshook__", "__doc__", "__repr__", "__getstate__"),
    *("__reduce__", "__reduce_ex__", "__getnewargs__", "__dir__", "__sizeof__"),
}
for _name in set(dir(str)) - set(vars(TracedText)) - _KEPT:
    setattr(TracedText, _name, _refuse)


class UntouchableText(TracedText):
    """A text that a template may pass on, but neither ask about nor write."""


for _name in ("__str__", "__add__", "__radd__", *(n for n in vars(TracedText) if n in dir(str))):
    if _name not in _KEPT:
        setattr(UntouchableText, _name, _refuse)


class TracedJson(WholeJson):
    """A JSON leaf that can be written whole and nothing else."""

    trace: Trace
    leaf: int

    @classmethod
    def make(cls, trace: Trace, leaf: int, value: dict[str, Any]) -> "TracedJson":
        """The object, traced as leaf number `leaf`."""
        traced = cls(value)
        traced.trace, traced.leaf = trace, leaf
        return traced

    def write(self, dumps: Callable[[Any], str], *, is_default: bool) -> str:
        """The leaf's JSON as a traced text."""
        if not is_default:
            self.trace.refuse()
        return self.trace.text(dumps(dict(dict.items(self))), self.leaf)


for _name in set(dir(dict)) - {"__class_getitem__", *_KEPT}:
    setattr(TracedJson, _name, _refuse)


def concat_traced(pieces: Iterable[str]) -> str:
    """Jinja's `concat`, for macros and block assignments: keeps a lone traced text traced."""
    parts = list(pieces)
    traced = [part for part in parts if isinstance(part, TracedText)]
    if not traced:
        return "".join(parts)
    if all(part is traced[0] or not str.__len__(part) for part in parts) and len(traced) == 1:
        return traced[0]
    return traced[0].trace.text("".join(parts), None)


_FILTERS = frozenset(
    "trim string length count list first last items map select selectattr reject rejectattr "
    "default d tojson upper lower replace dictsort sort reverse unique _tick _sized".split()
)
_TESTS = frozenset(
    "defined undefined none string mapping iterable sequence boolean true false number integer "
    "float equalto eq ne sameas callable odd even".split()
) | {"==", "!="}
_STATEMENTS = (
    nodes.FilterBlock,
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Block,
    nodes.Extends,
    nodes.ScopedEvalContextModifier,
)


def is_traceable(ast: nodes.Template) -> bool:
    """Whether every use of a string in the template passes through `TracedText`."""
    rules: tuple[tuple[type[nodes.Node], Callable[[Any], bool]], ...] = (
        (nodes.Filter, _is_known_filter),
        (nodes.Test, lambda test: test.name in _TESTS),
        (nodes.Compare, _is_known_compare),
        (nodes.Call, _is_known_call),
        (nodes.Mod, lambda mod: _is_const(mod.right, int)),
        (nodes.Mul, lambda mul: _is_const(mul.right, int) or _is_const(mul.left, int)),
    )
    if any(True for _ in ast.find_all(_STATEMENTS)):
        return False
    if not all(known(node) for kind, known in rules for node in ast.find_all(kind)):
        return False
    return _num(ast, nodes.Concat) == sum(_num_direct(out) for out in ast.find_all(nodes.Output))


def _is_known_filter(used: nodes.Filter) -> bool:
    if used.name not in _FILTERS or used.dyn_args or used.dyn_kwargs:
        return False
    arguments = [argument.value for argument in used.args if isinstance(argument, nodes.Const)]
    if used.name == "replace":
        return len(arguments) == len(used.args)
    if used.name in ("map", "select", "reject"):
        return not used.args or arguments[:1] in (["string"], ["trim"], ["defined"])
    if used.name in ("selectattr", "rejectattr"):
        return len(used.args) < 2 or (len(arguments) > 1 and arguments[1] in _TESTS)
    return True


def _is_known_compare(compare: nodes.Compare) -> bool:
    membership = [operand for operand in compare.ops if operand.op in ("in", "notin")]
    if not membership:
        return True
    listed = isinstance(membership[0].expr, nodes.List | nodes.Tuple | nodes.Dict)
    return len(compare.ops) == 1 and (isinstance(compare.expr, nodes.Const) or listed)


def _is_known_call(call: nodes.Call) -> bool:
    if not isinstance(call.node, nodes.Getattr):
        return True
    if call.node.attr in ("format", "format_map", "join", "translate", "maketrans"):
        return False
    return not hasattr(str, call.node.attr) or all(isinstance(a, nodes.Const) for a in call.args)


def _is_const(expression: nodes.Expr, kind: type) -> bool:
    return isinstance(expression, nodes.Const) and isinstance(expression.value, kind)


def _num(node: nodes.Node, kind: type[nodes.Node]) -> int:
    return sum(1 for _ in node.find_all(kind))


def _num_direct(node: nodes.Node) -> int:
    """Concatenations that go straight into the output."""
    total = 0
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Concat | nodes.Add | nodes.CondExpr):
            total += isinstance(child, nodes.Concat) + _num_direct(child)
    return total


def passing(checks: Iterable[Check], column: pa.Array) -> np.ndarray:
    """Which texts of a column give the same answers; bool [len(column)]."""
    passed = np.ones(len(column), dtype=bool)
    for check in sorted(checks, key=repr):
        passed &= _answers(check, column) == check.answer
    return passed


def _answers(check: Check, column: pa.Array) -> np.ndarray:
    kind, argument = check.kind, check.argument
    if kind == "filled":
        return np.asarray(pc.binary_length(column).to_numpy() > 0)
    if kind in ("strip", "lstrip", "rstrip"):
        return _strippable(column, argument, left=kind != "rstrip", right=kind != "lstrip")
    asked = {
        "contains": lambda: pc.match_substring(column, argument),
        "equals": lambda: pc.equal(column, argument),
        "startswith": lambda: pc.starts_with(column, argument),
        "endswith": lambda: pc.ends_with(column, argument),
    }[kind]()
    return np.asarray(asked.to_numpy(zero_copy_only=False))


def _strippable(column: pa.Array, chars: str | None, *, left: bool, right: bool) -> np.ndarray:
    """Whether stripping changes a text: does it begin or end with one of the characters?"""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
    begins, ends = offsets[:-1].astype(np.int64), offsets[1:].astype(np.int64)
    found = np.zeros(len(column), dtype=bool)
    data = column.buffers()[2]
    if data is None or not len(data):
        return found
    text = np.frombuffer(data, np.uint8)
    for size, codes in _codes_by_size(chars if chars is not None else _WHITESPACE):
        long_enough = ends - begins >= size
        if left:
            found |= long_enough & np.isin(_code_at(text, begins, size), codes)
        if right:
            found |= long_enough & np.isin(_code_at(text, ends - size, size), codes)
    return found


def _codes_by_size(chars: str) -> list[tuple[int, list[int]]]:
    """UTF-8 of the characters as big-endian numbers, by number of bytes."""
    encoded = [char.encode() for char in chars]
    sizes = sorted({len(data) for data in encoded})
    return [(n, [int.from_bytes(d, "big") for d in encoded if len(d) == n]) for n in sizes]


def _code_at(text: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    code = np.zeros(len(positions), dtype=np.int64)
    for step in range(size):
        code = code << 8 | text[np.clip(positions + step, 0, len(text) - 1)]
    return code


# Everything that str.strip() takes off.
_WHITESPACE = "".join(chr(point) for point in range(0x3001) if chr(point).isspace())
