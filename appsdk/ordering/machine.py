"""Algorithm of ordered multicast, a pure state machine per instance. `docs/explanation/ordering.md` proves it.

An instance is both a sender and a destination, with one clock. Messages go in, actions come out; no I/O, no time, no
randomness. Its whole state is :class:`State`, which is part of the app's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import TypeAlias

import msgspec

from immortal.appsdk.ordering.groups import Expel, Fences, QueuedRun, Sent, Stage, State, TellSilent, TellView
from immortal.appsdk.ordering.messages import (
    Cancel,
    Commit,
    Fence,
    Fenced,
    Fencing,
    Late,
    Message,
    Propose,
    Proposed,
    Refused,
    Resolve,
    Scope,
    Settle,
    Settled,
    Timestamp,
)

TIMESTAMP_MAX = 1 << 62  # larger than any real clock: a sender of more is broken, and must not break others


Key: TypeAlias = tuple[Timestamp, bool, str, int]


class Send(msgspec.Struct, frozen=True):
    """Action: send a message to ``destination``, over a stream that keeps the order."""

    destination: str
    message: Propose | Message | Fencing


class Release(msgspec.Struct, frozen=True):
    """Action: execute ``calls`` after all earlier releases; then call :meth:`Ordering.note_executed`."""

    filed: QueuedRun


class RunsCommitted(msgspec.Struct, frozen=True):
    """Action: send what waited for the runs up to ``number``, which all stand."""

    number: int


Action: TypeAlias = Send | Release | RunsCommitted | TellView | Expel | TellSilent


class Ordering:
    """State machine of ordered multicast in the instance ``name``.

    ``actions``: to be done in order; the caller clears the list.
    """

    def __init__(self, name: str, state: State | None = None) -> None:
        self.name = name
        self.state = state = state if state is not None else State()
        self.actions: list[Action] = []
        self._sent = {one.number: one for one in state.sent}
        self._runs = {(one.sender, one.number): one for one in state.queue if one.sender}
        self._own_run_count = sum(one.sender == name for one in state.queue)
        self._ready_count = sum(one.stage == Stage.COMMITTED for one in state.queue)  # delayed by earlier entries
        self.executed_count = 0  # of releases, since this object was made
        self._queue = [(self._key(one), one) for one in state.queue]
        heapify(self._queue)
        self.fences = Fences(self)

    def save(self) -> State:
        state = self.state
        state.sent = list(self._sent.values())
        state.queue = [filed for key, filed in sorted(self._queue, key=lambda item: item[0]) if self._is_at(key, filed)]
        return state

    @property
    def is_busy(self) -> bool:
        """True if calls outside of runs must be queued: some entry is before them."""
        return bool(self._queue) or self.state.released_count > 0

    @property
    def has_own_run(self) -> bool:
        """True if a run of this instance is in the queue."""
        return self._own_run_count > 0

    @property
    def is_idle(self) -> bool:
        """True if nothing is in flight."""
        return not self._sent and not self.is_busy

    @property
    def count(self) -> int:
        """Number of entries in the queue, blocks included."""
        return sum(self._is_at(*one) for one in self._queue)

    @property
    def sent(self) -> list[Sent]:
        """Runs of this instance that are not committed, the oldest first."""
        return list(self._sent.values())

    def first(self) -> QueuedRun | None:
        """Return the head of the queue, for which all other entries wait."""
        self._drop_stale_entries()
        return self._queue[0][1] if self._queue else None

    # --- as a sender --------------------------------------------------------------------------------------------------

    def multicast(
        self,
        method_id: int,
        destinations: list[str],
        calls: list[list[bytes]],
        now_ns: int = 0,
        scope: Scope | None = None,
    ) -> int:
        """Send a run to ``destinations``, each there once; return its number.

        ``calls``: one list for all, or one for each.
        """
        state = self.state
        state.sent_count = number = state.sent_count + 1
        state.clock = estimate = state.clock + 1
        sent = self._sent[number] = Sent(number, estimate, list(destinations), now_ns, scope=scope)
        # It needs no Commit. A run with a scope does: it can be cancelled until it is committed.
        sent.alone = scope is None and len(sent.destinations) == 1 and state.standing == number - 1
        for index, destination in enumerate(destinations):
            theirs = calls[index if len(calls) > 1 else 0]
            if destination == self.name:
                self._enqueue_run(QueuedRun(self.name, number, estimate, Stage.BLOCK, theirs, now_ns, scope))
                sent.proposed[destination] = estimate
            else:
                self.send(destination, Propose(method_id, self.name, number, estimate, theirs, sent.alone, scope))
        self._advance()
        return number

    def extend(self, filed: QueuedRun, method_id: int, destination: str) -> bool:
        """Send a run of this instance to ``destination`` as well. Return False if its timestamp is final."""
        sent = self._sent.get(filed.number)
        if filed.sender != self.name or sent is None or sent.timestamp or destination in sent.destinations:
            return False
        sent.destinations.append(destination)
        self.send(
            destination, Propose(method_id, self.name, sent.number, sent.estimate, filed.calls, False, sent.scope)
        )
        return True

    def _advance(self) -> None:
        """Make timestamps final, and commit runs that stand everywhere: both in the order of sending."""
        state = self.state
        for sent in self._sent.values():
            if not sent.timestamp:
                if len(sent.proposed) < len(sent.destinations):
                    break
                self._finalize(sent)
        for number in list(self._sent):
            sent = self._sent[number]
            if not sent.timestamp or sent.unsettled:
                break
            del self._sent[number]
            for destination in sent.destinations:
                if destination == self.name:
                    self._commit(self.name, Commit(number, sent.timestamp))
                elif not sent.alone:
                    self.send(destination, Commit(number, sent.timestamp))
            state.standing = number
            self.actions.append(RunsCommitted(number))
        self._release()

    def _finalize(self, sent: Sent) -> None:
        """Make a timestamp final: all destinations have proposed. All their clocks must reach it before delivery."""
        state = self.state
        sent.timestamp = final = max(state.last_final + 1, *sent.proposed.values(), 0)
        state.last_final = final
        state.clock = max(state.clock, final)
        for destination in self._destinations_before_final(sent):
            self._move(sent, destination, final)

    def _move(self, sent: Sent, destination: str, timestamp: Timestamp) -> None:
        """Move a run: it is not committed before ``destination`` has it at that timestamp or later."""
        if destination == self.name:
            self._settle(self.name, sent.number, timestamp)
        elif destination not in sent.unsettled:
            sent.unsettled.append(destination)
            self.send(destination, Settle(sent.number, timestamp))
        elif destination not in sent.again:
            sent.again.append(destination)

    def _handle_late(self, source: str, message: Late) -> bool:
        """Move a run after the entries that it delays at ``source``, unless it stands; then its Commit follows."""
        sent = self._sent.get(message.number)
        if sent is None or source not in sent.destinations:
            return True
        if not sent.proposed.get(source, TIMESTAMP_MAX) < message.timestamp <= TIMESTAMP_MAX:
            return False
        sent.proposed[source] = message.timestamp
        self.state.clock = max(self.state.clock, message.timestamp)
        if sent.timestamp:
            self._raise_timestamps(sent)
        else:
            self._move(sent, source, message.timestamp)
        return True

    def _raise_timestamps(self, first: Sent) -> None:
        """Raise final timestamps: that of ``first``, and those of later runs if they would no longer be after it."""
        state, least = self.state, 0
        for sent in self._sent.values():
            if sent.number < first.number:
                continue
            if not sent.timestamp:
                break
            final = max(sent.timestamp, least, *sent.proposed.values())
            if final > sent.timestamp:
                sent.timestamp = final
                for destination in sent.destinations:
                    self._move(sent, destination, final)
            least = final + 1
        state.last_final = max(state.last_final, least - 1)
        state.clock = max(state.clock, state.last_final)

    def cancel(self, sent: Sent) -> None:
        """Cancel a run: nobody delivers it. Later runs in the queue still wait for its turn."""
        for destination in sent.destinations:
            if destination == self.name:
                self.drop(self.name, sent.number)
                continue
            self.send(destination, Cancel(sent.number))
            if destination not in sent.proposed or destination in sent.unsettled:
                self.state.late.append((sent.number, destination))
        sent.destinations, sent.unsettled, sent.proposed, sent.again = [], [], {}, []

    def _destinations_before_final(self, sent: Sent) -> list[str]:
        return [one for one in sent.destinations if sent.proposed[one] < sent.timestamp]

    # --- as a destination ---------------------------------------------------------------------------------------------

    def handle_propose(self, message: Propose, now_ns: int = 0) -> None:
        """Take in a run of another sender. Its block is in the queue before the answer leaves."""
        state, sender = self.state, message.sender
        if message.scope is not None and not self.fences.may_propose(sender, message.scope):
            self.send(sender, Refused(message.number, "it is expelled"))
            return
        state.clock = timestamp = self._propose(message.estimate)
        filed = QueuedRun(sender, message.number, timestamp, Stage.BLOCK, message.calls, now_ns, message.scope)
        self._enqueue_run(filed)
        self.send(sender, Proposed(message.number, timestamp))
        if message.alone:
            self._commit(sender, Commit(message.number, timestamp))
            self._release()

    def _propose(self, estimate: Timestamp) -> Timestamp:
        """Return a timestamp above all that were ever proposed or final here."""
        return max(self.state.clock + 1, estimate)

    def _enqueue_run(self, filed: QueuedRun) -> None:
        self._own_run_count += filed.sender == self.name
        self._runs[filed.sender, filed.number] = filed
        heappush(self._queue, (self._key(filed), filed))

    def _settle(self, sender: str, number: int, timestamp: Timestamp) -> None:
        filed = self._runs[sender, number]
        self.state.clock = max(self.state.clock, timestamp)
        filed.stage, filed.asked = Stage.FINAL, 0
        if filed.timestamp != timestamp:
            filed.timestamp = timestamp
            heappush(self._queue, (self._key(filed), filed))  # the block's own place is stale from here on

    def _commit(self, sender: str, message: Commit) -> None:
        filed = self._runs[sender, message.number]
        self._ready_count += filed.stage != Stage.COMMITTED
        self._settle(sender, message.number, message.timestamp)
        filed.stage = Stage.COMMITTED
        if filed.scope is not None:
            self.state.committed[sender] = message.number

    def drop(self, sender: str, number: int) -> None:
        """Cancel the run of a sender."""
        filed = self._runs.pop((sender, number), None)
        if filed is not None:
            self._own_run_count -= sender == self.name
            self._ready_count -= filed.stage == Stage.COMMITTED

    def runs(self) -> list[QueuedRun]:
        """Return the runs in the queue."""
        return list(self._runs.values())

    def plain_calls(self) -> Iterator[QueuedRun]:
        """Yield the plain calls in the queue, in no order."""
        return (filed for _, filed in self._queue if not filed.sender)

    def enqueue_call(self, call: bytes, now_ns: int = 0, *, is_own: bool = False) -> None:
        """Queue a call outside of runs, after all entries, while :attr:`is_busy`. ``is_own``: a call of the instance to
        itself, which no later one must overtake."""
        state = self.state
        state.filed_count += 1
        if is_own:
            state.own_filed.append(state.filed_count)
        filed = QueuedRun("", state.filed_count, state.clock, Stage.COMMITTED, [call], now_ns)
        heappush(self._queue, (self._key(filed), filed))
        self._ready_count += 1
        self._release()

    @property
    def late(self) -> QueuedRun | None:
        """Run that delays deliverable entries, and whose sender was not asked yet to move it."""
        first = self.first() if self._ready_count else None
        return None if first is None or first.asked else first

    def postpone(self, filed: QueuedRun) -> None:
        """Ask the sender to move a run after all present entries of this queue."""
        state = self.state
        state.clock = filed.asked = state.clock + 1
        message = Late(filed.number, filed.asked)
        if filed.sender == self.name:
            self._handle_late(self.name, message)
            self._release()
        else:
            self.send(filed.sender, message)

    # --- silent members of groups -------------------------------------------------------------------------------------

    def count_message(self, source: str) -> None:
        """Count a message from ``source``."""
        self.state.heard[source] = self.state.heard.get(source, 0) + 1

    def _waits_of_groups(self, groups: Mapping[str, int]) -> list[tuple[Scope, int, list[str], list[str]]]:
        """Return the waits of runs of ``groups``: (scope, since when, the awaited names, those to tell)."""
        found = []
        for sent in self.sent[:1]:
            if sent.scope is not None and sent.scope.group in groups:
                names = [one for one in sent.silent if one != self.name]
                others = [one for one in sent.destinations if one not in names]
                found.append((sent.scope, sent.since_ns, names, others))
        first = self.first()
        is_blocked = first is not None and first.stage != Stage.COMMITTED and first.sender != self.name
        if first is not None and is_blocked and first.scope is not None and first.scope.group in groups:
            found.append((first.scope, first.since_ns, [first.sender], [self.name]))
        return [one for one in found if one[2]]

    def report_silent_members(self, groups: Mapping[str, int], now_ns: int) -> int | None:
        """Report the awaited members that have sent nothing since the last check.

        Checks of a group are half its limit in ``groups`` (ns) apart; return the time of the next one.
        """
        state, due_ns = self.state, None
        awaited = self._waits_of_groups(groups)
        for scope, since_ns, _, _ in awaited:
            next_ns = max(since_ns, state.looked_ns) + groups[scope.group] // 2
            due_ns = next_ns if due_ns is None else min(due_ns, next_ns)
        if due_ns is None or now_ns < due_ns:
            return due_ns
        before, state.silent, state.looked_ns = state.silent, {}, now_ns
        for scope, _, names, others in awaited:
            for name in names:
                count = state.silent[name] = state.heard.get(name, 0)
                if before.get(name) == count:
                    self.actions.append(TellSilent(scope.group, name, scope.view, others))
        first = self.first()
        if first is not None and first.sender in state.silent and not first.asked:
            self.postpone(first)  # it answers if it is alive
        return now_ns + min(groups[scope.group] // 2 for scope, _, _, _ in awaited)

    def note_executed(self, count: int = 1) -> None:
        """Note that ``count`` more of the released runs and calls are executed."""
        self.state.released_count -= count
        self.executed_count += count

    @staticmethod
    def _key(filed: QueuedRun) -> Key:
        """Return the place in the order: by timestamp, then runs by sender, then calls outside of runs."""
        return filed.timestamp, not filed.sender, filed.sender, filed.number

    def _is_at(self, key: Key, filed: QueuedRun) -> bool:
        if not filed.sender:
            return True
        return self._runs.get((filed.sender, filed.number)) is filed and self._key(filed) == key

    def _drop_stale_entries(self) -> None:
        queue = self._queue
        while queue and not self._is_at(*queue[0]):
            heappop(queue)

    def _release(self) -> None:
        """Deliver all entries that have nothing before them."""
        while (filed := self.first()) is not None and filed.stage == Stage.COMMITTED:
            heappop(self._queue)
            self._ready_count -= 1
            if filed.sender:
                del self._runs[filed.sender, filed.number]
                self._own_run_count -= filed.sender == self.name
            elif filed.number in self.state.own_filed:
                self.state.own_filed.remove(filed.number)
            self.state.released_count += 1
            self.actions.append(Release(filed))

    # --- input --------------------------------------------------------------------------------------------------------

    def handle_message(self, source: str, message: Message | Fencing) -> bool:
        """Handle a message of a sender or destination. Return False if it concerns nothing known, or is impossible."""
        if isinstance(message, Settle | Commit | Cancel):
            is_right = self._handle_decision(source, message)
            self._release()
        elif isinstance(message, Fence | Fenced | Resolve):
            self.fences.handle_message(source, message)
            is_right = True
        elif isinstance(message, Late):
            is_right = self._handle_late(source, message)
        elif (message.number, source) in self.state.late:
            self.state.late.remove((message.number, source))
            return True
        else:
            sent = self._sent.get(message.number)
            if sent is None or source not in sent.destinations or not self._handle_answer(sent, source, message):
                return False
            is_right = True
            self._advance()
        self._progress_fences()
        return is_right

    def expel(self, group: str, member: str, view: int, members: list[str], now_ns: int = 0) -> None:
        """Expel a member: see :meth:`immortal.appsdk.ordering.groups.Fences.expel`."""
        self.fences.expel(group, member, view, members, now_ns)
        self._progress_fences()

    def _progress_fences(self) -> None:
        if self.state.fences:
            self.fences.answer_askers()
            self._advance()

    def _handle_decision(self, sender: str, message: Settle | Commit | Cancel) -> bool:
        if self.fences.ignores(sender, message.number):
            return True
        if isinstance(message, Cancel):
            self.drop(sender, message.number)
            return True
        filed = self._runs.get((sender, message.number))
        if filed is None or not filed.timestamp <= message.timestamp <= TIMESTAMP_MAX:
            return False
        if isinstance(message, Settle):
            self._settle(sender, message.number, message.timestamp)
            self.send(sender, Settled(message.number))
        else:
            self._commit(sender, message)
        return True

    def commit_as_is(self, filed: QueuedRun) -> None:
        """Commit a run at its timestamp: another destination knows that it stands, so it is final here as well."""
        self._commit(filed.sender, Commit(filed.number, filed.timestamp))

    def _handle_answer(self, sent: Sent, source: str, message: Proposed | Settled | Refused) -> bool:
        if isinstance(message, Proposed):
            if source in sent.proposed or not sent.estimate <= message.timestamp <= TIMESTAMP_MAX:
                return False
            sent.proposed[source] = message.timestamp
            self.state.clock = max(self.state.clock, message.timestamp)
        elif isinstance(message, Settled):
            if source not in sent.unsettled:
                return False
            if source in sent.again:
                sent.again.remove(source)
                self.send(source, Settle(sent.number, sent.timestamp or sent.proposed[source]))
            else:
                sent.unsettled.remove(source)
        else:
            if source in sent.proposed:
                return False
            sent.destinations.remove(source)
        return True

    def send(self, destination: str, message: Propose | Message | Fencing) -> None:
        self.actions.append(Send(destination, message))
