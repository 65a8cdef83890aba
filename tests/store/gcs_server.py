"""A small part of Google's JSON API in memory, with its conditions, for gcsfs to talk to.

Written from the API's description: conditions and generations are kept under one lock, and can be
ignored on request. It is no evidence of what Google's servers do; `packhouse doctor storage` is.
"""

import base64
import email
import hashlib
import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "versions"


class GcsServer(ThreadingHTTPServer):
    """Objects of one bucket; `faults` are statuses for the next uploads, before or after them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.objects: dict[str, dict[str, Any]] = {}
        self.generation = 1_700_000_000_000_000
        self.lock = threading.Lock()
        self.honours_conditions = True
        self.faults: list[tuple[str, int]] = []
        self.refuse_with = 0

    def __enter__(self) -> "GcsServer":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def put(self, name: str, body: bytes, wanted: str | None) -> dict[str, Any] | None:
        """The new object, or None where its condition does not hold."""
        with self.lock:
            there = self.objects.get(name)
            current = there["generation"] if there else "0"
            if wanted is not None and wanted != current and self.honours_conditions:
                return None
            self.generation += 1
            self.objects[name] = {
                "name": name,
                "size": str(len(body)),
                "updated": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
                "generation": str(self.generation),
                "md5Hash": _md5(body),
                "body": body,
            }
            return self.objects[name]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: GcsServer

    def do_GET(self) -> None:
        place, query = self._asked()
        if place is None:
            return
        if not place:
            self._list(query)
            return
        found = self.server.objects.get(place)
        if found is None:
            self._say(404, {"error": {"code": 404, "message": "no such object"}})
        elif query.get("alt") == "media":
            self._send(found)
        else:
            self._say(200, _described(found))

    def do_DELETE(self) -> None:
        place, _ = self._asked()
        if place is None:
            return
        with self.server.lock:
            found = self.server.objects.pop(place, None)
        self._say(204 if found else 404, {"error": {"code": 404, "message": "no such object"}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        place, query = self._asked()
        if place is None:
            return
        fault = self.server.faults.pop(0) if self.server.faults else ("", 0)
        if fault[0] == "before":
            self._say(fault[1], {"error": {"code": fault[1], "message": "busy"}})
            return
        described, data = self._parts(body)
        if described.get("md5Hash", _md5(data)) != _md5(data):
            self._say(400, {"error": {"code": 400, "message": "md5Hash does not match"}})
            return
        made = self.server.put(described["name"], data, query.get("ifGenerationMatch"))
        if fault[0] == "after":
            self._say(fault[1], {"error": {"code": fault[1], "message": "busy"}})
        elif made is None:
            self._say(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        else:
            self._say(200, _described(made))

    def _parts(self, body: bytes) -> tuple[dict[str, str], bytes]:
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        boundary = email.message_from_bytes(head).get_boundary()
        assert boundary is not None
        _, described, data, _ = body.split(f"--{boundary}".encode())
        text = described.partition(b"\r\n\r\n")[2]
        return json.loads(text), data.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")

    def _asked(self) -> tuple[str | None, dict[str, str]]:
        """Name of the object ("" for the bucket) and query; None where the answer is given."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.partition("/storage/v1/b/")[2].split("/", 2)
        if self.server.refuse_with:
            status = self.server.refuse_with
            self._say(status, {"error": {"code": status, "message": "no"}})
            return None, query
        if words[0] != BUCKET:
            self._say(404, {"error": {"code": 404, "message": "no such bucket"}})
            return None, query
        return unquote(words[2]) if len(words) > 2 else "", query

    def _list(self, query: dict[str, str]) -> None:
        """Two names a page, so that paging is tried."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        with self.server.lock:
            names = sorted(name for name in self.server.objects if name.startswith(prefix))
            items = [_described(self.server.objects[name]) for name in names]
        folders = set()
        if delimiter:
            rests = [name.removeprefix(prefix) for name in names]
            folders = {prefix + r.partition("/")[0] + "/" for r in rests if delimiter in r}
            items = [item for item in items if delimiter not in item["name"][len(prefix) :]]
        start = int(query.get("pageToken", "0"))
        page: dict[str, Any] = {"items": items[start : start + 2]}
        if start == 0:
            page["prefixes"] = sorted(folders)
        if start + 2 < len(items):
            page["nextPageToken"] = str(start + 2)
        self._say(200, page)

    def _send(self, found: dict[str, Any]) -> None:
        body, wanted = found["body"], self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            body = body[int(first) : int(last) + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("X-Goog-Generation", found["generation"])
        if wanted:
            self.send_header("Content-Range", f"bytes {wanted[6:]}/{found['size']}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _say(self, status: int, answer: dict[str, Any]) -> None:
        text = b"" if status == 204 else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _described(found: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in found.items() if name != "body"}


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
