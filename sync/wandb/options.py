"""The options of ``llmtrack-sync`` that only W&B has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import click

from llmtrack.sync.sink import Sink, sink_class
from llmtrack.writer.errors import UsageError

from .pace import CLOUD_ROWS_PER_MINUTE

_CLOUD: Final = "cloud"
_MOST: Final = 10_000_000


def _rows(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Return a number of rows, or the one that W&B's cloud asks for."""
    if value is None or value == _CLOUD:
        return None if value is None else CLOUD_ROWS_PER_MINUTE
    if not (value.isdecimal() and 0 < int(value) <= _MOST):
        raise click.BadParameter(f"{value!r} is neither a number of rows nor {_CLOUD!r}", ctx=context, param=option)
    return int(value)


@dataclass(frozen=True)
class WandbOptions:
    """What was said for W&B alone.

    Attributes:
        offline: Write W&B's offline files into this folder, and contact nobody.
        id_prefix: Put before every run id.
        max_rows_per_minute: For all runs together.
        every: Keep of each so many steps the rows with a least, a greatest or a last value.
    """

    offline: Path | None = None
    id_prefix: str | None = None
    max_rows_per_minute: int | None = None
    every: int | None = None

    def sink(self, tracker: str, uri: str | None, timeout_s: float) -> Sink:
        """Return the sink that was asked for.

        Raises:
            UsageError: Another tracker has no such option.
        """
        given = {
            "--wandb-offline": self.offline,
            "--wandb-id-prefix": self.id_prefix,
            "--max-rows-per-minute": self.max_rows_per_minute,
            "--every": self.every,
        }
        said = [option for option, value in given.items() if value is not None]
        if tracker != "wandb":
            if said:
                raise UsageError(
                    f"{said[0]} is for --to wandb alone", hint=f"leave it out, or --to wandb {said[0]} ..."
                )
            return sink_class(tracker)(uri, timeout_s=timeout_s)
        if self.offline is not None:
            from .offline import WandbOffline

            if self.max_rows_per_minute is not None:
                raise UsageError(
                    "--max-rows-per-minute has no meaning with --wandb-offline: nothing is sent",
                    hint="`wandb sync` later sends as fast as the server takes it",
                )
            return WandbOffline(
                str(self.offline), timeout_s=timeout_s, id_prefix=self.id_prefix or "", every=self.every or 1
            )
        from .sink import WandbSink

        return WandbSink(
            uri,
            timeout_s=timeout_s,
            id_prefix=self.id_prefix or "",
            max_rows_per_minute=self.max_rows_per_minute,
            every=self.every or 1,
        )

    def tail(self, tail: Literal["side", "hold"]) -> Literal["side", "hold"]:
        """Return what becomes of provisional points: what is in an offline file cannot be taken back later."""
        return "hold" if self.offline is not None else tail


def with_wandb_options(command: click.Command) -> click.Command:
    """Give a command these options; its function gets them as `wandb`."""
    callback = command.callback
    if callback is None:
        raise ValueError("the command has a function")
    command.params += [
        click.Option(
            ["--wandb-offline"],
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="W&B: write offline files into DIR for `wandb sync` elsewhere; contact nobody. Implies --tail hold.",
        ),
        click.Option(["--wandb-id-prefix"], metavar="TEXT", help="W&B: put TEXT before every run id."),
        click.Option(
            ["--max-rows-per-minute"],
            callback=_rows,
            metavar="N|cloud",
            help=f"W&B: send no more; 'cloud' is {CLOUD_ROWS_PER_MINUTE}, as its multi-tenant cloud asks for.",
        ),
        click.Option(
            ["--every"],
            type=click.IntRange(min=1),
            metavar="N",
            help="W&B: thin out. Of N steps keep the rows with the least, the greatest or the last value of a metric.",
        ),
    ]
    command.callback = _gathered(callback)
    return command


def _gathered(callback: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(callback)
    def call(
        *,
        wandb_offline: Path | None,
        wandb_id_prefix: str | None,
        max_rows_per_minute: int | None,
        every: int | None,
        **options: Any,
    ) -> Any:
        return callback(wandb=WandbOptions(wandb_offline, wandb_id_prefix, max_rows_per_minute, every), **options)

    return call
