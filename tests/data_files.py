"""Write all files of a split at once for tests; the chain writes each file in a separate job."""

import pyarrow.compute as pc

from packhouse.run.steps.files import DataParameters, cut_files, write_data_file
from packhouse.store import LocalFile


def write_data_files(packs, split, folder, config):
    num_tokens = pc.sum(pc.list_value_length(packs["input_ids"])).as_py() or 0
    files = []
    for cut in cut_files(split, packs.num_rows, num_tokens, config):
        parameters = DataParameters(
            cut=cut,
            publish=config,
            with_label=packs["label"].null_count < packs.num_rows,
            with_weights=packs["range_weights"].null_count < packs.num_rows,
        )
        starts = range(cut.first, cut.last, cut.rows_per_group)
        groups = (packs.slice(n, min(cut.rows_per_group, cut.last - n)) for n in starts)
        batches = (group.combine_chunks().to_batches()[0] for group in groups)
        (file,) = write_data_file(batches, parameters, folder).files
        files.append(LocalFile(folder / file.name, file.split, file.rows, file.tokens))
    return files
