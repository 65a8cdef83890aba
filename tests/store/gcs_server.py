"""A small part of Google's XML API in memory, with its conditions, for tests with obstore.

Written from the API's description: conditions and generations are checked under one lock, and can
be ignored on request. It proves nothing about Google's servers; `packhouse doctor storage` does.
"""

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import md5
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.local_servers import LocalServer, QuietHandler

BUCKET = "versions"


@dataclass(frozen=True)
class Stored:
    body: bytes
    generation: str
    updated: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def etag(self) -> str:
        return f'"{md5(self.body, usedforsecurity=False).hexdigest()}"'


class GcsServer(LocalServer):
    """Objects of one bucket; `faults` are statuses for the next uploads, before or after them."""

    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.objects: dict[str, Stored] = {}
        self.generation = 1_700_000_000_000_000
        self.lock = threading.Lock()
        self.honours_conditions = True
        self.faults: list[tuple[str, int]] = []
        self.refuse_with = 0
        self.num_requests = 0

    def put(self, name: str, body: bytes, wanted: str | None) -> Stored | None:
        """Return the new object, or None if its condition is not met."""
        with self.lock:
            there = self.objects.get(name)
            current = there.generation if there else "0"
            if wanted is not None and wanted != current and self.honours_conditions:
                return None
            self.generation += 1
            self.objects[name] = Stored(body, str(self.generation))
            return self.objects[name]


class _Handler(QuietHandler):
    server: GcsServer

    def do_GET(self) -> None:
        name = self._asked()
        if name == "":
            self._list()
        elif name is not None:
            self._send(self.server.objects.get(name))

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        name = self._asked()
        if name is None:
            return
        with self.server.lock:
            found = self.server.objects.pop(name, None)
        self._say(204 if found else 404, "" if found else "NoSuchKey")

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self._asked()
        if name is None:
            return
        when, status = self.server.faults.pop(0) if self.server.faults else ("", 0)
        if when == "before":
            self._say(status, "ServiceUnavailable")
            return
        made = self.server.put(name, body, self.headers.get("x-goog-if-generation-match"))
        if when == "after":
            self._say(status, "ServiceUnavailable")
        elif made is None:
            self._say(412, "PreconditionFailed")
        else:
            self._answer(200, b"", made)

    def _asked(self) -> str | None:
        """Return the object's name ("" for the bucket), or None if the request was answered."""
        self.server.num_requests += 1
        bucket, _, name = urlsplit(self.path).path.removeprefix("/").partition("/")
        if self.headers.get("Authorization") != "Bearer of-the-tests":
            self._say(401, "AuthenticationRequired")
        elif self.server.refuse_with:
            self._say(self.server.refuse_with, "Refused")
        elif bucket != BUCKET:
            self._say(404, "NoSuchBucket")
        else:
            return unquote(name)
        return None

    def _list(self) -> None:
        """List two names per page, so that paging is tested."""
        asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        query = {name: values[0] for name, values in asked.items()}
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        with self.server.lock:
            found = {n: o for n, o in sorted(self.server.objects.items()) if n.startswith(prefix)}
        folders = set()
        if delimiter:
            rests = [name.removeprefix(prefix) for name in found]
            folders = {prefix + r.partition("/")[0] + "/" for r in rests if delimiter in r}
            found = {n: o for n, o in found.items() if delimiter not in n[len(prefix) :]}
        start = int(query.get("continuation-token", "0"))
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(each.body)}</Size>"
            f"<Generation>{each.generation}</Generation><ETag>{escape(each.etag)}</ETag>"
            f"<LastModified>{each.updated.isoformat()}</LastModified></Contents>"
            for name, each in list(found.items())[start : start + 2]
        )
        if start == 0:
            items += "".join(
                f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
                for folder in sorted(folders)
            )
        if start + 2 < len(found):
            items += f"<NextContinuationToken>{start + 2}</NextContinuationToken>"
        self._answer(200, f"<ListBucketResult>{items}</ListBucketResult>".encode())

    def _send(self, found: Stored | None) -> None:
        if found is None:
            self._say(404, "NoSuchKey")
            return
        wanted = self.headers.get("Range")
        if not wanted:
            self._answer(200, found.body, found)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        part = found.body[int(first) : int(last) + 1]
        self._answer(206, part, found, f"bytes {first}-{int(first) + len(part) - 1}")

    def _say(self, status: int, code: str) -> None:
        text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code></Error>"
        self._answer(status, text.encode() if code else b"")

    def _answer(self, status: int, body: bytes, of: Stored | None = None, part: str = "") -> None:
        headers = {}
        if of is not None:
            updated = format_datetime(of.updated, usegmt=True)
            headers = {"ETag": of.etag, "Last-Modified": updated}
            headers["x-goog-generation"] = of.generation
            if part:
                headers["Content-Range"] = f"{part}/{len(of.body)}"
        self.answer(status, body, headers)
