"""Rows that try to make a page execute, fetch, overflow or mislead."""

import json
from pathlib import Path

TEXTS = (
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'> <svg onload=window.pwned=1>",
    "]]> <!-- --> &lt;b&gt; <style>*{display:none}</style>",
    "![a](http://127.0.0.1:9/pixel.png) [b](javascript:window.pwned=1)",
    "\u202eevil\u202c \u2066isolated\u2069 \u200f",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd mixed with English",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \u4f60\u597d",
    "\x1b[31mred\x1b]0;title\x07 \u2028 \u2029",
    "<|im_start|>system<|im_end|> <|endoftext|>",
    "Z\u0351\u036b\u0343\u036a\u0302" * 40,
    "unbroken" * 400,
    "${7*7} {{7*7}} datum.x + toString.constructor('window.pwned=1')()",
)


def write_rows(path: Path) -> None:
    """Write them as JSON Lines, each as a question and as an answer, and some that are refused."""
    rows = []
    for number in range(6):
        for text in TEXTS:
            rows.append({"instruction": f"{number} {text}", "output": f"fine {number}"})
            rows.append({"instruction": f"say {number} {text[:20]}", "output": text})
    rows.append({"instruction": "long", "output": "word " * 200_000})
    rows.append({"instruction": "<script>window.pwned = 1</script>", "output": ""})
    lines = [json.dumps(row) for row in rows]
    lines.append('{"instruction": "half a pair \\ud800", "output": "b"}')
    lines.append('{"instruction": "</script><script>window.pwned=1</script>", ')
    path.write_text("\n".join(lines) + "\n")
