"""An instance with a log, to which something is about to happen; and the question whether anything was lost."""

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
    """The instance has been told numbers, from 1 on. What was accepted of them must be there in the end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.home = folder / "home"
        self.house = House(self.home)
        self.sent = 0
        self.accepted = 0
        self._sent_before = 0  # this session of the app
        self.process: CoordinatorProcess
        self.app: SocketApp
        self._plan = folder / "plan"

    # --- the ordinary life --------------------------------------------------------------------------------------------

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
        """So many more numbers, each accepted before the next is sent."""
        for _ in range(count):
            self.tell_one(padding)
            self.app.until(lambda: self.app.accepted >= self.sent - self._sent_before)
            self.accepted = self.sent

    def tell_one(self, padding: int = 0) -> None:
        self.sent += 1
        self.app.impulse(self.sent, TOLD, padding)

    def ask_for_checkpoint(self) -> None:
        """It may be killed at that very question."""
        try:
            control.query(self.house.settings(NAME).folder, "checkpoint", 1.0)
        except ImmortalError:
            return

    def checkpoint(self) -> int:
        """Take one; its ID."""
        before = self.process.status()["checkpoint"]["id"]
        self.app.types.discard(MessageType.TAKE_CHECKPOINT)
        self.ask_for_checkpoint()
        self.app.until(lambda: MessageType.TAKE_CHECKPOINT in self.app.types)
        status = self.process.until(lambda status: status["checkpoint"]["id"] > before)
        return int(status["checkpoint"]["id"])

    def with_two_checkpoints(self) -> None:
        """Numbers 1 to 12, and checkpoint 2 behind the eighth; down."""
        self.register()
        self.start()
        self.tell(8)
        assert self.checkpoint() == 2
        self.tell(4)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.app.until_closed()

    # --- what happens to it -------------------------------------------------------------------------------------------

    def disk(self, match: Path | str, *, journal: bool = False) -> Disk:
        """What is started from now on meets this disk."""
        disk = Disk(self.folder, match, journal=journal)
        for name, value in disk.environment.items():
            self.monkeypatch.setenv(name, value)
        return disk

    def clock(self) -> ShiftedClock:
        """What is started from now on has this clock."""
        clock = ShiftedClock(self.folder)
        for name, value in clock.environment.items():
            self.monkeypatch.setenv(name, value)
        return clock

    def arm(self, point: FaultPoint, action: str = "kill", count: int = 1) -> None:
        """For what is started from now on."""
        self.monkeypatch.setenv(VARIABLE, str(self._plan))
        written = self._plan.with_suffix(".new")  # what is running may look at it just now
        written.write_text(f"{count} {action} {point.value}")
        written.replace(self._plan)

    @property
    def armed(self) -> bool:
        return self._plan.exists()

    def died_at_its_point(self) -> None:
        """It was killed there, and nowhere else."""
        assert self.process.ended()[0] == -9
        assert not self.armed
        self.app.close()

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "immortal", "--home", str(self.home), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False)

    def settle_log(self) -> None:
        """What only the journal has goes into the tables, as at the next start: what is done to them then is seen."""
        with contextlib.suppress(LogLockedError):  # a coordinator runs
            open_log(self.log.parent, NAME).close()

    def copy_log(self) -> bytes:
        self.settle_log()
        return self.log.read_bytes()

    def flip(self, needle: bytes, offset_bytes: int = 0, bit: int = 2) -> None:
        """Flip one bit behind each place with ``needle``: pages that were replaced stay in the file."""
        self.settle_log()
        data = bytearray(self.log.read_bytes())
        position = data.find(needle)
        assert position >= 0
        while position >= 0:
            data[position + offset_bytes] ^= 1 << bit
            position = data.find(needle, position + len(needle))
        self.log.write_bytes(data)

    # --- the question -------------------------------------------------------------------------------------------------

    def recovers(self) -> None:
        """It starts, has all that was accepted, and goes on."""
        self.start()
        told = self.app.state["told"]
        assert told == list(range(1, len(told) + 1))
        assert self.accepted <= len(told) <= self.sent
        self.sent = self.accepted = self._sent_before = len(told)
        self.tell()
        self.app.until(lambda: self.app.state["told"] == list(range(1, self.sent + 1)))

    def stops(self, says: str, status: int) -> str:
        """It ends by itself with that status, and one line that says so."""
        line = self.process.failed(status)
        assert says in line, line
        return line

    def stops_at_the_start(self, says: str, status: int) -> str:
        self.process = self.house.start(NAME, started=False)
        return self.stops(says, status)

    def close(self) -> None:
        self.house.close()
        shutil.rmtree(self.home, ignore_errors=True)
