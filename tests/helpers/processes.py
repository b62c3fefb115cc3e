"""Real coordinators as processes, and small apps on real sockets. All waits are for a condition, up to a deadline."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from immortal.appsdk.running.transport import authenticate
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances.registry import HOME_VARIABLE, Registry
from immortal.coordinator.operator import control
from immortal.protocol.batch import decode_batch
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, decode_impulses_accepted, encode_hello
from immortal.protocol.messages import (
    MessageType,
    RpcType,
    decode_incoming_rpc,
    decode_messages,
    encode_attach_to,
    encode_checkpoint,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.readers import BlobData, BlobStart, RecordReader

DEADLINE_S = 20.0
LOOK_S = 0.02  # between two checks of a condition without events
FORWARD, TOLD = 1, 2  # methods: send the same number to the peer; receive it
BASE_TYPES = frozenset({0, 1, 2, 5, 8, 9, 11})


class CoordinatorProcess:
    """Process of `coordinator NAME`, and its log lines."""

    def __init__(self, settings: InstanceSettings, home: Path, *options: str, started: bool = True) -> None:
        self.settings = settings
        command = [sys.executable, "-m", "immortal", "coordinator", settings.name, *options]
        environment = {**os.environ, HOME_VARIABLE: str(home)}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if started:
            self.line("coordinator started")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self.lines.append("")  # the end
            self._changed.notify_all()

    def line(self, text: str, count: int = 1) -> str:
        """Return the ``count``-th line with ``text``, once it is there."""

        def there() -> bool:
            return self.count(text) >= count or self.lines[-1:] == [""]

        with self._changed:
            assert self._changed.wait_for(there, DEADLINE_S), f"no line with {text!r} came: {self.lines}"
            assert self.count(text) >= count, f"the coordinator ended without a line with {text!r}: {self.lines}"
            return [line for line in self.lines if text in line][count - 1]

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)

    def ended(self) -> tuple[int, list[str]]:
        """Return the exit status and all lines, once the process has ended by itself."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status, [line for line in self.lines if line]

    def failed(self, expected: int = 1) -> str:
        """Wait for the end with that status; return the last line of an error."""
        status, lines = self.ended()
        assert status == expected, (status, lines)
        assert not any("Traceback" in line for line in lines), lines
        errors = [line for line in lines if " error " in line or line.startswith("error: ")]
        return errors[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def pause(self) -> None:
        """Stop the process (SIGSTOP) until :meth:`resume`; bytes sent to it wait in its sockets."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        return control.query(self.settings.folder, "status")

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first status for which ``condition`` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, f"it does not come about: {status}\n{self.lines}"
        return status


class SocketApp:
    """Deterministic app: it keeps the numbers that it is called with, and forwards some of them to ``peer``.

    ``extended``: it says Hello and asks for all extensions. Otherwise it knows the base protocol; all else fails the
    test.
    """

    def __init__(
        self,
        settings: InstanceSettings,
        neighbours: list[SocketApp],
        *,
        peer: str = "",
        extended: bool = False,
        fixed_width: bool = False,
        secret: bytes = b"",
    ) -> None:
        neighbours.append(self)
        self.neighbours = neighbours
        self.socket = self.connected(settings)
        self.reader = RecordReader()
        self.peer, self.extended, self.fixed_width = peer, extended, fixed_width
        self.attached = False
        self.blob: list[bytes] | None = None
        self.state: dict[str, Any] = {}
        self.restored_from: dict[str, Any] | None = None
        self.primary = False
        self.closed = False
        self.accepted = 0
        self.goodbye = self.refusal = ""
        self.types: set[int] = set()
        self.gives_checkpoints = True
        if secret:
            authenticate(self.socket, secret, "the test's coordinator")
            self.socket.settimeout(DEADLINE_S)
        if extended:
            self.send(encode_hello(Hello(ALL_EXTENSIONS, "test")))

    def connected(self, settings: InstanceSettings) -> socket.socket:
        return socket.create_connection((settings.app_host, settings.app_port), timeout=DEADLINE_S)

    # --- speaking ----------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def impulse(self, number: int, method: int = FORWARD, padding: int = 0) -> None:
        argument = number.to_bytes(4, "little") + bytes(padding)
        self.send(encode_outgoing_rpc("", method, RpcType.IMPULSE, argument))

    def _forward(self, number: int) -> None:
        if not self.attached:
            self.attached = True
            self.send(encode_attach_to(self.peer))
        self.send(encode_outgoing_rpc(self.peer, TOLD, RpcType.FORK, number.to_bytes(4, "little")))

    def checkpoint(self) -> None:
        blob = json.dumps(self.state).encode()
        if self.fixed_width:
            self.send(encode_message(MessageType.CHECKPOINT, len(blob).to_bytes(8, "little")) + blob)
        else:
            self.send(encode_checkpoint(len(blob)) + blob)

    # --- listening ---------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool]) -> SocketApp:
        """Let all apps handle their input until ``condition`` holds."""
        while not condition():
            assert not self.closed, f"the connection ended: {self.state} {self.refusal}"
            self.turn()
        return self

    def serve_until(self, condition: Callable[[], bool]) -> None:
        """Serve as until(), for a condition that no app's input announces."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"it does not come about: {self.state}"
            if select.select([self.socket], [], [], LOOK_S)[0]:
                self.receive()

    def turn(self) -> None:
        """Let all apps of the test handle their input; at least one has some."""
        alive = [app for app in self.neighbours if not app.closed]
        ready, _, _ = select.select([app.socket for app in alive], [], [], DEADLINE_S)
        assert ready, f"nothing more comes in: {[(app.state, app.types) for app in alive]}"
        for app in alive:
            if app.socket in ready:
                app.receive()

    def ready(self) -> SocketApp:
        """Wait until the app is primary and has got its initial message back."""
        return self.until(lambda: self.primary and bool(self.state.get("begun")))

    def until_closed(self) -> SocketApp:
        while not self.closed:
            self.turn()
        return self

    def receive(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self.close()
            return
        self.reader.receive_data(data)
        while (event := self.reader.next_event()) is not None:
            if isinstance(event, BlobStart):
                self.types.add(MessageType.CHECKPOINT)
                self.blob = []
            elif isinstance(event, BlobData):
                assert self.blob is not None
                self.blob.append(event.data)
                if event.last:
                    self.state = json.loads(b"".join(self.blob))
                    self.restored_from = json.loads(b"".join(self.blob))
            else:
                if event.header.sequence_id >= 0:
                    assert event.header.sequence_id == self.state["sequence_id"] + 1
                    self.state["sequence_id"] += 1
                for message_type, start, end in decode_messages(event.content):
                    self._message(message_type, event.content[start:end])

    def _message(self, message_type: int, data: bytes) -> None:
        self.types.add(message_type)
        assert self.extended or message_type in BASE_TYPES, f"a base app was sent type {message_type}"
        if message_type == MessageType.RPC:
            self._called(data)
        elif message_type == MessageType.RPC_BATCH:
            body = data[decode_batch(data)[1] :]
            for _, start, end in decode_messages(body):
                self._called(body[start:end])
        elif message_type == MessageType.INITIAL_MESSAGE:
            assert (data, self.state["begun"]) == (b"begin", False)
            self.state["begun"] = True
        elif message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
            if not self.state:
                self.state = {"sequence_id": -1, "begun": False, "forwarded": [], "told": []}
                self.send(encode_message(MessageType.INITIAL_MESSAGE, b"begin"))
            self.checkpoint()
            self.primary = True
        elif message_type == MessageType.TAKE_CHECKPOINT:
            if self.gives_checkpoints:
                self.checkpoint()
        elif message_type == MessageType.IMPULSES_ACCEPTED:
            self.accepted = decode_impulses_accepted(data)
        elif message_type == MessageType.GOODBYE:
            self.goodbye = data.decode()
        elif message_type == MessageType.REFUSAL:
            self.refusal = data.decode()

    def _called(self, data: bytes) -> None:
        rpc = decode_incoming_rpc(data)
        number = int.from_bytes(rpc.arguments[:4], "little")
        if rpc.method_id == TOLD:
            self.state["told"].append(number)
            return
        self.state["forwarded"].append(number)
        if self.peer:
            self._forward(number)

    def close(self) -> None:
        self.closed = True
        self.socket.close()


class House:
    """Instances of one test, which stops all that it starts."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.registry = Registry(home)
        self._processes: list[CoordinatorProcess] = []
        self._apps: list[SocketApp] = []

    def register(self, *names: str, **options: Any) -> None:
        options = {"app_auth": "none", **options}  # the apps of these tests can know only the base protocol
        for name in names:
            self.registry.register(name, "tcp://127.0.0.1:*", **options)

    def settings(self, name: str) -> InstanceSettings:
        return self.registry.load(name)

    def start(self, name: str, *options: str, started: bool = True) -> CoordinatorProcess:
        process = CoordinatorProcess(self.settings(name), self.home, *options, started=started)
        self._processes.append(process)
        return process

    def app(self, name: str, kind: type[SocketApp] = SocketApp, **options: Any) -> SocketApp:
        return kind(self.settings(name), self._apps, **options)

    def both(self, name: str, **options: Any) -> tuple[CoordinatorProcess, SocketApp]:
        """Start a registered instance, up to normal processing."""
        process = self.start(name)
        return process, self.app(name, **options).ready()

    def close(self) -> None:
        for app in self._apps:
            app.close()
        for process in self._processes:
            if process.process.poll() is None:
                process.kill()
            assert process.process.stderr is not None
            process.process.stderr.close()
