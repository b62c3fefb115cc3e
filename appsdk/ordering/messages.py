"""What senders and destinations of ordered multicasts tell each other: calls of methods that no user can declare.

`docs/ORDERING.md` says which message does what. A *run* is what is ordered as one: calls of one method that one sender
made, one after the other, to the same destinations. ``number`` is the sender's, from 1.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Timestamp: TypeAlias = int
"""Of a queue's clock, a counter. No user sees one."""


class Scope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of runs that go to the members of a view of a named group: which group, and the number of the view."""

    group: str
    view: int

    def reaches(self, group: str, view: int) -> bool:
        """It is of ``group``, and of ``view`` or an earlier one."""
        return self.group == group and self.view <= view


class Propose(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Sender to destination: make room for this run at ``estimate``, and say where that is.

    ``method_id`` comes first: the coordinator of the destination looks there whether the sender may call it.
    ``calls`` are whole RPC messages, in incoming form. ``alone``: there is no other destination, and all earlier runs
    of the sender stand; what the destination proposes is final, and it delivers without a Commit.
    """

    method_id: int
    sender: str
    number: int
    estimate: Timestamp
    calls: list[bytes]
    alone: bool = False
    scope: Scope | None = None


class Proposed(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """Destination to sender: a block stands at ``timestamp``; nothing behind it is delivered."""

    number: int
    timestamp: Timestamp


class Settle(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Sender to destination: ``timestamp`` is final; bring your clock there, and move the block."""

    number: int
    timestamp: Timestamp


class Settled(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Destination to sender: done."""

    number: int


class Commit(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """Sender to destination: the clocks of all destinations are there; deliver it when its turn comes."""

    number: int
    timestamp: Timestamp


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=5, gc=False):
    """Destination to sender: this run is not taken here; the others are to go on without this destination."""

    number: int
    text: str


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag=6, gc=False):
    """Sender to destination: nobody delivers this run."""

    number: int


class Fence(msgspec.Struct, array_like=True, frozen=True, tag=7, gc=False):
    """``member`` is being expelled from ``group``: cancel your runs to it, of views up to ``view``, and send no more.

    ``asks``: by who expels it; say Fenced once all that stood in your queue then is final.
    """

    group: str
    member: str
    view: int
    asks: bool = False


class Fenced(msgspec.Struct, array_like=True, frozen=True, tag=8, gc=False):
    """Member to who expels: done. ``committed``: the last run of the expelled one that was committed here; 0: none."""

    group: str
    member: str
    view: int
    committed: int


class Resolve(msgspec.Struct, array_like=True, frozen=True, tag=9, gc=False):
    """Who expels to the other members: deliver the expelled one's own runs up to ``committed``, and no later ones."""

    group: str
    member: str
    view: int
    committed: int


class Late(msgspec.Struct, array_like=True, frozen=True, tag=10, gc=False):
    """Destination to sender: your run holds others up here; if it does not stand, Settle it at ``timestamp`` or behind.

    What is executed before it then, as it was here when the sender hears this, is no effect of the run.
    """

    number: int
    timestamp: Timestamp


Fencing: TypeAlias = Fence | Resolve
"""What only those may send that may change a group."""
OfFences: TypeAlias = Fencing | Fenced
Message: TypeAlias = Proposed | Settle | Settled | Commit | Refused | Cancel | Fenced | Late
