"""Errors that packhouse raises on purpose.

    PackhouseError
    |-- ConfigError               a recipe or an argument is wrong
    |   `-- PluginError           a plug-in failed or returned something invalid
    |-- SourceError               an input file cannot be read at all
    |   `-- EmptyDatasetError     nothing is left to publish
    |-- QuarantineLimitError      more rows are bad than the recipe allows
    |-- TokenizerError            a tokenizer cannot be loaded or used
    |-- AuditError                a limit of the audit is exceeded; nothing is published
    |-- TemplateError             the trained parts of a template cannot be proven
    |-- SequenceTooLongError      a record exceeds seq_len and the policy is `error`
    |-- ContractError             a table breaks its contract; no later step ran
    |   `-- EmptyRowError         a row without a token
    |-- StoreError                a fault of the object store or of its contents
    |   |-- VersionNotFoundError  no such dataset, version or ref
    |   |-- IntegrityError        bytes differ from their digest
    |   |-- ConflictError         another writer won a race and wrote something else
    |   `-- StoreRefusedError     the store cannot guard a publication (ignores conditions, 501)
    |-- DiskError                 a local disk is full, out of inodes or read-only
    `-- TransientError            a temporary fault of network or storage; the only kind retried

A user's mistake is one of these; a broken invariant is an `assert`. Facts about an error are
attributes, passed as keywords, and survive pickling, because worker processes raise these errors.
"""

from functools import partial
from typing import Any

from packhouse.system.escaping import for_terminal

HELD_BACK = 7
"""Exit code: the version is published, but its ref did not move because it drifted too far."""


class PackhouseError(Exception):
    """Base of all packhouse errors: a message with place, limit and fix, plus facts.

    Example:
        >>> import pickle
        >>> error = PackhouseError("row 3 is bad", row=3)
        >>> copy = pickle.loads(pickle.dumps(error))  # noqa: S301
        >>> str(copy), copy.row
        ('row 3 is bad', 3)
    """

    exit_code = 1

    def __init__(self, message: str, /, **facts: Any) -> None:
        # The message may quote a row or a file name.
        message = for_terminal(message, keep_lines=True)
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # Not `self.facts`: copy and pickle ask for attributes of an object whose `__init__` has not
        # run, and that would ask again.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle their positional arguments only, and worker processes raise these.
        return partial(type(self), self.message, **self.facts), ()


class ConfigError(PackhouseError):
    """A recipe or an argument is invalid."""

    exit_code = 2


class PluginError(ConfigError):
    """A plug-in failed or returned something invalid; the message names it."""


class SourceError(PackhouseError):
    """An input file cannot be read at all."""

    exit_code = 3


class EmptyDatasetError(SourceError):
    """Nothing is left to publish."""


class QuarantineLimitError(PackhouseError):
    """More rows are bad than the recipe allows."""

    exit_code = 4


class AuditError(PackhouseError):
    """An audit limit is exceeded, or a golden conversation differs."""

    exit_code = 4


class TokenizerError(PackhouseError):
    """A tokenizer cannot be loaded or used."""

    exit_code = 3


class TemplateError(PackhouseError):
    """The trained parts of a template cannot be determined."""

    exit_code = 4


class SequenceTooLongError(PackhouseError):
    """A record exceeds `seq_len` and the policy is `error`."""

    exit_code = 4


class ContractError(PackhouseError):
    """A table breaks its contract."""

    exit_code = 4


class EmptyRowError(ContractError):
    """A row has no tokens."""


class StoreError(PackhouseError):
    """An error of the object store, or damaged contents."""

    exit_code = 5


class VersionNotFoundError(StoreError):
    """No such dataset, version or ref."""


class IntegrityError(StoreError):
    """Bytes differ from the published digest."""


class ConflictError(StoreError):
    """Another writer won a race and wrote something else."""


class StoreRefusedError(StoreError):
    """The store does not support safe concurrent publishing."""


class DiskError(PackhouseError):
    """A local disk is full, out of inodes or read-only."""

    exit_code = 5


class TransientError(PackhouseError):
    """A temporary network or storage error; the only kind that is retried."""

    exit_code = 6
