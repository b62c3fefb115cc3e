"""Results of a replay: a Sink receives them one by one during the replay, a ReplayResult has them at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from immortal.coordinator.core.formatting import Methods, format_counted_method
from immortal.coordinator.core.interfaces import CheckpointHeader
from immortal.coordinator.log.reader import RecordSource
from immortal.protocol.command_line import counted
from immortal.protocol.extensions import AppDescription, HandlerFailure
from immortal.protocol.messages import decode_message
from immortal.protocol.safe_output import printable, printable_lines
from immortal.protocol.trailer import Trailer
from immortal.protocol.varint import decode_zigzag_int
from immortal.protocol.verdicts import NOT_FIXABLE_BY_CODE, Verdict, VerdictKind
from immortal.replay.app_process import Code
from immortal.replay.plan import place_of
from immortal.replay.session import Event, KeptImpulses, NumbersDrawn, Outputs, VerdictGiven

TRACES_CHARACTERS_MAX = 4 << 20  # of all verdicts together


class Sink:
    """Observer of a replay. The replaying thread calls it and waits: a slow sink slows the replay, and memory does not
    grow.

    An error that a method raises ends the replay.
    """

    forgotten: Callable[[], list[str]] = staticmethod(list)
    """Function that returns the forgotten persons whose data the app has asked for so far."""

    def handle(self, event: Event) -> None:
        """Call the method below that is for this event of a session, if there is one."""
        if isinstance(event, Outputs):
            self.outputs(event)
        elif isinstance(event, KeptImpulses):
            self.impulses(event)
        elif isinstance(event, NumbersDrawn):
            self.numbers(event.sequence_id, event.data, complete=event.complete)
        elif isinstance(event, VerdictGiven):
            self.verdict(event.verdict)

    def code(self, code: Code | None) -> None:
        """Receive the code that the connected app runs; None: it was started by hand."""

    def record(self, sequence_id: int, value: bytes, trailer: Trailer) -> None:
        """Receive a record that the app gets. ``value``: record and trailer in the log's form."""

    def outputs(self, made: Outputs) -> None:
        """Receive messages of the app. Positions continue from the checkpoint's; kept impulses take their own."""

    def impulses(self, kept: KeptImpulses) -> None:
        """Receive impulses of the past, which no replay makes."""

    def numbers(self, sequence_id: int | None, data: bytes, *, complete: bool) -> None:
        """Receive random numbers that the app reported: see :class:`immortal.replay.session.NumbersDrawn`."""

    def verdict(self, verdict: Verdict) -> None:
        """Receive the verdict on a failed message; the app continues. Outputs from before it can still follow."""


class ReplayResult(Struct):
    """Result of a replay. ``records`` and ``messages``: how many the app received.

    ``blob_size_bytes``, ``blob_check`` (CRC-64/XZ): the state at the end, also in the file ``blob_path`` if one was
    requested; None with a ``failure`` (a message that could not be handled; the replay ended there). None also for an
    app without a Hello in a what-if of an upgrade, which is not asked for its state.
    ``verdicts``: on messages that failed alone, without the messages, and with the first traces only.
    ``news``: the verdicts that the log does not have.
    ``flushed``: the app holds no output back; an app of the base protocol can hold some back.
    ``exit_status``: of the app's process, negative for a signal; None if it was started by hand. ``code``: the code
    that it ran, with the modules imported on the way; None likewise. ``forgotten``: texts on the persons whose data it
    asked for and did not get, which changes what it does.
    """

    checkpoint: CheckpointHeader
    first_sequence_id: int
    last_sequence_id: int
    records: int = 0
    messages: int = 0
    duration_s: float = 0.0
    blob_path: Path | None = None
    blob_size_bytes: int | None = None
    blob_check: int | None = None
    description: AppDescription | None = None
    label: str = ""
    flushed: bool = False
    failure: HandlerFailure | None = None
    exit_status: int | None = None
    stderr_head: str = ""
    stderr_tail: str = ""
    notes: Sequence[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    news: list[Verdict] = field(default_factory=list)
    code: Code | None = None
    forgotten: Sequence[str] = ()
    _traces_size: int = 0

    def add(self, verdict: Verdict) -> None:
        """Add a verdict that the app has given."""
        self._traces_size += len(verdict.trace)
        trace = verdict.trace if self._traces_size <= TRACES_CHARACTERS_MAX else ""
        self.verdicts.append(msgspec.structs.replace(verdict, message=b"", trace=trace))

    def find_new_failures(self, source: RecordSource) -> None:
        """Set ``news``, after the replay: a running instance's log can have got the same verdicts meanwhile."""
        known = {verdict.key for verdict in source.summary().verdicts} if self.verdicts else ()
        self.news = [verdict for verdict in self.verdicts if verdict.key not in known]

    @property
    def warnings(self) -> list[str]:
        """Warnings that the SDK printed about the app's code at its start, one line each."""
        return [line for line in self.stderr_head.split("\n") if line.startswith("app ") and ": warning: " in line]


def too_little_text(messages: int, at_least: int) -> str:
    """Return the text for a comparison of too few messages to decide anything."""
    return (
        f"can't be told: {counted(messages, 'message')} compared, no difference, at least {at_least:,} asked for; begin"
        " at an older checkpoint, or keep more of the log (keep_log_days, keep_log_mb)"
    )


# Summary of a replay: outputs counted during the replay, then lines for people or plain values.


class CountingSink(Sink):
    """Sink that counts the outputs by destination and method."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[bytes]] = {}  # by the kind and the encoded method ID

    def outputs(self, made: Outputs) -> None:
        counts = self._counts.setdefault(made.destination, Counter())
        payload = made.payload
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
        """Yield (destination, method's name, count), sorted by destination."""
        for destination, counts in sorted(self._counts.items()):
            decoded = {(decode_zigzag_int(front, 1)[0], front[0]): count for front, count in counts.items()}
            for (method_id, kind), count in sorted(decoded.items()):
                yield destination, format_counted_method(method_id, kind, destination, methods), count


def summary_json(name: str, result: ReplayResult, counted: CountingSink) -> dict[str, Any]:
    """Return the result as plain values; "failure" is null unless a message could not be handled."""
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
        "failed_now": new_failure_values(result.news),
        "failure": failure_json(result),
        "state_size_bytes": result.blob_size_bytes,
        "state_check": None if failure or result.blob_check is None else f"{result.blob_check:016x}",
        "app": result.label,
        "warnings": result.warnings,
        "notes": [*result.notes, *result.forgotten],
    }


def failure_json(result: ReplayResult) -> Mapping[str, Any] | None:
    failure = result.failure
    if failure is None:
        return None
    return {"record": failure.sequence_id, "message": failure.message_index, "report": failure.text}


def summary_lines(name: str, result: ReplayResult, counted: CountingSink) -> Iterator[str]:
    """Yield the result as lines for people."""
    for note in (*result.notes, *result.forgotten):
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
    for headline, *trace in new_failure_lines(result.news):
        yield headline
        yield from trace
    if result.failure is not None:
        failure = result.failure
        yield f"the handler of record {failure.sequence_id}, message {failure.message_index} raised:"
        yield from (f"  {line}" for line in failure.text.rstrip("\n").split("\n"))


def reached(result: ReplayResult) -> str:
    """Return in words how far the replay got."""
    if result.failure is not None:
        return f"up to record {result.failure.sequence_id}, message {result.failure.message_index}, which failed"
    return f"to record {result.last_sequence_id}" if result.records else "with no record after it"


# Outcomes of failing messages: messages that fail for the first time, and those whose outcome changed.
#
# A verdict of the log is the outcome then, a verdict of a replay is the outcome now.


class MessageOutcome(Enum):
    WORKS = "works now"  # it failed then
    FAILS = "fails now"  # it did not fail then
    DIFFERS = "fails in another way"

    @property
    def would_be(self) -> str:
        """The change as what would be different."""
        return {"works now": "would not fail", "fails now": "would fail"}.get(self.value, "would fail in another way")


class OutcomeChanges(Struct):
    """Group of ``count`` messages of ``method`` with one change. ``then``, ``now``: verdicts on the first of them."""

    method: str
    fate: MessageOutcome
    then: Verdict | None
    now: Verdict | None
    count: int = 0

    @property
    def first(self) -> Verdict:
        """Verdict on the first message: the present one, else the past one."""
        found = self.now or self.then
        assert found is not None
        return found


def changed_outcomes(
    then: Iterable[Verdict], now: Iterable[Verdict], after: int, before: tuple[int, int]
) -> list[OutcomeChanges]:
    """Return the messages whose outcome has changed, grouped by method and change, in the order of the log.

    ``then``: the log's verdicts. ``now``: those of an app that got no verdicts except those of causes that no code can
    change. It handled the messages after the record ``after`` and before (record, message) ``before``.
    """
    old = {
        each.key: each
        for each in then
        if after < each.sequence_id and each.key[:2] < before and each.cause not in NOT_FIXABLE_BY_CODE
    }
    new = {each.key: each for each in now}
    return group_outcomes((old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()))


def group_outcomes(pairs: Iterable[tuple[Verdict | None, Verdict | None]]) -> list[OutcomeChanges]:
    """Group (verdict then, verdict now) of messages by method and change, without those whose outcome is the same."""
    groups: dict[tuple[str, MessageOutcome], OutcomeChanges] = {}
    for was, is_now in pairs:
        if was is None:
            fate = MessageOutcome.FAILS
        elif is_now is None:
            fate = MessageOutcome.WORKS
        elif _failure_key(was) != _failure_key(is_now):
            fate = MessageOutcome.DIFFERS
        else:
            continue
        method = (is_now.method if is_now is not None else "") or (was.method if was is not None else "")
        groups.setdefault((method, fate), OutcomeChanges(method, fate, was, is_now)).count += 1
    return list(groups.values())


def _failure_key(verdict: Verdict) -> tuple[VerdictKind, str, str]:
    return verdict.kind, verdict.type_name, verdict.text


# --- in words ---------------------------------------------------------------------------------------------------------


def place_in_words(verdict: Verdict) -> str:
    return f"record {verdict.sequence_id}, message {verdict.message_index}"


def format_failure(verdict: Verdict) -> str:
    """Format a failure in one line: ``ValueError: no number``."""
    if verdict.kind is VerdictKind.REFUSED:
        how = f"refused: {verdict.text}"
    elif verdict.kind is VerdictKind.SKIPPED:
        how = f"skipped by an operator: {verdict.text}"
    elif verdict.kind is VerdictKind.TAKEN_BACK:
        how = f"taken back after record {verdict.behind}: {verdict.text}"
    else:
        how = f"{verdict.type_name}: {verdict.text}" if verdict.text else verdict.type_name
    return printable(how)


def new_failure_lines(verdicts: Iterable[Verdict]) -> Iterator[list[str]]:
    """Yield, for each method, lines about the first message that fails only in a replay, with their number."""
    for group in changed_outcomes((), verdicts, -1, (0, 0)):
        verdict = group.first
        what = f"{group.method or 'a message'} at {place_in_words(verdict)}"
        more = f" (the first of {group.count:,})" if group.count > 1 else ""
        yield [
            f"{what} did not fail when it was handled, and fails now{more}: {format_failure(verdict)}",
            *(printable_lines(verdict.trace.rstrip("\n"), indent="    ") if verdict.trace else ()),
        ]


def verdict_values(verdict: Verdict | None) -> dict[str, Any] | None:
    """Return a verdict as plain values."""
    if verdict is None:
        return None
    return {
        "kind": verdict.kind.name.lower(),
        "type": verdict.type_name,
        "text": verdict.text,
        "trace": verdict.trace,
    }


def new_failure_values(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return plain values for each message that fails only in a replay."""
    return [
        {
            "record": verdict.sequence_id,
            "message": verdict.message_index,
            "method": verdict.method,
            **(verdict_values(verdict) or {}),
        }
        for verdict in verdicts
    ]
