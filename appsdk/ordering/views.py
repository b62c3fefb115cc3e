"""Named groups of ordered multicast, the pure part: their members, and the messages to send again after a change.

A *view* is a number and the members from there on. A change of membership is an ordered multicast to all members of
the view that it was made from, and to who joins; a message to the group is one to the members of the view that its
sender knows. Both say which view that was. All members of a view see all changes and messages of it in one order, so
they agree, at each place, whether it is still the present one. If it is not, the change or message is *stale*: all
ignore it alike, and who sent it is told and sends it again. No I/O, no time, no randomness.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["join", "leave", "expel"]


class View(msgspec.Struct, array_like=True, frozen=True):
    number: int
    members: tuple[str, ...]

    def after(self, kind: Kind, *changed: str) -> View:
        others = tuple(one for one in self.members if one not in changed)
        return View(self.number + 1, (*others, *changed) if kind == "join" else others)

    def teller_of(self, sender: str) -> str:
        """Return the member that tells ``sender`` what became of its message.

        Another one if possible: when the sender is expelled, the others may not know what it said.
        """
        return next((one for one in self.members if one != sender), sender)


class Membership(msgspec.Struct, array_like=True):
    """Membership of a group as ``own`` knows it. ``view``: the current one, or for a non-member the newest it was told
    of.

    ``joining``: what the view is if the change that ``own`` joins with was not stale. ``own`` can't tell, as it has not
    seen what came before. The others can; and whatever comes for that view says so.

    ``cut``: the numbers of the first and the last view of which ``own`` can't tell what is executed, as it was expelled
    meanwhile; the others can.
    """

    own: str
    view: View
    joining: View | None = None
    cut: tuple[int, int] = (0, 0)

    @property
    def is_member(self) -> bool:
        return self.own in self.view.members

    def is_current(self, number: int) -> bool:
        """Tell, in the order, whether a message that was sent to the view ``number`` is to be executed."""
        self._joined(number)
        return self.is_member and self.view.number == number

    def expelled(self, number: int, view: View) -> None:
        """Leave the view ``number``, out of the order: this instance was expelled; ``view`` is the present one."""
        if self.is_member and self.view.number <= number:
            self.cut = self.view.number, number
            self.view, self.joining = view, None

    def is_cut(self, number: int) -> bool:
        return self.cut[0] <= number <= self.cut[1]

    def change(self, base: View, kind: Kind, *changed: str) -> bool:
        """Apply, in the order, a change made from ``base``. Returns whether it counts; unknown of its own join."""
        if self.joining == base:  # by its number alone it might be another change's, which counted in place of that
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
        """Learn the view from a member, out of the order, while not a member. Members learn in the order alone."""
        if self.is_member:
            return
        if self.own in view.members:
            if self.joining == view:
                self._joined(view.number)
        elif view.number > self.view.number:
            self.view = view
            if self.joining is not None and self.joining.number <= view.number:
                self.joining = None  # it was stale: views from there on would have this one


class Message(msgspec.Struct, array_like=True, frozen=True):
    """Message to a group. ``number``: counts the sender's messages to this group, from 1."""

    number: int
    method: str
    arguments: bytes


class Outgoing(msgspec.Struct, array_like=True):
    """Messages that one sender has sent to a group and that are not confirmed.

    All of ``unconfirmed`` went to ``view``.
    """

    view: View
    count: int = 0
    unconfirmed: list[Message] = []

    def send(self, method: str, arguments: bytes, known: View) -> Message:
        """Send a message to :attr:`view` now.

        A newer ``known`` view waits until nothing is in flight: otherwise an earlier message might be stale and go
        again after this one.
        """
        if not self.unconfirmed and known.number > self.view.number:
            self.view = known
        self.count += 1
        message = Message(self.count, method, arguments)
        self.unconfirmed.append(message)
        return message

    def told(self, number: int, view_number: int, newest: View | None) -> list[Message]:
        """Enter the teller's report, in the order of sending: ``number``, as sent to that view, is executed, or
        (``newest``) stale.

        What is to be sent once more, to :attr:`view`: what came behind a stale one is stale as well.
        """
        if view_number != self.view.number:
            return []  # that is answered already: by what was told of one before it
        executed = newest is None
        self.unconfirmed = [one for one in self.unconfirmed if one.number > number - (not executed)]
        if newest is None:
            return []
        self.view = newest
        return list(self.unconfirmed)

    def renewed(self, member: str, number: int, view: View, source: str, executed: int) -> list[Message]:
        """Return what to send to ``view`` again: ``member`` was expelled from the view ``number``, says ``source``, a
        member, which has ``executed`` up to there of what was sent to :attr:`view`. All else was cancelled or stale.
        """
        members = self.view.members
        if self.view.number > number or member not in members or source not in members:
            return []
        self.unconfirmed = [one for one in self.unconfirmed if one.number > executed]
        self.view = view
        return list(self.unconfirmed)
