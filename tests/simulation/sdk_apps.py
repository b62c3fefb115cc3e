"""Apps of the real SDK: its dispatcher, waiting handlers and timers; without threads, sockets or a real clock.

Each instance makes deals: handlers that call others and wait, sleep, race, gather, wait for a signal, are refused. The
caller numbers its calls to each instance, in the order in which it makes them, and the receiver checks the numbers.
After each record the whole state, with all that waits, is compared with that of the first time.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

import immortal
from immortal import Immortal, Impulses, every, impulse, peer, rpc
from immortal.appsdk.dispatch.dispatcher import Dispatcher
from immortal.appsdk.dispatch.events import BecamePrimary, Event, SnapshotBegun
from immortal.appsdk.dispatch.lifecycle import upgrades
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.handlers.log import FailureReporter
from immortal.appsdk.state.snapshots import Copies
from immortal.errors import RecoveryNeeded
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.readers import Record
from immortal.protocol.verdicts import Verdict
from tests.simulation.apps import IMPULSES_OUTSTANDING_MAX, Outside
from tests.simulation.callers import METHODS_THAT_FAIL, method_of_request, served_value
from tests.simulation.failing import Death
from tests.simulation.marks import Marks
from tests.simulation.sdk_failing import KINDS_OF_DEALS, Failing, Now, Stranger
from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.node import Node

VERSIONS = 3
KINDS = 6  # of deals that succeed


class RefusedDeal(Exception):  # noqa: N818
    pass


class Worker(Failing):
    """Handlers of all versions and instances. ``me``, ``others`` and ``salt`` are set by the class of each instance.

    ``salt``: selects the kinds of deals; -1: none of them fails.
    """

    version: int
    begun: list[int]
    ended: dict[int, int]
    made: dict[str, int]
    got: dict[str, int]
    outside: dict[str, list[int]]
    served: dict[int, int]
    beats: int
    salt: ClassVar[int] = -1

    def __init__(self) -> None:
        self.version = 1
        self.begun = []
        self.ended = {}
        self.made = {}
        self.got = {}
        self.outside = {}
        self.served = {}
        self.beats = 0
        self.kept = self.lucky = self.spoiled = 0

    # --- a deal ------------------------------------------------------------------------------------------------------

    @impulse
    async def deal(self, number: int) -> None:
        first, second, kind = await immortal.step(self.begin, number)
        result = 0
        if kind >= KINDS:
            result = await self.deal_that_fails(kind - KINDS, first, number)
        elif kind == 0:
            result = await self.ask(first, number)
        elif kind == 1:
            result, more = await asyncio.gather(self.ask(first, number), self.ask(second, number))
            result += more
        elif kind == 2:
            winner = await immortal.race(self.ask_later(first, number), immortal.sleep(timedelta(milliseconds=1)))
            result = winner.index
        elif kind == 3:
            await immortal.step(self.ask_for_signal, first, number)
            result = await immortal.event(f"deal {number}", int)
        elif kind == 4:
            await immortal.sleep(timedelta(milliseconds=2))
            try:
                await self.ask(first, -number)
            except RefusedDeal:
                result = await self.ask_later(second, number)
        else:
            result = await self.think(number)
        await immortal.step(self.end, number, result)

    async def ask(self, other: str, number: int) -> int:
        me, count = await immortal.step(self.count_call, other)
        answer: int = await getattr(self, f"to_{other}").answer(me, count, number)
        return answer

    async def ask_later(self, other: str, number: int) -> int:
        me, count = await immortal.step(self.count_call, other)
        answer: int = await getattr(self, f"to_{other}").answer_later(me, count, number)
        return answer

    @rpc
    async def think(self, number: int) -> int:
        await immortal.sleep(timedelta(milliseconds=1))
        return number + immortal.random.randrange(100)

    @rpc
    def begin(self, number: int) -> tuple[str, str, int]:
        _expect(number not in self.begun, f"deal {number} of {self.me} is begun twice")
        self.begun.append(number)
        if number == 1:
            self.oversleep.fork()
        others = self.others
        kind = number % KINDS if self.salt < 0 else (5 * number + self.salt) % (KINDS + KINDS_OF_DEALS)
        return others[number % len(others)], others[(number + 1) % len(others)], kind

    @rpc
    def end(self, number: int, result: int) -> None:
        _expect(number not in self.ended, f"deal {number} of {self.me} ends twice")
        self.ended[number] = result

    @rpc
    def count_call(self, other: str) -> tuple[str, int]:
        self.made[other] = self.made.get(other, 0) + 1
        return self.me, self.made[other]

    # --- calls of others ---------------------------------------------------------------------------------------------

    @rpc(raises=[RefusedDeal])
    def answer(self, caller: str, count: int, number: int) -> int:
        self.take(caller, count)
        if number < 0:
            raise RefusedDeal(str(number))
        return number * 7

    @rpc
    async def answer_later(self, caller: str, count: int, number: int) -> int:
        await immortal.step(self.take, caller, count)
        await immortal.sleep(timedelta(microseconds=500))
        return number * 5

    @rpc
    def take(self, caller: str, count: int) -> None:
        expected = self.got.get(caller, 0) + 1
        _expect(count == expected, f"{self.me} executes call {count} of {caller}, {expected} is next")
        self.got[caller] = count

    @rpc
    def ask_for_signal(self, other: str, number: int) -> None:
        _, count = self.count_call(other)
        getattr(self, f"to_{other}").signal_back.fork(self.me, count, number)

    @rpc
    def signal_back(self, caller: str, count: int, number: int) -> None:
        self.take(caller, count)
        _, own_count = self.count_call(caller)
        getattr(self, f"to_{caller}").hear.fork(self.me, own_count, number)

    @rpc
    def hear(self, caller: str, count: int, number: int) -> None:
        self.take(caller, count)
        immortal.signal(f"deal {number}", number + self.version)

    @impulse
    def note(self, sender: str, number: int) -> None:
        numbers = self.outside.setdefault(sender, [])
        _expect(
            not numbers or number > numbers[-1], f"{self.me} executes impulse {number} of {sender} behind {numbers}"
        )
        numbers.append(number)

    # --- callers from outside ----------------------------------------------------------------------------------------

    @rpc
    def serve(self, client: int, number: int) -> int:
        expected = self.served.get(client, 0) + 1
        while method_of_request(expected, fails=self.salt >= 0) in METHODS_THAT_FAIL:
            expected += 1
        _expect(number == expected, f"{self.me} executes request {number} of caller {client}, {expected} is next")
        self.served[client] = number
        return served_value(client, number)

    @rpc
    async def serve_later(self, client: int, number: int) -> int:
        value = await immortal.step(self.serve, client, number)
        await immortal.sleep(timedelta(microseconds=300))
        return value

    @every("20ms")
    def beat(self) -> None:
        self.beats += 1

    # A run lasts a tenth of a second, whatever its clocks show.

    @every("30m")
    def beat_slowly(self) -> None:
        Now.life.is_late("half an hour has passed")

    @rpc
    async def oversleep(self) -> None:
        await immortal.sleep(timedelta(minutes=30))
        await immortal.step(self.overslept)

    @rpc
    def overslept(self) -> None:
        Now.life.is_late("somebody has slept for half an hour")


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise Violation(problem)


@cache
def worker_class(name: str, names: tuple[str, ...], version: int, salt: int) -> type[Immortal]:
    """Return the class of one instance in a fleet of ``names``."""
    members: dict[str, Any] = {"me": name, "others": tuple(other for other in names if other != name), "salt": salt}
    members |= {f"strange_{other}": peer(lambda: Stranger, other) for other in names if other != name}
    members |= {f"to_{other}": peer(lambda: Worker, other) for other in names if other != name}
    members["__module__"] = __name__
    class_name = f"Worker_{name}_{version}"
    if version == 1:
        return type(Worker)(class_name, (Worker,), members, checkpoint="fork")

    def upgrade(cls: Any, old: Any) -> Any:
        new = cls()
        for key in ("begun", "ended", "made", "got", "outside", "served", "beats", "kept", "lucky", "spoiled"):
            setattr(new, key, getattr(old, key))
        new.version = old.version + 1
        return new

    members["upgrade"] = classmethod(upgrade)
    made = type(Worker)(class_name, (Worker,), members)
    return upgrades(worker_class(name, names, version - 1, salt))(made)


REWINDS_MAX = 1000  # for one record: each of its messages fails at most once, and it has some hundred


class CheckedDispatcher(Dispatcher):
    """Dispatcher that gives the state after each record to ``node``'s checker."""

    def __init__(self, definition: Definition, node: Node, rng: random.Random) -> None:
        self._node = node
        super().__init__(definition, lambda: rng.randbytes(16))
        self._busy = BusyCopies(node.name, enabled=rng.random() < 0.8, records_max=rng.randrange(1, 30))
        self._rewinds.copies = self._busy

    def _logged(self, record: Record) -> Iterator[Event]:
        self._busy.rewinds = 0
        yield from super()._logged(record)
        self._node.checker.reached_state(record.header.sequence_id, crc32(b"".join(self._life.encode())))


class BusyCopies(Copies):
    """Copies that renew the state's copy after a few records, or keep none."""

    def __init__(self, name: str, *, enabled: bool, records_max: int) -> None:
        super().__init__(enabled=enabled, keeps_large=False)
        self._name = name
        self._records_max = records_max
        self.rewinds = 0  # for the current record

    def expect_failures(self) -> None:
        super().expect_failures()
        self.rewinds += 1
        if self.rewinds > REWINDS_MAX:
            raise Violation(f"the app of {self._name} is rewound for ever for one record")

    def add(self, record: Record, *, rewound: bool, undo_size_bytes: int = 0) -> bool:
        wanted = super().add(record, rewound=rewound, undo_size_bytes=undo_size_bytes)
        copy = self.current
        return wanted or (copy is not None and len(copy.tail) > self._records_max)


class _MarkingReporter(FailureReporter):
    def __init__(self, marks: Marks) -> None:
        super().__init__("")
        self._marks = marks

    def failed(self, verdict: Verdict, arguments: str = "", instance: str = "") -> None:
        self._marks[f"verdict: {verdict.kind.name}"] += 1

    def declared(self, *arguments: Any) -> None:
        pass


class SdkApp:
    """App of the SDK, as :class:`tests.simulation.apps.App`."""

    def __init__(
        self, node: Node, peers: list[str], work: int, version: int, rng: random.Random, outside: Outside, marks: Marks
    ) -> None:
        self.primary = False
        self.fails_upgrade = False
        self.out = bytearray()
        self._node, self._peers, self._work = node, peers, work
        self._rng = rng
        self._outside = outside
        self._marks = marks
        plan = node.world.plan
        cls = worker_class(node.name, plan.names, version, plan.salt if plan.fails else -1)
        self.rng, self.failures = random.Random(rng.random()), node.checker.failures
        self._dispatcher = CheckedDispatcher(definition_of(cls), node, rng)
        self._dispatcher.context.record_time_ns = node.now_ns  # a first start reads the clock
        self._dispatcher.context.reporter = _MarkingReporter(marks)
        self._queue = self._dispatcher.outbox.impulses
        self.context = self._dispatcher.context
        self._impulses: Impulses | None = None
        self._deals_sent = 0
        self._sent: deque[tuple[int, str, int]] = deque()  # (count of all impulses by then, peer, number)
        self._snapshot: deque[bytes] = deque()
        self._take_output()

    def is_late(self, what: str) -> None:
        """Check that a late timer occurs only if the machine was started with a wrong clock."""
        _expect(self._node.time.believes_wrong, f"{what} on {self._node.name}")

    @property
    def _state(self) -> Any:
        return self._dispatcher.instance

    @property
    def is_restless(self) -> bool:
        return self.primary

    @property
    def is_done(self) -> bool:
        if not self.primary or self._snapshot:
            return False
        return len(self._state.ended) >= self._work and not self._sent and self._deals_sent >= self._work

    @property
    def made(self) -> dict[str, int]:
        made: dict[str, int] = self._state.made
        return made

    @property
    def got(self) -> dict[str, int]:
        got: dict[str, int] = self._state.got
        return got

    @property
    def outside(self) -> dict[str, list[int]]:
        outside: dict[str, list[int]] = self._state.outside
        return outside

    @property
    def spoiled(self) -> bool:
        return self._state.spoiled != 0  # type: ignore[no-any-return]

    def count_that_answer(self, caller: str) -> int:
        callers = [task.caller for task in self._dispatcher.tasks._tasks.values()]
        return callers.count(caller) + (callers.count("") if caller == self._node.name else 0)

    # --- as the SDK's transport does ---------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        Now.life = self
        dispatcher = self._dispatcher
        dispatcher.receive_data(data)
        while (event := self._next_event()) is not None:
            if isinstance(event, BecamePrimary):
                self._become_primary()
            elif isinstance(event, SnapshotBegun):
                self._take_output()  # the Begin, before any part of the blob
                blob = b"".join(event.encode()[1])
                size_bytes = self._rng.randrange(50, 500)
                for start in range(0, len(blob), size_bytes):
                    chunk = blob[start : start + size_bytes]
                    self._snapshot.append(encode_message(MessageType.SNAPSHOT_CHUNK, chunk))
                self._snapshot.append(encode_message(MessageType.SNAPSHOT_END))
                self._marks["snapshot taken"] += 1
            self._take_output()
        while self._sent and self._sent[0][0] <= self._queue._accepted_count:
            _, other, number = self._sent.popleft()
            if other:
                self._outside.accept(self._node.name, other, number)
        self._take_output()

    def _next_event(self) -> Event | None:
        dispatcher = self._dispatcher
        try:
            return dispatcher.next_event()
        except RecoveryNeeded as error:
            self._marks["recovered for want of a copy"] += 1
            dispatcher.announce_leaving(str(error))
            self._take_output()
            raise Death from error

    def _take_output(self) -> None:
        for chunk in self._dispatcher.data_to_send():
            self.out += chunk

    @property
    def next_due_ns(self) -> int | None:
        return self._dispatcher.next_due_ns

    def time_ns(self, steady_ns: int) -> int:
        """Return the time as the transport does: the coordinator's time, advanced by the steady clock."""
        told = self._dispatcher.time
        return self._node.now_ns if told is None else told.time_ns + steady_ns - told.steady_ns

    def log_time(self, time_ns: int) -> None:
        self._dispatcher.log_time(time_ns)
        self._take_output()

    # --- as a hook does ----------------------------------------------------------------------------------------------

    def _become_primary(self) -> None:
        if self.primary:
            return
        self.primary = True
        self._impulses = Impulses(self._state, self._dispatcher.definition, self._queue)
        self._deals_sent = len(self._state.begun)
        self._marks["async handler waited through a crash"] += self._dispatcher.tasks.count > 0

    @contextmanager
    def _as_a_hook(self) -> Iterator[Any]:
        """Act as a hook's thread, of which there is none here."""
        context = self._dispatcher.context
        own, context.thread_id = context.thread_id, 0
        try:
            yield self._impulses
        finally:
            context.thread_id = own

    def act(self) -> bool:
        if self._snapshot:
            self.out += self._snapshot.popleft()
        if not self.primary or len(self._sent) > IMPULSES_OUTSTANDING_MAX:
            return True
        rng = self._rng
        with self._as_a_hook() as impulses:
            if self._deals_sent < self._work:
                self._deals_sent += 1
                impulses.deal(self._deals_sent)
                self._sent.append((self._queue._sent_count, "", 0))
                if rng.random() < 0.3:
                    other = rng.choice(self._peers)
                    number = self._outside.next_number()
                    getattr(impulses, f"to_{other}").note(self._node.name, number)
                    self._sent.append((self._queue._sent_count, other, number))
                if self._node.world.plan.fails and rng.random() < 0.5:
                    self._doomed_impulse(impulses)
        self._take_output()
        return bool(self._snapshot) or self._deals_sent < self._work

    def _doomed_impulse(self, impulses: Any) -> None:
        rng = self._rng
        other = rng.choice(self._peers)
        number = self._outside.next_number()
        to = rng.choice((impulses, getattr(impulses, f"to_{other}")))
        name = rng.choice(("undone", "flaky", "remains", "undone_later", "doomed_deal", "lethal", "strange"))
        if name == "strange":
            getattr(impulses, f"strange_{other}").unknown(number)
        else:
            getattr(to, name)(number)
        self._sent.append((self._queue._sent_count, "", 0))
