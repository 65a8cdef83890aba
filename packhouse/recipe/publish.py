"""The `publish` section: where a version goes, and in which files."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from packhouse.recipe.section import Name, Section, Share, Uri

__all__ = ["PublishConfig"]

Target = Annotated[
    str, Field(pattern=r"^(hf://datasets/[\w.-]+/[\w.-]+|wandb://[\w.-]+(\?files=true)?)$")
]

ExportFormat = Literal["arrow", "axolotl", "jsonl", "mds", "megatron", "msgpack", "trl"]


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

    exports: list[ExportFormat] = []
    """Also carry the rows in these trainers' formats, as `packhouse export` writes them."""

    report: bool = True
    """Publish `report.html`, a page with charts and samples (1 to 3 MB), in the version."""

    @field_validator("also", mode="before")
    @classmethod
    def _as_addresses(cls, also: Any) -> Any:
        """Write `{wandb: {project: P, files: true}}` as an address, alone or in the list."""
        targets = [also] if isinstance(also, dict) else also
        if not isinstance(targets, list):
            return also
        return [_address(target) for target in targets]

    @field_validator("exports")
    @classmethod
    def _each_once(cls, formats: list[ExportFormat]) -> list[ExportFormat]:
        """In order of name: what is listed decides the version, how it is listed does not."""
        return sorted(set(formats))


def _address(target: Any) -> Any:
    """Return a W&B target as its address, and anything else as it is.

    Example:
        >>> _address({"wandb": {"project": "sft", "files": True}})
        'wandb://sft?files=true'

    Raises:
        ValueError: a mapping that is no W&B target.
    """
    if not isinstance(target, dict):
        return target
    settings = target.get("wandb")
    if not isinstance(settings, dict) or {*target, *settings} - {"wandb", "project", "files"}:
        raise ValueError(_HOW_WANDB)
    files = settings.get("files", False)
    if type(files) is not bool:
        raise ValueError(_HOW_WANDB)
    return f"wandb://{settings.get('project', 'packhouse')}" + "?files=true" * files


_HOW_WANDB = "write {wandb: {project: NAME, files: true}}, or an address"
