"""The `publish` section: where a version goes, and in which files."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from packhouse.recipe.section import Name, Section, Share, Uri

Target = Annotated[
    str, Field(pattern=r"^(hf://datasets/[\w.-]+/[\w.-]+|wandb://[\w.-]+(\?files=true)?)$")
]

ExportFormat = Literal["trl", "axolotl", "megatron", "mds", "msgpack", "jsonl", "arrow"]

NO_NPY = (
    "packed .npy files are pickles, which run code when they are read, and Megatron-Bridge will "
    "read them no longer; export to 'megatron', the packed Parquet that it reads"
)

MAX_SHARDS = 10_000


def shard_names(name: str, num_shards: int) -> list[str]:
    """Return the names of a set's files, without endings.

    Example:
        >>> shard_names("eval", 1), shard_names("train", 2)
        (['eval'], ['train-00000-of-00002', 'train-00001-of-00002'])
    """
    if num_shards == 1:
        return [name]
    return [f"{name}-{number:05d}-of-{num_shards:05d}" for number in range(num_shards)]


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
