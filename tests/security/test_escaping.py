"""Text that leaves the program is displayed and never interpreted."""

import re

from hypothesis import given, strategies as st
from markdown_it import MarkdownIt

from packhouse.system.escaping import for_markdown, for_terminal, markdown_code

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",
    "\x9b31m\x9d8;;http://evil.example\x9c",
    "\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\",
    "safe\u202egnp.exe",
    "\u2066\u2067\u200f\u061c",
    "![x](http://evil.example/x.png)",
    "[click](javascript:alert(1))",
    "<img src=x onerror=alert(1)>",
    "<http://evil.example>",
    "[a]: http://evil.example\n[a]",
    "`a` | b\n\n# heading\n\n| c | d |\n|---|---|",
    "``` \n<script>alert(1)</script>\n```",
    "[link=http://evil.example]x[/link] [bold]y[/bold]",
    "&#91;a&#93;(javascript&colon;alert(1))",
    "1. one\r2. two",
    "\\[a](http://evil.example)",
    "\U000e0041\ud800",
)

hostile = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(max_size=40),
    st.lists(
        st.sampled_from([*HOSTILE, *"[]()!<>`|\\*_&#;\n \x1b\x9b\u202eahttp:/."]), max_size=12
    ).map("".join),
)

ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that data must never send to a terminal; only the program may send newline and tab."""


@given(hostile)
def test_nothing_that_a_terminal_acts_on_is_left(text):
    assert not ACTIVE.search(for_terminal(text))
    assert "\n" not in for_terminal(text)
    assert not ACTIVE.search(for_terminal(text, keep_lines=True))
    assert for_terminal(for_terminal(text)) == for_terminal(text)


def test_letters_of_every_language_stay():
    text = "naïve 日本語 \u3000 فارسی\u200cها 👩‍👩‍👧 हिन्दी"  # noqa: RUF001

    assert for_terminal(text) == text


def _tokens(page: str) -> list[str]:
    """Kinds of all elements on a page except text and paragraphs."""
    parser = MarkdownIt("commonmark").enable("table").enable("strikethrough")
    found = []
    for block in parser.parse(page):
        found.append(block.type)
        found += [inline.type for inline in block.children or ()]
    return [kind for kind in found if kind not in ("text", "inline", "softbreak")]


@given(hostile)
def test_markdown_shows_data_as_text(text):
    assert _tokens(for_markdown(text)) in ([], ["paragraph_open", "paragraph_close"])
    assert _tokens("x " + markdown_code(text)) == [
        "paragraph_open",
        "code_inline",
        "paragraph_close",
    ]


@given(hostile, hostile)
def test_a_table_keeps_its_cells(text, other):
    table = f"| a | b |\n|---|---|\n| {for_markdown(text)} | {markdown_code(other)} |"

    kinds = _tokens(table)

    assert kinds.count("td_open") == 2
    assert kinds.count("code_inline") == 1
    assert not {"link_open", "image", "html_inline", "html_block"} & set(kinds)


@given(hostile)
def test_markdown_loses_no_letter(text):
    parser = MarkdownIt("commonmark")
    shown = "".join(
        inline.content
        for block in parser.parse(for_markdown(text))
        for inline in block.children or ()
    )

    assert shown.replace("@\u200b", "@") == for_terminal(" ".join(text.split())).strip()
