"""Machine under a test's control: a log in memory that answers on request, an app and peers made of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.effects import Read, Write
from immortal.coordinator.core.life_cycle.session import Phase
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.core.permissions import Permission
from immortal.coordinator.driver.ports import PlainApp, PlainHost, PlainLog, PlainPeers
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.extensions import ALL_EXTENSIONS, Hello, decode_record_time, encode_hello
from immortal.protocol.messages import (
    MessageType,
    decode_messages,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.peer_frames import FrameType, PeerFrame
from immortal.protocol.readers import BlobData, BlobStart, Record, RecordReader

COMMITTER_ID = 0x01020304
PEER_COMMITTER_ID = 77
NOW_NS = 1_700_000_000_000_000_000
INITIAL = bytes.fromhex("0e0000400105 0403".replace(" ", ""))  # the RPC of wire.md's first start
EXTENSIONS = ALL_EXTENSIONS - {MessageType.SOURCES}  # of apps that do not learn who sends each message
HELLO = encode_hello(Hello(EXTENSIONS - {MessageType.VERDICTS, MessageType.CAREFUL}, "test"))

EffectType = TypeVar("EffectType")


def checkpoint(blob: bytes) -> bytes:
    return encode_checkpoint(len(blob)) + blob


def first_start(blob: bytes = b"state one", initial: bytes = INITIAL) -> bytes:
    """Return an app's answer to its first type 11."""
    return encode_message(MessageType.INITIAL_MESSAGE, initial) + checkpoint(blob)


def call(destination: str, argument: int | bytes = b"", *, rpc_type: int = 1, method_id: int = 3) -> bytes:
    data = argument if isinstance(argument, bytes) else argument.to_bytes(4, "little")
    return encode_outgoing_rpc(destination, method_id, rpc_type, data)


def rpc(argument: int | bytes = b"", *, rpc_type: int = 1, method_id: int = 3) -> bytes:
    """Return an RPC as its receiver gets it."""
    data = argument if isinstance(argument, bytes) else argument.to_bytes(4, "little")
    return encode_incoming_rpc(method_id, rpc_type, data)


def attach(destination: str) -> bytes:
    return encode_attach_to(destination)


class _App(PlainApp):
    def __init__(self, driven: Driven) -> None:
        self._driven = driven

    def send(self, effect: ef.SendToApp) -> None:
        self._driven.app_bytes += effect.data


class _Log(PlainLog):
    def __init__(self, driven: Driven) -> None:
        super().__init__(driven.store, [])
        self._driven = driven
        self.waiting: ef.ReadRecords | None = None  # of a follower

    def acquire(self, effect: ef.AcquireWriteLease) -> None:
        holder = self._driven.held_by
        self.inbox.append(ev.WriteLeaseHeld(holder) if holder else ev.WriteLeaseGranted(1))

    def submit(self, request: Write | Read) -> None:
        if isinstance(request, self._driven.unanswered):
            return
        if self._driven.held_by and isinstance(request, ef.ReadRecords):
            self.waiting = request
            self.look()
        else:
            super().submit(request)

    def look(self) -> None:
        """Answer a follower's read, if the log has more records."""
        request = self.waiting
        if request is not None and self.store.summary().last_sequence_id >= request.first_sequence_id:
            self.waiting = None
            values = self.store.read(request.first_sequence_id, request.size_bytes_max)
            self.inbox.append(ev.RecordsRead(values, self.store.summary(), request.session))

    def answer(self, request: Read) -> ev.Event:
        if isinstance(request, ef.CheckCheckpoint) and request.header.checkpoint_id in self._driven.bad_checkpoints:
            return ev.CheckpointChecked(request.header.checkpoint_id, "bit rot")
        return super().answer(request)

    def trim(self, effect: ef.Trim) -> None:
        while self.store.trim(keep_checkpoints=None):
            pass

    @property
    def has_inline(self) -> bool:  # type: ignore[override]
        return self._driven.auto and bool(self.jobs)

    def run_inline(self) -> None:
        if not self.inbox:
            self.inbox.append(self.work())


class _Clock:
    def __init__(self, driven: Driven) -> None:
        self._driven = driven

    def now_ns(self) -> int:
        return self._driven.now_ns

    def pop_events(self) -> Sequence[ev.Event]:
        return ()

    def wake_at(self, effect: ef.WakeAt) -> None:
        pass


class Driven:
    """One machine, its log, and all its effects. ``auto``: the disk answers at once."""

    def __init__(
        self,
        store: MemoryLogStore | None = None,
        *,
        limits: Limits | None = None,
        auto: bool = True,
        name: str = "a",
        upgrade_to: int | None = None,
        promote: bool = False,
        follow: bool = False,
        permissions: Mapping[str, Permission] | None = None,
    ) -> None:
        self.held_by = "process 77" if follow else ""  # the log's writer
        self.store = store or MemoryLogStore(COMMITTER_ID)
        self.machine = Machine(
            Components(name, limits, upgrade_to, promote=promote, follow=follow, permissions=permissions)
        )
        self.auto = auto
        self.now_ns = NOW_NS
        self.effects: list[ef.Effect] = []  # all of them, in order
        self.app_bytes = bytearray()  # sent to the current app
        self.tags: dict[str, int] = {}  # of the last frame to each peer
        self.bad_checkpoints: set[int] = set()
        self.unanswered: tuple[type, ...] = ()  # kinds of reads that the log leaves without an answer
        self.log = _Log(self)
        self.driver = Driver(
            self.machine,
            self.log.inbox,
            _App(self),
            PlainPeers(),
            self.log,
            _Clock(self),
            PlainHost(),
            self._seen,
        )
        self.driver.start()
        self.forget()

    def _seen(self, effect: ef.Effect) -> None:
        self.effects.append(effect)
        if isinstance(effect, ef.SendToPeer):
            self.tags[effect.destination] = effect.tag

    # --- events in -------------------------------------------------------------------------------------------------

    def handle(self, *events: ev.Event) -> list[ef.Effect]:
        """Run one turn, and those that the log's answers cause; return the effects of all."""
        seen = len(self.effects)
        self.driver.inbox += events
        self.driver.turn()
        return self.effects[seen:]

    def disk(self) -> list[ef.Effect]:
        """Finish the disk job that has waited longest."""
        return self.handle(self.log.work())

    def disk_all(self) -> list[ef.Effect]:
        effects: list[ef.Effect] = []
        while self.jobs:
            effects += self.disk()
        return effects

    def connect(self, said: bytes = b"") -> list[ef.Effect]:
        """Connect an app. ``said``: its first bytes. An app that will say Hello gets no record before that."""
        self.app_bytes.clear()
        return self.handle(ev.AppConnected(), *([ev.AppData(said)] if said else []))

    def data(self, data: bytes) -> list[ef.Effect]:
        return self.handle(ev.AppData(data))

    def close(self) -> list[ef.Effect]:
        return self.handle(ev.AppClosed())

    def app_took_all(self) -> list[ef.Effect]:
        """Let the app's socket take everything."""
        return self.handle(ev.AppSent(self.unsent_bytes))

    @property
    def jobs(self) -> deque[Write]:
        """Return the writes that the disk has not done yet."""
        return self.log.jobs

    def crash(self, upgrade_to: int | None = None) -> Driven:
        """Return the machine after a crash, with the durable records and nothing else."""
        machine = self.machine
        return Driven(
            self.store.crash(),
            limits=machine.state.limits,
            auto=self.auto,
            name=machine.state.name,
            upgrade_to=upgrade_to,
        )

    # --- followers ----------------------------------------------------------------------------------------------------

    def look(self) -> list[ef.Effect]:
        """Tell a follower that the log can have grown."""
        seen = len(self.effects)
        self.log.look()
        self.driver.turn()
        return self.effects[seen:]

    def take_over(self) -> list[ef.Effect]:
        """Let the follower take over: the log's writer is gone."""
        self.held_by = ""
        request, self.log.waiting = self.log.waiting, None
        answered = [] if request is None else [ev.RecordsRead([], None, request.session)]
        return self.handle(*answered, ev.WriteLeaseGranted(2))

    # --- common beginnings -------------------------------------------------------------------------------------------

    @classmethod
    def started(cls, *, hello: bool = True, auto: bool = True, limits: Limits | None = None) -> Driven:
        """Return an instance in normal processing, with record 0 fed and taken, and no ``effects`` yet."""
        driven = cls(limits=limits)
        driven.connect()
        driven.data((HELLO if hello else b"") + first_start())
        driven.settle()
        driven.auto = auto
        return driven

    def recover(self, replayed: bytes = b"") -> None:
        """Bring the next app from its connection to normal processing; ``replayed`` is what it sends again."""
        self.connect()
        self.data(HELLO + replayed)
        self.data(checkpoint(b"state two"))
        self.settle()

    def settle(self) -> None:
        assert self.phase is Phase.NORMAL, self.phase
        self.app_took_all()
        self.forget()

    def forget(self) -> None:
        self.effects.clear()
        self.app_bytes.clear()

    # --- output ------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return Phase(self.machine.view.status(self.now_ns)["phase"])

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes for the app that its socket has not taken."""
        return int(str(self.machine.view.status(self.now_ns)["unsent_bytes"]))

    def of(self, effect_type: type[EffectType]) -> list[EffectType]:
        return [effect for effect in self.effects if isinstance(effect, effect_type)]

    @property
    def reports(self) -> list[tuple[str, str]]:
        told = [report.notice for report in self.of(ef.Report)]
        return [(notice.level, notice.text) for notice in told if notice.level != "trace"]

    @property
    def stop(self) -> ef.Stop:
        (stop,) = self.of(ef.Stop)
        return stop

    @property
    def heard(self) -> list[object]:
        """Return all that the app was sent, in short."""
        return shown(bytes(self.app_bytes))

    def frames(self, frame_type: FrameType | None = None) -> list[PeerFrame]:
        sent = [effect.frame for effect in self.of(ef.SendToPeer)]
        return [frame for frame in sent if frame_type in (None, frame.frame_type)]

    @property
    def replies(self) -> list[tuple[object, FrameType, int]]:
        return [(reply.token, reply.frame.frame_type, reply.frame.position) for reply in self.of(ef.ReplyToPeer)]

    # --- a peer called "b" -------------------------------------------------------------------------------------------

    def peer_frame(self, frame_type: FrameType, position: int, **fields: object) -> PeerFrame:
        values: dict = {
            "sender": "b",
            "receiver": self.machine.state.name,
            "committer_id": PEER_COMMITTER_ID,
            "epoch": 1,
        }
        return PeerFrame(frame_type, position=position, **(values | fields))

    def batch(
        self, token: object, position: int, *messages: bytes, greeted: bool = True, **fields: object
    ) -> list[ef.Effect]:
        """Receive a batch. ``greeted``: a new sender has said Hello before, of which nothing is kept."""
        payload = {"count": len(messages), "payload": b"".join(messages), "time_ns": 5}
        frame = self.peer_frame(FrameType.BATCH, position, **(payload | fields))
        source = self.machine.components.peers.inbound.senders.stream(frame.sender)
        if greeted and not source.committer_id and frame.receiver == self.machine.state.name:
            source._greeted_committer_id = frame.committer_id
        return self.handle(ev.PeerFrameReceived(token, frame))

    def greeted(self, token: object, position: int = 0, **fields: object) -> list[ef.Effect]:
        return self.handle(ev.PeerFrameReceived(token, self.peer_frame(FrameType.HELLO, position, **fields)))

    def reply(
        self, frame_type: FrameType, position: int, *, tag: int | None = None, destination: str = "b", **fields: object
    ) -> list[ef.Effect]:
        """Let ``destination`` answer; without a ``tag``, to the newest attempt of that stream."""
        if tag is None:
            tag = self.tags[destination]
        frame = self.peer_frame(frame_type, position, **({"sender": destination} | fields))
        return self.handle(ev.PeerReplied(destination, tag, frame))

    def open_stream(self, destination: str = "b", position: int = 0) -> None:
        """Let the app attach and call once with argument 1; the receiver welcomes it."""
        self.data(attach(destination) + call(destination, 1))
        self.reply(FrameType.WELCOME, position, destination=destination)


def shown(data: bytes) -> list[object]:
    """Summarize the coordinator's bytes: a tuple (sequence ID, message types...) for a record, the bytes of a blob."""
    reader = RecordReader()
    reader.receive_data(data)
    result: list[object] = []
    blob: list[bytes] | None = None
    while (event := reader.next_event()) is not None:
        if isinstance(event, BlobStart):
            blob = []
        elif isinstance(event, BlobData):
            assert blob is not None
            blob.append(event.data)
            if event.last:
                result.append(b"".join(blob))
        else:
            types = [MessageType(message_type).name for message_type, _, _ in decode_messages(event.content)]
            result.append((event.header.sequence_id, *types))
    assert not reader.buffered_bytes, "the coordinator's bytes end in the middle of a record"
    return result


def records(data: bytes) -> list[Record]:
    reader = RecordReader()
    reader.receive_data(data)
    found = []
    while (event := reader.next_event()) is not None:
        if isinstance(event, Record):
            found.append(event)
    return found


def time_of(record: Record) -> int:
    message_type, start, end = next(iter(decode_messages(record.content)))
    assert message_type == MessageType.RECORD_TIME
    return decode_record_time(record.content, start, end)


def arguments(data: bytes) -> list[bytes]:
    """Return the messages of all batches and RPCs of logged records in ``data``, whole, in order."""
    from immortal.protocol.batch import decode_batch

    found: list[bytes] = []
    for record in records(data):
        if record.header.sequence_id < 0:
            continue
        previous = 0
        for message_type, start, end in decode_messages(record.content):
            if message_type == MessageType.RPC:
                found.append(record.content[previous:end])
            elif message_type == MessageType.RPC_BATCH:
                body = record.content[start:end]
                _, offset = decode_batch(body)
                inner = body[offset:]
                last = 0
                for _, _, stop in decode_messages(inner):
                    found.append(inner[last:stop])
                    last = stop
            previous = end
    return found
