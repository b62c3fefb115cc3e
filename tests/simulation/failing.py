"""Model of messages that fail alone: which messages of the log are doomed, and the fate of each.

A doomed message gets one verdict, and is never called again. A caller that waits gets one answer; each other message is
one dead letter. All other messages get neither. The end check goes through all messages in the log's records.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from immortal.appsdk.calls.user_code import ControlFlowSignal
from immortal.protocol.batch import decode_batch
from immortal.protocol.client_frames import decode_caller
from immortal.protocol.messages import IncomingRpc, MessageType, RpcKind, RpcType, decode_incoming_rpc, decode_messages
from immortal.protocol.record import decode_header
from immortal.protocol.verdicts import MessageKey, Verdict, VerdictKind
from tests.simulation.trace import Violation

OVERRULING = (VerdictKind.KILLED, VerdictKind.SKIPPED)
FLAKY_RATE = 0.6  # of the messages that fail by chance

_take_number = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class Death(ControlFlowSignal):
    """Raised to end the app's process in the middle of its work; its output is on its way."""


@dataclass(frozen=True, slots=True)
class Doom:
    """Fate of a message. ``may_succeed``: it fails by chance, and has no verdict if it succeeded.

    ``is_task``: an ``async def`` handler, which fails at a later message.
    """

    kind: VerdictKind
    caller: str | None = None
    may_succeed: bool = False
    is_task: bool = False


DoomOf = Callable[[IncomingRpc], Doom | None]


def messages_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the RPCs of a record: (index, the message without its size and type)."""
    index = 0
    for message_type, start, end in decode_messages(content):
        if message_type == MessageType.RPC:
            yield index, content[start:end]
            index += 1
        elif message_type == MessageType.RPC_BATCH:
            _, offset = decode_batch(content[start:end])
            body = content[start + offset : end]
            for _, first, last in decode_messages(body):
                yield index, body[first:last]
                index += 1
        elif message_type == MessageType.INITIAL_MESSAGE:
            index += 1


class Failures:
    """Failures of one instance, through all its lives. ``doom_of``: the app's function for the fates of messages."""

    def __init__(self, name: str, doom_of: DoomOf) -> None:
        self.name = name
        self.doom_of = doom_of
        self.verdicts: dict[MessageKey, Verdict] = {}  # durable ones
        self._failed: set[MessageKey] = set()  # in any app so far; it is possible that nobody knows of it
        self._succeeded: set[MessageKey] = set()

    def copy(self) -> Failures:
        """Return the failures for a second copy of the log."""
        other = Failures(self.name, self.doom_of)
        other.verdicts = dict(self.verdicts)
        return other

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise Violation(f"{self.name}: {problem}")

    # --- as it happens -----------------------------------------------------------------------------------------------

    def called(self, key: MessageKey) -> None:
        """Check the call of a doomed message: with a verdict it must be skipped."""
        self.require(
            key not in self.verdicts or not self.verdicts[key].skips, f"message {key} has a verdict and is called again"
        )

    def failed(self, key: MessageKey) -> None:
        """Note a failure, which can differ at the next call."""
        self._failed.add(key)

    def fails_now(self, key: MessageKey, rng: random.Random) -> bool:
        """Draw if a flaky message fails. A success, whose effects others can have seen, is final."""
        if key not in self._succeeded:
            self.called(key)
            if rng.random() < FLAKY_RATE:
                self.failed(key)
                return True
            self._succeeded.add(key)
        return False

    def forget_unheard(self) -> int | None:
        """Begin a new app: return the first record that can end otherwise now, None if there is none."""
        unheard = [key for key in self._failed if key not in self.verdicts]
        self._failed.clear()
        return min(unheard)[0] if unheard else None

    def became_durable(self, verdict: Verdict, record: bytes) -> None:
        """Check a durable verdict. ``record``: the log's record that it is about."""
        key = verdict.key
        known = self.verdicts.get(key)
        self.require(
            known is None or (not known.skips and verdict.kind in OVERRULING), f"a second verdict on message {key}"
        )
        self.verdicts[key] = verdict
        self.require(verdict.kind is not VerdictKind.SKIPPED, f"nobody has skipped message {key}")
        if verdict.type_name == Violation.__name__:  # a handler raised it, which made the call fail as any other
            raise Violation(verdict.text)
        if verdict.task:
            return  # it names the message with which the handler continued
        doom = next((self._doom(data) for index, data in _rpcs(record) if index == key[1]), None)
        self.require(
            doom is not None and doom.kind is verdict.kind and doom.caller == verdict.caller and not doom.is_task,
            f"{verdict.kind.name} {verdict.method or 'a message'} {key}, {verdict.type_name}: {verdict.text}: "
            f"{'nothing is wrong with it' if doom is None else doom}",
        )

    def _doom(self, data: bytes) -> Doom | None:
        rpc = decode_incoming_rpc(data)
        return self.doom_of(rpc) if rpc.kind == RpcKind.CALL else None

    # --- the end -----------------------------------------------------------------------------------------------------

    def check_end(self, records: dict[int, bytes], letters: Iterable[MessageKey]) -> None:
        """Check all fates. ``records``: all that were ever logged, by sequence ID; ``letters``: an operator's list."""
        tasks: Counter[str | None] = Counter()  # async handlers that must fail, by their caller
        for sequence_id, record in records.items():
            for index, data in _rpcs(record):
                doom = self._doom(data)
                key = (sequence_id, index, 0, 0)
                if doom is not None and doom.is_task:
                    tasks[doom.caller] += 1
                elif doom is not None and not doom.may_succeed:
                    self.require(key in self.verdicts, f"message {key} is to fail ({doom}), and has no verdict")
        failed = Counter(one.caller for one in self.verdicts.values() if one.task and not one.step)
        self.require(failed == tasks, f"async handlers that failed, by caller: {failed}, those that are to: {tasks}")
        expected = {key for key, verdict in self.verdicts.items() if verdict.caller is None and not verdict.step}
        self.require(
            set(letters) == expected, f"dead letters: {sorted(letters)}, {sorted(expected)} nobody has waited for"
        )


def _rpcs(record: bytes) -> Iterator[tuple[int, bytes]]:
    header = decode_header(record)
    yield from messages_of(bytes(record[24 : header.size_bytes]))


def count_of_answers(records: dict[int, bytes]) -> Counter[int]:
    """Count the answers to each call of an instance, by its number."""
    counts: Counter[int] = Counter()
    for record in records.values():
        for _, data in _rpcs(record):
            rpc = decode_incoming_rpc(data)
            if rpc.kind != RpcKind.CALL:
                counts[msgspec.msgpack.decode(_take_number(rpc.arguments)[0], type=int)] += 1
    return counts


def calls_that_wait(records: dict[int, bytes]) -> Iterator[tuple[str, int]]:
    """Yield, for each call in a log whose caller waits, (caller, the call's number)."""
    for record in records.values():
        for _, data in _rpcs(record):
            if (caller := decode_caller(data, 0, len(data))) is not None:
                yield caller.name, caller.number


def waits(rpc: IncomingRpc) -> bool:
    return rpc.rpc_type == RpcType.ASYNC
