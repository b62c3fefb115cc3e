"""Messages that fail, over a real socket: what the coordinator hears, what the user sees, and what ends the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from immortal import Immortal, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.log import FailureReporter
from immortal.appsdk.running.options import RunOptions
from immortal.appsdk.running.runner import run_connection
from immortal.errors import HandlerError, RecoveryNeeded
from immortal.protocol.messages import MessageType
from immortal.protocol.verdicts import Verdict, VerdictKind, decode_handling, decode_verdict
from tests.helpers.sdk import GOODBYE, TAKE_FIRST, ScriptedCoordinator, coordinator, verdicts_record
from tests.helpers.wire import AppOutput, call, checkpoint_record, control, initial_record, logged

hold = threading.Event()


class Shelf(Immortal):
    items: list[str]
    ballast: bytes

    def __init__(self) -> None:
        self.items = []
        self.ballast = b""

    @rpc(id=1)
    def put(self, item: str) -> None:
        self.items.append(item)
        if item == "bad":
            raise ValueError("no bad here")

    @rpc(id=2)
    def wait(self) -> None:
        hold.wait(20)

    @rpc(id=3)
    def grow(self) -> None:
        self.ballast = bytes(2 << 20)

    @rpc(id=4, on_error="stop")
    def stop(self) -> None:
        raise ValueError("stop")


def has(output: AppOutput, message_type: MessageType) -> bool:
    return any(sent.message_type == message_type for sent in output.messages)


def last_words(it: ScriptedCoordinator) -> None:
    """Read until the app has gone."""
    with pytest.raises(EOFError):
        it.read_until(lambda output: False)


def start(it: ScriptedCoordinator) -> None:
    it.send(verdicts_record())
    it.start_first()


def test_the_user_sees_each_failure(capfd: pytest.CaptureFixture[str]) -> None:
    def script(it: ScriptedCoordinator) -> None:
        start(it)
        it.send(logged(1, [call(1, "a"), *[call(1, "bad")] * 3, call(1, "b")]))
        it.send(control(MessageType.TAKE_CHECKPOINT))
        it.read_until(lambda output: len(output.blobs) == 2)
        it.send(GOODBYE)

    with coordinator(script) as it:
        assert run_connection(definition_of(Shelf), it.address) == "stopping"
    verdicts = [decode_verdict(one.data) for one in it.output.messages if one.message_type == MessageType.VERDICT]
    assert [(one.message_index, one.kind) for one in verdicts] == [(index, VerdictKind.UNDONE) for index in (1, 2, 3)]
    told = capfd.readouterr().err
    for index in (1, 2, 3):
        assert (
            "error   Shelf> Shelf.put raised ValueError: no bad here; the state is as it was before  handler=Shelf.put "
            f"""arguments=('bad') caller="nobody waits" record=1:{index} remedy="mend it, then try it again: """
            f'immortal dead-letters Shelf retry 1:{index}"'
        ) in told
    assert told.count("error ") == 3
    assert told.count('raise ValueError("no bad here")') == 3
    assert not has(it.output, MessageType.LEAVING)


def test_what_came_from_outside_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    trace = "    Traceback\n    ValueError: \x1b[2J\x9bforged"
    FailureReporter("Shelf").failed(Verdict(1, 0, VerdictKind.UNDONE, "ValueError", trace=trace, method="Shelf.put"))
    assert capsys.readouterr().err.endswith("\n    Traceback\n    ValueError: \\x1b[2J\\x9bforged\n")


def test_an_app_that_stops_by_itself_says_so() -> None:
    def script(it: ScriptedCoordinator) -> None:
        start(it)
        it.send(logged(1, [call(4)]))
        last_words(it)

    with coordinator(script) as it, pytest.raises(HandlerError, match="stop"):
        run_connection(definition_of(Shelf), it.address)
    (leaving,) = [one for one in it.output.messages if one.message_type == MessageType.LEAVING]
    assert b"Shelf.stop raised ValueError" in leaving.data


def test_a_handler_that_does_not_come_back_is_told_of_while_it_runs() -> None:
    def script(it: ScriptedCoordinator) -> None:
        start(it)
        it.send(logged(1, [call(1, "a"), call(2)]))
        it.read_until(lambda output: has(output, MessageType.HANDLING))
        hold.set()
        it.send(GOODBYE)

    hold.clear()
    with coordinator(script) as it:
        run_connection(definition_of(Shelf), it.address)
    note = next(decode_handling(one.data) for one in it.output.messages if one.message_type == MessageType.HANDLING)
    assert (note.sequence_id, note.message_index, note.method, note.message) == (1, 1, "Shelf.wait", b"")
    assert note.for_s >= 1


def test_a_large_state_is_left_to_a_recovery_which_keeps_a_copy() -> None:
    records = logged(1, [call(3), call(1, "a")]), logged(2, [call(1, "b"), call(1, "bad"), call(1, "c")])

    def script(it: ScriptedCoordinator) -> None:
        start(it)
        it.send(records[0] + control(MessageType.TAKE_CHECKPOINT))
        it.read_until(lambda output: len(output.blobs) == 2)
        it.send(records[1])
        last_words(it)

    with coordinator(script) as it, pytest.raises(RecoveryNeeded):
        run_connection(definition_of(Shelf), it.address)
    assert [one.message_type for one in it.output.messages[-2:]] == [MessageType.VERDICT, MessageType.LEAVING]
    blob, verdict = it.output.blobs[-1], decode_verdict(it.output.messages[-2].data)

    def again(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(blob) + verdicts_record(verdict) + records[1] + TAKE_FIRST)
        it.read_until(lambda output: len(output.blobs) == 1)
        it.send(logged(3, [call(1, "bad"), call(1, "d")]) + control(MessageType.TAKE_CHECKPOINT))
        it.read_until(lambda output: len(output.blobs) == 2)
        it.send(GOODBYE)

    with coordinator(again) as it:
        run_connection(definition_of(Shelf), it.address, options=RunOptions(rewound=True))
    assert b"\xa5items\x94\xa1a\xa1b\xa1c\xa1d" in it.output.blobs[-1]


PROGRAM = """
    import os, sys
    from immortal import Immortal, rpc

    class Heavy(Immortal):
        ballast: bytes

        def __init__(self) -> None:
            self.ballast = bytes(2 << 20)

        @rpc(id=1)
        def fail(self) -> None:
            print(f"handled by {os.getpid()}", flush=True)
            raise ValueError("no")

    Heavy.main(sys.argv[1])
"""


def test_the_process_begins_anew_by_itself(tmp_path: Path) -> None:
    """Nobody has to start it: it is the same process, with the same program."""
    program = tmp_path / "heavy.py"
    program.write_text(textwrap.dedent(PROGRAM))
    lives: list[AppOutput] = []

    def script(it: ScriptedCoordinator) -> None:
        start(it)
        it.send(logged(1, [call(1)]))
        last_words(it)
        lives.append(it.output)
        it.output = AppOutput()
        it.connection.close()
        it.connection, _ = it.listener.accept()
        it.connection.settimeout(20)
        verdict = decode_verdict(next(one for one in lives[0].messages if one.message_type == MessageType.VERDICT).data)
        it.send(checkpoint_record(lives[0].blobs[0]) + verdicts_record(verdict))
        it.send(initial_record(lives[0].initial_message) + logged(1, [call(1)]) + TAKE_FIRST)
        it.read_until(lambda output: len(output.blobs) == 1)
        it.send(GOODBYE)

    with coordinator(script) as it:
        process = subprocess.Popen(
            [sys.executable, str(program), it.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output == f"handled by {process.pid}\n"
    assert "the app is recovered without it" in errors
