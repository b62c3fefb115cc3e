"""Change of a running instance's code: watch its source files, check new code against the log, let it take over.

The new code replays the records after the newest checkpoint (`immortal verify`). A recovery does the same, and a crash
right after the change would need it. The calls are compared with the log, and with the logs of their receivers if these
are here:

- the same calls: the new code can take over, at a clean stop.
- other calls, or a call that fails: a recovery with the new code would fail. But the new code can begin *here*: the old
  code stops with a checkpoint, and the new code begins after it, so that no code replays records that it did not make.
  Before that the new code is tried on the present state, with the handlers that wait in it.
- code of another version (@upgrades) upgrades the state there, as `immortal upgrade` does.
- or the log is deleted, and all begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs, upgrade_mark
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.instances.upgrade_mark import UpgradeMark
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.operator import control
from immortal.coordinator.operator.unregister import delete_log_of
from immortal.coordinator.project.fleet import command
from immortal.coordinator.project.project import Project, ServiceSpec
from immortal.protocol.errors import ImmortalError

CHECKPOINT_TIMEOUT_S = 30.0
RESET_TIMEOUT_S = 15.0  # of a peer that stops or starts meanwhile
RESET_RETRY_S = 0.1
_POLL_S = 0.05
_SAME, _DIFFERENT = 0, 3  # of `immortal verify`


class Outcome(enum.Enum):
    NOTHING_LOGGED = "nothing is logged yet"
    SAME = "the same"
    DIFFERENT = "different"
    UNKNOWN = "can't be told"  # for example, the app does not start with this state


class ChangeReport(Struct, frozen=True):
    """Result of a replay with the new code. ``lines``: the differences, with record and calls. ``version``: the log's;
    None if nothing is logged."""

    outcome: Outcome
    lines: Sequence[str] = ()
    version: int | None = None


class ChangeError(ImmortalError):
    """Raised if the new code can't take over, so that the old code continues."""


class VersionGap(Struct, frozen=True):
    """Difference between the version of a service's log and that of its class in the project. ``text``: description of
    both. ``can_upgrade``: the class also has the log's version, which runs until an upgrade. ``is_requested``: the next
    start upgrades."""

    text: str
    can_upgrade: bool
    is_requested: bool = False

    @property
    def stays(self) -> bool:
        """True if the service keeps its version until an upgrade is requested."""
        return self.can_upgrade and not self.is_requested


def version_gap(registry: Registry, service: ServiceSpec) -> VersionGap | None:
    """Return the difference between the versions of log and class; None if they are equal, or one is unknown."""
    name, version = service.name, service.version
    try:
        settings = registry.load(name)
        known, mark = own_logs.log_version(settings), upgrade_mark.read(settings.folder)
    except ImmortalError:  # not registered yet; any other error is reported at the start
        return None
    if known in (None, version):
        return None
    if known not in service.versions:
        way = f"name a class that has version {known}"
        if settings.app not in (None, service.app):
            way = f'write app = "{settings.app}" in immortal.toml, the class that it ran last'
        text = f"{name} has version {known}, but the project names {service.app}, which lacks that version: {way}"
        return VersionGap(text, can_upgrade=False)
    if mark is not None and mark.pending and mark.to == version:
        text = f"{name} becomes version {version} with {service.app}; it was version {known}"
        return VersionGap(text, can_upgrade=True, is_requested=True)
    text = f"{name} stays at version {known}, but {service.app} has version {version}"
    if mark is not None and mark.problem is not None:
        text += f"; the upgrade to version {mark.to} failed: {mark.problem}"
    return VersionGap(text, can_upgrade=True)


def request_upgrade(registry: Registry, service: ServiceSpec) -> None:
    """Mark the service, so that its next start upgrades it to the version of its class. Raises ImmortalError."""
    upgrade_mark.write(registry.load(service.name).folder, UpgradeMark(service.version, service.app))


class CodeChange:
    """Change of a service to new code. ``service``: the service as the project has it now."""

    def __init__(self, project: Project, registry: Registry, service: ServiceSpec) -> None:
        self._project = project
        self._registry = registry
        self.service = service

    @property
    def _settings(self) -> InstanceSettings:
        return self._registry.load(self.service.name)

    async def examine(self) -> ChangeReport:
        """Replay with the new code what a recovery would replay, and report the differences."""
        status = self._status()
        if status is None or not status.get("checkpoint"):
            return ChangeReport(Outcome.NOTHING_LOGGED)
        code, lines = await self._verify(status["checkpoint"]["id"])
        outcome = {_SAME: Outcome.SAME, _DIFFERENT: Outcome.DIFFERENT}.get(code, Outcome.UNKNOWN)
        return ChangeReport(outcome, lines, status.get("version"))

    async def try_at_current_state(self) -> None:
        """Take a checkpoint with the old code and try the new code on it. Raises ChangeError if either fails."""
        before = (self._status() or {}).get("checkpoint") or {"id": 0}
        try:
            control.query(self._settings.folder, "checkpoint")
            deadline_s = time.monotonic() + CHECKPOINT_TIMEOUT_S
            while (now := ((self._status() or {}).get("checkpoint") or {"id": 0})["id"]) <= before["id"]:
                if time.monotonic() > deadline_s:
                    raise ChangeError(f"the old code took no checkpoint within {CHECKPOINT_TIMEOUT_S:g} s")
                await asyncio.sleep(_POLL_S)
        except control.ControlError as error:
            raise ChangeError(f"the old code took no checkpoint: {error}") from None
        code, lines = await self._verify(now)
        if code != _SAME:
            raise ChangeError("\n".join(["the new code can't continue from the current state:", *lines]))

    def mark_upgrade(self, found: ChangeReport) -> None:
        """Mark the instance for an upgrade at its next start if the new code has another version."""
        if found.version is not None and found.version != self.service.version:
            request_upgrade(self._registry, self.service)

    def records_behind(self) -> int:
        """Return the number of records after the last checkpoint of a stopped instance."""
        if (summary := own_logs.summary_of(self._settings)) is None:
            return 0
        newest = summary.checkpoints[-1].sequence_id if summary.checkpoints else -1
        return summary.last_sequence_id - newest

    async def reset(self, report: Callable[[str], None]) -> None:
        """Delete the log of a stopped instance, and reset its peers' streams with it. Raises RegistryError."""
        settings = self._settings
        delete_log_of(settings)
        upgrade_mark.clear(settings.folder)
        for other in self._registry.names():
            if other == settings.name or not self._has_streams_with(other):
                continue
            deadline_s = time.monotonic() + RESET_TIMEOUT_S
            while True:
                code, lines = await self._immortal("peers", "reset", other, settings.name, "--yes")
                if code == 0 or time.monotonic() > deadline_s:
                    break
                await asyncio.sleep(RESET_RETRY_S)  # the peer just stops or starts, as after a change of its own code
            for line in lines:
                report(line)

    def _has_streams_with(self, other: str) -> bool:
        """Return True if the log of ``other`` has streams with this instance."""
        summary = own_logs.summary_of(self._registry.load(other))
        met = () if summary is None else (summary.peers, summary.sources, summary.acknowledged)
        return any(self.service.name in known for known in met)

    def _status(self) -> dict[str, Any] | None:
        with contextlib.suppress(control.ControlError):
            return control.query(self._settings.folder, "status")
        return None

    async def _verify(self, checkpoint_id: int) -> tuple[int, list[str]]:
        name = self.service.name
        called = {*((self._status() or {}).get("outputs") or ())} & {*self._registry.names()} - {name}
        receivers = [f"--peer-log={one}" for one in sorted(called) if log_exists(self._registry.load(one).log)]
        return await self._immortal(
            "verify", name, "--checkpoint", str(checkpoint_id), "--app", self.service.app, *receivers
        )

    async def _immortal(self, *arguments: str) -> tuple[int, list[str]]:
        """Run a command; return its exit status and lines. If cancelled, the command is terminated."""
        process = await asyncio.create_subprocess_exec(
            *command(self._project, *arguments),
            cwd=self._project.folder,
            env=self._project.environment(self.service.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        try:
            said, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        return process.returncode or 0, said.decode("utf-8", "replace").splitlines()


LOOK_INTERVAL_S = 0.3  # polling works on every file system; a few dozen files take less than a millisecond
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "venv"}

Stamp = tuple[int, int, int]


class SourceFiles:
    """Watcher of source files, by polls. A change counts after it has stood for one poll: an editor may still write."""

    def __init__(self, files: Iterable[str | Path]) -> None:
        self._stamps: dict[str, Stamp | None] = {}
        self._moving: set[str] = set()
        self.watch(files)

    def watch(self, files: Iterable[str | Path]) -> None:
        """Watch ``files`` from now on; changes of files that were watched before are still reported."""
        wanted = {str(file) for file in files}
        self._stamps = {file: self._stamps.get(file, None) or _stamp(file) for file in wanted}
        self._moving &= wanted

    def poll(self) -> set[str]:
        """Return the files that were changed, created or removed since they were last returned."""
        settled = set()
        for file, before in self._stamps.items():
            now = _stamp(file)
            if now != before:
                self._stamps[file] = now
                self._moving.add(file)
            elif file in self._moving:
                self._moving.remove(file)
                settled.add(file)
        return settled


def _stamp(file: str) -> Stamp | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def python_files(folder: Path) -> list[str]:
    """Return all Python files of ``folder`` outside environments and hidden folders: a module that can't be imported
    may need any of them."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [
            one
            for one in folders
            if one not in _SKIPPED and one[0] != "." and not Path(place, one, "pyvenv.cfg").exists()
        ]
        found += [os.path.join(place, file) for file in files if file.endswith(".py")]
    return found
