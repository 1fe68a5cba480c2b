"""Commands that need only the writer: ids of runs and checkpoints, evaluations, upkeep, and plans.

They raise `LlmtrackError`; ``llmtrack.__main__`` makes one line and an exit status of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from .capture.cadence import DEFAULT_FILE, Cadence
from .capture.plan import estimate_layers, make_plan, to_lines, to_rows
from .checkpoints.checkpoint import identify
from .checkpoints.evals import EvalFile, EvalValue, to_json, write_evals
from .checkpoints.lm_eval import import_lm_eval
from .errors import UsageError
from .lineage.opening import new_run_id
from .plain import plain
from .upkeep.adopt import adopt
from .upkeep.maintenance import DEFAULT_SILENCE_S, seal_root
from .upkeep.verify import verify

_PATH: Final = click.Path(path_type=Path)
_DAMAGED: Final = 4  # exit status
_OVER_BUDGET: Final = 1
_WITHOUT_DECIMALS: Final = 10
_json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print an array of rows.")
_root_option: Final = click.option(
    "--root",
    type=_PATH,
    default=".",
    envvar="LLMTRACK_DIR",
    show_default="the current folder",
    show_envvar=True,
    help="The folder that holds the runs.",
)


def _example(*lines: str) -> str:
    """Return the end of a help page; the first character keeps click from filling the lines."""
    return "\n".join(("\b", "Example:", *(f"  {line}" for line in lines)))


def _place_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what both ways to log an evaluation take."""
    for option in (
        _json_option,
        _root_option,
        click.option("--run", "run_id", help="The run that recorded the checkpoint; looked for when not given."),
        click.option("--tokens", type=int, help="Of the checkpoint; needed only where no run has recorded it."),
        click.option("--ckpt", "ckpt_id", required=True, metavar="ID", help="As `llmtrack ckpt-id` prints it."),
    ):
        command = option(command)
    return command


@click.command("id", epilog=_example("export LLMTRACK_RUN_ID=$(llmtrack id)", "sbatch --requeue train.sbatch"))
@_json_option
def new_id(*, as_json: bool) -> None:
    """Print a new run id, to choose it before the job starts.

    Exit status: 0 done; 1 wrong usage.
    """
    _print([{"run_id": new_run_id()}], "run_id", as_json=as_json)


@click.command("ckpt-id", epilog=_example("llmtrack ckpt-id checkpoints/step_4000 --tokens 16777216000 --quick"))
@click.argument("path", type=_PATH)
@click.option("--tokens", type=int, required=True, help="Tokens seen by the run when it was saved.")
@click.option("--quick", is_flag=True, help="Sizes and samples only: the form that a run records by itself.")
@_json_option
def ckpt_id(path: Path, tokens: int, *, quick: bool, as_json: bool) -> None:
    """Print the id of a checkpoint, made of its files and its token count.

    The id is the same wherever the file or folder lies and whatever it is called. A quick id and a full one of the
    same checkpoint differ: use the form that the run recorded, which is the quick one unless it was told otherwise.

    Exit status: 0 done; 1 wrong usage.
    """
    identity = identify(path, tokens, full=not quick)
    row = {"ckpt_id": identity.ckpt_id, "tokens": tokens, "path": str(path), "bytes": identity.bytes}
    _print([row], "ckpt_id", as_json=as_json)


@click.group("eval", epilog=_example('llmtrack eval import results_2025-01-02.json --ckpt "$CKPT"'))
def evaluation() -> None:
    """Keep evaluations of checkpoints, from any host, at any time.

    Exit status: 0 done; 1 wrong usage.
    """


@evaluation.command(
    "add", epilog=_example('llmtrack eval add --ckpt "$CKPT" --task hellaswag --metric acc --value 0.61 --stderr 0.01')
)
@click.option("--task", required=True, help="For example hellaswag.")
@click.option("--metric", required=True, help="For example acc.")
@click.option("--value", type=float, required=True, help="The number; nan and inf are numbers.")
@click.option("--stderr", type=float, help="Its standard error.")
@click.option("--harness", help="What measured it.")
@click.option("--harness-version", help="Its version.")
@click.option("--prompt-hash", help="Anything that differs when the prompts differ.")
@click.option("--details", metavar="JSON", help="Anything else.")
@_place_options
def eval_add(
    *,
    task: str,
    metric: str,
    value: float,
    stderr: float | None,
    harness: str | None,
    harness_version: str | None,
    prompt_hash: str | None,
    details: str | None,
    as_json: bool,
    **place: Any,
) -> None:
    """Keep one value that was measured on a checkpoint, and print its file.

    Adding is never replacing: a second value of the same task and metric stands beside the first.

    Exit status: 0 done; 1 wrong usage.
    """
    text = None if details is None else _compact(details)
    measured = EvalValue(task, metric, value, stderr, prompt_hash, text)
    written = write_evals(values=[measured], harness=harness, harness_version=harness_version, **place)
    _report(written, place, as_json=as_json)


@evaluation.command(
    "import", epilog=_example('llmtrack eval import results_2025-01-02.json --ckpt "$CKPT" --root /shared/runs')
)
@click.argument("file", type=_PATH)
@_place_options
def eval_import(file: Path, *, as_json: bool, **place: Any) -> None:
    """Keep every value of a result file of lm-evaluation-harness, and print the file they went to.

    Importing the same file again for the same checkpoint changes nothing.

    Exit status: 0 done; 1 wrong usage.
    """
    _report(import_lm_eval(path=file, **place), place, as_json=as_json)


@click.command("adopt", epilog=_example("llmtrack adopt continued-by-hand --from pretrain-7b --tokens 41943040"))
@_root_option
@click.argument("run_id", metavar="RUN")
@click.option("--from", "from_run", required=True, metavar="RUN", help="The run that it really went on from.")
@click.option("--tokens", type=int, required=True, help="Tokens seen up to the place.")
@click.option("--from-segment", type=int, help="Default: the one whose curve it is at these tokens.")
@click.option("--segment", type=int, help="The segment of RUN that starts there; default: its first.")
@click.option("--step", type=int, help="Optimiser step at the place.")
@_json_option
def adopt_run(*, root: Path, as_json: bool, **place: Any) -> None:
    """Join RUN to the place of another run that it really started from.

    For a run that was started without the checkpoint's llmtrack record. A record is added, and none is edited; where
    both have points, RUN's count beyond the place and the other's up to it. Adopting again replaces the place.

    Exit status: 0 done; 1 wrong usage.
    """
    adoption = adopt(root, **place)
    row = {**vars(adoption), "folder": str(adoption.folder)}
    line = (
        f"segment {adoption.segment} of {adoption.run_id} starts from segment {adoption.from_segment} of "
        f"{adoption.from_run} at {adoption.tokens} tokens"
    )
    _print([row], [line], as_json=as_json)


@click.command("seal", epilog=_example("llmtrack seal --root /shared/runs --run 'pretrain-7b-*'"))
@_root_option
@click.option("--run", "run", default="*", show_default=True, metavar="GLOB", help="Only runs whose id matches.")
@click.option(
    "--silence-s",
    type=click.FloatRange(min=0),
    default=DEFAULT_SILENCE_S,
    show_default=True,
    help="A writer that was not heard of for so long is gone; one that has ended is anyway.",
)
@_json_option
@click.pass_context
def seal(context: click.Context, *, root: Path, run: str, silence_s: float, as_json: bool) -> None:
    """Turn what killed writers left open into Parquet.

    Nothing is lost by not doing it: open parts are read like sealed ones. Exit status 4 when a part is damaged; it
    stays open, and what is intact in it stays readable.
    """
    results = list(seal_root(root, run=run, silence_s=silence_s))
    rows = [
        {
            "folder": str(result.folder),
            "sealed": [str(path) for path in result.sealed],
            "skipped": result.skipped,
            "error": result.error,
        }
        for result in results
    ]
    lines = [
        f"{result.folder}: {result.error or result.skipped or f'{len(result.sealed)} sealed'}" for result in results
    ]
    _print(rows, lines, as_json=as_json)
    if any(result.error for result in results):
        context.exit(_DAMAGED)


@click.command("verify", epilog=_example("llmtrack verify --root /shared/runs --deep"))
@_root_option
@click.option("--deep", is_flag=True, help="Decode sealed parts, too, and compare the digests of their rows.")
@_json_option
@click.pass_context
def verify_root(context: click.Context, *, root: Path, deep: bool, as_json: bool) -> None:
    """Check every file of a root, and list what is damaged or missing.

    Exit status 4 when something that was written cannot be read. What a kill leaves (a last batch that is not whole, a
    segment without a record) is listed, and is no damage.
    """
    report = verify(root, deep=deep)
    rows = [
        {
            "path": str(finding.path),
            "kind": finding.kind,
            "reason": finding.reason,
            "first_byte": finding.first_byte,
            "end_byte": finding.end_byte,
        }
        for finding in report.findings
    ]
    _print(rows, map(str, report.findings), as_json=as_json)
    click.echo(
        f"runs: {report.runs}, segments: {report.segments}, parts: {report.open_parts} open and {report.sealed_parts} "
        f"sealed, rows: {report.rows}, bytes: {report.bytes}; "
        + ("everything that was written whole can be read" if report.is_intact else "NOT everything can be read"),
        err=True,
    )
    if not report.is_intact:
        context.exit(_DAMAGED)


_FACTORS: Final = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def count(text: str) -> float:
    """Return a positive number that is written as people write large ones: 7B, 1.3e9, 500k."""
    digits, factor = (text[:-1], _FACTORS[text[-1].lower()]) if text[-1:].lower() in _FACTORS else (text, 1.0)
    try:
        number = float(digits) * factor
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise click.BadParameter(f"{text!r} is no count: write it as in 7B, 500k or 1e9")
    return number


@click.command("plan", epilog=_example("llmtrack plan cadence.toml --steps 500k --params 7B --max-points 200M"))
@click.argument("cadence", type=_PATH, required=False)
@click.option("--default", "prints_default", is_flag=True, help="Print the table that comes along, and nothing else.")
@click.option("--steps", type=count, help="Of the optimiser.")
@click.option("--params", type=count, help="Parameters of the model, to guess its layers.")
@click.option("--layers", type=click.IntRange(min=1), help="Of the model.")
@click.option("--step-time-s", type=count, default="1", show_default=True, help="Of one step.")
@click.option("--segments", type=click.IntRange(min=1), default=1, show_default=True, help="Starts of the job.")
@click.option("--max-points", type=count, help="Budget: values.")
@click.option("--max-bytes", type=count, help="Budget: on disk.")
@click.option("--max-files", type=count, help="Budget: at the end of the run.")
@click.option("--max-hours", type=count, help="Budget: replaying the run into any of the trackers.")
@_json_option
@click.pass_context
def plan(
    context: click.Context,
    /,
    *,
    cadence: Path | None,
    prints_default: bool,
    steps: float | None,
    params: float | None,
    layers: int | None,
    step_time_s: float,
    segments: int,
    as_json: bool,
    **budgets: float | None,
) -> None:
    """Say what a run will log: points, bytes, files, and what sending them to a tracker takes.

    CADENCE is a table in TOML; without it, the one that comes along is meant. Exit status 1 when the run goes beyond a
    budget. Sizes and rates are estimates from measurements; limits are those that the trackers document.
    """
    if prints_default:
        if others := [
            one for one in context.command.params if _is_given(context, one) and one.name != "prints_default"
        ]:
            raise UsageError(
                f"--default prints the table that comes along, and makes no plan: {others[0].get_error_hint(context)} "
                "has no say in it",
                hint="leave --default out: without CADENCE a plan is made of that table",
            )
        click.echo(DEFAULT_FILE.read_text(encoding="utf-8"), nl=False)
        return
    table = Cadence.load(cadence or DEFAULT_FILE)
    if steps is None or (params is None and layers is None):
        raise UsageError("a plan needs steps and a size", hint="give --steps 500k, and --params 7B or --layers 32")
    made = make_plan(
        table,
        steps=round(steps),
        layers=layers or estimate_layers(params or 1.0),
        step_time_s=step_time_s,
        segments=segments,
    )
    _print(to_rows(made), to_lines(made), as_json=as_json)
    used = {
        "max_points": made.points,
        "max_bytes": made.disk_bytes,
        "max_files": made.files,
        "max_hours": max(tracker.hours for tracker in made.trackers),
    }
    over = [(name, used[name], limit) for name, limit in budgets.items() if limit is not None and used[name] > limit]
    for name, value, limit in over:
        allowed = f"{_people(value)} {name.removeprefix('max_')}, and at most {_people(limit)} are allowed"
        click.echo(f"over budget: {allowed}", err=True)
    if over:
        context.exit(_OVER_BUDGET)


def _is_given(context: click.Context, parameter: click.Parameter) -> bool:
    return context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE


COMMANDS: Final[tuple[click.Command, ...]] = (new_id, ckpt_id, evaluation, adopt_run, seal, verify_root, plan)


def _people(number: float) -> str:
    return f"{number:,.0f}" if number >= _WITHOUT_DECIMALS else f"{number:.2g}"


def _compact(details: str) -> str:
    try:
        value = json.loads(details)
    except ValueError as error:
        raise UsageError(f"--details is no JSON: {error}", hint="""as in --details '{"limit": 100}'""") from error
    return to_json(value)


def _report(written: EvalFile, place: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the rows or the file, and on stderr what is worth knowing about where it went."""
    if not written.is_new:
        click.echo("these results are there already", err=True)
    if not written.is_matched:
        click.echo(
            f"{place['ckpt_id']} is not recorded in {place['run_id'] or place['root']}: kept as unmatched until it is "
            "(a run records quick ids unless told otherwise)",
            err=True,
        )
    file = str(written.path)
    rows = [
        {**row, "time": _utc(row["time"]), "run_id": written.run_id, "matched": written.is_matched, "file": file}
        for row in written.table.to_pylist()
    ]
    _print(rows, "file", as_json=as_json)


def _print(rows: Iterable[dict[str, Any]], lines: str | Iterable[str], *, as_json: bool) -> None:
    """Print rows as JSON, or lines; the name of a column stands for what it holds."""
    if as_json:
        click.echo(json.dumps([plain(row) for row in rows], ensure_ascii=False, indent=2))
        return
    texts = (str(row[lines]) for row in rows) if isinstance(lines, str) else lines
    for text in dict.fromkeys(texts):
        click.echo(text)


def _utc(time: datetime) -> str:
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
