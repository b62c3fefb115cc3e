"""Connection of ordered multicast to an app: its messages are calls, its actions go to the outbox.

Everything here happens while an input of the log is handled, or at the end of an input, which a replay finds again. So
it follows from the log, like all that handlers do. Its state is part of each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import refused
from immortal.appsdk.calls.outbox import CALL_SIZE_BYTES_MAX, Outbox, make_writer
from immortal.appsdk.calls.replay_rules import NEWEST_ORDER
from immortal.appsdk.errors import HandlerError, StateError, UsageError
from immortal.appsdk.ordering.groups import Expel, QueuedRun, Stage, State, TellSilent, TellView
from immortal.appsdk.ordering.machine import Ordering, Release, Send
from immortal.appsdk.ordering.messages import (
    Fencing,
    Message,
    Plain,
    Propose,
    Refused,
    Scope,
    arguments_of,
    as_fork,
    problem_of,
)
from immortal.appsdk.ordering.send_queue import EFFECT, Held, Run, SendQueue
from immortal.protocol import decoding
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.errors import ProtocolError
from immortal.protocol.messages import RpcType, decode_message
from immortal.protocol.system_methods import (
    EXECUTED_METHOD_ID,
    FENCING_METHOD_ID,
    HANDLES_METHOD_ID,
    ORDERED_METHOD_ID,
    ORDERING_METHOD_ID,
)
from immortal.protocol.varint import decode_zigzag_int
from immortal.protocol.verdicts import Cause

ORDERED_CALL_SIZE_BYTES_MAX = CALL_SIZE_BYTES_MAX - (1 << 10)  # of one call: another call contains it
WHAT = "an ordered multicast"
LATE_NS = 250_000_000  # a run that does not stand by then is moved after the entries that wait for it

GROUP_METHODS: dict[type, str] = {TellView: "group_asked", Expel: "group_ready", TellSilent: "group_silent"}
"""Method of :class:`immortal.appsdk.patterns.groups.Grouped` that is called for an action."""

Parts = dict[str, list[bytes]]


_write_ordered = make_writer(WHAT, ORDERED_METHOD_ID, RpcType.FORK)
_write_ordering = make_writer(WHAT, ORDERING_METHOD_ID, RpcType.FORK)
_write_fencing = make_writer(WHAT, FENCING_METHOD_ID, RpcType.FORK)
_write_executed = make_writer(WHAT, EXECUTED_METHOD_ID, RpcType.FORK)


def _method_of(call: bytes) -> int:
    _, start, _ = decode_message(call, 0)
    return decode_zigzag_int(call, start + 1)[0]


class Executed(msgspec.Struct, array_like=True, frozen=True):
    """Message of the instance to itself after released runs.

    ``runs``: (sender, number, timestamp, count of calls) of each, in order. Their calls come before this message, with
    plain calls between them.
    """

    released_count: int
    runs: list[tuple[str, int, int, int]]


class Saved(msgspec.Struct):
    """State of multicasts in a checkpoint. ``clients``: queued and released requests of clients, not executed yet."""

    name: str
    state: State
    waiting: list[Run | Held]
    clients: list[tuple[str, int]]


_decode_saved = decoding.Decoder(Saved).decode
decode_propose: Callable[[bytes], Propose] = decoding.Decoder(Propose).decode


def _decoder_of_one(kind: Any) -> Callable[[bytes], Any]:
    decode: Any = decoding.Decoder(tuple[kind]).decode
    return lambda data: decode(data)[0]


decode_ordering_message: Callable[[bytes], Message] = _decoder_of_one(Message)
decode_fence_message: Callable[[bytes], Fencing] = _decoder_of_one(Fencing)
decode_executed: Callable[[bytes], Executed] = decoding.Decoder(Executed).decode


class Multicasts:
    """Ordered multicasts of one instance. Before the first one sent or received it costs nothing.

    ``run_effect``: begins an effect that was held. ``receiver_of_call``: returns the receiver of an unanswered call."""

    def __init__(self, context: Context) -> None:
        self.rules = NEWEST_ORDER  # for the log's whole life
        self.expel_after: dict[str, int] = {}  # by group: ns of silence after which a member is expelled
        self.due_ns: int | None = None  # when to call :meth:`tick`, ns since the Unix epoch; None: never
        self._context = context
        self.ordering: Ordering | None = None  # the queue of runs; None: there was no ordered multicast yet
        self._sending: SendQueue | None = None
        self._clients: set[tuple[str, int]] = set()
        self._parts_to_push: Parts = {}
        self._released: list[QueuedRun] = []
        self._own_calls: list[bytes] = []  # to oneself, after the released runs
        self.proxies: Any = None  # the cache of the proxies that handlers got
        self.run_effect: Callable[[int], None] = lambda number: None
        self.receiver_of_call: Callable[[int], str | None] = lambda number: None

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self) -> bytes | None:
        """Encode the queues for a checkpoint; None: there was no ordered multicast yet."""
        if self.ordering is None or self._sending is None:
            return None
        saved = Saved(self.ordering.name, self.ordering.save(), self._sending.waiting, sorted(self._clients))
        return encoder.encode(saved)

    def restore(self, data: bytes | None) -> None:
        """Restore the queues from a checkpoint. Raises StateError."""
        self._parts_to_push, self._released, self._own_calls = {}, [], []
        self.due_ns = None
        if data is None:
            self.ordering = self._sending = None
            self._context.outbox.holder = None
            self._clients = set()
            return
        try:
            saved = _decode_saved(data)
        except decoding.DecodeError as error:
            raise StateError(f"the checkpoint's part on ordered multicasts can't be read: {error}") from None
        self._create_queues(saved.name, saved.state, saved.waiting)
        self._clients = set(saved.clients)
        if saved.state.sent or saved.state.queue:
            self.due_ns = 0  # as soon as the app is primary, see which runs are late

    def _create_queues(self, name: str, state: State | None = None, waiting: list[Run | Held] | None = None) -> None:
        self.ordering = Ordering(name, state)
        self._sending = SendQueue(self.ordering, self._release_held, waiting, own_name=name)
        self._context.outbox.holder = self

    def _queues(self) -> tuple[Ordering, SendQueue]:
        """Return both queues; create them at first use. Raises UsageError."""
        context = self._context
        if self.ordering is None or self._sending is None:
            if not context.instance_name or context.source is None:
                raise UsageError(
                    f"{WHAT}: the log does not say what this instance is called, or the coordinator does not say who "
                    f"sent what: both are older than this SDK; start the instance with a new log"
                )
            self._create_queues(context.instance_name)
            return self._queues()
        return self.ordering, self._sending

    @property
    def waiting(self) -> list[Run | Held]:
        return [] if self._sending is None else self._sending.waiting

    def describe(self) -> list[dict[str, Any]]:
        """Describe the instances that this one waits for: ``for``, ``what``, ``since_ns``, ``count`` of its entries."""
        ordering = self.ordering
        if ordering is None:
            return []
        found = []
        for sent in ordering.sent[:1]:  # the others wait for it
            silent = sent.silent
            count = len(ordering.sent) + len(self.waiting)
            found += [
                {"for": one, "what": "its answer to a multicast of this", "since_ns": sent.since_ns, "count": count}
                for one in silent
            ]
        for expulsion in ordering.state.expulsions:
            what = f"it to go on without {', '.join(expulsion.leaving)} in group {expulsion.group!r}"
            silent = list(dict.fromkeys(other for _, other in expulsion.waits))
            found += [{"for": one, "what": what, "since_ns": expulsion.since_ns, "count": 0} for one in silent]
        first = ordering.first()
        if first is not None and first.stage != Stage.COMMITTED and first.sender != ordering.name:
            what = "it to say that its multicast may be delivered"
            found.append({"for": first.sender, "what": what, "since_ns": first.since_ns, "count": ordering.count})
        return found

    def awaited_instances(self) -> list[str]:
        """Return the instances that must answer before the queue continues."""
        ordering = self.ordering
        first = None if ordering is None else ordering.first()
        if ordering is None or first is None or first.stage == Stage.COMMITTED:
            return []
        if first.sender != ordering.name:
            return [first.sender]
        return [name for sent in ordering.sent[:1] for name in sent.silent]

    # --- requests of handlers -----------------------------------------------------------------------------------------

    def send(
        self, name: str, method_id: int, destinations: list[str], calls: list[bytes], scope: Scope | None = None
    ) -> None:
        """Send a multicast. ``calls``: one for all, or one for each. ``method_id``: negative if they are of several
        methods, and the same for the same methods. ``scope``: of a group. Raises UsageError."""
        size_bytes = max(map(len, calls))
        if size_bytes > ORDERED_CALL_SIZE_BYTES_MAX:
            raise UsageError(
                f"{name}: the call takes {size_bytes} bytes, at most {ORDERED_CALL_SIZE_BYTES_MAX} are possible: send "
                f"it in parts"
            )
        context = self._context
        ordering, sending = self._queues()
        if context.carries_handles:
            for index, destination in enumerate(destinations):
                call = calls[index if len(calls) > 1 else 0]
                context.nodes.accounts.count_outgoing(destination, arguments_of(call))
        context.outbox.close_open()
        place = context.sequence_id, context.message_index
        if place != sending.place:
            self.flush()
        sending.multicast(place, method_id, destinations, calls, context.record_time_ns or 0, scope)
        if ordering.name in destinations:
            context.slice_end = 0  # later messages of the record can have to wait for the multicast

    def expel(self, group: str, member: str, view: int, members: list[str]) -> None:
        """Expel a member: see :meth:`immortal.appsdk.ordering.groups.Fences.expel`. Raises UsageError."""
        ordering, sending = self._flushed_queues()
        ordering.expel(group, member, view, members, self._context.record_time_ns or 0)
        self._execute_actions(ordering, sending)

    def is_cut(self, scope: Scope, destinations: list[str]) -> bool:
        """Return True if nothing can be sent to these destinations: one of them is being expelled."""
        return self.ordering is not None and self.ordering.fences.blocks(scope, destinations)

    # --- requests of nodes --------------------------------------------------------------------------------------------

    def calls_of(self, sender: str) -> Iterator[list[bytes]]:
        """Yield the calls of each run of ``sender`` that is not delivered here yet."""
        ordering = self.ordering
        if ordering is not None:
            yield from (filed.calls for filed in ordering.runs() if filed.sender == sender)
            if sender == ordering.name:
                yield from (one.calls[0] for one in self.waiting if isinstance(one, Run))

    def extend(self, method_id: int, calls: list[bytes], to: str) -> bool:
        """Send a run of this instance, one of :meth:`calls_of`, to ``to`` as well. Return False if it is too late."""
        ordering, sending = self._queues()
        for one in sending.waiting:
            if isinstance(one, Run) and one.calls[0] is calls:
                one.destinations.append(to)
                return True
        self._context.outbox.close_open()
        for filed in ordering.runs():
            if filed.calls is calls and ordering.extend(filed, method_id, to):
                self._execute_actions(ordering, sending)
                return True
        return False

    def warn(self, owner: str, carries: Callable[[bytes], bool], parts: list[bytes]) -> None:
        """Put the message ``parts`` before each waiting output for which ``carries`` is True, except for ``owner``."""
        _, sending = self._flushed_queues()
        waiting, sending.waiting = sending.waiting, []
        for one in waiting:
            if isinstance(one, Run):
                if any(carries(arguments_of(call)) for calls in one.calls for call in calls):
                    for to in one.destinations:
                        if to not in (owner, self._context.instance_name):
                            sending.hold(to, list(parts))
            elif one.destination not in ("", owner, EFFECT) and any(map(carries, one.parts[1::2])):
                one.parts[:0] = parts
            sending.waiting.append(one)

    # --- requests of the outbox ---------------------------------------------------------------------------------------

    def must_hold(self, destination: str) -> bool:
        """Return True if a message to ``destination`` must wait.

        A message to others waits for all earlier multicasts, one to oneself for those that come back here."""
        ordering, sending = self.ordering, self._sending
        if ordering is None or sending is None:
            return False
        if destination and destination != ordering.name:
            return sending.must_hold
        return (
            ordering.has_own_run
            or bool(ordering.state.own_filed)
            or any(
                ordering.name in one.destinations if isinstance(one, Run) else not one.destination
                for one in sending.waiting
            )
        )

    def hold(self, destination: str, parts: list[bytes]) -> None:
        ordering, sending = self._queues()
        to = "" if destination == ordering.name else destination
        if sending.must_hold:
            sending.hold(to, parts)
        else:
            self._release_held(Held(to, 0, parts))
            self._execute_actions(ordering, sending)

    def flush(self) -> None:
        """Send the multicasts of the last message. Called between two messages."""
        sending, ordering, context = self._sending, self.ordering, self._context
        if sending is None or ordering is None or not sending.waiting:
            return
        # The run belongs to that message, even if the next one has begun already: a what-if shows this.
        here = context.sequence_id, context.message_index
        context.sequence_id, context.message_index = sending.place or here
        sending.advance()
        self._execute_actions(ordering, sending)
        context.sequence_id, context.message_index = here

    def hold_effect(self, number: int) -> None:
        """Hold an effect if earlier multicasts are not done."""
        if self._sending is not None and self._sending.must_hold:
            self._context.outbox.close_open()
            self._sending.hold(EFFECT, [], number)

    def holds_effect(self, number: int) -> bool:
        return any(isinstance(one, Held) and one.effect == number for one in self.waiting)

    # --- input from the log: protocol ---------------------------------------------------------------------------------

    def handle_propose(self, propose: Propose) -> None:
        """Handle a Propose. Raises HandlerError."""
        ordering, sending = self._flushed_queues()
        if (problem := problem_of(propose, self._context.source)) is not None:
            raise self._refused(problem)
        ordering.count_message(propose.sender)
        ordering.handle_propose(propose, self._context.record_time_ns or 0)
        if propose.method_id == HANDLES_METHOD_ID and sending.waiting:
            self._context.nodes.accounts.announce_proposed_end(propose.sender, propose.calls)
        self._execute_actions(ordering, sending)
        self._context.slice_end = 0  # later input of the record is queued

    def refuse(self, message: bytes, text: str) -> list[bytes]:
        """Let the sender of a refused Propose continue without this instance. Return the calls in the message."""
        try:
            propose = decode_propose(arguments_of(message))
        except (decoding.DecodeError, ProtocolError):
            return []
        if propose.sender != self._context.source:
            return []
        ordering, sending = self._flushed_queues()
        ordering.actions.append(Send(propose.sender, Refused(propose.number, text)))
        self._execute_actions(ordering, sending)
        return propose.calls

    def handle_message(self, message: Message | Fencing) -> None:
        """Handle a message between sender and destination. Raises HandlerError."""
        ordering, sending = self._flushed_queues()
        source = self._context.source or ""
        ordering.count_message(source)
        if not ordering.handle_message(source, message):
            raise self._refused(f"{source!r} sent {message}, and that run is not open here")
        self._execute_actions(ordering, sending)

    def handle_fencing(self, message: Fencing) -> None:
        """Handle a message about a fence. Raises HandlerError."""
        if GROUP_METHODS[TellView] not in self._context.tasks.definition.handlers:
            raise self._refused(f"a member of group {message.group!r} is expelled, and this class is not below Grouped")
        self.handle_message(message)

    def handle_executed(self, executed: Executed) -> None:
        """Note that released runs were handled."""
        ordering, _ = self._flushed_queues()
        ordering.note_executed(executed.released_count)
        if not ordering.is_busy:
            self._clients.clear()  # of failed requests nobody was told here

    def _flushed_queues(self) -> tuple[Ordering, SendQueue]:
        both = self._queues()
        self._context.outbox.close_open()
        self.flush()  # earlier multicasts come before this message
        return both

    def _refused(self, text: str) -> HandlerError:
        return refused(self._context, WHAT, Cause.SENDER, f"{WHAT}: {text}")

    # --- input from the log: all else ---------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True if the queue has an entry, or can have one soon: other input can have to wait for it."""
        ordering = self.ordering
        return ordering is not None and (ordering.is_busy or bool(self.waiting))

    def enqueue_if_must_wait(self, message: Plain) -> bool:
        """Queue a plain message if it must wait; return True if so. Requires ``is_busy`` and a message from outside."""
        ordering, sending = self._flushed_queues()
        if not ordering.is_busy or not message.may_wait:
            return False
        counts_handles = message.method_id == HANDLES_METHOD_ID
        if counts_handles and self._context.nodes.accounts.is_pass_message(arguments_of(message.message)):
            return False
        if message.answers is not None and self.receiver_of_call(message.answers) != self._context.source:
            return False  # nobody has asked for it: it is refused, or ignored, at once
        if message.caller is not None and message.caller in self._clients:
            self._clients.remove(message.caller)  # it has waited
            return False
        ordering.enqueue_call(as_fork(message), self._context.record_time_ns or 0)
        self._execute_actions(ordering, sending)
        return True

    # --- late runs ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Handle the time :attr:`due_ns`, when the log has it."""
        if self.due_ns is not None:
            ordering, sending = self._flushed_queues()
            self._execute_actions(ordering, sending)

    def _check_late(self) -> QueuedRun | None:
        """Return the run that has delayed others for LATE_NS; None: set the time of the next check."""
        ordering = self.ordering
        late = None if ordering is None else ordering.late
        self.due_ns = None if late is None else late.since_ns + LATE_NS
        if ordering is not None and self.expel_after:
            silent_ns = ordering.report_silent_members(self.expel_after, self._context.record_time_ns or 0)
            if silent_ns is not None and (self.due_ns is None or silent_ns < self.due_ns):
                self.due_ns = silent_ns
        return late if late is not None and late.since_ns + LATE_NS <= (self._context.record_time_ns or 0) else None

    # --- actions ------------------------------------------------------------------------------------------------------

    def _execute_actions(self, ordering: Ordering, sending: SendQueue) -> None:
        """Execute the actions of the machines until they have no more."""
        while True:
            self._execute_all(ordering, sending)
            late = self._check_late()
            if late is not None:
                ordering.postpone(late)
            elif not ordering.actions:
                break
        self._push_to_outbox()

    def _execute_all(self, ordering: Ordering, sending: SendQueue) -> None:
        while True:
            while ordering.actions:
                actions, ordering.actions = ordering.actions, []
                for action in actions:
                    if isinstance(action, Send):
                        self._send(action)
                    elif isinstance(action, Release):
                        self._release(action.filed)
                    elif isinstance(action, TellView | Expel | TellSilent):
                        self._notify_group(action)
            sending.advance()
            if not ordering.actions:
                break

    def _send(self, action: Send) -> None:
        parts = self._parts_to_push.setdefault(action.destination, [])
        if isinstance(action.message, Propose):
            propose = action.message
            if propose.method_id < 0:  # of several methods: each destination gets its own
                propose = msgspec.structs.replace(propose, method_id=_method_of(propose.calls[0]))
            _write_ordered(parts, msgspec.structs.astuple(propose))
        elif isinstance(action.message, Fencing):
            _write_fencing(parts, (action.message,))
        else:
            _write_ordering(parts, (action.message,))

    def _notify_group(self, action: TellView | Expel | TellSilent) -> None:
        """Call the group's handlers in this instance: groups are part of their state. All members get a TellSilent."""
        handler = self._context.tasks.definition.handlers.get(GROUP_METHODS[type(action)])
        if handler is None:
            return
        write = make_writer(WHAT, handler.method_id, RpcType.FORK)
        if not isinstance(action, TellSilent):
            write(self._own_calls, msgspec.structs.astuple(action))
            return
        for other in action.others:
            parts = (
                self._own_calls if other == self._context.instance_name else self._parts_to_push.setdefault(other, [])
            )
            write(parts, (action.group, action.member, action.view))

    def _release_held(self, held: Held) -> None:
        ordering = self.ordering
        if held.effect:
            self.run_effect(held.effect)
        elif not held.destination and ordering is not None and ordering.is_busy:
            for front, body in zip(held.parts[::2], held.parts[1::2], strict=True):
                ordering.enqueue_call(front + body, self._context.record_time_ns or 0, is_own=True)
        else:
            self._parts_to_push.setdefault(held.destination, []).extend(held.parts)

    def _release(self, filed: QueuedRun) -> None:
        self._released.append(filed)
        parts = self._parts_to_push.setdefault("", [])
        for call in filed.calls:
            parts += (b"", call)
        if not filed.sender:
            caller = Plain(filed.calls[0], "").caller
            if caller is not None and caller[0].startswith(CLIENTS):
                self._clients.add(caller)

    def _push_to_outbox(self) -> None:
        outbox: Outbox = self._context.outbox
        if self._released:
            released, self._released = self._released, []
            runs = [(one.sender, one.number, one.timestamp, len(one.calls)) for one in released if one.sender]
            _write_executed(self._parts_to_push[""], (len(released), runs))
        if self._own_calls:
            self._parts_to_push.setdefault("", []).extend(self._own_calls)
            self._own_calls = []
        pushed, self._parts_to_push = self._parts_to_push, {}
        for destination, parts in pushed.items():
            outbox.push(destination, parts)
