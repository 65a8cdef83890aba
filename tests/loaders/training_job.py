"""One rank of test_ranks.py: takes packs, and is killed at a step.

It resumes from the last checkpoint in its folder, writes a checkpoint with a receipt every 3 steps,
and logs each batch that it takes.
"""

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from packhouse import StreamingPackedDataset, write_receipt

BATCH_SIZE, EPOCHS = 2, 2


def main(folder: Path, uri: str, num_workers: int, killed_at: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cache = folder / "cache"
    data = StreamingPackedDataset(uri, seed=7, batch_size=BATCH_SIZE, cache=cache)
    loader = DataLoader(data, BATCH_SIZE, num_workers=num_workers, collate_fn=list)
    checkpoints = sorted(folder.glob("checkpoint-*"))
    step = 0
    if checkpoints:
        receipt = json.loads((checkpoints[-1] / "packhouse-receipt.json").read_text())
        data.load_state_dict(receipt["state"])
        step = receipt["step"]
    run = f"{step:04}-{world_size}"
    with (folder / f"run-{run}-{rank}.jsonl").open("w") as log:
        for epoch in range(data.epoch, EPOCHS):
            data.set_epoch(epoch)
            batches, num_taken = iter(loader), 0
            while True:
                batch = next(batches, [])
                num_rows = torch.tensor(len(batch))
                dist.all_reduce(num_rows)  # as for gradients: a rank without rows takes part too
                if not num_rows:
                    break
                step, num_taken = step + 1, num_taken + 1
                packs = [row["input_ids"].tolist() for row in batch]
                log.write(json.dumps({"step": step, "epoch": epoch, "packs": packs}) + "\n")
                log.flush()
                if step == killed_at and rank == world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % 3 == 0 and rank == 0:
                    state = data.state_dict(rows_seen=num_taken * BATCH_SIZE)
                    write_receipt(folder / f"checkpoint-{step:04}", data, state, step=step)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that ends by itself
