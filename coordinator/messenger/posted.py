"""What any thread has given to a messenger, messages and replies, until its owner takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

from immortal.coordinator.messenger.errors import MessengerClosedError
from immortal.coordinator.messenger.listener import ClientReply, Reply
from immortal.coordinator.messenger.outbox import ReplyCallback
from immortal.coordinator.messenger.room import Room
from immortal.coordinator.messenger.sockets import check_destination, message_parts
from immortal.coordinator.messenger.threaded import OwnerThread
from immortal.coordinator.messenger.turns import Turn
from immortal.coordinator.messenger.wake import Wake


class Posted:
    """The deques are appended to by any thread, and emptied by the owner, whom ``wake`` tells of it.

    ``known``: destinations that need no check; ``room``: what bounds all that is pending, None: nothing.
    """

    def __init__(self, known: Container[str], room: Room | None, thread: OwnerThread, wake: Wake) -> None:
        self.closed = False
        self.why_closed = ""
        self.messages: deque[tuple[str, tuple[bytes, ...], ReplyCallback | None, Turn | None]] = deque()
        self.replies: deque[Reply | ClientReply] = deque()
        self._known = known
        self._room = room
        self._thread = thread
        self._wake = wake

    @property
    def waits(self) -> bool:
        """There is something to take."""
        return bool(self.messages or self.replies)

    def send(
        self,
        destination: str,
        message: bytes | Sequence[bytes],
        callback: ReplyCallback | None,
        turn: Turn | None = None,
    ) -> None:
        """Raises EndpointError, MessageTooLargeError, PendingFullError, MessengerClosedError."""
        if destination not in self._known:
            check_destination(destination)
        parts = message_parts(message)
        if self.closed or self._thread.failed:
            why = self.why_closed or "the messenger is closed, or its thread has failed: nothing is sent"
            raise MessengerClosedError(why)
        if self._room is not None:
            self._room.take(destination, sum(map(len, parts)))
        self.messages.append((destination, parts, callback, turn))
        self._wake.signal()

    def reply(self, reply: Reply | ClientReply) -> None:
        if not self.closed:
            self.replies.append(reply)
            self._wake.signal()

    def close(self, why: str) -> None:
        """Nothing is sent any more."""
        self.closed, self.why_closed = True, why

    def clear(self) -> None:
        self.messages.clear()
        self.replies.clear()
