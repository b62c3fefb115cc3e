"""what-if: replays the log of an instance with other code."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from immortal.cli.options import (
    app_or_hand,
    app_port_option,
    at_least_option,
    name_argument,
    pass_registry,
    progress_bar,
    settings_with_log,
    trust_pickle_option,
)
from immortal.coordinator.core.output.output_check import Divergence, OutputDivergenceError
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.presenters.what_if import Report
from immortal.protocol.command_line import FailedError, echo, echo_json, json_option
from immortal.replay import OWN_VERSION, AppCommand
from immortal.replay.app_process import OwnCode, own_code_at_end
from immortal.replay.comparison import Side
from immortal.replay.what_if import plan_what_if, run_what_if, try_upgrade


class _Version(click.ParamType):  # type: ignore[type-arg]
    """A version number; the option without a value stands for the version of the app."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return OWN_VERSION if value is OWN_VERSION else int(click.IntRange(min=1).convert(value, param, ctx))


class _WhatIf(click.Command):
    """With --fleet it is another command, with options of its own."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if "--fleet" not in args:
            return super().make_context(info_name, args, parent, **extra)
        from immortal.cli.what_if_fleet import fleet

        own = [arg for arg in args if arg != "--fleet"]
        context = fleet.make_context(f"{info_name} --fleet", list(own), parent, **extra)
        context.meta["arguments"] = own
        return context


@click.command("what-if", cls=_WhatIf)
@name_argument
@click.option(
    "--app",
    "new_app",
    required=True,
    metavar="MODULE:CLASS",
    callback=app_or_hand,
    help="The code to try; - waits for one.",
)
@click.option(
    "--code",
    type=click.Path(exists=True, path_type=Path),
    help="A folder or a wheel: the code to try is taken from there.",
)
@click.option(
    "--old-app", metavar="MODULE:CLASS", callback=app_or_hand, help="What to compare with.  [default: its own app]"
)
@app_port_option()
@app_port_option("old-app")
@click.option("--from", "checkpoint_id", type=click.IntRange(min=0), help="Begin at this checkpoint, not the oldest.")
@click.option("--to", "last_sequence_id", type=click.IntRange(min=0), help="The last record to be handled.")
@click.option(
    "--upgrade",
    "upgrade_to",
    is_flag=False,
    flag_value=OWN_VERSION,
    type=_Version(),
    metavar="[VERSION]",
    help="The new code upgrades the state first: to this version, or to its own.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=10, show_default=True, help="At most so many differences in full."
)
@at_least_option(1)
@click.option("--fleet", is_flag=True, help="Let changed calls travel through all services: what-if --fleet --help.")
@trust_pickle_option
@json_option
@pass_registry
def what_if(
    registry: Registry,
    name: str,
    new_app: str,
    code: Path | None,
    old_app: str | None,
    app_port: tuple[int, int | None] | None,
    old_app_port: tuple[int, int | None] | None,
    checkpoint_id: int | None,
    last_sequence_id: int | None,
    upgrade_to: int | None,
    limit: int,
    at_least: int,
    fleet: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compare what other code would have done with the log of NAME.

    The recorded inputs go through both, side by side; nothing is sent, and the log is only read. What failed is called
    again. The exit status is 0 if nothing would be different, 3 if something would (a call that fails, or does not any
    more, and a record that makes the new code end are), 1 if it could not be tried, or on fewer messages than
    --at-least.
    """
    settings = settings_with_log(registry, name)
    with (
        own_logs.open_reader(settings, trust_pickle=trust_pickle) as reader,
        tempfile.TemporaryDirectory(prefix="immortal-") as folder,
    ):
        route = plan_what_if(reader, checkpoint_id=checkpoint_id, last_sequence_id=last_sequence_id)
        old = OwnCode(old_app) if old_app else own_code_at_end(settings, reader.summary(), route)
        if old.note:
            echo(f"note: the old side runs {old.note}", err=True)
        apps = {
            Side.OLD: AppCommand.of(old.app, settings=settings, code=old.archive, ports=old_app_port),
            Side.NEW: AppCommand.of(new_app, settings=settings, code=code, ports=app_port),
        }
        blob_paths = {side: Path(folder, side.value) for side in Side}
        try:
            with progress_bar("replaying") as progress:
                outcome = run_what_if(
                    reader,
                    route,
                    apps,
                    upgrade_to=upgrade_to,
                    limit=limit,
                    blob_paths=blob_paths,
                    progress=progress,
                    announce=lambda side, address: echo(f"waiting for the {side.value} app at {address}", err=True),
                )
        except OutputDivergenceError as error:
            raise FailedError(_divergence_text(error.divergence, name, old.app)) from None
        if upgrade_to is not None and checkpoint_id is None and not outcome.upgrade_error:
            outcome.upgrade_now_error = try_upgrade(reader, route, apps[Side.NEW], upgrade_to)
        report = Report(name, apps, outcome, reader, limit, blob_paths, at_least=at_least)
        for warning in report.warnings:
            echo(warning, err=True)
        if as_json:
            echo_json(report.values())
        else:
            for line in report.lines():
                echo(line)
    sys.exit(report.exit_status)


def _divergence_text(divergence: Divergence, name: str, old_app: str) -> str:
    stream = f"the calls to {divergence.destination!r}" if divergence.destination else "the calls to itself"
    return (
        f"{old_app} does not make again what the log of {name!r} says was made: of {stream} those from number"
        f" {divergence.after_position + 1} to {divergence.position} are others, or missing. So there is nothing to"
        f" compare with: give the code that made this log with --old-app, or see 'immortal verify {name}'"
    )
