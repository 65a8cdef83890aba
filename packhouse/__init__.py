"""Turn raw instruction data into versions of packed token data, ready for training.

    import packhouse
    version = packhouse.prepare("data.json", tokenizer="Qwen/Qwen2.5-0.5B-Instruct", seq_len=4096)
    trainer = SFTTrainer(..., train_dataset=version.train, eval_dataset=version.eval)

Names are imported on first use. Datasets and collators for torch, and everything for models and
training loops, need torch: `pip install packhouse[torch]`. Errors are in `packhouse.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; at run time, `__getattr__` imports
    from packhouse.addons.audit_any.audit import AuditReport, audit
    from packhouse.addons.dart_math.supervised import TokenizedDataset, make_supervised_dataset
    from packhouse.addons.exports import Export, export_version
    from packhouse.addons.packs_in_memory import PackTally, pack_dataset
    from packhouse.addons.plan import plan
    from packhouse.addons.torch.check_packing import PackingReport, check_packing, check_ranks
    from packhouse.addons.torch.enable_packing import (
        PackingHandle,
        block_causal_mask,
        block_mask,
        cu_seqlens,
        enable_packing,
        enable_preferences,
        packed_mask_mod,
        segment_ids,
    )
    from packhouse.addons.torch.training_loop import (
        balance_rows,
        consumed_records,
        count_targets,
        prepare_finetuning_batch,
        split_batch_into_microbatches,
        token_loss,
        training_receipt,
        write_receipt,
    )
    from packhouse.api import Version, open_version, prepare
    from packhouse.errors import PackhouseError
    from packhouse.load.collators import ClassificationCollator, PackedCollator, PaddedCollator
    from packhouse.load.dataset import PackedDataset
    from packhouse.load.mapped_rows import load_packed, load_preferences
    from packhouse.load.streaming import StreamingPackedDataset
    from packhouse.recipe import Recipe, load_recipe

    __version__: str

_MODULES = {
    "ClassificationCollator": "packhouse.load.collators",
    "PackedCollator": "packhouse.load.collators",
    "PackedDataset": "packhouse.load.dataset",
    "PackhouseError": "packhouse.errors",
    "PaddedCollator": "packhouse.load.collators",
    "Recipe": "packhouse.recipe",
    "StreamingPackedDataset": "packhouse.load.streaming",
    "Version": "packhouse.api",
    "load_packed": "packhouse.load.mapped_rows",
    "load_preferences": "packhouse.load.mapped_rows",
    "load_recipe": "packhouse.recipe",
    "open_version": "packhouse.api",
    "prepare": "packhouse.api",
}

__all__ = [
    "AuditReport",
    "ClassificationCollator",
    "Export",
    "PackTally",
    "PackedCollator",
    "PackedDataset",
    "PackhouseError",
    "PackingHandle",
    "PackingReport",
    "PaddedCollator",
    "Recipe",
    "StreamingPackedDataset",
    "TokenizedDataset",
    "Version",
    "__version__",
    "audit",
    "balance_rows",
    "block_causal_mask",
    "block_mask",
    "check_packing",
    "check_ranks",
    "consumed_records",
    "count_targets",
    "cu_seqlens",
    "enable_packing",
    "enable_preferences",
    "export_version",
    "load_packed",
    "load_preferences",
    "load_recipe",
    "make_supervised_dataset",
    "open_version",
    "pack_dataset",
    "packed_mask_mod",
    "plan",
    "prepare",
    "prepare_finetuning_batch",
    "segment_ids",
    "split_batch_into_microbatches",
    "token_loss",
    "training_receipt",
    "write_receipt",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Imported here, because it takes as long as the rest of `import packhouse`.
        from importlib import metadata

        try:
            return metadata.version("packhouse")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "0+unknown"
    from packhouse.registry import PUBLIC

    module = _MODULES.get(name) or PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'packhouse' has no attribute '{name}'")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from packhouse.system.plugins import pip_install

        raise ImportError(f"packhouse.{name} needs torch: {pip_install('torch')}") from error


def __dir__() -> list[str]:
    return __all__
