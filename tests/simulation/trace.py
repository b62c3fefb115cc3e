"""Events of a run as lines for people; and a digest of them, to check that a seed gives the same run again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.peer_frames import PeerFrame
from tests.simulation.clock import MS, START_NS


class Violation(AssertionError):  # noqa: N818
    """Raised when a promise did not hold."""


class Trace:
    """Lines in the order of the events."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, now_ns: int, where: str, text: str) -> None:
        self.lines.append(f"{(now_ns - START_NS) / MS:10.3f} ms  {where:<2} {text}")

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()[:16]


def describe_events(events: Sequence[ev.Event]) -> str:
    return ", ".join(map(describe, events))


def describe(what: ev.Event | ef.Effect) -> str:
    """Describe an event or effect in a few words: sizes in place of bytes."""
    name = type(what).__name__
    if isinstance(what, ef.SendToPeer):
        return f"{name} {what.destination} {_frame(what.frame)}"
    if isinstance(what, ef.ReplyToPeer):
        return f"{name} {what.frame.receiver} {_frame(what.frame)}"
    if isinstance(what, ev.PeerFrameReceived):
        return f"{name} of {what.frame.sender}: {_frame(what.frame)}"
    if isinstance(what, ev.PeerReplied):
        return f"{name} by {what.destination}: {_frame(what.frame)}"
    if isinstance(what, ev.ClientFrameReceived | ef.ReplyToClient):
        client = what.frame
        return f"{name} {client.client_id} {client.frame_type.name} {client.number}+{client.count}"
    if isinstance(what, ef.Commit):
        return f"{name} {what.ticket}{_transaction(what)}"
    if isinstance(what, ef.SendToApp | ev.AppData):
        return f"{name} {len(what.data)} bytes"
    if isinstance(what, ef.Report):
        return f"{name} {what.notice.level}: {what.notice.text} {what.notice.values()}"
    if isinstance(what, ev.RecordsRead):
        return f"{name} {len(what.values)} records"
    if isinstance(what, ev.LogLoaded):
        return f"{name} up to record {what.summary.last_sequence_id}"
    if isinstance(what, ef.CheckCheckpoint):
        return f"{name} {what.header.checkpoint_id} behind record {what.header.sequence_id}"
    if isinstance(what, ev.CheckpointChunkRead | ef.WriteCheckpointChunk):
        return f"{name} {len(what.data)} bytes"
    values = [str(getattr(what, field)) for field in what.__struct_fields__]
    return " ".join([name, *values])


def _frame(frame: PeerFrame) -> str:
    text = f"{frame.frame_type.name} {frame.position}"
    if frame.count:
        text += f"-{frame.position + frame.count - 1}"
    if frame.reason:
        text += f" ({frame.reason})"
    return f"{text} epoch {frame.epoch}"


def _transaction(commit: ef.Commit) -> str:
    transaction = commit.transaction
    text = "".join(f" record {sequence_id}" for sequence_id, _ in transaction.records)
    text += "".join(f" {source or 'own'}<={known.position}" for source, known in transaction.sources.items())
    text += "".join(f" ack {name}<={position}" for name, position in transaction.acknowledged.items())
    text += "".join(f" impulses {one.destination}@{one.first_position}+{one.count}" for one in transaction.impulses)
    if transaction.checkpoint is not None:
        text += f" checkpoint {transaction.checkpoint.checkpoint_id}"
    if transaction.version is not None:
        text += f" version {transaction.version.version}"
    return text if transaction.epoch is None else f"{text} epoch {transaction.epoch}"
