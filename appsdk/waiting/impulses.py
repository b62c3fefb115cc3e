"""Logged impulses that wake handlers: timers and schedules, results of effects, events and signals."""

from __future__ import annotations

import contextvars
import hashlib
import heapq
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.outbox import encode_call, make_writer
from immortal.appsdk.calls.user_code import context_of_owner
from immortal.appsdk.effects.effect import EffectFunction, EffectOptions, EffectRequest, EffectRunner, encodable
from immortal.appsdk.errors import UsageError
from immortal.appsdk.handlers.decorators import CLOCK_METHOD_ID, EFFECT_METHOD_ID, Cron, Handler, Period
from immortal.appsdk.handlers.definition import Definition
from immortal.appsdk.state.journal import WAYS_OUT, JournalError, SavedTasks, describe_operation
from immortal.appsdk.waiting.operations import Event, Operation, Owner, Timer
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import RpcType

_UNUSED_COUNT_MIN = 64
_write_time = make_writer("the clock", CLOCK_METHOD_ID, RpcType.IMPULSE)


def earlier(one_ns: int | None, other_ns: int | None) -> int | None:
    """Return the earlier of two times; None: never."""
    if one_ns is None or other_ns is None:
        return other_ns if one_ns is None else one_ns
    return min(one_ns, other_ns)


class LoggedTime(msgspec.Struct, array_like=True, frozen=True):
    """Impulse with the time, in ns since the Unix epoch. ``decided``: see :meth:`Clock.decide`.

    ``jumped_ns``: how far the clock was stepped forward, to ``time_ns``; 0: it was not.
    """

    time_ns: int
    decided: dict[int, int] = {}
    jumped_ns: int = 0


class Deadline(msgspec.Struct, frozen=True):
    """Deadline of the handler ``number``: a timer that began with it. Times in ns since the epoch."""

    number: int
    began_ns: int
    detail: int  # the time when it is due, as in a timer


Due: TypeAlias = Timer | Deadline


class Clock:
    """Timers and schedules. ``schedules``: when each handler is due next, in ns since the Unix epoch, by method ID.

    ``jumps``: (since, by): waits that began before ``since`` are due later by ``by``, as the clock was stepped then.
    """

    def __init__(self) -> None:
        self.is_needed = False  # a handler can wait for a time
        self.schedules: dict[int, int] = {}
        self.jumps: list[tuple[int, int]] = []
        self.jumped_to_ns = 0  # by the last jump in the log
        self._timers: dict[int, Due] = {}
        self._due: list[tuple[int, int]] = []  # a heap of (when, number of the timer), cancelled ones included
        self._scheduled: list[Handler[Any, Any]] = []

    def use(self, definition: Definition) -> None:
        """Use this class's handlers from here on. Records with handlers that sleep can still follow."""
        handlers = definition.handlers.values()
        self._scheduled = [handler for handler in handlers if handler.schedule]
        self.is_needed = bool(self._scheduled) or any(handler.is_async for handler in handlers)

    def restore(self, saved: SavedTasks) -> None:
        """Restore schedules and clock jumps, without timers."""
        self.schedules, self.jumps, self.jumped_to_ns = dict(saved.schedules), list(saved.jumps), saved.jumped_to_ns
        self._timers.clear()
        self._due.clear()

    def add(self, timer: Due) -> None:
        self._timers[timer.number] = timer
        heapq.heappush(self._due, (self.due_ns(timer), timer.number))

    def has(self, timer: Due) -> bool:
        return self._timers.get(timer.number) is timer

    def forget(self, number: int) -> None:
        """Forget the timer of that number, if there is one."""
        self._timers.pop(number, None)
        if len(self._due) > 2 * len(self._timers) + _UNUSED_COUNT_MIN:
            self._make_heap()

    def _make_heap(self) -> None:
        self._due = [(self.due_ns(timer), number) for number, timer in self._timers.items()]
        heapq.heapify(self._due)

    def due_ns(self, timer: Due) -> int:
        began_ns = timer.began_ns
        if not self.jumps or began_ns is None:
            return timer.detail
        return timer.detail + sum(by_ns for since_ns, by_ns in self.jumps if began_ns < since_ns)

    def shift(self, since_ns: int, by_ns: int) -> None:
        """Delay running durations and periods by ``by_ns``: the clock was stepped."""
        self.jumps = [*self.relevant_jumps(), (since_ns, by_ns)]
        self.jumped_to_ns = since_ns
        self._make_heap()
        for handler in self._scheduled:
            if isinstance(handler.schedule, Period) and handler.method_id in self.schedules:
                self.schedules[handler.method_id] += by_ns

    def relevant_jumps(self) -> list[tuple[int, int]]:
        """Return the clock jumps that came after the beginning of some timer."""
        if not self.jumps:
            return []
        first_ns = min((timer.began_ns for timer in self._timers.values() if timer.began_ns is not None), default=None)
        return [] if first_ns is None else [jump for jump in self.jumps if first_ns < jump[0]]

    def next_due_ns(self) -> int | None:
        """Return the next due time; None: never. A schedule that has not begun is due at once."""
        while self._due and self._due[0][1] not in self._timers:
            heapq.heappop(self._due)
        due_ns = self._due[0][0] if self._due else None
        for handler in self._scheduled:
            due_ns = earlier(due_ns, self.schedules.get(handler.method_id, 0))
        return due_ns

    def describe(self) -> list[dict[str, object]]:
        """Describe each handler with a schedule, in plain values; ``due_ns`` None: it has not begun."""
        return [
            {
                "handler": handler.function.__qualname__,
                "schedule": handler.schedule.text,
                "due_ns": self.schedules.get(handler.method_id),
            }
            for handler in self._scheduled
            if handler.schedule
        ]

    def pop_due_timers(self, time_ns: int) -> list[Due]:
        """Remove and return the timers that are due at ``time_ns``, in the order of their times."""
        found = []
        while self._due and self._due[0][0] <= time_ns:
            _, number = heapq.heappop(self._due)
            timer = self._timers.get(number)
            if timer is not None and self.due_ns(timer) <= time_ns:  # a deadline can have been delayed
                found.append(timer)
        return found

    def decide(self, time_ns: int) -> dict[int, int]:
        """Return the next times of handlers with cron expressions that are due at ``time_ns``. Not for replays."""
        return {
            handler.method_id: handler.schedule.next_ns(time_ns)
            for handler in self._scheduled
            if isinstance(handler.schedule, Cron) and self.schedules.get(handler.method_id, 0) <= time_ns
        }

    def pop_due_schedules(self, time_ns: int, decided: Mapping[int, int]) -> list[Handler[Any, Any]]:
        """Return the handlers that are due at ``time_ns``, each once, however many of its times have passed.

        ``decided``: see :meth:`decide`. A schedule without a time in the log, in a replay, has not begun.
        """
        found, schedules = [], {}
        for handler in self._scheduled:
            due_ns = self.schedules.get(handler.method_id)
            if due_ns is not None and due_ns <= time_ns:
                found.append(handler)
            next_ns = due_ns
            if due_ns is None or due_ns <= time_ns:
                if isinstance(handler.schedule, Period):
                    next_ns = handler.schedule.next_ns(time_ns, due_ns)
                else:
                    next_ns = decided.get(handler.method_id)
            if next_ns is not None:
                schedules[handler.method_id] = next_ns
        self.schedules = schedules
        return found


class TimeImpulses:
    """Logs the time as impulses to this instance: when something is due, and if the clock was stepped.

    It logs nothing before :meth:`start`. Times in ns since the Unix epoch.
    """

    def __init__(self, context: Context, clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._is_primary = False
        self._in_flight_ns: int | None = None  # the time of an impulse that is in flight
        self._jumps: list[tuple[int, int]] = []  # to be logged once the app is primary

    @property
    def next_due_ns(self) -> int | None:
        """Time at which to call :meth:`log_time`, ns since the Unix epoch; None: not yet, or never."""
        if not self._is_primary or self._in_flight_ns is not None:
            return None
        return earlier(self._clock.next_due_ns(), self._context.multicasts.due_ns)

    def start(self) -> None:
        """Begin to log the time: the app is primary. Each logged time comes back as input."""
        self._is_primary = True
        self._log_jumps()

    def log_time(self, time_ns: int) -> None:
        """Log the time ``time_ns`` as an impulse to this instance."""
        self._in_flight_ns = time_ns
        decided = self._clock.decide(time_ns)
        self._context.outbox.impulses.append_own(_write_time, (time_ns, decided) if decided else (time_ns,))

    def note_logged(self, time_ns: int) -> None:
        if self._in_flight_ns is not None and time_ns >= self._in_flight_ns:
            self._in_flight_ns = None

    def note_jump(self, time_ns: int, jumped_ns: int) -> None:
        """Note that the clock was stepped by ``jumped_ns``, to ``time_ns``."""
        self._jumps.append((time_ns, jumped_ns))
        self._log_jumps()

    def _log_jumps(self) -> None:
        """Log clock jumps, so that they shorten no sleep, in any replay."""
        if self._is_primary:
            for time_ns, jumped_ns in self._jumps:
                if self._clock.is_needed and time_ns > self._clock.jumped_to_ns:  # else the log has it
                    fields = time_ns, self._clock.decide(time_ns), jumped_ns
                    self._context.outbox.impulses.append_own(_write_time, fields)
            self._jumps.clear()


# Effects that handlers wait for, and their results in the log.
#
# A result is an impulse to oneself, with EFFECT_METHOD_ID and [number, what, detail, True if it raised, value, words,
# execution]. ``what`` and ``detail`` are those of the journal, so that it is never taken for the result of another
# effect. The rest is only for people: which effect it was, its arguments, and the execution of its handler.


LABEL_CHARACTERS_MAX = 200
_write_result = make_writer("the result of an effect", EFFECT_METHOD_ID, RpcType.IMPULSE)


class EffectResult(msgspec.Struct, array_like=True, frozen=True):
    """Result of an effect in the log. ``value``: encoded: the returned value, or the exception.

    ``words``: ``unlock(bike=7) of Ride.ride(17)``; ``execution``: its number. "" and 0 in a log of an earlier version.
    """

    number: int
    what: str
    detail: int
    raised: bool
    value: msgspec.Raw
    words: str = ""
    execution: int = 0


class Effect(Operation):
    """Effect, done when the log has its result. ``encoded``: its arguments. ``variables``: its context copies this."""

    __slots__ = ("_arguments", "encoded", "function", "options", "variables")

    def __init__(
        self, task: Owner, function: EffectFunction, arguments: tuple[Any, ...], options: EffectOptions
    ) -> None:
        super().__init__(task, f"effect {function.name}")
        self.function = function
        self.options = options
        self._arguments = arguments
        self.encoded = b""
        self.variables: contextvars.Context | None = None

    def _start(self) -> None:
        self.variables = context_of_owner(self.task.instance_name)
        self.encoded = self.function.encode_arguments(self._arguments)
        self._arguments = ()
        self.detail = crc64(self.encoded)
        self.task.begin(self)

    def decode(self, value: bytes) -> Any:
        return self.function.decode_result(value)

    def decode_error(self, value: bytes) -> Exception:
        return self.function.decode_error(value, self.options.raises)


def describe_effect(effect: Effect) -> str:
    """Return a text on an effect and its handler, for people."""
    return encodable(f"{effect.function.describe(effect.encoded)} of {effect.task.described_call}")[
        :LABEL_CHARACTERS_MAX
    ]


def _result_fields(effect: Effect, words: str, raised: bool, value: bytes) -> tuple[Any, ...]:
    return effect.number, effect.what, effect.detail, raised, msgspec.Raw(value), words, effect.task.number


def encode_result(effect: Effect, raised: bool, value: bytes) -> bytes:
    """Encode the impulse with the result of an effect. Raises UsageError if it is too large."""
    return encode_call(_write_result, _result_fields(effect, describe_effect(effect), raised, value))


class WaitingEffects:
    """Effects of one instance without a result yet. After :meth:`start` with a runner they run.

    ``waiting``: those effects, by number. ``requests``: those of them that run here.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._functions: dict[Callable[..., Any], EffectFunction] = {}
        self.waiting: dict[int, Effect] = {}
        self.requests: dict[int, EffectRequest] = {}
        self._runner: EffectRunner | None = None
        self._paused_runner: EffectRunner | None = None
        self._misfit = ""
        self.collected: list[tuple[int, str, int]] | None = None  # numbers, what and detail, in an inspected run

    def function(self, function: Callable[..., Any]) -> EffectFunction:
        """Return the EffectFunction of a function. Raises UsageError, DefinitionError."""
        try:
            if (found := self._functions.get(function)) is None:
                found = self._functions[function] = EffectFunction(function)
        except TypeError:  # a callable that can't be a key; or a DefinitionError, which is raised again
            found = EffectFunction(function)
        return found

    def add(self, effect: Effect) -> None:
        self.waiting[effect.number] = effect
        if self.collected is not None:
            self.collected.append((effect.number, effect.what, getattr(effect, "detail", 0)))
        if self._runner is not None and not self._context.multicasts.holds_effect(effect.number):
            self._run(effect, self._runner)

    def run_held(self, number: int) -> None:
        """Run an effect: the multicasts that it waited for stand."""
        effect = self.waiting.get(number)
        if effect is not None and self._runner is not None and number not in self.requests:
            self._run(effect, self._runner)

    @property
    def retried(self) -> list[EffectRequest]:
        """Requests that have failed and are retried."""
        return [request for request in self.requests.values() if request.failure]

    def try_now(self, number: int) -> bool:
        """Make the next attempt now; return False if the effect did not wait for one."""
        request = self.requests.get(number)
        return request is not None and request.try_now is not None and request.try_now()

    def remove(self, effect: Effect) -> None:
        self.waiting.pop(effect.number, None)
        if (request := self.requests.get(effect.number)) is not None and self._runner is not None:
            self._forget(effect.number, request, self._runner)

    def start(self, runner: EffectRunner | None) -> None:
        """Run all waiting effects, the oldest first: the app is primary. ``runner`` None: they stay waiting.

        Raises JournalError.
        """
        if self._misfit:
            raise JournalError(f"{self._misfit}; the app stops\n{WAYS_OUT}")
        self._paused_runner = runner
        self.resume()

    def pause(self) -> None:
        """Begin no effects until :meth:`resume`: messages are handled again. Running effects continue."""
        self._paused_runner, self._runner = self._runner or self._paused_runner, None

    def resume(self) -> None:
        """Run the waiting effects that do not run yet, and cancel those that nobody waits for."""
        runner, self._paused_runner = self._paused_runner, None
        if runner is None:
            return
        self._runner = runner
        for number, request in list(self.requests.items()):
            if number not in self.waiting:
                self._forget(number, request, runner)
        for number, effect in sorted(self.waiting.items()):
            if number not in self.requests and not self._context.multicasts.holds_effect(number):
                self._run(effect, runner)

    def _forget(self, number: int, request: EffectRequest, runner: EffectRunner) -> None:
        del self.requests[number]
        request.is_cancelled = True
        runner.cancel(request)

    def _run(self, effect: Effect, runner: EffectRunner) -> None:
        def send(raised: bool, value: bytes) -> None:  # any thread; raises UsageError if the value is too large
            self._context.outbox.impulses.append_own(_write_result, _result_fields(effect, words, raised, value))

        words = describe_effect(effect)
        request = self.requests[effect.number] = self.make_request(effect, send)
        runner.start(request)

    def make_request(self, effect: Effect, send: Callable[[bool, bytes], None]) -> EffectRequest:
        """Make a request for a runner, which passes the result to ``send``: (True if it raised, value)."""
        task = effect.task  # it can have continued before the key is asked for
        return EffectRequest(
            effect.number,
            effect.function,
            effect.encoded,
            effect.options,
            partial(self._key, effect.options.key, task.number, task.generation, effect.step),
            send,
            effect.variables or contextvars.Context(),
            effect.since_ns,
            partial(self._report, effect),
        )

    def _key(self, given: str | None, task_number: int, generation: int, step: int) -> str:
        """Return the given key, or one that is the same only for the same step of the same handler of the same life.

        For any thread."""
        if given is not None:
            return given
        digest = hashlib.blake2b(key=self._context.seed, digest_size=16)
        digest.update(f"{self._context.instance_name}\n{task_number} {generation} {step}".encode())
        return str(uuid.UUID(bytes=digest.digest(), version=4))

    def _report(self, effect: Effect, error: BaseException, attempts: int) -> None:
        """Report an effect that has failed. For any thread."""
        if self._context.reporter is not None:
            self._context.reporter.effect_failed(self._context.instance_name, effect, error, attempts)

    def match(self, result: EffectResult) -> Effect | None:
        """Return the effect of ``result``, if it is still waited for."""
        effect = self.waiting.get(result.number)
        if effect is None:
            return None
        if not effect.fits(result):
            # In a replay of changed code the log does not know this effect. In a recovery this is an error, but when it
            # is known not to be such a replay, it is too late to raise it here.
            self._misfit = self._misfit or (
                f"{effect.task.name} waits for {describe_operation(effect)}, and record {self._context.sequence_id} "
                f"has the result of {describe_operation(result)} for it"
            )
            return None
        return effect


# Events that handlers wait for, and signals: each is for one waiter, the oldest for its name.


KEPT_SIGNALS_MAX = 100_000  # without a waiter: they are part of each checkpoint, and some 100 bytes each in memory
KEPT_SIGNALS_BYTES_MAX = 64 << 20  # ... and their values together


class Events:
    """Waits for events, the oldest first, and signals that nobody has waited for yet."""

    def __init__(self, defer: Callable[[Callable[[], None]], None], resolve: Callable[[Event, bytes], None]) -> None:
        self.kept: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, dict[int, Event]] = {}  # by name and number
        self._given: Counter[str] = Counter()  # signals that reach their waiters once the handler has come to a stop
        self._count = self._size_bytes = 0  # of these and of the kept ones
        self._defer = defer
        self._resolve = resolve

    def add(self, event: Event) -> None:
        self._waiting.setdefault(event.name, {})[event.number] = event

    def remove(self, event: Event) -> None:
        waiting = self._waiting.get(event.name, {})
        waiting.pop(event.number, None)
        if not waiting:
            self._waiting.pop(event.name, None)

    def restore(self, signals: Mapping[str, Sequence[bytes]]) -> None:
        """Restore kept signals; nobody waits."""
        self._waiting.clear()
        self._given.clear()
        self.kept = {name: deque(values) for name, values in signals.items()}
        self._count = sum(map(len, self.kept.values()))
        self._size_bytes = sum(len(value) for values in self.kept.values() for value in values)

    def sort(self) -> None:
        """Sort waits after a rebuild: the oldest comes first again."""
        self._waiting = {name: dict(sorted(waiting.items())) for name, waiting in self._waiting.items()}

    def require_room(self, name: str, value: bytes) -> None:
        """Check that there is room for one more signal, unless a handler waits for it. Raises UsageError."""
        if len(self._waiting.get(name, ())) > self._given[name]:
            return
        if self._count >= KEPT_SIGNALS_MAX or self._size_bytes + len(value) > KEPT_SIGNALS_BYTES_MAX:
            raise UsageError(
                f"immortal.signal({name!r}, ...): {self._count} signals of {self._size_bytes} bytes wait for nobody, "
                f"and with this one there would be more than {KEPT_SIGNALS_MAX}, or {KEPT_SIGNALS_BYTES_MAX} bytes: "
                f"let handlers wait for each of them (await immortal.event(...)), or signal only what somebody will "
                f"wait for"
            )

    def signal(self, name: str, value: bytes) -> None:
        self._given[name] += 1
        self._count += 1
        self._size_bytes += len(value)
        self._defer(partial(self._give, name, value))

    def offer(self, name: str) -> None:
        """Give the oldest kept signal to the handler that waits for it."""
        if kept := self.kept.get(name):
            value = kept.popleft()
            self._count -= 1
            self._size_bytes -= len(value)
            if not kept:
                del self.kept[name]
            self.signal(name, value)

    def take(self, name: str) -> list[bytes]:
        """Remove and return the kept signals of a name."""
        values = list(self.kept.pop(name))
        self._count -= len(values)
        self._size_bytes -= sum(map(len, values))
        return values

    def put(self, name: str, values: list[bytes]) -> None:
        """Keep signals that another instance has taken."""
        self.kept.setdefault(name, deque()).extend(values)
        self._count += len(values)
        self._size_bytes += sum(map(len, values))

    def _give(self, name: str, value: bytes) -> None:
        self._given[name] -= 1
        if not self._given[name]:
            del self._given[name]
        for event in self._waiting.get(name, {}).values():
            self._count -= 1
            self._size_bytes -= len(value)
            self._resolve(event, value)
            return
        self.kept.setdefault(name, deque()).append(value)
