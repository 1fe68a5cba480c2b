"""What a sync that ends by itself does beside replaying, with a tracker that is not there."""

from __future__ import annotations

import datetime as dt
import json
import shlex
import sys
from pathlib import Path

import pytest

from llmtrack.sync.cli import main
from llmtrack.sync.replay.cursor import cursor_path
from llmtrack.sync.watch.lock import SyncLock
from tests.handmade import write_part, write_segment
from tests.oracle import Point, Segment

_NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with an alert of a minute ago, and one of a month ago."""
    root = tmp_path / "root"
    folder = write_segment(root, Segment("run", 1, points=[Point(10, "loss", 1.0)]), project="p")
    now = dt.datetime.now(dt.UTC)
    alert = {"rule": "spike", "level": "error", "message": "up", "tokens": 10, "phase": "raised"}
    ages = {"new": dt.timedelta(minutes=1), "old": dt.timedelta(days=30)}
    write_part(folder, "alerts", [{**alert, "alert_id": name, "time": now - age} for name, age in ages.items()])
    return root


def _sync(root: Path, *options: str) -> int:
    place = ["--to", "mlflow", "--tracking-uri", _NOWHERE, "--timeout", "1", "--state", str(root.parent / "state")]
    with pytest.raises(SystemExit) as ended:
        main([str(root), *place, *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_alerts_are_relayed_once_though_the_tracker_is_away(root: Path, tmp_path: Path) -> None:
    """From cron every five minutes: the second one tells nothing again."""
    out = tmp_path / "told"
    code = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {shlex.quote(str(out))}"
    assert _sync(root, "--on-alert", command) == 3
    assert _sync(root, "--on-alert", command, "-q") == 3
    (told,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (told["event"], told["id"], told["rule"]) == ("alert", "run/1/new/raised", "spike")


def test_beside_a_watch_it_ends_and_says_who_is_at_work(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would do the same work."""
    folder = cursor_path(tmp_path / "state", "mlflow", _NOWHERE, "any").parent
    with SyncLock(folder, root, "watch"):
        assert _sync(root) == 1
    err = capsys.readouterr().err
    assert "llmtrack-sync --watch, process" in err
    assert "is at work on" in err
    assert _sync(root) == 3


def test_a_dry_run_relays_nothing(root: Path, tmp_path: Path) -> None:
    """It writes nothing and contacts nobody."""
    assert _sync(root, "--dry-run", "--on-alert", "/no/such/program") == 0
    assert not (tmp_path / "state").exists()
