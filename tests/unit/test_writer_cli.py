"""The commands that need only the writer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from llmtrack import open_run
from llmtrack.writer.checkpoints.checkpoint import checkpoint_id
from llmtrack.writer.cli import COMMANDS
from llmtrack.writer.errors import UsageError
from llmtrack.writer.format import check_run_id, run_folder

DATA = Path(__file__).parents[1] / "data" / "lm_eval"
CKPT = "quick-0123456789abcdef0123456789abcdef"


def call(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    """Run one command line."""
    main = click.Group("llmtrack", commands={command.name or "": command for command in COMMANDS})
    return CliRunner(env=env).invoke(main, [str(argument) for argument in arguments])


def rows(result: Result) -> list[dict[str, Any]]:
    """Return what a command printed with --json."""
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_id_prints_a_new_run_id() -> None:
    """It is valid, and another one each time."""
    ids = [check_run_id(call("id").stdout.removesuffix("\n")) for _ in range(3)]
    ids += [row["run_id"] for row in rows(call("id", "--json"))]
    assert len(set(ids)) == 4


def test_ckpt_id_prints_what_the_library_gives(tmp_path: Path) -> None:
    """One line to paste, or a row with the size."""
    (tmp_path / "model.pt").write_bytes(b"weights")
    assert call("ckpt-id", tmp_path, "--tokens", "7").stdout == checkpoint_id(tmp_path, 7) + "\n"
    quick = call("ckpt-id", tmp_path, "--tokens", "7", "--quick", "--json")
    assert rows(quick) == [
        {"ckpt_id": checkpoint_id(tmp_path, 7, full=False), "tokens": 7, "path": str(tmp_path), "bytes": 7}
    ]


def test_ckpt_id_of_nothing_is_a_usage_error(tmp_path: Path) -> None:
    """The library's own error comes through, for the caller of the commands to print."""
    assert isinstance(call("ckpt-id", tmp_path / "gone", "--tokens", "7").exception, UsageError)


def test_eval_add_keeps_one_value(tmp_path: Path) -> None:
    """Standard output has the file; that the checkpoint is not recorded is said on standard error."""
    run_folder(tmp_path, "a").mkdir()
    options = ("--ckpt", CKPT, "--task", "hellaswag", "--metric", "acc", "--value", "0.61", "--stderr", "0.01")
    result = call("eval", "add", *options, "--root", tmp_path)
    assert result.exit_code == 0
    assert Path(result.stdout.strip()).parent == tmp_path / "evals"
    assert f"{CKPT} is not recorded in {tmp_path}" in result.stderr
    named = ("--harness", "mine", "--harness-version", "2", "--prompt-hash", "f00", "--tokens", "9", "--run", "a")
    (row,) = rows(
        call("eval", "add", *options, *named, "--details", '{"b": 1}', "--json", env={"LLMTRACK_DIR": str(tmp_path)})
    )
    assert Path(row.pop("file")).parent == tmp_path / "run_id=a" / "evals"
    assert re.fullmatch(r"20..-..-..T..:..:..\....Z", row.pop("time"))
    assert row == {
        "seq": 1,
        "step": None,
        "tokens": 9,
        "ckpt_id": CKPT,
        "task": "hellaswag",
        "metric": "acc",
        "value": 0.61,
        "stderr": 0.01,
        "harness": "mine",
        "harness_version": "2",
        "prompt_hash": "f00",
        "details": '{"b": 1}',
        "run_id": "a",
        "matched": False,
    }


def test_json_has_a_word_for_what_json_cannot_say(tmp_path: Path) -> None:
    """NaN is kept in the file, and a string where it is printed, as in every command."""
    options = ("--ckpt", CKPT, "--task", "t", "--metric", "m", "--value", "nan", "--root", tmp_path, "--json")
    (row,) = rows(call("eval", "add", *options))
    assert row["value"] == "NaN"


def test_eval_add_takes_the_current_folder_where_no_root_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every command does."""
    monkeypatch.chdir(tmp_path)
    call("eval", "add", "--ckpt", CKPT, "--task", "t", "--metric", "m", "--value", "1")
    assert len(list((tmp_path / "evals").iterdir())) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("seal",),
        ("adopt", "a", "--from", "b", "--tokens", "4"),
        ("eval", "add", "--ckpt", CKPT, "--task", "t", "--metric", "m", "--value", "1"),
        ("eval", "import", DATA / "results_0.4.13_with_samples.json", "--ckpt", CKPT),
    ],
    ids=lambda arguments: "-".join(str(word) for word in arguments[:2]),
)
def test_the_folder_of_a_run_is_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str | Path, ...]
) -> None:
    """It would look like a root without runs, in which all is well; it is refused, from within it too."""
    with open_run(tmp_path, run_id="a") as run:
        run.log({"loss": 1.0}, step=1, tokens=10)
    folder = run_folder(tmp_path, "a")
    monkeypatch.chdir(folder)
    before = sorted(tmp_path.rglob("*"))
    for root in (folder, Path()):
        error = call(*arguments, "--root", root).exception
        assert isinstance(error, UsageError)
        assert "is the folder of a run, not a root" in str(error)
        assert str(tmp_path) in error.hint
    with pytest.raises(UsageError, match="not a root"):
        open_run(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_details_that_are_no_json_are_refused(tmp_path: Path) -> None:
    """With an example of what is."""
    options = ("--ckpt", CKPT, "--task", "t", "--metric", "m", "--value", "1", "--root", tmp_path)
    error = call("eval", "add", *options, "--details", "{").exception
    assert isinstance(error, UsageError)
    assert "--details" in error.hint


def test_eval_import_keeps_every_value_of_a_file_once(tmp_path: Path) -> None:
    """The second time it says that they are there."""
    options = ("eval", "import", DATA / "results_0.4.13_with_samples.json", "--ckpt", CKPT, "--root", tmp_path)
    first, second = call(*options), call(*options)
    assert first.stdout == second.stdout
    assert "there already" not in first.stderr
    assert "these results are there already" in second.stderr
    assert len(rows(call(*options, "--json"))) == 9


def leaves(command: click.Command) -> list[click.Command]:
    """Return a command, or those below a group."""
    if isinstance(command, click.Group):
        return [command, *(leaf for inner in command.commands.values() for leaf in leaves(inner))]
    return [command]


@pytest.mark.parametrize("command", [leaf for command in COMMANDS for leaf in leaves(command)], ids=lambda c: c.name)
def test_every_command_has_help_with_an_example(command: click.Command) -> None:
    """Each says what it does, shows a line to copy unbroken, and explains each option."""
    text = CliRunner().invoke(command, ["--help"]).stdout
    example = text.split("Example:\n")[1]
    assert example.strip().splitlines()[-1].strip().startswith(("llmtrack ", "sbatch "))
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help
