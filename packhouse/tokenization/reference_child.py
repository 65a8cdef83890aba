"""Program of the process that `packhouse.tokenization.reference` starts: texts in, HF's ids out.

Reads a line of JSON with the pipeline, then lines with lists of texts, and answers each with a line
of ids. Run by its path, so that it imports neither packhouse nor Arrow. It ends when its input
does, or when nothing was asked for two minutes.
"""

import json
import signal
import sys

__all__ = ["main"]

_IDLE_S = 120  # SIGALRM ends a process that does not say otherwise


def main() -> None:
    """Answer until nobody asks any more."""
    signal.alarm(_IDLE_S)
    backend = json.loads(sys.stdin.buffer.readline())
    question = sys.stdin.buffer.readline()  # before loading: the other side waits to be read

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(backend)
    while question:
        encodings = tokenizer.encode_batch_fast(json.loads(question), add_special_tokens=False)
        sys.stdout.write(json.dumps([encoding.ids for encoding in encodings]) + "\n")
        sys.stdout.flush()
        signal.alarm(_IDLE_S)
        question = sys.stdin.buffer.readline()


if __name__ == "__main__":
    main()
