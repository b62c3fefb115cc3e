"""Instance with a log, to which a test does something; and the check that nothing was lost."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from immortal.coordinator.core.errors import LogLockedError
from immortal.coordinator.fault_points import VARIABLE, FaultPoint
from immortal.coordinator.log.backends.lmdb.files import FILE_NAME as MARK_FILE_NAME
from immortal.coordinator.log.backends.lmdb.journal import FILE_NAME
from immortal.coordinator.operator import control
from immortal.log import open_log
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType
from tests.faults.clock import ShiftedClock
from tests.faults.disk import Disk
from tests.helpers.processes import TOLD, CoordinatorProcess, House, SocketApp

NAME = "alice"
REPOSITORY = Path(__file__).parents[2]


class Scene:
    """Instance that is told numbers, from 1 on. All accepted ones must be there at the end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.home = folder / "home"
        self.house = House(self.home)
        self.sent = 0
        self.accepted = 0
        self._sent_before = 0  # before this session of the app
        self.process: CoordinatorProcess
        self.app: SocketApp
        self._plan = folder / "plan"

    # --- ordinary life ------------------------------------------------------------------------------------------------

    def register(self, **options: Any) -> None:
        self.house.register(NAME, **options)

    @property
    def log(self) -> Path:
        return Path(self.house.settings(NAME).log) / "data.mdb"

    @property
    def journal(self) -> Path:
        return self.log.with_name(FILE_NAME)

    @property
    def high_water_mark(self) -> Path:
        return self.log.with_name(MARK_FILE_NAME)

    def start(self) -> None:
        self.process, self.app = self.house.both(NAME, extended=True)
        self._sent_before = self.sent

    def tell(self, count: int = 1, padding: int = 0) -> None:
        """Send ``count`` more numbers, each after the last one is accepted."""
        for _ in range(count):
            self.tell_one(padding)
            self.app.until(lambda: self.app.accepted >= self.sent - self._sent_before)
            self.accepted = self.sent

    def tell_one(self, padding: int = 0) -> None:
        self.sent += 1
        self.app.impulse(self.sent, TOLD, padding)

    def ask_for_checkpoint(self) -> None:
        """Ask for a checkpoint; the process can be killed by that request."""
        try:
            control.query(self.house.settings(NAME).folder, "checkpoint", 1.0)
        except ImmortalError:
            return

    def checkpoint(self) -> int:
        """Take a checkpoint; return its ID."""
        before = self.process.status()["checkpoint"]["id"]
        self.app.types.discard(MessageType.TAKE_CHECKPOINT)
        self.ask_for_checkpoint()
        self.app.until(lambda: MessageType.TAKE_CHECKPOINT in self.app.types)
        status = self.process.until(lambda status: status["checkpoint"]["id"] > before)
        return int(status["checkpoint"]["id"])

    def with_two_checkpoints(self) -> None:
        """Send numbers 1 to 12, with checkpoint 2 after the eighth; then kill the process."""
        self.register()
        self.start()
        self.tell(8)
        assert self.checkpoint() == 2
        self.tell(4)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.app.until_closed()

    # --- faults -------------------------------------------------------------------------------------------------------

    def disk(self, match: Path | str, *, journal: bool = False) -> Disk:
        """Return a disk for all processes that are started from now on."""
        disk = Disk(self.folder, match, journal=journal)
        for name, value in disk.environment.items():
            self.monkeypatch.setenv(name, value)
        return disk

    def clock(self) -> ShiftedClock:
        """Return a clock for all processes that are started from now on."""
        clock = ShiftedClock(self.folder)
        for name, value in clock.environment.items():
            self.monkeypatch.setenv(name, value)
        return clock

    def arm(self, point: FaultPoint, action: str = "kill", count: int = 1) -> None:
        """Arm a fault point in processes that are started from now on."""
        self.monkeypatch.setenv(VARIABLE, str(self._plan))
        written = self._plan.with_suffix(".new")  # a running process can be reading the plan
        written.write_text(f"{count} {action} {point.value}")
        written.replace(self._plan)

    @property
    def armed(self) -> bool:
        return self._plan.exists()

    def died_at_its_point(self) -> None:
        """Check that the process was killed at its fault point, and nowhere else."""
        assert self.process.ended()[0] == -9
        assert not self.armed
        self.app.close()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "immortal", "--home", str(self.home), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False)

    def settle_log(self) -> None:
        """Move the journal's writes to the tables, as the next start does, so that damage to the tables has effect."""
        with contextlib.suppress(LogLockedError):  # a coordinator runs
            open_log(self.log.parent, NAME).close()

    def copy_log(self) -> bytes:
        self.settle_log()
        return self.log.read_bytes()

    def flip(self, needle: bytes, offset_bytes: int = 0, bit: int = 2) -> None:
        """Flip one bit after each place with ``needle``: replaced pages stay in the file."""
        self.settle_log()
        data = bytearray(self.log.read_bytes())
        position = data.find(needle)
        assert position >= 0
        while position >= 0:
            data[position + offset_bytes] ^= 1 << bit
            position = data.find(needle, position + len(needle))
        self.log.write_bytes(data)

    # --- checks -------------------------------------------------------------------------------------------------------

    def recovers(self) -> None:
        """Check that the instance starts, has all accepted numbers, and continues."""
        self.start()
        told = self.app.state["told"]
        assert told == list(range(1, len(told) + 1))
        assert self.accepted <= len(told) <= self.sent
        self.sent = self.accepted = self._sent_before = len(told)
        self.tell()
        self.app.until(lambda: self.app.state["told"] == list(range(1, self.sent + 1)))

    def stops(self, says: str, status: int) -> str:
        """Check that the process ends by itself with that status, and a line with ``says``; return the line."""
        line = self.process.failed(status)
        assert says in line, line
        return line

    def stops_at_the_start(self, says: str, status: int) -> str:
        self.process = self.house.start(NAME, started=False)
        return self.stops(says, status)

    def close(self) -> None:
        self.house.close()
        shutil.rmtree(self.home, ignore_errors=True)
