"""What `scripts/soak --faults` does to services: kills, disks that fail, loss of power, clocks that jump, backups.

Each service runs on a disk of its own (tests/faults/disk.py): its coordinator's writes and syncs fail as they are told
to, and what no sync has reached is known, so that a loss of power can take it.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.protocol.errors import ImmortalError
from tests.faults.clock import ShiftedClock
from tests.faults.disk import Disk, lose_power
from tests.soak.service import COORDINATOR, POLL_S, ROLES, SUPERVISOR, Service, SoakError, wait_for

SYNCS = ("data-sync", "meta-sync", "journal-sync", "folder-sync")
MET_TIMEOUT_S = 1.5  # not every call comes in every state
MET_AT_START_TIMEOUT_S = 6.0  # of both processes, on a busy machine
FULL_S_MAX = 1.5
SLOW_S_MAX = 1.0
PAUSE_S_MAX = 0.4
FIRST_CALLS_MAX = 45  # writes and syncs of a first start, and some of what follows
SHARE_IN_RECOVERY = 0.25  # without waiting until the last fault is recovered from
SHARE_RESTORED = 0.4  # of the backups
BACKUP_TIMEOUT_S = 60.0

JUMPS = {"1 h": timedelta(hours=1), "3 days": timedelta(days=3), "10 years": timedelta(days=3652)}

Fault = Callable[[Service], str]  # what was done to it, in words; "" where it did not come to that


class _Backup:
    """One `immortal log backup` beside a running service."""

    def __init__(self, service: Service, target: Path) -> None:
        self.service, self.target = service, target
        self._process = subprocess.Popen(
            _immortal(service.settings.folder.parent, "log", "backup", service.name, str(target)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def is_done(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """It has been made. Raises SoakError."""
        try:
            told, _ = self._process.communicate(timeout=BACKUP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise SoakError(f"a backup of {self.service.name} took over {BACKUP_TIMEOUT_S:g} s") from None
        if self._process.returncode:
            status = self._process.returncode
            raise SoakError(f"a backup of {self.service.name} ended with status {status}: {told.strip()}")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Faults:
    """``counts`` are of faults that were met, by kind; ``beside`` of what else was done."""

    def __init__(self, folder: Path, services: Sequence[Service], rng: random.Random, feed: Callable[[], None]) -> None:
        self._folder, self._services, self._rng, self._feed = folder, services, rng, feed
        self._disks = {service.name: self._disk(service) for service in services}
        self._clocks = {service.name: self._clock(service) for service in services}
        self._backups: dict[str, _Backup] = {}
        self._restored = 0
        self.counts: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        self._kinds: dict[Fault, int] = {
            self._kill: 6,
            self._pause: 3,
            self._fail_sync: 5,
            self._fail_sync_late: 5,
            self._fail_write: 2,
            self._fail_write_late: 2,
            self._fill: 2,
            self._slow: 1,
            self._cut_power: 5,
            self._back_up: 3,
            self._jump: 4,
        }

    def _disk(self, service: Service) -> Disk:
        folder = self._folder / f"{service.name}-disk"
        folder.mkdir()
        disk = Disk(folder, Path(service.settings.log))
        disk.keep_journals()
        service.environment |= disk.environment
        return disk

    def _clock(self, service: Service) -> ShiftedClock:
        clock = ShiftedClock(self._folder / f"{service.name}-disk")
        libraries = f"{service.environment['LD_PRELOAD']}:{clock.environment['LD_PRELOAD']}"
        service.environment |= clock.environment | {"LD_PRELOAD": libraries}
        return clock

    # --- the course of a round ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first start of each service, at which something happens to it."""
        for service in self._services:
            if done := self._first_start(service):
                self.counts[done] += 1

    def wreak(self, faults: int, deadline_s: float) -> None:
        """Until so many faults have been met, or time (monotonic) is up. Raises SoakError."""
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while self.counts.total() < faults and time.monotonic() < deadline_s:
            service = self._rng.choice(self._services)
            self._feed()
            if self._rng.random() >= SHARE_IN_RECOVERY:
                self._wait_until_ready(service)
            (fault,) = self._rng.choices(kinds, weights)
            if done := fault(service):
                self.counts[done] += 1
            self._collect_backups()

    def finish(self) -> None:
        """Nothing more happens. Raises SoakError where a backup is not what it must be."""
        for disk in self._disks.values():
            disk.work()
        for name in list(self._backups):
            self._end_backup(name)

    def end(self) -> None:
        """Whatever state it is in."""
        for backup in self._backups.values():
            backup.kill()

    def _wait_until_ready(self, service: Service) -> None:
        wait_for(lambda: service.ready, lambda: f"{service.name} is ready\n{service.tail()}")

    # --- processes ----------------------------------------------------------------------------------------------------

    def _kill(self, service: Service) -> str:
        role = self._rng.choices(ROLES, (4, 4, 2))[0]
        killed = service.kill(role)
        time.sleep(self._rng.uniform(0, 0.05))
        return f"kill -9 of the {'app and coordinator' if role == SUPERVISOR else role}" if killed else ""

    def _pause(self, service: Service) -> str:
        role = self._rng.choice(ROLES)
        if not service.signal(role, signal.SIGSTOP):
            return ""
        time.sleep(self._rng.uniform(0.01, PAUSE_S_MAX))
        service.signal(role, signal.SIGCONT)
        return f"pause of the {role}"

    # --- the disk -----------------------------------------------------------------------------------------------------

    def _fail_sync(self, service: Service) -> str:
        place = self._rng.choice(SYNCS)
        self._disks[service.name].fail(place, errno.EIO, once=True)
        return self._met(service, f"one {place} fails", at_start=place == "folder-sync")

    def _fail_sync_late(self, service: Service) -> str:
        place = self._rng.choice(SYNCS)
        self._disks[service.name].fail_late(place, errno.EIO, once=True)
        return self._met(service, f"one {place} fails, bytes readable", at_start=place == "folder-sync")

    def _fail_write(self, service: Service) -> str:
        self._disks[service.name].fail("write", errno.EIO, once=True)
        return self._met(service, "one write fails")

    def _fail_write_late(self, service: Service) -> str:
        self._disks[service.name].fail_late("write", errno.EIO, once=True)
        return self._met(service, "one write fails, bytes readable")

    def _met(self, service: Service, what: str, *, at_start: bool = False) -> str:
        """``what`` was told to the disk: make it come, in traffic, at a checkpoint, or at a start."""
        if at_start or self._rng.random() < 0.2:
            service.kill(COORDINATOR)
        elif self._rng.random() < 0.5:
            with contextlib.suppress(ImmortalError):  # it may well end at that question
                control.query(service.settings.folder, "checkpoint", 0.5)
        disk = self._disks[service.name]
        _pass_s(lambda: not disk.waits, MET_AT_START_TIMEOUT_S if at_start else MET_TIMEOUT_S)
        return "" if disk.work() else what

    def _fill(self, service: Service) -> str:
        self._disks[service.name].fail("write", errno.ENOSPC)
        self._lasts(service, FULL_S_MAX)
        return "full disk for a while"

    def _slow(self, service: Service) -> str:
        self._disks[service.name].delay("sync", self._rng.choice((5, 20, 50)))
        self._lasts(service, SLOW_S_MAX)
        return "slow disk for a while"

    def _lasts(self, service: Service, most_s: float) -> None:
        time.sleep(self._rng.uniform(0.1, most_s))
        self._disks[service.name].work()

    def _cut_power(self, service: Service) -> str:
        if service.name in self._backups:
            self._end_backup(service.name)  # it maps the file that is about to change
        service.cut_power()
        changed = self._lose(service)
        service.start()
        return f"loss of power, {'some' if changed else 'none'} of it unsynced"

    def _lose(self, service: Service) -> list[str]:
        return lose_power(Path(service.settings.log), self._disks[service.name].journal, self._rng)

    # --- the clock ----------------------------------------------------------------------------------------------------

    def _jump(self, service: Service) -> str:
        """Of the wall clock of one service: from wherever it is to so far from the right time."""
        how, ahead = self._rng.choice(tuple(JUMPS.items()))
        sign = self._rng.choice((1, -1))
        self._clocks[service.name].jump(sign * ahead)
        return f"clock jump of {how} {'ahead' if sign > 0 else 'back'}"

    # --- a first start ------------------------------------------------------------------------------------------------

    def _first_start(self, service: Service) -> str:
        disk, rng = self._disks[service.name], self._rng
        kind = rng.choice(("killed", "killed", "sync", "late", "full", "power"))
        place = rng.choice(SYNCS)
        if kind == "killed":
            disk.kill_at("any", rng.randint(1, FIRST_CALLS_MAX), once=True)
        elif kind == "sync":
            disk.fail(place, errno.EIO, once=True)
        elif kind == "late":
            disk.fail_late(place, errno.EIO, once=True)
        elif kind == "full":
            disk.fail("write", errno.ENOSPC)
        service.start()
        if kind == "power":
            time.sleep(rng.uniform(0, 1.0))
            service.cut_power()
            self._lose(service)
            service.start()
            return "first start: loss of power"
        if kind == "full":
            self._lasts(service, FULL_S_MAX)
            return "first start: full disk for a while"
        wait_for(lambda: not disk.waits or service.ready, lambda: f"{service.name} starts\n{service.tail()}")
        if disk.work():
            return ""  # it has fewer calls than that, or none of that kind
        return "first start: killed at a write or sync" if kind == "killed" else "first start: one sync fails"

    # --- backups ------------------------------------------------------------------------------------------------------

    def _back_up(self, service: Service) -> str:
        if service.name in self._backups:
            self._end_backup(service.name)
        self._wait_until_ready(service)  # before that there may be no log yet
        self._backups[service.name] = _Backup(service, self._folder / f"{service.name}-backup")
        return "backup under load"

    def _collect_backups(self) -> None:
        for name, backup in list(self._backups.items()):
            if backup.is_done:
                self._end_backup(name)

    def _end_backup(self, name: str) -> None:
        backup = self._backups.pop(name)
        backup.end()
        if self._rng.random() < SHARE_RESTORED:
            self._restore(backup)

    def _restore(self, backup: _Backup) -> None:
        """Into a home of its own: the log is sound there."""
        self._restored += 1
        home = self._folder / f"restored-{self._restored}"
        settings = Registry(home).register(backup.service.name, "tcp://127.0.0.1:*")
        Path(settings.log).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(backup.target, settings.log)
        for command in (("log", "verify"), ("recover",)):
            told = subprocess.run(
                _immortal(home, *command, backup.service.name), capture_output=True, text=True, check=False
            )
            if told.returncode:
                what = f"{' '.join(command)} of a restored backup of {backup.service.name}"
                raise SoakError(f"{what} ended with status {told.returncode}: {told.stdout}{told.stderr}")
        shutil.rmtree(home)
        self.beside["backup restored and verified"] += 1


def _immortal(home: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "immortal", "--home", str(home), *arguments]


def _pass_s(condition: Callable[[], bool], most_s: float) -> None:
    deadline_s = time.monotonic() + most_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
