"""Distributed reference counting of handles: messages and two pure state machines. `docs/reference/nodes.md`.

:class:`Owner` counts, for each holder, the copies of a handle that went to it; :class:`Holder` counts the copies that
arrived. Messages go in, actions come out; no I/O, no time, no randomness. Their state is part of the app's checkpoint.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import msgspec

from immortal.protocol import decoding

DESTROYED, REVOKED = "destroyed", "revoked"
COUNT_MAX = 1 << 62  # larger than any real count: a sender of more is broken


class Stage(IntEnum):
    LIVE = 0
    ENDING = 1  # its end is in flight through the queues
    ENDED = 2  # copies can still be in flight


class Grant(msgspec.Struct, array_like=True):
    """Grant of one key, at its owner.

    ``holders``: for each, copies sent to it minus copies released; negative while the message that a copy was passed on
    is still in flight. ``notified``: holders that know of the end.
    """

    key: Key
    node: int
    stage: int = Stage.LIVE
    how: str = ""
    holders: dict[str, int] = {}
    banned: list[str] = []
    notified: list[str] = []


class Held(msgspec.Struct, array_like=True):
    """Handle at a holder. ``ended`` not empty: it has no node any more, whatever copies still arrive."""

    owner: str
    key: Key
    count: int
    ended: str = ""


class SendMessage(msgspec.Struct, frozen=True):
    to: str
    message: Message


class NoHoldersLeft(msgspec.Struct, frozen=True):
    """Action: note that nobody holds ``key`` any more, and no copy is in flight."""

    key: Key


Action: TypeAlias = SendMessage | NoHoldersLeft


class Owner:
    """Keys of one instance. ``actions``: to be done in order; the caller takes them and clears the list."""

    def __init__(self, grants: list[Grant] | None = None) -> None:
        self.grants = {one.key: one for one in grants or []}
        self.actions: list[Action] = []

    def save(self) -> list[Grant]:
        return list(self.grants.values())

    def create(self, key: Key, node: int) -> None:
        self.grants[key] = Grant(key, node)

    def note_passed(self, key: Key, to: str) -> bool:
        """Count a copy that goes to ``to``, reported by the owner or a holder. Return False if there is no such key."""
        grant = self.grants.get(key)
        if grant is None:
            return False
        self._count(grant, to, 1)
        if (grant.stage == Stage.ENDED or to in grant.banned) and to not in grant.notified:
            self._notify_end(grant, to, grant.how or REVOKED)
        self._settle(grant)
        return True

    def note_released(self, key: Key, holder: str, count: int) -> bool:
        """Count copies that ``holder`` released. Return False if there is no such key, or the count is impossible."""
        grant = self.grants.get(key)
        if grant is None or not 1 <= count <= COUNT_MAX:
            return False
        self._count(grant, holder, -count)
        self._settle(grant)
        return True

    @staticmethod
    def _count(grant: Grant, holder: str, change: int) -> None:
        count = grant.holders.get(holder, 0) + change
        if count:
            grant.holders[holder] = count
        else:
            grant.holders.pop(holder, None)

    def start_end(self, key: Key) -> list[str]:
        """Begin the end of a key, before :meth:`end`. Return the holders that must get :class:`Ended`, in order."""
        grant = self.grants[key]
        grant.stage = Stage.ENDING
        holders = [one for one in grant.holders if one not in grant.banned]
        grant.notified += holders
        return holders

    def end(self, key: Key, how: str) -> None:
        """End a grant. Tell the holders that were not told because their copy was not known yet."""
        grant = self.grants[key]
        grant.stage, grant.how = Stage.ENDED, how
        for holder in grant.holders:
            if holder not in grant.notified:
                self._notify_end(grant, holder, how)
        self._settle(grant)

    def ban(self, key: Key, holder: str) -> None:
        """Revoke the key for ``holder``, for good."""
        grant = self.grants[key]
        grant.banned.append(holder)
        if holder in grant.holders and holder not in grant.notified:
            self._notify_end(grant, holder, REVOKED)

    def _notify_end(self, grant: Grant, holder: str, how: str) -> None:
        grant.notified.append(holder)
        self.actions.append(SendMessage(holder, Ended(grant.key, how)))

    def _settle(self, grant: Grant) -> None:
        if not self._is_free(grant):
            return
        if grant.stage == Stage.LIVE:
            self.actions.append(NoHoldersLeft(grant.key))
        elif grant.stage == Stage.ENDED:
            del self.grants[grant.key]
            self.actions += [SendMessage(one, Forgotten(grant.key)) for one in grant.notified]

    @staticmethod
    def _is_free(grant: Grant) -> bool:
        """Return True if all counts are zero. A sum of zero is not enough: see the proof."""
        return not grant.holders


class Holder:
    """Handles of other instances that one instance holds. ``actions``: as in :class:`Owner`."""

    def __init__(self, held: list[Held] | None = None) -> None:
        self.held = {(one.owner, one.key): one for one in held or []}
        self.actions: list[Action] = []

    def save(self) -> list[Held]:
        return list(self.held.values())

    def holds(self, owner: str, key: Key) -> bool:
        one = self.held.get((owner, key))
        return one is not None and not one.ended

    def has_entry(self, owner: str, key: Key) -> bool:
        """Return True if the holder has the handle and hears of its end in order, or was told."""
        return (owner, key) in self.held

    def note_arrived(self, owner: str, key: Key) -> bool:
        """Count a copy in an accepted message. Return False if the handle has ended: the copy is given back at once."""
        one = self.held.setdefault((owner, key), Held(owner, key, 0))
        if one.ended:
            self.return_copy(owner, key)
            return False
        one.count += 1
        return True

    def return_copy(self, owner: str, key: Key) -> None:
        """Give back a copy in a message that is not accepted."""
        self.actions.append(SendMessage(owner, Released(key, 1)))

    def pass_on(self, owner: str, key: Key, to: str) -> None:
        """Report that a copy of a handle held here is sent to ``to``, which is not the owner."""
        self.actions.append(SendMessage(owner, Passed(key, to)))

    def release(self, owner: str, key: Key) -> None:
        """Release a handle that is held here."""
        one = self.held.pop((owner, key))
        self.actions.append(SendMessage(owner, Released(key, one.count)))

    def note_end(self, owner: str, key: Key, how: str) -> bool:
        """Note the end of a handle; return True if it was held. A copy can be in flight, so the hook always runs."""
        one = self.held.setdefault((owner, key), Held(owner, key, 0))
        was_held = one.count > 0
        if was_held:
            self.actions.append(SendMessage(owner, Released(key, one.count)))
        one.count, one.ended = 0, how
        return was_held

    def forget(self, owner: str, key: Key) -> None:
        self.held.pop((owner, key), None)


# Messages between owners and holders of handles: calls of methods that users can't declare.
#
# `docs/reference/nodes.md` explains each message. A *key* is 16 random bytes: a handle is its owner's name and a key.


Key: TypeAlias = bytes


class Passed(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """Message of a holder to the owner: a message with the handle goes to the instance ``to``."""

    key: Key
    to: str


class Released(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Message of a holder to the owner: ``count`` copies that arrived here are no longer held."""

    key: Key
    count: int


class Ended(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Message of the owner to a holder: the handle was ``how`` ("destroyed" or "revoked"), and is useless now."""

    key: Key
    how: str


class Forgotten(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """Message of the owner to a holder: no copy exists any more, so nobody must remember the end."""

    key: Key


class Stale(msgspec.Struct, array_like=True, frozen=True, tag=5, gc=False):
    """Message of the instance to itself: a copy came after the end of its handle, so the hook must still be called."""

    owner: str
    key: Key
    how: str


class Ending(msgspec.Struct, array_like=True, frozen=True, tag=6, gc=False):
    """Message to the receiver of a copy, sent before it: the end of the handle is in flight."""

    owner: str
    key: Key
    how: str


Message: TypeAlias = Passed | Released | Ended | Forgotten | Stale | Ending


class NodeCall(msgspec.Struct, array_like=True, frozen=True):
    """Call of the nodes with these keys by ``sender``."""

    sender: str
    keys: list[bytes]
    method_id: int
    arguments: msgspec.Raw


class AwaitedNodeCall(msgspec.Struct, array_like=True, frozen=True):
    """Call of a node, like :class:`NodeCall`; ``caller`` waits for the answer to its call ``number``."""

    caller: str
    number: int
    sender: str
    keys: list[bytes]
    method_id: int
    arguments: msgspec.Raw


class HandleMessage(msgspec.Struct, array_like=True, frozen=True):
    """Message between owners and holders, with its sender."""

    sender: str
    message: Message


decode_node_call = decoding.Decoder(NodeCall).decode
decode_awaited_node_call = decoding.Decoder(AwaitedNodeCall).decode
decode_handle_message = decoding.Decoder(HandleMessage).decode
