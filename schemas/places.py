"""Limit the places that a run form can name to those its worker allows.

Anyone who can start a run fills in a form, and the worker reads and writes with the rights of its
service. So the worker resolves every place in a recipe with a file of its operator,
`deployments/sources.yaml`:

    sources:            # names for the form: `path: demo-chats`
      demo-chats: demo/chats.jsonl
    tokenizers: {demo: demo/tokenizer}
    stores: {main: s3://bucket/versions}
    files: {}           # golden conversations, Jinja templates
    recipes: {demo: demo/recipe.yaml}   # names for `refresh` and `backfill`
    secrets: {AWS_SECRET_ACCESS_KEY: store-key}   # environment variable -> Secret block
    allow:
      read: [s3://raw/instructions/]    # prefixes that can be read
      write: []                         # prefixes where versions can be published

A name is replaced by its place. Any other place must be inside an allowed prefix, after `..` and
links are resolved. Credentials are refused everywhere. `${PACKHOUSE_X:-default}` is read from the
environment. Recipe files of the deployment are written by the operator, so they are not checked.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from packhouse.errors import ConfigError
from packhouse.recipe import Recipe, SourceConfig
from packhouse.recipe.recipe_file import expand_variables, tokenizer_at
from packhouse.recipe.sections import Uri

Place = Annotated[str, StringConstraints(min_length=1)]

StorePlace = Annotated[Uri, Field(min_length=1)]
"""Root of a store of versions: a name from sources.yaml, a folder or `s3://bucket/prefix`."""

RecipeName = Annotated[Uri, Field(min_length=1)]
"""Name of a recipe in sources.yaml; a path or address must not contain credentials."""

_TEMPLATES = (".jinja", ".j2")


class _Allowed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    read: list[Place] = []
    write: list[Place] = []


class AllowedPaths(BaseModel):
    """Named places, and prefixes inside which other places are allowed.

    Example:
        >>> places = AllowedPaths(sources={"chats": "/data/chats.jsonl"}, allow={"read": ["s3://raw/"]})
        >>> places.source("chats"), places.source("s3://raw/a.jsonl")
        ('/data/chats.jsonl', 's3://raw/a.jsonl')
        >>> places.source("/etc/passwd")
        Traceback (most recent call last):
        ...
        packhouse.errors.ConfigError: source '/etc/passwd' is not listed in the worker's ...
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    sources: dict[str, Place] = {}
    tokenizers: dict[str, Place] = {}
    stores: dict[str, Place] = {}
    files: dict[str, Place] = {}
    recipes: dict[str, Place] = {}
    """Recipes of this deployment, which `refresh` and `backfill` run by name."""
    secrets: dict[str, str] = {}
    """Environment variable -> name of the Secret block with its value."""
    allow: _Allowed = _Allowed()

    def source(self, place: str) -> str:
        """Return the place of a source."""
        return self._resolve("source", place, self.sources, self.allow.read)

    def tokenizer(self, place: str) -> str:
        """Return the folder of a tokenizer."""
        folder = self._resolve("tokenizer", place, self.tokenizers, self.allow.read)
        # A version keeps the files of its tokenizer, so a link would publish what it leads to.
        if place not in self.tokenizers and "://" not in folder and Path(folder).is_dir():
            for file in Path(folder).iterdir():
                if not any(_lies_below(str(file), prefix) for prefix in self.allow.read):
                    raise ConfigError(
                        f"tokenizer '{place}' contains the link '{file.name}', which leads outside "
                        "the allowed prefixes. Replace it with the file itself",
                        place=place,
                    )
        return folder

    def file(self, place: str) -> str:
        """Return the place of a template or of a file of golden conversations."""
        return self._resolve("file", place, self.files, self.allow.read)

    def store(self, place: str) -> str:
        """Return the root of a store of versions."""
        return self._resolve("store", place, self.stores, self.allow.write)

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with every place resolved.

        Raises:
            ConfigError: a place is neither listed nor allowed, or contains credentials.
        """
        benchmarks = [self._source(source) for source in recipe.audit.benchmarks]
        template = recipe.format.template
        if template.endswith(_TEMPLATES) or template in self.files:
            template = self.file(template)
        update: dict[str, object] = {
            "sources": [self._source(source) for source in recipe.sources],
            "tokenizer": self.tokenizer(recipe.tokenizer),
            "audit": recipe.audit.model_copy(update={"benchmarks": benchmarks}),
            "format": recipe.format.model_copy(update={"template": template}),
            "golden": None if recipe.golden is None else self.file(recipe.golden),
        }
        also = [self._resolve("mirror", uri, {}, self.allow.write) for uri in recipe.publish.also]
        publish = {"store": self.store(recipe.publish.store), "also": also}
        update["publish"] = recipe.publish.model_copy(update=publish)
        return recipe.model_copy(update=update)

    def _source(self, source: SourceConfig) -> SourceConfig:
        name = source.name
        if name is None and source.path in self.sources:
            name = source.path  # so that the lineage shows the name chosen in the form
        return source.model_copy(update={"path": self.source(source.path), "name": name})

    def _resolve(self, what: str, place: str, names: Mapping[str, str], allowed: list[str]) -> str:
        refuse_credentials(place, what)
        if place in names:
            return names[place]
        if any(_lies_below(place, prefix) for prefix in allowed):
            return _resolved(place)
        known = ", ".join(sorted(names)) or "none"
        prefixes = ", ".join(dict.fromkeys(allowed)) or "none"
        raise ConfigError(
            f"{what} '{place}' is not listed in the worker's sources.yaml (known: {known}) and is "
            f"outside the allowed prefixes ({prefixes}). Choose a known one, or add it there",
            place=place,
        )


def load_places(path: Path) -> AllowedPaths:
    """Read a file of places; relative ones are relative to the file's folder.

    Raises:
        ConfigError: the file does not exist, or has another form.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        places = AllowedPaths.model_validate(expand_variables(raw))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"'{path}' cannot be read: {error}. A worker needs this file to know its allowed "
            "paths (PACKHOUSE_SOURCES, or else deployments/sources.yaml)"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"'{path}': '{key}': {first['msg']}") from None
    return _anchored(places, path.parent.absolute())


def _anchored(places: AllowedPaths, folder: Path) -> AllowedPaths:
    def at(place: str) -> str:
        return place if "://" in place else os.path.normpath(folder / Path(place).expanduser())

    kinds = ("sources", "tokenizers", "stores", "files", "recipes")
    named = {kind: {n: at(p) for n, p in getattr(places, kind).items()} for kind in kinds}
    named["tokenizers"] = {n: tokenizer_at(p, folder) for n, p in places.tokenizers.items()}
    allow = _Allowed(
        read=[at(p) for p in places.allow.read], write=[at(p) for p in places.allow.write]
    )
    return places.model_copy(update={**named, "allow": allow})


def _lies_below(place: str, prefix: str) -> bool:
    """Return True if a place is a prefix or inside of it, with links and `..` resolved.

    Example:
        >>> _lies_below("s3://raw/a/b", "s3://raw/a"), _lies_below("s3://raw/ab", "s3://raw/a")
        (True, False)
        >>> _lies_below("s3://raw/a/../b", "s3://raw/a"), _lies_below("/data/../etc", "/data")
        (False, False)
    """
    if "\0" in place:
        return False
    if "://" in place and not place.startswith("file://"):
        plain = place
        # `%252e%252e` decodes to `%2e%2e`, and that to `..`.
        while (decoded := unquote(plain)) != plain:
            plain = decoded
        parts = plain.split("/")[2:]
        if "\\" in plain or "\0" in plain or "::" in plain or {".", ".."} & set(parts):
            return False
        return f"{place.rstrip('/')}/".startswith(f"{prefix.rstrip('/')}/")
    path = place.removeprefix("file://")
    if "://" in prefix or path.startswith("~"):
        return False
    # A plain name may contain `[x]`, and a link with such a name is followed too. What a glob finds
    # is inside its last folder without magic: /a/b*/c -> /a.
    fixed, magic, _ = re.split(r"([*?\[]|$)", path, maxsplit=1)
    if magic:
        fixed = fixed.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
        if ".." in Path(path[len(fixed) :]).parts:
            return False
    root = os.path.realpath(prefix)
    found = (os.path.realpath(path), os.path.realpath(fixed))
    return all(at == root or at.startswith(root.rstrip("/") + "/") for at in found)


def _resolved(place: str) -> str:
    """Return the resolved path that was checked, since a link may change after the check.

    Globs are returned unchanged, and so are links as the last part: their name names the source.
    """
    path = Path(place.removeprefix("file://"))
    if ("://" in place and not place.startswith("file://")) or re.search(r"[*?\[]", place):
        return place
    found = path.resolve()
    return str(found) if found.name == path.name else place


_CREDENTIALS = re.compile(
    r"://[^/?#]*@"
    r"|://[^/?#:]*:(?![0-9]*(?:[/?#]|$))"  # a password with a slash in it
    r"|[?&;#](x-amz-(signature|credential|security-token)|awsaccesskeyid|signature|sig|token"
    r"|access_?key(_?id)?|secret(_?access)?(_?key)?|password|key|secret)="
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{30,}",
    re.IGNORECASE,
)


def refuse_credentials(place: str, what: str = "place") -> None:
    """Refuse a place with a password, key or signature; the message does not repeat it.

    Raises:
        ConfigError: the place contains a credential.

    Example:
        >>> refuse_credentials("s3://key:secret@bucket/rows.jsonl", "source")
        Traceback (most recent call last):
        ...
        packhouse.errors.ConfigError: a source contains a credential. Remove it, and pass it to ...
    """
    if _CREDENTIALS.search(place):
        raise ConfigError(
            f"a {what} contains a credential. Remove it, and pass it to the worker as an "
            "environment variable or a Secret block"
        )
