"""Whatever the network, a proxy or the server does to a sync over HTTP: every point is there once, or it says why not.

A real MLflow server, behind a proxy on loopback that loses, cuts, refuses and delays. What is there in the end is read
with SQLite, and what should be there with Arrow, by code that shares nothing with what is tested.
"""

from __future__ import annotations

import json
import random
import shutil
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtrack.sync.cli import main
from tests.contract.conftest import Bench, Log, Point, Row, Tracker, read_log
from tests.faultproxy import Fault, Proxy, Request, no_fault, proxy
from tests.mlflow_server import MlflowServer, missing_postgres, serving_mlflow, serving_postgres

_SELF_SIGNED = [
    *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
    *("-addext", "subjectAltName=IP:127.0.0.1"),
]
_RESET = Fault("reset before it was taken")
_LOST = Fault("the answer is lost", taken=True)
_HALF = Fault("half of it arrives", half=True)
_TORN = Fault("half of the answer arrives", torn=True)
_BUSY = Fault("429", 429, b"slow down", (("Retry-After", "0"),))
_FAULTS = [
    _RESET,
    _LOST,
    _HALF,
    _TORN,
    _BUSY,
    Fault("500", 500, b'{"error_code": "INTERNAL_ERROR", "message": "oh"}'),
    Fault("502 of a proxy", 502, b"<html>bad gateway</html>"),
    Fault("503", 503, b"upstream"),
    Fault("500 after it was taken", 500, b"oh", taken=True),
    Fault("nothing, with status 200", 200, b""),
    Fault("nothing, with status 200, after it was taken", 200, b"", taken=True),
]


@pytest.fixture
def faulty(
    server: Tracker, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Bench, Proxy]]:
    """A log, and a server behind a proxy; waits are short."""
    monkeypatch.setattr("llmtrack.sync.replay.patience._FIRST_WAIT_S", 0.02)
    with proxy(server.uri) as before:
        yield Bench(log, Tracker(before.uri, server.database), tmp_path / "state", capsys), before


def tell(log: Log) -> None:
    """Log a run with all that there is: settled, superseded, provisional."""
    log.segment().train(0, 4000).checkpoint(3000)
    log.segment(after=("run", 1, 3000)).train(3000, 3500)


def check(bench: Bench, run_id: str = "run") -> None:
    """See that each run there holds exactly its points."""
    rows = bench.rows(run_id)

    def points(belongs: Callable[[Row], bool]) -> Counter[Point]:
        return Counter(row.point for row in rows if belongs(row))

    assert bench.only("canonical", run_id).points == points(lambda row: row.segment == 1 and row.tokens <= 3000)
    assert bench.only("superseded", run_id).points == points(lambda row: row.segment == 1 and row.tokens > 3000)
    assert bench.only("provisional", run_id).points == points(lambda row: row.segment == 2)


@pytest.mark.parametrize(
    "faults",
    [_FAULTS[:6], _FAULTS[5:], *(pytest.param([fault], marks=pytest.mark.soak) for fault in _FAULTS)],
    ids=lambda faults: " or ".join(fault.name for fault in faults),
)
def test_a_fault_at_every_request_costs_nothing(faulty: tuple[Bench, Proxy], faults: list[Fault]) -> None:
    """Every request fails at first and works when it is made again; the next sync has nothing to do."""
    bench, before = faulty
    seen = set[tuple[str, str, bytes]]()

    def once(request: Request) -> Fault | None:
        with before.lock:
            is_new = (request.method, request.path, request.body) not in seen
            seen.add((request.method, request.path, request.body))
            return faults[len(seen) % len(faults)] if is_new else None

    before.rule = once
    tell(bench.log)
    bench.sync()
    assert len(before.faults) > 10
    check(bench)
    before.rule = no_fault
    assert bench.sync()[0]["points_sent"] == 0
    assert len(bench.tracker.runs(bench.log.project)) == 3


@pytest.mark.parametrize("verify", ["full", "fast", "off"])
def test_an_answer_that_nothing_was_behind_is_found_out_by_reading_back(
    faulty: tuple[Bench, Proxy], verify: str
) -> None:
    """A proxy that answers ``{}`` to points and forwards none: whoever verifies sends them again."""
    bench, before = faulty
    liar = Fault("a lie", 200, b"{}")
    lies = iter([liar, None, liar])
    before.rule = lambda request: next(lies, None) if b'"metrics"' in request.body else None
    tell(bench.log)
    bench.sync("--verify", verify)
    if verify != "off":
        check(bench)
        return
    before.rule = no_fault
    assert sum(sum(run.points.values()) for run in bench.tracker.runs(bench.log.project)) < len(bench.rows())
    bench.sync()
    check(bench)


def test_a_history_that_is_cut_off_is_not_taken_for_the_whole(faulty: tuple[Bench, Proxy]) -> None:
    """A valid answer with half of the values: status 2 and what was not seen; it is there, and not sent twice."""
    bench, before = faulty
    tell(bench.log)
    half = [
        {"key": row.name, "step": row.tokens, "timestamp": row.ms, "value": row.value}
        for row in bench.rows()
        if (row.name, row.segment) == ("train/loss", 1) and row.tokens <= 1500
    ]
    cut_off = Fault("half of the values", 200, json.dumps({"metrics": half}).encode())

    def rule(request: Request) -> Fault | None:
        return cut_off if request.endpoint == "metrics/get-history" and "train%2Floss" in request.path else None

    before.rule = rule
    (row,) = bench.sync(expect=2)
    assert "150 of them are not there (train/loss: 150, between 1510 and 3000 tokens)" in row["error"]
    before.rule = no_fault
    bench.sync()
    check(bench)


def test_too_large_requests_are_made_smaller(faulty: tuple[Bench, Proxy]) -> None:
    """413: a batch is halved until it passes, and no batch after it is as large again."""
    bench, before = faulty
    limit = 20_000
    before.rule = lambda request: Fault("413", 413, b"<html>too large") if len(request.body) > limit else None
    tell(bench.log)
    bench.sync()
    check(bench)
    assert 1 < len(before.faults) < 15


def test_a_single_point_that_is_too_large_makes_the_run_incomplete(faulty: tuple[Bench, Proxy]) -> None:
    """Something that refuses even one point is named, and other runs would go on."""
    bench, before = faulty
    before.rule = lambda request: Fault("413", 413, b"no") if b'"metrics"' in request.body else None
    tell(bench.log)
    (row,) = bench.sync(expect=2)
    assert "for its size" in row["error"]


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        (Fault("401", 401, b"who are you"), 1, "does not let us in"),
        (Fault("403", 403, b"not you"), 1, "does not let us in"),
        (Fault("a login page", 200, b"<html>log in</html>"), 1, "not as an MLflow server does"),
        (Fault("503", 503, b"no"), 3, "503"),
        (_RESET, 3, "not reachable"),
        (Fault("429 for an hour", 429, b"no", (("Retry-After", "3600"),)), 3, "429"),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else None,
)
def test_what_does_not_get_better_ends_the_sync_in_the_middle(
    faulty: tuple[Bench, Proxy],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    fault: Fault,
    status: int,
    says: str,
) -> None:
    """From the second batch of points on: the status says what it was, and the next sync sends only the rest."""
    bench, before = faulty

    def has_points(request: Request) -> bool:
        return request.endpoint == "runs/log-batch" and b'"metrics"' in request.body

    def late(request: Request) -> Fault | None:
        return fault if has_points(request) and sum(map(has_points, list(before.requests))) > 1 else None

    before.rule = late
    tell(bench.log)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # the server itself may be slow
    with pytest.raises(SystemExit) as ended:
        main([*bench.arguments[:-1], "60" if status == 1 else "2"])
    assert ended.value.code == status
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    before.rule = no_fault
    already = sum(sum(run.points.values()) for run in bench.tracker.runs(bench.log.project))
    assert already > 0
    bench.sync()
    check(bench)


def test_a_server_that_says_nothing_is_not_waited_for_longer_than_the_timeout(
    faulty: tuple[Bench, Proxy], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stands and no answer comes: status 3."""
    bench, before = faulty
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    before.rule = lambda request: Fault("silence", silent=True) if request.number >= 0 else None
    tell(bench.log)
    assert bench.sync("--timeout", "1", expect=3) == []
    assert "timed out" in capsys.readouterr().err.lower() or before.faults
    assert 0 < len(before.faults) < 5


def test_one_new_row_is_one_small_request(faulty: tuple[Bench, Proxy]) -> None:
    """Of points; beside it the sync looks what is there, before and after, and reads no history back."""
    bench, before = faulty
    segment = bench.log.segment().train(0, 2000)
    bench.sync()
    before.requests.clear()
    bench.sync()
    assert [request.endpoint for request in before.requests] == [
        "experiments/search",
        "experiments/get-by-name",
        "runs/search",
    ]
    before.requests.clear()
    segment.train(2000, 2010)
    bench.sync()
    sent = [request for request in before.requests if b'"metrics"' in request.body]
    assert [len(request.body) < 500 for request in sent] == [True]
    assert before.count("metrics/get-history") == 0
    assert len(before.requests) < 16


def test_credentials_come_from_mlflows_own_environment_names(
    faulty: tuple[Bench, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """User and password, or a token; without them status 1, and they are in no message and no file of ours."""
    bench, before = faulty
    tell(bench.log)
    for wanted, names in (
        ("Basic YW5uOnNlY3JldA==", {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "secret"}),
        ("Bearer t0ken", {"MLFLOW_TRACKING_TOKEN": "t0ken"}),
    ):
        before.rule = _letting_in(wanted)
        assert bench.sync(expect=1) == []
        with monkeypatch.context() as environment:
            for name, value in names.items():
                environment.setenv(name, value)
            bench.sync()
    check(bench)
    kept = b"".join(path.read_bytes() for path in bench.state.rglob("*") if path.is_file())
    assert b"secret" not in kept
    assert b"t0ken" not in kept


def _letting_in(wanted: str) -> Callable[[Request], Fault | None]:
    stranger = Fault("401", 401, b"who are you")
    return lambda request: None if request.headers.get("Authorization") == wanted else stranger


def test_a_certificate_is_trusted_when_mlflows_environment_names_its_authority(
    server: Tracker,
    log: Log,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it is refused, with the name of the variable."""
    certificate = tmp_path / "server.pem"
    subprocess.run(
        [*_SELF_SIGNED, "-keyout", certificate, "-out", tmp_path / "ca.pem"],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", certificate)
    tell(log)
    with proxy(server.uri, tls=context) as before:
        bench = Bench(log, Tracker(before.uri, server.database), tmp_path / "state", capsys)
        with pytest.raises(SystemExit) as ended:
            main(bench.arguments)
        assert ended.value.code == 1
        assert "MLFLOW_TRACKING_SERVER_CERT_PATH" in capsys.readouterr().err
        monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "ca.pem"))
        bench.sync()
        check(bench)
        monkeypatch.delenv("MLFLOW_TRACKING_SERVER_CERT_PATH")
        monkeypatch.setenv("MLFLOW_TRACKING_INSECURE_TLS", "true")
        assert bench.sync()[0]["points_sent"] == 0


@pytest.mark.soak
def test_a_server_killed_and_started_again_gets_the_rest(
    empty_database: Path,
    log: Log,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL in the middle of a batch: the sync waits, and goes on by itself."""
    monkeypatch.setattr("llmtrack.sync.replay.patience._FIRST_WAIT_S", 0.1)
    database = Path(shutil.copy(empty_database, tmp_path / "own.db"))
    tell(log)
    with serving_mlflow(f"sqlite:///{database}", tmp_path) as own, proxy(own.uri) as before:
        before.rule = _killing(own)
        bench = Bench(log, Tracker(before.uri, database), tmp_path / "state", capsys)
        bench.sync()
        check(bench)
        assert before.faults == []


def _killing(own: MlflowServer) -> Callable[[Request], Fault | None]:
    """Kill the server at the second batch of points, and start it again."""
    batches = iter(range(1000))

    def rule(request: Request) -> Fault | None:
        if b'"metrics"' in request.body and next(batches) == 1:
            own.kill()
            own.start()
        return None

    return rule


@pytest.mark.skipif(bool(missing_postgres()), reason=missing_postgres() or "there is one")
def test_postgresql_behind_the_server_holds_every_point_once(
    log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same as with SQLite, also when answers are lost; and with the database written to without a server."""
    psycopg2 = pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
    tell(log)
    with serving_postgres() as store:
        with serving_mlflow(store, tmp_path) as own, proxy(own.uri) as before:
            before.rule = lambda request: _LOST if request.number % 5 == 3 else None
            bench = Bench(log, Tracker(before.uri, Path()), tmp_path / "state", capsys)
            bench.sync()
            assert bench.sync()[0]["points_sent"] == 0
        with psycopg2.connect(store.replace("+psycopg2", "")) as con, con.cursor() as reading:
            reading.execute("SELECT key, step, timestamp, value FROM metrics WHERE key <> 'step'")
            held = Counter[Point](reading.fetchall())
        con.close()
        assert held == Counter(row.point for row in read_log(log.root))
        direct = Bench(log, Tracker(store, Path()), tmp_path / "other", capsys)
        assert direct.sync()[0]["points_sent"] == 0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_two_hosts_under_random_faults_and_kills_end_with_every_point_once(
    faulty: tuple[Bench, Proxy], tmp_path: Path, seed: int
) -> None:
    """Any of: SIGKILL, lost answers, resets, lost or old cursors, another host's turn, a log that goes on meanwhile.

    At the end one undisturbed sync, and the database is compared with the log.
    """
    bench, before = faulty
    random_ = random.Random(seed)
    first = bench.log.segment().train(0, 3000).checkpoint(1000)
    hosts = [tmp_path / "host-1", tmp_path / "host-2"]

    def unkind(request: Request) -> Fault | None:
        return random_.choice(_FAULTS) if random_.random() < 0.15 and request.number >= 0 else None

    before.rule = unkind
    for turn in range(4 if seed == 1 else 10):
        bench.state = random_.choice(hosts)
        if random_.random() < 0.3:
            shutil.rmtree(bench.state, ignore_errors=True)
        process = subprocess.Popen(
            [sys.executable, "-c", "from llmtrack.sync.cli import main; main()", *bench.arguments, "-q"],
            stderr=subprocess.DEVNULL,
        )
        wanted = len(before.requests) + random_.randrange(1, 40)
        while process.poll() is None and len(before.requests) < wanted:
            try:
                process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        process.kill()
        process.wait()
        if turn == 1:
            first.train(3000, 4000).checkpoint(3000)
        elif turn == 3:
            bench.log.segment(after=("run", 1, 3000)).train(3000, 3500)
    before.rule = no_fault
    bench.sync()
    check(bench)
    assert bench.sync()[0]["points_sent"] == 0
    kinds = Counter(run.tag("kind") for run in bench.tracker.runs(bench.log.project))
    assert kinds == Counter(["canonical", "superseded", "provisional"])
