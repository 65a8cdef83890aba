"""The sections that need all rows at once: `pack`, `dedup`, `split`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from packhouse.recipe.section import Section

__all__ = ["DedupConfig", "PackConfig", "SplitConfig"]


class PackConfig(Section):
    """How sequences become rows of at most `seq_len` tokens."""

    seq_len: Annotated[int, Field(gt=0, le=2**24)] = 2048
    """Pack size in tokens."""

    strategy: Literal["best_fit", "first_fit", "next_fit", "concat", "none"] = "best_fit"
    """`best_fit` (decreasing) wastes least; `concat` cuts records at pack ends, for continued
    pretraining; `none` publishes one record a row, padded at load time."""

    over_length: Literal["drop", "error", "truncate_turns"] = "drop"
    """Records over `seq_len`: drop and count, fail, or keep the leading whole turns that fit."""

    seed: int = 0
    """Order of packs and of equal lengths within them."""


class DedupConfig(Section):
    """What happens to conversations that repeat an earlier one."""

    exact: Literal["keep", "drop"] = "keep"
    """Equal in every message: keep all, or only the first in order of file and row. Equal
    conversations are on one side, train or eval, either way."""


class SplitConfig(Section):
    """Which records are for evaluation."""

    eval_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of groups that go to eval, by hash of the group key."""

    eval_count: Annotated[int | None, Field(ge=0)] = None
    """Number of records in eval instead (the groups of lowest hash, until that many)."""

    group_by: Literal["prompt", "record"] = "prompt"
    """What stays on one side: records of the same prompt, or exact duplicates only."""

    seed: int = 0
    """Another seed is another assignment."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.eval_count is not None and self.eval_fraction:
            raise ValueError("give eval_fraction or eval_count, not both")
        return self
