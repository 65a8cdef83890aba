"""Versions on object storage: immutable, committed by one write, named by refs.

Readers never list: ref -> manifest -> files. Writers are told apart from the dead by the commit
slot alone. See `packhouse.store.publish` for the protocol and `packhouse.store.steps` for how one
text of it is both run and simulated.
"""

from packhouse.store.draft import LocalFile
from packhouse.store.evolution import Drift, Gate
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.objects import ObjectStore, open_filesystem, open_store
from packhouse.store.publish import PublishedVersion, find_version, publish_version
from packhouse.store.read import (
    OpenVersion,
    VerifyReport,
    open_version,
    pull_version,
    verify_version,
)
from packhouse.store.refs import Ref, list_refs, load_ref, rollback_ref, set_ref

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
    "find_version",
    "list_refs",
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
