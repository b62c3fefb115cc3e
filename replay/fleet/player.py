"""Player of one service in this process: it takes records, of its log or others, and returns their outputs."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import FrameType
from typing import Any

from msgspec import Struct, field

from immortal.appsdk.calls.outbox import encode_call, make_writer
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.running.tracing import TracingDispatcher
from immortal.appsdk.waiting.impulses import Effect, encode_result
from immortal.coordinator.core.errors import DamagedLogError
from immortal.coordinator.core.formatting import Methods
from immortal.coordinator.core.interfaces import ONESELF, CheckpointHeader
from immortal.coordinator.log.reader import RecordSource
from immortal.coordinator.log.record_contents import batches, record_of, rpcs
from immortal.protocol import personal_keys
from immortal.protocol.batch import encode_batch
from immortal.protocol.errors import ImmortalError
from immortal.protocol.extensions import RandomDraw, decode_app_batch, decode_origins, encode_record_time
from immortal.protocol.messages import MessageType, RpcKind, RpcType, decode_messages, encode_incoming_rpc
from immortal.protocol.record import decode_header, encode_record
from immortal.protocol.safe_output import printable
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, decode_trailer
from immortal.protocol.verdicts import Verdict, VerdictKind
from immortal.replay.host import LocalRun
from immortal.replay.plan import OWN_VERSION, ReplayError, ReplayPlan, Route, plan_first, usable_checkpoints
from immortal.replay.result import Sink
from immortal.replay.session import Ended, Event, Outputs, VerdictGiven

Place = tuple[int, int]
"""Place of a message: (record, its index in the record)."""

NOTHING = encode_incoming_rpc(0, RpcType.ASYNC, b"\x91\x00", RpcKind.RETURNED_NOTHING)
"""Answer to call 0, which nobody makes: it holds the place of a missing message, and does nothing."""

FIRST_OTHER_NUMBER = 10**12  # of calls, effects and executions that the log's code did not have

_write_time = make_writer("the clock", CLOCK_METHOD_ID, RpcType.IMPULSE)


class Slot(Struct, frozen=True):
    """Message of a logged record. ``source``: the instance that sent it, "" is itself; None: from outside."""

    batch: BatchSource
    source: str | None
    position: int
    message: bytes


class LoggedRecord(Struct, frozen=True):
    sequence_id: int
    value: bytes
    trailer: Trailer

    @classmethod
    def of(cls, value: bytes) -> LoggedRecord:
        header = decode_header(value)
        return cls(header.sequence_id, value, decode_trailer(value[header.size_bytes :], header.check))

    @property
    def time_ns(self) -> int:
        return self.trailer.time_ns

    def slots(self) -> list[Slot]:
        """Return the messages of the record, in order; a what-if never changes an initial message."""
        found = []
        contents = batches(record_of(self.value).content)
        for batch, content in zip(self.trailer.batches, contents, strict=True):
            source = batch.name if batch.kind == BatchKind.STREAM else None
            is_initial = content.message_type == MessageType.INITIAL_MESSAGE
            messages = [content.payload] if is_initial else [message for message, _ in rpcs(content.payload)]
            found += [Slot(batch, source, batch.first_position + at, one) for at, one in enumerate(messages)]
        return found


def logged(source: RecordSource, checkpoint: CheckpointHeader, to_ns: int | None) -> Iterator[LoggedRecord]:
    """Yield the records after ``checkpoint``, up to the present last one and up to ``to_ns``."""
    try:
        for value in source.values(checkpoint.sequence_id + 1, source.summary().last_sequence_id):
            record = LoggedRecord.of(value)
            if to_ns is not None and record.time_ns > to_ns:
                return
            yield record
    except DamagedLogError as error:
        raise DamagedLogError(f"{source.identity.instance_name}: {error}", error.sequence_id) from None


class Output(Struct, frozen=True):
    """Message that a run sent, in incoming form. ``place``: of the message that caused it."""

    destination: str
    position: int
    place: Place
    message: bytes


class Made(Struct, array_like=True, frozen=True):
    """Run of messages that the app sent."""

    destination: str
    first_position: int
    count: int


class Turn(Struct, array_like=True):
    """Result of one record: ``output``: the app's output as bytes, ``made``: runs of its messages.

    ``name``: of the service. ``stopped``: why the app stopped; "" if it continues.
    """

    name: str
    output: bytes = b""
    made: list[Made] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    draws: list[RandomDraw] = field(default_factory=list)
    stopped: str = ""

    @property
    def outputs(self) -> Iterator[Output]:
        """Messages that the code sent, one by one."""
        runs = ((one.destination, range(one.first_position, one.first_position + one.count)) for one in self.made)
        return outputs_in(self.output, self.name, runs)


def outputs_in(output: bytes, name: str, runs: Iterable[tuple[str, range]]) -> Iterator[Output]:
    """Yield the messages in the output of the app of the service ``name``, at these positions by destination."""
    positions: dict[str, list[int]] = defaultdict(list)
    for destination, run in runs:
        positions[destination] += run
    left = {destination: iter(found) for destination, found in positions.items()}
    places: list[Place] = []
    for message_type, start, end in decode_messages(output):
        if message_type == MessageType.ORIGINS:
            origins = decode_origins(output[start:end])
            places = [place for one in origins for place in [(one.sequence_id, one.message_index)] * one.count]
        elif message_type == MessageType.STREAM_BATCH:
            batch = decode_app_batch(output[start:end])
            destination = ONESELF if batch.destination == name else batch.destination
            offset, payload = 0, batch.payload
            for place, (_, _, behind) in zip(places, decode_messages(payload), strict=True):
                yield Output(destination, next(left[destination]), place, payload[offset:behind])
                offset = behind
        elif message_type == MessageType.CHECKPOINT:
            return  # of an upgrade; its blob is no message


def first_checkpoint(source: RecordSource, not_after_ns: int | None, behind: int = -1) -> Route:
    """Plan a run from the oldest sound checkpoint, or from the newest up to ``not_after_ns``; from none before the
    record ``behind``. Raises ReplayError."""
    summary = source.summary()
    name = source.identity.instance_name
    if summary.extensions is None:
        raise ReplayError(f"{name}: the log is empty: the instance has never completed its first start")
    if not summary.extensions:
        raise ReplayError(f"{name}: its app speaks the base protocol, and can't be run here")
    headers = [one for one in usable_checkpoints(summary) if one.sequence_id >= behind]
    if not_after_ns is not None:
        early = [one for one in headers if one.time_ns <= not_after_ns]
        headers = [*reversed(early), *headers[len(early) :]]
    try:
        return plan_first([one.checkpoint_id for one in headers], source, summary, ReplayPlan(follow=True))
    except ReplayError as error:
        raise ReplayError(f"{name}: {error}") from None


NEW_OBJECTS_MAX = 50_000  # before the next collection of garbage
_running = False
_limit_s = _given_s = 0.0  # no limit
CAUGHT_S = 5.0  # after the limit: for code to end, before its process is ended
_is_over = False
_FORBIDDEN = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork")


def stop(number: int, frame: FrameType | None) -> None:
    """Handle SIGALRM: raise TimeoutError; end the process if the code has caught that, and goes on."""
    global _is_over
    if _is_over:
        place = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        text = (
            f"error: the code{place} goes on after its limit, {_given_s:g} s: it catches the TimeoutError that ends it"
        )
        os.write(2, f"{printable(text)}\n".encode())
        os._exit(1)
    _is_over = True
    raise TimeoutError(f"ended after {_given_s:g} s, the limit in a what-if (--handler-limit)")


def seal_process(limit_s: float) -> None:
    """Forbid connections and processes to code that a player runs, and limit a record, and a check, to ``limit_s``, as
    long as this process lives; threads that start from here on do not keep it alive. Call it in the main thread.
    """
    global _limit_s
    start = threading.Thread.start

    def start_as_daemon(thread: threading.Thread) -> None:
        thread.daemon = True
        start(thread)

    setattr(threading.Thread, "start", start_as_daemon)  # noqa: B010 (the type checker refuses another form)
    gc.set_threshold(NEW_OBJECTS_MAX)  # many handlers wait at once: a fifth of the time would go into collections

    def check_event(event: str, arguments: object) -> None:
        if _running and event.startswith(_FORBIDDEN):
            raise PermissionError(f"a what-if refuses {event}: nothing leaves it; use immortal.effect")

    sys.addaudithook(check_event)
    signal.signal(signal.SIGALRM, stop)
    os.environ[personal_keys.NOTES_VARIABLE] = os.devnull
    _limit_s = limit_s


def can_fork() -> bool:
    """Return True if a copy of this process can run code that is tried: it is sealed, and has one thread and two
    processors."""
    return _limit_s > 0 and threading.active_count() == 1 and len(os.sched_getaffinity(0)) > 1


@contextmanager
def sealed() -> Iterator[None]:
    """Refuse connections and processes to code that runs in this context, in a process that is sealed."""
    global _running
    was_running, _running = _running, True
    try:
        yield
    finally:
        _running = was_running


@contextmanager
def limited(at_least_s: float = 0.0) -> Iterator[None]:
    """Raise TimeoutError inside the block when the limit of :func:`seal_process` is over, and ``at_least_s``."""
    global _given_s, _is_over
    if _limit_s:
        _given_s, _is_over = max(_limit_s, at_least_s), False
        signal.setitimer(signal.ITIMER_REAL, _given_s, CAUGHT_S)
    try:
        yield
    finally:
        if _limit_s:
            signal.setitimer(signal.ITIMER_REAL, 0)


class Player(LocalRun):
    """Run of a service from a checkpoint on. ``is_new``: it tries code, so it handles failed messages again.

    ``outsiders``: as in :class:`LocalApp`. Raises ReplayError if the class does not take the state.
    """

    def __init__(
        self,
        source: RecordSource,
        route: Route,
        definition: Definition,
        sink: Sink,
        *,
        is_new: bool = False,
        outsiders: frozenset[str] = frozenset(),
    ) -> None:
        self._turn = Turn(source.identity.instance_name)
        header = route.checkpoint
        if is_new and definition.version not in (header.version, *(one.version for one in route.versions)):
            route = Route(header, None, upgrade_to=OWN_VERSION)
        sends_verdict = not_of_code if is_new else lambda verdict: True
        super().__init__(
            source, route, definition, sink, now_ns=header.time_ns, sends_verdict=sends_verdict, outsiders=outsiders
        )
        assert isinstance(self.app.dispatcher, TracingDispatcher)
        self.dispatcher = self.app.dispatcher
        self.tasks = self.dispatcher.tasks
        self.dispatcher.reports_numbers = False  # they are taken from the tasks
        self.session.reads_origins = False
        self.restore()
        if self._turn.stopped:
            name = source.identity.instance_name
            raise ReplayError(f"{name}: {definition.name} does not accept the state: {self._turn.stopped}")
        if is_new:
            self.tasks.receive_draws(())
            if self.tasks.matcher is not None:
                self.tasks.matcher.number_own_from(FIRST_OTHER_NUMBER)

    @cached_property
    def methods(self) -> Methods:
        return all_method_names(self.definition)

    @property
    def next_due_ns(self) -> int | None:
        """Time of the next timer of its handlers; None if there is none."""
        clock = self.tasks.clock
        return clock.next_due_ns() if clock.is_needed else None

    def give_logged(self, record: LoggedRecord) -> Turn:
        """Give the app a record as the log has it."""
        return self._turn_of(partial(self.session.give_record, record.value, record.trailer))

    def give_slots(self, sequence_id: int, time_ns: int, slots: Sequence[Slot], *, is_logs: bool) -> Turn:
        """Give the app a record of these messages. ``is_logs``: it replaces the log's record of that number, as the
        last part of it."""
        content, sources = [encode_record_time(time_ns)], []
        at = 0
        while at < len(slots):
            end = at
            while end < len(slots) and slots[end].batch is slots[at].batch:
                end += 1
            payload = b"".join(slot.message for slot in slots[at:end])
            content += (encode_batch(payload, end - at), payload)
            batch = slots[at].batch
            sources.append(BatchSource(batch.kind, batch.name, batch.first_position, end - at, batch.send_time_ns))
            at = end
        value = encode_record(self.source.identity.committer_id, sequence_id, b"".join(content))
        self.dispatcher.expect(sequence_id)
        if is_logs:
            return self._turn_of(partial(self.session.give_record, value, Trailer(time_ns, sources)))
        return self._turn_of(partial(self.session.give_other_record, value, sources))

    def _turn_of(self, action: Callable[[], object]) -> Turn:
        self._turn = turn = Turn(self.source.identity.instance_name)
        action()
        self.exchange()
        turn.draws, self.tasks.drawn = self.tasks.drawn, []
        return turn

    def time_message(self, time_ns: int) -> bytes:
        """Return the message by which the log gives the time."""
        decided = self.tasks.clock.decide(time_ns)
        return encode_call(_write_time, (time_ns, decided) if decided else (time_ns,))

    def waiting_effects(self) -> dict[int, Effect]:
        """Return the effects without a result that handlers have asked for, by number."""
        effects = self.tasks.effects
        return {number: effect for number, effect in effects.waiting.items() if isinstance(effect, Effect)}

    def effect_message(self, effect: Effect, run: Callable[[Any], Any]) -> tuple[bytes, str]:
        """Return the message with the result of ``run(request)``, and its description."""
        found: list[bytes] = []
        request = self.tasks.effects.make_request(
            effect, lambda raised, value: found.append(encode_result(effect, raised, value))
        )
        try:
            value = run(request)
            request.returned(value)
            return found[0], f"returned {value!r}"
        except Exception as error:  # of the user's function
            request.raised(error)
            return found[0], f"raised {type(error).__name__}: {error}"

    def finish(self, last_sequence_id: int) -> bytes:
        """End the run, and return the state. Raises ReplayError if it can't be saved."""
        if self.ended is None:
            self.dispatcher.expect(last_sequence_id + 1)
            turn = self._turn_of(self.session.end_here)
            if turn.stopped:
                raise ReplayError(f"{self.definition.name}: the state at the end: {turn.stopped}")
        return self.blob

    def start_of_call(self, number: int | None) -> Place | None:
        """Return what began the execution that makes the call of that number; None: unknown."""
        call = None if number is None else self.tasks.calls.get(number)
        task = None if call is None else self.tasks.waiting(call.task.number)
        return None if task is None else task.started_by

    def close(self) -> None:
        with sealed():  # handlers that wait are closed: their finally clauses run
            self.app.close()

    def exchange(self) -> None:
        global _running  # an audit hook sees the whole process
        _running = True
        try:
            with limited():
                super().exchange()
        except ImmortalError as error:
            self._turn.stopped = str(error)
            self.ended = self.ended or Ended()
        finally:
            _running = False

    def process_output(self) -> None:
        self.dispatcher.outbox.close_batches()
        self.app.take_output()
        self._turn.output += self.app.output
        super().process_output()

    def handle_event(self, event: Event) -> None:
        super().handle_event(event)
        if isinstance(event, Outputs):
            self._turn.made.append(Made(event.destination, event.first_position, event.count))
        elif isinstance(event, VerdictGiven):
            self._turn.verdicts.append(event.verdict)
        elif isinstance(event, Ended) and event.failure is not None:
            place = f"record {event.failure.sequence_id}, message {event.failure.message_index}"
            self._turn.stopped = f"{place}: {event.failure.text}"


def not_of_code(verdict: Verdict) -> bool:
    """Return True if other code can't change the verdict, or must not run the message here: it is skipped."""
    return verdict.kind in (VerdictKind.KILLED, VerdictKind.SKIPPED)
