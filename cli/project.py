"""Commands for projects: init, dev, up, down, systemd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from immortal.cli.options import debugpy_option, timeout_option
from immortal.coordinator.config.schema import KEEP_ALL_VARIABLE
from immortal.coordinator.instances.registry import Registry, RegistryError
from immortal.coordinator.operator import control
from immortal.coordinator.project.project import TEMPLATES, make_project
from immortal.coordinator.project.run_lock import RunLockHolder, hold, holder
from immortal.protocol import shared_registry
from immortal.protocol.command_line import FailedError, echo, echo_lines
from immortal.protocol.files import is_living, make_folder, opener

if TYPE_CHECKING:
    from collections.abc import Iterable

    from immortal.coordinator.project.code_change import VersionGap
    from immortal.coordinator.project.project import Project, ServiceSpec


project_option = click.option(
    "--project",
    "path",
    type=click.Path(path_type=Path),
    help="immortal.toml, its folder, or a Python file.  [default: immortal.toml in this folder or a parent]",
)


def project_of(ctx: click.Context, path: Path | None) -> tuple[Project, Registry]:
    """Find the project of ``path`` or this folder, and its registry: that of --home if given. Raises ProjectError."""
    from immortal.coordinator.project.project import find_project

    main = ctx.find_root()
    if shared_registry.is_url(main.params["home"]):
        raise RegistryError(
            "a project has a registry of its own, in a folder: unset --home and IMMORTAL_HOME, or give a folder;"
            " with a registry of many machines, start each service with 'immortal run'"
        )
    given = main.get_parameter_source("home") not in (None, ParameterSource.DEFAULT)
    project = find_project(path, Path(main.params["home"]).absolute() if given else None)
    shared_registry.chosen_home = project.home
    return project, Registry(project.home)


def project_with(registry: Registry, name: str) -> Project | None:
    """Return the project whose immortal.toml defines the instance ``name`` of ``registry``; None if there is none.

    Raises ConfigError for a file with mistakes.
    """
    from immortal.coordinator.project.project import FILE_NAME, ProjectError

    beside = registry.home.parent / FILE_NAME
    try:
        project, own = project_of(click.get_current_context(), beside if beside.is_file() else None)
    except (ProjectError, RegistryError):  # there is none; a registry of many machines
        return None
    is_its = own.home.resolve() == registry.home.resolve() and name in project.names()
    return project if is_its else None


# init: a new project that runs.


@click.command()
@click.argument("name", required=False)
@click.option(
    "--template",
    type=click.Choice(TEMPLATES),
    default=TEMPLATES[0],
    show_default=True,
    help="shop: two services that call each other; agent: steps with a model; worker: a queue of jobs.",
)
def init(name: str | None, template: str) -> None:
    """Create a project that runs, with a test, in the folder NAME or this one.

    Existing files are never overwritten.
    """
    folder = Path(name).absolute() if name else Path.cwd()
    files = make_project(folder, folder.name, template)
    for file in files:
        echo(os.path.relpath(file))
    change = f"cd {os.path.relpath(folder)} && " if name else ""
    echo(f"run it with: {change}immortal dev")


# dev: a project at a terminal.


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--no-watch", is_flag=True, help="Do not reload code when a file is saved.")
@debugpy_option("Port for debugpy clients: PORT for the first service, PORT + 1 for the second, and so on.")
@click.pass_context
def dev(ctx: click.Context, path: Path | None, no_watch: bool, debugpy: int | None) -> None:
    """Run all services of a project here, and reload code when it is saved.

    PATH is an immortal.toml, its folder, or one Python file: then all services in the file run, each as an instance
    named after its class in small letters. The default is the immortal.toml in this folder or a parent.

    New services are registered in .immortal beside the project, and their logs are kept whole. When a file is saved,
    the services that use it restart. Before that, the new code replays the records since the last checkpoint: if it
    makes other calls than the log has, you are asked; without a terminal, the old code stays. Ctrl-C stops all
    services, with checkpoints.
    """
    from immortal.coordinator.project.development import Development

    project, registry = project_of(ctx, path)
    services = project.services()
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    development = Development(project, registry, interactive=interactive, watches=not no_watch, debugpy=debugpy)

    async def run() -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, development.signalled)
        try:
            return await development.run(services)
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a later signal must not change the exit status

    os.environ[KEEP_ALL_VARIABLE] = "1"  # for its services: earlier states can be inspected
    with hold(project.home, "immortal dev"):
        sys.exit(asyncio.run(run()))


# up, down: a project in the background.


TIMEOUT_S = 60.0
OWN_LOG_NAME = ".project.log"
_POLL_S = 0.05
_PATIENCE_S = 1.0  # for a process that has just started to publish its identity
_SETTLED = ("ready", "failed", "stopped")
RUNS_ALREADY = "runs already"


@click.command()
@click.argument("path", required=False, type=click.Path(path_type=Path))
@timeout_option(TIMEOUT_S)
@click.option("--upgrade", is_flag=True, help="Upgrade services whose class and log differ in version.")
@click.option("--keep", is_flag=True, hidden=True, help="Be the process in the background.")
@click.pass_context
def up(ctx: click.Context, path: Path | None, timeout_s: float, upgrade: bool, keep: bool) -> None:
    """Start a project's services in the background, and wait until they are ready.

    See 'immortal dev' for PATH. Running services are left alone; stopped or failed ones are started, and services
    that have changed in immortal.toml are restarted. See also 'immortal ps', 'immortal logs' and 'immortal down'.

    If a service's class and log differ in version, that is printed first. If the class can upgrade that version
    (@upgrades), the old version runs until --upgrade or 'immortal upgrade'; if not, the service is not started.

    Exit status: 0 if all services are ready, 1 if one has failed or is not ready in time.
    """
    from immortal.coordinator.project.code_change import version_gap

    project, registry = project_of(ctx, path)
    if keep:
        _run_daemon(project, registry)
        return
    found = background(project)
    was = {} if found is None else found.states
    services = project.services()  # reports errors of the project here
    names = [one.name for one in services]
    pids = _supervisors(registry, names)
    gaps = _version_gaps(registry, services, upgrade=upgrade)
    looks = _start_daemon(project, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while True:
        holder = _holder_of(project)
        states = dict(holder.states) if holder.looks > looks else {}
        settled = {name: text for name, text in states.items() if text.startswith(_SETTLED)}
        if holder.looks > looks and len(settled) == len(states):
            break
        if time.monotonic() > deadline_s:
            waiting = ", ".join(name for name in names if name not in settled)
            raise FailedError(
                f"not ready within {timeout_s:g} s: {waiting}; they are still starting (see 'immortal logs')"
            )
        time.sleep(_POLL_S)
    shown = {name: states.get(name) or _elsewhere(registry, name) for name in names}
    for name, pid in _supervisors(registry, names).items():
        state = was.get(name, "")
        why = "its settings or version have changed" if state.startswith("ready") else f"it was {state}"
        again = f", started again: {why}" if state and pid != pids.get(name) else ""
        echo(f"{name} {shown[name]}{again if pid else ''}")
    failed = [name for name, text in shown.items() if not text.startswith(("ready", RUNS_ALREADY))]
    if failed:
        why = "" if failed[0] in gaps else f" (see 'immortal logs {failed[0]}')"
        raise FailedError(f"{', '.join(failed)}: not running{why}")
    expected = [one for one in services if one.name in gaps and not gaps[one.name].stays]
    if left := [gap for one in expected if (gap := version_gap(registry, one)) is not None]:
        raise FailedError("\n".join(gap.text + ("" if gap.stays else ": at its next start") for gap in left))


def _supervisors(registry: Registry, names: Iterable[str]) -> dict[str, int | None]:
    """Return, for each instance, the process ID of its `immortal run`; None if it does not run."""
    found = {name: control.supervisor(registry.home / name) for name in names}
    return {name: None if one is None else one.pid for name, one in found.items()}


def _version_gaps(registry: Registry, services: Iterable[ServiceSpec], *, upgrade: bool) -> dict[str, VersionGap]:
    """Find services whose class and log differ in version, request upgrades if asked to, and print what happens."""
    from immortal.coordinator.project.code_change import request_upgrade, version_gap

    gaps = {}
    for service in services:
        gap = version_gap(registry, service)
        if gap is not None and gap.stays and upgrade:
            request_upgrade(registry, service)
            gap = version_gap(registry, service)
        if gap is not None:
            echo(gap.text + ("; 'immortal up --upgrade' upgrades it" if gap.stays else ""))
            gaps[service.name] = gap
    return gaps


def _run_daemon(project: Project, registry: Registry) -> None:
    from immortal.coordinator.project.background import COMMAND, RELOAD_SIGNAL, ProjectDaemon

    signal.signal(RELOAD_SIGNAL, signal.SIG_IGN)  # until there is a handler: the project is read after that anyway
    with hold(project.home, COMMAND):
        asyncio.run(ProjectDaemon(project, registry).run())


def background(project: Project) -> RunLockHolder | None:
    """Return the process in the background, if there is one. Raises FailedError if something else runs the project."""
    from immortal.coordinator.project.background import COMMAND

    found = holder(project.home)
    if found is not None and found.what != COMMAND:
        raise FailedError(f"the project runs already, by '{found.what}', process {found.pid}: Ctrl-C there stops it")
    return found


def _start_daemon(project: Project, timeout_s: float) -> int:
    """Start the background process, or make it read the project again; return how often it had read it before."""
    from immortal.coordinator.project.background import RELOAD_SIGNAL
    from immortal.coordinator.service.children import PYTHON

    if (found := background(project)) is not None:
        os.kill(found.pid, RELOAD_SIGNAL)
        return found.looks
    make_folder(project.home)
    argv = [*PYTHON, "-m", "immortal", "--home", str(project.home), "up", str(project.file), "--keep"]
    with open(project.home / OWN_LOG_NAME, "w", opener=opener) as log:
        process = subprocess.Popen(
            argv, cwd=project.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    deadline_s = time.monotonic() + timeout_s
    while holder(project.home) is None:
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = (project.home / OWN_LOG_NAME).read_text("utf-8", "replace").strip().removeprefix("error: ")
            raise FailedError(said or "the background process did not start")
        time.sleep(_POLL_S)
    return 0


def _holder_of(project: Project) -> RunLockHolder:
    """Return the process that runs the project, after a short wait if needed. Raises FailedError if it is gone."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := holder(project.home)) is None:
        if time.monotonic() > deadline_s:
            raise FailedError(f"the background process has ended: see {project.home / OWN_LOG_NAME}")
        time.sleep(_POLL_S)
    return found


def _elsewhere(registry: Registry, name: str) -> str:
    """Say who runs an instance that the project did not start, or that it does not run."""
    with contextlib.suppress(RegistryError):
        found = control.supervisor(registry.load(name).folder) or control.running(registry.load(name).folder)
        if found is not None:
            return f"{RUNS_ALREADY}, as process {found.pid}, which is left alone"
    return "is not started: see .project.log in the registry's folder"


@click.command()
@project_option
@timeout_option(TIMEOUT_S)
@click.pass_context
def down(ctx: click.Context, path: Path | None, timeout_s: float) -> None:
    """Stop a project's services cleanly, each with a checkpoint, and wait.

    The command stops services that run under 'immortal up', 'immortal dev' or 'immortal run'.

    Exit status: 0 if all services are stopped, also if none ran; 1 if not.
    """
    from immortal.cli.lifecycle import checkpoint_at_stop, stop

    project, registry = project_of(ctx, path)
    names = sorted({*project.names(), *registry.names()} & {*registry.names()})
    folders = {name: registry.load(name).folder for name in names}
    ran = {name for name in names if control.supervisor(folders[name]) or control.running(folders[name])}
    found = holder(project.home)
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


def _end(found: RunLockHolder, timeout_s: float) -> None:
    """Stop the process ``found``, and wait until it has ended. Raises FailedError if it does not in time."""
    try:
        os.kill(found.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise FailedError(f"process {found.pid} belongs to another user: run the command as that user") from None
    deadline_s = time.monotonic() + timeout_s
    while is_living(found):
        if time.monotonic() > deadline_s:
            raise FailedError(
                f"process {found.pid} has not ended within {timeout_s:g} s, but still tries ('immortal ps')"
            )
        time.sleep(_POLL_S)


# systemd: a project's unit files.


@click.command()
@project_option
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Folder to write the unit files to.")
@click.option("--user", "for_user", is_flag=True, help="Make units for your user's systemd, not the system's.")
@click.pass_context
def systemd(ctx: click.Context, path: Path | None, output: Path | None, for_user: bool) -> None:
    """Print systemd units for a project: a service per instance, and a target.

    Instances that are not registered yet are registered. Existing files are overwritten.
    """
    from immortal.coordinator.project.code_change import version_gap
    from immortal.coordinator.project.fleet import register, units

    project, registry = project_of(ctx, path)
    services = project.services()
    for service in services:
        if said := register(registry, service):
            echo(f"{service.name}: {said}", err=True)
        gap = version_gap(registry, service)
        if gap is not None:
            echo(gap.text, err=True)
        if gap is None or gap.can_upgrade:
            registry.remember_app(service.name, service.app)
    texts = units(project, services, for_user=for_user)
    for name, text in texts.items():
        if output is None:
            echo(f"# {name}")
            echo_lines(text.splitlines())
            echo("")
        else:
            output.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text, "utf-8")
            echo(str(output / name))
    manager = "systemctl --user" if for_user else "systemctl"
    everything = " ".join(texts)
    echo(f"{manager} daemon-reload && {manager} enable --now {everything}", err=True)
