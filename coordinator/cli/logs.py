"""logs: what the services of a project that runs in the background have said."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import click

from immortal.coordinator.cli.common import complete_instance, instance_name
from immortal.coordinator.cli.project_options import project_of, project_option
from immortal.coordinator.core.notices import Level
from immortal.protocol.command_line import FailedError

_POLL_S = 0.2


def _names(ctx: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str | None, ...]:
    return tuple(instance_name(ctx, parameter, one) for one in value)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=_names, shell_complete=complete_instance)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("-n", "--tail", "count", type=click.IntRange(min=0), help="The last lines of each only.")
@project_option
@click.pass_context
def logs(ctx: click.Context, names: tuple[str, ...], follow: bool, count: int | None, path: Path | None) -> None:
    """Show what the services have said under 'immortal up', all or those named, by time.

    Times are UTC. The last 40 MiB of each are kept, in HOME/NAME/output.log and the files before it.
    """
    from immortal.coordinator.project.console import Console
    from immortal.coordinator.project.log_files import Tail, in_order

    project, registry = project_of(ctx, path)
    known = [*dict.fromkeys([*project.names(), *registry.names()])]
    if unknown := [name for name in names if name not in known]:
        raise FailedError(f"there is no service {unknown[0]!r}; there are: {', '.join(known)}")
    tails = [Tail(project.home, name) for name in names or known]
    console = Console([tail.name for tail in tails], sys.stdout)

    def show(name: str, line: str) -> None:
        at, _, rest = line.partition(" ")
        level, _, text = rest.partition(" ")
        of_coordinator: Level | None = level if level in ("debug", "info", "warning", "error") else None  # type: ignore[assignment]
        console.line(name, text if of_coordinator else f"{at} {'':<7} {text}", of_coordinator, at)

    with contextlib.suppress(KeyboardInterrupt) if follow else contextlib.nullcontext():
        for name, line in in_order(tails, count):
            show(name, line)
        while follow:
            time.sleep(_POLL_S)
            for tail in tails:
                for line in tail.more():
                    show(tail.name, line)
