"""Errors of a log, an app or a peer, raised by the core."""

from __future__ import annotations

from typing import NoReturn

from immortal.protocol.errors import ImmortalError, RemoteProtocolError


class LogError(ImmortalError):
    """Raised for a problem with the log: the coordinator stops, because it must not guess."""


class LogLockedError(LogError):
    """Raised if the log is in use by another process."""


class LogFormatError(LogError):
    """Raised if the log was written in a format that this version does not read, or the folder holds no log."""


class LogIdentityError(LogError):
    """Raised if the log belongs to another instance or committer."""


class FencedError(LogError):
    """Raised if the log has another writer now and refuses this one's writes. ``holder``: the other writer."""

    def __init__(self, holder: str, message: str = "") -> None:
        super().__init__(holder, message)
        self.holder = holder

    def __str__(self) -> str:
        return self.args[1] or f"fenced by {self.holder}: it writes this log now"


class LogUnavailableError(LogError):
    """Raised if the log can't be reached for now. It is unknown whether a write was done."""


class LogLostError(LogError):
    """Raised if the log lacks acknowledged messages, since an older copy has replaced it."""


class LogFullError(LogError):
    """Raised if the disk, or the log's limit, is full: the transaction was not written."""


class LogSyncError(LogError):
    """Raised if a write or sync failed: it is unknown what is on disk until the log is opened again."""


class DamagedLogError(LogError):
    """Raised if a record or its trailer differs from what was written."""

    def __init__(self, message: str, sequence_id: int) -> None:
        super().__init__(message)
        self.sequence_id = sequence_id


class DamagedCheckpointError(LogError):
    """Raised if a checkpoint's blob or header differs from what was written."""

    def __init__(self, message: str, checkpoint_id: int) -> None:
        super().__init__(message)
        self.checkpoint_id = checkpoint_id


class AppProtocolError(RemoteProtocolError):
    """Raised if the app broke the local protocol."""


class DivergenceError(ImmortalError):
    """Raised if a replay differs from the logged execution."""


class FollowerError(ImmortalError):
    """Raised if the log continues in a way that this follower can't follow, such as another version of the app."""


class InvariantError(ImmortalError):
    """Raised for a bug of the core, which stops before anything wrong becomes durable or visible."""


def require(condition: bool, message: str) -> None:
    """Check an invariant, also under ``python -O``, unlike ``assert``. Raises InvariantError."""
    if not condition:
        fail(message)


def fail(message: str) -> NoReturn:
    """Raise InvariantError. Use it in place of :func:`require` if it costs too much to build the message each time."""
    raise InvariantError(f"internal error, please report it: {message}")
