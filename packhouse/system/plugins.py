"""Optional parts: plug-ins from other packages, and packages that extras install.

Plug-ins are row formats, renderers, packing strategies and checks. They are found by entry point:

    [project.entry-points."packhouse.row_formats"]   # in the pyproject.toml of `acme-data`
    faq = "acme_data:read_faq"

A recipe uses it like a built-in one: `format: faq`. It is imported only when a step needs it. The
name and version of its distribution are part of the step's key, and so of the version ID; they are
read without importing anything. docs/plugins.md has an example of each kind. In a notebook or
script, pass a function as a `PluginFunction` with a version.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import (
    EntryPoint,
    PackageNotFoundError,
    distribution,
    entry_points,
    version as version_of,
)
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from packhouse.errors import ConfigError, PackhouseError, PluginError

Kind = Literal["row_formats", "renderers", "packing_strategies", "checks"]
_WHAT: dict[Kind, str] = {
    "row_formats": "row format",
    "renderers": "renderer",
    "packing_strategies": "packing strategy",
    "checks": "check",
}

RENDERERS = {
    "harmony": ("openai-harmony", "packhouse.addons.renderers:Harmony"),
    "mistral": ("mistral-common", "packhouse.addons.renderers:Mistral"),
}
"""Built-in renderers: the library that each needs, and its class. The extra of the same name
installs the library."""


class BadRowError(Exception):
    """A row cannot become a conversation, and is quarantined.

    Args:
        reason: Reason code of lower-case letters, digits and `_`, such as `no_answer`.
        detail: Explanation for people, one sentence.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PluginFunction:
    """A function to pass to `packhouse.prepare` instead of the name of a plug-in.

    It exists only in this process, so use `workers=1`, or register it as an entry point.

    Example:
        >>> def in_order(lengths, seq_len, seed):
        ...     return [[record] for record in range(len(lengths))]
        >>> PluginFunction(in_order, version="1").name
        'in_order'
    """

    function: Callable[..., object]
    version: str
    """Part of the version ID. Change it when the function's results change."""
    name: str = ""
    """Name in the recipe and in messages; default: the function's name."""

    def __post_init__(self) -> None:
        if not callable(self.function) or not isinstance(self.version, str) or not self.version:
            raise ConfigError(
                "PluginFunction needs a function and a non-empty version string, which becomes "
                f"part of the version ID; got a {type(self.function).__name__} and a "
                f"{type(self.version).__name__}. Write PluginFunction(function, version='1')"
            )
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", "function"))


@dataclass(frozen=True, slots=True)
class Plugin:
    """An installed plug-in (not imported yet) or a `PluginFunction`."""

    kind: Kind
    name: str
    distribution: str
    """Empty for a `PluginFunction`."""
    version: str
    entry: EntryPoint | PluginFunction

    def __str__(self) -> str:
        owner = self.distribution or "your PluginFunction"
        return f"{_WHAT[self.kind]} '{self.name}' of {owner} {self.version}"

    def load(self) -> Any:
        """Import the function, or the object or class of a renderer.

        Raises:
            PluginError: It cannot be imported, or is not a function.
        """
        if isinstance(self.entry, PluginFunction):
            return self.entry.function
        with self.named_in_errors():
            loaded = self.entry.load()
        if self.kind != "renderers" and not callable(loaded):
            raise PluginError(f"{self}: {self.entry.value} is not a function. Fix its entry point")
        return loaded

    @contextmanager
    def named_in_errors(self, where: str = "") -> Iterator[None]:
        """Turn exceptions of the plug-in into a `PluginError` that names it; `where` is its input.

        Raises:
            PluginError: Its code raised anything but `BadRowError`.
        """
        try:
            yield
        except (BadRowError, PackhouseError, MemoryError):
            raise
        except Exception as error:  # third-party code may raise anything
            said = f"{type(error).__name__}: {error}"[:300]
            raise PluginError(f"{self} failed{where}: {said}", plugin=self.name) from error


_given: dict[tuple[Kind, str], Plugin] = {}
"""PluginFunctions that were passed in this process."""

# Reads the metadata of all installed packages, which took 14% of a process that uses plug-ins when
# each look-up did it. A package that is installed later is found by the next process.
installed = cache(entry_points)


def find_plugin(kind: Kind, name: str, built_in: Sequence[str] = ()) -> Plugin:
    """Return the plug-in of a name: a `PluginFunction`, or else an installed one.

    Reads only metadata and imports nothing.

    Args:
        kind: Kind of plug-in.
        name: Name of the entry point.
        built_in: Built-in names, to list in the error message.

    Raises:
        ConfigError: It does not exist, two packages provide it, or its package has no version.
    """
    # First, because whoever passes a function means that one.
    if (kind, name) in _given:
        return _given[kind, name]
    if kind == "renderers" and name in RENDERERS:
        library, value = RENDERERS[name]
        try:
            of_library = version_of(library)
        except PackageNotFoundError:
            raise ConfigError(
                f"renderer '{name}' needs {library}, which is not installed: {pip_install(name)}",
                name=name,
            ) from None
        entry_point = EntryPoint(name, value, "packhouse.renderers")
        return Plugin(kind, name, library, of_library, entry_point)
    found = installed().select(group=f"packhouse.{kind}", name=name)
    owners = {str(entry.dist.name): entry for entry in found if entry.dist is not None}
    if not owners:
        known = ", ".join([*built_in, *plugin_names(kind)]) or "none"
        raise ConfigError(f"unknown {_WHAT[kind]} '{name}'. Known: {known}", name=name)
    # Which of them is found first depends on the order of folders in `sys.path`.
    if len(owners) > 1:
        raise ConfigError(
            f"{_WHAT[kind]} '{name}' is provided by {' and '.join(sorted(owners))}. Uninstall all "
            "but one"
        )
    ((distribution, entry),) = owners.items()
    assert entry.dist is not None, "owners have one"
    facts = entry.dist.metadata
    version = facts["Version"] if "Version" in facts else None  # `.get` may raise KeyError
    if not version:
        raise ConfigError(
            f"{_WHAT[kind]} '{name}': its package {distribution} has no version, which must be "
            "part of the version ID. Add one"
        )
    return Plugin(kind, name, distribution, str(version), entry)


def plugin_names(kind: Kind) -> list[str]:
    """Return the names of the plug-ins of installed packages."""
    return sorted(installed().select(group=f"packhouse.{kind}").names)


def plugin_key(kind: Kind, name: str, built_in: Sequence[str]) -> dict[str, object]:
    """Return a plug-in's part of a step's key; empty for a built-in name.

    Raises:
        ConfigError: The plug-in is not available; see `find_plugin`.

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
    """Annotation of a recipe field that accepts built-in names and names of plug-ins.

    A built-in name always means the built-in one, even if a plug-in has the same name. Forms show
    only the built-in names.
    """

    kind: Kind
    built_in: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        """Check the name when a recipe is read, without importing the plug-in."""
        name = core_schema.no_info_after_validator_function(self._check, core_schema.str_schema())
        return core_schema.no_info_before_validator_function(self._take, name)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: object
    ) -> dict[str, object]:
        """Return the schema for run forms."""
        return {"type": "string"} | ({"enum": list(self.built_in)} if self.built_in else {})

    def _take(self, given: object) -> object:
        """Register a `PluginFunction` and return its name; return other values unchanged."""
        if callable(given):
            message = "is a function. Pass a name, or PluginFunction(function, version='1')"
            raise PydanticCustomError("no_plugin", "{message}", {"message": message})
        if not isinstance(given, PluginFunction):
            return given
        if given.name in self.built_in:
            raise ConfigError(
                f"'{given.name}' is a built-in {_WHAT[self.kind]}. Choose another name: "
                "PluginFunction(..., name='mine')"
            )
        _given[self.kind, given.name] = Plugin(self.kind, given.name, "", given.version, given)
        return given.name

    def _check(self, name: str) -> str:
        if name in self.built_in or (self.kind, name) in _given:
            return name
        offered = list(dict.fromkeys([*self.built_in, *plugin_names(self.kind)]))
        if name not in offered:
            if not offered:
                message = f"no installed package provides a {_WHAT[self.kind]}"
                raise PydanticCustomError("no_plugin", "{message}", {"message": message})
            expected = ", ".join(f"'{each}'" for each in offered)
            raise PydanticCustomError("literal_error", "unknown name", {"expected": expected})
        return name


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of packhouse installs.

    Args:
        module: Name of the module.
        extra: Name of the extra: `packhouse[extra]`.
        what: The feature that needs it, for the message.

    Raises:
        ConfigError: It is not installed; the message has the command to install it.

    Example:
        >>> import_extra("no_such_module", "s3", "s3://")
        Traceback (most recent call last):
        packhouse.errors.ConfigError: s3:// needs no_such_module, which is not installed: pip ...
    """
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which is not installed: {pip_install(extra)}"
        ) from None


def pip_install(extra: str) -> str:
    """Return the command that installs an extra from the origin of the installed packhouse.

    pip records a checkout, a file or a repository in `direct_url.json`; for an index, nothing.
    """
    try:
        origin = json.loads(distribution("packhouse").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        folder = unquote(urlsplit(url).path)
        return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'packhouse[{extra}]{url and ' @ '}{url}'"
