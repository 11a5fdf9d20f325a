"""As much of the API of Weights & Biases as is asked for runs, files and reports, on this machine.

It serves runs that a test has recorded offline.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from wandb_files import stored

USER = {
    **{"id": "VXNlcjox", "name": "me", "username": "me", "email": "me@lab", "entity": "lab"},
    **{"admin": False, "flags": "{}", "deletedAt": None, "apiKeys": {"edges": []}},
    "teams": {"edges": []},
}


class Server(ThreadingHTTPServer):
    """Answers from `runs`, and keeps the reports it is given in `reports`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, Path] = {}
        self.reports: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.is_known = True

    def add(self, *directories: Path) -> None:
        """Serve a run, whose files are in these directories, the first begun first."""
        found: dict[str, Any] = {"config": {}, "summary": {}, "history": [], "files": []}
        for directory in directories:
            part = stored(directory)
            found["run"] = part["run"]
            found["config"] |= part["config"]
            found["summary"] |= part["summary"]
            found["history"] += part["history"]
            for file in (directory / "files" / "evaluation").rglob("*.json*"):
                name = file.relative_to(directory / "files").as_posix()
                found["files"].append(name)
                self.files[f"/files/{part['run']['run_id']}/{name}"] = file
        self.runs[found["run"]["run_id"]] = found

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer a query of GraphQL by what it asks for."""
        if "viewer" in query:
            return {"viewer": USER if self.is_known else None}
        if "upsertView" in query:
            self.reports.append(given)
            view = {"id": "Vmlldzox", "displayName": given["displayName"], "spec": given["spec"]}
            about = {"name": given["projectName"], "entityName": given["entityName"]}
            times = {"createdAt": "2025-01-01T00:00:00", "updatedAt": "2025-01-01T00:00:00"}
            more = {"name": "n", "description": "", "type": "runs", "user": None, "project": about}
            return {"upsertView": {"view": view | times | more, "inserted": True}}
        if "runs(" in query:
            edges = [{"node": self._node(run), "cursor": "c"} for run in self.runs.values()]
            page = {"endCursor": "c", "hasNextPage": False}
            runs = {"edges": edges, "pageInfo": page}
            return {"project": {"internalId": "1", "runCount": 1, "readOnly": False, "runs": runs}}
        if "models(" in query or "projects(" in query:
            node = {"node": {"id": "1", "name": "students", "entityName": "lab"}, "cursor": "c"}
            node["node"] |= {"createdAt": "2025-01-01T00:00:00", "isBenchmark": False, "user": USER}
            return {
                "models": {"edges": [node], "pageInfo": {"endCursor": "c", "hasNextPage": False}}
            }
        if "ProjectInternalId" in query:
            return {"project": {"id": "1", "internalId": "1"}}
        run = self.runs.get(given.get("name", ""), {})
        if "history(" in query:
            rows = [json.dumps(row) for row in run["history"]]
            return {"project": {"run": {"history": rows}}}
        if "files(" in query:
            edges = [{"node": self._file(run, name), "cursor": name} for name in run["files"]]
            files = {"edges": edges, "pageInfo": {"endCursor": "c", "hasNextPage": False}}
            about = {"fileCount": len(edges), "id": "1", "files": files}
            return {"project": {"internalId": "1", "run": about}}
        raise AssertionError(f"nobody has recorded an answer to {query[:400]}")

    def _node(self, run: dict[str, Any]) -> dict[str, Any]:
        start = run["run"]
        config = {name: {"value": value} for name, value in run["config"].items()}
        return {
            **{"id": "1", "projectId": "1", "name": start["run_id"], "tags": start.get("tags", [])},
            **{"displayName": start["display_name"], "state": "finished", "sweepName": None},
            **{"config": json.dumps(config), "summaryMetrics": json.dumps(run["summary"])},
            **{"group": start.get("run_group"), "jobType": None, "commit": None, "notes": None},
            **{"readOnly": False, "createdAt": start["start_time"], "heartbeatAt": None},
            **{"description": None, "systemMetrics": "{}", "historyLineCount": 1, "user": None},
            "historyKeys": None,
        }

    def _file(self, run: dict[str, Any], name: str) -> dict[str, Any]:
        path = f"/files/{run['run']['run_id']}/{name}"
        size = self.files[path].stat().st_size
        return {
            **{"id": name, "name": name, "url": self.url + path, "directUrl": self.url + path},
            **{"sizeBytes": str(size), "mimetype": "application/json", "md5": "", "digest": ""},
            **{"updatedAt": "2025-01-01T00:00:00", "uploadUrl": None},
        }


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/graphql":
            return self._send(b"{}")
        asked = json.loads(content)
        answer = self.server.answer(asked["query"], asked.get("variables") or {})
        self._send(json.dumps({"data": answer}).encode())

    def do_GET(self) -> None:
        self._send(self.server.files[self.path].read_bytes())

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    """A server in a thread of its own."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
