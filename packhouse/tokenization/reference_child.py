"""Program of the process that `packhouse.tokenization.reference` starts: texts in, HF's ids out.

Run by its path, so that it imports neither packhouse nor Arrow.
"""

import json
import sys
from pathlib import Path

__all__ = ["main"]


def main(folder: Path) -> None:
    """Read `tokenizer.json` and `texts.json`, write `ids.json`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    (folder / "ids.json").write_text(json.dumps([encoding.ids for encoding in encodings]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
