"""What the old code draws of numbers, on its way to the new code, which is to draw the same for what it does alike.

The new code gets a record once it is known what the old code has drawn in it: so the old code goes ahead.
"""

from __future__ import annotations

import threading
from collections import deque

from immortal.protocol.numbers import pack_numbers

AHEAD_SIZE_BYTES_MAX = 16 << 20  # of numbers that the new code has not got yet: beyond it the old code ...
PAUSE_S = 0.05  # ... pauses so long at each message
MESSAGE_SIZE_BYTES = 100  # about what a message takes in memory beside its bytes


class NumbersAhead:
    """For two threads: the old code's tells, the new code's asks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()  # (record, data of a Numbers message)
        self._size_bytes = 0
        self._known_sequence_id = -1  # what was drawn up to this record
        self._is_all_known = False
        self._is_told = False
        self._is_begun = False

    def drawn(self, sequence_id: int, data: bytes, *, complete: bool) -> None:
        """The old code says so. ``complete``: there are no more of this record, nor of any before it."""
        with self._changed:
            self._is_told = True
            if complete:
                self._known_sequence_id = sequence_id
                return
            self._waiting.append((sequence_id, data))
            self._size_bytes += len(data) + MESSAGE_SIZE_BYTES
            self._changed.wait_for(lambda: self._size_bytes <= AHEAD_SIZE_BYTES_MAX, PAUSE_S)

    def end(self) -> None:
        """Nothing more comes, or nothing at all: the old code tells no numbers."""
        with self._changed:
            self._is_all_known = True

    def before(self, sequence_id: int) -> list[bytes] | None:
        """The data of the Numbers messages that the new code is to get before this record; None: not known yet.

        It gets one in any case before its first record: then it knows that it is to draw the same.
        """
        with self._changed:
            if not self._is_all_known and self._known_sequence_id < sequence_id:
                return None
            found = []
            while self._waiting and self._waiting[0][0] <= sequence_id:
                data = self._waiting.popleft()[1]
                self._size_bytes -= len(data) + MESSAGE_SIZE_BYTES
                found.append(data)
            if self._is_told and not self._is_begun:
                self._is_begun = True
                found = found or [pack_numbers(sequence_id)]
            self._changed.notify_all()
            return found
