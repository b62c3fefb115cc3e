"""up, down: a project in the background."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from immortal.coordinator.cli.project_options import project_of, project_option
from immortal.protocol.command_line import FailedError, echo

if TYPE_CHECKING:
    from immortal.coordinator.instances.registry import Registry
    from immortal.coordinator.project.keeping import Keeper
    from immortal.coordinator.project.project import Project

TIMEOUT_S = 60.0
OWN_LOG_NAME = ".project.log"
_POLL_S = 0.05
_PATIENCE_S = 1.0  # for a process that has just begun to say who it is
_SETTLED = ("ready", "failed", "stopped")


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--timeout-s", type=click.FloatRange(min=0, min_open=True), default=TIMEOUT_S, show_default=True)
@click.option("--keep", is_flag=True, hidden=True, help="Be the process in the background.")
@click.pass_context
def up(ctx: click.Context, path: Path | None, timeout_s: float, keep: bool) -> None:
    """Run all services of a project in the background, and wait until they are ready.

    PATH is as for 'immortal dev'. What runs already goes on; what was stopped or has failed is started again, and what
    immortal.toml says differently is started with that. 'immortal ps' shows them, 'immortal logs' what they say,
    'immortal down' stops them. The exit status is 1 where one is not ready in time, or has failed.
    """
    project, registry = project_of(ctx, path)
    if keep:
        _keep(project, registry)
        return
    names = [one.name for one in project.services()]  # what is wrong with it is said here
    looks = _begin(project, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while True:
        keeper = _keeper_of(project)
        states = dict(keeper.states) if keeper.looks > looks else {}
        settled = {name: text for name, text in states.items() if text.startswith(_SETTLED)}
        if keeper.looks > looks and len(settled) == len(states):
            break
        if time.monotonic() > deadline_s:
            waiting = ", ".join(name for name in names if name not in settled)
            raise FailedError(
                f"not ready within {timeout_s:g} s: {waiting}; they go on starting ('immortal logs' says more)"
            )
        time.sleep(_POLL_S)
    for name in names:
        echo(f"{name} {states.get(name) or _elsewhere(registry, name)}")
    failed = [name for name in names if states.get(name, "ready") != "ready"]
    if failed:
        raise FailedError(f"{', '.join(failed)}: not running ('immortal logs {failed[0]}' says why)")


def _keep(project: Project, registry: Registry) -> None:
    from immortal.coordinator.project.background import COMMAND, LOOK_SIGNAL, Background
    from immortal.coordinator.project.keeping import kept

    signal.signal(LOOK_SIGNAL, signal.SIG_IGN)  # until it is understood: the first look is still to come
    with kept(project.home, COMMAND):
        asyncio.run(Background(project, registry).run())


def _begin(project: Project, timeout_s: float) -> int:
    """Start the process in the background, or let it look again; how often it had looked before."""
    from immortal.coordinator.project.background import COMMAND, LOOK_SIGNAL
    from immortal.coordinator.project.keeping import keeper
    from immortal.coordinator.service.commands import PYTHON
    from immortal.protocol.private_files import make_folder, opener

    found = keeper(project.home)
    if found is not None:
        if found.what != COMMAND:
            raise FailedError(f"the project runs by '{found.what}', process {found.pid}: Ctrl-C there stops it")
        os.kill(found.pid, LOOK_SIGNAL)
        return found.looks
    make_folder(project.home)
    argv = [*PYTHON, "-m", "immortal.coordinator", "--home", str(project.home), "up", str(project.file), "--keep"]
    with open(project.home / OWN_LOG_NAME, "w", opener=opener) as log:
        process = subprocess.Popen(
            argv, cwd=project.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline_s = time.monotonic() + timeout_s
    while keeper(project.home) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = (project.home / OWN_LOG_NAME).read_text("utf-8", "replace").strip().removeprefix("error: ")
            raise FailedError(said or "the process in the background did not start")
        time.sleep(_POLL_S)
    return 0


def _keeper_of(project: Project) -> Keeper:
    """Raises FailedError where it is gone."""
    from immortal.coordinator.project.keeping import keeper

    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := keeper(project.home)) is None:
        if time.monotonic() > deadline_s:
            raise FailedError(f"the process in the background has ended; {project.home / OWN_LOG_NAME} says why")
        time.sleep(_POLL_S)
    return found


def _elsewhere(registry: Registry, name: str) -> str:
    """Of one that is not ours."""
    from immortal.coordinator.instances.registry import RegistryError
    from immortal.coordinator.operator import control

    with contextlib.suppress(RegistryError):
        found = control.supervisor(registry.load(name).folder) or control.running(registry.load(name).folder)
        if found is not None:
            return f"runs already, as process {found.pid}, which is left as it is"
    return "is not started; .project.log in the registry's folder says why"


@click.command()
@project_option
@click.option("--timeout-s", type=click.FloatRange(min=0, min_open=True), default=TIMEOUT_S, show_default=True)
@click.pass_context
def down(ctx: click.Context, path: Path | None, timeout_s: float) -> None:
    """Stop all services of a project cleanly, each with a checkpoint, and wait until they have ended.

    Whoever runs them is asked: the process of 'immortal up', an 'immortal dev', an 'immortal run' of one of them. Where
    nothing runs, that is well: status 0.
    """
    from immortal.coordinator.cli.lifecycle import checkpoint_at_stop, stop
    from immortal.coordinator.operator import control
    from immortal.coordinator.project.keeping import keeper

    project, registry = project_of(ctx, path)
    names = sorted({*project.names(), *registry.names()} & {*registry.names()})
    folders = {name: registry.load(name).folder for name in names}
    ran = {name for name in names if control.supervisor(folders[name]) or control.running(folders[name])}
    found = keeper(project.home)
    if found is not None:
        _end(found, timeout_s)
    for name in names:
        if control.supervisor(folders[name]) or control.running(folders[name]):
            ctx.obj = registry
            ctx.invoke(stop, name=name, timeout_s=timeout_s)
        elif name in ran:
            echo(f"{name} is stopped{checkpoint_at_stop(registry.load(name))}")
    if not ran:
        echo("nothing runs")


def _end(found: Keeper, timeout_s: float) -> None:
    """Raises FailedError where it does not end in time."""
    from immortal.protocol.process_file import is_living

    try:
        os.kill(found.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise FailedError(f"process {found.pid} belongs to another user, who can do this") from None
    deadline_s = time.monotonic() + timeout_s
    while is_living(found):
        if time.monotonic() > deadline_s:
            raise FailedError(
                f"process {found.pid} has not ended within {timeout_s:g} s, and goes on with it ('immortal ps')"
            )
        time.sleep(_POLL_S)
