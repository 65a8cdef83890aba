"""An HTTP proxy in front of an S3 server that deliberately loses, repeats, delays and damages.

The Host header is passed on unchanged, so signatures stay valid. Faults are chosen by a seeded
generator or by a rule; each kind is counted.

    drop_before     the connection ends before the request is passed on
    drop_after      the request is executed, and the connection ends without an answer
    busy_before     503 without asking the server
    busy_after      the request is executed, and the answer is 503
    conflict        409 without asking the server
    slow            the answer comes late
    truncate        half of the answer's body, then the end of the connection
    flip_answer     one bit of the answer's body is wrong
    flip_request    one bit of the request's body is wrong
"""

import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

from tests.local_servers import LocalServer, QuietHandler

PUT_FAULTS = ("drop_before", "drop_after", "busy_before", "busy_after", "conflict", "flip_request")
GET_FAULTS = ("drop_before", "drop_after", "busy_before", "truncate", "flip_answer", "slow")

Rule = Callable[[str, str], str | None]
"""Method and path -> fault or None."""


class FaultyProxy(LocalServer):
    """Faults are counted by kind."""

    def __init__(self, upstream: str, rule: Rule) -> None:
        super().__init__(_Handler)
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        self.upstream = (parts.hostname, parts.port or 80)
        self.rule = rule
        self.counts: Counter[str] = Counter()
        self.requests = 0
        self.lock = threading.Lock()
        self.random = random.Random(0)

    def handle_error(self, *_: object) -> None:
        """Ignore errors of clients whose connection we cut."""

    def choose(self, method: str, path: str) -> str | None:
        with self.lock:
            self.requests += 1
            fault = self.rule(method, path)
            if fault is not None:
                self.counts[fault] += 1
            return fault

    def flip(self, body: bytes) -> bytes:
        damaged = bytearray(body)
        with self.lock:
            bit = self.random.randrange(len(body) * 8)
        damaged[bit // 8] ^= 1 << bit % 8
        return bytes(damaged)


def at_random(share: float, seed: int) -> Rule:
    """Return a rule that faults this share of requests, each kind equally often."""
    chooser = random.Random(seed)

    def rule(method: str, path: str) -> str | None:
        if chooser.random() >= share:
            return None
        return chooser.choice(PUT_FAULTS if method == "PUT" else GET_FAULTS)

    return rule


def in_turn(faults: tuple[str, ...], methods: tuple[str, ...]) -> Rule:
    """Return a rule that gives the first requests of each method and path one fault each."""
    left: dict[tuple[str, str], list[str]] = {}

    def rule(method: str, path: str) -> str | None:
        own = left.setdefault((method, path), list(faults))
        return own.pop(0) if method in methods and own else None

    return rule


class _Handler(QuietHandler):
    server: FaultyProxy

    def _serve(self) -> None:
        fault = self.server.choose(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "drop_before":
            self._hang_up()
        elif fault == "busy_before":
            self._refuse(503, "SlowDown")
        elif fault == "conflict":
            self._refuse(409, "ConditionalRequestConflict")
        else:
            self._forward(
                self.server.flip(body) if fault == "flip_request" and body else body, fault
            )

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def _forward(self, body: bytes, fault: str | None) -> None:
        upstream = http.client.HTTPConnection(*self.server.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        if fault == "drop_after":
            self._hang_up()
        elif fault == "busy_after":
            self._refuse(503, "SlowDown")
        else:
            self._answer(answer, data, fault)

    def _answer(self, answer: http.client.HTTPResponse, data: bytes, fault: str | None) -> None:
        if fault == "slow":
            time.sleep(0.3)
        if fault == "flip_answer" and data:
            data = self.server.flip(data)
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if fault == "truncate" and data:
            self.wfile.write(data[: len(data) // 2])
            self._hang_up()
        elif self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        told = f"<Code>{code}</Code><Message>{code}</Message>"
        text = b"" if self.command == "HEAD" else f"<Error>{told}</Error>".encode()
        self.answer(status, text, {"Content-Type": "application/xml"})

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.close()
