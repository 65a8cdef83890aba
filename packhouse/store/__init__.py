"""Versions on object storage: immutable, committed by one write, named by refs.

Readers never list: ref -> manifest -> files. A version is there once its commit slot holds a
manifest, whoever else is still writing. `packhouse.store.publish` says in which order things are
written, and `packhouse.store.protocol` how the same code is run and simulated.
"""

from packhouse.store.evolution import Drift, Gate
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.objects import ObjectStore, open_filesystem, open_store
from packhouse.store.publish import LocalFile, PublishedVersion, publish_version
from packhouse.store.read import (
    OpenVersion,
    VerifyReport,
    open_version,
    pull_version,
    verify_version,
)
from packhouse.store.refs import Ref, load_ref, rollback_ref, set_ref

__all__ = [
    "Drift",
    "FileEntry",
    "Gate",
    "LocalFile",
    "Manifest",
    "ObjectStore",
    "OpenVersion",
    "PublishedVersion",
    "Ref",
    "VerifyReport",
    "load_ref",
    "open_filesystem",
    "open_store",
    "open_version",
    "publish_version",
    "pull_version",
    "rollback_ref",
    "set_ref",
    "verify_version",
]
