"""Every error packhouse raises on purpose.

    PackhouseError
    |-- ConfigError               a recipe or an argument is wrong: which key, what is allowed
    |   `-- PluginError           code of a plug-in failed, or gave what it must not
    |-- SourceError               an input file cannot be read at all; says which file and where
    |   `-- EmptyDatasetError     nothing is left to publish
    |-- QuarantineLimitError      more rows are bad than the recipe allows
    |-- TokenizerError            a tokenizer folder does not load or cannot be used
    |-- AuditError                the tokens would teach what they should not; nothing published
    |-- TemplateError             a template cannot be proven to mark what is trained
    |-- SequenceTooLongError      a record exceeds seq_len and the policy is `error`
    |-- ContractError             a table breaks its contract; nothing after it ran
    |   `-- EmptyRowError         a row without a token
    |-- StoreError                the object store, or what lies in it
    |   |-- VersionNotFoundError  no such dataset, version or ref
    |   |-- IntegrityError        bytes differ from their digest
    |   |-- ConflictError         someone else won, and what they wrote is not what we have
    |   `-- StoreRefusedError     the store cannot guard a publication (ignores conditions, 501)
    |-- DiskError                 a disk of this machine is full, out of inodes or read-only
    `-- TransientError            a hiccup of network or storage: the only kind that is retried

A user's mistake is one of these; a broken invariant is an `assert`. Facts about the error are
attributes, given as keywords, and survive pickling (worker processes raise them).
"""

from typing import Any

from packhouse.system.escaping import for_terminal

__all__ = [
    "HELD_BACK",
    "AuditError",
    "ConfigError",
    "ConflictError",
    "ContractError",
    "DiskError",
    "EmptyDatasetError",
    "EmptyRowError",
    "IntegrityError",
    "PackhouseError",
    "PluginError",
    "QuarantineLimitError",
    "SequenceTooLongError",
    "SourceError",
    "StoreError",
    "StoreRefusedError",
    "TemplateError",
    "TokenizerError",
    "TransientError",
    "VersionNotFoundError",
]

HELD_BACK = 7
"""Exit code: the version is published, and its ref stays because it drifted too far."""


class PackhouseError(Exception):
    """Base of all errors of packhouse: one sentence with place, limit and remedy, plus facts.

    Example:
        >>> import pickle
        >>> error = PackhouseError("row 3 is bad", row=3)
        >>> copy = pickle.loads(pickle.dumps(error))  # noqa: S301
        >>> str(copy), copy.row
        ('row 3 is bad', 3)
    """

    exit_code = 1

    def __init__(self, message: str, /, **facts: Any) -> None:
        message = for_terminal(message, keep_lines=True)  # it may repeat a row or a file's name
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[PackhouseError], message: str, facts: dict[str, Any]) -> PackhouseError:
    return cls(message, **facts)


class ConfigError(PackhouseError):
    """A recipe or an argument is wrong."""

    exit_code = 2


class PluginError(ConfigError):
    """Code of a plug-in failed, or what it returned is not what it must be; names the plug-in."""


class SourceError(PackhouseError):
    """An input file cannot be read at all."""

    exit_code = 3


class EmptyDatasetError(SourceError):
    """Nothing is left to publish."""


class QuarantineLimitError(PackhouseError):
    """More rows are bad than the recipe allows."""

    exit_code = 4


class AuditError(PackhouseError):
    """What a dataset would teach is over the limits, or a golden conversation differs."""

    exit_code = 4


class TokenizerError(PackhouseError):
    """A tokenizer folder does not load or cannot be used."""

    exit_code = 3


class TemplateError(PackhouseError):
    """A template cannot be proven to mark what is trained."""

    exit_code = 4


class SequenceTooLongError(PackhouseError):
    """A record exceeds `seq_len` and the policy is `error`."""

    exit_code = 4


class ContractError(PackhouseError):
    """A table breaks its contract."""

    exit_code = 4


class EmptyRowError(ContractError):
    """A row without a token."""


class StoreError(PackhouseError):
    """The object store, or what lies in it, is not as it must be."""

    exit_code = 5


class VersionNotFoundError(StoreError):
    """No such dataset, version or ref."""


class IntegrityError(StoreError):
    """Bytes differ from the digest they were published with."""


class ConflictError(StoreError):
    """Someone else won a race, and what they wrote is not what we have."""


class StoreRefusedError(StoreError):
    """The store cannot guard a publication."""


class DiskError(PackhouseError):
    """A disk of this machine is full, out of inodes or read-only."""

    exit_code = 5


class TransientError(PackhouseError):
    """A hiccup of network or storage; the only kind that is retried."""

    exit_code = 6
