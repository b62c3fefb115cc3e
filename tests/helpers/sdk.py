"""Other end of an app: a dispatcher driven by hand, and a small coordinator on a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import Event, OutputReady
from immortal.appsdk.effects.effect import EffectRunner
from immortal.appsdk.handlers.definition import definition_of
from immortal.protocol.extensions import encode_version
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from immortal.protocol.verdicts import Verdict, decode_verdict, encode_verdicts
from tests.helpers.wire import COMMITTER_ID, AppOutput, checkpoint_record, control, initial_record

WAIT_S = 20.0  # no test waits this long unless it fails
TAKE = control(MessageType.TAKE_CHECKPOINT)
TAKE_FIRST = control(MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT)
GOODBYE = control(MessageType.GOODBYE, b"stopping")
SEED = bytes(range(16))


def upgrade_record(version: int | None, message_type: int = MessageType.UPGRADE_TAKE_CHECKPOINT) -> bytes:
    """Return the control record that asks for an upgrade; without a version, as a base coordinator does."""
    content = b"" if version is None else encode_version(version)
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, content + encode_message(message_type))


@dataclass
class Life:
    """Dispatcher and its output."""

    dispatcher: Dispatcher
    output: AppOutput
    events: list[Event]

    @classmethod
    def of(cls, app: type, effects: EffectRunner | None = None, **more: Any) -> Life:
        return cls(Dispatcher(definition_of(app), lambda: SEED, effects=effects, **more), AppOutput(), [])

    def give(self, data: bytes, piece_size_bytes: int = 1 << 20) -> Any:
        for start in range(0, max(len(data), 1), piece_size_bytes):
            self.dispatcher.receive_data(data[start : start + piece_size_bytes])
            while True:
                event = self.dispatcher.next_event()
                for chunk in self.dispatcher.data_to_send():
                    self.output.receive_data(bytes(chunk))
                if event is None:
                    break
                if not isinstance(event, OutputReady):
                    self.events.append(event)
        return self.dispatcher.instance

    @property
    def verdicts(self) -> list[Verdict]:
        """Return the verdicts that the app has sent."""
        sent = [one for one in self.output.messages if one.message_type == MessageType.VERDICT]
        return [decode_verdict(one.data) for one in sent]

    @property
    def sent_types(self) -> list[int]:
        return [sent.message_type for sent in self.output.messages]


def verdicts_record(*verdicts: Verdict) -> bytes:
    """Return the record that a coordinator with verdicts sends before the first record."""
    return encode_record(COMMITTER_ID, CONTROL_SEQUENCE_ID, b"".join(encode_verdicts(verdicts)))


def first_start(
    app: type, piece_size_bytes: int = 1 << 20, *, effects: EffectRunner | None = None, **more: Any
) -> Life:
    """Start an app without verdicts, as beside a coordinator that keeps none: a failure stops the app."""
    life = Life.of(app, effects, **more)
    life.give(TAKE_FIRST, piece_size_bytes)
    life.give(initial_record(life.output.initial_message), piece_size_bytes)
    return life


def first_start_with_verdicts(app: type, name: str = "", **more: Any) -> Life:
    """Start an app beside a coordinator that keeps verdicts: a failure affects only its message."""
    life = Life.of(app, **more)
    life.give(verdicts_record() + TAKE_FIRST)
    life.give(initial_record(life.output.initial_message, name))
    return life


def recover(
    app: type,
    blob: bytes,
    *records: bytes,
    piece_size_bytes: int = 1 << 20,
    verdicts: Iterable[Verdict] | None = None,
    **more: Any,
) -> Life:
    """Recover an app. ``verdicts``: those in the log; None: the coordinator keeps none."""
    life = Life.of(app, **more)
    told = b"" if verdicts is None else verdicts_record(*verdicts)
    life.give(checkpoint_record(blob) + told + b"".join(records) + TAKE_FIRST, piece_size_bytes)
    return life


# --- over a socket ----------------------------------------------------------------------------------------------------

Script = Callable[["ScriptedCoordinator"], None]


class ScriptedCoordinator(threading.Thread):
    """Coordinator that listens, takes one app, runs the script, closes."""

    def __init__(self, script: Script) -> None:
        super().__init__(daemon=True)
        self._script = script
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.output = AppOutput()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.connection, _ = self.listener.accept()
            self.connection.settimeout(WAIT_S)
            self._script(self)
        except BaseException as error:
            self.error = error
        finally:
            with contextlib.suppress(AttributeError):
                self.connection.close()
            self.listener.close()

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def read_until(self, condition: Callable[[AppOutput], bool]) -> None:
        while not condition(self.output):
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError("the app has closed the connection")
            self.output.receive_data(data)

    def start_first(self) -> None:
        self.send(TAKE_FIRST)
        self.read_until(lambda output: len(output.blobs) == 1)
        self.send(initial_record(self.output.initial_message))


@contextlib.contextmanager
def coordinator(script: Script) -> Iterator[ScriptedCoordinator]:
    made = ScriptedCoordinator(script)
    made.start()
    yield made
    made.join(WAIT_S)
    assert not made.is_alive()
    if made.error is not None:
        raise made.error
