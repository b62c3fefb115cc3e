"""Replays with real apps in processes of their own, over logs that the same classes made in this process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.instances.registry import Registry
from immortal.log import LogReader, create_log, open_reader, verify_value
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import (
    MessageType,
    decode_messages,
    encode_attach_to,
    encode_incoming_rpc,
    encode_outgoing_rpc,
)
from immortal.protocol.readers import Record, RecordReader
from immortal.protocol.record import decode_header
from immortal.protocol.trailer import Trailer
from immortal.replay import (
    BY_HAND,
    AppCommand,
    AppExitedError,
    ReplayError,
    ReplayPlan,
    ReplayResult,
    SharedSource,
    Sink,
    run_replay,
)
from immortal.replay.app_process import diff_states, show_state
from immortal.replay.plan import OWN_VERSION
from immortal.replay.session import KeptImpulses, Outputs
from immortal.replay.verify import verify_section
from tests.helpers.core import Driven, checkpoint, first_start, records
from tests.helpers.recorded import Instances, load_module, write_module

DEADLINE_S = 30.0
SOURCE = """
import os
import immortal
from immortal import Immortal, Impulses, impulse, on_primary, peer, rpc


class Counter(Immortal):
    words: dict[str, int]

    def __init__(self) -> None:
        self.words = {}

    @rpc
    def count(self, line: str) -> None:
        for word in line.split():
            self.words[word] = self.words.get(word, 0) + 1
        self.noted.fork(len(line))

    @rpc
    def noted(self, size: int) -> None:
        pass


class Reader(Immortal, on_error=os.environ.get("ON_ERROR", "undo")):
    counter = peer(Counter, "counter")
    lines: int
    seen_ns: int

    def __init__(self) -> None:
        self.lines = self.seen_ns = 0

    @impulse
    def line(self, text: str) -> None:
        if text == os.environ.get("RAISE_AT"):
            print("just before")
            raise ValueError(f"no {text}")
        if text == os.environ.get("EXIT_AT"):
            os._exit(9)
        self.lines += 1
        self.seen_ns = int(immortal.now().timestamp() * 1_000_000)
        for word in text.split():
            self.counter.count.fork(word)

    @on_primary
    def feed(self, impulses: Impulses) -> None:
        os._exit(66)  # a replay never makes the app primary
"""


def path_to(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def trailer_of(value: bytes) -> Trailer:
    header = decode_header(value)
    return verify_value(value, header.sequence_id, header.committer_id)[1]


class Recording(Sink):
    """Keeps all that it is told."""

    def __init__(self) -> None:
        self.made: dict[str, list[tuple[int, bytes, tuple[int, int] | None]]] = {}
        self.fed: list[int] = []
        self.kept: list[tuple[str, int, int]] = []

    def record(self, sequence_id: int, value: bytes, trailer: object) -> None:
        self.fed.append(sequence_id)

    def outputs(self, made: Outputs) -> None:
        made_by = [(one.sequence_id, one.message_index) for one in made.origins or () for _ in range(one.count)]
        assert not made_by or len(made_by) == made.count
        start = 0
        for index, (_, _, end) in enumerate(decode_messages(made.payload)):
            entry = (made.first_position + index, made.payload[start:end], made_by[index] if made_by else None)
            self.made.setdefault(made.destination, []).append(entry)
            start = end

    def impulses(self, kept: KeptImpulses) -> None:
        self.kept.append((kept.destination, kept.first_position, kept.count))


class Made:
    """The logs of a Reader that feeds a Counter; the last record of the Reader is 8."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module_name = write_module(folder, SOURCE)
        module: ModuleType = load_module(folder, self.module_name)
        instances = Instances(folder)
        counter = instances.start("counter", module.Counter)
        reader = instances.start("reader", module.Reader)
        for text in ("to be", "or not", "to be"):
            reader.impulse("line", text)
        reader.checkpoint()
        reader.impulses([("line", [f"that is {number}"]) for number in range(4)])
        reader.impulse("count", "from outside", to="counter")
        reader.impulse("line", "the question")
        reader.impulse("line", "end")
        self.lines, self.words = reader.app.lines, dict(counter.app.words)
        self.last_sequence_id = 6
        instances.close()

    def app(self, name: str = "Reader", **environment: str) -> AppCommand:
        command = AppCommand.of(f"{self.module_name}:{name}")
        return AppCommand(command.name, command.argv, {**command.environment, **path_to(self.folder), **environment})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("replay"))


@pytest.fixture
def reader(made: Made) -> Iterator[LogReader]:
    with open_reader(made.folder / "reader" / "log", "reader") as opened:
        yield opened


def replay(reader: LogReader, app: AppCommand, **plan: int | bool) -> tuple[ReplayResult, Recording]:
    sink = Recording()
    return run_replay(reader, ReplayPlan(**plan), app, sink), sink  # type: ignore[arg-type]


def positions(sink: Recording, destination: str = "counter") -> list[int]:
    return [position for position, _, _ in sink.made.get(destination, ())]


def test_a_replay_makes_the_same_calls_again_and_says_what_made_them(made: Made, reader: LogReader) -> None:
    result, sink = replay(reader, made.app(), checkpoint_id=1)
    assert sink.fed == list(range(7))
    assert (result.records, result.messages, result.exit_status) == (7, 10, 0)
    assert (result.first_sequence_id, result.last_sequence_id) == (0, 6)
    # Two words a line, three in record 4's; the impulse to the counter has position 19.
    assert positions(sink) == [*range(1, 19), *range(20, 23)]
    assert sink.kept == [("counter", 19, 1)]
    made_by = [origin for _, _, origin in sink.made["counter"]]
    expected = [(sequence_id, 0) for sequence_id in (1, 1, 2, 2, 3, 3)]
    expected += [(4, message) for message in range(4) for _ in range(3)] + [(5, 0), (5, 0), (6, 0)]
    assert made_by == expected
    (mark,) = [mark for value in reader.values(6, 6) for mark in trailer_of(value).outputs]
    assert mark.position == 21  # what was made behind record 5
    upto = [message for position, message, _ in sink.made["counter"] if position <= mark.position]
    assert crc64(b"".join(upto)) == mark.checksum
    assert result.description is not None
    assert sorted(result.description.methods.values()) == [
        "Counter.count",
        "Counter.noted",
        "Reader.initial",
        "Reader.line",
    ]
    assert result.label == f"{made.module_name}:Reader"


def test_the_state_at_the_end_is_the_one_that_there_was(made: Made, reader: LogReader, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    result = run_replay(reader, ReplayPlan(checkpoint_id=1, last_sequence_id=3), made.app(), Sink(), blob_path=blob)
    second = reader.summary().checkpoints[1]
    assert (result.blob_size_bytes, result.blob_check) == (second.size_bytes, second.check)
    assert blob.read_bytes() == b"".join(reader.checkpoint_chunks(second.checkpoint_id))
    assert result.blob_path == blob


def test_the_state_can_be_looked_into(
    made: Made, reader: LogReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(made.folder), prepend=os.pathsep)
    app = f"{made.module_name}:Reader"
    old, new = tmp_path / "old", tmp_path / "new"
    run_replay(reader, ReplayPlan(last_sequence_id=4, last_message=1), made.app(), Sink(), blob_path=old)
    run_replay(reader, ReplayPlan(), made.app(), Sink(), blob_path=new)
    shown = show_state(app, old)
    assert (shown["sequence_id"], shown["state"]["lines"]) == (4, 5)
    assert {"path": "lines", "old": 5, "new": made.lines} in diff_states(app, old, app, new)
    assert diff_states(app, new, app, new) == []
    new.write_bytes(b"no state")
    with pytest.raises(ReplayError, match=r"the state can't be inspected: .*8 bytes"):
        show_state(app, new)


@pytest.mark.parametrize("message", [0, 2])
def test_it_can_end_in_the_middle_of_a_record(made: Made, reader: LogReader, message: int) -> None:
    result, sink = replay(reader, made.app(), last_sequence_id=4, last_message=message)
    assert result.messages == message + 1
    assert positions(sink) == list(range(7, 7 + 3 * (message + 1)))


def test_calls_to_oneself_are_outputs_too(made: Made) -> None:
    with open_reader(made.folder / "counter" / "log", "counter") as reader:
        result, sink = replay(reader, made.app("Counter"), checkpoint_id=1)
    assert result.failure is None
    assert len(sink.made[""]) == sum(made.words.values()) - len(["from", "outside"]) + 1
    assert positions(sink, "") == list(range(1, len(sink.made[""]) + 1))


def test_a_call_that_fails_now_is_a_result_and_the_replay_goes_on(made: Made, reader: LogReader) -> None:
    whole, _ = replay(reader, made.app(), checkpoint_id=1)
    result, _ = replay(reader, made.app(RAISE_AT="that is 2"), checkpoint_id=1)
    assert result.failure is None
    (verdict,) = result.news
    assert (verdict.sequence_id, verdict.message_index, verdict.method) == (4, 2, "Reader.line")
    assert (verdict.type_name, verdict.text, verdict.message) == ("ValueError", "no that is 2", b"")
    assert "in line" in verdict.trace
    assert (result.exit_status, result.last_sequence_id) == (0, whole.last_sequence_id)
    assert result.warnings == []  # of the code: a call that fails is told in its own way
    assert whole.news == []


def test_a_handler_that_stops_its_app_is_a_result(made: Made, reader: LogReader) -> None:
    result, sink = replay(reader, made.app(RAISE_AT="that is 2", ON_ERROR="stop"), checkpoint_id=1)
    assert result.failure is not None
    assert (result.failure.sequence_id, result.failure.message_index) == (4, 2)
    assert "ValueError: no that is 2" in result.failure.text
    assert result.exit_status == 70
    assert result.blob_size_bytes is None
    assert "just before" in result.stderr_tail
    assert positions(sink) == list(range(1, 13))  # all that was made before


def test_an_app_that_dies_says_what_it_died_of(made: Made, reader: LogReader) -> None:
    with pytest.raises(AppExitedError) as raised:
        replay(reader, made.app(EXIT_AT="end"))
    assert raised.value.exit_status == 9
    assert "ended with status 9 before the replay was complete" in str(raised.value)


def test_an_app_that_cannot_be_found(made: Made, reader: LogReader) -> None:
    with pytest.raises(AppExitedError, match=r"status 2 before the replay was complete; it said:\n.*has no 'Missing'"):
        replay(reader, made.app("Missing"))
    with pytest.raises(ReplayError, match="the app x can't be started: /nonexistent/program: No such file"):
        replay(reader, AppCommand("x", ["/nonexistent/program"]))


def test_the_wrong_app_for_the_log(made: Made, reader: LogReader) -> None:
    with pytest.raises(AppExitedError, match="'Reader', this is 'Counter'"):
        replay(reader, made.app("Counter"))


def test_an_app_whose_looker_on_fails_is_gone(made: Made, reader: LogReader, tmp_path: Path) -> None:
    class Failing(Sink):
        def outputs(self, *arguments: object) -> None:
            raise ZeroDivisionError

    pid_file = tmp_path / "pid"
    script = f"import os, runpy, sys; open({str(pid_file)!r}, 'w').write(str(os.getpid())); sys.argv.pop(0);"
    script += "runpy.run_module('immortal.appsdk', run_name='__main__', alter_sys=True)"
    app = made.app()
    command = AppCommand(app.name, [sys.executable, "-c", script, *app.argv[3:]], app.environment)
    with pytest.raises(ZeroDivisionError):
        run_replay(reader, ReplayPlan(checkpoint_id=1), command, Failing())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


STRANGERS = """
import os, runpy, socket, sys
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, encode_hello
path = sys.argv[sys.argv.index("--address") + 1].removeprefix("unix:")

def stranger():
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    return made

secret = open(os.environ["IMMORTAL_APP_SECRET_FILE"], "rb").read().strip()
assert secret not in " ".join(sys.argv).encode()
silent = stranger()
for said, answer in (
    (b"\\x02\\x09", b""),
    (encode_hello(Hello(ALL_EXTENSIONS, "x")), b"must prove that it knows its secret"),
    (encode_hello(Hello(ALL_EXTENSIONS, "x", secret)), b"must not send it"),
):
    with stranger() as one:
        one.sendall(said)
        heard = b""
        while piece := one.recv(1000):
            heard += piece
    assert answer in heard and bool(answer) == bool(heard), heard
for name in (path, os.environ["IMMORTAL_APP_SECRET_FILE"], os.path.dirname(path)):
    assert not os.stat(name).st_mode & 0o077, name
sys.argv.pop(0)
runpy.run_module("immortal.appsdk", run_name="__main__", alter_sys=True)
"""


def test_only_the_app_that_was_started_is_served(made: Made, reader: LogReader) -> None:
    """Others come before it: one says nothing, others no Hello, no proof, the secret itself."""
    app = made.app()
    command = AppCommand(app.name, [sys.executable, "-c", STRANGERS, *app.argv[3:]], app.environment)
    result, sink = replay(reader, command, checkpoint_id=1)
    assert (result.messages, result.exit_status) == (10, 0), result.stderr_tail
    assert positions(sink) == [*range(1, 19), *range(20, 23)]


def test_two_replays_share_one_reader(made: Made, reader: LogReader) -> None:
    shared = SharedSource(reader)
    sinks = [Recording(), Recording()]

    def run(sink: Sink) -> None:
        run_replay(shared, ReplayPlan(checkpoint_id=1), made.app(), sink)

    threads = [threading.Thread(target=run, args=(sink,)) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sinks[0].made == sinks[1].made != {}


def test_following_goes_on_with_what_is_logged_meanwhile(tmp_path: Path) -> None:
    """The log is written by this process, so the one that follows is a process of its own."""
    made = Made(tmp_path)
    follower = f"""
import sys
from pathlib import Path
from immortal.log import open_reader
from immortal.replay import AppCommand, ReplayPlan, Sink, run_replay

class Told(Sink):
    def record(self, sequence_id, value, trailer):
        print(sequence_id, flush=True)

with open_reader(Path({str(tmp_path)!r}) / "reader" / "log", "reader") as reader:
    plan = ReplayPlan(last_sequence_id=8, follow=True)
    result = run_replay(reader, plan, AppCommand.of("{made.module_name}:Reader"), Told())
    print(result.last_sequence_id, result.records)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", follower],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **made.app().environment},
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["4\n", "5\n", "6\n"]
        instances = Instances(tmp_path)
        module = sys.modules[made.module_name]
        app = instances.start("reader", module.Reader)
        app.impulse("line", "late")
        app.impulse("line", "later")
        assert process.stdout.read() == "7\n8\n8 5\n"
        assert process.wait(DEADLINE_S) == 0
        instances.close()
    finally:
        process.kill()
        process.wait()


# --- apps that are started by hand ------------------------------------------------------------------------------------


class BaseApp(threading.Thread):
    """Knows the base protocol alone: restores, adds up what it is called with, tells ``b``, and gives its state."""

    def __init__(self, address: str, *, says: bytes = b"") -> None:
        super().__init__(daemon=True)
        self.address = address
        host, _, port = address.rpartition(":")
        self.connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        self.says = says
        self.got = bytearray()
        self.types: list[int] = []
        self.start()

    def run(self) -> None:
        reader = RecordReader()
        with self.connection, contextlib.suppress(OSError):  # it is left alone once all is seen
            self.connection.sendall(self.says)
            while data := self.connection.recv(1 << 16):
                self.got += data
                reader.receive_data(data)
                while (event := reader.next_event()) is not None:
                    if not isinstance(event, Record):
                        continue
                    for message_type, _, _ in decode_messages(event.content):
                        self.types.append(message_type)
                        if message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
                            self.connection.sendall(checkpoint(b"state two"))
                        elif message_type == MessageType.RPC:
                            self.connection.sendall(encode_attach_to("b") + encode_outgoing_rpc("b", 3, 1, b"again"))


@pytest.fixture
def base_log(tmp_path: Path) -> Path:
    """The log of an app of the base protocol: record 0, a checkpoint behind it, then a call from a peer."""
    folder = tmp_path / "log"
    store = create_log(folder, "a")
    driven = Driven(store)  # type: ignore[arg-type]
    driven.connect()
    driven.data(first_start())
    driven.settle()
    driven.greeted("token")
    driven.batch("token", 1, encode_incoming_rpc(3, 1, b"x"))
    assert [record.header.sequence_id for record in records(bytes(driven.app_bytes))] == [1]
    store.close()
    return folder


def by_hand(
    folder: Path, says: bytes = b"", ports: tuple[int, int | None] | None = None, plan: ReplayPlan | None = None
) -> tuple[ReplayResult, Recording, BaseApp]:
    apps: list[BaseApp] = []
    sink = Recording()
    registry = Registry(folder / "home")
    settings = registry.load("a") if registry.names() else registry.register("a", "tcp://127.0.0.1:*", app_auth="none")
    with open_reader(folder, "a") as reader:
        result = run_replay(
            reader,
            plan or ReplayPlan(),
            AppCommand.of(BY_HAND, settings=settings, ports=ports),
            sink,
            announce=lambda address: apps.append(BaseApp(address, says=says)),
        )
    return result, sink, apps[0]


def test_an_app_of_the_base_protocol_that_is_started_by_hand(base_log: Path) -> None:
    result, sink, app = by_hand(base_log)
    app.join(DEADLINE_S)
    assert (result.records, result.exit_status, result.flushed) == (2, None, False)
    assert result.blob_size_bytes == len(b"state two")
    assert [(position, made_by) for position, _, made_by in sink.made["b"]] == [(1, None)]
    assert b"state one" in app.got


def test_a_what_if_of_an_upgrade_sends_what_the_protocol_says_and_nothing_more(base_log: Path) -> None:
    plan = ReplayPlan(checkpoint_id=1, upgrade_to=OWN_VERSION)
    result, sink, app = by_hand(base_log, plan=plan)
    app.join(DEADLINE_S)
    assert app.types == [MessageType.UPGRADE_SERVICE, MessageType.INITIAL_MESSAGE, MessageType.RPC]
    assert app.got.count(b"state one") == 1
    assert [position for position, _, _ in sink.made["b"]] == [1]
    assert (result.blob_check, result.blob_path, result.failure) == (None, None, None)


def test_an_app_that_is_started_by_hand_comes_in_at_the_port_that_is_asked_for(base_log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ReplayError, match=f"can't wait for the app at 127.0.0.1:{port}: Address already in use"):
            by_hand(base_log, ports=(port, None))
    with pytest.raises(ReplayError, match="has one port for both ways"):
        by_hand(base_log, ports=(port, port))
    _, _, app = by_hand(base_log, ports=(port, None))
    assert app.address == f"127.0.0.1:{port}"
    with pytest.raises(ReplayError, match="use it with --app -"):
        AppCommand.of("shop:Shop", ports=(port, None))


class EndingApp(BaseApp):
    """Ends where it is called by a peer."""

    def run(self) -> None:
        reader = RecordReader()
        with self.connection, contextlib.suppress(OSError):
            while data := self.connection.recv(1 << 16):
                reader.receive_data(data)
                while (event := reader.next_event()) is not None:
                    if not isinstance(event, Record):
                        continue
                    for message_type, _, _ in decode_messages(event.content):
                        if message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
                            self.connection.sendall(checkpoint(b"state two"))
                        elif message_type == MessageType.RPC:
                            return


def test_an_app_that_is_started_by_hand_and_ends_at_the_last_record(base_log: Path) -> None:
    settings = Registry(base_log / "home").register("a", "tcp://127.0.0.1:*", app_auth="none")
    started: list[EndingApp] = []
    with open_reader(base_log, "a") as reader:
        last = reader.last_sequence_id()
        section = verify_section(
            reader,
            reader.summary().checkpoints[0],
            None,
            AppCommand.of(BY_HAND, settings=settings),
            announce=lambda address: started.append(EndingApp(address)),
        )
    assert section.ended is not None
    assert (section.ended.sequence_id, section.result.last_sequence_id) == (last, last - 1)
    assert len(started) == 3, "once as it was, once to see where, once to compare"


def test_an_app_that_breaks_the_protocol_is_told_apart(base_log: Path) -> None:
    with pytest.raises(AppProtocolError, match="type 9, which has no place in a replay"):
        by_hand(base_log, says=b"\x02\x09")


# --- memory -----------------------------------------------------------------------------------------------------------

FOUNTAIN = """
from immortal import Immortal, impulse, peer, rpc


class Sponge(Immortal):
    @rpc
    def soak(self, data: bytes) -> None: ...


class Fountain(Immortal):
    sponge = peer(Sponge, "sponge")

    @impulse
    def gush(self, data: bytes) -> None:
        self.sponge.soak.fork(data)
"""
LOOKER_ON = """
import sys
from pathlib import Path
from immortal.log import open_reader
from immortal.replay import AppCommand, ReplayPlan, Sink, run_replay

class Slow(Sink):
    made_bytes = 0

    def outputs(self, made):
        self.made_bytes += len(made.payload)
        sum(made.payload[:200_000])  # slower than the app

def peak_kib():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return int(line.split()[1])

folder, app = sys.argv[1:]
with open_reader(Path(folder)) as reader:
    before, sink = peak_kib(), Slow()
    result = run_replay(reader, ReplayPlan(checkpoint_id=1), AppCommand.of(app), sink)
    print(result.messages, sink.made_bytes, peak_kib() - before)
"""


def test_memory_is_bounded_whatever_the_size_of_the_log(tmp_path: Path) -> None:
    name = write_module(tmp_path, FOUNTAIN)
    module = load_module(tmp_path, name)
    # None of it is spilled to the log: looking at that maps more of the file for a moment.
    instances = Instances(tmp_path, limits=Limits(output_memory_bytes=1 << 30))
    fountain = instances.start("fountain", module.Fountain)
    for _ in range(128):
        fountain.impulse("gush", bytes(1 << 20))
    instances.close()
    done = subprocess.run(
        [sys.executable, "-c", LOOKER_ON, str(tmp_path / "fountain" / "log"), f"{name}:Fountain"],
        env={**os.environ, **path_to(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    messages, made_bytes, grown_kib = map(int, done.stdout.split())
    assert messages == 129
    assert made_bytes > 128 << 20
    assert grown_kib < 80 << 10, f"{grown_kib} KiB more for a log of 128 MiB"
