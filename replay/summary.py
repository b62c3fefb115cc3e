"""What a replay came to: counted as it goes on, then in lines for people or as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from immortal.coordinator.core.words import Methods, counted_method_in_words
from immortal.protocol.extensions import Origin
from immortal.protocol.messages import decode_message
from immortal.protocol.varint import decode_zigzag_int
from immortal.replay.fates import news_lines, news_values
from immortal.replay.plan import place_of
from immortal.replay.result import ReplayResult, Sink


class CountingSink(Sink):
    """Counts the outputs by destination and method."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[bytes]] = {}  # by the kind, and the method ID as it is encoded

    def outputs(
        self, destination: str, first_position: int, count: int, payload: bytes, origins: Sequence[Origin] | None
    ) -> None:
        counts = self._counts.setdefault(destination, Counter())
        offset, end = 0, len(payload)
        while offset < end:
            first = payload[offset]
            if first < 0x80:
                kind = offset + 2
                offset += 1 + (first >> 1)
            else:
                _, kind, offset = decode_message(payload, offset)
            method_end = kind + 1
            while payload[method_end] >= 0x80:
                method_end += 1
            counts[payload[kind : method_end + 1]] += 1

    def by_method(self, methods: Methods) -> Iterator[tuple[str, str, int]]:
        """(destination, method's name, count)"""
        for destination, counts in sorted(self._counts.items()):
            decoded = {(decode_zigzag_int(front, 1)[0], front[0]): count for front, count in counts.items()}
            for (method_id, kind), count in sorted(decoded.items()):
                yield destination, counted_method_in_words(method_id, kind, destination, methods), count


def summary_json(name: str, result: ReplayResult, counted: CountingSink) -> dict[str, Any]:
    """Plain values; "failure" is null unless a message could not be handled."""
    methods = result.description.methods if result.description else {}
    failure = result.failure
    return {
        "instance": name,
        "from_checkpoint": result.checkpoint.checkpoint_id,
        "after_record": result.checkpoint.sequence_id,
        "last_record": result.last_sequence_id,
        "records": result.records,
        "messages": result.messages,
        "duration_s": round(result.duration_s, 6),
        "outputs": [
            {"destination": destination or name, "method": method, "count": count}
            for destination, method, count in counted.by_method(methods)
        ],
        "failed_now": news_values(result.news),
        "failure": failure_json(result),
        "state_size_bytes": result.blob_size_bytes,
        "state_check": None if failure or result.blob_check is None else f"{result.blob_check:016x}",
        "app": result.label,
        "warnings": result.warnings,
        "notes": list(result.notes),
    }


def failure_json(result: ReplayResult) -> Mapping[str, Any] | None:
    failure = result.failure
    if failure is None:
        return None
    return {"record": failure.sequence_id, "message": failure.message_index, "report": failure.text}


def summary_lines(name: str, result: ReplayResult, counted: CountingSink) -> Iterator[str]:
    """The same for people."""
    for note in result.notes:
        yield f"note: {note}"
    start = result.checkpoint
    rate = result.messages / result.duration_s if result.duration_s else 0.0
    yield (
        f"{name}: from checkpoint {start.checkpoint_id} ({place_of(start)}) {reached(result)}: "
        f"{result.records:,} records, {result.messages:,} messages in {result.duration_s:.2f} s ({rate:,.0f} a second)"
    )
    methods = result.description.methods if result.description else {}
    for destination, method, count in counted.by_method(methods):
        yield f"  to {destination or 'itself'}: {method} {count:,}"
    for headline, *trace in news_lines(result.news):
        yield headline
        yield from trace
    if result.failure is not None:
        failure = result.failure
        yield f"the handler of record {failure.sequence_id}, message {failure.message_index} raised:"
        yield from (f"  {line}" for line in failure.text.rstrip("\n").split("\n"))


def reached(result: ReplayResult) -> str:
    """Up to where the replay got, in words."""
    if result.failure is not None:
        return f"up to record {result.failure.sequence_id}, message {result.failure.message_index}, which failed"
    return f"to record {result.last_sequence_id}" if result.records else "with no record behind it"
