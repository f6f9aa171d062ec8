"""A Hub on loopback: enough of its HTTP interface to create, push to and load from model repositories."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["HubServer"]


class HubServer:
    """`with HubServer() as hub:` serves `hub.repositories` (id -> file name -> bytes) at `hub.url`."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, repo_id: str, folder: Path) -> None:
        """Puts the files of `folder` into a repository."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories.setdefault(repo_id, {}).update(files)

    def commit_id(self, repo_id: str) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.repositories[repo_id].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self._parts()
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._describe("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._json({"error": "not found"}, 404)

    def do_POST(self) -> None:
        parts, body = self._parts(), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if parts == ["api", "repos", "create"]:
            name = json.loads(body)
            repo_id = f"{name.get('organization') or 'you'}/{name['name']}"
            self._hub.repositories.setdefault(repo_id, {".gitattributes": b""})
            self._json({"url": f"{self._hub.url}/{repo_id}", "id": repo_id, "name": repo_id})
        elif parts == ["api", "validate-yaml"]:
            self._json({"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._json({"files": files})
        elif "commit" in parts:
            self._commit("/".join(parts[2:4]), body)
        else:
            self._json({"error": "not found"}, 404)

    def _describe(self, repo_id: str, rest: list[str]) -> None:
        files = self._hub.repositories.get(repo_id)
        if files is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["tree"]:
            self._json([{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self._json({"id": repo_id, "modelId": repo_id, "sha": self._hub.commit_id(repo_id), "siblings": siblings})

    def _file(self, repo_id: str, name: str) -> None:
        content = self._hub.repositories.get(repo_id, {}).get(name)
        if content is None:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": self._hub.commit_id(repo_id), "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        self._send(content, 200, headers)

    def _commit(self, repo_id: str, body: bytes) -> None:
        files = self._hub.repositories[repo_id]
        for line in body.splitlines():
            operation = json.loads(line)
            if operation["key"] == "file":
                files[operation["value"]["path"]] = base64.b64decode(operation["value"]["content"])
        sha = self._hub.commit_id(repo_id)
        self._json({"success": True, "commitUrl": f"{self._hub.url}/{repo_id}/commit/{sha}", "commitOid": sha})

    @property
    def _hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined]

    def _parts(self) -> list[str]:
        self._hub.requests.append(f"{self.command} {self.path}")
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass
