"""Small deterministic app that speaks the protocol byte by byte, and checks each message that it gets.

A tick is an impulse to itself. Each tick calls all peers, some of them several times (a storm); some calls are passed
on from one instance to the next (a cycle, also back to the first one), and every third tick calls the app itself. It
also sends impulses to its peers. The caller numbers its calls to each instance, and each call carries a check over all
earlier ones: a call that is lost, doubled, reordered or altered is found where it is executed.

Some messages fail, each in its way: they are refused, raise, raise and keep their changes, raise by chance, or end the
process. The text of such a call's verdict is drawn, and goes back to its caller: so only its verdict makes a replay
equal.

Each version has its own calls to itself: a record that the wrong version handles makes other outputs. A plain app is
one of the base protocol: no Hello, no extensions, and it can hold calls back until after a checkpoint.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Protocol
from zlib import crc32

import msgspec

from immortal.protocol.batch import decode_batch, encode_batch
from immortal.protocol.extensions import (
    ALL_EXTENSIONS,
    AppDescription,
    Hello,
    decode_impulses_accepted,
    decode_sources,
    decode_version,
    encode_app_batch,
    encode_app_description,
    encode_hello,
)
from immortal.protocol.messages import (
    IncomingRpc,
    MessageType,
    RpcType,
    decode_incoming_rpc,
    decode_messages,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
    encode_outgoing_rpc,
)
from immortal.protocol.readers import BlobData, BlobStart, RecordReader
from immortal.protocol.verdicts import (
    Handling,
    MessageKey,
    Verdict,
    VerdictKind,
    decode_careful,
    decode_verdicts,
    encode_handling,
    encode_verdict,
)
from tests.simulation.checkers import Checker
from tests.simulation.failing import Death, Doom
from tests.simulation.marks import Marks
from tests.simulation.trace import Violation

METHOD_TICK, METHOD_CALL, METHOD_OUTSIDE, METHOD_DOOMED, METHOD_INITIAL = 1, 2, 3, 4, -1
STORM_SIZE = 6
IMPULSES_OUTSTANDING_MAX = 8

_encode = msgspec.msgpack.encode
_decode_call = msgspec.msgpack.Decoder(tuple[str, int, int, int, int, int]).decode
_decode_tag = msgspec.msgpack.Decoder(int).decode
_decode_doomed = msgspec.msgpack.Decoder(tuple[str, int, int]).decode
_decode_impulse = msgspec.msgpack.Decoder(tuple[str, int]).decode


DOOMS = (VerdictKind.REFUSED, VerdictKind.UNDONE, VerdictKind.KEPT, VerdictKind.UNDONE, VerdictKind.KILLED)
FLAKY = 3  # index of the one that fails by chance


def doom_of(rpc: IncomingRpc) -> Doom | None:
    """Return the expected fate of a call. Every other one has a caller that waits, as its verdict says."""
    if rpc.method_id != METHOD_DOOMED:
        return None
    sender, number, which = _decode_doomed(rpc.arguments)
    return Doom(DOOMS[which], sender if number % 2 else None, which == FLAKY)


class Outside:
    """World outside: it sends impulses to other instances, and knows which were accepted."""

    def __init__(self) -> None:
        self.made = 0
        self.wiped = ""  # an instance that has lost its log: it numbers its calls anew, and has forgotten executed ones
        self.begun_anew: dict[tuple[str, str], int] = {}  # by sender and receiver: the first number after the loss
        self.accepted: dict[tuple[str, str], set[int]] = {}

    def allows(self, sender: str, receiver: str, number: int, before: int) -> bool:
        """Return True if ``number`` can be executed after ``before``, though it does not follow it."""
        if (
            self.wiped
            and sender
            and ((sender == self.wiped and number == 1) or (receiver == self.wiped and not before))
        ):
            return self.begun_anew.setdefault((sender, receiver), number) == number
        return False

    def next_number(self) -> int:
        self.made += 1
        return self.made

    def accept(self, sender: str, receiver: str, number: int) -> None:
        self.accepted.setdefault((sender, receiver), set()).add(number)


class App(Protocol):
    """Interface of one life of an app, as its node uses it."""

    primary: bool
    fails_upgrade: bool
    out: bytearray  # bytes to be sent

    @property
    def is_restless(self) -> bool:
        """Return True if the app would act by itself: :meth:`act`."""

    def receive(self, data: bytes) -> None: ...

    def act(self) -> bool:
        """Act by itself; return True if there is more to do of that kind."""

    def time_ns(self, steady_ns: int) -> int: ...

    def log_time(self, time_ns: int) -> None: ...

    @property
    def next_due_ns(self) -> int | None: ...

    @property
    def is_done(self) -> bool:
        """Return True if all its work is done, and all its impulses are accepted."""

    @property
    def made(self) -> dict[str, int]:
        """Return the number of calls made, by destination."""

    @property
    def got(self) -> dict[str, int]:
        """Return the number of calls executed, by sender."""

    @property
    def outside(self) -> dict[str, list[int]]:
        """Return the impulses executed, by sender."""

    @property
    def spoiled(self) -> bool:
        """Return True if a failed call has left changes."""

    def count_that_answer(self, caller: str) -> int:
        """Return the number of handlers at work for ``caller``, which waits."""


class State(msgspec.Struct):
    sequence_id: int = -1
    time_ns: int = 0
    begun: bool = False
    version: int = 1
    ticks: int = 0
    tag: int = 0  # of the last tick: no other life of this log has the same
    made: dict[str, int] = {}
    made_check: dict[str, int] = {}
    got: dict[str, int] = {}
    got_check: dict[str, int] = {}
    outside: dict[str, list[int]] = {}
    doomed: int = 0  # calls made that must fail
    kept: int = 0  # ... received ones that changed the state before they failed
    lucky: int = 0  # ... received ones that did not fail
    held: list[tuple[str, int, bytes]] = []  # calls of a plain app that are not sent yet


_decode_state = msgspec.msgpack.Decoder(State).decode


class CheckingApp:
    def __init__(
        self,
        name: str,
        peers: list[str],
        work: int,
        version: int,
        rng: random.Random,
        checker: Checker,
        outside: Outside,
        marks: Marks,
        *,
        plain: bool = False,
        calls_only: bool = False,
        hops: int = 3,
        salt: int = -1,
    ) -> None:
        self.name, self.peers, self.work = name, peers, work
        self.primary = False
        self.fails_upgrade = False
        self.out = bytearray()
        self.next_due_ns = None
        self._version = version
        self._rng = rng
        self._checker = checker
        self._outside = outside
        self._marks = marks
        self._plain = plain
        self._calls_only = calls_only
        self._hops = hops
        self._salt = salt  # -1: nothing fails
        self._verdicts: dict[MessageKey, Verdict] = {}
        self._index = 0  # of the message in its record
        self._suspect = -1  # in this record it announces each message before it handles it
        self._reader = RecordReader()
        self._blob: list[bytes] | None = None
        self._state: State | None = None
        self._made: list[tuple[str, int, bytes]] = []  # calls that are not in ``out`` yet
        self._upgrading_to = 0
        self._upgraded = False
        self._snapshot: deque[bytes] = deque()  # the rest of the snapshot on its way
        self._ticks_sent = 0
        self._impulses: list[tuple[str, int] | None] = []  # (peer, number) by count; None for a tick
        self._accepted = 0
        self._has_held = False  # calls were held back at the last checkpoint
        self._sources: list[str] | None = None  # of the next records' batches, as the coordinator said
        self._source: str | None = None  # of the current batch
        self._introduced = plain  # has got its verdicts, which precede its first record
        self._careful_until = -1  # up to this record it announces the message that it will handle
        if not plain:
            self.out += encode_hello(Hello(ALL_EXTENSIONS, name))
            self.out += encode_app_description(AppDescription(version))
        for peer in peers:
            self.out += encode_attach_to(peer)

    # --- what the world checks ---------------------------------------------------------------------------------------

    @property
    def is_restless(self) -> bool:
        return self.primary or bool(self._made) or bool(self._snapshot)

    @property
    def is_done(self) -> bool:
        state = self._state
        accepted = self._plain or self._accepted >= len(self._impulses)
        return (
            self.primary
            and state is not None
            and state.begun
            and state.ticks >= self.work
            and accepted
            and not self._snapshot
            and not self._made
        )

    @property
    def made(self) -> dict[str, int]:
        return self._known.made

    @property
    def got(self) -> dict[str, int]:
        return self._known.got

    @property
    def outside(self) -> dict[str, list[int]]:
        return self._known.outside

    @property
    def spoiled(self) -> bool:
        return False

    def count_that_answer(self, caller: str) -> int:
        return 0

    @property
    def _known(self) -> State:
        if self._state is None:
            raise Violation(f"the app of {self.name} was asked to handle something before it had a state")
        return self._state

    # --- input -------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        reader = self._reader
        reader.receive_data(data)
        while (event := reader.next_event()) is not None:
            if isinstance(event, BlobStart):
                self._blob = []
            elif isinstance(event, BlobData):
                assert self._blob is not None
                self._blob.append(event.data)
                if event.last:
                    self._state = _decode_state(b"".join(self._blob))
                    self._made = self._state.held
                    self._has_held = bool(self._made)
                    self._state.held = []
                    self._blob = None
            else:
                self._record(event.header.sequence_id, event.content)
        self._flush(everything=not self._plain)

    def _record(self, sequence_id: int, content: bytes) -> None:
        if sequence_id < 0:
            for message_type, start, end in decode_messages(content):
                self._control(message_type, content[start:end])
            return
        state = self._known
        if not self._introduced:
            raise Violation(f"the app of {self.name} got record {sequence_id} before its verdicts")
        if sequence_id <= self._careful_until:
            self.out += encode_handling(Handling(sequence_id))
        if sequence_id != state.sequence_id + 1:
            raise Violation(f"the app of {self.name} got record {sequence_id} behind {state.sequence_id}")
        state.sequence_id = sequence_id
        self._index = 0
        sources = iter(self._sources) if self._sources else None
        for message_type, start, end in decode_messages(content):
            if message_type in (MessageType.RPC, MessageType.RPC_BATCH, MessageType.INITIAL_MESSAGE):
                self._source = next(sources) if sources is not None else "" if self._sources is not None else None
            if message_type == MessageType.RPC:
                self._call(content, start, end)
            elif message_type == MessageType.RPC_BATCH:
                data = content[start:end]
                _, offset = decode_batch(data)
                body = data[offset:]
                for _, first, last in decode_messages(body):
                    self._call(body, first, last)
            else:
                self._logged(message_type, content[start:end])
        self._checker.reached_state(sequence_id, crc32(_encode(state)))
        if sequence_id == self._careful_until:
            self._marks["careful run lived through"] += 1
            self.out += encode_handling(Handling(-1))

    def _logged(self, message_type: int, data: bytes) -> None:
        state = self._known
        if message_type == MessageType.RECORD_TIME:
            time_ns = int.from_bytes(data, "little")
            if time_ns < state.time_ns:
                raise Violation(f"the time of {self.name} goes back")
            state.time_ns = time_ns
        elif message_type == MessageType.INITIAL_MESSAGE:
            if data != b"begin" or state.begun:
                raise Violation(f"{self.name} was begun twice, or with {data!r}")
            self._index += 1
            state.begun = True
        elif message_type == MessageType.INSTANCE_NAME:
            if data.decode() != self.name:
                raise Violation(f"{self.name} was told that it is called {data!r}")
        else:
            raise Violation(f"the app of {self.name} got a logged message of type {message_type}")

    def _control(self, message_type: int, data: bytes) -> None:
        if message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
            if self._state is None:
                self._state = State(
                    version=self._version, made={}, made_check={}, got={}, got_check={}, outside={}, held=[]
                )
                self.out += encode_message(MessageType.INITIAL_MESSAGE, b"begin")
            self._checkpoint()
            self._become_primary()
        elif message_type == MessageType.TAKE_CHECKPOINT:
            if not (self._upgraded or self._plain) and self._rng.random() < 0.5:
                self._begin_snapshot()
            else:
                self._checkpoint()
                if self._upgraded:  # a follower gets this request as well
                    self._become_primary()
        elif message_type == MessageType.BECOMING_PRIMARY:
            self._marks["promoted"] += 1
            self._become_primary()
        elif message_type == MessageType.VERSION:
            self._upgrading_to = decode_version(data)
        elif message_type == MessageType.UPGRADE_TAKE_CHECKPOINT:
            self._upgrade()
        elif message_type == MessageType.IMPULSES_ACCEPTED:
            self._accept(decode_impulses_accepted(data))
        elif message_type == MessageType.VERDICTS:
            self._introduced = True
            self._verdicts |= {verdict.key: verdict for verdict in decode_verdicts(data)}
        elif message_type == MessageType.CAREFUL:
            careful = decode_careful(data)
            self._careful_until, self._suspect = careful.last_sequence_id, careful.suspect_sequence_id
        elif message_type == MessageType.SOURCES:
            self._sources = decode_sources(data)
        elif message_type not in (MessageType.GOODBYE, MessageType.REFUSAL, MessageType.APP_TIME):
            raise Violation(f"the app of {self.name} got a control message of type {message_type}")

    def _call(self, content: bytes, start: int, end: int) -> None:
        rpc = decode_incoming_rpc(content, start, end)
        state = self._known
        index, self._index = self._index, self._index + 1
        if state.sequence_id == self._suspect:
            doom = doom_of(rpc)
            caller, message = doom.caller if doom else None, encode_message(MessageType.RPC, content[start:end])
            self.out += encode_handling(Handling(state.sequence_id, index, 0.0, "", caller, message))
        if rpc.method_id == METHOD_CALL:
            sender, number, hops, _, _, check = _decode_call(rpc.arguments)
            if self._source not in (None, sender):
                raise Violation(f"{self.name} is told that {self._source!r} sent call {number} of {sender!r}")
            before = state.got.get(sender, 0)
            expected = before + 1
            if number != expected and not self._outside.allows(sender, self.name, number, before):
                raise Violation(
                    f"{self.name} executes call {number} of {sender or 'itself'}, {expected} is next: "
                    f"{'one was lost or is out of order' if number > expected else 'one was doubled'}"
                )
            if number != expected:
                check = state.got_check[sender] = check if number > 1 else 0
            if check != state.got_check.get(sender, 0):
                raise Violation(f"{self.name} executes another call {number} of {sender or 'itself'} than was made")
            state.got[sender] = number
            state.got_check[sender] = crc32(rpc.arguments, check)
            if hops:
                self._make(self._next_hop(number), hops - 1)
        elif rpc.method_id == METHOD_TICK:
            state.ticks += 1
            state.tag = _decode_tag(rpc.arguments)
            number = state.ticks
            for peer in self.peers:
                for _ in range(STORM_SIZE if number % 5 == 0 else 1):
                    self._make(peer, 0)
            if number % 4 == 1:
                self._make(self._next_hop(number), self._hops)
            if number % 3 == 0:
                self._make("", number % 2)
            if self._salt >= 0 and number % 3 == 1:
                self._make_doomed(self._next_hop(number // 3))
        elif rpc.method_id == METHOD_DOOMED:
            self._doomed(rpc, index)
        elif rpc.method_id == METHOD_OUTSIDE:
            sender, number = _decode_impulse(rpc.arguments)
            numbers = state.outside.setdefault(sender, [])
            if numbers and number <= numbers[-1]:
                raise Violation(f"{self.name} executes impulse {number} of {sender} behind {numbers[-1]}")
            numbers.append(number)
        else:
            raise Violation(f"{self.name} got a call of method {rpc.method_id}")

    # --- calls that fail ---------------------------------------------------------------------------------------------

    def _doomed(self, rpc: IncomingRpc, index: int) -> None:
        """Execute a doomed call. Its text, and at times its failure, are random: only the verdict fixes replays."""
        state = self._known
        key = (state.sequence_id, index, 0, 0)
        verdict = self._verdicts.get(key)
        sender, _, which = _decode_doomed(rpc.arguments)
        if verdict is None:
            if which == FLAKY and not self._checker.failures.fails_now(key, self._rng):
                state.lucky += 1
                self._make(self._next_hop(index), 1)
                return
            verdict = self._verdicts[key] = self._fail(rpc, key)
        elif self._rng.random() < 0.2:  # the first verdict counts
            self.out += encode_verdict(msgspec.structs.replace(verdict, kind=VerdictKind.UNDONE, text="another"))
        if verdict.kind is VerdictKind.KEPT:
            state.kept += 1
            self._make(self._next_hop(index), 1)
        self._make("" if sender == self.name else sender, 0, crc32(verdict.text.encode()))  # the answer

    def _fail(self, rpc: IncomingRpc, key: MessageKey) -> Verdict:
        doom, failures = doom_of(rpc), self._checker.failures
        assert doom is not None
        failures.called(key)
        if doom.kind is VerdictKind.KILLED:
            raise Death
        failures.failed(key)
        self._marks[f"verdict: {doom.kind.name}"] += 1
        text = f"{self._rng.random()}"
        message = encode_incoming_rpc(rpc.method_id, rpc.rpc_type, rpc.arguments)
        verdict = Verdict(key[0], key[1], doom.kind, "", text, caller=doom.caller, message=message)
        self.out += encode_verdict(verdict)
        return verdict

    def _make_doomed(self, destination: str) -> None:
        state = self._known
        state.doomed += 1
        self._made.append((destination, METHOD_DOOMED, self._doomed_arguments(state.doomed)))

    def _doomed_arguments(self, number: int) -> bytes:
        return _encode((self.name, number, (number + self._salt) % len(DOOMS)))

    def _next_hop(self, number: int) -> str:
        return self.peers[number % len(self.peers)] if self.peers else ""

    # --- output ------------------------------------------------------------------------------------------------------

    def _make(self, destination: str, hops: int, tag: int | None = None) -> None:
        state = self._known
        number = state.made.get(destination, 0) + 1
        state.made[destination] = number
        sender = self.name if destination else ""
        version = state.version if not destination else 0
        check = state.made_check.get(destination, 0)
        arguments = _encode((sender, number, hops, version, state.tag if tag is None else tag, check))
        state.made_check[destination] = crc32(arguments, check)
        self._made.append((destination, METHOD_CALL, arguments))

    def _flush(self, *, everything: bool) -> None:
        """Send calls in random batches; a replay can make other batches."""
        made = self._made
        if not made or (not everything and self._rng.random() < 0.4):
            return
        self._made = []
        if self._plain:
            calls = [encode_outgoing_rpc(name, method, RpcType.FORK, arguments) for name, method, arguments in made]
            payload = b"".join(calls)
            self.out += encode_batch(payload, len(calls)) + payload
            return
        run: list[bytes] = []
        destination = made[0][0]
        for name, method, arguments in made:
            if name != destination or (run and self._rng.random() < 0.2):
                self.out += encode_app_batch(MessageType.STREAM_BATCH, destination, len(run), b"".join(run))
                run, destination = [], name
            run.append(encode_incoming_rpc(method, RpcType.FORK, arguments))
        self.out += encode_app_batch(MessageType.STREAM_BATCH, destination, len(run), b"".join(run))

    def _blob_of_state(self) -> bytes:
        state = self._known
        state.held = self._made
        blob = _encode(state)
        state.held = []
        return blob

    def _checkpoint(self) -> None:
        # Calls held back at one checkpoint precede the next one.
        self._flush(everything=not self._plain or self._has_held)
        self._has_held = bool(self._made)
        blob = self._blob_of_state()
        self.out += encode_checkpoint(len(blob)) + blob

    def _begin_snapshot(self) -> None:
        self._flush(everything=True)
        self.out += encode_message(MessageType.SNAPSHOT_BEGIN)
        blob = self._blob_of_state()
        size_bytes = self._rng.randrange(20, 200)
        for start in range(0, len(blob), size_bytes):
            self._snapshot.append(encode_message(MessageType.SNAPSHOT_CHUNK, blob[start : start + size_bytes]))
        why_not = b"no memory" if self._rng.random() < 0.1 else b""
        self._snapshot.append(encode_message(MessageType.SNAPSHOT_END, why_not))
        self._marks["snapshot taken"] += not why_not

    def _upgrade(self) -> None:
        state = self._known
        to = self._upgrading_to
        if self.primary or to != state.version + 1:
            raise Violation(f"{self.name} of version {state.version} was asked to upgrade to {to}")
        self._flush(everything=True)
        if self.fails_upgrade and to == self._version:
            self.out += encode_message(MessageType.UPGRADE_FAILED, b"it can't (simulated)")
            return
        self._marks["upgrade of the past repeated"] += to < self._version
        state.version = to
        self._upgraded = True
        self._checkpoint()

    # --- acts by itself ----------------------------------------------------------------------------------------------

    def _become_primary(self) -> None:
        if not self.primary:
            self.primary = True
            self._ticks_sent = self._known.ticks

    def _accept(self, count: int) -> None:
        if not self._accepted < count <= len(self._impulses):
            raise Violation(f"{count} impulses of {self.name} are accepted, it has sent {len(self._impulses)}")
        for impulse in self._impulses[self._accepted : count]:
            if impulse is not None:
                self._outside.accept(self.name, *impulse)
        self._accepted = count

    def time_ns(self, steady_ns: int) -> int:
        return steady_ns

    def log_time(self, time_ns: int) -> None:
        """Do nothing: the app asks for no time."""

    def act(self) -> bool:
        """Send a part of a snapshot, a few ticks, an impulse to a peer."""
        if self._snapshot:
            self.out += self._snapshot.popleft()
        rng = self._rng
        if self._made and rng.random() < 0.7:
            self._flush(everything=True)
        if not self.primary:
            return bool(self._snapshot or self._made)
        if not self._plain and len(self._impulses) - self._accepted > IMPULSES_OUTSTANDING_MAX:
            return True
        while self._ticks_sent < self.work:
            self._ticks_sent += 1
            self._impulse("", METHOD_TICK, _encode(self._outside.next_number()))
            self._impulses.append(None)
            if rng.random() < 0.5:
                break
        while self.peers and not self._calls_only and self._ticks_sent < self.work and rng.random() < 0.5:
            peer = rng.choice(self.peers)
            number = self._outside.next_number()
            self._impulse(peer, METHOD_OUTSIDE, _encode((self.name, number)))
            self._impulses.append((peer, number))
        if self._salt >= 0 and self._ticks_sent < self.work and rng.random() < 0.15:
            destination = rng.choice(["", *self.peers])
            self._impulse(destination, METHOD_DOOMED, self._doomed_arguments(self._outside.next_number()))
            self._impulses.append(None)
        return bool(self._snapshot or self._made) or self._ticks_sent < self.work

    def _impulse(self, destination: str, method_id: int, arguments: bytes) -> None:
        if self._plain:
            self._flush(everything=True)  # its output is one queue
            self.out += encode_outgoing_rpc(destination, method_id, RpcType.IMPULSE, arguments)
        else:
            rpc = encode_incoming_rpc(method_id, RpcType.IMPULSE, arguments)
            self.out += encode_app_batch(MessageType.IMPULSE_BATCH, destination, 1, rpc)
