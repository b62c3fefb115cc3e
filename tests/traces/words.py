"""Effects of a machine as lines of text: what was asked for, and by which numbers. Sizes and check bytes stay out."""

from __future__ import annotations

from collections.abc import Iterator

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.interfaces import Transaction
from immortal.protocol.batch import decode_batch
from immortal.protocol.messages import MessageType, decode_incoming_rpc, decode_messages
from immortal.protocol.peer_frames import PeerFrame
from immortal.protocol.readers import BlobData, BlobStart, Record, RecordReader
from immortal.protocol.record import HEADER_SIZE_BYTES
from immortal.protocol.verdicts import decode_careful, decode_verdicts
from tests.helpers.core import NOW_NS

_BATCHES = (MessageType.RPC_BATCH, MessageType.COUNT_REPLAYABLE_RPC_BATCH)


class Words:
    """Of one connection with an app after the other: what it is sent comes in any pieces."""

    def __init__(self) -> None:
        self.now_ns = NOW_NS
        self._reader = RecordReader()
        self._blob = b""

    def app_connected(self) -> None:
        self._reader, self._blob = RecordReader(), b""

    def of(self, effect: ef.Effect) -> Iterator[str]:
        match effect:
            case ef.SendToApp():
                yield from self._to_app(bytes(effect.data))
            case ef.Commit():
                yield f"commit {effect.ticket}: {', '.join(_transaction(effect.transaction)) or 'nothing'}"
            case ef.WriteCheckpointChunk():
                yield f"write chunk {effect.index} of checkpoint {effect.checkpoint_id}: {_text(effect.data)}"
            case ef.CheckCheckpoint():
                yield f"check checkpoint {effect.header.checkpoint_id}"
            case ef.ReadCheckpointChunk():
                yield f"read chunk {effect.index} of checkpoint {effect.checkpoint_id}"
            case ef.ReadRecords():
                yield f"read records from {effect.first_sequence_id} on"
            case ef.ReadSpilled():
                yield f"read what was spilled for {effect.destination}, from {effect.first_position} on"
            case ef.SendToPeer():
                yield f"to {effect.destination}: {_frame(effect.frame)}"
            case ef.ReplyToPeer():
                yield f"answer {effect.frame.receiver}: {_frame(effect.frame)}"
            case ef.OpenPeer():
                yield f"find {effect.destination}"
            case ef.ResetPeer():
                yield f"forget what is on its way to {effect.destination}"
            case ef.WakeAt():
                yield f"wake in {(effect.time_ns - self.now_ns) / 1e9:g} s"
            case ef.Report():
                notice = effect.notice
                values = "".join(f" {name}={value}" for name, value in notice.values().items())
                yield f"tell {type(notice).__name__}: {notice.text}{values}"
            case ef.UpgradeEnded():
                ended = f"failed: {effect.problem}" if effect.problem else "is done"
                yield f"the upgrade to version {effect.version} {ended}"
            case ef.Stop():
                yield f"stop: {effect.error or 'cleanly'}"
            case _:
                yield _PLAIN[type(effect)]

    def _to_app(self, data: bytes) -> Iterator[str]:
        self._reader.receive_data(data)
        while (event := self._reader.next_event()) is not None:
            if isinstance(event, BlobStart):
                self._blob = b""
            elif isinstance(event, BlobData):
                self._blob += event.data
                if event.last:
                    yield f"to the app: the state {_text(self._blob)}"
            elif isinstance(event, Record):
                number = event.header.sequence_id
                where = "" if number < 0 else f"record {number}: "
                yield f"to the app: {where}{', '.join(_messages(event.content))}"


_PLAIN: dict[type[ef.Effect], str] = {
    ef.CloseApp: "close the app's connection",
    ef.PauseApp: "read no more from the app",
    ef.ResumeApp: "read from the app again",
    ef.AcquireWriteLease: "ask for the right to write the log",
    ef.LoadLog: "load the log",
    ef.ReadTail: "ask where the log ends",
    ef.Trim: "trim the log",
}


def _messages(content: bytes) -> Iterator[str]:
    previous = 0
    for kind, start, end in decode_messages(content):
        if kind == MessageType.RPC:
            yield _call(content, start, end)
        elif kind in _BATCHES:
            yield from _messages(content[start + decode_batch(content[start:end])[1] : end])
        elif kind == MessageType.VERDICTS:
            told = [f"{one.sequence_id}:{one.message_index}" for one in decode_verdicts(content[start:end])]
            yield f"VERDICTS ({', '.join(told) or 'none'})"
        elif kind == MessageType.CAREFUL:
            yield f"CAREFUL from record {decode_careful(content[start:end]).first_sequence_id} on"
        elif kind != MessageType.RECORD_TIME:
            yield MessageType(kind).name
        previous = end
    assert previous == len(content)


def _call(content: bytes, start: int, end: int) -> str:
    rpc = decode_incoming_rpc(content, start, end)
    return f"call {int.from_bytes(rpc.arguments[:4], 'little')}"


def _frame(frame: PeerFrame) -> str:
    name = frame.frame_type.name
    if frame.count and frame.payload:
        return f"{name} {_span(frame.position, frame.count)} ({', '.join(_messages(frame.payload))})"
    return f"{name} {frame.position}{f': {frame.reason}' if frame.reason else ''}"


def _transaction(transaction: Transaction) -> Iterator[str]:
    if transaction.epoch is not None:
        yield f"epoch {transaction.epoch}"
    for number, value in transaction.records:
        size_bytes = int.from_bytes(value[4:8], "little")
        yield f"record {number} ({', '.join(_messages(value[HEADER_SIZE_BYTES:size_bytes]))})"
    for sender, known in transaction.sources.items():
        yield f"has {known.position} of {sender or 'itself'}"
    for destination, position in transaction.acknowledged.items():
        yield f"{destination or 'itself'} has {position}"
    for destination in transaction.peers:
        yield f"knows the log of {destination}"
    for destination, start in transaction.stream_starts.items():
        yield f"the stream to {destination} begins {'anew' if start.pending else f'behind {start.offset}'}"
    for one in transaction.impulses:
        yield f"impulses {_span(one.first_position, one.count)} to {one.destination}"
    for destination, first in transaction.impulses_removed:
        yield f"no impulses from {first} on to {destination}"
    for one in transaction.spilled:
        yield f"spill {_span(one.first_position, one.count)} for {one.destination}"
    if transaction.checkpoint is not None:
        yield f"checkpoint {transaction.checkpoint.checkpoint_id} behind record {transaction.checkpoint.sequence_id}"
    if transaction.version is not None:
        yield f"version {transaction.version.version}"
    for verdict in transaction.verdicts:
        yield f"verdict {verdict.kind.name} on {verdict.sequence_id}:{verdict.message_index}"


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _text(data: bytes | memoryview) -> str:
    return repr(bytes(data).decode("ascii", "backslashreplace"))
