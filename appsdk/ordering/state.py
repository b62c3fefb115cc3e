"""The state of the algorithm of ordered multicast, which is part of the app's checkpoint."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from immortal.appsdk.ordering.messages import Scope, Timestamp


class Stage(IntEnum):
    BLOCK = 0  # its timestamp can still grow
    FINAL = 1  # it can't; but some destination's clock may still be behind it
    COMMITTED = 2  # it may be delivered


class Sent(msgspec.Struct, array_like=True):
    """A run of one's own that is not committed. ``timestamp`` 0: it is not final yet."""

    number: int
    estimate: Timestamp
    destinations: list[str]
    since_ns: int
    proposed: dict[str, Timestamp] = {}
    unsettled: list[str] = []
    timestamp: Timestamp = 0
    alone: bool = False  # see Propose
    scope: Scope | None = None
    again: list[str] = []  # of the unsettled: the timestamp has grown since what they were told

    @property
    def silent(self) -> list[str]:
        """Who has not answered."""
        return [one for one in self.destinations if one not in self.proposed] or self.unsettled


class Filed(msgspec.Struct, array_like=True):
    """In the queue: a run of ``sender``, or (sender "") one call that came by itself and is behind what stood there."""

    sender: str
    number: int  # of a run; of a call: how many came before it
    timestamp: Timestamp
    stage: int
    calls: list[bytes]
    since_ns: int
    scope: Scope | None = None
    asked: Timestamp = 0  # see Late; 0: its sender was not, or has answered


class FenceState(msgspec.Struct, array_like=True):
    """``askers``: who waits for Fenced, until ``open``, (sender, number) of runs in the queue, are final.

    ``told``: senders that have heard of it from here. ``decided``: runs of the member that the others have decided
    about; what it says itself of these comes too late.
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
    """One's own. ``waits``: (who is expelled, who has not said Fenced). ``committed``: by who is expelled."""

    group: str
    view: int
    members: list[str]  # of that view
    leaving: list[str] = []
    waits: list[tuple[str, str]] = []
    committed: dict[str, int] = {}
    since_ns: int = 0


class State(msgspec.Struct):
    """What a checkpoint keeps.

    ``released_count``: releases that the instance has not executed yet. ``late``: (number, destination) of answers
    about cancelled runs that are still to come. ``committed``: by sender, its last committed run with a scope.
    ``heard``: how many messages came, by who sent them; ``silent``: the same as it was at ``looked_ns``, of those that
    were waited for. ``own_filed``: numbers of calls of the instance to itself that stand in the queue.
    """

    clock: Timestamp = 0
    sent_count: int = 0
    standing: int = 0  # the runs up to this number stand at all their destinations
    last_final: Timestamp = 0
    filed_count: int = 0
    released_count: int = 0
    sent: list[Sent] = []
    queue: list[Filed] = []
    late: list[tuple[int, str]] = []
    committed: dict[str, int] = {}
    fences: list[FenceState] = []
    expulsions: list[Expulsion] = []
    heard: dict[str, int] = {}
    silent: dict[str, int] = {}
    looked_ns: int = 0
    own_filed: list[int] = []
