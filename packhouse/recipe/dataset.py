"""The sections that need all rows at once: `pack`, `dedup`, `split`."""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from packhouse.recipe.section import Section
from packhouse.system.plugins import NameOf

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
