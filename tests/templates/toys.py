"""Toy tokenizers, toy templates and validated tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pyarrow as pa
from tokenizers import Tokenizer, models

from packhouse.recipe import FormatConfig
from packhouse.records.table_schemas import VALIDATED
from packhouse.render import Rendered, Renderer, make_renderer
from packhouse.render.jinja_sandbox import ChatTemplate
from packhouse.tokenize.encoders import TokenizerSnapshot


def make_table(
    conversations: list[Any],
    tools: Any = None,
    labels: Any = None,
    arguments: Any = None,
    weights: Any = None,
) -> pa.Table:
    """Return a VALIDATED table of conversations given as [(role, content), ...] or as dicts."""
    rows = []
    for number, conversation in enumerate(conversations):
        messages = [
            turn if isinstance(turn, dict) else dict(zip(("role", "content"), turn, strict=True))
            for turn in conversation
        ]
        rows.append(
            {
                "record_id": f"{number:020x}",
                "source": "toy/rows.jsonl",
                "row": number,
                "messages": messages,
                "tools": tools[number] if tools else None,
                "arguments": arguments[number] if arguments else None,
                "weight": weights[number] if weights else None,
                "label": labels[number] if labels else None,
                "group_key": f"{number:020x}",
            }
        )
    source = pa.array([row.pop("source") for row in rows], pa.string()).dictionary_encode()
    names = [name for name in VALIDATED.names if name != "source"]
    columns = {
        name: pa.array([r[name] for r in rows], VALIDATED.field(name).type) for name in names
    }
    columns["source"] = source.cast(VALIDATED.field("source").type)
    return pa.table([columns[name] for name in VALIDATED.names], schema=VALIDATED)


_BACKEND = Tokenizer(models.BPE({"a": 0}, [])).to_str()


def make_snapshot(**changes: Any) -> TokenizerSnapshot:
    facts = {
        "fingerprint": "0" * 64,
        "class_name": "ToyTokenizer",
        "backend": _BACKEND,
        "vocab_size": 300,
        "added_tokens": {"<s>": 0, "</s>": 1, "<|im_start|>": 2, "<|im_end|>": 3},
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "adds_bos": True,
        "chat_template": None,
    }
    return TokenizerSnapshot(**(facts | changes))


def pieces(formatted: pa.Table, spans: str = "trained_spans") -> list[list[str]]:
    rows = formatted.select(["text", spans]).to_pylist()
    return [
        [row["text"].encode()[span["start"] : span["end"]].decode() for span in row[spans]]
        for row in rows
    ]


def refusals(rendered: Rendered) -> list[str]:
    return [f"{row['reason']}: {row['detail']}" for row in rendered.quarantined.to_pylist()]


def snapshot_of(tokenizer: Any, **changes: Any) -> TokenizerSnapshot:
    """Return what templates need from a transformers tokenizer."""
    ids = tokenizer("a")["input_ids"]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    facts = {
        "class_name": type(tokenizer).__name__,
        "added_tokens": dict(tokenizer.added_tokens_encoder),
        "special_tokens": dict(tokenizer.special_tokens_map),
        "adds_bos": first is not None and ids[0] == first,
        "chat_template": tokenizer.chat_template,
        "vocab_size": len(tokenizer),
    }
    return make_snapshot(**(facts | changes))


def chat_renderer(template: str, config: dict[str, Any] | None = None, **snapshot: Any) -> Renderer:
    facts = {"adds_bos": False, "chat_template": template, **snapshot}
    return make_renderer(FormatConfig(**(config or {})), make_snapshot(**facts))


@contextmanager
def counting_messages() -> Iterator[list[int]]:
    """Record how many messages each rendering is given."""
    given = []
    render = ChatTemplate.render

    def counting(self: ChatTemplate, messages: Sequence[object], *args: Any, **named: Any) -> str:
        given.append(len(messages))
        return render(self, messages, *args, **named)

    with mock.patch.object(ChatTemplate, "render", counting):
        yield given


def render_chat(template: str, conversations: list[Any], **options: Any) -> Rendered:
    table = make_table(conversations, tools=options.pop("tools", None))
    return chat_renderer(template, **options).render(table)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
