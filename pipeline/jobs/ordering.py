"""Audit of ordered multicasts: all destinations, and no others, execute them in one order, after their causes.

Each log shows which runs were executed, and their places in the one order: (timestamp, sender, number). Workers extract
that from the streams; the driver gets a few numbers for each run.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from immortal.appsdk.ordering.messages import Proposed
from immortal.appsdk.ordering.multicasts import decode_executed, decode_ordering_message, decode_propose
from immortal.appsdk.ordering.send_queue import RUNS_IN_FLIGHT_MAX
from immortal.pipeline.jobs.evidence import Row
from immortal.pipeline.jobs.stream_audit import Result, Violation
from immortal.protocol import decoding
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import MessageType, RpcKind, decode_incoming_rpc, decode_messages
from immortal.protocol.system_methods import EXECUTED_METHOD_ID, ORDERED_METHOD_ID, ORDERING_METHOD_ID
from immortal.protocol.varint import encode_zigzag

ORDERED = "ordered"
"""Kind of the results on ordered multicasts."""

_MARKS = tuple(
    bytes((RpcKind.CALL,)) + encode_zigzag(one) for one in (ORDERED_METHOD_ID, ORDERING_METHOD_ID, EXECUTED_METHOD_ID)
)
_MARKS_OF_OTHERS = _MARKS[:2]  # the third is of runs that the receiver itself has executed
_FIND, _FIND_OF_OTHERS = (re.compile(b"|".join(map(re.escape, marks))).search for marks in (_MARKS, _MARKS_OF_OTHERS))
_PROPOSED_HERE, _PROPOSAL, _EXECUTED = "proposed here", "proposal", "executed"

Key = tuple[int, str, int]  # timestamp, sender, number
Places = dict[tuple[str, int], tuple[int, int, str]]
"""Runs by (sender, number): timestamp, count of calls, and the first log that showed the run."""


class _Fact(NamedTuple):
    """Fact on a run of multicasts, from one message of a log. ``source``: sender of that message."""

    record: int
    batch: int
    at: int  # its place among the words of its batch
    source: str
    kind: str
    sender: str
    number: int
    timestamp: int
    calls: int  # number of calls, if the run was executed


# --- in the workers --------------------------------------------------------------------------------------------------


def ordered_results(row: Row) -> Iterator[Result]:
    """Yield the facts on ordered multicasts in a batch; without any, it costs a search for a few bytes."""
    payload = row.payload
    marks, find = (_MARKS, _FIND) if row.sender == row.receiver else (_MARKS_OF_OTHERS, _FIND_OF_OTHERS)
    if payload is None or find(payload) is None:
        return
    facts: list[tuple[str, str, int, int, int]] = []
    try:
        for message_type, start, end in decode_messages(payload):
            if message_type == MessageType.RPC and payload.startswith(marks, start):
                facts += _facts_in(payload, start, end, row)
    except (decoding.DecodeError, ProtocolError):
        pass  # the stream's own audit says that it is damaged
    if facts:
        numbered = [(index, *fact) for index, fact in enumerate(facts)]
        yield ORDERED, row.sender, row.receiver, row.sequence_id, row.batch, json.dumps(numbered)


def _facts_in(payload: bytes, start: int, end: int, row: Row) -> Iterator[tuple[str, str, int, int, int]]:
    rpc = decode_incoming_rpc(payload, start, end)
    if rpc.method_id == ORDERED_METHOD_ID:
        propose = decode_propose(rpc.arguments)
        yield _PROPOSED_HERE, propose.sender, propose.number, propose.estimate, 0
    elif rpc.method_id == EXECUTED_METHOD_ID:
        for sender, number, timestamp, count in decode_executed(rpc.arguments).runs:
            yield _EXECUTED, sender, number, timestamp, count
    else:
        message = decode_ordering_message(rpc.arguments)
        if isinstance(message, Proposed):
            yield _PROPOSAL, row.receiver, message.number, message.timestamp, 0


# --- in the driver ---------------------------------------------------------------------------------------------------


class OrderingAudit:
    """Collector of the workers' results, which finds the violations in them."""

    def __init__(self) -> None:
        self._facts: dict[str, list[_Fact]] = defaultdict(list)

    def add(self, source: str, receiver: str, record: int, batch: int, body: str) -> None:
        self._facts[receiver] += [_Fact(record, batch, at, source, *fact) for at, *fact in decoding.load_json(body)]

    def violations(self, first: Mapping[str, int]) -> Iterator[Violation]:
        """Yield all violations. ``first``: the first record of each log that was read."""
        places: Places = {}
        for log, facts in sorted(self._facts.items()):
            facts.sort()
            executed = [fact for fact in facts if fact.kind == _EXECUTED]
            yield from _check_consistency(log, executed, places)
            yield from _check_order(log, executed)
            if first.get(log, 0) == 0:
                yield from _check_locality(log, facts)
        yield from _check_senders(places)
        for log, facts in sorted(self._facts.items()):
            yield from _check_causality(log, facts, places)


def _check_consistency(log: str, executed: Iterable[_Fact], places: Places) -> Iterator[Violation]:
    """Check consistency: a run has the same calls and the same place in all logs."""
    for fact in executed:
        timestamp, count, other = places.setdefault((fact.sender, fact.number), (fact.timestamp, fact.calls, log))
        if count != fact.calls:
            text = f"run {fact.number} of {fact.sender!r} has {fact.calls} calls at {log!r} and {count} at {other!r}"
            yield Violation("order", fact.sender, log, fact.number, fact.number, fact.record, text)
        if timestamp != fact.timestamp:
            text = (
                f"run {fact.number} of {fact.sender!r} has the place {fact.timestamp} at {log!r} and {timestamp} at "
                f"{other!r}: they may see it in another order"
            )
            yield Violation("order", fact.sender, log, fact.number, fact.number, fact.record, text)


def _check_order(log: str, executed: Iterable[_Fact]) -> Iterator[Violation]:
    """Check consistency: each log executed its runs in the one order."""
    last: Key = (0, "", 0)
    for fact in executed:
        key = (fact.timestamp, fact.sender, fact.number)
        if key <= last:
            text = (
                f"{log!r} executed run {fact.number} of {fact.sender!r} behind run {last[2]} of {last[1]!r}, which "
                f"comes after it: the places are {fact.timestamp} and {last[0]}"
            )
            yield Violation("order", fact.sender, log, fact.number, fact.number, fact.record, text)
        else:
            last = key


def _check_locality(log: str, facts: Iterable[_Fact]) -> Iterator[Violation]:
    """Check locality: only its destinations execute a run. (Runs of an instance to itself need no message.)"""
    sent = set()
    for fact in facts:
        if fact.kind == _PROPOSED_HERE and fact.sender == fact.source:
            sent.add((fact.sender, fact.number))
        elif fact.kind == _EXECUTED and fact.sender != log and (fact.sender, fact.number) not in sent:
            text = f"{log!r} executed run {fact.number} of {fact.sender!r}, which was not sent to it"
            yield Violation("invented", fact.sender, log, fact.number, fact.number, fact.record, text)


def _check_senders(places: Places) -> Iterator[Violation]:
    """Check causality: runs of one sender are in the order in which it sent them."""
    last: dict[str, tuple[int, int]] = {}
    for (sender, number), (timestamp, _, log) in sorted(places.items()):
        before, at = last.get(sender, (0, 0))
        if timestamp <= at:
            text = (
                f"run {number} of {sender!r} has the place {timestamp}, and run {before}, which was sent before it, "
                f"{at}: an effect before its cause"
            )
            yield Violation("causality", sender, log, number, number, -1, text)
        last[sender] = number, max(timestamp, at)


def _check_causality(log: str, facts: Iterable[_Fact], places: Places) -> Iterator[Violation]:
    """Check causality: a run that an instance sent after it had executed another run has a later place.

    When its log shows a proposal for its run n, it has sent at most RUNS_IN_FLIGHT_MAX more runs: later runs were sent
    after all that it had executed by then.
    """
    own = {number: timestamp for (sender, number), (timestamp, _, _) in places.items() if sender == log}
    if not own:
        return
    numbers = sorted(own)
    sent_at_most = RUNS_IN_FLIGHT_MAX
    highest, cause = 0, None
    limits: list[tuple[int, int, _Fact | None]] = []  # runs above this number are above this timestamp, because of
    for fact in facts:
        if fact.kind == _PROPOSAL and fact.number + RUNS_IN_FLIGHT_MAX > sent_at_most:
            sent_at_most = fact.number + RUNS_IN_FLIGHT_MAX
        elif fact.kind == _EXECUTED and fact.timestamp > highest:
            highest, cause = fact.timestamp, fact
            limits.append((sent_at_most, highest, cause))
    above, because, next_limit = 0, None, 0
    for number in numbers:
        while next_limit < len(limits) and limits[next_limit][0] < number:
            _, above, because = limits[next_limit]
            next_limit += 1
        if own[number] <= above and because is not None:
            text = (
                f"run {number} of {log!r} has the place {own[number]}, and was sent behind run {because.number} of "
                f"{because.sender!r}, which {log!r} had executed and which has {above}: an effect before its cause"
            )
            yield Violation("causality", log, log, number, number, because.record, text)
