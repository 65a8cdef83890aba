"""TRL: its own `SFTTrainer._prepare_dataset` with best-fit-decreasing packing, saved to disk.

The trainer is made without a model, so that TRL is not charged for one.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.contenders.alpaca import prompt_of, size_of


def run(data: Path, tokenizer: Path, seq_len: int, out: Path) -> dict[str, Any]:
    """Prepare as `SFTTrainer(train_dataset=..., args=SFTConfig(packing=True))` does."""
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "json", data_files=str(data), split="train", cache_dir=str(out / "cache")
    )
    rows = rows.map(_prompt_completion, remove_columns=rows.column_names)
    engine = AutoTokenizer.from_pretrained(tokenizer)
    config = SFTConfig(
        output_dir=str(out), packing=True, max_length=seq_len, bf16=False, report_to=[]
    )
    trainer: Any = SimpleNamespace(_tokenizer=engine, chat_template=None, completion_only_loss=True)
    packed = SFTTrainer._prepare_dataset(trainer, rows, engine, config, True, None, "train")
    packed.save_to_disk(str(out / "packed"))
    return {
        "rows": len(rows),
        "tokens": sum(map(sum, packed["seq_lengths"])),
        "packs": len(packed),
        "bytes": size_of(out / "packed"),
    }


def _prompt_completion(row: dict[str, Any]) -> dict[str, str]:
    return {"prompt": prompt_of(row), "completion": row["output"]}
