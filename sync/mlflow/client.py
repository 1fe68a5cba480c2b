"""MLflow's client, quiet, without retries of its own, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from llmtrack.sync.sink import MovedError
from llmtrack.writer.errors import LlmtrackError, RejectedError, RetryableSinkError, TooLargeError, UsageError

from .database import DatabaseClient
from .rest import RestClient, RestError

NAME: Final = "mlflow"
_DEFAULT_URI: Final = "sqlite:///mlflow.db"
_SQLITE_HEADER: Final = b"SQLite format 3\0"
_DATABRICKS: Final = frozenset({"databricks", "databricks-uc", "uc"})
_DATABASE_PORTS: Final = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_REQUEST_S: Final = 60.0  # a batch of a thousand takes a loaded server a second; MLflow's own default is 120
_AUTHENTICATION: Final = frozenset({"UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"})
_NO_ADDRESS: Final = frozenset(
    {"InvalidUrlException", "InvalidURL", "InvalidSchema", "MissingSchema", "UnsupportedModelRegistryStoreURIException"}
)
_NOT_AUTHENTICATED: Final = frozenset({401, 403, 407})
_TRANSIENT_STATUS: Final = frozenset({408, 425, 429})
_TOO_LARGE: Final = 413
_CLIENT_ERRORS: Final = range(400, 500)
_SERVER_ERRORS: Final = range(500, 600)
# MLflow's client says INTERNAL_ERROR for every failure of the network, for every HTTP 500, and for whatever it does not
# know; then the status is in its text.
_NO_RUN: Final = re.compile(r"must be in the 'active' state|Run with id=\w+ not found")  # somebody deleted it meanwhile
_STATUS_IN_TEXT: Final = re.compile(r"failed with error code (\d{3}) != 200")
_TRANSIENT: Final = frozenset(
    {
        "EMPTY_ANSWER",
        "INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "WORKSPACE_TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED",
        "RESOURCE_EXHAUSTED", "RESOURCE_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED", "ABORTED", "IO_ERROR",
    }
)  # fmt: skip


def resolve_uri(uri: str | None) -> str:
    """Return the tracking address to use, a local database by its whole path.

    Args:
        uri: What the user said; None means MLFLOW_TRACKING_URI or a database beside the caller.

    Raises:
        UsageError: It is a file store, no address at all, or needs a package that is not installed.
    """
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or _DEFAULT_URI
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError("MLflow is not installed", hint="pip install 'llmtrack-log[mlflow]'")
    scheme, colon, rest = uri.partition(":")
    if scheme in _DATABRICKS:
        return uri  # MLflow finds out where that is, and with which credentials
    if scheme == "file" or not colon or uri.startswith((".", "/", "~")):
        raise UsageError(
            f"{uri!r} is an MLflow file store, which MLflow 3.13 and later refuse and which doubles what is sent twice",
            hint="--tracking-uri sqlite:///mlflow.db writes a database that needs no server; "
            "`mlflow migrate-filestore` takes an old ./mlruns over",
        )
    if re.match(r"[0-9]+(/|$)", rest):
        raise UsageError(f"{uri!r} is no address", hint=f"--tracking-uri http://{uri}")
    if scheme in {"http", "https"} and "/#/" in rest:  # copied from the browser
        server, _, page = without_credentials(uri).partition("/#/")
        raise UsageError(f"{server}/#/{page} is a page, and not the server's address", hint=f"--tracking-uri {server}")
    if scheme.partition("+")[0] in {"sqlite", *_DATABASE_PORTS} and importlib.util.find_spec("sqlalchemy") is None:
        raise UsageError(
            f"{without_credentials(uri)!r} needs the whole of MLflow, and only mlflow-skinny is installed",
            hint="pip install 'llmtrack-log[mlflow]', or give the address of a server",
        )
    if scheme == "sqlite":
        return _resolve_sqlite(uri)
    return uri.rstrip("/") if scheme in {"http", "https"} else uri


def local_folder(uri: str) -> Path | None:
    """Return the folder of a local database; None when the tracker is something else."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(unquote(uri.removeprefix("sqlite:///").partition("?")[0])).parent


def without_credentials(uri: str) -> str:
    """Return an address that may be shown and kept."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def connect(uri: str, timeout_s: float) -> RestClient | DatabaseClient:
    """Return MLflow's client, which imports MLflow when it has to; a local database is made if it is not there.

    Args:
        uri: From `resolve_uri`.
        timeout_s: Upper limit for one request.

    Raises:
        RetryableSinkError: The tracker is not reachable.
        RejectedError: It is reachable and not what it should be.
    """
    _settle_environment(timeout_s)
    _reach_database(uri)
    with translated(uri):
        client: RestClient | DatabaseClient
        if uri.startswith(("http://", "https://")):
            client = RestClient(uri, min(_REQUEST_S, timeout_s))
        else:
            client = DatabaseClient(uri, _sqlite_file(uri))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client.probe()
        return client


@contextlib.contextmanager
def translated(uri: str, run_id: str | None = None) -> Iterator[None]:
    """Raise what MLflow raises as one of our errors.

    Raises:
        RetryableSinkError: The network, the server or the database did not get to an answer.
        RejectedError: It answered no; with ``run_id=None`` when no run will fare better.
        UsageError: The address cannot be one.
    """
    try:
        yield
    except LlmtrackError:
        raise
    except Exception as error:  # whatever the client's library raises, also outside its own MlflowException
        raise _translate(error, uri, run_id) from error


def _translate(error: Exception, uri: str, run_id: str | None) -> LlmtrackError:
    uri, secret = without_credentials(uri), urlsplit(uri).netloc.rpartition("@")[0]
    text = re.sub(r"\s+", " ", str(error).replace(f"{secret}@", "") if secret else str(error)).strip()
    code, status = str(getattr(error, "error_code", "")), _status_of(error)
    causes = {kind.__name__ for cause in _chain(error) for kind in type(cause).__mro__}
    if causes & _NO_ADDRESS:
        return UsageError(f"{uri} is no address that MLflow knows: {text}", hint="http://HOST:PORT or sqlite:///FILE")
    for holds, message, hint in (
        (
            causes & {"SSLError"} and re.search("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE", text),
            f"{uri} answers, but without TLS",
            f"--tracking-uri {uri.replace('https:', 'http:', 1)}",
        ),
        (
            causes & {"SSLError"},
            f"the certificate of {uri} is not trusted: {text}",
            "name the authority's file in MLFLOW_TRACKING_SERVER_CERT_PATH",
        ),
        (
            "Databricks credential" in text,
            "no credentials for Databricks can be found",
            "pip install databricks-sdk, then set DATABRICKS_HOST and DATABRICKS_TOKEN or run `databricks auth login`",
        ),
        (
            "out-of-date database schema" in text,
            f"{uri} was made by another version of MLflow: {text}",
            f"mlflow db upgrade {uri}",
        ),
        (
            "valid JSON format" in text,
            f"{uri} answers, but not as an MLflow server does",
            "check the address and the path in it",
        ),
        (
            code in _AUTHENTICATION or status in _NOT_AUTHENTICATED,
            f"{uri} does not let us in ({code}): {text}",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        ),
    ):
        if holds:
            return RejectedError(message, sink=NAME, hint=hint)
    if status == _TOO_LARGE:
        return TooLargeError(
            f"{uri} refused a request for its size: {text}",
            sink=NAME,
            run_id=run_id or "",
            hint="let whatever stands before the server take bodies of 200 kB",
        )
    if _is_transient(code, status, causes):
        *_, reason = _chain(error)  # the innermost says it shortest: connection refused, 503, database is locked
        found = RetryableSinkError(
            f"{uri} is not reachable: {reason}",
            sink=NAME,
            run_id=run_id,
            hint="see whether it runs and whether the address is right, then sync again: it goes on where it was",
        )
        found.retry_after_s = getattr(error, "retry_after_s", None)
        return found
    if run_id is not None and _NO_RUN.search(text):
        return MovedError(f"{uri}: {text}", sink=NAME, run_id=run_id)
    return RejectedError(f"{uri} refused ({code or type(error).__name__}): {text}", sink=NAME, run_id=run_id or "")


def _status_of(error: Exception) -> int | None:
    if isinstance(error, RestError):
        return error.status
    said = _STATUS_IN_TEXT.search(str(error))
    return int(said[1]) if said else None


def _is_transient(code: str, status: int | None, causes: set[str]) -> bool:
    if status in _CLIENT_ERRORS and status not in _TRANSIENT_STATUS:
        return False
    return (
        status in _TRANSIENT_STATUS
        or status in _SERVER_ERRORS
        or code in _TRANSIENT
        or bool(causes & {"OperationalError", "RequestException", "OSError"})
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _settle_environment(timeout_s: float) -> None:
    """Say what MLflow reads when it is imported or called: our own waiting replaces its retries."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, int(min(_REQUEST_S, timeout_s)))))
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    if "DO_NOT_TRACK" not in os.environ:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def _resolve_sqlite(uri: str) -> str:
    location, _, query = uri.removeprefix("sqlite://").removeprefix("/").partition("?")
    if not location:
        raise UsageError(
            f"{uri!r} is a database in memory: it would be gone at once", hint=f"--tracking-uri {_DEFAULT_URI}"
        )
    file = Path(unquote(location)).absolute()
    if file.is_dir():
        raise UsageError(f"{file} is a folder, not a database", hint=f"--tracking-uri sqlite:///{file / 'mlflow.db'}")
    if not file.parent.is_dir():
        raise UsageError(f"there is no folder {file.parent} for {file.name}", hint=f"mkdir -p {file.parent}")
    try:
        with file.open("rb") as database:
            start = database.read(len(_SQLITE_HEADER))
    except FileNotFoundError:
        start = b""
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", hint="give a file of your own") from error
    if start and start != _SQLITE_HEADER:
        raise UsageError(f"{file} is not a SQLite database", hint=f"--tracking-uri {_DEFAULT_URI}")
    return f"sqlite:///{file}" + (f"?{query}" if query else "")


def _reach_database(uri: str) -> None:
    """Fail at once when nobody listens: MLflow would try for 100 seconds without a word."""
    parts = urlsplit(uri)
    port = _DATABASE_PORTS.get(parts.scheme.partition("+")[0])
    if port is None or parts.hostname is None:
        return
    try:
        socket.create_connection((parts.hostname, parts.port or port), timeout=_REQUEST_S).close()
    except OSError as error:
        raise RetryableSinkError(f"{without_credentials(uri)} is not reachable: {error}", sink=NAME) from error


def _sqlite_file(uri: str) -> Path | None:
    location, _, query = uri.removeprefix("sqlite:///").partition("?")
    return Path(unquote(location)) if uri.startswith("sqlite:///") and not query else None
