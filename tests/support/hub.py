"""A stand-in for the hub's HTTP API, with repositories in memory.

It answers what a push asks for: to create a repository, to announce files and to commit them. It
logs requests, so that a test sees them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "0" * 40
_API = re.compile(r"/api/(?:models|datasets)/([\w.-]+/[\w.-]+)(?:/(.*))?")


@dataclass
class Hub:
    """Repositories by name, as {path: content}, the titles of their commits, and all requests."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str, body: bytes) -> Any:
        """The answer to a request of the API, as JSON; None where there is none."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization") or "me", asked["name"])))
            self.repositories.setdefault(name, {})
            return {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/whoami-v2":
            return {"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if not (found := _API.fullmatch(path)) or found[1] not in self.repositories:
            return None
        return self._of_repository(found[1], (found[2] or "").partition("/")[0], body)

    def _of_repository(self, name: str, asked_for: str, body: bytes) -> Any:
        files = self.repositories[name]
        if asked_for == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": path, **mode} for path in paths]}
        if asked_for == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.commits.append(value["summary"])
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
            return {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        siblings = [{"rfilename": path} for path in files]
        return {"id": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on this machine; HF_ENDPOINT=hub.url leads to it."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = hub.answer(path, body)
            if answer is None:
                self.reply(404, b"{}", X_Error_Code="RepoNotFound")
            else:
                self.reply(200, json.dumps(answer).encode(), Content_Type="application/json")

        do_POST = do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
