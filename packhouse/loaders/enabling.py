"""Prepare a transformers model so that packed records do not attend across their boundaries.

transformers 5 cuts attention where `position_ids` do not rise by one, but only if the model gets
no `attention_mask` and makes no cache - and by default it makes one. A tiny Llama's logits are
then off by 9 where the right way is off by 1e-5, silently. `enable_packing` puts a guard before
the decoder's forward pass that, for packed batches only, turns the cache off, drops a mask that
says nothing (all ones, right padding), reads a mask of record numbers 1, 1, 2, 2, 0 as boundaries,
and refuses what cannot be right: boundaries that contradict each other, padding between records,
a cache, and RoPE that the longest record of a pack would change for all. Generation and unpacked
batches pass through untouched.

The guard costs a few comparisons of T positions a step. `check_packing` proves the result.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from packhouse.errors import ConfigError, ContractError
from packhouse.loaders.masks import cu_seqlens, segment_ids

__all__ = ["FAMILIES", "PackingHandle", "enable_packing"]

# Families whose tiny models pass `check_packing` in the tests, by `model_type`.
FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)

_LAYERS = {"full_attention", "sliding_attention"}
_DENSE = {"eager", "sdpa", "flex_attention"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_FLASH = {"flash_attention_2", "flash_attention_3", "flash_attention_4"}


class PackingHandle:
    """Undoes `enable_packing`, by `disable()` or at the end of a `with` block."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def disable(self) -> None:
        """Put everything back as it was; a second call does nothing."""
        if self._undo:
            _forget_compiled()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "PackingHandle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.disable()


def enable_packing(target: Any, *, attn_implementation: str | None = None) -> PackingHandle:
    """Make packed batches safe for a model, or for every model built from a config or a name.

    Args:
        target: a model (wrapped by PEFT or DDP too); a config; a `model_type` as 'mistral'; or a
            folder or name that `AutoConfig` knows. All but a model guard the decoder class of
            that family in this process, whenever its models are made.
        attn_implementation: also switch the model or config to this one; not with a name, which
            has no config that a model would be made from.

    Returns:
        A handle whose `disable()` undoes it.

    Raises:
        ConfigError: a family, layer type or attention implementation not known to keep apart.

    Example:
        >>> handle = enable_packing("llama")
        >>> handle.disable()
    """
    handle = PackingHandle()
    try:
        if isinstance(target, torch.nn.Module):
            _enable_model(target, attn_implementation, handle)
        elif isinstance(target, str):
            if attn_implementation is not None:
                raise ConfigError(
                    f"a name has no attention to switch; give attn_implementation="
                    f"'{attn_implementation}' to from_pretrained, or a model or config here"
                )
            _enable_config(_named_config(target), attn_implementation, handle)
        else:
            _enable_config(target, attn_implementation, handle)
    except BaseException:
        handle.disable()
        raise
    _forget_compiled()
    return handle


def _forget_compiled() -> None:
    """Make `torch.compile` look at models anew: code that it has made does not see a new guard."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _enable_model(model: torch.nn.Module, attention: str | None, handle: PackingHandle) -> None:
    decoders = [m for m in model.modules() if _is_decoder(m)]
    if not decoders:
        _check_family(getattr(model, "config", None))
        raise ConfigError(f"{type(model).__name__} holds no decoder of its config's family")
    for decoder in decoders:
        config = decoder.config
        _check_family(config)
        _configure(config, attention, handle)
        signature = inspect.signature(decoder.forward)
        guard = functools.partial(_before_forward, signature)
        hook = decoder.register_forward_pre_hook(guard, with_kwargs=True)
        handle._undo.append(hook.remove)


def _is_decoder(module: torch.nn.Module) -> bool:
    config = getattr(module, "config", None)
    return config is not None and type(module) is _decoder_class(config)


def _enable_config(config: Any, attention: str | None, handle: PackingHandle) -> None:
    _check_family(config)
    _configure(config, attention, handle)
    decoder = _decoder_class(config)
    if decoder not in _GUARDED:
        plain = decoder.forward
        decoder.forward = _guarded(plain)
        _GUARDED[decoder] = (plain, [])
    _GUARDED[decoder][1].append(handle)
    handle._undo.append(lambda: _release_class(decoder, handle))


# Decoder class -> its own forward and who holds it guarded: handles may end in any order.
_GUARDED: dict[Any, tuple[Callable[..., Any], list[PackingHandle]]] = {}


def _guarded(plain: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _guard(self.config, signature, (self, *args), kwargs)
        return plain(*args, **kwargs)

    return guarded


def _release_class(decoder: Any, handle: PackingHandle) -> None:
    plain, holders = _GUARDED[decoder]
    holders.remove(handle)
    if not holders:
        decoder.forward = plain
        del _GUARDED[decoder]


def _decoder_class(config: Any) -> Any:
    from transformers import AutoModel

    mapping = AutoModel._model_mapping
    return mapping[type(config)] if type(config) in mapping else None


def _named_config(name: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    return CONFIG_MAPPING[name]() if name in CONFIG_MAPPING else AutoConfig.from_pretrained(name)


def _check_family(config: Any) -> None:
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ConfigError(
            f"enable_packing does not know model type '{family}'; known: {', '.join(FAMILIES)}. "
            "If check_packing passes with use_cache=False and no attention_mask, it needs no help"
        )
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if odd:
        raise ConfigError(f"layers of type '{odd[0]}' carry state across packed records")


def _configure(config: Any, attention: str | None, handle: PackingHandle) -> None:
    old_cache, old_attention = config.use_cache, config._attn_implementation
    chosen = attention or old_attention
    if chosen is not None and chosen not in _DENSE | _FLASH:
        raise ConfigError(
            f"attention '{chosen}' is not known to keep packed records apart; use one of "
            f"{', '.join(sorted(_DENSE | _FLASH))}"
        )
    if attention in _FLASH and not _has_kernels(attention):
        raise ConfigError(
            f"attention '{attention}' needs a GPU and its kernel package, which are not here; "
            "install it, or use sdpa or flex_attention"
        )
    held = _HELD.setdefault(id(config), _Held(config, old_cache, old_attention))
    held.by.append((handle, attention))
    held.apply()
    handle._undo.append(lambda: held.release(handle))


def _has_kernels(attention: str | None) -> bool:
    from transformers import utils

    name = f"is_flash_attn_{str(attention)[-1]}_available"
    return bool(getattr(utils, name, lambda: False)())


@dataclass(eq=False)
class _Held:
    """A config that handles hold, in the order they came, and what it was before the first."""

    config: Any
    use_cache: Any
    attention: str | None
    by: list[tuple[PackingHandle, str | None]] = field(default_factory=list)

    def apply(self) -> None:
        self.config.use_cache = False if self.by else self.use_cache
        wanted = [attention for _, attention in self.by if attention is not None]
        chosen = wanted[-1] if wanted else self.attention
        if self.config._attn_implementation != chosen:
            self.config._attn_implementation = chosen

    def release(self, handle: PackingHandle) -> None:
        place = next(n for n, (holder, _) in enumerate(self.by) if holder is handle)
        del self.by[place]
        self.apply()
        if not self.by:
            del _HELD[id(self.config)]


_HELD: dict[int, _Held] = {}


def _before_forward(
    signature: inspect.Signature, module: Any, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _guard(module.config, signature, args, kwargs)


def _guard(
    config: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the decoder is called with instead."""
    given = dict(kwargs) | dict(zip(signature.parameters, args, strict=False))
    self = () if "self" not in given else (given.pop("self"),)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if given.get("past_key_values") is not None:
        _refuse_packed_cache(positions, mask)
        return args, dict(kwargs)  # generation
    has_numbers = _holds_numbers(mask)
    if not has_numbers:
        _refuse_holes(mask)
    if positions is None and has_numbers:
        positions = _numbers_to_positions(mask)
    _refuse_other_bounds(given, positions, config._attn_implementation in _FLASH)
    if positions is None or not (has_numbers or _is_packed(positions, mask)):
        return args, dict(kwargs)
    _refuse(config, positions, mask)
    given |= {"position_ids": positions, "attention_mask": None, "use_cache": False}
    return self, given


def _refuse_packed_cache(positions: Any, mask: Any) -> None:
    """With a cache the model does not look at positions: nothing may be packed."""
    is_packed = _holds_numbers(mask)
    if not is_packed and isinstance(positions, torch.Tensor):
        length = positions.shape[-1]
        if mask is None:
            is_packed = _is_packed(positions, None)
        elif isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[-1] >= length:
            is_packed = _is_packed(positions, mask[:, -length:])
    if is_packed:
        raise ContractError(
            "a packed batch came with past_key_values, with which a model does not look at record "
            "boundaries; leave them out, and set use_cache=False"
        )


def _refuse_holes(mask: Any) -> None:
    """A mask whose pads lie between tokens: what follows them may be another record."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return
    real = (mask != 0).int()
    if bool(
        ((torch.diff(real, dim=-1, prepend=torch.zeros_like(real[:, :1])) > 0).sum(-1) > 1).any()
    ):
        raise ContractError(
            "attention_mask has padding between tokens, over which records would see each other; "
            "number the records in it (1, 1, 0, 2, 2), or use PackedCollator"
        )


def _refuse_other_bounds(given: Mapping[str, Any], positions: Any, is_flash: bool) -> None:
    """Boundaries that some kernels read and others do not must be those of `position_ids`.

    Flash kernels read `cu_seq_lens` and not the positions: a bound that is missing there merges two
    records. Others read the positions alone, and a dispatcher that takes the bounds for rows of the
    batch may have cut them short.
    """
    told = [n for n in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if given.get(n) is not None]
    if not told:
        return
    if not isinstance(positions, torch.Tensor):
        raise ContractError(
            f"{told[0]} came without position_ids, and attention cuts records by these only; "
            "use PackedCollator, which gives both"
        )
    for name in told:
        value = given[name].to(positions.device)
        if name == "seq_idx":
            cuts = torch.diff(segment_ids(positions), dim=-1) != 0
            agrees = value.shape == positions.shape and torch.equal(
                torch.diff(value, dim=-1) != 0, cuts
            )
        else:
            bounds = cu_seqlens(positions).long()
            agrees = bool(torch.isin(value.long(), bounds).all())
            if is_flash:
                agrees = torch.equal(value.long().flatten(), bounds)
                longest = given.get(f"max_length_{name[-1]}")
                agrees = agrees and (longest is None or int(longest) >= int(bounds.diff().max()))
        if not agrees:
            raise ContractError(f"{name} and position_ids disagree where records end")


def _holds_numbers(mask: Any) -> bool:
    is_matrix = isinstance(mask, torch.Tensor) and mask.ndim == 2
    return is_matrix and mask.dtype != torch.bool and bool((mask > 1).any())


def _numbers_to_positions(mask: torch.Tensor) -> torch.Tensor:
    """Record numbers to positions: [1, 1, 2, 2, 0] -> [0, 1, 0, 1, 0]."""
    place = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    is_first = torch.ones_like(mask, dtype=torch.bool)
    is_first[:, 1:] = mask[:, 1:] != mask[:, :-1]
    starts = torch.where(is_first, place, 0).cummax(-1).values
    return place - starts


def _is_packed(positions: torch.Tensor, mask: Any) -> bool:
    """Whether positions restart between two tokens that are not padding."""
    if positions.ndim != 2:
        return False
    cuts = torch.diff(positions, dim=-1) != 1
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[-1] == positions.shape[-1]:
        cuts = cuts & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(cuts.any())


def _refuse(config: Any, positions: torch.Tensor, mask: Any) -> None:
    if config._attn_implementation in _FLASH and positions.shape[0] > 1:
        raise ContractError(
            f"flash attention keeps packed records apart in one row only, got {positions.shape[0]} "
            "rows; lay them behind one another with PackedCollator"
        )
    _refuse_long_rope(config, positions)
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.shape != positions.shape:
        raise ContractError(
            "a packed batch came with a mask of its own; the model would use it in place of the "
            "record boundaries and its sliding window. Leave attention_mask out"
        )
    if _holds_numbers(mask):
        cuts = torch.diff(segment_ids(positions), dim=-1) != 0
        if not bool((cuts | (torch.diff(mask, dim=-1) == 0)).all()):
            raise ContractError("attention_mask numbers records that position_ids do not cut")
    elif bool((torch.diff(mask.int(), dim=-1) > 0).any()):
        raise ContractError("a packed batch is padded on the left; use PackedCollator, or no pads")


def _refuse_long_rope(config: Any, positions: torch.Tensor) -> None:
    """RoPE that changes with the longest position would change for every record of the pack."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in [rope, *(part for part in rope.values() if isinstance(part, Mapping))]:
        kind = each.get("rope_type", each.get("type"))
        if kind not in _LENGTH_DEPENDENT:
            continue
        limit = config.max_position_embeddings
        for place in (config.__dict__, each):
            limit = min(limit, place.get("original_max_position_embeddings") or limit)
        # 'dynamic' forgets an earlier, longer batch only below its window, not at it.
        limit -= kind == "dynamic"
        longest = int(positions.max()) + 1
        if longest > limit:
            raise ContractError(
                f"a packed record of {longest:,} tokens is over the original window of {limit:,}, "
                f"and RoPE of type '{kind}' would then turn the short records of the pack as the "
                "long one; prepare with a smaller seq_len, or train long records unpacked"
            )
