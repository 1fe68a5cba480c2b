"""How a command ends: one line for an error and one for its remedy, an exit status that means something, valid JSON."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NoReturn

import click

from llmtrack.writer.errors import CorruptSegmentError, LlmtrackError, explained, shortened

EXIT_OK: Final = 0
EXIT_USAGE: Final = 1
EXIT_DAMAGED: Final = 4
EXIT_INTERRUPTED: Final = 130


def run(command: click.Command, args: Sequence[str] | None = None, *, prog_name: str = "llmtrack") -> NoReturn:
    """Run a command and exit: 0, 1 for wrong usage, 4 for damaged data, 130 when interrupted, or what it returned.

    Args:
        command: May return an exit status, or call `click.Context.exit` with one.
        args: Instead of those of the process.
        prog_name: Its name in messages.
    """
    if f"_{prog_name.replace('-', '_').upper()}_COMPLETE" in os.environ:  # the shell asks how to complete a line
        command.main(args, prog_name)
    status: object = EXIT_OK
    try:
        # Not `command.main`: it has its own idea of how a broken pipe ends.
        with command.make_context(prog_name, list(sys.argv[1:] if args is None else args)) as context:
            status = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as ended:
        status = ended.exit_code
    except LlmtrackError as error:
        _say_error(str(error))
        status = EXIT_DAMAGED if isinstance(error, CorruptSegmentError) else EXIT_USAGE
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else prog_name
        _say_error(f"{shortened(error.format_message()).rstrip('.')}\n  try: {path} --help")
        status = EXIT_USAGE
    except click.ClickException as error:
        _say_error(error.format_message())
        status = EXIT_USAGE
    except ModuleNotFoundError as error:
        _say_error(str(explained(error, else_extra="query")))
        status = EXIT_USAGE
    except (click.Abort, EOFError, KeyboardInterrupt):
        _say_error("interrupted")
        status = EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        _drop_output()
        status = EXIT_OK
    sys.exit(status if isinstance(status, int) else EXIT_OK)


def to_json(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return an array of objects that every JSON parser accepts, with nothing lost.

    NaN and the infinities are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, times are ISO 8601 in UTC with
    milliseconds, and integers have all their digits.
    """
    lines = (json.dumps({key: plain(value) for key, value in row.items()}, ensure_ascii=False) for row in rows)
    text = ",\n  ".join(lines)
    return f"[\n  {text}\n]" if text else "[]"


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; `to_json` says how."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value: object) -> object:
    match value:
        case dt.datetime():
            utc = value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
            return utc.isoformat(timespec="milliseconds") + "Z"
        case dt.timedelta():
            return value.total_seconds()
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case bytes():
            return value.hex()
    return str(value)


def say(text: str) -> None:
    """Print a line for the person at the terminal to stderr: stdout has the results."""
    click.echo(text, err=True)


def _drop_output() -> None:
    """Let what is still in the buffer go nowhere: it must not fail once more at the exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _say_error(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"error: {text}", err=True)
