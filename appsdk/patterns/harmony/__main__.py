"""Command of the harmony pattern: runs workers, and shows the progress of batches."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from immortal.appsdk.patterns.harmony.ventilator import connect
from immortal.appsdk.patterns.harmony.worker import WorkerProcesses, worker
from immortal.protocol.command_line import Commands, echo

_FOLLOW_S = 1.0


def _function(text: str) -> tuple[str, Callable[[Any], Any]]:
    """Import the function of ``MODULE:FUNCTION`` or ``NAME=MODULE:FUNCTION``. Raises click.UsageError."""
    name, equals, place = text.rpartition("=")
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute) or (equals and not name):
        raise click.UsageError(f"{text!r}: MODULE:FUNCTION or NAME=MODULE:FUNCTION was expected")
    sys.path.insert(0, os.getcwd())
    try:
        return name or attribute, getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise click.UsageError(f"{text!r}: {error}") from None
    except AttributeError:
        raise click.UsageError(f"{text!r}: module {module!r} has no {attribute!r}") from None
    finally:
        sys.path.pop(0)


@click.group(cls=Commands)
def main() -> None:
    """Run workers of a cluster, and show the progress of its batches."""


@main.command()
@click.argument("cluster")
@click.argument("functions", nargs=-1, required=True, metavar="[NAME=]MODULE:FUNCTION...")
@click.option("--processes", type=click.IntRange(min=1), help="So many, each replaced when it dies.")
@click.option("--task-timeout", type=float, metavar="SECONDS", help="A task that takes longer ends its process.")
@click.option("--name", help="Of this worker, where there is one process.")
def work(
    cluster: str, functions: tuple[str, ...], processes: int | None, task_timeout: float | None, name: str | None
) -> None:
    """Do tasks of a cluster until Ctrl-C, by functions that batches call NAME."""
    if processes is not None:
        rest = [] if task_timeout is None else ["--task-timeout", str(task_timeout)]
        crew = WorkerProcesses(cluster, [*functions, *rest], processes)
        signal.signal(signal.SIGTERM, lambda number, frame: crew.end())
        with suppress(KeyboardInterrupt):
            sys.exit(crew.run())
        return
    try:
        with suppress(KeyboardInterrupt):
            worker(cluster, dict(map(_function, functions)), task_timeout_s=task_timeout, name=name)
    except TypeError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@click.argument("cluster")
@click.argument("batch", required=False)
@click.option("--follow", is_flag=True, help="Until it is complete.")
def progress(cluster: str, batch: str | None, follow: bool) -> None:
    """Show how far batches are, or one of them."""
    with connect(cluster) as client:
        while True:
            found = [client.progress(name) for name in ([batch] if batch else client.batches())]
            for one in found:
                echo(str(one))
            if not follow or all(one.is_complete for one in found):
                return
            time.sleep(_FOLLOW_S)


if __name__ == "__main__":
    main(prog_name="python -m immortal.patterns.harmony")
