"""Separate packed records: a guard for transformers models, and masks for your own models.

transformers 5 separates records where `position_ids` do not rise by one, but only if the model gets
no `attention_mask` and builds no cache, and by default it builds one. The logits of a tiny Llama
are then silently wrong by up to 9, compared with 1e-5 if records are separated. `enable_packing`
adds a guard before the decoder's forward pass. For packed batches, the guard

- turns off the cache and drops a mask without information (all ones, right padding);
- reads a mask of record numbers as boundaries: [1, 1, 2, 2, 0] -> positions [0, 1, 0, 1, 0];
- rejects batches that cannot be right: contradicting boundaries, padding between records, a
  cache, `loss_weights`, and RoPE that the longest record of a pack would change for all records.

Generation and unpacked batches pass through unchanged. Cost: a few comparisons of T positions per
step. `check_packing` proves the result. If a collator or trainer loses the boundaries, this is
detected only for packs that this process knows (`packhouse.load.known_packs`).

Use a mask for attention that does not read `position_ids`. A record is a run in which
`position_ids` rise by one.

| form | memory at T tokens | for |
|---|---|---|
| `cu_seqlens` | 4 bytes per record | flash-attention's varlen functions |
| `block_mask` | T^2 / 128^2 blocks | flex attention |
| `block_causal_mask` | 4 T^2 bytes (float32) | eager and sdpa; not boolean, because eager adds it |

A mask passed to a transformers model **replaces** its own, so it must include the sliding window.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import pyarrow.compute as pc
import torch

from packhouse.errors import ConfigError, ContractError
from packhouse.load.known_packs import GUARDS, holds_pack, watch_datasets
from packhouse.pack.pack_columns import IGNORE_INDEX

if TYPE_CHECKING:
    from datasets import Dataset
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import PretrainedConfig, Trainer, TrainingArguments


def record_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the first token of each record, bool [batch, T].

    Example:
        >>> record_starts(torch.tensor([[0, 1, 2, 0, 1]])).int().tolist()
        [[1, 0, 0, 1, 0]]
    """
    # The first difference of a row is 0, so a record starts there whatever the first position is.
    return torch.diff(position_ids, dim=-1, prepend=position_ids[..., :1]) != 1


def segment_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the record number of each token, int64 [batch, T], counted from 0 in each row.

    Example:
        >>> segment_ids(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    return record_starts(position_ids).cumsum(-1) - 1


def cu_seqlens(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the boundaries of all records, row after row, int32 [num_records + 1].

    Example:
        >>> cu_seqlens(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [0, 3, 5]
    """
    starts = record_starts(position_ids).flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=position_ids.numel()).to(torch.int32)


MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A flex attention `mask_mod`: (batch, head, query, key) -> True if the query sees the key."""


def packed_mask_mod(segments: torch.Tensor, sliding_window: int | None = None) -> MaskMod:
    """Return a `mask_mod` for flex attention: causal, within a record and within the window.

    Args:
        segments: record number of each token, int [batch, T] (`segment_ids`).
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None for
            no limit.

    Example:
        >>> sees = packed_mask_mod(torch.tensor([[0, 0, 1]]))
        >>> query, key = torch.arange(3)[:, None], torch.arange(3)
        >>> sees(torch.tensor(0), torch.tensor(0), query, key).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """

    def mask_mod(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        seen = (key <= query) & (segments[batch, query] == segments[batch, key])
        return seen if sliding_window is None else seen & (query - key < sliding_window)

    return mask_mod


def block_mask(segments: torch.Tensor, sliding_window: int | None = None) -> "BlockMask":
    """Return a BlockMask for flex attention, which skips blocks without visible pairs.

    Args:
        segments: record number of each token, int [batch, T].
        sliding_window: as in `packed_mask_mod`.

    Example:
        >>> mask = block_mask(torch.tensor([[0] * 128 + [1] * 128]))
        >>> mask.shape, round(mask.sparsity())
        ((1, 1, 256, 256), 50)
    """
    from torch.nn.attention.flex_attention import create_block_mask

    batch, length = segments.shape
    mask_mod = packed_mask_mod(segments, sliding_window)
    return create_block_mask(mask_mod, batch, None, length, length, device=segments.device)


def block_causal_mask(
    segments: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Return an additive mask [batch, 1, T, T]: 0 for visible keys, else the dtype's minimum.

    Args:
        segments: record number of each token, int [batch, T].
        dtype: the floating-point type of the attention scores.
        sliding_window: as in `packed_mask_mod`.

    Example:
        >>> mask = block_causal_mask(torch.tensor([[0, 0, 1]]))
        >>> (mask == 0).int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    token = torch.arange(segments.shape[-1], device=segments.device)
    row = torch.arange(len(segments), device=segments.device)[:, None, None]
    seen = packed_mask_mod(segments, sliding_window)(row, None, token[:, None], token)
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    # With a boolean mask, which eager attention adds as 0 and 1, a tiny Llama's logits were off by
    # 8.5.
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]


Forward = Callable[..., object]
Args = tuple[object, ...]
Kwargs = dict[str, object]

# Model families, by `model_type`, whose tiny models pass `check_packing` in the tests.
FAMILIES = (
    *("gemma", "gemma2", "gemma3_text", "llama", "mistral", "mixtral", "phi", "phi3"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)

_LAYERS = {"full_attention", "sliding_attention"}
_FLASH = {"flash_attention_2", "flash_attention_3", "flash_attention_4"}
_ATTENTION = {"eager", "sdpa", "flex_attention"} | _FLASH

# Decoder class -> its original forward and the active handles, which may be disabled in any order.
_GUARDED: dict[type[torch.nn.Module], tuple[Forward, list["PackingHandle"]]] = {}


class PackingHandle(ExitStack):
    """Result of `enable_packing`. Undo it with `disable()`, or use it as a context manager."""

    def disable(self) -> None:
        """Restore the original state. A second call has no effect."""
        self.close()


def enable_packing(target: "torch.nn.Module | type | PretrainedConfig | str") -> PackingHandle:
    """Make packed batches safe for a model, or for every model of a family.

    Call it before you create the trainer, with a collator that keeps the boundaries, such as
    `PackedCollator`, or TRL's with `padding_free=True`; see docs/how-to/keep-records-apart.md.

    Args:
        target: a model, which PEFT or DDP may wrap; a model class such as `LlamaForCausalLM`; a
            config; a `model_type` such as 'mistral'; or a folder or name for `AutoConfig`. Anything
            but a model guards the decoder class of that family in this process, including models
            created later.

    Returns:
        A handle whose `disable()` undoes it.

    Raises:
        ConfigError: the model family, a layer type or the attention is not known to keep records
            apart.

    Example:
        >>> handle = enable_packing("llama")
        >>> handle.disable()
    """
    handle = PackingHandle()
    handle.callback(GUARDS.discard, handle)
    if isinstance(target, torch.nn.Module):
        decoders = [
            module
            for module in target.modules()
            if (own := getattr(module, "config", None)) is not None
            and type(module) is _decoder_class(own)
        ]
        for config in [each.config for each in decoders] or [getattr(target, "config", None)]:
            _check_config(config)
        if not decoders:
            raise ConfigError(
                f"{type(target).__name__} has no decoder of the model family in its config. Pass "
                "a Transformers model."
            )
        for decoder in decoders:
            names = tuple(inspect.signature(decoder.forward).parameters)
            guard = functools.partial(_guard, names)  # not a lambda: a model may be pickled
            handle.callback(decoder.register_forward_pre_hook(guard, with_kwargs=True).remove)
    else:
        # Models of the class may not exist yet, so the class itself gets the guard.
        config = _config_of(target)
        _check_config(config)
        decoder_class = _decoder_class(config)
        assert decoder_class is not None, "a known family has one"
        _guard_class(decoder_class, handle)
    _forget_compiled()
    handle.callback(_forget_compiled)
    GUARDS.add(handle)
    watch_datasets()
    return handle


def _forget_compiled() -> None:
    """Reset `torch.compile`, because compiled code ignores a guard that is added later."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _decoder_class(config: "PretrainedConfig") -> type[torch.nn.Module] | None:
    from transformers import AutoModel

    mapping = AutoModel._model_mapping
    return mapping[type(config)] if type(config) in mapping else None


def _config_of(target: "str | type | PretrainedConfig") -> "PretrainedConfig":
    """Return the config for a name or a model class; a config is returned unchanged."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if isinstance(target, str):
        is_type = target in CONFIG_MAPPING
        return CONFIG_MAPPING[target]() if is_type else AutoConfig.from_pretrained(target)
    if not isinstance(target, type):
        return target
    config = getattr(target, "config_class", None)
    if config is None:
        raise ConfigError(
            f"class {target.__name__} has no config. Pass a model class such as "
            "LlamaForCausalLM, a model, or a model type such as 'llama'."
        )
    return config()


def _check_config(config: "PretrainedConfig") -> None:
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ConfigError(
            f"enable_packing does not support model type '{family}'; supported: "
            f"{', '.join(FAMILIES)}. If check_packing passes with use_cache=False and no "
            "attention_mask, the model works without it."
        )
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if unknown:
        raise ConfigError(
            f"layers of type '{unknown[0]}' carry state across packed records. Use a model "
            "without them, or do not pack."
        )
    attention = config._attn_implementation
    if attention is not None and attention not in _ATTENTION:
        raise ConfigError(
            f"attention '{attention}' is not known to separate packed records. Use one of "
            f"{', '.join(sorted(_ATTENTION))}."
        )


def _guard_class(decoder: type[torch.nn.Module], handle: PackingHandle) -> None:
    """Guard every model of a decoder class until its last handle is disabled."""
    if decoder not in _GUARDED:
        plain: Forward = decoder.forward
        names = tuple(inspect.signature(plain).parameters)[1:]

        @functools.wraps(plain)
        def guarded(self: torch.nn.Module, *args: object, **kwargs: object) -> object:
            args, kwargs = _guard(names, self, args, kwargs)
            return plain(self, *args, **kwargs)

        decoder.forward = guarded
        _GUARDED[decoder] = plain, []

    def release() -> None:
        plain, handles = _GUARDED[decoder]
        handles.remove(handle)
        if not handles:
            decoder.forward = plain
            del _GUARDED[decoder]

    _GUARDED[decoder][1].append(handle)
    handle.callback(release)


def _guard(
    names: Sequence[str], decoder: torch.nn.Module, args: Args, kwargs: Kwargs
) -> tuple[Args, Kwargs]:
    """Return the arguments to call the decoder with.

    Args:
        names: parameter names of its forward, without `self`.
        decoder: the decoder that is called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        ContractError: records would see each other, or would give other logits than alone.
    """
    config = decoder.config
    given: dict[str, Any] = kwargs | dict(zip(names, args, strict=False))
    if given.get("loss_weights") is not None:
        raise ContractError(
            "the model got loss_weights, which it ignores, so all tokens would have equal "
            "weight. Remove them from the batch and use token_loss (docs/how-to/own-loop.md)."
        )
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if given.get("seq_lengths") is not None and positions is None:
        raise ContractError(
            "the model got seq_lengths without position_ids, so records would see each "
            "other. Use PackedCollator (docs/how-to/keep-records-apart.md)."
        )
    is_flash = config._attn_implementation in _FLASH
    if given.get("past_key_values") is not None:
        _refuse_packed_cache(positions, mask)
        return args, kwargs  # generation
    has_numbers = _holds_numbers(mask)
    if not has_numbers:
        _refuse_holes(mask)
    elif positions is None:
        positions = _numbers_to_positions(mask)
    _refuse_other_bounds(given, positions, is_flash)
    _refuse_lost_bounds(given.get("input_ids"), positions, mask, decoder.training)
    if positions is None or not (has_numbers or _is_packed(positions, mask)):
        return args, kwargs
    if is_flash and len(positions) > 1:
        raise ContractError(
            "flash attention separates packed records only in a batch of one row, got "
            f"{len(positions)} rows. Use PackedCollator to concatenate them."
        )
    _refuse_long_rope(config, positions)
    if mask is not None:
        _refuse_mask(positions, mask, has_numbers)
    # transformers 5 separates records by positions only without a mask and without a cache
    # (`_preprocess_mask_arguments` in its masking_utils.py). A mask of ones moved the logits of a
    # tiny Llama by 9; without mask and cache, the difference is 7e-6.
    return (), given | {"position_ids": positions, "attention_mask": None, "use_cache": False}


def _is_matrix(mask: object) -> TypeGuard[torch.Tensor]:
    """Return True for a mask [batch, T]; False for None and for masks over token pairs."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2


def _holds_numbers(mask: object) -> bool:
    """Return True for a mask of record numbers, such as [1, 1, 2, 2, 0]."""
    return _is_matrix(mask) and mask.dtype != torch.bool and bool((mask > 1).any())


def _numbers_to_positions(numbers: torch.Tensor) -> torch.Tensor:
    """Convert record numbers to positions: [1, 1, 2, 2, 0] -> [0, 1, 0, 1, 0]."""
    token = torch.arange(numbers.shape[-1], device=numbers.device).expand_as(numbers)
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    # Subtract the index of the record's first token: [0 1 2 3 4] - [0 0 2 2 4].
    return token - torch.where(is_first, token, 0).cummax(-1).values


def _is_packed(positions: torch.Tensor, mask: object) -> bool:
    """Return True if positions restart between two tokens that are not padding."""
    if positions.ndim != 2:
        return False
    cuts = torch.diff(positions, dim=-1) != 1
    if _is_matrix(mask) and mask.shape[-1] == positions.shape[-1]:
        cuts = cuts & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(cuts.any())


def _refuse_packed_cache(positions: object, mask: object) -> None:
    """Reject packed input with a cache, because the model then ignores record boundaries."""
    is_packed = _holds_numbers(mask)
    if not is_packed and isinstance(positions, torch.Tensor):
        length = positions.shape[-1]
        if mask is None:
            is_packed = _is_packed(positions, None)
        elif _is_matrix(mask) and mask.shape[-1] >= length:
            # During generation the mask also covers cached tokens; its end belongs to this input.
            is_packed = _is_packed(positions, mask[:, -length:])
    if is_packed:
        raise ContractError(
            "a packed batch has past_key_values, which disable record boundaries. Remove them "
            "and set use_cache=False."
        )


def _refuse_holes(mask: object) -> None:
    """Reject a mask with padding between tokens: what follows it may be another record."""
    if not _is_matrix(mask):
        return
    real = (mask != 0).int()
    num_runs = (torch.diff(real, dim=-1, prepend=torch.zeros_like(real[:, :1])) > 0).sum(-1)
    if bool((num_runs > 1).any()):  # [1, 1, 0, 1, 1] has two
        raise ContractError(
            "attention_mask has padding between tokens, so records would see each other. "
            "Number the records in it (1, 1, 0, 2, 2), or use PackedCollator."
        )


def _refuse_other_bounds(given: Mapping[str, Any], positions: Any, is_flash: bool) -> None:
    """Reject boundaries for specific kernels that differ from `position_ids`.

    Flash kernels read `cu_seq_lens` instead of positions, so a missing boundary merges two records.
    Other kernels read positions only, and a dispatcher that takes the boundaries for batch rows may
    have truncated them; that is harmless, so they need only be a subset.
    """
    names = [n for n in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if given.get(n) is not None]
    if names and not isinstance(positions, torch.Tensor):
        raise ContractError(
            f"the batch has {names[0]} without position_ids, but attention separates records only "
            "by position_ids. Use PackedCollator, which provides both."
        )
    for name in names:
        value = given[name].to(positions.device)
        if name == "seq_idx":
            cuts = record_starts(positions)[..., 1:]
            agrees = value.shape == positions.shape and torch.equal(torch.diff(value) != 0, cuts)
        else:
            bounds = cu_seqlens(positions).long()
            agrees = bool(torch.isin(value.long(), bounds).all())
            if is_flash:
                longest = given.get(f"max_length_{name[-1]}")
                agrees = torch.equal(value.long().flatten(), bounds) and (
                    longest is None or int(longest) >= int(bounds.diff().max())
                )
        if not agrees:
            raise ContractError(f"{name} and position_ids disagree on where records end")


def _refuse_lost_bounds(ids: Any, positions: Any, mask: object, is_training: bool) -> None:
    """Reject a known pack that is passed as a single record; warn if no boundaries are passed.

    Nothing in the batch marks a pack whose boundaries were lost, but its tokens identify it.
    """
    advice = (
        "Use PackedCollator, or SFTConfig(padding_free=True, max_length=None, packing=False) "
        "(docs/how-to/keep-records-apart.md)"
    )
    if not isinstance(ids, torch.Tensor) or (positions is not None and positions.ndim != 2):
        return
    is_start = torch.zeros_like(ids, dtype=torch.bool)
    if positions is not None:
        is_start |= record_starts(positions)
    if _is_matrix(mask) and mask.shape == ids.shape:
        is_start[:, 1:] |= torch.diff(mask != 0)
    is_start[:, 0] = True
    for row, starts in zip(ids.cpu().numpy(), is_start.cpu().numpy(), strict=True):
        if holds_pack(row, starts.nonzero()[0]):
            raise ContractError(f"a batch treats several records of a pack as one. {advice}")
    if is_training and positions is None:
        warnings.warn(
            "the model got no position_ids, so each row is trained as one record. If a row "
            f"holds several, they see each other. {advice}",
            stacklevel=2,
        )


def _refuse_mask(positions: torch.Tensor, mask: object, has_numbers: bool) -> None:
    """Reject a mask with information that the positions lack, because the model will not get it."""
    # A mask over pairs of tokens replaces the model's own: without its sliding window of 8, the
    # logits of a tiny Mistral were off by 7.8.
    if not isinstance(mask, torch.Tensor) or mask.shape != positions.shape:
        raise ContractError(
            "a packed batch has its own attention_mask, which would replace the record "
            "boundaries and the sliding window. Remove attention_mask."
        )
    changes = torch.diff(mask.int(), dim=-1)
    if has_numbers:
        if bool(((changes != 0) & ~record_starts(positions)[:, 1:]).any()):
            raise ContractError("attention_mask numbers records that position_ids do not separate")
    elif bool((changes > 0).any()):
        raise ContractError(
            "a packed batch is padded on the left. Use PackedCollator, or remove the padding."
        )


def _refuse_long_rope(config: "PretrainedConfig", positions: torch.Tensor) -> None:
    """Reject RoPE scaling by the longest position, which would change all records of a pack."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in [rope, *(part for part in rope.values() if isinstance(part, Mapping))]:
        kind = each.get("rope_type", each.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        limit = config.max_position_embeddings
        for place in (config.__dict__, each):
            limit = min(limit, place.get("original_max_position_embeddings") or limit)
        # 'dynamic' resets after a longer batch only if the batch is below the window, not at it.
        limit -= kind == "dynamic"
        longest = int(positions.max()) + 1
        if longest > limit:
            raise ContractError(
                f"a packed record of {longest:,} tokens exceeds the original window of "
                f"{limit:,}, so RoPE of type '{kind}' would also change the short records of "
                "its pack. Prepare with a smaller seq_len, or train long records unpacked."
            )


_Trainer = TypeVar("_Trainer", bound=type[Any])


def enable_preferences(trainer_class: _Trainer) -> _Trainer:
    """Return a subclass of a TRL trainer that accepts prepared rows.

    Datasets with `prompt_ids` are not tokenized again; others are processed as usual. For KTO
    losses with a KL term, each row gets the answer of the previous row in its batch, as in TRL.

    Args:
        trainer_class: `trl.DPOTrainer`, `trl.KTOTrainer`, `ORPOTrainer` or `CPOTrainer` of
            `trl.experimental`, or your own subclass of one.

    Raises:
        ConfigError: `trainer_class` is not one of these; or, when a trainer is created, its
            `max_length` would cut an answer.

    Example:
        >>> from trl import DPOTrainer
        >>> trainer_class = enable_preferences(DPOTrainer)
        >>> issubclass(trainer_class, DPOTrainer)
        True
    """

    def prepare(
        self: "Trainer",
        dataset: "Dataset",
        processing_class: object,
        args: "TrainingArguments",
        dataset_name: str,
    ) -> "Dataset":
        if "prompt_ids" not in (dataset.column_names or next(iter(dataset))):
            usual = trainer_class._prepare_dataset
            return usual(self, dataset, processing_class, args, dataset_name)
        _check_max_length(dataset, args.max_length)
        if getattr(self, "calculate_KL", False):
            size = args.per_device_train_batch_size
            dataset = dataset.map(_add_neighbours, batched=True, batch_size=size)
        return dataset

    def tokenize_row(
        self: "Trainer", feature: Mapping[str, Any], model: object = None
    ) -> dict[str, Any]:
        if "prompt_ids" not in feature:
            row: dict[str, Any] = trainer_class.tokenize_row(self, feature, model)
            return row
        return _whole_sides(feature, self.max_length)

    # DPO and KTO tokenize a dataset at once, ORPO and CPO row by row.
    for name, method in {"_prepare_dataset": prepare, "tokenize_row": tokenize_row}.items():
        if hasattr(trainer_class, name):
            return cast(_Trainer, type(trainer_class.__name__, (trainer_class,), {name: method}))
    raise ConfigError(
        f"{trainer_class.__name__} is not supported. Use TRL's DPOTrainer, KTOTrainer, "
        "ORPOTrainer or CPOTrainer."
    )


def _whole_sides(row: Mapping[str, Any], max_length: int) -> dict[str, list[int]]:
    """Return the columns of ORPO and CPO: the prompt, and each side with its prompt and labels."""
    prompt = row["prompt_ids"]
    columns = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for side in ("chosen", "rejected"):
        answer = row[f"{side}_ids"]
        ids = [*prompt, *answer]
        if len(ids) > max_length:
            raise _too_short(max_length, len(ids), "a larger number")
        columns |= {
            f"{side}_input_ids": ids,
            f"{side}_attention_mask": [1] * len(ids),
            f"{side}_labels": [IGNORE_INDEX] * len(prompt) + answer,
        }
    return columns


def _check_max_length(dataset: "Dataset", max_length: int | None) -> None:
    """Reject a limit that would cut answers. Lengths in streams are unknown, so they pass."""
    if max_length is None or not hasattr(dataset, "with_format") or not hasattr(dataset, "data"):
        return
    answers = [each for each in _ANSWERS if each in dataset.column_names]
    longest = 0
    for batch in dataset.with_format("arrow").iter(2**14):
        prompt = pc.list_value_length(batch["prompt_ids"])
        for answer in answers:
            lengths = pc.add(prompt, pc.list_value_length(batch[answer]))
            longest = max(longest, pc.max(lengths).as_py())
    if longest > max_length:
        raise _too_short(max_length, longest, "None")


def _too_short(max_length: int, longest: int, remedy: str) -> ConfigError:
    return ConfigError(
        f"the trainer's max_length {max_length:,} would cut answers: the longest has "
        f"{longest:,} tokens with its prompt. Set max_length to {remedy}, or prepare with a "
        "smaller pack.seq_len.",
        longest=longest,
    )


_ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids")


def _add_neighbours(rows: Mapping[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Pair each prompt with the answer of the previous row; the first one gets the last answer."""
    answers = rows["completion_ids"]
    return {"KL_completion_ids": [answers[-1], *answers[:-1]]}
