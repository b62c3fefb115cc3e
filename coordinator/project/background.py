"""Daemon of `immortal up`: runs a project's services, and writes their output to files.

At SIGHUP it reads the project again: it starts services that are new, changed, stopped, failed or must be upgraded, and
stops those that the project no longer has. SIGTERM stops all with checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.project import run_lock
from immortal.coordinator.project.code_change import version_gap
from immortal.coordinator.project.fleet import ServiceProcess, register, stop_all
from immortal.coordinator.project.output import LogFiles
from immortal.coordinator.project.project import Project
from immortal.coordinator.service.process import StopRequests
from immortal.protocol.errors import ImmortalError

COMMAND = "immortal up"
RELOAD_SIGNAL = signal.SIGHUP


class ProjectDaemon:
    def __init__(self, project: Project, registry: Registry) -> None:
        self._project = project
        self._registry = registry
        self._members: dict[str, ServiceProcess] = {}
        self._files = LogFiles(project.home, self._publish_states)
        self._reload_count = 0
        self._reload_requested = asyncio.Event()
        self._stop_requests = StopRequests()

    async def run(self) -> None:
        """Run the services until a stop is requested."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(RELOAD_SIGNAL, self._reload_requested.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_stop)
        try:
            self._reload_requested.set()
            while not self._stop_requests.count:
                await self._reload_requested.wait()
                self._reload_requested.clear()
                if not self._stop_requests.count:
                    await self._apply_project()
            await stop_all(self._members.values())
        finally:
            self._files.close()

    def _request_stop(self) -> None:
        before = self._stop_requests.count
        self._stop_requests.signalled()
        if before and self._stop_requests.count > before:  # a second request: stop at once
            for member in self._members.values():
                member.stop()
        self._reload_requested.set()

    async def _apply_project(self) -> None:
        try:
            planned = {one.name: one for one in await asyncio.to_thread(self._project.services)}
        except ImmortalError as error:
            self._print(str(error))
            planned = {name: member.service for name, member in self._members.items()}
        gaps = {name: version_gap(self._registry, service) for name, service in planned.items()}
        changed = []
        for name, running in self._members.items():
            gap = gaps.get(name)
            if gap is not None and not gap.can_upgrade and running.runs:
                planned[name] = running.service  # keep the running one: the planned one can't run
            elif (
                name not in planned
                or not planned[name].runs_as(running.service)
                or (gap is not None and gap.is_requested)
            ):
                changed.append(running)
        await stop_all(changed)
        for name in [name for name in self._members if name not in planned]:
            del self._members[name]
        for name, service in planned.items():
            member = self._members.get(name)
            if member is not None and member.runs:
                continue
            gap = gaps[name]
            if gap is not None and not gap.can_upgrade:
                self._print(f"{gap.text}; it is not started")
                continue
            try:
                if said := register(self._registry, service):
                    self._print(f"{name}: {said}")
                control.refuse_running(self._registry.load(name).folder)
            except ImmortalError as error:
                self._print(f"{name}: {error}")
                continue
            if member is None:
                member = self._members[name] = ServiceProcess(self._project, service, self._files, interactive=False)
            member.service = service
            member.start()
        self._reload_count += 1
        self._publish_states()

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (to the file of its own)

    def _publish_states(self) -> None:
        """Write the states of the services, for `immortal ps` and `up`."""
        states = {name: member.state_text for name, member in self._members.items()}
        with contextlib.suppress(OSError):  # the disk may be full: these commands ask the instances as well
            run_lock.publish(self._project.home, COMMAND, states, self._reload_count)
