"""Where the options of ``llmtrack-sync`` come from: the command line first, then the environment, then a TOML file.

[sync]                      # every option of the command, without its dashes
root = "/shared/runs"
to = "mlflow"
tracking_uri = "http://mlflow:5000"
watch = true

[watch]
poll = 30                   # seconds
stalled_after = 900
lost_after = 86400

[notify]
url = "https://hooks.slack.com/services/..."
on_alert = "/usr/local/bin/page-me"
min_level = "warn"
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import tomllib
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from llmtrack.query.text.console import say
from llmtrack.writer.errors import UsageError

from .watch.notify import LEVELS

FILE: Final = "llmtrack.toml"  # looked for in the current folder

_PREFIX: Final = "LLMTRACK_SYNC_"
_SECTIONS: Final = {  # of the file, for options that are not in [sync], and their names there
    "poll": ("watch", "poll"),
    "stalled_after": ("watch", "stalled_after"),
    "lost_after": ("watch", "lost_after"),
    "notify": ("notify", "url"),
    "on_alert": ("notify", "on_alert"),
    "min_level": ("notify", "min_level"),
}
# Of trainers, and what a watch that begins anew leaves to itself: near in spelling, and not meant.
_OF_OTHERS: Final = frozenset({"LLMTRACK_DIR", "LLMTRACK_MODE", "LLMTRACK_RUN_ID", "LLMTRACK_SYNC_RENEWED"})
_NOT_IN_FILES: Final = {"config", "print_config", "help"}
_SOURCES: Final = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
    ParameterSource.DEFAULT: "default",
}


@dataclass(frozen=True)
class Watching:
    """The options that are about going on, and about telling people.

    Attributes:
        on: Go on until a signal comes.
        poll_s: Look every so many seconds, whatever the file system; None: as the file system allows.
        stalled_s: Silence after which a run is stalled; None: as the views of the log have it.
        lost_s: Silence after which it is lost; None: likewise.
        notify: The address of a web hook; a secret.
        on_alert: A command; its arguments may be secrets.
        min_level: Of what is relayed.
    """

    on: bool
    poll_s: float | None
    stalled_s: float | None
    lost_s: float | None
    notify: str | None
    on_alert: str | None
    min_level: str


def configurable(command: click.Command) -> click.Command:
    """Let a command read its options from the environment and a file too, and give it those of `Watching`.

    Its function gets them as `watching`.
    """
    callback = command.callback
    if callback is None:
        raise ValueError("the command has a function")
    command.params += _options()
    context = click.Context(command)
    required = [param for param in command.params if param.required]
    for param in command.params:
        param.metavar = param.metavar or (param.make_metavar(context) if isinstance(param, click.Argument) else None)
        param.required = False  # what is missing is said later: --print-config needs nothing
        param.envvar = param.envvar or ("LLMTRACK_DIR" if param.name == "root" else _PREFIX + _key(param).upper())
    command.callback = _with_watching(callback, required)
    return command


def _with_watching(callback: Callable[..., Any], required: list[click.Parameter]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(
        *,
        watch: bool,
        poll: float | None,
        stalled_after: float | None,
        lost_after: float | None,
        notify: str | None,
        on_alert: str | None,
        min_level: str,
        print_config: bool,
        **options: Any,
    ) -> Any:
        context = click.get_current_context()
        for warning in unknown_variables(os.environ, context.command.params):
            say(warning)
        if print_config:
            click.echo(shown(context))
            return 0
        for param in required:
            if context.params.get(param.name or "") is None:
                raise _missing(context, param)
        watching = Watching(watch, poll, stalled_after, lost_after, notify, on_alert, min_level)
        return callback(watching=watching, **options)

    return call


def _missing(context: click.Context, param: click.Parameter) -> Exception:
    """Return what to say when something is lacking: which tracker is meant may show in the other options."""
    if _key(param) != "to":
        return click.MissingParameter(ctx=context, param=param)
    of_wandb = (one for one in context.command.params if (one.name or "").startswith("wandb_"))
    given = next((one.opts[0] for one in of_wandb if context.params.get(one.name or "") is not None), None)
    hint = f"--to wandb {given} ..." if given else "--to mlflow, or --to wandb"
    return UsageError("Missing option '--to': the tracker", hint=hint)


def unknown_variables(environment: Mapping[str, str], params: Sequence[click.Parameter]) -> list[str]:
    """Return a warning for each variable of the environment that was probably meant for an option and is none.

    Args:
        environment: By name.
        params: The options.
    """
    known: set[str] = set()
    for param in params:
        known.update([param.envvar] if isinstance(param.envvar, str) else param.envvar or ())
    warnings = []
    for name in sorted(environment.keys() - known - _OF_OTHERS):
        near = difflib.get_close_matches(name, sorted(known), 1, 0.85)
        if name.startswith(_PREFIX) or (name.startswith("LLMTRACK_") and near):
            meant = f"; {near[0]} is one" if near else ": see llmtrack-sync --help"
            warnings.append(f"warning: {name} in the environment is no option of llmtrack-sync{meant}")
    return warnings


def _options() -> list[click.Parameter]:
    seconds = click.FloatRange(min=0.1)
    return [
        click.Option(["--watch"], is_flag=True, help="Go on: send what is new as it comes, until SIGINT or SIGTERM."),
        click.Option(
            ["--poll"],
            type=seconds,
            metavar="S",
            show_default="as events come, or 10 where they do not",
            envvar=["LLMTRACK_SYNC_POLL", "LLMTRACK_POLL"],
            help="With --watch: look every S seconds. Without it, as events come, and every 10 s on NFS, Lustre and"
            " whatever is not local.",
        ),
        click.Option(
            ["--stalled-after"],
            type=seconds,
            show_default="900",
            metavar="S",
            envvar=["LLMTRACK_SYNC_STALLED_AFTER", "LLMTRACK_STALLED_AFTER"],
            help="Silence after which a run is stalled, if that is more than three of its own longest pauses.",
        ),
        click.Option(
            ["--lost-after"],
            type=seconds,
            show_default="86400",
            metavar="S",
            envvar=["LLMTRACK_SYNC_LOST_AFTER", "LLMTRACK_LOST_AFTER"],
            help="Silence after which it is lost.",
        ),
        click.Option(
            ["--notify"],
            metavar="URL",
            envvar=["LLMTRACK_SYNC_NOTIFY", "LLMTRACK_NOTIFY"],
            help="Post new alerts, stalls, crashes, restarts and ends of runs there, as JSON that Slack understands.",
        ),
        click.Option(
            ["--on-alert"],
            metavar="CMD",
            envvar=["LLMTRACK_SYNC_ON_ALERT", "LLMTRACK_ON_ALERT"],
            help="Run a command for each of them, with the JSON on its standard input.",
        ),
        click.Option(
            ["--min-level"],
            type=click.Choice(LEVELS),
            default="info",
            show_default=True,
            envvar=["LLMTRACK_SYNC_MIN_LEVEL", "LLMTRACK_MIN_LEVEL"],
            help="Relay nothing below it.",
        ),
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            envvar="LLMTRACK_CONFIG",
            is_eager=True,
            expose_value=False,
            show_default=FILE,
            callback=_read_file,
            help="Where else options are looked for; the command line and LLMTRACK_SYNC_... go before.",
        ),
        click.Option(["--print-config"], is_flag=True, help="Print the options, and where each comes from, and end."),
    ]


def _read_file(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Let a file's values be the defaults.

    Raises:
        UsageError: It cannot be read, or has what no option is called.
    """
    found = path or Path(FILE)
    if path is None and not found.is_file():
        return None
    try:
        content = tomllib.loads(found.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{found} cannot be read: {error.strerror}", hint="--config FILE") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{found} is not TOML: {error}", hint='[sync]\n       to = "mlflow"') from error
    names = {_place(param): param.name for param in context.command.params if _key(param) not in _NOT_IN_FILES}
    values: dict[str, Any] = {}
    for section, table in content.items():
        if section not in {"sync", "watch", "notify"}:
            continue  # of another command
        for key, value in (table if isinstance(table, dict) else {"": table}).items():
            name = names.get((section, key))
            if name is None:
                known = sorted(f"[{place[0]}] {place[1]}" for place in names)
                near = [place for place in known if place.endswith(f"] {key}")]
                near = near or difflib.get_close_matches(f"[{section}] {key}", known, 1) or known
                raise UsageError(f"{found}: there is no option {key!r} in [{section}]", hint=", ".join(near))
            values[name] = value
    context.default_map = {**(context.default_map or {}), **values}
    context.meta["llmtrack.config"] = str(found)
    return found


def shown(context: click.Context) -> str:
    """Return the options as a file would have them, each with where it comes from, and without secrets."""
    file = context.meta.get("llmtrack.config")
    lines = [f"# file: {file or f'none ({FILE} is not here)'}"]
    by_section: dict[str, list[str]] = {"sync": [], "watch": [], "notify": []}
    for param in context.command.params:
        if _key(param) in _NOT_IN_FILES:
            continue
        section, key = _place(param)
        name = param.name or ""
        value = context.params.get(name)
        source = _SOURCES.get(context.get_parameter_source(name) or ParameterSource.DEFAULT, "default")
        if value is None:
            default = param.show_default if isinstance(param, click.Option) else None
            text = f"default: {default}" if isinstance(default, str) else "not given"
            by_section[section].append(f"# {key} =  # {text}")
            continue
        text = json.dumps(_without_secrets(key, value) if not isinstance(value, bool | int | float) else value)
        by_section[section].append(f"{key} = {text}  # {source}")
    for section, content in by_section.items():
        lines += ["", f"[{section}]", *content]
    return "\n".join(lines)


def _without_secrets(key: str, value: object) -> str:
    text = str(value)
    if key == "url":
        parts = urllib.parse.urlsplit(text)
        return f"{parts.scheme}://{parts.hostname}/..." if parts.hostname else "..."
    if key == "on_alert":
        program, _, arguments = text.partition(" ")
        return f"{program} ..." if arguments else program
    if "://" in text and "@" in text:
        parts = urllib.parse.urlsplit(text)
        place = parts.netloc.rpartition("@")[2]
        return urllib.parse.urlunsplit(parts._replace(netloc=place))
    return text


def _key(param: click.Parameter) -> str:
    """Return an option's name as a file has it."""
    long = next((name for name in param.opts if name.startswith("--")), param.name or "")
    return long.removeprefix("--").replace("-", "_")


def _place(param: click.Parameter) -> tuple[str, str]:
    key = _key(param)
    return _SECTIONS.get(key, ("sync", key))
