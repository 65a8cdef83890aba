"""Copy versions to the Hugging Face Hub or Weights & Biases, and share cached steps in a store.

The version in the store remains the original; `copy_version` makes the copies listed in
`publish.also`.

On the Hub, a version is one commit that adds its data files, card and manifest and deletes the data
files of the previous version. The commit names its parent (`parent_commit`), so readers see all of
it or nothing, and concurrent copies cannot mix. Quarantined rows and lineage records stay in the
store. Token and endpoint come from the HF environment.

On W&B, a version is an artifact of type `dataset` with the manifest, the address of the version and
the first records of each split as text. The data files are included only on request:
`artifact.download()` then writes what `packhouse pull` writes. `WANDB_MODE=offline` works.

`StepMirror` shares cached steps between machines without a common disk. Do not use it if they have
one: point them to the same cache folder instead.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from packhouse.errors import (
    ConfigError,
    ConflictError,
    IntegrityError,
    PackhouseError,
    StoreError,
    TransientError,
)
from packhouse.pack.pack_columns import trained_tokens
from packhouse.recipe import Recipe
from packhouse.records.arrays import flat_list
from packhouse.run.step_cache import LOCK, AnyReceipt, StepStore, is_intact, parse_receipt
from packhouse.store.object_keys import version_folder
from packhouse.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    file_body,
    open_store,
)
from packhouse.store.store_requests import RetryPolicy, ask, download, run
from packhouse.store.version_reader import OpenVersion, read_batches
from packhouse.system.disks import temporary_folder
from packhouse.system.plugins import import_extra
from packhouse.tokenize import load_snapshot, run_tokenizer
from packhouse.tokenize.encoders import decode

MIRRORED_KINDS = ("data", "card")
"""Kinds of files that may leave the store; others may contain raw rows."""

_MAX_TRIES = 5
# Their errors pass through huggingface_hub if the Hub does not answer. They are worth another try.
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2")  # of the Hub's client


def mirror_to_hub(opened: OpenVersion, uri: str) -> str:
    """Commit this version to a dataset repository, creating a private one if needed.

    Repeating it has no effect: a repository with this version gets no commit.

    Returns:
        ID of the commit with the version.

    Raises:
        ConflictError: others keep committing to the repository.
        StoreError: the Hub refused it: no token or no permission.
        TransientError: the Hub cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    repo, api = uri.removeprefix("hf://datasets/"), HfApi()  # the recipe admits no other form
    with _translated(uri), temporary_folder("hub") as folder:
        api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        wanted = [entry for entry in opened.manifest.files if entry.kind in MIRRORED_KINDS]
        files = {entry.path: opened.fetch(entry, folder / entry.path) for entry in wanted}
        files["manifest.json"] = folder / "manifest.json"
        files["manifest.json"].write_bytes(opened.manifest.to_bytes())
        for _ in range(_MAX_TRIES):
            info = api.dataset_info(repo)
            present = {each.rfilename for each in info.siblings or ()}
            old = {path for path in present if path.startswith("data/")}
            data = {path for path in files if path.startswith("data/")}
            # Data files are named by content, so equal names mean equal files.
            if data == old and "manifest.json" in present:
                return str(info.sha)
            added = [
                CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(file))
                for path, file in sorted(files.items())
                if path not in old
            ]
            deleted = [CommitOperationDelete(path_in_repo=path) for path in sorted(old - data)]
            message = f"{opened.dataset} {opened.version}"
            commit = partial(api.create_commit, repo_type="dataset", commit_message=message)
            try:
                # `parent_commit`, because another copy in between would leave data files of both
                # versions.
                committed = commit(repo, [*added, *deleted], parent_commit=info.sha)
            except HfHubHTTPError as error:
                # 409 and 412: `parent_commit` is no longer the latest commit.
                if error.response is None or error.response.status_code not in (409, 412):
                    raise
                continue  # someone committed in the meantime
            return str(committed.oid)
    raise ConflictError(f"other commits to {uri} interfered {_MAX_TRIES} times. Try again later.")


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Convert errors of the Hub's client."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        yield
    except Exception as raised:
        # Uploads of large files fail in threads, with the original error as the cause.
        is_wrapped = type(raised) is RuntimeError and raised.__cause__ is not None
        error = raised.__cause__ if is_wrapped else raised
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code if error.response is not None else 0
            if status == 429 or status >= 500:
                raise TransientError(f"{uri}: the Hub returned status {status}") from error
            raise StoreError(
                f"{uri}: the Hub denied access ({status}). Check HF_TOKEN and its permissions."
            ) from error
        if isinstance(error, LocalTokenNotFoundError):
            raise ConfigError(f"{uri}: no Hub token. Set HF_TOKEN or log in.") from error
        if type(error).__module__.partition(".")[0] in _CLIENTS:
            raise TransientError(f"{uri}: {error}") from error
        if isinstance(error, ConnectionError):  # hf_xet raises it for everything
            raise TransientError(
                f"{uri}: {error}. If the Hub or a proxy does not support Xet storage, set "
                "HF_HUB_DISABLE_XET=1."
            ) from error
        raise


COLUMNS = ["record_id", "text", "trained_text", "num_tokens", "num_trained"]

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text, such as a tokenizer's `decode`."""


def log_to_wandb(
    opened: OpenVersion, project: str, *, decode: Decode, num_rows: int = 200, files: bool = False
) -> dict[str, Any]:
    """Log a version as an artifact, with one table per split.

    Args:
        opened: the version.
        project: W&B project; entity, mode and key come from W&B's environment.
        decode: token ids -> text.
        num_rows: number of records per table, from the start of the split.
        files: also add the packed files and the card.

    Returns:
        Name of the artifact, folder of the run, and rows of each table.

    Raises:
        ConfigError: wandb is not installed, or has no account.
        TransientError: W&B cannot be reached.
    """
    wandb = import_extra("wandb", "wandb", "wandb://")
    manifest = opened.manifest
    tables = {
        split: [list(row) for row in islice(text_rows(opened, split, decode), num_rows)]
        for split in manifest.splits()
    }
    described = {  # where the version is, what it holds, and how it was made
        "uri": f"{opened.store.uri}/{version_folder(opened.dataset, opened.version)}",
        "version": opened.version,
        "manifest_id": manifest.manifest_id,
        "content_id": manifest.content_id,
        "packs": sum(entry.rows for entry in opened.files()),
        "tokens": sum(entry.tokens for entry in opened.files()),
        "configuration": dict(manifest.configuration),
        "lineage": dict(manifest.lineage),
    }
    artifact = wandb.Artifact(opened.dataset, type="dataset", metadata=described)
    for split, rows in tables.items():
        artifact.add(wandb.Table(columns=COLUMNS, data=rows), split)
    with artifact.new_file("manifest.json", mode="wb") as file:
        file.write(manifest.to_bytes())
    if files:  # one file at a time: W&B copies each to its staging folder
        with temporary_folder("wandb") as scratch:
            for entry in [*opened.files("data"), *opened.files("card")]:
                path = opened.fetch(entry, scratch / entry.path)
                artifact.add_file(str(path), name=entry.path)
                path.unlink()
    errors = wandb.errors
    try:
        with wandb.init(project=project, job_type="publish") as run:
            run.log_artifact(artifact, aliases=["latest", opened.version])
            folder = run.dir
    except (errors.UsageError, errors.AuthenticationError) as error:
        raise ConfigError(
            f"wandb://{project}: {error} Or set WANDB_API_KEY, or WANDB_MODE=offline"
        ) from error
    except errors.Error as error:
        raise TransientError(f"wandb://{project}: {error}") from error
    counts = {split: len(rows) for split, rows in tables.items()}
    return {"artifact": opened.dataset, "folder": folder, "rows": counts}


def text_rows(
    opened: OpenVersion, split: str, decode: Decode
) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield the records of a split as text, in published order; see `COLUMNS`."""
    with temporary_folder("wandb") as folder:
        for entry in opened.files("data", split):
            path = opened.fetch(entry, folder / entry.key)
            for batch in read_batches(path):
                ids, offsets = flat_list(batch["input_ids"])
                mask = trained_tokens(batch, offsets)
                # Lengths [3 2] end at [3 5]: the records are tokens [0, 3) and [3, 5) of the batch.
                ends = np.cumsum(flat_list(batch["seq_lengths"])[0]).tolist()
                names = batch["record_ids"].flatten().to_pylist()
                for record_id, start, end in zip(names, [0, *ends], ends, strict=False):
                    own, is_trained = ids[start:end], mask[start:end]
                    text, trained = decode(own.tolist()), decode(own[is_trained].tolist())
                    yield record_id, text, trained, len(own), int(is_trained.sum())


def copy_version(opened: OpenVersion, uri: str, recipe: Recipe) -> str:
    """Bring a version to `hf://datasets/ORG/NAME` or `wandb://PROJECT`; return its name there.

    The Hub gets one commit, and none if it holds the version already; W&B gets a run with an
    artifact each time, whose equal contents it stores once.

    Raises:
        ConfigError: W&B is not installed.
        StoreError: the target refused.
        TransientError: the target cannot be reached.
    """
    if uri.startswith("hf://"):
        return mirror_to_hub(opened, uri)
    assert uri.startswith("wandb://"), uri  # the recipe admits no other
    load = partial(load_snapshot, recipe.tokenizer, pipeline=recipe.tokenize.pipeline)

    def as_text(ids: Sequence[int]) -> str:
        return str(run_tokenizer(partial(decode, load, [ids]), recipe.tokenizer)[0])

    project, _, files = uri.removeprefix("wandb://").partition("?")
    return str(log_to_wandb(opened, project, decode=as_text, files=bool(files))["artifact"])


_RECEIPT = "receipt.json"
# Keep retries short, because a mirror only saves time. Its notes report what it skipped.
_RETRY = RetryPolicy(deadline_s=2, is_logged=False)
_READ_TIMEOUT_S = 10
_THREADS = 8
_FAILURES = (StoreError, TransientError, ConfigError)  # ConfigError: missing credentials


@dataclass(kw_only=True)
class StepMirror:
    """Mirror of finished steps in an object store, which supplements the local step store.

    Layout of the mirror:

    ```
    <mirror>/<step>/<key>/tokenized.arrow ...   files of the step, create-only
    <mirror>/<step>/<key>/receipt.json          written last: without it, the step does not exist
    ```

    Before a step, missing results are fetched; after it, new results are written. Fetched steps are
    verified like local ones: the digest of the receipt, and the size and sha256 of each file.
    Nothing is ever unpickled. Anyone with write access could still store wrong results with valid
    digests, so give untrusted runs read-only credentials. Nothing is ever deleted from a mirror;
    use a lifecycle rule of the bucket to expire objects.

    A mirror only saves time, so no run fails because of it. After the first failure (no answer
    within 2 seconds of retries, no such bucket, access denied), the run continues without it.
    Without write access, a mirror is still read. `notes` reports each of these once. The cost is
    one request for each step that is not in the local store, and one transfer of each step's files.
    """

    store: ObjectStore
    steps: StepStore
    notes: list[str] = field(default_factory=list)
    """Problems with the mirror; each of them only costs time."""
    fetched: list[str] = field(default_factory=list)
    """Steps fetched from the mirror, as `step/key`."""
    is_used: bool = True
    """False after a failure: the mirror is neither read nor written any more."""
    is_written: bool = True
    """False after the mirror rejected a write."""
    _lock: Lock = field(default_factory=Lock, repr=False)

    def fetch(self, step: str, key: str) -> bool:
        """Fetch a step if the mirror has all of it; return True if it is now in the local cache.

        Raises:
            DiskError: the local cache cannot store it.
        """
        if self.steps.peek(step, key) is not None:
            return True
        if not self.is_used:
            return False
        try:
            with self.steps.work_folder("mirror") as work:
                return self._fetch(step, key, work)
        except (IntegrityError, ObjectNotFoundError) as error:  # affects this step only
            self.notes.append(f"{step}/{key[:12]} was not read from the mirror: {error}")
        except _FAILURES as error:
            self._stop_using(error)
        return False

    def holding(self, steps: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of the (step, key) pairs the mirror has; one request each."""
        asked = list(steps)
        with ThreadPoolExecutor(_THREADS, "packhouse-mirror") as pool:
            return {*compress(asked, pool.map(self._holds, asked))}

    def _holds(self, step: tuple[str, str]) -> bool:
        try:
            return self.is_used and self._has("/".join((*step, _RECEIPT)))
        except _FAILURES as error:
            self._stop_using(error)
            return False

    def write(self, receipt: AnyReceipt) -> None:
        """Write a step to the mirror, its receipt last, unless the mirror already has it."""
        folder = f"{receipt.step}/{receipt.key}"
        try:
            if not self.is_used or not self.is_written or self._has(f"{folder}/{_RECEIPT}"):
                return
            for name in (*sorted(receipt.files), _RECEIPT):
                body = file_body(receipt.path(name))
                steps = ask(ObjectStore.put_create, f"{folder}/{name}", body)
                with suppress(PreconditionFailedError):  # equal keys have equal content
                    run(self.store, steps, retry=_RETRY)
        # Without this, the first write ended a job that may only read the mirror, with exit code 5.
        except StoreError as error:  # a read-only key, as untrusted jobs have
            with self._lock:
                if self.is_written and self.is_used:
                    self.is_written = False
                    self.notes.append(
                        f"this run no longer writes to the step mirror: {error}. To share its "
                        "steps, use credentials with write access."
                    )
        except _FAILURES as error:
            self._stop_using(error)

    def _stop_using(self, error: PackhouseError) -> None:
        """Stop using the mirror, with a single note even if 8 threads fail at once."""
        with self._lock:
            if self.is_used:
                self.is_used = False
                self.notes.append(
                    "the step mirror failed, so the rest of this run computes its steps "
                    f"here: {error}. Check the mirror with `packhouse doctor cache`. To run "
                    "without it, unset PACKHOUSE_CACHE_MIRROR or pass a folder to --cache."
                )

    @contextmanager
    def sharing(self, names: Sequence[tuple[str, str]]) -> Iterator[None]:
        """Fetch missing steps, given as (step, key), then write those that the block computed."""
        with ThreadPoolExecutor(_THREADS, "packhouse-mirror") as pool:
            list(pool.map(lambda name: self.fetch(*name), names))
            yield
            taken = set(self.fetched)
            # Not written again: each costs a request even if the mirror has it.
            new = [self.steps.peek(*name) for name in names if "/".join(name) not in taken]
            list(pool.map(self.write, filter(None, new)))

    def _has(self, key: str) -> bool:
        try:
            run(self.store, ask(ObjectStore.head, key), retry=_RETRY)
        except ObjectNotFoundError:
            return False
        return True

    def _fetch(self, step: str, key: str, work: Path) -> bool:
        """Download and verify a step, then move it into the local store."""
        folder = f"{step}/{key}"
        try:
            raw = run(self.store, ask(ObjectStore.get, f"{folder}/{_RECEIPT}"), retry=_RETRY).data
        except ObjectNotFoundError:
            return False
        # It checks names and types of files: a forged receipt could name any path.
        receipt = parse_receipt(raw, step, key, work)
        names = sorted(receipt.files)
        for name in names:
            steps = download(f"{folder}/{name}", work / name, receipt.files[name].size)
            run(self.store, steps, retry=_RETRY)
        if not is_intact(receipt):  # checked before other processes can see it
            raise IntegrityError("its files differ from its receipt")
        (work / _RECEIPT).write_bytes(raw)
        place = self.steps.root / step / key
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            work.rename(place)
        except OSError:  # another process fetched or computed it
            return self.steps.find(step, key) is not None
        # The lock of the work folder moved along with it.
        (place / LOCK).unlink(missing_ok=True)
        self.fetched.append(folder)
        return True


def open_step_mirror(uri: str, cache: Path) -> StepMirror:
    """Open the mirror for the steps in a cache folder.

    Raises:
        ConfigError: unknown kind of store, or missing credentials.
    """
    store = open_store(uri, read_timeout_s=_READ_TIMEOUT_S)
    return StepMirror(store=store, steps=StepStore(cache / "steps"))
