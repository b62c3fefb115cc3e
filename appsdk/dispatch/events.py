"""What a dispatcher tells its transport."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from immortal.protocol.verdicts import Verdict


class BecamePrimary(Struct, frozen=True):
    """All that was logged is handled: the hooks may start."""


class OutputReady(Struct, frozen=True):
    """There is a batch or more to send, before more input is handled."""


class Goodbye(Struct, frozen=True):
    """The coordinator stops cleanly; so does the app."""

    reason: str


class Refusal(Struct, frozen=True):
    """The coordinator closes the connection and says why."""

    reason: str


class SnapshotBegun(Struct, frozen=True):
    """A checkpoint of the state as it is now is to be taken beside the handlers, before more input is handled.

    ``encode`` makes the pieces of its blob; it raises StateError.
    """

    encode: Callable[[], tuple[bytes, bytes]]


class Flush(Struct, frozen=True):
    """What is to be sent must be on its way before more input is handled: that may end the process."""


class MessageFailed(Struct, frozen=True):
    """A message has failed alone; ``verdict`` is on its way to the coordinator."""

    verdict: Verdict


Event = BecamePrimary | OutputReady | Goodbye | Refusal | SnapshotBegun | Flush | MessageFailed
