"""An Azure Blob Storage container as an object store, through adlfs's service client.

adlfs's file interface has create-only writes and no compare-and-swap, so the client that it made
and signed is asked: `If-None-Match: *` is create-only and `If-Match: <etag>` a compare-and-swap,
both on Put Blob and on the Put Block List that ends an upload of more than 64 MiB, so a blob shows
whole or not at all. An ETag names a write and not its bytes.

Retries of the client are switched off. Credentials come from adlfs's environment:
AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, a
SAS token or Azure's default login. Costs: each uploaded file is read back once.
"""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from packhouse.errors import (
    ConfigError,
    IntegrityError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.store.objects import (
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    check_key,
)

__all__ = ["AzureStore", "make_filesystem"]

_ONCE: dict[str, Any] = {"retry_total": 0}


class AzureStore(ObjectStore):
    """Objects in `az://container/prefix`; safe to share between threads."""

    def __init__(self, container: str, prefix: str = "", *, filesystem: Any = None) -> None:
        if not container:
            raise ConfigError("an Azure store needs a container: az://container/prefix")
        self.container = container
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"az://{container}/{prefix}".rstrip("/")
        self._fs = filesystem or make_filesystem()

    @override
    def get(self, key: str) -> Blob:
        async def ask(blob: Any) -> Blob:
            answer = await blob.download_blob(**_ONCE)
            return Blob(await answer.readall(), answer.properties.etag)

        found: Blob = self._ask(key, ask)
        return found

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        async def ask(blob: Any) -> bytes:
            answer = await blob.download_blob(offset=start, length=length, **_ONCE)
            data: bytes = await answer.readall()
            return data

        part: bytes = self._ask(key, ask)
        return part

    @override
    def head(self, key: str) -> ObjectInfo:
        async def ask(blob: Any) -> ObjectInfo:
            return self._info(await blob.get_blob_properties(**_ONCE))

        found: ObjectInfo = self._ask(key, ask)
        return found

    @override
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        if isinstance(body, bytes):
            return self._put(key, body, overwrite=False)
        try:
            file = body.path.open("rb")
        except FileNotFoundError:
            raise IntegrityError(f"'{body.path}' vanished while it was being published") from None
        with file:
            return self._put(key, file, overwrite=False, length=body.size)

    @override
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        from azure.core import MatchConditions

        condition = MatchConditions.IfNotModified
        try:
            return self._put(key, body, overwrite=True, etag=etag, match_condition=condition)
        except ObjectNotFoundError as error:
            raise PreconditionFailedError(str(error), key=key) from None

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        async def ask(container: Any) -> list[ObjectInfo]:
            wanted = container.list_blobs(name_starts_with=self.prefix + prefix, **_ONCE)
            return [self._info(blob) async for blob in wanted]

        yield from self._ask_container(ask)

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        start = self.prefix + prefix

        async def ask(container: Any) -> list[str]:
            wanted = container.walk_blobs(name_starts_with=start, delimiter="/", **_ONCE)
            return [item.name async for item in wanted if item.name.endswith("/")]

        for name in self._ask_container(ask):
            yield name.removeprefix(start).rstrip("/")

    @override
    def delete(self, key: str) -> None:
        async def ask(blob: Any) -> None:
            await blob.delete_blob(**_ONCE)

        try:
            self._ask(key, ask)
        except ObjectNotFoundError:
            return

    @override
    def clock(self) -> float:
        """The `Date` header of an answer: one second coarse."""
        import email.utils

        dates: list[str] = []

        async def ask(container: Any) -> None:
            def keep(answer: Any) -> None:
                dates.append(answer.http_response.headers["Date"])

            await container.get_container_properties(raw_response_hook=keep, **_ONCE)

        self._ask_container(ask)
        return email.utils.parsedate_to_datetime(dates[0]).timestamp()

    def _info(self, found: Any) -> ObjectInfo:
        key = found.name.removeprefix(self.prefix)
        return ObjectInfo(key, found.size, found.last_modified.timestamp(), found.etag)

    def _put(self, key: str, body: Any, **condition: Any) -> str:
        async def ask(blob: Any) -> str:
            answer = await blob.upload_blob(body, validate_content=True, **condition, **_ONCE)
            return str(answer["etag"])

        tag: str = self._ask(key, ask)
        return tag

    def _ask(self, key: str, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        from fsspec.asyn import sync

        name = self.prefix + check_key(key)

        async def asked() -> Any:
            async with self._fs.service_client.get_blob_client(self.container, name) as blob:
                return await ask(blob)

        with self._request(key):
            return sync(self._fs.loop, asked)

    def _ask_container(self, ask: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        from fsspec.asyn import sync

        async def asked() -> Any:
            async with self._fs.service_client.get_container_client(self.container) as container:
                return await ask(container)

        with self._request(""):
            return sync(self._fs.loop, asked)

    @contextmanager
    def _request(self, key: str) -> Iterator[None]:
        from azure.core import exceptions

        place = f"{self.uri}/{key}"
        try:
            yield
        except exceptions.ClientAuthenticationError as error:
            raise StoreError(
                f"{place}: refused; check the credentials and their rights: {_first_line(error)}"
            ) from error
        except exceptions.HttpResponseError as error:
            raise self._explained(place, key, error) from error
        except exceptions.AzureError as error:
            raise TransientError(f"{place}: {_first_line(error)}", key=key) from error

    def _explained(self, place: str, key: str, error: Any) -> PackhouseError:
        """Tell apart lost race, absence, busy store, unable store and mistake."""
        status, code = error.status_code or 0, str(getattr(error, "error_code", "") or "")
        if code == "ContainerNotFound":
            return StoreError(f"no container '{self.container}' in {self._fs.service_client.url}")
        if status == 404:
            return ObjectNotFoundError(f"no object {place}", key=key)
        if status == 412 or code == "BlobAlreadyExists":
            return PreconditionFailedError(f"{place} exists or has changed", key=key)
        if status == 416:
            return IntegrityError(f"{place} is shorter than it was published", key=key)
        if status == 501:
            return StoreRefusedError(f"{place}: the store answers 501 to a conditional write")
        if status in (0, 408, 409, 429) or status >= 500 or code == "Md5Mismatch":
            return TransientError(f"{place}: {status} {code}", key=key, status=status, code=code)
        if status in (401, 403):
            return StoreError(
                f"{place}: refused ({code or status}); check the credentials and their rights"
            )
        return StoreError(f"{place}: {status} {code}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def make_filesystem() -> Any:
    """An adlfs filesystem from its usual environment, without caches.

    Raises:
        ConfigError: adlfs is not installed, or it is not told which account.
    """
    try:
        import adlfs
    except ImportError:
        raise ConfigError("az:// stores need adlfs: pip install 'packhouse[azure]'") from None
    try:
        return adlfs.AzureBlobFileSystem(skip_instance_cache=True, use_listings_cache=False)
    except ValueError as error:
        raise ConfigError(
            "az://: which account? set AZURE_STORAGE_CONNECTION_STRING, or "
            f"AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY ({_first_line(error)})"
        ) from None
