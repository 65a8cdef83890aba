"""What an answer of a store that is no success means; the same for all stores that speak HTTP."""

from packhouse.errors import (
    IntegrityError,
    PackhouseError,
    StoreError,
    StoreRefusedError,
    TransientError,
)
from packhouse.store.objects import ObjectNotFoundError, PreconditionFailedError

# Codes that mean "send it again", though some come with a 400: bytes or time were lost on the way.
_AGAIN = {"RequestTimeout", "BadDigest", "IncompleteBody", "SlowDown", "XAmzContentSHA256Mismatch"}
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


def error_of_answer(
    place: str, key: str, status: int, code: str, *, detail: str, no_bucket: str
) -> PackhouseError:
    """Tell apart lost race, absence, busy store, unable store and mistake.

    Args:
        place: address of the object, for people.
        key: its key.
        status: of HTTP; 0 if no answer came.
        code: the store's own word, such as `SlowDown`; empty if it gave none.
        detail: what the client says of it.
        no_bucket: what to say if there is no such bucket.
    """
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return StoreError(no_bucket)
    if status == 404 or code in ("NoSuchKey", "NoSuchUpload"):
        return ObjectNotFoundError(f"no object {place}", key=key)
    if status == 412 or code == "BlobAlreadyExists":  # Azure's comes with a 409
        return PreconditionFailedError(f"{place} exists or has changed", key=key)
    if status == 416:
        return IntegrityError(f"{place} is shorter than it was published", key=key)
    if status == 501 or code == "NotImplemented":
        return StoreRefusedError(
            f"{place}: the store answers 501 to a conditional write, so a publication there "
            "could be torn or doubled; see `packhouse doctor storage`"
        )
    if not status:
        return TransientError(f"{place}: {detail}", key=key)
    if status in (408, 409, 429) or status >= 500 or code in _AGAIN:
        return TransientError(f"{place}: {status} {code}", key=key, status=status, code=code)
    if status in (401, 403) or code in _DENIED:
        return StoreError(
            f"{place}: refused ({code or status}); check the credentials and their rights"
        )
    return StoreError(f"{place}: {status} {code}: {detail}")
