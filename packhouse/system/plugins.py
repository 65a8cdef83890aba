"""What not every install has: plug-ins of other packages, and packages that extras bring.

Plug-ins are row formats, renderers, packing strategies and checks. They are found by entry point:

    [project.entry-points."packhouse.row_formats"]   # in the pyproject.toml of `acme-data`
    faq = "acme_data:read_faq"

A recipe names it like a built-in one: `format: faq`. Nothing is imported until a step needs it;
the key of a step, and so the version's id, holds the distribution's name and version, which are
read without importing anything. docs/plugins.md shows one of each kind. A function of a notebook or
script goes in place of the name, as a `PluginFunction` with a version of its own.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.metadata import version as version_of
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
"""Renderers that packhouse ships: the library that each needs, and its class. An extra of the same
name installs the library."""


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
class PluginFunction:
    """A function that goes to `packhouse.prepare` in place of a plug-in's name.

    This process alone knows it: work with `workers=1`, or offer it by entry point.

    Example:
        >>> def in_order(lengths, seq_len, seed):
        ...     return [[record] for record in range(len(lengths))]
        >>> PluginFunction(in_order, version="1").name
        'in_order'
    """

    function: Callable[..., object]
    version: str
    """Part of the version's id: change it when what the function returns changes."""
    name: str = ""
    """Its name in the recipe and in messages; by default the function's own."""

    def __post_init__(self) -> None:
        if not callable(self.function) or not isinstance(self.version, str) or not self.version:
            raise ConfigError(
                "PluginFunction takes a function and a version, a text such as '1', which the id "
                f"of what is made with it holds; got {self.function!r:.60}, {self.version!r:.20}"
            )
        if not self.name:
            object.__setattr__(self, "name", getattr(self.function, "__name__", "function"))


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plug-in that is installed, of which nothing is imported yet, or that was given."""

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
            PluginError: it cannot be imported, or is no function.
        """
        if isinstance(self.entry, PluginFunction):
            return self.entry.function
        with self.named_in_errors():
            loaded = self.entry.load()
        if self.kind != "renderers" and not callable(loaded):
            raise PluginError(f"{self}: {self.entry.value} is no function")
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


_given: dict[tuple[Kind, str], Plugin] = {}
"""Functions that took the place of a name in this process."""


def find_plugin(kind: Kind, name: str, built_in: Sequence[str] = ()) -> Plugin:
    """Return a plug-in by its name: one that was given, else an installed one.

    Reads metadata and imports nothing.

    Args:
        kind: what it is.
        name: of the entry point.
        built_in: names that the message of an error lists beside those of plug-ins.

    Raises:
        ConfigError: there is none, two packages offer it, or its package has no version.
    """
    if (kind, name) in _given:
        return _given[kind, name]
    if kind == "renderers" and name in RENDERERS:
        return _shipped_renderer(name)
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


def _shipped_renderer(name: str) -> Plugin:
    library, value = RENDERERS[name]
    try:
        version = version_of(library)
    except PackageNotFoundError:
        raise ConfigError(
            f"renderer '{name}' needs {library}, which is not installed: {pip_install(name)}",
            name=name,
        ) from None
    return Plugin(
        "renderers", name, library, version, EntryPoint(name, value, "packhouse.renderers")
    )


def plugin_names(kind: Kind) -> list[str]:
    """Return the names of the plug-ins that installed packages offer."""
    return sorted(_names(kind))


def _installed(kind: Kind) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"packhouse.{kind}"))


def _names(kind: Kind) -> set[str]:
    return {entry.name for entry in _installed(kind)}


def plugin_key(kind: Kind, name: str, built_in: Sequence[str]) -> dict[str, object]:
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

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        """Check a name when a recipe is read; without an import of a plug-in."""
        name = core_schema.no_info_after_validator_function(self._check, core_schema.str_schema())
        return core_schema.no_info_before_validator_function(self._take, name)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: object
    ) -> dict[str, object]:
        """Return the schema of a form's field."""
        return {"type": "string"} | ({"enum": list(self.built_in)} if self.built_in else {})

    def _take(self, given: object) -> object:
        """Return a function's name, by which it is found from now on; anything else as it is."""
        if callable(given):
            message = "give its name, or `PluginFunction(function, version='1')`"
            raise PydanticCustomError("no_plugin", "{message}", {"message": message})
        if not isinstance(given, PluginFunction):
            return given
        if given.name in self.built_in:
            raise ConfigError(
                f"'{given.name}' is a built-in {_WHAT[self.kind]}; give yours another name: "
                "PluginFunction(..., name='mine')"
            )
        _given[self.kind, given.name] = Plugin(self.kind, given.name, "", given.version, given)
        return given.name

    def _check(self, name: str) -> str:
        if name in self.built_in or (self.kind, name) in _given:
            return name
        offered = [*self.built_in, *sorted(_names(self.kind) - {*self.built_in})]
        if name not in offered:
            if not offered:
                message = f"no package that is installed offers a {_WHAT[self.kind]}"
                raise PydanticCustomError("no_plugin", "{message}", {"message": message})
            expected = ", ".join(f"'{each}'" for each in offered)
            raise PydanticCustomError("literal_error", "unknown name", {"expected": expected})
        return name


NO_FILES = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    # Else what memory does not hold goes to `.tmp` in the working directory, up to 90% of the disk.
    "max_temp_directory_size": "0B",
}
"""Settings of a DuckDB connection; each use adds its own memory and threads."""


def hub_options() -> dict[str, Any]:
    """Return the endpoint and the token of the environment, as the Hub's client takes them.

    The token comes from `HF_TOKEN` only; `False` keeps the client from a login that lies on disk.
    """
    return {
        "endpoint": os.environ.get("HF_ENDPOINT"),
        "token": os.environ.get("HF_TOKEN") or False,
    }


def silent_bar() -> type:
    """Return the Hub client's progress bar, never shown: the run has one of its own."""
    tqdm: Any = import_module("tqdm.auto").tqdm  # which has no types

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        tqdm.__init__(self, *args, **{**kwargs, "disable": True})

    return type("Silent", (tqdm,), {"__init__": init})


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module that an extra of packhouse brings.

    Args:
        module: its name.
        extra: what to install: `packhouse[extra]`.
        what: who needs it, for the message.

    Raises:
        ConfigError: it is not installed; says how to install it.

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
    """Return the command that installs an extra of this packhouse, from where packhouse came.

    pip notes a checkout, a file or a repository in `direct_url.json`, and nothing for an index.
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
