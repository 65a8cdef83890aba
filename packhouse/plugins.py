"""Plug-ins: row formats, packing strategies and checks of other packages, found by entry point.

    [project.entry-points."packhouse.row_formats"]   # in the pyproject.toml of `acme-data`
    faq = "acme_data:read_faq"

A recipe names it like a built-in one: `format: faq`. Nothing is imported until a step needs it;
the key of a step, and so the version's id, holds the distribution's name and version, which are
read without importing anything. docs/plugins.md shows one of each kind.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from packhouse.errors import ConfigError, PackhouseError, PluginError

__all__ = ["BadRowError", "Kind", "NameOf", "Plugin", "find_plugin", "plugin_key"]

Kind = Literal["row_formats", "packing_strategies", "checks"]
_WHAT: dict[Kind, str] = {
    "row_formats": "row format",
    "packing_strategies": "packing strategy",
    "checks": "check",
}


class BadRowError(Exception):
    """A row cannot become a conversation; it goes to quarantine.

    Args:
        reason: a code: lower-case letters, digits and `_`, such as `no_answer`.
        detail: a sentence for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in that is installed; nothing of it is imported yet."""

    kind: Kind
    name: str
    distribution: str
    version: str
    entry: EntryPoint

    def __str__(self) -> str:
        return f"{_WHAT[self.kind]} '{self.name}' of {self.distribution} {self.version}"

    def load(self) -> Callable[..., Any]:
        """Import the function.

        Raises:
            PluginError: it cannot be imported, or is no function.
        """
        with self.named_in_errors():
            function = self.entry.load()
        if not callable(function):
            raise PluginError(f"{self}: {self.entry.value} is no function")
        loaded: Callable[..., Any] = function
        return loaded

    @contextmanager
    def named_in_errors(self, where: str = "") -> Iterator[None]:
        """Name the plug-in in whatever its code raises; `where` says what it was given.

        Raises:
            PluginError: its code raised anything but `BadRowError`.
        """
        try:
            yield
        except (BadRowError, PackhouseError, MemoryError):
            raise
        except Exception as error:  # code of others may raise anything
            said = f"{type(error).__name__}: {error}"[:300]
            raise PluginError(f"{self} failed{where}: {said}", plugin=self.name) from error


def find_plugin(kind: Kind, name: str, built_in: Sequence[str] = ()) -> Plugin:
    """Return an installed plug-in by its name; reads metadata and imports nothing.

    Args:
        kind: what it is.
        name: of the entry point.
        built_in: names that the message of an error lists beside those of plug-ins.

    Raises:
        ConfigError: there is none, two packages offer it, or its package has no version.
    """
    found = [entry for entry in _installed(kind) if entry.name == name]
    owners = {str(entry.dist.name): entry for entry in found if entry.dist is not None}
    if not owners:
        known = ", ".join([*built_in, *sorted(_names(kind))]) or "none"
        raise ConfigError(f"no {_WHAT[kind]} '{name}'; known: {known}", name=name)
    if len(owners) > 1:
        raise ConfigError(
            f"{_WHAT[kind]} '{name}' is offered by {' and '.join(sorted(owners))}; keep one of them"
        )
    ((distribution, entry),) = owners.items()
    assert entry.dist is not None, "owners have one"
    facts = entry.dist.metadata
    version = facts["Version"] if "Version" in facts else None  # one without it may raise KeyError
    if not version:
        raise ConfigError(
            f"{_WHAT[kind]} '{name}': its package {distribution} has no version, which the id of "
            "what is made with it must hold; give it one"
        )
    return Plugin(kind, name, distribution, str(version), entry)


def _installed(kind: Kind) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"packhouse.{kind}"))


def _names(kind: Kind) -> set[str]:
    return {entry.name for entry in _installed(kind)}


def plugin_key(kind: Kind, name: str, built_in: Sequence[str]) -> dict[str, Any]:
    """Return what of a plug-in goes into a step's key; empty for a built-in name.

    Raises:
        ConfigError: see `find_plugin`.

    Example:
        >>> plugin_key("packing_strategies", "best_fit", ["best_fit"])
        {}
    """
    if name in built_in:
        return {}
    plugin = find_plugin(kind, name, built_in)
    return {"plugin": {plugin.name: [plugin.distribution, plugin.version]}}


@dataclass(frozen=True, slots=True)
class NameOf:
    """Annotation of a recipe's field that takes built-in names, and those of plug-ins.

    A built-in name is always the built-in thing: a plug-in of that name is never looked for. Forms
    offer the built-in ones alone.
    """

    kind: Kind
    built_in: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Check a name when a recipe is read; without an import of a plug-in."""
        return core_schema.no_info_after_validator_function(self._check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the schema of a form's field."""
        return {"type": "string"} | ({"enum": list(self.built_in)} if self.built_in else {})

    def _check(self, name: str) -> str:
        if name in self.built_in:
            return name
        offered = [*self.built_in, *sorted(_names(self.kind) - {*self.built_in})]
        if name not in offered:
            if not offered:
                message = f"no package that is installed offers a {_WHAT[self.kind]}"
                raise PydanticCustomError("no_plugin", "{message}", {"message": message})
            expected = ", ".join(f"'{each}'" for each in offered)
            raise PydanticCustomError("literal_error", "unknown name", {"expected": expected})
        return name
