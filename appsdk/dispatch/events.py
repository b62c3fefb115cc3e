"""What a dispatcher tells its transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class BecamePrimary:
    """All that was logged is handled: the hooks may start."""


@dataclass(frozen=True, slots=True)
class OutputReady:
    """There is a batch or more to send, before more input is handled."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The coordinator stops cleanly; so does the app."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """The coordinator closes the connection and says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotBegun:
    """A checkpoint of the state as it is now is to be taken beside the handlers, before more input is handled.

    ``encode`` makes the pieces of its blob; it raises StateError.
    """

    encode: Callable[[], tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Flush:
    """What is to be sent must be on its way before more input is handled: that may end the process."""


@dataclass(frozen=True, slots=True)
class MessageFailed:
    """A message has failed alone; ``verdict`` is on its way to the coordinator."""

    verdict: Verdict


Event = BecamePrimary | OutputReady | Goodbye | Refusal | SnapshotBegun | Flush | MessageFailed
