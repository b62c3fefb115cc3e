"""Cells of the matrix for spilled calls, which wait in the log for a peer that is down."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from immortal.coordinator.core.interfaces import OutputBatch
from immortal.coordinator.fault_points import FaultPoint
from immortal.coordinator.log import view_queries
from immortal.coordinator.log.backend import Severity
from immortal.coordinator.log.backends.lmdb.journal import FILE_SIZE_BYTES
from immortal.coordinator.log.verify import verify_log
from immortal.log import open_reader
from tests.faults.clock import JUMPS
from tests.faults.disk import Disk, read_journal, undone, without_power
from tests.faults.matrix import Cell, Fault
from tests.faults.scene import NAME, Scene
from tests.helpers.processes import FORWARD, CoordinatorProcess, SocketApp
from tests.helpers.spilling import Caller, limit_memory
from tests.soak.service import wait_for

PEER = "bob"
CALLS = 8  # three are in memory, the others are spilled, one in each row
SPILLED = 6  # one of these
PAGE_SIZE_BYTES = 4096
PAGE_HEAD_SIZE_BYTES = 16
ROW_COUNT_AT = 8  # in a row, after its CRC
MOMENTS = 12
DELAY_MS = 80


class SpillScene(Scene):
    """Instance that sends each number to its peer, with a large argument; the peer must get each number once."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.folder, scene.monkeypatch)
        self.house = scene.house
        self.peer: SocketApp | None = None
        self.peer_process: CoordinatorProcess

    def register(self, **options: object) -> None:
        self.house.register(NAME, PEER, **options)
        limit_memory(self.house.registry, NAME)

    def start(self) -> None:
        self.process = self.house.start(NAME)
        self.app = self.house.app(NAME, Caller, peer=PEER, extended=True).ready()
        self._sent_before = self.sent

    def tell_one(self, padding: int = 0) -> None:
        self.sent += 1
        self.app.impulse(self.sent, FORWARD, padding)

    def spills(self, calls: int = CALLS) -> None:
        """Make ``calls`` more calls, the last of which are in the log alone."""
        self.tell(calls)
        self.app.until(lambda: self.app.state["forwarded"] == list(range(1, self.sent + 1)))
        self.process.until(lambda status: self._all_spilled(status["outputs"].get(PEER, {})) and self._is_idle(status))

    def _all_spilled(self, output: dict[str, int]) -> bool:
        return output.get("position") == self.sent and output["spilled_bytes"] > 0

    @staticmethod
    def _is_idle(status: dict[str, Any]) -> bool:
        """Return True if all spilled rows are on the disk, so that the next fault meets only later writes."""
        return not status["log"]["pending_bytes"]

    def start_peer(self) -> SocketApp:
        if self.peer is None:
            self.peer_process = self.house.start(PEER)
            self.peer = self.house.app(PEER).ready()
        return self.peer

    def starts_until(self, point: FaultPoint) -> None:
        """Start, and be killed at ``point`` during the recovery or soon after it."""
        self.arm(point)
        self.process = self.house.start(NAME)
        self.app = self.house.app(NAME, Caller, peer=PEER, extended=True)
        with contextlib.suppress(OSError):  # it can be killed while the app sends
            self.app.until_closed()
        self.died_at_its_point()

    def recovers(self) -> None:
        """Check that the instance starts, and has made all requested calls, up to the last accepted one."""
        self.start()
        self.app.until(lambda: len(self.app.state["forwarded"]) >= self.accepted)
        forwarded = self.app.state["forwarded"]
        assert forwarded == list(range(1, len(forwarded) + 1))
        assert self.accepted <= len(forwarded) <= self.sent
        self.sent = self.accepted = self._sent_before = len(forwarded)

    def arrives(self) -> None:
        """Check that the peer has got all calls, once and in order, and that the log keeps none of them."""
        peer = self.start_peer()
        self.tell()
        peer.until(lambda: len(peer.state["told"]) >= self.sent)
        self.process.until(lambda status: status["outputs"][PEER]["acknowledged"] == self.sent)
        assert peer.state["told"] == list(range(1, self.sent + 1))
        assert self.process.status()["outputs"][PEER]["waiting_bytes"] == 0

    def stop_at(self, point: FaultPoint) -> None:
        """Stop the process (SIGSTOP) at ``point`` with one more call, until :meth:`goes_on`."""
        self.arm(point, action="stop")
        self.tell_one()
        self.app.until(lambda: len(self.app.state["forwarded"]) == self.sent)
        self.until_it_stands_still()

    def until_it_stands_still(self) -> None:
        state = Path(f"/proc/{self.process.process.pid}/stat")
        wait_for(
            lambda: state.read_text().rpartition(")")[2].split()[0] == "T" and not self.armed,
            lambda: f"the point is reached: {self.process.lines}",
        )

    def goes_on(self) -> None:
        self.process.resume()

    def row_at(self, number: int) -> int:
        """Return the offset in the log's file of the only row with that call's argument."""
        data = self.copy_log()
        needle = number.to_bytes(4, "little") + bytes(3000)
        assert data.count(needle) == 1
        return data.index(needle) // PAGE_SIZE_BYTES * PAGE_SIZE_BYTES + PAGE_HEAD_SIZE_BYTES

    def flip_at(self, offset_bytes: int) -> None:
        """Flip one bit. A running process sees the change: its map of the file is the same pages."""
        with self.log.open("r+b") as file:
            file.seek(offset_bytes)
            (byte,) = file.read(1)
            file.seek(offset_bytes)
            file.write(bytes([byte ^ 4]))


SpillShow = Callable[[SpillScene, Cell], None]
SPILL_SHOWS: dict[Fault, SpillShow] = {}


def shows(fault: Fault) -> Callable[[SpillShow], SpillShow]:
    def register(show: SpillShow) -> SpillShow:
        SPILL_SHOWS[fault] = show
        return show

    return register


@shows(Fault.PROCESS_KILL)
def killed_around_what_is_spilled(scene: SpillScene, cell: Cell) -> None:
    scene.register()
    scene.arm(FaultPoint.BEFORE_SPILL, count=1_000_000)
    scene.start()
    scene.spills()
    for point in (FaultPoint.BEFORE_SPILL, FaultPoint.AFTER_SPILL):
        scene.arm(point)
        scene.tell_one()
        scene.app.until_closed()
        scene.died_at_its_point()
        scene.recovers()
    scene.arm(FaultPoint.SPILL_READ)
    scene.start_peer()
    scene.app.until_closed()
    scene.died_at_its_point()
    for point in (FaultPoint.DURING_SPILL_TRIM, FaultPoint.AFTER_SPILL_TRIM):  # the peer has got all by then
        scene.starts_until(point)
    scene.recovers()
    scene.arrives()


@shows(Fault.LOST_PAGES)
def power_is_lost_while_it_spills(scene: SpillScene, cell: Cell) -> None:
    scene.register()
    scene.start()
    scene.spills()
    scene.kill()
    durable = _spilled(scene.log.parent)
    disk = scene.disk(scene.log, journal=True)
    scene.arm(FaultPoint.AFTER_SPILL, count=1_000_000)
    scene.recovers()
    scene.spills()
    scene.arm(FaultPoint.AFTER_SPILL)
    scene.tell_one()
    scene.app.until_closed()
    scene.died_at_its_point()
    writes, moments = read_journal(disk.journal)
    rng = random.Random(1)
    whole, journal = scene.log.read_bytes(), scene.journal.read_bytes()
    scene.journal.write_bytes(bytes(FILE_SIZE_BYTES))  # at most of these moments nothing in it counts
    mark = scene.high_water_mark.read_bytes()
    scene.high_water_mark.unlink()  # it belongs to the last moment
    interesting = [moment for moment in moments if moment.pending]
    for moment in rng.sample(interesting, min(MOMENTS, len(interesting))):
        then = undone(bytearray(whole), writes[moment.writes_done :])
        scene.log.write_bytes(without_power(then, moment.pending, rng))
        assert [one for one in verify_log(scene.log.parent).findings() if one.severity is not Severity.NOTE] == []
        assert _spilled(scene.log.parent)[: len(durable)] == durable
    scene.log.write_bytes(without_power(bytearray(whole), moments[-1].pending, rng))
    scene.journal.write_bytes(journal)
    scene.high_water_mark.write_bytes(mark)
    scene.recovers()
    scene.arrives()


def _spilled(folder: Path) -> list[OutputBatch]:
    """Return all spilled batches on disk."""
    with open_reader(folder) as reader:
        first, last = (reader.summary().spilled[PEER][at] for at in (0, -1))
        span = (first.first_position, last.last_position, 1 << 30)
        with reader.view() as view:
            return view_queries.read(view, PEER, *span)


@shows(Fault.BIT_FLIP)
def a_flipped_bit_in_a_spilled_call(scene: SpillScene, cell: Cell) -> None:
    scene.register()
    scene.start()
    scene.spills()
    copied = {path: path.read_bytes() for path in (scene.log, scene.journal)}  # of a log that is in use
    row = scene.row_at(SPILLED)
    scene.flip_at(row + 3000)
    peer = scene.start_peer()
    scene.app.until_closed()
    place = f"the spilled messages to 'bob' at position {SPILLED} are damaged"
    line = scene.stops(cell.says, 3)
    assert place in line
    assert "'immortal recover alice' says what can be done" in line
    told = scene.command("recover", NAME)
    assert told.returncode == 1
    assert place in told.stdout
    assert "what helps: restore the log from a copy" in told.stdout
    peer.until(lambda: len(peer.state["told"]) >= 3)
    assert peer.state["told"] == list(range(1, len(peer.state["told"]) + 1))[: SPILLED - 1]
    restore(copied)
    scene.flip_at(row + ROW_COUNT_AT)
    assert "table 'spilled' is damaged at key" in scene.stops_at_the_start(cell.says, 3)
    restore(copied)
    scene.recovers()
    scene.arrives()


def restore(copied: Mapping[Path, bytes]) -> None:
    for path, data in copied.items():
        path.write_bytes(data)


@shows(Fault.TRUNCATION)
def a_log_truncated_where_calls_are_spilled(scene: SpillScene, cell: Cell) -> None:
    scene.register()
    scene.start()
    scene.spills()
    scene.kill()
    sound = scene.copy_log()
    row = scene.row_at(SPILLED)
    for size_bytes in (row - PAGE_HEAD_SIZE_BYTES, row + 30_000):
        scene.log.write_bytes(sound[:size_bytes])
        scene.stops_at_the_start(cell.says, 3)
    scene.log.write_bytes(sound)
    scene.recovers()
    scene.arrives()


def fails_to_spill(fail: Callable[[Disk], None]) -> SpillShow:
    """Show a failing write or sync in the commit that holds a spilled row."""

    def show(scene: SpillScene, cell: Cell) -> None:
        scene.register()
        disk = scene.disk(scene.log)
        scene.arm(FaultPoint.BEFORE_SPILL, count=1_000_000)
        scene.start()
        scene.spills()
        scene.stop_at(FaultPoint.BEFORE_SPILL)
        fail(disk)
        scene.goes_on()
        scene.app.until_closed()
        scene.stops(cell.says, 1)
        disk.work()
        scene.recovers()
        scene.arrives()

    return show


shows(Fault.FULL_DISK)(fails_to_spill(lambda disk: disk.fail("write", errno.ENOSPC)))
shows(Fault.FAILED_SYNC)(fails_to_spill(lambda disk: disk.fail("sync", errno.EIO)))
shows(Fault.ONE_SYNC)(fails_to_spill(lambda disk: disk.fail("sync", errno.EIO, once=True)))
shows(Fault.LATE_SYNC)(fails_to_spill(lambda disk: disk.fail_late("sync", errno.EIO, once=True)))
shows(Fault.LATE_WRITE)(fails_to_spill(lambda disk: disk.fail_late("write", errno.EIO, once=True)))


@shows(Fault.READ_ERROR)
def a_spilled_call_that_the_disk_does_not_give(scene: SpillScene, cell: Cell) -> None:
    """Read a page after the end of a mapped file, which acts as an unreadable page: SIGBUS."""
    scene.register()
    disk = scene.disk(scene.log)
    scene.arm(FaultPoint.SPILL_READ, count=1_000_000)
    scene.start()
    scene.spills()
    row = scene.row_at(SPILLED) - PAGE_HEAD_SIZE_BYTES
    scene.arm(FaultPoint.SPILL_READ, action="stop")
    peer = scene.start_peer()
    scene.until_it_stands_still()
    sound = scene.copy_log()
    os.truncate(scene.log, row)
    scene.goes_on()
    scene.app.until_closed()
    assert scene.process.ended()[0] == -signal.SIGBUS
    assert peer.state["told"] == list(range(1, len(peer.state["told"]) + 1))[: SPILLED - 1]
    scene.log.write_bytes(sound)
    disk.cannot_read_from(row)
    told = scene.command("log", "verify", NAME)
    assert told.returncode == 1
    assert f"{cell.says} {row}: Input/output error" in told.stdout + told.stderr
    disk.work()
    scene.recovers()
    scene.arrives()


@shows(Fault.SLOW_DISK)
def a_slow_disk_under_what_is_spilled(scene: SpillScene, cell: Cell) -> None:
    scene.register()
    disk = scene.disk(scene.log)
    scene.start()
    disk.delay("sync", DELAY_MS)
    scene.spills()
    assert scene.process.status()["commit_ms"] > DELAY_MS / 2
    assert cell.says in " ".join(scene.command("status", NAME).stdout.split())
    scene.arrives()


@shows(Fault.CLOCK_JUMP)
def a_clock_that_jumps_over_what_is_spilled(scene: SpillScene, cell: Cell) -> None:
    scene.register()
    clock = scene.clock()
    scene.start()
    scene.spills()
    for jump in JUMPS:
        clock.jump(jump)
        scene.tell(1)
    scene.kill()
    scene.recovers()  # with the clock ten years behind
    scene.arrives()
