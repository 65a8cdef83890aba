"""An S3 bucket as an object store, using botocore without its own retries.

s3fs is not used for writing, because it retries PUTs internally (a lost response then looks like
"already exists"), recognizes 412 by AWS's message text (Ceph sends another), and uses multipart
uploads above its block size, which Ceph 16 completes without checking the condition. Here every
object is one PUT with Content-MD5 and `If-None-Match: *`; 409, 412, 429, 501 and 5xx are
distinguished by code and status.
"""

import base64
import email.utils
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from typing_extensions import override

from packhouse.errors import ConfigError, StoreError, TransientError
from packhouse.store.object_store import (
    MAX_GET_BYTES,
    Blob,
    FileBody,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    Part,
    PreconditionFailedError,
    check_key,
    error_of_answer,
)
from packhouse.system.plugins import import_extra

_CHUNK_BYTES = 2**20


class S3Store(ObjectStore):
    """Objects under `s3://bucket/prefix`. Thread-safe."""

    def __init__(self, bucket: str, prefix: str = "", *, client: Any) -> None:
        if not bucket:
            raise ConfigError("the s3:// store has no bucket. Use s3://bucket/prefix")
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client = client
        self._quoted: bool | None = None  # how this server expects If-Match; None until known

    @override
    def get(self, key: str) -> Blob:
        with self._request(key):
            answer = self._client.get_object(**self._at(key))
            with closing(answer["Body"]) as body:
                data = body.read(MAX_GET_BYTES + 1)
                if len(data) <= MAX_GET_BYTES:
                    data += body.read()  # returns nothing, but raises if the response was cut off
                return Blob(data, answer["ETag"].strip('"'))

    @override
    def chunks(self, key: str, start: int = 0) -> Iterator[bytes]:
        wanted = {"Range": f"bytes={start}-"} if start else {}
        with self._request(key):
            yield from _body(self._client.get_object(**self._at(key), **wanted), start)

    @override
    def get_range(self, key: str, start: int, length: int) -> Part:
        wanted = f"bytes={start}-{start + length - 1}"
        data = bytearray()
        with self._request(key):
            answer = self._client.get_object(**self._at(key), Range=wanted)
            for chunk in _body(answer, start):
                data += chunk
                if len(data) >= length:
                    break
            tag = answer["ETag"].strip('"')
        whole = f"/{answer['ContentLength']}" if "ContentRange" not in answer else None
        size = re.search(r"/([0-9]{1,18})$", whole or answer["ContentRange"])  # `bytes 0-9/1234`
        return Part(bytes(data[:length]), int(size[1]) if size else -1, tag)

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
        """Try the ETag with quotes (the standard) and without (Ceph 16) until one is accepted."""
        # A 412 means that the tag differs or is quoted the wrong way. A second attempt with the
        # same tag is safe: if the first one had succeeded, the tag would be different now.
        styles = (True, False) if self._quoted is None else (self._quoted,)
        for quoted in styles:
            try:
                tag = self._put(key, body, IfMatch=f'"{etag}"' if quoted else etag)
            except ObjectNotFoundError as error:  # AWS's response if the object was deleted
                raise PreconditionFailedError(str(error), key=key) from None
            except PreconditionFailedError:
                if quoted is styles[-1]:
                    raise
            else:
                self._quoted = quoted
                return tag
        raise AssertionError("unreachable: the last style returns or raises")

    def _put(self, key: str, body: bytes | FileBody, **condition: str) -> str:
        if isinstance(body, FileBody):
            self._check_size(body)
            md5, file = body.md5, body.open()
        else:
            md5, file = hashlib.md5(body, usedforsecurity=False).hexdigest(), io.BytesIO(body)
        sent = {"ContentMD5": base64.b64encode(bytes.fromhex(md5)).decode(), **condition}
        # One PUT, never a multipart upload: Ceph 16 completes those without checking the condition.
        with file, self._request(key):
            answer = self._client.put_object(**self._at(key), **sent, Body=file)
            tag: str = answer["ETag"].strip('"')
        return tag

    @override
    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        found = self._pages("list_objects_v2", "Contents", Prefix=self.prefix + prefix)
        names = ((item["Key"].removeprefix(self.prefix), item) for item in found)
        return [ObjectInfo(k, each["Size"], each["LastModified"].timestamp()) for k, each in names]

    @override
    def list_folders(self, prefix: str) -> Sequence[str]:
        base = self.prefix + prefix
        found = self._pages("list_objects_v2", "CommonPrefixes", Prefix=base, Delimiter="/")
        return [item["Prefix"].removeprefix(base).rstrip("/") for item in found]

    @override
    def delete(self, key: str) -> None:
        with self._request(key):
            self._client.delete_object(**self._at(key))

    @override
    def clock(self) -> float:
        """Return the `Date` header of a response; its resolution is one second."""
        with self._request(""):
            answer = self._client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        return email.utils.parsedate_to_datetime(date).timestamp()

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def _pages(self, method: str, items: str, **query: str) -> Sequence[dict[str, Any]]:
        """Return all items of a paginated response."""
        with self._request(query["Prefix"].removeprefix(self.prefix)):
            pages = self._client.get_paginator(method).paginate(Bucket=self.bucket, **query)
            return [item for page in pages for item in page.get(items, ())]

    @contextmanager
    def _request(self, key: str) -> Iterator[None]:
        """Translate errors of the client."""
        import botocore.exceptions as boto
        import urllib3.exceptions

        place = f"{self.uri}/{key}"
        try:
            yield
        except boto.ClientError as error:
            raise error_of_answer(
                place,
                key,
                error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
                str(error.response.get("Error", {}).get("Code", "")),
                detail=str(error),
                no_bucket=f"no bucket '{self.bucket}' at {self._client.meta.endpoint_url}",
            ) from error
        except boto.SSLError as error:
            raise StoreError(
                f"{self.uri}: {error}. Set AWS_CA_BUNDLE to the certificates to trust"
            ) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
            raise ConfigError(
                f"{self.uri}: no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or AWS_PROFILE"
            ) from error
        except boto.ParamValidationError as error:
            raise ConfigError(f"{place}: {error}") from error
        except KeyError as error:
            raise StoreError(
                f"{place}: the response lacks {error}, which S3 requires. Check the store with "
                "`packhouse doctor storage`"
            ) from error
        # No connection, or no complete response.
        except (urllib3.exceptions.HTTPError, boto.BotoCoreError) as error:
            raise TransientError(f"{place}: {error}", key=key) from error


def _body(answer: dict[str, Any], start: int) -> Iterator[bytes]:
    """Yield the bytes from `start` on; a server without ranges sends the whole object."""
    left_out = 0 if "ContentRange" in answer else start
    with closing(answer["Body"]) as body:
        for chunk in body.iter_chunks(_CHUNK_BYTES):
            if len(chunk) > left_out:
                yield chunk[left_out:]
            left_out = max(0, left_out - len(chunk))


def make_client(read_timeout_s: float = 60) -> Any:
    """Create a botocore S3 client without retries from the usual AWS environment and files.

    A custom endpoint is addressed path-style unless the profile sets
    `s3 = addressing_style = virtual`.
    """
    session = import_extra("botocore.session", "s3", "s3://").get_session()
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        region, options = _settings(session)
        config = Config(
            # After a lost response, a retried write would find its own object and report a failure.
            retries={"total_max_attempts": 1},
            connect_timeout=5,  # a wrong endpoint fails in seconds, not in botocore's 60
            read_timeout=read_timeout_s,
            max_pool_connections=32,
            **options,
        )
        return session.create_client("s3", config=config, region_name=region)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"S3 settings: {error}") from error


def filesystem_options() -> dict[str, Any]:
    """Return options for s3fs with the same settings as `make_client`."""
    region, options = _settings(import_extra("botocore.session", "s3", "s3://").get_session())
    return {"client_kwargs": {"region_name": region}, "config_kwargs": options}


def _settings(session: Any) -> tuple[str, dict[str, Any]]:
    """Return the region and options of botocore's Config from AWS's environment and files.

    Raises:
        ConfigError: An endpoint contains a password. Libraries that cannot reach an address repeat
            it in errors, and so in logs and artifacts.
    """
    profile = session.get_scoped_config()
    endpoints = {
        "AWS_ENDPOINT_URL_S3": os.environ.get("AWS_ENDPOINT_URL_S3"),
        "AWS_ENDPOINT_URL": os.environ.get("AWS_ENDPOINT_URL"),
        "endpoint_url of the AWS profile": profile.get("endpoint_url"),
    }
    for name, endpoint in endpoints.items():
        if endpoint and ("@" in endpoint or "?" in endpoint):
            raise ConfigError(
                f"{name} contains a user name, password or query. Set only the address there, and "
                "the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or in "
                "AWS_SHARED_CREDENTIALS_FILE"
            )
    style = (profile.get("s3") or {}).get("addressing_style")
    region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    return str(region or "us-east-1"), {
        "s3": {"addressing_style": style or ("path" if any(endpoints.values()) else "auto")},
        "signature_version": "s3v4",
        # Most stores other than AWS answer 411 to CRC trailers or corrupt them. Our own digests are
        # verified instead.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
