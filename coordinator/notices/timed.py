"""What takes how long around the core: for sinks that measure. Said only where one does."""

from __future__ import annotations

from immortal.coordinator.core.notices import Notice


class Timed(Notice):
    level = "trace"
    template = "{seconds} s"
    seconds: float


class CommitTimed(Timed):
    """A transaction is durable, with those that were joined to it."""


class SyncTimed(Timed):
    """An entry of the journal, or a transaction of LMDB's, is on the disk: a part of a commit, or of a trim."""
