"""One rank of test_ranks.py: `check_ranks` on layers with and without data of other ranks."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from packhouse import PackedCollator, check_ranks, enable_packing
from tests.loaders.models import VOCABULARY, tiny_model

LENGTHS = [[9, 4, 3], [5, 8], [16], [2, 2, 2, 10]]
"""Lengths of the records in each data-parallel rank's pack."""

RECORDS = torch.tensor([0] * 7 + [1] * 6 + [2] * 3)
"""Record of each of the 16 tokens that two context-parallel ranks share."""

# Rank 0 of such a pair has the first and the last quarter, a split that balances attention.
PLACES = [torch.tensor([0, 1, 2, 3, 12, 13, 14, 15]), torch.arange(4, 12)]


class ContextParallel(torch.nn.Module):
    """One layer of attention with keys and values from all ranks, as in ring attention."""

    def __init__(self, group: Any, is_apart: bool, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.group, self.is_apart, self.scale = group, is_apart, scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        own = self.embedding(input_ids)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, own, group=self.group)
        every = torch.cat(parts, dim=1)
        token, other = PLACES[dist.get_rank() % 2], torch.cat(PLACES * (len(parts) // 2))
        seen = other[None] <= token[:, None]
        if self.is_apart:
            seen &= RECORDS[token][:, None] == RECORDS[other][None]
        scores = (own @ every.mT).masked_fill(~seen, float("-inf"))
        mixed = own + self.scale * scores.softmax(-1) @ every
        return mixed @ self.embedding.weight.T


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, pair = dist.get_rank(), dist.get_rank() // 2
    found = {}

    # Data parallel: other packs on each rank.
    ids = torch.randint(3, VOCABULARY, (sum(LENGTHS[rank]),))
    batch = PackedCollator()([{"input_ids": ids, "seq_lengths": LENGTHS[rank]}])
    model = torch.nn.parallel.DistributedDataParallel(tiny_model("llama", "sdpa"))
    found["plain"] = check_ranks(model, batch)
    with enable_packing(model):
        found["enabled"] = check_ranks(model, batch)

    # Context parallel: pairs of ranks share a pack, so records span both ranks.
    pairs = [dist.new_group([2 * n, 2 * n + 1]) for n in range(dist.get_world_size() // 2)]
    ids = torch.randint(3, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(pair))
    own, places = pairs[pair], PLACES[rank % 2]
    for name, layer in {
        "apart": ContextParallel(own, True),
        "together": ContextParallel(own, False),
        "zeros": ContextParallel(own, False, scale=0.0),
        "another pair's": ContextParallel(None, True),
    }.items():
        numbers = RECORDS[None, places] + 3 * pair
        found[name] = check_ranks(layer, {"input_ids": ids[:, places]}, records=numbers)

    told = {name: [str(each), each.is_safe, each.max_leak] for name, each in found.items()}
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may abort a process that ends by itself
