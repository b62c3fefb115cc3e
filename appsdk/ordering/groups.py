"""Groups of ordered multicast: their members, the expulsion of a dead member, and the state saved in checkpoints.

A *view* is a number and the members from there on. A change of membership is an ordered multicast to all members of the
view that it was made from, and to the joining instance; a message to the group is one to the members of the view that
its sender knows. Both name that view. All members of a view receive all its changes and messages in one order, so they
agree, at each place, whether it is still the current one. If it is not, the change or message is *stale*: all ignore it
alike, and its sender is told and sends it again.

A *fence* is a group, a member and the number of a view: a sender that knows of it no longer commits runs of that group
to that member, of views up to that one. The expelling instance sets the fence at all other members. Once they have sent
Fenced, each run that was committed with the member is before all that is sent from there on. Fences are part of
:class:`immortal.appsdk.ordering.machine.Ordering`.

No I/O, no time, no randomness.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from immortal.appsdk.ordering.messages import Fence, Fenced, OfFences, Resolve, Scope, Timestamp

Kind: TypeAlias = Literal["join", "leave", "expel"]


class View(msgspec.Struct, array_like=True, frozen=True):
    number: int
    members: tuple[str, ...]

    def after(self, kind: Kind, *changed: str) -> View:
        others = tuple(one for one in self.members if one not in changed)
        return View(self.number + 1, (*others, *changed) if kind == "join" else others)

    def teller_of(self, sender: str) -> str:
        """Return the member that tells ``sender`` whether its message was executed.

        It is another member if possible: if the sender is expelled, the others possibly do not know its reports.
        """
        return next((one for one in self.members if one != sender), sender)


class Membership(msgspec.Struct, array_like=True):
    """Membership of a group as ``own`` knows it. ``view``: the current one; for a non-member, the newest known one.

    ``joining``: the next view if the change by which ``own`` joins was not stale. ``own`` can't tell, since it has not
    received the earlier changes. The others can; any message for that view confirms it.

    ``cut``: numbers of the first and the last view for which ``own`` does not know what was executed, since it was
    expelled meanwhile; the others know.
    """

    own: str
    view: View
    joining: View | None = None
    cut: tuple[int, int] = (0, 0)

    @property
    def is_member(self) -> bool:
        return self.own in self.view.members

    def is_current(self, number: int) -> bool:
        """Return True if a message that was sent to the view ``number`` must be executed. Call it in order."""
        self._joined(number)
        return self.is_member and self.view.number == number

    def expelled(self, number: int, view: View) -> None:
        """Leave the view ``number`` at once: the others expelled this instance. ``view``: the current view."""
        if self.is_member and self.view.number <= number:
            self.cut = self.view.number, number
            self.view, self.joining = view, None

    def is_cut(self, number: int) -> bool:
        return self.cut[0] <= number <= self.cut[1]

    def change(self, base: View, kind: Kind, *changed: str) -> bool:
        """Apply a change of the view ``base``, at its turn. Return True if it counts; False also for the own join."""
        if self.joining == base:  # by its number alone it could be another change's, which replaced that one
            self._joined(base.number)
        after = base.after(kind, *changed)
        if self.own in base.members:
            if self.view.number != base.number:
                return False
            self.view = after
            return True
        if kind == "join" and self.own in changed and not self.is_member and after.number > self.view.number:
            self.joining = after
        return False

    def _joined(self, number: int) -> None:
        if self.joining is not None and self.joining.number == number:
            self.view, self.joining = self.joining, None

    def learn(self, view: View) -> None:
        """Learn the view from a member, at once, while not a member. Members learn views from changes, in order."""
        if self.is_member:
            return
        if self.own in view.members:
            if self.joining == view:
                self._joined(view.number)
        elif view.number > self.view.number:
            self.view = view
            if self.joining is not None and self.joining.number <= view.number:
                self.joining = None  # it was stale: later views would include this instance


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Message to a group. ``number``: counts the sender's messages to this group, from 1."""

    number: int
    method: str
    arguments: bytes


class Outgoing(msgspec.Struct, array_like=True):
    """Messages of one sender to a group that are not confirmed.

    All of ``unconfirmed`` were sent to ``view``.
    """

    view: View
    count: int = 0
    unconfirmed: list[Message] = []

    def send(self, method: str, arguments: bytes, known: View) -> Message:
        """Send a message to :attr:`view` now.

        A newer ``known`` view waits until nothing is in flight: otherwise an earlier message could be stale and be sent
        again after this one.
        """
        if not self.unconfirmed and known.number > self.view.number:
            self.view = known
        self.count += 1
        message = Message(self.count, method, arguments)
        self.unconfirmed.append(message)
        return message

    def apply_report(self, number: int, view_number: int, newest: View | None) -> list[Message]:
        """Note a report, in the order of sending: message ``number`` to the view ``view_number`` is executed, or stale.

        ``newest``: the current view if it is stale, else None. Return the messages to send again to :attr:`view`: those
        after a stale one are stale as well.
        """
        if view_number != self.view.number:
            return []  # that is answered already, by the report on an earlier one
        executed = newest is None
        self.unconfirmed = [one for one in self.unconfirmed if one.number > number - (not executed)]
        if newest is None:
            return []
        self.view = newest
        return list(self.unconfirmed)

    def resend_after_expulsion(self, member: str, number: int, view: View, source: str, executed: int) -> list[Message]:
        """Return the messages to send again to ``view``, after ``member`` was expelled from the view ``number``.

        ``source``, a member, reports this. It has executed the messages to :attr:`view` up to number ``executed``; all
        others were cancelled or stale.
        """
        members = self.view.members
        if self.view.number > number or member not in members or source not in members:
            return []
        self.unconfirmed = [one for one in self.unconfirmed if one.number > executed]
        self.view = view
        return list(self.unconfirmed)


class TellView(msgspec.Struct, frozen=True):
    """Action: once there is a view without ``member``, tell it to ``sender``, which may be this instance."""

    group: str
    member: str
    view: int
    sender: str


class Expel(msgspec.Struct, frozen=True):
    """Action: expel ``leaving`` from the view: send this change to its other members."""

    group: str
    view: int
    leaving: list[str]


class TellSilent(msgspec.Struct, frozen=True):
    """Action: tell ``others``, who may be members, that ``member`` is silent and that its view waits for it.

    Send this before all held output."""

    group: str
    member: str
    view: int
    others: list[str]


class Ordering(Protocol):
    """Interface to the part of :class:`immortal.appsdk.ordering.machine.Ordering` that fences need."""

    name: str
    state: State
    actions: list[Any]

    @property
    def sent(self) -> list[Sent]: ...
    def runs(self) -> list[QueuedRun]: ...
    def send(self, destination: str, message: OfFences) -> None: ...
    def cancel(self, sent: Sent) -> None: ...
    def drop(self, sender: str, number: int) -> None: ...
    def commit_as_is(self, filed: QueuedRun) -> None: ...


class Fences:
    """Fences that one instance knows: expelled members whose runs the others decide."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering

    # --- as a sender --------------------------------------------------------------------------------------------------

    def blocks(self, scope: Scope | None, destinations: list[str]) -> bool:
        """Return True if a run to these destinations must not be sent, or must be cancelled."""
        return scope is not None and any(
            scope.reaches(one.group, one.view) and one.member in destinations for one in self._ordering.state.fences
        )

    # --- as a destination ---------------------------------------------------------------------------------------------

    def may_propose(self, sender: str, scope: Scope) -> bool:
        """Tell ``sender`` of the fences that its run meets, before it is queued. Return False if it is expelled."""
        may = True
        for fence in self._ordering.state.fences:
            if scope.reaches(fence.group, fence.view):
                self._announce_to(fence, sender)
                may = may and sender != fence.member
        return may

    def ignores(self, sender: str, number: int) -> bool:
        """Return True if decisions of ``sender`` about its run ``number`` no longer count: the others decide."""
        ordering = self._ordering
        for fence in ordering.state.fences:
            if fence.member != sender:
                continue
            if number in fence.decided:
                return True
            if not fence.is_resolved and any(one.number == number for one in self._runs_of_member(fence)):
                return True
        return False

    def _runs_of_member(self, fence: FenceState) -> list[QueuedRun]:
        return [one for one in self._open_runs(fence) if one.sender == fence.member]

    def _open_runs(self, fence: FenceState) -> list[QueuedRun]:
        """Return the runs in the queue that the fence concerns and that can still change."""
        return [
            one
            for one in self._ordering.runs()
            if one.scope is not None and one.scope.reaches(fence.group, fence.view) and one.stage != Stage.COMMITTED
        ]

    def _announce_to(self, fence: FenceState, sender: str) -> None:
        if sender not in fence.told and sender != self._ordering.name:
            fence.told.append(sender)
            self._ordering.send(sender, Fence(fence.group, fence.member, fence.view))
            self._ordering.actions.append(TellView(fence.group, fence.member, fence.view, sender))

    # --- as both ------------------------------------------------------------------------------------------------------

    def handle_message(self, source: str, message: OfFences) -> None:
        if isinstance(message, Fence):
            fence = self._apply_fence(message.group, message.member, message.view)
            if message.asks:
                self._add_asker(fence, source, message)
        elif isinstance(message, Fenced):
            self._handle_fenced(source, message)
        else:
            fence = self._apply_fence(message.group, message.member, message.view)
            self._resolve(fence, message)

    def _apply_fence(self, group: str, member: str, view: int) -> FenceState:
        """Apply a new fence: cancel own runs, and tell the senders of runs in the queue."""
        ordering, state = self._ordering, self._ordering.state
        fence = next((one for one in state.fences if (one.group, one.member) == (group, member)), None)
        if fence is None:
            fence = FenceState(group, member, -1)
            state.fences.append(fence)
        if view <= fence.view:
            return fence
        fence.view, fence.is_resolved, fence.told = view, False, []
        own = [one for one in ordering.sent if self.blocks(one.scope, one.destinations)]
        for sent in own:
            ordering.cancel(sent)
        if own:
            ordering.actions.append(TellView(group, member, view, ordering.name))
        for filed in self._open_runs(fence):
            self._announce_to(fence, filed.sender)
        self._extend_expulsions(fence)
        return fence

    def _add_asker(self, fence: FenceState, asker: str, message: Fence) -> None:
        if asker not in fence.askers:
            fence.askers.append(asker)
            fence.told.append(asker)
        found = [
            (one.sender, one.number)
            for one in self._open_runs(fence)
            if one.stage == Stage.BLOCK and one.sender != fence.member
        ]
        fence.open += [one for one in found if one not in fence.open]

    def answer_askers(self) -> None:
        """Send Fenced to the askers of each fence whose awaited runs are all final now."""
        for fence in self._ordering.state.fences:
            if not fence.askers:
                continue
            blocks = {(one.sender, one.number) for one in self._open_runs(fence) if one.stage == Stage.BLOCK}
            fence.open = [one for one in fence.open if one in blocks]
            if fence.open:
                continue
            askers, fence.askers = fence.askers, []
            committed = self._ordering.state.committed.get(fence.member, 0)
            reply = Fenced(fence.group, fence.member, fence.view, committed)
            for asker in askers:
                if asker == self._ordering.name:
                    self._handle_fenced(asker, reply)
                else:
                    self._ordering.send(asker, reply)

    def _resolve(self, fence: FenceState, message: Resolve) -> None:
        """Deliver the expelled member's own runs that any other member has seen committed; cancel its other runs."""
        if fence.is_resolved or fence.view != message.view:
            return
        fence.is_resolved = True
        for filed in self._runs_of_member(fence):
            fence.decided.append(filed.number)
            if filed.number <= message.committed:
                self._ordering.commit_as_is(filed)
            else:
                self._ordering.drop(filed.sender, filed.number)

    # --- as the expelling member --------------------------------------------------------------------------------------

    def expel(self, group: str, member: str, view: int, members: list[str], now_ns: int = 0) -> None:
        """Expel ``member`` from ``members``, the members of ``view``. The action Expel follows once all others sent
        Fenced; nothing follows if this instance is expelled itself."""
        state, name = self._ordering.state, self._ordering.name
        own = next((one for one in state.expulsions if one.group == group), None)
        if own is not None and own.view < view:
            state.expulsions.remove(own)
            own = None
        if own is None:
            own = Expulsion(group, view, list(members), since_ns=now_ns)
            state.expulsions.append(own)
        fenced = [one.member for one in state.fences if one.group == group and one.view >= own.view]
        for one in (member, *fenced):
            if one in own.members and one not in own.leaving and one != name:
                own.leaving.append(one)
                self._request_fences(own, one)
        own.waits = [(one, other) for one, other in own.waits if other not in own.leaving]

    def _request_fences(self, own: Expulsion, member: str) -> None:
        name = self._ordering.name
        for other in own.members:
            if other == member:
                continue
            own.waits.append((member, other))
            message = Fence(own.group, member, own.view, True)
            if other == name:
                self._add_asker(self._apply_fence(own.group, member, own.view), name, message)
            elif other not in own.leaving:
                self._ordering.send(other, message)

    def _extend_expulsions(self, fence: FenceState) -> None:
        """Add ``fence.member`` to an expulsion of this instance: another member found that it no longer answers."""
        state = self._ordering.state
        for own in [one for one in state.expulsions if one.group == fence.group]:
            if fence.member == self._ordering.name:
                state.expulsions.remove(own)
            elif fence.member in own.members and fence.member not in own.leaving:
                self.expel(own.group, fence.member, own.view, own.members, own.since_ns)

    def _handle_fenced(self, source: str, message: Fenced) -> None:
        own = next((one for one in self._ordering.state.expulsions if one.group == message.group), None)
        if own is None or (message.member, source) not in own.waits or message.view < own.view:
            return
        own.waits.remove((message.member, source))
        own.committed[message.member] = max(own.committed.get(message.member, 0), message.committed)
        self._complete_expulsion(own)

    def _complete_expulsion(self, own: Expulsion) -> None:
        if own.waits:
            return
        ordering = self._ordering
        ordering.state.expulsions.remove(own)
        for member in own.leaving:
            message = Resolve(own.group, member, own.view, own.committed.get(member, 0))
            self._resolve(self._apply_fence(own.group, member, own.view), message)
            for other in own.members:
                if other not in own.leaving and other != ordering.name:
                    ordering.send(other, message)
        ordering.actions.append(Expel(own.group, own.view, own.leaving))


# State of the algorithm, which is part of the app's checkpoint.


class Stage(IntEnum):
    BLOCK = 0  # its timestamp can still grow
    FINAL = 1  # it can't; but some destination's clock can still be behind it
    COMMITTED = 2  # it can be delivered


class Sent(msgspec.Struct, array_like=True):
    """Run of this instance that is not committed. ``timestamp`` 0: it is not final yet."""

    number: int
    estimate: Timestamp
    destinations: list[str]
    since_ns: int
    proposed: dict[str, Timestamp] = {}
    unsettled: list[str] = []
    timestamp: Timestamp = 0
    alone: bool = False  # see Propose
    scope: Scope | None = None
    again: list[str] = []  # of the unsettled: those whose timestamp has grown since the last Settle

    @property
    def silent(self) -> list[str]:
        """Destinations that have not answered."""
        return [one for one in self.destinations if one not in self.proposed] or self.unsettled


class QueuedRun(msgspec.Struct, array_like=True):
    """Entry of the queue: a run of ``sender``, or (sender "") one call outside of runs, after all earlier entries."""

    sender: str
    number: int  # of a run; for a call, the number of calls before it
    timestamp: Timestamp
    stage: int
    calls: list[bytes]
    since_ns: int
    scope: Scope | None = None
    asked: Timestamp = 0  # see Late; 0: its sender was not asked, or has answered


class FenceState(msgspec.Struct, array_like=True):
    """State of a fence. ``askers`` wait for Fenced until ``open``, (sender, number) of runs in the queue, are final.

    ``told``: senders that this instance has told of it. ``decided``: runs of the member that the others have decided;
    its own decisions about these come too late.
    """

    group: str
    member: str
    view: int
    is_resolved: bool = False
    askers: list[str] = []
    open: list[tuple[str, int]] = []
    told: list[str] = []
    decided: list[int] = []


class Expulsion(msgspec.Struct, array_like=True):
    """Expulsion by this instance. ``waits``: (member, who has not sent Fenced). ``committed``: last runs by member."""

    group: str
    view: int
    members: list[str]  # of that view
    leaving: list[str] = []
    waits: list[tuple[str, str]] = []
    committed: dict[str, int] = {}
    since_ns: int = 0


class State(msgspec.Struct):
    """State of ordered multicast in a checkpoint.

    ``released_count``: releases that the instance has not executed yet. ``late``: (number, destination) of answers
    about cancelled runs that are still to come. ``committed``: by sender, its last committed run with a scope.
    ``heard``: number of messages by sender; ``silent``: this number at the time ``looked_ns``, for awaited senders.
    ``own_filed``: numbers of calls of the instance to itself in the queue.
    """

    clock: Timestamp = 0
    sent_count: int = 0
    standing: int = 0  # all runs up to this number stand at all their destinations
    last_final: Timestamp = 0
    filed_count: int = 0
    released_count: int = 0
    sent: list[Sent] = []
    queue: list[QueuedRun] = []
    late: list[tuple[int, str]] = []
    committed: dict[str, int] = {}
    fences: list[FenceState] = []
    expulsions: list[Expulsion] = []
    heard: dict[str, int] = {}
    silent: dict[str, int] = {}
    looked_ns: int = 0
    own_filed: list[int] = []
