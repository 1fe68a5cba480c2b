"""MLflow's public REST API as far as points and tables need it, without MLflow itself.

MLflow's client turns every metric into a protocol buffer and that into indented JSON, which costs five times as much as
writing the same JSON, takes two seconds to import, and cannot tell one failure of the network from another. So what is
called often is asked for here, and everything else goes to MLflow's client, which is imported when it is first needed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import quote, unquote, urlsplit

from llmtrack.sync.sink import Record

if TYPE_CHECKING:
    import requests
    from mlflow.tracking import MlflowClient

_API: Final = "/api/2.0/mlflow"
_ARTIFACTS: Final = "/api/2.0/mlflow-artifacts/artifacts"
_PROXIED: Final = "mlflow-artifacts"
_NOT_THERE: Final = "RESOURCE_DOES_NOT_EXIST"
_EXISTS: Final = "RESOURCE_ALREADY_EXISTS"
_EMPTY: Final = "EMPTY_ANSWER"
_NOT_JSON: Final = "NOT_JSON"
_CREDENTIALS: Final = Path("~/.mlflow/credentials")
# With one of these MLflow itself has to say how a request is made.
_SPECIAL: Final = ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4", "MLFLOW_WORKSPACE")

PAGE_RUNS: Final = 500
_BATCH_TEXTS: Final = 100  # parameters or tags in one request
OLDEST_FIRST: Final = ["attributes.start_time ASC"]
_SINGLE_SEARCHES: Final = 20  # above it, one search for all runs of an experiment is cheaper

Send = Callable[[str, str, Mapping[str, Any] | None, bytes | None], "requests.Response"]


class RestError(Exception):
    """The server answered, and not as was hoped.

    Attributes:
        status: Of HTTP.
        error_code: MLflow's word for it; `HTTP_<status>` when whatever answered is not MLflow.
        retry_after_s: Seconds after which it wants to be asked again; None when it does not say.
    """

    def __init__(self, message: str, status: int, error_code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class Experiment(NamedTuple):
    """As MLflow's entity of this name."""

    experiment_id: str
    lifecycle_stage: str


class Info(NamedTuple):
    """As MLflow's `RunInfo`; times in milliseconds since the epoch."""

    run_id: str
    run_name: str
    experiment_id: str
    status: str
    start_time: int | None
    end_time: int | None
    lifecycle_stage: str
    artifact_uri: str


class Latest(NamedTuple):
    """As MLflow's `Metric`."""

    key: str
    value: float
    timestamp: int
    step: int


class Data:
    """As MLflow's `RunData`."""

    def __init__(self, metrics: list[Latest], params: dict[str, str], tags: dict[str, str]) -> None:
        self._metric_objs = metrics
        self.metrics = {metric.key: metric.value for metric in metrics}
        self.params = params
        self.tags = tags


class ModelOutput(NamedTuple):
    """As MLflow's `LoggedModelOutput`."""

    model_id: str
    step: int


class Outputs(NamedTuple):
    """As MLflow's `RunOutputs`."""

    model_outputs: list[ModelOutput]


class File(NamedTuple):
    """As MLflow's `FileInfo`; the path is that below the run's artifacts."""

    path: str
    file_size: int | None


class Run(NamedTuple):
    """As MLflow's `Run`; outputs are None where they were not asked for."""

    info: Info
    data: Data
    outputs: Outputs | None = None


class RestClient:
    """MLflow's client for a server, with the calls of this module in place of its own; may be used by several threads.

    Args:
        uri: ``http://…`` or ``https://…``.
        timeout_s: For one answer; MLFLOW_HTTP_REQUEST_TIMEOUT is heeded.
    """

    def __init__(self, uri: str, timeout_s: float) -> None:
        self._uri = uri
        self._send = _send_as_mlflow(uri) if _is_special() else _send_plainly(uri, timeout_s)
        self._lock = threading.Lock()
        self._whole: MlflowClient | None = None

    def __getattr__(self, name: str) -> Any:
        """Return whatever else MLflow's client can do."""
        if name.startswith("__"):
            raise AttributeError(name)
        with self._lock:
            if self._whole is None:
                self._whole = whole_client(self._uri)
        return getattr(self._whole, name)

    def close(self) -> None:
        """Let go of connections; there is nothing that must be."""

    def probe(self) -> None:
        """See that a server answers, and as MLflow does."""
        self._post("experiments/search", {"max_results": 1})

    def get_experiment_by_name(self, name: str) -> Experiment | None:
        """Return an experiment, deleted or not."""
        try:
            found = self._get("experiments/get-by-name", {"experiment_name": name})["experiment"]
        except RestError as error:
            if error.error_code == _NOT_THERE:
                return None
            raise
        return Experiment(str(found["experiment_id"]), str(found.get("lifecycle_stage", "active")))

    def ours(self, experiment_id: str, run_ids: Sequence[str]) -> list[Any]:
        """Return at least those runs of an experiment that are tagged as some runs of the log, oldest first."""
        return [run for text in filters(run_ids) for run in self._search(experiment_id, text)]

    def _search(self, experiment_id: str, text: str) -> Iterator[Run]:
        token = None
        while True:
            body = {
                "experiment_ids": [experiment_id],
                "filter": text,
                "max_results": PAGE_RUNS,
                "order_by": OLDEST_FIRST,
            }
            found = self._post("runs/search", body | ({"page_token": token} if token else {}))
            yield from map(_run, found.get("runs", ()))
            token = found.get("next_page_token")
            if not token:
                return

    def get_run(self, ref: str) -> Any:
        """Return one run."""
        return _run(self._get("runs/get", {"run_id": ref})["run"])

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        """Make an experiment, unless an answer was lost and it is there already; return its id."""
        body = {"name": name, **({"artifact_location": artifact_location} if artifact_location else {})}
        try:
            return str(self._post("experiments/create", body)["experiment_id"])
        except RestError as error:
            there = self.get_experiment_by_name(name) if error.error_code == _EXISTS else None
            if there is None:
                raise
            return there.experiment_id

    def create_run(self, experiment_id: str, start_time: int, tags: Mapping[str, str], run_name: str) -> Any:
        """Make a run with its tags."""
        body = {"experiment_id": experiment_id, "start_time": start_time, "run_name": run_name, "tags": _pairs(tags)}
        return _run(self._post("runs/create", body)["run"])

    def update_run(self, ref: str, status: str | None = None, name: str | None = None) -> None:
        """Give a run another status or name."""
        said = {"status": status, "run_name": name}
        self._post("runs/update", {"run_id": ref, **{key: value for key, value in said.items() if value is not None}})

    def set_terminated(self, ref: str, status: str, end_time: int | None) -> None:
        """Say how and when a run ended."""
        self._post("runs/update", {"run_id": ref, "status": status, **({"end_time": end_time} if end_time else {})})

    def delete_run(self, ref: str) -> None:
        """Delete a run, as MLflow does."""
        self._post("runs/delete", {"run_id": ref})

    def log_texts(self, ref: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Write parameters and tags, in as many requests as it takes."""
        for kind, texts in (("params", _pairs(params)), ("tags", _pairs(tags))):
            for at in range(0, len(texts), _BATCH_TEXTS):
                self._post("runs/log-batch", {"run_id": ref, kind: texts[at : at + _BATCH_TEXTS]})

    def log_records(self, ref: str, records: Sequence[Record]) -> None:
        """Add at most a thousand records in one request."""
        metrics = [{"key": r.key, "value": r.value, "timestamp": r.time_ms, "step": r.tokens} for r in records]
        self._post("runs/log-batch", {"run_id": ref, "metrics": metrics})

    def log_text(self, ref: str, text: str, artifact_file: str) -> None:
        """Store a JSON text among a run's artifacts."""
        folder = self._proxied_folder(ref)
        if folder is None:
            self.__getattr__("log_text")(ref, text, artifact_file)
        else:
            endpoint = f"{_ARTIFACTS}/{quote(f'{folder}/{artifact_file}')}"
            response = self._send("PUT", endpoint, None, text.encode())
            if not response.ok:  # what is answered when all went well is nothing
                _content(response, artifact_file)

    def list_artifacts(self, ref: str, path: str) -> Sequence[Any]:
        """Return the files in a folder of a run's artifacts."""
        folder = self._proxied_folder(ref)
        if folder is None:
            found: Sequence[Any] = self.__getattr__("list_artifacts")(ref, path)
            return found
        answer = _content(self._send("GET", _ARTIFACTS, {"path": f"{folder}/{path}"}, None), path)
        files = answer.get("files", ())
        return [File(f"{path}/{file['path']}", int(file["file_size"])) for file in files if "file_size" in file]

    def _proxied_folder(self, ref: str) -> str | None:
        """Return where the server keeps a run's artifacts; None where MLflow's client has to go elsewhere itself."""
        place = urlsplit(self.get_run(ref).info.artifact_uri)
        return place.path.strip("/") if place.scheme == _PROXIED and not place.netloc else None

    def history(self, ref: str, key: str, *, page: int, skip: int) -> Iterator[Record]:
        """Yield the records of one key in MLflow's order: time, step, value."""
        token = _page_token(skip) if skip else None
        while True:
            asked = {"run_id": ref, "metric_key": key, "max_results": page, **({"page_token": token} if token else {})}
            found = self._get("metrics/get-history", asked)
            for metric in found.get("metrics", ()):
                yield Record(key, int(metric.get("step", 0)), int(metric["timestamp"]), float(metric["value"]))
            token = found.get("next_page_token")
            if not token:
                return

    def _get(self, endpoint: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return _content(self._send("GET", f"{_API}/{endpoint}", params, None), endpoint)

    def _post(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        # allow_nan: a bare NaN makes MLflow answer 200 and drop the rest of the batch.
        data = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        return _content(self._send("POST", f"{_API}/{endpoint}", None, data), endpoint)


def filters(run_ids: Sequence[str]) -> list[str]:
    """Return searches that together find the runs in MLflow of some runs of the log."""
    if len(run_ids) > _SINGLE_SEARCHES:
        return ["tags.`llmtrack.kind` != ''"]  # matches only runs that have the tag
    return [f"tags.`llmtrack.run_id` = '{run_id}'" for run_id in run_ids]


def _content(response: requests.Response, endpoint: str) -> dict[str, Any]:
    """Return what a server answered.

    Raises:
        RestError: It is not what MLflow answers when all went well.
    """
    body = response.content
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if response.status_code == 200 and isinstance(content, dict):  # noqa: PLR2004 - HTTP's
        return content
    if response.status_code == 200 and not body.strip():  # noqa: PLR2004 - likewise
        raise RestError(f"{endpoint} was answered with nothing at all", 200, _EMPTY)
    if response.status_code == 200:  # noqa: PLR2004 - likewise
        raise RestError(f"{endpoint} was answered with something that is not in valid JSON format", 200, _NOT_JSON)
    said = content if isinstance(content, dict) else {}
    text = str(said.get("message") or " ".join(response.text.split())[:200] or response.reason)
    code = said.get("error_code") if isinstance(said.get("error_code"), str) else f"HTTP_{response.status_code}"
    raise RestError(f"{response.status_code} {text}", response.status_code, str(code), _retry_after_s(response))


def _retry_after_s(response: requests.Response) -> float | None:
    """Return the seconds of a Retry-After header; a date, which the standard also allows, is nobody's habit here."""
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isdecimal() else None


def _pairs(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in texts.items()]


def _run(content: Mapping[str, Any]) -> Run:
    info, data = content["info"], content.get("data", {})
    return Run(
        Info(
            str(info["run_id"]),
            str(info.get("run_name", "")),
            str(info["experiment_id"]),
            str(info.get("status", "")),
            info.get("start_time"),
            info.get("end_time"),
            str(info.get("lifecycle_stage", "active")),
            str(info.get("artifact_uri", "")),
        ),
        Data(
            [
                Latest(m["key"], float(m["value"]), int(m["timestamp"]), int(m.get("step", 0)))
                for m in data.get("metrics", ())
            ],
            {param["key"]: str(param.get("value", "")) for param in data.get("params", ())},
            {tag["key"]: str(tag.get("value", "")) for tag in data.get("tags", ())},
        ),
        Outputs(
            [
                ModelOutput(str(out["model_id"]), int(out.get("step", 0)))
                for out in content.get("outputs", {}).get("model_outputs", ())
            ]
        ),
    )


def _page_token(offset: int) -> str:
    """Return the token of a page, as MLflow itself makes it: JSON in base 64."""
    import base64

    return base64.b64encode(json.dumps({"offset": offset}).encode()).decode()


def _is_special() -> bool:
    return any(os.environ.get(name) for name in _SPECIAL) or _CREDENTIALS.expanduser().exists()


def _send_plainly(uri: str, timeout_s: float) -> Send:
    """Return a function that makes one request, with what MLflow's environment names say of credentials and TLS."""
    import requests

    parts = urlsplit(uri)
    base = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
    user, password = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    if not (user and password) and parts.username is not None:
        user, password = unquote(parts.username), unquote(parts.password or "")
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    is_insecure = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in {"true", "1"}
    authority = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or os.environ.get("REQUESTS_CA_BUNDLE") or True
    if is_insecure:
        import urllib3

        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the user asked for it
    own = threading.local()  # `requests` promises nothing about a session that several threads use

    def session() -> requests.Session:
        made = getattr(own, "session", None)
        if made is None:
            made = own.session = requests.Session()
            made.headers.update({"Content-Type": "application/json", "User-Agent": "llmtrack-sync"})
            made.cert = os.environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH") or None
            if user and password:
                made.auth = (user, password)
            elif token:
                made.auth = _bearer(token)
        return cast("requests.Session", made)

    def send(method: str, endpoint: str, params: Mapping[str, Any] | None, data: bytes | None) -> requests.Response:
        # verify: given to the session only, REQUESTS_CA_BUNDLE would take its place.
        sure = False if is_insecure else authority
        wait_s = _timeout_s(timeout_s)
        return session().request(method, f"{base}{endpoint}", params=params, data=data, timeout=wait_s, verify=sure)

    return send


def _bearer(token: str) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    return sign


def _send_as_mlflow(uri: str) -> Send:
    """Return a function that makes one request as MLflow's client does: plugins, signatures, a file of credentials."""
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    credentials = get_default_host_creds(uri)  # type: ignore[no-untyped-call]

    def send(method: str, endpoint: str, params: Mapping[str, Any] | None, data: bytes | None) -> requests.Response:
        kind = {"Content-Type": "application/json"}
        more = {"params": params, "data": data, "extra_headers": kind}
        response = http_request(credentials, endpoint, method, max_retries=0, raise_on_status=False, **more)  # type: ignore[no-untyped-call]
        return cast("requests.Response", response)

    return send


def _timeout_s(timeout_s: float) -> float:
    text = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "")
    try:
        return float(text) if text else timeout_s
    except ValueError:
        return timeout_s


def whole_client(uri: str) -> MlflowClient:
    """Import MLflow, which takes seconds, and return its client, quiet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic", "sqlalchemy"):  # after the import, which sets them up
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what matters of it arrives here as an error
        return MlflowClient(tracking_uri=uri, registry_uri=uri)
