"""Upgrades over a real socket, and as a process with its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from immortal.appsdk.state import decode_envelope
from immortal.errors import EXIT_HANDLER_FAILED, EXIT_UPGRADE_FAILED
from immortal.protocol.messages import MessageType
from tests.helpers.sdk import GOODBYE, TAKE, WAIT_S, Script, ScriptedCoordinator, coordinator, upgrade_record
from tests.helpers.wire import call, checkpoint_record, initial_record, logged

FIRST = """
from immortal import Immortal, peer, rpc

class Counter(Immortal):
    sink = peer("first:Counter", "sink")
    count: int

    def __init__(self) -> None:
        self.count = 0

    @rpc(id=1)
    def add(self, amount: int) -> None:
        self.count += amount
        self.sink.add.fork(self.count)
"""

SECOND = """
from __future__ import annotations
import first
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc, upgrades

@upgrades(first.Counter)
class Counter(Immortal):
    sink = peer("first:Counter", "sink")
    amounts: list[int]

    @classmethod
    def upgrade(cls, old: first.Counter) -> Counter:
        new = cls()
        new.amounts = [old.count, 100 // old.count]
        return new

    @rpc(id=1)
    def add(self, amount: int) -> None:
        self.amounts.append(amount)
        self.sink.add.fork(1000 * sum(self.amounts))

    @impulse(id=2)
    def started(self, amounts: list[int]) -> None:
        pass

    @on_primary
    def start(self, impulses: Impulses) -> None:
        impulses.started(self.amounts)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "first.py").write_text(FIRST)
    (tmp_path / "second.py").write_text(SECOND)
    return tmp_path


def run_app(folder: Path, target: str, script: Script) -> tuple[ScriptedCoordinator, int, str]:
    """The coordinator after its script, the app's exit status and what it said."""
    with coordinator(script) as it:
        environment = {**os.environ, "IMMORTAL_APP_ADDRESS": it.address}
        command = [sys.executable, "-m", "immortal.appsdk", target]
        app = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    return it, app.returncode, app.stderr


def first_life(folder: Path, amount: int) -> tuple[bytes, list[bytes]]:
    """The first version's first checkpoint, and the records behind it."""

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(GOODBYE)

    it, status, text = run_app(folder, "first:Counter", script)
    assert (status, text) == (0, "")
    return it.output.blobs[0], [initial_record(it.output.initial_message), logged(1, [call(1, amount)])]


def test_an_upgrade_as_the_coordinator_asks_for_it(folder: Path) -> None:
    blob, records = first_life(folder, 4)

    def script(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(blob) + b"".join(records) + upgrade_record(2))
        it.read_until(lambda output: len(output.blobs) == 1)
        assert it.output.calls == [("sink", 1, (4,))]
        it.send(TAKE)
        it.read_until(lambda output: len(output.blobs) == 2)
        it.read_until(lambda output: output.calls_count == 2)  # the hook's
        it.send(logged(2, [call(1, 1)]))
        it.read_until(lambda output: output.calls_count == 3)
        it.send(GOODBYE)

    it, status, text = run_app(folder, "second:Counter", script)
    assert (status, text) == (0, "")
    assert it.output.calls == [("sink", 1, (4,)), ("", 2, ([4, 25],)), ("sink", 1, (30_000,))]
    assert [decode_envelope(blob)[0].version for blob in it.output.blobs] == [2, 2]
    later_blob = it.output.blobs[1]

    def recovery(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(later_blob) + logged(2, [call(1, 2)]))
        it.read_until(lambda output: output.calls_count == 1)
        it.send(GOODBYE)

    it, status, _ = run_app(folder, "second:Counter", recovery)
    assert (status, it.output.calls) == (0, [("sink", 1, (31_000,))])

    it, status, text = run_app(folder, "first:Counter", recovery_refused(later_blob))
    assert status == EXIT_HANDLER_FAILED
    assert "the checkpoint is of version 2 (Counter), the app first:Counter has version 1 only" in text


def recovery_refused(blob: bytes) -> Script:
    def script(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(blob))
        with pytest.raises((EOFError, ConnectionError)):
            it.read_until(lambda output: False)

    return script


def test_what_if_of_an_upgrade(folder: Path) -> None:
    blob, records = first_life(folder, 4)

    def script(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(blob) + logged(0, [call(1, 5)]) + TAKE)
        it.read_until(lambda output: len(output.blobs) == 1)
        it.send(GOODBYE)

    it, _, _ = run_app(folder, "first:Counter", script)
    blob = it.output.blobs[0]

    def what_if(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(blob) + upgrade_record(2, MessageType.UPGRADE_SERVICE) + records[1])
        it.read_until(lambda output: output.calls_count == 1)
        it.send(GOODBYE)

    it, status, _ = run_app(folder, "second:Counter", what_if)
    assert (status, it.output.calls, it.output.blobs) == (0, [("sink", 1, (29_000,))], [])


def test_a_failing_upgrade_is_told_and_leaves_with_its_own_status(folder: Path) -> None:
    blob, records = first_life(folder, 0)

    def script(it: ScriptedCoordinator) -> None:
        # What comes in behind the request is never read: it must not keep the last words from arriving.
        behind = b"".join(logged(sequence_id, [call(1, 1)] * 100) for sequence_id in range(2, 50))
        it.send(checkpoint_record(blob) + b"".join(records) + upgrade_record(2) + behind)
        it.read_until(lambda output: any(sent.message_type == MessageType.UPGRADE_FAILED for sent in output.messages))
        with pytest.raises((EOFError, ConnectionError)):
            it.read_until(lambda output: False)

    it, status, text = run_app(folder, "second:Counter", script)
    assert status == EXIT_UPGRADE_FAILED == 71
    reason = it.output.messages[-1].data.decode()
    line = SECOND.split("\n").index("        new.amounts = [old.count, 100 // old.count]") + 1
    assert reason.startswith("Counter.upgrade raised ZeroDivisionError: ")
    assert reason.endswith(f"second.py:{line})")
    assert it.output.calls == [("sink", 1, (0,))]
    assert it.output.blobs == []
    assert text.startswith(
        "app Counter: the upgrade from version 1 to version 2 failed: Counter.upgrade raised ZeroDiv"
    )
    assert "appsdk/" not in text
