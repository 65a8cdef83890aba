"""The `sources` of a recipe: where raw rows come from."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, field_validator

from packhouse.recipe.settings import Name, Role, Section, Uri
from packhouse.system.plugins import NameOf

RowFormatName = Literal[
    "auto",
    "alpaca",  # instruction, input, output
    "prompt_completion",  # prompt, completion
    "question_answer",  # question or query, answer or response
    "dolly",  # instruction, context, response
    "chat",  # messages: [{role, content}]
    "messages",  # the row itself is the list of messages
    "sharegpt",  # conversations: [{from, value}]
    "oasst",  # a message tree: text, role, replies
    "oasst_flat",  # a message of a tree: message_id, parent_id, text, role
    "transcript",  # chosen or text: "\n\nHuman: ...\n\nAssistant: ..."
    "classification",  # text, label
    "text",  # text
    "preference",  # prompt, chosen; rejected is left out
    "pairs",  # prompt, chosen, rejected: both sides
    "kto",  # prompt, completion, label: good or bad
    "squad",  # context, question, answers; or paragraphs of them
    "tokenized",  # input_ids, and labels or a mask
    "mixed",  # each row of a shape of its own
]

FileFormat = Literal[
    "json",
    "jsonl",
    "objects",
    "csv",
    "csv_semicolon",
    "tsv",
    "parquet",
    "arrow",
    "xlsx",
    "sqlite",
    "duckdb",
]

Encoding = Literal[
    "utf-8", "utf-16", "gb18030", "big5", "cp932", "cp949", "cp1250", "cp1251", "cp1252"
]

Expression = Annotated[str, Field(min_length=1, max_length=4000)]
Expressions = Annotated[
    Annotated[Expression, Tag("one")]
    | Annotated[list[Expression], Field(min_length=1, max_length=50), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
"""Their tags let a mistake be of one of them; of a plain union it would be of both."""


def _as_choices(schema: dict[str, Any]) -> None:
    """Write a union with tags as forms in the browser know it, and editors too."""
    union, *others = schema["anyOf"]
    schema["anyOf"] = [*union["oneOf"], *others]


class SourceConfig(Section):
    """One source of raw rows."""

    path: Uri
    """File, folder, glob, `s3://bucket/key` (or `gs://`, `az://`) or `hf://datasets/org/name/file`."""

    name: Name | None = None
    """Name in lineage and statistics; by default the file's name without its endings."""

    format: Annotated[str, NameOf("row_formats", get_args(RowFormatName))] = "auto"
    """Shape of a row, or a plug-in's name. `auto` looks at every row, knows no plug-in's shape, and
    refuses a file of mixed shapes; `mixed` reads each row by its own shape."""

    file_format: Literal["auto", FileFormat] = "auto"
    """Format of the file; `auto` goes by its name and checks its first bytes. `objects`: JSON
    objects one after another, each over as many lines as it takes; `xlsx`: also ODS."""

    table: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """SQLite or DuckDB file: the table that holds the rows; needed where there are several."""

    encoding: Encoding = "utf-8"
    """Of a text file. `gb18030` also reads GBK and GB2312, `cp932` Shift JIS, `cp949` EUC-KR,
    `cp1252` Latin-1."""

    rows_at: str | None = None
    """JSON file of one object: its field that holds the list of rows, `data` or `of.data`."""

    unwrap: bool = False
    """Each row stands in a list of its own: `[{"question": ...}]` counts as `{"question": ...}`."""

    where: Annotated[Expressions | None, Field(json_schema_extra=_as_choices)] = None
    """Which rows are read: an SQL expression over a row's fields, such as
    `length(output) > 20 and lang = 'en'`, or a list of them. Rows for which one is false or NULL
    are dropped, and counted by the first that is."""

    select: dict[str, Expression] = {}
    """What a row has instead of its own fields: name -> SQL expression over them, such as
    `{instruction: "title || chr(10) || body", output: answer}`. Fields that are not named here are
    left out."""

    fields: dict[str, str] = {}
    """Our field -> the file's field, where they differ: `{instruction: question_text}`. `role` and
    `content` are those of a message."""

    roles: dict[str, Role] = {}
    """Speaker of messages -> role, where `auto` knows no such speaker: `{Agent: assistant}`."""

    ignored_fields: list[str] = []
    """Fields with text that is left out. `prepare` refuses text that nothing reads: at least four
    words, in 5% of the rows and three of them. `input.notes` is a field of an object, and
    `messages[].notes` one of messages."""

    media: Literal["quarantine", "drop_rows", "drop_parts"] = "quarantine"
    """Rows with images, sound, video or files: bad rows; or dropped and counted; or read without
    these parts, which are counted."""

    label_names: list[str] | None = None
    """Classification: text of label 0, 1, ...; it is what a generative template trains."""

    oasst_paths: Literal["best", "all"] = "best"
    """Message trees: the best-ranked path only, or every path from root to leaf."""

    weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """How often each row is trained, with all records that it makes: 0.1 takes a tenth of the rows,
    2.5 takes every row twice and half of them a third time. Appended rows change nothing for those
    before."""

    max_records: Annotated[int | None, Field(ge=0)] = None
    """At most this many different rows, chosen by hash, each with all records that it makes;
    `weight` then applies to them."""

    loss_weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Factor of the loss weights of all its records: 0.5 lets each trained token count half. (How
    often records are trained is `weight`.) A row's own is the field `loss_weight` of `fields`."""

    mix_seed: int = 0
    """Another seed is another choice by `weight` and `max_records`."""

    eval_only: bool = False
    """All its records go to eval, and with them those of other sources with the same prompt."""

    @property
    def filters(self) -> list[str]:
        """The expressions of `where`."""
        return [self.where] if isinstance(self.where, str) else self.where or []

    @property
    def is_reshaped(self) -> bool:
        """True if expressions decide which rows are read, or which fields they have."""
        return bool(self.filters or self.select)

    @property
    def is_weighted(self) -> bool:
        """True if its records have loss weights: those of the source, or of rows."""
        return self.loss_weight != 1 or "loss_weight" in self.fields

    @field_validator("where")
    @classmethod
    def _one_spelling(cls, where: str | list[str] | None) -> str | list[str] | None:
        """One expression has one key, in a list or not."""
        if not isinstance(where, list):
            return where
        if twice := [text for text in where if where.count(text) > 1]:
            raise ValueError(f"`{twice[0]}` stands there twice")
        return where if len(where) > 1 else where[0]


MIXING = ("weight", "max_records", "mix_seed", "eval_only")
"""Settings of a source that decide which of its records are packed, and nothing before that."""
