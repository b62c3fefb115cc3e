"""Messages that fail alone, as a plain model: which of the log's messages are doomed, and what is to become of each.

A doomed one gets a verdict, once, and is never called again; who waits for it gets one answer; the others are one dead
letter each. All else gets none. The log's records say which messages there were: they are gone through at the end.
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
    """The app's process ends here, in the middle of whatever it does; what it has put out is on its way."""


@dataclass(frozen=True, slots=True)
class Doom:
    """What a message is to come to. ``may_succeed``: it fails by chance, and has no verdict where it did not.

    ``is_task``: an ``async def`` handler, which fails at a later message.
    """

    kind: VerdictKind
    caller: str | None = None
    may_succeed: bool = False
    is_task: bool = False


DoomOf = Callable[[IncomingRpc], Doom | None]


def messages_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The RPCs of a record: (index, the message without its size and type)."""
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
    """Of one instance, through all its lives. ``doom_of``: what its messages are to come to; the app's."""

    def __init__(self, name: str, doom_of: DoomOf) -> None:
        self.name = name
        self.doom_of = doom_of
        self.verdicts: dict[MessageKey, Verdict] = {}  # durable ones
        self._failed: set[MessageKey] = set()  # as an app has found, ever: perhaps nobody has heard of it
        self._succeeded: set[MessageKey] = set()

    def copy(self) -> Failures:
        """For a second copy of the log."""
        other = Failures(self.name, self.doom_of)
        other.verdicts = dict(self.verdicts)
        return other

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise Violation(f"{self.name}: {problem}")

    # --- as it happens -----------------------------------------------------------------------------------------------

    def called(self, key: MessageKey) -> None:
        """A message that is to be passed over once it has a verdict is handled."""
        self.require(
            key not in self.verdicts or not self.verdicts[key].skips, f"message {key} has a verdict and is called again"
        )

    def failed(self, key: MessageKey) -> None:
        """... and has come to something that it may not come to the next time."""
        self._failed.add(key)

    def fails_now(self, key: MessageKey, rng: random.Random) -> bool:
        """Whether a message that fails by chance does so. What has happened once, and may have been seen, stays."""
        if key not in self._succeeded:
            self.called(key)
            if rng.random() < FLAKY_RATE:
                self.failed(key)
                return True
            self._succeeded.add(key)
        return False

    def forget_unheard(self) -> int | None:
        """A new app begins: which record is the first that may come to something else now; None: none may."""
        unheard = [key for key in self._failed if key not in self.verdicts]
        self._failed.clear()
        return min(unheard)[0] if unheard else None

    def became_durable(self, verdict: Verdict, record: bytes) -> None:
        """``record``: of the log, the one that it is about."""
        key = verdict.key
        known = self.verdicts.get(key)
        self.require(
            known is None or (not known.skips and verdict.kind in OVERRULING), f"a second verdict on message {key}"
        )
        self.verdicts[key] = verdict
        self.require(verdict.kind is not VerdictKind.SKIPPED, f"nobody has skipped message {key}")
        if verdict.type_name == Violation.__name__:  # of a handler: it has failed, as any other
            raise Violation(verdict.text)
        if verdict.task:
            return  # it names the message that the handler went on with
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
        """``records``: all that were ever logged, by sequence ID; ``letters``: what an operator is shown."""
        tasks: Counter[str | None] = Counter()  # async handlers that are to fail, by their caller
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
    """How often each call of an instance was answered, by its number."""
    counts: Counter[int] = Counter()
    for record in records.values():
        for _, data in _rpcs(record):
            rpc = decode_incoming_rpc(data)
            if rpc.kind != RpcKind.CALL:
                counts[msgspec.msgpack.decode(_take_number(rpc.arguments)[0], type=int)] += 1
    return counts


def calls_that_wait(records: dict[int, bytes]) -> Iterator[tuple[str, int]]:
    """Of the calls in a log: (who waits, the call's number)."""
    for record in records.values():
        for _, data in _rpcs(record):
            if (caller := decode_caller(data, 0, len(data))) is not None:
                yield caller.name, caller.number


def waits(rpc: IncomingRpc) -> bool:
    return rpc.rpc_type == RpcType.ASYNC
