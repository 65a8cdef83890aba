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
    from packhouse.addons.audit_any.audit import AuditReport as AuditReport, audit as audit
    from packhouse.addons.dart_math.supervised import (
        TokenizedDataset as TokenizedDataset,
        make_supervised_dataset as make_supervised_dataset,
    )
    from packhouse.addons.exports import Export as Export, export_version as export_version
    from packhouse.addons.packs_in_memory import (
        PackTally as PackTally,
        pack_dataset as pack_dataset,
    )
    from packhouse.addons.plan import plan as plan
    from packhouse.addons.torch.check_packing import (
        PackingReport as PackingReport,
        check_packing as check_packing,
        check_ranks as check_ranks,
    )
    from packhouse.addons.torch.enable_packing import (
        PackingHandle as PackingHandle,
        block_causal_mask as block_causal_mask,
        block_mask as block_mask,
        cu_seqlens as cu_seqlens,
        enable_packing as enable_packing,
        enable_preferences as enable_preferences,
        packed_mask_mod as packed_mask_mod,
        segment_ids as segment_ids,
    )
    from packhouse.addons.torch.training_loop import (
        balance_rows as balance_rows,
        consumed_records as consumed_records,
        count_targets as count_targets,
        prepare_finetuning_batch as prepare_finetuning_batch,
        split_batch_into_microbatches as split_batch_into_microbatches,
        token_loss as token_loss,
        training_receipt as training_receipt,
        write_receipt as write_receipt,
    )
    from packhouse.api import Version as Version, open_version as open_version, prepare as prepare
    from packhouse.errors import PackhouseError as PackhouseError
    from packhouse.load.collators import (
        ClassificationCollator as ClassificationCollator,
        PackedCollator as PackedCollator,
        PaddedCollator as PaddedCollator,
    )
    from packhouse.load.dataset import PackedDataset as PackedDataset
    from packhouse.load.mapped_rows import (
        load_packed as load_packed,
        load_preferences as load_preferences,
    )
    from packhouse.load.streaming import StreamingPackedDataset as StreamingPackedDataset
    from packhouse.recipe import Recipe as Recipe, load_recipe as load_recipe

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
