"""The `sources` section of a recipe: files of raw rows and how to read them."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from packhouse.recipe.settings import Name, Role, Section, Uri
from packhouse.system.plugins import NameOf

ROW_FORMATS = (
    "auto",
    "alpaca",  # instruction, input, output
    "prompt_completion",  # prompt, completion
    "question_answer",  # question or query, answer or response
    "dolly",  # instruction, context, response
    "chat",  # messages: [{role, content}]
    "messages",  # the row itself is the list of messages
    "sharegpt",  # conversations: [{from, value}]
    "oasst",  # a message tree: text, role, replies
    "oasst_flat",  # one message of a tree per row: message_id, parent_id, text, role
    "transcript",  # chosen or text: "\n\nHuman: ...\n\nAssistant: ..."
    "classification",  # text, label
    "text",  # text
    "preference",  # prompt, chosen; rejected is ignored
    "pairs",  # prompt, chosen, rejected: both answers
    "kto",  # prompt, completion, label: good or bad
    "squad",  # context, question, answers; or a list of paragraphs with these
    "mixed",  # the format is detected for each row
    *sorted(
        file.stem.removesuffix("_format")
        for file in (Path(__file__).parents[1] / "read").glob("*_format.py")
    ),
)
"""Names of row formats. Those after `mixed` are in separate files: `read/<name>_format.py`."""

DETECTED = ("auto", "mixed")
"""Names with which packhouse finds the format of rows, among all formats."""

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
# The tags make pydantic report an error for the matching type only.
Expressions = Annotated[
    Annotated[Expression, Tag("one")]
    | Annotated[list[Expression], Field(min_length=1, max_length=50), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list) else "one"),
]
"""One expression or several."""


def _as_choices(schema: dict[str, Any]) -> None:
    """Rewrite `oneOf` of a tagged union as `anyOf`, which run forms and editors understand."""
    union, *others = schema["anyOf"]
    schema["anyOf"] = [*union["oneOf"], *others]


class SourceConfig(Section):
    """One source of raw rows."""

    path: Uri
    """File, folder, glob, `s3://bucket/key` (or `gs://`, `az://`) or
    `hf://datasets/org/name/file`."""

    name: Name | None = None
    """Name in lineage and statistics. Default: the file name without extensions."""

    format: Annotated[str, NameOf("row_formats", ROW_FORMATS)] = "auto"
    """Row format, or the name of a plug-in. `auto` checks every row and refuses a file with mixed
    formats; it does not detect plug-in formats. `mixed` detects the format of each row."""

    file_format: Literal["auto", FileFormat] = "auto"
    """File format. `auto` uses the file name and checks the first bytes. `objects`: one
    JSON object after another, each on one or more lines. `xlsx` also reads ODS."""

    table: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Table of a SQLite or DuckDB file. Required if the file has several tables."""

    encoding: Encoding = "utf-8"
    """Encoding of a text file. `gb18030` also reads GBK and GB2312; `cp932` Shift JIS; `cp949`
    EUC-KR; `cp1252` Latin-1."""

    rows_at: str | None = None
    """For a JSON file with one object: path of the field with the list of rows, such as `data` or
    `of.data`."""

    unwrap: bool = False
    """Each row is wrapped in a list: read `[{"question": ...}]` as `{"question": ...}`."""

    where: Annotated[Expressions | None, Field(json_schema_extra=_as_choices)] = None
    """Rows to keep: an SQL expression over the row's fields, such as `length(output) > 20 and lang
    = 'en'`, or a list of them. A row is dropped if any expression is false or NULL, and counted
    under the first one that is."""

    select: dict[str, Expression] = {}
    """New fields of each row: name -> SQL expression over its original fields, such as
    `{instruction: "title || chr(10) || body", output: answer}`. All other fields are dropped."""

    fields: dict[str, str] = {}
    """Field names of the row format -> names used in the file, where they differ: `{instruction:
    question_text}`. `role` and `content` refer to messages."""

    roles: dict[str, Role] = {}
    """Speaker names -> roles, for speakers that are not recognized: `{Agent: assistant}`."""

    ignored_fields: list[str] = []
    """Text fields to leave out. `prepare` refuses a source with a text field that nothing reads
    (at least four words, in at least 5% of the rows and three rows), unless it is listed here.
    Write `input.notes` for a field of an object and `messages[].notes` for a field of messages."""

    media: Literal["quarantine", "drop_rows", "drop_parts"] = "quarantine"
    """How to handle rows that contain images, audio, video or files. `quarantine` the rows,
    `drop_rows` and count them, or `drop_parts`: read the rows without these parts and count the
    parts."""

    label_names: list[str] | None = None
    """For classification: text of label 0, 1, ... Generative templates train this text."""

    oasst_paths: Literal["best", "all"] = "best"
    """For message trees: read only the `best`-ranked path, or `all` paths from root to leaf."""

    weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """How many times to use each row, with all its records: 0.1 uses a tenth of the rows; 2.5 uses
    every row twice and half of them a third time. Appending rows to a file does not change the
    choice among earlier rows."""

    max_records: Annotated[int | None, Field(ge=0)] = None
    """Maximum number of distinct rows, chosen by hash, each with all its records. `weight` then
    applies to these rows."""

    loss_weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Multiplies the loss weights of this source: with 0.5, each trained token counts half.
    (`weight` sets how many times rows are used.) For a weight per row, map `loss_weight` in
    `fields`."""

    mix_seed: int = 0
    """Seed for sampling with `weight` and `max_records`."""

    eval_only: bool = False
    """Put all records of this source into eval, along with records of other sources that have the
    same prompt."""

    @property
    def filters(self) -> list[str]:
        """Expressions of `where`, as a list."""
        return [self.where] if isinstance(self.where, str) else self.where or []

    @property
    def is_reshaped(self) -> bool:
        """True if `where` or `select` is set."""
        return bool(self.filters or self.select)

    @property
    def is_weighted(self) -> bool:
        """True if the source or its rows set a loss weight."""
        return self.loss_weight != 1 or "loss_weight" in self.fields

    @field_validator("where")
    @classmethod
    def _one_spelling(cls, where: str | list[str] | None) -> str | list[str] | None:
        """Unwrap a list of one expression, so that both spellings have the same cache key."""
        if not isinstance(where, list):
            return where
        if twice := [text for text in where if where.count(text) > 1]:
            raise ValueError(f"`{twice[0]}` is listed twice. Remove one")
        return where if len(where) > 1 else where[0]


MIXING = ("weight", "max_records", "mix_seed", "eval_only")
"""Source settings that decide which records are packed. They do not affect earlier steps."""
