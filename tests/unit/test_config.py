"""Where options come from, and which one counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrack.sync.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a root in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return tmp_path


def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--print-config"])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    pairs = (line.split(" = ", 1) for line in out.splitlines() if " = " in line)
    return {key: value for key, value in pairs if not key.startswith("#")}


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 1
    return capsys.readouterr().err


_FILE = """
[sync]
root = "runs"
to = "mlflow"
jobs = 2
watch = true
tail = "hold"

[watch]
poll = 30
stalled_after = 600

[notify]
url = "https://hooks.example.org/services/T0P5ECRET"
on_alert = "/bin/page --key T0P5ECRET"
min_level = "warn"

[detectors]
of = "another command"
"""


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each says where it comes from."""
    (here / "llmtrack.toml").write_text(_FILE)
    monkeypatch.setenv("LLMTRACK_SYNC_JOBS", "5")
    monkeypatch.setenv("LLMTRACK_STALLED_AFTER", "77")
    monkeypatch.setenv("LLMTRACK_POLL", "40")
    shown = _shown(capsys, "--poll", "50", "--verify", "fast")
    assert shown["poll"] == "50.0  # command line"
    assert shown["verify"] == '"fast"  # command line'
    assert shown["jobs"] == "5  # environment"
    assert shown["stalled_after"] == "77.0  # environment"
    assert shown["tail"] == '"hold"  # file'
    assert shown["to"] == '"mlflow"  # file'
    assert shown["root"] == '"runs"  # file'
    assert shown["watch"] == "true  # file"
    assert shown["superseded"] == '"side"  # default'


def test_secrets_are_not_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The address of a hook, the arguments of a command, and a password in the tracker's address."""
    (here / "llmtrack.toml").write_text(_FILE)
    shown = _shown(capsys, "--tracking-uri", "https://user:T0P5ECRET@mlflow.example.org:5000/x")
    assert "T0P5ECRET" not in str(shown)
    assert shown["url"] == '"https://hooks.example.org/..."  # file'
    assert shown["on_alert"] == '"/bin/page ..."  # file'
    assert shown["tracking_uri"] == '"https://mlflow.example.org:5000/x"  # command line'


def test_a_file_may_lie_elsewhere_and_none_is_needed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was named has to be there."""
    assert "tail" in _shown(capsys)
    (here / "other.toml").write_text('[sync]\ntail = "hold"\n')
    assert _shown(capsys, "--config", "other.toml")["tail"] == '"hold"  # file'
    monkeypatch.setenv("LLMTRACK_CONFIG", "other.toml")
    assert _shown(capsys)["tail"] == '"hold"  # file'
    assert "missing.toml cannot be read" in _error(capsys, "--config", "missing.toml", "--print-config")


@pytest.mark.parametrize(
    "case",
    [
        ("[sync\n", "is not TOML"),
        ('[sync]\ntoo = "mlflow"\n', "no option 'too' in [sync]\n  try: [sync] to"),
        ("[watch]\nstaled_after = 3\n", "no option 'staled_after' in [watch]\n  try: [watch] stalled_after"),
        ("[sync]\npoll = 3\n", "no option 'poll' in [sync]\n  try: [watch] poll"),
        ('[watch]\npoll = "soon"\n', "--poll"),
        ('[notify]\nmin_level = "loud"\n', "--min-level"),
        ("sync = 3\n", "no option '' in [sync]"),
    ],
)
def test_what_a_file_should_not_say_is_told_with_what_was_meant(
    here: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, str]
) -> None:
    """A misspelt setting that counts for nothing would be found in the night when it was needed."""
    content, told = case
    (here / "llmtrack.toml").write_text(content)
    assert told in _error(capsys, "runs", "--to", "mlflow")


def test_a_file_can_name_the_root_and_the_tracker(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then the command needs nothing; without a file it says what is missing."""
    assert "Missing argument 'ROOT'" in _error(capsys)
    assert "Missing option '--to'" in _error(capsys, "runs")
    (here / "llmtrack.toml").write_text('[sync]\nroot = "nowhere"\nto = "mlflow"\n')
    assert "there is no folder nowhere" in _error(capsys)


@pytest.mark.parametrize(
    "case",
    [
        (["--notify", "hooks.example.org"], "--notify https://host/path"),
        (["--on-alert", "'open"], "--on-alert"),
        (["--poll", "0"], "--poll"),
        (["--stalled-after", "soon"], "--stalled-after"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_done(
    here: Path, capsys: pytest.CaptureFixture[str], case: tuple[list[str], str]
) -> None:
    """Not when the first alert comes."""
    arguments, told = case
    assert told in _error(capsys, "runs", "--to", "mlflow", "--watch", *arguments)
    assert sorted(path.name for path in here.iterdir()) == ["runs"]


def test_what_is_not_given_is_shown_with_its_default(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not only what has a value of its own."""
    assert here.is_dir()
    with pytest.raises(SystemExit):
        main(["--print-config"])
    lines = capsys.readouterr().out.splitlines()
    assert "# state =  # default: ~/.local/state/llmtrack" in lines
    assert "# stalled_after =  # default: 900" in lines
    assert "# to =  # not given" in lines


def test_a_variable_that_was_misspelt_is_told_with_what_was_meant(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What belongs to trainers and to others is left alone, and every option has its name with SYNC in it."""
    assert here.is_dir()
    names = ("SYNC_STATEE", "NOTIFI", "SYNC_NONSENSE", "RUN_ID", "MODE", "DEMO_DIR", "SYNC_RENEWED", "SYNC_LOST_AFTER")
    for name in names:
        monkeypatch.setenv(f"LLMTRACK_{name}", "5")
    with pytest.raises(SystemExit):
        main(["--print-config"])
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "warning: LLMTRACK_NOTIFI in the environment is no option of llmtrack-sync; LLMTRACK_NOTIFY is one",
        "warning: LLMTRACK_SYNC_NONSENSE in the environment is no option of llmtrack-sync: see llmtrack-sync --help",
        "warning: LLMTRACK_SYNC_STATEE in the environment is no option of llmtrack-sync; LLMTRACK_SYNC_STATE is one",
    ]
    assert "lost_after = 5.0  # environment" in out


def test_without_a_tracker_the_other_options_say_which_may_be_meant(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of one tracker alone names it."""
    assert "--to mlflow, or --to wandb" in _error(capsys, str(here / "runs"))
    assert "--to wandb --wandb-offline ..." in _error(capsys, str(here / "runs"), "--wandb-offline", str(here / "out"))
