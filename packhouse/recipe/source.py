"""The `sources` of a recipe: where raw rows come from."""

from typing import Literal

from packhouse.recipe.section import Name, Section

__all__ = ["RowFormat", "SourceConfig"]

RowFormat = Literal[
    "auto",
    "alpaca",  # instruction, input, output
    "prompt_completion",  # prompt, completion
    "question_answer",  # question, answer
    "dolly",  # instruction, context, response
    "chat",  # messages: [{role, content}]
    "messages",  # the row itself is the list of messages
    "sharegpt",  # conversations: [{from, value}]
    "oasst",  # a message tree: text, role, replies
    "classification",  # text, label
    "text",  # text
    "preference",  # prompt, chosen
]


class SourceConfig(Section):
    """One source of raw rows."""

    path: str
    """File, folder, glob, `s3://bucket/key` or `hf://datasets/org/name/file`."""

    name: Name | None = None
    """Name in lineage and statistics; by default the file's name without its endings."""

    format: RowFormat = "auto"
    """Shape of a row. `auto` looks at every row and refuses a file of mixed shapes."""

    file_format: Literal["auto", "json", "jsonl", "csv", "tsv", "parquet", "arrow"] = "auto"
    """Format of the file; `auto` goes by its name and checks its first bytes."""

    fields: dict[str, str] = {}
    """Our field -> the file's field, where they differ: `{instruction: question_text}`."""

    label_names: list[str] | None = None
    """Classification: text of label 0, 1, ...; it is what a generative template trains."""

    oasst_paths: Literal["best", "all"] = "best"
    """Message trees: the best-ranked path only, or every path from root to leaf."""
