"""Token ids -> the text of each token, as a page shows it."""

from collections.abc import Sequence

from packhouse.escaping import for_terminal
from packhouse.tokenization.pipeline import Pipeline

__all__ = ["piece_texts"]

_MAX_CHARS = 200  # of a token; some vocabularies have tokens of 128 spaces


def piece_texts(ids: Sequence[int], pipeline: Pipeline | None) -> list[str]:
    r"""Return the text of each token, harmless to show; bytes of half a character go on.

    A character whose bytes stand in several tokens is the text of the last of them, and the others
    have none: the tokens of "\N{GRINNING FACE}" give ["", "\N{GRINNING FACE}"].

    Without a pipeline, or with one whose tokens are no bytes, a token's text is its number.
    """
    known = pipeline.token_bytes if pipeline else None
    if known is None:
        return [f"{token} " for token in ids]
    texts: list[str] = []
    held = b""
    for token in ids:
        data = held + (known[token].as_py() if 0 <= token < len(known) else b"[%d]" % token)
        whole, held = _whole(data)
        texts.append(for_terminal(whole.decode("utf-8", "replace"), keep_lines=True)[:_MAX_CHARS])
    if held and texts:
        texts[-1] += held.decode("utf-8", "replace")
    return texts


def _whole(data: bytes) -> tuple[bytes, bytes]:
    r"""Cut before the first bytes of a character that is not whole: b"a\xf0\x9f" -> b"a", rest."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return (data[:-back], data[-back:]) if size > back else (data, b"")
        if byte < 0x80:
            break
    return data, b""
