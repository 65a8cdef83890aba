"""Size and shape of the library: `python -m bench.size`, part of `make check`.

A line of code is one that is not only a docstring or a comment. Prints the packages, largest first,
and figures that show how hard the code is to follow: short functions, private ones, look-ups by
string, and modules with a single importer.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "packhouse"
_LOOK_UP = re.compile(r"\[\"[a-z_]+\"\]|\.get\(\"[a-z_]+\"")
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def measure(path: Path) -> Counter[str]:
    """Count the lines and functions of one module."""
    text = path.read_text()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code = {
        line
        for token in tokens
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    functions = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.append(node.name)
    own_line = [
        t for t in tokens if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip()
    ]
    return Counter(
        files=1,
        lines=text.count("\n"),
        code=len(code),
        comments=len(own_line),
        functions=len(functions),
        private=sum(name.startswith("_") and not name.startswith("__") for name in functions),
        look_ups=len(_LOOK_UP.findall(text)),
    )


def _imported(path: Path) -> Iterator[str]:
    """Return names that a module imports from others: modules, or names that could be modules."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def count_single(root: Path) -> int:
    """Count the modules with exactly one importer."""
    importers = Counter[str]()
    for path in root.rglob("*.py"):
        importers.update(set(_imported(path)))
    paths = (p.relative_to(root.parent) for p in root.rglob("*.py") if p.name != "__init__.py")
    return sum(importers[".".join(path.with_suffix("").parts)] == 1 for path in paths)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    packages: dict[str, Counter[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        first, *rest = path.relative_to(ROOT).parts
        packages.setdefault(first if rest else "(modules)", Counter()).update(measure(path))
    total = Counter[str]()
    for each in packages.values():
        total.update(each)
    addons = packages.get("addons", Counter[str]())
    for name, each in sorted(packages.items(), key=lambda item: -item[1]["code"]):
        print(f"{name:<14} {each['files']:>4} files {each['code']:>7,} lines of code")
    print(f"core {total['code'] - addons['code']:,} lines of code, add-ons {addons['code']:,}")
    print(
        f"{total['files']} files; {100 * total['functions'] / total['code']:.1f} functions per 100 "
        f"lines of code, {100 * total['private'] / total['functions']:.0f}% private; "
        f"{count_single(ROOT)} modules with one importer; {total['look_ups']:,} look-ups by "
        f"string; {100 * total['comments'] / total['lines']:.1f}% comment lines"
    )


if __name__ == "__main__":
    main()
