"""Matches of each function, and similar texts that must not match."""

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from packhouse.records.duckdb_functions import text_function
from packhouse.registry import TEXT_FUNCTIONS

SENTENCE = "The Elbe is a river that begins in Bohemia and ends in the North Sea, far away."
LUHN = "4539 5787 6362 1486"

FOUND = {
    "has_email": (
        ["Write to jo.lee+x@mail.example.co.uk!", "a@b.io", "<boss@company.com>", "mail:jo@x.org."],
        ["@jo", "git@github.com:org/repo", "jo@localhost", "x@y", "3@4.5", "@media.print", "a@b.c"],
    ),
    "has_phone": (
        (
            "Call (212) 684-4700. | 502-294-8258 | 502.294.8258 | +12145558444 | "
            "+44 20 7946 0958 | +49 30 901820 | 1-800-362-0101 | +1 (790) 998-9545 | "
            "tel +86 138 1234 5678"
        ).split(" | "),
        (
            "2126844700 | 1234-5678-9012 | 192.168.100.1000 | 3-4-5 | +3 and -4 | "
            "978-3-16-148410-0 | +1000000 | 2021-03-04 | f(100)-200-3000 | x=100.200.3000 | "
            "ID-502-294-8258"
        ).split(" | "),
    ),
    "has_card": (
        [
            f"Card {LUHN}.",
            LUHN.replace(" ", ""),
            LUHN.replace(" ", "-"),
            "3782 822463 10005",
            "(5555555555554444)",
            "6011111111111117,",
            "3530111333300000",
        ],
        [
            "4539 5787 6362 1487",
            "9780743273565",
            f"0.{LUHN.replace(' ', '')}",
            "4539-5787 6362 1486",
            f"{LUHN.replace(' ', '')}0",
            f"1{LUHN}",
            "4444444444444448=x",
            "0000 0000 0000 0000",
            "1/4111111111111111",
            "4111111111111111.5",
            "4111111111111111,000",
        ],
    ),
    "has_secret": (
        [
            "key AKIAIOSFODNN7EXAMPLE",
            f"ghp_{'a1' * 18}",
            f"hf_{'Ab' * 17}",
            f"sk-{'a1B2' * 12}",
            f"sk-proj-{'a_B-' * 10}",
            f"sk-ant-api03-{'aB3-' * 10}",
            f"AIza{'SyA' * 11}xy",
            "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
            f"github_pat_{'a1B2' * 11}",
            "xoxb-123456789012-abcdefghijkl",
            f"glpat-{'a1B2c' * 4}",
        ],
        (
            "AKIA | sk-learn | risk-averse-and-more-than-that-it-is-long-enough-to-be-one | "
            "ghp_token | -----BEGIN PUBLIC KEY-----\nMIIB | hf_hub_download | YOUR_API_KEY | "
            "sk-..."
        ).split(" | "),
    ),
    "has_html": (
        (
            "<p>Hi</p> | one<br/>two | a&nbsp;b | Tom &amp; Jo | "
            '<a href="x">y</a> | '
            "10 m<sup>2</sup>"
        ).split(" | "),
        (
            "a < b > c | <br> is a tag of HTML | `<p>` it is | ```\n<div>x</div>\n``` | "
            "AT&T; R&D; | <a drawing of a rocket> | <noinput> | List<String> | "
            "<html><p>x</p></html> | x &y; z"
        ).split(" | "),
    ),
    "has_mojibake": (
        (
            "caf\u00c3\u00a9 | it\u00e2\u20ac\u2122s | \ufffd | 5\u00c2\xa0km | "
            "\u00f0\u0178\u02dc\u20ac | \u951f\u65a4\u62f7"
        ).split(" | "),
        (
            "caf\u00e9 | S\u00c3O PAULO | \u00c2ngelo | it\u2019s | \u00e2ge | 5\u00a0km | "
            "\U0001f600"
        ).split(" | "),
    ),
    "has_invisible": (
        (
            "a\u200bb | \ufeffa | a\x07 | \x1b[31mred | \u202egpj.exe | a\u2066b\u2069 | "
            "Hi\U000e0048\U000e0069 | \U000e0041"
        ).split(" | "),
        [
            "\U0001f468\u200d\U0001f469",  # an emoji joiner
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # a Persian joiner
            "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # Scotland
            "co\u00adoperate",
            "a\tb\r\nc\fd",
            "5\u00a0km",
        ],
    ),
    "is_empty": (
        (
            "[object Object] | #REF! | #n/a | #DIV/0! |  |  \n\t | ... | \u2026 | N/A | n/a. | "
            "None | null | - | [] | No Output | <noinput>"
        ).split(" | "),
        ("A | 5 | + | :-) | .. . -.-- | None of them. | \u65e0 | No | x = [] | \U0001f600").split(
            " | "
        ),
    ),
    "is_refusal": (
        (
            "As an AI language model, I cannot eat. | "
            "I'm sorry, but I can't assist with that. | "
            "I\u2019m sorry, but as an AI, I don\u2019t have that. | "
            "Sorry, I cannot help you. | I cannot provide medical advice. | "
            "Unfortunately, I am unable to do so. | "
            "Well: as an AI assistant, I do not taste. | "
            "I am very sorry, I am not able to do that. | "
            "\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u56de\u7b54 | "
            "\u4f5c\u4e3a\u4e00\u4e2a\u4eba\u5de5\u667a\u80fd\uff0c\u6211"
        ).split(" | "),
        (
            "I can't believe it! | I'm sorry, but that's not true. | Sorry for the delay. | "
            "I cannot wait! | A model used as an AI assistant, it can be tested. | "
            "Agent: I'm sorry, but we cannot. | Sorry, I won't be able to make it. | "
            "As a child, I could not swim. | I can't sleep."
        ).split(" | "),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_function_finds_its_matches_and_no_similar_text(name):
    yes, no = FOUND[name]
    answers = text_function(name)(pa.array([*yes, *no, None]))
    said = dict(zip([*yes, *no, None], answers.to_pylist(), strict=True))
    assert said == {**dict.fromkeys(yes, True), **dict.fromkeys(no, False), None: None}


def test_an_answer_echoes_its_prompt():
    prompt = "Name three rivers of Europe, please."
    pairs = [
        (prompt, prompt, True),
        (f"  {prompt.upper()}\n", prompt, True),
        (f"{prompt} Elbe, Rhine, Oder.", prompt, True),
        ("Hi", "Hi", True),
        ("Hi there", "Hi", False),  # too short a prompt to be an intended prefix
        ("Name three rivers of Asia.", prompt, False),
        ("", "", False),
        (None, prompt, None),
        ("x", None, None),
    ]
    said, asked, due = zip(*pairs, strict=True)
    assert text_function("echoes")(pa.array(said), pa.array(asked)).to_pylist() == list(due)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("I am here. " * 20, 0.9, 1),
        ("a" * 200, 0.9, 1),
        ("ha" * 100, 0.9, 1),
        ("!" * 150, 0.9, 1),
        ("\u6211\u5f88\u597d\u3002" * 30, 0.85, 1),
        ("e\u0326" + "\u0326" * 100, 0.85, 1),
        (f"{SENTENCE} " * 3, 0.6, 0.7),
        (f"{SENTENCE} {SENTENCE}", 0.4, 0.6),
        ("".join(f"Line {n} says that {n * n} is the square of {n}.\n" for n in range(9)), 0, 0.5),
        ("Short. " * 5, 0, 0),
    ],
)
def test_repetition_is_the_share_of_repeated_text(text, low, high):
    around = ["another text " * 30, text, None, "b" * 500, text]
    answers = text_function("repetition")(pa.array(around)).to_pylist()
    assert answers[2] is None
    assert answers[1] == answers[4]
    assert low <= answers[1] <= high


@settings(max_examples=12)
@given(texts=st.lists(st.none() | st.text(max_size=300), max_size=12))
def test_an_answer_depends_on_its_text_alone(texts):
    """Neither the surrounding values nor the chunks of the array matter; null gives null."""
    array = pa.array(texts, pa.string())
    cut = pa.concat_arrays([pa.array(["x" * 200]), array]).slice(1)
    for name in TEXT_FUNCTIONS:
        if name in ("echoes", "language"):
            continue
        function = text_function(name)
        whole = function(array).to_pylist()
        assert function(cut).to_pylist() == whole
        assert function(pa.chunked_array([array[:7], array[7:]])).to_pylist() == whole
        assert [function(array.slice(n, 1))[0].as_py() for n in range(len(texts))] == whole
        assert [each is None for each in whole] == [each is None for each in texts]


def test_the_language_of_texts():
    pytest.importorskip("py3langid")
    texts = [
        "The quick brown fox jumps over the lazy dog near the river bank.",
        "Der Rhein ist ein Fluss, der durch mehrere Staaten in Europa flie\u00dft.",
        "Le Rhin est un fleuve qui traverse plusieurs pays de l'Europe.",
        "\u83b1\u8335\u6cb3\u662f\u6b27\u6d32\u7684\u4e00\u6761\u91cd\u8981\u6cb3\u6d41\uff0c\u6d41\u7ecf\u591a\u4e2a\u56fd\u5bb6\u3002",
        "Yes.",
        None,
    ]
    answers = text_function("language")(pa.array(texts)).to_pylist()
    assert answers == ["en", "de", "fr", "zh", "und", None]


HOSTILE = [
    *("a", "<p ", "4111 1111 1111 1112 ", "@", "a@b.", "+1 2", "&#", "\u00c3", "i am ", "x-"),
    *("\x00", "`"),
]


def test_a_hostile_text_is_looked_through():
    """Run in linear time: a backtracking search would not end within the time limit."""
    texts = [piece * (2**18 // len(piece)) for piece in HOSTILE]
    for name in TEXT_FUNCTIONS:
        if name not in ("echoes", "language"):
            assert len(text_function(name)(pa.array(texts))) == len(texts)
