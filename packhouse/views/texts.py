"""Token ids of many records -> their texts, where the version's tokenizer is known."""

from collections.abc import Callable

import pyarrow as pa

from packhouse.errors import ConfigError
from packhouse.tokenize import TokenizerSnapshot
from packhouse.tokenize.texts import decode_lists


def texts_of(
    ids: pa.LargeListArray, load: Callable[[], TokenizerSnapshot | None] | None
) -> pa.LargeStringArray:
    """Return the text of each list of ids, control tokens included.

    Raises:
        ConfigError: the tokenizer is not known.
    """
    snapshot = load() if load else None
    if snapshot is None:
        raise ConfigError(
            "text needs the version's tokenizer, which neither the cache nor the store has; ask "
            "for input_ids instead"
        )
    return decode_lists(ids, snapshot)
