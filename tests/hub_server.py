"""A Hub on loopback: the HTTP interface that huggingface_hub uses to push model repositories and to load from them.

Commits are atomic, large files go by Git LFS, repositories may be private, and any request can be made to fail. Tests
ask it with the fixture `commands`.
"""

import base64
import hashlib
import json
import os
import re
import secrets
import socket
import threading
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import command_server
import pytest
from click.testing import Result
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from huggingface_hub.utils.sha import git_hash
from typer.testing import CliRunner

from resformer.cli import app

__all__ = ["Commands", "HubServer", "Repository", "Sparse"]


@dataclass(frozen=True)
class Sparse:
    """A large file, zero behind `head`, that takes no memory; its hash is made up."""

    head: bytes
    size: int
    oid: str

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.size)
        return self.head[start:stop].ljust(max(0, stop - start), b"\0")


Content = bytes | Sparse
#: Content, status and headers.
Response = tuple[Content, int, dict[str, str]]


class Repository(UserDict[str, Content]):
    """A model repository; as a mapping, the files of `main`: each change is a commit."""

    def __init__(self, *, private: bool = False) -> None:
        self.private = private
        self.commits: dict[str, dict[str, Content]] = {}
        self.objects: dict[str, Content] = {}  # SHA-256 -> content of the LFS objects that its commits may name
        self.messages: list[str] = []
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.commit({".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}, "initial commit")

    def commit(self, files: dict[str, Content], message: str, branch: str = "main") -> str:
        sha = self.branches[branch] = secrets.token_hex(20)
        self.commits[sha] = files
        self.objects |= {_sha256(content): content for name, content in files.items() if _is_large(name, content)}
        self.messages.append(message)
        return sha

    @property
    def data(self) -> dict[str, Content]:
        return self.commits[self.branches["main"]]

    def __setitem__(self, name: str, content: Content) -> None:
        self.update({name: content})

    def update(self, files: dict[str, Content]) -> None:
        self.commit({**self, **files}, "Upload files")

    def __delitem__(self, name: str) -> None:
        self.commit({other: content for other, content in self.items() if other != name}, f"Delete {name}")


class HubServer(ThreadingHTTPServer):
    """`with HubServer() as hub:` serves `hub.repositories` at `hub.url`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}"  # another host's, as large files of the Hub are
        self.repositories: dict[str, Repository] = {}
        self.tokens = {"hf_test": "you"}  # token -> user, who owns `user/*`
        self.requests: list[str] = []  # "METHOD /path?query", as they came
        self.sent = self.received = 0  # bytes of answers and requests, headers included
        self.lock = threading.RLock()
        self._faults: list[tuple[str, str]] = []  # (pattern of "METHOD /path?query", kind)
        self.watch: Callable[[str], object] = lambda request: None  # called with every request, before it is answered

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *request: object) -> None:
        """Clients hang up."""

    def environment(self, home: Path) -> dict[str, str]:
        """What a process needs in its environment, before it imports huggingface_hub, to take this for the Hub."""
        found = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        return {**found, "HF_TOKEN": "hf_test"}

    def add(self, repo_id: str, folder: Path) -> Repository:
        """Puts the files of `folder` into a repository, in one commit."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        repository = self.repositories.setdefault(repo_id, Repository())
        repository.update(files)
        return repository

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        with self.lock:
            self.sent += sent
            self.received += received

    def commit_id(self, repo_id: str) -> str:
        return self.repositories[repo_id].branches["main"]

    def reset(self) -> None:
        """As a new Hub."""
        for held in (self.repositories, self.requests, self._faults):
            held.clear()
        self.watch = lambda request: None

    def asked(self, pattern: str) -> list[str]:
        """The requests so far that match."""
        return [request for request in self.requests if re.search(pattern, request)]

    def fail(self, pattern: str, fault: str, times: int = 1) -> None:
        """Makes the next requests that match `pattern` fail.

        Args:
            fault: "request" cuts the connection in the middle of the request's body; "answer" in the middle of the
                answer, so that all is done, only the client cannot know; "503" or another number is the status of the
                answer; "short" is half of the bytes; "whole" the whole file instead of the range that was asked for;
                "away" sends the client to a host that does not answer.
        """
        self._faults += [(pattern, fault)] * times

    def fault(self, request: str) -> str | None:
        with self.lock:
            for fault in self._faults:
                if re.search(fault[0], request):
                    self._faults.remove(fault)
                    return fault[1]
        return None


class Commands:
    """Runs `resformer` in this process, which takes `hub` for the Hub, with a cache of its own."""

    def __init__(self, hub: HubServer, home: Path):
        self.hub, self.home = hub, home

    def direct(self, patch: pytest.MonkeyPatch) -> None:
        """Has huggingface_hub ask `hub` from now on."""
        patch.setattr(constants, "ENDPOINT", self.hub.url)
        patch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        patch.setattr(constants, "HF_HUB_CACHE", str(self.home / "hub"))
        patch.setattr(constants, "HF_ASSETS_CACHE", str(self.home / "assets"))
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(self.home / "token"))
        patch.setattr(hf_api.api, "endpoint", self.hub.url)
        patch.setenv("HF_TOKEN", "hf_test")
        patch.setattr("time.sleep", lambda seconds: None)  # between attempts

    def __call__(self, *words: object, token: str | None = "hf_test", offline: bool = False) -> Result:
        arguments = [str(word) for word in words]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", offline)
            patch.setenv("HF_TOKEN", token or "")
            patch.setattr("sys.argv", ["resformer", *arguments])
            disable_progress_bars()
            done = CliRunner().invoke(app, arguments)
            enable_progress_bars()
            return done

    def refused(self, *words: object, **options: Any) -> str:
        """The exit code and the one message of a command that fails."""
        done = self(*words, **options)
        assert (done.stdout, "Traceback" in done.stderr) == ("", False), done.stderr
        assert len(re.findall("^Error: ", done.stderr, re.MULTILINE)) == 1
        return f"{done.exit_code}: {done.stderr}"

    def start(self, *words: object, log: Path) -> command_server.Run:
        """Runs a command in a process that can be killed."""
        return command_server.Run(
            "-m", "resformer", *words, env={**os.environ, **self.hub.environment(self.home)}, log=log
        )


class _Answer(Exception):
    """What a request is answered with, where it is not the ordinary thing."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        request = f"{self.command} {self.path}"
        url = urlsplit(self.path)
        self._query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.server.requests.append(request)
        self.server.count(received=len(self.raw_requestline) + len(bytes(self.headers)))
        self._fault = self.server.fault(request)
        self.server.watch(request)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        try:
            body = self._body()
            self.server.count(received=len(body))
            if self._fault == "away":
                self._send(b"", 302, {"Location": "http://127.0.0.1:9/elsewhere"})
                return
            if self._fault is not None and self._fault.isdigit():
                raise _Answer(int(self._fault), "a bad day")
            with self.server.lock:
                self._user = self._known_user()
                answer = self._route(parts, body)
            self._send(*answer)
        except _Answer as error:
            content = json.dumps({"error": str(error)}).encode()
            self._send(content, error.status, {"Content-Type": "application/json", **error.headers})
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_POST = do_PUT = do_GET

    def _route(self, parts: list[str], body: bytes) -> Response:
        match self.command, parts:
            case "POST", ["api", "repos", "create"]:
                return self._create(json.loads(body))
            case "POST", ["api", "validate-yaml"]:
                return self._validate(json.loads(body)["content"])
            case "GET", ["api", "models", owner, name, *rest]:
                return self._describe(f"{owner}/{name}", rest)
            case "POST", ["api", "models", owner, name, what, *rest]:
                repo_id = f"{owner}/{name}"
                if what == "paths-info":
                    return self._paths(self._readable(repo_id), *rest, parse_qs(body.decode())["paths"])
                proposed = "create_pr" in self._query  # which anybody may
                repository = self._readable(repo_id) if proposed else self._writable(repo_id)
                match what, rest:
                    case "preupload", [revision]:
                        return self._preupload(repository, revision, json.loads(body))
                    case "commit", [branch]:
                        return self._commit(repo_id, repository, branch, body)
                    case "branch", [branch]:
                        sha = self._sha(repository, json.loads(body).get("startingPoint", "main"))
                        return self._name(repository.branches, branch, sha)
                    case "tag", [revision]:
                        return self._name(repository.tags, json.loads(body)["tag"], self._sha(repository, revision))
            case "POST", [owner, name, "info", "lfs", "objects", "batch"]:
                return self._batch(f"{owner}/{name.removesuffix('.git')}", json.loads(body))
            case _, ["objects", *_] if "Authorization" in self.headers:
                raise _Answer(400, "storage takes signed addresses, and must not see tokens")
            case "PUT", ["objects", owner, name, oid]:
                if _sha256(body) != oid:
                    raise _Answer(400, "the content does not match its SHA-256")
                self.server.repositories[f"{owner}/{name}"].objects[oid] = body
                return b"", 200, {}
            case "GET" | "HEAD", ["objects", owner, name, oid]:
                return self.server.repositories[f"{owner}/{name}"].objects[oid], 200, {"ETag": f'"{oid}"'}
            case "GET" | "HEAD", [owner, name, "resolve", revision, *file]:
                return self._file(f"{owner}/{name}", revision, "/".join(file))
        raise _Answer(404, f"{self.command} {self.path}: this Hub has no such thing")

    # Who may do what.

    def _known_user(self) -> str | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.server.tokens:
            raise _Answer(401, "Invalid credentials in Authorization header")
        return self.server.tokens.get(token)

    def _readable(self, repo_id: str) -> Repository:
        """To whom a private repository is not theirs, there is none."""
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and repo_id.split("/")[0] != self._user):
            raise _Answer(404 if self._user else 401, "Repository not found", "RepoNotFound")
        return repository

    def _writable(self, repo_id: str) -> Repository:
        repository = self._readable(repo_id)
        if repo_id.split("/")[0] != self._user:
            raise _Answer(403, "you have no write access to this repository")
        return repository

    # Repositories and their revisions.

    def _create(self, wanted: dict[str, Any]) -> Response:
        owner = wanted.get("organization") or self._user
        if owner != self._user:
            raise _Answer(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        repo_id = f"{owner}/{wanted['name']}"
        status = 409 if repo_id in self.server.repositories else 200
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.server.repositories.setdefault(repo_id, Repository(private=private))
        return _json({"url": f"{self.server.url}/{repo_id}", "id": repo_id, "name": repo_id}, status)

    def _validate(self, card: str) -> Response:
        stated = re.search("^license: (.*)$", card, re.MULTILINE)
        if stated and stated[1] not in ("apache-2.0", "mit", "llama3", "other"):
            return _json({"errors": [{"message": '"license" must be one of [apache-2.0, ...]'}], "warnings": []}, 400)
        return _json({"errors": [], "warnings": []})

    def _sha(self, repository: Repository, revision: str) -> str:
        """The commit of a branch, tag or commit id."""
        sha = {**repository.branches, **repository.tags}.get(revision, revision)
        if sha not in repository.commits:
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def _name(self, refs: dict[str, str], name: str, sha: str) -> Response:
        if name in refs:
            raise _Answer(409, f"Reference already exists: {name}")
        refs[name] = sha
        return _json({})

    def _describe(self, repo_id: str, rest: list[str]) -> Response:
        repository = self._readable(repo_id)
        match rest:
            case ["refs"]:
                tags = [{"name": n, "ref": n, "targetCommit": sha} for n, sha in repository.tags.items()]
                return _json({"branches": [], "tags": tags, "converts": []})
            case ["tree", revision, *folder]:
                return self._tree(repository, self._sha(repository, revision), "".join(f"{part}/" for part in folder))
            case [] | ["revision", _]:
                sha = self._sha(repository, rest[1] if rest else "main")
                files = repository.commits[sha]
                siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
                about = {"id": repo_id, "sha": sha, "siblings": siblings, "tags": [], "private": repository.private}
                return _json(about)
        raise _Answer(404, "Not found")

    def _tree(self, repository: Repository, sha: str, folder: str) -> Response:
        files = repository.commits[sha].items()
        found = [self._about_file(name, content) for name, content in files if name.startswith(folder)]
        if not found:
            raise _Answer(404, f"{folder} does not exist", "EntryNotFound")
        return _json(found)

    def _paths(self, repository: Repository, revision: str, names: list[str]) -> Response:
        files = repository.commits[self._sha(repository, revision)]
        return _json([self._about_file(name, files[name]) for name in names if name in files])

    def _about_file(self, name: str, content: Content) -> dict[str, Any]:
        about: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
        if not _is_large(name, content):
            return {**about, "oid": git_hash(content[:])}
        oid = _sha256(content)
        lfs = {"oid": oid, "size": len(content), "pointerSize": 134}
        return {**about, "oid": git_hash(oid.encode()), "lfs": lfs}

    # Uploads.

    def _preupload(self, repository: Repository, revision: str, wanted: dict[str, Any]) -> Response:
        present = repository.commits[self._sha(repository, revision)]
        files = []
        for file in wanted["files"]:
            name, sample = file["path"], base64.b64decode(file["sample"])
            mode = "lfs" if _is_large(name, sample, file["size"]) else "regular"
            oid = None
            if name in present:
                oid = _sha256(present[name]) if mode == "lfs" else git_hash(present[name][:])
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return _json({"files": files})

    def _batch(self, repo_id: str, wanted: dict[str, Any]) -> Response:
        repository, objects = self._readable(repo_id), []
        for item in wanted["objects"]:
            entry: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in repository.objects:
                upload = f"{self.server.storage}/objects/{repo_id}/{item['oid']}"
                entry["actions"] = {"upload": {"href": upload}}
            objects.append(entry)
        return _json({"transfer": "basic", "objects": objects})

    def _commit(self, repo_id: str, repository: Repository, branch: str, body: bytes) -> Response:
        parent = self._sha(repository, branch)
        files = dict(repository.commits[parent])
        message = ""
        for operation in map(json.loads, body.splitlines()):
            value = operation["value"]
            match operation["key"]:
                case "header":
                    message = value["summary"]
                    if value.get("parentCommit", parent) != parent:
                        raise _Answer(412, "A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    if value["oid"] not in repository.objects:
                        raise _Answer(400, f"LFS pointer of {value['path']} points to a file that does not exist")
                    files[value["path"]] = repository.objects[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        answer: dict[str, Any] = {"success": True}
        if self._query.get("create_pr"):
            branch = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in repository.branches)}"
            answer["pullRequestUrl"] = f"{self.server.url}/{repo_id}/discussions/{branch.rpartition('/')[2]}"
        sha = repository.commit(files, message, branch)
        return _json({**answer, "commitUrl": f"{self.server.url}/{repo_id}/commit/{sha}", "commitOid": sha})

    # Downloads.

    def _file(self, repo_id: str, revision: str, name: str) -> Response:
        repository = self._readable(repo_id)
        sha = self._sha(repository, revision)
        content = repository.commits[sha].get(name)
        if content is None:
            missing = _Answer(404, "Entry not found", "EntryNotFound")
            missing.headers["X-Repo-Commit"] = sha
            raise missing
        headers = {"X-Repo-Commit": sha}
        if not _is_large(name, content):
            return content, 200, {**headers, "ETag": f'"{git_hash(content[:])}"'}
        oid = _sha256(content)
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        return b"", 302, {**headers, **linked, "Location": f"{self.server.storage}/objects/{repo_id}/{oid}"}

    # HTTP.

    def _body(self) -> bytes:
        cut = self._fault == "request"
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length // 2 if cut else length)
        if cut:
            self._hang_up()
        return body

    def _send(self, content: Content, status: int, headers: dict[str, str]) -> None:
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part and status == 200 and self._fault != "whole":
            start, stop = int(part[1]), min(int(part[2]) + 1, len(content))
            status, headers = 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            content = content[start : stop if self._fault != "short" else (start + stop) // 2]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.server.count(sent=sum(map(len, self._headers_buffer)))  # type: ignore[attr-defined]
        self.end_headers()
        cut = self._fault == "answer"
        if self.command != "HEAD":
            end = len(content) // 2 if cut else len(content)
            for start in range(0, end, 2**20):
                self.server.count(sent=self.wfile.write(content[start : min(start + 2**20, end)]))
        if cut:
            self.wfile.flush()
            self._hang_up()

    def _hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError

    def log_message(self, *arguments: object) -> None:
        pass


def _json(value: Any, status: int = 200) -> Response:
    return json.dumps(value).encode(), status, {"Content-Type": "application/json"}


def _is_large(name: str, sample: Content, size: int | None = None) -> bool:
    """Whether a file goes by LFS: by its name, by its size, or because it is binary."""
    size = len(sample) if size is None else size
    return bool(size) and (name.endswith((".safetensors", ".gguf")) or size > 10_000_000 or b"\0" in sample[:512])


def _sha256(content: Content) -> str:
    return content.oid if isinstance(content, Sparse) else hashlib.sha256(content).hexdigest()
