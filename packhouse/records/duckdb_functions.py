"""DuckDB without files or network, and the text functions of add-ons in it."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

import pyarrow as pa

from packhouse.records.arrays import one_chunk
from packhouse.registry import TEXT_FUNCTIONS, is_there

NO_FILES = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # Otherwise DuckDB spills to `.tmp` in the working directory, up to 90% of the disk.
    "max_temp_directory_size": "0B",
}
"""Settings of a DuckDB connection without files or network; callers add memory and threads."""


def add_text_functions(connection: Any) -> None:
    """Register the installed functions of `TEXT_FUNCTIONS`, before the configuration is locked."""
    for name, (module, returns) in TEXT_FUNCTIONS.items():
        if is_there(module):
            function = text_function(name)
            arguments = ["VARCHAR"] * len(signature(function).parameters)
            # "arrow" passes a whole vector of texts to one call. Without "special", DuckDB does not
            # call a function for NULL.
            how = {"type": "arrow", "null_handling": "special"}
            connection.create_function(name, function, arguments, returns, **how)


def text_function(name: str) -> Callable[..., pa.Array]:
    """Return one of `TEXT_FUNCTIONS`, for arrays and DuckDB's chunked columns."""
    function = getattr(import_module(TEXT_FUNCTIONS[name][0]), name)

    @wraps(function)
    def call(*texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        return function(*map(one_chunk, texts))

    return call


def check_text_function(name: str) -> None:
    """Call one of `TEXT_FUNCTIONS` once.

    Raises:
        ConfigError: the package that it needs is not installed.
    """
    function = text_function(name)
    text = pa.array(["text long enough to detect its language"])
    function(*[text] * len(signature(function).parameters))
