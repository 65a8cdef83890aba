"""The sections of a recipe, in the order of the chain; `sources` and `audit` have their own files.

All are frozen, know all their keys, and take no boolean for a number.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from packhouse.records.reasons import TurnOrder
from packhouse.system.plugins import RENDERERS, NameOf, plugin_names

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]|\.[a-z0-9_-])*$", max_length=64)]

HUB_NAME = re.compile(r"(?!.*\.\.)(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
"""A name of the Hugging Face Hub: `org/name`, perhaps with a branch, a tag or a commit.

The Hub's client makes paths of a revision, so `..` is in none.
"""

IN_A_FILE = "in a file"
"""Context of a recipe whose names are final; those of a run form may be names of places."""

Share = Annotated[float, Field(ge=0, le=1)]

# A server holds parameters against this before it stores them: no `user:password@`, not even with
# a slash in the password, as AWS makes them; no signature; nothing that looks like a key.
_NO_CREDENTIALS = (
    r"^(?![^/]*://[^/?#]*@)"
    r"(?![^/]*://[^/?#:]*:(?![0-9]*(?:[/?#]|$)))"
    r"(?!.*[?&;#](?:[Xx]-[Aa][Mm][Zz]-[A-Za-z-]+|AWSAccessKeyId|[Ss]ignature|SIGNATURE|sig|SIG"
    r"|[A-Za-z_-]*(?:[Ss]ecret|SECRET|[Pp]assword|PASSWORD|[Tt]oken|TOKEN|[Kk]ey|KEY"
    r"|[Kk]ey_?[Ii]d|KEY_?ID))=)"
    r"(?!.*(?:AKIA|ASIA)[A-Z0-9]{16})(?!.*hf_[A-Za-z0-9]{30,})"
)

Uri = Annotated[str, Field(json_schema_extra={"pattern": _NO_CREDENTIALS})]
"""A place, without credentials; what reads it refuses them, too, without repeating them."""


def _as_form(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Say in the schema how a run form shows the section: its name, its fields in their order.

    A server on PostgreSQL keeps schemas as JSONB, which sorts keys by length; `position` is what
    Prefect's form sorts by.
    """
    schema["title"] = model.__name__.removesuffix("Config")
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


class Section(BaseModel):
    """A frozen section that knows all its keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra=_as_form,
        hide_input_in_errors=True,  # it may be a secret in the wrong field
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Pydantic would take `true` for 1."""
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("takes no boolean")
        return value


Role = Literal["system", "user", "assistant", "tool"]
PipelineChoice = Literal["file", "class"]


class ValidateConfig(Section):
    """What makes a row bad, and how many bad rows are too many."""

    max_quarantined: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be quarantined before the run fails. One row always may, so that a
    small file does not fail by it, unless the share is 0."""

    max_row_bytes: Annotated[int, Field(gt=0)] = 16 * 2**20
    """Bytes of one raw row; longer rows are quarantined unparsed. A file with a row that has not
    ended after 64 MiB, nor after this, is refused."""

    max_chars: Annotated[int, Field(gt=0)] = 1_000_000
    """Characters of one message; longer ones are quarantined before the tokenizer sees them."""

    allow_ends_on_user: bool = False
    """Keep conversations that end on a user turn (the open question is not trained)."""

    refused_orders: Annotated[list[TurnOrder], Field(max_length=4)] = []
    """Orders of turns that make a row bad: `system_not_first`, `starts_with_assistant`,
    `consecutive_user`, `consecutive_assistant`. By default any order passes that the template
    writes with every content."""

    @field_validator("refused_orders")
    @classmethod
    def _sorted(cls, orders: list[TurnOrder]) -> list[TurnOrder]:
        return sorted(set(orders))  # the same orders are the same recipe


CHAT_TEMPLATES = ("chat", "mistral_system", *RENDERERS)
"""Built-in templates that take `chat_template_kwargs`: Jinja, and renderers in Python."""
TEMPLATES = (
    *CHAT_TEMPLATES,
    "alpaca",
    "alpaca_newline",
    "completion",
    "classification",
    "sequence_classification",
    "text",
    "dart-math/qa",
    "dart-math/alpaca",
    "dart-math/wizardmath-cot",
    "dart-math/deepseekmath",
    "dart-math/deepseekmath-tool",
    "dart-math/xwinmath",
    "dart-math/mammoth2-cot",
    "dart-math/llama3-math",
)
"""Built-in templates; `packhouse.render` has them."""


def is_chat(template: str) -> bool:
    """Return True if a template renders conversations: all but those of constants around contents.

    Example:
        >>> is_chat("chat"), is_chat("mine.jinja"), is_chat("dart-math/qa"), is_chat("alpaca")
        (True, True, True, False)
    """
    return template not in TEMPLATES or template.startswith((*CHAT_TEMPLATES, "dart-math/"))


def is_renderer(template: str) -> bool:
    """Return True if a template is a renderer in Python: one of packhouse, or of a plug-in."""
    if template in TEMPLATES or template.endswith((".jinja", ".j2")):
        return template in RENDERERS
    return template in plugin_names("renderers")


_OWN_ARGUMENTS = {"messages", "add_generation_prompt", "continue_final_message"}
_MAX_ARGUMENTS = 2**16


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse names that no chat template is given by a row or a recipe.

    Raises:
        ValueError: says which.
    """
    for name in arguments:
        if not name.isidentifier() or name in _OWN_ARGUMENTS or name.endswith("_token"):
            raise ValueError(f"'{name[:60]}' is no argument of a chat template")


class FormatConfig(Section):
    """How a conversation becomes text, and which of it is trained."""

    template: str = "chat"
    """`chat` (the tokenizer's own), `mistral_system` (Mistral v0.3's, with the system turn wherever
    a row has one), `alpaca`, `alpaca_newline`, `completion`, `classification`,
    `sequence_classification`, `text`, one of dart-math's (`dart-math/alpaca`, ...), a path to a
    Jinja file, or a renderer in Python: `harmony` (gpt-oss), `mistral` (tekken.json), or a
    plug-in's name."""

    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Which turns are trained; `all` trains every token of the rendering. A message's own `weight`
    or `train` goes before."""

    never_train: Annotated[list[Role], Field(max_length=4)] = []
    """Roles left out of `train_on: all`: their turns, headers included, and no others."""

    reasoning: Literal["keep", "strip", "train_last"] = "keep"
    """Thinking in answers: what the template makes of it; taken out before rendering; or as the
    template has it, but trained only behind the last user turn."""

    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template, such as `{enable_thinking: false}`; `tools` and `documents`
    are those of rows without any. A row's own (`chat_template_kwargs`, `documents`, `tools`) go
    before. Give them to `apply_chat_template` at inference as well."""

    turns: Literal["joined", "exact", "alone", "whole"] = "joined"
    """How the answers of a conversation become records. `joined`: an answer joins the record before
    it if its prompt at inference continues that record, text of the template aside; else it starts
    a new one. `exact`: it joins only if the prompt is that record, byte for byte. `alone`: one
    record per answer. `whole`: one rendering per row, whatever inference would send."""

    stop_tokens: Annotated[list[str], Field(max_length=16)] = []
    """Control tokens at which generation stops. By default those of `generation_config.json` and
    the tokenizer's EOS; if none follows an answer, the one that the template writes after each."""

    thought_end: str | None = None
    """Text between reasoning and answer, for templates that never write reasoning (DeepSeek R1:
    `"\\n</think>\\n\\n"`)."""

    call_ids: Literal["functions"] | None = None
    """`functions`: number tool calls as `functions.NAME:N`, the only ids that Kimi models write."""

    system: str | None = None
    """System prompt put before conversations that have none."""

    prompt: str | None = None
    """Classification: text with `{text}` that asks for the label."""

    @field_validator("template")
    @classmethod
    def _is_known(cls, template: str, info: ValidationInfo) -> str:
        """In a file, an unknown name is a mistake; in a run form it may be the name of a place."""
        is_file = info.context == IN_A_FILE
        is_path = template.endswith((".jinja", ".j2"))
        if is_file and template not in TEMPLATES and not is_path and not is_renderer(template):
            known = [*TEMPLATES, *plugin_names("renderers"), "a path to a .jinja or .j2 file"]
            raise PydanticCustomError("literal_error", "no such template", {"expected": str(known)})
        return template

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_json(cls, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Names that a template may have, and values that JSON has; in one order."""
        check_arguments(arguments)
        for name in ("tools", "documents"):
            items = arguments.get(name, [])
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise ValueError(f"'{name}' are no list of objects")
        try:
            text = json.dumps(dict(sorted(arguments.items())), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the arguments are no JSON: {error}") from None
        if len(text) > _MAX_ARGUMENTS:
            raise ValueError(f"the arguments have over {_MAX_ARGUMENTS:,} characters of JSON")
        ordered: dict[str, Any] = json.loads(text)
        return ordered

    @field_validator("never_train")
    @classmethod
    def _in_order(cls, roles: list[Role]) -> list[Role]:
        return sorted(set(roles))  # the same roles are the same recipe

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.chat_template_kwargs and self.template in set(TEMPLATES) - set(CHAT_TEMPLATES):
            raise ValueError(
                f"chat_template_kwargs are for chat templates, and template is {self.template}"
            )
        if self.never_train and self.train_on != "all":
            raise ValueError(
                f"never_train takes roles out of train_on: all, and train_on is {self.train_on}"
            )
        if len({*self.never_train, "tool", "system"}) == 4:
            raise ValueError("never_train leaves neither user nor assistant turns to train")
        if self.turns == "alone" and self.train_on == "all":
            raise ValueError("turns: alone trains one answer in each record: not train_on: all")
        if self.reasoning == "train_last" and self.train_on == "all":
            raise ValueError("reasoning: train_last leaves thinking out: not train_on: all")
        return self


class TokenizeConfig(Section):
    """How text becomes ids."""

    encoder: Literal["auto", "hf", "fast"] = "auto"
    """`auto` uses the fast encoder where it reproduced HF's ids, else HF. Never changes the ids."""

    pipeline: PipelineChoice | None = None
    """Which pipeline gives the ids if the tokenizer's class builds another one than tokenizer.json
    has: that of the `file`, or of the `class`, as `AutoTokenizer` loads it. By default, a tokenizer
    for which the two give different ids is refused: choose the one that inference uses."""

    control_text: Literal["text", "allow", "quarantine"] = "text"
    """Control-token text inside contents: keep as ordinary text, allow as control token, or bad."""


Strategy = Literal["best_fit", "first_fit", "first_fit_shuffle", "next_fit", "concat", "none"]


class PackConfig(Section):
    """How sequences become rows of at most `seq_len` tokens."""

    seq_len: Annotated[int, Field(gt=0, le=2**24)] = 2048
    """Pack size in tokens."""

    strategy: Annotated[str, NameOf("packing_strategies", get_args(Strategy))] = "best_fit"
    """`best_fit` (decreasing) wastes least; `concat` cuts records at pack ends, for continued
    pretraining; `none` publishes one record a row, padded at load time; or a plug-in's name."""

    over_length: Literal["drop", "error", "truncate_turns", "window"] = "drop"
    """Records over `seq_len`: drop and count, fail, keep the leading whole turns that fit, or make
    windows of whole turns with the system prompt in each (then formatting follows `seq_len`)."""

    seed: int = 0
    """Order of packs and of equal lengths within them."""

    pad_record_to_multiple_of: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Leave room in packs for each record to be padded to a multiple: twice the number of ranks for
    context parallelism; 16, 32 or 128 for FP8 and tensor parallelism. Files hold no pads:
    `PackedCollator` and the export `megatron` add them. `seq_len` must be a multiple, too."""

    balance: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Packs of a step of training over all data-parallel ranks: each so many neighbours cost about
    the same attention (sum of squared lengths). The packs are the same ones in another order, for
    trainers that read them in the order of the files."""

    @model_validator(mode="after")
    def _multiples_fit(self) -> Self:
        multiple = self.pad_record_to_multiple_of
        if self.seq_len % multiple:
            raise ValueError(f"seq_len {self.seq_len} is no multiple of {multiple}")
        if multiple > 1 and self.strategy == "concat":
            raise ValueError("concat fills packs to the last token: no pad_record_to_multiple_of")
        return self


Repeats = Literal["keep", "drop", "same_side"]


class DedupConfig(Section):
    """What happens to conversations that repeat an earlier one."""

    exact: Repeats = "keep"
    """Equal but for white space and Unicode form: keep all, drop all but the first in order of
    file and row, or keep all on one side, train or eval (equal to the letter, they always are)."""

    near: Literal["ignore", "keep", "drop", "same_side"] = "ignore"
    """Alike, if not equal: `keep` all and count them, `drop` (equal ones, too) all but the first,
    or keep all on one side by `same_side`. `ignore` does not look for them; all else needs
    `pip install 'packhouse[dedup]'`. Split conversations are compared whole."""

    near_threshold: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    """Share of runs that two conversations have in common (Jaccard) to count as alike."""

    near_unit: Literal["words", "characters"] = "words"
    """What runs are made of. Each ideograph is a word."""

    near_ngram: Annotated[int, Field(ge=1, le=50)] = 2
    """Words or characters of a run."""

    near_permutations: Annotated[int, Field(ge=32, le=1024)] = 128
    """Numbers of a MinHash: more find more of what is near the threshold, and cost time."""


class SplitConfig(Section):
    """Which records are for evaluation."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of groups that go to eval, by hash of the group key."""

    eval_count: Annotated[int | None, Field(ge=0)] = None
    """Number of rows in eval instead, each with all records that it makes (the groups of lowest
    hash, until that many)."""

    group_by: Literal["prompt", "record"] = "prompt"
    """What stays on one side: records of the same prompt, or exact duplicates only."""

    seed: int = 0
    """Another seed is another assignment."""

    eval_by_source: bool = False
    """Pack the eval records of each source by themselves, in files of their own, which
    `load_packed(..., split="eval", by_source=True)` gives as a dict."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.eval_count is not None and self.eval_fraction:
            raise ValueError("give eval_fraction or eval_count, not both")
        return self


Target = Annotated[
    str, Field(pattern=r"^(hf://datasets/[\w.-]+/[\w.-]+|wandb://[\w.-]+(\?files=true)?)$")
]

ExportFormat = Literal["trl", "axolotl", "megatron", "mds", "msgpack", "jsonl", "arrow"]

NO_NPY = (
    "packed .npy files are pickles, which run code when they are read, and Megatron-Bridge will "
    "read them no longer; export to 'megatron', the packed Parquet that it reads"
)

MAX_SHARDS = 10_000


class ExportConfig(Section):
    """A trainer's format, and in how many files: `trl`, `{format: megatron, shards: 4}`."""

    format: ExportFormat
    """As `packhouse export --to` takes it."""

    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] = 1
    """Files of each split, which must have as many packs. `mds` has shards of its own."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: object) -> object:
        return {"format": value} if isinstance(value, str) else value

    @field_validator("format", mode="before")
    @classmethod
    def _is_no_pickle(cls, name: object) -> object:
        if name == "npy":
            raise ValueError(NO_NPY)
        return name

    @model_validator(mode="after")
    def _has_no_shards_of_its_own(self) -> Self:
        if self.shards > 1 and self.format == "mds":
            raise ValueError("mds has shards of its own, so it takes no `shards`")
        return self

    @model_serializer(mode="wrap")
    def _as_a_name(self, write: SerializerFunctionWrapHandler) -> object:
        """Write what has no other setting as its name, as before there were any."""
        return self.format if self.shards == 1 else write(self)


def _or_a_name(schema: dict[str, Any]) -> None:
    """Let forms and editors take the name of a format, too."""
    names = {"type": "string", "enum": list(get_args(ExportFormat))}
    schema["items"] = {"anyOf": [names, schema["items"]]}


class PublishConfig(Section):
    """Where a version goes, and in which files."""

    store: Uri = "./store"
    """Root of the object store: a folder or `s3://bucket/prefix`."""

    ref: Name = "latest"
    """Ref that moves to the new version."""

    move_ref: bool = True
    """False: publish, and leave the ref where it is; one that is nowhere yet moves all the same."""

    also: list[Target] = []
    """Where else the version goes: `hf://datasets/ORG/NAME`, `wandb://PROJECT`. W&B gets tables of
    text and the manifest; the packed files too with `wandb://PROJECT?files=true`, which can be
    written as `{wandb: {project: PROJECT, files: true}}`."""

    keep_tokenizer: bool = True
    """Keep the tokenizer's files in the store, once for all versions, so that any machine shows
    text. False where its terms forbid to pass it on; `packhouse inspect` then needs it."""

    allow_breaking_schema: bool = False
    """Move the ref even if readers of its current version would miss or misread something."""

    max_length_drift: Share | None = None
    """Largest distance of record lengths from the ref's version at which the ref still moves."""

    max_source_drift: Share | None = None
    """The same for the sources' shares of the rows."""

    max_quarantine_drift: Share | None = None
    """The same for the share of quarantined rows."""

    max_trained_drift: Share | None = None
    """The same for the share of trained tokens."""

    file_format: Literal["parquet", "arrow", "jsonl"] = "parquet"
    """Format of the published files."""

    layout: Literal["labels", "compact"] = "labels"
    """`labels` holds a label per token; `compact` holds the trained ranges instead."""

    position_ids: bool = True
    """Also publish `position_ids`, restarting at each record: the one mark of their ends that
    `transformers.Trainer` keeps (with `pack.strategy: none`, a row is a record, and has none).
    0.4% of a Parquet file; `arrow` and `jsonl` grow by 4 bytes a token and more."""

    max_file_mb: Annotated[int, Field(gt=0)] = 256
    """Upper size of one published file in MiB of token data, before compression."""

    exports: Annotated[list[ExportConfig], Field(json_schema_extra=_or_a_name)] = []
    """Also carry the rows in these trainers' formats, as `packhouse export` writes them: `trl`, or
    `{format: megatron, shards: 4}` for several files a split."""

    report: bool = True
    """Publish `report.html`, a page with charts and samples (1 to 3 MB), in the version."""

    @field_validator("also", mode="before")
    @classmethod
    def _as_addresses(cls, also: object) -> object:
        """Write `{wandb: {project: P, files: true}}` as an address, alone or in the list."""
        targets = [also] if isinstance(also, dict) else also
        if not isinstance(targets, list):
            return also
        return [_address(target) for target in targets]

    @field_validator("exports")
    @classmethod
    def _each_once(cls, exports: list[ExportConfig]) -> list[ExportConfig]:
        """In order of name: what is listed decides the version, how it is listed does not."""
        named = {each.format: each for each in exports}
        if twice := [each.format for each in exports if each != named[each.format]]:
            raise ValueError(f"{twice[0]} stands there with different numbers of shards")
        return [named[name] for name in sorted(named)]


def _address(target: object) -> object:
    """Return a W&B target as its address, and anything else as it is.

    Example:
        >>> _address({"wandb": {"project": "sft", "files": True}})
        'wandb://sft?files=true'

    Raises:
        ValueError: a mapping that is no W&B target.
    """
    if not isinstance(target, dict):
        return target
    settings: Any = target.get("wandb")
    is_files = settings.get("files", False) if isinstance(settings, dict) else None
    if type(is_files) is not bool or {*target, *settings} - {"wandb", "project", "files"}:
        raise ValueError("write {wandb: {project: NAME, files: true}}, or an address")
    return f"wandb://{settings.get('project', 'packhouse')}" + "?files=true" * is_files
