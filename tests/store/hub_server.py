"""A small part of the Hub's API, enough for huggingface_hub to create, look at and commit."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubServer(ThreadingHTTPServer):
    """Repositories in memory; `race` runs once before the next commit is looked at."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, list[dict[str, bytes]]] = {}
        self.race: Any = None
        self.refuse_with = 0

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def sha(self, repo: str) -> str:
        return f"{len(self.repos[repo]):040x}"

    def commit(self, repo: str, change: list[dict[str, Any]], parent: str | None) -> bool:
        if self.race is not None:
            race, self.race = self.race, None
            race()
        if parent is not None and parent != self.sha(repo):
            return False
        files = dict(self.repos[repo][-1])
        for line in change:
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        self.repos[repo].append(files)
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_GET(self) -> None:
        if self._refused():
            return
        repo = "/".join(self.path.split("?")[0].split("/")[3:5])
        files = self.server.repos[repo][-1]
        siblings = [{"rfilename": name} for name in sorted(files)]
        self._say(200, {"id": repo, "sha": self.server.sha(repo), "siblings": siblings, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refused():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.server.repos.setdefault(repo, [{}])
            self._say(200, {"url": f"{self.server.endpoint}/datasets/{repo}"})
        elif self.path == "/api/validate-yaml":
            self._say(200, {"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            self._say(200, {"files": modes})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._say(404, {"error": self.path})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        repo = "/".join(self.path.split("/")[3:5])
        parent = lines[0]["value"].get("parentCommit")
        if not self.server.commit(repo, lines[1:], parent):
            self._say(412, {"error": "a commit has happened since"})
            return
        oid = self.server.sha(repo)
        url = f"{self.server.endpoint}/datasets/{repo}/commit/{oid}"
        self._say(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def _refused(self) -> bool:
        if self.server.refuse_with:
            self._say(self.server.refuse_with, {"error": "no"})
        return bool(self.server.refuse_with)

    def _say(self, status: int, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""
