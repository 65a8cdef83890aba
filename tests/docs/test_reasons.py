"""Every reason code in the library has a meaning and a remedy, and no other code is listed."""

import ast
import re
from pathlib import Path

from packhouse.pack.overlength import REASONS as OF_PACKING
from packhouse.records.message_rules import REASONS as OF_MESSAGES
from packhouse.records.reasons import DROP_REASONS, QUARANTINE_REASONS

PACKAGE = Path(__file__).parents[2] / "packhouse"
FILES = {
    "validate": (
        "read/*.py",
        *(
            f"addons/{name}.py"
            for name in ("message_trees", "spreadsheets_databases", "where_select")
        ),
        "addons/tokenized_rows.py",
    ),
    "format": ("render/*.py",),
    "tokenize": ("tokenize/*.py",),
}
ERRORS = {"BadRowError", "RefusedError", "Refusal"}
OF_DROPPED_ROWS = {"filtered", "joined", "other_path"}  # before they become records
OF_BOTH = {"media"}  # quarantined, or dropped depending on the source
NO_REASONS = {"names.py", "file_formats.py"}  # text pairs with another meaning


def is_sentence(node: ast.expr) -> bool:
    """Return True for a text with a space, an f-string, or a variable: the part after a code."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and " " in node.value
    return isinstance(node, ast.JoinedStr) or ast.unparse(node) in ("detail", "text", "why")


def codes(path: Path) -> set[str]:
    """Return the first text of each pair (code, sentence) and of each call that makes a refusal."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and is_sentence(node.elts[1]):
            found.append(node.elts[0])
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and is_sentence(node.elts[2]):
            found.append(node.elts[1])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and node.args:
            found.append(node.args[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            found += node.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("Failure", "dict.fromkeys"):
            found += node.args[1:2]
        elif isinstance(node, ast.keyword) and node.arg == "reason":
            found.append(node.value)
    texts = {node.value for node in found if isinstance(node, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and re.fullmatch("[a-z_]{3,}", text)}


def test_every_code_of_quarantined_rows_is_explained():
    # The IDs of pretokenized rows are compared with the tokenizer before anything is tokenized.
    of_ids = PACKAGE / "addons" / "tokenized_rows.py"
    elsewhere = {
        "validate": {*OF_MESSAGES, *codes(of_ids)},
        "format": {"only_thinking", "unclosed_thinking"},
    }
    for step, patterns in FILES.items():
        given = elsewhere.get(step, set())
        paths = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
        for path in paths - {of_ids}:
            given |= codes(path) if path.name not in NO_REASONS else set()
        if step == "tokenize":
            given |= codes(PACKAGE / "records" / "preference_pairs.py")
        assert given - OF_DROPPED_ROWS == set(QUARANTINE_REASONS[step])


def test_every_code_of_dropped_rows_is_explained():
    assert set(OF_PACKING) - {"kept"} | OF_DROPPED_ROWS | OF_BOTH == set(DROP_REASONS)
