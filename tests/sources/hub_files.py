"""A fake Hub for reading: its API for repositories, trees and paths, and downloads."""

import re
from hashlib import sha1
from urllib.parse import parse_qs, unquote, urlsplit

from tests.local_servers import LocalServer, QuietHandler

TOKEN = "hf_standin"


class HubFiles(LocalServer):
    """Repositories as commits, each with a revision name and its files."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.cut_after: int | None = None
        self.status = 0

    def commit_of(self, repo: str, revision: str) -> str | None:
        for name, files in self.repos[repo].items():
            commit = sha1(repr((repo, name, sorted(files.items()))).encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def files(self, repo: str, commit: str) -> dict[str, bytes]:
        names = [n for n in self.repos[repo] if self.commit_of(repo, n) == commit]
        return self.repos[repo][names[0]]


class _Handler(QuietHandler):
    server: HubFiles

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if self.server.status:
            return self.say(self.server.status, {"error": "no"})
        api = re.fullmatch(
            r"/api/(?:datasets|models)/([^/]+/[^/]+)"
            r"(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?",
            path,
        )
        load = re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        match = api or load
        if match is None:
            return self.say(404, {"error": path})
        repo, what, revision, rest = match.groups()
        if not self._may_see(repo):
            return None
        commit = self.server.commit_of(repo, revision or "main")
        if commit is None:
            return self.say(404, {"error": "revision"}, {"X-Error-Code": "RevisionNotFound"})
        files = self.server.files(repo, commit)
        if what == "resolve":
            return self._load(files, rest, commit)
        if what == "tree":
            return self.say(200, [e for e in entries(files) if is_below(e["path"], rest)])
        if what == "paths-info":
            wanted = parse_qs(self.body.decode())["paths"]
            return self.say(200, [e for e in entries(files) if e["path"] in wanted])
        siblings = [{"rfilename": name} for name in sorted(files)]
        return self.say(200, {"id": repo, "sha": commit, "siblings": siblings, "tags": []})

    def _may_see(self, repo: str) -> bool:
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            self.say(401, {"error": "Invalid credentials"})
        elif repo in self.server.gated and given is None:
            self.say(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif repo in self.server.repos and (repo not in self.server.private or given):
            return True
        else:
            status = 404 if given else 401  # like the Hub: without a token, nobody learns which
            self.say(status, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        return False

    def _load(self, files: dict[str, bytes], path: str, commit: str) -> None:
        if path not in files:
            return self.say(404, {"error": path}, {"X-Error-Code": "EntryNotFound"})
        data = files[path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{sha1(data).hexdigest()}"'}
        first = 0
        if asked := re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range") or ""):
            first = int(asked[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.send_response_only(206 if asked else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if self.command == "HEAD":
            return None
        cut, self.server.cut_after = self.server.cut_after, None
        self.server.requests.append(f"from {first}")
        self.wfile.write(data[first : None if cut is None else first + cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(2)
        return None


def entries(files: dict[str, bytes]) -> list[dict[str, object]]:
    """Return files and their folders as the Hub lists them."""
    folders = {name.rpartition("/")[0] for name in files if "/" in name}
    listed = [{"type": "directory", "path": f, "oid": "0" * 40} for f in sorted(folders)]
    for name, data in sorted(files.items()):
        oid = sha1(data).hexdigest()
        listed.append({"type": "file", "path": name, "size": len(data), "oid": oid})
    return listed


def is_below(path: object, folder: str) -> bool:
    return not folder or str(path).startswith(f"{folder.rstrip('/')}/")
