"""Development mode of `immortal dev`: runs a project's services at a terminal, and reloads code when it is saved."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator

import msgspec

from immortal.coordinator.config import ConfigError
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.operator import control
from immortal.coordinator.project.code_change import (
    LOOK_INTERVAL_S,
    ChangeError,
    ChangeReport,
    CodeChange,
    Outcome,
    SourceFiles,
    python_files,
    version_gap,
)
from immortal.coordinator.project.fleet import ServiceProcess, State, register, stop_all
from immortal.coordinator.project.output import Console
from immortal.coordinator.project.project import ModuleImportError, Project, ServiceSpec
from immortal.coordinator.service.process import StopRequests
from immortal.protocol.errors import ImmortalError

OWN = "immortal"  # name in front of this module's lines


class Development:
    """Runner of a project's services in development. ``interactive``: questions can be asked at the terminal.

    ``debugpy``: the port at which clients of debugpy attach to the first service; each next one has the next port.
    """

    def __init__(
        self,
        project: Project,
        registry: Registry,
        *,
        interactive: bool,
        watches: bool = True,
        debugpy: int | None = None,
    ) -> None:
        self._project = project
        self._registry = registry
        self._interactive = interactive
        self._watches = watches
        self._debugpy = debugpy
        self._members: dict[str, ServiceProcess] = {}
        self._console = Console([], sys.stdout)
        self._files = SourceFiles(())
        self._is_broken = False  # the project can't be read: a change of any file may repair it
        self._reported_failed: set[str] = set()  # names of services that ended by themselves, which was reported
        self._changed: set[str] = set()  # names of services that must take over new code
        self._all_changed = False
        self._other_versions: set[str] = set()  # names of services to be asked about when they are ready
        self._unread: set[str] = set()  # names of services that were changed while the project could not be read
        self._task: asyncio.Task[None] | None = None
        self._is_committed = False  # the change under way can't be cancelled
        self._stopping = asyncio.Event()
        self._stop_requests = StopRequests()

    async def run(self, services: list[ServiceSpec]) -> int:
        """Run until stopped; return the exit status, 1 if a service did not stop cleanly, or none could start."""
        self._console = Console([OWN, *(one.name for one in services)], sys.stdout, self._states)
        if self._interactive:
            self._console.listen()
        try:
            self._start_new(services)
            self._warn_of_missing(services)
            await self._poll_until_stopped()
            await self._stop()
        finally:
            if self._interactive:
                self._console.close()
        return 1 if any(member.exit_status for member in self._members.values()) else 0

    def signalled(self) -> None:
        """Handle Ctrl-C or SIGTERM: the first requests a clean stop, the second an immediate one."""
        before = self._stop_requests.count
        self._stop_requests.signalled()
        if self._stopping.is_set() and self._stop_requests.count > before:
            for member in self._members.values():
                member.stop()
        self._stopping.set()

    def _print(self, text: str, level: Level | None = None, name: str = OWN) -> None:
        for line in text.split("\n"):
            self._console.write_line(name, line, level)

    def _states(self) -> str:
        states = [f"{member.name} {member.state.value}" for member in self._members.values()]
        return f" {' · '.join(states)} · Ctrl-C stops"

    def _start_new(self, services: Iterable[ServiceSpec]) -> None:
        """Register and start the services that do not run yet."""
        new = [one for one in services if one.name not in self._members]
        for service in [one for one in new if self._has_version(one)]:
            if self._register(service) and not self._is_started_elsewhere(service.name):
                self._start_service(service)
        self._watch()

    def _start_service(self, service: ServiceSpec) -> None:
        member = ServiceProcess(
            self._project,
            service,
            self._console,
            interactive=self._interactive,
            simulates_effects=True,
            debugpy=self._debugpy,
        )
        if self._debugpy is not None:
            self._debugpy += 1
        self._members[service.name] = member
        member.start()

    def _register(self, service: ServiceSpec) -> bool:
        try:
            if described := register(self._registry, service):
                self._print(f"{service.name}: {described}")
        except ImmortalError as error:
            self._print(f"{service.name}: {error}", "error")
            return False
        return True

    def _has_version(self, service: ServiceSpec) -> bool:
        """Return True if the class has the log's version. If its own version is another, ask about an upgrade later."""
        gap = version_gap(self._registry, service)
        if gap is None:
            return True
        self._print(gap.text, "warning" if gap.can_upgrade else "error")
        if gap.stays:
            self._other_versions.add(service.name)
        return gap.can_upgrade

    def _is_started_elsewhere(self, name: str) -> bool:
        try:
            control.refuse_running(self._registry.load(name).folder)
        except control.RunningError as error:
            self._print(f"{error}; it is left alone", "warning")
            return True
        return False

    def _warn_of_missing(self, services: list[ServiceSpec]) -> None:
        there = {*self._registry.names(), *(one.name for one in services)}
        for service in services:
            for peer in service.calls:
                settings = self._registry.load(service.name)
                if peer not in there and peer not in settings.peers and settings.peer_template is None:
                    self._print(
                        f"{service.name} calls {peer!r}, which is not an instance here: these calls wait", "warning"
                    )

    async def _stop(self) -> None:
        if self._task is not None and not self._is_committed:
            self._task.cancel()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._console.interrupt(OWN, "stopping; Ctrl-C again ends all processes at once, without loss")
        await stop_all(self._members.values())
        for member in self._members.values():
            if member.exit_status:
                self._print(f"{member.name} ended with status {member.exit_status}", "error")

    def _watch(self) -> None:
        files = {file for member in self._members.values() for file in member.service.files}
        if self._is_broken or not files:
            files |= set(python_files(self._project.folder))
        self._files.watch({*files, str(self._project.file)} if self._watches else ())

    async def _poll_until_stopped(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_INTERVAL_S)
            if changed := self._files.poll():
                self._note_changed_files(changed)
            ready = {name for name, member in self._members.items() if member.state is State.READY}
            self._changed |= ready & self._other_versions
            self._other_versions -= ready
            is_free = self._task is None or self._task.done()
            if is_free and self._task is not None and not self._task.cancelled():
                self._task.result()  # raises our own errors
            failed = [member for member in self._members.values() if member.state is State.FAILED]
            self._reported_failed &= {member.name for member in failed}
            untold = [member for member in failed if member.name not in self._reported_failed]
            if is_free and untold and not self._stopping.is_set():
                self._reported_failed |= {member.name for member in untold}
                self._task = asyncio.create_task(self._handle_failed(untold))
            elif (self._changed or self._all_changed) and not self._stopping.is_set():
                if not is_free and not self._is_committed and self._task is not None:
                    self._task.cancel()  # its questions and tries are about code that was replaced
                elif is_free:
                    self._task = asyncio.create_task(self._apply_changes())

    def _note_changed_files(self, files: set[str]) -> None:
        if self._is_broken or str(self._project.file) in files:
            self._all_changed = True
        self._changed |= {
            member.name for member in self._members.values() if not files.isdisjoint(member.service.files)
        }

    async def _apply_changes(self) -> None:
        """Apply the code changed until now. If cancelled, the services not done yet count as changed again."""
        names, everything = self._changed | self._unread, self._all_changed
        self._changed, self._unread, self._all_changed = set(), set(), False
        try:
            try:
                services = await asyncio.to_thread(self._project.services)
            except (ConfigError, ModuleImportError) as error:
                self._print(
                    f"the saved code can't be run, the services continue with their old code:\n{error}", "error"
                )
                self._is_broken, self._unread = True, names
                return
            everything, self._is_broken = everything or self._is_broken, False
            planned = {one.name: one for one in services}
            for name in [name for name in self._members if name not in planned]:
                self._print(f"{name} is no longer a service of the project: it is stopped, its log stays")
                await stop_all([self._members.pop(name)])
            changing = [
                (member, CodeChange(self._project, self._registry, planned[name]))
                for name, member in self._members.items()
                if name in names or (everything and planned[name] != member.service)
            ]
            # Check all before the first takes over: the calls that it received prove those of the others.
            found = await asyncio.gather(*(change.examine() for _, change in changing))
            for (member, change), described in zip(changing, found, strict=True):
                await self._change(member, change, described)
                names.discard(member.name)
            self._start_new(services)
        except asyncio.CancelledError:
            self._changed |= names
            self._all_changed = self._all_changed or everything
            raise
        finally:
            self._watch()

    async def _change(self, member: ServiceProcess, change: CodeChange, found: ChangeReport) -> None:
        name, service = member.name, change.service
        if member.state in (State.STOPPED, State.FAILED):
            self._restart_with(member, service, "starts with the current code")
            return
        is_other_version = found.version not in (None, service.version)
        if found.outcome in (Outcome.NOTHING_LOGGED, Outcome.SAME) and not is_other_version:
            why = found.outcome.value if found.outcome is Outcome.NOTHING_LOGGED else "its replay is the same"
            with self._committed():
                await stop_all([member])
                self._restart_with(member, service, f"restarts with the current code: {why}")
            return
        self._describe_change(name, found, service)
        while True:
            choice = await self._choose(name, found, service)
            if choice == "k" and found.outcome is Outcome.SAME:
                self._print(f"{name} stays at version {found.version}, also after a crash")
                member.service = service
                return
            if choice == "k":
                self._print(
                    f"{name} keeps the code that it runs. Its file has other code: after a crash, recovery stops at the"
                    " record above, and nothing is lost. Save the old code or other code: it is checked again",
                    "warning",
                )
                member.service = msgspec.structs.replace(member.service, files=service.files)  # to notice their changes
                return
            try:
                await (self._upgrade_here(member, change, found) if choice == "u" else self._reset(member, change))
            except ImmortalError as error:
                self._print(f"{name}: {error}", "error")
                if not self._interactive or not member.runs:
                    return
                continue
            return

    def _describe_change(self, name: str, found: ChangeReport, service: ServiceSpec) -> None:
        if found.outcome is not Outcome.SAME:
            described = "makes other calls" if found.outcome is Outcome.DIFFERENT else "can't replay its log"
            self._print(f"the new code of {name} {described}:", "warning")
            for line in found.lines:
                self._print(line, "warning", name)
        if found.version not in (None, service.version):
            self._print(f"the new code of {name} has version {service.version}, its log has version {found.version}")

    async def _choose(self, name: str, found: ChangeReport, service: ServiceSpec) -> str:
        if (gap := version_gap(self._registry, service)) is not None and gap.is_requested:
            return "u"
        if not self._interactive:
            to = f"'immortal upgrade {name} {service.app} --to {service.version}'"
            way = to if found.version not in (None, service.version) else "'immortal dev' at a terminal asks what to do"
            self._print(f"{name} keeps its code: {way}", "warning")
            return "k"
        return await self._console.ask(name, "[k]eep the old code, [u]pgrade here, [r]eset the log? ", "kur")

    async def _handle_failed(self, members: list[ServiceProcess]) -> None:
        """Report services that ended by themselves, and offer to reset their logs. Usually they need other code, or
        this code can't replay the log."""
        for member in members:
            ended = f"{member.name} has ended with status {member.exit_status}; its own lines say why"
            self._print(f"{ended}. It starts again when its code is saved", "error")
            settings = self._registry.load(member.name)
            if not (self._interactive and log_exists(settings.log)):
                continue
            if await self._console.ask(member.name, "[w]ait for that, [r]eset the log? ", "wr") == "r":
                change = CodeChange(self._project, self._registry, member.service)
                try:
                    await self._reset(member, change)
                except ImmortalError as error:
                    self._print(f"{member.name}: {error}", "error")

    async def _upgrade_here(self, member: ServiceProcess, change: CodeChange, found: ChangeReport) -> None:
        await change.try_at_current_state()
        new = change.service
        with self._committed():
            await stop_all([member])
            if behind := change.records_behind():
                raise ChangeError(
                    f"it stopped without a checkpoint of its last {behind} records, which only the old code can replay:"
                    " save the old code again to start it; nothing is lost"
                )
            change.mark_upgrade(found)
            how = f"is upgraded to version {new.version}"
            if found.version in (None, new.version):
                how = (
                    "continues from here with the new code, under the same version: time travel and 'immortal verify'"
                    " of earlier records need the old code"
                )
            self._restart_with(member, new, how)

    async def _reset(self, member: ServiceProcess, change: CodeChange) -> None:
        with self._committed():
            await stop_all([member])
            await change.reset(lambda line: self._print(line, None, member.name))
            self._restart_with(member, change.service, "starts from scratch: its log is deleted")

    @contextlib.contextmanager
    def _committed(self) -> Iterator[None]:
        """Protect the change in the block: files saved meanwhile do not cancel it, and a stop waits for it."""
        self._is_committed = True
        try:
            yield
        finally:
            self._is_committed = False

    def _restart_with(self, member: ServiceProcess, service: ServiceSpec, how: str) -> None:
        self._print(f"{member.name} {how}")
        if self._register(service):
            member.service = service
            member.start()
