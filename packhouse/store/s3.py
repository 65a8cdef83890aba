"""An S3 bucket as an object store, by botocore with every retry of its own switched off.

botocore and not s3fs for writing: s3fs retries PUTs inside (a lost response then reads as "already
exists"), maps 412 by AWS's message text (Ceph sends another), and uploads by multipart above its
block size, whose completion Ceph 16 does not guard. Here every object is one PUT with Content-MD5
and `If-None-Match: *`; 409, 412, 429, 501 and 5xx are told apart by code and status.

Checksums of botocore (CRC trailers) are sent only `when_required`: most stores that are not AWS
answer 411 or mangle them. Digests of our own are verified instead.
"""

import base64
import email.utils
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from packhouse.errors import (
    ConfigError,
    PackhouseError,
    StoreError,
    TransientError,
)
from packhouse.runtime.extras import import_extra
from packhouse.store.objects import (
    MAX_GET_BYTES,
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    PreconditionFailedError,
    check_key,
    error_of_answer,
)

__all__ = ["S3Store", "filesystem_options"]

_CHUNK_BYTES = 2**20


class S3Store(ObjectStore):
    """Objects in `s3://bucket/prefix`; safe to share between threads."""

    def __init__(self, bucket: str, prefix: str = "", *, client: Any) -> None:
        if not bucket:
            raise ConfigError("an S3 store needs a bucket: s3://bucket/prefix")
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client = client
        self._quoted: bool | None = None  # quoting of If-Match that this server accepts

    @override
    def get(self, key: str) -> Blob:
        with self._request(key):
            answer = self._client.get_object(**self._at(key))
            with closing(answer["Body"]) as body:
                data = body.read(MAX_GET_BYTES + 1)
                if len(data) <= MAX_GET_BYTES:
                    data += body.read()  # nothing more: this read notices an answer cut short
                return Blob(data, answer["ETag"].strip('"'))

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        wanted = f"bytes={start}-{start + length - 1}"
        with self._request(key):
            answer = self._client.get_object(**self._at(key), Range=wanted)
            with closing(answer["Body"]) as body:
                data: bytes = body.read()
        if "ContentRange" in answer:
            return data
        return data[start : start + length]  # a server that ignores ranges sends it all

    @override
    def chunks(self, key: str) -> Iterator[bytes]:
        with self._request(key):
            answer = self._client.get_object(**self._at(key))
            with closing(answer["Body"]) as body:
                yield from body.iter_chunks(_CHUNK_BYTES)

    @override
    def download(self, key: str, path: Path, *, offset: int = 0, end: int | None = None) -> None:
        wanted = {"Range": f"bytes={offset}-"} if offset else {}
        with self._request(key):
            answer = self._client.get_object(**self._at(key), **wanted)
            mode = "ab" if not offset or "ContentRange" in answer else "wb"
            with closing(answer["Body"]) as body, path.open(mode) as out:
                for chunk in body.iter_chunks(_CHUNK_BYTES):
                    out.write(chunk if end is None else chunk[: max(0, end - out.tell())])
                    if end is not None and out.tell() >= end:
                        return

    @override
    def head(self, key: str) -> ObjectInfo:
        with self._request(key):
            answer = self._client.head_object(**self._at(key))
        modified = answer["LastModified"].timestamp()
        return ObjectInfo(key, answer["ContentLength"], modified, answer["ETag"].strip('"'))

    @override
    def put_create(self, key: str, body: bytes | FileBody) -> str:
        return self._put(key, body, IfNoneMatch="*")

    @override
    def put_if_match(self, key: str, body: bytes, etag: str) -> str:
        """Quoted as the standard says, and unquoted as Ceph 16 wants it, until one is accepted."""
        styles = (True, False) if self._quoted is None else (self._quoted,)
        for quoted in styles:
            try:
                tag = self._put(key, body, IfMatch=f'"{etag}"' if quoted else etag)
            except ObjectNotFoundError as error:  # AWS's answer where the key is gone
                raise PreconditionFailedError(str(error), key=key) from None
            except PreconditionFailedError:
                if quoted is styles[-1]:
                    raise
            else:
                self._quoted = quoted
                return tag
        raise AssertionError("unreachable: the last style returns or raises")

    @override
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(Prefix=self.prefix + prefix):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self.prefix)
                yield ObjectInfo(key, item["Size"], item["LastModified"].timestamp())

    @override
    def list_folders(self, prefix: str) -> Iterator[str]:
        for page in self._pages(Prefix=self.prefix + prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].removeprefix(self.prefix + prefix).rstrip("/")

    @override
    def delete(self, key: str) -> None:
        with self._request(key):
            self._client.delete_object(**self._at(key))

    @override
    def clock(self) -> float:
        """The `Date` header of an answer: one second coarse."""
        with self._request(""):
            answer = self._client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        return email.utils.parsedate_to_datetime(date).timestamp()

    @override
    def abort_uploads(self, older_than_s: float, *, dry_run: bool) -> int:
        """Abort unfinished multipart uploads under the prefix (ours are single PUTs; guests')."""
        with self._request(""):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self.prefix
            )
            uploads = [item for page in pages for item in page.get("Uploads", ())]
        now = self.clock()
        old = [u for u in uploads if now - u["Initiated"].timestamp() >= older_than_s]
        for upload in () if dry_run else old:
            with self._request(upload["Key"]):
                self._client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
        return len(old)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def _pages(self, **query: str) -> Iterator[dict[str, Any]]:
        with self._request(query["Prefix"].removeprefix(self.prefix)):
            paginator = self._client.get_paginator("list_objects_v2")
            yield from paginator.paginate(Bucket=self.bucket, **query)

    def _put(self, key: str, body: bytes | FileBody, **condition: str) -> str:
        if isinstance(body, bytes):
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            return self._put_object(key, body, digest, condition)
        self._check_size(body)
        with body.open() as file:
            return self._put_object(key, file, bytes.fromhex(body.md5), condition)

    def _put_object(self, key: str, body: Any, md5: bytes, condition: dict[str, str]) -> str:
        with self._request(key):
            answer = self._client.put_object(
                **self._at(key),
                Body=body,
                ContentMD5=base64.b64encode(md5).decode(),
                **condition,
            )
        tag: str = answer["ETag"].strip('"')
        return tag

    @contextmanager
    def _request(self, key: str) -> Iterator[None]:
        import botocore.exceptions as boto
        import urllib3.exceptions

        try:
            yield
        except boto.ClientError as error:
            raise self._explained(key, error) from error
        except boto.SSLError as error:
            raise StoreError(
                f"{self.uri}: {error}; AWS_CA_BUNDLE names the certificates to trust"
            ) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
            raise ConfigError(
                f"{self.uri}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or AWS_PROFILE"
            ) from error
        except (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError) as error:
            raise TransientError(f"{self.uri}/{key}: {error}", key=key) from error
        except boto.ParamValidationError as error:
            raise ConfigError(f"{self.uri}/{key}: {error}") from error
        except (urllib3.exceptions.HTTPError, boto.BotoCoreError) as error:
            raise TransientError(f"{self.uri}/{key}: {error}", key=key) from error

    def _explained(self, key: str, error: Any) -> PackhouseError:
        return error_of_answer(
            f"{self.uri}/{key}",
            key,
            error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
            str(error.response.get("Error", {}).get("Code", "")),
            detail=str(error),
            no_bucket=f"no bucket '{self.bucket}' at {self._client.meta.endpoint_url}",
        )


def make_client(read_timeout_s: float = 60) -> Any:
    """A botocore S3 client from the usual AWS environment, profile and files; no retries inside.

    A custom endpoint is addressed path-style unless the profile says
    `s3 = addressing_style = virtual`.
    """
    session = _session()
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        profile = session.get_scoped_config()
        config = Config(
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            connect_timeout=5,
            read_timeout=read_timeout_s,
            max_pool_connections=32,
            signature_version="s3v4",
            s3={"addressing_style": _addressing(profile)},
        )
        return session.create_client("s3", config=config, region_name=_region(session))
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"S3 settings: {error}") from error


def filesystem_options() -> dict[str, Any]:
    """Options of s3fs that make it read through the same settings as `make_client`."""
    session = _session()
    style = _addressing(session.get_scoped_config())
    checksums = "when_required"
    return {
        "client_kwargs": {"region_name": _region(session)},
        "config_kwargs": {
            "s3": {"addressing_style": style},
            "signature_version": "s3v4",
            "request_checksum_calculation": checksums,
            "response_checksum_validation": checksums,
        },
    }


def _session() -> Any:
    """The environment, profile and files of AWS."""
    return import_extra("botocore.session", "s3", "s3://").get_session()


def _addressing(profile: dict[str, Any]) -> str:
    custom = _has_own_endpoint(profile)
    named = (profile.get("s3") or {}).get("addressing_style")
    return str(named) if named else "path" if custom else "auto"


def _has_own_endpoint(profile: Mapping[str, Any]) -> bool:
    """Return whether S3's address is a custom one; refuse one that holds a password.

    Every library that fails to reach an address repeats it, in errors, logs and artifacts.
    """
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return _without_password(os.environ[name], name)
    named = profile.get("endpoint_url")
    return bool(named) and _without_password(str(named), "endpoint_url of the AWS profile")


def _without_password(endpoint: str, name: str) -> bool:
    if "@" in endpoint or "?" in endpoint:
        raise ConfigError(
            f"{name} holds a user name, password or query; give the address alone, and the keys as "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in AWS_SHARED_CREDENTIALS_FILE"
        )
    return True


def _region(session: Any) -> str:
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    return str(region or "us-east-1")
