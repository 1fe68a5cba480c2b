"""The command ``llmtrack``: gathers the commands of all parts, and loads only the one that is called."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from typing import Any, Final, NoReturn

from llmtrack.writer.errors import NotInstalledError

try:
    import click
except ModuleNotFoundError:  # the base install is for trainers, and has no commands
    _EXTRA = "demo" if sys.argv[1:2] == ["demo"] else "query"
    raise SystemExit(f"error: {NotInstalledError('click', extra=_EXTRA)}") from None

# Where each command is and what it says of itself: a help page must not load DuckDB and Arrow.
_COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "ls": ("llmtrack.query.cli.tables", "ls", "List the runs of a root, the latest first."),
    "show": ("llmtrack.query.cli.tables", "show", "Show one run as a tree."),
    "sql": ("llmtrack.query.cli.tables", "sql", "Run one SQL statement over the views of a root."),
    "plot": ("llmtrack.query.cli.pictures", "plot", "Draw metrics of one run in the terminal, or as PNG or SVG."),
    "compare": ("llmtrack.query.cli.pictures", "compare", "Compare one metric of several runs at equal tokens."),
    "tail": ("llmtrack.query.cli.pictures", "tail", "Show the last rows of a run, and follow it."),
    "report": ("llmtrack.query.cli.pictures", "report", "Write runs as one HTML file that opens anywhere."),
    "alerts": ("llmtrack.query.cli.alerts", "alerts", "List alerts, and what they have in common."),
    "best": ("llmtrack.query.cli.tables", "best", "Rank checkpoints by an evaluation."),
    "verify": ("llmtrack.writer.cli", "verify_root", "Check every file of a root."),
    "adopt": ("llmtrack.writer.cli", "adopt_run", "Join a run to the place it really started from."),
    "seal": ("llmtrack.writer.cli", "seal", "Turn what killed writers left open into Parquet."),
    "plan": ("llmtrack.writer.cli", "plan", "Say what a run will log, before it is started."),
    "id": ("llmtrack.writer.cli", "new_id", "Print a new run id."),
    "ckpt-id": ("llmtrack.writer.cli", "ckpt_id", "Print the id of a checkpoint."),
    "eval": ("llmtrack.writer.cli", "evaluation", "Keep evaluations of checkpoints."),
    "demo": ("llmtrack.examples.demo", "demo", "Train a small GPT, kill it, resume it, sync it, look at it."),
}


class _Commands(click.Group):
    """Commands by name, each from a module that is imported when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [name for name, (module, _, _) in _COMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            close = difflib.get_close_matches(name, known, 1)
            ctx.fail(f"there is no command {name!r}" + (f"; did you mean {close[0]}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in self.list_commands(ctx)])


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"llmtrack {version('llmtrack-log')}")
        ctx.exit()


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "LLMTRACK",
        "max_content_width": 100,
    },
    epilog="\b\nExamples:\n  llmtrack ls --root /shared/runs\n  llmtrack show pretrain-7b --root /shared/runs\n\n"
    "\b\nExit status: 0 done; 1 wrong usage; 4 damaged data found; 130 interrupted.\n"
    "llmtrack-sync sends runs to a tracker.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Look at runs that llmtrack logged, and keep their log in order."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        args: Instead of those of the process.
    """
    from llmtrack.query.text.console import run

    run(cli, args, prog_name="llmtrack")


if __name__ == "__main__":
    main()
