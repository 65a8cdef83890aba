"""What a trainer imports: datasets, collators, masks and microbatches.

Nothing is imported until it is asked for: `load_packed` and `load_preferences` need no torch, all
else does (`pip install packhouse[torch]`).
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "ClassificationCollator": "collators",
    "PackedCollator": "collators",
    "PaddedCollator": "collators",
    "PackedDataset": "dataset",
    "PackingHandle": "enabling",
    "PackingReport": "checking",
    "StreamingPackedDataset": "streaming",
    "TokenizedDataset": "dataset",
    "balance_rows": "microbatches",
    "block_causal_mask": "masks",
    "block_mask": "masks",
    "check_packing": "checking",
    "check_ranks": "checking",
    "consumed_records": "receipts",
    "count_targets": "microbatches",
    "cu_seqlens": "masks",
    "enable_packing": "enabling",
    "enable_preferences": "preferences",
    "load_packed": "versions",
    "load_preferences": "preferences",
    "packed_mask_mod": "masks",
    "prepare_finetuning_batch": "microbatches",
    "segment_ids": "masks",
    "split_batch_into_microbatches": "microbatches",
    "token_loss": "microbatches",
    "training_receipt": "receipts",
    "write_receipt": "receipts",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        module = import_module(f".{_MODULES[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{__name__}.{name} needs torch: pip install 'packhouse[torch]'"
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
