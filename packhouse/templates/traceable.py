"""Whether every use of a string in a template passes through `TracedText`.

Not every use of a string calls a Python method of it: `'%s' % content`, `content in 'abc'`,
conversions. A template that is free of these is traced (see tracing.py); others are rendered by
marks. Decided once a template, from its syntax tree.
"""

from collections.abc import Callable
from typing import Any

from jinja2 import nodes

__all__ = ["is_traceable"]

_FILTERS = frozenset(
    "trim string length count list first last items map select selectattr reject rejectattr "
    "default d tojson upper lower replace dictsort sort reverse unique _joined".split()
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
    """Whether tracing sees all that the template does with texts."""
    rules: tuple[tuple[type[nodes.Node], Callable[[Any], bool]], ...] = (
        (nodes.Filter, _is_known_filter),
        (nodes.Test, lambda test: test.name in _TESTS),
        (nodes.Compare, _is_known_compare),
        (nodes.Call, _is_known_call),
        (nodes.Mod, lambda mod: _is_const(mod.right, int)),
        (nodes.Mul, lambda mul: _is_const(mul.right, int) or _is_const(mul.left, int)),
        (nodes.Concat, lambda _: False),  # the sandbox joins by a filter instead
    )
    if any(True for _ in ast.find_all(_STATEMENTS)):
        return False
    return all(known(node) for kind, known in rules for node in ast.find_all(kind))


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
