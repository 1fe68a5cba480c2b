"""W&B's client: quiet, telling nobody what it need not tell, bounded in time, and with errors that say what to do."""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import json
import logging
import netrc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from llmtrack.writer.errors import LlmtrackError, RejectedError, RetryableSinkError, UsageError

NAME: Final = "wandb"
CLOUD: Final = "https://api.wandb.ai"
_CORE: Final = "wandb-core"
REQUEST_S: Final = 30.0
_INIT_S: Final = 20.0  # the client tries for so long by itself; we go on from there
_PAGE_ROWS: Final = 1000
_NUMBERS_SINCE: Final = (0, 31)
_HISTORY_PAGE: Final = """
query HistoryPage($entity: String!, $project: String!, $run: String!,
                  $minStep: Int64!, $maxStep: Int64!, $pageSize: Int!) {
    project(name: $project, entityName: $entity) {
        run(name: $run) {
            history(minStep: $minStep, maxStep: $maxStep, samples: $pageSize)
        }
    }
}
"""
# What a person set for a training run of their own, and would be said of every run that is replayed.
_OF_ONE_RUN: Final = tuple(
    f"WANDB_{name}"
    for name in (
        "MODE", "DISABLED", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "RUN_ID", "RESUME", "SWEEP_ID", "SERVICE",
        "CONFIG_PATHS", "HOST", "PROGRAM", "USERNAME", "USER_EMAIL", "LAUNCH", "ARGS",
    )
)  # fmt: skip
_ENDING_S: Final = 5.0  # for the client's service to end by itself

_AUTHENTICATION: Final = re.compile(
    r"\b(401|403)\b|AuthenticationError|not logged in|api[_ ]key|permission denied", re.IGNORECASE
)
_TRANSIENT: Final = re.compile(
    r"\b(408|425|429|5\d\d)\b|refused|reset|timed? ?out|timeout|EOF|unreachable|no such host|temporar|unavailable|"
    r"connection|broken pipe|retrying|respond in time|service process|incomplete",
    re.IGNORECASE,
)
_RETRIED: Final = frozenset({408, 425, 429, *range(500, 600)})
_DELETED: Final = "previously created and deleted"
_imports = threading.Lock()
_stops = [0]


class DeletedIdError(RejectedError):
    """The id belonged to a run that was deleted; W&B never gives it out again."""


def resolve_url(uri: str | None) -> str:
    """Return the address of the server, without a slash at its end.

    Args:
        uri: What the user said; None means WANDB_BASE_URL, what `wandb login --host` remembered, or the cloud.

    Raises:
        UsageError: It is no address, or wandb is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise UsageError("wandb is not installed", hint="pip install 'llmtrack-log[wandb]'")
    url = (uri or os.environ.get("WANDB_BASE_URL") or _remembered_url() or CLOUD).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"{url!r} is no address of a W&B server", hint="--tracking-uri https://wandb.example.org")
    if "@" in parts.netloc:
        raise UsageError(
            f"{without_credentials(url)} with a password in it is no address that W&B's client takes",
            hint="put the key into WANDB_API_KEY, or run `wandb login --host URL`",
        )
    return url


def without_credentials(url: str) -> str:
    """Return an address that may be shown."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def require_key(url: str) -> None:
    """See that there is a key: without one the client would ask a person for it.

    Raises:
        UsageError: There is none.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(url).hostname or ""
    for name in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with contextlib.suppress(OSError, netrc.NetrcParseError, KeyError):
            if netrc.netrc(Path(name).expanduser()).authenticators(host):
                return
    raise UsageError(f"there is no key for {url}", hint=f"WANDB_API_KEY=... , or wandb login --host {url}")


def load(url: str) -> Any:
    """Import wandb, with everything off that tells others about this machine."""
    with _imports:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_CONSOLE", "off")
        os.environ["WANDB_BASE_URL"] = url  # parts of the client read nothing else
        for name in _OF_ONE_RUN:
            os.environ.pop(name, None)
        import wandb

        logging.getLogger("wandb").setLevel(logging.CRITICAL)  # what matters of it arrives here as an error
        return wandb


def settings(url: str, **more: Any) -> Any:
    """Return settings of the client; what an older client does not know is left out."""
    wandb = load(url)
    wanted: dict[str, Any] = {
        "base_url": url,
        "silent": True,
        "quiet": True,
        "console": "off",
        "show_errors": False,
        "show_info": False,
        "show_warnings": False,
        "disable_git": True,
        "disable_code": True,
        "disable_job_creation": True,
        "save_code": False,
        "reinit": "create_new",
        "init_timeout": _INIT_S,
        # A trainer's own facts are in the log: whatever the client finds out about this machine is about another one.
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "host": "",
        "program": "",
        "program_relpath": "",
        "x_skip_transaction_log": more.get("mode") != "offline",  # the log is ours; W&B's would take 4 KB a row
        **more,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


@contextlib.contextmanager
def translated(url: str, run_id: str | None = None) -> Iterator[None]:
    """Raise what W&B's client raises as one of our errors.

    Raises:
        RetryableSinkError: The network or the server did not get to an answer.
        RejectedError: It answered no; with ``run_id=None`` when no run will fare better.
    """
    try:
        yield
    except LlmtrackError:
        raise
    except Exception as error:  # whatever the client's library raises
        raise translate(error, url, run_id) from error


def translate(error: Exception, url: str, run_id: str | None) -> LlmtrackError:
    """Return one of our errors for one of the client's."""
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    text = text.partition(" Consider increasing the init_timeout")[0]
    if _DELETED in text:
        return DeletedIdError(f"{url}: {text}", sink=NAME, run_id=run_id or "")
    status = _status(error)
    if status in {401, 403} or (not status and _AUTHENTICATION.search(text)):
        return RejectedError(
            f"{url} does not let us in: {text}", sink=NAME, hint=f"WANDB_API_KEY=... , or wandb login --host {url}"
        )
    if status in _RETRIED or (not status and (_TRANSIENT.search(text) or isinstance(error, OSError))):
        return RetryableSinkError(
            f"{url} is not reachable: {text}",
            sink=NAME,
            run_id=run_id,
            hint="see whether it runs and whether the address is right, then sync again: it goes on where it was",
        )
    about = f" (HTTP {status})" if status else ""
    return RejectedError(f"{url} refused{about}: {text}", sink=NAME, run_id=run_id or "")


def numbers_offline_rows() -> bool:
    """Return whether ``wandb sync`` numbers the rows of a resumed offline run from where the server's end."""
    import wandb

    return tuple(int(part) for part in wandb.__version__.split(".")[:2]) >= _NUMBERS_SINCE


def keeps_patterns() -> bool:
    """Return whether ``define_metric("*")`` is kept as such: before, it held for the metrics of that session alone."""
    return numbers_offline_rows()


def is_missing(error: Exception) -> bool:
    """Return whether the client says that there is no such run or project."""
    return "Could not find" in str(error) or "could not find" in str(error)


def _status(error: BaseException) -> int:
    """Return the HTTP status that an error of the client is about; 0 when it is about none."""
    seen: set[int] = set()
    found: Any = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        response = getattr(found, "response", None)
        status = getattr(response, "http_status", 0) or getattr(response, "status_code", 0)
        if status and status != 200:  # noqa: PLR2004 - with which GraphQL says its own errors
            return int(status)
        found = getattr(found, "exc", None) or found.__cause__ or found.__context__
    told = re.search(r"HTTP ([45]\d\d)", str(error))
    return int(told.group(1)) if told else 0


def rows_of(native: Any, first: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run from a number on, as `scan_history` does, in a quarter of its time while nothing lacks.

    Its pages are asked for as the client's service asks for them, and whole rows are parsed. What W&B has moved to
    files is not in them: from the first page on that has fewer rows than numbers, `scan_history` goes on.

    Args:
        native: The run, of the client's public API.
        first: Number of the first row.
    """
    execute = getattr(getattr(native, "_service_api", None), "execute_graphql", None)
    end = native.lastHistoryStep + 1
    while execute is not None and first < end:
        last = min(first + _PAGE_ROWS, end)
        place = {"entity": native.entity, "project": native.project, "run": native.id}
        found = execute(_HISTORY_PAGE, {**place, "minStep": first, "maxStep": last, "pageSize": _PAGE_ROWS})
        lines = ((found.get("project") or {}).get("run") or {}).get("history") or []
        if len(lines) != last - first:
            break
        yield from map(_parse, lines)
        first = last
    if first < end:
        yield from native.scan_history(page_size=_PAGE_ROWS, min_step=first, use_cache=False)


def _parse(line: str) -> dict[str, Any]:
    """Parse one row with the parser of pydantic, on which the client is built: a quarter of the time of `json`."""
    from pydantic_core import from_json

    try:
        row: dict[str, Any] = from_json(line)
    except ValueError:  # half of a surrogate pair, which is JSON all the same
        row = json.loads(line)
    return row


def stop_service(*, at_once: bool = False) -> None:
    """End the client's service, by force if it does not end: nothing of it is left running.

    Args:
        at_once: Do not wait for what it still has to upload: the next sync sends it again.
    """
    if "wandb" not in sys.modules:
        return
    import wandb

    _stops[0] += 1
    if at_once:
        kill_service()
    ending = threading.Thread(target=_teardown, args=(wandb,), daemon=True, name="llmtrack-wandb-end")
    ending.start()
    ending.join(_ENDING_S)
    if ending.is_alive():
        kill_service()
        ending.join(_ENDING_S)


def stops() -> int:
    """Return how often the service was ended: what knew it has to be made anew."""
    return _stops[0]


def kill_service() -> None:
    """Kill the client's service: what it has not uploaded yet is sent again by the next sync."""
    process = _known_service()
    if process is not None:
        process.kill()
        process.wait()
    for pid in _service_pids():  # one that the client has forgotten
        with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _known_service() -> Any:
    """Return the `Popen` of the service: the client has no public name for it, and reaps none that was killed."""
    from wandb.sdk import wandb_setup

    setup: Any = getattr(wandb_setup, "_singleton", None)
    service = getattr(getattr(setup, "_connection", None), "_proc", None)
    return getattr(service, "_process", None)


def _teardown(wandb: Any) -> None:
    from wandb.sdk import wandb_setup

    setup: Any = getattr(wandb_setup, "_singleton", None)
    try:
        wandb.teardown()
    except Exception:  # noqa: BLE001 - it says that its service is gone, which is what we want, and leaves its thread
        with contextlib.suppress(Exception):
            setup._asyncer.join()  # noqa: SLF001 - there is no public name for it


def _service_pids() -> list[int]:
    """Return this process's children that are wandb-core, where there is a /proc to tell."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in task.read_text().split():
                with contextlib.suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() == _CORE:
                        found.append(int(pid))
    return found


def _remembered_url() -> str | None:
    """Return the address that `wandb login --host` wrote down."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, configparser.Error):
        parser.read_string(
            "[default]\n" + (Path(folder).expanduser() / "settings").read_text().replace("[default]", "")
        )
        return parser.get("default", "base_url", fallback=None)
    return None
