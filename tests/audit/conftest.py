"""Small tables of every step, made by the real steps, for tests to audit or to damage."""

import functools
from pathlib import Path

import pyarrow as pa
import pytest

from packhouse.recipe import FormatConfig, TokenizeConfig
from packhouse.records.record_ids import conversation_ids
from packhouse.records.table_schemas import CONVERSATION, VALIDATED
from packhouse.render import make_renderer
from packhouse.tokenize import load_snapshot, tokenize_table
from tests.chain.conftest import Project
from tests.prepared import DEMO


@pytest.fixture(scope="session")
def snapshot(tmp_path_factory):
    return load_snapshot(DEMO / "tokenizer", cache=tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session")
def snapshots(shared):
    """Real tokenizers by folder name, each loaded once."""
    return functools.cache(lambda name: load_snapshot(shared / "tokenizers" / name))


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]


CHATS = [
    turns("How many legs has an ant?", "Six."),
    turns("Name a river.", "The Danube.", "And another?", "The Elbe, for example."),
    [{"role": "system", "content": "Be brief."}, *turns("Why is the sky blue?", "Scattering.")],
]


def validated_table(chats, labels=None, tools=None) -> pa.Table:
    messages = pa.array(chats, CONVERSATION)
    tools = pa.array(tools or [None] * len(chats), pa.string())
    labels = pa.array(labels or [None] * len(chats), pa.int64())
    ids = conversation_ids(messages, tools, labels)
    source = pa.array(["chats/chats.jsonl"] * len(chats)).dictionary_encode()
    rows = pa.array(range(len(chats)), pa.int64())
    none = pa.nulls(len(chats))
    columns = [ids, source, rows, messages, tools, none.cast(pa.string())]
    columns += [none.cast(pa.float32()), labels, ids]
    return pa.table(columns, schema=VALIDATED)


DEFAULT = FormatConfig()


class Tables:
    """Validated, formatted and tokenized tables of some conversations."""

    def __init__(
        self,
        chats,
        snapshot,
        config=DEFAULT,
        labels=None,
        control_text="text",
        tools=None,
    ) -> None:
        self.config, self.snapshot = config, snapshot
        self.validated = validated_table(chats, labels, tools)
        rendered = make_renderer(config, snapshot).render(self.validated)
        assert not rendered.quarantined.num_rows, rendered.quarantined["detail"].to_pylist()
        self.validated = rendered.examples
        self.formatted = rendered.formatted
        self.tokenized = tokenize_table(
            self.formatted, snapshot, TokenizeConfig(control_text=control_text)
        ).tokenized

    def sabotage(self, change) -> None:
        rows = self.tokenized.to_pylist()
        for row in rows:
            change(row)
            row["num_tokens"] = len(row["input_ids"])
        self.tokenized = pa.Table.from_pylist(rows, self.tokenized.schema)


SOUND = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SUMS = [{"instruction": f"Add 1 to {n}.", "output": f"{n + 1}."} for n in range(40)]


class Sums(Project):
    """Rows and a recipe of which the audit has no finding."""

    def __init__(self, root: Path, rows=SUMS, **sections) -> None:
        super().__init__(root)
        (root / "sound.jinja").write_text(SOUND)
        self.write(rows, "sums.jsonl")
        base = {
            "sources": [{"path": "sums.jsonl", "format": "alpaca"}],
            "format": {"template": "sound.jinja"},
            "publish": {"store": str(root / "store")},
        }
        self.write_recipe(**base | sections)


@pytest.fixture
def tables(snapshot):
    return Tables(CHATS, snapshot)
