"""Turn raw instruction data into versions of packed token data, ready for training.

    import packhouse
    version = packhouse.prepare("data.json", tokenizer="Qwen/Qwen2.5-0.5B-Instruct", seq_len=4096)
    trainer = SFTTrainer(..., train_dataset=version.train, eval_dataset=version.eval)

Names are imported on first use. Datasets and collators for torch, and everything for models and
training loops, need torch: `pip install packhouse[torch]`. Errors are in `packhouse.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from packhouse.registry import PUBLIC

if TYPE_CHECKING:  # for editors and type checkers; at run time, `__getattr__` imports
    from packhouse.addons.audit_any.audit import AuditReport as AuditReport
    from packhouse.addons.audit_any.audit import audit as audit
    from packhouse.addons.dart_math.supervised import TokenizedDataset as TokenizedDataset
    from packhouse.addons.dart_math.supervised import (
        make_supervised_dataset as make_supervised_dataset,
    )
    from packhouse.addons.exports import Export as Export
    from packhouse.addons.exports import export_version as export_version
    from packhouse.addons.packs_in_memory import PackTally as PackTally
    from packhouse.addons.packs_in_memory import pack_dataset as pack_dataset
    from packhouse.addons.plan import plan as plan
    from packhouse.addons.torch.check_packing import PackingReport as PackingReport
    from packhouse.addons.torch.check_packing import check_packing as check_packing
    from packhouse.addons.torch.check_packing import check_ranks as check_ranks
    from packhouse.addons.torch.enable_packing import PackingHandle as PackingHandle
    from packhouse.addons.torch.enable_packing import block_causal_mask as block_causal_mask
    from packhouse.addons.torch.enable_packing import block_mask as block_mask
    from packhouse.addons.torch.enable_packing import cu_seqlens as cu_seqlens
    from packhouse.addons.torch.enable_packing import enable_packing as enable_packing
    from packhouse.addons.torch.enable_packing import enable_preferences as enable_preferences
    from packhouse.addons.torch.enable_packing import packed_mask_mod as packed_mask_mod
    from packhouse.addons.torch.enable_packing import segment_ids as segment_ids
    from packhouse.addons.torch.training_loop import balance_rows as balance_rows
    from packhouse.addons.torch.training_loop import consumed_records as consumed_records
    from packhouse.addons.torch.training_loop import count_targets as count_targets
    from packhouse.addons.torch.training_loop import (
        prepare_finetuning_batch as prepare_finetuning_batch,
    )
    from packhouse.addons.torch.training_loop import (
        split_batch_into_microbatches as split_batch_into_microbatches,
    )
    from packhouse.addons.torch.training_loop import token_loss as token_loss
    from packhouse.addons.torch.training_loop import training_receipt as training_receipt
    from packhouse.addons.torch.training_loop import write_receipt as write_receipt
    from packhouse.api import Version as Version
    from packhouse.api import open_version as open_version
    from packhouse.api import prepare as prepare
    from packhouse.errors import PackhouseError as PackhouseError
    from packhouse.load.collators import ClassificationCollator as ClassificationCollator
    from packhouse.load.collators import PackedCollator as PackedCollator
    from packhouse.load.collators import PaddedCollator as PaddedCollator
    from packhouse.load.dataset import PackedDataset as PackedDataset
    from packhouse.load.mapped_rows import load_packed as load_packed
    from packhouse.load.mapped_rows import load_preferences as load_preferences
    from packhouse.load.streaming import StreamingPackedDataset as StreamingPackedDataset
    from packhouse.recipe import Recipe as Recipe
    from packhouse.recipe import load_recipe as load_recipe

    __version__: str

__all__ = sorted([*PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Imported here, because it takes as long as the rest of `import packhouse`.
        from importlib import metadata

        try:
            return metadata.version("packhouse")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "0+unknown"
    if name not in PUBLIC:
        raise AttributeError(f"module 'packhouse' has no attribute '{name}'")
    try:
        return getattr(import_module(PUBLIC[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from packhouse.system.plugins import pip_install

        raise ImportError(f"packhouse.{name} needs torch: {pip_install('torch')}") from error


def __dir__() -> list[str]:
    return __all__
