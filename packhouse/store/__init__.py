"""Versions on object storage: immutable, committed by one write, named by refs.

Readers never list objects: ref -> manifest -> files. A version exists as soon as its commit slot
(`manifest.json`) is written, even if other publishers are still at work. See
`packhouse.store.commit` for the order of writes, and `packhouse.store.store_requests` for how the
same code is run and simulated.
"""

from packhouse.store.commit import LocalFile as LocalFile, publish_version as publish_version
from packhouse.store.manifest import FileEntry as FileEntry
from packhouse.store.object_store import open_store as open_store
from packhouse.store.refs import (
    Ref as Ref,
    load_ref as load_ref,
    rollback_ref as rollback_ref,
    set_ref as set_ref,
)
from packhouse.store.version_reader import (
    OpenVersion as OpenVersion,
    VerifyReport as VerifyReport,
    open_version as open_version,
    pull_version as pull_version,
    verify_version as verify_version,
)
