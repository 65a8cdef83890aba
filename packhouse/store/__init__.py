"""Versions on object storage: immutable, committed by one write, named by refs.

Readers never list objects: ref -> manifest -> files. A version exists as soon as its commit slot
(`manifest.json`) is written, even if other publishers are still at work. See
`packhouse.store.commit` for the order of writes, and `packhouse.store.store_requests` for how the
same code is run and simulated.
"""

from packhouse.store.commit import LocalFile, PublishedVersion, publish_version
from packhouse.store.manifest import FileEntry, Manifest
from packhouse.store.object_store import ObjectStore, open_filesystem, open_store
from packhouse.store.refs import Ref, load_ref, rollback_ref, set_ref
from packhouse.store.schema_drift import Drift
from packhouse.store.version_reader import (
    OpenVersion,
    VerifyReport,
    open_version,
    pull_version,
    verify_version,
)

__all__ = [
    "Drift",
    "FileEntry",
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
