"""Checkpoints that a child process encodes, over a real socket."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import immortal.appsdk.running.app_loop
import immortal.appsdk.state.snapshots
from immortal import Immortal, Impulses, on_primary, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.runner import run_connection
from immortal.appsdk.state.snapshots import CHUNK_SIZE_BYTES_MAX, Snapshot
from immortal.errors import EXIT_HANDLER_FAILED, Disconnected, StateError
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.messages import MessageType
from tests.helpers.sdk import (
    GOODBYE,
    TAKE,
    WAIT_S,
    ScriptedCoordinator,
    coordinator,
    recover,
)
from tests.helpers.wire import AppOutput, call, logged

CHILDREN: list[int] = []  # that the running test has forked


class Store(Immortal, checkpoint="fork"):
    sink = peer(lambda: Store, "sink")
    texts: dict[int, str]

    def __init__(self) -> None:
        self.texts = {}

    @rpc(id=1)
    def fill(self, count: int) -> None:
        self.texts = {key: f"{key:1024}" for key in range(count)}

    @rpc(id=2)
    def put(self, key: int, text: str) -> None:
        self.texts[key] = text
        self.sink.put.fork(key, text)


class Pickled(Store, serializer="pickle"):
    seen: collections.Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.seen = collections.Counter("aab")


class Own(Store):
    def checkpoint(self) -> bytes:
        return repr(self.texts).encode()

    def restore(self, blob: bytes) -> None:
        self.texts = eval(blob)


class WaitsInChild(Own):
    """A state whose encoding never ends."""

    def checkpoint(self) -> bytes:
        if self.texts:
            threading.Event().wait()
        return super().checkpoint()


class Careless(Store):
    def put_careless(self) -> None:
        self.surprise = 1

    @rpc(id=3)
    def careless(self) -> None:
        self.put_careless()


def snapshot_of(output: AppOutput) -> bytes:
    return b"".join(sent.data for sent in output.messages if sent.message_type == MessageType.SNAPSHOT_CHUNK)


def types_of(output: AppOutput) -> list[int]:
    return [sent.message_type for sent in output.messages]


def snapshot_ended(output: AppOutput) -> bool:
    return MessageType.SNAPSHOT_END in types_of(output)


def snapshot_begun(output: AppOutput) -> bool:
    return MessageType.SNAPSHOT_BEGIN in types_of(output)


def reason_of(output: AppOutput) -> str:
    return next(sent.data for sent in output.messages if sent.message_type == MessageType.SNAPSHOT_END).decode()


def read_to_the_end(it: ScriptedCoordinator) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        it.read_until(lambda output: False)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes the children that a test forks. This process may have others: Spark of earlier tests is one."""
    CHILDREN.clear()
    fork = os.fork

    def noted() -> int:
        child = fork()
        if child:
            CHILDREN.append(child)
        return child

    monkeypatch.setattr(os, "fork", noted)


def no_child_is_left() -> bool:
    assert CHILDREN
    for child in CHILDREN:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
            return False
    return True


def test_a_snapshot_between_the_outputs() -> None:
    """What comes in behind the request is handled while the child encodes; it is not in the snapshot."""
    count = 16_000  # 16 MiB: many chunks
    done = threading.Event()

    class Busy(Store, formerly=("Store",)):
        @on_primary
        def work(self, impulses: Impulses) -> None:
            while not done.is_set():
                sorted(str(number) for number in range(1_000))

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, count), call(2, 0, "before")]) + TAKE)
        sequence_id = 2
        while not snapshot_ended(it.output):
            it.send(logged(sequence_id, [call(2, 1, f"behind {sequence_id}")]))
            it.read_until(lambda output: output.calls_count == sequence_id)  # noqa: B023
            sequence_id += 1
        it.send(TAKE)  # the next one begins once this one has ended
        it.read_until(
            lambda output: [sent.message_type for sent in output.messages].count(MessageType.SNAPSHOT_END) == 2
        )
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(Busy), it.address)
    done.set()
    types = types_of(it.output)
    begin, end = types.index(MessageType.SNAPSHOT_BEGIN), types.index(MessageType.SNAPSHOT_END)
    between = it.output.messages[begin + 1 : end]
    chunks = [sent.data for sent in between if sent.message_type == MessageType.SNAPSHOT_CHUNK]
    assert {sent.message_type for sent in between} == {MessageType.SNAPSHOT_CHUNK, MessageType.STREAM_BATCH}
    assert max(map(len, chunks)) <= CHUNK_SIZE_BYTES_MAX
    assert it.output.calls[0] == ("sink", 2, (0, "before"))
    assert types.index(MessageType.STREAM_BATCH) < begin
    recovered = recover(Busy, b"".join(chunks)).dispatcher.instance
    assert recovered.texts == {key: f"{key:1024}" for key in range(count)} | {0: "before"}
    second = [sent.data for sent in it.output.messages[end:] if sent.message_type == MessageType.SNAPSHOT_CHUNK]
    assert recover(Busy, b"".join(second)).dispatcher.instance.texts[1].startswith("behind")
    assert reason_of(it.output) == ""
    assert no_child_is_left()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("app", [Pickled, Own])
def test_other_serializers(app: type) -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        it.read_until(snapshot_ended)
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(app), it.address)
    recovered = recover(app, snapshot_of(it.output)).dispatcher.instance
    assert recovered.texts == {0: "a"}
    assert app is Own or recovered.seen == {"a": 2, "b": 1}


def test_a_child_that_is_killed_ends_its_snapshot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[int] = []
    fork = os.fork

    def noting_fork() -> int:
        child = fork()
        children.append(child)
        return child

    monkeypatch.setattr(os, "fork", noting_fork)

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        it.read_until(snapshot_begun)
        it.send(logged(2, [call(2, 1, "b")]))  # handled behind the fork
        it.read_until(lambda output: output.calls_count == 2)
        os.kill(children[0], signal.SIGKILL)
        it.read_until(snapshot_ended)
        it.send(logged(3, [call(2, 1, "c")]))
        it.read_until(lambda output: output.calls_count == 3)
        it.send(GOODBYE)

    with coordinator(script) as it:
        assert run_connection(definition_of(WaitsInChild), it.address) == "stopping"
    assert reason_of(it.output) == "the process that encoded the state was killed by signal 9 before it was done"
    assert no_child_is_left()


PARENT = os.getpid()


class HangsInChild(Own):
    """As where another thread held a lock at the fork: nobody lets go of it in the child."""

    def checkpoint(self) -> bytes:
        if os.getpid() != PARENT:
            threading.Event().wait()
        return super().checkpoint()


def test_a_child_that_hangs_is_killed_and_the_next_checkpoint_is_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.state.snapshots, "SILENCE_S_MAX", 0.5)

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        it.read_until(snapshot_ended)
        it.send(logged(2, [call(2, 1, "b")]) + TAKE)
        it.read_until(lambda output: len(output.blobs) == 2)
        it.send(TAKE)  # and the one behind that again beside the handlers
        it.read_until(lambda output: types_of(output).count(MessageType.SNAPSHOT_END) == 2)
        it.send(GOODBYE)

    with coordinator(script) as it:
        assert run_connection(definition_of(HangsInChild), it.address) == "stopping"
    said = reason_of(it.output)
    assert said.startswith("the process that encoded the state said nothing for 0.5 s and was killed. ")
    assert said.endswith("The next checkpoint is encoded in the app")
    assert recover(HangsInChild, it.output.blobs[1]).dispatcher.instance.texts == {0: "a", 1: "b"}
    assert no_child_is_left()
    assert gc.get_freeze_count() == 0


def test_a_child_that_is_not_read_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(immortal.appsdk.state.snapshots.time, "monotonic", lambda: now_s[0])
    snapshot = Snapshot(lambda: (4 << 20, [bytes(4 << 20)]))  # more than its pipe holds
    try:
        now_s[0] += 10 * immortal.appsdk.state.snapshots.SILENCE_S_MAX
        snapshot.note_unread()
        received = 0
        while (data := snapshot.read()) != b"":
            received += len(data or b"")
            now_s[0] += immortal.appsdk.state.snapshots.SILENCE_S_MAX / 2 if data else 0
            if data is None:
                select.select([snapshot], [], [], WAIT_S)
    finally:
        snapshot.close()
    assert received == 4 << 20
    assert (snapshot.reason, snapshot.has_hung) == ("", False)


def test_a_child_ends_with_the_connection() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        it.read_until(snapshot_begun)

    with coordinator(script) as it, pytest.raises(Disconnected):
        run_connection(definition_of(WaitsInChild), it.address)
    assert no_child_is_left()
    assert gc.get_freeze_count() == 0


WAITING_APP = """
import threading
from immortal import Immortal, impulse

class Waiting(Immortal, checkpoint="fork"):
    started = False

    def checkpoint(self) -> bytes:
        if self.started:
            threading.Event().wait()
        return b""

    def restore(self, blob: bytes) -> None:
        pass

    @impulse(id=1)
    def start(self) -> None:
        self.started = True
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when it writes")
def test_a_child_ends_with_an_app_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING_APP)
    apps: list[subprocess.Popen[bytes]] = []

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1)]) + TAKE)
        it.read_until(snapshot_begun)
        app = apps[0]
        child = os.pidfd_open(int(Path(f"/proc/{app.pid}/task/{app.pid}/children").read_text()))
        app.kill()
        app.wait(WAIT_S)
        read_to_the_end(it)  # the child does not keep the connection open
        ended, _, _ = select.select([child], [], [], WAIT_S)
        os.close(child)
        assert ended

    with coordinator(script) as it:
        command = [sys.executable, "-m", "immortal.appsdk", "waiting:Waiting", "--address", it.address]
        apps.append(subprocess.Popen(command, cwd=tmp_path))
        try:
            it.join(WAIT_S)
        finally:
            apps[0].kill()
            apps[0].wait(WAIT_S)


def test_a_second_request_is_an_error() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE + TAKE)
        read_to_the_end(it)

    with coordinator(script) as it, pytest.raises(RemoteProtocolError, match="while another one is on its way"):
        run_connection(definition_of(WaitsInChild), it.address)
    assert no_child_is_left()


def test_a_state_that_can_not_be_saved_ends_the_app_as_it_does_inline() -> None:
    class CarelessInline(Careless, checkpoint="inline"):
        pass

    texts = []

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(3)]) + TAKE)
        read_to_the_end(it)

    for app in (Careless, CarelessInline):
        with coordinator(script) as it, pytest.raises(StateError) as caught:
            run_connection(definition_of(app), it.address)
        assert caught.value.exit_status == EXIT_HANDLER_FAILED
        texts.append(str(caught.value).replace(app.__qualname__, "the app"))
    assert texts[0] == texts[1]
    assert "attribute 'surprise' is set but not annotated" in texts[0]
    assert no_child_is_left()


def test_a_failing_checkpoint_method_of_one_s_own() -> None:
    class Failing(Own):
        def checkpoint(self) -> bytes:
            if self.texts:
                raise ValueError("not today")
            return super().checkpoint()

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        read_to_the_end(it)

    with coordinator(script) as it, pytest.raises(StateError, match=r"(?s)checkpoint raised ValueError.*not today"):
        run_connection(definition_of(Failing), it.address)


def test_too_little_memory_ends_the_snapshot_only() -> None:
    class Hungry(Own):
        def checkpoint(self) -> bytes:
            if self.texts:
                raise MemoryError
            return super().checkpoint()

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        it.read_until(snapshot_ended)
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(Hungry), it.address)
    assert "not enough memory" in reason_of(it.output)


def test_a_process_that_can_not_be_started_ends_the_snapshot_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(2, 0, "a")]) + TAKE)
        it.read_until(snapshot_ended)
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(Store), it.address)
    assert "could not be started: [Errno 11]" in reason_of(it.output)
    assert gc.get_freeze_count() == 0


def test_a_coordinator_that_does_not_read_holds_up_the_child_not_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    last, relayed = 300, [0]
    all_handled = threading.Event()

    class Watched(Store):
        @rpc(id=2)
        def put(self, key: int, text: str) -> None:
            if key == last:
                all_handled.set()

    class Counting(Snapshot):
        def read(self) -> bytes | None:
            chunk = super().read()
            relayed[0] += len(chunk or b"")
            return chunk

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, 40_000)]) + TAKE)  # 39 MiB: more than the sockets and the pending chunks hold
        it.read_until(snapshot_begun)
        for key in range(2, last + 1):
            it.send(logged(key, [call(2, key, "a")]))
        assert all_handled.wait(WAIT_S)
        assert relayed[0] < 20 << 20
        it.read_until(snapshot_ended)
        assert relayed[0] == len(snapshot_of(it.output)) > 38 << 20
        it.send(GOODBYE)

    monkeypatch.setattr(immortal.appsdk.running.app_loop, "Snapshot", Counting)
    with coordinator(script) as it:
        run_connection(definition_of(Watched), it.address)
    assert reason_of(it.output) == ""
