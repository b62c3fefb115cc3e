"""Ordered multicasts over many logs: whether all instances delivered them in one order (`docs/ORDERING.md`).

An instance notes behind what it delivers which runs that were: sender, number, timestamp, how many calls. In each log
they must lie in the order of (timestamp, sender, number), and a run must have one timestamp in all logs: then one order
fits all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from pipeline.jobs.reports import Violation
from pipeline.jobs.stream_audit import Finding
from protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_messages
from protocol.ordering import EXECUTED_METHOD_ID
from protocol.varint import encode_zigzag

KIND = "consistency"
_FRONT = bytes((RpcKind.CALL,)) + encode_zigzag(EXECUTED_METHOD_ID) + bytes((RpcType.FORK,))
_decode = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, int, int, int]]]).decode

Delivered = tuple[str, str, int, int, int, int]
"""A run in one log: its sender, the receiver, number, timestamp, count of calls, the record."""


class RunAudit:
    """The runs that one log has delivered. ``findings``: where they are out of order."""

    def __init__(self, receiver: str) -> None:
        self.receiver = receiver
        self.findings: list[Finding] = []
        self.delivered: list[Delivered] = []
        self._last: tuple[int, str, int] = (0, "", 0)

    def take(self, record: int, payload: bytes) -> None:
        """What the instance sent to itself and has executed with ``record``."""
        if _FRONT not in payload:
            return
        for _, start, end in decode_messages(payload):
            if not payload.startswith(_FRONT, start):
                continue
            try:
                _, runs = _decode(decode_incoming_rpc(payload, start, end).arguments)
            except msgspec.DecodeError as error:
                self.findings.append(Finding(KIND, 0, 0, record, f"what it delivered can't be read: {error}"))
                continue
            for sender, number, timestamp, count in runs:
                self._delivered(sender, number, timestamp, count, record)

    def _delivered(self, sender: str, number: int, timestamp: int, count: int, record: int) -> None:
        key = timestamp, sender, number
        if key <= self._last:
            _, before, before_number = self._last
            text = (
                f"record {record}: {self.receiver!r} delivered multicast {number} of {sender!r} behind multicast "
                f"{before_number} of {before!r}, which comes later in the order of all"
            )
            self.findings.append(Finding(KIND, number, number, record, text))
        self._last = max(self._last, key)
        self.delivered.append((sender, self.receiver, number, timestamp, count, record))

    def results(self) -> Iterator[tuple[str, str, str, int, int, str]]:
        """For the driver."""
        for sender, receiver, number, timestamp, count, record in self.delivered:
            yield "run", sender, receiver, number, timestamp, json.dumps((count, record))


class OneOrder:
    """All runs of a fleet: each must be the same in all logs."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Delivered] = {}

    def take(self, sender: str, receiver: str, number: int, timestamp: int, body: str) -> Violation | None:
        count, record = json.loads(body)
        mine: Delivered = sender, receiver, number, timestamp, count, record
        first = self._known.setdefault((sender, number), mine)
        if first[3:5] == mine[3:5]:
            return None
        text = (
            f"multicast {number} of {sender!r} has another place or other calls in record {record} of {receiver!r} "
            f"than in record {first[5]} of {first[1]!r}: they can't have been delivered in one order"
        )
        return Violation(KIND, sender, receiver, number, number, record, text)
