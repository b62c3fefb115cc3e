"""dev: a project at a terminal."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from immortal.coordinator.cli.project_options import project_of

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--no-watch", is_flag=True, help="Files that are saved change nothing.")
@click.pass_context
def dev(ctx: click.Context, path: Path | None, no_watch: bool) -> None:
    """Run all services of a project here, with one log, and with their code as it is saved.

    PATH is an immortal.toml, its folder, or one file of Python: then all services in it run, each as the instance that
    is called as its class, in small letters. Without PATH it is the immortal.toml of this folder or of one above.

    What is not registered is registered, in .immortal beside the project. When a file is saved, the services that use
    it start again. Before that, the new code replays what was logged since the last checkpoint: where it makes other
    calls than were made, you are asked, and without a terminal the old code goes on. Ctrl-C stops all, with
    checkpoints.
    """
    from immortal.coordinator.project.development import Development
    from immortal.coordinator.project.keeping import kept

    project, registry = project_of(ctx, path)
    services = project.services()
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    development = Development(project, registry, interactive=interactive, watches=not no_watch)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, development.signalled)
        try:
            return await development.run(services)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # one more wish must not spoil the exit status

    with kept(project.home, "immortal dev"):
        sys.exit(asyncio.run(run()))
