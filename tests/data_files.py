"""All files of a split at once, as tests want them; the chain writes each as a job of its own."""

import pyarrow.compute as pc

from packhouse.run.steps.data_files import cut_files, write_data_file


def write_data_files(packs, split, folder, config, content):
    num_tokens = pc.sum(pc.list_value_length(packs["input_ids"])).as_py() or 0
    return [
        write_data_file(
            packs.slice(cut.first, cut.last - cut.first),
            cut,
            folder,
            config,
            content,
            with_label=packs["label"].null_count < packs.num_rows,
            with_weights=packs["range_weights"].null_count < packs.num_rows,
        )
        for cut in cut_files(split, packs.num_rows, num_tokens, config)
    ]
