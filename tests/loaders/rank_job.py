"""One rank of test_ranks.py: `rank_job.py RANK WORLD_SIZE FOLDER` writes what it measured."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from packhouse.loaders import PackedCollator, check_ranks, enable_packing
from tests.loaders.models import VOCABULARY, tiny_model

RECORDS = torch.tensor([[0] * 7 + [1] * 6 + [2] * 3])  # of 16 tokens, 8 on each rank


class ContextParallel(torch.nn.Module):
    """One layer of attention whose keys and values come from all ranks, as ring attention's."""

    def __init__(self, is_apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.is_apart = is_apart

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None) -> torch.Tensor:
        own = self.embedding(input_ids)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        every = torch.cat(parts, dim=1)
        first = dist.get_rank() * input_ids.shape[1]
        token, other = torch.arange(first, first + input_ids.shape[1]), torch.arange(every.shape[1])
        seen = other[None] <= token[:, None]
        if self.is_apart:
            seen &= RECORDS[0, token][:, None] == RECORDS[0, other][None]
        scores = (own @ every.mT).masked_fill(~seen, float("-inf"))
        return scores.softmax(-1) @ every @ self.embedding.weight.T


def main(rank: int, world_size: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world_size
    )
    found = {}

    # Data parallel: other packs on each rank.
    lengths = [[9, 4, 3], [5, 8]][rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, VOCABULARY, (sum(lengths),), generator=generator)
    batch = PackedCollator()([{"input_ids": ids, "seq_lengths": lengths}])
    model = torch.nn.parallel.DistributedDataParallel(tiny_model("llama", "sdpa"))
    found["plain"] = check_ranks(model, batch)
    with enable_packing(model):
        found["enabled"] = check_ranks(model, batch)

    # Context parallel: a record lies on both ranks.
    part = slice(8 * rank, 8 * rank + 8)
    ids = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(5))
    own = {"input_ids": ids[:, part]}
    for name, is_apart in (("apart", True), ("together", False)):
        found[name] = check_ranks(ContextParallel(is_apart), own, records=RECORDS[:, part])

    told = {name: [str(each), each.is_safe, each.max_leak] for name, each in found.items()}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that ends by itself


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
