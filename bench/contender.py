"""Run one contender in this process: `python bench/contender.py NAME INPUT TOKENIZER SEQ_LEN OUT`.

Imports are timed from the first line on; everything else is the contender's work. Its module is
imported by name from `bench/contenders` and provides `run`; the result goes to `OUT/result.json`.
"""

import sys
import time
from typing import Any

_import_s = 0.0
_depth = 0


def _time_imports() -> None:
    """Add up the CPU time of the outermost imports."""
    bootstrap: Any = sys.modules["_frozen_importlib"]
    find_and_load = bootstrap._find_and_load

    def timed(name: str, import_: Any) -> Any:
        global _import_s, _depth
        if name in sys.modules:
            return find_and_load(name, import_)
        _depth += 1
        start = time.thread_time()
        try:
            return find_and_load(name, import_)
        finally:
            _depth -= 1
            if not _depth:
                _import_s += time.thread_time() - start

    bootstrap._find_and_load = timed


def main() -> None:
    """Run the contender that the command line names."""
    name, data, tokenizer, seq_len, out = sys.argv[1:6]
    _time_imports()
    import importlib
    import json
    from pathlib import Path

    folder = Path(out)
    module = importlib.import_module(f"bench.contenders.{name}")
    facts = module.run(Path(data), Path(tokenizer), int(seq_len), folder)
    facts["import_s"] = _import_s
    (folder / "result.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
