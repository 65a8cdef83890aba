"""List phrases that a native speaker would not write: `python -m bench.prose [--max N] [PLACES]`.

Reads the prose of files: Markdown outside code blocks, docstrings, comments, and strings of
at least four words. Reviews of this project found these phrases again and again. A text without a
hit can still read badly: read it aloud.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PLACES = (
    *("README.md", "CHANGELOG.md", "docs", "packhouse", "schemas", "tasks", "flows"),
    *("deployments", "tests", "bench", "hatch_build.py"),
)
_DOCSTRING = "\0"
# What to write instead -> what to look for. Only what is wrong here nearly every time: `is one` and
# `of its own` are English, so they are not in the list.
PHRASES = {
    "after, following": r"\bbehind\b(?! (?:the |a )?(?:scenes|proxy|firewall|flag|load balancer))",
    "next to, besides, with": r"\bbeside\b",
    "compared with, checked against": r"\b(?:held|hold|holds|holding) (?:\w+ ){0,4}against\b",
    "is (in, at, before, ...)": (
        r"\bstands? (?:in|beside|behind|before|there|alone|for itself)\b"
        r"|\b(?:lies|lay) (?:in|behind|before|beside|below|across|beyond|at|on|there|where)\b"
    ),
    "the result of": r"\bwhat (?:came|comes|becomes|became|come) of\b",
    "is not a": (
        r"(?<!there )\b(?:is|are|was|were) (?:no|none)\b"
        r"(?! (?:longer|more|one|need|way|reason|such|different|use|point)\b)"
    ),
    "again, from where, rarely, in it": r"\b(?:anew|whence|thence|seldom|therein|whereof)\b",
    "fix": r"\bmend(?:s|ed|ing)?\b",
    "the previous, the current": r"\bof (?:before|today|yesterday)\b",
    "literally, available": r"\bto the letter\b|\bat hand\b",
    "reports it, explains": r"\b(?:say|says|said|saying) (?:so|whether)\b",
    "prints, offers": r"\bput (?:forward|out)\b",
    "unchanged, as given": r"\bas (?:it|they) (?:came|stands?)\b",
    "because": r", for (?:it|they|there) (?:is|are|was|has|have|can|may|must|would)\b",
    "(docstring) an imperative verb or a noun": (
        rf"^{_DOCSTRING}\W*(?:What|Whether|Where|Whose|Of which)\b"
    ),
    "untrusted, somebody else's": r"\bstrangers?\b|\bforeign\b(?! key)",
    "in another way": r"\botherwise than\b",
    "distinguish, split": r"\b(?:tells?|told|telling|taken|takes?) (?:\w+ ){0,2}apart\b",
    "learned, comes before": r"\blearnt\b|\bgoe?s? before\b",
    "the same, exactly that": r"\bthe very (?!(?:same|first|last|end|beginning)\b)",
    "does not need to": r"\bneeds? not\b|\bneeds? no\b(?! longer)",
    "the same, one": r"\bof one (?:name|size|length|shape|kind)\b",
    "of other names: with other names": r"\bof (?:another|other) (?:names?|sizes?|shapes?)\b",
}
_PATTERNS = {write: re.compile(found, re.IGNORECASE) for write, found in PHRASES.items()}


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of docstrings, comments and messages."""
    tree = ast.parse(source)
    docstrings = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node in docstrings:
                yield node.lineno, _DOCSTRING + node.value
            elif node.value.count(" ") >= 3:
                yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of lines outside code blocks."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def hits(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what to write instead, the phrase with its surroundings) for a file."""
    read = prose_of_python if path.suffix == ".py" else prose_of_markdown
    for first, text in read(path.read_text()):
        for write, pattern in _PATTERNS.items():
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 40) : match.end() + 40]
                line = first + text.count("\n", 0, match.start())
                yield line, write, " ".join(around.strip(_DOCSTRING).split())


def main() -> None:
    """Print the hits, or with `--max` only their number unless there are more."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("places", nargs="*", help="files or folders; default: the repository")
    parser.add_argument("--max", type=int, help="exit with 1 if there are more hits than this")
    args = parser.parse_args()
    if gone := [place for place in args.places or PLACES if not Path(place).exists()]:
        parser.error(f"{', '.join(gone)} does not exist here. Run it in the root of the repository")
    files = [
        path
        for place in args.places or PLACES
        for path in ([Path(place)] if Path(place).is_file() else sorted(Path(place).rglob("*")))
        if path.suffix in (".py", ".md") and path.name != "prose.py"
    ]
    found = [(str(path), *hit) for path in files for hit in hits(path)]
    if args.max is None or len(found) > args.max:
        for name, line, write, around in found:
            print(f"{name}:{line}: {write}: ...{around}...")
        for write, count in Counter(hit[2] for hit in found).most_common():
            print(f"{count:6,}  {write}")
    print(
        f"{len(found):,} phrases that a native speaker would not write (at most {args.max})"
        if args.max is not None
        else f"{len(found):,} phrases that a native speaker would not write"
    )
    raise SystemExit(args.max is not None and len(found) > args.max)


if __name__ == "__main__":
    main()
