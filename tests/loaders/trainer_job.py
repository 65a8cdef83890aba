"""One rank of test_ranks.py: transformers' Trainer, and a custom loop with DDP."""

import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from packhouse import (
    PackedCollator,
    PackedDataset,
    StreamingPackedDataset,
    count_targets,
    enable_packing,
    load_packed,
    token_loss,
)
from tests.loaders.models import tiny_model


def main(folder: Path, uri: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cache = folder / "cache"
    model = tiny_model("llama", "sdpa")
    enable_packing(model)
    seen = []

    class Noting(Trainer):
        def training_step(self, model, inputs, *args):
            seen.append(inputs["input_ids"][0].tolist())
            return super().training_step(model, inputs, *args)

    data = StreamingPackedDataset(uri, rank=0, world_size=1, cache=cache)
    settings = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=1,
        max_steps=data.num_rows // 2,
        accelerator_config={"dispatch_batches": False},
        **settings,
    )
    Noting(model=model, args=arguments, train_dataset=data, data_collator=PackedCollator()).train()

    # A custom loop: the ranks' gradients, averaged by DDP, equal those of one process.
    rank, packs = dist.get_rank(), PackedDataset(load_packed(uri, cache=cache))
    gradients = []
    for is_alone in (False, True):
        model = tiny_model("llama", "sdpa")
        enable_packing(model)
        wrapped = model if is_alone else torch.nn.parallel.DistributedDataParallel(model)
        dealt = [[0, 1, 2]] if is_alone else [[0], [1, 2]]
        rows = [packs[number] for number in dealt[0 if is_alone else rank]]
        batch = PackedCollator()(rows)
        num_targets = torch.tensor(count_targets(batch))
        if not is_alone:
            dist.all_reduce(num_targets)
        labels = batch.pop("labels")
        loss = token_loss(wrapped(**batch).logits, labels, int(num_targets))
        (loss * (1 if is_alone else dist.get_world_size())).backward()
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters()]))
    largest = float((gradients[0] - gradients[1]).abs().max())
    told = {"seen": seen, "difference": largest, "gradient": float(gradients[1].abs().max())}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process that ends by itself
