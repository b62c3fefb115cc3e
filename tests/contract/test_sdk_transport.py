"""The app over a real loopback socket, against a small coordinator that is scripted here, in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

import immortal
import immortal.appsdk.calls.outbox
import immortal.appsdk.running.transport
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.runner import run_connection
from immortal.appsdk.running.transport import connect
from immortal.errors import EXIT_FAILED, EXIT_NOT_RUNNABLE, ConnectError, Disconnected, HandlerError, HookError, Refused
from immortal.protocol.messages import MessageType, RpcType
from tests.helpers.sdk import GOODBYE, TAKE_FIRST, WAIT_S, Script, ScriptedCoordinator, coordinator
from tests.helpers.wire import accepted, call, checkpoint_record, control, logged


class Counter(Immortal):
    lines: int

    def __init__(self) -> None:
        self.lines = 0

    @rpc(id=1)
    def count(self, line: str) -> None:
        self.lines += 1


class Relay(Counter):
    counter = peer(Counter, "counter")

    @rpc(id=1)
    def count(self, line: str) -> None:
        self.lines += 1
        self.counter.count.fork(line)
        if line == "bad":
            raise ValueError("bad line")


class Feeder(Counter):
    @impulse(id=2)
    def line(self, text: str) -> None:
        self.lines += 1

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        for number in range(self.lines, 10):
            impulses.line(str(number))
        impulses.flush()
        impulses.line("done")


class FailingFeeder(Counter):
    @on_primary
    def feed(self, impulses: Impulses) -> None:
        raise FileNotFoundError("no input")


def test_a_life_over_a_socket() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "x" * 10)] * 50_000) + control(MessageType.TAKE_CHECKPOINT))
        it.read_until(lambda output: len(output.blobs) == 2)
        it.send(GOODBYE)

    with coordinator(script) as it:
        assert run_connection(definition_of(Relay), it.address) == "stopping"
    assert len(it.output.calls) == 50_000
    assert it.output.messages[-1].message_type == MessageType.CHECKPOINT
    first_life = it.output

    def recovery(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(first_life.blobs[1]) + logged(2, [call(1, "y")]) + TAKE_FIRST)
        it.read_until(lambda output: len(output.blobs) == 1)
        it.send(GOODBYE)

    with coordinator(recovery) as it:
        run_connection(definition_of(Relay), it.address)
    assert it.output.calls == [("counter", 1, ("y",))]


def test_impulses_of_a_hook_and_their_acceptance() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.read_until(lambda output: output.calls_count == 10)
        assert all(rpc_type == RpcType.IMPULSE for sent in it.output.messages for _, rpc_type, _ in sent.calls)
        it.send(logged(1, [call(2, "0", rpc_type=RpcType.IMPULSE)] * 10) + accepted(10))
        it.read_until(lambda output: output.calls_count == 11)
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(Feeder), it.address)
    assert [arguments[0] for _, _, arguments in it.output.calls] == [*map(str, range(10)), "done"]


def test_a_hook_starts_after_the_replay_and_reads_the_state() -> None:
    blobs: list[bytes] = []

    def first(it: ScriptedCoordinator) -> None:
        it.send(TAKE_FIRST)
        it.read_until(lambda output: len(output.blobs) == 1)
        blobs.extend(it.output.blobs)

    def recovery(it: ScriptedCoordinator) -> None:
        it.send(checkpoint_record(blobs[0]) + logged(0, [call(2, "x")] * 7) + TAKE_FIRST)
        it.read_until(lambda output: output.calls_count == 3)
        it.send(GOODBYE)

    with coordinator(first) as it, pytest.raises(Disconnected):
        run_connection(definition_of(Feeder), it.address)
    with coordinator(recovery) as it:
        run_connection(definition_of(Feeder), it.address)
    assert [arguments[0] for _, _, arguments in it.output.calls] == ["7", "8", "9"]


class Sleeper(Counter):
    counter = peer(Counter, "counter")

    @impulse(id=2)
    async def sleep_until(self, time_ns: int) -> None:
        await immortal.at(datetime.fromtimestamp(time_ns / 1e9, UTC))
        self.counter.count.fork("awake")


def test_a_timer_is_told_when_it_is_due_and_no_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.running.transport, "TIMER_WAIT_MS_MAX", int(10 * 1000 * WAIT_S))

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        begun_ns = time.time_ns()
        due_ns = begun_ns + 300_000_000
        it.send(logged(1, [call(2, due_ns, rpc_type=RpcType.IMPULSE)], begun_ns))
        it.read_until(lambda output: output.calls_count == 1)  # the time, as an impulse to oneself
        assert time.time_ns() >= due_ns
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(Sleeper), it.address)


def test_a_hook_that_raises_ends_the_app() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        with contextlib.suppress(EOFError, ConnectionError):
            it.read_until(lambda output: False)

    with coordinator(script) as it, pytest.raises(HookError, match=r"(?s)FailingFeeder.feed.*no input.*once\n  more"):
        run_connection(definition_of(FailingFeeder), it.address)


def test_refusal() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.send(control(MessageType.REFUSAL, b"another app is connected"))

    with coordinator(script) as it, pytest.raises(Refused, match="refuses: another app is connected"):
        run_connection(definition_of(Counter), it.address)


@pytest.mark.parametrize("cut", [0, 1, 23, 24, 30])
def test_the_end_without_a_word(cut: int) -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "a")])[:cut])

    words = "live and die together: start both again"
    with coordinator(script) as it, pytest.raises(Disconnected, match=words) as caught:
        run_connection(definition_of(Counter), it.address)
    assert ("in the middle of a record" in str(caught.value)) == (cut > 0)


def test_records_before_the_end_are_handled_and_a_goodbye_before_it_counts() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "a")] * 10_000) + GOODBYE)

    with coordinator(script) as it:
        assert run_connection(definition_of(Relay), it.address) == "stopping"


def test_a_handler_error_passes() -> None:
    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "bad")]))
        with contextlib.suppress(EOFError, ConnectionError):
            it.read_until(lambda output: False)

    with coordinator(script) as it, pytest.raises(HandlerError, match="bad line"):
        run_connection(definition_of(Relay), it.address)


def test_a_coordinator_that_does_not_read_stops_the_handlers_not_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app's output is stuck; it goes on when the coordinator reads again, and nothing is lost."""
    monkeypatch.setattr(immortal.appsdk.running.transport, "OUTPUT_PENDING_BYTES_MAX", 64 << 10)
    monkeypatch.setattr(immortal.appsdk.running.transport, "INPUT_BUFFERED_BYTES_MAX", 1 << 20)
    handled: list[str] = []

    class Watched(Relay):
        @rpc(id=1)
        def count(self, line: str) -> None:
            handled.append(line)
            self.counter.count.fork(line)

    count, size_bytes = 4_000, 10_000  # 40 MB: more than all socket buffers

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        record = logged(1, [call(1, "x" * size_bytes)] * count)
        sender = threading.Thread(target=it.send, args=(record,), daemon=True)
        sender.start()
        # It takes in what it can hold and no more: the sender is still stuck when handling has stopped.
        seen = -1
        while seen != len(handled) or not handled:
            seen = len(handled)
            sender.join(0.2)
        assert len(handled) < count
        it.read_until(lambda output: output.calls_count == count)
        sender.join(WAIT_S)
        it.send(GOODBYE)

    with coordinator(script) as it:
        run_connection(definition_of(Watched), it.address)


def test_a_goodbye_is_heard_while_output_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.running.transport, "OUTPUT_PENDING_BYTES_MAX", 64 << 10)

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        for sequence_id in range(1, 60):
            it.send(logged(sequence_id, [call(1, "x" * 10_000)] * 10))
        it.send(control(MessageType.REFUSAL, b"enough"))
        # closes with the app's output unread: the app's next send fails

    with coordinator(script) as it, pytest.raises((Refused, Disconnected)):
        run_connection(definition_of(Relay), it.address)


def test_the_end_frees_a_hook_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immortal.appsdk.calls.outbox, "IMPULSES_OUTSTANDING_MAX", 5)
    ended: list[BaseException] = []
    done = threading.Event()

    class Blocked(Feeder):
        @on_primary
        def feed(self, impulses: Impulses) -> None:
            try:
                super().feed(impulses)
            except Disconnected as error:
                ended.append(error)
                raise
            finally:
                done.set()

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.read_until(lambda output: output.calls_count == 5)

    with coordinator(script) as it, pytest.raises(Disconnected):
        run_connection(definition_of(Blocked), it.address)
    assert done.wait(WAIT_S)
    assert "start both again" in str(ended[0])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_connecting_goes_on_until_a_coordinator_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    listeners: list[socket.socket] = []
    attempts: list[float] = []

    def sleep(delay_s: float) -> None:
        attempts.append(delay_s)
        if len(attempts) == 3:
            listeners.append(socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))))

    monkeypatch.setattr(time, "sleep", sleep)
    connection = connect(address)
    assert attempts == [0.01, 0.02, 0.04]
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()
    listeners[0].close()


def test_connecting_has_an_end() -> None:
    address = f"127.0.0.1:{free_port()}"
    refused = "Connection refused|nobody listens there"
    with pytest.raises(
        ConnectError, match=rf"no coordinator at {address} for 0.05 s \(({refused})\).*immortal coordinator"
    ):
        connect(address, timeout_s=0.05)


@pytest.mark.parametrize("address", ["", "7001", "host:", "host:port", "host:0", "host:65536", ":7001"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConnectError, match="HOST:PORT was expected"):
        connect(address)


# --- the process ------------------------------------------------------------------------------------------------------

PROGRAM = """
from immortal import Immortal, rpc

class Counter(Immortal):
    lines: int

    def __init__(self) -> None:
        self.lines = 0

    @rpc(id=1)
    def count(self, line: str) -> None:
        self.lines += len({line: 1}["a"] if line == "bad" else line)

class NoApp:
    pass
"""


def start_app(folder: Path, target: str, address: str | None) -> subprocess.Popen[str]:
    (folder / "wordcount.py").write_text(PROGRAM)
    (folder / "broken.py").write_text("import wordcount\n1 / 0\n")
    (folder / "needs.py").write_text("import surely_not_there\n")
    environment = {name: value for name, value in os.environ.items() if name != "IMMORTAL_APP_ADDRESS"}
    if address:
        environment["IMMORTAL_APP_ADDRESS"] = address
    command = [sys.executable, "-m", "immortal.appsdk", target]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def finish(app: subprocess.Popen[str]) -> tuple[int, str]:
    _, text = app.communicate(timeout=WAIT_S)
    return app.returncode, text


def test_exit_statuses(tmp_path: Path) -> None:
    def goodbye(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(GOODBYE)

    def gone(it: ScriptedCoordinator) -> None:
        it.start_first()

    def refuse(it: ScriptedCoordinator) -> None:
        it.send(control(MessageType.REFUSAL, b"not you"))

    def bad_call(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "bad")]))
        with contextlib.suppress(EOFError, ConnectionError):
            it.read_until(lambda output: False)

    expected: list[tuple[Script, int, str]] = [
        (goodbye, 0, ""),
        (gone, 1, "start both again"),
        (refuse, 1, "app Counter: the coordinator at 127.0.0.1:"),
        (bad_call, 70, "KeyError: 'a'"),
    ]
    for script, status, words in expected:
        with coordinator(script) as it:
            returned, text = finish(start_app(tmp_path, "wordcount:Counter", it.address))
        assert returned == status, text
        assert words in text
        assert ("Traceback" in text) == (status == 70)
        if not words:
            assert text == ""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_app_quietly(tmp_path: Path, number: int, status: int) -> None:
    apps: list[subprocess.Popen[str]] = []

    def script(it: ScriptedCoordinator) -> None:
        it.start_first()
        it.send(logged(1, [call(1, "a")]) + control(MessageType.TAKE_CHECKPOINT))
        it.read_until(lambda output: len(output.blobs) == 2)
        apps[0].send_signal(number)
        with contextlib.suppress(EOFError, ConnectionError):
            it.read_until(lambda output: False)

    it = ScriptedCoordinator(script)
    apps.append(start_app(tmp_path, "wordcount:Counter", it.address))
    it.start()
    assert finish(apps[0]) == (status, "")
    it.join(WAIT_S)
    assert it.error is None


AT_ITS_END = """
import atexit, os, signal, sys
from immortal import Immortal
import immortal.appsdk.running.runner

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)

class Falls:
    __del__ = terminate

class Service(Immortal):
    pass

print("said")
place = os.environ["PLACE"]
if place == "said":  # while it says what has ended it
    immortal.appsdk.running.runner.print_message = terminate
elif place == "swallowed":  # where Python lets no exception through
    immortal.appsdk.running.runner.definition_of = lambda cls: Falls() and None
else:  # in Python's own last steps
    atexit.register(terminate)
immortal.appsdk.running.runner.run(Service)
"""


@pytest.mark.parametrize(("place", "status"), [("said", 143), ("swallowed", 143), ("python's end", EXIT_FAILED)])
def test_sigterm_ends_the_app_quietly_wherever_it_is(tmp_path: Path, place: str, status: int) -> None:
    environment = {**os.environ, "PLACE": place}
    environment.pop("IMMORTAL_APP_ADDRESS", None)
    (tmp_path / "service.py").write_text(AT_ITS_END)
    command = [sys.executable, "service.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert (ended.returncode, ended.stdout) == (status, "said\n")


@pytest.mark.parametrize(
    ("target", "words", "traceback"),
    [
        ("wordcount", "module:Class", False),
        ("nowhere:Counter", "there is no module 'nowhere'", False),
        ("wordcount:Total", "module 'wordcount' has no 'Total' (its apps: Counter)", False),
        ("wordcount:NoApp", "NoApp is not a class below immortal.Immortal", False),
        ("wordcount:Counter", "no address of a coordinator: set IMMORTAL_APP_ADDRESS", False),
        ("broken:Counter", "ZeroDivisionError", True),
        ("needs:Counter", "No module named 'surely_not_there'", True),
    ],
)
def test_mistakes_before_the_start(tmp_path: Path, target: str, words: str, traceback: bool) -> None:
    status, text = finish(start_app(tmp_path, target, None))
    assert status == (EXIT_FAILED if "no address" in words else EXIT_NOT_RUNNABLE)
    assert words in text
    assert ("Traceback" in text) == traceback
    assert "appsdk/" not in text
    assert "importlib" not in text
