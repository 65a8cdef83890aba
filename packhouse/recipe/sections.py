"""The sections of a recipe, from `sources` to `publish`; `audit` has its own file.

All are frozen, refuse unknown keys, and do not accept a boolean as a number.
"""

import ast
import inspect
import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from packhouse import registry
from packhouse.records.reasons import TurnOrder
from packhouse.system.plugins import RENDERERS, NameOf, plugin_names

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]|\.[a-z0-9_-])*$", max_length=64)]

# `..` is refused, because the Hub's client builds file paths from the revision.
HUB_NAME = re.compile(r"(?!.*\.\.)(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
"""A name on the Hugging Face Hub: `org/name` or `org/name@revision` (a branch, tag or commit)."""

IN_A_FILE = "in a file"
"""Validation context of a recipe file. In a run form, a name may stand for an allowed path."""

Share = Annotated[float, Field(ge=0, le=1)]

# Prefect's server checks parameters against this pattern before it stores them. It refuses
# `user:password@` (also with a slash in the password, as in AWS secrets), signatures in the query,
# and anything that looks like a key.
_NO_CREDENTIALS = (
    r"^(?![^/]*://[^/?#]*@)"
    r"(?![^/]*://[^/?#:]*:(?![0-9]*(?:[/?#]|$)))"
    r"(?!.*[?&;#](?:[Xx]-[Aa][Mm][Zz]-[A-Za-z-]+|AWSAccessKeyId|[Ss]ignature|SIGNATURE|sig|SIG"
    r"|[A-Za-z_-]*(?:[Ss]ecret|SECRET|[Pp]assword|PASSWORD|[Tt]oken|TOKEN|[Kk]ey|KEY"
    r"|[Kk]ey_?[Ii]d|KEY_?ID))=)"
    r"(?!.*(?:AKIA|ASIA)[A-Z0-9]{16})(?!.*hf_[A-Za-z0-9]{30,})"
)

# Not a `Path`, which turns `s3://b` into `s3:/b`.
Uri = Annotated[str, Field(json_schema_extra={"pattern": _NO_CREDENTIALS})]
"""A path or address without credentials. The code that opens it refuses them too."""


def _as_form(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add title, docstrings and order of the fields to the schema for Prefect's form."""
    # The form sorts by `position`: a server on PostgreSQL stores schemas as JSONB, which loses the
    # order of keys.
    schema["title"] = model.__name__.removesuffix("Config")
    texts = docstrings_of(model)
    for position, (name, field) in enumerate(schema.get("properties", {}).items()):
        field["position"] = position
        if name in texts:
            field["description"] = texts[name]


@cache
def docstrings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a section's keys, by their names in a recipe.

    Read from the source on request: `use_attribute_docstrings` of pydantic reads them at each
    start, in each process (3% of the CPU time of a small run).
    """
    texts: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if issubclass(owner, Section):
            (section,) = ast.parse(inspect.getsource(owner)).body
            assert isinstance(section, ast.ClassDef)
            for field, text in pairwise(section.body):
                match field, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(said))),
                    ):
                        texts[model.model_fields[name].alias or name] = inspect.cleandoc(said)
    return texts


class Section(BaseModel):
    """Base class of all sections: frozen, rejects unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,  # a worker process builds none of them: 0.1 s
        json_schema_extra=_as_form,
        hide_input_in_errors=True,  # a secret may have been pasted into the wrong field
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse a boolean where a number or text is expected; pydantic would read `true` as 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("must not be a boolean")
        return value


Role = Literal["system", "user", "assistant", "tool"]
PipelineChoice = Literal["file", "class"]


def _in_order(names: list[Any]) -> list[Any]:
    return sorted(set(names))  # the order of the list must not change the version ID


class ValidateConfig(Section):
    """Rules for rows, and the share of bad rows at which a run fails."""

    max_quarantined: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Maximum share of quarantined rows; above it, the run fails. Unless it is 0, one bad row is
    always allowed, so that a single bad row does not fail a small file."""

    max_row_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    """Maximum size of a raw row in bytes. Longer rows are quarantined without parsing. A file
    with a row that exceeds both this and 64 MiB is rejected."""

    max_chars: Annotated[int, Field(gt=0)] = 1_000_000
    """Maximum length of a message in characters. Rows with a longer one are quarantined before
    tokenization."""

    allow_ends_on_user: bool = False
    """Keep conversations that end with a user turn. The last turn is not trained."""

    refused_orders: Annotated[list[TurnOrder], Field(max_length=4), AfterValidator(_in_order)] = []
    """Turn orders that quarantine a row: `system_not_first`, `starts_with_assistant`,
    `consecutive_user`, `consecutive_assistant`. By default, any order is accepted that the
    template can write without losing content."""


CHAT_TEMPLATES = ("chat", "mistral_system", *RENDERERS)
"""Built-in templates that accept `chat_template_kwargs`: Jinja templates and Python renderers."""
TEMPLATES = (
    *CHAT_TEMPLATES,
    *("alpaca", "alpaca_newline", "completion"),
    *("classification", "sequence_classification", "text"),
    *("dart-math/qa", "dart-math/alpaca", "dart-math/wizardmath-cot", "dart-math/deepseekmath"),
    *("dart-math/deepseekmath-tool", "dart-math/xwinmath", "dart-math/mammoth2-cot"),
    "dart-math/llama3-math",
)
"""Built-in templates, implemented in `packhouse.render`."""


def is_chat(template: str) -> bool:
    """Return True if a template renders whole conversations, not one prompt and one answer.

    Example:
        >>> is_chat("chat"), is_chat("mine.jinja"), is_chat("dart-math/qa"), is_chat("alpaca")
        (True, True, True, False)
    """
    return template not in TEMPLATES or template.startswith((*CHAT_TEMPLATES, "dart-math/"))


def is_renderer(template: str) -> bool:
    """Return True if a template is a Python renderer: a built-in one or a plug-in."""
    if template in TEMPLATES or template.endswith((".jinja", ".j2")):
        return template in RENDERERS
    return template in plugin_names("renderers")


_OWN_ARGUMENTS = {"messages", "add_generation_prompt", "continue_final_message"}
_MAX_ARGUMENTS = 2**16


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse argument names that a row or recipe cannot set, such as `messages` or `bos_token`.

    Raises:
        ValueError: names the first refused argument.
    """
    for name in arguments:
        if not name.isidentifier() or name in _OWN_ARGUMENTS or name.endswith("_token"):
            problem = "cannot be set as an argument of a chat template. Remove it"
            raise ValueError(f"'{name[:60]}' {problem}")


class FormatConfig(Section):
    """How conversations become text, and which parts are trained."""

    template: str = "chat"
    """`chat` (the tokenizer's own template), `mistral_system` (Mistral v0.3's, but always with the
    system turn), `alpaca`, `alpaca_newline`, `completion`, `classification`,
    `sequence_classification`, `text`, one of dart-math's (`dart-math/alpaca`, ...), a path to a
    Jinja file, or a Python renderer: `harmony` (gpt-oss), `mistral` (tekken.json) or the name of a
    plug-in."""

    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which turns are trained. `all` trains every token. The `weight` or `train` of a message
    overrides this setting."""

    never_train: Annotated[list[Role], Field(max_length=4), AfterValidator(_in_order)] = []
    """Roles whose turns, including headers, are not trained with `train_on: all`."""

    reasoning: Literal["keep", "strip", "train_last"] = "keep"
    """How to treat reasoning in answers. `keep`: leave it to the template. `strip`: remove it
    before rendering. `train_last`: like `keep`, but train it only after the last user turn."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`. A row's own
    `chat_template_kwargs`, `tools` and `documents` override them. At inference, pass the same
    arguments to `apply_chat_template`."""

    turns: Literal["joined", "exact", "alone", "whole"] = "joined"
    """How the answers of a conversation become records. `joined`: an answer joins the previous
    record if its prompt at inference continues that record, ignoring text that the template adds;
    otherwise it starts a new record. `exact`: it joins only if its prompt continues that record
    byte for byte. `alone`: one record per answer. `whole`: one record per row, even if inference
    would use different prompts."""

    stop_tokens: Annotated[list[str], Field(max_length=16)] = []
    """Control tokens that stop generation. Default: those of `generation_config.json` and the
    tokenizer's EOS; if the template writes none of these after an answer, the control token that
    it writes after every answer."""

    thought_end: str | None = None
    """Text between reasoning and answer, for templates that do not write reasoning themselves
    (DeepSeek R1: `"\\n</think>\\n\\n"`)."""

    call_ids: Literal["functions"] | None = None
    """`functions`: rewrite tool call IDs as `functions.NAME:N`, the only form that Kimi models
    write."""

    system: str | None = None
    """System prompt for conversations without one."""

    prompt: str | None = None
    """Prompt that asks for the label, with `{text}` where the row's text goes (only with template
    `classification`)."""

    @field_validator("template")
    @classmethod
    def _is_known(cls, template: str, info: ValidationInfo) -> str:
        """Refuse an unknown name in a recipe file; in a run form, it may name an allowed path."""
        is_file = info.context == IN_A_FILE
        is_path = template.endswith((".jinja", ".j2"))
        if is_file and template not in TEMPLATES and not is_path and not is_renderer(template):
            known = [*TEMPLATES, *plugin_names("renderers"), "a path to a .jinja or .j2 file"]
            raise PydanticCustomError("literal_error", "no such template", {"expected": str(known)})
        return template

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_json(cls, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Check names and values; sort by name, so that the order does not change the version."""
        check_arguments(arguments)
        for name in ("tools", "documents"):
            items = arguments.get(name, [])
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise ValueError(f"'{name}' must be a list of objects")
        try:
            text = json.dumps(dict(sorted(arguments.items())), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the arguments cannot be written as JSON: {error}") from None
        if len(text) > _MAX_ARGUMENTS:
            limit = f"the limit is {_MAX_ARGUMENTS:,}. Shorten them"
            raise ValueError(f"the arguments have {len(text):,} characters as JSON; {limit}")
        ordered: dict[str, Any] = json.loads(text)
        return ordered

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.chat_template_kwargs and self.template in set(TEMPLATES) - set(CHAT_TEMPLATES):
            raise ValueError(
                f"template {self.template} does not accept chat_template_kwargs. Remove them, or "
                "use a chat template"
            )
        if self.never_train and self.train_on != "all":
            raise ValueError(
                f"never_train requires train_on: all, but train_on is {self.train_on}. Change "
                "one of them"
            )
        if len({*self.never_train, "tool", "system"}) == 4:
            raise ValueError(
                "never_train excludes both user and assistant, so nothing is left to train. "
                "Remove one of the two"
            )
        if self.turns == "alone" and self.train_on == "all":
            raise ValueError(
                "turns: alone trains one answer per record and cannot be combined with train_on: "
                "all. Change one of them"
            )
        if self.turns == "whole" and self.thought_end is not None:
            raise ValueError(
                "turns: whole renders each row once, and the template drops the reasoning that "
                "thought_end would close. Remove thought_end, or use turns: joined"
            )
        if self.reasoning == "train_last" and self.train_on == "all":
            raise ValueError(
                "reasoning: train_last excludes reasoning from training and cannot be combined "
                "with train_on: all. Change one of them"
            )
        return self


class TokenizeConfig(Section):
    """How text becomes token IDs."""

    encoder: Literal["auto", "hf", "fast"] = "auto"
    """`auto` uses the fast encoder if it gives the same IDs as Hugging Face's, and Hugging Face's
    otherwise. Does not affect the IDs."""

    pipeline: PipelineChoice | None = None
    """Which pipeline to use if the tokenizer's class builds a different one from that in
    tokenizer.json: that of the `file`, or of the `class` (as loaded by `AutoTokenizer`). By
    default, a tokenizer whose two pipelines give different IDs is rejected. Choose the one that
    inference uses."""

    control_text: Literal["text", "allow", "quarantine"] = "text"
    """How to handle the text of a control token inside a message: encode it as ordinary `text`,
    `allow` it as a control token, or `quarantine` the row."""


Strategy = Literal["best_fit", "first_fit", "first_fit_shuffle", "next_fit", "concat", "none"]


class PackConfig(Section):
    """How records are packed into rows of at most `seq_len` tokens."""

    seq_len: Annotated[int, Field(gt=0, le=2**24)] = 2048
    """Pack size in tokens."""

    strategy: Annotated[str, NameOf("packing_strategies", get_args(Strategy))] = "best_fit"
    """`best_fit` (best-fit decreasing) leaves the least padding. `concat` splits records at the
    end of a pack, for continued pretraining. `none` publishes one record per row, padded at load
    time. Or the name of a plug-in."""

    over_length: Literal["drop", "error", "truncate_turns", "window"] = "drop"
    """How to handle records longer than `seq_len`. `drop`: drop and count them (in chats with many
    answers, records over 8,192 tokens are counted without being built). `error`: fail.
    `truncate_turns`: keep the whole turns that fit, from the start. `window`: split into windows of
    whole turns, each with the system prompt (changing `seq_len` then reruns the format step,
    too)."""

    seed: int = 0
    """Seed for the order of packs, and of records of equal length within them."""

    pad_record_to_multiple_of: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Leave room in packs to pad each record to a multiple of this many tokens: twice the number
    of ranks for context parallelism; 16, 32 or 128 for FP8 and tensor parallelism.
    `PackedCollator` and the export `megatron` add the padding; the files have none. `seq_len` must
    be a multiple too."""

    # On Alpaca with 8 ranks, the costliest pack of a step costs 1.96 times the mean of its step,
    # and 1.01 times if packs are balanced.
    balance: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Packs per training step, over all data-parallel ranks. Packs are ordered so that each group
    of this many costs about the same attention (sum of squared lengths). Only the order changes.
    Use it with trainers that read packs in file order."""

    @model_validator(mode="after")
    def _multiples_fit(self) -> Self:
        multiple = self.pad_record_to_multiple_of
        if self.seq_len % multiple:
            raise ValueError(
                f"seq_len {self.seq_len} is not a multiple of pad_record_to_multiple_of "
                f"{multiple}. Use {max(1, self.seq_len // multiple) * multiple}"
            )
        if multiple > 1 and self.strategy == "concat":
            raise ValueError(
                "strategy concat leaves no room for padding. Remove pad_record_to_multiple_of, or "
                "choose another strategy"
            )
        return self


Repeats = Literal["keep", "drop", "same_side"]


class DedupConfig(Section):
    """How to treat conversations that repeat an earlier one."""

    exact: Repeats = "keep"
    """Conversations that are equal except for white space and Unicode form: `keep` all, `drop` all
    but the first (in file and row order), or keep all in the same split (`same_side`). Identical
    conversations are always in the same split."""

    near: Literal["ignore", "keep", "drop", "same_side"] = "ignore"
    """Similar conversations: do not look for them (`ignore`), `keep` and count them, `drop` all
    but the first (including equal ones), or keep all in the same split (`same_side`). All but
    `ignore` need `pip install 'packhouse[dedup]'`. Conversations that become several records are
    compared as a whole."""

    near_threshold: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    """Minimum Jaccard similarity of n-grams at which two conversations count as similar."""

    # With 8 characters, 99.3% of copies with a typing error in the answer were found instead of
    # 94.9%, for six times the CPU.
    near_unit: Literal["words", "characters"] = "words"
    """Unit of the n-grams. Each ideograph counts as a word."""

    # Answers are short: of copies with a word in 40 replaced, pairs of words found 93%, and runs of
    # five words, usual for web pages, 60%.
    near_ngram: Annotated[int, Field(ge=1, le=50)] = 2
    """Words or characters per n-gram."""

    near_permutations: Annotated[int, Field(ge=32, le=1024)] = 128
    """Hash functions per MinHash. More are slower, but more accurate near the threshold."""


class SplitConfig(Section):
    """Which records go to the eval split."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the groups (see `group_by`) that go to eval, chosen by a hash of the group
    key."""

    eval_count: Annotated[int | None, Field(ge=0)] = None
    """Number of rows in eval, instead of a fraction. Groups are added in order of their hash until
    this number is reached; each row includes all its records."""

    # With `record`, one of two answers to a question may be trained and the other one evaluated.
    group_by: Literal["prompt", "record"] = "prompt"
    """Unit that stays in one split: records with the same `prompt`, or only exact duplicates
    (`record`)."""

    seed: int = 0
    """Seed for assigning records to train and eval."""

    eval_by_source: bool = False
    """Pack the eval records of each source separately, into separate files. `load_packed(...,
    split="eval", by_source=True)` returns them as a dict."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.eval_count is not None and self.eval_fraction:
            raise ValueError("eval_fraction and eval_count are both set. Remove one")
        return self


_TARGET = r"^(hf://datasets/[\w.-]+/[\w.-]+|wandb://[\w.-]+(\?files=true)?)$"
Target = Annotated[str, Field(pattern=_TARGET)]

ExportFormat = Literal["trl", "axolotl", "megatron", "mds", "msgpack", "jsonl", "arrow"]

MAX_SHARDS = 10_000


class ExportConfig(Section):
    """Format of an export and its number of files: `trl` or `{format: megatron, shards: 4}`."""

    format: ExportFormat
    """Format name, as for `packhouse export --to`."""

    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    """Files per split. Each split needs at least this many packs. `mds` chooses its own shards."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: object) -> object:
        return {"format": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_no_shards_of_its_own(self) -> Self:
        if self.shards > 1 and self.format == "mds":
            raise ValueError("export mds chooses its own shards. Remove `shards`")
        return self

    @model_serializer(mode="wrap")
    def _as_a_name(self, write: SerializerFunctionWrapHandler) -> object:
        """Write an export without other settings as its name, the short form in recipes."""
        return self.format if self.shards == 1 else write(self)


def _or_a_name(schema: dict[str, Any]) -> None:
    """Let forms and editors accept the name of a format as well as a mapping."""
    names = {"type": "string", "enum": list(get_args(ExportFormat))}
    schema["items"] = {"anyOf": [names, schema["items"]]}


class PublishConfig(Section):
    """Destination and files of the published version."""

    store: Uri = "./store"
    """Root of the store: a folder or `s3://bucket/prefix`."""

    ref: Name = "latest"
    """Ref that moves to the new version."""

    move_ref: bool = True
    """If false, publish without moving the ref. A ref that does not exist yet is still created."""

    also: list[Target] = []
    """Additional targets: `hf://datasets/ORG/NAME`, `wandb://PROJECT`. W&B receives tables of text
    and the manifest, and with `wandb://PROJECT?files=true` also the packed files."""

    keep_tokenizer: bool = True
    """Keep a copy of the tokenizer in the store, shared by all versions, so that any machine can
    decode its tokens. Set it to false if the license forbids redistribution; `packhouse inspect`
    then needs the tokenizer's folder."""

    allow_breaking_schema: bool = False
    """Move the ref even if the new version's schema breaks readers of the current version."""

    max_length_drift: Share | None = None
    """Maximum difference in record lengths from the ref's current version. Above it, the version
    is published but the ref does not move."""

    max_source_drift: Share | None = None
    """Same limit for the share of rows per source."""

    max_quarantine_drift: Share | None = None
    """Same limit for the share of quarantined rows."""

    max_trained_drift: Share | None = None
    """Same limit for the share of trained tokens."""

    file_format: Literal["parquet", "arrow", "jsonl"] = "parquet"
    """Format of the published files."""

    # In Parquet, `labels` takes 2.6 bytes per token and `compact` 1.4.
    layout: Literal["labels", "compact"] = "labels"
    """`labels` stores one label per token; `compact` stores the trained ranges instead."""

    position_ids: bool = True
    """Also publish `position_ids`, which restart at each record. They are the only record
    boundaries that `transformers.Trainer` keeps. Not written with `pack.strategy: none`, where
    each row is one record. They take 0.4% of a Parquet file, and at least 4 bytes per token in
    `arrow` and `jsonl`."""

    max_file_mb: Annotated[int, Field(gt=0)] = 256
    """Maximum size of a published file, in MiB of token data before compression."""

    exports: Annotated[list[ExportConfig], Field(json_schema_extra=_or_a_name)] = []
    """Also publish the rows in these formats, as written by `packhouse export`: `trl`, or
    `{format: megatron, shards: 4}` for several files per split."""

    report: bool = True
    """Publish `report.html` with the version: one page with charts and samples, 1 to 3 MB."""

    @field_validator("exports")
    @classmethod
    def _each_once(cls, exports: list[ExportConfig]) -> list[ExportConfig]:
        """Sort by name and drop repeats, so that their order does not change the version."""
        named = {each.format: each for each in exports}
        if twice := [each.format for each in exports if each != named[each.format]]:
            raise ValueError(
                f"exports lists '{twice[0]}' more than once with different shard counts. Keep one"
            )
        return [named[name] for name in sorted(named)]


ROW_FORMATS = (
    "auto",
    "alpaca",  # instruction, input, output
    "prompt_completion",  # prompt, completion
    "question_answer",  # question or query, answer or response
    "dolly",  # instruction, context, response
    "chat",  # messages: [{role, content}]
    "messages",  # the row itself is the list of messages
    "sharegpt",  # conversations: [{from, value}]
    "transcript",  # chosen or text: "\n\nHuman: ...\n\nAssistant: ..."
    "classification",  # text, label
    "text",  # text
    "preference",  # prompt, chosen; rejected is ignored
    "pairs",  # prompt, chosen, rejected: both answers
    "kto",  # prompt, completion, label: good or bad
    "squad",  # context, question, answers; or a list of paragraphs with these
    "mixed",  # the format is detected for each row
    *(name for name, module in registry.ROW_FORMATS.items() if registry.is_there(module)),
    *sorted(
        file.stem.removesuffix("_format")
        for file in (Path(__file__).parents[1] / "read").glob("*_format.py")
    ),
)
"""Names of row formats. Those after `mixed` are of installed add-ons, or in separate files:
`read/<name>_format.py`."""

DETECTED = ("auto", "mixed")
"""Names with which packhouse finds the format of rows, among all formats."""

TextFormat = Literal["json", "jsonl", "objects", "csv", "csv_semicolon", "tsv"]
FileFormat = Literal[TextFormat, "parquet", "arrow", "xlsx", "sqlite", "duckdb"]

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
    `of.data`. A run names other lists of objects with such fields among the unused fields."""

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
    parts. It also removes marks such as `<image>` at the start or end of the texts of such rows."""

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

    @field_validator("format", mode="before")
    @classmethod
    def _needs_its_add_on(cls, name: object) -> object:
        if isinstance(name, str) and name in registry.ROW_FORMATS:
            registry.row_format(name)  # raises an error that names a missing add-on
        return name

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
