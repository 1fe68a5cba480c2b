"""A W&B server on loopback: what the real client, its wandb-core and `wandb.Api` need, and faults on demand.

It keeps history lines by file offset as the real one does, answers resume requests from what it holds, refuses ids of
deleted runs, and remembers every request. Nothing of it is in the wheel.

    python -m tests.wandb_server --port 8080      # for benchmarks, in a process of its own
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

KEY: Final = "k" * 40
ENTITY: Final = "tester"

_OPERATION: Final = re.compile(r"(?:query|mutation)\s+(\w+)")
_STREAMS: Final = {"wandb-history.jsonl": "history", "wandb-events.jsonl": "events", "output.log": "output"}


@dataclass
class Run:
    """One run as the server holds it; lines are text as they came."""

    id: str
    name: str
    project: str
    entity: str
    display_name: str = ""
    notes: str | None = None
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    job_type: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    state: str = "running"
    exit_code: int | None = None
    history: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    overwritten: int = 0
    holes: int = 0
    upserts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The history, parsed."""
        return [json.loads(line) for line in self.history]

    @property
    def values(self) -> dict[str, Any]:
        """The configuration without W&B's wrapping."""
        return {key: item["value"] for key, item in self.config.items() if key != "_wandb"}

    @property
    def about(self) -> dict[str, Any]:
        """Our dictionary in the configuration."""
        return dict(self.values.get("llmtrack") or {})


@dataclass
class Fault:
    """What is to go wrong, how often.

    Attributes:
        where: ``file_stream``, ``files``, the name of a GraphQL operation, or ``graphql`` for any.
        status: What is answered instead; None with `cut`.
        times: For how many requests; a negative number never ends.
        cut: The connection is reset ``before`` the request is done, or ``after``.
        retry_after: Seconds, as a header of the answer.
        delay_s: How long the request takes; without `status` and `cut` it is then done.
        skip: So many requests go through first.
        message: Of a GraphQL error.
    """

    where: str
    status: int | None = None
    times: int = 1
    cut: str = ""
    retry_after: float | None = None
    delay_s: float = 0.0
    skip: int = 0
    message: str = "injected"


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    operation: str
    headers: dict[str, str]
    body: bytes


class WandbServer:
    """The server; a context manager.

    Args:
        port: 0 for any that is free.
        remember: Keep every request; a benchmark does without.
    """

    def __init__(self, port: int = 0, *, remember: bool = True) -> None:
        self.runs: dict[tuple[str, str], Run] = {}
        self.deleted: set[tuple[str, str]] = set()
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.key = KEY
        self.lock = threading.RLock()
        self._remember = remember
        self._frozen: dict[tuple[str, str], int] | None = None
        self._frozen_answers = 0
        self._hidden_from: int | None = None
        self._next_id = 0
        self._port = port
        self._http: _Http | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Answer again, at the same port."""
        self._http = _Http(self._port, self)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="wandb-server", daemon=True)
        self._thread.start()

    def down(self) -> None:
        """Refuse connections, and cut those that are open."""
        if self._http is None or self._thread is None:
            return
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self._http.cut_all()
        self._http = self._thread = None

    def fail(self, where: str, status: int | None = None, **more: Any) -> None:
        """Inject a fault; see `Fault`."""
        with self.lock:
            self.faults.append(Fault(where, status, **more))

    def heal(self) -> None:
        """Take all faults away."""
        with self.lock:
            self.faults.clear()
            self._frozen = self._hidden_from = None

    def hide_rows_from(self, number: int) -> None:
        """Count all rows, and show none from this number on, as a read side does that lags behind."""
        with self.lock:
            self._hidden_from = number

    def snapshot(self) -> dict[tuple[str, str], int]:
        """Return how many rows each run has."""
        with self.lock:
            return {place: len(run.history) for place, run in self.runs.items()}

    def freeze(self, counts: dict[tuple[str, str], int], *, answers: int) -> None:
        """Give stale answers: runs are told of as they were at a snapshot, so many times."""
        with self.lock:
            self._frozen = dict(counts)
            self._frozen_answers = answers

    def find(self, project: str, **about: Any) -> list[Run]:
        """Return the runs of a project whose `llmtrack` dictionary has these entries."""
        with self.lock:
            found = [run for (of, _), run in self.runs.items() if of == project]
        return [run for run in found if all(run.about.get(key) == value for key, value in about.items())]

    # What comes in.

    def fault_for(self, where: str) -> Fault | None:
        """Return what is to go wrong with a request, and count it."""
        with self.lock:
            for fault in self.faults:
                if fault.where != where and not (fault.where == "graphql" and where not in {"file_stream", "files"}):
                    continue
                if fault.skip:
                    fault.skip -= 1
                elif fault.times:
                    fault.times -= 1
                    return fault
            return None

    def note(self, request: Request) -> None:
        """Count a request, and remember it."""
        with self.lock:
            self.counts[request.operation] += 1
            if self._remember:
                self.requests.append(request)

    def stream(self, project: str, name: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Take a chunk of a run's files; None when there is no such run."""
        with self.lock:
            run = self.runs.get((project, name))
            if run is None:
                return None
            for file, chunk in (body.get("files") or {}).items():
                if file == "wandb-summary.json":
                    run.summary = json.loads(chunk["content"][-1])
                elif file in _STREAMS:
                    self._put(run, getattr(run, _STREAMS[file]), chunk["offset"], chunk["content"])
            if body.get("complete"):
                run.exit_code = body.get("exitcode", 0)
                run.state = "finished" if run.exit_code == 0 else "failed"
            elif body.get("preempting"):
                run.state = "preempting"
            return {}

    def _put(self, run: Run, lines: list[str], offset: int, content: list[str]) -> None:
        if offset > len(lines):
            run.holes += offset - len(lines)
            lines += ["{}"] * (offset - len(lines))
        there = lines[offset : offset + len(content)]
        run.overwritten += sum(old != new for old, new in zip(there, content, strict=False))
        lines[offset : offset + len(content)] = content

    def graphql(self, operation: str, v: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer one GraphQL operation."""
        method: Callable[[dict[str, Any]], Any] | None = getattr(self, f"_on_{operation}", None)
        if method is None:
            return 400, {"errors": [{"message": f"Unknown operation {operation}"}]}
        with self.lock:
            try:
                return 200, {"data": method(v)}
            except _GraphQLError as error:
                return error.status, {"errors": [{"message": str(error)}], "data": None}

    # What is answered.

    def _on_Viewer(self, _: dict[str, Any]) -> Any:  # noqa: N802 - W&B's names
        teams = {"edges": [{"node": {"name": ENTITY}}]}
        viewer = {"id": "VXNlcjox", "entity": ENTITY, "username": ENTITY, "name": ENTITY, "email": "t@example.org"}
        return {"viewer": viewer | {"flags": "{}", "teams": teams, "admin": False, "apiKeys": {"edges": []}}}

    _on_GetViewer = _on_GetDefaultEntity = _on_Viewer  # noqa: N815

    def _on_ServerFeaturesQuery(self, _: dict[str, Any]) -> Any:  # noqa: N802
        return {"serverInfo": {"features": []}}

    def _on_OrganizationCoreWeaveOrganizationID(self, _: dict[str, Any]) -> Any:  # noqa: N802
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def _on_RunResumeStatus(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self.runs.get((v["project"], v["name"]))
        if run is None:
            bucket = None
        else:
            lines = run.history[: self._told(run)]
            last = json.loads(lines[-1]).get("_step", -1) if lines else -1
            summary = run.summary if self._told(run) == len(run.history) else run.summary | {"_step": last}
            bucket = {
                "id": run.id,
                "name": run.name,
                "summaryMetrics": json.dumps(summary),
                "displayName": run.display_name,
                "logLineCount": len(run.output),
                "historyLineCount": len(lines),
                "eventsLineCount": len(run.events),
                "historyTail": json.dumps(lines[-1:]),
                "eventsTail": json.dumps(run.events[-1:]),
                "config": json.dumps(run.config),
                "tags": run.tags,
                "notes": run.notes,
                "wandbConfig": json.dumps({"t": {}}),
            }
            self._thaw()
        project = {"id": "p", "name": v["project"], "entity": {"id": "e", "name": v.get("entity") or ENTITY}}
        return {"model": project | {"bucket": bucket}}

    def _on_UpsertBucket(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run, inserted = self._wanted(v), False
        if run is None:
            place = (v.get("project") or "uncategorized", v["name"])
            if place in self.deleted:
                raise _GraphQLError(
                    f"run {place[1]} was previously created and deleted; try a new run name", status=409
                )
            self._next_id += 1
            run = Run(f"UnVuOjE6{self._next_id}", place[1], place[0], v.get("entity") or ENTITY)
            self.runs[place] = run
            inserted = True
        run.upserts.append(v)
        for name, attribute in (
            ("displayName", "display_name"),
            ("display_name", "display_name"),
            ("notes", "notes"),
            ("tags", "tags"),
            ("groupName", "group"),
            ("jobType", "job_type"),
        ):
            if v.get(name) is not None:
                setattr(run, attribute, v[name])
        if v.get("config") is not None:
            run.config = json.loads(v["config"])
        if v.get("summaryMetrics") is not None:
            run.summary = json.loads(v["summaryMetrics"])
        if v.get("id") is None and run.state != "running":
            run.state, run.exit_code = "running", None
        if v.get("state"):
            run.state = v["state"]
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _on_RewindRun(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self._run(v["project"], v["runName"])
        run.history = [line for line in run.history if json.loads(line).get("_step", 0) <= v["metricValue"]]
        return {"rewindRun": {"rewoundRun": self._bucket(run)}}

    def _on_DeleteRun(self, v: dict[str, Any]) -> Any:  # noqa: N802
        for place, run in list(self.runs.items()):
            if run.id == v["id"]:
                del self.runs[place]
                self.deleted.add(place)
                return {"deleteRun": {"clientMutationId": None}}
        raise _GraphQLError("could not find run")

    def _on_UpdateRunState(self, v: dict[str, Any]) -> Any:  # noqa: N802
        for run in self.runs.values():
            if run.id == v["input"]["id"]:
                run.state = v["input"]["state"]
        return {"updateRunState": {"success": True}}

    def _on_RunStoppedStatus(self, _: dict[str, Any]) -> Any:  # noqa: N802
        return {"project": {"run": {"stopped": False}}}

    def _on_RunState(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self._run(v["project"], v.get("run") or v["name"])
        return {"project": {"run": {"id": run.id, "state": run.state}}}

    def _on_CreateRunFiles(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self._run(v["project"], v["run"])
        base = f"{self.url}/upload/{urllib.parse.quote(run.project)}/{run.name}/"
        files = [{"name": name, "uploadUrl": base + urllib.parse.quote(name)} for name in v["files"]]
        return {"createRunFiles": {"runID": run.id, "uploadHeaders": [], "files": files}}

    def _on_MarkRunFilesUploaded(self, _: dict[str, Any]) -> Any:  # noqa: N802
        return {"markRunFilesUploaded": {"success": True}}

    def _on_NotifyScriptableRunAlert(self, v: dict[str, Any]) -> Any:  # noqa: N802
        self._run(v["projectName"], v["runName"]).alerts.append(v)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _on_Run(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self.runs.get((v["project"], v["name"]))
        return {"project": {"run": None if run is None else self._node(run)}}

    def _on_Runs(self, v: dict[str, Any]) -> Any:  # noqa: N802
        matches = _filter(json.loads(v.get("filters") or "{}"))
        found = [run for (project, _), run in self.runs.items() if project == v["project"] and matches(run)]
        if not any(project == v["project"] for project, _ in self.runs):
            return {"project": None}
        first, size = int(v.get("cursor") or 0), v.get("perPage") or 50
        page = found[first : first + size]
        edges = [{"node": self._node(run), "cursor": str(first + n)} for n, run in enumerate(page, start=1)]
        info = {"endCursor": str(first + len(page)), "hasNextPage": first + len(page) < len(found)}
        project = {"internalId": "1", "runCount": len(found), "readOnly": False}
        return {"project": project | {"runs": {"edges": edges, "pageInfo": info}}}

    def _on_RunHistoryKeys(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self._run(v["project"], v["name"])
        answer = {"project": {"run": {"historyKeys": self._history_keys(run)}}}
        self._thaw()
        return answer

    def _on_RunParquetHistory(self, _: dict[str, Any]) -> Any:  # noqa: N802
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": []}}}}

    def _on_HistoryPage(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self._run(v["project"], v["run"])
        first, end = int(v["minStep"]), int(v["maxStep"])
        there = run.history[: self._told(run)][: self._hidden_from]
        lines = there[first:end]
        if not lines or _step(lines[0]) != first or _step(lines[-1]) != first + len(lines) - 1:
            lines = [line for line in there if first <= _step(line) < end]  # not numbered without gaps
        return {"project": {"run": {"history": lines[: int(v["pageSize"])]}}}

    def _on_SampledHistoryPage(self, v: dict[str, Any]) -> Any:  # noqa: N802
        run = self._run(v["project"], v["run"])
        spec = json.loads(v["spec"])
        first, end = spec.get("minStep", 0), spec.get("maxStep", 1 << 62)
        keys = spec["keys"]
        rows = [r for r in run.rows if first <= r.get("_step", -1) < end and all(key in r for key in keys)]
        return {"project": {"run": {"sampledHistory": [[{key: row[key] for key in keys} for row in rows]]}}}

    # Of what it holds.

    def _wanted(self, v: dict[str, Any]) -> Run | None:
        if v.get("id") is not None:
            return next((run for run in self.runs.values() if run.id == v["id"]), None)
        return self.runs.get((v.get("project") or "uncategorized", v["name"]))

    def _run(self, project: str, name: str) -> Run:
        run = self.runs.get((project, name))
        if run is None:
            raise _GraphQLError(f"could not find run {project}/{name}")
        return run

    def _told(self, run: Run) -> int:
        """How many of its lines are told of: fewer than there are while answers are stale."""
        if self._frozen is None:
            return len(run.history)
        return min(len(run.history), self._frozen.get((run.project, run.name), 0))

    def _thaw(self) -> None:
        if self._frozen is not None and self._frozen_answers > 0:
            self._frozen_answers -= 1
            if not self._frozen_answers:
                self._frozen = None

    def _history_keys(self, run: Run) -> dict[str, Any]:
        lines = run.history[: self._told(run)]
        return {"lastStep": json.loads(lines[-1]).get("_step", -1) if lines else -1, "keys": {}}

    def _bucket(self, run: Run) -> dict[str, Any]:
        project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": run.entity}}
        return self._node(run) | {"project": project}

    def _node(self, run: Run) -> dict[str, Any]:
        return {
            "id": run.id,
            "projectId": "1",
            "name": run.name,
            "displayName": run.display_name,
            "description": run.notes,
            "notes": run.notes,
            "sweepName": None,
            "state": run.state,
            "config": json.dumps(run.config),
            "group": run.group,
            "jobType": run.job_type,
            "commit": None,
            "readOnly": False,
            "createdAt": "2026-01-01T00:00:00",
            "heartbeatAt": "2026-01-01T00:00:00",
            "tags": run.tags,
            "systemMetrics": "{}",
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": self._told(run),
            "historyKeys": self._history_keys(run),
            "user": {"name": ENTITY, "username": ENTITY},
        }


class _GraphQLError(Exception):
    def __init__(self, message: str, *, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


def _step(line: str) -> int:
    return int(json.loads(line).get("_step", -1))


def _filter(spec: dict[str, Any]) -> Callable[[Run], bool]:
    """Make a predicate of the few of MongoDB's words that are used."""

    def value(run: Run, path: str) -> Any:
        if not path.startswith("config."):
            return {"group": run.group, "name": run.name, "tags": run.tags, "jobType": run.job_type}.get(path)
        found: Any = run.config
        for part in path.split(".")[1:]:
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def matches(run: Run) -> bool:
        for path, wanted in spec.items():
            if path in {"$or", "$and"}:
                if not (any if path == "$or" else all)(_filter(part)(run) for part in wanted):
                    return False
                continue
            there = value(run, path)
            choices = wanted["$in"] if isinstance(wanted, dict) and "$in" in wanted else [wanted]
            if there not in choices and not (isinstance(there, list) and set(there) & set(choices)):
                return False
        return True

    return matches


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, port: int, server: WandbServer) -> None:
        self.wandb = server
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that went away is what is tested."""

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        """Close the connections that are open."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def _wandb(self) -> WandbServer:
        assert isinstance(self.server, _Http)
        return self.server.wandb

    def do_GET(self) -> None:
        """Answer nothing: the client gets everything it wants by POST."""
        self._answer(404, b"{}")

    def do_PUT(self) -> None:
        """Take a file."""
        body = self._body()
        wandb = self._wandb
        wandb.note(Request("PUT", self.path, "upload", dict(self.headers), body))
        _, _, project, name, *file = self.path.split("/")
        run = wandb.runs.get((urllib.parse.unquote(project), name))
        if run is not None:
            run.files[urllib.parse.unquote("/".join(file))] = body
        self._answer(200 if run else 404, b"")

    def do_POST(self) -> None:
        """Answer GraphQL and take chunks of files."""
        body = self._body()
        wandb = self._wandb
        parsed = json.loads(body) if self.path == "/graphql" or self.path.endswith("/file_stream") else {}
        if self.path == "/graphql":
            found = _OPERATION.search(parsed["query"])
            where = parsed.get("operationName") or (found.group(1) if found else "")
        else:
            where = "file_stream" if self.path.endswith("/file_stream") else "other"
        wandb.note(Request("POST", self.path, where, dict(self.headers), body))
        if where == "other":
            self._answer(404, b"{}")
            return
        fault = wandb.fault_for(where)
        if fault is not None and not self._survives(fault):
            return
        if not self._is_let_in():
            self._answer(401, b'{"errors": [{"message": "user is not logged in"}]}')
            return
        if self.path == "/graphql":
            status, answer = wandb.graphql(where, parsed.get("variables") or {})
        else:
            *_, project, name, _ = self.path.split("/")
            streamed = wandb.stream(urllib.parse.unquote(project), urllib.parse.unquote(name), parsed)
            status, answer = (404, {"error": "run not found"}) if streamed is None else (200, streamed)
        if fault is not None and fault.cut == "after":
            self._reset()
            return
        self._answer(status, json.dumps(answer).encode())

    def _survives(self, fault: Fault) -> bool:
        """Do what a fault says; return whether the request is to be done all the same."""
        if fault.delay_s:
            time.sleep(fault.delay_s)
        if fault.cut == "before":
            self._reset()
        elif fault.status is not None:
            headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            self._answer(fault.status, json.dumps({"errors": [{"message": fault.message}]}).encode(), headers)
        return fault.cut == "after" or (not fault.cut and fault.status is None)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.wfile.close()
        self.connection.close()

    def _is_let_in(self) -> bool:
        kind, _, secret = self.headers.get("Authorization", "").partition(" ")
        return kind == "Basic" and b64decode(secret).decode() == f"api:{self._wandb.key}"

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the library's
        """Say nothing."""


@contextlib.contextmanager
def serving(**more: Any) -> Iterator[WandbServer]:
    """Run a server for a while."""
    with WandbServer(**more) as server:
        yield server


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8080)
    with serving(port=parser.parse_args().port, remember=False) as server:
        print(server.url, flush=True)  # noqa: T201 - whoever started it waits for this line
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
