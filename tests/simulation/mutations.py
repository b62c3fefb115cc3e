"""Bugs to plant in the core and the log, one at a time: the simulation must find each, to prove its checkers.

Each is a change of a line or two of one function, as a slip would make it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from immortal.appsdk.dispatch.lifecycle import Life
from immortal.appsdk.dispatch.records import Records, Rewinds
from immortal.appsdk.waiting.impulses import Clock as AppTimers
from immortal.appsdk.waiting.tasks import Tasks
from immortal.coordinator.core.availability.failover import Failover
from immortal.coordinator.core.availability.snapshot_transfer import SnapshotSender
from immortal.coordinator.core.availability.write_lease import LogRequests
from immortal.coordinator.core.checkpoints.policy import CheckpointPolicy
from immortal.coordinator.core.checkpoints.taking import CheckpointTaker
from immortal.coordinator.core.client.requests import Clients
from immortal.coordinator.core.client.table import ClientTable
from immortal.coordinator.core.clock import AppClock, SteadyClock, Timekeeper
from immortal.coordinator.core.failures.call_failure import CallFailures, Verdicts
from immortal.coordinator.core.failures.poison_guard import PoisonGuard
from immortal.coordinator.core.input.app_inbox import AppInbox
from immortal.coordinator.core.input.inbound import Inbound
from immortal.coordinator.core.input.input_stream import InputStream
from immortal.coordinator.core.life_cycle.recovery import Lifecycle
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.core.output.handshake import Handshake
from immortal.coordinator.core.output.output_stream import OutputStream
from immortal.coordinator.core.output.replay_check import FollowerOutputs
from immortal.coordinator.core.output.send_buffer import SendBuffer
from immortal.coordinator.core.state import CoreState, Versions
from immortal.coordinator.log import checkpoints, verdicts, view_queries
from immortal.log import RowLogStore
from immortal.protocol.compiled import SETS
from tests.simulation.disk import Disk
from tests.simulation.log_side import LogSide
from tests.simulation.shared_log import SharedLog


@cache
def _compiled() -> frozenset[str]:
    return frozenset().union(*(one.paths() for one in SETS))


@dataclass(frozen=True, slots=True)
class Mutation:
    """Planted bug: ``right``, a part of ``function``'s source that occurs once in it, becomes ``wrong``.

    ``seed``: the first seed that found it when all were tried last. It is tried first, which saves the search while
    plans are drawn unchanged.
    """

    name: str
    owner: type | ModuleType
    function: str
    right: str
    wrong: str
    seed: int = 0

    @property
    def is_compiled(self) -> bool:
        """Return True if the module can run compiled: only its source can be changed while it runs."""
        module = self.owner.__name__ if isinstance(self.owner, ModuleType) else self.owner.__module__
        return module in _compiled()


MUTATIONS = (
    Mutation(
        "an append of which nobody knows whether it was done is done again",
        LogRequests,
        "tick",
        "self._state.effects.append(ReadTail())",
        "self._unknown = self._state.log.is_held = False; self._state.effects.extend(self._writes)",
        seed=1,
    ),
    Mutation(
        "an append is not fenced",
        Disk,
        "_try",
        "if not self.is_writer:",
        "if False:",
    ),
    Mutation(
        "a takeover does not conflict with the appends of the one before",
        SharedLog,
        "grant",
        "self.term += 1",
        "self.term = 1",
    ),
    Mutation(
        "where the log ends is read at a replica that lags behind",
        LogSide,
        "_answer",
        "shared.ticket if self._disk.is_writer else 0",
        "max(0, shared.ticket - 1)",
        seed=2,
    ),
    Mutation(
        "an app takes over before it has the log to its end",
        Lifecycle,
        "log_grew",
        "session.replay_target = summary.last_sequence_id",
        "session.replay_target = session.fed_sequence_id",
    ),
    Mutation(
        "a follower's calls take their places before the impulses between them are known",
        FollowerOutputs,
        "_place",
        "(room := stream.room_before(marked))",
        "(room := 1 << 30)",
    ),
    Mutation(
        "a follower's state is taken for that of a later record",
        SnapshotSender,
        "advance",
        "self._sequence_id = self.state.session.fed_sequence_id",
        "self._sequence_id = self.state.session.fed_sequence_id + 1",
        seed=147,
    ),
    Mutation(
        "a follower's checkpoint has the marks that were known when its state was taken",
        FollowerOutputs,
        "cut",
        "cut.waits_for[destination] = waiting",
        "cut.reach(stream)",
        seed=108,
    ),
    Mutation(
        "a log is handed over before the last append to it is durable",
        Machine,
        "_settle",
        "shutdown.hands_over and self._log.is_idle",
        "shutdown.hands_over",
        seed=332,
    ),
    Mutation(
        "who is fenced goes on",
        Machine,
        "_fenced",
        "        name, epoch = self.state.name, self.state.epoch\n",
        "        name, epoch = self.state.name, self.state.epoch\n        return\n",
    ),
    Mutation(
        "who takes over works on in the epoch of the one before",
        Failover,
        "_load_as_writer",
        "self._epoch_ticket = state.begin_epoch()",
        "self._epoch_ticket = 1; state.log.durable_ticket = 1",
        seed=1,
    ),
    Mutation(
        "a frame is acknowledged before it is durable",
        Inbound,
        "_answer",
        "        self.grants.sent(frame.sender, now_ns)\n        return None",
        "        self.grants.sent(frame.sender, now_ns)\n        return _Reply(FrameType.TRIM_TO, stream.received)",
    ),
    Mutation(
        "a Welcome names what is not durable",
        Inbound,
        "_answer_hello",
        "stream.wait_for(stream.received, PeerFrameReceived(token, frame))\n            return None",
        "return _Reply(FrameType.WELCOME, stream.received)",
        seed=2,
    ),
    Mutation(
        "an impulse is sent before it is durable",
        OutputStream,
        "append_impulses",
        "payload, ticket, made_by_replay",
        "payload, 0, made_by_replay",
        seed=2,
    ),
    Mutation(
        "a frame takes an impulse along that is not durable",
        SendBuffer,
        "_dequeue",
        "and unsent[0].ticket <= durable_ticket\n",
        "\n",
        seed=5,
    ),
    Mutation(
        "impulses are accepted before they are durable",
        AppInbox,
        "_calls",
        "impulses.log_calls(calls)",
        "impulses.log_calls(calls)\n"
        "                self._state.log.open.impulses_accepted -= calls.count\n"
        "                self._state.session.note_accepted(calls.count, self._state.session.fed_sequence_id)",
        seed=5,
    ),
    Mutation(
        "a record goes to the app before it is durable",
        Machine,
        "_commit",
        "if group is not None:",
        "if group is not None and group.record is not None and self._session.phase is Phase.NORMAL:\n"
        "            self.state.outbox.send(group.record)\n"
        "        if group is not None:",
    ),
    Mutation(
        "a checkpoint leaves out the unacknowledged outputs",
        CheckpointTaker,
        "_begin",
        "name: stream.unacknowledged for",
        "name: [] for",
    ),
    Mutation(
        "a checkpoint has the marks of another moment",
        CheckpointTaker,
        "_begin",
        "{name: stream.mark for name, stream in outputs.items()}",
        "{}",
    ),
    Mutation(
        "a checkpoint's state is taken for that of a later record",
        CheckpointTaker,
        "request_if_due",
        "session.checkpoint_sequence_id = session.fed_sequence_id",
        "session.checkpoint_sequence_id = self.state.log.durable_sequence_id",
        seed=181,
    ),
    Mutation(
        "the sender drops one message too many",
        OutputStream,
        "acknowledge",
        "        self.acknowledged = position",
        "        position += 1; self.acknowledged = position",
    ),
    Mutation(
        "the log is trimmed one record too far",
        checkpoints,
        "_trim_history",
        '"records", SEQUENCE_KEY.pack(oldest.sequence_id + 1)',
        '"records", SEQUENCE_KEY.pack(oldest.sequence_id + 2)',
    ),
    Mutation(
        "what is here already is taken again",
        InputStream,
        "new_part",
        "if known < 0 or known >= frame.count:",
        "return frame.position, frame.count, frame.payload\n        if True:",
    ),
    Mutation(
        "the log is told one position too few",
        InputStream,
        "_position_to_log",
        "self.received)",
        "max(0, self.received - 1))",
    ),
    Mutation(
        "a record's positions become durable after it",
        Inbound,
        "_log_position",
        "        delivered.group.transaction.sources[",
        "        self._state.log.close_group().transaction.sources[",
    ),
    Mutation(
        "the first record becomes durable before the first checkpoint",
        CheckpointTaker,
        "_end",
        "group = self._log_first_record()",
        "self._log_first_record(); self.state.log.close_group(); group = self.state.log.append_outside_record(0)",
        seed=44,
    ),
    Mutation(
        "a replay forgets the impulses",
        OutputStream,
        "__init__",
        "self._kept_impulses.keep(impulses, self.position)",
        "pass",
    ),
    Mutation(
        "a mark counts an impulse that is not durable",
        OutputStream,
        "pop_new_mark",
        " or self._impulse_ticket > ticket",
        "",
        seed=30,
    ),
    Mutation(
        "an epoch is used twice",
        CoreState,
        "begin_epoch",
        "self.epoch += ahead",
        "self.epoch = max(self.epoch, ahead)",
    ),
    Mutation(
        "frames of a past life are taken",
        InputStream,
        "refusal",
        "if frame.epoch < self.epoch and not begins_anew:",
        "if False:",
        seed=14,
    ),
    Mutation(
        "what was on its way is not sent again",
        Handshake,
        "replied",
        "            stream.requeue_in_flight()",
        "            pass",
    ),
    Mutation(
        "a clock that is set back is followed",
        SteadyClock,
        "_accept_jump",
        "if ahead_ns > 0:",
        "if True:",
        seed=6,
    ),
    Mutation(
        "a jump of the clock is believed at once",
        SteadyClock,
        "read",
        "if self.held_ns is None or abs(ahead_ns - self.held_ns) > TOLERANCE_NS:",
        "if False:",
        seed=3,
    ),
    Mutation(
        "time is that of the machine's clock",
        SteadyClock,
        "read",
        "return Reading(steady_ns + self.offset_ns, held_jump_ns=ahead_ns)",
        "return Reading(wall_ns, held_jump_ns=ahead_ns)",
        seed=3,
    ),
    Mutation(
        "a jump of the clock counts as time in which the instance ran",
        Timekeeper,
        "read",
        "self.running.start_span(time_ns)",
        "pass",
        seed=6,
    ),
    Mutation(
        "clients are forgotten by the clock alone",
        ClientTable,
        "forget_unused",
        "self._running.time_of_age(limits.client_keep_ns)",
        "self._running.last_ns - limits.client_keep_ns",
        seed=321,
    ),
    Mutation(
        "what sleeps wakes by a jump of the clock",
        AppTimers,
        "due_ns",
        "if began_ns < since_ns",
        "if False",
        seed=62,
    ),
    Mutation(
        "what runs in each period runs by a jump of the clock",
        AppTimers,
        "shift",
        "self.schedules[handler.method_id] += by_ns",
        "pass",
        seed=62,
    ),
    Mutation(
        "an app that comes later is not told of jumps",
        AppClock,
        "send_time",
        "self._send_event(event)",
        "pass",
        seed=582,
    ),
    Mutation(
        "a checkpoint forgets a jump of the clock",
        Tasks,
        "save",
        "jumps=self.clock.relevant_jumps()",
        "jumps=[]",
        seed=62,
    ),
    Mutation(
        "damage is passed on",
        RowLogStore,
        "read",
        "checked_prefix(values, first_sequence_id, self.identity.committer_id)",
        "values",
        seed=3,
    ),
    Mutation(
        "the new code gets the old records",
        Versions,
        "replay_bound",
        "min(self._upcoming[0].sequence_id, target_sequence_id) if self._upcoming else target_sequence_id",
        "target_sequence_id",
        seed=605,
    ),
    Mutation(
        "an upgrade's version is not durable with its checkpoint",
        CheckpointTaker,
        "_end",
        "            group.transaction.version = VersionStart(header.version, header.sequence_id, session.label)",
        "            version = VersionStart(header.version, header.sequence_id, session.label)\n"
        "            self.state.log.close_group().transaction.version = version\n"
        "            self.state.log.open.required = True",
        seed=972,
    ),
    Mutation(
        "the next app is told what the last one had sent",
        Machine,
        "_app_closed",
        "self._log.forget_app()",
        "pass",
        seed=3,
    ),
    Mutation(
        "a checkpoint does not wait for the one before it",
        CheckpointPolicy,
        "end",
        "self.settled = False",
        "pass",
        seed=12,
    ),
    Mutation(
        "a request that is here already is done again",
        Clients,
        "_request",
        "min(frame.count, first_new - frame.number)",
        "0",
        seed=1,
    ),
    Mutation(
        "a request's number is not durable with its record",
        Clients,
        "_log_requests",
        "identities[repeated : repeated + count], group.transaction)",
        "identities[repeated : repeated + count], self.state.log.close_group().transaction)",
        seed=3,
    ),
    Mutation(
        "spilled messages are removed before they are acknowledged",
        view_queries,
        "trim",
        "or first_position > position:\n            break\n        if first",
        "or (table == 'impulses' and first_position > position):\n            break\n"
        "        if table == 'impulses' and first",
    ),
    Mutation(
        "an older copy of a log is not found out",
        Handshake,
        "replied",
        "position > stream.sent_through",
        "position > stream.position",
        seed=96,
    ),
    Mutation(
        "a verdict is not logged",
        Verdicts,
        "log_verdict",
        "group.transaction.verdicts.append(verdict)",
        "pass",
        seed=6,
    ),
    Mutation(
        "what follows a verdict leaves before it is durable",
        CallFailures,
        "log_verdict",
        "self.state.last_verdict_ticket = group.ticket",
        "pass",
        seed=63,
    ),
    Mutation(
        "a second verdict on a message takes the place of the first",
        Verdicts,
        "log_verdict",
        "if known is not None and (known.skips or verdict.kind not in OVERRULING):",
        "if False:",
        seed=6,
    ),
    Mutation(
        "a replay is not told the verdicts",
        CallFailures,
        "send_verdicts",
        "self.verdicts.unsettled(self._settled_sequence_id, summary)",
        "()",
        seed=6,
    ),
    Mutation(
        "a replay is not told the verdict on the first record behind its checkpoint",
        Verdicts,
        "forget_until",
        "if key[0] > sequence_id}",
        "if key[0] > sequence_id + 1}",
        seed=6,
    ),
    Mutation(
        "a replay from an older checkpoint is told the verdicts behind the newest",
        Verdicts,
        "unsettled",
        "        self.add_known(summary.verdicts)  # the replay can begin before the last checkpoint\n",
        "",
        seed=901,
    ),
    Mutation(
        "a dead letter is not kept",
        verdicts,
        "verdict_rows",
        'rows.append(("letters", key, log_format.seal(b"letters", key, (now_ns, verdict))))',
        "pass",
        seed=6,
    ),
    Mutation(
        "what a failed call has called is sent",
        Rewinds,
        "_undo",
        "outbox.rewind_to_copy()\n        self._replay",
        "outbox.close_batches()\n        self._context.outbox.mark()\n        self._context.outbox.rewind_to_copy()\n"
        "        self._replay",
        seed=43,
    ),
    Mutation(
        "what was sent before is sent again by a rewind",
        Rewinds,
        "_undo",
        "outbox.rewind_to_copy()\n        self._replay",
        "outbox.begin_copy()\n        self._context.outbox.rewind_to_copy()\n        self._replay",
        seed=43,
    ),
    Mutation(
        "a rewind begins with the wrong handlers waiting",
        Life,
        "restore_copy",
        "self._tasks.restore(envelope.tasks or SavedTasks())",
        "pass",
        seed=43,
    ),
    Mutation(
        "who waits for a call that has failed is not told",
        Records,
        "_skip",
        "self._failures.answer(verdict, message)",
        "pass",
        seed=43,
    ),
    Mutation(
        "what ends the app's process again and again gets no verdict",
        PoisonGuard,
        "app_died",
        "runs_count < self._kills_max",
        "runs_count > 0",
        seed=6,
    ),
    Mutation(
        "the first message is blamed for the death of its app",
        PoisonGuard,
        "app_died",
        "            noted.message_index,\n            VerdictKind.KILLED,",
        "            0,\n            VerdictKind.KILLED,",
        seed=6,
    ),
)


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Plant the bug in this process, until the end."""
    original: Any = mutation.owner.__dict__[mutation.function]
    source = inspect.getsource(original)
    found = source.count(mutation.right)
    assert found == 1, f"{mutation.name}: {mutation.right!r} occurs {found} times in {mutation.function}"
    source = textwrap.dedent(source.replace(mutation.right, mutation.wrong))  # a method's source is indented
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{mutation.name}>", "exec"), original.__globals__, namespace)
    setattr(mutation.owner, mutation.function, namespace[mutation.function])
    try:
        yield
    finally:
        setattr(mutation.owner, mutation.function, original)
