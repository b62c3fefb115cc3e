"""What stands in the queue of an instance."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from appsdk.ordering.messages import Scope, Timestamp


class Stage(IntEnum):
    BLOCK = 0  # its timestamp can still grow
    FINAL = 1  # it can't; but some destination's clock may still be behind it
    COMMITTED = 2  # it may be delivered


class Filed(msgspec.Struct, array_like=True):
    """In the queue: a run of ``sender``, or (sender "") one call that came by itself and is behind what stood there."""

    sender: str
    number: int  # of a run; of a call: how many came before it
    timestamp: Timestamp
    stage: int
    calls: list[bytes]
    since_ns: int
    scope: Scope | None = None
