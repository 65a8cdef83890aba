"""What a manifest counts, as numbers that pages show."""

from packhouse.packing import PackStatistics
from packhouse.store.manifest import Manifest

__all__ = ["splits_of"]


def splits_of(manifest: Manifest) -> dict[str, PackStatistics]:
    """Return the statistics of the splits that have packs, train before eval.

    What another program's manifest does not say is 0.
    """
    splits = {}
    for name, said in sorted(manifest.counts.get("statistics", {}).items(), reverse=True):
        known = {key: said[key] for key in _NUMBERS if type(said.get(key)) is int}
        bars = [(length, count) for length, count in said.get("length_histogram", [])]
        side = PackStatistics(
            **{"seq_len": 1, "lower_bound": 0, **known},
            strategy=str(said.get("strategy", "")),
            length_histogram=bars,
        )
        if side.num_packs:
            splits[name] = side
    return splits


_NUMBERS = ("seq_len", "num_sequences", "num_packs", "num_tokens", "num_trained", "lower_bound")
