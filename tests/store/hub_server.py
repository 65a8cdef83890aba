"""A small part of the Hub's API: enough for huggingface_hub to create, read and commit.

Like the Hub, it receives Parquet files with the LFS protocol: first the bytes, whole or in parts,
at a separate URL, then a commit that refers to them by sha256.
"""

import base64
import hashlib
import json
from typing import Any

from tests.local_servers import LocalServer, QuietHandler


class HubServer(LocalServer):
    """Repositories in memory; `race` runs once before the next commit is checked."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repos: dict[str, list[dict[str, bytes]]] = {}
        self.race: Any = None
        self.refuse_with = 0
        self.refuse_lfs_with = 0
        self.part_bytes = 0  # 0: files are sent whole
        self.lfs: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.num_lfs_puts = 0

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
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.lfs[line["value"]["oid"]]
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        self.repos[repo].append(files)
        return True

    def receive(self, oid: str, part: int, data: bytes) -> None:
        self.num_lfs_puts += 1
        self.parts.setdefault(oid, {})[part] = data
        if not self.part_bytes:
            self.assemble(oid)

    def assemble(self, oid: str) -> None:
        data = b"".join(part for _, part in sorted(self.parts.pop(oid).items()))
        assert hashlib.sha256(data).hexdigest() == oid
        self.lfs[oid] = data

    def upload_action(self, oid: str, size: int) -> dict[str, Any]:
        """Return the URL for an upload, or nothing if the file exists."""
        if oid in self.lfs:
            return {"oid": oid, "size": size}
        place = f"{self.endpoint}/lfs/{oid}"
        upload = {"href": f"{place}/0"}
        if self.part_bytes:
            numbers = range(1, -(-size // self.part_bytes) + 1)
            header = {str(number): f"{place}/{number}" for number in numbers}
            upload = {"href": place, "header": header | {"chunk_size": str(self.part_bytes)}}
        return {"oid": oid, "size": size, "actions": {"upload": upload}}


class _Handler(QuietHandler):
    server: HubServer

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.refuse_lfs_with:
            self.say(self.server.refuse_lfs_with, {"error": "no"})
            return
        _, _, oid, part = self.path.split("/")
        self.server.receive(oid, int(part), body)
        self.say(200, {}, {"ETag": f'"{part}"'})

    def do_GET(self) -> None:
        if self._refused():
            return
        repo = "/".join(self.path.split("?")[0].split("/")[3:5])
        if repo not in self.server.repos or "/xet-" in self.path:
            self.say(404, {"error": self.path})
            return
        files = self.server.repos[repo][-1]
        siblings = [{"rfilename": name} for name in sorted(files)]
        self.say(200, {"id": repo, "sha": self.server.sha(repo), "siblings": siblings, "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._refused():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.server.repos.setdefault(repo, [{}])
            self.say(200, {"url": f"{self.server.endpoint}/datasets/{repo}"})
        elif self.path == "/api/validate-yaml":
            self.say(200, {"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {n: "lfs" if n.endswith(".parquet") else "regular" for n in names}
            files = [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]
            self.say(200, {"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            objects = [self.server.upload_action(o["oid"], o["size"]) for o in wanted]
            self.say(200, {"transfer": "basic", "objects": objects})
        elif self.path.startswith("/lfs/"):
            self.server.assemble(json.loads(body)["oid"])
            self.say(200, {})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self.say(404, {"error": self.path})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        repo = "/".join(self.path.split("/")[3:5])
        parent = lines[0]["value"].get("parentCommit")
        if not self.server.commit(repo, lines[1:], parent):
            self.say(412, {"error": "a commit has happened since"})
            return
        oid = self.server.sha(repo)
        url = f"{self.server.endpoint}/datasets/{repo}/commit/{oid}"
        self.say(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def _refused(self) -> bool:
        if self.server.refuse_with:
            self.say(self.server.refuse_with, {"error": "no"})
        return bool(self.server.refuse_with)
