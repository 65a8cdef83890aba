"""HTTP servers of tests, on a free port of loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalServer(ThreadingHTTPServer):
    """Use as a context manager; clients connect to `endpoint`."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Any:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections and logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def say(self, status: int, told: object, headers: dict[str, str] | None = None) -> None:
        more = {"Content-Type": "application/json", **(headers or {})}
        self.answer(status, json.dumps(told).encode(), more)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
