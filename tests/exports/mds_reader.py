"""Write the samples of MDS folders as MosaicML's own `StreamingDataset` reads them, as JSON.

Runs as a separate program, because the package keeps shared memory and a signal handler in its
process. Its vision datasets are left out: they are not needed here and would require torchvision.
"""

import json
import sys
import types
import warnings


def main() -> None:
    warnings.simplefilter("ignore")
    sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    for folder in sys.argv[1:]:
        data = StreamingDataset(local=folder, shuffle=False, batch_size=1)
        for sample in data:
            row = {name: values.tolist() for name, values in sample.items()}
            sys.stdout.write(json.dumps({"folder": folder} | row) + "\n")


if __name__ == "__main__":
    main()
