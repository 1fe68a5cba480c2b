"""What ``llmtrack-sync`` says, writes and returns when something is not as it should be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest

from llmtrack.sync.cli import main
from llmtrack.writer.format import SCHEMAS, part_name, segment_folder
from llmtrack.writer.log.stream import PartWriter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one run of twenty points, none of them settled."""
    root = tmp_path / "root"
    folder = segment_folder(root, "run-1", 1)
    folder.mkdir(parents=True)
    start = {"seq": 1, "time": 1_767_225_600_000, "step": 0, "tokens": 0, "phase": "start", "project": "p"}
    rows = [
        {"seq": n, "time": 1_767_225_600_000 + n, "step": n, "tokens": 100 * n, "name": "loss", "value": 1.0 / n}
        for n in range(2, 22)
    ]
    for table, content, first, last in (("segments", [start], 1, 1), ("metrics", rows, 2, 21)):
        part = PartWriter(folder / part_name(table, 1), table)
        part.append(pa.RecordBatch.from_pylist(content, schema=SCHEMAS[table]), first, last)
        part.close()
    return root


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a state folder that is not there yet."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    return folder


def run(*arguments: object) -> int:
    """Call the command in this process, and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def written(elsewhere: Path) -> list[str]:
    """Return what a call left in the current folder and as state."""
    state = elsewhere.parent / "state-home"
    return sorted(str(path.relative_to(elsewhere.parent)) for place in (elsewhere, state) for path in place.rglob("*"))


@pytest.mark.parametrize(
    "case",
    [
        (["nowhere", "--to", "mlflow"], "there is no folder nowhere", "llmtrack-sync ROOT"),
        (["{root}", "--to", "comet"], "there is no tracker 'comet'", "--to mlflow"),
        (["{root}"], "Missing option '--to'", "--to wandb"),
        (["{root}", "--to", "mlflow", "--tail", "up"], "--tail", "--help"),
        (["{root}", "--to", "mlflow", "--timeout", "soon"], "--timeout", "--help"),
        (["{root}", "--to", "mlflow", "--run", "zz*"], "matches 'zz*'", "llmtrack ls"),
        (["{root}", "--to", "mlflow", "--tracking-uri", "file:///tmp/mlruns"], "file store", "sqlite:///mlflow.db"),
        (["{root}", "--to", "mlflow", "--tracking-uri", "./mlruns"], "file store", "sqlite:///mlflow.db"),
        (["{root}", "--to", "mlflow", "--tracking-uri", "host:5000"], "no address", "http://host:5000"),
        (["{root}", "--to", "mlflow", "--tracking-uri", "sqlite://"], "in memory", "sqlite:///mlflow.db"),
        (["{root}", "--to", "mlflow", "--tracking-uri", "sqlite:///{root}"], "is a folder", "mlflow.db"),
        (["{root}", "--to", "mlflow", "--tracking-uri", "sqlite:///nowhere/x.db"], "no folder", "mkdir -p"),
        (["{root}/run_id=run-1", "--to", "mlflow"], "the folder of a run", "root"),
    ],
)
def test_wrong_usage_is_one_line_a_remedy_and_status_1(
    root: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str], case: tuple[list[str], str, str]
) -> None:
    """Nothing is written: no database, no state folder."""
    arguments, says, remedy = case
    assert run(*(argument.format(root=root) for argument in arguments)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert remedy in err.partition("try: ")[2]
    assert "Traceback" not in err
    assert written(elsewhere) == []


def test_a_file_that_is_no_database_is_not_touched(
    root: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow would try for minutes and then say something about SQLAlchemy."""
    (elsewhere / "notes.txt").write_text("not a database, but somebody's notes")
    assert run(root, "--to", "mlflow", "--tracking-uri", "sqlite:///notes.txt") == 1
    assert "not a SQLite database" in capsys.readouterr().err
    assert (elsewhere / "notes.txt").read_text().startswith("not a database")


@pytest.mark.parametrize("missing", ["mlflow", "duckdb", "click"])
def test_a_missing_package_is_named_with_the_way_to_get_it(root: Path, elsewhere: Path, missing: str) -> None:
    """The base install has none of them, and the command says so in one line."""
    code = f"import sys; sys.modules[{missing!r}] = None\nfrom llmtrack.sync.cli import main\nmain()"
    call = [sys.executable, "-c", code, str(root), "--to", "mlflow"]
    done = subprocess.run(
        call, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": _checkout()}
    )
    assert done.returncode == 1
    assert done.stderr.lower().startswith(f"error: {missing}")
    assert "pip install 'llmtrack-log[mlflow]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert written(elsewhere) == []


def test_without_click_the_tracker_that_was_asked_for_is_named(root: Path) -> None:
    """One extra brings all that it takes."""
    code = "import sys; sys.modules['click'] = None\nimport llmtrack.sync.cli"
    call = [sys.executable, "-c", code, str(root), "--to", "wandb"]
    done = subprocess.run(
        call, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": _checkout()}
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: click is not installed\n  try: pip install 'llmtrack-log[wandb]', or ")


def test_a_dry_run_contacts_and_writes_nothing(root: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says what would be sent, without importing the tracker's library."""
    assert run(root, "--to", "mlflow", "--dry-run", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run_id"], row["points"], row["points_sent"], row["provisional_sent"]) == ("run-1", 20, 20, 20)
    assert run(root, "--to", "mlflow", "--dry-run", "--tracking-uri", "http://127.0.0.1:9") == 0
    assert "would send 20 points (20 provisional)" in capsys.readouterr().out
    assert written(elsewhere) == []


def test_an_empty_root_makes_no_database(tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to send, and that is no error."""
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--to", "mlflow") == 0
    assert "there are no runs in" in capsys.readouterr().out
    assert written(elsewhere) == []


def test_a_tracker_that_nobody_listens_at_is_status_3_within_the_timeout(
    root: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the reason, and no state."""
    assert run(root, "--to", "mlflow", "--tracking-uri", "http://127.0.0.1:9", "--timeout", "1") == 3
    err = capsys.readouterr().err
    assert "http://127.0.0.1:9 is not reachable" in err
    assert "Connection refused" in err
    assert "try: " in err
    assert written(elsewhere) == []


@contextmanager
def answering(status: int, body: bytes, kind: str = "text/plain") -> Iterator[str]:
    """Serve one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815 - the library's name

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    "case",
    [
        (401, b"You are not authenticated.", 1, "does not let us in"),
        (403, b"Invalid Host header - possible DNS rebinding attack detected", 1, "Invalid Host header"),
        (200, b"<html>a login page</html>", 1, "not as an MLflow server does"),
        (503, b"upstream", 3, "is not reachable"),
        (404, b"nothing here", 1, "refused"),
    ],
)
def test_what_a_server_answers_decides_the_status(
    root: Path,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
    case: tuple[int, bytes, int, str],
) -> None:
    """Credentials and wrong servers are the user's to mend, an outage is not; nothing is written either way."""
    status, body, exit_status, says = case
    with answering(status, body) as uri:
        assert run(root, "--to", "mlflow", "--tracking-uri", uri, "--timeout", "1") == exit_status
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert written(elsewhere) == []


def test_credentials_in_an_address_are_not_shown_or_kept(
    root: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in messages nor in the name of anything."""
    assert run(root, "--to", "mlflow", "--tracking-uri", "http://ann:secret@127.0.0.1:9", "--timeout", "1") == 3
    out, err = capsys.readouterr()
    assert "secret" not in out + err
    assert written(elsewhere) == []


def test_the_default_is_a_database_beside_the_caller_and_the_output_is_clean(root: Path, elsewhere: Path) -> None:
    """A fresh process: results on stdout, nothing on stderr, nothing of alembic or MLflow; then nothing to send."""
    code = "from llmtrack.sync.cli import main; main()"
    call = [sys.executable, "-c", code, str(root), "--to", "mlflow"]
    environment = os.environ | {"PYTHONPATH": _checkout()}
    first = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
    said = [line for line in first.stderr.splitlines() if not line.startswith("run run-1: ")]  # where all is slow
    assert (first.returncode, said) == (0, [])
    assert first.stdout.startswith("run-1  ")
    assert "sent 20 points (20 provisional)" in first.stdout
    assert "look at it: mlflow server --backend-store-uri sqlite:///" in first.stdout
    assert sorted(path.name for path in elsewhere.iterdir()) == ["mlartifacts", "mlflow.db"]
    second = subprocess.run([*call, "-q"], capture_output=True, text=True, check=False, env=environment)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")


def test_an_interrupt_is_status_130_and_the_next_sync_goes_on(root: Path, elsewhere: Path) -> None:
    """Ctrl-C while the tracker is waited for ends at once, with one line."""
    # A shell in the background has SIGINT ignored, and its children too.
    code = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from llmtrack.sync.cli import main; main()"
    call = [sys.executable, "-c", code, str(root), "--to", "mlflow", "--tracking-uri", "http://127.0.0.1:9", "-v"]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": _checkout()})
    assert process.stderr is not None
    assert "next try in" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert written(elsewhere) == []


def test_help_has_an_example_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    """The page is enough to use the command."""
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "llmtrack-sync runs --to mlflow" in out
    assert "3 tracker not reachable" in out


def _checkout() -> str:
    return str(Path(__file__).parents[2])
